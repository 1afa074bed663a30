//! Cases that went wrong in other proxies: sizes, places, slow clients, and fields. Each is
//! named after the case it comes from.

use std::fmt::Write;
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Call, Client, Origin, Proxy, SOON, Then, Value, eventually, let_pass, reply};

use crate::setup::{assert_counts, client_from, get, in_flight, over, start};
use crate::upgrade::{ACCEPT, OFFER};

/// Does one of the things that go wrong, in turn.
fn erratic(call: &mut Call<'_>) -> Then {
    if call.request.target() == "/good" {
        return reply::name("good")(call);
    }
    if call.request.get("upgrade").is_some() && !call.number.is_multiple_of(3) {
        call.send(ACCEPT);
        return if call.number.is_multiple_of(2) { Then::Close } else { reply::hang(call) };
    }
    match call.number % 7 {
        0 => reply::raw_kept("HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n")(call),
        1 => reply::hang(call),
        2 => Then::Reset,
        3 => reply::raw("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")(call),
        4 => {
            call.send("HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nsl");
            let_pass(Duration::from_millis(50));
            call.send("ow");
            Then::Next
        }
        _ => reply::name("good")(call),
    }
}

/// One client of many: asks, uploads or offers to upgrade, and stays or leaves.
fn ask_and_leave(proxy: &Proxy, n: usize) {
    let mut client = proxy.client();
    let _ = match n % 10 {
        0 => client.wire.write(OFFER.as_bytes()),
        1 => {
            client.wire.write(b"PUT /u HTTP/1.1\r\nHost: a.test\r\nContent-Length: 99\r\n\r\nhalf")
        }
        _ => client.wire.write(get("a.test", "/", "").as_bytes()),
    };
    match n * 7 % 11 {
        0 => client.reset(),
        1 => drop(client),
        2 => {
            let_pass(Duration::from_millis(n as u64 % 40));
            client.reset();
        }
        _ if n.is_multiple_of(10) => {
            // A tunnel that the client ends.
            if client.wire.read_head().is_ok_and(|head| head.is_some()) {
                let _ = client.wire.write(b"hello");
            }
        }
        _ => {
            let answer = client.try_response();
            if let Ok(answer) = answer
                && answer.status() == 503
            {
                assert_eq!(answer.get("retry-after"), Some("1"), "{answer:?}");
            }
        }
    }
}

#[test]
fn limits_shed_slots_return() {
    let (one, two) = (Origin::start(erratic), Origin::start(erratic));
    let refusing = Origin::refusing();
    let proxy = over(&[&one, &refusing])
        .upstream(&two.url(), "max_in_flight: 8")
        .listener("max_in_flight: 32, timeouts: { read: 300ms }")
        .pool("max_in_flight: 16, response_header_timeout: 1s")
        .pool("circuit_breaker: { failure_ratio: 1.0 }")
        .route("tunnel_idle_timeout: 500ms")
        .top("limits: { max_in_flight: 64 }")
        .start();
    thread::scope(|scope| {
        for who in 0..24 {
            let proxy = &proxy;
            scope.spawn(move || (0..16).for_each(|n| ask_and_leave(proxy, who * 16 + n)));
        }
    });
    eventually(SOON, || in_flight(&proxy) == 0.0);
    assert_counts(&proxy, "proxy_tunnels", &[], 0.0);
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
    assert_counts(&proxy, "proxy_upstream_connections", &[("state", "active")], 0.0);
    assert!(proxy.metrics().sum("proxy_shed_total", &[("scope", "pool")]) > 0.0);
    let mut clients: Vec<Client> = (0..8).map(|_| proxy.client()).collect();
    for client in &mut clients {
        client.send(get("a.test", "/good", ""));
    }
    for client in &mut clients {
        let answer = client.response();
        assert_eq!((answer.status(), answer.text().as_str()), (200, "good"), "{answer:?}");
    }
}

/// Writes octets one at a time until the proxy has had enough; what it says then.
fn drip(client: &mut Client, begin: &str) -> Option<l7rp_testkit::Message> {
    client.wire.patience(Some(Duration::from_millis(100)));
    for octet in begin.bytes().chain([b'x'; 200]) {
        let _ = client.wire.write(&[octet]);
        match client.wire.read_head() {
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            other => return other.ok().flatten(),
        }
    }
    None
}

