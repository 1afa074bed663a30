//! Which certificate is shown.

use std::sync::Arc;

use rcgen::KeyPair;
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::super::testing::{self, Ca};
use super::{authorities, client, files, shake_with, terminator};
use crate::config::plan::{Autocert, Certificate};
use crate::tls::files::Named;
use crate::tls::verify::Verifier;
use crate::tls::{Issued, Resumption, Terminator, issued};

/// The common name of what a client is shown that does not care for whom it is.
async fn shown(server: &Terminator, ca: &Ca, name: &str, sni: bool) -> String {
    let config = client(ca, &[&TLS13], |config| {
        config.enable_sni = sni;
        config.dangerous().set_certificate_verifier(Arc::new(Verifier::insecure()));
    });
    let (_, stream) = shake_with(server, config, name).await;
    subject(stream.unwrap().get_ref().1.peer_certificates().unwrap())
}

fn subject(chain: &[rustls::pki_types::CertificateDer<'_>]) -> String {
    let (_, certificate) = X509Certificate::from_der(&chain[0]).unwrap();
    let name = certificate.subject().iter_common_name().last().unwrap();
    name.as_str().unwrap().to_owned()
}

fn load(certificate: &Certificate) -> Arc<CertifiedKey> {
    let named = |path| Named { path, name: "a file" };
    Arc::new(files::both(named(&certificate.cert), named(&certificate.key)).unwrap().1)
}

#[tokio::test]
async fn exact_then_longest_wildcard_then_fallback() {
    let ca = Ca::new("ca");
    let mut given = ca.issue("given", &["other.test"]);
    given.hosts = vec!["Given.test".into(), "*.deep.wild.test".into()];
    let server = terminator(&testing::listener(vec![
        ca.issue("first", &["first.test"]),
        ca.issue("wild", &["*.wild.test"]),
        ca.issue("exact", &["exact.wild.test", "exact.test"]),
        ca.issue("again", &["exact.test"]),
        given,
    ]));
    for (sni, expected) in [
        ("first.test", "first"),
        ("exact.test", "exact"),
        ("EXACT.test", "exact"),
        ("exact.wild.test", "exact"),
        ("a.wild.test", "wild"),
        ("a.b.wild.test", "wild"),
        ("a.deep.wild.test", "given"),
        ("wild.test", "first"),
        ("given.test", "given"),
        // The names in the file count, not those in the certificate.
        ("other.test", "first"),
        ("unknown.test", "first"),
    ] {
        assert_eq!(shown(&server, &ca, sni, true).await, expected, "{sni}");
    }
    assert_eq!(shown(&server, &ca, "exact.test", false).await, "first", "without a name");
    let hosts: Vec<_> = server.certificates().map(|shown| shown.host).collect();
    assert_eq!(hosts, ["first.test", "*.wild.test", "exact.wild.test", "exact.test", "Given.test"]);
}

#[tokio::test]
async fn a_client_gets_the_kind_of_key_that_it_knows() {
    let ca = Ca::new("ca");
    let rsa = KeyPair::generate_for(&rcgen::PKCS_RSA_SHA256).unwrap();
    let server = terminator(&testing::listener(vec![
        ca.issue_with("rsa", &["a.test", "b.test"], &rsa, |_| {}),
        ca.issue("ecdsa", &["a.test"]),
    ]));
    assert_eq!(shown(&server, &ca, "a.test", true).await, "ecdsa");
    assert_eq!(shown(&server, &ca, "b.test", true).await, "rsa");
    assert_eq!(shown(&server, &ca, "unknown.test", true).await, "ecdsa");

    let mut provider = rustls::crypto::aws_lc_rs::default_provider();
    provider
        .cipher_suites
        .retain(|suite| format!("{:?}", suite.suite()).starts_with("TLS_ECDHE_RSA"));
    let roots = authorities(&ca).roots;
    let old = rustls::ClientConfig::builder_with_provider(Arc::new(provider))
        .with_protocol_versions(&[&rustls::version::TLS12])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let (_, stream) = shake_with(&server, Arc::new(old), "a.test").await;
    assert_eq!(subject(stream.unwrap().get_ref().1.peer_certificates().unwrap()), "rsa");
}

#[tokio::test]
async fn certificates_come_at_run_time() {
    let ca = Ca::new("ca");
    let mut plan = testing::listener(vec![ca.issue("wild", &["*.test"])]);
    plan.autocert = Some(Autocert {
        cache_dir: ca.path("cache"),
        allowed_hosts: vec!["a.test".into()],
        email: None,
        directory_url: None,
        ca_file: None,
    });
    let issued = Arc::new(Issued::default());
    let resumption = Resumption::new().unwrap();
    let server = Terminator::new(&plan, &resumption, Some(&issued)).unwrap();
    assert_eq!(shown(&server, &ca, "a.test", true).await, "wild");
    let put = |name: &str, host: &str| {
        let key = load(&ca.issue(name, &[host]));
        issued.put(host, &issued::Certificate { key, not_after: 7 });
    };
    put("fetched", "a.test");
    // For a listener that shares the CA.
    put("other", "b.test");
    assert_eq!(shown(&server, &ca, "a.test", true).await, "fetched");
    assert_eq!(shown(&server, &ca, "b.test", true).await, "wild");
    let hosts: Vec<_> = server.certificates().map(|one| (one.host, one.not_after)).collect();
    assert_eq!(hosts[1..], [("a.test".to_owned(), 7)]);

    issued.put_challenge("a.test", &load(&ca.issue("challenge", &["a.test"])));
    let look =
        || client(&ca, &[&TLS13], |config| config.alpn_protocols = vec![b"acme-tls/1".into()]);
    let (accepted, stream) = shake_with(&server, look(), "a.test").await;
    assert_eq!(super::reason(accepted), "acme_challenge");
    assert_eq!(subject(stream.unwrap().get_ref().1.peer_certificates().unwrap()), "challenge");
    let (accepted, stream) = shake_with(&server, look(), "b.test").await;
    assert_eq!((super::reason(accepted), stream.is_err()), ("no_certificate", true));

    plan.certs.clear();
    let issued = Arc::new(Issued::default());
    let server = Terminator::new(&plan, &resumption, Some(&issued)).unwrap();
    let (accepted, _) = shake_with(&server, client(&ca, &[&TLS13], |_| {}), "a.test").await;
    assert_eq!(super::reason(accepted), "no_certificate");
    let key = load(&ca.issue("only", &["a.test"]));
    issued.put("a.test", &issued::Certificate { key, not_after: 7 });
    assert_eq!(shown(&server, &ca, "b.test", true).await, "only");
}

#[test]
fn a_host_belongs_where_its_certificate_was_shown() {
    let ca = Ca::new("ca");
    let server = terminator(&testing::listener(vec![
        ca.issue("first", &["first.test"]),
        ca.issue("wild", &["*.wild.test", "wild.test"]),
    ]));
    for (sni, host, good) in [
        (Some("a.wild.test"), "A.wild.test", true),
        (Some("a.wild.test"), "b.wild.test", true),
        (Some("a.wild.test"), "wild.test", true),
        (Some("a.wild.test"), "first.test", false),
        (Some("a.wild.test"), "unknown.test", false),
        (Some("unknown.test"), "first.test", true),
        (None, "first.test", true),
        (None, "unknown.test", false),
    ] {
        assert_eq!(server.is_good_for(sni, host), good, "{sni:?} {host}");
    }
}
