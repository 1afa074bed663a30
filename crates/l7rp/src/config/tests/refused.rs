//! What is refused, and in which words. Each table is one snapshot.

use std::fmt::Write as _;

use super::{check, listener, pool, rest, route};

/// The reports of files that must all be refused.
fn reports<T: AsRef<str>>(table: &[(&str, T)]) -> String {
    let mut out = String::new();
    for (what, text) in table {
        let refused = match check(text.as_ref()) {
            Err(refused) => refused.render(false),
            Ok(_) => panic!("{what} was accepted:\n{}", text.as_ref()),
        };
        let (reports, _count) = refused.trim_end().rsplit_once("\n\n").unwrap();
        write!(out, "## {what}\n{reports}\n\n").unwrap();
    }
    out
}

#[test]
fn not_a_configuration() {
    let deep = format!("listeners: {}{}", "[".repeat(100), "]".repeat(100));
    let bomb = (0..9).fold("a0: &a0 [x, x, x, x, x, x, x, x]\n".to_owned(), |mut text, n| {
        let list = vec![format!("*a{n}"); 8].join(", ");
        writeln!(text, "a{m}: &a{m} [{list}]", m = n + 1).unwrap();
        text
    });
    let told = reports(&[
        ("empty", ""),
        ("comments only", "# nothing\n# here\n"),
        ("an empty document", "---\n"),
        ("a list", "- a\n- b\n"),
        ("a text", "hello\n"),
        ("two documents", "listeners: []\n---\nroutes: []\n"),
        ("unclosed bracket", "listeners: [\n  { name: a\n"),
        ("unclosed quote", "admin:\n  bind: \"127.0.0.1:9090\nworkers: 2\n"),
        ("a colon too many", "admin: bind: x\n"),
        ("bad indentation", "admin:\n    bind: x\n  drain: {}\n"),
        ("tab", "admin:\n\tbind: \"127.0.0.1:9090\"\n"),
        ("reserved character", "admin:\n  bind: @local\n"),
        ("unknown alias", "admin:\n  bind: *local\n"),
        ("alias in itself", "admin: &a [*a]\n"),
        ("deep", &deep),
        ("alias bomb", &bomb),
        ("a key that is no word", "? [a, b]\n: c\nworkers: x\n"),
    ]);
    insta::assert_snapshot!(told);
}

#[test]
fn keys_and_types() {
    let told = reports(&[
        ("unknown key, close", listener("timeout: { idle: 5s }")),
        ("unknown key, far", listener("colour: red")),
        ("unknown key at the top", rest("upstream_pool: []\n")),
        ("unknown key in flow style", listener("limits: { max_header: 5 }")),
        ("duplicate key", listener("max_in_flight: 1\nmax_in_flight: 2")),
        ("number for text", listener("tls: { min_version: 1.2 }")),
        ("boolean for text", route("header_predicates: [{ name: X-On, value: true }]")),
        ("text for number", listener("max_in_flight: many")),
        ("negative number", listener("max_in_flight: -1")),
        ("large number", listener("max_in_flight: 5000000000")),
        ("YAML 1.1 boolean off", listener("enable_http3: Off")),
        ("number in quotes", listener("max_in_flight: \"5\"")),
        ("boolean in quotes", listener("enable_http3: \"true\"")),
        ("fraction", listener("max_in_flight: 1.5")),
        ("YAML 1.1 boolean", listener("enable_http3: yes")),
        ("text for list", route("methods: GET")),
        ("section for list", listener("trusted_proxies: { a: b }")),
        ("text for section", rest("admin: \"127.0.0.1:9090\"\n")),
        ("list for text", route("host: [a, b]")),
        ("blank list entry", route("methods: [GET, ]\nallow:\n  -\n  - 10.0.0.0/8")),
        ("not finite", pool("selector: { epsilon: .inf }")),
        ("unknown enum value, close", pool("selector: { algorithm: least-con }")),
        ("unknown enum value, far", pool("selector: { algorithm: random }")),
        ("unknown protocol", pool("protocol: h2")),
        ("workers", rest("workers: all\n")),
        ("workers 0", rest("workers: 0\n")),
    ]);
    insta::assert_snapshot!(told);
}

