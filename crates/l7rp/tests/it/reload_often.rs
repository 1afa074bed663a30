//! Reloads in quick succession, while the process ends, and without a signal; and what goes on
//! at its own pace meanwhile.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Gate, Origin, Proxy, SOON, Signal, eventually, let_pass, reply};

use crate::reload::{Over, generation_of, is_left_alone, many_files, simple};
use crate::setup::{PROGRAM, assert_counts, get, start};
use crate::tries::assert_at_rest;

/// Case `reload-hup-burst`, with fewer clients and a faster pace.
#[test]
fn reload_hup_burst() {
    const SIGNALS: usize = 500;
    let (proxy, file) = many_files();
    let threads = proxy.threads();
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                let mut client = proxy.client();
                while !over.load(SeqCst) {
                    generation_of(&mut client);
                    let_pass(Duration::from_millis(5));
                }
            });
        }
        let _end = Over(&over);
        for n in 1..=SIGNALS {
            proxy.rewrite_yaml(&file(n));
            proxy.signal(Signal::HUP);
            let_pass(Duration::from_millis(1 + n as u64 * 7 % 10));
        }
        let mut client = proxy.client();
        eventually(SOON / 2, || generation_of(&mut client) == SIGNALS);
    });
    // Whatever still waits reads the same file.
    let outcomes = || proxy.outcomes().len() as f64;
    eventually(SOON, || proxy.metrics().sum("proxy_config_reloads_total", &[]) == outcomes());
    let outcomes = proxy.outcomes();
    assert!((1..=SIGNALS).contains(&outcomes.len()), "{}", outcomes.len());
    assert!(outcomes.iter().all(|event| event["event"] == "config_reloaded"));
    let generations: Vec<_> = outcomes.iter().filter_map(|e| e["generation"].as_u64()).collect();
    assert!(generations.iter().copied().eq(2..outcomes.len() as u64 + 2), "{generations:?}");
    let last = *generations.last().expect("one") as f64;
    assert_counts(&proxy, "proxy_config_generation", &[], last);
    eventually(SOON * 2, || proxy.threads() == threads);
    assert_at_rest(&proxy);
}

#[test]
fn the_last_of_two_files_wins() {
    let origins = ["one", "two"].map(|name| Origin::start(reply::name(name)));
    let proxy = start(&simple(&[&Origin::refusing()], ""));
    for round in 0..10 {
        let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        for ix in order {
            proxy.rewrite_yaml(&simple(&[&origins[ix]], ""));
            proxy.signal(Signal::HUP);
        }
        let expected = ["one", "two"][order[1]];
        eventually(SOON, || proxy.get("/").text() == expected);
    }
    assert_eq!(proxy.events("config_rejected").len(), 0);
}

#[test]
fn a_process_that_drains_does_not_reload() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("late", &gate));
    let mut proxy = start(&simple(&[&origin], ""));
    let mut client = proxy.client();
    client.send(get("a.test", "/", ""));
    eventually(SOON, || origin.requests() == 1);
    proxy.signal(Signal::TERM);
    proxy.wait_for_event("shutdown_started", |_| true, SOON);
    proxy.rewrite_yaml(&simple(&[&Origin::refusing()], ", max_in_flight: 3"));
    proxy.signal(Signal::HUP);
    let event = proxy.wait_for_event("reload_ignored", |_| true, SOON);
    assert!(event["why"].as_str().is_some_and(|why| why.contains("drain")), "{event}");
    gate.open();
    assert_eq!(client.response().text(), "late");
    assert_eq!(proxy.wait_exit(SOON), 0);
    assert!(proxy.outcomes().is_empty());
}

#[test]
fn a_file_that_never_ends_does_not_keep_the_process_from_ending() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = start(&simple(&[&origin], ""));
    let path = proxy.directory().join("config.yaml");
    fs::remove_file(&path).expect("it goes");
    // Whoever opens it waits for somebody who writes, as for a file system that hangs.
    let made = Command::new("mkfifo").arg(&path).status().expect("it runs");
    assert!(made.success());
    proxy.signal(Signal::HUP);
    assert_eq!(proxy.get("/").text(), "x");
    // It has begun to read when it is not the same any more to signal it to end.
    let_pass(Duration::from_millis(100));
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
}

fn checked(interval: &str) -> String {
    let pace = format!("interval: {interval}, timeout: 200ms");
    format!(
        ", selector: {{ algorithm: round-robin }}, health: {{ active: {{ path: /healthz, {pace}, \
         healthy_threshold: 2, unhealthy_threshold: 3 }} }}"
    )
}

/// Checks that in this time so many probes have come as one every half second, or every 0.6 s.
#[track_caller]
fn assert_pace(probes: usize, time: Duration) {
    let due = time.as_secs_f64() / 0.5;
    let most = due * 1.25 + 1.0;
    assert!(probes as f64 <= most, "{probes} in {time:?}, not {most} at most");
    assert!(probes as f64 >= due * 0.6 - 1.0, "{probes} in {time:?}, not {due}");
}

