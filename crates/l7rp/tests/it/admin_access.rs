//! Who may change a running proxy: this machine, those who have the token, and nobody's web page.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use l7rp_testkit::{Client, Message, Origin, Proxy, SOON, Value, eventually, reply};

use crate::admin_actions::post;
use crate::setup::{over, start};

const SECRET: &str = "correct-horse-battery";

/// An order that changes nothing, over this connection.
#[track_caller]
fn knock(mut client: Client, host: &str, lines: &str) -> Message {
    client.ask(post(host, "/-/log-level", lines, &serde_json::json!({ "level": "info" })))
}

#[track_caller]
fn over_tcp(proxy: &Proxy, host: &str, lines: &str) -> Message {
    knock(Client::connect(proxy.admin()), host, lines)
}

#[track_caller]
fn refused(answer: &Message, status: u16, says: &str) {
    let text = answer.text();
    assert_eq!(answer.status(), status, "{text}");
    assert!(text.contains(says) && text.lines().count() == 1, "{text}");
}

/// A token in a file that only its owner can read.
fn write_token(path: &Path, token: &str) {
    fs::write(path, token).expect("a file");
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).expect("it is mine");
}

/// A proxy whose admin endpoints have a token.
fn with_token(origin: &Origin) -> (tempfile::TempDir, Proxy) {
    let folder = tempfile::tempdir().expect("a directory");
    let path = folder.path().join("token");
    write_token(&path, &format!("{SECRET}\n"));
    let admin = format!("admin: {{ bind: \"127.0.0.1:0\", token_file: \"{}\" }}", path.display());
    let proxy = over(&[origin]).top(&admin).start();
    (folder, proxy)
}

#[test]
fn without_a_token_this_machine_may_and_no_web_page() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let own = proxy.admin().to_string();
    let origin_is = |origin: &str| format!("Origin: {origin}\r\n");
    assert_eq!(over_tcp(&proxy, &own, "").status(), 200);
    assert_eq!(over_tcp(&proxy, "localhost", "").status(), 200);
    let same = origin_is(&format!("http://{own}")) + "Sec-Fetch-Site: same-origin\r\n";
    assert_eq!(over_tcp(&proxy, &own, &same).status(), 200);
    for (host, lines, says) in [
        (&*own, origin_is("http://evil.example"), "same origin"),
        (&own, origin_is("null"), "same origin"),
        (&own, "Sec-Fetch-Site: cross-site\r\n".to_owned(), "same origin"),
        (&own, "Sec-Fetch-Site: same-site\r\n".to_owned(), "same origin"),
        // A name that was made to lead here: to the browser it is the same origin.
        ("evil.example:9090", origin_is("http://evil.example:9090"), "localhost"),
        ("evil.example", "Sec-Fetch-Site: same-origin\r\n".to_owned(), "localhost"),
        ("evil.example", String::new(), "localhost"),
    ] {
        refused(&over_tcp(&proxy, host, &lines), 403, says);
    }
    // What a page can send without being asked for leave.
    let form = format!(
        "POST /-/upstreams/drain HTTP/1.1\r\nHost: {own}\r\nContent-Type: text/plain\r\n\
         Content-Length: 2\r\n\r\n{{}}"
    );
    refused(&Client::connect(proxy.admin()).ask(form), 415, "application/json");
    let empty = format!(
        "POST /-/reload HTTP/1.1\r\nHost: {own}\r\n\
         Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 0\r\n\r\n"
    );
    refused(&Client::connect(proxy.admin()).ask(empty), 415, "application/json");
    // To look is free, for pages too.
    assert_eq!(proxy.ask_admin("/-/plan").status(), 200);
}

/// A POST that only looks asks for no token, but lets no page from elsewhere make work.
#[test]
fn no_web_page_from_elsewhere_has_something_explained() {
    let origin = Origin::start(reply::name("x"));
    let (_folder, proxy) = with_token(&origin);
    let ask = |lines: &str| {
        let asked = serde_json::json!({ "url": "http://a.test/" });
        Client::connect(proxy.admin()).ask(post("localhost", "/-/explain", lines, &asked))
    };
    assert_eq!(ask("").status(), 200);
    assert_eq!(ask("Origin: http://localhost\r\n").status(), 200);
    for lines in ["Origin: http://evil.example\r\n", "Sec-Fetch-Site: cross-site\r\n"] {
        refused(&ask(lines), 403, "same origin");
    }
    let twice = "Origin: http://localhost\r\nOrigin: http://evil.example\r\n";
    refused(&ask(twice), 400, "at most once");
}