#[test]
fn times_and_sizes() {
    let told = reports(&[
        ("no unit", pool("connect_timeout: 30")),
        ("no unit, in quotes", pool("connect_timeout: \"30\"")),
        ("no unit, fraction", pool("connect_timeout: 1.5")),
        ("unknown unit", pool("connect_timeout: 5 seconds")),
        ("boolean", pool("connect_timeout: true")),
        ("too long", pool("connect_timeout: 9999999999h")),
        ("negative", pool("slow_start: -5s")),
        ("negative, deep", route("timeouts: { total: -1ms }")),
        ("zero", pool("connect_timeout: 0s")),
        ("zero idle", listener("timeouts: { idle: 0 }")),
        ("size with an ambiguous unit", route("max_body_bytes: 10MB")),
        ("size in words", route("max_body_bytes: lots")),
        ("negative size", route("max_body_bytes: -1")),
        ("fraction of a size", route("max_body_bytes: 1.5")),
        ("huge size", route("max_body_bytes: 99999999999TiB")),
        ("small head", listener("timeouts: { max_header_bytes: 10 }")),
    ]);
    insta::assert_snapshot!(told);
}

#[test]
fn names() {
    let told = reports(&[
        (
            "duplicate listener",
            rest("").replace(
                "upstream_pools:",
                "  - name: http\n    bind: \"127.0.0.1:8081\"\nupstream_pools:",
            ),
        ),
        (
            "duplicate bind",
            rest("").replace(
                "upstream_pools:",
                "  - name: other\n    bind: \"127.0.0.1:8080\"\nupstream_pools:",
            ),
        ),
        ("bind of admin", rest("admin: { bind: \"127.0.0.1:8080\" }\n")),
        (
            "duplicate pool",
            rest("").replace(
                "routes:",
                "  - name: backend\n    upstreams: [{ url: \"http://a\" }]\nroutes:",
            ),
        ),
        ("duplicate route", rest("  - { name: all, host: a.example, pool: backend }\n")),
        (
            "duplicate upstream",
            rest("").replace("upstreams: [", "upstreams: [{ url: \"http://127.0.0.1:9001\" }, "),
        ),
    ]);
    insta::assert_snapshot!(told);
}

#[test]
fn names_that_are_referred_to_or_missing() {
    let minimal = "listeners: [{ name: a, bind: \"127.0.0.1:80\" }]\n";
    let told = reports(&[
        ("unknown pool, close", rest("  - { name: b, host: b.example, pool: backends }\n")),
        ("unknown pool, far", rest("  - { name: b, host: b.example, pool: x }\n")),
        ("unknown listener", route("listeners: [htp]")),
        ("no upstreams", rest("").replace("[{ url: \"http://127.0.0.1:9001\" }]", "[]")),
        (
            "upstreams missing",
            rest("").replace("    upstreams: [{ url: \"http://127.0.0.1:9001\" }]\n", ""),
        ),
        ("name missing", rest("").replace("- name: backend\n    ", "- ")),
        ("name empty", rest("").replace("name: http", "name: \"\"")),
        ("name blank", rest("").replace("name: http", "name:")),
        ("name with a line break", rest("").replace("name: http", "name: \"a\\nb\"")),
        ("name with spaces", rest("").replace("name: http", "name: \" a\"")),
        ("no listeners", "routes: [{ name: a, respond: {} }]\n".to_owned()),
        ("no routes", minimal.to_owned()),
        (
            "unknown TCP pool",
            rest("tcp_listeners: [{ name: r, bind: \"127.0.0.1:6379\", pool: redis }]\n"),
        ),
        (
            "TCP upstream without a port",
            rest("tcp_pools: [{ name: r, upstreams: [{ address: 10.0.0.1 }] }]\n"),
        ),
        (
            "TCP upstream as a URL",
            rest("tcp_pools: [{ name: r, upstreams: [{ address: \"tcp://10.0.0.1:1\" }] }]\n"),
        ),
        ("TCP pool with no upstreams", rest("tcp_pools: [{ name: r }]\n")),
        (
            "TCP listener with the name of another",
            rest(
                "tcp_pools: [{ name: r, upstreams: [{ address: \"a:1\" }] }]\ntcp_listeners: [{ name: http, bind: \"127.0.0.1:6379\", pool: r }]\n",
            ),
        ),
    ]);
    insta::assert_snapshot!(told);
}

