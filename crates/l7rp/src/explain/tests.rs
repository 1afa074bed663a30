//! An explanation says what the code that serves does.

use std::fmt::Write;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;

use super::*;
use crate::clock::Clock;
use crate::config::{Files, Plan, Refused, Source, parse};
use crate::live::Made;
use crate::observe::event::{Events, Level};
use crate::observe::log::Log;
use crate::tls::Material;

fn read(yaml: &str) -> Result<Plan, Refused> {
    let source = Source { name: "x".into(), text: yaml.into() };
    parse(&source, Path::new(""), Files::Ignore).map(|loaded| loaded.plan)
}

/// A process that serves this configuration, without anything going on.
fn process(yaml: &str) -> Process {
    let plan = read(yaml).unwrap_or_else(|e| panic!("{}\n{yaml}", e.render(false)));
    let events = Arc::new(Events::new(Log::start(std::io::sink()).unwrap(), Level::Error));
    let tls = Material {
        listeners: plan.listeners.iter().map(|_| None).collect(),
        pools: plan.pools.iter().map(|_| None).collect(),
    };
    let doors = plan.listeners.iter().map(|_| Vec::new()).collect();
    Process::new(Clock::new(), &events, 1, 1024, plan, Made { doors, tls, tracer: None })
}

fn asked(url: &str, headers: &[&str]) -> Asked {
    let headers = headers.iter().map(ToString::to_string).collect();
    Asked { url: url.to_owned(), headers, ..Asked::default() }
}

const HOSTS: [&str; 6] = ["a.test", "b.a.test", "c.b.a.test", "*.a.test", "*.test", "x"];
const PATHS: [&str; 7] = ["/", "/v1", "/v1/", "/v1/x", "/v2", "/v1/x/y", "/%2F"];
const METHODS: [&str; 3] = ["GET", "POST", "PUT"];

/// (host, path prefix, method, asks for a header, listener, denies)
type Rule = (Option<usize>, usize, Option<usize>, bool, Option<usize>, bool);

fn rule() -> impl Strategy<Value = Rule> {
    let maybe = prop::option::of;
    let (host, path, method) = (maybe(0..HOSTS.len()), 0..PATHS.len(), maybe(0..METHODS.len()));
    (host, path, method, prop::bool::weighted(0.3), maybe(0..2usize), prop::bool::weighted(0.2))
}

