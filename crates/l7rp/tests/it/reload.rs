//! Another file is put in force while everything goes on: what has begun ends as it began, and
//! what begins next, on the same connection too, goes by the new file.

use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use l7rp_testkit::{Client, Gate, Origin, Proxy, SOON, Then, eventually, let_pass, reply};

use crate::setup::{assert_counts, get, in_flight, start};
use crate::tries::assert_at_rest;
use crate::upgrade::{OFFER, echo, echoes};

/// A listener on any free port.
pub const WEB: &str = "name: web, bind: \"127.0.0.1:0\"";
/// A route for everything.
pub const ALL: &str = "name: r, pool: b";

/// A file with these listeners, pools and routes.
pub fn file(listeners: &[&str], pools: &[String], routes: &[&str]) -> String {
    let pools: Vec<_> = pools.iter().map(String::as_str).collect();
    let sections = [("listeners", listeners), ("upstream_pools", &pools), ("routes", routes)];
    let mut text = String::new();
    for (name, items) in sections.iter().filter(|(_, items)| !items.is_empty()) {
        let _ = writeln!(text, "{name}:");
        for item in *items {
            let _ = writeln!(text, "- {{ {item} }}");
        }
    }
    text
}

/// A pool of these upstreams; `keys` of its own, each after a comma.
pub fn pool(name: &str, origins: &[&Origin], keys: &str) -> String {
    let upstreams: Vec<_> = origins.iter().map(|o| format!("{{ url: \"{}\" }}", o.url())).collect();
    format!("name: {name}, upstreams: [{}]{keys}", upstreams.join(", "))
}

/// Says so when dropped, that threads of a test that fails come to an end too.
pub struct Over<'a>(pub &'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// One pool `b` for everything.
pub fn simple(origins: &[&Origin], keys: &str) -> String {
    file(&[WEB], &[pool("b", origins, keys)], &[ALL])
}

/// A tunnel opened at this address and path.
#[track_caller]
pub fn tunnel(address: SocketAddr, path: &str) -> Client {
    let mut client = Client::connect(address);
    let head = client.send(OFFER.replace("/t", path)).head();
    assert_eq!(head.status(), 101, "{head:?}");
    client
}

/// Whether the upstream has lost all connections.
#[track_caller]
pub fn is_left_alone(origin: &Origin) {
    eventually(SOON, || origin.open() == 0);
}

/// Sends half of an answer, the other half when the gate opens.
fn in_two_parts(gate: &Gate) -> Origin {
    let gate = gate.clone();
    Origin::start(move |call| {
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nold ");
        gate.pass();
        call.send("half");
        Then::Next
    })
}

#[test]
fn an_answer_in_progress_comes_to_its_end_and_the_next_is_the_new_ones() {
    let gate = Gate::default();
    let (old, waiting) = (in_two_parts(&gate), Origin::start(reply::held("late", &gate)));
    let new = Origin::start(reply::name("new"));
    let proxy = start(&file(
        &[WEB],
        &[pool("b", &[&old], ""), pool("w", &[&waiting], "")],
        &[ALL, "name: gone, path_prefix: /gone, pool: w"],
    ));
    let (mut streaming, mut asking, mut idle) = (proxy.client(), proxy.client(), proxy.client());
    streaming.send(get("a.test", "/", ""));
    assert_eq!(streaming.head().status(), 200);
    assert_eq!(streaming.wire.read_exact(4).expect("a half"), b"old ");
    asking.send(get("a.test", "/gone", ""));
    eventually(SOON, || waiting.requests() == 1);
    idle.send("GET / HT");
    assert_counts(&proxy, "proxy_connections", &[], 3.0);
    // Route, pools and upstreams: nothing of what these two use is there any more.
    let event = proxy.reload(&file(&[WEB], &[pool("c", &[&new], "")], &["name: n, pool: c"]));
    assert_eq!((&event["cause"], &event["generation"]), (&"SIGHUP".into(), &2.into()));
    assert_eq!((&event["in_flight"], &event["closed"]), (&2.into(), &0.into()), "{event}");
    assert_eq!(event["kept_connections"], 3, "{event}");
    assert_eq!(idle.ask("TP/1.1\r\nHost: a.test\r\n\r\n").text(), "new");
    gate.open();
    assert_eq!(streaming.wire.read_exact(4).expect("the other half"), b"half");
    assert_eq!(asking.response().text(), "late");
    for client in [&mut streaming, &mut asking, &mut idle] {
        let answer = client.get("/gone");
        assert_eq!((answer.text().as_str(), answer.get("connection")), ("new", None));
    }
    assert_eq!((old.requests(), waiting.requests(), new.requests()), (1, 1, 4));
    for gone in [&old, &waiting] {
        is_left_alone(gone);
    }
    assert_at_rest(&proxy);
}