/// A name that was made to lead here: to the browser all that it shows is of the page's own site.
#[test]
fn no_web_page_sees_anything_under_a_name_of_its_own() {
    let origin = Origin::start(reply::name("x"));
    let (_folder, proxy) = with_token(&origin);
    let ask = |head: String| Client::connect(proxy.admin()).ask(head);
    let get = |path: &str, host: &str| ask(format!("GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n"));
    for path in ["/", "/metrics", "/status", "/-/plan", "/-/log-level", "/-/none"] {
        refused(&get(path, "evil.example:9090"), 403, "localhost");
        assert_ne!(get(path, "localhost:9090").status(), 403, "{path}");
    }
    for path in ["/livez", "/readyz", "/-/healthz", "/-/ready"] {
        assert!(get(path, "probe.example").status() < 300, "{path}");
    }
    let asked = serde_json::json!({ "url": "http://a.test/" });
    refused(&ask(post("evil.example", "/-/explain", "", &asked)), 403, "localhost");
}

/// Connections on which nothing comes, or not all of a request, keep nobody out.
#[test]
fn probes_are_answered_while_others_hold_connections() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let hold = |part: &str| {
        let mut held = Client::connect(proxy.admin());
        held.send(part);
        held
    };
    let _held: Vec<_> = ["", "GET /met"]
        .into_iter()
        .flat_map(|part| (0..70).map(move |_| part))
        .map(hold)
        .collect();
    let began = std::time::Instant::now();
    for _ in 0..3 {
        assert_eq!(proxy.ask_admin("/livez").status(), 204);
    }
    assert!(began.elapsed() < SOON, "the patience with one that holds a connection is longer");
}

/// Which of two counts is a matter of opinion: somebody in between may have another.
#[test]
fn what_decides_is_said_once() {
    let origin = Origin::start(reply::name("x"));
    let (_folder, proxy) = with_token(&origin);
    let shown = format!("Authorization: Bearer {SECRET}\r\n");
    assert_eq!(over_tcp(&proxy, "a", &shown).status(), 200);
    for twice in [
        "authorization: Bearer another-one-altogether\r\n",
        "Origin: http://a\r\nOrigin: http://evil.example\r\n",
        "Sec-Fetch-Site: none\r\nSec-Fetch-Site: cross-site\r\n",
        "Content-Type: text/plain\r\n",
    ] {
        refused(&over_tcp(&proxy, "a", &format!("{shown}{twice}")), 400, "at most once");
    }
}

#[test]
fn with_a_token_all_who_come_over_tcp_must_show_it() {
    let origin = Origin::start(reply::name("x"));
    let (_folder, proxy) = with_token(&origin);
    let shown = |token: &str| format!("Authorization: Bearer {token}\r\n");
    let answer = over_tcp(&proxy, "localhost", "");
    refused(&answer, 401, "admin.token_file");
    assert_eq!(answer.get("www-authenticate"), Some("Bearer"));
    let basic = "Authorization: Basic Zm9vOmJhcg==\r\n";
    refused(&over_tcp(&proxy, "localhost", basic), 401, "Bearer");
    refused(&over_tcp(&proxy, "localhost", &shown("correct-horse-batterx")), 403, "not the token");
    assert_eq!(over_tcp(&proxy, "proxy.example:9090", &shown(SECRET)).status(), 200);
    let page = shown(SECRET) + "Origin: http://evil.example\r\n";
    refused(&over_tcp(&proxy, "localhost", &page), 403, "same origin");
    for path in ["/metrics", "/-/plan", "/-/log-level", "/-/ready"] {
        assert_eq!(proxy.ask_admin(path).status(), 200, "{path}: to look is free");
    }
    let plan = proxy.ask_admin("/-/plan").text();
    assert!(plan.contains("token_file"));
    for text in [plan, format!("{:?}{}", proxy.lines(), proxy.errors())] {
        assert!(!text.contains(SECRET) && !text.contains("batterx"), "{text}");
    }
}

#[test]
fn guesses_are_few_and_do_not_come_in_by_being_many() {
    let origin = Origin::start(reply::name("x"));
    let (_folder, proxy) = with_token(&origin);
    let guess = |n: usize| {
        over_tcp(&proxy, "localhost", &format!("Authorization: Bearer wrong-wrong-wrong-{n}\r\n"))
    };
    let mut n = 0;
    // As many as there is room for, and what time gives back meanwhile.
    eventually(SOON, || {
        n += 1;
        let answer = guess(n);
        let is_locked = answer.status() == 429;
        assert!(is_locked || answer.status() == 403, "{}", answer.text());
        if is_locked {
            refused(&answer, 429, "wait a second");
            assert_eq!(answer.get("retry-after"), Some("1"));
        }
        is_locked
    });
    assert!(n > 5, "the first few are told that they are wrong: {n}");
    // After a while the right one is let in again.
    let right = format!("Authorization: Bearer {SECRET}\r\n");
    eventually(SOON, || over_tcp(&proxy, "localhost", &right).status() == 200);
}

