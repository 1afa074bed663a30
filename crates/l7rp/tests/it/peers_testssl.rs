//! testssl.sh, which knows what has gone wrong with TLS elsewhere, looks at a listener with both
//! kinds of certificates. It looks once, for a minute, and each test reads of it what it is about.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

use l7rp_testkit::{Origin, Value, reply};
use rcgen::{CertificateParams, ExtendedKeyUsagePurpose, KeyPair, KeyUsagePurpose};

use crate::peers_tls::run;
use crate::setup::over;
use crate::tls_kit::{Ca, HOST, rsa, tls};
use crate::tries::assert_at_rest;

/// Longer than a busy machine needs.
const SECONDS: u32 = 300;
/// Protocols, standard suites, forward secrecy, what the server shows, what it prefers, and all
/// that has a name as a vulnerability.
const CHECKS: [&str; 6] = ["-p", "-s", "-f", "-S", "-P", "-U"];
/// No name is looked up, and nobody is asked about the certificates.
const ALONE: [&str; 8] =
    ["-n", "none", "--ip", "127.0.0.1", "--connect-timeout", "10", "--openssl-timeout", "20"];

/// Findings of testssl.sh that are not about the proxy.
const NOT_OURS: [(&str, &str); 4] = [
    ("sessionresumption_ticket", "its client may leave before a ticket of TLS 1.3 has come to it;"),
    ("sessionresumption_ID", "the client of `peers_tls.rs` waits for one"),
    ("cert_revocation", "the CA of the tests publishes no list of what it has revoked"),
    ("engine_problem", "about the client's own OpenSSL, which has no GOST"),
];

/// A finding, without the number of the certificate that it is about.
#[derive(Clone, Debug)]
struct Finding {
    severity: String,
    text: String,
}

/// All findings, by what they are about.
type Findings = BTreeMap<String, Vec<Finding>>;

/// As certificates are issued these days: for three months, to servers.
fn usual(params: &mut CertificateParams) {
    const DAY: Duration = Duration::from_hours(24);
    let today = SystemTime::UNIX_EPOCH.elapsed().expect("after 1970");
    let now = rcgen::date_time_ymd(1970, 1, 1) + today;
    params.not_before = now - DAY;
    params.not_after = now + 89 * DAY;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
}

static FINDINGS: LazyLock<Findings> = LazyLock::new(|| {
    let origin = Origin::start(reply::name("x"));
    let ca = Ca::new("ca");
    let keys = [("ec", KeyPair::generate().expect("a key")), ("rsa", rsa())];
    let pairs = keys.map(|(name, key)| ca.issue_for(&key, name, &[HOST], usual));
    let proxy = over(&[&origin]).listener(&tls(&[&pairs[0], &pairs[1]], "")).start();
    let (file, trusted) = (ca.path("findings.json"), ca.file());
    let url = format!("https://{HOST}:{}/", proxy.address().port());
    let [file, trusted] = [&file, &trusted].map(|path| path.to_str().expect("text"));
    let told = ["--quiet", "--color", "0", "--warnings", "off", "--add-ca", trusted];
    let told = [&told[..], &["--jsonfile", file], &ALONE, &CHECKS, &[&url]].concat();
    let said = run(SECONDS, "testssl", &told, "");
    assert_at_rest(&proxy);
    let text = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{e}: {}", said.text));
    let all: Value = serde_json(&text);
    let mut findings = Findings::new();
    for one in all.as_array().expect("a list") {
        let word = |key: &str| one[key].as_str().expect("a word").to_owned();
        let about = word("id").split(' ').next().unwrap_or_default().to_owned();
        let finding = Finding { severity: word("severity"), text: word("finding") };
        findings.entry(about).or_default().push(finding);
    }
    println!("testssl.sh took {} s", text_of(&findings, "scanTime"));
    findings
});

fn serde_json(text: &str) -> Value {
    text.parse().expect("JSON")
}

