//! A request takes the route that the precedence rules name, or none.

use std::fmt::Write;

use l7rp_testkit::{Client, Origin, reply};

use crate::setup::{assert_counts, assert_failed, client_from, get, over, start};

/// A file whose routes answer with their own names.
fn naming(routes: &[(&str, &str)]) -> String {
    let mut yaml = String::from("listeners:\n- { name: web, bind: \"127.0.0.1:0\" }\nroutes:\n");
    for (name, keys) in routes {
        let comma = if keys.is_empty() { "" } else { ", " };
        let respond = format!("respond: {{ status: 200, body: {name} }}");
        let _ = writeln!(yaml, "- {{ name: {name}, {respond}{comma}{keys} }}");
    }
    yaml
}

#[test]
fn precedence_is_host_then_path_then_predicates() {
    let proxy = start(&naming(&[
        ("any", ""),
        ("any-deep", "path_prefix: /v1/deep/er"),
        ("wild", "host: \"*.test\""),
        ("wild-longer", "host: \"*.a.test\""),
        (
            "exact-canary",
            "host: a.test, path_prefix: /v1, header_predicates: [{ name: X-Canary, value: \"1\" }]",
        ),
        (
            "exact-canary-2",
            "host: a.test, path_prefix: /v1, header_predicates: [{ name: x-two, value: yes }]",
        ),
        ("exact-v1", "host: a.test, path_prefix: /v1"),
        ("exact", "host: a.test"),
    ]));
    let mut client = proxy.client();
    for (host, path, lines, route) in [
        ("other.example", "/", "", "any"),
        ("other.example", "/v1/deep/er/x", "", "any-deep"),
        // The host counts more than the path.
        ("a.test", "/v1/deep/er/x", "", "exact-v1"),
        ("b.test", "/v1/deep/er/x", "", "wild"),
        ("x.a.test", "/", "", "wild-longer"),
        // Exactly one label.
        ("x.y.a.test", "/", "", "any"),
        ("test", "/", "", "any"),
        ("a.test", "/", "", "exact"),
        ("a.test", "/v1", "", "exact-v1"),
        ("a.test", "/v1/x", "", "exact-v1"),
        ("a.test", "/v1?x=/v2", "", "exact-v1"),
        ("a.test", "/v1x", "", "exact"),
        ("a.test", "/v1%2Fx", "", "exact"),
        ("a.test", "/V1", "", "exact"),
        ("a.test", "/v1", "X-Canary: 1\r\n", "exact-canary"),
        ("a.test", "/v1", "x-canary: 1\r\n", "exact-canary"),
        ("a.test", "/v1", "X-Canary: 10\r\n", "exact-v1"),
        ("a.test", "/v1", "X-Two: yes\r\n", "exact-canary-2"),
        ("a.test", "/v1", "X-Two: yes\r\nX-Canary: 1\r\n", "exact-canary"),
    ] {
        let answer = client.ask(get(host, path, lines));
        assert_eq!(answer.text(), route, "{host} {path} {lines}");
    }
}

#[test]
fn a_prefix_ends_at_a_slash() {
    let proxy =
        start(&naming(&[("v1", "path_prefix: /v1"), ("v2", "path_prefix: /v2/"), ("rest", "")]));
    let mut client = proxy.client();
    for (route, paths) in [
        ("v1", &["/v1", "/v1/", "/v1?x", "/v1//x"][..]),
        ("v2", &["/v2/", "/v2/?x", "/v2/x"]),
        ("rest", &["/v1x", "/v1;a", "/v1%2Fx", "/V1", "/v2", "/v2%2F", "/v10/..", "/"]),
    ] {
        for path in paths {
            assert_eq!(client.get(path).text(), route, "{path}");
        }
    }
}

#[test]
fn a_host_is_the_same_in_every_form() {
    let proxy = start(&naming(&[
        ("mixed", "host: Admin.Example.com"),
        ("v6", "host: \"[::1]\""),
        ("any", ""),
    ]));
    for (host, route) in [
        ("admin.example.com", "mixed"),
        ("ADMIN.EXAMPLE.COM", "mixed"),
        ("admin.example.com:8080", "mixed"),
        ("admin.example.com.", "mixed"),
        ("admin.example.com.:80", "mixed"),
        ("[::1]", "v6"),
        ("[::1]:8080", "v6"),
        ("[0:0:0:0:0:0:0:1]", "v6"),
        ("xn--bcher-kva.example", "any"),
    ] {
        assert_eq!(proxy.client().ask(get(host, "/", "")).text(), route, "{host}");
    }
    for host in [
        "admin.example.com:99999",
        "admin example.com",
        "admin%2eexample.com",
        "b\u{fc}cher.example",
        "a.test,b.test",
    ] {
        let answer = proxy.client().ask(get(host, "/", ""));
        assert_eq!(answer.status(), 400, "{host}");
    }
    // In an absolute target too; a Host line that says something else is refused.
    for (host, status) in [("admin.example.com", 200), ("other", 400)] {
        let request = format!("GET http://Admin.Example.com/x HTTP/1.1\r\nHost: {host}\r\n\r\n");
        let answer = proxy.client().ask(request);
        assert_eq!(answer.status(), status);
        assert_eq!(answer.text() == "mixed", status == 200);
    }
}

