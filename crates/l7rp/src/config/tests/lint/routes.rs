//! Routes that match nothing, and keys of routes that do nothing.

use super::{CERT, With, and_listener, answering, clean, found, rest, route, routes, tls};

#[test]
fn routes_that_others_hide() {
    found(&[
        (
            routes(&[
                "name: a, host: a.test, methods: [GET, POST]",
                "name: b, host: A.test., methods: [GET]",
            ]),
            "11:5 routes[2]: the route `b` can never be taken: `a` on line 10 matches all that it matches [unreachable-route]",
        ),
        (
            routes(&[
                "name: a, methods: [GET]",
                "name: b, path_prefix: /, methods: [POST]",
                "name: c, methods: [POST, GET]",
            ]),
            "12:5 routes[3]: the route `c` can never be taken: `a` on line 10 and `b` on line 11 together match all that it matches [unreachable-route]",
        ),
        (
            routes(&[
                "name: a, host: a.test, header_predicates: [{ name: x-a, value: '1' }]",
                "name: b, host: a.test, methods: [GET], header_predicates: [{ name: X-B, value: '1' }, { name: X-A, value: '1' }]",
            ]),
            "11:5 routes[2]: the route `b` can never be taken: `a` on line 10 matches all that it matches [unreachable-route]",
        ),
        (
            and_listener(
                &routes(&[
                    "name: a, listeners: [http], methods: [GET, POST]",
                    "name: b, listeners: [other], methods: [GET, PUT]",
                    "name: c, methods: [GET]",
                ]),
                "name: other, bind: '127.0.0.1:8081'",
            ),
            "13:5 routes[3]: the route `c` can never be taken: `a` on line 11 and `b` on line 12 together match all that it matches [unreachable-route]",
        ),
    ]);
}

#[test]
fn routes_that_others_leave_something() {
    clean(&[
        // A longer prefix, a narrower host, a condition more: the others get the rest.
        routes(&[
            "name: a, host: a.test, methods: [GET]",
            "name: b, host: '*.test', methods: [GET]",
        ]),
        routes(&["name: a, host: a.test, path_prefix: /v1", "name: b, host: a.test"]),
        routes(&[
            "name: a, host: a.test, path_prefix: /v1/",
            "name: b, host: a.test, path_prefix: /v1",
        ]),
        routes(&[
            "name: a, host: a.test, methods: [GET]",
            "name: b, host: a.test, methods: [GET, HEAD]",
        ]),
        routes(&["name: a, host: a.test, methods: [GET]", "name: b, host: a.test"]),
        routes(&[
            "name: a, host: a.test, methods: [GET], header_predicates: [{ name: x-a, value: '1' }]",
            "name: b, host: a.test, header_predicates: [{ name: x-a, value: '1' }, { name: x-b, value: '1' }]",
        ]),
        // The order of the file counts, but not before the order of precedence.
        routes(&["name: a, methods: [GET]", "name: b, methods: [GET, POST]"]),
        routes(&["name: a", "name: b, methods: [GET]"])
            .replace("  - name: all\n    pool: backend\n", ""),
        and_listener(
            &routes(&[
                "name: a, listeners: [http], methods: [GET, POST]",
                "name: c, methods: [GET]",
            ]),
            "name: other, bind: '127.0.0.1:8081'",
        ),
    ]);
}

#[test]
fn hosts_without_a_certificate() {
    let host = |host: &str| format!("{}    host: {host}\n", tls(CERT));
    let issued = "autocert: { cache_dir: a, allowed_hosts: [c.test] }";
    found(&[
        (
            host("b.test"),
            "11:11 routes[0].host: no certificate of `http` is for the host of the route `all`: clients that ask for it by name (SNI) get 421 [misdirected-host]",
        ),
        (
            host("\"*.a.test\""),
            "11:11 routes[0].host: no certificate of `http` is for the host of the route `all`: clients that ask for it by name (SNI) get 421 [misdirected-host]",
        ),
        (
            host("\"*.test\"").replace("a.test, ", ""),
            "11:11 routes[0].host: no certificate of `http` is for the host of the route `all`: clients that ask for it by name (SNI) get 421 [misdirected-host]",
        ),
        (
            format!("{}    host: d.test\n", tls(issued)),
            "11:11 routes[0].host: no certificate of `http` is for the host of the route `all`: clients that ask for it by name (SNI) get 421 [misdirected-host]",
        ),
    ]);
    clean(&[
        host("a.test"),
        host("c.b.test"),
        host("d.c.b.test"),
        host("\"*.b.test\""),
        host("\"*.c.b.test\""),
        host("\"*.test\""),
        host("\"*\""),
        host("192.0.2.1"),
        host("\"[2001:db8::1]\""),
        format!("{}    host: c.test\n", tls(issued)),
        // Its names are in its file.
        host("b.test").replace(", hosts: [a.test, \"*.b.test\"]", ""),
        and_listener(&host("b.test"), "name: other, bind: '127.0.0.1:8081'"),
    ]);
}

