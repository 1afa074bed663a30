//! How many instructions it takes to remember a request: `cargo xtask instructions`.
//!
//! Each benchmark is a hundred requests, after one that is not counted.

#![expect(
    missing_docs,
    unused_qualifications,
    clippy::disallowed_methods,
    reason = "the macros of gungraun write code of their own"
)]

use std::hint::black_box;
use std::time::Duration;

use gungraun::{library_benchmark, library_benchmark_group, main};
use l7rp::observe::access_log::{Entry, Lines};
use l7rp::observe::event::{Events, Level};
use l7rp::observe::log::Log;
use l7rp::observe::stats::{RouteStats, UpstreamStats};
use l7rp::observe::tries::{End, Link, Try};
use l7rp_core::http1::request::Method;
use l7rp_core::names::Nanos;

main!(library_benchmark_groups = record);

library_benchmark_group!(name = record, benchmarks = [count_request, log_request]);

const REQUESTS: u64 = 100;

type Counters = (Box<RouteStats>, Box<UpstreamStats>);

fn counted() -> Counters {
    let counters = Counters::default();
    count(&counters, Duration::from_micros(1));
    counters
}

/// What each answered request moves.
fn count((route, upstream): &Counters, took: Duration) {
    let method = route.method(Method::Get);
    method.status.up(200);
    method.duration.record(took);
    upstream.status.up(200);
    upstream.duration.record(took);
}

#[library_benchmark]
#[bench::answered(counted())]
fn count_request(counters: Counters) -> Counters {
    for n in 0..REQUESTS {
        count(black_box(&counters), black_box(Duration::from_micros(n * n)));
    }
    counters
}

/// The lines of one worker, after one: it has read the clock.
fn logged() -> (Lines, Events) {
    #[expect(clippy::expect_used, reason = "without its thread there is nothing to measure")]
    let log = Log::start(std::io::sink()).expect("a thread");
    let (lines, events) = (Lines::default(), Events::new(log, Level::Info));
    // A buffer that need not grow comes with the first hand-over.
    log_success(&lines, &events);
    lines.hand_over(&events);
    log_success(&lines, &events);
    (lines, events)
}

fn log_success(lines: &Lines, events: &Events) {
    let only = Try {
        url: "http://10.0.0.7:8080",
        host: "10.0.0.7",
        port: 8080,
        began: Nanos(1_000),
        ended: Some((End::Answered(200), Duration::from_millis(2))),
        link: Some(Link { reused: true, age: Duration::from_secs(12) }),
        is_hedge: false,
        is_repeated: false,
        span: 0,
    };
    lines.add(
        &Entry {
            route: "articles",
            request_id: b"0123456789abcdef0123456789abcdef",
            method: b"GET",
            host: b"www.example.com",
            path: b"/articles/2024/the-long-way-home",
            status: 200,
            grpc_status: None,
            duration: Duration::from_micros(2_345),
            bytes_in: 0,
            bytes_out: 18_324,
            client_ip: "203.0.113.7",
            client_identity: "",
            protocol: "HTTP/1.1",
            pool: "articles",
            attempts: 1,
            tries: &[only],
            used: Some(&only),
            refused: &[],
            stop: "",
            trace_id: None,
            reason: "",
            is_fault: false,
        },
        Nanos(2_346_000),
        events,
    );
}

#[library_benchmark]
#[bench::success(logged())]
fn log_request((lines, events): (Lines, Events)) -> (Lines, Events) {
    for _ in 0..REQUESTS {
        log_success(black_box(&lines), black_box(&events));
    }
    (lines, events)
}
