//! As in `why`: requests that came to nothing because of what the proxy allows or has.

use l7rp_testkit::{Client, Origin, Proxy, SOON, Signal, Value, eventually, reply};
use serde_json::json;

use crate::faults_proxy::leave_room;
use crate::setup::{Setup, get, over};
use crate::why::{alone, told};

/// The line of a second request, where there is room for one.
#[track_caller]
fn full(origin: &Origin, setup: Setup) -> Value {
    let proxy = setup.start();
    let _first = hanging(&proxy, origin);
    assert_eq!(proxy.get("/second").status(), 503);
    told(&proxy, "/second", &[origin])
}

/// A client that waits for this upstream.
fn hanging(proxy: &Proxy, origin: &Origin) -> Client {
    let mut client = proxy.client();
    client.send(get("a.test", "/first", ""));
    eventually(SOON, || origin.requests() == 1);
    client
}

#[test]
fn what_is_full_says_what_it_is() {
    let one = "max_in_flight: 1";
    let origin = || Origin::start(reply::hang);
    let (a, b, c, d) = (origin(), origin(), origin(), origin());
    assert_eq!(
        full(&a, over(&[&a]).top(&format!("limits: {{ {one} }}"))),
        json!({ "status": 503, "route": "r", "reason": "capacity_process" })
    );
    assert_eq!(
        full(&b, over(&[&b]).listener(one)),
        json!({ "status": 503, "route": "r", "reason": "capacity_listener" })
    );
    assert_eq!(
        full(&c, over(&[&c]).pool(one)),
        json!({ "status": 503, "route": "r", "pool": "b", "reason": "capacity_pool" })
    );
    assert_eq!(
        full(&d, over(&[]).upstream(&d.url(), one)),
        json!({
            "status": 503, "route": "r", "pool": "b", "reason": "capacity_upstream",
            "not_tried": [{ "upstream": "A", "why": "at_limit" }],
        })
    );
}

#[test]
fn no_descriptor_is_left() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).one_worker().start();
    leave_room(&proxy, 1);
    assert_eq!(proxy.get("/").status(), 503);
    proxy.limit_descriptors(1000);
    let short = alone(503, "local_shortage", None, "final");
    assert_eq!(told(&proxy, "/", &[&origin]), short);
}

#[test]
fn the_grace_is_over() {
    let origin = Origin::start(reply::told);
    let mut proxy = over(&[&origin]).top("drain: { timeout: 300ms }").start();
    let mut waits = proxy.client();
    waits.send(get("a.test", "/hang", ""));
    let mut half = proxy.client();
    half.send(get("a.test", "/stall", ""));
    assert_eq!(half.head().status(), 200);
    eventually(SOON, || origin.requests() == 2);
    proxy.signal(Signal::TERM);
    proxy.wait_exit(SOON);
    let cut = |status, one| {
        json!({
            "status": status, "route": "r", "pool": "b", "upstream": "A", "reason": "draining",
            "tries": [one],
        })
    };
    let waited = json!({ "upstream": "A", "error": "not_ended" });
    let begun = json!({ "upstream": "A", "error": "not_ended", "conn_reused": false });
    assert_eq!(told(&proxy, "/hang", &[&origin]), cut(503, waited));
    assert_eq!(told(&proxy, "/stall", &[&origin]), cut(200, begun));
}
