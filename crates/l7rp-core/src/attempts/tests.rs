use proptest::prelude::*;

use super::*;

const MS: u64 = 1_000_000;
const NOW: Nanos = Nanos(1_000 * MS);
const FREE: Situation =
    Situation { whole: true, replayable: true, told: false, draining: false, tries: 1 };

fn rules() -> Rules {
    Rules {
        max_attempts: 3,
        methods: vec!["GET".into(), "HEAD".into()],
        retry_on: vec![502, 503, 504],
        retry_on_grpc: vec![],
        backoff: Duration::from_millis(20),
        hedge_after: Duration::from_millis(100),
        hedge_after_percentile: 0.0,
        hedgeable: vec!["GET".into()],
    }
}

fn get() -> Request<'static> {
    Request { method: b"GET", idempotent: true, whole: true, grpc: false }
}

fn post() -> Request<'static> {
    Request { method: b"POST", idempotent: false, whole: true, grpc: false }
}

fn status(status: u16) -> Outcome {
    Outcome::Answered { status: status.into(), stay_away: false }
}

#[test]
fn why_there_was_no_other_try() {
    let (rules, once) = (rules(), Rules { max_attempts: 1, ..rules() });
    let calls = Rules { retry_on_grpc: vec![14], ..rules.clone() };
    let rules = Some(&rules);
    let later = Outcome::Answered { status: 503.into(), stay_away: true };
    let call = |grpc| Outcome::Answered { status: Status { http: 200, grpc }, stay_away: false };
    let failed = Outcome::Failed;
    let timeout = failed(Failure::TotalTimeout);
    let told = Situation { told: true, ..FREE };
    let long = Situation { replayable: false, ..FREE };
    let leaving = Situation { draining: true, ..FREE };
    let twice = Situation { tries: 3, ..FREE };
    for (rules, request, outcome, at, stop) in [
        // Nobody asks that of an answer that is good.
        (rules, get(), status(200), FREE, None),
        (rules, get(), status(404), FREE, None),
        (None, get(), status(429), FREE, None),
        (rules, post(), call(Some(0)), FREE, None),
        (rules, post(), call(Some(13)), FREE, None),
        (Some(&calls), post(), call(Some(13)), FREE, None),
        (Some(&calls), post(), call(Some(14)), told, Some(Stop::Told)),
        (None, get(), status(503), FREE, Some(Stop::NoRule)),
        (Some(&once), get(), status(503), FREE, Some(Stop::NoRule)),
        (rules, get(), status(500), FREE, Some(Stop::Outcome)),
        (rules, post(), status(503), FREE, Some(Stop::Method)),
        (rules, get(), later, FREE, Some(Stop::StayAway)),
        (rules, get(), status(503), told, Some(Stop::Told)),
        (rules, get(), status(503), long, Some(Stop::Body)),
        (rules, get(), status(503), leaving, Some(Stop::Draining)),
        (rules, get(), status(503), twice, Some(Stop::Attempts)),
        // What ends everything does so whatever the rules.
        (None, get(), timeout, FREE, Some(Stop::Final)),
        (rules, post(), timeout, FREE, Some(Stop::Final)),
    ] {
        let mut plan = Plan::new(rules, request, Nanos::NEVER);
        assert_eq!(plan.after(outcome, NOW, at, 0), Next::Give, "{outcome:?} {at:?}");
        assert_eq!(plan.stop(), stop, "{outcome:?} {at:?}");
    }
}

#[test]
fn what_was_not_sent_moves_on_whatever_it_is() {
    let rules = rules();
    for (rules, request) in [(None, get()), (None, post()), (Some(&rules), post())] {
        for failure in [Failure::ConnectRefused, Failure::ConnectFailed, Failure::Unresolved] {
            let mut plan = Plan::new(rules, request, Nanos::NEVER);
            for _ in 0..50 {
                let nothing_kept = Situation { replayable: false, ..FREE };
                let next = plan.after(Outcome::Failed(failure), NOW, nothing_kept, 0);
                assert_eq!(next, Next::Elsewhere, "{failure:?} {request:?}");
            }
        }
    }
}

