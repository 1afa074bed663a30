//! Where errors are said to be, and which of them are told.

use super::{check, pool, rest};

/// Line, column, path and message of everything that is wrong.
fn places(text: &str) -> Vec<String> {
    let refused = check(text).unwrap_err();
    let place = |wrong: &crate::config::Wrong| {
        let (line, column) = wrong.line_column(&refused.source).unwrap_or_default();
        format!("{line}:{column} {}: {}", wrong.path, wrong.message)
    };
    refused.wrongs.iter().map(place).collect()
}

#[test]
fn every_error_of_a_file_is_told_at_once_in_file_order() {
    let text = "\
listeners:
  - name: http
    bind: localhost
    timeouts: { idle: 30, raed: 5s }
  - bind: \"127.0.0.1:8081\"
upstream_pools:
  - name: backend
    selector: { algorithm: leastconn, epsilon: 0 }
    upstreams:
      - url: http://127.0.0.1:9001
        weight: heavy
      - { url: \"ftp://a\", weight: 0 }
      - 5
      - url: http://127.0.0.1:9001
routes:
  - name: api
    host: 1
    pool: bakend
    methods: [GET, 5, get]
colour: red
";
    insta::assert_snapshot!(check(text).unwrap_err().render(false));
    assert_eq!(
        places(text),
        [
            "3:11 listeners[0].bind: `localhost` is not an address to listen on",
            "4:23 listeners[0].timeouts.idle: a bare number has no unit: write `30s` for seconds, or `30ms`",
            "4:27 listeners[0].timeouts.raed: unknown key `raed`",
            "5:5 listeners[1]: `name` is missing",
            "8:28 upstream_pools[0].selector.algorithm: unknown algorithm `leastconn`",
            "8:48 upstream_pools[0].selector.epsilon: `epsilon` must be above 0, is 0",
            "11:17 upstream_pools[0].upstreams[0].weight: expected a whole number, found the text `heavy`",
            "12:16 upstream_pools[0].upstreams[1].url: unknown scheme `ftp`",
            "12:35 upstream_pools[0].upstreams[1].weight: `weight` must be from 1 to 65535, is 0",
            "13:9 upstream_pools[0].upstreams[2]: expected a section with keys (`url`, `weight`, `max_in_flight`, …), found the number `5`",
            "14:14 upstream_pools[0].upstreams[3].url: duplicate upstream URL `http://127.0.0.1:9001`",
            "17:11 routes[0].host: expected text, found the number `1`",
            "18:11 routes[0].pool: unknown pool `bakend`",
            "19:20 routes[0].methods[1]: expected text, found the number `5`",
            "19:23 routes[0].methods[2]: methods are case-sensitive: `get` is not `GET`",
            "20:1 colour: unknown key `colour`",
        ]
    );
}

#[test]
fn columns_count_characters_and_lines_may_end_in_any_way() {
    let told = places("# ä\r\nadmin: { \"ключ\": 1, bind: x }\r\n");
    assert!(told.contains(&"2:10 admin.ключ: unknown key `ключ`".to_owned()), "{told:?}");
    let bind = "2:27 admin.bind: `x` is not an address to listen on";
    assert!(told.contains(&bind.to_owned()), "{told:?}");
    assert_eq!(
        places("\u{feff}workers: none\n").last().map(String::as_str),
        Some("1:11 workers: expected `auto` or a number of threads, found the text `none`")
    );
}

#[test]
fn text_over_several_lines_is_marked_where_it_begins() {
    let text = rest("admin:\n  bind: >\n    a\n    b\n");
    let refused = check(&text).unwrap_err().render(false);
    assert!(refused.contains("--> config.yaml:"), "{refused}");
}

#[test]
fn an_alias_is_told_where_the_value_is_written() {
    let text = pool("connect_timeout: &t 5\nslow_start: *t");
    assert_eq!(
        places(&text),
        [
            "7:25 upstream_pools[0].connect_timeout: a bare number has no unit: write `5s` for seconds, or `5ms`",
            "7:25 upstream_pools[0].slow_start: a bare number has no unit: write `5s` for seconds, or `5ms`",
        ]
    );
}

#[test]
fn what_only_follows_from_another_error_is_not_told() {
    for (text, only) in [
        // The pool is there, only something else in it is wrong.
        (pool("selector: { algorithm: x }"), "unknown algorithm `x`"),
        // The name of the pool could not be read.
        (rest("").replace("name: backend", "name: 5"), "expected text, found the number `5`"),
        (rest("").replace("name: backend", "nmae: backend"), "unknown key `nmae`"),
        (rest("").replace("upstream_pools:", "upstream_pool:"), "unknown key `upstream_pool`"),
        (rest("").replace("upstreams:", "upstream:"), "unknown key `upstream`"),
        (rest("").replace("routes:", "route:"), "unknown key `route`"),
        (rest("").replace("listeners:", "listener:"), "unknown key `listener`"),
        (rest("").replace("- name: backend\n    ", "- "), "`name` is missing"),
        // The two routes differ, in what could not be read.
        (rest("  - { name: b, host: 5, pool: backend }\n"), "expected text, found the number `5`"),
        (rest("  - { name: b, host: \"a:1\", pool: backend }\n"), "a host has no port here: `a:1`"),
        (rest("  - { name: b, hots: a.example, pool: backend }\n"), "unknown key `hots`"),
        (pool("health: { activ: {}, passive: {} }"), "unknown key `activ`"),
        (
            pool("health: { active: 5, passive: {} }"),
            "expected a section with keys (`path`, `method`, `interval`, …), found the number `5`",
        ),
    ] {
        let refused = check(&text).unwrap_err();
        let told: Vec<&str> = refused.wrongs.iter().map(|wrong| wrong.message.as_str()).collect();
        assert_eq!(told, [only], "{text}");
    }
}

#[test]
fn errors_without_end_are_cut() {
    let text = format!("routes: [{}]", "5, ".repeat(5000));
    let refused = check(&text).unwrap_err();
    assert_eq!(refused.wrongs.len(), 100);
    assert!(refused.render(false).ends_with("error: the first 100 problems in config.yaml\n"));
    let copies = rest(&"  - { name: all, pool: backend }\n".repeat(5000));
    assert_eq!(check(&copies).unwrap_err().wrongs.len(), 100);
}

#[test]
fn color_only_when_asked_for() {
    let refused = check("workers: none\n").unwrap_err();
    assert!(!refused.render(false).contains('\u{1b}'));
    assert!(refused.render(true).contains('\u{1b}'));
}

#[test]
fn what_the_file_holds_cannot_move_the_cursor() {
    let text = rest("").replace("pool: backend", "pool: \"a\\e[2J\\nb\"");
    let told = check(&text).unwrap_err().render(false);
    assert!(!told.contains('\u{1b}'), "{told}");
    let told = check("\"a\\e[2J\": 1\n").unwrap_err().render(false);
    assert!(!told.contains('\u{1b}'), "{told}");
    let told = check("# \u{9b}2J\nworkers: \u{7f}\n").unwrap_err().render(false);
    assert!(!told.contains(['\u{9b}', '\u{7f}']), "{told}");
}
