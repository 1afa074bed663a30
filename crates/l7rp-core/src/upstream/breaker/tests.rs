use std::sync::Barrier;
use std::sync::atomic::AtomicU32;

use super::*;

mod forced;
mod model;
mod taking_over;

const MS: u64 = 1_000_000;

fn at(ms: u64) -> Nanos {
    Nanos(ms * MS)
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Opens for exactly a second.
fn rules(trip: Trip) -> Rules {
    Rules {
        trip,
        window: ms(10_000),
        window_size: 100,
        open_min: ms(1_000),
        open_max: ms(1_000),
        half_open_probes: 3,
        probe_timeout: ms(5_000),
    }
}

/// One that opens at the first failure.
fn touchy(probes: u32) -> Breaker {
    Breaker::new(&Rules { half_open_probes: probes, ..rules(Trip::Consecutive(1)) })
}

fn permit(breaker: &Breaker, now: Nanos) -> Permit<'_> {
    breaker.admit(now).unwrap().permit
}

fn tell(breaker: &Breaker, now: Nanos, verdict: Verdict) -> Option<Change> {
    permit(breaker, now).settle(verdict, now, 0)
}

fn succeed(breaker: &Breaker, now: Nanos) -> Option<Change> {
    tell(breaker, now, Verdict::Success)
}

fn fail(breaker: &Breaker, now: Nanos) -> Option<Change> {
    tell(breaker, now, Verdict::Failure)
}

/// All permits that can be had at `now`.
fn all(breaker: &Breaker, now: Nanos) -> Vec<Permit<'_>> {
    assert_ne!(breaker.state(), State::Closed);
    std::iter::from_fn(|| breaker.admit(now)).map(|admission| admission.permit).collect()
}

fn opened(from: State, open_for: Duration) -> Change {
    Change { from, to: State::Open, open_for: Some(open_for) }
}

const HALF_OPENED: Option<Change> =
    Some(Change { from: State::Open, to: State::HalfOpen, open_for: None });
const CLOSED: Option<Change> =
    Some(Change { from: State::HalfOpen, to: State::Closed, open_for: None });

#[test]
fn so_many_failures_in_a_row_open_it() {
    for limit in [1, 2, 5, 100] {
        let breaker = Breaker::new(&rules(Trip::Consecutive(limit)));
        for round in 0..3 {
            for n in 1..limit {
                assert_eq!(fail(&breaker, at(n.into())), None, "{n} of {limit}");
                assert_eq!(breaker.state(), State::Closed);
            }
            if round < 2 {
                assert_eq!(succeed(&breaker, at(200)), None, "and the count begins again");
            }
        }
        let change = fail(&breaker, at(300));
        assert_eq!(change, Some(opened(State::Closed, ms(1_000))), "{limit}");
    }
    let breaker = Breaker::new(&rules(Trip::Consecutive(0)));
    assert!(fail(&breaker, at(1)).is_some(), "0 is taken as 1");
}

#[test]
fn no_verdict_neither_counts_nor_resets() {
    let breaker = Breaker::new(&rules(Trip::Consecutive(2)));
    assert_eq!(fail(&breaker, at(1)), None);
    drop(permit(&breaker, at(2)));
    assert!(fail(&breaker, at(3)).is_some());
}

#[test]
fn a_share_of_failures_above_the_ratio_opens_it() {
    // (ratio, at least, successes first, failures that do not open it; one more does)
    for (above, min_observations, successes, patience) in [
        (0.5, 20, 0, 19),
        (0.5, 20, 5, 14),
        (0.5, 20, 10, 10), // 10 of 20 are not above a half
        (0.5, 20, 40, 40),
        (0.5, 1, 0, 0),
        (0.0, 0, 0, 0),
        (0.0, 5, 99, 0),
        (0.99, 100, 1, 99), // the success must leave the window
        (0.29, 100, 71, 29),
    ] {
        let breaker = Breaker::new(&rules(Trip::Ratio { above, min_observations }));
        for _ in 0..successes {
            assert_eq!(succeed(&breaker, at(7)), None);
        }
        for n in 0..patience {
            assert_eq!(fail(&breaker, at(8)), None, "{n} failures at {above}");
        }
        assert_eq!(fail(&breaker, at(9)), Some(opened(State::Closed, ms(1_000))), "{above}");
    }
}

