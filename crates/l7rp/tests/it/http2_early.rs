//! Answers that are out before the request is: the client may finish it, and keeps the answer.

use std::process::Command;
use std::time::Instant;

use l7rp_testkit::{Origin, Proxy, reply};

use crate::http2_tools::{GET, Raw, code, flag, frame, get_frame, kind, section};
use crate::setup::over;

/// A proxy that refuses what is asked of it, and an upstream that is never asked.
fn refusing() -> (Origin, Proxy) {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).route("deny: [127.0.0.0/8]").start();
    (origin, proxy)
}

/// The head of a POST whose body is still to come.
fn post_frame(stream: u32) -> Vec<u8> {
    let mut fields = GET.to_vec();
    fields[0].1 = "POST";
    frame(kind::HEADERS, flag::END_HEADERS, stream, &section(&fields))
}

#[test]
fn a_body_that_is_under_way_may_end_after_the_answer() {
    let (_origin, proxy) = refusing();
    let mut raw = Raw::open(&proxy, b"");
    raw.write(post_frame(1));
    let end = raw.end_of(1);
    assert_eq!((end.kind, end.ends()), (kind::DATA, true));
    // More than the stream's window, which is opened as it is read.
    let (part, mut window) = (vec![b'a'; 16 << 10], 256 << 10);
    for number in 0..32 {
        while window < part.len() {
            let more = raw.find(|f| f.stream == 1).expect("a frame");
            assert_eq!(more.kind, kind::WINDOW_UPDATE, "{more:?}");
            window += more.number(0) as usize;
        }
        window -= part.len();
        let last = if number == 31 { flag::END_STREAM } else { 0 };
        assert!(raw.write(frame(kind::DATA, last, 1, &part)));
    }
    // Whatever there is to say of the first stream comes before the end of another one.
    raw.write(get_frame(3));
    let next = raw.find(|f| f.kind != kind::WINDOW_UPDATE).expect("an answer");
    assert_eq!((next.kind, next.stream), (kind::HEADERS, 3));
}

#[test]
fn a_body_that_does_not_end_is_not_waited_for() {
    let (_origin, proxy) = refusing();
    let mut raw = Raw::open(&proxy, b"");
    raw.write(post_frame(1));
    assert!(raw.end_of(1).ends());
    let reset = raw.find(|f| f.kind == kind::RST_STREAM).expect("it is reset");
    assert_eq!((reset.stream, reset.code()), (1, code::NO_ERROR));
}

#[test]
fn a_client_that_resets_after_the_answer_is_done_with_at_once() {
    let (_origin, proxy) = refusing();
    let mut raw = Raw::open(&proxy, b"");
    let began = Instant::now();
    for number in 0..100 {
        let stream = 2 * number + 1;
        raw.write(post_frame(stream));
        assert!(raw.end_of(stream).ends());
        raw.write(frame(kind::RST_STREAM, 0, stream, &code::NO_ERROR.to_be_bytes()));
    }
    // Two seconds each, if nobody had noticed.
    assert!(began.elapsed().as_secs() < 20);
}

#[test]
fn curl_keeps_an_answer_that_comes_before_its_body_is_out() {
    let (_origin, proxy) = refusing();
    let body = "a".repeat(100_000);
    for data in ["x", &body] {
        for _ in 0..10 {
            let asked = Command::new("curl")
                .args(["-s", "--http2-prior-knowledge", "--max-time", "20", "-w", "%{http_code}"])
                .args(["-o", "/dev/null", "-d", data, &format!("http://{}/", proxy.address())])
                .output()
                .expect("curl");
            let told = String::from_utf8_lossy(&asked.stdout).into_owned();
            assert_eq!((asked.status.code(), told.as_str()), (Some(0), "403"));
        }
    }
}
