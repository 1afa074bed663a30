//! What is accepted, and what it comes to.

use std::time::Duration;

use super::{accepted, check, listener, pool, rest, route};
use crate::config::plan::{Action, Bind, HostPattern, Scheme};
use crate::config::{Files, from_flags, load, schema};

const FULL: &str = include_str!("full.yaml");

#[test]
fn every_key_of_the_schema_parses() {
    let loaded = accepted(FULL);
    insta::assert_debug_snapshot!(loaded.plan);
    assert!(loaded.warnings.is_empty());
}

#[test]
fn what_cannot_be_served_is_named_with_its_place() {
    insta::assert_snapshot!(accepted(FULL).render_not_yet(false));
    let served = route(
        "middleware: [{ headers: { add_request: { X-A: a } } }]\nrewrite: { add_prefix: /a }",
    );
    assert!(accepted(&served).not_yet.is_empty());
    let one = |text: &str| accepted(text).not_yet.len();
    assert_eq!(one(&pool("upstream_tls: { server_name: a }\nprotocol: http2")), 0);
    assert_eq!(one(&route("tunnel_idle_timeout: 1h")), 0);
    assert_eq!(one(&route("middleware:\n  - compress:")), 1);
    assert_eq!(one(&listener("enable_http3: false\nlimits: { min_body_rate: 0 }")), 0);
    assert_eq!(one(&pool("slow_start: 0s\nprotocol: auto")), 0);
}

#[test]
fn the_defaults_are_those_of_the_schema() {
    insta::assert_debug_snapshot!(accepted(&rest("")).plan);
}

#[test]
fn a_hundred_thousand_routes_are_a_configuration() {
    use std::fmt::Write as _;
    let mut routes = String::new();
    for n in 0..100_000 {
        let _ =
            writeln!(routes, "  - {{ name: r{n}, host: h{n}.test, path_prefix: /r{n}, pool: p }}");
    }
    let pool = "{ name: p, upstreams: [{ url: \"http://127.0.0.1:9001\" }] }";
    let listener = "{ name: http, bind: \"127.0.0.1:8080\" }";
    let text = format!("listeners: [{listener}]\nupstream_pools: [{pool}]\nroutes:\n{routes}");
    assert_eq!(accepted(&text).plan.routes.len(), 100_000);
}