#[test]
fn nothing_is_above_all() {
    for above in [1.0, 1.5, f64::INFINITY, f64::NAN] {
        let breaker = Breaker::new(&rules(Trip::Ratio { above, min_observations: 1 }));
        assert!((0..1_000).all(|n| fail(&breaker, at(n)).is_none()), "{above}");
    }
}

#[test]
fn a_success_never_opens_it() {
    // After 18 failures and 2 successes the share is far above the ratio, and would have been
    // acted on by a failure.
    let breaker = Breaker::new(&rules(Trip::Ratio { above: 0.5, min_observations: 20 }));
    assert!((0..18).all(|_| fail(&breaker, at(1)).is_none()));
    assert!((0..2).all(|_| succeed(&breaker, at(2)).is_none()));
    assert_eq!(breaker.state(), State::Closed);
    assert!(fail(&breaker, at(3)).is_some());
}

#[test]
fn results_expire_by_time() {
    let breaker = Breaker::new(&rules(Trip::Ratio { above: 0.5, min_observations: 20 }));
    assert!((0..10).all(|_| fail(&breaker, at(1_000)).is_none()));
    assert!((0..9).all(|_| fail(&breaker, at(2_000)).is_none()));
    assert_eq!(fail(&breaker, at(11_001)), None, "ten are 10.001 s old");
    assert!((0..9).all(|_| fail(&breaker, at(11_500)).is_none()));
    assert!(fail(&breaker, at(12_000)).is_some(), "nine are 10 s old and still count");
}

#[test]
fn results_expire_by_count() {
    let breaker = Breaker::new(&rules(Trip::Ratio { above: 0.1, min_observations: 20 }));
    assert!((0..10).all(|_| fail(&breaker, at(1)).is_none()));
    assert!((0..99).all(|_| succeed(&breaker, at(2)).is_none()));
    assert_eq!(fail(&breaker, at(3)), None, "only the last hundred are looked at");
    assert!((0..9).all(|_| fail(&breaker, at(3)).is_none()));
    assert!(fail(&breaker, at(3)).is_some());
}

#[test]
fn consecutive_needs_no_ring() {
    assert!(matches!(touchy(1).counting, Counting::Consecutive(1)));
}

#[test]
fn goes_round() {
    let breaker = touchy(2);
    assert_eq!((breaker.state(), breaker.admits_at()), (State::Closed, None));
    let admission = breaker.admit(at(5)).unwrap();
    assert!(!admission.permit.is_probe() && admission.change.is_none());
    assert!(admission.permit.settle(Verdict::Failure, Nanos(5 * MS + 1), 0).is_some());

    assert_eq!(breaker.state(), State::Open);
    assert_eq!(breaker.admits_at(), Some(at(1_006)), "rounded up");
    assert!(!breaker.admits(at(1_005)) && breaker.admit(at(1_005)).is_none());
    assert!(breaker.admits(at(1_006)));
    assert_eq!(breaker.state(), State::Open, "asking changes nothing");

    let first = breaker.admit(at(1_006)).unwrap();
    assert!(first.permit.is_probe());
    assert_eq!((first.change, breaker.state()), (HALF_OPENED, State::HalfOpen));
    assert_eq!((breaker.admits(at(1_006)), breaker.admits_at()), (true, None));
    let second = breaker.admit(at(1_007)).unwrap();
    assert!(second.permit.is_probe() && second.change.is_none());
    assert!(!breaker.admits(at(1_008)) && breaker.admit(at(1_008)).is_none());
    assert_eq!(breaker.admits_at(), Some(at(6_007)), "when they are taken to be lost");

    assert_eq!(first.permit.settle(Verdict::Success, at(1_100), 0), None);
    assert!(!breaker.admits(at(1_100)), "its place stays taken: two in all, not two at once");
    assert_eq!(second.permit.settle(Verdict::Success, at(1_200), 0), CLOSED);
    assert_eq!((breaker.state(), breaker.admits_at()), (State::Closed, None));
}

