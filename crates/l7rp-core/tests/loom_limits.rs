//! Rate limits and retry budgets in every order in which two or three threads can take turns:
//! `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p l7rp-core --release \
//! --test loom_limits`

#![cfg(loom)]

use l7rp_core::limit::{Bucket, Buckets, Decision, Rate, RetryBudget};
use l7rp_core::names::Nanos;
use loom::sync::Arc;
use loom::thread;

const NOW: Nanos = Nanos(1_000_000_000);

/// Runs `work` in a thread for each of `inputs`; what they return.
fn together<I, O>(
    inputs: impl IntoIterator<Item = I>,
    work: impl Fn(I) -> O + Clone + 'static,
) -> Vec<O>
where
    I: 'static,
    O: 'static,
{
    let mut inputs = inputs.into_iter();
    // The main thread is one of them, because loom is slow with each more.
    let own = inputs.next();
    let others: Vec<_> = inputs
        .map(|input| {
            let work = work.clone();
            thread::spawn(move || work(input))
        })
        .collect();
    let mut outputs: Vec<O> = own.map(&work).into_iter().collect();
    outputs.extend(others.into_iter().map(|thread| thread.join().unwrap()));
    outputs
}

fn passes(decision: Decision) -> bool {
    matches!(decision, Decision::Allowed { .. })
}

/// Requests of `key` that pass when nobody else is there.
fn left(buckets: &Buckets, key: u128, rate: &Rate) -> usize {
    (0..20).take_while(|_| passes(buckets.try_take(key, rate, NOW))).count()
}

#[test]
fn a_bucket_gives_what_it_has() {
    loom::model(|| {
        let bucket = Arc::new(Bucket::new());
        let rate = Rate::new(1.0, 2);
        let shared = Arc::clone(&bucket);
        let passed = together(0..3, move |_| passes(shared.try_take(&rate, NOW)));
        assert_eq!(passed.into_iter().filter(|&passed| passed).count(), 2);
    });
}

#[test]
fn a_budget_gives_what_it_has() {
    loom::model(|| {
        let budget = Arc::new(RetryBudget::new(0.5, 1));
        budget.deposit();
        let shared = Arc::clone(&budget);
        let got = together(0..3, move |thread| {
            if thread == 0 {
                shared.deposit();
                return false;
            }
            shared.withdraw(NOW)
        });
        // One token by time, and one that is earned before, after or between the two.
        let got = got.into_iter().filter(|&got| got).count();
        assert!((1..=2).contains(&got));
        assert_eq!(budget.withdraw(NOW), got == 1);
        assert!(!budget.withdraw(NOW));
    });
}

/// Two threads move the same client in at once, with room enough.
#[test]
fn a_newcomer_gets_one_bucket() {
    loom::model(|| {
        let buckets = Arc::new(Buckets::new(1, [1, 2]));
        let rate = Rate::new(1.0, 3);
        let shared = Arc::clone(&buckets);
        let passed = together(0..2, move |_| passes(shared.try_take(7, &rate, NOW)));
        assert_eq!(passed, [true, true]);
        assert!((1..=2).contains(&left(&buckets, 7, &rate)), "one may be forgotten");
    });
}

/// Two clients move into the same set at once; each of them has one way.
#[test]
fn two_newcomers_do_not_share() {
    loom::model(|| {
        let buckets = Arc::new(Buckets::new(1, [1, 2]));
        let rate = Rate::new(1.0, 3);
        let shared = Arc::clone(&buckets);
        let passed = together([7, 8], move |key| passes(shared.try_take(key, &rate, NOW)));
        assert_eq!(passed, [true, true]);
        let left = [7, 8].map(|key| left(&buckets, key, &rate));
        assert!(
            left.iter().all(|left| (1..=2).contains(left)),
            "{left:?}: one may be charged twice"
        );
    });
}

/// A client takes tokens while another displaces it from a full set.
#[test]
fn who_is_evicted_gets_at_most_one_more() {
    loom::model(|| {
        let buckets = Arc::new(Buckets::new(1, [1, 2]));
        let rate = Rate::new(1.0, 3);
        // Of the two ways, 7 owes one token and 8 two.
        for key in [7, 8, 8] {
            assert!(passes(buckets.try_take(key, &rate, NOW)));
        }
        let shared = Arc::clone(&buckets);
        let passed = together([7, 9], move |key| passes(shared.try_take(key, &rate, NOW)));
        let more = left(&buckets, 7, &rate);
        assert!(1 + usize::from(passed[0]) + more <= 3 + 1, "{passed:?} {more}");
    });
}
