//! Calls while the configuration changes again and again.

use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use l7rp_testkit::{Proxy, let_pass};
use tokio::task::JoinHandle;
use tonic::Status;
use tonic::transport::Channel;

use crate::bench::{SILENT, file};
use crate::tonic_client::{endpoint, stream, unary};
use crate::tonic_server::TonicServer;
use crate::{PROGRAM, meanwhile, wait, wait_for};

/// Held by a test that keeps the whole machine busy, or looks at how long calls take.
static MACHINE: Mutex<()> = Mutex::new(());

/// The `n`th file: every third is another, in a route that no call takes.
fn nth(url: &str, n: usize) -> String {
    let status = 410 + n / 3 % 10;
    let other =
        format!("- {{ name: other, path_prefix: /other, respond: {{ status: {status} }} }}\n");
    file(url, &other) + SILENT
}

fn channels(proxy: &Proxy) -> Vec<Channel> {
    let endpoint = endpoint(proxy.address(), "a.test", None);
    (0..4).map(|_| wait(endpoint.connect()).expect("it accepts")).collect()
}

/// What tasks have come to, all of which go well.
#[track_caller]
fn joined<T: Debug>(tasks: Vec<JoinHandle<Result<T, Status>>>) -> Vec<T> {
    let results = tasks.into_iter().map(|task| wait_for(Duration::from_secs(30), task));
    results.map(|result| result.expect("no panic").expect("no call fails")).collect()
}

/// Case `reload-h2-no-hang`.
#[test]
fn reload_h2_no_hang() {
    const RELOADS: usize = 40;
    let _alone = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let server = TonicServer::start();
    let proxy = Proxy::start(PROGRAM, &nth(&server.url(), 0));
    let over = Arc::new(AtomicBool::new(false));
    let (mut short, mut long) = (Vec::new(), Vec::new());
    for channel in channels(&proxy) {
        for _ in 0..20 {
            short.push(meanwhile(short_calls(channel.clone(), over.clone())));
        }
        for _ in 0..5 {
            long.push(meanwhile(long_calls(channel.clone(), over.clone())));
        }
    }
    for n in 1..=RELOADS {
        proxy.reload(&nth(&server.url(), n));
        let_pass(Duration::from_millis(200));
    }
    over.store(true, SeqCst);
    let streams: usize = joined(long).into_iter().sum();
    let short = joined(short);
    let calls: usize = short.iter().map(|(calls, _)| calls).sum();
    let slowest = short.iter().map(|(_, slowest)| *slowest).max().expect("some");
    println!("{calls} calls, the slowest in {slowest:?}; {streams} streams");
    // Each has made one before, one during most of the reloads, and one more.
    assert!(streams >= 40 && calls >= 2000, "{streams} {calls}");
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    assert_eq!(proxy.metrics().sum("proxy_config_generation", &[]), RELOADS as f64 + 1.0);
}

/// Calls of 20 ms, one after another: how many, and how long the slowest has taken.
async fn short_calls(channel: Channel, over: Arc<AtomicBool>) -> Result<(usize, Duration), Status> {
    let (mut calls, mut slowest) = (0, Duration::ZERO);
    while !over.load(SeqCst) {
        let began = Instant::now();
        unary(channel.clone(), "Late", "20".to_owned()).await?;
        slowest = slowest.max(began.elapsed());
        calls += 1;
    }
    Ok((calls, slowest))
}

/// Streams of 5 s, one after another: how many.
async fn long_calls(channel: Channel, over: Arc<AtomicBool>) -> Result<usize, Status> {
    let mut streams = 0;
    while !over.load(SeqCst) {
        let mut answer = stream(channel.clone(), "Expand", "100 50".to_owned()).await?;
        let mut messages = 0;
        while answer.message().await?.is_some() {
            messages += 1;
        }
        assert_eq!(messages, 100, "an end before the end");
        streams += 1;
    }
    Ok(streams)
}

#[test]
fn a_hundred_thousand_calls_go_well_across_reloads() {
    const TASKS: usize = 50;
    const CALLS: usize = 500;
    const ALL: usize = 100_000;
    let _alone = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    let server = TonicServer::start();
    let proxy = Proxy::start(PROGRAM, &nth(&server.url(), 0));
    let began = Instant::now();
    let tasks: Vec<_> = channels(&proxy)
        .into_iter()
        .flat_map(|channel| (0..TASKS).map(move |task| (channel.clone(), task)))
        .map(|(channel, task)| meanwhile(some_calls(channel, task, CALLS)))
        .collect();
    let mut reloads = 0;
    while tasks.iter().any(|task| !task.is_finished()) {
        reloads += 1;
        proxy.reload(&nth(&server.url(), reloads));
        let_pass(Duration::from_millis(200));
        assert!(began.elapsed() < Duration::from_mins(2), "it takes too long");
    }
    assert_eq!(joined(tasks).into_iter().sum::<usize>(), ALL);
    println!("{reloads} reloads in {:?}", began.elapsed());
    assert!(reloads >= 5, "{reloads}");
    assert_eq!(server.begun(), ALL, "none was sent twice");
}

/// So many calls, each answered with what it has said.
async fn some_calls(channel: Channel, task: usize, calls: usize) -> Result<usize, Status> {
    for call in 0..calls {
        let message = format!("{task} {call}");
        let answer = unary(channel.clone(), "Unary", message.clone()).await?;
        assert_eq!(answer, message.as_bytes());
    }
    Ok(calls)
}
