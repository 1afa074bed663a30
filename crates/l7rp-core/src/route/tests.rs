use std::cmp::Reverse;

use proptest::prelude::*;

use super::*;

fn rule(host: &str, prefix: &str) -> Rule {
    let host = match host.strip_prefix("*.") {
        Some(suffix) => HostPattern::Wildcard(suffix.into()),
        None if host == "*" => HostPattern::Any,
        None => HostPattern::Exact(host.into()),
    };
    Rule { host, prefix: prefix.into(), methods: vec![], predicates: vec![], listeners: vec![] }
}

fn get<'a>(host: &'a str, path: &'a str) -> Request<'a> {
    Request {
        listener: 0,
        host: parse_host(host.as_bytes()).ok(),
        path: path.as_bytes(),
        method: b"GET",
        has_field: &|_, _| false,
    }
}

/// The rule that is found, checked against what is explained.
#[track_caller]
fn find(table: &Table, request: &Request<'_>) -> Option<usize> {
    let found = table.find(request);
    let why = table.why(request);
    let taken: Vec<_> =
        why.iter().filter(|v| v.outcome == Outcome::Taken).map(|v| v.rule).collect();
    assert_eq!(taken, Vec::from_iter(found), "find and why differ for {request:?}");
    assert_eq!(why.len(), table.rules().len());
    found
}

#[test]
fn a_prefix_ends_at_a_segment() {
    let table = Table::new(vec![rule("*", "/v1"), rule("*", "/v2/"), rule("*", "/")]);
    for (path, want) in [
        ("/v1", 0),
        ("/v1/", 0),
        ("/v1?x", 0),
        ("/v1/?x", 0),
        ("/v1//x", 0),
        ("/v1/x/y?/z", 0),
        ("/v1x", 2),
        ("/v1;a", 2),
        ("/v1%2Fx", 2),
        ("/V1", 2),
        ("/v2", 2),
        ("/v2?/", 2),
        ("/v2/", 1),
        ("/v2//", 1),
        ("/v2/x", 1),
        ("/v2%2F", 2),
        ("/v10/..", 2),
        ("//v1", 2),
        ("/", 2),
        ("/?x", 2),
        ("", 2),
        ("?x", 2),
        ("*", 2),
    ] {
        assert_eq!(find(&table, &get("a", path)), Some(want), "{path}");
    }
    let no_root = Table::new(vec![rule("*", "/v1"), rule("*", "v1"), rule("*", "")]);
    for path in ["*", "/", "", "/v2", "v1"] {
        assert_eq!(find(&no_root, &get("a", path)), None, "{path}");
    }
}

#[test]
fn the_longest_prefix_wins_with_slashes_counted() {
    let prefixes = ["/", "/a", "/a/", "/a/b", "/a//", "/a//b", "/a/b/c/"];
    let table = Table::new(prefixes.iter().map(|prefix| rule("*", prefix)).collect());
    for (path, want) in [
        ("/a", "/a"),
        ("/a/", "/a/"),
        ("/a/x", "/a/"),
        ("/a/b", "/a/b"),
        ("/a/bc", "/a/"),
        ("/a/b/c", "/a/b"),
        ("/a/b/c/", "/a/b/c/"),
        ("/a/b/c/d", "/a/b/c/"),
        ("/a//", "/a//"),
        ("/a///", "/a//"),
        ("/a//b", "/a//b"),
        ("/a//b/", "/a//b"),
        ("/a//c", "/a//"),
        ("//a", "/"),
    ] {
        let found = find(&table, &get("a", path)).unwrap();
        assert_eq!(prefixes[found], want, "{path}");
    }
}

#[test]
fn hosts_match_in_every_spelling() {
    // More than a hundred hosts, as some matchers behave differently beyond.
    let mut rules: Vec<_> = (0..150).map(|n| rule(&format!("h{n}.example"), "/")).collect();
    rules.push(rule("Admin.Example.com", "/"));
    rules.push(rule("[::1]", "/"));
    rules.push(rule("*", "/"));
    let table = Table::new(rules);
    for (host, want) in [
        ("h0.example", 0),
        ("H149.EXAMPLE.:8080", 149),
        ("admin.example.com", 150),
        ("ADMIN.EXAMPLE.COM", 150),
        ("admin.example.com:8080", 150),
        ("admin.example.com.", 150),
        ("admin.example.com.:80", 150),
        ("[::1]", 151),
        ("[::1]:8080", 151),
        ("[0:0:0:0:0:0:0:1]", 151),
        ("[::2]", 152),
        ("h150.example", 152),
        ("x.h1.example", 152),
        ("xn--bcher-kva.example", 152),
    ] {
        assert_eq!(find(&table, &get(host, "/")), Some(want), "{host}");
    }
    let none = Request { host: None, ..get("a", "/") };
    assert_eq!(find(&table, &none), Some(152), "no host at all");
}

