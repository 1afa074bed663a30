//! Addresses come, go and change hands by a reload: a socket whose address stays is never closed,
//! and who has come in at one that goes is served.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use l7rp_testkit::{Client, Gate, Origin, Proxy, SOON, eventually, let_pass, own_address, reply};

use crate::reload::{ALL, Over, WEB, file, pool, tunnel};
use crate::setup::{assert_counts, get, start};
use crate::upgrade::{echo, echoes};

/// Routes that say which listener a request has come in by.
const WHICH: [&str; 2] = [
    "name: one, listeners: [one], respond: { status: 200, body: one }",
    "name: two, listeners: [two], respond: { status: 200, body: two }",
];

/// A listener with this name at this address.
fn at(name: &str, address: impl std::fmt::Display) -> String {
    format!("name: {name}, bind: \"{address}\"")
}

/// These listeners, and a route for everything.
fn serving(listeners: &[&str]) -> String {
    file(listeners, &[], &["name: r, respond: { status: 200, body: any }"])
}

fn refuses(address: SocketAddr) -> bool {
    let error = TcpStream::connect_timeout(&address, SOON).map(drop).map_err(|e| e.kind());
    error == Err(io::ErrorKind::ConnectionRefused)
}

#[track_caller]
fn says(address: SocketAddr, words: &str) {
    assert_eq!(Client::connect(address).get("/").text(), words, "{address}");
}

/// Checks that this answer is the last on its connection.
#[track_caller]
fn is_last(client: &mut Client, words: &str) {
    let answer = client.get("/");
    assert_eq!((answer.text().as_str(), answer.get("connection")), (words, Some("close")));
    assert!(client.is_closed_within(SOON));
}

/// Checks that this answer is not the last.
#[track_caller]
fn stays(client: &mut Client, words: &str) {
    let answer = client.get("/");
    assert_eq!(answer.text(), words);
    assert_ne!(answer.get("connection"), Some("close"), "{answer:?}");
}

/// The inodes of the sockets that listen at this address.
fn sockets(proxy: &Proxy, address: SocketAddr) -> Vec<u64> {
    let all = proxy.listening();
    all.into_iter().filter(|(_, other)| *other == address).map(|(inode, _)| inode).collect()
}

#[test]
fn one_that_is_added_serves_and_the_others_do_not_notice() {
    let proxy = start(&serving(&[WEB]));
    let before = proxy.listening();
    let mut kept = proxy.client();
    assert_eq!(kept.get("/").status(), 200);
    let added = own_address();
    proxy.reload(&serving(&[WEB, &at("more", added)]));
    says(added, "any");
    stays(&mut kept, "any");
    let after = proxy.listening();
    assert!(before.keys().all(|inode| after.contains_key(inode)));
    assert_counts(&proxy, "proxy_connections_total", &[("listener", "more")], 1.0);
}

#[test]
fn one_that_is_removed_gives_each_connection_one_more_answer() {
    let (echoing, gate) = (Origin::start(echo), Gate::default());
    let held = Origin::start(reply::held("late", &gate));
    let pools = [pool("b", &[&echoing], ""), pool("h", &[&held], "")];
    let routes = [
        "name: r, respond: { status: 200, body: any }",
        "name: t, path_prefix: /t, pool: b",
        "name: h, path_prefix: /held, pool: h",
    ];
    let (stable, goes) = (own_address(), own_address());
    let proxy = start(&file(&[&at("one", stable), &at("two", goes)], &pools, &routes));
    let connect = || Client::connect(goes);
    let (mut idle, mut fresh, mut half, mut busy) = (connect(), connect(), connect(), connect());
    stays(&mut idle, "any");
    half.send("GET / HTTP/1.1\r\nHo");
    busy.send(get("a.test", "/held", ""));
    let mut talking = tunnel(goes, "/t");
    let mut other = Client::connect(stable);
    assert_eq!(other.get("/").status(), 200);
    assert_counts(&proxy, "proxy_connections", &[("listener", "two")], 5.0);
    eventually(SOON, || held.requests() == 1);
    let event = proxy.reload(&file(&[&at("one", stable)], &pools, &routes));
    assert_eq!((&event["kept_connections"], &event["closed"]), (&1.into(), &0.into()), "{event}");
    assert_eq!(event["leaving_connections"], 5);
    eventually(SOON, || refuses(goes) && sockets(&proxy, goes).is_empty());
    is_last(&mut idle, "any");
    is_last(&mut fresh, "any");
    let answer = half.ask("st: a.test\r\n\r\n");
    assert_eq!((answer.status(), answer.get("connection")), (200, Some("close")));
    gate.open();
    assert_eq!(busy.response().text(), "late");
    echoes(&mut talking, "still here");
    stays(&mut other, "any");
    drop((busy, talking));
    eventually(SOON, || echoing.open() == 0);
    assert_counts(&proxy, "proxy_connections", &[], 1.0);
}