/// The only finding about this.
#[track_caller]
fn text_of(findings: &Findings, about: &str) -> String {
    let all = findings.get(about).unwrap_or_else(|| panic!("nothing about {about}: {findings:#?}"));
    assert_eq!(all.len(), 1, "{about}: {all:?}");
    all[0].text.clone()
}

#[test]
fn versions_are_those_of_today() {
    for version in ["SSLv2", "SSLv3", "TLS1", "TLS1_1"] {
        assert_eq!(text_of(&FINDINGS, version), "not offered", "{version}");
    }
    for version in ["TLS1_2", "TLS1_3"] {
        let text = text_of(&FINDINGS, version);
        assert!(text.starts_with("offered"), "{version}: {text}");
    }
    assert_eq!(text_of(&FINDINGS, "ALPN_HTTP2"), "h2");
}

#[test]
fn suites_are_strong_and_have_forward_secrecy() {
    for kind in ["NULL", "aNULL", "EXPORT", "LOW", "3DES_IDEA", "AVERAGE"] {
        let about = format!("cipherlist_{kind}");
        // AVERAGE are those with CBC and those without forward secrecy.
        assert_eq!(text_of(&FINDINGS, &about), "not offered", "{about}");
    }
    assert_eq!(text_of(&FINDINGS, "cipherlist_STRONG"), "offered");
    assert_eq!(text_of(&FINDINGS, "PFS"), "offered");
    let suites = text_of(&FINDINGS, "PFS_ciphers");
    for kind in ["ECDHE-RSA-", "ECDHE-ECDSA-", "TLS_"] {
        assert!(suites.contains(kind), "{suites}");
    }
    for suite in suites.split_ascii_whitespace() {
        assert!(suite.contains("GCM") || suite.contains("CHACHA20"), "{suite}");
    }
}

#[test]
fn both_certificates_are_shown_and_believed() {
    for about in ["cert_keySize", "cert_chain_of_trust", "cert_trust"] {
        let all = FINDINGS.get(about).expect("findings");
        let severities: Vec<_> = all.iter().map(|one| one.severity.as_str()).collect();
        assert!(severities.iter().all(|s| matches!(*s, "OK" | "INFO")), "{about}: {all:?}");
        assert_eq!(all.len(), 2, "{about}: {all:?}");
    }
}

#[test]
fn nothing_with_a_name_has_gone_wrong_here() {
    for about in [
        "heartbleed",
        "CCS",
        "ticketbleed",
        "ROBOT",
        "secure_renego",
        "secure_client_renego",
        "CRIME_TLS",
        "BREACH",
        "POODLE_SSL",
        "fallback_SCSV",
        "SWEET32",
        "FREAK",
        "DROWN",
        "LOGJAM",
        "BEAST",
        "LUCKY13",
        "RC4",
    ] {
        let all = FINDINGS.get(about).unwrap_or_else(|| panic!("nothing about {about}"));
        assert!(all.iter().all(|one| one.severity == "OK"), "{about}: {all:?}");
    }
}

/// Findings that are graded so, or that could not be made.
fn bad(ids: impl Fn(&str) -> bool) -> Vec<String> {
    let is_bad = |finding: &Finding| !matches!(finding.severity.as_str(), "OK" | "INFO" | "LOW");
    let of = |(about, all): (&String, &Vec<Finding>)| {
        let bad: Vec<_> = all.iter().filter(|one| is_bad(one)).cloned().collect();
        (ids(about) && !bad.is_empty()).then(|| format!("{about}: {bad:?}"))
    };
    FINDINGS.iter().filter_map(of).collect()
}

/// Which of its suites is used is for the server to say.
const ORDER: &str = "cipher_order";

#[test]
fn nothing_else_is_worse_than_low() {
    let found = bad(|about| about != ORDER && NOT_OURS.iter().all(|(id, _)| *id != about));
    assert!(found.is_empty(), "{found:#?}");
    assert!(FINDINGS.contains_key("scanTime"), "it has not come to its end");
}

#[test]
fn the_order_of_suites_is_no_finding() {
    let found = bad(|about| about == ORDER);
    assert!(found.is_empty(), "{found:#?}");
}
