//! Addresses that come, go and move while the program runs: nobody is cut off, nobody gets in
//! where they should not, and what is others' stays theirs.

use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use l7rp_testkit::{Client, Gate, Origin, Proxy, SOON, Signal, eventually, let_pass, reply};

use crate::reloading::{ANY, free_port, in_halves, listening, second_is_answered, unix};
use crate::setup::{PROGRAM, get};

#[test]
fn a_refused_reload_leaves_no_unix_socket_behind() {
    let origin = Origin::start(reply::name("x"));
    let taken = TcpListener::bind(ANY).expect("a port");
    let busy = taken.local_addr().expect("an address").to_string();
    let web = ("web", ANY);
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[web]));
    let path = proxy.directory().join("new.sock");
    let new = [web, ("local", &unix(&path)), ("busy", &busy)];
    let event = proxy.try_reload(&listening(&origin, &new));
    assert_eq!(event["event"], "config_rejected");
    assert!(!path.exists(), "it has left {}", path.display());
}

#[test]
fn an_address_of_another_process_is_refused_even_if_an_own_one_has_the_same_port() {
    let (one, two) = (Origin::start(reply::name("one")), Origin::start(reply::name("two")));
    let port = free_port();
    let (own, others) = (format!("127.0.0.1:{port}"), format!("127.0.0.2:{port}"));
    let web = ("web", own.as_str());
    let first = Proxy::start(PROGRAM, &listening(&one, &[web]));
    let second = Proxy::start(PROGRAM, &listening(&two, &[("web", &others)]));
    let event = first.try_reload(&listening(&one, &[web, ("more", &others)]));
    let answers: Vec<_> = (0..20).map(|_| second.get("/").text()).collect();
    let stolen = answers.iter().filter(|a| *a == "one").count();
    assert_eq!(stolen, 0, "of 20 requests to another process; {event}");
    assert_eq!(event["event"], "config_rejected");
}

#[test]
fn a_live_datagram_socket_is_not_removed_for_a_listener() {
    let origin = Origin::start(reply::name("x"));
    let web = ("web", ANY);
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[web]));
    let path = proxy.directory().join("log.sock");
    let _owner = UnixDatagram::bind(&path).expect("nobody has it");
    let event = proxy.try_reload(&listening(&origin, &[web, ("local", &unix(&path))]));
    let sender = UnixDatagram::unbound().expect("a socket");
    assert!(sender.send_to(b"x", &path).is_ok(), "its owner gets nothing any more: {event}");
}

#[test]
fn an_admin_socket_that_goes_leaves_no_file() {
    let origin = Origin::start(reply::name("x"));
    let yaml = |name: &str| {
        let listeners = listening(&origin, &[("web", ANY)]);
        format!("{listeners}admin: {{ bind: \"unix:{{dir}}/{name}.sock\" }}\n")
    };
    let mut proxy = Proxy::start(PROGRAM, &yaml("one"));
    let is_there = |proxy: &Proxy, name: &str| proxy.directory().join(name).exists();
    proxy.reload(&yaml("two"));
    let moved = is_there(&proxy, "one.sock");
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    let ended = is_there(&proxy, "two.sock");
    assert_eq!((moved, ended), (false, false), "after it has moved; after the end");
}

#[test]
fn what_a_reload_takes_can_be_started() {
    let origin = Origin::start(reply::name("x"));
    let port = free_port();
    let (one, all) = (format!("127.0.0.1:{port}"), format!("0.0.0.0:{port}"));
    let both = listening(&origin, &[("one", &one), ("all", &all)]);
    let mut proxy = Proxy::start(PROGRAM, &listening(&origin, &[("one", &one)]));
    proxy.reload(&both);
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    drop(Proxy::start(PROGRAM, &both));
}

/// Threads that connect to an address over and over.
#[derive(Default)]
struct Connecting {
    stop: AtomicBool,
    done: AtomicUsize,
    failed: AtomicUsize,
    longest_ms: AtomicUsize,
}

impl Connecting {
    fn start(self: &Arc<Self>, port: u16) -> JoinHandle<()> {
        let all = self.clone();
        thread::spawn(move || {
            while !all.stop.load(SeqCst) {
                let began = Instant::now();
                let failed = TcpStream::connect(("127.0.0.1", port)).is_err();
                all.failed.fetch_add(usize::from(failed), SeqCst);
                all.longest_ms.fetch_max(began.elapsed().as_millis() as usize, SeqCst);
                all.done.fetch_add(1, SeqCst);
                let_pass(Duration::from_millis(2));
            }
        })
    }

    /// Waits until there have been so many more.
    fn go_on(&self, more: usize) {
        let before = self.done.load(SeqCst);
        eventually(SOON, || self.done.load(SeqCst) >= before + more);
    }
}

#[test]
fn an_address_that_widens_delays_no_connection() {
    let origin = Origin::start(reply::name("x"));
    let port = free_port();
    let yaml = |host: &str| listening(&origin, &[("web", &format!("{host}:{port}"))]);
    let proxy = Proxy::start(PROGRAM, &yaml("127.0.0.1"));
    let all = Arc::new(Connecting::default());
    let threads: Vec<_> = (0..4).map(|_| all.start(port)).collect();
    all.go_on(200);
    proxy.reload(&yaml("0.0.0.0"));
    all.go_on(200);
    all.stop.store(true, SeqCst);
    for thread in threads {
        thread.join().expect("it ends");
    }
    assert_eq!(all.failed.load(SeqCst), 0);
    // A packet that is lost is sent again after a second.
    let longest = all.longest_ms.load(SeqCst);
    assert!(longest < 900, "a connection took {longest} ms");
}