#[test]
fn limits_slowloris() {
    let origin = Origin::start(|call| match call.request.target() {
        "/large" => {
            call.send("HTTP/1.1 200 OK\r\nContent-Length: 10000000\r\n\r\n");
            call.send(vec![b'x'; 10_000_000]);
            Then::Next
        }
        _ => reply::name("x")(call),
    });
    let proxy = over(&[&origin])
        .listener("timeouts: { read_header: 1s, read: 600ms, write: 600ms, idle: 1s }")
        .start();
    let before = proxy.resident();
    thread::scope(|scope| {
        let proxy = &proxy;
        for _ in 0..15 {
            scope.spawn(move || {
                let began = Instant::now();
                let answer =
                    drip(&mut proxy.client(), "GET / HTTP/1.1\r\nHost: a.test\r\nX-Slow: ");
                let took = began.elapsed();
                assert_eq!(answer.expect("an answer").status(), 408);
                assert!(took > Duration::from_millis(900) && took < SOON);
            });
            scope.spawn(move || {
                let mut client = proxy.client();
                client.send("POST /b HTTP/1.1\r\nHost: a.test\r\nContent-Length: 1000000\r\n\r\nx");
                assert_eq!(client.response().status(), 408);
            });
            scope.spawn(move || {
                let mut client = proxy.client();
                client.send(get("a.test", "/large", "")).head();
                // Not even this much progress: one octet a tick, all of it from what is buffered.
                for _ in 0..20 {
                    let_pass(Duration::from_millis(100));
                    if client.wire.read_some(1).is_err() {
                        return;
                    }
                }
            });
        }
        for n in 0..100 {
            let asked = Instant::now();
            assert_eq!(proxy.get("/honest").status(), 200);
            assert!(asked.elapsed() < SOON / 2, "{n}: {:?}", asked.elapsed());
            let_pass(Duration::from_millis(10));
        }
    });
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
    let grown = proxy.resident().saturating_sub(before);
    assert!(grown < 32 << 20, "{grown} octets more");
    let reasons = |reason: &str| {
        proxy.events("request_completed").iter().filter(|line| line["reason"] == reason).count()
    };
    eventually(SOON, || reasons("client_stalled") == 15);
    assert_eq!((reasons("head_timeout"), reasons("body_timeout")), (15, 15));
    assert_counts(&proxy, "proxy_upstream_requests_total", &[("status", "err")], 0.0);
}

#[test]
fn limits_big_headers() {
    let origin = Origin::start(|call| {
        let head = call.request.head.len();
        let lines = match call.request.target() {
            "/big" => format!("Set-Cookie: c={}\r\n", "v".repeat(2000)).repeat(30),
            "/huge" => format!("X-Huge: {}\r\n", "v".repeat(2 << 20)),
            _ => format!("X-Head: {head}\r\n"),
        };
        call.send(format!("HTTP/1.1 200 OK\r\n{lines}Content-Length: 0\r\n\r\n"));
        Then::Next
    });
    let proxy = over(&[&origin])
        .listener("timeouts: { max_header_bytes: 65536 }, limits: { max_headers: 256 }")
        .start();
    let target = format!("/{}", "t".repeat(7_999));
    assert_eq!(proxy.get(&target).status(), 200);
    assert_eq!(origin.last().target(), target);
    let many: Vec<_> = (0..200).map(|n| format!("X-Field-{n}: value {n}\r\n")).collect();
    assert_eq!(proxy.client().ask(get("a.test", "/many", &many.concat())).status(), 200);
    let last = origin.last();
    let kept = last.fields.iter().filter(|(name, _)| name.starts_with("X-Field-"));
    assert!(kept.map(|(n, v)| format!("{n}: {v}\r\n")).eq(many.iter().cloned()));
    let before = origin.requests();
    let cookie = format!("Cookie: c={}\r\n", "v".repeat(70 << 10));
    for (path, lines, expected) in
        [("/", cookie.as_str(), &[431][..]), (&format!("/{}", "t".repeat(69_999)), "", &[414, 431])]
    {
        let mut client = proxy.client();
        let answer = client.ask(get("a.test", path, lines));
        assert!(expected.contains(&answer.status()), "{answer:?}");
        assert!(answer.body.len() < 500 && client.is_closed_within(SOON));
    }
    assert_eq!(origin.requests(), before);
    assert_eq!(proxy.get("/big").all("set-cookie").len(), 30);
    let answer = proxy.get("/huge");
    assert_eq!(answer.status(), 502);
    let status = answer.get("proxy-status").expect("a reason");
    assert!(status.contains("error=http_response_header_section_size"), "{status}");
}