#[test]
fn what_was_turned_away_unprocessed_moves_on_if_it_can_be_sent_again() {
    let refused = Outcome::Failed(Failure::StreamRefused { gone: true });
    let rules = rules();
    for rules in [None, Some(&rules)] {
        let mut plan = Plan::new(rules, post(), Nanos::NEVER);
        assert_eq!(plan.after(refused, NOW, FREE, 0), Next::Elsewhere);
        assert_eq!(plan.after(refused, NOW, FREE, 0), Next::Elsewhere);
        assert_eq!(plan.after(refused, NOW, FREE, 0), Next::Give, "three are enough");
        assert_eq!(plan.stop(), Some(Stop::Patience));
        let mut plan = Plan::new(rules, post(), Nanos::NEVER);
        let long = Situation { replayable: false, ..FREE };
        assert_eq!(plan.after(refused, NOW, long, 0), Next::Elsewhere);
        let gone = Situation { whole: false, ..long };
        assert_eq!(plan.after(refused, NOW, gone, 0), Next::Give);
    }
    // Where the route allows it, the same upstream may be asked again.
    let mut plan = Plan::new(Some(&rules), get(), Nanos::NEVER);
    assert!(matches!(plan.after(refused, NOW, FREE, 0), Next::Retry(_)));
}

#[test]
fn three_connect_timeouts_are_enough() {
    let mut plan = Plan::new(None, get(), Nanos::NEVER);
    let timeout = Outcome::Failed(Failure::ConnectTimeout);
    assert_eq!(plan.after(timeout, NOW, FREE, 0), Next::Elsewhere);
    assert_eq!(plan.after(Outcome::Failed(Failure::ConnectRefused), NOW, FREE, 0), Next::Elsewhere);
    assert_eq!(plan.after(timeout, NOW, FREE, 0), Next::Elsewhere);
    assert_eq!(plan.after(timeout, NOW, FREE, 0), Next::Give);
}

#[test]
fn without_rules_what_was_sent_is_final() {
    for outcome in [status(503), Outcome::Failed(Failure::UpstreamClosed), status(200)] {
        let mut plan = Plan::new(None, get(), Nanos::NEVER);
        assert_eq!(plan.after(outcome, NOW, FREE, 0), Next::Give);
    }
}

#[test]
fn what_is_tried_again() {
    let rules = rules();
    let stay_away = Outcome::Answered { status: 503.into(), stay_away: true };
    let failed = Outcome::Failed;
    let told = Situation { told: true, ..FREE };
    let long = Situation { replayable: false, ..FREE };
    let leaving = Situation { draining: true, ..FREE };
    for (outcome, request, at, again) in [
        (status(503), get(), FREE, true),
        (status(502), get(), FREE, true),
        (status(500), get(), FREE, false), // not listed
        (status(200), get(), FREE, false),
        (status(503), post(), FREE, false), // method not listed
        (stay_away, get(), FREE, false),
        (status(503), get(), told, false),
        (status(503), get(), long, false),
        (status(503), get(), leaving, false),
        (failed(Failure::UpstreamClosed), get(), FREE, true),
        (failed(Failure::UpstreamClosed), post(), FREE, false),
        (failed(Failure::ResponseTimeout), get(), FREE, true),
        (failed(Failure::ResponseHeadTooLarge), get(), FREE, true),
        (failed(Failure::TotalTimeout), get(), FREE, false),
        (failed(Failure::ClientGone), get(), FREE, false),
        (failed(Failure::LocalShortage), get(), FREE, false),
        (failed(Failure::Internal), get(), FREE, false),
    ] {
        let mut plan = Plan::new(Some(&rules), request, Nanos::NEVER);
        let next = plan.after(outcome, NOW, at, 0);
        assert_eq!(matches!(next, Next::Retry(_)), again, "{outcome:?} {request:?} {at:?}");
        assert!(again || next == Next::Give);
    }
}