fn yaml(rules: &[Rule]) -> String {
    let mut text = String::from(
        "listeners: [{ name: l0, bind: '127.0.0.1:1' }, { name: l1, bind: '127.0.0.1:2' }]\n\
         upstream_pools: [{ name: p, upstreams: [{ url: 'http://127.0.0.1:3' }] }]\nroutes:\n",
    );
    for (n, &(host, path, method, header, listener, denies)) in rules.iter().enumerate() {
        let host = host.map_or(String::new(), |ix| format!(", host: '{}'", HOSTS[ix]));
        let method = method.map_or(String::new(), |ix| format!(", methods: [{}]", METHODS[ix]));
        let listener = listener.map_or(String::new(), |ix| format!(", listeners: [l{ix}]"));
        let header =
            if header { ", header_predicates: [{ name: x-canary, value: '1' }]" } else { "" };
        let deny = if denies { ", deny: [10.0.0.0/8]" } else { "" };
        let path = PATHS[path];
        let keys = [&host, &method, &listener, header, deny].concat();
        let _ = writeln!(text, "- {{ name: r{n}, pool: p, path_prefix: '{path}'{keys} }}");
    }
    text
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_route_that_is_told_is_the_one_that_serves(
        rules in prop::collection::vec(rule(), 1..25),
        requests in prop::collection::vec(
            (0..HOSTS.len(), 0..PATHS.len(), 0..METHODS.len(), any::<bool>(), 0..2usize, any::<bool>()),
            12,
        ),
    ) {
        // Routes that others leave nothing for are refused.
        let rules = rules.into_iter().fold(Vec::new(), |mut good, rule| {
            good.push(rule);
            if read(&yaml(&good)).is_err() {
                good.pop();
            }
            good
        });
        let process = process(&yaml(&rules));
        let snapshot = process.snapshot();
        for (host, path, method, canary, listener, inside) in requests {
            let host = HOSTS[host].trim_start_matches("*.");
            let asked = Asked {
                url: PATHS[path].to_owned(),
                method: Some(METHODS[method].to_owned()),
                headers: [format!("Host: {host}")]
                    .into_iter()
                    .chain(canary.then(|| "X-Canary: 1".to_owned()))
                    .collect(),
                client: Some(if inside { "10.1.2.3" } else { "192.0.2.1" }.parse().unwrap()),
                listener: Some(format!("l{listener}")),
            };
            let told = explain(&snapshot, None, &asked).unwrap();

            let written = asked.write().unwrap();
            let listener = &snapshot.listeners[listener];
            let mut head = Request::default();
            parse_request(&written.head, &mut head, listener.limits).unwrap().unwrap();
            let incoming =
                Incoming { buf: &written.head, head: &head, rest: b"", arrived: Nanos(0) };
            let served = crate::exchange::judge::route(&snapshot, listener, &incoming);
            let name = served.as_ref().ok().map(|route| route.plan.name.as_str());
            prop_assert_eq!(told.route.as_deref(), name);

            let taken: Vec<_> =
                told.routes.iter().filter(|r| r.outcome == RouteOutcome::Taken).collect();
            prop_assert_eq!(taken.len(), usize::from(name.is_some()));
            prop_assert_eq!(taken.first().map(|r| r.route.as_str()), name);
            prop_assert_eq!(told.routes.len(), rules.len(), "every route has its reason");
            let denied = name.is_some_and(|name| {
                let ix: usize = name[1..].parse().unwrap();
                inside && rules[ix].5
            });
            let status = match name {
                None => Some(404),
                Some(_) if denied => Some(403),
                Some(_) => None,
            };
            prop_assert_eq!(told.verdict.status, status);
            prop_assert_eq!(told.pool.is_some(), status.is_none());

            let ends = told.stages.iter().filter(|s| s.outcome == StageOutcome::Ends).count();
            prop_assert_eq!(ends, usize::from(status.is_some()));
            // What is told is understood by whoever asks.
            let json = serde_json::to_value(&told).unwrap();
            let again: Explanation = serde_json::from_value(json.clone()).unwrap();
            prop_assert_eq!(serde_json::to_value(&again).unwrap(), json);
        }
    }
}

#[test]
fn the_listener_is_the_one_that_fits_best() {
    let process = process(
        "listeners:
- { name: plain, bind: '127.0.0.1:80' }
- { name: other, bind: '127.0.0.1:8443' }
- { name: tls, bind: '0.0.0.0:443', tls: { certs: [{ cert: a.pem, key: a.key }] } }
- { name: tls2, bind: '0.0.0.0:8443', tls: { certs: [{ cert: a.pem, key: a.key }] } }
routes: [{ name: r, respond: { status: 200 } }]
",
    );
    let snapshot = process.snapshot();
    for (url, listener, note) in [
        ("http://a/", "plain", false),
        ("https://a/", "tls", false),
        ("https://a:8443/", "tls2", false),
        ("http://a:8443/", "other", false),
        ("http://a:443/", "tls", true),
        ("https://a:9/", "tls", false),
        ("http://a:9/", "plain", false),
        ("/", "plain", false),
    ] {
        let told = explain(&snapshot, None, &asked(url, &["Host: a"])).unwrap().listener;
        assert_eq!((told.name.as_str(), told.note.is_some()), (listener, note), "{url}");
    }
    let nobody = Asked { listener: Some("web".into()), ..asked("/", &[]) };
    let why = explain(&snapshot, None, &nobody).unwrap_err();
    assert_eq!(why, "there is no listener `web`; there are: plain, other, tls, tls2");
}

