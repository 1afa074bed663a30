//! When which request is due; the time is an argument.
//!
//! In an open loop request `n` is due at start + n / rate, whatever has become of those before it.
//! A late one counts from when it was due, so that a stall is seen by all that it delays. A place
//! that is free takes the next number, whichever thread it is of, and waits until that is due: a
//! request is late only if no place is free.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use l7rp_core::names::Nanos;

use super::plan::Plan;

/// What decides when a request is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// Each connection sends its next request as soon as the last is answered.
    Closed,
    /// So many requests each second in all.
    Open(u64),
}

/// When a run ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// So long after the warm-up no request is started any more.
    After(Duration),
    /// After so many requests, those of the warm-up not among them.
    Requests(u64),
}

/// A request that may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Turn {
    /// Its latency counts from here.
    pub(super) due: Nanos,
    /// And its deadline from here: it is given to a connection now.
    pub(super) now: Nanos,
    /// It is not of the warm-up.
    pub(super) counts: bool,
}

/// What a connection that is free does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// It sends.
    Send(Turn),
    /// It sends this once it is due.
    Wait(Turn),
    /// It is done.
    Over,
}

/// The number of the next request, which all threads take theirs from.
#[derive(Clone, Debug)]
pub(super) struct Queue(Arc<AtomicU64>);

impl Queue {
    pub(super) fn new(plan: &Plan) -> Self {
        let first = match plan.pace {
            Pace::Closed => 0,
            // Each place has begun with one of those before.
            Pace::Open(_) => plan.concurrency as u64,
        };
        Self(Arc::new(AtomicU64::new(first)))
    }

    fn take(&self) -> u64 {
        self.0.fetch_add(1, Relaxed)
    }

    /// Those below are taken.
    pub(super) fn next(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// The part of thread `index` of `threads`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) index: u64,
    pub(super) threads: u64,
}

/// One thread's schedule.
#[derive(Clone, Debug)]
pub(super) struct Schedule {
    pace: Pace,
    start: Nanos,
    /// The warm-up ends here.
    counted_from: Nanos,
    cut_off: Nanos,
    /// A time was given, no number of requests.
    is_timed: bool,
    /// Numbers are below.
    end: u64,
    queue: Queue,
    /// The next of the numbers that this thread's places begin with in an open loop, and the
    /// distance to the one after it: threads take turns from the first request on.
    first: u64,
    step: u64,
    /// Such numbers are below.
    places: u64,
}

impl Schedule {
    pub(super) fn new(plan: &Plan, start: Nanos, part: Part, queue: Queue) -> Self {
        let counted_from = start.plus(plan.warm_up);
        let (cut_off, end) = match plan.end {
            End::After(time) => (counted_from.plus(time), u64::MAX),
            End::Requests(n) => (Nanos::NEVER, n.saturating_add(of_warm_up(plan))),
        };
        Self {
            pace: plan.pace,
            start,
            counted_from,
            cut_off,
            is_timed: matches!(plan.end, End::After(_)),
            end,
            queue,
            first: part.index,
            step: part.threads,
            places: plan.concurrency as u64,
        }
    }

    /// What comes next for a connection that is free now.
    pub(super) fn next(&mut self, now: Nanos) -> Next {
        if now >= self.cut_off {
            return Next::Over;
        }
        let Pace::Open(rate) = self.pace else { return self.next_in_closed_loop(now) };
        let number = self.take();
        let due = due(rate, self.start, number);
        if number >= self.end || due >= self.cut_off {
            return Next::Over;
        }
        let turn = Turn { due, now, counts: due >= self.counted_from };
        if due > now { Next::Wait(turn) } else { Next::Send(turn) }
    }

    fn next_in_closed_loop(&self, now: Nanos) -> Next {
        let counts = now >= self.counted_from;
        if counts && !self.is_timed && self.queue.take() >= self.end {
            return Next::Over;
        }
        Next::Send(Turn { due: now, now, counts })
    }