#[test]
fn listeners() {
    let bind = |text: &str| rest("").replace("\"127.0.0.1:8080\"", text);
    let told = reports(&[
        ("port only", bind("\":8080\"")),
        ("a name", bind("localhost:8080")),
        ("no port", bind("127.0.0.1")),
        ("large port", bind("127.0.0.1:65536")),
        ("IPv6 without brackets", bind("\"::1:8080x\"")),
        ("relative socket", bind("unix:l7rp.sock")),
        ("min_version", listener("tls: { min_version: \"1.1\", certs: [{ cert: a, key: b }] }")),
        (
            "min_version unknown",
            listener("tls: { min_version: \"1.4\", certs: [{ cert: a, key: b }] }"),
        ),
        ("tls without certificates", listener("tls: {}")),
        ("tls blank", listener("tls:")),
        ("certificate without key", listener("tls: { certs: [{ cert: a }] }")),
        ("key without certificate", listener("tls: { certs: [{ key: a }] }")),
        (
            "hosts of a certificate",
            listener("tls: { certs: [{ cert: a, key: b, hosts: [\"a.*.com\", \"*\"] }] }"),
        ),
        ("autocert without hosts", listener("tls: { autocert: { cache_dir: /c } }")),
        ("autocert without cache", listener("tls: { autocert: { allowed_hosts: [a.example] } }")),
        (
            "autocert with a wildcard",
            listener("tls: { autocert: { cache_dir: /c, allowed_hosts: [\"*.a.example\"] } }"),
        ),
        (
            "directory_url",
            listener(
                "tls: { autocert: { cache_dir: /c, allowed_hosts: [a.example], directory_url: \"http://a\" } }",
            ),
        ),
        (
            "client_auth",
            listener("tls: { certs: [{ cert: a, key: b }], client_auth: { mode: maybe } }"),
        ),
        (
            "an identity_header that tells something else",
            listener(
                "tls: { certs: [{ cert: a, key: b }], client_auth: { ca_file: c, identity_header: X-Real-IP } }",
            ),
        ),
        (
            "an identity_header that frames",
            listener(
                "tls: { certs: [{ cert: a, key: b }], client_auth: { ca_file: c, identity_header: TE } }",
            ),
        ),
        (
            "client_auth without ca_file",
            listener("tls: { certs: [{ cert: a, key: b }], client_auth: {} }"),
        ),
        ("http3 without tls", listener("enable_http3: true")),
        ("proxy_protocol from anybody", listener("proxy_protocol: true")),
        ("trusted_proxies", listener("trusted_proxies: [10.0.0.0/33, proxy.example]")),
        ("max_headers", listener("limits: { max_headers: 0, max_target_bytes: 0 }")),
    ]);
    insta::assert_snapshot!(told);
}

