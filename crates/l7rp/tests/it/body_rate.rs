//! A least rate for bodies: who sends slower than that for long is refused, and nobody else.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Message, Origin, Proxy, SOON, eventually, let_pass, reply};

use crate::setup::{assert_counts, assert_failed, in_flight, over};

/// No body is too slow before this.
const GRACE: Duration = Duration::from_secs(10);

/// Sends `first`, then `part` every 100 ms until there is an answer, or for `most`; when it came.
fn upload(
    proxy: &Proxy,
    head: &str,
    first: &str,
    part: &str,
    most: Duration,
) -> (Message, Duration) {
    let mut client = proxy.client();
    client.send(format!("POST / HTTP/1.1\r\nHost: a.test\r\n{head}\r\n\r\n{first}"));
    let began = Instant::now();
    let mut sender = client.wire.twin();
    let answered = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while began.elapsed() < most && !answered.load(SeqCst) {
                let _ = sender.write(part.as_bytes());
                let_pass(Duration::from_millis(100));
            }
            // The end, where it is framed by chunks.
            let _ = sender.write(b"0\r\n\r\n");
        });
        client.wire.patience(Some(GRACE + SOON));
        let answer = client.response();
        answered.store(true, SeqCst);
        (answer, began.elapsed())
    })
}

#[test]
fn a_body_below_the_rate_is_refused_and_one_above_it_is_not() {
    const CHUNKED: &str = "Transfer-Encoding: chunked";
    let by_length = "Content-Length: 1000000";
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).listener("limits: { min_body_rate: 1000 }").start();
    let long = Duration::from_secs(14);
    let (burst, fast) = ("b".repeat(11_500), format!("c8\r\n{}\r\n", "x".repeat(200)));
    let steady = Duration::from_millis(11_500);
    let [slow, drip, after_burst, fast] = thread::scope(|scope| {
        let proxy = &proxy;
        [
            scope.spawn(move || upload(proxy, by_length, "", &"x".repeat(20), long)),
            scope.spawn(move || upload(proxy, CHUNKED, "", "1\r\nx\r\n", long)),
            // What it was ahead counts.
            scope.spawn(move || upload(proxy, by_length, &burst, "", long)),
            scope.spawn(move || upload(proxy, CHUNKED, "", &fast, steady)),
        ]
        .map(|upload| upload.join().expect("it is answered"))
    });
    for (name, (answer, took), least) in [
        ("slow", slow, GRACE),
        ("drip", drip, GRACE),
        ("burst", after_burst, Duration::from_secs(11)),
    ] {
        assert!(took + Duration::from_millis(300) > least, "{name}: {took:?}");
        assert!(took < least + Duration::from_millis(1500), "{name}: {took:?}");
        assert_failed(&proxy, &answer, 408, "http_request_error", "body_too_slow");
        assert_eq!(answer.get("connection"), Some("close"), "{name}");
    }
    assert_eq!(fast.0.status(), 200);
    assert!(fast.1 > steady, "{:?}", fast.1);
    // The upstream is told by the end of its connection, and is not blamed.
    eventually(SOON, || origin.open() <= 1 && in_flight(&proxy) == 0.0);
    assert_eq!(origin.seen().iter().filter(|seen| seen.message.complete).count(), 1);
    assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "cancel")], 3.0);
    assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "err")], 0.0);
    assert_counts(&proxy, "proxy_bad_requests_total", &[("reason", "body_too_slow")], 3.0);
}
