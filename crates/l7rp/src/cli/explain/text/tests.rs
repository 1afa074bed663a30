use std::path::Path;

use super::*;
use crate::config::{Files, Source, parse};
use crate::explain::{Asked, explain};

const YAML: &str = "
listeners:
- name: web
  bind: '127.0.0.1:8080'
  trusted_proxies: [10.0.0.0/8]
  max_in_flight: 100
- name: tls
  bind: '0.0.0.0:443'
  tls: { certs: [{ cert: a.pem, key: a.key }] }
upstream_pools:
- name: api
  selector: { algorithm: consistent-hash-bounded, hash_key: 'cookie:session' }
  host_header: upstream
  max_in_flight: 50
  upstreams:
  - { url: 'http://10.1.0.1:8080/base', max_in_flight: 8 }
  - { url: 'http://10.1.0.2:8080/base', weight: 3 }
  - { url: 'http://a-name-that-does-not-fit-beside-the-others.example.org:8080/', weight: 2, backup: true }
routes:
- { name: site, host: '*.example.com', respond: { status: 200, body: hi } }
- name: api
  host: api.example.org
  path_prefix: /v1
  pool: api
  rewrite: { strip_prefix: /v1 }
  methods: [GET, POST]
  allow: [192.0.2.0/24]
  middleware:
  - rate_limit: { per_ip_rps: 10, burst: 20 }
  - retry: { max_attempts: 3, retry_methods: [GET], hedge_after: 50ms, hedgeable: [GET] }
  - headers: { add_request: { X-Secret: hush }, remove_request: [Cookie] }
  timeouts: { total: 30s }
- name: canary
  host: api.example.org
  path_prefix: /v1
  pool: api
  header_predicates: [{ name: x-canary, value: 'yes' }]
- { name: api-v2-with-a-very-long-name, host: api.example.org, path_prefix: /v2, pool: api }
- { name: old, host: old.example.org, redirect: { scheme: https, code: 308 } }
- { name: rest, listeners: [tls], pool: api }
";

fn told(asked: &Asked) -> String {
    let source = Source { name: "x".into(), text: YAML.into() };
    let plan = parse(&source, Path::new(""), Files::Ignore)
        .unwrap_or_else(|e| panic!("{}", e.render(false)))
        .plan;
    let process = super::super::at_rest(plan).unwrap();
    let text = render(&explain(&process.snapshot(), None, asked).unwrap());
    for line in text.lines() {
        assert!(line.chars().count() <= WIDTH, "{line}");
    }
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    text
}

fn get(url: &str, headers: &[&str], client: &str) -> Asked {
    Asked {
        url: url.to_owned(),
        headers: headers.iter().map(ToString::to_string).collect(),
        client: Some(client.parse().unwrap()),
        ..Asked::default()
    }
}

#[test]
fn a_request_that_is_passed_on() {
    let headers = ["X-Forwarded-For: 192.0.2.7, 10.0.0.9", "Cookie: session=1"];
    insta::assert_snapshot!(told(&get("http://api.example.org:8080/v1/x?y", &headers, "10.0.0.1")));
}

#[test]
fn a_request_that_is_kept_out() {
    insta::assert_snapshot!(told(&get("http://api.example.org:8080/v1", &[], "198.51.100.1")));
}

#[test]
fn a_request_that_nobody_takes() {
    insta::assert_snapshot!(told(&get("/", &["Host: example.net"], "192.0.2.1")));
}

#[test]
fn a_request_that_is_none() {
    insta::assert_snapshot!(told(&get("/", &["Host: a\u{1b}[2J"], "192.0.2.1")));
}

#[test]
fn a_redirect() {
    insta::assert_snapshot!(told(&get("https://old.example.org/", &[], "192.0.2.1")));
}

#[test]
fn nothing_of_a_request_moves_the_cursor() {
    for text in ["\u{1b}[2J", "\u{9b}2J", "\u{7f}", "\u{202e}x", "\t", "\u{0}"] {
        let name = format!("X{text}: 1");
        for asked in [
            get(&format!("http://a/{text}"), &[], "192.0.2.1"),
            get(&format!("http://{text}/"), &[], "192.0.2.1"),
            get("/", &["Host: a", &name], "192.0.2.1"),
            Asked { method: Some(format!("GET{text}")), ..get("/", &["Host: a"], "192.0.2.1") },
        ] {
            let out = told(&asked);
            assert!(!out.contains(text), "{out:?}");
        }
    }
}

#[test]
fn words_are_kept_within_the_columns() {
    let mut out = String::new();
    row(&mut out, "  ", &"l".repeat(100), &format!("{} a {}", "w".repeat(70), "x".repeat(130)));
    assert!(out.lines().all(|line| line.chars().count() <= WIDTH), "{out}");
    let letters = |c: char| out.chars().filter(|&o| o == c).count();
    assert_eq!((letters('l'), letters('w'), letters('x')), (100, 70, 130), "{out}");
}
