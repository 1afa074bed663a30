//! A panic in one exchange is a failure of it alone. Nothing that comes from outside can cause
//! one, so these tests have points in the code where a request can ask for it.

use std::panic::{set_hook, take_hook};
use std::sync::Arc;
use std::time::Duration;

use l7rp_core::upstream::breaker::State;
use l7rp_testkit::{Client, Message, Origin, SOON, Then, eventually, let_pass};

use super::Exchange;
use crate::config::{Files, Source, parse};
use crate::lifecycle::count_panics;
use crate::observe::event::{Events, Level};
use crate::observe::log::Log;
use crate::orders::Desk;
use crate::running::{self, Running};

/// Panics if the request asks for it here.
pub(super) fn point(x: &Exchange<'_>, place: &str) {
    let (buf, head) = (x.incoming.buf, x.incoming.head);
    let asks = head.fields.iter().any(|f| {
        f.name.of(buf) == b"X-Panic" && !place.is_empty() && f.value.of(buf) == place.as_bytes()
    });
    assert!(!asks, "as the request wants");
}

/// A proxy in this process in front of `origin`, whose breaker opens at the first failure.
fn start(origin: &Origin) -> Running {
    let text = format!(
        "listeners: [{{ name: web, bind: \"127.0.0.1:0\", max_in_flight: 4 }}]\n\
         upstream_pools:\n- name: b\n  upstreams: [{{ url: \"{}\", max_in_flight: 1 }}]\n  \
         circuit_breaker: {{ consecutive_failures: 1, open_min: 10ms, half_open_probes: 1 }}\n  \
         max_in_flight: 1\n\
         routes: [{{ name: r, pool: b }}]\nadmin: {{ bind: \"\" }}\nworkers: 1\n\
         limits: {{ max_in_flight: 1 }}\n",
        origin.url()
    );
    let source = Source { name: "test".into(), text };
    let loaded = parse(&source, "".as_ref(), Files::Ignore).unwrap();
    let events = Events::new(Log::start(std::io::sink()).unwrap(), Level::Error);
    running::start(loaded.plan, &Arc::new(events), 1024, &mut Vec::new(), None, Desk::default())
        .unwrap()
}

fn origin() -> Origin {
    Origin::start(|call| {
        let fails = call.request.get("x-fail").is_some();
        let status = if fails { "500 No" } else { "200 OK" };
        call.send(format!("HTTP/1.1 {status}\r\nContent-Length: 400000\r\n\r\n"));
        call.send([b'x'; 1000]);
        // So that the body is on its way when the rest of it comes.
        let_pass(Duration::from_millis(50));
        for _ in 1..400 {
            call.send([b'x'; 1000]);
        }
        Then::Next
    })
}

fn client(running: &Running) -> Client {
    Client::connect(running.listeners().next().unwrap().1.parse().unwrap())
}

fn ask(running: &Running, lines: &str) -> std::io::Result<Message> {
    // A client has its answer a moment before the places are given back.
    all_is_back(running);
    let mut client = client(running);
    client.send(format!("GET / HTTP/1.1\r\nHost: a.test\r\n{lines}\r\n"));
    client.try_response()
}

/// Waits until nothing is held any more: each limit is 1, so the next request shows it.
fn all_is_back(running: &Running) {
    let pool = &running.process().snapshot().pools[0];
    eventually(SOON, || {
        pool.upstreams[0].seat.in_flight() == 0
            && pool.lineage.slots.used() == 0
            && running.process().slots.used() == 0
    });
}

#[test]
fn a_panic_is_the_failure_of_its_exchange_alone() {
    let origin = origin();
    let running = start(&origin);
    let usual = take_hook();
    count_panics(running.process());
    let counting = take_hook();
    // Other tests run meanwhile, and theirs are to be told.
    set_hook(Box::new(move |info| {
        counting(info);
        usual(info);
    }));
    let breaker = || running.process().snapshot().pools[0].upstreams[0].breaker.state();

    for place in ["before dispatch", "in a try"] {
        let answer = ask(&running, &format!("X-Panic: {place}\r\n")).unwrap();
        assert_eq!(answer.status(), 500, "{place}");
        let status = answer.get("proxy-status").unwrap();
        assert!(status.contains("internal_error"), "{place}: {status}");
        assert_eq!(answer.get("connection"), Some("close"), "{place}");
        all_is_back(&running);
        assert_eq!(breaker(), State::Closed, "{place}");
        assert_eq!(ask(&running, "").unwrap().status(), 200, "{place}");
    }

    let cut = ask(&running, "X-Panic: in the body\r\n");
    assert!(cut.is_err(), "what was committed cannot look whole");
    all_is_back(&running);
    assert_eq!(ask(&running, "").unwrap().body.len(), 400_000);

    // A probe that ends so gives its slot back and says nothing.
    assert_eq!(ask(&running, "X-Fail: 1\r\n").unwrap().status(), 500);
    for place in ["in a try", "in the body"] {
        let pool = running.process().snapshot().pools[0].clone();
        let clock = running.process().clock;
        eventually(SOON, || pool.has_eligible(clock.now()));
        let _ = ask(&running, &format!("X-Panic: {place}\r\n"));
        all_is_back(&running);
        assert_eq!(breaker(), State::HalfOpen, "{place}");
    }
    assert_eq!(ask(&running, "").unwrap().status(), 200);
    eventually(SOON, || breaker() == State::Closed);

    let panics = running.process().panics.all();
    let ours = panics.iter().filter(|(place, _)| place.contains("panics.rs:"));
    assert_eq!(ours.map(|(_, count)| count).sum::<u64>(), 5, "{panics:?}");
    drop(take_hook());
    running.stop();
}
