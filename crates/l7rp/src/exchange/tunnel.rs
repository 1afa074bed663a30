//! After a 101: octets in both directions until both sides have ended, or neither has said
//! anything for too long. One side may end while the other goes on.

use std::future::poll_fn;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use l7rp_core::failure::{Failure, Malformed};
use l7rp_core::http1::encode::{self, ToClient};
use l7rp_core::names::Nanos;

use super::attempt::Lap;
use super::client::{Client, poll_write_from};
use super::dispatch::Answered;
use super::record::Record;
use super::{Done, Exchange, Next, Workspace, decision};
use crate::live::Route;
use crate::observe::stats::{RouteStats, WorkerStats};
use crate::observe::tries;
use crate::stream::Stream;
use crate::upstream::pool::End;
use crate::worker::Worker;

/// A side that has ended in order can still be reset, which no reading tells any more. From
/// then on, both are looked at this often.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// One direction. It holds a buffer only while there is something in it.
#[derive(Debug, Default)]
struct Flow {
    buf: Vec<u8>,
    at: usize,
    /// The source has ended.
    ended: bool,
    /// The receiver was told so.
    told: bool,
    /// Octets that went through.
    moved: u64,
}

/// Passes a 101 on and tunnels to the end. The exchange's slots and the upstream's place are
/// held as long, and given back when this returns or is dropped.
pub(super) async fn run<'a>(
    x: &Exchange<'a>,
    client: &mut Client,
    record: &mut Record<'a>,
    space: &mut Workspace<'_>,
    route: &'a Route,
    answered: Answered<'a>,
) -> Result<Done, Failure> {
    let Answered { mut place, lap, upload } = answered;
    let Lap { mut connection, buf, head_at, body_at, .. } = lap;
    let worker = x.worker;
    let used = upload.first_len();
    upload.finish(worker, client);
    // What came before the 101 cannot have been meant for the other protocol. Passed on as
    // such, it would be a request that nobody has checked.
    if used < x.incoming.rest.len() || !client.ahead.is_empty() || client.stream.has_arrived() {
        worker.buffers.give(buf);
        let failure = Failure::BadRequest(Malformed::EarlyUpgrade);
        let took = place.settle(End::Failed(failure), worker.process.clock.now());
        record.ends(&place, tries::End::Failed(failure), took);
        return Err(failure);
    }
    let to = ToClient {
        is_http10: false,
        keep_alive: true,
        request_id: record.id.as_bytes(),
        decision: &decision::of(record, client, None),
    };
    space.to_client.clear();
    encode::response(
        space.to_client,
        &buf[head_at..],
        space.response,
        &to,
        &route.response_changes,
    );
    let now = worker.process.clock.now();
    // Both have agreed: what follows is theirs. The place is held to its end.
    let took = place.settle(End::Answered(101.into()), now);
    record.ends(&place, tries::End::Answered(101), took);
    record.status = 101;
    let until = now.plus(x.listener.plan.timeouts.write);
    client.write_all(space.to_client, &[], until).await?;
    let _tunnel = Tunnel::open(&route.stats[worker.index], worker.counts());
    let down = Flow { buf, at: body_at, ..Flow::default() };
    let idle = route.plan.tunnel_idle_timeout;
    match pump(worker, client, &mut connection.stream, record, down, idle).await {
        Ok(()) => Ok(Done { next: Next::Close, used: 0 }),
        // Both sides are told in order that it is over; the client may still be sending.
        Err(Failure::Draining) => {
            worker.counts().tunnels_closed.up();
            record.failure = Some(Failure::Draining);
            let _ = poll_fn(|cx| connection.stream.poll_shutdown(cx)).await;
            Ok(Done { next: Next::Linger, used: 0 })
        }
        Err(failure) => Err(failure),
    }
}

/// A tunnel in the count of its route.
struct Tunnel<'a>(&'a RouteStats, &'a WorkerStats);

impl<'a> Tunnel<'a> {
    fn open(of_route: &'a RouteStats, of_worker: &'a WorkerStats) -> Self {
        of_route.tunnels_opened.up();
        of_worker.tunnels_opened.up();
        Self(of_route, of_worker)
    }
}

