//! After its time an open breaker lets a bounded number of requests through, and what becomes of
//! them decides. However one of them ends, its place is free for the next.

use std::time::{Duration, Instant};

use l7rp_testkit::{
    Call, Client, Gate, Origin, Proxy, SOON, Signal, Then, eventually, let_pass, reply, within,
};

use crate::setup::{Setup, assert_counts, get, in_flight, over, quiet};
use crate::upgrade::{OFFER, is_stopped};
use crate::verdict::{
    CLOSED, HALF_OPEN, OPEN, asking, becomes, half_open, judged, refused, state, turns,
};

/// For how long it is open in these tests.
const A_WHILE: Duration = Duration::from_millis(300);

fn breaker(keys: &str) -> String {
    format!("circuit_breaker: {{ open_min: 300ms, open_max: 300ms, {keys} }}")
}

/// One failure opens it, one good answer closes it.
fn nervous() -> String {
    breaker("consecutive_failures: 1, half_open_probes: 1")
}

/// Does what it is told, `/held` and `/held500` once the gate is open.
fn told_or_held(gate: &Gate) -> Origin {
    let gate = gate.clone();
    Origin::start(move |call| {
        if call.request.target().starts_with("/held") {
            gate.pass();
        }
        if call.request.target() == "/held500" {
            return reply::raw_kept("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")(call);
        }
        reply::told(call)
    })
}

/// Clients whose requests arrive all at the same moment.
fn crowd(proxy: &Proxy, of: usize) -> Vec<Client> {
    let mut clients: Vec<_> = (0..of).map(|_| proxy.client()).collect();
    proxy.signal(Signal::STOP);
    eventually(SOON, || is_stopped(proxy));
    for client in &mut clients {
        client.send(get("a.test", "/held", ""));
    }
    proxy.signal(Signal::CONT);
    clients
}

#[test]
fn of_a_hundred_at_once_five_are_let_through() {
    let gate = Gate::default();
    let origin = told_or_held(&gate);
    let pool = breaker("consecutive_failures: 1, half_open_probes: 5");
    let proxy = over(&[&origin]).pool(&pool).start();
    half_open(&proxy, &origin, A_WHILE);
    let before = origin.requests();
    let of_503 = [("status", "503")];
    let early = proxy.metrics().sum("proxy_requests_total", &of_503);
    let mut clients = crowd(&proxy, 100);
    // The others do not wait for those.
    assert_counts(&proxy, "proxy_requests_total", &of_503, early + 95.0);
    eventually(SOON, || origin.requests() == before + 5);
    assert_eq!(state(&proxy, &origin), HALF_OPEN);
    gate.open();
    let answers: Vec<_> = clients.iter_mut().map(Client::response).collect();
    let (good, others): (Vec<_>, Vec<_>) = answers.iter().partition(|a| a.status() == 200);
    assert_eq!((good.len(), others.len()), (5, 95));
    for answer in others {
        refused(&proxy, answer);
    }
    assert_eq!(origin.requests(), before + 5);
    becomes(&proxy, &origin, CLOSED);
    let turned = ["open", "half_open", "closed"].map(|to| turns(&proxy, &origin, to));
    assert_eq!(turned, [1.0; 3]);
    quiet(&proxy);
}

#[test]
fn those_that_are_not_let_through_go_elsewhere() {
    let gate = Gate::default();
    let shaky = told_or_held(&gate);
    let sound = Origin::start(reply::name("sound"));
    let pool = breaker("consecutive_failures: 1, half_open_probes: 2");
    let proxy = over(&[&shaky, &sound])
        .pool(&format!("selector: {{ algorithm: round-robin }}, {pool}"))
        .start();
    half_open(&proxy, &shaky, A_WHILE);
    let before = (shaky.requests(), sound.requests());
    let mut clients = crowd(&proxy, 40);
    eventually(SOON, || sound.requests() == before.1 + 38 && shaky.requests() == before.0 + 2);
    gate.open();
    for client in &mut clients {
        assert_eq!(client.response().status(), 200);
    }
    assert_eq!(shaky.requests(), before.0 + 2);
    becomes(&proxy, &shaky, CLOSED);
    assert_counts(&proxy, "proxy_requests_total", &[("status", "503")], 0.0);
    quiet(&proxy);
}

