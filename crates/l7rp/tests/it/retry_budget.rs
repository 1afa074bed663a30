//! Retries are a share of the traffic: when everything fails, they do not make it worse.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Origin, Proxy, let_pass, reply};

use crate::setup::{post, start};
use crate::tries::{
    NEVER_OPENS, NOTHING_LEFT, assert_at_rest, attempts, in_turn, requests, say, with_retry,
};

/// How often a retry was not allowed.
fn refused(proxy: &Proxy, pool: &str) -> f64 {
    proxy.metrics().sum("proxy_retry_budget_exhausted_total", &[("pool", pool)])
}

/// Upstreams that answer with a status that can be changed.
fn adjustable<const N: usize>(status: &Arc<AtomicU16>) -> [Origin; N] {
    let now = status.clone();
    in_turn(move |call, _| {
        let body = call.request.target().to_owned();
        say(call, now.load(SeqCst), "", &body)
    })
}

#[test]
fn with_an_empty_budget_the_first_answer_is_passed_on() {
    let origins: [Origin; 2] = in_turn(|call, nth| {
        let status = if nth == 0 { 503 } else { 200 };
        say(call, status, "Set-Cookie: a=1\r\nSet-Cookie: b=2\r\n", "said")
    });
    let proxy = with_retry(&origins.each_ref(), "backoff: 1ms").pool(NOTHING_LEFT).start();
    for n in 0..10 {
        let path = format!("/{n}");
        let answer = proxy.get(&path);
        assert_eq!((answer.status(), answer.get("proxy-status")), (503, None));
        assert_eq!(answer.all("set-cookie"), ["a=1", "b=2"]);
        assert_eq!(answer.text(), "said");
        assert_eq!(attempts(&proxy, &path), 1);
    }
    assert_eq!(requests(&origins), 10);
    assert_eq!(refused(&proxy, "b"), 10.0);
    assert_eq!(proxy.metrics().sum("proxy_retry_attempts_total", &[]), 0.0);
    assert_at_rest(&proxy);
}

#[test]
fn what_was_not_sent_needs_no_budget() {
    let good = Origin::start(reply::echo);
    let bad = Origin::refusing();
    let proxy = with_retry(&[&bad, &good], "backoff: 1ms").pool(NOTHING_LEFT).start();
    for _ in 0..4 {
        assert_eq!(proxy.get("/").status(), 200);
        assert_eq!(proxy.client().ask(post("/", "x")).status(), 200);
    }
    assert_eq!(good.requests(), 8);
    assert!(proxy.metrics().sum("proxy_retry_attempts_total", &[("outcome", "success")]) >= 1.0);
    assert_eq!(refused(&proxy, "b"), 0.0);
    assert_at_rest(&proxy);
}

#[test]
fn a_stale_connection_needs_no_budget() {
    let origin = Origin::start(|call| match call.on_connection {
        0 => say(call, 200, "", "good"),
        _ => reply::close(call),
    });
    let proxy = with_retry(&[&origin], "").pool(NOTHING_LEFT).one_worker().start();
    assert_eq!(proxy.get("/first").text(), "good");
    assert_eq!(proxy.get("/second").text(), "good");
    assert_eq!(refused(&proxy, "b"), 0.0);
}

#[test]
fn a_few_each_second_are_always_allowed() {
    let origins: [Origin; 2] = in_turn(|call, _| say(call, 503, "", "busy"));
    let proxy = with_retry(&origins.each_ref(), "max_attempts: 2, backoff: 1ms")
        .pool("retry_budget: { ratio: 0.0, min_per_second: 4 }")
        .start();
    let mut client = proxy.client();
    let began = Instant::now();
    for n in 0..30 {
        assert_eq!(client.get(&format!("/{n}")).status(), 503);
    }
    // A second's worth at once, and what has come since.
    let retries = requests(&origins) - 30;
    let most = 4.0 + began.elapsed().as_secs_f64() * 4.0 + 1.0;
    assert!(retries >= 4 && retries as f64 <= most, "{retries}, {most}");
    assert_eq!(refused(&proxy, "b"), (30 - retries) as f64);
    let_pass(Duration::from_millis(600));
    let before = requests(&origins);
    assert_eq!(client.get("/later").status(), 503);
    assert_eq!(requests(&origins) - before, 2, "there is one again");
    assert_at_rest(&proxy);
}

