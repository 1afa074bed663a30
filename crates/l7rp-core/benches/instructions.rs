//! How many instructions the decisions of one request take: `cargo xtask instructions`.
//!
//! Each benchmark is a hundred calls, so that a few instructions around them do not count, and
//! chance is spread. All have been called before: the first look at what the processor can do is
//! not part of a request.

#![expect(
    missing_docs,
    unused_qualifications,
    clippy::disallowed_methods,
    reason = "the macros of gungraun write code of their own"
)]

mod fixtures;

use std::hint::black_box;
use std::net::Ipv4Addr;
use std::time::Duration;

use gungraun::{library_benchmark, library_benchmark_group, main};
use l7rp_core::http1::Limits;
use l7rp_core::http1::encode::{self, Changes, Forwarding, ToClient};
use l7rp_core::http1::request::{Request, parse_request};
use l7rp_core::http1::response::{Response, parse_response};
use l7rp_core::limit::{Buckets, Decision, Rate, client_key};
use l7rp_core::names::Nanos;
use l7rp_core::pick::Algorithm;
use l7rp_core::route::{self, HostPattern, Rule, Table, parse_host};
use l7rp_core::upstream::breaker::{Breaker, Trip, Verdict};
use l7rp_core::window::Percentile;

use fixtures::{CONSISTENT_HASH, IP_HASH, NEVER, Pool, RATIO, next};

main!(library_benchmark_groups = heads, decisions);

library_benchmark_group!(
    name = heads,
    benchmarks = [parse_request_head, parse_response_head, write_request_head, write_response_head]
);

library_benchmark_group!(
    name = decisions,
    benchmarks = [find_route, pick, judge, limit_rate, observe_latency]
);

const CALLS: u64 = 100;

const LIMITS: Limits = Limits { max_head: 65_536, max_fields: 100, max_target: 16_384 };

const SMALL: &[u8] = b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n";

const BROWSER: &[u8] = b"GET /articles/2024/the-long-way-home?ref=front HTTP/1.1\r\n\
    Host: www.example.com\r\n\
    Connection: keep-alive\r\n\
    sec-ch-ua: \"Chromium\";v=\"128\", \"Not;A=Brand\";v=\"24\"\r\n\
    sec-ch-ua-mobile: ?0\r\n\
    User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) \
    Chrome/128.0.0.0 Safari/537.36\r\n\
    Accept: text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8\r\n\
    Sec-Fetch-Site: same-origin\r\n\
    Sec-Fetch-Mode: navigate\r\n\
    Referer: https://www.example.com/articles\r\n\
    Accept-Encoding: gzip, deflate, br, zstd\r\n\
    Accept-Language: en-GB,en;q=0.9\r\n\
    Cookie: session=4f1c6f0e9c3b4d5a8e7f; theme=dark; consent=yes\r\n\r\n";

const RESPONSE: &[u8] = b"HTTP/1.1 200 OK\r\n\
    Server: nginx\r\n\
    Date: Tue, 03 Sep 2024 10:11:12 GMT\r\n\
    Content-Type: text/html; charset=utf-8\r\n\
    Content-Length: 18324\r\n\
    Connection: keep-alive\r\n\
    Cache-Control: max-age=60\r\n\
    ETag: \"66d6d0f0-4794\"\r\n\
    Vary: Accept-Encoding\r\n\r\n";

/// A head, and room for what is sent on.
struct Message<H> {
    raw: &'static [u8],
    head: H,
    out: Vec<u8>,
}

impl<H: Default> Message<H> {
    fn new(raw: &'static [u8]) -> Self {
        Self { raw, head: H::default(), out: Vec::with_capacity(4096) }
    }
}

impl Message<Request> {
    fn parse(&mut self) -> bool {
        let len = parse_request(self.raw, &mut self.head, LIMITS);
        len.is_ok_and(|len| len == Some(self.raw.len()))
    }

    fn write(&mut self) {
        let forwarding = Forwarding {
            peer: "192.0.2.1",
            client: "192.0.2.1",
            proto: "https",
            peer_is_trusted: false,
            request_id: b"0123456789abcdef0123456789abcdef",
            identity: None,
            trace: None,
        };
        let Self { raw, head, out } = self;
        out.clear();
        let (target, host) = ([head.target.of(raw)], head.host.of(raw));
        encode::request(out, raw, head, &target, host, &forwarding, &Changes::default());
    }
}