#[test]
fn a_failed_probe_opens_it_again() {
    let breaker = touchy(2);
    assert!(fail(&breaker, at(0)).is_some());
    let (first, second) = (permit(&breaker, at(1_000)), permit(&breaker, at(1_000)));
    assert_eq!(first.settle(Verdict::Success, at(1_001), 0), None);
    let change = second.settle(Verdict::Failure, at(1_002), 0);
    assert_eq!(change, Some(opened(State::HalfOpen, ms(1_000))));
    assert_eq!(breaker.admits_at(), Some(at(2_002)));
    assert_eq!(all(&breaker, at(2_002)).len(), 2, "the success is forgotten");
}

#[test]
fn a_cancelled_probe_says_nothing() {
    let breaker = touchy(1);
    assert!(fail(&breaker, at(0)).is_some());
    let probe = permit(&breaker, at(1_000));
    assert!(!breaker.admits(at(1_000)));
    drop(probe);
    assert_eq!((breaker.state(), breaker.admits_at()), (State::HalfOpen, None));
    assert_eq!(succeed(&breaker, at(1_001)), CLOSED);
}

#[test]
fn a_probe_that_is_let_off_makes_room_and_still_tells() {
    for verdict in [Verdict::Success, Verdict::Failure] {
        let breaker = touchy(1);
        assert!(fail(&breaker, at(0)).is_some());
        let mut probe = permit(&breaker, at(1_000));
        assert!(!breaker.admits(at(1_001)));
        probe.let_off();
        probe.let_off();
        assert!(probe.is_off() && breaker.admits(at(1_001)));
        // It comes while nobody else tests.
        let change = probe.settle(verdict, at(1_002), 0);
        let want = match verdict {
            Verdict::Success => CLOSED,
            Verdict::Failure => Some(opened(State::HalfOpen, ms(1_000))),
        };
        assert_eq!(change, want);
    }
}

#[test]
fn a_probe_that_is_let_off_takes_nobodys_place() {
    let breaker = touchy(1);
    assert!(fail(&breaker, at(0)).is_some());
    let mut slow = permit(&breaker, at(1_000));
    slow.let_off();
    let other = permit(&breaker, at(1_001));
    // The bound holds: there is one place, and it is taken.
    assert_eq!(slow.settle(Verdict::Success, at(1_002), 0), None);
    assert!(!breaker.admits(at(1_002)));
    drop(other);
    let mut gone = permit(&breaker, at(1_003));
    gone.let_off();
    drop(gone);
    assert_eq!(all(&breaker, at(1_004)).len(), 1, "given back once, not twice");
}

#[test]
fn open_time_doubles_up_to_the_cap() {
    let breaker = Breaker::new(&Rules {
        open_min: ms(1_000),
        open_max: ms(60_000),
        ..rules(Trip::Consecutive(1))
    });
    let middle = 1 << 63; // no jitter
    let mut now = at(0);
    for (trip, want) in [1, 2, 4, 8, 16, 32, 60, 60, 60].into_iter().cycle().take(9).enumerate() {
        let change = permit(&breaker, now).settle(Verdict::Failure, now, middle).unwrap();
        assert_eq!(change.open_for, Some(ms(want * 1_000)), "trip {trip}");
        now = breaker.admits_at().unwrap();
    }
    for _ in 0..100 {
        assert_eq!(fail(&breaker, now).unwrap().open_for, Some(ms(60_000)), "more than 31 trips");
        now = breaker.admits_at().unwrap();
    }
}

#[test]
fn jitter_stays_within_a_fifth_and_the_bounds() {
    let breaker = Breaker::new(&Rules {
        open_min: ms(1_000),
        open_max: ms(5_000),
        ..rules(Trip::Consecutive(1))
    });
    let mut rng = fastrand::Rng::with_seed(3);
    for (trips, low, high) in
        [(1, 1_000, 1_200), (2, 1_600, 2_400), (3, 3_200, 4_800), (4, 5_000, 5_000)]
    {
        let times: Vec<_> = (0..1_000).map(|_| breaker.open_time(trips, rng.u64(..))).collect();
        assert!(times.iter().all(|t| (ms(low)..=ms(high)).contains(t)), "trip {trips}");
        let spread = times.iter().max().unwrap().saturating_sub(*times.iter().min().unwrap());
        assert!(spread >= ms(high - low).mul_f64(0.95), "{spread:?} at trip {trips}");
    }
    assert_eq!(breaker.open_time(2, 0), ms(1_600));
    assert!(breaker.open_time(2, u64::MAX) <= ms(2_400));
}