#[test]
fn one_that_is_renamed_keeps_its_sockets_and_connections() {
    let address = own_address();
    let proxy = start(&file(&[&at("one", address)], &[], &WHICH[..1]));
    let before = sockets(&proxy, address);
    assert!(!before.is_empty());
    let mut kept = Client::connect(address);
    assert_eq!(kept.get("/").text(), "one");
    let two = file(&[&at("two", address)], &[], &WHICH[1..]);
    proxy.reload(&two);
    assert_eq!(sockets(&proxy, address), before);
    says(address, "two");
    stays(&mut kept, "two");
}

#[test]
fn one_that_is_moved_serves_at_its_new_address_only() {
    let (old, new) = (own_address(), own_address());
    let proxy = start(&file(&[&at("one", old)], &[], &WHICH[..1]));
    let mut kept = Client::connect(old);
    assert_eq!(kept.get("/").text(), "one");
    proxy.reload(&file(&[&at("one", new)], &[], &WHICH[..1]));
    says(new, "one");
    assert!(refuses(old));
    is_last(&mut kept, "one");
    // And back, at once.
    proxy.reload(&file(&[&at("one", old)], &[], &WHICH[..1]));
    says(old, "one");
    assert!(refuses(new));
    assert!(proxy.listening().values().all(|address| *address != new));
}

#[test]
fn two_may_swap_their_addresses() {
    let addresses = [own_address(), own_address()];
    let listeners = |swapped: usize| {
        let names = ["one", "two"];
        let all: Vec<_> = (0..2).map(|n| at(names[n], addresses[(n + swapped) % 2])).collect();
        file(&[&all[0], &all[1]], &[], &WHICH)
    };
    let proxy = start(&listeners(0));
    let before = proxy.listening();
    let mut kept = addresses.map(Client::connect);
    for swapped in [0, 1, 2, 3] {
        if swapped > 0 {
            proxy.reload(&listeners(swapped));
        }
        let names = if swapped % 2 == 0 { ["one", "two"] } else { ["two", "one"] };
        for (ix, client) in kept.iter_mut().enumerate() {
            says(addresses[ix], names[ix]);
            stays(client, names[ix]);
        }
    }
    assert_eq!(proxy.listening(), before, "no socket was opened or closed");
}

#[test]
fn any_port_stays_the_port_that_it_was() {
    let one = "name: one, bind: \"127.0.0.1:0\"";
    let proxy = start(&file(&[one], &[], &WHICH[..1]));
    let before = proxy.listening();
    for _ in 0..3 {
        proxy.reload(&file(&[one, &at("two", own_address())], &[], &WHICH));
        says(proxy.address(), "one");
        proxy.reload(&file(&[&format!("{one}, max_connections: 50")], &[], &WHICH[..1]));
        says(proxy.address(), "one");
    }
    eventually(SOON, || proxy.listening() == before);
    // Under another name it is another port.
    proxy.reload(&file(&["name: two, bind: \"127.0.0.1:0\""], &[], &WHICH[1..]));
    eventually(SOON, || refuses(proxy.address()));
    let after = proxy.listening();
    let new = after.iter().find(|(inode, _)| !before.contains_key(inode)).expect("a new port");
    says(*new.1, "two");
}

