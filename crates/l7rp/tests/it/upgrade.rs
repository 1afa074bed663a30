//! How a tunnel begins: only with what was offered and accepted, and with nothing that came
//! before.

use l7rp_testkit::{Call, Client, Gate, Origin, Proxy, SOON, Signal, Then, eventually, reply};

use crate::setup::{assert_counts, assert_failed, get, in_flight, over};

/// An offer to upgrade.
pub const OFFER: &str =
    "GET /t HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n";
/// What accepts it.
pub const ACCEPT: &str =
    "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: test\r\n\r\n";

/// Accepts offers and sends back what comes; answers other requests with their head.
pub fn echo(call: &mut Call<'_>) -> Then {
    let Some(protocol) = call.request.get("upgrade").map(str::to_owned) else {
        return reply::echo(call);
    };
    let accept = ACCEPT.replace("Upgrade: test", &format!("Upgrade: {protocol}"));
    call.send(accept);
    while let Ok(part) = call.wire.read_some(usize::MAX) {
        if part.is_empty() || !call.send(part) {
            break;
        }
    }
    Then::Close
}

/// Opens a tunnel.
#[track_caller]
pub fn open(proxy: &Proxy) -> Client {
    let mut client = proxy.client();
    let head = client.send(OFFER).head();
    assert_eq!(head.status(), 101, "{head:?}");
    client
}

/// Says something and hears it again.
#[track_caller]
pub fn echoes(client: &mut Client, words: &str) {
    client.send(words);
    let got = client.wire.read_exact(words.len()).expect("the echo");
    assert_eq!(String::from_utf8_lossy(&got), words);
}

#[test]
fn both_sides_learn_of_the_new_protocol() {
    let origin = Origin::start(echo);
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    let head = client.send(OFFER).head();
    assert_eq!(head.start, "HTTP/1.1 101 Switching Protocols");
    assert_eq!((head.get("connection"), head.get("upgrade")), (Some("Upgrade"), Some("test")));
    assert_eq!((head.get("content-length"), head.get("transfer-encoding")), (None, None));
    assert!(head.get("x-request-id").is_some());
    let request = origin.last();
    assert_eq!(request.get("connection"), Some("Upgrade"));
    assert_eq!(request.get("upgrade"), Some("test"));
    assert_eq!(request.get("x-forwarded-for"), Some("127.0.0.1"));
    echoes(&mut client, "hello");
}

#[test]
fn what_comes_with_the_101_is_the_begin_of_the_tunnel() {
    let origin = Origin::start(|call| {
        call.send(format!("{ACCEPT}first"));
        let heard = call.wire.read_exact(5).unwrap_or_default();
        call.send(heard);
        reply::hang(call)
    });
    let proxy = over(&[&origin]).start();
    let mut client = open(&proxy);
    assert_eq!(client.wire.read_exact(5).expect("the first frame"), b"first");
    echoes(&mut client, "later");
    drop(client);
    assert_eq!(proxy.logged_path("/t")["bytes_out"], 10);
}

/// An origin that accepts when `gate` opens, and what came to it in the tunnel.
fn accepting_after(gate: &Gate) -> (Origin, std::sync::mpsc::Receiver<Vec<u8>>) {
    let (told, heard) = std::sync::mpsc::channel();
    let gate = gate.clone();
    let origin = Origin::start(move |call| {
        gate.pass();
        call.send(ACCEPT);
        let _ = told.send(call.wire.read_to_end().unwrap_or_default());
        Then::Close
    });
    (origin, heard)
}

/// The upgrade is refused, and the upstream got nothing of what came early.
#[track_caller]
fn is_too_early(proxy: &Proxy, origin: &Origin, answer: &l7rp_testkit::Message, got: &[u8]) {
    assert_failed(proxy, answer, 400, "http_request_error", "early_upgrade_data");
    assert_eq!(answer.get("connection"), Some("close"));
    assert_eq!(String::from_utf8_lossy(got), "");
    eventually(SOON, || origin.open() == 0 && in_flight(proxy) == 0.0);
    assert_counts(proxy, "proxy_upstream_connections", &[], 0.0);
    assert_counts(proxy, "proxy_upstream_requests_total", &[("status", "err")], 0.0);
    assert_eq!(proxy.metrics().sum("proxy_tunnels", &[]), 0.0);
}

