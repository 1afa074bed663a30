//! Upstreams learn who the client is, from us alone or from proxies that are trusted; every
//! request has one id.

use l7rp_testkit::{Message, Origin, reply};

use crate::setup::{client_from, get, over};

const FORGED: &str = "X-Forwarded-For: 192.0.2.66\r\nx-forwarded-for: 192.0.2.67\r\n\
     X-Forwarded-Proto: https\r\nX-Forwarded-Host: evil.test\r\nX-Real-IP: 192.0.2.66\r\n\
     Forwarded: for=192.0.2.66;proto=https\r\n";

fn each_once(request: &Message) {
    for name in [
        "x-forwarded-for",
        "x-forwarded-proto",
        "x-forwarded-host",
        "x-real-ip",
        "host",
        "x-request-id",
    ] {
        assert_eq!(request.all(name).len(), 1, "{name}: {request:?}");
    }
}

#[test]
fn what_an_untrusted_peer_says_is_replaced() {
    let origin = Origin::start(reply::name("x"));
    for trusted in ["[]", "[\"127.0.0.2/32\", \"10.0.0.0/8\"]"] {
        let proxy = over(&[&origin]).listener(&format!("trusted_proxies: {trusted}")).start();
        for lines in ["", FORGED, "X-Forwarded-For:\r\n"] {
            client_from(3, &proxy).ask(get("a.test:81", "/u", lines));
            let request = origin.last();
            each_once(&request);
            assert_eq!(request.get("x-forwarded-for"), Some("127.0.0.3"));
            assert_eq!(request.get("x-forwarded-proto"), Some("http"));
            assert_eq!(request.get("x-forwarded-host"), Some("a.test:81"));
            assert_eq!(request.get("x-real-ip"), Some("127.0.0.3"));
            assert_eq!(request.get("forwarded"), None);
        }
        assert_eq!(proxy.logged_path("/u")["client_ip"], "127.0.0.3");
    }
}

#[test]
fn what_a_trusted_peer_says_is_extended() {
    let origin = Origin::start(reply::name("x"));
    let proxy =
        over(&[&origin]).listener("trusted_proxies: [\"127.0.0.2/32\", \"10.0.0.0/8\"]").start();
    let mut client = client_from(2, &proxy);
    for (path, lines, list, real) in [
        ("/none", "", "127.0.0.2", "127.0.0.2"),
        ("/one", "X-Forwarded-For: 192.0.2.1\r\n", "192.0.2.1, 127.0.0.2", "192.0.2.1"),
        (
            "/two",
            "X-Forwarded-For: 192.0.2.1\r\nX-Forwarded-For: 10.1.1.1\r\n",
            "192.0.2.1, 10.1.1.1, 127.0.0.2",
            "192.0.2.1",
        ),
        (
            "/first-from-the-right",
            "X-Forwarded-For: 192.0.2.66, 192.0.2.1, 10.1.1.1\r\n",
            "192.0.2.66, 192.0.2.1, 10.1.1.1, 127.0.0.2",
            "192.0.2.1",
        ),
        (
            "/garbage",
            "X-Forwarded-For: 192.0.2.1, garbage\r\n",
            "192.0.2.1, garbage, 127.0.0.2",
            "127.0.0.2",
        ),
    ] {
        client.ask(get("a.test", path, lines));
        let request = origin.last();
        each_once(&request);
        assert_eq!(request.get("x-forwarded-for"), Some(list), "{lines}");
        assert_eq!(request.get("x-real-ip"), Some(real), "{lines}");
        assert_eq!(proxy.logged_path(path)["client_ip"], real, "{lines}");
    }
    client.ask(get(
        "a.test",
        "/rest",
        "X-Forwarded-Proto: https\r\nX-Forwarded-Host: b.test\r\nForwarded: for=192.0.2.1;proto=https\r\n",
    ));
    let request = origin.last();
    each_once(&request);
    assert_eq!(request.get("x-forwarded-proto"), Some("https"));
    assert_eq!(request.get("x-forwarded-host"), Some("b.test"));
    let forwarded = request.get("forwarded").expect("a list");
    assert_eq!(forwarded, "for=192.0.2.1;proto=https, for=127.0.0.2;proto=http");
}

#[test]
fn an_empty_list_is_extended_without_an_empty_entry() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).listener("trusted_proxies: [\"127.0.0.1/32\"]").start();
    proxy.client().ask(get("a.test", "/", "X-Forwarded-For:\r\n"));
    assert_eq!(origin.last().get("x-forwarded-for"), Some("127.0.0.1"));
}

#[test]
fn every_line_of_a_trusted_forwarded_list_is_kept() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).listener("trusted_proxies: [\"127.0.0.1/32\"]").start();
    proxy.client().ask(get(
        "a.test",
        "/",
        "Forwarded: for=192.0.2.1\r\nForwarded: for=192.0.2.2\r\n",
    ));
    let forwarded = origin.last().all("forwarded").join(", ");
    assert!(forwarded.starts_with("for=192.0.2.1, for=192.0.2.2, for=127.0.0.1"), "{forwarded}");
}