#[test]
fn pools() {
    let url = |text: &str| rest("").replace("http://127.0.0.1:9001", text);
    let told = reports(&[
        ("no scheme", url("127.0.0.1:9001")),
        ("unknown scheme", url("ftp://127.0.0.1")),
        ("no host", url("http://")),
        ("no host, but a path", url("http:///a")),
        ("port 0", url("http://a:0")),
        ("port in words", url("http://a:http")),
        ("IPv6 without brackets", url("http://::1:80")),
        ("user info", url("http://user:secret@a")),
        ("query", url("http://a/?b")),
        ("fragment", url("http://a/#b")),
        ("bad host", url("http://a_b..c")),
        ("bad address", url("http://10.0.0.256")),
        ("path", url("http://a/b c")),
        ("url missing", rest("").replace("{ url: \"http://127.0.0.1:9001\" }", "{ weight: 2 }")),
        ("h2c in an http1 pool", url("h2c://a").replace("routes:", "    protocol: http1\nroutes:")),
        ("weight 0", rest("").replace("9001\" }", "9001\", weight: 0 }")),
        ("weight too large", rest("").replace("9001\" }", "9001\", weight: 65536 }")),
        ("consistent hash without key", pool("selector: { algorithm: consistent-hash-bounded }")),
        ("hash key", pool("selector: { hash_key: ip }")),
        ("hash key, header", pool("selector: { hash_key: \"header:a b\" }")),
        ("hash key, cookie", pool("selector: { hash_key: \"cookie:\" }")),
        ("hash key, bad cookie", pool("selector: { hash_key: \"cookie:a;b\" }")),
        ("epsilon", pool("selector: { epsilon: 0 }")),
        ("epsilon below 0", pool("selector: { epsilon: -0.5 }")),
        ("virtual_nodes", pool("selector: { virtual_nodes: 0 }")),
        ("virtual_nodes below 0", pool("selector: { virtual_nodes: -1 }")),
        ("host_header", pool("host_header: a b")),
        ("client certificate without key", pool("upstream_tls: { client_cert_file: a }")),
        ("client key without certificate", pool("upstream_tls: { client_key_file: a }")),
        ("server_name", pool("upstream_tls: { server_name: \"a:443\" }")),
        ("retry_budget", pool("retry_budget: { ratio: 1.5 }")),
    ]);
    insta::assert_snapshot!(told);
}

#[test]
fn health() {
    let active = |text: &str| pool(&format!("health: {{ active: {{ {text} }} }}"));
    let breaker = |text: &str| pool(&format!("circuit_breaker: {{ {text} }}"));
    let told = reports(&[
        ("passive without active", pool("health: { passive: {} }")),
        ("interval as long as timeout", active("interval: 1s, timeout: 1s")),
        ("timeout longer than the default interval", active("timeout: 3s")),
        ("healthy_threshold", active("healthy_threshold: 0")),
        ("unhealthy_threshold", active("unhealthy_threshold: -1")),
        ("path", active("path: healthz")),
        ("method", active("method: get")),
        ("status", active("expected_status: [99, 600, \"6xx\", ok, 2xx]")),
        ("no status", active("expected_status: []")),
        ("error_threshold", pool("health: { active: {}, passive: { error_threshold: 0 } }")),
        (
            "latency_threshold_p99",
            pool("health: { active: {}, passive: { latency_threshold_p99: -1s } }"),
        ),
        ("failure_ratio", breaker("failure_ratio: 1.5")),
        ("open_min above open_max", breaker("open_min: 2m")),
        ("open_max below open_min", breaker("open_max: 500ms")),
        ("window_size below min_observations", breaker("window_size: 10")),
        ("no probes", breaker("half_open_probes: 0")),
        ("failure_statuses", breaker("failure_statuses: [5xx, 999]")),
        ("failure_grpc_statuses", breaker("failure_grpc_statuses: [UNAVAILABLE, unavailable, 14]")),
    ]);
    insta::assert_snapshot!(told);
}

#[test]
fn routes() {
    let host = |text: &str| route(&format!("host: \"{text}\""));
    let told = reports(&[
        ("empty host", host("")),
        ("port in a host", host("a.example:80")),
        ("wildcard inside", host("a.*.example")),
        ("wildcard in a label", host("a*.example")),
        ("two wildcards", host("*.*.example")),
        ("wildcard address", host("*.10.0.0.1")),
        ("non-ASCII host", host("bücher.example")),
        ("bad host", host("a b")),
        ("URL for host", host("https://a.example/")),
        ("path_prefix", route("path_prefix: v1")),
        ("path_prefix, empty", route("path_prefix: \"\"")),
        ("path_prefix with a query", route("path_prefix: /a?b")),
        ("path_prefix with a space", route("path_prefix: \"/a b\"")),
        ("method", route("methods: [get, \"G T\", TRACE]")),
        ("predicate name", route("header_predicates: [{ name: \"a b\", value: x }]")),
        ("predicate without value", route("header_predicates: [{ name: a }]")),
        ("allow", route("allow: [example.com]")),
        ("redirect with pool", route("redirect: { scheme: https }")),
        ("respond with pool", route("respond: { status: 200 }")),
        ("nothing to do", route("").replace("    pool: backend\n", "")),
        ("pool empty", route("").replace("pool: backend\n", "pool: \"\"\n")),
        (
            "redirect",
            rest("  - { name: r, host: a.example, redirect: { scheme: ftp, code: 200 } }\n"),
        ),
        ("respond", rest("  - { name: r, host: a.example, respond: { status: 101 } }\n")),
        (
            "respond without a body",
            rest("  - { name: r, host: a.example, respond: { status: 204, body: x } }\n"),
        ),
        ("rewrite", route("rewrite: { strip_prefix: a, add_prefix: b }")),
        ("same route", rest("  - { name: b, pool: backend }\n")),
        (
            "same route, other spelling",
            rest(
                "  - { name: b, host: A.example., methods: [GET, HEAD], pool: backend }\n  - { name: c, host: a.example, methods: [HEAD, GET], pool: backend }\n",
            ),
        ),
        (
            "predicates too late",
            rest(
                "  - { name: b, header_predicates: [{ name: X-Canary, value: \"1\" }], pool: backend }\n",
            ),
        ),
        ("body limit", route("max_body_bytes: big")),
        ("tunnel", route("tunnel_idle_timeout: 0s")),
    ]);
    insta::assert_snapshot!(told);
}

