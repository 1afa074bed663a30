//! `X-L7rp-Decision`: peers that the listener names are told what was decided, and nobody else.

use std::sync::Arc;
use std::time::Duration;

use l7rp_testkit::{Client, Message, Origin, Proxy, let_pass, reply};

use crate::http2_tools::Conn;
use crate::setup::{Setup, client_from, get, over, post};
use crate::tls_kit::{Ca, shake, tls};
use crate::tries::{in_turn, retrying, say};
use crate::upgrade::{OFFER, echo};

const NAME: &str = "x-l7rp-decision";
/// Who is told in these tests: clients from this address, and those of no other.
const TRUSTED: u8 = 7;
const TOLD: &str = "decision_header_for: [\"127.0.0.7/32\"]";

fn trusted(proxy: &Proxy) -> Client {
    client_from(TRUSTED, proxy)
}

/// What a trusted peer is told, with A and B for these upstreams.
#[track_caller]
fn told(answer: &Message, origins: &[&Origin]) -> String {
    let value = answer.get(NAME).unwrap_or_else(|| panic!("not told: {answer:?}"));
    let names = origins.iter().zip(["A", "B"]);
    names.fold(value.to_owned(), |text, (origin, name)| text.replace(&origin.url(), name))
}

/// The answer to a trusted peer, after another was told nothing.
#[track_caller]
fn ask(proxy: &Proxy, request: &str) -> Message {
    let other = client_from(8, proxy).ask(request);
    assert_eq!(other.get(NAME), None, "{other:?}");
    trusted(proxy).ask(request)
}

#[test]
fn who_is_named_is_told_of_a_success() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).listener(TOLD).start();
    let answer = ask(&proxy, &get("a.test", "/", ""));
    let plain = "route=\"r\", pool=\"b\", upstream=\"A\", tries=1, hedge=?0";
    assert_eq!(told(&answer, &[&origin]), plain);
    // It is the peer that is named, not who it speaks for.
    let setup = over(&[&origin]).listener(TOLD).listener("trusted_proxies: [\"127.0.0.0/8\"]");
    let proxy = setup.start();
    let lie = get("a.test", "/", "X-Forwarded-For: 127.0.0.7\r\n");
    assert_eq!(ask(&proxy, &lie).status(), 200);
}

#[test]
fn nobody_is_told_by_default() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    assert_eq!(trusted(&proxy).get("/").get(NAME), None);
    proxy.reload(&over(&[&origin]).listener(TOLD).yaml());
    assert!(trusted(&proxy).get("/").get(NAME).is_some(), "a reload switches it on");
    proxy.reload(&over(&[&origin]).yaml());
    assert_eq!(trusted(&proxy).get("/").get(NAME), None, "and off");
}

#[test]
fn tries_that_failed_are_told() {
    let origins: [Origin; 2] = in_turn(|call, nth| match (nth, call.request.target()) {
        (0, "/status") => say(call, 503, "", "busy"),
        (0, _) | (_, "/both") => reply::close(call),
        _ => say(call, 200, "", "good"),
    });
    for (path, status, expected) in [
        (
            "/status",
            200,
            "route=\"r\", pool=\"b\", upstream=\"B\", tries=2, hedge=?0, failed=(\"A\";why=503)",
        ),
        (
            "/close",
            200,
            "route=\"r\", pool=\"b\", upstream=\"B\", tries=2, hedge=?0, \
             failed=(\"A\";why=upstream_closed)",
        ),
        (
            "/both",
            502,
            "route=\"r\", pool=\"b\", upstream=\"B\", tries=2, hedge=?0, reason=upstream_closed, \
             failed=(\"A\";why=upstream_closed \"B\";why=upstream_closed)",
        ),
    ] {
        // A new one begins at the first.
        let proxy = retrying(&origins.each_ref(), "max_attempts: 2").listener(TOLD).start();
        let answer = trusted(&proxy).get(path);
        assert_eq!(answer.status(), status);
        assert_eq!(told(&answer, &origins.each_ref()), expected);
    }
}