#[test]
fn extreme_times_do_not_overflow() {
    let breaker = Breaker::new(&Rules {
        window: Duration::MAX,
        open_min: Duration::MAX,
        open_max: Duration::MAX,
        probe_timeout: Duration::MAX,
        ..rules(Trip::Ratio { above: 0.0, min_observations: 1 })
    });
    let change = permit(&breaker, Nanos::NEVER).settle(Verdict::Failure, Nanos::NEVER, u64::MAX);
    assert_eq!(change.unwrap().open_for, Some(LONGEST_OPEN));
    assert!(!breaker.admits(at(0)));
    assert_eq!(breaker.open_time(31, u64::MAX), LONGEST_OPEN);
}

#[test]
fn the_end_of_the_open_time_is_exact_after_years() {
    let day = 24 * 3_600 * 1_000;
    for days in [0, 700, 800, 1_590, 1_591, 1_600, 5_000, 36_500] {
        let breaker =
            Breaker::new(&Rules { open_max: LONGEST_OPEN, ..rules(Trip::Consecutive(1)) });
        let now = at(days * day);
        assert!(fail(&breaker, now).is_some());
        let end = now.plus(ms(1_000));
        assert_eq!(breaker.admits_at(), Some(end), "{days} days");
        assert!(!breaker.admits(Nanos(end.0 - 1)) && breaker.admits(end));
        assert!(breaker.admits(at((days + 5_000) * day)), "nobody asked for years");
    }
}

#[test]
fn a_long_closed_time_makes_the_next_trip_a_first_one() {
    let rules = Rules { open_max: ms(60_000), ..rules(Trip::Consecutive(1)) };
    let middle = 1 << 63;
    for (closed_for, want) in [(0, 2_000), (9_999, 2_000), (10_000, 1_000), (99_999, 1_000)] {
        let breaker = Breaker::new(&Rules { half_open_probes: 1, ..rules.clone() });
        let first = permit(&breaker, at(50)).settle(Verdict::Failure, at(50), middle).unwrap();
        assert_eq!(first.open_for, Some(ms(1_000)), "the first ever, however early");
        assert_eq!(succeed(&breaker, at(2_000)), CLOSED);
        let now = at(2_000 + closed_for);
        let second = permit(&breaker, now).settle(Verdict::Failure, now, middle).unwrap();
        assert_eq!(second.open_for, Some(ms(want)), "closed for {closed_for} ms");
    }
}

#[test]
fn late_results_change_nothing() {
    for verdict in [Some(Verdict::Success), Some(Verdict::Failure), None] {
        let breaker = touchy(2);
        let late = |permit: Permit<'_>, now| {
            let before = (breaker.load(), breaker.admits_at());
            match verdict {
                Some(verdict) => assert_eq!(permit.settle(verdict, now, 7), None),
                None => drop(permit),
            }
            assert_eq!((breaker.load(), breaker.admits_at()), before, "{verdict:?}");
        };
        let mut early: Vec<_> = (0..6).map(|_| permit(&breaker, at(0))).collect();
        let mut tell = |now| late(early.pop().unwrap(), now);

        assert!(fail(&breaker, at(1)).is_some());
        tell(at(500)); // a failure does not extend the open time
        tell(at(5_000));
        let (first, lost) = (permit(&breaker, at(5_000)), permit(&breaker, at(5_000)));
        tell(at(5_001)); // a success does not close, a failure does not reopen
        assert!(first.settle(Verdict::Failure, at(5_002), 0).is_some());
        late(lost, at(5_500)); // a probe of an earlier half-open time, while open
        let mut probes = all(&breaker, at(7_000));
        tell(at(7_001));
        let outlived = probes.pop().unwrap();
        let new = all(&breaker, at(12_000)); // those are taken to be lost
        late(outlived, at(12_001)); // and while half-open again
        for permit in new {
            permit.settle(Verdict::Success, at(12_002), 0);
        }
        assert_eq!(breaker.state(), State::Closed);
        tell(at(12_003)); // of the closed time before this one
        late(probes.pop().unwrap(), at(12_004));
    }
}

