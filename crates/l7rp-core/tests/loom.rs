//! What threads share, under every order in which they can take turns and with every old value
//! that the memory model lets them read. `cargo xtask loom` runs these; without `--cfg loom`
//! there is nothing here.
//!
//! Ordinary atomics in here are the tests' own notes. They are no part of the model, so noting
//! something gives nobody else a turn.
#![cfg(loom)]
#![allow(clippy::unwrap_used, reason = "models are tests, also outside of the test functions")]

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use l7rp_core::limit::Slots;
use l7rp_core::names::Nanos;
use l7rp_core::pick::{Eligible, Seat};
use l7rp_core::upstream::breaker::{Breaker, Change, Mode, Rules, State, Trip, Verdict};
use l7rp_core::window::{Ewma, HalfLife};
use loom::sync::Arc;
use loom::thread;

use Verdict::{Failure, Success};

/// All interleavings, or all with at most so many preemptions. Faults that need more than
/// three are rare, and models of three threads do not end otherwise.
fn check(preemptions: Option<usize>, model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(model);
}

const THREE: Option<usize> = Some(3);

// The breaker.

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

const START: Nanos = Nanos(0);
/// When a breaker that opened at the start will let somebody in.
const EDGE: Nanos = Nanos(1_000_000_000);
/// When probes that were let in at the edge are taken to be lost.
const LOST: Nanos = Nanos(1_500_000_000);

/// Probes are lost sooner than the open time ends, so that a breaker that forgets to note when
/// it let one in lets in another at once.
fn closed(trip: Trip, probes: u32) -> Arc<Breaker> {
    Arc::new(Breaker::new(&Rules {
        trip,
        window: ms(10_000),
        window_size: 4,
        open_min: ms(1_000),
        open_max: ms(1_000),
        half_open_probes: probes,
        probe_timeout: ms(500),
    }))
}

/// Open since the start.
fn open(probes: u32) -> Arc<Breaker> {
    let breaker = closed(Trip::Consecutive(1), probes);
    assert!(tell(&breaker, START, Failure).is_some());
    breaker
}

/// Half-open; the only probe is never heard of again.
fn lost_one() -> Arc<Breaker> {
    let breaker = open(1);
    assert!(keep(&breaker, EDGE));
    breaker
}

/// One request; `None` also if it was not admitted.
fn tell(breaker: &Breaker, now: Nanos, verdict: Verdict) -> Option<Change> {
    breaker.admit(now)?.permit.settle(verdict, now, 0)
}

/// Whether it was admitted; it stays out for good.
fn keep(breaker: &Breaker, now: Nanos) -> bool {
    breaker.admit(now).map(std::mem::forget).is_some()
}

/// How many can still be let in.
fn places(breaker: &Breaker, now: Nanos) -> u32 {
    assert_eq!(breaker.state(), State::HalfOpen);
    (0..10).take_while(|_| keep(breaker, now)).count() as u32
}

fn spawn<T: 'static>(
    breaker: &Arc<Breaker>,
    work: impl FnOnce(&Breaker) -> T + 'static,
) -> thread::JoinHandle<T> {
    let breaker = breaker.clone();
    thread::spawn(move || work(&breaker))
}

fn opens(change: Option<Change>) -> u32 {
    u32::from(change.is_some_and(|c| c.to == State::Open))
}

#[test]
fn the_edge_lets_in_exactly_the_bound() {
    for probes in [1, 2] {
        check(THREE, move || {
            let breaker = open(probes);
            let half_opened = std::sync::Arc::new(AtomicU32::new(0));
            let arrive = |noted: std::sync::Arc<AtomicU32>| {
                move |breaker: &Breaker| {
                    let Some(admission) = breaker.admit(EDGE) else { return 0 };
                    assert!(admission.permit.is_probe());
                    noted.fetch_add(u32::from(admission.change.is_some()), Relaxed);
                    std::mem::forget(admission);
                    1
                }
            };
            let a = spawn(&breaker, arrive(half_opened.clone()));
            let b = spawn(&breaker, arrive(half_opened.clone()));
            let admitted = arrive(half_opened.clone())(&breaker);
            assert_eq!(admitted + a.join().unwrap() + b.join().unwrap(), probes);
            assert_eq!(half_opened.load(Relaxed), 1);
            assert_eq!(places(&breaker, EDGE), 0);
        });
    }
}