    /// A number that nobody else has; above those that were taken before.
    fn take(&mut self) -> u64 {
        if self.first >= self.places {
            return self.queue.take();
        }
        let number = self.first;
        self.first += self.step;
        number
    }

    /// Whether all requests have been started, if those that could be were.
    pub(super) fn has_started_all(&self, now: Nanos) -> bool {
        let last = match self.pace {
            Pace::Closed => now,
            Pace::Open(rate) => due(rate, self.start, self.end.saturating_sub(1)),
        };
        now >= self.cut_off || self.queue.next() >= self.end && now >= last
    }

    /// Ends the run before its time.
    pub(super) fn end(&mut self, now: Nanos) {
        self.cut_off = self.cut_off.min(now);
    }

    /// When no request is started any more; [`Nanos::NEVER`] if the number of requests decides.
    pub(super) fn cut_off(&self) -> Nanos {
        self.cut_off
    }

    /// Whether an answer at this time is one of those that the rate is taken of. In a given time it
    /// may be to a request of the warm-up, as others come after that time; of a given number not.
    pub(super) fn is_measured(&self, now: Nanos, counts: bool) -> bool {
        (counts || self.is_timed) && self.counted_from <= now && now < self.cut_off
    }
}

fn due(rate: u64, start: Nanos, number: u64) -> Nanos {
    let after = u128::from(number) * 1_000_000_000 / u128::from(rate.max(1));
    Nanos(start.0.saturating_add(u64::try_from(after).unwrap_or(u64::MAX)))
}

/// How many requests are due in this time.
fn numbers_before(rate: u64, time: Duration) -> u64 {
    let numbers = (time.as_nanos() * u128::from(rate)).div_ceil(1_000_000_000);
    u64::try_from(numbers).unwrap_or(u64::MAX)
}

/// How many numbers are those of requests that do not count.
fn of_warm_up(plan: &Plan) -> u64 {
    match plan.pace {
        Pace::Open(rate) => numbers_before(rate, plan.warm_up),
        Pace::Closed => 0,
    }
}

/// Requests that were due before the cut-off and count, but for which no place was free: numbers
/// from `next` on were not taken.
pub(super) fn never_taken(plan: &Plan, start: Nanos, cut_off: Nanos, next: u64) -> u64 {
    let Pace::Open(rate) = plan.pace else { return 0 };
    let first = of_warm_up(plan);
    let end = match plan.end {
        End::After(_) => u64::MAX,
        End::Requests(n) => n.saturating_add(first),
    };
    numbers_before(rate, cut_off.since(start)).min(end).saturating_sub(next.max(first))
}

#[cfg(test)]
mod tests {
    use super::super::plan::tests::plan;
    use super::*;

    const START: Nanos = Nanos(5_000_000_000);
    const ALONE: Part = Part { index: 0, threads: 1 };

    fn at(ms: u64) -> Nanos {
        START.plus(Duration::from_millis(ms))
    }

    /// With five places.
    fn planned(pace: Pace, end: End, warm_up: u64) -> Plan {
        Plan { warm_up: Duration::from_millis(warm_up), ..plan(pace, end) }
    }

    fn alone(plan: &Plan) -> Schedule {
        Schedule::new(plan, START, ALONE, Queue::new(plan))
    }

    fn of_threads(plan: &Plan, threads: u64) -> Vec<Schedule> {
        let queue = Queue::new(plan);
        let part = |index| Part { index, threads };
        (0..threads).map(|n| Schedule::new(plan, START, part(n), queue.clone())).collect()
    }

    fn missed(plan: &Plan, of: &Schedule) -> u64 {
        never_taken(plan, START, of.cut_off(), of.queue.next())
    }

    fn send(due: u64, counts: bool) -> Next {
        send_at(due, due, counts)
    }

    fn send_at(due: u64, now: u64, counts: bool) -> Next {
        Next::Send(Turn { due: at(due), now: at(now), counts })
    }

