//! A body that is sent again arrives exactly as it was, once and whole; one that is too long to
//! be kept passes whole, too, and is not sent again.

use std::thread;
use std::time::Duration;

use l7rp_testkit::{Call, Client, Message, Origin, Proxy, SOON, Then, eventually, let_pass, reply};

use crate::setup::{Setup, over, post};
use crate::tries::{
    PLENTY, assert_at_rest, attempts, in_turn, requests, retrying, say, with_retry,
};

const LIMIT: usize = 65_536;
const ALL: &str = "retry_methods: [GET, PUT, POST]";

/// Octets that do not repeat within any buffer.
fn pattern(length: usize) -> Vec<u8> {
    let words = (0u32..).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes());
    words.take(length).collect()
}

/// How a body is framed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Framing {
    Length,
    /// In chunks of this size.
    Chunks(usize),
    /// The same, with trailers.
    Trailers(usize),
}

/// A PUT with this body.
fn put(path: &str, body: &[u8], framing: Framing) -> Vec<u8> {
    let head = format!("PUT {path} HTTP/1.1\r\nHost: a.test\r\n");
    let (size, trailer) = match framing {
        Framing::Length => {
            let head = format!("{head}Content-Length: {}\r\n\r\n", body.len());
            return [head.as_bytes(), body].concat();
        }
        Framing::Chunks(size) => (size, ""),
        Framing::Trailers(size) => (size, "X-Sum: 7\r\nX-End: yes\r\n"),
    };
    let mut out = format!("{head}Transfer-Encoding: chunked\r\n\r\n").into_bytes();
    for chunk in body.chunks(size) {
        out.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
        out.extend_from_slice(chunk);
        out.extend_from_slice(b"\r\n");
    }
    out.extend_from_slice(format!("0\r\n{trailer}\r\n").as_bytes());
    out
}

/// Every kind of body that may be sent again.
fn kinds() -> Vec<(&'static str, Vec<u8>, Framing)> {
    vec![
        ("nothing", vec![], Framing::Length),
        ("no chunk", vec![], Framing::Chunks(9)),
        ("only trailers", vec![], Framing::Trailers(9)),
        ("two octets", pattern(2), Framing::Length),
        ("small chunks", pattern(2000), Framing::Chunks(3)),
        ("60 KiB", pattern(60 << 10), Framing::Length),
        ("60 KiB in chunks", pattern(60 << 10), Framing::Chunks(4096)),
        ("60 KiB in chunks, and trailers", pattern(60 << 10), Framing::Trailers(10_000)),
        ("the limit", pattern(LIMIT), Framing::Length),
        ("the limit in a chunk", pattern(LIMIT), Framing::Chunks(LIMIT)),
    ]
}

/// Checks what an upstream has got.
#[track_caller]
fn assert_whole(got: &Message, body: &[u8], framing: Framing, name: &str) {
    assert!(got.complete, "{name}: not complete");
    let same = got.body == body;
    assert!(same, "{name}: {} octets of {}, or others", got.body.len(), body.len());
    assert_eq!(got.is_chunked(), framing != Framing::Length, "{name}");
    let length = (framing == Framing::Length).then(|| body.len().to_string());
    assert_eq!(got.get("content-length"), length.as_deref(), "{name}");
    let fields = [("X-Sum".to_owned(), "7".to_owned()), ("X-End".to_owned(), "yes".to_owned())];
    let trailers = if matches!(framing, Framing::Trailers(_)) { &fields[..] } else { &[] };
    assert_eq!(got.trailers, trailers, "{name}");
}

/// The requests for this target at any of these upstreams, in no order.
fn seen(origins: &[Origin], path: &str) -> Vec<Message> {
    let all = origins.iter().flat_map(Origin::seen);
    all.map(|seen| seen.message).filter(|message| message.target() == path).collect()
}

