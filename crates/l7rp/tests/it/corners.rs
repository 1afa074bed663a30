//! Corners that were once wrong, found by a review.

use l7rp_testkit::{Origin, SOON, Signal, Then, eventually, reply};

use crate::setup::{assert_counts, get, in_flight, over, start};

/// Accepting on the way out stops at tokio's budget of 128 operations, not at an empty queue:
/// what waits behind is reset.
#[test]
fn a_long_queue_is_served_to_its_end_on_the_way_out() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = over(&[&origin]).one_worker().start();
    proxy.signal(Signal::STOP);
    let mut clients: Vec<_> = (0..300).map(|_| proxy.client()).collect();
    for client in &mut clients {
        client.send(get("a.test", "/", ""));
    }
    proxy.signal(Signal::TERM);
    proxy.signal(Signal::CONT);
    let answered = clients
        .iter_mut()
        .filter_map(|client| client.try_response().ok())
        .filter(|answer| answer.status() == 200)
        .count();
    assert_eq!(answered, clients.len());
    assert_eq!(proxy.wait_exit(SOON), 0);
}

/// A closed tab sends FIN, no reset, and a quiet stream of events has no deadline: connection,
/// descriptors and places stay for ever.
#[test]
fn a_client_that_leaves_a_quiet_stream_of_events_is_noticed() {
    let origin = Origin::start(|call: &mut l7rp_testkit::Call<'_>| {
        call.send("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n");
        call.until_gone();
        Then::Close
    });
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    assert_eq!(client.head().status(), 200);
    drop(client);
    eventually(SOON, || in_flight(&proxy) == 0.0);
}

/// The client waits for 100 (Continue), which only the upstream can give: it is the upstream
/// that is late, and it has `response_header_timeout`. But no server has to give it, so that it
/// is not held against this one either.
#[test]
fn a_client_that_waits_for_100_waits_for_the_upstream() {
    let origin = Origin::start(reply::hang);
    let proxy = over(&[&origin])
        .listener("timeouts: { read: 2s }")
        .pool("response_header_timeout: 300ms")
        .start();
    let answer = proxy.client().ask(
        "POST / HTTP/1.1\r\nHost: a.test\r\nExpect: 100-continue\r\nContent-Length: 3\r\n\r\n",
    );
    assert_eq!(answer.status(), 504, "{answer:?}");
    assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "cancel")], 1.0);
}

/// A route's total time that a client uses up by not sending is not the upstream's failure.
#[test]
fn a_slow_client_that_uses_up_the_total_time_is_not_the_upstreams_failure() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).route("timeouts: { total: 300ms }").start();
    let answer =
        proxy.client().ask("POST / HTTP/1.1\r\nHost: a.test\r\nContent-Length: 9\r\n\r\nabc");
    assert!(answer.status() >= 400);
    assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "cancel")], 1.0);
}

/// `headers` is served on routes with a pool, and passed over in silence on the others.
#[test]
fn fields_are_added_to_answers_of_the_proxy_itself_too() {
    for action in [
        "respond: { status: 200, body: hi, content_type: text/plain }",
        "redirect: { scheme: https, code: 308 }",
    ] {
        let proxy = start(&format!(
            "listeners: [{{ name: web, bind: \"127.0.0.1:0\" }}]\n\
             routes:\n- {{ name: r, {action}, middleware: [{{ headers: {{ add_response: {{ X-A: '1' }} }} }}] }}\n"
        ));
        assert_eq!(proxy.get("/").get("x-a"), Some("1"), "{action}");
    }
}

/// What a route sets on a response replaces our own `X-Request-ID`, as it does on requests.
#[test]
fn a_route_may_set_or_remove_the_request_id_of_a_response() {
    let origin = Origin::start(reply::name("x"));
    for (keys, expected) in [
        ("add_response: { X-Request-ID: mine }", vec!["mine"]),
        ("remove_response: [X-Request-ID]", vec![]),
    ] {
        let proxy =
            over(&[&origin]).route(&format!("middleware: [{{ headers: {{ {keys} }} }}]")).start();
        assert_eq!(proxy.get("/").all("x-request-id"), expected, "{keys}");
    }
}

/// Clients' addresses are made canonical before they are compared; the networks are not.
#[test]
fn networks_of_mapped_addresses_keep_their_clients_out() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).route("deny: [\"::ffff:127.0.0.0/104\"]").start();
    assert_eq!(proxy.get("/").status(), 403);
}

/// `*` is no path: it does not follow the host in a URL.
#[test]
fn a_redirect_of_the_whole_server_is_a_url() {
    let proxy = start(
        "listeners: [{ name: web, bind: \"127.0.0.1:0\" }]\n\
         routes:\n- { name: r, redirect: { scheme: https, code: 308 } }\n",
    );
    let answer = proxy.client().ask("OPTIONS * HTTP/1.1\r\nHost: a.test\r\n\r\n");
    assert_ne!(answer.get("location"), Some("https://a.test*"));
}