#[test]
fn a_pipelined_request_at_a_listener_that_goes_is_answered() {
    let gate = Gate::default();
    let origin = in_halves(&gate);
    let stays = ("stays", ANY);
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[stays, ("goes", ANY)]));
    second_is_answered(proxy.listener("goes"), &gate, || {
        proxy.reload(&listening(&origin, &[stays]));
    });
}

#[test]
fn max_connections_holds_when_a_listener_is_renamed() {
    let origin = Origin::start(reply::name("x"));
    let port = free_port();
    let yaml = |name: &str| {
        let bind = format!("127.0.0.1:{port}");
        let limited = format!("{bind}\", max_connections: 2 }}");
        listening(&origin, &[(name, &bind)]).replace(&format!("{bind}\" }}"), &limited)
    };
    let proxy = Proxy::start(PROGRAM, &yaml("old"));
    let mut kept: Vec<_> = (0..2).map(|_| proxy.client()).collect();
    let mut is_full = || {
        for client in &mut kept {
            assert_eq!(client.get("/").status(), 200);
        }
        assert_eq!(proxy.get("/").status(), 503, "a third connection at max_connections: 2");
    };
    is_full();
    proxy.reload(&yaml("new"));
    is_full();
}

#[test]
fn connections_of_a_listener_that_goes_are_not_called_kept() {
    let origin = Origin::start(reply::name("x"));
    let stays = ("stays", ANY);
    let proxy = Proxy::start(PROGRAM, &listening(&origin, &[stays, ("goes", ANY)]));
    let mut clients: Vec<_> = (0..3).map(|_| Client::connect(proxy.listener("goes"))).collect();
    for client in &mut clients {
        assert_eq!(client.get("/").status(), 200);
    }
    let event = proxy.reload(&listening(&origin, &[stays]));
    let shown = proxy.metrics().sum("proxy_connections_leaving", &[]);
    for client in &mut clients {
        assert_eq!(client.get("/").get("connection"), Some("close"));
    }
    assert_eq!((&event["kept_connections"], shown), (&0.into(), 3.0), "{event}");
    assert_eq!(event["leaving_connections"], 3);
}

/// Threads that ask over and over, each on one connection.
#[derive(Default)]
struct Asking {
    stop: AtomicBool,
    answers: AtomicUsize,
    secrets: AtomicUsize,
}

impl Asking {
    fn start(self: &Arc<Self>, port: u16) -> JoinHandle<()> {
        let all = self.clone();
        let mut client = Client::connect(([127, 0, 0, 1], port).into());
        thread::spawn(move || {
            while !all.stop.load(SeqCst) {
                let sent = client.wire.write(get("a.test", "/", "").as_bytes());
                let Ok(answer) = sent.and_then(|()| client.try_response()) else { return };
                all.secrets.fetch_add(usize::from(answer.text() == "secret"), SeqCst);
                all.answers.fetch_add(1, SeqCst);
            }
        })
    }
}

/// A public listener with a route of its own, if there is one, and an internal one with a secret;
/// so many pools that a reload takes its time.
fn two_worlds(open: &Origin, secret: &Origin, public: Option<u16>, internal: u16) -> String {
    let mut listeners = format!("- {{ name: internal, bind: \"127.0.0.1:{internal}\" }}\n");
    let mut routes = "- { name: hidden, pool: s, listeners: [internal] }\n".to_owned();
    if let Some(public) = public {
        // Before the other, so that it takes its index when this one goes.
        listeners.insert_str(0, &format!("- {{ name: public, bind: \"127.0.0.1:{public}\" }}\n"));
        routes.insert_str(0, "- { name: open, pool: p0, listeners: [public] }\n");
    }
    let pool = |name: &str, origin: &Origin| {
        format!("- {{ name: {name}, upstreams: [{{ url: \"{}\" }}] }}\n", origin.url())
    };
    let mut pools = pool("s", secret);
    pools.extend((0..500).map(|n| pool(&format!("p{n}"), open)));
    format!("listeners:\n{listeners}upstream_pools:\n{pools}routes:\n{routes}")
}

#[test]
fn a_kept_connection_is_never_served_by_the_routes_of_another_listener() {
    let (open, secret) = (Origin::start(reply::name("open")), Origin::start(reply::name("secret")));
    let (public, internal) = (free_port(), free_port());
    let with_public = two_worlds(&open, &secret, Some(public), internal);
    let without = two_worlds(&open, &secret, None, internal);
    let proxy = Proxy::start(PROGRAM, &with_public);
    let mut leaked = 0;
    for _ in 0..8 {
        let all = Arc::new(Asking::default());
        let clients: Vec<_> = (0..6).map(|_| all.start(public)).collect();
        eventually(SOON, || all.answers.load(SeqCst) >= 60);
        proxy.reload(&without);
        all.stop.store(true, SeqCst);
        for client in clients {
            client.join().expect("it ends");
        }
        leaked += all.secrets.load(SeqCst);
        proxy.reload(&with_public);
    }
    assert_eq!(leaked, 0, "answers of the internal listener at the public one");
}