#[test]
fn middleware() {
    let item = |text: &str| route(&format!("middleware: [{{ {text} }}]"));
    let headers = |text: &str| item(&format!("headers: {{ {text} }}"));
    let told = reports(&[
        ("unknown", item("retries: {}")),
        ("two in one", item("retry: {}, compress: {}")),
        ("none", route("middleware: [{}]")),
        ("twice", route("middleware:\n  - retry: {}\n  - compress:\n  - retry: {}")),
        ("rps", item("rate_limit: { per_ip_rps: 0 }")),
        ("burst", item("rate_limit: { burst: 0 }")),
        ("scope", item("rate_limit: { scope: per-client }")),
        (
            "hops and proxies",
            route("middleware:\n  - rate_limit:\n      trust_proxy_hops: 1")
                .replace("upstream_pools:", "    trusted_proxies: [10.0.0.0/8]\nupstream_pools:"),
        ),
        ("max_attempts", item("retry: { max_attempts: 0 }")),
        ("max_replayable_body", item("retry: { max_replayable_body: 2GiB }")),
        ("retry_on", item("retry: { retry_on: [502, 99, 600] }")),
        ("retry_on_grpc", item("retry: { retry_on_grpc: [UNAVAILABLE, \"503\"] }")),
        ("retry_methods", item("retry: { retry_methods: [Get] }")),
        ("hedgeable", item("retry: { hedgeable: [POST, get] }")),
        ("percentile", item("retry: { hedge_after_percentile: 100 }")),
        ("line break", headers("add_request: { X-A: \"a\\r\\nX-B: b\" }")),
        ("line feed in a response", headers("add_response: { X-A: \"a\\nb\" }")),
        ("NUL", headers("add_request: { X-A: \"a\\0b\" }")),
        ("space", headers("add_request: { X-A: \" a\" }")),
        ("header name", headers("add_request: { \"X A\": a }")),
        ("hop-by-hop added", headers("add_request: { Connection: close }")),
        ("framing removed", headers("remove_response: [Content-Length, transfer-encoding]")),
        ("host", headers("add_request: { Host: a }")),
        ("same header", headers("add_request: { X-A: a, x-a: b }")),
        ("number as value", headers("add_request: { X-A: 1 }")),
        ("blank value", headers("add_request: { X-A: , X-B: b }")),
        ("media type", item("compress: { skip_content_types: [png] }")),
    ]);
    insta::assert_snapshot!(told);
}

#[test]
fn tracing_and_drain() {
    let told = reports(&[
        ("sample_ratio", rest("tracing: { sample_ratio: 1.5 }\n")),
        ("endpoint", rest("tracing: { endpoint: \"http://localhost:4317\" }\n")),
        ("endpoint without a port", rest("tracing: { endpoint: localhost }\n")),
        ("drain", rest("drain: { timeout: -1s }\n")),
        ("admin", rest("admin: { bind: 9090 }\n")),
    ]);
    insta::assert_snapshot!(told);
}
