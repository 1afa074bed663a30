//! Certificates by ACME, from a CA that is not ours: issued, served, replaced, kept.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use l7rp_testkit::{Client, Signal, eventually, within};

use crate::acme_kit::{
    ISSUED, Pebble, Refusing, Shown, failures, file, is_served, shown, until_shown,
};
use crate::reload::Over;
use crate::reloading::free_port;
use crate::setup::start;
use crate::tls_kit::Ca;

/// Years: nothing is due in a test.
const LONG: u64 = 90 * 24 * 3600;

fn cache() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let private = fs::Permissions::from_mode(0o700);
    fs::set_permissions(folder.path(), private).expect("permissions");
    folder
}

/// Every file and folder below, with its permissions.
fn modes(folder: &Path) -> Vec<(String, u32)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let meta = fs::symlink_metadata(&path).expect("a file");
        all.push((path.display().to_string(), meta.permissions().mode() & 0o7777));
        if meta.is_dir() {
            all.extend(modes(&path));
        }
    }
    all
}

#[test]
fn a_certificate_is_issued_served_and_kept() {
    let (ca, cache) = (Ca::new("own"), cache());
    let fallback = ca.issue("fallback", &["fallback.test"]);
    let (tls, plain) = (free_port(), free_port());
    let mut pebble = Pebble::start(plain, tls, LONG);
    let below = cache.path().join("made");
    let autocert = pebble.autocert(&below, &["a.test", "B.test"]);
    let yaml = file(tls, plain, Some(&fallback), &autocert);
    let mut proxy = start(&yaml);
    let a = until_shown(tls, "a.test", Shown::is_pebbles);
    let b = until_shown(tls, "b.test", Shown::is_pebbles);
    assert!(is_served(tls, "a.test"));
    let junk = shown(tls, "junk.test").expect("a handshake");
    assert!(!junk.is_pebbles(), "nobody can make it ask for other names: {junk:?}");
    let obtained = |proxy: &l7rp_testkit::Proxy| proxy.events("certificate_obtained").len();
    eventually(ISSUED, || obtained(&proxy) == 2);
    let metrics = proxy.metrics();
    let expiry = "proxy_certificate_expiry_timestamp_seconds";
    let until = metrics.sum(expiry, &[("host", "a.test")]);
    let fallback_until = metrics.sum(expiry, &[("host", "fallback.test")]);
    assert!(until > 1.7e9 && until < fallback_until, "{until}");
    for (path, mode) in modes(cache.path()) {
        assert_eq!(mode & 0o077, 0, "{path} is nobody else's business: {mode:o}");
    }
    let challenges: Vec<_> =
        modes(&below).into_iter().filter(|(p, _)| p.contains("challenges/")).collect();
    assert_eq!(challenges, [], "what a CA looked at is not left behind");
    assert_eq!(pebble.orders(), 2);

    // A restart needs no CA.
    pebble.stop();
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(ISSUED), 0);
    let proxy = start(&yaml);
    assert_eq!(shown(tls, "a.test"), Some(a));
    assert_eq!(shown(tls, "b.test"), Some(b));
    assert_eq!(failures(&proxy).len(), 0, "nothing is due");
}

#[test]
fn a_certificate_is_replaced_before_it_expires_and_the_old_one_stays_while_the_ca_is_down() {
    let cache = cache();
    let (tls, plain) = (free_port(), free_port());
    let mut pebble = Pebble::start(plain, tls, 30);
    let proxy = start(&file(tls, plain, None, &pebble.autocert(cache.path(), &["a.test"])));
    let first = until_shown(tls, "a.test", Shown::is_pebbles);
    let over = AtomicBool::new(false);
    let second = thread::scope(|scope| {
        let _over = Over(&over);
        let hand_shakes = scope.spawn(|| {
            let (mut done, mut failed) = (0, 0);
            while !over.load(SeqCst) {
                done += 1;
                failed += u32::from(!is_served(tls, "a.test"));
            }
            (done, failed)
        });
        let second = until_shown(tls, "a.test", |shown| shown.serial != first.serial);
        over.store(true, SeqCst);
        let (done, failed) = hand_shakes.join().expect("a thread");
        assert!(done > 10 && failed == 0, "{failed} of {done} have failed");
        second
    });
    pebble.stop();
    let failed = within(ISSUED, || failures(&proxy).pop()).expect("a failure");
    assert_eq!(failed["host"], "a.test");
    let error = failed["error"].as_str().unwrap_or_default();
    assert!(error.contains("cannot connect to localhost:"), "{failed}");
    assert!(failed["next_try"].as_str() > failed["time"].as_str(), "{failed}");
    assert_eq!(shown(tls, "a.test"), Some(second), "the old one stays");
    assert!(is_served(tls, "a.test"));
}

#[test]
fn where_the_ca_cannot_shake_hands_it_is_shown_a_file() {
    let cache = cache();
    let (tls, plain) = (free_port(), free_port());
    // It looks for TLS where nobody is.
    let pebble = Pebble::start(plain, free_port(), LONG);
    let proxy = start(&file(tls, plain, None, &pebble.autocert(cache.path(), &["a.test"])));
    let failed = within(ISSUED, || failures(&proxy).pop()).expect("a failure");
    let error = failed["error"].as_str().unwrap_or_default();
    assert!(error.contains("urn:ietf:params:acme:error"), "in the CA's words: {failed}");
    until_shown(tls, "a.test", Shown::is_pebbles);
    assert_eq!(pebble.orders(), 2);
    let token = "/.well-known/acme-challenge/no-such-token";
    let answer = Client::connect(proxy.listener("web")).get(token);
    assert_eq!(answer.text(), "here", "other paths are those of routes");
}