#[test]
fn it_takes_as_many_good_answers_as_it_lets_through() {
    let origin = Origin::start(reply::told);
    let pool = breaker("consecutive_failures: 1, half_open_probes: 3");
    let proxy = over(&[&origin]).pool(&pool).start();
    half_open(&proxy, &origin, A_WHILE);
    for path in ["/", "/404"] {
        proxy.get(path);
        judged(&proxy, origin.requests());
        assert_eq!(state(&proxy, &origin), HALF_OPEN);
    }
    // One that fails opens it again, whatever came before.
    assert_eq!(proxy.get("/500").status(), 500);
    becomes(&proxy, &origin, OPEN);
    let_pass(A_WHILE);
    for n in 0..3 {
        assert_ne!(state(&proxy, &origin), CLOSED, "after {n}");
        assert_eq!(proxy.get("/").status(), 200);
        judged(&proxy, origin.requests());
    }
    becomes(&proxy, &origin, CLOSED);
    assert_eq!(turns(&proxy, &origin, "open"), 2.0);
}

/// What the end of a trial means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Means {
    Good,
    Bad,
    /// Nothing: the upstream is not judged by it.
    Nothing,
}

/// With one place for trials: a trial that ends so is judged as it should be, and the place is
/// free for the next. What the trial gives is kept until then.
#[track_caller]
fn after<T>(setup: fn(Setup) -> Setup, means: Means, trial: impl FnOnce(&Proxy, &Origin) -> T) {
    let origin = Origin::start(reply::told);
    let pool = breaker("consecutive_failures: 3, half_open_probes: 1");
    let proxy =
        setup(over(&[&origin])).pool(&format!("response_header_timeout: 300ms, {pool}")).start();
    half_open(&proxy, &origin, A_WHILE);
    let kept = trial(&proxy, &origin);
    let began = Instant::now();
    match means {
        Means::Good => becomes(&proxy, &origin, CLOSED),
        Means::Bad => eventually(SOON, || turns(&proxy, &origin, "open") == 2.0),
        Means::Nothing => {
            eventually(SOON, || in_flight(&proxy) == 0.0);
            assert_eq!(state(&proxy, &origin), HALF_OPEN);
        }
    }
    if means == Means::Bad {
        let served = within(SOON, || (proxy.get("/").status() == 200).then_some(()));
        assert!(served.is_some(), "it stays open");
    } else {
        assert_eq!(proxy.get("/").status(), 200, "the place is free at once");
    }
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    becomes(&proxy, &origin, CLOSED);
    let opened = if means == Means::Bad { 2.0 } else { 1.0 };
    assert_eq!((turns(&proxy, &origin, "open"), turns(&proxy, &origin, "closed")), (opened, 1.0));
    drop(kept);
    quiet(&proxy);
}

fn as_is(setup: Setup) -> Setup {
    setup
}

#[test]
fn an_answer_that_the_client_is_to_blame_for_is_good() {
    after(as_is, Means::Good, |proxy, _| assert_eq!(proxy.get("/404").status(), 404));
}

#[test]
fn a_failing_status_is_bad() {
    after(as_is, Means::Bad, |proxy, _| assert_eq!(proxy.get("/503").status(), 503));
}

#[test]
fn a_client_that_is_gone_while_it_waits_is_nothing() {
    after(as_is, Means::Nothing, |proxy, origin| asking(proxy, origin, "/hang").reset());
}

#[test]
fn a_client_that_is_gone_after_an_interim_answer_is_nothing() {
    after(as_is, Means::Nothing, |proxy, origin| {
        let mut client = asking(proxy, origin, "/hint");
        assert_eq!(client.head().status(), 103);
        client.reset();
    });
}

#[test]
fn a_client_that_is_gone_in_the_middle_of_the_answer_is_nothing() {
    after(as_is, Means::Nothing, |proxy, origin| {
        let mut client = asking(proxy, origin, "/stall");
        assert_eq!(client.head().status(), 200);
        client.reset();
    });
}

#[test]
fn a_client_that_is_gone_in_the_middle_of_its_own_body_is_nothing() {
    after(as_is, Means::Nothing, |proxy, origin| {
        let before = origin.requests();
        let mut client = proxy.client();
        client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 9\r\n\r\nhalf");
        eventually(SOON, || origin.requests() > before);
        client.reset();
    });
}

