//! Certificates and keys are read anew on each reload, and nothing that is open is lost.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;

use l7rp_testkit::{Client, Origin, Proxy, SOON, eventually, own_address, reply};

use crate::reload::{ALL, Over, WEB, file, pool, simple};
use crate::setup::{get, over, start};
use crate::tls_kit::{Ca, HOST, Pair, shake, tls, try_shake, upstream};
use crate::tls_upstream::trusting;
use crate::tries::assert_at_rest;
use crate::upgrade::{OFFER, echo, echoes};

/// A pair that changes, and what it can become.
pub struct Changing {
    pub ca: Ca,
    pub served: Pair,
    /// They are issued to `one` and `two`.
    pub others: [Pair; 2],
}

pub fn changing() -> Changing {
    let ca = Ca::new("ca");
    let others = ["one", "two"].map(|name| ca.issue(name, &[HOST]));
    let served = Pair { cert: ca.path("served.crt"), key: ca.path("served.key") };
    served.becomes(&others[0]);
    Changing { ca, served, others }
}

/// Has it read all its files again, which goes well.
#[track_caller]
fn reread(proxy: &Proxy) {
    let event = proxy.hang_up();
    assert_eq!(event["event"], "config_reloaded", "{event}");
}

#[test]
fn a_certificate_at_the_same_path_is_replaced() {
    let origin = Origin::start(echo);
    let Changing { ca, served, others } = changing();
    let proxy = over(&[&origin]).listener(&tls(&[&served], "")).start();
    let config = Arc::new(ca.client());
    let mut open = shake(&config, proxy.address(), HOST).client;
    let mut tunnel = shake(&config, proxy.address(), HOST).client;
    assert_eq!(tunnel.send(OFFER).head().status(), 101);
    for n in 1..7 {
        let next = &others[n % 2];
        served.becomes(next);
        reread(&proxy);
        let expected = ["one", "two"][n % 2];
        for _ in 0..10 {
            assert_eq!(shake(&config, proxy.address(), HOST).shown, expected);
        }
        assert_eq!(open.get("/").status(), 200);
        echoes(&mut tunnel, "still here");
    }
    assert_eq!(origin.seen().len(), 7);
}

#[test]
fn no_handshake_fails_while_certificates_change() {
    const RELOADS: usize = 20;
    let origin = Origin::start(reply::name("x"));
    let Changing { ca, served, others } = changing();
    let proxy = over(&[&origin]).listener(&tls(&[&served], "")).start();
    let config = Arc::new(ca.client());
    let (over, shown) = (AtomicBool::new(false), Mutex::new(BTreeSet::new()));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !over.load(SeqCst) {
                    let mut shaken = shake(&config, proxy.address(), HOST);
                    assert_eq!(shaken.client.get("/").text(), "x");
                    shown.lock().expect("no failure").insert(shaken.shown);
                }
            });
        }
        scope.spawn(|| {
            let mut kept = shake(&config, proxy.address(), HOST).client;
            while !over.load(SeqCst) {
                let answer = kept.get("/");
                assert_eq!((answer.text().as_str(), answer.get("connection")), ("x", None));
            }
        });
        let end = Over(&over);
        for n in 1..=RELOADS {
            served.becomes(&others[n % 2]);
            reread(&proxy);
            assert_eq!(shake(&config, proxy.address(), HOST).shown, ["one", "two"][n % 2]);
        }
        drop(end);
    });
    let failures = proxy.metrics().sum("proxy_tls_handshake_failures_total", &[]);
    assert_eq!((failures, shown.lock().expect("no failure").len()), (0.0, 2));
    assert_at_rest(&proxy);
}

#[test]
fn bad_files_refuse_the_whole_reload() {
    let (origin, other) = (Origin::start(reply::name("x")), Origin::start(reply::name("other")));
    let Changing { ca, served, others } = changing();
    let setup = |origin| over(&[origin]).listener(&tls(&[&served], "")).yaml();
    let proxy = start(&setup(&origin));
    let config = Arc::new(ca.client());
    let mut open = shake(&config, proxy.address(), HOST).client;
    proxy.rewrite_yaml(&setup(&other));
    let (cert, key) = (served.cert.as_path(), served.key.as_path());
    let mangle: [(&dyn Fn(), _); 5] = [
        (&|| drop(std::fs::copy(&others[1].key, key)), key),
        (&|| std::fs::write(key, "no key").expect("a file"), key),
        (&|| std::fs::remove_file(key).expect("a file"), key),
        (&|| std::fs::write(cert, "-----BEGIN CERTIFICATE-----\nMII").expect("a file"), cert),
        (&|| std::fs::remove_file(cert).expect("a file"), cert),
    ];
    for (n, (mangle, file)) in mangle.into_iter().enumerate() {
        served.becomes(&others[0]);
        mangle();
        let event = proxy.hang_up();
        assert_eq!((&event["event"], &event["generation"]), (&"config_rejected".into(), &1.into()));
        let errors = event["errors"].to_string();
        assert!(errors.contains(&*file.to_string_lossy()), "{n}: {errors}");
        assert_eq!(open.get("/").text(), "x");
        let mut shaken = shake(&config, proxy.address(), HOST);
        assert_eq!((shaken.shown.as_str(), shaken.client.get("/").text().as_str()), ("one", "x"));
    }
    served.becomes(&others[1]);
    reread(&proxy);
    let mut shaken = shake(&config, proxy.address(), HOST);
    assert_eq!((shaken.shown.as_str(), shaken.client.get("/").text().as_str()), ("two", "other"));
    assert_eq!(open.get("/").text(), "other");
}

