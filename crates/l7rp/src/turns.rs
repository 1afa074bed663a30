//! Handshakes take turns. What a handshake computes costs a worker as much as some dozen requests,
//! and anybody can begin thousands of them at once: between two steps of handshakes, everything
//! else that is ready is served.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use tokio::sync::Semaphore;

/// The turns of one worker: one step each time that it looks what its sockets have to say.
#[derive(Debug)]
pub struct Turns(Arc<Semaphore>);

impl Default for Turns {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(1)))
    }
}

impl Turns {
    /// Does `work`, each step of it in its turn: first come, first served. While it waits for a
    /// peer it holds up nobody. Must run inside a `LocalSet`.
    pub async fn take<T>(&self, work: impl Future<Output = T>) -> T {
        let mut work = pin!(work);
        loop {
            let turn = self.0.clone().acquire_owned().await;
            let step = poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await;
            // Whoever yields goes on when the sockets have been looked at.
            tokio::task::spawn_local(async move {
                tokio::task::yield_now().await;
                drop(turn);
            });
            if let Poll::Ready(done) = step {
                return done;
            }
            woken().await;
        }
    }
}

/// Ready the next time that the task is woken.
async fn woken() {
    let mut asked = false;
    poll_fn(|_| if std::mem::replace(&mut asked, true) { Poll::Ready(()) } else { Poll::Pending })
        .await;
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use tokio::task::{LocalSet, spawn_local, yield_now};

    use super::*;

    #[test]
    fn between_two_steps_everything_else_has_its_turn() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let (turns, log) = (Rc::new(Turns::default()), Rc::new(RefCell::new(Vec::new())));
            let over = Rc::new(Cell::new(false));
            for n in 0..5 {
                let (turns, log) = (turns.clone(), log.clone());
                spawn_local(async move {
                    turns.take(async { log.borrow_mut().push(n) }).await;
                });
            }
            let (other, is_over) = (log.clone(), over.clone());
            spawn_local(async move {
                while !is_over.get() {
                    other.borrow_mut().push(99);
                    yield_now().await;
                }
            });
            while log.borrow().iter().filter(|n| **n != 99).count() < 5 {
                yield_now().await;
            }
            over.set(true);
            let log = log.borrow();
            let steps: Vec<_> = log.iter().filter(|n| **n != 99).collect();
            assert_eq!(steps, [&0, &1, &2, &3, &4], "first come, first served");
            let together = log.windows(2).any(|two| two[0] != 99 && two[1] != 99);
            assert!(!together, "{log:?}");
        });
    }

    #[test]
    fn who_waits_for_a_peer_holds_up_nobody() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        LocalSet::new().block_on(&runtime, async {
            let turns = Rc::new(Turns::default());
            let (say, heard) = tokio::sync::oneshot::channel();
            let waiting = turns.clone();
            let waiting = spawn_local(async move { waiting.take(heard).await });
            yield_now().await;
            assert_eq!(turns.take(async { 7 }).await, 7);
            say.send(8).unwrap();
            assert_eq!(waiting.await.unwrap(), Ok(8));
        });
    }
}