#[test]
fn nothing_that_comes_with_the_offer_is_tunnelled() {
    let gate = Gate::default();
    gate.open();
    let (origin, heard) = accepting_after(&gate);
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    let answer = client.ask(format!("{OFFER}{}", get("a.test", "/smuggled", "")));
    is_too_early(&proxy, &origin, &answer, &heard.recv_timeout(SOON).expect("the end"));
    assert!(client.is_closed_within(SOON));
}

#[test]
fn nothing_that_comes_before_the_101_is_tunnelled() {
    let gate = Gate::default();
    let (origin, heard) = accepting_after(&gate);
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(OFFER);
    eventually(SOON, || origin.requests() == 1);
    client.send("early");
    // Time enough to arrive.
    l7rp_testkit::let_pass(std::time::Duration::from_millis(100));
    gate.open();
    let answer = client.response();
    is_too_early(&proxy, &origin, &answer, &heard.recv_timeout(SOON).expect("the end"));
    assert!(client.is_closed_within(SOON));
}

/// Whether all threads of the process are stopped.
pub fn is_stopped(proxy: &Proxy) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", proxy.pid())).expect("it is there");
    tasks.flatten().all(|task| {
        let status = std::fs::read_to_string(task.path().join("status")).unwrap_or_default();
        status.lines().any(|line| line.starts_with("State:\tT"))
    })
}

#[test]
fn what_comes_at_the_same_moment_as_the_101_is_not_tunnelled() {
    let gate = Gate::default();
    let (origin, heard) = accepting_after(&gate);
    let proxy = over(&[&origin]).one_worker().start();
    let mut client = proxy.client();
    client.send(OFFER);
    eventually(SOON, || origin.requests() == 1);
    // The proxy finds both when it runs again; the client cannot have seen the 101.
    proxy.signal(Signal::STOP);
    eventually(SOON, || is_stopped(&proxy));
    client.send(get("a.test", "/smuggled", ""));
    gate.open();
    l7rp_testkit::let_pass(std::time::Duration::from_millis(100));
    proxy.signal(Signal::CONT);
    let answer = client.head();
    client.wire.half_close().expect("it can");
    let got = heard.recv_timeout(SOON).expect("the end");
    assert_eq!((answer.status(), String::from_utf8_lossy(&got).as_ref()), (400, ""));
}

#[test]
fn a_protocol_that_was_not_offered_is_a_bad_answer() {
    for fields in [
        "Connection: Upgrade\r\nUpgrade: other\r\n",
        "Connection: Upgrade\r\nUpgrade: tes\r\n",
        "Connection: Upgrade\r\nUpgrade:\r\n",
        "Connection: Upgrade\r\nUpgrade: test\r\nUpgrade: test\r\n",
        "Connection: Upgrade\r\nUpgrade: test, other\r\n",
        "Connection: Upgrade\r\n",
        "",
    ] {
        let answer = format!("HTTP/1.1 101 Switching Protocols\r\n{fields}\r\nHTTP/1.1 200 OK\r\n");
        let origin = Origin::start(reply::raw_kept(answer));
        let proxy = over(&[&origin]).start();
        let mut client = proxy.client();
        let answer = client.ask(OFFER);
        assert_failed(&proxy, &answer, 502, "http_protocol_error", "bad_interim_response");
        eventually(SOON, || origin.open() == 0);
        assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "err")], 1.0);
        assert_eq!(proxy.metrics().sum("proxy_tunnels", &[]), 0.0);
    }
}

#[test]
fn a_switch_without_an_offer_is_a_bad_answer() {
    let origin = Origin::start(reply::raw(ACCEPT));
    let proxy = over(&[&origin]).start();
    for (path, lines) in [
        ("/plain", ""),
        ("/unnamed", "Upgrade: test\r\n"),
        ("/nothing", "Connection: Upgrade\r\n"),
        ("/h2c", "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n"),
    ] {
        let answer = proxy.client().ask(get("a.test", path, lines));
        assert_failed(&proxy, &answer, 502, "http_protocol_error", "bad_interim_response");
        let request = origin.last();
        assert_eq!((request.get("upgrade"), request.get("connection")), (None, None), "{path}");
        assert_eq!(request.get("http2-settings"), None, "{path}");
    }
}

