//! Handshakes with clients: what is agreed on, and why there is no agreement.

use rustls::version::{TLS12, TLS13};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::super::testing::{self, Ca};
use super::{
    Originator, Terminator, client, connected, originator, reason, shake, shake_with, terminator,
    trusting,
};
use crate::config::plan::{ClientAuth, TlsVersion, UpstreamProtocol, UpstreamTls};
use crate::tls::Resumption;

#[tokio::test]
async fn versions_and_protocols() {
    let ca = Ca::new("ca");
    let mut plan = testing::listener(vec![ca.issue("a", &["a.test"])]);
    let server = terminator(&plan);
    for (offers, h2) in [
        (UpstreamProtocol::Auto, true),
        (UpstreamProtocol::Http2, true),
        (UpstreamProtocol::Http1, false),
    ] {
        let originator = Originator::new(&trusting(&ca), offers).unwrap();
        let (accepted, connected) = shake(&server, &originator, "A.test").await;
        let accepted = accepted.unwrap();
        assert_eq!((accepted.alpn_h2, connected.unwrap().1), (h2, h2));
        assert_eq!(accepted.sni.as_deref(), Some("a.test"));
        assert_eq!(accepted.client_identity, None);
    }
    let (accepted, stream) = shake_with(&server, client(&ca, &[&TLS12], |_| {}), "a.test").await;
    assert!(!accepted.unwrap().alpn_h2, "nothing was offered");
    assert!(stream.is_ok());
    let strange = client(&ca, &[&TLS13], |config| config.alpn_protocols = vec![b"h3".into()]);
    assert_eq!(reason(shake_with(&server, strange, "a.test").await.0), "no_shared_protocol");

    plan.min_version = TlsVersion::V13;
    let server = Terminator::new(&plan, &Resumption::new().unwrap(), None).unwrap();
    let old = client(&ca, &[&TLS12], |_| {});
    assert_eq!(reason(shake_with(&server, old, "a.test").await.0), "no_shared_version");
    let (accepted, connected) = shake(&server, &originator(&trusting(&ca)), "a.test").await;
    assert_eq!((accepted.unwrap().alpn_h2, connected.unwrap().1), (true, true));
}

#[tokio::test]
async fn client_certificates() {
    let (ca, theirs, strangers) = (Ca::new("ca"), Ca::new("theirs"), Ca::new("strangers"));
    let mut plan = testing::listener(vec![ca.issue("a", &["a.test"])]);
    let with = |from: &Ca, name: &str| {
        let certificate = from.issue(name, &["client.test"]);
        let client_cert = Some((certificate.cert, certificate.key));
        originator(&UpstreamTls { client_cert, ..trusting(&ca) })
    };
    for required in [true, false] {
        let ca_file = theirs.path("ca.pem");
        plan.client_auth = Some(ClientAuth { ca_file, required, identity_header: None });
        let server = terminator(&plan);
        let (accepted, connected) = shake(&server, &with(&theirs, "alice"), "a.test").await;
        assert_eq!(accepted.unwrap().client_identity.as_deref(), Some("CN=alice"));
        assert!(connected.is_ok());
        let (accepted, _) = shake(&server, &with(&strangers, "eve"), "a.test").await;
        assert_eq!(reason(accepted), "client_certificate_refused");
        let (accepted, _) = shake(&server, &originator(&trusting(&ca)), "a.test").await;
        if required {
            assert_eq!(reason(accepted), "client_certificate_missing");
        } else {
            assert_eq!(accepted.unwrap().client_identity, None);
        }
    }
    let nameless = theirs.issue_with(
        "nameless",
        &["svc.test"],
        &rcgen::KeyPair::generate().unwrap(),
        |params| params.distinguished_name = rcgen::DistinguishedName::new(),
    );
    let client_cert = Some((nameless.cert, nameless.key));
    let client = originator(&UpstreamTls { client_cert, ..trusting(&ca) });
    let (accepted, _) = shake(&terminator(&plan), &client, "a.test").await;
    assert_eq!(accepted.unwrap().client_identity.as_deref(), Some("DNS:svc.test"));
}

/// What comes of a client that sends `words` and then ends its side.
async fn speaks(server: &Terminator, words: &[u8]) -> (&'static str, String) {
    let (at_server, mut at_client) = connected().await;
    let (accepted, told) = tokio::join!(server.accept(at_server), async {
        at_client.write_all(words).await.unwrap();
        at_client.shutdown().await.unwrap();
        let mut told = Vec::new();
        at_client.read_to_end(&mut told).await.map(|_| told).unwrap_or_default()
    });
    (reason(accepted), String::from_utf8_lossy(&told).into_owned())
}

#[tokio::test]
async fn who_does_not_speak_tls_is_told_apart() {
    let ca = Ca::new("ca");
    let server = terminator(&testing::listener(vec![ca.issue("a", &["a.test"])]));
    for words in ["GET / HTTP/1.1\r\nHost: a.test\r\n\r\n", "POST", "PRI * HTTP/2.0\r\n\r\n"] {
        let (reason, told) = speaks(&server, words.as_bytes()).await;
        assert_eq!(reason, "plaintext_http");
        assert!(told.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{told}");
        assert!(told.ends_with("\r\n\r\nThis port speaks TLS: use https://\n"), "{told}");
    }
    let body = [b"POST / HTTP/1.1\r\n\r\n".as_slice(), &vec![b'x'; 30_000]].concat();
    assert!(speaks(&server, &body).await.1.ends_with("https://\n"));
    for (words, expected) in [
        (b"".as_slice(), "closed"),
        (b"SSH-2.0-x\r\n", "not_tls"),
        (b" / HTTP/1.1", "not_tls"),
        (b"\0\0\0", "not_tls"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "closed"),
        (b"\x16\x03\x01\x00\x04\x01\x00\x00\x00", "malformed"),
        (b"\x16GET / HTTP", "malformed"),
    ] {
        assert_eq!(speaks(&server, words).await.0, expected, "{words:?}");
    }
}

#[tokio::test]
async fn a_client_may_go_away_or_not_trust_us() {
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let server = terminator(&testing::listener(vec![ca.issue("a", &["a.test"])]));
    let (accepted, _) = shake(&server, &originator(&trusting(&other)), "a.test").await;
    assert_eq!(reason(accepted), "client_alert");
    let (at_server, at_client) = connected().await;
    reset(at_client);
    assert_eq!(reason(server.accept(at_server).await), "reset");
}

fn reset(stream: TcpStream) {
    crate::stream::Stream::Tcp(stream).reset_on_close();
}