impl Message<Response> {
    fn parse(&mut self) -> bool {
        let len = parse_response(self.raw, &mut self.head, false, LIMITS);
        len.is_ok_and(|len| len == Some(self.raw.len()))
    }

    fn write(&mut self) {
        let to = ToClient {
            is_http10: false,
            keep_alive: true,
            request_id: b"0123456789abcdef0123456789abcdef",
            decision: b"",
        };
        self.out.clear();
        encode::response(&mut self.out, self.raw, &self.head, &to, &Changes::default());
    }
}

fn request(raw: &'static [u8]) -> Message<Request> {
    let mut message = Message::<Request>::new(raw);
    assert!(message.parse());
    message.write();
    message
}

fn response(raw: &'static [u8]) -> Message<Response> {
    let mut message = Message::<Response>::new(raw);
    assert!(message.parse());
    message.write();
    message
}

#[library_benchmark(setup = request)]
#[bench::small(SMALL)]
#[bench::browser(BROWSER)]
fn parse_request_head(mut message: Message<Request>) -> Message<Request> {
    for _ in 0..CALLS {
        black_box(black_box(&mut message).parse());
    }
    message
}

#[library_benchmark(setup = request)]
#[bench::small(SMALL)]
#[bench::browser(BROWSER)]
fn write_request_head(mut message: Message<Request>) -> Message<Request> {
    for _ in 0..CALLS {
        black_box(&mut message).write();
    }
    message
}

#[library_benchmark(setup = response)]
#[bench::usual(RESPONSE)]
fn parse_response_head(mut message: Message<Response>) -> Message<Response> {
    for _ in 0..CALLS {
        black_box(black_box(&mut message).parse());
    }
    message
}

#[library_benchmark(setup = response)]
#[bench::usual(RESPONSE)]
fn write_response_head(mut message: Message<Response>) -> Message<Response> {
    for _ in 0..CALLS {
        black_box(&mut message).write();
    }
    message
}

const PREFIXES: usize = 10;

/// Hosts of ten prefixes each.
fn many_hosts(len: usize) -> Table {
    table(len, |ix| (ix / PREFIXES, ix % PREFIXES))
}

/// One host of many prefixes.
fn many_paths(len: usize) -> Table {
    table(len, |ix| (0, ix))
}

/// The names are equally long, however many there are: their octets are hashed.
fn table(len: usize, place: impl Fn(usize) -> (usize, usize)) -> Table {
    let rule = |ix| {
        let (host, prefix) = place(ix);
        Rule {
            host: HostPattern::Exact(format!("tenant-{host:05}.example.com")),
            prefix: format!("/api/resource-{prefix:05}"),
            methods: Vec::new(),
            predicates: Vec::new(),
            listeners: Vec::new(),
        }
    };
    Table::new((0..len).map(rule).collect())
}

/// A table, and a request that takes its last rule.
fn last_of(table: Table) -> (Table, String, String) {
    let last = table.rules().last();
    let host = last.and_then(|rule| match &rule.host {
        HostPattern::Exact(host) => Some(host.clone()),
        _ => None,
    });
    let path = last.map(|rule| format!("{}/12345?fields=name", rule.prefix));
    (table, host.unwrap_or_default(), path.unwrap_or_default())
}

#[library_benchmark]
#[bench::by_host_of_10(last_of(many_hosts(10)))]
#[bench::by_host_of_1000(last_of(many_hosts(1_000)))]
#[bench::by_host_of_100000(last_of(many_hosts(100_000)))]
#[bench::by_path_of_10(last_of(many_paths(10)))]
#[bench::by_path_of_1000(last_of(many_paths(1_000)))]
#[bench::by_path_of_100000(last_of(many_paths(100_000)))]
fn find_route(asked: (Table, String, String)) -> (Table, String, String) {
    let (table, host, path) = &asked;
    let request = route::Request {
        listener: 0,
        host: parse_host(host.as_bytes()).ok(),
        path: path.as_bytes(),
        method: b"GET",
        has_field: &|_, _| false,
    };
    for _ in 0..CALLS {
        let found = black_box(table).find(black_box(&request));
        assert_eq!(found, Some(table.rules().len() - 1));
    }
    asked
}

/// In the middle of a round: who is counted off is then as far away as on average.
fn half_way(algorithm: Algorithm, len: usize) -> Pool {
    let pool = Pool::new(algorithm, len);
    for _ in 0..len.saturating_sub(CALLS as usize) / 2 {
        black_box(pool.pick(0, Nanos(1_000_000)));
    }
    pool
}