#[test]
fn a_unix_socket_needs_no_token_and_lets_no_web_page_in_either() {
    let origin = Origin::start(reply::name("x"));
    let yaml = over(&[&origin])
        .top("admin: { bind: \"unix:{dir}/admin.sock\", token_file: \"{dir}/token\" }")
        .yaml();
    let folder = tempfile::tempdir().expect("a directory");
    write_token(&folder.path().join("token"), SECRET);
    let yaml = yaml.replace("{dir}", &folder.path().to_string_lossy());
    let proxy = start(&yaml);
    let path = folder.path().join("admin.sock");
    let over_unix = |host: &str, lines: &str| knock(Client::connect_unix(&path), host, lines);
    assert_eq!(over_unix("any.name", "").status(), 200);
    refused(&over_unix("localhost", "Origin: http://evil.example\r\n"), 403, "same origin");
    let page = "Origin: http://evil.example\r\nSec-Fetch-Site: same-origin\r\n";
    refused(&over_unix("evil.example", page), 403, "localhost");
    let body = serde_json::json!({ "level": "warn" });
    Client::connect_unix(&path).ask(post("x", "/-/log-level", "", &body));
    let told = proxy.wait_for_event("log_level_changed", |_| true, SOON);
    assert_eq!(told["by"], "unix");
}

#[test]
fn a_reload_brings_another_token_or_refuses_one_that_is_none() {
    let origin = Origin::start(reply::name("x"));
    let (folder, proxy) = with_token(&origin);
    let path = folder.path().join("token");
    let status = |token: &str| {
        over_tcp(&proxy, "localhost", &format!("Authorization: Bearer {token}\r\n")).status()
    };
    assert_eq!(status(SECRET), 200);
    write_token(&path, "another-secret-altogether");
    assert_eq!(status(SECRET), 200, "it is read at the start and by a reload");
    let told = proxy.hang_up();
    assert_eq!(told["event"], "config_reloaded");
    assert_eq!(told["settings"], serde_json::json!(["admin.token_file"]), "{told}");
    assert_eq!(proxy.hang_up()["settings"], serde_json::json!([]), "nothing is new");
    assert_eq!((status(SECRET), status("another-secret-altogether")), (403, 200));
    for (token, mode, says) in [
        ("short", 0o600, "at least 16 characters"),
        ("", 0o600, "is empty"),
        ("another-secret-altogether", 0o644, "mode is 0644"),
    ] {
        fs::write(&path, token).expect("a file");
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).expect("it is mine");
        let event = proxy.hang_up();
        assert_eq!(event["event"], "config_rejected", "{event}");
        let error = event["errors"][0].as_str().expect("an error");
        assert!(error.contains(says) && error.contains("config.yaml:"), "{error}");
    }
    assert_eq!(status("another-secret-altogether"), 200);
}

/// Addresses of this machine that are not loopback ones.
fn outside() -> Option<std::net::IpAddr> {
    // No packet is sent: it only asks which address would be used.
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    let ip = socket.local_addr().ok()?.ip();
    (!ip.is_loopback() && !ip.is_unspecified()).then_some(ip)
}

/// Where the machine has no other address, the table in `access` has to do.
#[test]
fn who_comes_from_elsewhere_is_told_to_configure_a_token() {
    let Some(ip) = outside() else { return };
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).top("admin: { bind: \"0.0.0.0:0\" }").start();
    let at = std::net::SocketAddr::new(ip, proxy.admin().port());
    let answer = knock(Client::connect_from(ip, at), &at.to_string(), "");
    refused(&answer, 403, "admin.token_file");
    let here = std::net::SocketAddr::from(([127, 0, 0, 1], at.port()));
    assert_eq!(knock(Client::connect(here), "localhost", "").status(), 200);
    let answer = Client::connect(at).ask(get_ready(&at.to_string()));
    assert_eq!(answer.status(), 200, "to look is free");
}

fn get_ready(host: &str) -> String {
    format!("GET /-/ready HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
}

#[test]
fn the_demo_has_nothing_to_read_again() {
    let proxy = Proxy::run(crate::setup::PROGRAM, ["demo", "--access-log"]);
    let started = proxy.wait_for_event("proxy_started", |_| true, SOON);
    let admin = started["admin"].as_str().expect("an address").parse().expect("an address");
    let ask =
        |path: &str, body: &Value| Client::connect(admin).ask(post("localhost", path, "", body));
    refused(&ask("/-/reload", &Value::Null), 409, "no file");
    let plan = Client::connect(admin).ask(get_ready("x").replace("/-/ready", "/-/plan")).text();
    let plan: Value = serde_json::from_str(&plan).expect("JSON");
    let url = plan["upstream_pools"][0]["upstreams"][0]["url"].clone();
    let body = serde_json::json!({ "pool": "demo", "upstream": url });
    assert_eq!(ask("/-/upstreams/drain", &body).status(), 200);
}
