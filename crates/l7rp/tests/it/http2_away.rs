//! GOAWAY and refusals under load, on both sides of the proxy: nothing is lost, and nothing is done
//! twice. The steps one by one are in `http2_drain.rs` and `http2_goaway.rs`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use h2::Reason;
use http::Response;
use l7rp_testkit::{Gate, Origin, Proxy, SOON, Signal, eventually, own_address, reply};

use crate::http2_tools::{
    Conn, H2Origin, Incoming, Raw, code, content, flag, frame, get_frame, kind, raw_origin,
    request, taken, to, upload, wait, whole,
};
use crate::setup::{assert_counts, get, in_flight, over, post, quiet, start};
use crate::tries::PLENTY;
use crate::verdict::{TOUCHY, nobody_is_blamed};

/// Row D16: the process ends with fifty streams open. `end`: what ends the connection.
#[track_caller]
fn d16_fifty_streams(end: impl FnOnce(&Proxy, &Origin)) {
    const STREAMS: u32 = 50;
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let own = own_address();
    let proxy = start(&over(&[&origin]).yaml().replace("127.0.0.1:0", &own.to_string()));
    let mut raw = Raw::open(&proxy, b"");
    let early: Vec<u8> = (0..STREAMS).flat_map(|n| get_frame(1 + 2 * n)).collect();
    raw.write(early);
    eventually(SOON, || origin.requests() == STREAMS as usize);
    end(&proxy, &origin);
    let first = raw.find(|f| f.kind == kind::GOAWAY).expect("a first");
    assert_eq!((first.number(0), first.code()), (u32::MAX >> 1, code::NO_ERROR));
    let second = raw.find(|f| f.kind == kind::GOAWAY).expect("a second");
    let last = second.number(0);
    assert_eq!((last, second.code()), (2 * STREAMS - 1, code::NO_ERROR));
    // What comes later is not begun.
    let late = last + 2;
    raw.write(get_frame(late));
    gate.open();
    let mut answered = 0;
    while let Some(next) = raw.next() {
        assert!(next.stream != late || next.kind == kind::RST_STREAM, "{next:?}");
        answered += u32::from(next.ends());
    }
    assert_eq!(answered, STREAMS);
    assert_eq!(origin.requests(), STREAMS as usize);
    assert!(proxy.events("request_completed").iter().all(|line| line["reason"].is_null()));
}

#[test]
fn d16_the_end_of_the_process_lets_fifty_streams_end() {
    d16_fifty_streams(|proxy, _| proxy.signal(Signal::TERM));
}

#[test]
fn d16_a_listener_that_is_gone_lets_fifty_streams_end() {
    d16_fifty_streams(|proxy, origin| {
        let elsewhere = own_address();
        proxy.reload(&over(&[origin]).yaml().replace("127.0.0.1:0", &elsewhere.to_string()));
    });
}

/// Row D16: clients that go on by themselves, each request once and again elsewhere if it was
/// refused, notice nothing of twenty reloads.
#[test]
fn d16_clients_under_load_lose_nothing_in_reloads() {
    const RELOADS: usize = 20;
    let origin = Origin::start(reply::name("x"));
    let own = own_address();
    let yaml = over(&[&origin]).yaml().replace("127.0.0.1:0", &own.to_string());
    let proxy = start(&yaml);
    let asked = AtomicUsize::new(0);
    let over = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut conn = Conn::open(&proxy);
                while !over.load(SeqCst) {
                    let all: Vec<_> =
                        (0..20).map(|_| conn.try_begin(request("POST", "/"), true)).collect();
                    for one in all {
                        match one.and_then(|(response, _)| wait(whole(response))) {
                            Ok(got) => assert_eq!(got.text(), "x"),
                            // It is told so that nothing of it was begun.
                            Err(e) if e.is_go_away() && e.reason() == Some(Reason::NO_ERROR) => {
                                conn = Conn::open(&proxy);
                            }
                            Err(e) => panic!("{e:?}"),
                        }
                        asked.fetch_add(1, SeqCst);
                    }
                }
            });
        }
        for n in 0..RELOADS {
            let before = asked.load(SeqCst);
            proxy.reload(&yaml);
            let further = || asked.load(SeqCst) > before + 60;
            assert!(l7rp_testkit::within(SOON, || further().then_some(())).is_some(), "{n}");
        }
        over.store(true, SeqCst);
    });
    assert!(proxy.events("request_completed").iter().all(|line| line["reason"].is_null()));
    quiet(&proxy);
}

/// What an upstream has processed, by the path of each request.
type Processed = Arc<Mutex<HashMap<String, usize>>>;