/// Every kind of body, all at once, sent to a first upstream that does `first` and then to one
/// that is good.
#[track_caller]
fn arrive_whole(first: impl Fn(&mut Call<'_>) -> Then + Clone + Send + Sync + 'static) {
    let origins: [Origin; 2] = in_turn(move |call, nth| match nth {
        0 => first(call),
        _ => say(call, 200, "", "good"),
    });
    let proxy = retrying(&origins.each_ref(), ALL).pool("response_header_timeout: 1s").start();
    thread::scope(|scope| {
        let (proxy, origins) = (&proxy, &origins);
        for (n, (name, body, framing)) in kinds().into_iter().enumerate() {
            scope.spawn(move || {
                arrives_whole(proxy, origins, &format!("/{n}"), name, &body, framing);
            });
        }
    });
    assert_at_rest(&proxy);
}

fn arrives_whole(
    proxy: &Proxy,
    origins: &[Origin],
    path: &str,
    name: &str,
    body: &[u8],
    framing: Framing,
) {
    let answer = proxy.client().ask(put(path, body, framing));
    assert_eq!((answer.status(), answer.text().as_str()), (200, "good"), "{name}");
    assert_eq!(attempts(proxy, path), 2, "{name}");
    let seen = seen(origins, path);
    assert_eq!(seen.len(), 2, "{name}");
    // The first may have read less; whoever has read all has read the same.
    let whole: Vec<_> = seen.iter().filter(|message| message.complete).collect();
    assert!(!whole.is_empty(), "{name}");
    for message in whole {
        assert_whole(message, body, framing, name);
    }
    assert_eq!(proxy.logged_path(path)["bytes_in"], body.len(), "{name}");
}

#[test]
fn after_a_first_that_read_it_all() {
    arrive_whole(|call| say(call, 503, "", "busy"));
}

#[test]
fn after_a_first_that_read_it_all_and_closed() {
    arrive_whole(reply::close);
}

#[test]
fn after_a_first_that_read_it_all_and_said_nothing() {
    arrive_whole(|call| {
        let _ = call.body();
        reply::hang(call)
    });
}

/// Reads half of what has a length, and the head of what has none.
fn half(call: &mut Call<'_>) {
    let length = call.request.get("content-length").and_then(|l| l.parse::<usize>().ok());
    let _ = call.wire.read_exact(length.unwrap_or_default() / 2);
}

#[test]
fn after_a_first_that_read_half_and_died() {
    arrive_whole(|call| {
        half(call);
        Then::Reset
    });
}

#[test]
fn after_a_first_that_read_half_and_closed() {
    arrive_whole(|call| {
        half(call);
        Then::Close
    });
}

#[test]
fn after_a_first_that_answered_before_it_read() {
    arrive_whole(|call| {
        call.send("HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 4\r\n\r\nbusy");
        // Whatever is on its way is taken, so that no reset overtakes the answer.
        reply::hang(call)
    });
}

/// Sends in pieces, some time apart.
fn send_slowly(client: &mut Client, data: &[u8]) {
    for part in data.chunks(data.len().div_ceil(7)) {
        client.send(part);
        let_pass(Duration::from_millis(25));
    }
}

#[test]
fn from_a_client_that_sends_slowly() {
    let origins: [Origin; 2] = in_turn(move |call, nth| {
        let status = if nth == 0 { 503 } else { 200 };
        say(call, status, "", "said")
    });
    let proxy = retrying(&origins.each_ref(), ALL).start();
    for (n, framing) in
        [Framing::Length, Framing::Chunks(700), Framing::Trailers(5000)].into_iter().enumerate()
    {
        let (path, body) = (format!("/{n}"), pattern(40_000));
        let mut client = proxy.client();
        send_slowly(&mut client, &put(&path, &body, framing));
        assert_eq!(client.response().status(), 200, "{framing:?}");
        let seen = seen(&origins, &path);
        assert_eq!(seen.len(), 2);
        for message in &seen {
            assert_whole(message, &body, framing, "slowly");
        }
        // And its connection goes on.
        assert_eq!(client.get(&format!("/next/{n}")).status(), 200);
    }
    assert_at_rest(&proxy);
}

#[test]
fn from_a_client_that_still_sends_when_the_first_dies() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        0 => {
            let _ = call.wire.read_exact(10);
            Then::Reset
        }
        _ => say(call, 200, "", "good"),
    });
    let proxy = retrying(&origins.each_ref(), ALL).start();
    for (n, framing) in
        [Framing::Length, Framing::Chunks(700), Framing::Trailers(700)].into_iter().enumerate()
    {
        let (path, body) = (format!("/{n}"), pattern(40_000));
        let request = put(&path, &body, framing);
        let mut client = proxy.client();
        let (begin, end) = request.split_at(request.len() / 2);
        client.send(begin);
        eventually(SOON, || seen(&origins, &path).len() == 2);
        client.send(end);
        assert_eq!(client.response().text(), "good", "{framing:?}");
        let whole = seen(&origins, &path).into_iter().filter(|message| message.complete);
        let whole: Vec<_> = whole.collect();
        assert_eq!(whole.len(), 1, "{framing:?}");
        assert_whole(&whole[0], &body, framing, "late");
        // And its connection goes on.
        assert_eq!(client.ask(put(&path, b"", Framing::Length)).status(), 200);
    }
    assert_at_rest(&proxy);
}