#[library_benchmark(setup = half_way)]
#[bench::round_robin_of_3(Algorithm::RoundRobin, 3)]
#[bench::round_robin_of_100(Algorithm::RoundRobin, 100)]
#[bench::round_robin_of_1000(Algorithm::RoundRobin, 1_000)]
#[bench::weighted_rr_of_3(Algorithm::WeightedRr, 3)]
#[bench::weighted_rr_of_100(Algorithm::WeightedRr, 100)]
#[bench::weighted_rr_of_1000(Algorithm::WeightedRr, 1_000)]
#[bench::least_conn_of_3(Algorithm::LeastConn, 3)]
#[bench::least_conn_of_100(Algorithm::LeastConn, 100)]
#[bench::least_conn_of_1000(Algorithm::LeastConn, 1_000)]
#[bench::p2c_ewma_of_3(Algorithm::P2cEwma, 3)]
#[bench::p2c_ewma_of_100(Algorithm::P2cEwma, 100)]
#[bench::p2c_ewma_of_1000(Algorithm::P2cEwma, 1_000)]
#[bench::consistent_hash_of_3(CONSISTENT_HASH, 3)]
#[bench::consistent_hash_of_100(CONSISTENT_HASH, 100)]
#[bench::consistent_hash_of_1000(CONSISTENT_HASH, 1_000)]
#[bench::ip_hash_of_3(IP_HASH, 3)]
#[bench::ip_hash_of_100(IP_HASH, 100)]
#[bench::ip_hash_of_1000(IP_HASH, 1_000)]
fn pick(pool: Pool) -> Pool {
    let mut n = 0;
    for _ in 0..CALLS {
        black_box(black_box(&pool).pick(next(&mut n), Nanos(1_000_000)));
    }
    pool
}

/// A breaker that has seen as much as it remembers.
fn judging(trip: Trip, verdict: Verdict) -> (Breaker, Verdict, u64) {
    let (breaker, mut now) = (fixtures::breaker(trip), 0);
    for _ in 0..CALLS {
        one_try(&breaker, verdict, &mut now);
    }
    (breaker, verdict, now)
}

fn one_try(breaker: &Breaker, verdict: Verdict, now: &mut u64) {
    *now += 1_000;
    let admission = breaker.admit(Nanos(*now));
    let change = admission.and_then(|admission| admission.permit.settle(verdict, Nanos(*now), 0));
    assert!(change.is_none());
}

#[library_benchmark(setup = judging)]
#[bench::success_by_ratio(RATIO, Verdict::Success)]
#[bench::success_in_a_row(Trip::Consecutive(5), Verdict::Success)]
#[bench::failure_by_ratio(NEVER, Verdict::Failure)]
#[bench::failure_in_a_row(Trip::Consecutive(u32::MAX), Verdict::Failure)]
fn judge((breaker, verdict, mut now): (Breaker, Verdict, u64)) -> Breaker {
    for _ in 0..CALLS {
        one_try(black_box(&breaker), black_box(verdict), &mut now);
    }
    breaker
}

/// Room for clients that have all been there.
fn clients(rps: f64) -> (Buckets, Rate) {
    let (buckets, rate) = (Buckets::new(65_536, [1, 2]), Rate::new(rps, 1));
    ask_for_all(&buckets, &rate, 1);
    (buckets, rate)
}

/// One request of each of a hundred clients; how many may pass.
fn ask_for_all(buckets: &Buckets, rate: &Rate, now: u64) -> u64 {
    let mut passed = 0;
    for client in 0..CALLS as u32 {
        let key = client_key(Ipv4Addr::from_bits(0xcb00_7100 + client).into());
        let decision = buckets.try_take(key, rate, Nanos(1_000_000_000 * now));
        passed += u64::from(matches!(decision, Decision::Allowed { .. }));
    }
    passed
}

#[library_benchmark(setup = clients)]
#[bench::allowed(10.0)]
#[bench::refused(0.1)]
fn limit_rate((buckets, rate): (Buckets, Rate)) -> Buckets {
    black_box(ask_for_all(black_box(&buckets), black_box(&rate), 2));
    buckets
}

fn observed() -> Percentile {
    let percentile = Percentile::new();
    percentile.observe(Duration::from_millis(1), Nanos(1));
    percentile
}

#[library_benchmark]
#[bench::usual(observed())]
fn observe_latency(percentile: Percentile) -> Percentile {
    for n in 0..CALLS {
        black_box(&percentile).observe(black_box(Duration::from_micros(n * n)), Nanos(n));
    }
    percentile
}
