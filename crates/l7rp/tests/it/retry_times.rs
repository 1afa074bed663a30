//! When a route with `retry` tries again: after a back-off, within the route's time, while the
//! client is there, and not while we are going.

use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Gate, Origin, SOON, Signal, eventually, let_pass, reply};

use crate::setup::{get, in_flight, over, post};
use crate::tries::{
    Moments, assert_at_rest, attempts, in_turn, requests, retrying, say, says, with_retry,
};

#[test]
fn each_back_off_is_twice_as_long() {
    let came = Moments::default();
    let moments = came.clone();
    let origins: [Origin; 2] = in_turn(move |call, _| {
        moments.now();
        say(call, 503, "", "busy")
    });
    let keys = "max_attempts: 4, backoff: 100ms";
    let proxy = with_retry(&origins.each_ref(), keys).start();
    let began = Instant::now();
    assert_eq!(proxy.get("/").status(), 503);
    // 100, 200 and 400 ms, of which at least a half is waited.
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    let came = came.all();
    assert_eq!(came.len(), 4);
    for (pair, least) in came.windows(2).zip([50, 100, 200]) {
        let gap = pair[1] - pair[0];
        assert!(gap >= Duration::from_millis(least), "{gap:?} is less than {least} ms");
    }
    assert_at_rest(&proxy);
}

#[test]
fn back_offs_differ() {
    const MANY: usize = 24;
    let origins: [Origin; 2] = in_turn(|call, nth| {
        let status = if nth == 0 { 503 } else { 200 };
        say(call, status, "", "said")
    });
    let keys = "max_attempts: 2, backoff: 400ms";
    let proxy = with_retry(&origins.each_ref(), keys).pool(crate::tries::PLENTY).start();
    let took: Vec<Duration> = thread::scope(|scope| {
        let proxy = &proxy;
        let clients: Vec<_> = (0..MANY)
            .map(|n| {
                scope.spawn(move || {
                    let mut client = proxy.client();
                    let began = Instant::now();
                    assert_eq!(client.get(&format!("/{n}")).status(), 200);
                    began.elapsed()
                })
            })
            .collect();
        clients.into_iter().map(|client| client.join().expect("an answer")).collect()
    });
    let millis = Duration::from_millis;
    assert!(took.iter().all(|t| *t >= millis(200)), "{took:?}");
    // They would all do so without jitter, or none would.
    assert!(took.iter().any(|t| *t < millis(345)), "{took:?}");
    assert!(took.iter().any(|t| *t > millis(255)), "{took:?}");
    assert_at_rest(&proxy);
}

#[test]
fn what_was_not_sent_moves_on_at_once() {
    let good = Origin::start(reply::echo);
    let bad = Origin::refusing();
    let proxy = with_retry(&[&bad, &good], "backoff: 20s").start();
    let began = Instant::now();
    for n in 0..4 {
        assert_eq!(proxy.get(&format!("/get/{n}")).status(), 200);
        assert_eq!(proxy.client().ask(post(&format!("/post/{n}"), "x")).status(), 200);
    }
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    let tries: u64 = (0..4).map(|n| attempts(&proxy, &format!("/get/{n}"))).sum();
    let of_posts: u64 = (0..4).map(|n| attempts(&proxy, &format!("/post/{n}"))).sum();
    assert!(tries + of_posts > 8, "some met the bad one first");
    let again = proxy.metrics().sum("proxy_retry_attempts_total", &[("outcome", "success")]);
    assert_eq!(again, (tries + of_posts - 8) as f64);
    assert_at_rest(&proxy);
}

#[test]
fn a_back_off_that_the_routes_time_does_not_allow_is_not_begun() {
    let origins: [Origin; 2] = in_turn(|call, _| say(call, 503, "", "busy"));
    let proxy = with_retry(&origins.each_ref(), "backoff: 10s").route("timeouts: { total: 4s }");
    let proxy = proxy.start();
    let began = Instant::now();
    let answer = proxy.get("/");
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    assert_eq!((answer.status(), answer.text().as_str()), (503, "busy"));
    assert_eq!((requests(&origins), attempts(&proxy, "/")), (1, 1));
    assert_at_rest(&proxy);
}

