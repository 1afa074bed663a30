//! What `--listen`, `--backends` and `--max-in-flight` alone promise, each line of it: backends
//! are probed, one that fails is left alone, what is too much is refused, and the end is in order.

use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{
    Client, Gate, Origin, Proxy, SOON, Signal, Value, eventually, let_pass, reply, within,
};

use crate::setup::{PROGRAM, assert_failed, get};
use crate::verdict::hear;

/// A process of `l7rp backend`.
struct Backend {
    process: Proxy,
    address: SocketAddr,
}

impl Backend {
    fn start(name: &str, flags: &[&str]) -> Self {
        Self::start_at("127.0.0.1:0", name, flags)
    }

    fn start_at(address: &str, name: &str, flags: &[&str]) -> Self {
        let all = [&["backend", "--listen", address, "--name", name][..], flags].concat();
        let process = Proxy::run(PROGRAM, all);
        let prefix = format!("backend {name} listening on ");
        let address = within(SOON, || {
            let lines = process.lines();
            let line = lines.iter().filter_map(Value::as_str).find_map(|l| l.strip_prefix(&prefix));
            line.and_then(|address| address.parse().ok())
        });
        Self { address: address.expect("it listens"), process }
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// A proxy of these URLs, with these flags as well.
fn proxy_of(urls: &[&str], flags: &[&str]) -> Proxy {
    let urls = urls.join(",");
    let common = ["--listen", "127.0.0.1:0", "--metrics-bind", "127.0.0.1:0", "--backends", &urls];
    Proxy::start_with(PROGRAM, &[&common[..], flags].concat())
}

/// As [`proxy_of`], when all of them are probed and good.
#[track_caller]
fn serving(backends: &[&Backend], flags: &[&str]) -> Proxy {
    let urls: Vec<_> = backends.iter().map(|backend| backend.url()).collect();
    let proxy = proxy_of(&urls.iter().map(String::as_str).collect::<Vec<_>>(), flags);
    let eligible = || proxy.metrics().sum("proxy_upstream_eligible", &[]);
    eventually(SOON, || eligible() == backends.len() as f64);
    proxy
}

/// The backend that has answered.
fn name(answer: &l7rp_testkit::Message) -> String {
    answer.get("x-backend").unwrap_or_default().to_owned()
}

/// The times of this mode are fixed; they are waited out all at once.
#[test]
fn slow_what_takes_its_time() {
    let all: [fn(); 4] = [
        a_stopped_backend_disappears_and_comes_back,
        five_failures_open_only_that_backends_circuit_for_fifteen_seconds,
        a_backend_that_hangs_is_given_up_after_five_seconds,
        a_backend_that_was_good_is_out_after_one_bad_probe,
    ];
    let all = all.map(thread::spawn);
    assert!(all.map(thread::JoinHandle::join).iter().all(Result::is_ok), "one of them failed");
}

#[test]
fn the_health_of_a_backend_is_any_2xx_and_short() {
    let backend = Backend::start("one", &[]);
    let answer = Client::connect(backend.address).get("/healthz");
    assert!((200..300).contains(&answer.status()) && answer.body.len() < 1024);
    let proxy = serving(&[&backend], &[]);
    assert_eq!(proxy.get("/readyz").status(), 204);
    let odd = Origin::start(|call| match call.request.target() {
        "/healthz" => {
            call.send("HTTP/1.1 299 Odd\r\nContent-Length: 0\r\n\r\n");
            l7rp_testkit::Then::Next
        }
        _ => reply::name("odd")(call),
    });
    let proxy = proxy_of(&[&odd.url()], &[]);
    eventually(SOON, || proxy.get("/").text() == "odd");
    let probe = &odd.seen()[0].message;
    assert_eq!((probe.method(), probe.target()), ("GET", "/healthz"));
    // One that is good was enough, and the next is five seconds away.
    let probes = odd.seen().iter().filter(|s| s.message.target() == "/healthz").count();
    assert_eq!(probes, 1);
}

#[test]
fn the_probe_is_told_at_the_start() {
    let origin = Origin::start(reply::name("x"));
    let note = |proxy: &Proxy| proxy.events("proxy_started")[0]["note"].clone();
    let without = note(&proxy_of(&[&origin.url()], &[]));
    let without = without.as_str().expect("it is there");
    assert!(
        without.contains("GET /healthz every 5 s") && without.contains("l7rp init"),
        "{without}"
    );
    assert_eq!(note(&crate::setup::over(&[&origin]).start()), Value::Null);
}

#[test]
fn requests_take_turns() {
    let (one, two) = (Backend::start("one", &[]), Backend::start("two", &[]));
    let proxy = serving(&[&one, &two], &[]);
    let names: Vec<_> = (0..8).map(|_| name(&proxy.get("/"))).collect();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
}

#[test]
fn no_backend_is_used_before_it_was_probed() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("x", &gate));
    let proxy = proxy_of(&[&origin.url()], &[]);
    eventually(SOON, || origin.requests() == 1);
    assert_eq!(proxy.get("/livez").status(), 204);
    let answer = proxy.get("/readyz");
    assert_eq!((answer.status(), answer.text().as_str()), (503, "no backend ready\n"));
    let answer = proxy.get("/");
    assert_failed(&proxy, &answer, 503, "destination_unavailable", "no_upstream");
    assert_eq!(answer.get("retry-after"), Some("1"));
    gate.open();
    eventually(SOON, || proxy.get("/readyz").status() == 204);
    assert_eq!(proxy.get("/").text(), "x");
}

