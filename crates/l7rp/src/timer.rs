//! One coarse timer for each connection, moved lazily: a deadline that moves away costs a
//! store, and the runtime's timer is touched only when it fires or must fire sooner.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use l7rp_core::names::Nanos;
use tokio::time::{Sleep, sleep_until};

use crate::clock::Clock;

/// A timer.
#[derive(Debug)]
pub struct Timer {
    clock: Clock,
    /// The runtime's, from the first time that it was waited for.
    sleep: Option<Pin<Box<Sleep>>>,
    armed: Nanos,
}

impl Timer {
    /// A timer that has not been set.
    pub fn new(clock: Clock) -> Self {
        Self { clock, sleep: None, armed: Nanos::NEVER }
    }

    /// Ready at `at` or up to some ms later; until then the task is woken in time.
    pub fn poll(&mut self, cx: &mut Context<'_>, at: Nanos) -> Poll<()> {
        if at == Nanos::NEVER {
            return Poll::Pending;
        }
        if at < self.armed {
            self.arm(at);
        }
        while let Some(sleep) = &mut self.sleep {
            ready!(sleep.as_mut().poll(cx));
            if self.clock.now() >= at {
                return Poll::Ready(());
            }
            self.arm(at);
        }
        Poll::Pending
    }

    fn arm(&mut self, at: Nanos) {
        let instant = self.clock.instant(at);
        match &mut self.sleep {
            Some(sleep) => sleep.as_mut().reset(instant),
            None => self.sleep = Some(Box::pin(sleep_until(instant))),
        }
        self.armed = at;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn fires_at_the_last_deadline_whichever_way_it_moved() {
        let clock = Clock::new();
        let mut timer = Timer::new(clock);
        for ms in [50u64, 5000, 20, 300] {
            let at = clock.now().plus(Duration::from_millis(ms));
            // A later deadline was asked for before; only the last counts.
            let far = at.plus(Duration::from_secs(9));
            let early = poll_fn(|cx| Poll::Ready(timer.poll(cx, far))).await;
            assert!(early.is_pending());
            poll_fn(|cx| timer.poll(cx, at)).await;
            let late = clock.now().since(at);
            assert!(late <= Duration::from_millis(2), "{ms} ms: late by {late:?}");
        }
    }
}
