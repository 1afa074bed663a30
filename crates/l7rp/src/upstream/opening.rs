//! Connections that are being opened for whoever wants a request on them: many requests at once
//! should not open as many connections that then carry one each.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

use foldhash::fast::FixedState;
use l7rp_core::failure::Failure;
use tokio::sync::Notify;

/// One worker's, by the id of the upstream.
#[derive(Clone, Debug, Default)]
pub struct Openings(Rc<RefCell<HashMap<usize, Rc<Opening>, FixedState>>>);

/// One of them.
#[derive(Debug, Default)]
pub struct Opening {
    failed: Cell<Option<Failure>>,
    over: Notify,
}

impl Opening {
    /// Waits until it is over.
    ///
    /// # Errors
    /// Why there is no connection. Where there is none for another reason, somebody should try
    /// again.
    pub async fn over(&self) -> Result<(), Failure> {
        self.over.notified().await;
        self.failed.get().map_or(Ok(()), Err)
    }
}

impl Openings {
    /// The turn to open a connection to the upstream with this `id`.
    ///
    /// # Errors
    /// Somebody else is about it.
    pub fn turn(&self, id: usize) -> Result<Turn, Rc<Opening>> {
        let mut all = self.0.borrow_mut();
        if let Some(theirs) = all.get(&id) {
            return Err(theirs.clone());
        }
        let opening = Rc::<Opening>::default();
        all.insert(id, opening.clone());
        Ok(Turn { all: self.clone(), id, opening })
    }
}

/// The turn to open a connection. Dropping it ends it, and wakes all that wait.
#[derive(Debug)]
pub struct Turn {
    all: Openings,
    id: usize,
    opening: Rc<Opening>,
}

impl Turn {
    /// There will be no connection.
    pub fn failed(self, why: Failure) {
        self.opening.failed.set(Some(why));
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.all.0.borrow_mut().remove(&self.id);
        self.opening.over.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn all_wait_for_one_and_learn_what_came_of_it() {
        let all = Openings::default();
        let turn = all.turn(1).unwrap();
        assert!(all.turn(2).is_ok(), "another upstream");
        let (first, second) = (all.turn(1).unwrap_err(), all.turn(1).unwrap_err());
        let (first, second, ()) = tokio::join!(first.over(), second.over(), async {
            turn.failed(Failure::ConnectRefused);
        });
        assert_eq!((first, second), (Err(Failure::ConnectRefused), Err(Failure::ConnectRefused)));
        let turn = all.turn(1).unwrap();
        let waiting = all.turn(1).unwrap_err();
        let (over, ()) = tokio::join!(waiting.over(), async { drop(turn) });
        assert_eq!(over, Ok(()));
        assert!(all.turn(1).is_ok());
    }
}
