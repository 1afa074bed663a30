//! What the connections of one thread share. Of all that, only the number of the next request is
//! shared with other threads, so that none of it needs a lock while the load runs.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use l7rp_core::http1::response::Response;
use l7rp_core::names::Nanos;
use tokio::sync::{Notify, Semaphore, oneshot};
use tokio::time::{sleep, sleep_until, timeout_at};

use super::Work;
use super::alarm::Alarm;
use super::busy::Busy;
use super::schedule::{Next, Schedule, Turn};
use super::tally::{Failure, Kind, Tally};
use super::target::Target;
use crate::clock::Clock;
use crate::stream::Stream;

/// What is read at once.
const ROOM: usize = 256 << 10;
/// Connections that are opened at once before the load begins: more may not fit into the queue of
/// who accepts, and then each waits for a second.
pub(super) const OPENING: usize = 64;
/// After a connection that could not be opened.
const PAUSE: Duration = Duration::from_millis(10);

/// What the connections of one thread share.
pub(super) struct Desk {
    pub(super) clock: Clock,
    pub(super) work: Arc<Work>,
    pub(super) target: Target,
    pub(super) tally: RefCell<Tally>,
    /// What is read goes here first, and most often no further.
    pub(super) room: Cell<Vec<u8>>,
    /// The head that is being read.
    pub(super) head: RefCell<Response>,
    /// Set when the load begins.
    schedule: RefCell<Option<Schedule>>,
    /// Connections that wait for their request to be due, the one that is due next first.
    waiting: RefCell<VecDeque<(Turn, oneshot::Sender<Turn>)>>,
    /// Something has changed for [`Desk::pace`].
    changed: Notify,
    opening: Semaphore,
    in_flight: Cell<u64>,
    /// What the thread had done when the last request had been started, and when that was.
    started_all: Cell<Option<(Busy, Nanos)>>,
}

impl Desk {
    pub(super) fn new(clock: Clock, work: Arc<Work>, target: Target, tally: Tally) -> Self {
        Self {
            clock,
            work,
            target,
            tally: RefCell::new(tally),
            room: Cell::new(Vec::with_capacity(ROOM)),
            head: RefCell::default(),
            schedule: RefCell::new(None),
            waiting: RefCell::default(),
            changed: Notify::new(),
            opening: Semaphore::new(OPENING),
            in_flight: Cell::new(0),
            started_all: Cell::new(None),
        }
    }

    /// From now on there are turns.
    pub(super) fn begin(&self, schedule: Schedule) {
        *self.schedule.borrow_mut() = Some(schedule);
    }

    /// From now on there are none.
    pub(super) fn end(&self, now: Nanos) {
        if let Some(schedule) = &mut *self.schedule.borrow_mut() {
            schedule.end(now);
        }
        self.mark_started_all(now);
        self.changed.notify_one();
    }

    /// Marks the cut-off, as it may be long until the next request ends. Is never ready.
    pub(super) async fn watch_cut_off(&self) {
        let cut_off = self.cut_off();
        sleep_until(self.clock.instant(cut_off)).await;
        self.mark_started_all(self.clock.now());
        std::future::pending::<()>().await;
    }

    fn cut_off(&self) -> Nanos {
        self.schedule.borrow().as_ref().map_or(Nanos(0), Schedule::cut_off)
    }

    fn mark_started_all(&self, now: Nanos) {
        if self.started_all.get().is_none() {
            self.started_all.set(Some((Busy::now(), now)));
        }
    }

    /// What the thread has done since it began with `before` at `start`, until the last request
    /// was started: what is waited for then is no sign that there was nothing to do.
    pub(super) fn busy(&self, before: Busy, start: Nanos) -> Busy {
        let so_far = || (Busy::now(), self.clock.now());
        let (busy, at) = self.started_all.get().unwrap_or_else(so_far);
        busy.since(before, at.since(start))
    }