#[test]
fn no_route_is_a_404_that_says_so_and_keeps_the_connection() {
    let proxy = start(&naming(&[("only", "host: a.test, path_prefix: /in")]));
    let mut client = proxy.client();
    let answer = client.get("/out");
    assert_failed(&proxy, &answer, 404, "destination_not_found", "no_route");
    assert_eq!(client.get("/in").text(), "only");
    let metrics = proxy.metrics();
    assert_eq!(metrics.sum("proxy_no_route_total", &[("listener", "web")]), 1.0);
    assert_eq!(proxy.logged_path("/out")["route"], "");
}

#[test]
fn a_route_can_be_bound_to_listeners() {
    let proxy = start(
        "listeners:\n\
         - { name: one, bind: \"127.0.0.1:0\" }\n\
         - { name: two, bind: \"127.0.0.2:0\" }\n\
         routes:\n\
         - { name: both, path_prefix: /both, respond: { status: 200, body: both } }\n\
         - { name: first, listeners: [one], respond: { status: 200, body: first } }\n\
         - { name: second, listeners: [two], path_prefix: /x, respond: { status: 200, body: second } }\n",
    );
    let ask = |listener, path| Client::connect(proxy.listener(listener)).get(path);
    assert_eq!(ask("one", "/both").text(), "both");
    assert_eq!(ask("two", "/both").text(), "both");
    assert_eq!(ask("one", "/x").text(), "first");
    assert_eq!(ask("two", "/x").text(), "second");
    assert_eq!(ask("two", "/y").status(), 404);
}

#[test]
fn a_route_can_be_bound_to_methods() {
    let proxy = start(&naming(&[("reads", "methods: [GET, HEAD]"), ("puts", "methods: [PUT]")]));
    let mut client = proxy.client();
    for (method, status, body) in [("GET", 200, "reads"), ("PUT", 200, "puts")] {
        let answer = client.ask(format!("{method} / HTTP/1.1\r\nHost: a.test\r\n\r\n"));
        assert_eq!((answer.status(), answer.text().as_str()), (status, body));
    }
    let answer = client.ask("DELETE / HTTP/1.1\r\nHost: a.test\r\n\r\n");
    assert_eq!(answer.status(), 404);
    let answer = client.send("HEAD / HTTP/1.1\r\nHost: a.test\r\n\r\n").head();
    assert_eq!((answer.status(), answer.get("content-length")), (200, Some("5")));
    // Nothing of a body came after it.
    assert_eq!(client.get("/").text(), "reads");
}

#[test]
fn connect_and_trace_are_refused() {
    let origin = Origin::start(reply::echo);
    let proxy = over(&[&origin]).start();
    for request in [
        "TRACE / HTTP/1.1\r\nHost: a.test\r\n\r\n",
        "CONNECT a.test:80 HTTP/1.1\r\nHost: a.test:80\r\n\r\n",
    ] {
        let answer = proxy.client().ask(request);
        assert_failed(&proxy, &answer, 405, "http_request_denied", "method_refused");
        assert!(answer.get("allow").is_some());
    }
    assert_eq!(origin.requests(), 0);
}

#[test]
fn a_route_can_redirect() {
    let proxy = start(
        "listeners:\n- { name: web, bind: \"127.0.0.1:0\" }\nroutes:\n\
         - { name: r, redirect: { scheme: https, code: 308 } }\n\
         - { name: s, path_prefix: /s, redirect: { scheme: https, code: 301 } }\n",
    );
    let mut client = proxy.client();
    let answer = client.ask(get("a.test:8080", "/x/y?z=1", ""));
    assert_eq!(answer.status(), 308);
    assert_eq!(answer.get("location"), Some("https://a.test/x/y?z=1"));
    let answer = client.ask(get("[::1]:8080", "/s", ""));
    assert_eq!(answer.status(), 301);
    assert_eq!(answer.get("location"), Some("https://[::1]/s"));
    // Without a port nothing of an address is taken for one.
    let answer = client.ask(get("[::1]", "/s", ""));
    assert_eq!(answer.get("location"), Some("https://[::1]/s"));
}

