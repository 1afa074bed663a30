//! Things that were used and may be used again. What a busy moment has needed is kept for the next
//! one; what nobody has needed for a while is given up.

use std::cell::{Cell, RefCell};

/// Things of one kind, the last one used on top: it is the warmest.
#[derive(Debug)]
pub struct Spare<T> {
    items: RefCell<Vec<T>>,
    /// As few as there have been since the last [`Spare::trim`]: so many were not needed.
    least: Cell<usize>,
    most: usize,
}

impl<T> Spare<T> {
    /// Keeps `most` at most.
    pub fn new(most: usize) -> Self {
        Self { items: RefCell::default(), least: Cell::new(0), most }
    }

    /// One of them, if there is one.
    pub fn take(&self) -> Option<T> {
        let mut items = self.items.borrow_mut();
        let item = items.pop();
        self.least.set(self.least.get().min(items.len()));
        item
    }

    /// Keeps one for later.
    pub fn give(&self, item: T) {
        let mut items = self.items.borrow_mut();
        if items.len() < self.most {
            items.push(item);
        }
    }

    /// Gives up half of what was not needed since the last call.
    pub fn trim(&self) {
        let mut items = self.items.borrow_mut();
        let unneeded = self.least.get().div_ceil(2);
        // The oldest lie at the bottom; nobody asks for them before the others.
        items.drain(..unneeded);
        items.shrink_to(self.most / 16);
        self.least.set(items.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_needed_is_given_up_and_what_was_is_kept() {
        let spare = Spare::new(100);
        for n in 0..120 {
            spare.give(n);
        }
        spare.trim();
        let count = || spare.items.borrow().len();
        assert_eq!(count(), 100, "nothing is known of them yet");
        for _ in 0..3 {
            // Forty at once are needed again and again.
            let used: Vec<_> = std::iter::from_fn(|| spare.take()).take(40).collect();
            assert_eq!(used.len(), 40);
            for n in used {
                spare.give(n);
            }
            spare.trim();
        }
        assert_eq!(count(), 47, "half of the others is left out each time");
        for _ in 0..10 {
            spare.trim();
        }
        assert_eq!(count(), 0);
        assert_eq!(spare.take(), None::<i32>);
    }
}