#[test]
fn processes_that_share_a_cache_ask_once() {
    let cache = cache();
    let ports: Vec<(u16, u16)> = (0..3).map(|_| (free_port(), free_port())).collect();
    // It looks at the last one, whoever has asked.
    let pebble = Pebble::start(ports[2].1, ports[2].0, LONG);
    let autocert = pebble.autocert(cache.path(), &["a.test", "b.test"]);
    let proxies: Vec<_> =
        ports.iter().map(|(tls, plain)| start(&file(*tls, *plain, None, &autocert))).collect();
    for host in ["a.test", "b.test"] {
        let all = ports.iter().map(|(tls, _)| until_shown(*tls, host, Shown::is_pebbles));
        let all: Vec<_> = all.collect();
        assert!(all.iter().all(|one| *one == all[0]), "{host}: {all:?}");
    }
    assert_eq!(pebble.orders(), 2, "{:?}", proxies.iter().map(failures).collect::<Vec<_>>());
}

/// Case `tls-acme-429`.
#[test]
fn a_ca_that_wants_to_be_left_alone_is() {
    let (ca, cache) = (Ca::new("own"), cache());
    let fallback = ca.issue("fallback", &["fallback.test"]);
    let (tls, plain) = (free_port(), free_port());
    let refusing = Refusing::start(120);
    let yaml = file(tls, plain, Some(&fallback), &refusing.autocert(cache.path(), &["a.test"]));
    let mut proxy = start(&yaml);
    let failed = within(ISSUED, || failures(&proxy).pop()).expect("a failure");
    let error = failed["error"].as_str().unwrap_or_default();
    assert!(error.contains("too many new orders recently"), "in the CA's words: {failed}");
    let at = |key: &str| failed[key].as_str().expect("a time").to_owned();
    assert!(seconds(&at("next_try")) >= seconds(&at("time")) + 119, "{failed}");
    for _ in 0..5 {
        for name in ["a.test", "junk.test"] {
            for _ in 0..40 {
                let shown = shown(tls, name).expect("a handshake");
                assert!(!shown.is_pebbles(), "{shown:?}");
            }
        }
        proxy.signal(Signal::TERM);
        assert_eq!(proxy.wait_exit(ISSUED), 0);
        proxy = start(&yaml);
    }
    // It looks once a second whether something is due.
    l7rp_testkit::let_pass(Duration::from_millis(2500));
    assert_eq!((refusing.orders(), failures(&proxy).len()), (1, 0));
}

#[test]
fn where_nothing_can_be_written_nobody_is_asked_and_it_is_told_once() {
    let cache = cache();
    let (tls, plain) = (free_port(), free_port());
    let refusing = Refusing::start(1);
    let yaml = file(tls, plain, None, &refusing.autocert(cache.path(), &["a.test"]));
    let mut proxy = start(&yaml);
    within(ISSUED, || failures(&proxy).pop()).expect("a failure");
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(ISSUED), 0);
    // Nothing can take the place of a folder that is not empty.
    let all = modes(cache.path());
    let (tries, _) = all.iter().find(|(path, _)| path.ends_with("tries.json")).expect("it is kept");
    fs::remove_file(tries).expect("a file");
    fs::create_dir_all(format!("{tries}/full")).expect("a folder");
    let proxy = start(&yaml);
    let failed = within(ISSUED, || failures(&proxy).pop()).expect("a failure");
    assert!(failed["error"].as_str().is_some_and(|e| e.contains("cannot write to the cache")));
    // It looks once a second whether something is due.
    l7rp_testkit::let_pass(Duration::from_millis(3500));
    assert_eq!((failures(&proxy).len(), refusing.orders()), (1, 1));
}

/// Of a time of the day, as events have it.
fn seconds(time: &str) -> u64 {
    let (day, clock) = time.split_once('T').expect("a date");
    let number = |part: &str| part.parse::<u64>().expect("a number");
    let clock: Vec<_> = clock.split([':', '.']).take(3).map(number).collect();
    let day = number(day.rsplit('-').next().expect("a day"));
    // The tests do not run over the end of a month by more than a moment.
    ((day * 24 + clock[0]) * 60 + clock[1]) * 60 + clock[2]
}

#[test]
fn a_reload_asks_for_more_names_and_keeps_what_there_is() {
    let cache = cache();
    let (tls, plain) = (free_port(), free_port());
    let pebble = Pebble::start(plain, tls, LONG);
    let of = |hosts: &[&str]| file(tls, plain, None, &pebble.autocert(cache.path(), hosts));
    let proxy = start(&of(&["a.test"]));
    let a = until_shown(tls, "a.test", Shown::is_pebbles);
    proxy.reload(&of(&["a.test", "b.test"]));
    assert_eq!(shown(tls, "a.test").as_ref(), Some(&a));
    until_shown(tls, "b.test", Shown::is_pebbles);
    proxy.reload(&of(&["b.test"]));
    let other = shown(tls, "a.test").expect("a handshake");
    assert_ne!(other, a, "it is not asked for any more");
    assert_eq!(pebble.orders(), 2);
}

#[test]
fn a_cache_that_others_can_change_is_refused() {
    let cache = cache();
    let open = fs::Permissions::from_mode(0o777);
    fs::set_permissions(cache.path(), open).expect("permissions");
    let refusing = Refusing::start(120);
    let yaml = file(free_port(), free_port(), None, &refusing.autocert(cache.path(), &["a.test"]));
    let mut proxy = l7rp_testkit::Proxy::spawn(crate::setup::PROGRAM, &yaml);
    assert_eq!(proxy.wait_exit(ISSUED), 1);
    let errors = proxy.errors();
    assert!(errors.contains("can be changed by others (mode 777)"), "{errors}");
    assert!(errors.contains("chmod 700"), "{errors}");
}
