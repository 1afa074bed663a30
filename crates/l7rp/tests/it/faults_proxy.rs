//! What this machine lacks is no upstream's fault, and passes: rows P4 and P4b of the table of
//! faults. `capacity.rs` shows what clients see of it.

use std::time::{Duration, Instant};

use l7rp_testkit::{Client, Origin, Proxy, SOON, eventually, let_pass, reply};

use crate::setup::{over, quiet};
use crate::verdict::{TOUCHY, nobody_is_blamed};

/// Leaves room for `more` descriptors and no others.
pub fn leave_room(proxy: &Proxy, more: usize) {
    let directory = format!("/proc/{}/fd", proxy.pid());
    let names = std::fs::read_dir(directory).expect("it runs").flatten();
    let used: Vec<usize> =
        names.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    let limit = (0..).filter(|n| !used.contains(n)).nth(more).expect("there are more numbers");
    proxy.limit_descriptors(limit);
}

#[test]
fn p4_no_descriptor_for_a_client() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).one_worker().pool(TOUCHY).start();
    let mut kept = proxy.client();
    assert_eq!(kept.get("/").status(), 200);
    let mut admin = Client::connect(proxy.admin());
    let readyz = "GET /readyz HTTP/1.1\r\nHost: admin\r\n\r\n";
    assert_eq!(admin.ask(readyz).status(), 204);
    leave_room(&proxy, 0);
    let mut waiting: Vec<_> = (0..5).map(|_| proxy.client()).collect();
    proxy.wait_for_event("accept_failed", |_| true, SOON);
    let (began, busy) = (Instant::now(), proxy.processor_time());
    let_pass(Duration::from_secs(1));
    let busy = proxy.processor_time().saturating_sub(busy);
    assert!(busy < began.elapsed() * 3 / 10, "{busy:?} of processor time in {:?}", began.elapsed());
    let told = proxy.events("accept_failed").len();
    assert!(told <= 4, "told {told} times");
    // Who is connected is served.
    assert_eq!(kept.get("/").status(), 200);
    assert_eq!(admin.ask(readyz).status(), 204);
    proxy.limit_descriptors(1000);
    for client in &mut waiting {
        assert_eq!(client.get("/").status(), 200);
    }
    nobody_is_blamed(&proxy);
    quiet(&proxy);
}

#[test]
fn p4_no_descriptor_for_a_client_but_for_the_admin_endpoints() {
    let proxy = over(&[&Origin::refusing()]).one_worker().start();
    leave_room(&proxy, 0);
    let _waiting = proxy.client();
    proxy.wait_for_event("accept_failed", |_| true, SOON);
    assert_eq!(proxy.ask_admin("/-/healthz").status(), 200);
    assert_eq!(proxy.metrics().sum("proxy_panics_total", &[]), 0.0);
}

#[test]
fn p4b_no_descriptor_for_an_upstream() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).one_worker().pool(TOUCHY).start();
    leave_room(&proxy, 1);
    let mut client = proxy.client();
    for _ in 0..5 {
        let answer = client.get("/short");
        assert_eq!((answer.status(), answer.get("retry-after")), (503, Some("1")));
        let status = answer.get("proxy-status").unwrap_or_default();
        assert!(status.contains("local_shortage"), "{status}");
    }
    proxy.limit_descriptors(1000);
    nobody_is_blamed(&proxy);
    assert_eq!(client.get("/").status(), 200);
    eventually(SOON, || origin.requests() == 1);
    quiet(&proxy);
}
