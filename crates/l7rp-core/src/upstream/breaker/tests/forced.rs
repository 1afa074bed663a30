//! A breaker that somebody has forced.

use super::*;

fn change(from: State, to: State) -> Option<Change> {
    (from != to).then_some(Change { from, to, open_for: None })
}

/// One in each state that it can be in by itself, at two seconds.
fn in_state(state: State) -> Breaker {
    let breaker = touchy(1);
    match state {
        State::Closed => {}
        State::Open => {
            fail(&breaker, at(2_000));
        }
        State::HalfOpen => {
            fail(&breaker, at(1_000));
            std::mem::forget(permit(&breaker, at(2_000)));
        }
    }
    assert_eq!(breaker.state(), state);
    breaker
}

const ALL: [State; 3] = [State::Closed, State::Open, State::HalfOpen];

#[test]
fn forced_open_lets_nobody_in_however_long() {
    for state in ALL {
        let breaker = in_state(state);
        assert_eq!(
            breaker.set_mode(Mode::Open, at(2_000)),
            (Mode::Auto, change(state, State::Open))
        );
        assert_eq!((breaker.mode(), breaker.state()), (Mode::Open, State::Open));
        for now in [at(2_000), at(9_000), Nanos(u64::MAX - 1)] {
            assert!(breaker.admit(now).is_none() && !breaker.admits(now));
        }
        assert_eq!(breaker.admits_at(), Some(Nanos::NEVER));
        assert_eq!(breaker.set_mode(Mode::Open, at(3_000)), (Mode::Open, None));
    }
}

#[test]
fn forced_closed_lets_everybody_in_whatever_they_find() {
    for state in ALL {
        let breaker = in_state(state);
        let told = breaker.set_mode(Mode::Closed, at(2_000));
        assert_eq!(told, (Mode::Auto, change(state, State::Closed)));
        for _ in 0..200 {
            let admission = breaker.admit(at(2_000)).unwrap();
            assert!(!admission.permit.is_probe() && admission.change.is_none());
            assert_eq!(admission.permit.settle(Verdict::Failure, at(2_000), 0), None);
        }
        assert_eq!((breaker.mode(), breaker.state()), (Mode::Closed, State::Closed));
        assert_eq!(breaker.admits_at(), None);
    }
}

#[test]
fn left_to_itself_it_counts_anew() {
    let three = Trip::Ratio { above: 0.5, min_observations: 3 };
    for trip in [three, Trip::Consecutive(3)] {
        for mode in [Mode::Open, Mode::Closed, Mode::Auto] {
            let breaker = Breaker::new(&rules(trip));
            for _ in 0..2 {
                fail(&breaker, at(10));
            }
            breaker.set_mode(mode, at(20));
            if mode == Mode::Closed {
                for _ in 0..5 {
                    fail(&breaker, at(30));
                }
            }
            let (before, told) = breaker.set_mode(Mode::Auto, at(40));
            let open = if mode == Mode::Open { State::Open } else { State::Closed };
            assert_eq!((before, told), (mode, change(open, State::Closed)));
            for _ in 0..2 {
                assert_eq!(fail(&breaker, at(50)), None, "{mode:?}");
            }
            assert_eq!(fail(&breaker, at(50)), Some(opened(State::Closed, ms(1_000))), "{mode:?}");
        }
    }
}

#[test]
fn what_was_let_in_before_changes_nothing() {
    for mode in [Mode::Open, Mode::Closed, Mode::Auto] {
        let breaker = touchy(2);
        let early = permit(&breaker, at(0));
        fail(&breaker, at(0));
        let tests = [permit(&breaker, at(1_000)), permit(&breaker, at(1_000))];
        breaker.set_mode(mode, at(1_010));
        let word = breaker.load();
        assert_eq!(early.settle(Verdict::Failure, at(1_020), 0), None);
        for (test, verdict) in tests.into_iter().zip([Verdict::Success, Verdict::Failure]) {
            assert_eq!(test.settle(verdict, at(1_020), 0), None);
        }
        assert_eq!(breaker.load(), word, "{mode:?}");
    }
}

#[test]
fn forced_stays_forced_under_other_rules() {
    let other = Rules { open_max: ms(50), open_min: ms(50), ..rules(Trip::Consecutive(1)) };
    for (mode, state) in [(Mode::Open, State::Open), (Mode::Closed, State::Closed)] {
        let before = touchy(1);
        before.set_mode(mode, at(10));
        let new = Breaker::taking_over(&other, &before, at(20));
        assert_eq!((new.mode(), new.state()), (mode, state));
        assert_eq!(new.admit(at(60_000)).is_some(), mode == Mode::Closed);
    }
}