#[test]
fn cas_of_upstreams_at_the_same_path_are_replaced() {
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let served = ca.path("upstreams.pem");
    std::fs::copy(ca.file(), &served).expect("a file");
    let origins = [&ca, &other].map(|ca| {
        let pair = ca.issue("up", &["127.0.0.1"]);
        let config = ca.server(&pair, false, &["http/1.1"]);
        // Each connection serves one request, so that each request shakes hands.
        upstream(config, reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"))
    });
    let keys = format!(
        ", upstream_tls: {{ ca_file: \"{}\" }}, circuit_breaker: {{ failure_ratio: 1.0 }}",
        served.display()
    );
    let pools = [pool("b", &[&origins[0]], &keys), pool("o", &[&origins[1]], &keys)];
    let proxy = start(&file(&[WEB], &pools, &[ALL, "name: o, path_prefix: /o, pool: o"]));
    for n in 0..4 {
        let statuses = ["/", "/o"].map(|path| proxy.get(path).status());
        assert_eq!(statuses, if n % 2 == 0 { [200, 502] } else { [502, 200] }, "{n}");
        let next = if n % 2 == 0 { &other } else { &ca };
        std::fs::copy(next.file(), &served).expect("a file");
        reread(&proxy);
    }
    assert_at_rest(&proxy);
}

#[test]
fn bad_cas_of_upstreams_refuse_the_whole_reload() {
    let ca = Ca::new("ca");
    let pair = ca.issue("up", &["127.0.0.1"]);
    let origin = upstream(ca.server(&pair, false, &[]), reply::name("x"));
    let proxy = over(&[&origin]).pool(&trusting(&ca, "")).start();
    assert_eq!(proxy.get("/").text(), "x");
    std::fs::write(ca.file(), "nothing").expect("a file");
    let event = proxy.hang_up();
    assert_eq!(event["event"], "config_rejected", "{event}");
    assert!(event["errors"].to_string().contains("ca.pem"), "{event}");
    assert_eq!(proxy.get("/").text(), "x");
}

#[test]
fn a_listener_turns_to_tls_and_back() {
    let origin = Origin::start(echo);
    let ca = Ca::new("ca");
    let pair = ca.issue("a", &[HOST]);
    let config = Arc::new(ca.client());
    let address = own_address();
    let web = format!("name: web, bind: \"{address}\"");
    let clear = file(&[&web], &[pool("b", &[&origin], "")], &[ALL]);
    let secret = clear.replace(&web, &format!("{web}, {}", tls(&[&pair], "")));
    let proxy = start(&clear);
    let mut open: Vec<Client> = vec![proxy.client()];
    let mut tunnel = Client::connect(address);
    assert_eq!(tunnel.send(OFFER).head().status(), 101);
    for n in 1..5 {
        let is_secret = n % 2 == 1;
        proxy.reload(if is_secret { &secret } else { &clear });
        for client in &mut open {
            assert_eq!(client.get("/").status(), 200, "what was open is spoken to as before");
        }
        echoes(&mut tunnel, "still here");
        if is_secret {
            assert_eq!(Client::connect(address).get("/").status(), 400);
            open.push(shake(&config, address, HOST).client);
        } else {
            assert!(try_shake(&config, address, HOST).is_err());
            open.push(Client::connect(address));
        }
        let client = open.last_mut().expect("one");
        let answer = client.ask(get(HOST, "/", ""));
        let proto = format!("x-forwarded-proto: http{}\r\n", if is_secret { "s" } else { "" });
        assert!(answer.text().to_lowercase().contains(&proto), "{answer:?}");
    }
    drop((open, tunnel));
    eventually(SOON, || proxy.metrics().sum("proxy_connections", &[]) == 0.0);
    assert_at_rest(&proxy);
}

#[test]
fn it_is_told_when_certificates_expire() {
    const NAME: &str = "proxy_certificate_expiry_timestamp_seconds";
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let [near, far, past] = [(2035, "near"), (2040, "far"), (2020, "past")].map(|(year, name)| {
        ca.issue_with(name, &["a.test"], |params| {
            params.not_after = rcgen::date_time_ymd(year, 1, 2);
        })
    });
    let fixed = ca.issue_with("fixed", &["b.test"], |params| {
        params.not_after = rcgen::date_time_ymd(2030, 1, 2);
    });
    let served = Pair { cert: ca.path("served.crt"), key: ca.path("served.key") };
    served.becomes(&near);
    let proxy = over(&[&origin]).listener(&tls(&[&served, &fixed], "")).start();
    let at = |host| proxy.metrics().sum(NAME, &[("listener", "web"), ("host", host)]);
    assert_eq!((at("a.test"), at("b.test")), (2_051_308_800.0, 1_893_542_400.0));
    served.becomes(&far);
    reread(&proxy);
    assert_eq!((at("a.test"), at("b.test")), (2_209_075_200.0, 1_893_542_400.0));
    // One that is over is served all the same, and told of.
    served.becomes(&past);
    reread(&proxy);
    assert_eq!(at("a.test"), 1_577_923_200.0);
    let config = Arc::new(ca.client());
    assert!(try_shake(&config, proxy.address(), "a.test").is_err());
    let mut client = shake(&config, proxy.address(), "b.test").client;
    assert_eq!(client.ask(get("b.test", "/", "")).text(), "x");
    // None is left without TLS.
    proxy.reload(&simple(&[&origin], ""));
    assert_eq!(proxy.metrics().series(NAME).count(), 0);
}