fn note(processed: &Processed, path: &str) {
    *processed
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .entry(path.to_owned())
        .or_default() += 1;
}

/// Workers that ask for so many paths, each its own, GET and POST in turn; each is answered with
/// 200 and was processed once.
#[track_caller]
fn each_once(proxy: &Proxy, processed: &Processed, requests: usize) {
    const WORKERS: usize = 50;
    let bad = Mutex::new(Vec::new());
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..WORKERS {
            scope.spawn(|| {
                let mut client = proxy.client();
                loop {
                    let n = next.fetch_add(1, SeqCst);
                    if n >= requests {
                        return;
                    }
                    let path = format!("/{n}");
                    let text = if n.is_multiple_of(2) {
                        get("a.test", &path, "")
                    } else {
                        post(&path, &"b".repeat(1024))
                    };
                    let status = client.ask(text).status();
                    if status != 200 {
                        bad.lock().unwrap_or_else(PoisonError::into_inner).push((n, status));
                    }
                }
            });
        }
    });
    let bad = bad.into_inner().unwrap_or_else(PoisonError::into_inner);
    // What is said of the first of them in the log says more than a status.
    let why = bad.iter().take(3).map(|(n, _)| proxy.logged_path(&format!("/{n}")).to_string());
    let why: Vec<String> = why.collect();
    assert!(bad.is_empty(), "{} of {requests}: {why:#?}", bad.len());
    let all = processed.lock().unwrap_or_else(PoisonError::into_inner);
    let twice: Vec<_> = all.iter().filter(|(_, times)| **times != 1).take(10).collect();
    assert!(twice.is_empty() && all.len() == requests, "{twice:?}, {} in all", all.len());
}

/// A 200 without a body.
fn ok(stream: u32) -> Vec<u8> {
    frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, stream, &[0x88])
}

/// Requests as they come, in the order of their ends: the stream and the path of each.
struct Requests {
    raw: Raw,
    decoder: HashMap<u32, String>,
}

impl Requests {
    /// The path is the only field in clear text that begins with a slash: the client's table of
    /// HPACK may be used, so paths are sent as digits in a literal of their own.
    fn next(&mut self) -> Option<(u32, String)> {
        loop {
            let next = self.raw.next()?;
            if next.kind == kind::HEADERS {
                self.decoder.insert(next.stream, path_in(&next.payload));
            }
            if next.kind == kind::DATA && !next.payload.is_empty() {
                let by = (next.payload.len() as u32).to_be_bytes();
                // The connection lasts, the stream may be over.
                let both = [0, next.stream];
                for stream in &both[..if next.ends() { 1 } else { 2 }] {
                    self.raw.write(frame(kind::WINDOW_UPDATE, 0, *stream, &by));
                }
            }
            if next.ends() {
                return self.decoder.remove(&next.stream).map(|path| (next.stream, path));
            }
        }
    }
}

/// The path in a field section of which everything else is in the static table or of no
/// interest: a literal with the name `:path`, whose value may be in Huffman code.
fn path_in(packed: &[u8]) -> String {
    // 0x04: `:path`, not indexed; 0x44: with incremental indexing.
    let at = packed.iter().position(|b| matches!(b, 0x04 | 0x44)).expect("a path");
    let length = usize::from(packed[at + 1] & 0x7f);
    let value = &packed[at + 2..at + 2 + length];
    if packed[at + 1] & 0x80 == 0 {
        return String::from_utf8_lossy(value).into_owned();
    }
    // The octets of the code tell paths apart as well as what they stand for.
    format!("{value:02x?}")
}

/// A proxy for these upstreams that tries so often, and that one failure makes blame them.
fn touchy(urls: &[String], tries: usize) -> Proxy {
    let retry = format!("middleware: [{{ retry: {{ backoff: 1ms, max_attempts: {tries} }} }}]");
    let setup = urls.iter().fold(over(&[]), |setup, url| setup.upstream(url, "weight: 1"));
    let pool = "protocol: http2, selector: { algorithm: round-robin }";
    setup.pool(pool).pool(TOUCHY).pool(PLENTY).route(&retry).start()
}

/// Case `h2-upstream-goaway`, A: each connection ends after a hundred streams, while more are on
/// the wire.
#[test]
fn h2_upstream_goaway_a_with_more_on_the_wire() {
    const EACH: u32 = 100;
    let processed = Processed::default();
    let urls = [(); 2].map(|()| {
        let processed = processed.clone();
        raw_origin(b"", move |raw, _| {
            let mut all = Requests { raw, decoder: HashMap::new() };
            while let Some((stream, path)) = all.next() {
                if stream > 2 * EACH - 1 {
                    // It was told that this one would not be begun.
                    continue;
                }
                note(&processed, &path);
                if stream == 2 * EACH - 1 {
                    let last = [stream.to_be_bytes(), code::NO_ERROR.to_be_bytes()].concat();
                    all.raw.write(frame(kind::GOAWAY, 0, 0, &last));
                }
                all.raw.write(ok(stream));
            }
        })
    });
    let proxy = touchy(&urls, 3);
    each_once(&proxy, &processed, 5000);
    nobody_is_blamed(&proxy);
    quiet(&proxy);
}

