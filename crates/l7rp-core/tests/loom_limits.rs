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

/// A client, and how many tokens it asks for one after the other.
type Wish = (u128, usize);

/// One thread for each of `wishes`, in a set of two ways where `before` was fulfilled. Each client
/// gets at most its burst. Only where clients displace one another, or more than two threads meet,
/// it may be one more for each other thread. `preemptions`: how often a thread is interrupted at
/// most; without a bound this takes minutes.
fn crowd(before: &'static [Wish], wishes: &'static [Wish], preemptions: usize) {
    const BURST: usize = 5;
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(move || {
        let buckets = Arc::new(Buckets::new(1, [1, 2]));
        let rate = Rate::new(1.0, BURST as u32);
        let shared = Arc::clone(&buckets);
        let ask = move |(key, tokens): Wish| {
            let passed = (0..tokens).filter(|_| passes(shared.try_take(key, &rate, NOW)));
            (key, passed.count())
        };
        let mut got: Vec<Wish> = before.iter().copied().map(&ask).collect();
        got.extend(together(wishes.iter().copied(), ask));
        let clients: BTreeSet<u128> = got.iter().map(|&(key, _)| key).collect();
        let crowded = clients.len() > 2 || wishes.len() > 2;
        for client in clients {
            let mine = got.iter().filter(|&&(key, _)| key == client);
            let all = mine.map(|got| got.1).sum::<usize>() + left(&buckets, client, &rate);
            let more = if crowded { wishes.len() - 1 } else { 0 };
            assert!(all <= BURST + more, "{client} gets {all}");
            // With two threads there is always a way that is free.
            if before.is_empty() && wishes.len() == 2 {
                assert!(all + 1 >= BURST, "{client} gets {all}");
            }
        }
    });
}

#[test]
fn newcomers_get_their_burst() {
    crowd(&[], &[(7, 1), (7, 1)], 5);
    crowd(&[], &[(7, 1), (8, 1)], 5);
    crowd(&[(8, 1)], &[(7, 1), (7, 1)], 5);
    crowd(&[], &[(7, 1), (7, 1), (7, 1)], 3);
    crowd(&[], &[(7, 1), (7, 1), (8, 1)], 3);
}

#[test]
fn what_was_taken_from_another_way_is_not_forgotten() {
    crowd(&[], &[(7, 1), (7, 3)], 4);
    crowd(&[], &[(7, 3), (7, 1)], 4);
    crowd(&[], &[(7, 1), (8, 4)], 4);
    crowd(&[(10, 1), (11, 2)], &[(7, 1), (8, 4)], 4);
}

#[test]
fn who_is_evicted_gets_no_more() {
    crowd(&[(7, 1), (8, 1)], &[(7, 1), (9, 1)], 5);
    crowd(&[(7, 1), (8, 2)], &[(7, 1), (9, 1)], 5);
    crowd(&[(7, 1), (8, 2)], &[(9, 1), (9, 1)], 5);
    crowd(&[(7, 1), (8, 2)], &[(7, 1), (7, 1), (9, 1)], 3);
    crowd(&[(7, 1), (8, 1)], &[(7, 1), (9, 1), (9, 1)], 3);
}