#[test]
fn a_client_that_does_not_send_on_is_nothing() {
    let impatient = |setup: Setup| setup.listener("timeouts: { read: 200ms }");
    after(impatient, Means::Nothing, |proxy, _| {
        let begun = "POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 9\r\n\r\nhalf";
        assert_eq!(proxy.client().ask(begun).status(), 408);
    });
}

#[test]
fn a_client_that_does_not_read_is_nothing() {
    let impatient = |setup: Setup| setup.listener("timeouts: { write: 200ms }");
    after(impatient, Means::Nothing, |proxy, origin| {
        let mut client = asking(proxy, origin, "/big");
        client.head();
        assert_eq!(proxy.logged_path("/big")["reason"], "client_stalled");
    });
}

#[test]
fn a_switch_of_protocols_is_good_when_it_is_passed_on() {
    after(as_is, Means::Good, |proxy, _| {
        let mut client = proxy.client();
        client.send(OFFER.replace("/t", "/upgrade"));
        assert_eq!(client.head().status(), 101);
        // It stays open.
        client
    });
}

#[test]
fn an_answer_that_does_not_come_is_bad() {
    after(as_is, Means::Bad, |proxy, _| assert_eq!(proxy.get("/hang").status(), 504));
}

#[test]
fn an_answer_that_the_route_has_no_time_for_is_bad() {
    let hurried = |setup: Setup| setup.route("timeouts: { total: 200ms }");
    after(hurried, Means::Bad, |proxy, _| assert_eq!(proxy.get("/hang").status(), 504));
}

#[test]
fn an_answer_that_is_cut_is_bad() {
    after(as_is, Means::Bad, |proxy, _| {
        assert!(proxy.client().send(get("a.test", "/half", "")).try_response().is_err());
    });
}

#[test]
fn an_answer_that_stalls_is_bad() {
    after(as_is, Means::Bad, |proxy, _| {
        assert!(proxy.client().send(get("a.test", "/stall", "")).try_response().is_err());
    });
}

#[test]
fn a_reset_is_bad() {
    after(as_is, Means::Bad, |proxy, _| assert_eq!(proxy.get("/reset").status(), 502));
}

#[test]
fn an_answer_that_is_none_is_bad() {
    after(as_is, Means::Bad, |proxy, _| assert_eq!(proxy.get("/garbage").status(), 502));
}

#[test]
fn a_refused_connection_is_bad() {
    // An address where no connection of another test begins.
    let mut origin = Origin::start_at(([127, 0, 77, 1], 0).into(), reply::told);
    let address = origin.address;
    let proxy = over(&[&origin]).pool(&nervous()).start();
    half_open(&proxy, &origin, A_WHILE);
    drop(origin);
    assert_eq!(proxy.get("/").status(), 502);
    origin = Origin::start_at(address, reply::told);
    eventually(SOON, || turns(&proxy, &origin, "open") == 2.0);
    eventually(SOON, || proxy.get("/").status() == 200);
    becomes(&proxy, &origin, CLOSED);
    quiet(&proxy);
}

/// One trial, ending as `kind` says.
fn try_one(proxy: &Proxy, origin: &Origin, kind: usize) {
    match kind {
        0 => asking(proxy, origin, "/hang").reset(),
        1 => asking(proxy, origin, "/stall").reset(),
        2 => drop(asking(proxy, origin, "/hint")),
        3 => drop(proxy.client().send(get("a.test", "/half", "")).try_response()),
        4 => drop(proxy.client().send(get("a.test", "/stall", "")).try_response()),
        n => {
            let path = ["/404", "/503", "/hang", "/reset", "/garbage", "/"][n % 6];
            let status = proxy.get(path).status();
            assert!([200, 404, 502, 503, 504].contains(&status), "{path}: {status}");
        }
    }
    eventually(SOON, || in_flight(proxy) == 0.0);
}