#[test]
fn an_upload_in_progress_is_taken_to_its_end() {
    let (old, new) = (Origin::start(reply::echo), Origin::start(reply::name("new")));
    let routes = [ALL, "name: up, path_prefix: /up, pool: up"];
    let proxy = start(&file(&[WEB], &[pool("b", &[&new], ""), pool("up", &[&old], "")], &routes));
    let mut client = proxy.client();
    client.send("POST /up HTTP/1.1\r\nHost: a.test\r\nContent-Length: 9\r\n\r\nbef");
    eventually(SOON, || old.requests() == 1);
    for n in 0..3 {
        let respond = format!("name: up, path_prefix: /up, respond: {{ status: 41{n} }}");
        proxy.reload(&file(&[WEB], &[pool("b", &[&new], "")], &[ALL, &respond]));
        client.send("in ");
    }
    // Nine are all: what is sent of the third "in " beyond them is the next request's begin.
    let answer = client.response();
    assert!(answer.status() == 200 && answer.text().ends_with("\r\n\r\nbefin in "), "{answer:?}");
    is_left_alone(&old);
    assert_eq!(proxy.client().ask(get("a.test", "/up", "")).status(), 412);
    assert_eq!(proxy.get("/").text(), "new");
}

#[test]
fn tunnels_live_on_whatever_becomes_of_their_route() {
    let (kept, gone) = (Origin::start(echo), Origin::start(echo));
    let both = file(
        &[WEB],
        &[pool("b", &[&kept], ""), pool("g", &[&gone], "")],
        &[ALL, "name: gone, path_prefix: /gone, pool: g"],
    );
    let proxy = start(&both);
    let mut tunnels = ["/t", "/gone"].map(|path| tunnel(proxy.address(), path));
    assert_counts(&proxy, "proxy_tunnels", &[], 2.0);
    let one = file(
        &[WEB],
        &[pool("b", &[&kept], "")],
        &[ALL, "name: no, path_prefix: /gone, respond: { status: 410 }"],
    );
    for n in 0..6 {
        let event = proxy.reload(if n % 2 == 0 { &one } else { &both });
        assert_eq!((&event["kept_tunnels"], &event["closed"]), (&2.into(), &0.into()), "{event}");
        assert_eq!(event["in_flight"], 0, "a tunnel is none: {event}");
        for client in &mut tunnels {
            echoes(client, "still here");
        }
        let again = proxy.client().send(OFFER.replace("/t", "/gone")).head().status();
        assert_eq!(again, if n % 2 == 0 { 410 } else { 101 });
        assert_counts(&proxy, "proxy_connections", &[], 2.0);
    }
    proxy.reload(&one);
    drop(tunnels);
    for origin in [&kept, &gone] {
        is_left_alone(origin);
    }
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
    assert_at_rest(&proxy);
}

/// Case `ws-over-reload`.
#[test]
fn ws_over_reload() {
    let origins = [(); 3].map(|()| Origin::start(echo));
    let [one, two, three] = &origins;
    let least = ", selector: { algorithm: least-conn }";
    let proxy = start(&simple(&[one, two], least));
    let mut tunnels = Vec::new();
    let open = |tunnels: &mut Vec<Client>, n: usize| {
        tunnels.extend((0..n).map(|_| tunnel(proxy.address(), "/t")));
        for client in tunnels.iter_mut() {
            echoes(client, "open");
        }
        assert_counts(&proxy, "proxy_tunnels", &[], tunnels.len() as f64);
        [one, two, three].map(Origin::requests)
    };
    assert_eq!(open(&mut tunnels, 20), [10, 10, 0]);
    let event = proxy.reload(&simple(&[one, two, three], least));
    assert_eq!((&event["kept_tunnels"], &event["closed"]), (&20.into(), &0.into()), "{event}");
    assert_eq!(open(&mut tunnels, 8), [10, 10, 8], "least connections counts tunnels");
    proxy.reload(&simple(&[two, three], least));
    assert_eq!(open(&mut tunnels, 2), [10, 10, 10]);
    // Tunnels of the one that is gone are nothing to the others, and live on.
    assert_eq!(one.open(), 10);
    assert_eq!(in_flight(&proxy), 20.0);
    drop(tunnels);
    is_left_alone(one);
    assert_at_rest(&proxy);
    assert!(!proxy.metrics().text.contains(&one.url()), "its series are gone");
}