/// The ways to say that a stream was not begun.
const NOT_BEGUN: [fn(u32) -> Vec<u8>; 2] = [
    |stream| frame(kind::RST_STREAM, 0, stream, &code::REFUSED_STREAM.to_be_bytes()),
    |stream| {
        let last = stream.saturating_sub(2).to_be_bytes();
        frame(kind::GOAWAY, 0, 0, &[last, code::NO_ERROR.to_be_bytes()].concat())
    },
];

/// Row U12, where the body has not begun because there is no window for it: that it never will is
/// said of the stream, not by the exchange.
#[test]
fn u12_a_post_whose_body_waits_for_a_window_is_sent_again() {
    const NO_WINDOW: &[u8] = &[0, 4, 0, 0, 0, 0];
    for (n, end) in NOT_BEGUN.into_iter().enumerate() {
        // The second request of the first connection finds a window of nothing, and is refused.
        // All others get one.
        let url = raw_origin(NO_WINDOW, move |mut raw, connection| {
            while let Some(head) = raw.find(|f| f.kind == kind::HEADERS) {
                if connection == 0 && head.stream > 1 {
                    raw.write(end(head.stream));
                    continue;
                }
                raw.write(frame(kind::WINDOW_UPDATE, 0, head.stream, &[0, 0, 1, 0]));
                if raw.find(|f| f.kind == kind::DATA && f.ends()).is_some() {
                    raw.write(ok(head.stream));
                }
            }
        });
        let proxy = touchy(&[url], 3);
        let mut client = proxy.client();
        for nth in 1..=2 {
            let answer = client.ask(post("/", "body"));
            assert_eq!(answer.status(), 200, "{n} {nth}: {answer:?}");
        }
        nobody_is_blamed(&proxy);
        quiet(&proxy);
    }
}

/// Row U12, where an upstream begins nothing at all: another does, whatever the method.
#[test]
fn u12_a_post_that_one_upstream_never_begins_goes_to_another() {
    for (n, end) in NOT_BEGUN.into_iter().enumerate() {
        let refused = Arc::new(AtomicUsize::new(0));
        let count = refused.clone();
        let closed = raw_origin(b"", move |mut raw, _| {
            while let Some((stream, _)) = taken(&mut raw) {
                count.fetch_add(1, SeqCst);
                raw.write(end(stream));
            }
        });
        let open = raw_origin(b"", |mut raw, _| {
            while let Some((stream, _)) = taken(&mut raw) {
                raw.write(ok(stream));
            }
        });
        let proxy = touchy(&[closed, open], 3);
        for _ in 0..6 {
            let answer = proxy.client().ask(post("/", "body"));
            assert_eq!(answer.status(), 200, "{n}: {answer:?}");
        }
        assert!(refused.load(SeqCst) > 0, "{n}: nothing was refused");
        nobody_is_blamed(&proxy);
        quiet(&proxy);
    }
}

/// Case `h2-upstream-goaway`, B: ten at once, and whatever is over that is refused. That limit is
/// only said; another that is lower is not even that.
#[test]
fn h2_upstream_goaway_b_with_a_limit_that_is_not_told() {
    const FEW: &[u8] = &[0, 3, 0, 0, 0, 10];
    let processed = Processed::default();
    let most = Arc::new(AtomicUsize::new(0));
    let urls = [(); 2].map(|()| {
        let (processed, most) = (processed.clone(), most.clone());
        raw_origin(FEW, move |raw, _| {
            let mut all = Requests { raw, decoder: HashMap::new() };
            let mut nth = 0;
            while let Some((stream, path)) = all.next() {
                most.fetch_max(all.decoder.len() + 1, SeqCst);
                nth += 1;
                if nth % 10 == 0 {
                    let refused = code::REFUSED_STREAM.to_be_bytes();
                    all.raw.write(frame(kind::RST_STREAM, 0, stream, &refused));
                } else {
                    note(&processed, &path);
                    all.raw.write(ok(stream));
                }
            }
        })
    });
    let proxy = touchy(&urls, 5);
    each_once(&proxy, &processed, 3000);
    assert!(most.load(SeqCst) <= 10, "{} at once", most.load(SeqCst));
    nobody_is_blamed(&proxy);
    quiet(&proxy);
}

