//! A CA that means no good, and a cache that does not stay.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use l7rp_testkit::{Client, Origin, Then, let_pass, within};

use crate::acme_kit::{ISSUED, Pebble, Shown, failures, file, is_served, until_shown};
use crate::reloading::free_port;
use crate::setup::{get, start};
use crate::tls_kit::{Ca, upstream};

/// Years: nothing is due in a test.
const LONG: u64 = 90 * 24 * 3600;

/// All files below.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

/// What a CA looks at is not left behind: neither on disk nor at the port.
#[test]
fn the_answer_to_a_challenge_is_gone_when_the_order_is_over() {
    let cache = tempfile::tempdir().expect("a folder");
    let below = cache.path().join("made");
    let (tls, plain) = (free_port(), free_port());
    // It looks for TLS where nobody is, and so for a file.
    let pebble = Pebble::start(plain, free_port(), LONG);
    let proxy = start(&file(tls, plain, None, &pebble.autocert(&below, &["a.test"])));
    let token = within(ISSUED, || {
        let name =
            |path: &PathBuf| path.file_name()?.to_str()?.strip_suffix(".token").map(Into::into);
        files(&below).iter().find_map(name)
    });
    let token: String = token.expect("a token");
    until_shown(tls, "a.test", Shown::is_pebbles);
    within(ISSUED, || (!proxy.events("certificate_obtained").is_empty()).then_some(()))
        .expect("an event");
    // It looks at the cache once a second.
    let_pass(Duration::from_secs(3));
    assert!(!files(&below).iter().any(|path| path.to_string_lossy().ends_with(".token")));
    let path = format!("/.well-known/acme-challenge/{token}");
    let answer = Client::connect(proxy.listener("web")).ask(get("other.test", &path, ""));
    assert_eq!(answer.text(), "here", "answered although the order is over");
}

/// A CA that never comes to an end of an order, with these fields in each answer about it; how often
/// it was asked for its directory.
struct Endless {
    _origin: Origin,
    ca: Ca,
    port: String,
    asked: Arc<AtomicUsize>,
}

impl Endless {
    fn start(fields_of_order: &'static str) -> Self {
        let ca = Ca::new("of-endless");
        let own = ca.issue("endless", &["localhost"]);
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = asked.clone();
        let origin = upstream(ca.server(&own, false, &[]), move |call| {
            let base = format!("https://{}", call.request.get("host").expect("a host"));
            let say = |status: &str, more: &str, body: &str| {
                format!(
                    "HTTP/1.1 {status}\r\nReplay-Nonce: bm9uY2U\r\nConnection: close\r\n{more}\
                     Content-Length: {}\r\n\r\n{body}",
                    body.len()
                )
            };
            let _ = call.body();
            let order = format!(
                "{{\"status\":\"pending\",\"identifiers\":[{{\"type\":\"dns\",\"value\":\"a.test\"}}],\
                 \"authorizations\":[\"{base}/z\"],\"finalize\":\"{base}/f\"}}"
            );
            let reply = match call.request.target() {
                "/dir" => {
                    counted.fetch_add(1, SeqCst);
                    let body = format!(
                        "{{\"newNonce\":\"{base}/n\",\"newAccount\":\"{base}/a\",\"newOrder\":\"{base}/o\",\"revokeCert\":\"{base}/r\",\"keyChange\":\"{base}/k\"}}"
                    );
                    say("200 OK", "", &body)
                }
                "/n" => say("200 OK", "", ""),
                "/a" => say("201 Created", &format!("Location: {base}/a/1\r\n"), "{}"),
                "/o" => say("201 Created", &format!("Location: {base}/o/1\r\n"), &order),
                "/z" => say(
                    "200 OK",
                    "",
                    "{\"status\":\"valid\",\"identifier\":{\"type\":\"dns\",\"value\":\"a.test\"},\"challenges\":[]}",
                ),
                _ => say("200 OK", fields_of_order, &order),
            };
            call.send(reply);
            Then::Close
        });
        let url = origin.url();
        let port = url.rsplit(':').next().expect("a port").to_owned();
        Self { _origin: origin, ca, port, asked }
    }

