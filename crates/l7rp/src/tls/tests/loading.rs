//! Files: every kind of key, and what is wrong with the others.

use rcgen::KeyPair;

use super::super::testing::{self, Ca};
use super::{Originator, Resumption, Terminator, terminator};
use crate::config::plan::{Certificate, ClientAuth, ListenerTls, UpstreamProtocol, UpstreamTls};

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digit = |part: &[u8], i: usize| {
        let word =
            part.iter().fold(0u32, |word, b| word << 8 | u32::from(*b)) << (8 * (3 - part.len()));
        if i > part.len() { '=' } else { char::from(DIGITS[(word >> (18 - 6 * i) & 63) as usize]) }
    };
    bytes.chunks(3).flat_map(|part| (0..4).map(move |i| digit(part, i))).collect()
}

/// The key inside of PKCS#8: what is in its one OCTET STRING on the upper level.
fn within(pkcs8: &[u8]) -> Vec<u8> {
    let header = |der: &[u8]| match der[1] {
        n if n < 128 => (2, usize::from(n)),
        n => {
            let octets = usize::from(n - 128);
            let length = der[2..2 + octets].iter().fold(0, |sum, b| sum << 8 | usize::from(*b));
            (2 + octets, length)
        }
    };
    let mut rest = &pkcs8[header(pkcs8).0..];
    while rest[0] != 4 {
        let (start, length) = header(rest);
        rest = &rest[start + length..];
    }
    let (start, length) = header(rest);
    rest[start..start + length].to_vec()
}

#[test]
fn keys_of_every_kind_are_read() {
    let ca = Ca::new("ca");
    for (name, kind, label) in [
        ("rsa", &rcgen::PKCS_RSA_SHA256, Some("RSA PRIVATE KEY")),
        ("p256", &rcgen::PKCS_ECDSA_P256_SHA256, Some("EC PRIVATE KEY")),
        ("p384", &rcgen::PKCS_ECDSA_P384_SHA384, None),
        ("ed25519", &rcgen::PKCS_ED25519, None),
    ] {
        let key = KeyPair::generate_for(kind).unwrap();
        let certificate = ca.issue_with(name, &["a.test"], &key, |_| {});
        terminator(&testing::listener(vec![certificate.clone()]));
        if let Some(label) = label {
            let inner = base64(&within(&key.serialize_der()));
            let lines: Vec<_> = inner.as_bytes().chunks(64).map(String::from_utf8_lossy).collect();
            let text =
                format!("-----BEGIN {label}-----\n{}\n-----END {label}-----\n", lines.join("\n"));
            ca.write(&format!("{name}.key"), &text);
            terminator(&testing::listener(vec![certificate]));
        }
    }
}

/// Everything that is wrong, with `DIR` for the folder.
fn wrong(ca: &Ca, plan: &ListenerTls) -> Vec<String> {
    let errors = Terminator::new(plan, &Resumption::new().unwrap(), None).unwrap_err();
    let folder = ca.path("").display().to_string();
    errors.iter().map(|error| error.to_string().replace(&folder, "DIR/")).collect()
}

#[test]
fn everything_that_is_wrong_is_told() {
    let ca = Ca::new("ca");
    let good = ca.issue("good", &["a.test"]);
    let other = ca.issue("other", &["b.test"]);
    let read = |path| std::fs::read_to_string(path).unwrap();
    let both = ca.write("chain.crt", &(read(ca.path("ca.pem")) + &read(ca.path("good.crt"))));
    let weak = "-----BEGIN PRIVATE KEY-----\nMIIBIjANBgkqhkiG9w0B\n-----END PRIVATE KEY-----\n";
    let strange = "-----BEGIN CERTIFICATE-----\nMIIBIjANBgkqhkiG9w0B\n-----END CERTIFICATE-----\n";
    let with = |cert: &std::path::Path, key: &std::path::Path| Certificate {
        cert: cert.to_owned(),
        key: key.to_owned(),
        hosts: Vec::new(),
    };
    let mut plan = testing::listener(vec![
        with(&good.cert, &other.key),
        with(&both, &good.key),
        with(&ca.path("none.crt"), &ca.write("weak.key", weak)),
        with(&ca.write("strange.crt", strange), &good.cert),
    ]);
    plan.client_auth =
        Some(ClientAuth { ca_file: ca.path("strange.crt"), required: true, identity_header: None });
    assert_eq!(
        wrong(&ca, &plan),
        [
            "`DIR/other.key` is not the key of the certificate in `DIR/good.crt`",
            "`DIR/good.key` is not the key of the certificate in `DIR/chain.crt` (it is that of certificate 2 there: the server's own must be the first)",
            "cannot read `DIR/none.crt`: No such file or directory (os error 2) (looked for at DIR/none.crt)",
            "`DIR/weak.key` has a private key that cannot be used (RSA with 2048 to 8192 bits, ECDSA with P-256, P-384 or P-521, and Ed25519 can)",
            "`DIR/strange.crt` is damaged: its certificate 1 is not X.509",
            "`DIR/good.crt` has no private key (`BEGIN PRIVATE KEY`), only `CERTIFICATE`",
            "`DIR/strange.crt` has no certificate that can be used as a CA",
        ]
    );
    let plan = UpstreamTls {
        ca_file: Some(ca.path("none.pem")),
        client_cert: Some((good.cert, other.key)),
        ..UpstreamTls::default()
    };
    assert_eq!(Originator::new(&plan, UpstreamProtocol::Auto).unwrap_err().len(), 2);
}

#[test]
fn an_expired_certificate_is_shown_all_the_same() {
    let ca = Ca::new("ca");
    let old = ca.issue_with("old", &["a.test"], &KeyPair::generate().unwrap(), testing::expired);
    let server = terminator(&testing::listener(vec![old]));
    assert_eq!(server.certificates().next().unwrap().not_after, 1_577_923_200);
}