#[test]
fn a_share_of_the_traffic_is_saved_up() {
    let status = Arc::new(AtomicU16::new(200));
    let origins: [Origin; 2] = adjustable(&status);
    let proxy = with_retry(&origins.each_ref(), "max_attempts: 2, backoff: 1ms")
        .pool("retry_budget: { ratio: 0.5, min_per_second: 0 }")
        .start();
    let mut client = proxy.client();
    for _ in 0..20 {
        assert_eq!(client.get("/good").status(), 200);
    }
    status.store(503, SeqCst);
    for _ in 0..40 {
        assert_eq!(client.get("/bad").status(), 503);
    }
    // Half of 20 saved up, and half of 40 that came since; less at most what is not whole.
    let retries = requests(&origins) - 60;
    assert!((28..=30).contains(&retries), "{retries}");
    assert_eq!(refused(&proxy, "b"), (40 - retries) as f64);
    assert_at_rest(&proxy);
}

#[test]
fn no_more_than_a_hundred_are_saved_up() {
    let status = Arc::new(AtomicU16::new(200));
    let origins: [Origin; 2] = adjustable(&status);
    let proxy = with_retry(&origins.each_ref(), "max_attempts: 3, backoff: 1ms")
        .pool("retry_budget: { ratio: 1.0, min_per_second: 0 }")
        .top("access_log: { enabled: false }")
        .start();
    let mut client = proxy.client();
    for _ in 0..300 {
        assert_eq!(client.get("/good").status(), 200);
    }
    status.store(503, SeqCst);
    for _ in 0..150 {
        assert_eq!(client.get("/bad").status(), 503);
    }
    // Each brings one and takes two as long as there are any.
    let retries = requests(&origins) - 450;
    assert!((248..=250).contains(&retries), "{retries}");
    assert_at_rest(&proxy);
}

#[test]
fn routes_without_retry_and_other_pools_save_nothing_up() {
    let status = Arc::new(AtomicU16::new(200));
    let [a, b, c, d] = adjustable(&status);
    let budget = "retry_budget: { ratio: 0.5, min_per_second: 0 }";
    let retry = "middleware: [{ retry: { max_attempts: 2, backoff: 1ms } }]";
    let pool = |name: &str, origins: [&Origin; 2]| {
        let [a, b] = origins.map(Origin::url);
        format!(
            "- {{ name: {name}, {NEVER_OPENS}, {budget}, \
             upstreams: [{{ url: \"{a}\" }}, {{ url: \"{b}\" }}] }}\n"
        )
    };
    let proxy = start(&format!(
        "listeners:\n- {{ name: web, bind: \"127.0.0.1:0\" }}\nupstream_pools:\n{}{}\
         routes:\n- {{ name: plain, pool: b }}\n\
         - {{ name: again, path_prefix: /again, pool: b, {retry} }}\n\
         - {{ name: other, path_prefix: /other, pool: other, {retry} }}\n",
        pool("b", [&a, &b]),
        pool("other", [&c, &d])
    ));
    let mut client = proxy.client();
    for _ in 0..40 {
        assert_eq!(client.get("/plain").status(), 200);
    }
    for _ in 0..10 {
        assert_eq!(client.get("/other").status(), 200);
    }
    status.store(503, SeqCst);
    // A half is not enough.
    assert_eq!(client.get("/again").status(), 503);
    assert_eq!(a.requests() + b.requests(), 41);
    assert_eq!((refused(&proxy, "b"), refused(&proxy, "other")), (1.0, 0.0));
    // The other pool has five and its half.
    for _ in 0..5 {
        assert_eq!(client.get("/other").status(), 503);
    }
    assert_eq!(c.requests() + d.requests(), 10 + 10);
    assert_eq!(refused(&proxy, "other"), 0.0);
    assert_at_rest(&proxy);
}