#[test]
fn blank_sections_and_blank_values_mean_their_defaults() {
    let plain = accepted(&rest("")).plan;
    let blank = "listeners:
  - name: http
    bind: \"127.0.0.1:8080\"
    timeouts:
    limits: { max_headers: , max_body_bytes: null }
    trusted_proxies:
    enable_http3:
    max_in_flight: ~
upstream_pools:
  - name: backend
    upstreams: [{ url: \"http://127.0.0.1:9001\", weight: }]
    selector: { algorithm: , epsilon: , hash_key: }
    connect_timeout:
    host_header:
    health:
    circuit_breaker:
routes:
  - name: all
    pool: backend
    host:
    path_prefix:
    middleware:
    rewrite:
    tunnel_idle_timeout:
admin:
limits:
drain:
workers:
access_log:
tracing:
";
    assert_eq!(accepted(blank).plan, plain);
    let retry = accepted(&route("middleware:\n  - retry:\n  - compress:")).plan;
    assert_eq!(retry.routes[0].retry.as_ref().map(|retry| retry.max_attempts), Some(3));
    assert_eq!(retry.routes[0].compress.as_ref().map(|compress| compress.min_bytes), Some(1024));
    let active = accepted(&pool("health:\n  active:")).plan;
    assert_eq!(
        active.pools[0].active.as_ref().map(|active| active.path.as_str()),
        Some("/healthz")
    );
}

#[test]
fn any_number_of_values_may_be_blank() {
    let blank = |n: usize| {
        format!(
            "  - {{ name: r{n}, host: h{n}.example, path_prefix: , methods: , max_body_bytes: , pool: backend }}\n"
        )
    };
    let text = rest(&(0..3000).map(blank).collect::<String>());
    assert_eq!(accepted(&text).plan.routes.len(), 3001);
}

#[test]
fn a_class_of_failures_leaves_out_what_speaks_of_the_request() {
    let counted = |keys: &str| {
        let plan = accepted(&pool(&format!("circuit_breaker: {{ {keys} }}"))).plan;
        (400..=599).filter(|&status| plan.pools[0].breaker.is_failure(status)).collect::<Vec<_>>()
    };
    let without = |left_out: &[u16]| {
        (500..=599).filter(|status| !left_out.contains(status)).collect::<Vec<_>>()
    };
    for (keys, want) in [
        ("", without(&[501, 505])),
        ("failure_statuses: [5xx]", without(&[501, 505])),
        ("failure_statuses: [5xx, 501]", without(&[505])),
        ("failure_statuses: [505, 5xx, 501]", without(&[])),
        ("failure_statuses: [429, 501, 503]", vec![429, 501, 503]),
        ("failure_statuses: [4xx]", (400..=499).collect()),
        ("failure_statuses: []", vec![]),
    ] {
        assert_eq!(counted(keys), want, "{keys}");
    }
}

#[test]
fn the_quick_start_works() {
    let plan = accepted(
        "listeners:
  - name: http
    bind: \"127.0.0.1:8080\"

upstream_pools:
  - name: backend
    selector:
      algorithm: p2c-ewma
    upstreams:
      - url: http://127.0.0.1:9001
      - url: http://127.0.0.1:9002

routes:
  - name: api
    host: localhost
    path_prefix: /
    pool: backend
",
    );
    assert!(plan.not_yet.is_empty() && plan.warnings.is_empty());
    assert_eq!(plan.plan.pools[0].upstreams.len(), 2);
    assert_eq!(plan.plan.routes[0].action, Action::Pool(0));
}

#[test]
fn times() {
    for (text, millis) in [
        ("100ms", 100),
        ("1.5s", 1500),
        ("1m30s", 90_000),
        ("1h", 3_600_000),
        (".5s", 500),
        ("1.s", 1000),
        ("\"2s\"", 2000),
        ("+2s", 2000),
        ("0s", 0),
        ("0", 0),
        ("-0", 0),
    ] {
        let plan = accepted(&pool(&format!("slow_start: {text}"))).plan;
        assert_eq!(plan.pools[0].slow_start, Duration::from_millis(millis), "{text}");
    }
    for text in ["1", "s", "1 s", "1s ", "1,5s", "1d", "--1s", "1.2.3s", ".s", "1ss", "5S", "1e3s"]
    {
        assert!(check(&pool(&format!("slow_start: \"{text}\""))).is_err(), "{text}");
    }
}

#[test]
fn sizes() {
    for (text, bytes) in [
        ("0", 0),
        ("65536", 65536),
        ("\"65536\"", 65536),
        ("0x10", 16),
        ("64KiB", 65536),
        ("64 KiB", 65536),
        ("10MiB", 10 << 20),
        ("1GiB", 1 << 30),
        ("12B", 12),
    ] {
        let plan = accepted(&route(&format!("max_body_bytes: {text}"))).plan;
        assert_eq!(plan.routes[0].max_body_bytes, bytes, "{text}");
    }
    for text in ["1.5MiB", "KiB", "64kib", "1_000", "-1KiB", "64KiBx", "0b2"] {
        assert!(check(&route(&format!("max_body_bytes: \"{text}\""))).is_err(), "{text}");
    }
}

#[test]
fn hosts_are_kept_in_one_form() {
    for (written, kept) in [
        ("API.Example.com.", HostPattern::Exact("api.example.com".into())),
        ("*.Example.com", HostPattern::Wildcard("example.com".into())),
        ("localhost", HostPattern::Exact("localhost".into())),
        ("10.0.0.1", HostPattern::Exact("10.0.0.1".into())),
        ("[2001:DB8:0::1]", HostPattern::Exact("[2001:db8::1]".into())),
        ("::1", HostPattern::Exact("[::1]".into())),
        ("a_b.example", HostPattern::Exact("a_b.example".into())),
        ("*", HostPattern::Any),
    ] {
        let plan = accepted(&route(&format!("host: \"{written}\""))).plan;
        assert_eq!(plan.routes[0].host, kept, "{written}");
    }
}

#[test]
fn urls_are_taken_apart() {
    for (written, scheme, host, port, authority, base) in [
        ("http://a", Scheme::Http, "a", 80, "a", ""),
        ("http://A:8080/", Scheme::Http, "a", 8080, "a:8080", ""),
        ("HTTPS://a.example/v1/", Scheme::Https, "a.example", 443, "a.example", "/v1"),
        ("h2c://[::1]:9000", Scheme::H2c, "::1", 9000, "[::1]:9000", ""),
        ("http://10.0.0.1:1/a/b", Scheme::Http, "10.0.0.1", 1, "10.0.0.1:1", "/a/b"),
    ] {
        let plan = accepted(&rest("").replace("http://127.0.0.1:9001", written)).plan;
        let upstream = &plan.pools[0].upstreams[0];
        assert_eq!(upstream.url, written);
        assert_eq!((upstream.scheme, upstream.port), (scheme, port), "{written}");
        assert_eq!(upstream.host, host);
        assert_eq!(upstream.authority, authority);
        assert_eq!(upstream.base_path, base);
    }
}

#[test]
fn routes_that_only_look_alike_are_accepted() {
    for text in [
        rest("  - { name: b, methods: [GET], pool: backend }\n"),
        rest(
            "  - { name: b, path_prefix: /v1, pool: backend }\n  - { name: c, path_prefix: /v1/, pool: backend }\n",
        ),
        rest(
            "  - { name: b, host: a.example, header_predicates: [{ name: X, value: \"1\" }], pool: backend }\n  - { name: c, host: a.example, header_predicates: [{ name: X, value: \"2\" }], pool: backend }\n  - { name: d, host: a.example, pool: backend }\n",
        ),
        rest("  - { name: b, listeners: [other], pool: backend }\n")
            .replace(
                "upstream_pools:",
                "  - { name: other, bind: \"127.0.0.1:81\" }\nupstream_pools:",
            )
            .replace("  - name: all\n", "  - name: all\n    listeners: [http]\n"),
    ] {
        accepted(&text);
    }
}

#[test]
fn admin_may_be_off_and_ports_may_be_chosen_by_the_system() {
    assert_eq!(accepted(&rest("admin: { bind: \"\" }\n")).plan.admin, None);
    accepted(&rest("admin: { bind: \"127.0.0.1:0\" }\n").replace("127.0.0.1:8080", "127.0.0.1:0"));
    let unix = accepted(&rest("").replace("127.0.0.1:8080", "unix:/run/l7rp.sock")).plan;
    assert_eq!(unix.listeners[0].bind, Bind::Unix("/run/l7rp.sock".into()));
}

#[test]
fn merge_keys_work() {
    let text = pool("keepalive: &k { max_idle: 7 }\ndns: &d { refresh: 1s }")
        .replace("routes:", "  - { name: other, <<: { keepalive: { max_idle: 9 } }, upstreams: [{ url: \"http://a\" }] }\nroutes:");
    assert_eq!(accepted(&text).plan.pools[1].keepalive.max_idle, 9);
}

#[test]
fn warnings_do_not_refuse() {
    let text = pool("upstream_tls: { insecure_skip_verify: true }")
        .replace("routes:", "  - { name: spare, upstreams: [{ url: \"http://a\" }] }\nroutes:");
    insta::assert_snapshot!(accepted(&text).render_warnings(false));
}

#[test]
fn a_file_is_loaded_or_the_reason_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let told = |name: &str| {
        let error = load(&dir.path().join(name), Files::Check).unwrap_err();
        error.render(false).replace(&dir.path().display().to_string(), "DIR")
    };
    std::fs::write(dir.path().join("good.yaml"), rest("")).unwrap();
    std::fs::write(dir.path().join("latin1.yaml"), b"a: 1\nb: \xe4\n").unwrap();
    assert!(load(&dir.path().join("good.yaml"), Files::Check).is_ok());
    assert_eq!(
        told("gone.yaml"),
        "error: cannot read the configuration DIR/gone.yaml: No such file or directory (os error 2)\n"
    );
    assert_eq!(
        told("."),
        "error: cannot read the configuration DIR/.: Is a directory (os error 21)\n"
    );
    assert_eq!(
        told("latin1.yaml"),
        "error: the configuration DIR/latin1.yaml is not UTF-8 text: line 2\n"
    );
}

#[test]
fn flags_make_a_plan() {
    let urls = "http://127.0.0.1:9001, http://127.0.0.1:9002";
    insta::assert_debug_snapshot!(from_flags("127.0.0.1:8080", urls, 256).unwrap());
    assert_eq!(
        from_flags(":8080", "127.0.0.1:9001,http://a,http://a", 0).unwrap_err(),
        [
            "--listen: `:8080` is not an address to listen on (write `0.0.0.0:8080` for all IPv4 addresses, `[::]:8080` for all addresses)",
            "--backends 127.0.0.1:9001: `127.0.0.1:9001` is not a URL: it has no scheme (write `http://127.0.0.1:9001`)",
            "--backends http://a: is there twice",
            "--max-in-flight: must be at least 1",
        ]
    );
    assert_eq!(
        from_flags("[::]:80", " ,", 1).unwrap_err(),
        ["--backends: at least one URL is needed"]
    );
}

#[test]
fn the_schema_describes_every_key() {
    let schema = schema();
    insta::assert_json_snapshot!(schema);
    let mut found = Vec::new();
    undescribed(&schema, "", &mut found);
    assert_eq!(found, Vec::<String>::new());
}

/// Keys without a description.
fn undescribed(value: &serde_json::Value, path: &str, found: &mut Vec<String>) {
    if let Some(properties) = value.get("properties").and_then(|p| p.as_object()) {
        for (key, property) in properties {
            let described = property.get("description").is_some();
            if !described {
                found.push(format!("{path}.{key}"));
            }
        }
    }
    if let Some(definitions) = value.get("$defs").and_then(|d| d.as_object()) {
        for (name, definition) in definitions {
            undescribed(definition, name, found);
        }
    }
}
