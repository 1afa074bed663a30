//! The end of the process, as a client with another one to go to sees it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};

use l7rp_testkit::{Proxy, SOON, Signal, eventually};
use tokio::task::JoinHandle;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

use crate::bench::{SILENT, file};
use crate::tap::Tap;
use crate::tonic_client::{endpoint, is_unserved, stream, unary};
use crate::tonic_server::TonicServer;
use crate::{PROGRAM, meanwhile, wait};

/// What a client knows while it calls, and what is known of it.
struct Caller {
    places: [Endpoint; 2],
    calls: [AtomicUsize; 2],
    over: AtomicBool,
}

impl Caller {
    fn new(addresses: [SocketAddr; 2]) -> Self {
        let places = addresses.map(|address| endpoint(address, "a.test", None));
        Self { places, calls: [const { AtomicUsize::new(0) }; 2], over: AtomicBool::new(false) }
    }

    /// Calls again and again. Where the connection has ended it turns to the other place; a call
    /// that was served is never made again.
    async fn calls(&self, first: Channel) -> Result<(), Status> {
        let (mut place, mut channel) = (0, first);
        while !self.over.load(SeqCst) {
            match unary(channel.clone(), "Unary", "x".to_owned()).await {
                Ok(_) => {
                    self.calls[place].fetch_add(1, SeqCst);
                }
                Err(status) if place == 0 && is_unserved(&status) => {
                    place = 1;
                    channel = self.places[1].connect().await.expect("it accepts");
                }
                Err(status) => return Err(status),
            }
        }
        Ok(())
    }

    fn has_called(&self, place: usize) -> bool {
        self.calls[place].load(SeqCst) >= 20
    }
}

/// The rest of a stream: how many messages.
async fn rest(mut answer: Streaming<bytes::Bytes>) -> Result<usize, Status> {
    let mut messages = 0;
    while answer.message().await?.is_some() {
        messages += 1;
    }
    Ok(messages)
}

/// Case `drain-h2-two-goaways`.
#[test]
fn drain_h2_two_goaways() {
    let server = TonicServer::start();
    let yaml = file(&server.url(), "") + SILENT;
    let (mut first, second) = (Proxy::start(PROGRAM, &yaml), Proxy::start(PROGRAM, &yaml));
    let (mut callers, mut calls, mut streams) = (Vec::new(), Vec::new(), Vec::new());
    let taps: Vec<_> = (0..10).map(|_| Tap::to(first.address())).collect();
    for tap in &taps {
        let caller = Arc::new(Caller::new([tap.address, second.address()]));
        let channel = wait(caller.places[0].connect()).expect("it accepts");
        let mut answer = wait(stream(channel.clone(), "Expand", "40 100".to_owned()));
        let begun = answer.as_mut().expect("an answer");
        wait(begun.message()).expect("no failure").expect("a message");
        streams.push(meanwhile(rest(answer.expect("an answer"))));
        callers.push(caller.clone());
        calls.push(meanwhile(async move { caller.calls(channel).await }));
    }
    eventually(SOON, || callers.iter().all(|caller| caller.has_called(0)));
    assert!(streams.iter().all(|stream| !stream.is_finished()), "they are to be drained");
    first.signal(Signal::TERM);
    eventually(SOON, || {
        // A call that fails is told of below.
        callers.iter().all(|caller| caller.has_called(1))
            || calls.iter().any(JoinHandle::is_finished)
    });
    for caller in &callers {
        caller.over.store(true, SeqCst);
    }
    for task in calls {
        wait(task).expect("no panic").expect("no call fails");
    }
    for task in streams {
        assert_eq!(wait(task).expect("no panic").expect("it ends well"), 39);
    }
    assert_eq!(first.wait_exit(SOON), 0);
    first.wait_for_event("shutdown_complete", |event| event["cut"] == 0, SOON);
    assert!(callers.iter().all(|caller| caller.has_called(1)), "all go to the other");
    let answered: usize = callers.iter().flat_map(|c| &c.calls).map(|n| n.load(SeqCst)).sum();
    assert_eq!(server.begun(), answered + callers.len(), "what was not answered was not sent");
    for tap in taps {
        let seen = tap.seen();
        // The first only says that there will be an end: a client cannot know of it at once.
        assert_eq!(seen.goaways.len(), 2, "{seen:?}");
        assert_eq!(seen.goaways[0], u32::MAX >> 1, "{seen:?}");
        assert!(seen.begun > 20, "{seen:?}");
        assert!(seen.goaways[1] >= seen.begun, "a call was begun in vain: {seen:?}");
    }
}