#[test]
fn what_the_proxy_does_not_take_is_refused_as_if_it_came() {
    let process = process(
        "listeners: [{ name: web, bind: '127.0.0.1:80', limits: { max_headers: 3 } }]
routes: [{ name: r, max_body_bytes: 10, respond: { status: 200 } }]
",
    );
    let snapshot = process.snapshot();
    for (url, method, headers, status, reason) in [
        ("/", "GET", &[][..], 400, "host_missing"),
        ("/", "GET", &["Host: a", "Host: a"], 400, "host_repeated"),
        ("/", "GET", &["Host: a b"], 400, "host_invalid"),
        ("http://a_,b/", "GET", &[], 400, "host_invalid"),
        ("http://a/", "CONNECT", &[], 405, "method_refused"),
        ("http://a/ /", "GET", &[], 400, "malformed_start_line"),
        ("http://a/", "GET", &["A: 1", "B: 1", "C: 1"], 431, "too_many_fields"),
        ("http://a/", "POST", &["Content-Length: x"], 400, "bad_content_length"),
        ("http://a/", "POST", &["Content-Length: 11"], 413, "body_too_large"),
        ("http://a/", "GET", &["A: \u{1b}[2J"], 400, "malformed_field_value"),
    ] {
        let asked = Asked { method: Some(method.to_owned()), ..asked(url, headers) };
        let told = explain(&snapshot, None, &asked).unwrap().verdict;
        assert_eq!((told.status, told.reason.as_deref()), (Some(status), Some(reason)), "{url}");
    }
}

#[test]
fn a_look_takes_no_token_and_no_turn() {
    let process = process(
        "listeners: [{ name: web, bind: '127.0.0.1:80' }]
upstream_pools:
- name: p
  selector: { algorithm: round-robin }
  upstreams: [{ url: 'http://127.0.0.1:1' }, { url: 'http://127.0.0.1:2' }]
routes: [{ name: r, pool: p, middleware: [{ rate_limit: { per_ip_rps: 0.001, burst: 2 } }] }]
",
    );
    let snapshot = process.snapshot();
    let look = || explain(&snapshot, Some(&process), &asked("http://a/", &[])).unwrap();
    for _ in 0..5 {
        let told = look();
        assert_eq!(told.verdict.status, None);
        let chosen: Vec<_> =
            told.pool.unwrap().upstreams.iter().map(|u| u.chosen.unwrap()).collect();
        assert_eq!(chosen, [1.0, 0.0], "it is the turn of the first");
    }
    let limiter = snapshot.routes[0].limiter.as_ref().unwrap();
    let peer = || Some("127.0.0.1".parse().unwrap());
    for _ in 0..2 {
        assert!(limiter.admit(peer, process.clock.now()).is_ok());
    }
    let told = look().verdict;
    assert_eq!((told.status, told.reason.as_deref()), (Some(429), Some("rate_limited")));
}

#[test]
fn a_long_request_is_not_told_anew_for_each_route() {
    let mut yaml = "listeners: [{ name: web, bind: '127.0.0.1:80' }]\nroutes:\n".to_owned();
    for n in 0..500 {
        let _ =
            writeln!(yaml, "- {{ name: r{n}, path_prefix: /r{n}, respond: {{ status: 200 }} }}");
    }
    let process = process(&yaml);
    let url = format!("http://a/{}", "x".repeat(16_000));
    let told = explain(&process.snapshot(), Some(&process), &asked(&url, &[])).unwrap();
    assert_eq!((told.routes.len(), told.verdict.status), (500, Some(404)));
    assert!(serde_json::to_string(&told).unwrap().len() < 250_000);
}

#[test]
fn the_choice_is_told_in_shares() {
    let process = process(
        "listeners: [{ name: web, bind: '127.0.0.1:80' }]
upstream_pools:
- name: p
  selector: { algorithm: least-conn }
  upstreams:
  - { url: 'http://127.0.0.1:1' }
  - { url: 'http://127.0.0.1:2' }
  - { url: 'http://127.0.0.1:3', max_in_flight: 1 }
  - { url: 'http://127.0.0.1:4', backup: true }
routes: [{ name: r, pool: p }]
",
    );
    let snapshot = process.snapshot();
    assert!(snapshot.pools[0].upstreams[2].seat.enter());
    let told = explain(&snapshot, Some(&process), &asked("http://a/", &[])).unwrap();
    let upstreams = told.pool.unwrap().upstreams;
    let shares: Vec<_> = upstreams.iter().map(|u| u.chosen.unwrap()).collect();
    assert!((shares.iter().sum::<f64>() - 1.0).abs() < 1e-9, "{shares:?}");
    assert!(shares[0] > 0.3 && shares[1] > 0.3 && shares[2..] == [0.0, 0.0], "{shares:?}");
    let why = |ix: usize| upstreams[ix].live.as_ref().unwrap().obstacle.clone();
    assert_eq!(why(0), None);
    assert_eq!(why(2).as_deref(), Some("at its max_in_flight"));
    assert_eq!(why(3).as_deref(), Some("stands by while another is eligible"));
}