    fn autocert(&self, cache: &Path) -> String {
        format!(
            "autocert: {{ cache_dir: \"{}\", allowed_hosts: [a.test], \
             directory_url: \"https://localhost:{}/dir\", ca_file: \"{}\" }}",
            cache.display(),
            self.port,
            self.ca.file().display()
        )
    }
}

/// What a CA asks for in `Retry-After` is not what ends the asking for good, and without a word.
#[test]
fn a_ca_that_wants_to_be_left_alone_for_ever_is_a_failure_like_another() {
    let cache = tempfile::tempdir().expect("a folder");
    let ca = Endless::start("Retry-After: 18446744073709551615\r\n");
    let (tls, plain) = (free_port(), free_port());
    let proxy = start(&file(tls, plain, None, &ca.autocert(&cache.path().join("made"))));
    let failed = within(Duration::from_secs(20), || failures(&proxy).pop());
    let errors = proxy.errors();
    let panics: Vec<_> = proxy
        .lines()
        .into_iter()
        .filter(|l| l["event"].as_str().is_some_and(|e| e.contains("panic")))
        .collect();
    assert!(
        failed.is_some(),
        "asked {} times, and nothing is told: {errors} {panics:#?}",
        ca.asked.load(SeqCst)
    );
}

/// The same with a time that makes sense: what the test above differs in.
#[test]
fn a_ca_that_wants_to_be_left_alone_for_a_day_is_told_of() {
    let cache = tempfile::tempdir().expect("a folder");
    let ca = Endless::start("Retry-After: 86400\r\n");
    let (tls, plain) = (free_port(), free_port());
    let proxy = start(&file(tls, plain, None, &ca.autocert(&cache.path().join("made"))));
    assert!(within(Duration::from_secs(20), || failures(&proxy).pop()).is_some());
}

/// A cache that was removed while the proxy runs is made again, at the latest by a reload, as it is
/// made at a start: else nothing is ever renewed again in the life of the process.
#[test]
fn a_cache_that_was_removed_is_made_again() {
    let cache = tempfile::tempdir().expect("a folder");
    let below = cache.path().join("made");
    let (tls, plain) = (free_port(), free_port());
    let pebble = Pebble::start(plain, tls, LONG);
    let of = |hosts: &[&str]| file(tls, plain, None, &pebble.autocert(&below, hosts));
    let proxy = start(&of(&["a.test"]));
    until_shown(tls, "a.test", Shown::is_pebbles);
    fs::remove_dir_all(&below).expect("it is there");
    let_pass(Duration::from_secs(2));
    proxy.reload(&of(&["a.test", "b.test"]));
    assert!(is_served(tls, "a.test"), "what there is stays");
    let got = within(ISSUED, || {
        crate::acme_kit::shown(tls, "b.test").filter(|shown| shown.names == ["DNSName(b.test)"])
    });
    assert!(got.is_some(), "{:#?}", failures(&proxy));
}

/// A certificate that is due as soon as it is there (the clock is ahead by weeks, or the CA gives
/// little) is not asked for without end and without a pause: a CA counts that.
#[test]
fn certificates_that_are_due_at_once_are_not_asked_for_without_a_pause() {
    let cache = tempfile::tempdir().expect("a folder");
    let (tls, plain) = (free_port(), free_port());
    let pebble = Pebble::start(plain, tls, 1);
    let proxy =
        start(&file(tls, plain, None, &pebble.autocert(&cache.path().join("m"), &["a.test"])));
    let first = within(ISSUED, || (!proxy.events("certificate_obtained").is_empty()).then_some(()));
    assert!(first.is_some(), "{:#?}", failures(&proxy));
    let before = pebble.orders();
    let_pass(Duration::from_secs(30));
    let more = pebble.orders() - before;
    assert!(more <= 3, "{more} more orders within 30 s");
}