#[test]
fn an_address_may_become_wider_and_narrow_again() {
    // Other tests listen at addresses of their own, so that nobody else has this port.
    let narrow = own_address();
    let wide: SocketAddr = ([0, 0, 0, 0], narrow.port()).into();
    let elsewhere: SocketAddr = ([127, 0, 0, 1], narrow.port()).into();
    let proxy = start(&file(&[&at("one", narrow)], &[], &WHICH[..1]));
    for _ in 0..2 {
        let mut kept = Client::connect(narrow);
        assert_eq!(kept.get("/").text(), "one");
        eventually(SOON, || refuses(elsewhere));
        proxy.reload(&file(&[&at("one", wide)], &[], &WHICH[..1]));
        says(narrow, "one");
        says(elsewhere, "one");
        // The narrow one is a part of it, and has never been closed.
        stays(&mut kept, "one");
        let mut outside = Client::connect(elsewhere);
        stays(&mut outside, "one");
        proxy.reload(&file(&[&at("one", narrow)], &[], &WHICH[..1]));
        says(narrow, "one");
        stays(&mut kept, "one");
        is_last(&mut outside, "one");
    }
}

#[test]
fn a_socket_of_the_file_system_comes_and_goes() {
    let proxy = start(&serving(&[WEB]));
    let paths = ["a.sock", "b.sock"].map(|name| proxy.directory().join(name));
    let with = |path: &Path| serving(&[WEB, &at("local", format!("unix:{}", path.display()))]);
    let says = |path: &Path| assert_eq!(Client::connect_unix(path).get("/").text(), "any");
    proxy.reload(&with(&paths[0]));
    says(&paths[0]);
    let mut kept = Client::connect_unix(&paths[0]);
    proxy.reload(&with(&paths[0]).replace("local", "renamed"));
    stays(&mut kept, "any");
    says(&paths[0]);
    proxy.reload(&with(&paths[1]));
    says(&paths[1]);
    assert!(!paths[0].exists(), "what nobody listens at is removed");
    is_last(&mut kept, "any");
    // The same path again, and then none.
    proxy.reload(&with(&paths[0]));
    says(&paths[0]);
    proxy.reload(&serving(&[WEB]));
    assert!(paths.iter().all(|path| UnixStream::connect(path).is_err() && !path.exists()));
}

/// Case `reload-bind-conflict`.
#[test]
fn reload_bind_conflict() {
    let origin = Origin::start(reply::name("x"));
    let [first, taken, moved] = [(); 3].map(|()| own_address());
    let holder = TcpListener::bind(taken).expect("it is free");
    let pools = [pool("b", &[&origin], "")];
    let proxy = start(&file(&[&at("web", first)], &pools, &[ALL]));
    let before = proxy.listening();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut client = Client::connect(first);
            while !over.load(SeqCst) {
                let answer = client.get("/");
                assert_eq!(answer.text(), "x");
                if answer.get("connection") == Some("close") {
                    client = Client::connect(moved);
                }
                let_pass(Duration::from_millis(5));
            }
        });
        let end = Over(&over);
        let (web, second) = (at("web", moved), at("second", taken));
        let event = proxy.try_reload(&file(&[&web, &second], &pools, &[ALL]));
        assert_eq!(event["event"], "config_rejected", "{event}");
        let error = event["errors"][0].as_str().expect("a reason");
        let id = format!("(pid {})", std::process::id());
        for word in ["second", taken.to_string().as_str(), "in use", id.as_str()] {
            assert!(error.contains(word), "{word}: {error}");
        }
        assert!(refuses(moved), "nothing of it is in force");
        assert_eq!(proxy.listening(), before);
        Client::connect(first).get("/");
        drop(holder);
        assert_eq!(proxy.hang_up()["event"], "config_reloaded");
        for address in [moved, taken] {
            says(address, "x");
        }
        eventually(SOON, || refuses(first));
        drop(end);
        asking.join().expect("no failure");
    });
}

#[test]
fn a_refused_file_leaves_no_socket_behind() {
    let taken = TcpListener::bind(own_address()).expect("it is free");
    let proxy = start(&serving(&[WEB]));
    let path = proxy.directory().join("new.sock");
    let local = at("local", format!("unix:{}", path.display()));
    let second = at("second", taken.local_addr().expect("an address"));
    let event = proxy.try_reload(&serving(&[WEB, &local, &second]));
    assert_eq!(event["event"], "config_rejected");
    assert!(!path.exists(), "nobody listens there");
    drop(taken);
    assert_eq!(proxy.hang_up()["event"], "config_reloaded");
    assert_eq!(Client::connect_unix(&path).get("/").text(), "any");
}

