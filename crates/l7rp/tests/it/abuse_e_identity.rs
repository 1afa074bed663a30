//! What a client says of itself, in places that a guard of heads alone does not see.

use std::sync::Arc;

use h2::client::Builder;
use http::{HeaderMap, Request};
use l7rp_testkit::{Client, Origin, Proxy, Then, reply};

use crate::http2_tools::{Conn, wait, whole};
use crate::reload::{ALL, file, pool};
use crate::setup::{get, start};
use crate::tls_kit::{Ca, HOST, shake, tls};

const NAME: &str = "X-Client-Identity";

/// A proxy with a listener that asks for certificates of this CA, and one without TLS.
fn guarded(pools: &[String], ca: &Ca, routes: &[&str]) -> Proxy {
    let keys = format!(
        ", client_auth: {{ ca_file: \"{}\", mode: optional, identity_header: {NAME} }}",
        ca.file().display()
    );
    let listeners = [
        &format!("name: tls, bind: \"127.0.0.1:0\", {}", tls(&[&ca.issue("a", &[HOST])], &keys)),
        "name: web, bind: \"127.0.0.1:0\"",
    ];
    start(&file(&listeners, pools, routes))
}

/// What the upstream was told behind the body.
fn trailing(origin: &Origin) -> Vec<(String, String)> {
    let all = origin.last().trailers.clone();
    all.into_iter().filter(|(name, _)| name.replace('_', "-").eq_ignore_ascii_case(NAME)).collect()
}

/// Promised: "that field, and what differs from it by `_` alone, is taken from no client, on any
/// listener". Many servers put the fields of a trailer section among those of the head.
#[test]
fn nobody_says_who_it_is_behind_a_body() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let proxy = guarded(&[pool("b", &[&origin], "")], &ca, &[ALL]);
    let lie = format!(
        "POST /lie HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: chunked\r\n\r\n\
         3\r\nabc\r\n0\r\n{NAME}: CN=root\r\nx_client_identity: CN=root\r\n\r\n"
    );
    assert_eq!(Client::connect(proxy.listener("web")).ask(&lie).status(), 200);
    let plain = trailing(&origin);
    let config = Arc::new(ca.client());
    let mut client = shake(&config, proxy.listener("tls"), HOST).client;
    assert_eq!(client.ask(&lie).status(), 200);
    let secured = trailing(&origin);

    // And by HTTP/2.
    let stream = wait(tokio::net::TcpStream::connect(proxy.listener("web"))).expect("it accepts");
    let conn = Conn::over(stream, &Builder::new());
    let uri = format!("http://{HOST}/two");
    let asked = Request::builder().method("POST").uri(uri).body(()).expect("a request");
    let (response, mut stream) = conn.begin(asked, false);
    stream.send_data("abc".into(), false).expect("it is taken");
    let mut trailers = HeaderMap::new();
    trailers.insert("x-client-identity", "CN=root".parse().expect("a value"));
    stream.send_trailers(trailers).expect("they are taken");
    assert_eq!(wait(whole(response)).expect("an answer").status, 200);
    let two = trailing(&origin);
    let none: Vec<(String, String)> = Vec::new();
    assert_eq!([plain, secured, two], [none.clone(), none.clone(), none]);
}

/// The same field decides nothing when a client sends it: neither the route nor the upstream.
#[test]
fn nobody_chooses_a_route_by_who_it_says_to_be() {
    let (everybody, admins) = (reply::name("everybody"), reply::name("admins"));
    let (everybody, admins) = (Origin::start(everybody), Origin::start(admins));
    let ca = Ca::new("ca");
    let pools = [pool("b", &[&everybody], ""), pool("admins", &[&admins], "")];
    let only = format!(
        "name: admins, pool: admins, header_predicates: [{{ name: {NAME}, value: \"CN=root\" }}]"
    );
    let proxy = guarded(&pools, &ca, &[&only, ALL]);
    let lie = get(HOST, "/", &format!("{NAME}: CN=root\r\n"));
    let answer = Client::connect(proxy.listener("web")).ask(lie);
    assert_eq!(answer.text(), "everybody", "routed by what a client says of itself");
}

/// Held: a client that offers another protocol says nothing of itself either.
#[test]
fn nobody_says_who_it_is_with_an_upgrade() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n");
        call.until_gone();
        Then::Close
    });
    let ca = Ca::new("ca");
    let proxy = guarded(&[pool("b", &[&origin], "")], &ca, &[ALL]);
    let lines = "Connection: upgrade, x-client-identity\r\nUpgrade: x\r\nX-Client_Identity: CN=root\r\nX-CLIENT-IDENTITY: CN=root\r\n";
    let mut client = Client::connect(proxy.listener("web"));
    assert_eq!(client.send(get(HOST, "/", lines)).head().status(), 101);
    let last = origin.last();
    assert!(!last.fields.iter().any(|(_, value)| value == "CN=root"), "{last:?}");
}

/// Promised: what is put in force holds for the next request, "on the same connection too". A listener
/// that has begun to need a certificate serves nobody who has shown none, and one that believes
/// another CA tells upstreams nothing by the word of the one before.
#[test]
fn a_connection_from_before_proves_nothing_by_a_new_rule() {
    let origin = Origin::start(reply::name("x"));
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let (own, alice) = (ca.issue("a", &[HOST]), ca.issue("alice", &["alice.test"]));
    let address = l7rp_testkit::own_address();
    let of = |rule: &str| {
        let listener = format!("name: tls, bind: \"{address}\", {}", tls(&[&own], rule));
        file(&[&listener], &[pool("b", &[&origin], "")], &[ALL])
    };
    let rule = |ca: &Ca, mode: &str| {
        let file = ca.file();
        format!(
            ", client_auth: {{ ca_file: \"{}\", mode: {mode}, identity_header: {NAME} }}",
            file.display()
        )
    };
    let proxy = start(&of(&rule(&ca, "optional")));
    let config = |pair| Arc::new(ca.client_of(rustls::ALL_VERSIONS, pair));
    let mut nobody = shake(&config(None), proxy.listener("tls"), HOST).client;
    let mut known = shake(&config(Some(&alice)), proxy.listener("tls"), HOST).client;
    for client in [&mut nobody, &mut known] {
        assert_eq!(client.ask(get(HOST, "/", "")).status(), 200);
    }
    assert_eq!(origin.last().get(NAME), Some("CN=alice"));
    proxy.reload(&of(&rule(&other, "require")));
    let mut seen = Vec::new();
    for (who, client) in [("nobody", &mut nobody), ("alice", &mut known)] {
        client.send(get(HOST, "/after", ""));
        let status = client.try_response().map(|answer| answer.status()).ok();
        let told = origin.last().get(NAME).map(str::to_owned);
        seen.push((who, status, told));
    }
    let served = seen.iter().any(|(_, status, _)| *status == Some(200));
    assert!(!served, "served by a listener that needs a certificate of another CA: {seen:?}");
}