#[test]
fn fields_that_are_taken_from_no_client() {
    let guarded =
        format!("{CERT}, client_auth: {{ ca_file: a, identity_header: X-Client-Identity }}");
    let predicate = |name: &str| {
        format!("{}    header_predicates: [{{ name: {name}, value: a }}]\n", tls(&guarded))
    };
    let hash = |name: &str| {
        let pool = format!(
            "selector: {{ algorithm: consistent-hash-bounded, hash_key: \"header:{name}\" }}"
        );
        let listener = format!("tls: {{ {guarded} }}");
        With { listener: &listener, pool: &pool, ..With::default() }.text()
    };
    found(&[
        (
            predicate("X-Client_Identity"),
            "11:33 routes[0].header_predicates[0].name: the route `all` can never be taken: no request has `x-client_identity`, which is taken from no client [guarded-predicate]",
        ),
        (
            hash("x-client-identity"),
            "8:63 upstream_pools[0].selector.hash_key: `x-client-identity` is taken from no client: all requests are spread by the client's address [guarded-hash-key]",
        ),
    ]);
    clean(&[predicate("X-Client"), hash("X-Client")]);
}

#[test]
fn clients_that_are_let_in_and_kept_out() {
    found(&[
        (
            route("allow: [10.0.0.0/8, 192.0.2.1]\ndeny: [10.0.0.0/9, 10.128.0.0/9, 192.0.2.0/24]"),
            "10:12 routes[0].allow: the route `all` lets nobody in: `deny` has all that `allow` has [pointless-allow]",
        ),
        (
            route("allow: [10.0.0.0/8, 192.0.2.1]\ndeny: [192.0.2.0/24]"),
            "10:25 routes[0].allow[1]: 192.0.2.1/32 lets nobody in: `deny` has all of it [pointless-allow]",
        ),
    ]);
    clean(&[
        route("allow: [10.0.0.0/8, 192.0.2.1]\ndeny: [10.0.0.0/9, 192.0.2.2]"),
        route("deny: [0.0.0.0/0]"),
        route("allow: [\"2001:db8::/32\"]\ndeny: [0.0.0.0/0]"),
    ]);
}

#[test]
fn redirects_that_go_in_a_circle() {
    let redirect = |scheme: &str| {
        answering(&rest(""), &format!("redirect: {{ scheme: {scheme} }}")).replace(":8080", ":80")
    };
    let secure =
        |port: &str| answering(&tls(CERT), "redirect: { scheme: https }").replace(":8080", port);
    found(&[
        (
            redirect("http"),
            "6:15 routes[0].redirect: the route `all` redirects to the URL that was asked for: all its listeners serve `http` on port 80 [redirect-loop]",
        ),
        (
            secure(":443"),
            "7:15 routes[0].redirect: the route `all` redirects to the URL that was asked for: all its listeners serve `https` on port 443 [redirect-loop]",
        ),
    ]);
    clean(&[
        redirect("https"),
        redirect("http").replace(":80", ":8080"),
        secure(":8443"),
        secure(":443").replace("routes:", "  - { name: open, bind: '127.0.0.1:80' }\nroutes:"),
    ]);
}

#[test]
fn prefixes_that_are_never_taken_away() {
    let strip = |prefix: &str, strip: &str| {
        route(&format!("path_prefix: {prefix}\nrewrite: {{ strip_prefix: {strip} }}"))
    };
    found(&[
        (
            strip("/v1", "/v2"),
            "11:30 routes[0].rewrite.strip_prefix: `strip_prefix` never takes anything away: every path of the route `all` begins with `/v1` [never-strips]",
        ),
        (
            strip("/v1", "/v"),
            "11:30 routes[0].rewrite.strip_prefix: `strip_prefix` never takes anything away: every path of the route `all` begins with `/v1` [never-strips]",
        ),
    ]);
    clean(&[
        strip("/v1/a", "/v1"),
        strip("/v1", "/v1/"),
        strip("/v1/", "/v1"),
        strip("/v1", "/v1/a"),
        strip("/", "/v1"),
        strip("/v1", "/"),
    ]);
}

#[test]
fn fields_that_are_removed_and_set() {
    let headers = |keys: &str| route(&format!("middleware: [{{ headers: {{ {keys} }} }}]"));
    found(&[
        (
            headers("add_request: { X-A: b }, remove_request: [X-B, x-a]"),
            "10:78 routes[0].middleware[0].headers.remove_request[1]: `x-a` is not removed, for `add_request` sets it [added-and-removed]",
        ),
        (
            headers("add_response: { server: b }, remove_response: [Server]"),
            "10:78 routes[0].middleware[0].headers.remove_response[0]: `server` is not removed, for `add_response` sets it [added-and-removed]",
        ),
    ]);
    clean(&[headers("add_request: { X-A: b }, remove_response: [x-a]")]);
}

#[test]
fn listeners_that_no_route_is_bound_to() {
    let bound = |listener: &str| and_listener(&route("listeners: [http]"), listener);
    let issued = "tls: { autocert: { cache_dir: a, allowed_hosts: [c.test] } }";
    let secure = With { listener: issued, route: "listeners: [http]", ..With::default() }.text();
    found(&[
        (
            bound("name: other, bind: '127.0.0.1:8081'"),
            "4:13 listeners[1].name: no route is bound to the listener `other`: every request there gets 404 [idle-listener]",
        ),
        (
            and_listener(
                &secure,
                &format!("name: other, bind: '127.0.0.1:8081', tls: {{ {CERT} }}"),
            ),
            "5:13 listeners[1].name: no route is bound to the listener `other`: every request there gets 404 [idle-listener]",
        ),
    ]);
    clean(&[
        and_listener(&rest(""), "name: other, bind: '127.0.0.1:8081'"),
        // A CA looks there for its proof.
        and_listener(&secure, "name: other, bind: '127.0.0.1:80'"),
    ]);
}