/// R10: a thousand failures, from several clients at once.
#[test]
fn when_all_fails_a_fifth_is_added_and_no_more() {
    const CLIENTS: usize = 4;
    const EACH: usize = 250;
    let origins: [Origin; 3] = in_turn(|call, _| say(call, 503, "", "busy"));
    let proxy = with_retry(&origins.each_ref(), "max_attempts: 3, backoff: 1ms")
        .pool("retry_budget: { ratio: 0.2, min_per_second: 0 }")
        .top("access_log: { enabled: false }")
        .start();
    thread::scope(|scope| {
        for who in 0..CLIENTS {
            let proxy = &proxy;
            scope.spawn(move || {
                let mut client = proxy.client();
                for n in 0..EACH {
                    assert_eq!(client.get(&format!("/{who}/{n}")).text(), "busy");
                }
            });
        }
    });
    let first = CLIENTS * EACH;
    let retries = requests(&origins) - first;
    assert!((first / 5 - 4..=first / 5).contains(&retries), "{retries} for {first}");
    assert_at_rest(&proxy);
}

/// Case `retry-storm-budget`, shorter.
#[test]
fn retry_storm_budget() {
    const SECONDS: f64 = 3.0;
    const CLIENTS: u32 = 8;
    /// Of each client, so that 200 come in a second.
    const PERIOD: Duration = Duration::from_millis(40);
    let status = Arc::new(AtomicU16::new(503));
    let origins: [Origin; 3] = adjustable(&status);
    let proxy = with_retry(&origins.each_ref(), "max_attempts: 3, backoff: 2ms")
        .pool("retry_budget: { ratio: 0.2, min_per_second: 10 }")
        .top("access_log: { enabled: false }")
        .start();
    let began = Instant::now();
    let took: Vec<Duration> = thread::scope(|scope| {
        let proxy = &proxy;
        let clients: Vec<_> = (0..CLIENTS)
            .map(|who| scope.spawn(move || storm(proxy, began, who, PERIOD, SECONDS)))
            .collect();
        clients.into_iter().flat_map(|client| client.join().expect("answers")).collect()
    });
    let first = took.len() as f64;
    let lasted = began.elapsed().as_secs_f64();
    let sent = requests(&origins) as f64;
    let most = first * 1.2 + (lasted + 1.0) * 10.0;
    assert!(sent <= most * 1.02, "{sent} for {first} in {lasted} s, not {most}");
    assert!(sent >= first * 1.15, "{sent} for {first}: there are retries");
    assert!(refused(&proxy, "b") > 0.0);
    let mut took = took;
    took.sort();
    let (half, last) = (took[took.len() / 2], took[took.len() - 1]);
    assert!(half < Duration::from_millis(100), "{half:?}");
    assert!(last < Duration::from_secs(2), "{last:?}");
    status.store(200, SeqCst);
    let mut client = proxy.client();
    for _ in 0..50 {
        assert_eq!(client.get("/after").status(), 200);
    }
    assert_at_rest(&proxy);
}

/// Asks at a constant rate, whatever the answers; how long each took.
fn storm(proxy: &Proxy, began: Instant, who: u32, period: Duration, seconds: f64) -> Vec<Duration> {
    let mut client = proxy.client();
    let mut took = Vec::new();
    for n in 0.. {
        let due = began + period * n + period * who / 8;
        let_pass(due.saturating_duration_since(Instant::now()));
        let asked = Instant::now();
        if asked.duration_since(began).as_secs_f64() > seconds {
            break;
        }
        let answer = client.get(&format!("/{who}/{n}"));
        assert_eq!((answer.status(), answer.get("proxy-status")), (503, None));
        assert_eq!(answer.text(), format!("/{who}/{n}"));
        took.push(asked.elapsed());
    }
    took
}
