//! When which request is due. One thread's part of a run; the time is an argument.
//!
//! In an open loop request `n` is due at start + n / rate, whatever has become of those before it.
//! A late one counts from when it was due, so that a stall is seen by all that it delays.

use std::time::Duration;

use l7rp_core::names::Nanos;

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
    /// It waits for this time.
    Wait(Nanos),
    /// It is done.
    Over,
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
    /// Requests that may still be sent and count.
    left: u64,
    /// Number of the next request in an open loop, and the distance to this thread's one after it.
    number: u64,
    step: u64,
}

impl Schedule {
    pub(super) fn new(pace: Pace, end: End, warm_up: Duration, start: Nanos, part: Part) -> Self {
        let counted_from = start.plus(warm_up);
        let (cut_off, left) = match end {
            End::After(time) => (counted_from.plus(time), u64::MAX),
            End::Requests(n) => {
                let more = u64::from(part.index < n % part.threads);
                (Nanos::NEVER, n / part.threads + more)
            }
        };
        let is_timed = matches!(end, End::After(_));
        let (number, step) = (part.index, part.threads);
        Self { pace, start, counted_from, cut_off, is_timed, left, number, step }
    }

    /// What comes next for a connection that is free now.
    pub(super) fn next(&mut self, now: Nanos) -> Next {
        if now >= self.cut_off { Next::Over } else { self.next_for_waiting(now) }
    }

