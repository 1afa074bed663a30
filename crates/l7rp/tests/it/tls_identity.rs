//! Who a client has proved to be reaches the log and, where it is asked for, upstreams; and nobody
//! can say it of themselves.

use std::process::Command;
use std::sync::Arc;

use l7rp_testkit::{Origin, Proxy, reply};

use crate::reload::{ALL, file, pool};
use crate::setup::{get, start};
use crate::tls_kit::{Ca, HOST, Pair, shake, tls};

/// A proxy with a listener that asks for certificates of this CA, and one without TLS.
fn guarded(origin: &Origin, ca: &Ca, route: &str) -> Proxy {
    let keys = format!(
        ", client_auth: {{ ca_file: \"{}\", mode: optional, identity_header: X-Client-Identity }}",
        ca.file().display()
    );
    let listeners = [
        &format!("name: tls, bind: \"127.0.0.1:0\", {}", tls(&[&ca.issue("a", &[HOST])], &keys)),
        "name: web, bind: \"127.0.0.1:0\"",
    ];
    start(&file(&listeners, &[pool("b", &[origin], "")], &[&format!("{ALL}{route}")]))
}

/// What the upstream was told.
fn told(origin: &Origin) -> Vec<String> {
    let fields = origin.last();
    ["x-client-identity", "x_client_identity"]
        .iter()
        .flat_map(|name| fields.all(name))
        .map(str::to_owned)
        .collect()
}

/// Asks for `path` with this certificate, and says to be somebody else.
fn ask(proxy: &Proxy, ca: &Ca, own: Option<&Pair>, path: &str) {
    let config = Arc::new(ca.client_of(rustls::ALL_VERSIONS, own));
    let mut client = shake(&config, proxy.listener("tls"), HOST).client;
    let lie = "X-Client-Identity: CN=root\r\nx_client_identity: CN=root\r\n";
    assert_eq!(client.ask(get(HOST, path, lie)).status(), 200);
}

#[test]
fn upstreams_and_the_log_are_told_who_a_client_is() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let alice = ca.issue_with("alice", &["alice.test"], |params| {
        params.distinguished_name.push(rcgen::DnType::OrganizationName, "Ümlaut, Inc");
    });
    let proxy = guarded(&origin, &ca, "");
    ask(&proxy, &ca, Some(&alice), "/shown");
    let name = "O=%C3%9Cmlaut\\, Inc,CN=alice";
    assert_eq!(told(&origin), [name]);
    assert_eq!(proxy.logged_path("/shown")["client_identity"], name);

    ask(&proxy, &ca, None, "/not-shown");
    assert_eq!(told(&origin), [""; 0]);
    assert_eq!(proxy.logged_path("/not-shown")["client_identity"], serde_json::Value::Null);

    // By another listener, which knows nothing of certificates.
    let mut client = l7rp_testkit::Client::connect(proxy.listener("web"));
    let lie = "X-Client-Identity: CN=root\r\nx-client_identity: CN=root\r\n";
    assert_eq!(client.ask(get(HOST, "/plain", lie)).status(), 200);
    let last = origin.last();
    assert!(!last.fields.iter().any(|(_, value)| value == "CN=root"), "{last:?}");
}

#[test]
fn upstreams_are_told_of_clients_that_speak_http2() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let alice = ca.issue("alice", &["alice.test"]);
    let proxy = guarded(&origin, &ca, "");
    let address = proxy.listener("tls");
    let asked = Command::new("curl")
        .args(["-sS", "--http2", "-w", " %{http_version}", "-H", "X-Client-Identity: CN=root"])
        .args(["--resolve", &format!("{HOST}:{}:127.0.0.1", address.port()), "--cacert"])
        .arg(ca.file())
        .arg("--cert")
        .arg(&alice.cert)
        .arg("--key")
        .arg(&alice.key)
        .arg(format!("https://{HOST}:{}/two", address.port()))
        .output()
        .expect("curl");
    assert_eq!(String::from_utf8_lossy(&asked.stdout), "x 2", "{asked:?}");
    assert_eq!(told(&origin), ["CN=alice"]);
    assert_eq!(proxy.logged_path("/two")["client_identity"], "CN=alice");
}

#[test]
fn a_route_may_keep_it_to_itself() {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let alice = ca.issue("alice", &["alice.test"]);
    let removed = ", middleware: [{ headers: { remove_request: [X-Client-Identity] } }]";
    let proxy = guarded(&origin, &ca, removed);
    ask(&proxy, &ca, Some(&alice), "/");
    assert_eq!(told(&origin), [""; 0]);
}
