//! The end of the process and a new configuration, as connections of HTTP/2 see them.

use h2::Reason;
use l7rp_testkit::{Gate, Origin, SOON, Signal, eventually, own_address, reply};

use crate::http2_tools::{Conn, Raw, code, flag, get_frame, kind, request, wait, whole};
use crate::setup::{over, start};

#[test]
fn a_drain_says_so_twice_and_lets_streams_end() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let mut proxy = over(&[&origin]).start();
    let mut raw = Raw::open(&proxy, b"");
    raw.write(get_frame(1));
    eventually(SOON, || origin.requests() == 1);
    proxy.signal(Signal::TERM);
    let first = raw.find(|f| f.kind == kind::GOAWAY).expect("a first");
    assert_eq!((first.number(0), first.code()), (u32::MAX >> 1, code::NO_ERROR));
    let second = raw.find(|f| f.kind == kind::GOAWAY).expect("a second");
    assert_eq!((second.number(0), second.code()), (1, code::NO_ERROR));
    gate.open();
    let data = raw.find(|f| f.kind == kind::DATA).expect("a body");
    assert_eq!(data.payload, b"late");
    assert!(data.flags & flag::END_STREAM != 0 || raw.end_of(1).ends());
    assert!(raw.find(|_| false).is_none());
    assert_eq!(proxy.wait_exit(SOON), 0);
    proxy.wait_for_event("shutdown_complete", |e| e["cut"] == 0, SOON);
}

#[test]
fn an_idle_connection_is_closed_by_a_drain() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = over(&[&origin]).start();
    let conn = Conn::open(&proxy);
    assert_eq!(conn.get("/").text(), "x");
    proxy.signal(Signal::TERM);
    assert!(conn.ended().is_ok());
    assert_eq!(proxy.wait_exit(SOON), 0);
}

#[test]
fn a_reload_does_not_disturb_open_streams() {
    let gate = Gate::default();
    let old = Origin::start(reply::held("old", &gate));
    let new = Origin::start(reply::name("new"));
    let own = own_address();
    let yaml = |origin: &Origin| {
        let yaml = over(&[origin]).yaml();
        yaml.replace("127.0.0.1:0", &own.to_string())
    };
    let proxy = start(&yaml(&old));
    let conn = Conn::open(&proxy);
    let (response, mut stream) = conn.begin(request("POST", "/"), false);
    stream.send_data("a".into(), false).expect("it is taken");
    eventually(SOON, || old.requests() == 1);
    proxy.reload(&yaml(&new));
    stream.send_data("b".into(), true).expect("it is taken");
    gate.open();
    assert_eq!(wait(whole(response)).expect("an answer").text(), "old");
    assert_eq!(old.last().text(), "ab");
    assert_eq!(Conn::open(&proxy).get("/").text(), "new");
    // The connection that was there goes on, or is closed in order.
    match conn.ask(request("GET", "/again")) {
        Ok(got) => assert_eq!(got.text(), "new"),
        Err(error) => assert_eq!(error.reason(), Some(Reason::NO_ERROR), "{error}"),
    }
    assert!(proxy.events("request_completed").iter().all(|line| line["reason"].is_null()));
}