#[test]
fn no_try_lasts_longer_than_the_route_allows() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        0 => say(call, 503, "", "busy"),
        _ => reply::hang(call),
    });
    let total = Duration::from_millis(400);
    let proxy = retrying(&origins.each_ref(), "").route("timeouts: { total: 400ms }").start();
    let began = Instant::now();
    let answer = proxy.get("/");
    let took = began.elapsed();
    assert!(took >= total && took < total + Duration::from_secs(2), "{took:?}");
    // What an upstream really said is worth more than that time was over.
    assert_eq!((answer.status(), answer.text().as_str()), (503, "busy"));
    assert_eq!((requests(&origins), attempts(&proxy, "/")), (2, 2));
    eventually(SOON, || origins.iter().all(|origin| origin.open() <= 1));
    assert_at_rest(&proxy);
}

#[test]
fn slow_failures_use_up_the_routes_time() {
    let origins: [Origin; 2] = in_turn(|call, _| {
        let_pass(Duration::from_millis(300));
        say(call, 503, "", "busy")
    });
    // Room for two of them.
    let proxy = retrying(&origins.each_ref(), "max_attempts: 9")
        .route("timeouts: { total: 750ms }")
        .start();
    let began = Instant::now();
    let answer = proxy.get("/");
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert_eq!((answer.status(), answer.text().as_str()), (503, "busy"));
    assert!(requests(&origins) <= 3, "{}", requests(&origins));
    assert_at_rest(&proxy);
}

#[test]
fn nothing_is_tried_again_while_draining() {
    let gate = Gate::default();
    let open = gate.clone();
    let origins: [Origin; 2] = in_turn(move |call, _| {
        open.pass();
        say(call, 503, "", "busy")
    });
    let mut proxy = retrying(&origins.each_ref(), "").start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || requests(&origins) == 1);
    proxy.signal(Signal::TERM);
    // It drains once it does not listen any more.
    let address = proxy.address();
    eventually(SOON, || TcpStream::connect(address).is_err());
    gate.open();
    let answer = client.response();
    assert_eq!((answer.status(), answer.text().as_str()), (503, "busy"));
    assert_eq!((requests(&origins), attempts(&proxy, "/")), (1, 1));
    assert_eq!(proxy.wait_exit(SOON), 0);
}

#[test]
fn a_back_off_in_which_draining_begins_is_the_end() {
    let origins: [Origin; 2] = in_turn(|call, _| say(call, 503, "", "busy"));
    let mut proxy = with_retry(&origins.each_ref(), "backoff: 1s").start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || requests(&origins) == 1);
    proxy.signal(Signal::TERM);
    let answer = client.response();
    assert_eq!((answer.status(), answer.text().as_str()), (503, "busy"));
    assert_eq!((requests(&origins), attempts(&proxy, "/")), (1, 1));
    assert_eq!(proxy.wait_exit(SOON), 0);
}

#[test]
fn a_client_that_leaves_during_a_back_off_ends_it() {
    let origins: [Origin; 2] = in_turn(|call, _| say(call, 503, "", "busy"));
    let proxy = with_retry(&origins.each_ref(), "backoff: 1400ms").start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || requests(&origins) == 1);
    let left = Instant::now();
    client.reset();
    let line = proxy.logged_path("/");
    // Before the shortest back-off was over.
    assert!(left.elapsed() < Duration::from_millis(650), "{:?}", left.elapsed());
    assert_eq!((&line["status"], &line["reason"]), (&499.into(), &"client_gone".into()));
    assert_eq!(in_flight(&proxy), 0.0);
    let_pass(Duration::from_millis(1500));
    assert_eq!(requests(&origins), 1, "and nothing comes of it later");
    assert_at_rest(&proxy);
}

