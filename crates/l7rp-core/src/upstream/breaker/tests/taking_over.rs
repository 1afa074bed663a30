//! A breaker whose rules were changed goes on where the old one was.

use super::*;

/// The rules of the old ones here: at the first failure, for a second.
fn old() -> Breaker {
    touchy(1)
}

fn other() -> Rules {
    Rules { half_open_probes: 2, open_max: ms(8_000), ..rules(Trip::Consecutive(3)) }
}

#[test]
fn open_stays_open_to_the_same_end() {
    let before = old();
    fail(&before, at(100));
    let new = Breaker::taking_over(&other(), &before, at(600));
    assert_eq!(new.state(), State::Open);
    assert_eq!(new.admits_at(), Some(at(1_100)));
    assert!(new.admit(at(1_099)).is_none());
    assert_eq!(new.admit(at(1_100)).unwrap().change, HALF_OPENED);
}

#[test]
fn not_for_longer_than_the_new_rules_allow() {
    let before = old();
    fail(&before, at(100));
    let brief = Rules { open_min: ms(50), open_max: ms(50), ..other() };
    let new = Breaker::taking_over(&brief, &before, at(600));
    assert_eq!(new.admits_at(), Some(at(650)));
}

#[test]
fn half_open_is_tested_anew_with_all_of_its_places() {
    let before = old();
    fail(&before, at(0));
    let lost = permit(&before, at(1_000));
    let new = Breaker::taking_over(&other(), &before, at(1_010));
    assert_eq!(lost.settle(Verdict::Success, at(1_020), 0), CLOSED, "that is the old one's");
    let tests = [permit(&new, at(1_030)), permit(&new, at(1_030))];
    assert!(new.admit(at(1_030)).is_none());
    let changes = tests.map(|test| test.settle(Verdict::Success, at(1_040), 0));
    assert_eq!(changes, [None, CLOSED]);
}

#[test]
fn failures_in_a_row_go_on() {
    let before = Breaker::new(&rules(Trip::Consecutive(5)));
    for _ in 0..2 {
        fail(&before, at(10));
    }
    let new = Breaker::taking_over(&other(), &before, at(20));
    assert_eq!(new.state(), State::Closed);
    assert_eq!(fail(&new, at(30)), Some(opened(State::Closed, ms(1_000))));
}

#[test]
fn trips_in_a_row_go_on() {
    let doubling =
        Rules { open_min: ms(1_000), open_max: ms(60_000), ..rules(Trip::Consecutive(1)) };
    let before = Breaker::new(&Rules { half_open_probes: 1, ..doubling });
    // A draw of 0 takes a fifth off, but never below the least.
    fail(&before, at(0));
    fail(&before, at(2_000));
    let new = Breaker::taking_over(&doubling, &before, at(2_100));
    let later = new.admits_at().unwrap();
    assert_eq!(fail(&new, later), Some(opened(State::HalfOpen, ms(3_200))));
}

#[test]
fn results_counted_by_other_rules_do_not_count() {
    let ratio = |above| rules(Trip::Ratio { above, min_observations: 2 });
    let before = Breaker::new(&ratio(0.9));
    succeed(&before, at(0));
    fail(&before, at(1));
    let new = Breaker::taking_over(&ratio(0.1), &before, at(2));
    assert_eq!(fail(&new, at(3)), None, "it is the first that it sees");
    assert_eq!(fail(&new, at(4)), Some(opened(State::Closed, ms(1_000))));
}