    /// The same for one that has waited. It was free when the request was due: that it is told
    /// after the cut-off is no fault of the target.
    pub(super) fn next_for_waiting(&mut self, now: Nanos) -> Next {
        let due = match self.pace {
            Pace::Closed => now,
            Pace::Open(rate) => self.due(rate, self.number),
        };
        let counts = due >= self.counted_from;
        if due >= self.cut_off || counts && self.left == 0 {
            return Next::Over;
        }
        if due > now {
            return Next::Wait(due);
        }
        self.number = self.number.saturating_add(self.step);
        self.left -= u64::from(counts);
        Next::Send(Turn { due, now, counts })
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

    /// Requests that were due before the cut-off and count, but for which no connection was free.
    pub(super) fn never_started(&self) -> u64 {
        let Pace::Open(rate) = self.pace else { return 0 };
        if self.cut_off == Nanos::NEVER {
            return 0;
        }
        let before = |at: Nanos| numbers_before(rate, at.since(self.start));
        let first = self.number.max(before(self.counted_from));
        // This thread's numbers are those that leave the same rest as its next one.
        let behind = (self.number % self.step + self.step - first % self.step) % self.step;
        let first = first.saturating_add(behind);
        before(self.cut_off).saturating_sub(first).div_ceil(self.step).min(self.left)
    }

    fn due(&self, rate: u64, number: u64) -> Nanos {
        let after = u128::from(number) * 1_000_000_000 / u128::from(rate.max(1));
        Nanos(self.start.0.saturating_add(u64::try_from(after).unwrap_or(u64::MAX)))
    }
}

/// How many requests of all threads are due in this time.
fn numbers_before(rate: u64, time: Duration) -> u64 {
    let numbers = (time.as_nanos() * u128::from(rate)).div_ceil(1_000_000_000);
    u64::try_from(numbers).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Nanos = Nanos(5_000_000_000);
    const ALONE: Part = Part { index: 0, threads: 1 };

    fn at(ms: u64) -> Nanos {
        START.plus(Duration::from_millis(ms))
    }

    fn schedule(pace: Pace, end: End, warm_up: u64, part: Part) -> Schedule {
        Schedule::new(pace, end, Duration::from_millis(warm_up), START, part)
    }

    fn send(due: u64, counts: bool) -> Next {
        send_at(due, due, counts)
    }

    fn send_at(due: u64, now: u64, counts: bool) -> Next {
        Next::Send(Turn { due: at(due), now: at(now), counts })
    }

    const SECOND: End = End::After(Duration::from_secs(1));

    #[test]
    fn a_closed_loop_sends_at_once_until_the_cut_off() {
        let mut one = schedule(Pace::Closed, SECOND, 100, ALONE);
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
        assert_eq!(one.never_started(), 0);
    }

    #[test]
    fn an_open_loop_keeps_to_the_times_whatever_the_delay() {
        let mut one = schedule(Pace::Open(10), SECOND, 0, ALONE);
        for (ms, next) in [
            (0, send(0, true)),
            (1, Next::Wait(at(100))),
            (100, send(100, true)),
            // A stall: those that were due meanwhile go out one by one, and count from then.
            (650, send_at(200, 650, true)),
            (650, send_at(300, 650, true)),
            (651, send_at(400, 651, true)),
            (651, send_at(500, 651, true)),
            (651, send_at(600, 651, true)),
            (651, Next::Wait(at(700))),
            (999, send_at(700, 999, true)),
            (1000, Next::Over),
        ] {
            assert_eq!(one.next(at(ms)), next, "{ms} ms");
        }
        // Those of 800 and 900 ms.
        assert_eq!(one.never_started(), 2);
        // A connection that waits has been free at 800 ms.
        assert_eq!(one.next_for_waiting(at(1001)), send_at(800, 1001, true));
        assert_eq!(one.never_started(), 1);
    }

    #[test]
    fn an_open_loop_is_over_once_nothing_more_will_be_due() {
        let mut one = schedule(Pace::Open(2), SECOND, 0, ALONE);
        assert_eq!(one.next(at(0)), send(0, true));
        assert_eq!(one.next(at(500)), send(500, true));
        assert_eq!(one.next(at(501)), Next::Over);
        assert_eq!(one.never_started(), 0);
    }

    #[test]
    fn threads_share_the_rate_and_the_number() {
        for (rate, ms, threads) in [(1000, 1000, 3), (7, 1000, 2), (1, 1500, 4), (3, 10, 8)] {
            let end = End::After(Duration::from_millis(ms));
            let mut dues = Vec::new();
            for index in 0..threads {
                let part = Part { index, threads };
                let mut one = schedule(Pace::Open(rate), end, 0, part);
                let mut now = at(0);
                loop {
                    match one.next(now) {
                        Next::Send(turn) => dues.push(turn.due),
                        Next::Wait(due) => now = due,
                        Next::Over => break,
                    }
                }
                assert_eq!(one.never_started(), 0);
                // Had it not started any, it would miss as many.
                let fresh = schedule(Pace::Open(rate), end, 0, part);
                let expected = (0..(ms * rate).div_ceil(1000)).filter(|n| n % threads == index);
                assert_eq!(fresh.never_started(), expected.count() as u64, "{rate} {ms} {index}");
            }
            dues.sort_unstable();
            let all =
                (0..(ms * rate).div_ceil(1000)).map(|n| Nanos(START.0 + n * 1_000_000_000 / rate));
            assert_eq!(dues, all.collect::<Vec<_>>(), "{rate}/s in {ms} ms");
        }
        for (n, threads) in [(10, 3), (2, 4), (8, 8)] {
            let mut sent = 0;
            for index in 0..threads {
                let mut one = schedule(Pace::Closed, End::Requests(n), 0, Part { index, threads });
                while let Next::Send(_) = one.next(at(7)) {
                    sent += 1;
                }
            }
            assert_eq!(sent, n, "{n} on {threads}");
        }
    }

    #[test]
    fn the_warm_up_is_on_top() {
        let mut one = schedule(Pace::Open(10), End::Requests(2), 250, ALONE);
        let mut sent = Vec::new();
        while let Next::Send(turn) = one.next(at(9000)) {
            sent.push((turn.due, turn.counts));
        }
        let expected = [(0, false), (100, false), (200, false), (300, true), (400, true)];
        assert_eq!(sent, expected.map(|(ms, counts)| (at(ms), counts)));
        assert!(one.is_measured(at(300), true) && !one.is_measured(at(300), false));
        let mut late = schedule(Pace::Open(10), SECOND, 250, ALONE);
        assert_eq!(late.next(at(5000)), Next::Over);
        // 300 to 1200 ms.
        assert_eq!(late.never_started(), 10);
        assert!(late.is_measured(at(300), false) && !late.is_measured(at(200), false));
    }

    #[test]
    fn it_can_be_ended_early_and_only_once() {
        let mut one = schedule(Pace::Open(10), SECOND, 0, ALONE);
        assert_eq!(one.next(at(0)), send(0, true));
        one.end(at(450));
        one.end(at(900));
        assert_eq!((one.cut_off(), one.next(at(460))), (at(450), Next::Over));
        assert_eq!(one.never_started(), 4);
        assert!(one.is_measured(at(449), true) && !one.is_measured(at(450), true));
        let mut counted = schedule(Pace::Closed, End::Requests(9), 0, ALONE);
        assert_eq!(counted.cut_off(), Nanos::NEVER);
        counted.end(at(3));
        assert_eq!(counted.next(at(3)), Next::Over);
        // Ended long after the last of four was due.
        let mut slow = schedule(Pace::Open(10), End::Requests(4), 0, ALONE);
        for left in (1..=4).rev() {
            let mut ended = slow.clone();
            ended.end(at(9000));
            assert_eq!(ended.never_started(), left);
            assert!(matches!(slow.next(at(8000)), Next::Send(_)));
        }
        slow.end(at(9000));
        assert_eq!(slow.never_started(), 0);
    }
}
