//! A place at an upstream: what one try has taken there and gives back, whatever happens to it.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use l7rp_core::failure::{Blame, Failure};
use l7rp_core::names::{Nanos, Status};
use l7rp_core::upstream::breaker::{Permit, Verdict};

use super::member::Upstream;
use super::pool::Pool;

/// How long a test of a breaker may wait for its own client.
const CLIENTS_SHARE: Duration = Duration::from_secs(1);

/// A try's share of an upstream: its place among those in flight, and the breaker's permit.
/// Dropping it gives both back; without [`Place::settle`] before, nothing is held against
/// anybody.
#[derive(Debug)]
pub struct Place<'a> {
    pool: &'a Pool,
    ix: usize,
    upstream: &'a Arc<Upstream>,
    /// Gone once the try is settled.
    permit: Option<Permit<'a>>,
    settled: bool,
    seated: bool,
    worker: usize,
    began: Nanos,
    /// The try's place among those of its request: for whoever has taken this.
    pub number: usize,
    /// From sending the request to the head of its response.
    latency: Option<Duration>,
}

/// How a try ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With a whole response of this status.
    Answered(Status),
    /// Without.
    Failed(Failure),
    /// Without, and the client had its part in it: it says nothing about the upstream.
    Excused(Failure),
}

impl<'a> Place<'a> {
    pub(super) fn new(
        pool: &'a Pool,
        ix: usize,
        upstream: &'a Arc<Upstream>,
        permit: Permit<'a>,
        worker: usize,
        began: Nanos,
    ) -> Self {
        let permit = Some(permit);
        pool.crowd.enter();
        Self {
            pool,
            ix,
            upstream,
            permit,
            settled: false,
            seated: true,
            worker,
            began,
            number: 0,
            latency: None,
        }
    }

    /// Its position in the pool.
    pub fn ix(&self) -> usize {
        self.ix
    }

    /// Whose place it is.
    pub fn upstream(&self) -> &'a Arc<Upstream> {
        self.upstream
    }

    /// When it was taken.
    pub fn began(&self) -> Nanos {
        self.began
    }

    /// Whether this try tests a breaker that is half-open.
    pub fn is_probe(&self) -> bool {
        self.permit.as_ref().is_some_and(Permit::is_probe)
    }

    /// Whether this try must come to an end of its own: the last test of the breaker has lost a
    /// race and told nothing, and that may not go on for ever.
    pub fn must_be_judged(&self) -> bool {
        self.is_probe() && self.upstream.test_was_lost.swap(false, Relaxed)
    }

    /// Another try has won.
    pub fn has_lost(&self) {
        if self.is_probe() {
            self.upstream.test_was_lost.store(true, Relaxed);
        }
    }

    /// When a try that tests a breaker has gone on for long enough to be called good, although
    /// its response still flows: a stream of events may never end.
    pub fn good_at(&self) -> Nanos {
        if self.is_probe() { self.began.plus(self.pool.probe_patience) } else { Nanos::NEVER }
    }

    /// The head of a response came, this long after the request was sent.
    pub fn head_came(&mut self, latency: Duration, now: Nanos) {
        self.latency = Some(latency);
        self.pool.observe_latency(self.upstream, now, latency);
    }

    /// No head came for this long. That is no measurement, but it says that the upstream is not
    /// faster.
    pub fn waited(&self, time: Duration, now: Nanos) {
        if self.pool.latency(self.upstream, now).is_none_or(|known| known < time.as_secs_f64()) {
            self.pool.observe_latency(self.upstream, now, time);
        }
    }

    /// Says how the try ended. Counts it and tells breaker and scoring, unless the upstream has
    /// no part in it. Only the first call does anything. Gives the time since the place was
    /// taken.
    pub fn settle(&mut self, end: End, now: Nanos) -> Duration {
        let took = now.since(self.began);
        if std::mem::replace(&mut self.settled, true) {
            return took;
        }
        let counts = &self.upstream.stats[self.worker];
        counts.duration.record(took);
        let verdict = match end {
            End::Answered(status) => {
                counts.status.up(status.http);
                let failed = self.pool.is_failure(status);
                Some(if failed { Verdict::Failure } else { Verdict::Success })
            }
            End::Failed(failure) if failure.meaning().blame == Blame::Upstream => {
                counts.errors.up();
                Some(Verdict::Failure)
            }
            End::Failed(_) | End::Excused(_) => {
                counts.cancels.up();
                None
            }
        };
        match (self.permit.take(), verdict) {
            (Some(permit), Some(verdict)) => {
                let judged = (verdict, end);
                self.pool.lineage.judge(self.upstream, permit, judged, self.latency, now);
            }
            (Some(permit), None) => self.release(permit),
            (None, _) => {}
        }
        took
    }

    /// When a test of a breaker is let off because it waits for its client: for as long as that,
    /// no upload may keep others from testing.
    pub fn waits_until(&self) -> Nanos {
        if !self.permit.as_ref().is_some_and(|permit| permit.is_probe() && !permit.is_off()) {
            return Nanos::NEVER;
        }
        self.began.plus(CLIENTS_SHARE.min(self.pool.probe_patience))
    }

    /// Gives others the right to test the breaker; what this one comes to still counts.
    pub fn let_off(&mut self) {
        if let Some(permit) = &mut self.permit {
            permit.let_off();
            self.pool.lineage.refresh(self.upstream);
        }
    }

    /// No longer counts among those in flight: all that is left of the try is an answer that
    /// is kept.
    pub fn rise(&mut self) {
        if std::mem::replace(&mut self.seated, false) {
            self.pool.crowd.leave();
            self.upstream.seat.leave();
        }
    }

    /// Gives the place back as if it had never been taken.
    pub fn unused(mut self) {
        self.settled = true;
        self.give_up();
    }

    fn give_up(&mut self) {
        if let Some(permit) = self.permit.take() {
            self.release(permit);
        }
    }

    /// Gives a permit back without a verdict.
    fn release(&self, permit: Permit<'_>) {
        let probe = permit.is_probe();
        drop(permit);
        if probe {
            self.pool.lineage.refresh(self.upstream);
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.settled {
            self.upstream.stats[self.worker].cancels.up();
        }
        self.give_up();
        self.rise();
    }
}