#[test]
fn lost_probes_are_replaced_by_exactly_the_bound() {
    check(THREE, || {
        let breaker = lost_one();
        let a = spawn(&breaker, |breaker| u32::from(keep(breaker, LOST)));
        let b = spawn(&breaker, |breaker| u32::from(keep(breaker, LOST)));
        let admitted = u32::from(keep(&breaker, LOST));
        assert_eq!(admitted + a.join().unwrap() + b.join().unwrap(), 1);
    });
}

/// One comes back at the last moment and another goes out: the word looks as it did, and who
/// has just found the first one lost must not replace the second.
#[test]
fn a_probe_that_has_just_gone_out_is_not_lost() {
    check(None, || {
        let breaker = open(1);
        let first = breaker.admit(EDGE).unwrap();
        let other = spawn(&breaker, |breaker| u32::from(keep(breaker, LOST)));
        drop(first);
        let admitted = u32::from(keep(&breaker, LOST));
        assert_eq!(admitted + other.join().unwrap(), 1);
    });
}

#[test]
fn a_lost_probe_that_comes_back_is_late_or_counts() {
    for verdict in [Some(Success), Some(Failure), None] {
        check(None, move || {
            let breaker = open(1);
            let lost = breaker.admit(EDGE).unwrap().permit;
            let other = spawn(&breaker, |breaker| keep(breaker, LOST));
            let change = verdict.and_then(|verdict| lost.settle(verdict, LOST, 0));
            let admitted = other.join().unwrap();
            assert_eq!(breaker.state(), change.map_or(State::HalfOpen, |c| c.to));
            assert_eq!(admitted, breaker.state() != State::Open);
            assert_eq!(breaker.admits(LOST), breaker.state() == State::Closed);
        });
    }
}

#[test]
fn a_success_a_cancellation_and_an_arrival_lose_no_place() {
    check(THREE, || {
        let breaker = open(2);
        let success = spawn(&breaker, |breaker| {
            let Some(admission) = breaker.admit(EDGE) else { return 0 };
            assert_eq!(admission.permit.settle(Success, EDGE, 0), None, "there must be two");
            1
        });
        let cancelled = spawn(&breaker, |breaker| drop(breaker.admit(EDGE)));
        let kept = u32::from(keep(&breaker, EDGE));
        cancelled.join().unwrap();
        assert_eq!(places(&breaker, EDGE), 2 - kept - success.join().unwrap());
    });
}

#[test]
fn the_last_success_closes_it_once() {
    check(None, || {
        let breaker = open(2);
        let other = spawn(&breaker, |breaker| tell(breaker, EDGE, Success));
        drop(breaker.admit(EDGE));
        let mine = tell(&breaker, EDGE, Success);
        assert!(mine.is_some() != other.join().unwrap().is_some(), "one of them is the last");
        assert_eq!(breaker.state(), State::Closed);
    });
}

#[test]
fn one_failure_of_many_probes_opens_it_once() {
    check(THREE, || {
        let breaker = open(3);
        let failure = |breaker: &Breaker| opens(tell(breaker, EDGE, Failure));
        let a = spawn(&breaker, failure);
        let b = spawn(&breaker, |breaker| drop(breaker.admit(EDGE)));
        let opened = failure(&breaker) + a.join().unwrap();
        b.join().unwrap();
        assert_eq!(opened, 1);
        assert_eq!((breaker.state(), breaker.admits(EDGE)), (State::Open, false));
    });
}

#[test]
fn failures_at_the_threshold_open_it_once_and_do_open_it() {
    for n in [2, 3] {
        for trip in [Trip::Consecutive(n), Trip::Ratio { above: 0.9, min_observations: n }] {
            check(THREE, move || {
                let breaker = closed(trip, 1);
                let failure = |breaker: &Breaker| opens(tell(breaker, START, Failure));
                let others: Vec<_> = (1..n).map(|_| spawn(&breaker, failure)).collect();
                let mut opened = failure(&breaker);
                for other in others {
                    opened += other.join().unwrap();
                }
                assert_eq!((opened, breaker.state()), (1, State::Open));
            });
        }
    }
}

#[test]
fn a_success_beside_failures_hides_none() {
    // Two of three are above a half, whatever comes first.
    check(THREE, || {
        let breaker = closed(Trip::Ratio { above: 0.5, min_observations: 2 }, 1);
        let failure = |breaker: &Breaker| opens(tell(breaker, START, Failure));
        let a = spawn(&breaker, failure);
        let b = spawn(&breaker, |breaker| opens(tell(breaker, START, Success)));
        let opened = failure(&breaker) + a.join().unwrap();
        assert_eq!(b.join().unwrap(), 0);
        assert_eq!((opened, breaker.state()), (1, State::Open));
    });
}