#[test]
fn what_is_still_to_come_of_a_body_is_never_a_request() {
    // The first refuses before it has all, and the second does not answer: the first one's
    // answer is passed on while the client still sends.
    let origins: [Origin; 2] = in_turn(|call, nth| match (call.request.target(), nth % 2) {
        ("/put", 0) => {
            call.send("HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy");
            reply::hang(call)
        }
        ("/put", _) => {
            let _ = call.wire.read_exact(10);
            Then::Reset
        }
        _ => say(call, 200, "", "smuggled"),
    });
    let proxy = retrying(&origins.each_ref(), &format!("max_attempts: 2, {ALL}")).start();
    let rest = "GET /smuggled HTTP/1.1\r\nHost: a.test\r\n\r\n";
    for (framing, begin) in [
        ("Content-Length: 100", "x".repeat(20)),
        ("Transfer-Encoding: chunked", format!("80\r\n{}", "x".repeat(20))),
    ] {
        let mut client = proxy.client();
        client.send(format!("PUT /put HTTP/1.1\r\nHost: a.test\r\n{framing}\r\n\r\n{begin}"));
        let answer = client.response();
        assert_eq!((answer.status(), answer.text().as_str()), (503, "busy"), "{framing}");
        let _ = client.wire.write(rest.as_bytes());
        assert!(!client.try_response().is_ok_and(|answer| answer.text() == "smuggled"));
    }
    assert_eq!(seen(&origins, "/put").len(), 4);
    assert!(seen(&origins, "/smuggled").is_empty());
    assert_at_rest(&proxy);
}

#[test]
fn continue_is_asked_for_once() {
    let origins: [Origin; 2] = in_turn(|call, nth| {
        call.send("HTTP/1.1 100 Continue\r\n\r\n");
        let status = if nth == 0 { 503 } else { 200 };
        say(call, status, "", "said")
    });
    let proxy = retrying(&origins.each_ref(), ALL).start();
    let mut client = proxy.client();
    client.send(
        "PUT /e HTTP/1.1\r\nHost: a.test\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n",
    );
    assert_eq!(client.head().status(), 100);
    let answer = client.send("body").response();
    assert_eq!(answer.status(), 200);
    let seen = seen(&origins, "/e");
    assert_eq!(seen.len(), 2);
    assert!(seen.iter().all(|message| message.complete && message.body == b"body"));
    assert_at_rest(&proxy);
}

