//! Certificates, keys and CAs that a configuration names.

use rcgen::KeyPair;

use super::{Files, Source, listener, parse, pool};
use crate::tls::testing::{self, Ca};

/// Everything that is told of a file beside what `ca` has issued, refused or not.
fn told(ca: &Ca, text: String) -> String {
    let source = Source { name: "config.yaml".into(), text };
    let told = match parse(&source, &ca.path(""), Files::Check) {
        Ok(loaded) => loaded.render_warnings(false),
        Err(refused) => refused.render(false),
    };
    assert!(!told.contains("secret"));
    assert!(parse(&source, &ca.path(""), Files::Ignore).is_ok());
    told.replace(&ca.path("").display().to_string(), "DIR/")
}

#[test]
fn files_that_are_something_else_are_refused() {
    let ca = Ca::new("ca");
    ca.issue("good", &["a.test"]);
    ca.issue("other", &["a.test"]);
    ca.write("junk.pem", "secret words");
    ca.write(
        "nested.crt",
        "-----BEGIN CERTIFICATE-----\nMIIBIjANBgkqhkiG9w0B\n-----END CERTIFICATE-----\n",
    );
    let listeners = listener(
        "tls:\n  certs:\n    - { cert: good.crt, key: good.key }\n    - { cert: gone.crt, key: junk.pem }\n    - { cert: good.key, key: good.crt }\n    - { cert: nested.crt, key: good.key }\n    - { cert: good.crt, key: other.key }\n  client_auth: { ca_file: junk.pem }\n  autocert: { cache_dir: cache, allowed_hosts: [b.test], ca_file: nested.crt }",
    );
    insta::assert_snapshot!("listeners", told(&ca, listeners));
    let pools = pool(
        "upstream_tls:\n  ca_file: good.key\n  client_cert_file: good.crt\n  client_key_file: other.key",
    );
    insta::assert_snapshot!("pools", told(&ca, pools));
}

#[test]
fn files_that_are_good_may_still_be_worth_a_warning() {
    let ca = Ca::new("ca");
    ca.issue("good", &["a.test", "*.b.test"]);
    ca.issue("nobody", &[]);
    let key = KeyPair::generate().unwrap();
    ca.issue_with("old", &["a.test"], &key, testing::expired);
    ca.issue_with("early", &["a.test"], &key, |params| {
        params.not_before = rcgen::date_time_ymd(2998, 7, 1);
        params.not_after = rcgen::date_time_ymd(2999, 7, 1);
    });
    let bundle = std::fs::read_to_string(ca.path("ca.pem")).unwrap()
        + "-----BEGIN CERTIFICATE-----\nMIIBIjANBgkqhkiG9w0B\n-----END CERTIFICATE-----\n";
    ca.write("bundle.pem", &bundle);
    let listeners = listener(
        "tls:\n  certs:\n    - { cert: good.crt, key: good.key, hosts: [A.test, c.b.test, \"*.b.test\", b.test, d.c.b.test] }\n    - { cert: old.crt, key: old.key }\n    - { cert: early.crt, key: early.key }\n    - { cert: nobody.crt, key: nobody.key, hosts: [e.test] }\n  client_auth: { ca_file: bundle.pem }",
    );
    insta::assert_snapshot!("warned_listeners", told(&ca, listeners));
    let pools = pool(
        "upstream_tls:\n  ca_file: ca.pem\n  client_cert_file: old.crt\n  client_key_file: old.key\n  insecure_skip_verify: true",
    );
    insta::assert_snapshot!("warned_pools", told(&ca, pools));
}