    fn wait(due: u64, now: u64) -> Next {
        Next::Wait(Turn { due: at(due), now: at(now), counts: true })
    }

    const SECOND: End = End::After(Duration::from_secs(1));

    #[test]
    fn a_closed_loop_sends_at_once_until_the_cut_off() {
        let plan = planned(Pace::Closed, SECOND, 100);
        let mut one = alone(&plan);
        for (ms, next) in [
            (0, send(0, false)),
            (99, send(99, false)),
            (100, send(100, true)),
            (1099, send(1099, true)),
            (1100, Next::Over),
            (5000, Next::Over),
        ] {
            assert_eq!(one.next(at(ms)), next, "{ms} ms");
        }
        assert_eq!(missed(&plan, &one), 0);
    }

    #[test]
    fn an_open_loop_keeps_to_the_times_whatever_the_delay() {
        let plan = planned(Pace::Open(10), SECOND, 0);
        let mut one = alone(&plan);
        for (ms, next) in [
            (0, send(0, true)),
            // Two places that are free.
            (1, wait(100, 1)),
            (1, wait(200, 1)),
            // A stall: those that were due meanwhile go out one by one, and count from then.
            (650, send_at(300, 650, true)),
            (650, send_at(400, 650, true)),
            (651, send_at(500, 651, true)),
            (651, send_at(600, 651, true)),
            (651, wait(700, 651)),
            (1000, Next::Over),
        ] {
            assert_eq!(one.next(at(ms)), next, "{ms} ms");
        }
        // Those of 800 and 900 ms.
        assert_eq!(missed(&plan, &one), 2);
    }

    #[test]
    fn an_open_loop_is_over_once_nothing_more_will_be_due() {
        let plan = planned(Pace::Open(2), SECOND, 0);
        let mut one = alone(&plan);
        assert_eq!(one.next(at(0)), send(0, true));
        assert_eq!(one.next(at(500)), send(500, true));
        assert_eq!(one.next(at(501)), Next::Over);
        assert_eq!(missed(&plan, &one), 0);
    }

    #[test]
    fn a_thread_that_is_held_up_holds_up_no_other() {
        let plan = Plan { concurrency: 2, ..planned(Pace::Open(10), SECOND, 0) };
        let mut threads = of_threads(&plan, 2);
        // Its only place hangs from now on, and the other thread's does the rest.
        assert_eq!(threads[0].next(at(0)), send(0, true));
        for n in 1..10 {
            assert_eq!(threads[1].next(at(100 * n - 1)), wait(100 * n, 100 * n - 1));
        }
        assert_eq!((threads[1].next(at(950)), threads[0].next(at(1000))), (Next::Over, Next::Over));
        assert_eq!(missed(&plan, &threads[0]), 0);
    }

    #[test]
    fn threads_take_turns_from_the_first_request_on() {
        let plan = Plan { concurrency: 6, ..planned(Pace::Open(10), SECOND, 0) };
        let mut threads = of_threads(&plan, 3);
        let mut taken = |thread: usize| match threads[thread].next(at(0)) {
            Next::Send(turn) | Next::Wait(turn) => turn.due,
            Next::Over => panic!("there is more to do"),
        };
        let numbers = [1, 4, 0, 3, 2, 5, 6, 7, 8];
        for (thread, number) in [1, 1, 0, 0, 2, 2, 2, 2, 0].into_iter().zip(numbers) {
            assert_eq!(taken(thread), at(100 * number));
        }
    }