#[test]
fn a_client_that_leaves_during_a_later_try_ends_it() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        0 => say(call, 503, "", "busy"),
        _ => reply::hang(call),
    });
    let proxy = retrying(&origins.each_ref(), "max_attempts: 5").start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || requests(&origins) == 2);
    client.reset();
    let line = proxy.logged_path("/");
    assert_eq!((&line["status"], &line["attempts"]), (&499.into(), &2.into()));
    assert_at_rest(&proxy);
    assert_eq!(requests(&origins), 2);
    let cancelled = proxy.metrics().sum("proxy_upstream_requests_total", &[("status", "cancel")]);
    assert_eq!(cancelled, 1.0);
}

/// Case `retry-dead-hash-target`: an upstream that dies and comes back, and those who are tied
/// to it.
#[test]
fn retry_dead_hash_target() {
    const SESSIONS: usize = 60;
    // An address that no connection of another test takes in between.
    let [.., p2, p1, p0] = std::process::id().to_be_bytes();
    let dying = ([127, 64 | p2, p1, p0], 9002).into();
    let [a, c] = ["a", "c"].map(|name| Origin::start(reply::name(name)));
    let b = Origin::start_at(dying, reply::name("b"));
    let proxy = over(&[&a, &b, &c])
        .pool("selector: { algorithm: consistent-hash-bounded, hash_key: \"cookie:sid\" }")
        .pool(crate::tries::NEVER_OPENS)
        .route("middleware: [{ retry: { max_attempts: 3, backoff: 1ms } }]")
        .start();
    let ask = |round: &str| -> Vec<String> {
        let mut client = proxy.client();
        (0..SESSIONS)
            .map(|n| {
                let request =
                    get("a.test", &format!("/{round}/{n}"), &format!("Cookie: sid=s{n}\r\n"));
                let answer = client.ask(request);
                assert_eq!(answer.status(), 200, "{round}");
                answer.text()
            })
            .collect()
    };
    let before = ask("before");
    let tied = before.iter().filter(|name| *name == "b").count();
    assert!((6..=40).contains(&tied), "{tied} of {SESSIONS}");
    drop(b);
    for round in ["dead", "still"] {
        for (was, is) in before.iter().zip(ask(round)) {
            assert!(is == *was || (was == "b" && is != "b"), "{was} became {is}");
        }
    }
    // The silent repeat of a stale connection, if there was one, is none of them.
    for n in 0..SESSIONS {
        assert!(attempts(&proxy, &format!("/dead/{n}")) <= 2);
        assert!(attempts(&proxy, &format!("/still/{n}")) <= 2);
    }
    let b = Origin::start_at(dying, reply::name("b"));
    let after = ask("after");
    let back = before.iter().zip(&after).filter(|(was, is)| *was == "b" && *is == "b").count();
    assert!(back * 100 >= tied * 95, "{back} of {tied} are back");
    assert!(b.requests() >= back);
    assert_at_rest(&proxy);
}

#[test]
fn whoever_is_not_there_is_not_asked_twice() {
    // R7 and U16: of many, all but one are dead.
    let dead: Vec<_> = (0..7).map(|_| Origin::refusing()).collect();
    let good = Origin::start(says(200, "good"));
    let mut all: Vec<_> = dead.iter().collect();
    all.push(&good);
    let proxy = with_retry(&all, "max_attempts: 3, backoff: 10s").start();
    let began = Instant::now();
    for n in 0..8 {
        assert_eq!(proxy.get(&format!("/{n}")).text(), "good");
        assert!(attempts(&proxy, &format!("/{n}")) <= 8);
    }
    assert!(began.elapsed() < Duration::from_secs(5));
    assert_at_rest(&proxy);
}
