//! Who is served: so many connections at once. Once all places are taken, whoever has kept one
//! waiting longest gives it up to the next: nobody is to keep a probe or a scrape out by holding
//! connections on which nothing comes.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use crate::sync::lock;

/// Connections served at once.
const MOST: usize = 64;

/// All places.
#[derive(Clone, Debug)]
pub(super) struct Places {
    free: Arc<Semaphore>,
    waiting: Arc<Mutex<Waiting>>,
}

/// Those who wait for their peer, in the order in which they began to.
#[derive(Debug, Default)]
struct Waiting {
    next: u64,
    all: BTreeMap<u64, Arc<Notify>>,
}

impl Default for Places {
    fn default() -> Self {
        Self { free: Arc::new(Semaphore::new(MOST)), waiting: Arc::default() }
    }
}

impl Places {
    pub(super) fn all_are_free(&self) -> bool {
        self.free.available_permits() == MOST
    }

    /// A place, at the cost of somebody who waits if there is no other. `None`: there are no more.
    pub(super) async fn take(&self) -> Option<Place> {
        if self.free.available_permits() == 0
            && let Some((_, longest)) = lock(&self.waiting).all.pop_first()
        {
            longest.notify_one();
        }
        let permit = self.free.clone().acquire_owned().await.ok()?;
        Some(Place { waiting: self.waiting.clone(), needed: Arc::default(), _permit: permit })
    }
}

/// A place, which is free again when dropped.
#[derive(Debug)]
pub(super) struct Place {
    waiting: Arc<Mutex<Waiting>>,
    /// Told when it is to be given up.
    needed: Arc<Notify>,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    /// What `act` comes to; `None`: the place is needed, and is to be given up.
    pub(super) async fn unless_needed<T>(&self, act: impl Future<Output = T>) -> Option<T> {
        let _wait = Wait::begin(self);
        tokio::select! {
            biased;
            done = act => Some(done),
            () = self.needed.notified() => None,
        }
    }
}

/// A place among those that wait.
struct Wait<'a>(&'a Place, u64);

impl<'a> Wait<'a> {
    fn begin(place: &'a Place) -> Self {
        let mut waiting = lock(&place.waiting);
        let number = waiting.next;
        waiting.next += 1;
        waiting.all.insert(number, place.needed.clone());
        Self(place, number)
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        lock(&self.0.waiting).all.remove(&self.1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::pending;

    #[tokio::test]
    async fn who_waits_longest_makes_room_and_who_is_served_does_not() {
        let places = Places::default();
        let (served, first) = (places.take().await.unwrap(), places.take().await.unwrap());
        let mut others = Vec::new();
        for _ in 2..MOST {
            others.push(places.take().await.unwrap());
        }
        let second = others.pop().unwrap();
        let longest = tokio::spawn(async move { first.unless_needed(pending::<()>()).await });
        tokio::task::yield_now().await;
        let next = tokio::spawn(async move { second.unless_needed(pending::<()>()).await });
        tokio::task::yield_now().await;
        let third = places.take().await.unwrap();
        assert_eq!(longest.await.unwrap(), None);
        let fourth = places.take().await.unwrap();
        assert_eq!(next.await.unwrap(), None);
        // Nobody waits: the next one does, until somebody has been served.
        let fifth = tokio::spawn({
            let places = places.clone();
            async move { places.take().await.is_some() }
        });
        tokio::task::yield_now().await;
        assert!(!fifth.is_finished() && !places.all_are_free());
        assert_eq!(served.unless_needed(async { 1 }).await, Some(1));
        drop(served);
        assert!(fifth.await.unwrap());
        drop((third, fourth, others));
        assert!(places.all_are_free() && lock(&places.waiting).all.is_empty());
    }
}