#[test]
fn the_one_that_answered_has_not_failed() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        0 => say(call, 503, "", "busy"),
        _ => reply::close(call),
    });
    let proxy = retrying(&origins.each_ref(), "max_attempts: 2").listener(TOLD).start();
    let answer = trusted(&proxy).get("/");
    assert_eq!((answer.status(), answer.text().as_str()), (503, "busy"));
    assert_eq!(
        told(&answer, &origins.each_ref()),
        "route=\"r\", pool=\"b\", upstream=\"A\", tries=2, hedge=?0, \
         failed=(\"B\";why=upstream_closed)"
    );
}

#[test]
fn a_race_is_told() {
    let origins: [Origin; 2] = in_turn(|call, nth| match nth {
        0 => {
            let_pass(Duration::from_millis(600));
            reply::close(call)
        }
        _ => say(call, 200, "", "hedge"),
    });
    let setup = retrying(&origins.each_ref(), "max_attempts: 2, hedge_after: 100ms");
    let proxy = setup.listener(TOLD).start();
    let answer = trusted(&proxy).get("/");
    assert_eq!(
        told(&answer, &origins.each_ref()),
        "route=\"r\", pool=\"b\", upstream=\"B\", tries=2, hedge=?1"
    );
}

#[test]
fn answers_of_the_proxy_itself_tell() {
    let yaml = over(&[&Origin::refusing()])
        .route("host: a.test")
        .listener(TOLD)
        .top("- { name: none, host: none.test, pool: nobody }")
        .top(
            "- { name: few, host: few.test, pool: b, \
             middleware: [{ rate_limit: { per_ip_rps: 0.01, burst: 1 } }] }",
        )
        .top("- { name: moved, host: moved.test, redirect: { scheme: https, code: 301 } }")
        .top("- { name: fixed, host: fixed.test, respond: { status: 200, body: hello } }")
        .yaml()
        .replace(
            "routes:",
            "- { name: nobody, upstreams: [{ url: \"http://no.such.name.invalid\" }] }\nroutes:",
        );
    let proxy = crate::setup::start(&yaml);
    let mut client = trusted(&proxy);
    client.ask(get("few.test", "/", ""));
    let none = "tries=0, hedge=?0";
    for (host, status, expected) in [
        ("else.test", 404, format!("{none}, reason=no_route")),
        ("none.test", 503, format!("route=\"none\", pool=\"nobody\", {none}, reason=unresolved")),
        ("few.test", 429, format!("route=\"few\", {none}, reason=rate_limited")),
        ("moved.test", 301, format!("route=\"moved\", {none}")),
        ("fixed.test", 200, format!("route=\"fixed\", {none}")),
    ] {
        let answer = client.ask(get(host, "/", ""));
        assert_eq!((answer.status(), told(&answer, &[])), (status, expected));
        let answer = client_from(8, &proxy).ask(get(host, "/", ""));
        assert_eq!(answer.get(NAME), None, "{host}");
    }
    // What is no request is told as well.
    let answer = trusted(&proxy).ask("GET / HTTP/1.1\r\n\r\n");
    assert_eq!(told(&answer, &[]), format!("{none}, reason=host_missing"));
}

#[test]
fn tunnels_and_heads_tell() {
    let origin = Origin::start(|call| match call.request.method() {
        "HEAD" => {
            call.send("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n");
            l7rp_testkit::Then::Next
        }
        _ => echo(call),
    });
    let proxy = over(&[&origin]).listener(TOLD).start();
    let plain = "route=\"r\", pool=\"b\", upstream=\"A\", tries=1, hedge=?0";
    let switch = trusted(&proxy).send(OFFER).head();
    assert_eq!((switch.status(), told(&switch, &[&origin])), (101, plain.to_owned()));
    let head = trusted(&proxy).send(get("a.test", "/", "").replace("GET", "HEAD")).head();
    assert_eq!((head.status(), told(&head, &[&origin])), (200, plain.to_owned()));
    assert_eq!(head.get("content-length"), Some("7"));
    let other = client_from(8, &proxy).send(OFFER).head();
    assert_eq!((other.status(), other.get(NAME)), (101, None));
}