#[test]
fn limits_big_headers_the_event_names_the_limit() {
    let head = format!("HTTP/1.1 200 OK\r\nX-Huge: {}\r\n\r\n", "v".repeat(2 << 20));
    let origin = Origin::start(reply::raw(head));
    let proxy = over(&[&origin]).start();
    assert_eq!(proxy.get("/huge").status(), 502);
    let event = proxy.wait_for_event("upstream_error", |_| true, SOON);
    assert_eq!(event["reason"], "response_head_too_large");
    let words = event["error"].as_str().expect("words");
    assert!(words.contains("65536") || words.contains("64"), "{event}");
}

#[test]
fn headers_set_cookie() {
    let long = format!("long={}", "c".repeat(4096));
    let cookies =
        ["a=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT", "b=2", &long, "d=\u{17c}\u{f3}", "e=5"];
    let mut head = String::from("HTTP/1.1 200 OK\r\nLink: </a>; rel=preload\r\nVary: a\r\n");
    for value in cookies {
        head.extend(["Set-Cookie: ", value, "\r\n"]);
    }
    head += "WWW-Authenticate: Basic realm=\"a, b\"\r\nVary: b\r\nLink: </b>\r\n\
             X-Served: upstream\r\nWWW-Authenticate: Bearer\r\nContent-Length: 0\r\n\r\n";
    let sent = head.clone();
    let origin = Origin::start(reply::raw_kept(sent));
    let proxy = over(&[&origin])
        .route("middleware: [{ headers: { add_response: { X-Served: l7rp } } }]")
        .start();
    let answer = proxy.get("/");
    // The octets, not what they mean.
    let lines = |head: &[u8]| -> Vec<Vec<u8>> {
        let lines = head.split(|&b| b == b'\n').map(<[u8]>::to_vec);
        lines.filter(|line| line.starts_with(b"Set-Cookie: ")).collect()
    };
    assert_eq!(lines(&answer.head), lines(head.as_bytes()));
    assert_eq!(answer.all("vary"), ["a", "b"]);
    assert_eq!(answer.all("link"), ["</a>; rel=preload", "</b>"]);
    assert_eq!(answer.all("www-authenticate"), ["Basic realm=\"a, b\"", "Bearer"]);
    assert_eq!(answer.all("x-served"), ["l7rp"]);
}

#[test]
fn headers_forwarded_once_however_long_the_list() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).listener("trusted_proxies: [\"127.0.0.2/32\"]").start();
    let lines: String =
        format!("X-Forwarded-For: {}\r\n", vec!["192.0.2.1"; 5000].join(", ")).repeat(2);
    for last in [2, 3] {
        let asked = Instant::now();
        let answer = client_from(last, &proxy).ask(get("a.test", "/", &lines));
        assert!(asked.elapsed() < Duration::from_millis(500), "{:?}", asked.elapsed());
        assert!(matches!(answer.status(), 400 | 431), "{}", answer.status());
    }
    assert_eq!(origin.requests(), 0);
    // The longest that passes is no slower.
    let lines = format!("X-Forwarded-For: {}\r\n", vec!["10.1.1.1"; 6000].join(", "));
    for last in [2, 3] {
        let asked = Instant::now();
        let answer = client_from(last, &proxy).ask(get("a.test", "/", &lines));
        assert_eq!(answer.status(), 200);
        assert!(asked.elapsed() < Duration::from_millis(500), "{:?}", asked.elapsed());
        let list = origin.last().get("x-forwarded-for").expect("a list").split(", ").count();
        assert_eq!(list, if last == 2 { 6001 } else { 1 });
    }
}