#[test]
fn a_client_that_was_not_told_to_send_may_be_told_by_another() {
    let origins: [Origin; 2] = in_turn(|call, nth| {
        if nth == 0 {
            call.send("HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 0\r\n\r\n");
            return reply::hang(call);
        }
        call.send("HTTP/1.1 100 Continue\r\n\r\n");
        say(call, 200, "", "good")
    });
    let proxy = retrying(&origins.each_ref(), ALL).start();
    let mut client = proxy.client();
    client.send(
        "PUT /e HTTP/1.1\r\nHost: a.test\r\nExpect: 100-continue\r\nContent-Length: 4\r\n\r\n",
    );
    assert_eq!(client.head().status(), 100);
    assert_eq!(client.send("body").response().text(), "good");
    assert!(seen(&origins, "/e").iter().any(|message| message.body == b"body"));
    assert_at_rest(&proxy);
}

#[test]
fn a_client_that_leaves_in_the_middle_during_a_back_off_ends_it() {
    let origins: [Origin; 2] = in_turn(|call, _| {
        call.send("HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy");
        reply::hang(call)
    });
    let keys = format!("backoff: 600ms, {ALL}");
    let proxy = with_retry(&origins.each_ref(), &keys).pool(PLENTY).start();
    let mut client = proxy.client();
    client.send("PUT /half HTTP/1.1\r\nHost: a.test\r\nContent-Length: 9\r\n\r\nhalf");
    eventually(SOON, || requests(&origins) == 1);
    // The answer is in by then.
    let_pass(Duration::from_millis(100));
    client.reset();
    let line = proxy.logged_path("/half");
    assert_eq!((&line["status"], &line["attempts"]), (&499.into(), &1.into()), "{line}");
    assert_eq!(requests(&origins), 1);
    assert_at_rest(&proxy);
}

/// A body that is not kept: the first upstream gets it whole, and nobody else gets it.
#[track_caller]
fn is_sent_once(proxy: &Proxy, origins: &[Origin], path: &str, body: &[u8], framing: Framing) {
    let before = requests(origins);
    let answer = proxy.client().ask(put(path, body, framing));
    assert_eq!((answer.status(), answer.text().as_str()), (503, "busy"), "{framing:?}");
    assert_eq!(answer.get("proxy-status"), None, "it is the upstream's");
    assert_eq!((requests(origins) - before, attempts(proxy, path)), (1, 1), "{framing:?}");
    assert_whole(&seen(origins, path)[0], body, framing, "once");
}

#[test]
fn one_over_the_limit_is_not_sent_again() {
    let origins: [Origin; 2] = in_turn(|call, _| say(call, 503, "", "busy"));
    let proxy = retrying(&origins.each_ref(), ALL).start();
    for (n, framing) in [
        Framing::Length,
        Framing::Chunks(LIMIT + 1),
        Framing::Chunks(1000),
        Framing::Trailers(1000),
    ]
    .into_iter()
    .enumerate()
    {
        is_sent_once(&proxy, &origins, &format!("/{n}"), &pattern(LIMIT + 1), framing);
        is_sent_once(&proxy, &origins, &format!("/long/{n}"), &pattern(400_000), framing);
    }
    assert_at_rest(&proxy);
}

#[test]
fn the_limit_is_the_routes_own() {
    for (limit, kept) in [(10, true), (9, false), (0, false)] {
        let origins: [Origin; 2] = in_turn(|call, nth| match nth {
            0 => say(call, 503, "", "busy"),
            _ => say(call, 200, "", "good"),
        });
        let keys = format!("max_replayable_body: {limit}, {ALL}");
        let proxy = retrying(&origins.each_ref(), &keys).start();
        let body = pattern(10);
        if kept {
            let answer = proxy.client().ask(put("/p", &body, Framing::Length));
            assert_eq!(answer.text(), "good", "{limit}");
        } else {
            is_sent_once(&proxy, &origins, "/p", &body, Framing::Length);
        }
        // Who has no body is not concerned.
        assert_eq!(proxy.get("/g").text(), "good", "{limit}");
        assert_at_rest(&proxy);
    }
}