#[test]
fn late_failures_neither_count_nor_push_out_those_that_do() {
    let breaker = Breaker::new(&Rules {
        half_open_probes: 1,
        window_size: 2,
        ..rules(Trip::Ratio { above: 0.5, min_observations: 2 })
    });
    let old: Vec<_> = (0..50).map(|_| permit(&breaker, at(0))).collect();
    assert!(fail(&breaker, at(1)).is_none() && fail(&breaker, at(1)).is_some());
    assert_eq!(succeed(&breaker, at(1_001)), CLOSED);
    assert_eq!(fail(&breaker, at(1_002)), None, "those of before do not count");
    for permit in old {
        assert_eq!(permit.settle(Verdict::Failure, at(1_003), 0), None);
    }
    assert!(fail(&breaker, at(1_004)).is_some());
}

#[test]
fn lost_probes_are_replaced() {
    let breaker = touchy(3);
    assert!(fail(&breaker, at(0)).is_some());
    let first = permit(&breaker, at(1_000));
    assert!(breaker.admits(at(9_000)), "while there are places the time does not matter");
    // The last one's thread is a little behind the others.
    let lost = [permit(&breaker, at(9_000)), permit(&breaker, at(8_999))];
    assert_eq!(first.settle(Verdict::Success, at(9_001), 0), None);
    assert_eq!(breaker.admits_at(), Some(at(14_000)), "counted from the last one");
    assert!(!breaker.admits(at(13_999)) && breaker.admit(at(13_999)).is_none());
    assert!(breaker.admits(at(14_000)));
    let replacement = breaker.admit(at(14_000)).unwrap();
    assert!(replacement.permit.is_probe());
    assert_eq!(replacement.change, None, "half-open it was");
    assert_eq!(all(&breaker, at(14_000)).len(), 2);
    drop(lost);
    drop(replacement);
    assert_eq!(all(&breaker, at(14_000)).len(), 3, "the lost ones gave nothing back");
}

#[test]
fn a_generation_is_one_transition() {
    let breaker = touchy(1);
    let generation = || breaker.load().generation();
    assert!(fail(&breaker, at(0)).is_some());
    assert_eq!(generation(), 1);
    let lost = permit(&breaker, at(1_000));
    assert_eq!(generation(), 2);
    let probe = permit(&breaker, at(6_000));
    assert_eq!(generation(), 3, "the lost probe's is over");
    drop(lost);
    drop(probe);
    assert_eq!(generation(), 3);
    assert!(fail(&breaker, at(6_001)).is_some());
    assert_eq!(generation(), 4);
    assert_eq!(succeed(&breaker, at(7_001)), CLOSED);
    assert_eq!(generation(), 6);
}

#[test]
fn no_slot_is_lost_however_probes_end() {
    let mut rng = fastrand::Rng::with_seed(5);
    let mut now = 0;
    for round in 0..1_000 {
        let limit = rng.u32(1..9);
        let breaker = touchy(limit);
        assert!(fail(&breaker, at(now)).is_some());
        now += 1_000;
        let mut out = all(&breaker, at(now));
        let mut succeeded = 0;
        while breaker.state() == State::HalfOpen {
            out.extend(all(&breaker, at(now)));
            assert_eq!(out.len(), limit as usize - succeeded, "round {round}");
            for _ in 0..=rng.usize(..out.len()) {
                let permit = out.swap_remove(rng.usize(..out.len()));
                match rng.u32(..10) {
                    0 => drop(permit.settle(Verdict::Failure, at(now), rng.u64(..))),
                    1..4 => {
                        permit.settle(Verdict::Success, at(now), rng.u64(..));
                        succeeded += 1;
                    }
                    _ => drop(permit),
                }
            }
        }
        drop(out);
        if breaker.state() == State::Open {
            now += 1_000;
            assert_eq!(all(&breaker, at(now)).len(), limit as usize, "round {round}");
        } else {
            assert_eq!(succeeded, limit as usize);
        }
    }
}

#[test]
fn probes_are_clamped_to_what_can_be_counted() {
    for (asked, want) in [(0, 1), (4_095, 4_095), (4_096, 4_095), (u32::MAX, 4_095)] {
        let breaker = touchy(asked);
        assert!(fail(&breaker, at(0)).is_some());
        let probes = all(&breaker, at(1_000));
        assert_eq!(probes.len(), want);
        let changes: Vec<_> =
            probes.into_iter().filter_map(|p| p.settle(Verdict::Success, at(1_001), 0)).collect();
        assert_eq!(changes.len(), 1);
        assert_eq!(breaker.state(), State::Closed);
    }
}

