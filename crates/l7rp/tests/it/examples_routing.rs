//! Examples about which way a request takes, and what is changed on it.

use l7rp_testkit::{Client, Origin, reply};
use tungstenite::Message;

use crate::examples::{Example, start};
use crate::setup::get;
use crate::websocket::{echo, open, returns, serving};

#[test]
fn canary_by_header() {
    let mut example = start("canary-by-header");
    let [plain, asked] = example.rest();
    assert_eq!((plain.as_str(), asked.as_str()), ("stable request=1\n", "canary request=1\n"));
    let other = get("a.test", "/", "X-Canary: 2\r\n");
    let answer = Client::connect(example.example.at(8080)).ask(other);
    assert_eq!(answer.get("x-backend"), Some("stable"));
}

#[test]
fn virtual_hosts() {
    let mut example = start("virtual-hosts");
    let [web, api, tenant, refused] = example.rest();
    assert_eq!(web, "web request=1\n");
    assert_eq!(api, "api request=1\n");
    assert_eq!(tenant, "tenants request=1\n");
    assert!(refused.starts_with("404 no route"), "{refused}");
    let mut client = Client::connect(example.example.at(8080));
    for (host, path, backend) in [
        ("www.example.test", "/apis", Some("web")),
        ("a.b.example.test", "/", None),
        ("example.test", "/", None),
    ] {
        let answer = client.ask(get(host, path, ""));
        assert_eq!(answer.get("x-backend"), backend, "{host}{path}");
    }
}

#[test]
fn internal_listener() {
    let [public, internal] = start("internal-listener").rest();
    assert_eq!((public.as_str(), internal.as_str()), ("site request=1\n", "office request=1\n"));
}

#[test]
fn headers() {
    let [request, response] = start("headers").rest();
    assert!(request.contains("X-Environment: production\n"), "{request}");
    assert!(!request.to_lowercase().contains("x-debug"), "{request}");
    assert!(response.contains("Strict-Transport-Security: max-age=31536000"), "{response}");
    assert!(!response.to_lowercase().contains("x-backend"), "{response}");
}

#[test]
fn host_header() {
    let mut example = start("host-header");
    let [request] = example.rest();
    let host = format!("Host: {}\n", example.example.at(9001));
    assert!(request.contains(&host), "{request}");
    assert!(request.contains("X-Forwarded-Host: www.example.test\n"), "{request}");
}

#[test]
fn path_rewriting() {
    let [request] = start("path-rewriting").rest();
    assert!(request.starts_with("GET /echo?q=1 HTTP/1.1\n"), "{request}");
    let origin = Origin::start(reply::name("x"));
    let example = Example::with("path-rewriting", &[(9001, origin.address.port())]).start();
    for (asked, seen) in [("/a", "/v2/a"), ("/shop", "/"), ("/shopping", "/v2/shopping")] {
        assert_eq!(example.get(8080, asked).status(), 200);
        assert_eq!(origin.last().target(), seen);
    }
}

#[test]
fn fixed_answers() {
    let [robots, other] = start("fixed-answers").rest();
    assert_eq!(robots, "User-agent: *\nDisallow: /\n");
    assert!(other.starts_with("HTTP/1.1 503 "), "{other}");
    for part in ["Content-Type: text/html\r\n", "Retry-After: 3600\r\n", "<h1>Back at noon</h1>\n"]
    {
        assert!(other.contains(part), "{other}");
    }
}

#[test]
fn allow_deny() {
    let mut example = start("allow-deny");
    let [allowed, denied, stranger] = example.rest();
    assert_eq!(allowed, "one request=1\n");
    assert_eq!((denied.as_str(), stranger.as_str()), ("403\n", "403\n"));
    assert_eq!(example.tries(9001), 1.0);
}

#[test]
fn behind_proxies() {
    let mut example = start("behind-proxies");
    let [request] = example.rest();
    assert!(request.contains("X-Real-IP: 203.0.113.7\n"), "{request}");
    let way = "X-Forwarded-For: 6.6.6.6, 203.0.113.7, 198.51.100.20, 127.0.0.1\n";
    assert!(request.contains(way), "{request}");
    assert_eq!(example.proxy.logged_path("/echo")["client_ip"], "203.0.113.7");
    let denied = get("a.test", "/", "X-Forwarded-For: 203.0.113.7, 6.6.6.6\r\n");
    assert_eq!(Client::connect(example.example.at(8080)).ask(denied).status(), 403);
}

#[test]
fn websocket() {
    let server = serving(echo);
    let example = Example::with("websocket", &[(9001, server.port())]).start();
    let mut socket = open(&example.proxy);
    returns(&mut socket, &Message::text("hello"));
    returns(&mut socket, &Message::binary(vec![7; 100_000]));
    socket.close(None).expect("it closes");
    while socket.read().is_ok() {}
    drop(socket);
    assert_eq!(example.proxy.logged_path("/ws")["status"], 101);
}

#[test]
fn unix_sockets() {
    let mut example = start("unix-sockets");
    let [answer, status] = example.rest();
    assert_eq!(answer, "one request=1\n");
    assert!(status.contains(" ready, "), "{status}");
    assert!(status.contains("l7rp.sock"), "{status}");
}