impl Drop for Tunnel<'_> {
    fn drop(&mut self) {
        self.0.tunnels_ended.up();
        self.1.tunnels_ended.up();
    }
}

/// Moves octets both ways until both sides are done.
///
/// # Errors
/// Why it ended otherwise.
async fn pump(
    worker: &Worker,
    client: &mut Client,
    upstream: &mut Stream,
    record: &mut Record<'_>,
    mut down: Flow,
    idle: Duration,
) -> Result<(), Failure> {
    let clock = worker.process.clock;
    let mut up = Flow::default();
    let mut deadline = clock.now().plus(idle);
    let mut look_at = Nanos::NEVER;
    let Client { stream, timer, .. } = client;
    let result = poll_fn(|cx| {
        let going_up = up.poll(cx, worker, stream, upstream);
        let going_down = down.poll(cx, worker, upstream, stream);
        // Kept current, for the tunnel may be cut from outside.
        if (record.bytes_in, record.bytes_out) != (up.moved, down.moved) {
            (record.bytes_in, record.bytes_out) = (up.moved, down.moved);
            deadline = clock.now().plus(idle);
        }
        if worker.process.is_ending() {
            return Poll::Ready(Err(Failure::Draining));
        }
        match (going_up, going_down) {
            (Poll::Ready(Err(Side::From)), _) | (_, Poll::Ready(Err(Side::To))) => {
                return Poll::Ready(Err(Failure::ClientGone));
            }
            (Poll::Ready(Err(Side::To)), _) | (_, Poll::Ready(Err(Side::From))) => {
                return Poll::Ready(Err(Failure::ResponseTruncated));
            }
            (Poll::Ready(Ok(())), Poll::Ready(Ok(()))) => return Poll::Ready(Ok(())),
            (going_up, going_down) => {
                if look_at == Nanos::NEVER && (going_up.is_ready() || going_down.is_ready()) {
                    look_at = clock.now().plus(LOOK_EVERY);
                }
            }
        }
        loop {
            ready!(timer.poll(cx, deadline.min(look_at)));
            if stream.has_failed() {
                return Poll::Ready(Err(Failure::ClientGone));
            }
            if upstream.has_failed() {
                return Poll::Ready(Err(Failure::ResponseTruncated));
            }
            if clock.now() >= deadline {
                return Poll::Ready(Err(Failure::TunnelIdle));
            }
            look_at = clock.now().plus(LOOK_EVERY);
        }
    })
    .await;
    worker.buffers.give(up.buf);
    worker.buffers.give(down.buf);
    result
}

/// Which end of a [`Flow`] has failed.
#[derive(Clone, Copy, Debug)]
enum Side {
    From,
    To,
}

impl Flow {
    /// Moves what can be moved. Ready when the source has ended and the receiver knows.
    fn poll(
        &mut self,
        cx: &mut Context<'_>,
        worker: &Worker,
        from: &mut Stream,
        to: &mut Stream,
    ) -> Poll<Result<(), Side>> {
        loop {
            if self.at < self.buf.len() {
                let n = ready!(poll_write_from(to, cx, &self.buf[self.at..], &[], 0));
                let n = n.map_err(|_| Side::To)?;
                self.at += n;
                self.moved += n as u64;
                continue;
            }
            if self.told {
                return Poll::Ready(Ok(()));
            }
            if self.ended {
                // A receiver that is gone already need not be told.
                let _ = ready!(to.poll_shutdown(cx));
                self.told = true;
                continue;
            }
            if self.buf.capacity() > 0 {
                worker.buffers.give(std::mem::take(&mut self.buf));
                self.at = 0;
            }
            ready!(from.poll_readable(cx)).map_err(|_| Side::From)?;
            self.buf = worker.buffers.small();
            match ready!(from.poll_fill(cx, &mut self.buf)) {
                Ok(n) => self.ended = n == 0,
                Err(_) => return Poll::Ready(Err(Side::From)),
            }
        }
    }
}