/// One file of many: all that it says carries its number.
fn numbered(origins: &[Origin], n: usize) -> String {
    let fields = format!("add_request: {{ X-Gen: \"{n}\" }}, add_response: {{ X-Gen: \"{n}\" }}");
    let route = format!("{ALL}, middleware: [{{ headers: {{ {fields} }} }}]");
    file(&[WEB], &[pool("b", &[&origins[n % origins.len()]], "")], &[&route])
}

/// Upstreams that answer with their own number and that of the request.
fn numbered_origins() -> [Origin; 3] {
    [0, 1, 2].map(|own| {
        Origin::start(move |call| {
            let body = format!("{own} {}", call.request.get("x-gen").unwrap_or_default());
            call.send(reply::ok(&body));
            Then::Next
        })
    })
}

/// The file that an answer goes by; all of it must go by the same.
#[track_caller]
pub fn generation_of(client: &mut Client) -> usize {
    let answer = client.get("/");
    assert_eq!(answer.status(), 200, "{answer:?}");
    let number = answer.get("x-gen").and_then(|n| n.parse().ok()).expect("a number");
    assert_eq!(answer.text(), format!("{} {number}", number % 3), "{answer:?}");
    number
}

/// A proxy whose file is the first of many, and what makes the others.
pub fn many_files() -> (Proxy, impl Fn(usize) -> String) {
    let origins = numbered_origins();
    let proxy = start(&numbered(&origins, 0));
    (proxy, move |n| numbered(&origins, n))
}

#[test]
fn each_answer_goes_by_one_file() {
    const FILES: usize = 40;
    let (proxy, file) = many_files();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let clients: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = proxy.client();
                    let mut last = 0;
                    while !over.load(SeqCst) {
                        let now = generation_of(&mut client);
                        assert!(now >= last, "an older file comes back");
                        last = now;
                        let_pass(Duration::from_millis(2));
                    }
                    generation_of(&mut client)
                })
            })
            .collect();
        let end = Over(&over);
        for n in 1..=FILES {
            let event = proxy.reload(&file(n));
            assert_eq!(event["generation"], n + 1, "{event}");
            // Nothing of the old one begins after the event.
            assert_eq!(generation_of(&mut proxy.client()), n);
        }
        drop(end);
        for client in clients {
            assert_eq!(client.join().expect("no failure"), FILES);
        }
    });
    assert_at_rest(&proxy);
}

#[test]
fn reloads_are_counted_and_dated() {
    let origin = Origin::start(reply::name("x"));
    let proxy = start(&simple(&[&origin], ""));
    let sum = |name: &str| proxy.metrics().sum(name, &[]);
    assert_eq!(sum("proxy_config_generation"), 1.0);
    assert_eq!(sum("proxy_config_last_reload_successful"), 1.0);
    let began = std::time::SystemTime::now();
    for n in 1..=3 {
        // The same file too is put in force.
        let event = proxy.reload(&simple(&[&origin], ""));
        assert!(event["took_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{event}");
        assert_counts(&proxy, "proxy_config_reloads_total", &[("outcome", "ok")], f64::from(n));
        assert_eq!(sum("proxy_config_generation"), f64::from(n) + 1.0);
    }
    assert_counts(&proxy, "proxy_config_reloads_total", &[("outcome", "rejected")], 0.0);
    assert_eq!(sum("proxy_config_reload_duration_seconds_count"), 3.0);
    let at = sum("proxy_config_last_reload_success_timestamp_seconds");
    let since = began.duration_since(std::time::UNIX_EPOCH).expect("a clock").as_secs_f64();
    assert!((since - 1.0..since + 60.0).contains(&at), "{at} after {since}");
}

#[test]
fn what_the_whole_process_does_changes_too() {
    let origin = Origin::start(reply::name("x"));
    let plain = simple(&[&origin], "");
    let proxy = start(&plain);
    assert_eq!(proxy.get("/told").status(), 200);
    proxy.logged_path("/told");
    proxy.reload(&format!("{plain}access_log: {{ enabled: false }}\n"));
    assert_eq!(proxy.get("/silent").status(), 200);
    proxy.reload(&plain);
    assert_eq!(proxy.get("/again").status(), 200);
    proxy.logged_path("/again");
    assert!(proxy.events("request_completed").iter().all(|line| line["path"] != "/silent"));
}

#[test]
fn threads_stay_as_many() {
    let origin = Origin::start(reply::name("x"));
    let proxy = start(&format!("{}workers: 2\n", simple(&[&origin], "")));
    let before = proxy.threads();
    proxy.reload(&format!("{}workers: 4\n", simple(&[&origin], ", connect_timeout: 1s")));
    for _ in 0..20 {
        assert_eq!(proxy.get("/").text(), "x");
    }
    // One that only reads files ends by itself after a while.
    eventually(SOON * 2, || proxy.threads() == before);
}