#[test]
fn calls_are_tried_again_for_their_own_status_whatever_their_method() {
    const UNAVAILABLE: u8 = 14;
    let rules = Rules { retry_on_grpc: vec![UNAVAILABLE], ..rules() };
    let call = Request { grpc: true, ..post() };
    let said = |grpc, stay_away| {
        let status = Status { http: 200, grpc: Some(grpc) };
        Outcome::Answered { status, stay_away }
    };
    for (outcome, at, again) in [
        (said(UNAVAILABLE, false), FREE, true),
        (said(UNAVAILABLE, true), FREE, false),
        (said(UNAVAILABLE, false), Situation { replayable: false, ..FREE }, false),
        (said(0, false), FREE, false),
        (said(4, false), FREE, false),
        // These do not say that nothing was done, and POST is not listed.
        (status(503), FREE, false),
        (Outcome::Failed(Failure::UpstreamClosed), FREE, false),
    ] {
        let mut plan = Plan::new(Some(&rules), call, Nanos::NEVER);
        assert!(plan.may_retry() && plan.may_cost());
        let next = plan.after(outcome, NOW, at, 0);
        assert_eq!(matches!(next, Next::Retry(_)), again, "{outcome:?} {at:?}");
    }
    assert!(!Plan::new(Some(&rules), post(), Nanos::NEVER).may_retry(), "it is no call");
}

#[test]
fn failures_are_tried_again_only_for_the_status_they_stand_for() {
    let only_504 = Rules { retry_on: vec![504], ..rules() };
    let mut plan = Plan::new(Some(&only_504), get(), Nanos::NEVER);
    assert_eq!(plan.after(Outcome::Failed(Failure::UpstreamClosed), NOW, FREE, 0), Next::Give);
    let mut plan = Plan::new(Some(&only_504), get(), Nanos::NEVER);
    let timeout = Outcome::Failed(Failure::ResponseTimeout);
    assert!(matches!(plan.after(timeout, NOW, FREE, 0), Next::Retry(_)));
}

#[test]
fn back_off_doubles_with_jitter_and_attempts_end() {
    let rules = Rules { max_attempts: 4, ..rules() };
    for (draw, waits) in [(0, [10, 20, 40]), (u64::MAX, [20, 40, 80]), (u64::MAX / 2, [15, 30, 60])]
    {
        let mut plan = Plan::new(Some(&rules), get(), Nanos::NEVER);
        for wait in waits {
            let Next::Retry(at) = plan.after(status(503), NOW, FREE, draw) else {
                panic!("a retry");
            };
            let got = at.since(NOW).as_secs_f64() * 1e3;
            assert!((got - f64::from(wait)).abs() < 0.01, "{got} is not {wait} ms");
        }
        assert_eq!(plan.after(status(503), NOW, FREE, draw), Next::Give);
    }
}

#[test]
fn unsent_tries_do_not_use_up_attempts() {
    let rules = rules();
    let mut plan = Plan::new(Some(&rules), get(), Nanos::NEVER);
    for _ in 0..5 {
        let refused = Outcome::Failed(Failure::ConnectRefused);
        assert_eq!(plan.after(refused, NOW, FREE, 0), Next::Elsewhere);
    }
    assert!(matches!(plan.after(status(503), NOW, FREE, 0), Next::Retry(_)));
    assert!(matches!(plan.after(status(503), NOW, FREE, 0), Next::Retry(_)));
    assert_eq!(plan.after(status(503), NOW, FREE, 0), Next::Give);
}

#[test]
fn hedges() {
    let rules = rules();
    let percentile = Some(Duration::from_millis(30));
    let late = NOW.plus(Duration::from_millis(105));
    let in_parts = Request { whole: false, ..get() };
    let only_percentile =
        Rules { hedge_after: Duration::ZERO, hedge_after_percentile: 90.0, ..rules.clone() };
    for (rules, request, deadline, percentile, after) in [
        (&rules, get(), Nanos::NEVER, None, Some(100)),
        (&rules, get(), Nanos::NEVER, percentile, Some(30)),
        (&rules, get(), late, None, None), // no time would be left
        (&rules, get(), late, percentile, Some(30)),
        (&rules, post(), Nanos::NEVER, None, None),
        (&rules, in_parts, Nanos::NEVER, None, None),
        (&only_percentile, get(), Nanos::NEVER, None, None), // not known yet
        (&only_percentile, get(), Nanos::NEVER, percentile, Some(30)),
    ] {
        let plan = Plan::new(Some(rules), request, deadline);
        let at = plan.hedge_at(NOW, percentile);
        let want = after.map_or(Nanos::NEVER, |ms| NOW.plus(Duration::from_millis(ms)));
        assert_eq!(at, want, "{request:?} {percentile:?}");
    }
    let mut plan = Plan::new(Some(&rules), get(), Nanos::NEVER);
    let _ = plan.after(status(503), NOW, FREE, 0);
    assert_eq!(plan.hedge_at(NOW, None), Nanos::NEVER, "only the first try gets company");
    assert_eq!(Plan::new(None, get(), Nanos::NEVER).hedge_at(NOW, percentile), Nanos::NEVER);
}