#[test]
fn a_wildcard_stands_for_exactly_one_label() {
    let table = Table::new(vec![
        rule("*", "/long/path"),
        rule("*.example.com", "/long"),
        rule("*.b.example.com", "/"),
        rule("a.example.com", "/"),
    ]);
    for (host, path, want) in [
        ("a.example.com", "/long/path", Some(3)),
        ("b.example.com:1", "/long/path", Some(1)),
        ("B.EXAMPLE.COM.", "/long", Some(1)),
        ("b.example.com", "/", None),
        ("x.b.example.com", "/long", Some(2)),
        ("x.y.example.com", "/long/path", Some(0)),
        ("example.com", "/long/path", Some(0)),
        ("example.com", "/long", None),
    ] {
        assert_eq!(find(&table, &get(host, path)), want, "{host}{path}");
    }
}

#[test]
fn what_does_not_match_wholly_falls_through() {
    let mut write = rule("a", "/v1/x");
    write.methods = vec!["POST".into(), "PUT".into()];
    let mut canary = rule("a", "/v1");
    canary.predicates = vec![("x-canary".into(), "1".into()), ("x-user".into(), "me".into())];
    let mut inner = rule("*", "/v1");
    inner.listeners = vec![1, 2];
    let rules = vec![rule("*", "/"), rule("a", "/"), rule("a", "/v1"), inner, canary, write];
    let table = Table::new(rules);
    let get = get("a", "/v1/x");
    assert_eq!(find(&table, &get), Some(2));
    assert_eq!(find(&table, &Request { method: b"POST", ..get }), Some(5));
    assert_eq!(find(&table, &Request { method: b"post", ..get }), Some(2));
    let one = |name: &str, value: &str| (name, value) == ("x-canary", "1");
    let request = Request { has_field: &one, ..get };
    assert_eq!(find(&table, &request), Some(2));
    let both = |name: &str, value: &str| one(name, value) || (name, value) == ("x-user", "me");
    assert_eq!(find(&table, &Request { has_field: &both, ..get }), Some(4));
    let other = Request { host: parse_host(b"b").ok(), ..get };
    assert_eq!(find(&table, &other), Some(0));
    assert_eq!(find(&table, &Request { listener: 2, ..other }), Some(3));

    let outcomes: Vec<_> = table.why(&request).into_iter().map(|v| (v.rule, v.outcome)).collect();
    assert_eq!(
        outcomes,
        [
            (5, Outcome::Method),
            (4, Outcome::Predicate("x-user".into())),
            (2, Outcome::Taken),
            (1, Outcome::Outranked),
            (3, Outcome::Listener),
            (0, Outcome::Outranked),
        ]
    );
    let outcomes: Vec<_> = table.why(&Request { path: b"/v2", ..other }).into_iter().collect();
    assert_eq!(outcomes[0].outcome, Outcome::Host);
    assert_eq!(outcomes[4], Verdict { rule: 3, outcome: Outcome::Prefix });
}

#[test]
fn a_path_of_slashes_is_walked_once() {
    let deep = "/".repeat(8_000);
    let table = Table::new(vec![rule("*", &deep), rule("*", "/a"), rule("*", "/")]);
    let path = "/".repeat(16_384);
    assert_eq!(find(&table, &get("a", &path)), Some(0));
    assert_eq!(find(&table, &get("a", &path[..7_999])), Some(2));
    assert_eq!(find(&table, &get("a", &format!("/a{path}"))), Some(1));
}

#[test]
fn a_hundred_thousand_routes() {
    let mut rules: Vec<_> = (0..50_000).map(|n| rule("*", &format!("/svc{n}/v1"))).collect();
    rules.extend((0..50_000).map(|n| rule(&format!("h{n}.example"), "/api")));
    let table = Table::new(rules);
    for n in (0..50_000).step_by(997) {
        let path = format!("/svc{n}/v1/x");
        assert_eq!(table.find(&get("a", &path)), Some(n));
        let host = format!("h{n}.example");
        assert_eq!(table.find(&get(&host, "/api")), Some(50_000 + n));
        assert_eq!(table.find(&get(&host, &path)), Some(n), "falls to any host");
        assert_eq!(table.find(&get(&host, "/svc")), None);
    }
}

