//! A gate that holds scripts until a test opens it.

use std::sync::{Arc, Condvar, Mutex};

use crate::{SOON, lock};

/// A gate; clones are the same one.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    /// Lets everybody through from now on.
    pub fn open(&self) {
        *lock(&self.0.0) = true;
        self.0.1.notify_all();
    }

    /// Waits until it is open; a test that forgot to open it does not hang for ever.
    pub fn pass(&self) {
        let open = lock(&self.0.0);
        drop(self.0.1.wait_timeout_while(open, SOON * 2, |open| !*open));
    }
}
