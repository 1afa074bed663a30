//! Handshakes with upstreams: what is checked, and the words for what fails.

use std::sync::Arc;

use l7rp_core::failure::Failure;
use rcgen::KeyPair;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::super::testing::{self, Ca};
use super::{Connected, Originator, connected, originator, shake, terminator, trusting};
use crate::config::plan::{UpstreamProtocol, UpstreamTls};

fn failed(connected: Connected) -> (Failure, String) {
    connected.map(|(_, h2)| h2).unwrap_err()
}

#[tokio::test]
async fn the_certificate_is_checked() {
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let hosts = ["svc.test", "*.wild.test", "127.0.0.1"];
    let key = KeyPair::generate().unwrap();
    let good = terminator(&testing::listener(vec![ca.issue("good", &hosts)]));
    let expired = ca.issue_with("old", &hosts, &key, testing::expired);
    let expired = terminator(&testing::listener(vec![expired]));
    let early = ca.issue_with("early", &hosts, &key, |params| {
        params.not_before = rcgen::date_time_ymd(2998, 7, 1);
        params.not_after = rcgen::date_time_ymd(2999, 7, 1);
    });
    let early = terminator(&testing::listener(vec![early]));
    for host in ["svc.test", "SVC.test", "a.wild.test", "127.0.0.1"] {
        let (_, connected) = shake(&good, &originator(&trusting(&ca)), host).await;
        assert!(connected.is_ok(), "{host}");
    }
    let named = |name: &str| UpstreamTls { server_name: Some(name.into()), ..trusting(&ca) };
    let (_, connected) = shake(&good, &originator(&named("svc.test")), "10.0.0.1").await;
    assert!(connected.is_ok());
    for (server, plan, host, words) in [
        (&good, trusting(&other), "svc.test", "is not trusted: no CA in `ca_file` has issued it"),
        (
            &good,
            trusting(&ca),
            "a.test",
            "is for another name: expected a.test, it is for svc.test, *.wild.test, 127.0.0.1",
        ),
        (
            &good,
            trusting(&ca),
            "127.0.0.2",
            "is for another name: expected 127.0.0.2, it is for svc.test, *.wild.test, 127.0.0.1",
        ),
        (
            &good,
            named("b.test"),
            "svc.test",
            "is for another name: expected b.test, it is for svc.test, *.wild.test, 127.0.0.1",
        ),
        (&expired, trusting(&ca), "svc.test", "has expired at 2020-01-02T00:00:00Z"),
        (&early, trusting(&ca), "svc.test", "is not valid before 2998-07-01T00:00:00Z"),
    ] {
        let (_, connected) = shake(server, &originator(&plan), host).await;
        let words = format!("the upstream's certificate {words}");
        assert_eq!(failed(connected), (Failure::TlsCertificate, words));
    }
    let (_, connected) = shake(&good, &originator(&trusting(&ca)), "not a name").await;
    assert_eq!(failed(connected).0, Failure::TlsCertificate);
}

#[tokio::test]
async fn a_certificate_of_its_own_making_needs_insecure() {
    let ca = Ca::new("ca");
    let key = KeyPair::generate().unwrap();
    let mut own = ca.issue("own", &["svc.test"]);
    let params = rcgen::CertificateParams::new(["svc.test".to_owned()]).unwrap();
    own.cert = ca.write("own.crt", &params.self_signed(&key).unwrap().pem());
    own.key = ca.write("own.key", &key.serialize_pem());
    let server = terminator(&testing::listener(vec![own.clone()]));
    let (_, connected) = shake(&server, &originator(&trusting(&ca)), "svc.test").await;
    assert!(failed(connected).1.contains("is not trusted"));
    let insecure = UpstreamTls { insecure_skip_verify: true, ..UpstreamTls::default() };
    let (_, connected) = shake(&server, &originator(&insecure), "other.test").await;
    assert!(connected.is_ok());
    let pinned = UpstreamTls { ca_file: Some(own.cert.clone()), ..UpstreamTls::default() };
    let (_, connected) = shake(&server, &originator(&pinned), "svc.test").await;
    assert!(connected.is_ok());

    // Server and CA in one.
    let mut params = params;
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let both = params.self_signed(&key).unwrap().pem();
    own.cert = ca.write("own.crt", &both);
    let server = terminator(&testing::listener(vec![own.clone()]));
    let (_, connected) = shake(&server, &originator(&pinned), "svc.test").await;
    assert!(connected.is_ok());
    let (_, connected) = shake(&server, &originator(&pinned), "other.test").await;
    let words = "is for another name: expected other.test, it is for svc.test";
    assert_eq!(failed(connected).1, format!("the upstream's certificate {words}"));
    let (_, connected) = shake(&server, &originator(&trusting(&ca)), "svc.test").await;
    let words = "is that of a CA: a server needs one of its own, issued by it";
    assert_eq!(failed(connected).1, format!("the upstream's certificate {words}"));

    testing::expired(&mut params);
    ca.write("own.crt", &params.self_signed(&key).unwrap().pem());
    let server = terminator(&testing::listener(vec![own]));
    let (_, connected) = shake(&server, &originator(&pinned), "svc.test").await;
    let words = "has expired at 2020-01-02T00:00:00Z";
    assert_eq!(failed(connected).1, format!("the upstream's certificate {words}"));
}

#[tokio::test]
async fn an_upstream_without_http2_is_refused_where_only_that_will_do() {
    let ca = Ca::new("ca");
    let plan = testing::listener(vec![ca.issue("a", &["a.test"])]);
    let mut server = terminator(&plan);
    Arc::get_mut(&mut server.config).unwrap().alpn_protocols = vec![b"http/1.1".to_vec()];
    let client = Originator::new(&trusting(&ca), UpstreamProtocol::Http2).unwrap();
    let (_, connected) = shake(&server, &client, "a.test").await;
    let (failure, words) = failed(connected);
    assert_eq!(failure, Failure::TlsProtocol);
    assert_eq!(words, "the upstream refused the TLS handshake: NoApplicationProtocol");
}

#[tokio::test]
async fn what_is_no_tls_fails_at_once() {
    let ca = Ca::new("ca");
    let client = originator(&trusting(&ca));
    for (answer, words) in [
        (
            b"HTTP/1.1 400 Bad Request\r\n\r\n".as_slice(),
            "the upstream answered the TLS handshake with something else than TLS",
        ),
        (b"", "the upstream closed the connection in the TLS handshake"),
        // Alert: protocol_version.
        (
            b"\x15\x03\x01\x00\x02\x02\x46",
            "the upstream refused the TLS handshake: ProtocolVersion",
        ),
    ] {
        let (mut at_server, at_client) = connected().await;
        let ((), connected) = tokio::join!(
            async {
                let mut hello = [0; 4096];
                assert!(at_server.read(&mut hello).await.unwrap() > 0);
                at_server.write_all(answer).await.unwrap();
                drop(at_server);
            },
            client.connect(at_client, "a.test", false)
        );
        assert_eq!(failed(connected), (Failure::TlsProtocol, words.to_owned()));
    }
}