/// Takes as long as two probes are apart, twice.
fn a_stopped_backend_disappears_and_comes_back() {
    let one = Backend::start("one", &[]);
    // An address where no connection of another test begins.
    let mut two = Backend::start_at("127.0.77.4:0", "two", &[]);
    let proxy = serving(&[&one, &two], &[]);
    two.process.signal(Signal::KILL);
    two.process.wait_exit(SOON);
    let began = Instant::now();
    // Nobody notices. They are few enough for the probe to decide and no breaker.
    for _ in 0..4 {
        assert_eq!(name(&proxy.get("/")), "one");
    }
    let is_gone = |e: &Value| e["to"] == "ineligible";
    let event = proxy.wait_for_event("upstream_health_changed", is_gone, SOON);
    assert_eq!((&event["upstream"], &event["why"]), (&two.url().into(), &"connect_refused".into()));
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    for n in 0..6 {
        assert_eq!(name(&proxy.get(&format!("/{n}"))), "one");
        assert_eq!(proxy.logged_path(&format!("/{n}"))["attempts"], 1);
    }
    assert_eq!(proxy.get("/readyz").status(), 204);
    let _again = Backend::start_at(&two.address.to_string(), "two", &[]);
    let labels = [("upstream", &*two.url())];
    eventually(Duration::from_secs(8), || {
        proxy.metrics().sum("proxy_upstream_eligible", &labels) == 1.0
    });
    let names: Vec<_> = (0..4).map(|_| name(&proxy.get("/"))).collect();
    assert_eq!(names.iter().filter(|name| *name == "two").count(), 2, "{names:?}");
}

/// Waits out the time that a breaker is open, which is fixed in this mode.
fn five_failures_open_only_that_backends_circuit_for_fifteen_seconds() {
    let (one, two) = (Backend::start("one", &[]), Backend::start("two", &["--status", "500"]));
    let proxy = serving(&[&one, &two], &[]);
    let mut answers: Vec<u16> = (0..10).map(|_| proxy.get("/").status()).collect();
    let opened = Instant::now();
    answers.sort_unstable();
    assert_eq!(answers, [[200; 5], [500; 5]].concat());
    let opening = |e: &Value| e["to"] == "open";
    let event = proxy.wait_for_event("circuit_breaker_changed", opening, SOON);
    assert_eq!((&event["upstream"], &event["from"]), (&two.url().into(), &"closed".into()));
    let of_two = [("upstream", &*two.url())];
    for _ in 0..20 {
        assert_eq!(name(&proxy.get("/")), "one");
    }
    // It is healthy all the time, by its probes.
    assert!(proxy.events("upstream_health_changed").iter().all(|e| e["to"] == "eligible"));
    let answered = within(Duration::from_secs(30), || {
        let_pass(Duration::from_millis(20));
        (proxy.get("/").status() == 500).then(|| opened.elapsed())
    });
    let took = answered.expect("it is tried again");
    assert!(took >= Duration::from_millis(14_900), "{took:?}");
    // One trial, and it is left alone for as long again.
    for _ in 0..20 {
        assert_eq!(name(&proxy.get("/")), "one");
    }
    let turns = "proxy_circuit_breaker_transitions_total";
    let metrics = proxy.metrics();
    let turned = |to: &str| metrics.sum(turns, &[of_two[0], ("to", to)]);
    assert_eq!((turned("open"), turned("half_open"), turned("closed")), (2.0, 1.0, 0.0));
    assert_eq!(metrics.sum(turns, &[]), 3.0);
}

#[test]
fn transport_failures_open_the_circuit_too_and_the_client_is_told_when_to_come_again() {
    let backend = Backend::start("one", &["--close"]);
    let proxy = serving(&[&backend], &[]);
    for _ in 0..5 {
        assert_eq!(proxy.get("/").status(), 502);
    }
    let opening = |e: &Value| e["to"] == "open";
    proxy.wait_for_event("circuit_breaker_changed", opening, SOON);
    let_pass(Duration::from_millis(20));
    let answer = proxy.get("/");
    assert_failed(&proxy, &answer, 503, "destination_unavailable", "breaker_open");
    let seconds = answer.get("retry-after").and_then(|s| s.parse::<u64>().ok());
    assert!(seconds.is_some_and(|s| (8..=15).contains(&s)), "{seconds:?}");
    assert_eq!(proxy.get("/readyz").status(), 503);
    assert_eq!(proxy.get("/livez").status(), 204);
}