#[test]
fn long_bodies_pass_whole_on_a_route_that_tries_again() {
    let origin = Origin::start(|call| say(call, 200, "", "good"));
    let proxy = retrying(&[&origin], ALL).start();
    let origins = [origin];
    for (n, size) in [LIMIT - 1, LIMIT, LIMIT + 1, 65 << 10, 1 << 20].into_iter().enumerate() {
        for (m, framing) in
            [Framing::Length, Framing::Chunks(3000), Framing::Trailers(70_000)].iter().enumerate()
        {
            let (path, body) = (format!("/{n}/{m}"), pattern(size));
            assert_eq!(proxy.client().ask(put(&path, &body, *framing)).text(), "good");
            let seen = seen(&origins, &path);
            assert_eq!(seen.len(), 1, "{size}");
            assert_whole(&seen[0], &body, *framing, "long");
        }
    }
    assert_at_rest(&proxy);
}

/// G4: an upstream that refuses, and bodies of every kind.
#[track_caller]
fn refused_at_first(route: impl Fn(&Origin, &Origin) -> Setup) {
    let (bad, good) = (Origin::refusing(), Origin::start(|call| say(call, 200, "", "good")));
    let proxy = route(&bad, &good).pool("selector: { algorithm: round-robin }").start();
    let mut moved = 0;
    let long = ("1 MiB", pattern(1 << 20), Framing::Length);
    for (n, (name, body, framing)) in kinds().into_iter().chain([long]).enumerate() {
        for m in 0..2 {
            let path = format!("/{n}/{m}");
            let request = put(&path, &body, framing);
            let request = [b"POST", &request[3..]].concat();
            assert_eq!(proxy.client().ask(request).text(), "good", "{name}");
            assert_whole(&good.last(), &body, framing, name);
            moved += attempts(&proxy, &path) - 1;
        }
    }
    assert!(moved >= 5, "{moved} met the bad one first");
    assert_at_rest(&proxy);
}

#[test]
fn after_a_first_that_refused() {
    refused_at_first(|bad, good| over(&[bad, good]).pool(crate::tries::NEVER_OPENS));
}

#[test]
fn after_a_first_that_refused_on_a_route_that_tries_again() {
    refused_at_first(|bad, good| {
        over(&[bad, good])
            .pool(crate::tries::NEVER_OPENS)
            .route("middleware: [{ retry: { backoff: 1ms } }]")
    });
}

#[test]
fn a_get_with_a_body_is_sent_again_with_it() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        0 => say(call, 503, "", "busy"),
        _ => say(call, 200, "", "good"),
    });
    let proxy = retrying(&origins.each_ref(), "").start();
    let request = post("/g", "a query").replace("POST", "GET");
    assert_eq!(proxy.client().ask(request).text(), "good");
    let seen = seen(&origins, "/g");
    assert!(seen.len() == 2 && seen.iter().all(|message| message.body == b"a query"));
    assert_at_rest(&proxy);
}

#[test]
fn bodies_do_not_mix() {
    // Each upstream fails in one of several ways now and then.
    let origins: [Origin; 3] = in_turn(|call, nth| match (nth, call.request.target().len() % 3) {
        (0, 0) => say(call, 503, "", "busy"),
        (0, 1) => {
            half(call);
            Then::Reset
        }
        (0 | 1, 2) => reply::close(call),
        _ => reply::echo(call),
    });
    let proxy = retrying(&origins.each_ref(), ALL).start();
    thread::scope(|scope| {
        for who in 0..8 {
            let proxy = &proxy;
            scope.spawn(move || {
                let mut client = proxy.client();
                for n in 0..25 {
                    let path = format!("/{who}/{}", "n".repeat(n));
                    let body = format!("{who}-{n};").repeat(1 + (n * 397 + who * 31) % 9000);
                    let request = put(&path, body.as_bytes(), Framing::Length);
                    let answer = client.ask(request);
                    let text = answer.text();
                    assert_eq!(answer.status(), 200, "{who}/{n}: {text}");
                    assert!(text.starts_with(&format!("PUT {path} HTTP/1.1\r\n")));
                    assert!(text.ends_with(&format!("\r\n\r\n{body}")), "{who}/{n}");
                }
            });
        }
    });
    assert_at_rest(&proxy);
}
