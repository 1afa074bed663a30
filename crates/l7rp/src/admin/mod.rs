//! Endpoints about the proxy itself, on a listener of their own, served by the control
//! thread: they answer while all workers are busy, and to the end of a drain.
//!
//! | file | has |
//! |---|---|
//! | `http` | one request off the wire, one answer onto it |
//! | `places` | how many are served at once, and who makes room for whom |
//! | `endpoints` | which answer |
//! | `access` | who may change something |
//! | `actions` | what can be changed |
//! | [`status`] | what the process is about, as one value |
//! | `page` | the same for people, live |

mod access;
mod actions;
mod endpoints;
mod http;
mod page;
mod places;
pub mod status;

use std::fs::File;
use std::future::poll_fn;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;

use crate::live::Process;
use crate::serve::listen::{Accepting, Bound};
use crate::stream::Stream;
use http::{Answer, Reader};
use places::{Place, Places};

/// For one request to come, and for its answer to be taken.
const PATIENCE: Duration = Duration::from_secs(10);
/// For what is asked to be done: reading the configuration may take half of it, and so may the
/// process that is about to take over.
const DONE_WITHIN: Duration = Duration::from_mins(1);
/// Accepting pauses for so long when this machine lacks something.
const SHORTAGE_PAUSE: Duration = Duration::from_millis(50);

/// Descriptors held back, so that what is wrong can be asked for when there are no others.
#[derive(Default)]
struct Reserve(Vec<File>);

impl Reserve {
    /// One for a connection, and some for the files that metrics are read from.
    const SIZE: usize = 4;

    fn fill(&mut self) {
        while self.0.len() < Self::SIZE
            && let Ok(file) = File::open("/dev/null")
        {
            self.0.push(file);
        }
    }
}

/// Serves the endpoints. Never returns while the socket works.
pub async fn serve(socket: Bound, process: Arc<Process>) {
    let places = Places::default();
    // A socket that the runtime refuses leaves the proxy without these endpoints, no more.
    let Ok(socket) = Accepting::new(socket) else { return };
    let mut reserve = Reserve::default();
    loop {
        // Not while somebody is served who may need what was held back.
        if places.all_are_free() {
            reserve.fill();
        }
        let mut accepted = poll_fn(|cx| socket.poll_accept(cx)).await;
        if accepted.is_err() {
            reserve.0.clear();
            accepted = poll_fn(|cx| socket.poll_accept(cx)).await;
        }
        let Ok((stream, peer)) = accepted else {
            tokio::time::sleep(SHORTAGE_PAUSE).await;
            continue;
        };
        let Some(place) = places.take().await else { return };
        let process = process.clone();
        tokio::spawn(async move { connection(stream, peer, &process, &place).await });
    }
}

/// Serves one connection; `peer`: its other end, `None` on a Unix-domain socket.
async fn connection(mut stream: Stream, peer: Option<IpAddr>, process: &Process, place: &Place) {
    let mut reader = Reader::default();
    while exchange(&mut stream, &mut reader, peer, process, place).await.is_some() {
        // Others have their turn, whatever has been sent ahead: probes are made on this thread.
        tokio::task::yield_now().await;
    }
}

/// Serves one request; `None`: it was the last.
async fn exchange(
    stream: &mut Stream,
    reader: &mut Reader,
    peer: Option<IpAddr>,
    process: &Process,
    place: &Place,
) -> Option<()> {
    let asked = match patiently(place, reader.next(stream, peer)).await?? {
        Ok(asked) => asked,
        Err(answer) => {
            let _ = patiently(place, http::write(stream, &answer, false, false)).await;
            return None;
        }
    };
    let answer = timeout(DONE_WITHIN, endpoints::answer(&asked, process)).await;
    let answer = answer.unwrap_or_else(|_| {
        let words = "it is not done yet, and may still be: the log will say\n";
        Answer::text("504 Gateway Timeout", words)
    });
    let keep = asked.keep_alive && !process.is_succeeded();
    patiently(place, http::write(stream, &answer, keep, asked.is_head)).await??;
    keep.then_some(())
}

/// Waits for the peer, but not for ever, and not if others need the place.
async fn patiently<T>(place: &Place, act: impl Future<Output = T>) -> Option<T> {
    timeout(PATIENCE, place.unless_needed(act)).await.ok()?
}