/// Case `h2-upstream-goaway`, C, with both versions of HTTP at the front and many at once.
#[test]
fn h2_upstream_goaway_c_from_everybody_at_once_is_bounded() {
    let count = Arc::new(AtomicUsize::new(0));
    let urls = [(); 2].map(|()| {
        let count = count.clone();
        raw_origin(b"", move |mut raw, _| {
            count.fetch_add(1, SeqCst);
            let calm = [0u32.to_be_bytes(), code::ENHANCE_YOUR_CALM.to_be_bytes()].concat();
            raw.write(frame(kind::GOAWAY, 0, 0, &calm));
        })
    });
    let proxy = to(&[&urls[0], &urls[1]]).start();
    let (used, began) = (proxy.processor_time(), Instant::now());
    thread::scope(|scope| {
        for _ in 0..10 {
            scope.spawn(|| {
                let since = Instant::now();
                assert!(matches!(proxy.get("/").status(), 502 | 503));
                assert!(matches!(Conn::open(&proxy).get("/").status, 502 | 503));
                assert!(since.elapsed() < Duration::from_secs(4), "{:?}", since.elapsed());
            });
        }
    });
    assert!(count.load(SeqCst) <= 60, "{} connections for 20 requests", count.load(SeqCst));
    // Nobody goes on with it when the answers are out.
    quiet(&proxy);
    let settled = count.load(SeqCst);
    assert_counts(&proxy, "proxy_upstream_inflight", &[], 0.0);
    assert_eq!(count.load(SeqCst), settled);
    let worked = proxy.processor_time().saturating_sub(used);
    assert!(worked < began.elapsed() / 2 + Duration::from_millis(500), "{worked:?}");
}

/// Case `h2-grpc-trailers-only`, a hundred times each, through HTTP/2 on both sides: A and D, with
/// `te`; B and C.
#[test]
fn h2_grpc_answers_keep_their_ends() {
    let origin = H2Origin::start(|mut incoming: Incoming| async move {
        let is_asked = incoming.request.headers().get("te").is_some_and(|te| te == "trailers");
        assert!(is_asked, "{:?}", incoming.request.headers());
        let path = incoming.request.uri().path().to_owned();
        let _ = content(incoming.request.into_body()).await;
        let mut head = Response::new(());
        head.headers_mut().insert("content-type", "application/grpc".parse().expect("a value"));
        if path == "/trailers-only" {
            head.headers_mut().insert("grpc-status", 5.into());
            head.headers_mut().insert("grpc-message", "none".parse().expect("a value"));
            let _ = incoming.respond.send_response(head, true);
            return;
        }
        let Ok(mut stream) = incoming.respond.send_response(head, false) else { return };
        let _ = upload(&mut stream, "\0\0\0\0\x01a\0\0\0\0\x01b".into(), false).await;
        if path == "/reset" {
            stream.send_reset(Reason::INTERNAL_ERROR);
            return;
        }
        let mut trailers = http::HeaderMap::new();
        trailers.insert("grpc-status", 10.into());
        trailers.insert("x-custom", "kept".parse().expect("a value"));
        let _ = stream.send_trailers(trailers);
    });
    let proxy = to(&[&origin.url()]).start();
    let conn = Conn::open(&proxy);
    for _ in 0..100 {
        let call = |path: &str| {
            let mut asked = request("POST", path);
            asked.headers_mut().insert("te", "trailers".parse().expect("a value"));
            asked.headers_mut().insert("content-type", "application/grpc".parse().expect("a type"));
            conn.post(asked, "\0\0\0\0\x01q")
        };
        let got = call("/trailers-only").expect("an answer");
        let said = (got.get("grpc-status"), got.get("grpc-message"), got.body.len());
        assert_eq!(said, (Some("5"), Some("none"), 0));
        assert!(got.trailers.is_none(), "{got:?}");
        let got = call("/two").expect("an answer");
        assert_eq!(got.body, b"\0\0\0\0\x01a\0\0\0\0\x01b");
        let trailers = got.trailers.expect("trailers");
        assert_eq!(
            (&trailers["grpc-status"], &trailers["x-custom"]),
            (&"10".parse().expect("a value"), &"kept".parse().expect("a value"))
        );
        // The reset may overtake what was sent before it: then the proxy says that it was so.
        match call("/reset") {
            Ok(got) => assert_eq!(got.get("grpc-status"), Some("14"), "{got:?}"),
            Err(error) => assert!(error.is_reset(), "{error}"),
        }
    }
    eventually(SOON, || in_flight(&proxy) == 0.0);
}