    /// The next request of a connection that is free; `None`: there is no more.
    pub(super) async fn turn(&self, now: Nanos) -> Option<Turn> {
        let next = self.schedule.borrow_mut().as_mut().map_or(Next::Over, |it| it.next(now));
        let turn = match next {
            Next::Send(turn) => turn,
            Next::Over => return None,
            Next::Wait(turn) => {
                let (give, given) = oneshot::channel();
                let is_first = self.waiting.borrow().is_empty();
                self.waiting.borrow_mut().push_back((turn, give));
                if is_first {
                    self.changed.notify_one();
                }
                given.await.ok()?
            }
        };
        self.in_flight.set(self.in_flight.get() + 1);
        Some(turn)
    }

    /// Gives turns to those who wait for one, each when it is due. Ends only if it cannot.
    pub(super) async fn pace(&self, alarm: &mut Alarm) -> std::io::Result<()> {
        loop {
            let due = self.waiting.borrow().front().map(|(turn, _)| turn.due);
            let Some(due) = due else {
                self.changed.notified().await;
                continue;
            };
            let now = self.clock.now();
            if due >= self.cut_off() {
                // So are those of all the others.
                self.waiting.borrow_mut().clear();
            } else if due > now {
                tokio::select! {
                    rung = alarm.after(due.since(now)) => rung?,
                    () = self.changed.notified() => {}
                }
            } else if let Some((turn, first)) = self.waiting.borrow_mut().pop_front() {
                // Whoever waits waits until it is told.
                let _ = first.send(Turn { now, ..turn });
            }
        }
    }

    /// A connection before the load begins.
    pub(super) async fn open_early(&self) -> Result<Stream, Failure> {
        // It is never closed.
        let _turn = self.opening.acquire().await.ok();
        self.open(self.clock.now().plus(self.work.plan.timeout)).await
    }

    /// A connection, until `deadline`.
    pub(super) async fn open(&self, deadline: Nanos) -> Result<Stream, Failure> {
        let at = self.clock.instant(deadline);
        let late = |kind, words| move |_| Failure::new(kind, words);
        let tcp = timeout_at(at, self.target.tcp()).await;
        let tcp = tcp.map_err(late(Kind::Connect, "no connection within --timeout"))??;
        let stream = timeout_at(at, self.target.secure(tcp)).await;
        let stream = stream.map_err(late(Kind::Tls, "no TLS handshake within --timeout"))??;
        self.tally.borrow_mut().opened += 1;
        Ok(stream)
    }

    /// Counts what has become of a turn, and says what time it is now.
    pub(super) fn done(&self, turn: Turn, outcome: Result<u16, Failure>, moved: Moved) -> Nanos {
        let now = self.clock.now();
        self.in_flight.set(self.in_flight.get() - 1);
        let mut tally = self.tally.borrow_mut();
        let schedule = self.schedule.borrow();
        if schedule.as_ref().is_some_and(|s| s.has_started_all(now)) {
            self.mark_started_all(now);
        }
        let measured = schedule.as_ref().is_some_and(|s| s.is_measured(now, turn.counts));
        tally.measured += u64::from(measured && outcome.is_ok());
        if turn.counts {
            tally.sent += moved.sent;
            tally.received += moved.received;
            match outcome {
                Ok(status) => {
                    tally.last = now;
                    tally.answered(status, now.since(turn.due));
                }
                Err(failure) => tally.failed(failure),
            }
        } else {
            tally.warm_up += 1;
        }
        now
    }

    /// Counts a connection that was opened in the place of a kept one that the peer has closed.
    pub(super) fn reconnects(&self) {
        self.tally.borrow_mut().reconnects += 1;
    }

    /// Somebody who does not accept is not asked again at once.
    pub(super) async fn rest_after(&self, kind: Kind) {
        if matches!(kind, Kind::Connect | Kind::Tls) {
            sleep(PAUSE).await;
        }
    }

    /// The counts, at the end, and when no request was started any more.
    pub(super) fn close(&self) -> (Tally, Nanos) {
        let mut tally = self.tally.borrow().clone();
        tally.cut = self.in_flight.get();
        let cut_off = self.cut_off();
        // By force, before they were told that theirs is due.
        let waiting = self.waiting.borrow();
        let missed = waiting.iter().filter(|(turn, _)| turn.counts && turn.due < cut_off);
        tally.never_started = missed.count() as u64;
        (tally, cut_off)
    }
}

/// Octets of one exchange.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moved {
    pub(super) sent: u64,
    pub(super) received: u64,
}