#[test]
fn what_is_too_much_is_refused_at_once() {
    let backend = Backend::start("one", &["--slow", "1500"]);
    let proxy = serving(&[&backend], &["--max-in-flight", "2"]);
    let mut held: Vec<_> = (0..2).map(|_| proxy.client()).collect();
    for client in &mut held {
        client.send(get("a.test", "/", ""));
    }
    let in_flight = || proxy.metrics().sum("proxy_upstream_inflight", &[]);
    eventually(SOON, || in_flight() == 2.0);
    let began = Instant::now();
    for _ in 0..5 {
        let answer = proxy.get("/");
        assert_failed(&proxy, &answer, 503, "connection_limit_reached", "capacity_process");
        assert_eq!(answer.get("retry-after"), Some("1"));
    }
    assert!(began.elapsed() < Duration::from_secs(1), "they waited");
    // Probes of the proxy itself are not requests.
    assert_eq!(proxy.get("/livez").status(), 204);
    for client in &mut held {
        assert_eq!(client.response().status(), 200);
    }
}

#[test]
fn every_line_has_what_it_needs_and_no_secret() {
    let (one, two) = (Backend::start("one", &[]), Backend::start("two", &[]));
    let mut proxy = serving(&[&one, &two], &[]);
    let lines = "Authorization: Bearer s3cret\r\nCookie: sid=s3cret\r\n";
    for n in 0..4 {
        proxy.client().ask(get("a.test", &format!("/{n}?token=s3cret"), lines));
    }
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    let mut upstreams = Vec::new();
    for n in 0..4 {
        let line = proxy.logged_path(&format!("/{n}"));
        assert!(line["request_id"].as_str().is_some_and(|id| !id.is_empty()), "{line}");
        assert!(line["duration_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{line}");
        assert_eq!(line["status"], 200);
        upstreams.push(line["upstream"].as_str().unwrap_or_default().to_owned());
    }
    upstreams.sort();
    let mut expected = [one.url(), one.url(), two.url(), two.url()];
    expected.sort();
    assert_eq!(upstreams, expected);
    assert!(proxy.lines().iter().all(|line| !line.to_string().contains("s3cret")));
    assert!(!proxy.errors().contains("s3cret"));
}

#[test]
fn what_was_accepted_is_finished_at_the_end() {
    let backend = Backend::start("one", &["--slow", "700"]);
    let mut proxy = serving(&[&backend], &[]);
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    let in_flight = || proxy.metrics().sum("proxy_upstream_inflight", &[]);
    eventually(SOON, || in_flight() == 1.0);
    proxy.signal(Signal::TERM);
    let started = proxy.wait_for_event("shutdown_started", |_| true, SOON);
    assert_eq!(started["grace_ms"], 10_000);
    assert_eq!(client.response().status(), 200);
    assert_eq!(proxy.wait_exit(SOON), 0);
}

#[test]
fn only_the_address_that_was_given_is_listened_on() {
    let backend = Backend::start("one", &[]);
    let proxy = serving(&[&backend], &[]);
    for address in [proxy.address(), proxy.admin(), backend.address] {
        assert!(address.ip().is_loopback());
        let beside = SocketAddr::from(([127, 0, 0, 2], address.port()));
        assert!(TcpStream::connect_timeout(&beside, SOON).is_err(), "{beside} answers");
    }
}

/// A backend has five seconds to answer in this mode.
fn a_backend_that_hangs_is_given_up_after_five_seconds() {
    let backend = Backend::start("one", &["--hang"]);
    let proxy = serving(&[&backend], &[]);
    let began = Instant::now();
    let answer = proxy.get("/");
    assert!(began.elapsed() >= Duration::from_secs(5), "{:?}", began.elapsed());
    assert_failed(&proxy, &answer, 504, "http_response_timeout", "response_timeout");
}

#[test]
fn a_probe_that_takes_a_second_is_a_bad_one() {
    let origin = Origin::start(reply::hang);
    let began = Instant::now();
    let proxy = proxy_of(&[&origin.url()], &[]);
    eventually(SOON, || origin.requests() == 1);
    // It is given up, and its connection closed.
    eventually(Duration::from_secs(4), || origin.open() == 0);
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
    assert_eq!(proxy.get("/readyz").status(), 503);
    assert_eq!(origin.requests(), 1);
}

fn a_backend_that_was_good_is_out_after_one_bad_probe() {
    let origin = Origin::start(|call| {
        let status = if call.number == 0 { "200 Good" } else { "500 Bad" };
        call.send(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n"));
        l7rp_testkit::Then::Next
    });
    let proxy = proxy_of(&[&origin.url()], &[]);
    hear(&proxy, &origin, "eligible");
    let event = hear(&proxy, &origin, "ineligible");
    assert_eq!((&event["why"], origin.requests()), (&"status:500".into(), 2));
}