/// The documentation, word for word: the first rule in the total order that matches.
fn naive(rules: &[Rule], host: &str, request: &Request<'_>) -> Option<usize> {
    let host = host.split(':').next().unwrap().trim_end_matches('.').to_lowercase();
    let path = std::str::from_utf8(request.path).unwrap().split('?').next().unwrap();
    let order = |&ix: &usize| {
        let rule = &rules[ix];
        let class = match &rule.host {
            HostPattern::Exact(_) => (0, Reverse(0)),
            HostPattern::Wildcard(suffix) => (1, Reverse(suffix.len())),
            HostPattern::Any => (2, Reverse(0)),
        };
        let plain = rule.methods.is_empty() && rule.predicates.is_empty();
        (class, Reverse(rule.prefix.len()), plain, ix)
    };
    let matches = |&ix: &usize| {
        let rule = &rules[ix];
        let host = match &rule.host {
            HostPattern::Exact(name) => host == name.to_lowercase(),
            HostPattern::Wildcard(suffix) => {
                host.split_once('.').is_some_and(|(_, rest)| rest == suffix.to_lowercase())
            }
            HostPattern::Any => true,
        };
        let prefix = path == rule.prefix
            || path.starts_with(&format!("{}/", rule.prefix.trim_end_matches('/')))
                && path.starts_with(&rule.prefix)
                && (rule.prefix.ends_with('/') || path[rule.prefix.len()..].starts_with('/'))
            || path == "*" && rule.prefix == "/";
        let method = std::str::from_utf8(request.method).unwrap().to_owned();
        host && prefix
            && (rule.methods.is_empty() || rule.methods.contains(&method))
            && rule.predicates.iter().all(|(name, value)| (request.has_field)(name, value))
            && (rule.listeners.is_empty() || rule.listeners.contains(&request.listener))
    };
    (0..rules.len()).filter(matches).min_by_key(order)
}

fn any_rule() -> impl Strategy<Value = Rule> {
    let host = prop_oneof![
        Just(HostPattern::Any),
        "(a|B|a\\.b|b\\.a\\.b)".prop_map(HostPattern::Exact),
        "(a|B|a\\.b)".prop_map(HostPattern::Wildcard),
    ];
    let methods = prop::collection::vec("(GET|PUT)", 0..2);
    let predicates = prop::collection::vec(("(x|y)", "(0|1)"), 0..2);
    let listeners = prop::collection::vec(0..3usize, 0..2);
    (host, "(/(a|b|ab|%2F|)){0,4}/?", methods, predicates, listeners).prop_map(
        |(host, prefix, methods, predicates, listeners)| {
            let prefix = if prefix.is_empty() { "/".into() } else { prefix };
            Rule { host, prefix, methods, predicates, listeners }
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1_000, failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn same_as_going_through_the_list(
        rules in prop::collection::vec(any_rule(), 0..25),
        requests in prop::collection::vec((
            "(a|b|A|c)(\\.(a|b|B)){0,2}\\.?(:80)?",
            "((/(a|b|ab|c|%2F|)){1,6}(\\?/a/b)?|\\*)",
            "(GET|PUT|POST)",
            0..3usize,
            "(0|1|2)",
            "(0|1|2)",
        ), 20),
    ) {
        let table = Table::new(rules.clone());
        for (host, path, method, listener, x, y) in &requests {
            let has_field = |name: &str, value: &str| value == if name == "x" { x } else { y };
            let request = Request {
                listener: *listener,
                host: parse_host(host.as_bytes()).ok(),
                path: path.as_bytes(),
                method: method.as_bytes(),
                has_field: &has_field,
            };
            prop_assert!(request.host.is_some());
            prop_assert_eq!(find(&table, &request), naive(&rules, host, &request));
        }
    }

    #[test]
    fn normal_hosts_are_stable(raw in "[a-zA-Z0-9.:\\[\\]-]{0,30}|\\[[0-9a-fA-F:]{2,20}\\](:[0-9]{0,4})?") {
        if let Ok(host) = parse_host(raw.as_bytes()) {
            let (mut once, mut twice) = ([0; MAX_HOST], [0; MAX_HOST]);
            let once = host.normal(&mut once);
            let again = parse_host(once).unwrap();
            prop_assert_eq!(again.port(), None);
            prop_assert_eq!(again.normal(&mut twice), once);
        }
    }

    #[test]
    fn no_octets_upset_the_parser(raw in prop::collection::vec(any::<u8>(), 0..40)) {
        let _ = parse_host(&raw);
    }
}