#[test]
fn a_field_that_a_route_sets_is_there_once() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin])
        .route(
            "middleware: [{ headers: { add_request: { X-Forwarded-Proto: https, X-Set: new }, \
             remove_request: [X-Gone], add_response: { X-Served: l7rp, X-Set: new }, \
             remove_response: [Server] } }]",
        )
        .start();
    let answer =
        proxy.client().ask(get("a.test", "/", "x-set: old\r\nX-SET: older\r\nx-gone: 1\r\n"));
    assert_eq!(answer.get("x-served"), Some("l7rp"));
    let request = origin.last();
    assert_eq!(request.get("x-set"), Some("new"));
    assert_eq!(request.get("x-gone"), None);
    assert_eq!(request.all("x-forwarded-proto"), ["https"]);
}

#[test]
fn a_route_changes_the_fields_of_answers() {
    let origin = Origin::start(reply::raw_kept(
        "HTTP/1.1 200 OK\r\nServer: leaky/1.0\r\nX-Set: a\r\nx-set: b\r\nContent-Length: 0\r\n\r\n",
    ));
    let proxy = over(&[&origin])
        .route(
            "middleware: [{ headers: { add_response: { X-Set: new }, remove_response: [Server] } }]",
        )
        .start();
    let answer = proxy.get("/");
    assert_eq!(answer.get("x-set"), Some("new"));
    assert_eq!(answer.get("server"), None);
}

#[test]
fn a_well_formed_request_id_is_kept_and_told_to_all() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    for (n, id) in ["abc-123", "!~", &"x".repeat(128)].into_iter().enumerate() {
        let path = format!("/{n}");
        let answer = proxy.client().ask(get("a.test", &path, &format!("X-Request-ID: {id}\r\n")));
        assert_eq!(answer.get("x-request-id"), Some(id));
        assert_eq!(origin.last().get("x-request-id"), Some(id));
        assert_eq!(proxy.logged_path(&path)["request_id"], id);
    }
}

#[test]
fn a_missing_or_odd_request_id_is_replaced() {
    let origin = Origin::start(reply::raw_kept(
        "HTTP/1.1 200 OK\r\nX-Request-ID: the-upstreams\r\nContent-Length: 0\r\n\r\n",
    ));
    let proxy = over(&[&origin]).start();
    let too_long = "x".repeat(129);
    let mut seen = std::collections::HashSet::new();
    for (n, id) in ["", "a b", &too_long, "caf\u{e9}"].into_iter().enumerate() {
        let path = format!("/{n}");
        let lines = format!("X-Request-ID: {id}\r\n");
        let answer = proxy.client().ask(get("a.test", &path, if n == 0 { "" } else { &lines }));
        let new = answer.get("x-request-id").expect("an id").to_owned();
        assert_ne!(new, id);
        assert!(!new.is_empty() && new.len() <= 128 && new.bytes().all(|b| b.is_ascii_graphic()));
        assert_eq!(origin.last().get("x-request-id"), Some(new.as_str()));
        assert_eq!(proxy.logged_path(&path)["request_id"], new.as_str());
        assert!(seen.insert(new), "each is new");
    }
}

#[test]
fn an_untrusted_peer_chooses_no_id_where_some_are_trusted() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).listener("trusted_proxies: [\"127.0.0.2/32\"]").start();
    let ask = |last| {
        let answer = client_from(last, &proxy).ask(get("a.test", "/", "X-Request-ID: mine\r\n"));
        answer.get("x-request-id").expect("an id").to_owned()
    };
    assert_eq!(ask(2), "mine");
    assert_ne!(ask(3), "mine");
}

#[test]
fn the_host_that_upstreams_see_is_chosen() {
    let origin = Origin::start(reply::name("x"));
    let authority = origin.address.to_string();
    for (mode, host) in
        [("preserve", "a.test:81"), ("upstream", authority.as_str()), ("fixed.test", "fixed.test")]
    {
        let proxy = over(&[&origin]).pool(&format!("host_header: {mode}")).start();
        proxy.client().ask(get("a.test:81", "/", ""));
        let request = origin.last();
        assert_eq!(request.get("host"), Some(host), "{mode}");
        assert_eq!(request.get("x-forwarded-host"), Some("a.test:81"));
    }
}

#[test]
fn a_route_can_keep_the_client_to_itself() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin])
        .route("middleware: [{ headers: { remove_request: [X-Forwarded-For, X-Real-IP] } }]")
        .start();
    proxy.get("/");
    let request = origin.last();
    assert_eq!(request.all("x-forwarded-for"), [""; 0]);
    assert_eq!(request.all("x-real-ip"), [""; 0]);
}