#[test]
fn no_place_is_lost_in_any_order() {
    let origin = Origin::start(reply::told);
    let pool = "response_header_timeout: 80ms, circuit_breaker: { consecutive_failures: 1, \
                open_min: 20ms, open_max: 20ms, half_open_probes: 1 }";
    let proxy = over(&[&origin]).pool(pool).start();
    let (mut seed, mut tried) = (7_usize, 0);
    for _ in 0..40 {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // However it stands: the next request is let through before long.
        let let_in = within(Duration::from_secs(2), || {
            let before = origin.requests();
            proxy.get("/404");
            (origin.requests() > before).then_some(())
        });
        assert!(let_in.is_some(), "nobody is let through");
        drop(proxy.client().send(get("a.test", "/reset", "")).try_response());
        let_pass(Duration::from_millis(25));
        let before = origin.requests();
        if in_flight(&proxy) == 0.0 && state(&proxy, &origin) != CLOSED {
            try_one(&proxy, &origin, (seed >> 33) % 11);
            assert!(origin.requests() > before, "the only place is taken by nobody");
            tried += 1;
        }
    }
    assert!(tried > 20, "{tried}");
    eventually(Duration::from_secs(2), || proxy.get("/").status() == 200);
    becomes(&proxy, &origin, CLOSED);
    quiet(&proxy);
}

#[test]
fn a_late_failure_of_the_time_before_opens_nothing() {
    let gate = Gate::default();
    let origin = told_or_held(&gate);
    let proxy = over(&[&origin]).pool(&nervous()).start();
    let mut late = asking(&proxy, &origin, "/held500");
    half_open(&proxy, &origin, A_WHILE);
    assert_eq!(proxy.get("/").status(), 200);
    becomes(&proxy, &origin, CLOSED);
    gate.open();
    assert_eq!(late.response().status(), 500);
    judged(&proxy, origin.requests());
    assert_eq!(state(&proxy, &origin), CLOSED);
    assert_eq!(turns(&proxy, &origin, "open"), 1.0);
    assert_eq!(proxy.get("/").status(), 200);
}

#[test]
fn a_late_success_of_the_time_before_closes_nothing() {
    let (early, late) = (Gate::default(), Gate::default());
    let (of_early, of_late) = (early.clone(), late.clone());
    let origin = Origin::start(move |call| {
        match call.request.target() {
            "/early" => of_early.pass(),
            "/late" => of_late.pass(),
            _ => {}
        }
        reply::told(call)
    });
    let proxy = over(&[&origin]).pool(&nervous()).start();
    let mut first = asking(&proxy, &origin, "/early");
    half_open(&proxy, &origin, A_WHILE);
    let mut second = asking(&proxy, &origin, "/late");
    assert_eq!(state(&proxy, &origin), HALF_OPEN);
    early.open();
    assert_eq!(first.response().status(), 200);
    judged(&proxy, origin.requests() - 1);
    // Neither is it closed nor the place of the trial free.
    assert_eq!(state(&proxy, &origin), HALF_OPEN);
    refused(&proxy, &proxy.get("/"));
    late.open();
    assert_eq!(second.response().status(), 200);
    becomes(&proxy, &origin, CLOSED);
}

#[test]
fn a_late_answer_does_not_lengthen_or_shorten_the_open_time() {
    let gate = Gate::default();
    let origin = told_or_held(&gate);
    let pool = "circuit_breaker: { consecutive_failures: 1, open_min: 10s, open_max: 60s }";
    let proxy = over(&[&origin]).pool(pool).start();
    let mut late: Vec<_> =
        ["/held", "/held500"].iter().map(|path| asking(&proxy, &origin, path)).collect();
    assert_eq!(proxy.get("/500").status(), 500);
    becomes(&proxy, &origin, OPEN);
    gate.open();
    for client in &mut late {
        assert!([200, 500].contains(&client.response().status()));
    }
    judged(&proxy, origin.requests());
    assert_eq!(state(&proxy, &origin), OPEN);
    // A second failure would have doubled it, give or take a fifth.
    assert!((5..=12).contains(&refused(&proxy, &proxy.get("/"))));
    assert_eq!(turns(&proxy, &origin, "open"), 1.0);
}

/// Sends a head and half of the body, and the rest or nothing more when the gate is open.
fn in_two_parts(
    gate: &Gate,
    rest: &'static str,
) -> impl Fn(&mut Call<'_>) -> Then + Send + Sync + use<> {
    let gate = gate.clone();
    move |call| {
        if call.request.target() != "/parts" {
            return reply::told(call);
        }
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf");
        gate.pass();
        call.send(rest);
        Then::Close
    }
}