#[test]
fn a_success_between_failures_in_a_row_resets_or_comes_too_late() {
    check(THREE, || {
        let breaker = closed(Trip::Consecutive(2), 1);
        let failure = |breaker: &Breaker| opens(tell(breaker, START, Failure));
        let a = spawn(&breaker, failure);
        let b = spawn(&breaker, |breaker| opens(tell(breaker, START, Success)));
        let opened = failure(&breaker) + a.join().unwrap();
        assert_eq!(b.join().unwrap(), 0);
        assert_eq!(breaker.state() == State::Open, opened == 1);
        assert!(opened <= 1);
    });
}

/// Whatever results and arrivals come at the same time: what it is forced to it is, and stays.
#[test]
fn what_is_forced_is_undone_by_nobody() {
    for (mode, state) in [(Mode::Open, State::Open), (Mode::Closed, State::Closed)] {
        for verdict in [Success, Failure] {
            check(THREE, move || {
                let breaker = open(1);
                let a = spawn(&breaker, move |breaker| tell(breaker, EDGE, verdict));
                let b = spawn(&breaker, |breaker| drop(breaker.admit(EDGE)));
                let (before, _) = breaker.set_mode(mode, EDGE);
                assert_eq!(before, Mode::Auto);
                assert_eq!((breaker.mode(), breaker.state()), (mode, state));
                a.join().unwrap();
                b.join().unwrap();
                assert_eq!((breaker.mode(), breaker.state()), (mode, state));
                assert_eq!(keep(&breaker, LOST), mode == Mode::Closed);
            });
        }
    }
}

/// Each change of state is told by one of those who made it: they form a chain.
#[test]
fn a_forced_change_is_told_once() {
    check(None, || {
        let breaker = closed(Trip::Consecutive(1), 1);
        let other = spawn(&breaker, |breaker| opens(tell(breaker, START, Failure)));
        let (_, mine) = breaker.set_mode(Mode::Open, START);
        assert_eq!(opens(mine) + other.join().unwrap(), 1);
        assert_eq!(breaker.mode(), Mode::Open);
    });
}

/// One was let in while it was closed, and comes back while it opens and half-opens.
#[test]
fn late_results_change_nothing() {
    for trip in [Trip::Consecutive(1), Trip::Ratio { above: 0.0, min_observations: 1 }] {
        for verdict in [Some(Success), Some(Failure), None] {
            check(None, move || {
                let breaker = closed(trip, 1);
                let late = breaker.admit(START).unwrap().permit;
                let other = spawn(&breaker, |breaker| {
                    let opened = opens(tell(breaker, START, Failure));
                    assert!(keep(breaker, EDGE));
                    opened
                });
                let opened = opens(verdict.and_then(|verdict| late.settle(verdict, START, 0)));
                assert_eq!(opened + other.join().unwrap(), 1);
                assert_eq!((breaker.state(), places(&breaker, EDGE)), (State::HalfOpen, 0));
                assert_eq!(breaker.admits_at(), Some(LOST));
            });
        }
    }
}

// Slots and seats.

/// Three threads take one of `max` places each and give it back: never too many inside.
fn never_above<S: 'static>(
    max: u32,
    subject: fn(u32) -> S,
    enter: fn(&S) -> bool,
    leave: fn(&S),
    used: fn(&S) -> u32,
) {
    check(THREE, move || {
        let subject = Arc::new(subject(max));
        let inside = std::sync::Arc::new(AtomicU32::new(0));
        let visit = move |subject: &S, inside: &AtomicU32| {
            let entered = enter(subject);
            if entered {
                assert!(inside.fetch_add(1, Relaxed) < max, "one too many");
                assert!(used(subject) <= max);
                inside.fetch_sub(1, Relaxed);
                leave(subject);
            }
            u32::from(entered)
        };
        let others: Vec<_> = (0..2)
            .map(|_| {
                let (subject, inside) = (subject.clone(), inside.clone());
                thread::spawn(move || visit(&subject, &inside))
            })
            .collect();
        let mut entered = visit(&subject, &inside);
        for other in others {
            entered += other.join().unwrap();
        }
        assert!(entered >= max, "refused although one was free");
        assert_eq!(used(&subject), 0);
        assert_eq!((0..4).filter(|_| enter(&subject)).count(), max as usize);
    });
}

