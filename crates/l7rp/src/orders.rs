//! What the admin endpoints ask of the main thread: it alone puts another plan in force. Orders
//! wait in a short queue, and each is answered once it is done.

use serde::Serialize;
use tokio::sync::{mpsc, oneshot};

use crate::observe::event::AllChanges;

/// Orders that wait at most.
const QUEUE: usize = 4;

/// What is to be done, for whom, and where to answer. An answer that never comes, because the
/// sender is dropped, means that the process is on its way out.
#[derive(Debug)]
pub enum Order {
    /// Read the configuration again and put it in force.
    Reload {
        /// Who asked.
        by: String,
        /// What it has come to.
        reply: oneshot::Sender<Outcome>,
    },
    /// Put the plan in force with another weight of one upstream.
    Weight {
        /// Which, and what.
        weight: Weight,
        /// Who asked.
        by: String,
        /// What it has come to.
        reply: oneshot::Sender<Result<Weighed, String>>,
    },
}

/// Another weight for an upstream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Weight {
    /// The pool's name.
    pub pool: String,
    /// The upstream's URL.
    pub upstream: String,
    /// 1 to 65535.
    pub weight: u32,
}

/// An upstream has the weight that was wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weighed {
    /// The weight that it had.
    pub from: u32,
    /// The generation that is in force now.
    pub generation: u64,
}

/// What a reload has come to.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
#[expect(missing_docs, reason = "fields are the keys of the answer")]
pub enum Outcome {
    /// Another plan is in force.
    Ok { generation: u64, took_ms: f64, warnings: Vec<String>, changes: Box<AllChanges> },
    /// All is as it was.
    Rejected { generation: u64, took_ms: f64, errors: Vec<String> },
}

/// The way to the main thread. By default nobody listens at its end.
#[derive(Debug, Default)]
pub struct Desk(Option<mpsc::Sender<Order>>);

/// Why an order was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// Nobody takes orders here: it is no ordinary process, or it is on its way out.
    Closed,
    /// Too many wait already.
    Busy,
}

impl Desk {
    /// One, and where its orders come out: those that come too early wait there.
    pub fn open() -> (Self, mpsc::Receiver<Order>) {
        let (sender, orders) = mpsc::channel(QUEUE);
        (Self(Some(sender)), orders)
    }

    /// Leaves an order.
    ///
    /// # Errors
    /// It was not taken.
    pub fn order(&self, order: Order) -> Result<(), NotTaken> {
        let sender = self.0.as_ref().ok_or(NotTaken::Closed)?;
        sender.try_send(order).map_err(|e| match e {
            mpsc::error::TrySendError::Full(_) => NotTaken::Busy,
            mpsc::error::TrySendError::Closed(_) => NotTaken::Closed,
        })
    }
}