#[test]
fn a_race_is_two_tries() {
    let rules = rules();
    let mut plan = Plan::new(Some(&rules), get(), Nanos::NEVER);
    let raced = Situation { tries: 2, ..FREE };
    assert!(matches!(plan.after(status(503), NOW, raced, 0), Next::Retry(_)));
    assert_eq!(plan.after(status(503), NOW, FREE, 0), Next::Give);
}

#[test]
fn what_may_cost_pays_in() {
    let rules = Rules { max_attempts: 1, methods: vec!["PUT".into()], ..rules() };
    for (request, may) in [(get(), true), (post(), false)] {
        assert_eq!(Plan::new(Some(&rules), request, Nanos::NEVER).may_cost(), may);
    }
    let only_retries = Rules {
        max_attempts: 2,
        hedge_after: Duration::ZERO,
        methods: vec!["POST".into()],
        ..rules
    };
    assert!(Plan::new(Some(&only_retries), post(), Nanos::NEVER).may_cost());
    assert!(!Plan::new(Some(&only_retries), get(), Nanos::NEVER).may_cost());
    assert!(!Plan::new(None, get(), Nanos::NEVER).may_cost());
}

#[test]
fn only_a_good_response_wins_a_race_at_once() {
    let rules = Rules { retry_on: vec![404, 503], ..rules() };
    for (status, wins) in [(200, true), (301, true), (404, false), (500, false), (503, false)] {
        assert_eq!(rules.wins(status), wins, "{status}");
    }
}

#[test]
fn only_a_stale_connection_is_no_failure() {
    let plan = Plan::new(None, get(), Nanos::NEVER);
    assert!(plan.repeats_stale(Failure::UpstreamClosed, true));
    assert!(!plan.repeats_stale(Failure::UpstreamClosed, false));
    assert!(!plan.repeats_stale(Failure::ResponseTimeout, true));
    assert!(!Plan::new(None, post(), Nanos::NEVER).repeats_stale(Failure::UpstreamClosed, true));
}

proptest! {
    #[test]
    fn never_past_the_deadline_nor_over_the_attempts(
        outcomes in proptest::collection::vec(0..6u8, 1..40),
        max_attempts in 1..6u32,
        total_ms in 0..400u64,
        seed: u64,
    ) {
        let rules = Rules { max_attempts, ..rules() };
        let deadline = NOW.plus(Duration::from_millis(total_ms));
        let mut plan = Plan::new(Some(&rules), get(), deadline);
        let (mut now, mut sent, mut draw) = (NOW, 0, seed);
        for kind in outcomes {
            draw = draw.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            now = now.plus(Duration::from_millis(draw >> 59));
            let outcome = match kind {
                0 => status(200),
                1 => status(503),
                2 => Outcome::Failed(Failure::UpstreamClosed),
                3 => Outcome::Failed(Failure::ConnectRefused),
                4 => Outcome::Failed(Failure::ConnectTimeout),
                _ => Outcome::Answered { status: 503.into(), stay_away: true },
            };
            sent += u32::from(matches!(kind, 0 | 1 | 2 | 5));
            match plan.after(outcome, now, FREE, draw) {
                Next::Give => break,
                Next::Elsewhere => prop_assert!(matches!(kind, 3 | 4) && now < deadline),
                Next::Retry(at) => {
                    prop_assert!(matches!(kind, 1 | 2) && sent < max_attempts);
                    prop_assert!(at >= now && at.plus(FLOOR) <= deadline);
                    now = at;
                }
            }
        }
        prop_assert!(sent <= max_attempts.max(1));
    }
}