#[test]
fn a_route_can_answer_by_itself() {
    let proxy = start(
        "listeners:\n- { name: web, bind: \"127.0.0.1:0\" }\nroutes:\n\
         - { name: r, respond: { status: 418, body: \"short and stout\", content_type: text/teapot } }\n\
         - { name: n, path_prefix: /none, respond: { status: 204 } }\n",
    );
    let mut client = proxy.client();
    let answer = client.get("/");
    assert_eq!((answer.status(), answer.text().as_str()), (418, "short and stout"));
    assert_eq!(answer.get("content-type"), Some("text/teapot"));
    let answer = client.get("/none");
    assert_eq!((answer.status(), answer.get("content-length")), (204, None));
    assert_eq!(client.get("/").status(), 418);
    assert_counts(&proxy, "proxy_requests_total", &[("route", "r"), ("status", "418")], 2.0);
}

#[test]
fn a_path_can_be_rewritten() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin])
        .route("path_prefix: /v1, rewrite: { strip_prefix: /v1, add_prefix: /app }")
        .top("- { name: any, pool: b, rewrite: { strip_prefix: /s } }")
        .start();
    let mut client = proxy.client();
    for (path, at_the_upstream) in [
        ("/v1/x?q=/v1", "/app/x?q=/v1"),
        ("/v1", "/app/"),
        ("/v1/", "/app/"),
        ("/v1?q", "/app/?q"),
        ("/v1/%2Fx//y", "/app/%2Fx//y"),
        ("/v1/v1/x", "/app/v1/x"),
        ("/s/x", "/x"),
        // Not that prefix.
        ("/sx", "/sx"),
        ("/x/s", "/x/s"),
    ] {
        assert_eq!(client.get(path).status(), 200);
        assert_eq!(origin.last().target(), at_the_upstream, "{path}");
    }
    assert_eq!(proxy.logged_path("/v1/x")["status"], 200);
}

#[test]
fn a_path_goes_on_as_it_was_sent() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let mut client = proxy.client();
    for path in ["/", "/a%2Fb/../c//d;e=f?x=%20&y", "/%00%ff", "/?", "//a.test/x"] {
        assert_eq!(client.get(path).status(), 200, "{path}");
        assert_eq!(origin.last().target(), path);
    }
    client.ask("GET http://a.test?x HTTP/1.1\r\nHost: a.test\r\n\r\n");
    assert_eq!(origin.last().target(), "/?x");
    client.ask("OPTIONS * HTTP/1.1\r\nHost: a.test\r\n\r\n");
    assert_eq!(origin.last().target(), "*");
}

#[test]
fn an_upstreams_own_path_comes_first() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[]).upstream(&format!("{}/base", origin.url()), "weight: 1").start();
    assert_eq!(proxy.get("/x?y").status(), 200);
    assert_eq!(origin.last().target(), "/base/x?y");
}

#[test]
fn clients_are_let_in_by_address() {
    let origin = Origin::start(reply::name("in"));
    let proxy =
        over(&[&origin]).route("allow: [\"127.0.0.0/30\"], deny: [\"127.0.0.2/32\"]").start();
    for (last, status) in [(1, 200), (2, 403), (3, 200), (4, 403)] {
        let answer = client_from(last, &proxy).get(&format!("/{last}"));
        assert_eq!(answer.status(), status, "127.0.0.{last}");
        if status == 403 {
            assert_failed(&proxy, &answer, 403, "http_request_denied", "forbidden");
        }
        let line = proxy.logged_path(&format!("/{last}"));
        assert_eq!(line["client_ip"], format!("127.0.0.{last}"));
    }
    assert_eq!(origin.requests(), 2);
}

#[test]
fn an_address_list_means_the_client_behind_a_trusted_proxy() {
    let origin = Origin::start(reply::name("in"));
    let proxy = over(&[&origin])
        .listener("trusted_proxies: [\"127.0.0.1/32\"]")
        .route("deny: [\"192.0.2.0/24\"]")
        .start();
    let from = |forwarded: &str| {
        let lines = format!("X-Forwarded-For: {forwarded}\r\n");
        proxy.client().ask(get("a.test", "/", &lines)).status()
    };
    assert_eq!(from("192.0.2.7"), 403);
    assert_eq!(from("203.0.113.1, 192.0.2.7"), 403);
    // What the client itself has claimed is no reason.
    assert_eq!(from("192.0.2.7, 203.0.113.1"), 200);
}

#[test]
fn an_old_client_without_a_host_is_served() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin])
        .top("- { name: away, path_prefix: /away, redirect: { scheme: https, code: 308 } }")
        .start();
    assert_eq!(proxy.client().ask("GET / HTTP/1.0\r\n\r\n").text(), "x");
    assert_eq!(origin.last().get("host"), Some(origin.address.to_string().as_str()));
    // There is nowhere to redirect it to.
    let answer = proxy.client().ask("GET /away HTTP/1.0\r\n\r\n");
    assert_eq!((answer.status(), answer.get("location")), (400, None), "{answer:?}");
}