/// Case `reload-probes-constant`.
#[test]
fn reload_probes_constant() {
    let origins = [(); 2].map(|()| Origin::start(reply::told));
    let [a, b] = &origins;
    let proxy = start(&simple(&[a, b], &checked("500ms")));
    eventually(SOON, || a.requests() >= 2 && b.requests() >= 2);
    let counts = || [a.requests(), b.requests()];
    let watch = |time: Duration, work: &dyn Fn()| {
        let (before, began) = (counts(), Instant::now());
        work();
        let_pass(time.saturating_sub(began.elapsed()));
        let time = began.elapsed();
        for (before, after) in before.iter().zip(counts()) {
            assert_pace(after - before, time);
        }
    };
    watch(Duration::from_secs(3), &|| {
        for n in 0..100 {
            // Two with the same interval, then two with the other, and something else each time.
            let interval = if n / 2 % 2 == 0 { "500ms" } else { "600ms" };
            let keys = format!("{}, max_in_flight: {}", checked(interval), 50 + n % 3);
            proxy.reload(&simple(&[a, b], &keys));
            let_pass(Duration::from_millis(25));
        }
    });
    watch(Duration::from_secs(3), &|| {});
    proxy.reload(&simple(&[a], &checked("500ms")));
    is_left_alone(b);
    let before = counts();
    let_pass(Duration::from_millis(1500));
    assert_eq!(b.requests(), before[1], "what is gone is not probed");
    assert!(a.requests() > before[0]);
    assert_eq!(b.open(), 0);
}

#[test]
fn what_is_removed_is_left_alone_at_once() {
    let (a, b) = (Origin::start(reply::name("a")), Origin::start(reply::name("b")));
    let keys = ", selector: { algorithm: round-robin }";
    let proxy = start(&simple(&[&a, &b], keys));
    for _ in 0..8 {
        proxy.get("/");
    }
    assert!(b.open() > 0, "connections are kept");
    proxy.reload(&simple(&[&a], keys));
    let before = b.requests();
    for _ in 0..8 {
        assert_eq!(proxy.get("/").text(), "a");
    }
    // Without a request too: workers that nobody asks anything look once a second.
    is_left_alone(&b);
    assert_eq!(b.requests(), before);
}

/// Starts a proxy that watches the file.
fn watching(file: &Path) -> Proxy {
    Proxy::start_with(PROGRAM, &["--config", &file.to_string_lossy(), "--watch"])
}

/// A file for [`watching`].
fn watched(origin: &Origin) -> String {
    simple(&[origin], "") + "admin: { bind: \"127.0.0.1:0\" }\n"
}

fn replace(file: &Path, text: &str) {
    let next = file.with_extension("next");
    fs::write(&next, text).expect("a file");
    fs::rename(next, file).expect("it is replaced");
}

#[test]
fn a_watched_file_is_put_in_force_once_it_is_still() {
    let (a, b) = (Origin::start(reply::name("a")), Origin::start(reply::name("b")));
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("l7rp.yaml");
    fs::write(&path, watched(&a)).expect("a file");
    let proxy = watching(&path);
    assert_eq!(proxy.get("/").text(), "a");
    replace(&path, &watched(&b));
    let event = proxy.wait_for_event("config_reloaded", |_| true, SOON);
    assert_eq!((&event["cause"], &event["generation"]), (&"file".into(), &2.into()));
    assert_eq!(proxy.get("/").text(), "b");
    // In place, in two steps; the first alone would be refused.
    let text = watched(&a);
    let (half, _) = text.split_at(text.len() / 2);
    fs::write(&path, half).expect("a file");
    fs::write(&path, &text).expect("a file");
    eventually(SOON, || proxy.get("/").text() == "a");
    replace(&path, "routes: 1\n");
    let event = proxy.wait_for_event("config_rejected", |_| true, SOON);
    assert_eq!((&event["cause"], &event["generation"]), (&"file".into(), &3.into()), "{event}");
    assert_eq!(proxy.get("/").text(), "a");
    // It is told once, not every second.
    let_pass(Duration::from_millis(2500));
    assert_eq!(proxy.outcomes().len(), 3);
}

#[test]
fn a_link_on_the_way_to_a_watched_file_may_be_switched() {
    let (a, b) = (Origin::start(reply::name("a")), Origin::start(reply::name("b")));
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    // As Kubernetes mounts a ConfigMap.
    let point = |data: &str, origin: &Origin| {
        fs::create_dir(at(data)).expect("a directory");
        fs::write(at(data).join("l7rp.yaml"), watched(origin)).expect("a file");
        symlink(data, at("..next")).expect("a link");
        fs::rename(at("..next"), at("..data")).expect("it is switched");
    };
    point("..one", &a);
    symlink("..data/l7rp.yaml", at("l7rp.yaml")).expect("a link");
    let proxy = watching(&at("l7rp.yaml"));
    assert_eq!(proxy.get("/").text(), "a");
    point("..two", &b);
    fs::remove_dir_all(at("..one")).expect("it is removed");
    let event = proxy.wait_for_event("config_reloaded", |_| true, SOON);
    assert_eq!(event["cause"], "file");
    assert_eq!(proxy.get("/").text(), "b");
}

#[test]
fn who_does_not_watch_waits_for_the_signal() {
    let (a, b) = (Origin::start(reply::name("a")), Origin::start(reply::name("b")));
    let proxy = start(&simple(&[&a], ""));
    proxy.rewrite_yaml(&simple(&[&b], ""));
    let_pass(Duration::from_millis(2500));
    assert_eq!(proxy.get("/").text(), "a");
    assert!(proxy.outcomes().is_empty());
    proxy.hang_up();
    assert_eq!(proxy.get("/").text(), "b");
}