/// The only place is given back and wanted by two: one of them has it.
fn never_refused_when_free<S: 'static>(
    subject: fn(u32) -> S,
    enter: fn(&S) -> bool,
    leave: fn(&S),
) {
    check(None, move || {
        let subject = Arc::new(subject(1));
        assert!(enter(&subject));
        let other = {
            let subject = subject.clone();
            thread::spawn(move || enter(&subject))
        };
        leave(&subject);
        let mine = enter(&subject);
        assert_eq!(u32::from(mine) + u32::from(other.join().unwrap()), 1);
    });
}

#[test]
fn slots_are_exact() {
    for max in [1, 2] {
        never_above(max, Slots::new, Slots::try_enter, Slots::leave, Slots::used);
    }
    never_refused_when_free(Slots::new, Slots::try_enter, Slots::leave);
}

#[test]
fn seats_are_exact() {
    for max in [1, 2] {
        never_above(max, Seat::new, Seat::enter, Seat::leave, Seat::in_flight);
    }
    never_refused_when_free(Seat::new, Seat::enter, Seat::leave);
}

#[test]
fn those_eligible_are_counted_exactly() {
    check(THREE, || {
        let set = Arc::new(Eligible::new(2));
        set.set(0, true);
        // The same bit and another one, from two sides.
        let others: Vec<_> = [(0, false), (1, true)]
            .into_iter()
            .map(|(ix, eligible)| {
                let set = set.clone();
                thread::spawn(move || set.set(ix, eligible))
            })
            .collect();
        set.set(0, true);
        assert!(set.nth(0).is_none_or(|ix| ix < 2) && set.count() <= 3);
        for other in others {
            other.join().unwrap();
        }
        assert_eq!(set.count(), set.iter().count());
        assert!(set.iter().enumerate().all(|(k, ix)| set.nth(k) == Some(ix)));
    });
}

#[test]
fn no_limit_counts_exactly() {
    check(THREE, || {
        let both = Arc::new((Slots::new(0), Seat::new(0)));
        let visit = |both: &(Slots, Seat)| {
            assert!(both.0.try_enter() && both.1.enter());
            both.0.leave();
            both.1.leave();
        };
        let others: Vec<_> = (0..2)
            .map(|_| {
                let both = both.clone();
                thread::spawn(move || visit(&both))
            })
            .collect();
        visit(&both);
        for other in others {
            other.join().unwrap();
        }
        assert_eq!((both.0.used(), both.1.in_flight()), (0, 0));
    });
}

// Averages.

fn second(n: u64) -> Nanos {
    Nanos(n * 1_000_000_000)
}

fn observer(ewma: &Arc<Ewma>, at: Nanos, value: f64, life: HalfLife) -> thread::JoinHandle<()> {
    let ewma = ewma.clone();
    thread::spawn(move || ewma.observe(at, value, life))
}

#[test]
fn an_average_never_leaves_the_range_of_what_was_observed() {
    check(THREE, || {
        let life = HalfLife::new(Duration::from_secs(10));
        let ewma = Arc::new(Ewma::new());
        let a = observer(&ewma, second(5), 1.0, life);
        let b = observer(&ewma, second(9), 3.0, life);
        ewma.observe(second(7), 2.0, life);
        let seen = ewma.raw().unwrap();
        assert!((1.0..=3.0).contains(&seen), "{seen}");
        a.join().unwrap();
        b.join().unwrap();
        let seen = ewma.raw().unwrap();
        assert!((1.0..=3.0).contains(&seen), "{seen}");
    });
}

/// Each observation has its weight in the result, and each interval is counted once: the
/// average is one that two calls, one after the other, could have left.
#[test]
fn an_average_loses_no_observation() {
    check(None, || {
        let life = HalfLife::new(Duration::from_secs(10));
        let ewma = Arc::new(Ewma::new());
        ewma.observe(second(10), 1.0, life);
        let other = observer(&ewma, second(13), 2.0, life);
        ewma.observe(second(15), 3.0, life);
        other.join().unwrap();
        let got = ewma.raw().unwrap();

        let weight = |seconds: f64| 1.0 - (-seconds / 10.0).exp();
        let step = |old: f64, value: f64, weight: f64| old + weight * (value - old);
        // Whose interval is what depends on who moved the stamp first.
        let could_be =
            [(weight(3.0), weight(2.0)), (0.0, weight(5.0))].into_iter().any(|(a, b)| {
                let ways = [step(step(1.0, 2.0, a), 3.0, b), step(step(1.0, 3.0, b), 2.0, a)];
                ways.iter().any(|want| (want - got).abs() < 1e-12)
            });
        assert!(could_be, "{got}");
    });
}