#[test]
fn headers_host_forms() {
    // Some matchers change their ways above a hundred names.
    let mut yaml = String::from("listeners:\n- { name: web, bind: \"127.0.0.1:0\" }\nroutes:\n");
    for n in 0..150 {
        let _ = writeln!(
            yaml,
            "- {{ name: r{n}, host: h{n}.example, respond: {{ status: 200, body: r{n} }} }}"
        );
    }
    yaml += "- { name: mixed, host: Admin.Example.com, respond: { status: 200, body: mixed } }\n\
             - { name: v6, host: \"[::1]\", respond: { status: 200, body: v6 } }\n\
             - { name: any, respond: { status: 200, body: any } }\n";
    let proxy = start(&yaml);
    for (host, route) in [
        ("admin.example.com", "mixed"),
        ("ADMIN.EXAMPLE.COM", "mixed"),
        ("admin.example.com:8080", "mixed"),
        ("admin.example.com.", "mixed"),
        ("admin.example.com.:80", "mixed"),
        // An empty port is the default one (RFC 3986 §3.2.3).
        ("admin.example.com:", "mixed"),
        ("[::1]", "v6"),
        ("[::1]:8080", "v6"),
        ("[0:0:0:0:0:0:0:1]", "v6"),
        ("h149.example", "r149"),
        ("h0.example", "r0"),
        ("h150.example", "any"),
        ("xn--bcher-kva.example", "any"),
        // The blank is the line's, not the name's.
        (" admin.example.com", "mixed"),
    ] {
        assert_eq!(proxy.client().ask(get(host, "/", "")).text(), route, "{host}");
    }
    for host in
        ["admin.example.com:99999", "admin example.com", "admin%2eexample.com", "\u{17c}.example"]
    {
        assert_eq!(proxy.client().ask(get(host, "/", "")).status(), 400, "{host}");
    }
}

#[test]
fn headers_host_forms_reach_the_upstream_as_sent() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    for host in ["Admin.Example.COM.", "admin.example.com:8080", "[0:0:0:0:0:0:0:1]:81", "[::1]"] {
        assert_eq!(proxy.client().ask(get(host, "/", "")).status(), 200, "{host}");
        assert_eq!(origin.last().get("host"), Some(host));
        assert_eq!(origin.last().get("x-forwarded-host"), Some(host));
    }
}

#[test]
fn headers_values_as_sent_but_for_control_characters() {
    let origin = Origin::start(|call| {
        let octet = call.request.get("x-octet").and_then(|n| n.parse::<u8>().ok());
        let value = [b"a", &[octet.unwrap_or(b'x')][..], b"b"].concat();
        call.send(
            [b"HTTP/1.1 200 OK\r\nX-Odd: ", &value[..], b"\r\nContent-Length: 0\r\n\r\n"].concat(),
        );
        Then::Close
    });
    let proxy = over(&[&origin]).pool("circuit_breaker: { failure_ratio: 1.0 }").start();
    let controls = (0..0x20).chain([0x7f]).filter(|b| !b"\t\r\n".contains(b));
    for octet in controls {
        let before = origin.requests();
        let value =
            [b"GET / HTTP/1.1\r\nHost: a.test\r\nX-Odd: a", &[octet][..], b"b\r\n\r\n"].concat();
        assert_eq!(proxy.client().ask(value).status(), 400, "{octet:#x}");
        assert_eq!(origin.requests(), before, "{octet:#x}");
        let answer = proxy.client().ask(get("a.test", "/", &format!("X-Octet: {octet}\r\n")));
        assert_eq!(answer.status(), 502, "{octet:#x}");
    }
    for octet in [b'\t', b' ', b'~', 0x80, 0xff] {
        let answer = proxy.client().ask(get("a.test", "/", &format!("X-Octet: {octet}\r\n")));
        let expected: String = ['a', char::from(octet), 'b'].iter().collect();
        assert_eq!((answer.status(), answer.get("x-odd")), (200, Some(expected.as_str())));
    }
    // A bare CR or LF would begin a line of its own.
    for line in ["X-Odd: a\rb", "X-Odd: a\nX-Smuggled: b", "X-Odd: a\r X-Smuggled: b"] {
        assert_eq!(proxy.client().ask(get("a.test", "/", &format!("{line}\r\n"))).status(), 400);
    }
    assert!(proxy.lines().iter().all(Value::is_object), "every line is JSON");
}
