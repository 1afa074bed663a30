//! Rate limits and retry budgets in every order in which two or three threads can take turns:
//! `RUSTFLAGS="--cfg loom" CARGO_TARGET_DIR=target/loom cargo test -p l7rp-core --release \
//! --test loom_limits`

#![cfg(loom)]
#![expect(clippy::unwrap_used, reason = "a thread that has panicked fails the test")]

use std::collections::BTreeSet;

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

/// One thread for each of `keys` asks for a token in a set of two ways, where `before` have one
/// token for each time that they are named. Whatever happens, each gets at most its burst, and one
/// more for each other thread; and if there is room, at most one less.
fn crowd(before: &'static [u128], keys: &'static [u128], preemptions: Option<usize>) {
    const BURST: usize = 5;
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.check(move || {
        let buckets = Arc::new(Buckets::new(1, [1, 2]));
        let rate = Rate::new(1.0, BURST as u32);
        for &key in before {
            assert!(passes(buckets.try_take(key, &rate, NOW)));
        }
        let shared = Arc::clone(&buckets);
        let passed =
            together(keys.iter().copied(), move |key| passes(shared.try_take(key, &rate, NOW)));
        let clients: BTreeSet<u128> = before.iter().chain(keys).copied().collect();
        for client in clients {
            let earlier = before.iter().filter(|&&key| key == client).count();
            let now = keys.iter().zip(&passed).filter(|&(&key, &passed)| passed && key == client);
            let all = earlier + now.count() + left(&buckets, client, &rate);
            assert!(all < BURST + keys.len(), "{client} gets {all}");
            // With two threads there is always a way that is free.
            if before.is_empty() && keys.len() == 2 {
                assert!(all + keys.len() > BURST, "{client} gets {all}");
            }
        }
    });
}

#[test]
fn newcomers_get_their_burst() {
    crowd(&[], &[7, 7], None);
    crowd(&[], &[7, 8], None);
    crowd(&[8], &[7, 7], None);
    crowd(&[], &[7, 7, 7], Some(2));
    crowd(&[], &[7, 7, 8], Some(2));
}

#[test]
fn who_is_evicted_gets_no_more() {
    crowd(&[7, 8], &[7, 9], None);
    crowd(&[7, 8, 8], &[7, 9], None);
    crowd(&[7, 8, 8], &[9, 9], None);
    crowd(&[7, 8, 8], &[7, 7, 9], Some(2));
    crowd(&[7, 8], &[7, 9, 9], Some(2));
}
