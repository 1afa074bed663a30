//! What resilience is worth, in figures for people: nothing here is judged. Run on a quiet
//! machine: `cargo test --release --test it -- --ignored --nocapture measure`.

use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Call, Origin, Proxy, Then, let_pass};

use crate::setup::{get, over};

const LENGTH: Duration = Duration::from_secs(4);

/// Answers after `time`.
fn after(time: Duration) -> impl Fn(&mut Call<'_>) -> Then {
    move |call| {
        let_pass(time);
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        Then::Next
    }
}

/// Answers by status, with the time that each took, in ms.
#[derive(Default)]
struct Seen {
    good: Vec<f64>,
    refused: Vec<f64>,
}

impl Seen {
    fn line(times: &mut [f64]) -> String {
        if times.is_empty() {
            return "none".into();
        }
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
        format!("{} answers, p50 {:.2} ms, p99 {:.2} ms", times.len(), at(0.5), at(0.99))
    }
}

/// `clients` ask for [`LENGTH`], each again after `every`, or at once where that has passed.
fn load(proxy: &Proxy, clients: usize, every: Duration) -> Seen {
    let seen = Mutex::new(Seen::default());
    let end = Instant::now() + LENGTH;
    thread::scope(|scope| {
        for n in 0..clients {
            let seen = &seen;
            scope.spawn(move || {
                let mut client = proxy.client();
                let mut mine = Seen::default();
                let mut due = Instant::now() + every.mul_f64(n as f64 / clients as f64);
                while due < end {
                    let_pass(due.saturating_duration_since(Instant::now()));
                    let began = Instant::now();
                    let answer = client.ask(get("a.test", "/", ""));
                    let took = began.elapsed().as_secs_f64() * 1e3;
                    let which =
                        if answer.status() == 200 { &mut mine.good } else { &mut mine.refused };
                    which.push(took);
                    due = (due + every).max(Instant::now());
                }
                let mut all = seen.lock().expect("nobody panics");
                all.good.append(&mut mine.good);
                all.refused.append(&mut mine.refused);
            });
        }
    });
    seen.into_inner().expect("nobody panics")
}

/// Tries at upstreams for each request of a client.
fn tries(proxy: &Proxy) -> f64 {
    let metrics = proxy.metrics();
    metrics.sum("proxy_upstream_requests_total", &[]) / metrics.sum("proxy_requests_total", &[])
}

#[test]
#[ignore = "a measurement"]
fn measure_one_of_three_fifty_times_slower() {
    let (usual, slow) = (Duration::from_millis(2), Duration::from_millis(100));
    let hedge = "middleware: [{ retry: { hedge_after: 10ms } }]";
    let by_percentile = "middleware: [{ retry: { hedge_after_percentile: 90 } }]";
    for algorithm in ["round-robin", "p2c-ewma"] {
        for (name, route) in [("none", ""), ("10ms", hedge), ("p90", by_percentile)] {
            let origins = [usual, usual, slow].map(|time| Origin::start(after(time)));
            let mut setup = over(&[&origins[0], &origins[1], &origins[2]])
                .pool(&format!("selector: {{ algorithm: {algorithm} }}"))
                .pool("retry_budget: { ratio: 0.5 }")
                .top("access_log: { enabled: false }");
            if !route.is_empty() {
                setup = setup.route(route);
            }
            let proxy = setup.start();
            let mut seen = load(&proxy, 16, Duration::ZERO);
            let (line, tries) = (Seen::line(&mut seen.good), tries(&proxy));
            println!("{algorithm:12} hedge {name:5} {line}, {tries:.3} tries a request");
        }
    }
}

#[test]
#[ignore = "a measurement"]
fn measure_all_failing() {
    let fail = |call: &mut Call<'_>| {
        call.send("HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\nno");
        Then::Next
    };
    let origins = [(); 3].map(|()| Origin::start(fail));
    let proxy = over(&[&origins[0], &origins[1], &origins[2]])
        .pool("circuit_breaker: { failure_ratio: 1.0 }")
        .route("middleware: [{ retry: { max_attempts: 3 } }]")
        .top("access_log: { enabled: false }")
        .start();
    let mut seen = load(&proxy, 10, Duration::from_millis(20));
    let allowed = 1.2 + 10.0 * LENGTH.as_secs_f64() / seen.refused.len() as f64;
    println!(
        "all failing: {}, {:.3} tries a request (allowed: {allowed:.3})",
        Seen::line(&mut seen.refused),
        tries(&proxy)
    );
}

#[test]
#[ignore = "a measurement"]
fn measure_three_times_overload() {
    let origin = Origin::start(after(Duration::from_millis(20)));
    for (name, clients) in [("within capacity", 10), ("three times over", 60)] {
        // 20 at once of 20 ms each: 1,000 a second.
        let proxy = over(&[&origin])
            .pool("max_in_flight: 20")
            .top("access_log: { enabled: false }")
            .start();
        let mut seen = load(&proxy, clients, Duration::from_millis(20));
        println!("{name}: admitted {}", Seen::line(&mut seen.good));
        println!("{name}: refused  {}", Seen::line(&mut seen.refused));
    }
}
