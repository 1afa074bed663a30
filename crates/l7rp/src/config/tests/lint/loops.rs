//! Upstreams that are the proxy itself.

use super::{and_listener, clean, found, pool, rest, route, tls, upstreams};

/// The listener is at `bind`, its only upstream at `url`.
fn to(bind: &str, url: &str) -> String {
    let text = rest("").replace("127.0.0.1:8080", bind);
    upstreams(&text, &format!("{{ url: \"{url}\" }}"))
}

fn told(url: &str, listener: &str) -> String {
    format!(
        "6:24 upstream_pools[0].upstreams[0].url: `{url}` is the listener `{listener}` itself: what the route `all` sends there comes back to it [self-loop]"
    )
}

#[test]
fn an_upstream_that_is_the_listener() {
    for (bind, url) in [
        ("127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("127.0.0.1:8080", "http://localhost:8080"),
        ("127.0.0.1:8080", "http://0.0.0.0:8080"),
        ("127.0.0.1:8080", "h2c://[::ffff:127.0.0.1]:8080/"),
        ("127.0.0.1:80", "http://127.0.0.1"),
        ("10.0.0.1:8080", "http://10.0.0.1:8080"),
        ("0.0.0.0:8080", "http://127.0.0.1:8080"),
        ("[::]:8080", "http://127.0.0.1:8080"),
        ("[::]:8080", "http://[::1]:8080"),
        ("[::]:8080", "http://[::]:8080"),
        ("[::1]:8080", "http://localhost:8080"),
    ] {
        found(&[(to(bind, url), told(url, "http").as_str())]);
    }
    let clear = [
        ("127.0.0.1:8080", "http://127.0.0.1:8081"),
        ("127.0.0.1:8080", "http://127.0.0.2:8080"),
        ("127.0.0.1:8080", "http://[::1]:8080"),
        ("127.0.0.1:8080", "https://127.0.0.1:8080"),
        ("127.0.0.1:8080", "http://a.test:8080"),
        ("0.0.0.0:8080", "http://[::1]:8080"),
        ("0.0.0.0:8080", "http://10.0.0.1:8080"),
        ("[::]:0", "http://127.0.0.1:8080"),
        ("unix:/run/a.sock", "http://127.0.0.1:8080"),
    ];
    clean(&clear.map(|(bind, url)| to(bind, url)));
}

/// The same file with the upstream at the listener `http`.
fn own(text: &str) -> String {
    upstreams(text, "{ url: \"http://127.0.0.1:8080\" }")
}

#[test]
fn the_most_exact_listener_gets_the_connection() {
    let other = |bind: &str, more: &str| {
        let text = own(&rest("")).replace("127.0.0.1:8080\"\nup", "0.0.0.0:8080\"\nup");
        and_listener(&text, &format!("name: other, bind: '{bind}'{more}"))
    };
    let here = |listener: &str| told("http://127.0.0.1:8080", listener).replace("6:24", "7:24");
    found(&[
        (other("[::]:8080", ""), here("http").as_str()),
        (other("127.0.0.1:8080", ""), here("other").as_str()),
    ]);
    clean(&[other("127.0.0.1:8080", ", tls: { certs: [{ cert: a, key: a }] }")]);
}

#[test]
fn only_what_comes_back_to_its_own_route_goes_round() {
    let bound = |listeners: &str| {
        let text = own(&route(&format!("listeners: [{listeners}]")));
        and_listener(&text, "name: other, bind: '127.0.0.1:8081'")
    };
    let here = told("http://127.0.0.1:8080", "http").replace("6:24", "7:24");
    found(&[(bound("http, other"), here.as_str())]);
    let elsewhere = "  - { name: a, listeners: [http], respond: { status: 200 } }\n";
    let added_by_the_proxy = "  - { name: a, header_predicates: [{ name: x-real-ip, value: '127.0.0.1' }], pool: backend }\n";
    clean(&[
        bound("other") + elsewhere,
        own(&route("rewrite: { strip_prefix: /a }\npath_prefix: /a")),
        own(&route("header_predicates: [{ name: x-a, value: '1' }]")),
        own(&route("deny: [127.0.0.0/8]")),
        own(&pool("host_header: upstream")),
        own(&rest("")).replace(":8080\" }", ":8080/base\" }"),
        own(&rest("")).replace("routes:\n", &format!("routes:\n{added_by_the_proxy}")),
        own(&tls("certs: [{ cert: a, key: a }]")),
    ]);
}