#[test]
fn one_of_several_protocols_is_chosen() {
    let origin = Origin::start(reply::raw_kept(ACCEPT.replace("test", "Second/2")));
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", "Connection: upgrade\r\nUpgrade: first/1, second/2\r\n"));
    let head = client.head();
    assert_eq!((head.status(), head.get("upgrade")), (101, Some("Second/2")));
    assert_eq!(origin.last().get("upgrade"), Some("first/1, second/2"));
}

#[test]
fn ws_connection_list() {
    let origin = Origin::start(echo);
    let proxy = over(&[&origin]).start();
    for (n, lines) in [
        "Connection: Upgrade\r\nUpgrade: websocket\r\n",
        "Connection: upgrade\r\nUpgrade: WebSocket\r\n",
        "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n",
        "Upgrade: websocket\r\nConnection: Upgrade, close\r\n",
        "Connection: keep-alive\r\nX-Hop: 1\r\nConnection: X-Hop, UPGRADE\r\nUpgrade: websocket\r\n",
    ]
    .into_iter()
    .enumerate()
    {
        let mut client = proxy.client();
        let head = client.send(get("a.test", &format!("/{n}"), lines)).head();
        assert_eq!(head.status(), 101, "{lines}");
        let request = origin.last();
        let connection = request.get("connection").expect("a field");
        assert!(connection.eq_ignore_ascii_case("upgrade"), "{lines}: {connection}");
        assert!(request.get("upgrade").is_some_and(|u| u.eq_ignore_ascii_case("websocket")));
        assert_eq!(request.get("x-hop"), None);
        echoes(&mut client, "frame");
    }
    let old =
        "GET /old HTTP/1.0\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n";
    assert_eq!(proxy.client().send(old).head().status(), 200);
    assert_eq!(origin.last().get("upgrade"), None);
    let h2c = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMA\r\n";
    let mut client = proxy.client();
    assert_eq!(client.ask(get("a.test", "/h2c", h2c)).status(), 200);
    // It goes on as what it was.
    assert_eq!(client.get("/").status(), 200);
}

#[test]
fn an_offer_with_a_body_is_not_passed_on() {
    let origin = Origin::start(echo);
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    for framing in [
        "Content-Length: 4\r\n\r\nbody",
        "Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n",
    ] {
        let answer = client.ask(format!(
            "POST /b HTTP/1.1\r\nHost: a.test\r\nConnection: Upgrade\r\nUpgrade: test\r\n{framing}"
        ));
        assert_eq!(answer.status(), 200);
        assert!(answer.text().ends_with("body"));
        assert_eq!(origin.last().get("upgrade"), None);
    }
}

#[test]
fn a_connection_goes_on_after_a_refused_upgrade() {
    let origin = Origin::start(|call| match call.request.target() {
        "/200" => reply::raw_kept(reply::ok("plain"))(call),
        "/403" => reply::raw_kept("HTTP/1.1 403 Forbidden\r\nContent-Length: 5\r\n\r\nplain")(call),
        "/426" => reply::raw_kept(
            "HTTP/1.1 426 Upgrade Required\r\nUpgrade: other\r\nConnection: Upgrade\r\n\
             Content-Length: 5\r\n\r\nplain",
        )(call),
        _ => reply::echo(call),
    });
    let proxy = over(&[&origin]).one_worker().start();
    let mut client = proxy.client();
    for status in [200, 403, 426] {
        let offer = OFFER.replace("/t", &format!("/{status}"));
        let answer = client.ask(&offer);
        assert_eq!((answer.status(), answer.text().as_str()), (status, "plain"));
        assert_eq!(origin.last().get("upgrade"), Some("test"));
        assert_eq!(client.get("/next").status(), 200);
        // What was sent behind the offer is the next request, for there is no tunnel.
        client.send(format!("{offer}{}", get("a.test", "/behind", "")));
        assert_eq!(client.response().text(), "plain");
        assert!(client.response().text().starts_with("GET /behind "));
    }
    assert_eq!(origin.accepted(), 1);
    assert_eq!(proxy.metrics().sum("proxy_tunnels", &[]), 0.0);
}

#[test]
fn interim_answers_may_come_before_the_101() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n");
        echo(call)
    });
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    assert_eq!(client.send(OFFER).head().status(), 103);
    assert_eq!(client.head().status(), 101);
    echoes(&mut client, "hello");
}