#[test]
fn each_address_that_cannot_be_had_is_a_reason_of_its_own() {
    let proxy = start(&serving(&[WEB]));
    let before = proxy.listening();
    let missing = proxy.directory().join("none").join("l7rp.sock");
    let cases = [
        // An address for documents; nobody has it.
        (at("far", "192.0.2.1:80"), ["far", "192.0.2.1:80", "does not have the address"]),
        (at("local", format!("unix:{}", missing.display())), ["local", "none", "o such file"]),
    ];
    for (listener, words) in cases {
        let event = proxy.try_reload(&serving(&[&at("other", own_address()), &listener]));
        assert_eq!(event["event"], "config_rejected", "{event}");
        let error = event["errors"][0].as_str().expect("a reason");
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        assert_eq!(proxy.listening(), before);
        says(proxy.address(), "any");
    }
}

#[test]
fn the_admin_endpoints_move_too() {
    let [old, new] = [(); 2].map(|()| own_address());
    let with = |bind: String| format!("{}admin: {{ bind: \"{bind}\" }}\n", serving(&[WEB]));
    let proxy = start(&with(old.to_string()));
    assert_eq!(proxy.ask_admin("/livez").status(), 204);
    proxy.reload(&with(new.to_string()));
    let ask = |address| {
        let get = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
        Client::connect(address).ask(get).text()
    };
    assert!(ask(new).contains("\nproxy_config_generation 2\n"));
    eventually(SOON, || refuses(old));
    let taken = TcpListener::bind(old).expect("it is free again");
    let event = proxy.try_reload(&with(old.to_string()));
    let error = event["errors"][0].as_str().expect("a reason");
    assert!(error.contains("admin") && error.contains(&old.to_string()), "{error}");
    assert!(ask(new).contains("\nproxy_config_generation 2\n"));
    drop(taken);
    assert_eq!(proxy.hang_up()["event"], "config_reloaded");
    assert!(ask(old).contains("\nproxy_config_generation 3\n"));
}

#[test]
fn a_listener_and_the_admin_endpoints_may_swap_their_addresses() {
    let addresses = [own_address(), own_address()];
    let with = |web: usize| {
        let admin = addresses[1 - web];
        serving(&[&at("web", addresses[web])]) + &format!("admin: {{ bind: \"{admin}\" }}\n")
    };
    let proxy = start(&with(0));
    let sockets_before = proxy.listening().len();
    for web in [1, 0, 1] {
        proxy.reload(&with(web));
        eventually(SOON, || proxy.listening().len() == sockets_before);
        for _ in 0..8 {
            says(addresses[web], "any");
            assert_eq!(Client::connect(addresses[1 - web]).get("/livez").status(), 204);
        }
    }
}

/// Asks on new connections until they are refused: whoever is let in is answered.
fn until_refused(address: SocketAddr, answered: &AtomicUsize) {
    loop {
        match TcpStream::connect_timeout(&address, SOON) {
            Ok(stream) => {
                assert_eq!(Client::from(stream).get("/").text(), "any");
                answered.fetch_add(1, SeqCst);
            }
            Err(e) => return assert_eq!(e.kind(), io::ErrorKind::ConnectionRefused),
        }
    }
}

#[test]
fn whoever_was_let_in_before_an_address_goes_is_answered() {
    const CLIENTS: usize = 6;
    let goes = own_address();
    let quiet = "access_log: { enabled: false }\n";
    let with = serving(&[WEB, &at("goes", goes)]) + quiet;
    let without = serving(&[WEB]) + quiet;
    let proxy = start(&without);
    for _ in 0..5 {
        proxy.reload(&with);
        let (answered, ready) = (AtomicUsize::new(0), Barrier::new(CLIENTS + 1));
        thread::scope(|scope| {
            for _ in 0..CLIENTS {
                scope.spawn(|| {
                    ready.wait();
                    until_refused(goes, &answered);
                });
            }
            ready.wait();
            eventually(SOON, || answered.load(SeqCst) > 100);
            proxy.reload(&without);
        });
        assert!(refuses(goes));
    }
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
}