#[test]
fn clients_of_http2_are_told_and_of_tls() {
    let origin = Origin::start(reply::name("x"));
    let everybody = "decision_header_for: [\"127.0.0.0/8\"]";
    let plain =
        format!("route=\"r\", pool=\"b\", upstream=\"{}\", tries=1, hedge=?0", origin.url());
    let proxy = over(&[&origin]).listener(everybody).start();
    let conn = Conn::open(&proxy);
    assert_eq!(conn.get("/").get(NAME), Some(plain.as_str()));
    let missing = conn.ask(crate::http2_tools::request("TRACE", "/")).expect("an answer");
    assert_eq!(
        (missing.status, missing.get(NAME)),
        (405, Some("tries=0, hedge=?0, reason=method_refused"))
    );
    let ca = Ca::new("ca");
    let own = tls(&[&ca.issue("a", &["a.test"])], "");
    let proxy = over(&[&origin]).listener(everybody).listener(&own).start();
    let mut client = shake(&Arc::new(ca.client()), proxy.address(), "a.test").client;
    assert_eq!(client.get("/").get(NAME), Some(plain.as_str()));
    // Here nobody but others is named.
    let proxy = over(&[&origin]).listener(TOLD).start();
    assert_eq!(Conn::open(&proxy).get("/").get(NAME), None);
}

#[test]
fn an_upstream_that_says_it_itself() {
    let origin = Origin::start(|call| {
        say(call, 200, "X-L7rp-Decision: mine\r\nx-l7rp-decision: again\r\n", "x")
    });
    let proxy = over(&[&origin]).listener(TOLD).start();
    // What an inner proxy has decided was for this one, and goes no further.
    assert_eq!(client_from(8, &proxy).get("/").get(NAME), None);
    let answer = trusted(&proxy).get("/");
    assert!(told(&answer, &[&origin]).starts_with("route=\"r\""), "{answer:?}");
    let proxy = over(&[&origin]).start();
    assert_eq!(trusted(&proxy).get("/").get(NAME), None);
}

/// What a parser of RFC 9651 reads: keys, and strings with their escapes taken off.
fn strings(value: &str) -> Vec<(String, String)> {
    let mut all = Vec::new();
    let mut rest = value;
    while let Some((key, after)) = rest.split_once("=\"") {
        let key = key.rsplit([' ', ',']).next().unwrap_or_default().to_owned();
        let (mut text, mut octets) = (String::new(), after.char_indices());
        let end = loop {
            match octets.next().expect("the string ends") {
                (at, '"') => break at,
                (_, '\\') => {
                    let (_, c) = octets.next().expect("an escape");
                    assert!(matches!(c, '"' | '\\'), "{value}");
                    text.push(c);
                }
                (_, c) => {
                    assert!(matches!(c, ' '..='~'), "{value}");
                    text.push(c);
                }
            }
        };
        all.push((key, text));
        rest = &after[end + 1..];
    }
    all
}

#[test]
fn names_that_are_no_tokens() {
    let origin = Origin::start(reply::name("x"));
    for (name, shown) in [
        ("it's \"quoted\"", "it's \"quoted\""),
        ("back\\slash, semi;colon=?1", "back\\slash, semi;colon=?1"),
        ("b\u{fc}cher \u{1f600}", "b?cher ?"),
    ] {
        let yaml = over(&[&origin]).listener(TOLD).yaml();
        let quoted = serde_json::to_string(name).expect("text");
        let yaml = yaml.replace("name: r,", &format!("name: {quoted},"));
        let proxy = crate::setup::start(&yaml);
        let answer = trusted(&proxy).get("/");
        let value = told(&answer, &[&origin]);
        let expected = [("route", shown), ("pool", "b"), ("upstream", "A")];
        let expected = expected.map(|(key, text)| (key.to_owned(), text.to_owned()));
        assert_eq!(strings(&value), expected, "{value}");
        assert!(value.ends_with(", tries=1, hedge=?0"), "{value}");
    }
}

#[test]
fn what_a_route_says_of_the_field_is_done() {
    let origin = Origin::start(reply::name("x"));
    let headers = |keys: &str| -> Setup {
        let keys = format!("middleware: [{{ headers: {{ {keys} }} }}]");
        over(&[&origin]).listener(TOLD).route(&keys)
    };
    let proxy = headers("remove_response: [X-L7rp-Decision]").start();
    let answer = trusted(&proxy).get("/");
    assert_eq!((answer.status(), answer.get(NAME)), (200, None));
    let proxy = headers("add_response: { X-L7rp-Decision: own }").start();
    for client in [&mut trusted(&proxy), &mut client_from(8, &proxy)] {
        assert_eq!(client.ask(post("/", "x")).all(NAME), ["own"]);
    }
}