    #[test]
    fn threads_share_the_rate_and_the_number() {
        for (rate, ms, threads) in [(1000, 1000, 3), (7, 1000, 2), (1, 1500, 4), (3, 10, 5)] {
            let plan = planned(Pace::Open(rate), End::After(Duration::from_millis(ms)), 0);
            let mut all = of_threads(&plan, threads);
            let mut dues = Vec::new();
            for one in &mut all {
                while let Next::Send(turn) | Next::Wait(turn) = one.next(at(0)) {
                    dues.push(turn.due);
                }
            }
            assert_eq!(missed(&plan, &all[0]), 0);
            dues.sort_unstable();
            let count = (ms * rate).div_ceil(1000);
            let expected = (0..count).map(|n| Nanos(START.0 + n * 1_000_000_000 / rate));
            assert_eq!(dues, expected.collect::<Vec<_>>(), "{rate}/s in {ms} ms");
            // Had they taken none, they would miss as many.
            assert_eq!(never_taken(&plan, START, all[0].cut_off(), 0), count);
        }
        for (n, threads) in [(10, 3), (2, 4), (8, 8)] {
            let plan = planned(Pace::Closed, End::Requests(n), 0);
            let mut sent = 0;
            for mut one in of_threads(&plan, threads) {
                assert_eq!(one.has_started_all(at(7)), sent == n);
                while let Next::Send(_) = one.next(at(7)) {
                    sent += 1;
                }
                assert!(one.has_started_all(at(7)));
            }
            assert_eq!(sent, n, "{n} on {threads}");
        }
    }

    #[test]
    fn the_warm_up_is_on_top() {
        let mut one = alone(&planned(Pace::Open(10), End::Requests(2), 250));
        let mut sent = Vec::new();
        while let Next::Send(turn) = one.next(at(9000)) {
            sent.push((turn.due, turn.counts));
        }
        let expected = [(0, false), (100, false), (200, false), (300, true), (400, true)];
        assert_eq!(sent, expected.map(|(ms, counts)| (at(ms), counts)));
        assert!(one.is_measured(at(300), true) && !one.is_measured(at(300), false));
        assert!(one.has_started_all(at(400)) && !one.has_started_all(at(399)));
        let mut closed = alone(&planned(Pace::Closed, End::Requests(2), 250));
        for (ms, next) in [(0, send(0, false)), (249, send(249, false)), (250, send(250, true))] {
            assert_eq!(closed.next(at(ms)), next);
        }
        assert_eq!((closed.next(at(251)), closed.next(at(251))), (send(251, true), Next::Over));
        let plan = planned(Pace::Open(10), SECOND, 250);
        let mut late = alone(&plan);
        assert_eq!(late.next(at(5000)), Next::Over);
        // 300 to 1200 ms.
        assert_eq!(never_taken(&plan, START, late.cut_off(), 0), 10);
        assert!(late.is_measured(at(300), false) && !late.is_measured(at(200), false));
        assert!(late.has_started_all(at(1250)) && !late.has_started_all(at(1249)));
    }

    #[test]
    fn it_can_be_ended_early_and_only_once() {
        let plan = planned(Pace::Open(10), SECOND, 0);
        let mut one = alone(&plan);
        for n in 0..5 {
            assert!(matches!(one.next(at(10)), Next::Send(_) | Next::Wait(_)), "{n}");
        }
        one.end(at(650));
        one.end(at(900));
        assert_eq!((one.cut_off(), one.next(at(660))), (at(650), Next::Over));
        // Those of 500 and 600 ms.
        assert_eq!(missed(&plan, &one), 2);
        assert!(one.is_measured(at(649), true) && !one.is_measured(at(650), true));
        let mut counted = alone(&planned(Pace::Closed, End::Requests(9), 0));
        assert_eq!(counted.cut_off(), Nanos::NEVER);
        counted.end(at(3));
        assert_eq!(counted.next(at(3)), Next::Over);
        // Ended long after the last of four was due.
        let plan = planned(Pace::Open(10), End::Requests(4), 0);
        for taken in 0..9 {
            let left = 4_u64.saturating_sub(taken);
            assert_eq!(never_taken(&plan, START, at(9000), taken), left);
            assert_eq!(never_taken(&plan, START, Nanos::NEVER, taken), left);
        }
    }
}
