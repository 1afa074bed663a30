//! Upstreams that leave in the middle of HTTP/2: what they have not begun is sent again, and what
//! they may have begun is not.

use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Gate, SOON, eventually};

use crate::http2_tools::{code, flag, frame, kind, raw_origin, retried, taken, to};
use crate::setup::{assert_counts, get, in_flight, post, quiet};

/// A GOAWAY after the stream `last`.
pub fn goaway(last: u32, code: u32) -> Vec<u8> {
    frame(kind::GOAWAY, 0, 0, &[last.to_be_bytes(), code.to_be_bytes()].concat())
}

/// A stream's end.
pub fn reset(stream: u32, code: u32) -> Vec<u8> {
    frame(kind::RST_STREAM, 0, stream, &code.to_be_bytes())
}

/// A 200 without a body.
pub fn ok(stream: u32) -> Vec<u8> {
    frame(kind::HEADERS, flag::END_HEADERS | flag::END_STREAM, stream, &[0x88])
}

/// What upstreams have got, in order.
type Got = Arc<Mutex<Vec<Vec<u8>>>>;

fn all(got: &Got) -> Vec<Vec<u8>> {
    got.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// An upstream that answers, but one request, as the `nth` one, it ends with these octets.
fn one_ends(
    nth: usize,
    with: impl Fn(u32) -> Vec<u8> + Clone + Send + 'static,
    close: bool,
) -> (String, Got) {
    let got = Got::default();
    let for_origin = got.clone();
    let url = raw_origin(b"", move |mut raw, _| {
        while let Some((stream, body)) = taken(&mut raw) {
            let is_it = {
                let mut got = for_origin.lock().unwrap_or_else(PoisonError::into_inner);
                got.push(body);
                got.len() == nth
            };
            if !is_it {
                raw.write(ok(stream));
                continue;
            }
            raw.write(with(stream));
            if close {
                return;
            }
        }
    });
    (url, got)
}

/// The request that is not begun, and said to be so in each way, is sent again once.
#[track_caller]
fn is_sent_again(method: &str, nth: usize) {
    let refused: fn(u32) -> Vec<u8> = |stream| reset(stream, code::REFUSED_STREAM);
    let gone: fn(u32) -> Vec<u8> = |stream| goaway(stream.saturating_sub(2), code::NO_ERROR);
    for (what, with, close) in
        [("refused", refused, false), ("gone away", gone, false), ("closed", gone, true)]
    {
        let (url, got) = one_ends(nth, with, close);
        let (other, other_got) = one_ends(0, ok, false);
        let proxy = retried(&[&url, &other], "max_attempts: 3").one_worker().start();
        for _ in 0..2 * nth + 2 {
            let answer = match method {
                "GET" => proxy.get("/"),
                _ => proxy.client().ask(post("/", "body")),
            };
            assert_eq!(answer.status(), 200, "{what}: {answer:?}");
        }
        let all = [all(&got), all(&other_got)].concat();
        let expected = if method == "GET" { "" } else { "body" };
        assert_eq!(all, vec![expected.as_bytes(); 2 * nth + 3], "{what}");
        quiet(&proxy);
    }
}

#[test]
fn a_get_that_the_upstream_has_not_begun_is_sent_again() {
    is_sent_again("GET", 1);
    is_sent_again("GET", 2);
}

#[test]
fn a_post_that_the_upstream_has_not_begun_is_sent_again() {
    is_sent_again("POST", 2);
}

#[test]
fn a_post_that_a_new_connection_has_not_begun_is_sent_again() {
    is_sent_again("POST", 1);
}

#[test]
fn what_the_upstream_may_have_begun_is_not_repeated() {
    let ways: [fn(u32) -> Vec<u8>; 4] = [
        // It names the stream as one that it has begun.
        |stream| goaway(stream, code::NO_ERROR),
        |stream| reset(stream, code::CANCEL),
        |_| b"".to_vec(),
        // No frame at all.
        |_| frame(kind::WINDOW_UPDATE, 0, 0, &[0; 4]),
    ];
    for (n, way) in ways.into_iter().enumerate() {
        let (url, got) = one_ends(1, way, true);
        let (other, other_got) = one_ends(0, ok, false);
        let proxy = retried(&[&url, &other], "max_attempts: 3").start();
        let statuses = [(); 4].map(|()| proxy.client().ask(post("/", "body")).status());
        let failed = statuses.iter().filter(|&&status| status == 502).count();
        assert_eq!(failed, 1, "{n}: {statuses:?}");
        assert_eq!(all(&got).len() + all(&other_got).len(), 4, "{n}");
        quiet(&proxy);
    }
}

#[test]
fn what_may_be_repeated_is() {
    let (url, got) = one_ends(1, |stream| reset(stream, code::CANCEL), false);
    let (other, other_got) = one_ends(0, ok, false);
    let proxy = retried(&[&url, &other], "max_attempts: 3").start();
    for _ in 0..4 {
        assert_eq!(proxy.get("/").status(), 200);
    }
    assert_eq!(all(&got).len() + all(&other_got).len(), 5);
    quiet(&proxy);
}

#[test]
fn an_upstream_that_sends_everybody_away_is_not_asked_for_ever() {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    let url = raw_origin(b"", move |mut raw, _| {
        counted.fetch_add(1, SeqCst);
        raw.write(goaway(0, code::ENHANCE_YOUR_CALM));
    });
    let proxy = to(&[&url]).start();
    let before = proxy.processor_time();
    for _ in 0..10 {
        let began = Instant::now();
        let answer = proxy.get("/");
        assert!(matches!(answer.status(), 502 | 503), "{answer:?}");
        assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    }
    assert!(count.load(SeqCst) <= 30, "{} connections", count.load(SeqCst));
    assert!(proxy.processor_time() < before + Duration::from_secs(1));
    quiet(&proxy);
}

#[test]
fn streams_in_progress_outlive_a_goaway() {
    let gate = Gate::default();
    let held = gate.clone();
    let url = raw_origin(b"", move |mut raw, connection| {
        while let Some((stream, _)) = taken(&mut raw) {
            if connection == 0 {
                raw.write(goaway(stream, code::NO_ERROR));
                held.pass();
            }
            raw.write(ok(stream));
        }
    });
    let proxy = to(&[&url]).one_worker().start();
    let mut first = proxy.client();
    first.send(get("a.test", "/first", ""));
    eventually(SOON, || in_flight(&proxy) == 1.0);
    // The others go elsewhere, once it is known.
    thread::scope(|scope| {
        let others = scope.spawn(|| (0..5).map(|_| proxy.get("/").status()).collect::<Vec<_>>());
        assert_eq!(others.join().expect("they are answered"), [200; 5]);
    });
    gate.open();
    assert_eq!(first.response().status(), 200);
    quiet(&proxy);
}

#[test]
fn an_upstream_that_closes_between_requests_is_not_noticed() {
    let url = raw_origin(b"", |mut raw, _| {
        if let Some((stream, _)) = taken(&mut raw) {
            raw.write(ok(stream));
            raw.write(goaway(stream, code::NO_ERROR));
        }
    });
    let proxy = to(&[&url]).one_worker().start();
    let mut client = proxy.client();
    // One that may be repeated: the end may come at the same moment as the request.
    for n in 0..20 {
        let answer = client.get(&format!("/{n}"));
        assert_eq!(answer.status(), 200, "{n}: {answer:?}");
    }
    assert_counts(&proxy, "proxy_requests_total", &[("status", "200")], 20.0);
    quiet(&proxy);
}

#[test]
fn octets_that_are_no_frames_cut_the_answer_once() {
    let got = Arc::new(AtomicUsize::new(0));
    let count = got.clone();
    let url = raw_origin(b"", move |mut raw, _| {
        while let Some((stream, _)) = taken(&mut raw) {
            count.fetch_add(1, SeqCst);
            raw.write(frame(kind::HEADERS, flag::END_HEADERS, stream, &[0xff; 40]));
        }
    });
    let (other, other_got) = one_ends(0, ok, false);
    let proxy = retried(&[&url, &other], "max_attempts: 3").start();
    let statuses = [(); 2].map(|()| proxy.client().ask(post("/", "body")).status());
    assert!(statuses == [502, 200] || statuses == [200, 502], "{statuses:?}");
    assert_eq!((got.load(SeqCst), all(&other_got).len()), (1, 1));
    quiet(&proxy);
}