/// `threads` threads ask `each` times at once; how many probes are let in, how many
/// half-opened it.
fn arrive(breaker: &Breaker, now: Nanos, threads: usize, each: usize) -> (usize, usize) {
    let barrier = Barrier::new(threads);
    let admissions: Vec<Admission<'_>> = std::thread::scope(|scope| {
        let arrivals: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    barrier.wait();
                    (0..each).filter_map(|_| breaker.admit(now)).collect::<Vec<_>>()
                })
            })
            .collect();
        arrivals.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let changes = admissions.iter().filter(|a| a.change == HALF_OPENED).count();
    (admissions.len(), changes)
}

#[test]
fn a_hundred_at_the_edge_let_in_exactly_the_bound() {
    for round in 0..60 {
        let probes = [1, 3, 10, 99][round % 4];
        let breaker = touchy(probes);
        assert!(fail(&breaker, at(0)).is_some());
        assert_eq!(arrive(&breaker, at(1_000), 100, 1), (probes as usize, 1));
        assert_eq!(arrive(&breaker, at(1_000), 100, 1), (probes as usize, 0), "given back");
    }
}

#[test]
fn ten_thousand_at_the_edge_let_in_exactly_the_bound() {
    for probes in [1, 3, 10, 1_000] {
        let breaker = touchy(probes);
        assert!(fail(&breaker, at(0)).is_some());
        assert_eq!(arrive(&breaker, at(1_000), 50, 200), (probes as usize, 1));
    }
}

#[test]
fn ten_thousand_replace_lost_probes_by_exactly_the_bound() {
    let breaker = touchy(3);
    assert!(fail(&breaker, at(0)).is_some());
    let lost = all(&breaker, at(1_000));
    assert_eq!(arrive(&breaker, at(6_000), 50, 200), (3, 0));
    drop(lost);
}

#[test]
fn never_above_the_bound_while_others_give_up() {
    let breaker = touchy(3);
    assert!(fail(&breaker, at(0)).is_some());
    let out = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..10_000 {
                    if let Some(admission) = breaker.admit(at(1_000)) {
                        assert!(out.fetch_add(1, Relaxed) < 3);
                        out.fetch_sub(1, Relaxed);
                        drop(admission);
                    }
                }
            });
        }
    });
    assert_eq!(all(&breaker, at(1_000)).len(), 3);
}

#[test]
fn threads_leave_no_transition_untold_and_no_slot_lost() {
    for trip in [Trip::Consecutive(3), Trip::Ratio { above: 0.5, min_observations: 5 }] {
        let breaker = Breaker::new(&Rules {
            open_min: Duration::ZERO,
            open_max: ms(1),
            probe_timeout: Duration::MAX,
            ..rules(trip)
        });
        let (changes, clock) = (AtomicU32::new(0), AtomicU32::new(0));
        std::thread::scope(|scope| {
            for thread in 0..8 {
                let (breaker, changes, clock) = (&breaker, &changes, &clock);
                scope.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(thread);
                    let mut told = 0;
                    for _ in 0..20_000 {
                        let now = at(clock.fetch_add(1, Relaxed).into());
                        let Some(Admission { permit, change }) = breaker.admit(now) else {
                            continue;
                        };
                        told += u32::from(change.is_some());
                        let verdict = match rng.u32(..8) {
                            0 => continue,
                            1..4 => Verdict::Failure,
                            _ => Verdict::Success,
                        };
                        let change = permit.settle(verdict, now, rng.u64(..));
                        told += u32::from(change.is_some());
                    }
                    changes.fetch_add(told, Relaxed);
                });
            }
        });
        let told = changes.into_inner();
        assert!(told > 100, "{told} transitions show little");
        assert_eq!(breaker.load().generation(), told % (1 << word::GENERATION_BITS));
        while breaker.state() == State::Closed {
            fail(&breaker, at(160_000));
        }
        let (admitted, succeeded) = match breaker.state() {
            State::HalfOpen => (breaker.load().admitted(), breaker.load().succeeded()),
            _ => (0, 0),
        };
        assert_eq!(admitted, succeeded, "{trip:?}: a slot is lost");
        assert_eq!(all(&breaker, at(170_000)).len(), 3 - succeeded as usize, "{trip:?}");
    }
}