#[test]
fn an_answer_is_judged_at_its_end_and_not_at_its_head() {
    let gate = Gate::default();
    let origin = Origin::start(in_two_parts(&gate, ""));
    let proxy = over(&[&origin]).pool(&nervous()).start();
    let mut client = asking(&proxy, &origin, "/parts");
    assert_eq!(client.head().status(), 200);
    assert_eq!(client.wire.read_exact(4).expect("a half"), b"half");
    assert_eq!(state(&proxy, &origin), CLOSED);
    gate.open();
    becomes(&proxy, &origin, OPEN);
    assert!(!matches!(client.wire.read_some(1), Ok(rest) if !rest.is_empty()));
    quiet(&proxy);
}

#[test]
fn a_trial_is_good_at_its_end_and_not_at_its_head() {
    let gate = Gate::default();
    let origin = Origin::start(in_two_parts(&gate, "half"));
    let proxy = over(&[&origin]).pool(&nervous()).start();
    half_open(&proxy, &origin, A_WHILE);
    let mut client = asking(&proxy, &origin, "/parts");
    assert_eq!(client.head().status(), 200);
    assert_eq!(client.wire.read_exact(4).expect("a half"), b"half");
    assert_eq!(state(&proxy, &origin), HALF_OPEN);
    refused(&proxy, &proxy.get("/"));
    gate.open();
    assert_eq!(client.wire.read_exact(4).expect("the rest"), b"half");
    becomes(&proxy, &origin, CLOSED);
    quiet(&proxy);
}

#[test]
fn a_trial_that_flows_for_long_is_good_before_its_end() {
    let origin = Origin::start(|call| {
        if call.request.target() != "/flow" {
            return reply::told(call);
        }
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n");
        while call.send("x") {
            let_pass(Duration::from_millis(20));
        }
        Then::Close
    });
    let pool = format!("connect_timeout: 200ms, response_header_timeout: 300ms, {}", nervous());
    let proxy = over(&[&origin]).pool(&pool).start();
    half_open(&proxy, &origin, A_WHILE);
    let began = Instant::now();
    let mut client = asking(&proxy, &origin, "/flow");
    assert_eq!(client.head().status(), 200);
    becomes(&proxy, &origin, CLOSED);
    assert!(began.elapsed() >= Duration::from_millis(500), "{:?}", began.elapsed());
    assert_eq!(in_flight(&proxy), 1.0);
    client.reset();
    quiet(&proxy);
    assert_eq!(turns(&proxy, &origin, "open"), 1.0);
}

#[test]
fn a_trial_that_is_a_quiet_stream_of_events_is_good_before_its_end() {
    let origin = Origin::start(|call| {
        if call.request.target() != "/events" {
            return reply::told(call);
        }
        call.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n");
        reply::hang(call)
    });
    let pool = format!("connect_timeout: 100ms, response_header_timeout: 200ms, {}", nervous());
    let proxy = over(&[&origin]).pool(&pool).start();
    half_open(&proxy, &origin, A_WHILE);
    let mut client = asking(&proxy, &origin, "/events");
    assert_eq!(client.head().status(), 200);
    becomes(&proxy, &origin, CLOSED);
    assert_eq!(in_flight(&proxy), 1.0);
    client.reset();
    quiet(&proxy);
}

#[test]
fn a_client_that_drips_its_body_does_not_keep_the_place_for_ever() {
    let origin = Origin::start(reply::told);
    let pool = format!("connect_timeout: 100ms, response_header_timeout: 200ms, {}", nervous());
    let proxy = over(&[&origin]).pool(&pool).start();
    half_open(&proxy, &origin, A_WHILE);
    let before = origin.requests();
    let mut client = proxy.client();
    client.send("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 100000\r\n\r\n");
    eventually(SOON, || origin.requests() > before);
    refused(&proxy, &proxy.get("/"));
    let let_in = within(SOON, || {
        client.send("x");
        (proxy.get("/").status() == 200).then_some(())
    });
    assert!(let_in.is_some(), "nobody is let in while it drips");
    becomes(&proxy, &origin, CLOSED);
    assert_eq!(in_flight(&proxy), 1.0);
}
