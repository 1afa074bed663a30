use crate::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// How many requests may be in flight at one place, and how many are.
///
/// Never a queue: who does not get a slot is told so at once.
#[derive(Debug)]
pub struct Slots {
    used: AtomicU32,
    /// 0: no limit.
    max: AtomicU32,
}

impl Slots {
    /// `max` slots; 0 is no limit, but what is in flight is still counted.
    #[must_use]
    pub fn new(max: u32) -> Self {
        Self { used: AtomicU32::new(0), max: AtomicU32::new(max) }
    }

    /// Takes a slot unless all are taken. Exact: at no time are more than `max` slots taken,
    /// and nobody is refused while one is free.
    ///
    /// Each `true` is owed exactly one [`Slots::leave`].
    #[must_use]
    pub fn try_enter(&self) -> bool {
        let max = self.max.load(Relaxed);
        if max == 0 {
            self.used.fetch_add(1, Relaxed);
            return true;
        }
        // Adding first and taking back on excess would be cheaper under contention, but then
        // those being refused could make others be refused while a slot is free.
        self.used.fetch_update(Relaxed, Relaxed, |used| (used < max).then(|| used + 1)).is_ok()
    }

    /// Gives a slot back.
    pub fn leave(&self) {
        let before = self.used.fetch_sub(1, Relaxed);
        debug_assert!(before > 0, "a slot was given back twice");
    }

    /// Slots taken now.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.used.load(Relaxed)
    }

    /// The limit; 0: none.
    #[must_use]
    pub fn max(&self) -> u32 {
        self.max.load(Relaxed)
    }

    /// Changes the limit and keeps the count, as a reload does. Those above a lower limit stay.
    pub fn set_max(&self, max: u32) {
        self.max.store(max, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn admits_up_to_the_limit_and_again_after_leaving() {
        let slots = Slots::new(2);
        assert!(slots.try_enter());
        assert!(slots.try_enter());
        assert!(!slots.try_enter());
        assert_eq!(slots.used(), 2);
        slots.leave();
        assert!(slots.try_enter());
        slots.set_max(1);
        slots.leave();
        assert!(!slots.try_enter(), "one is still in, and one is the limit now");
        slots.leave();
        assert!(slots.try_enter());
    }

    #[test]
    fn no_limit_still_counts() {
        let slots = Slots::new(0);
        for _ in 0..1_000 {
            assert!(slots.try_enter());
        }
        assert_eq!(slots.used(), 1_000);
        slots.leave();
        assert_eq!(slots.used(), 999);
    }

    #[test]
    fn ten_thousand_at_once_admit_exactly_the_limit() {
        let slots = Slots::new(137);
        let admitted = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..20 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        admitted.fetch_add(usize::from(slots.try_enter()), Relaxed);
                    }
                });
            }
        });
        assert_eq!(admitted.into_inner(), 137);
        assert_eq!(slots.used(), 137);
    }

    #[test]
    fn never_more_than_the_limit_while_others_leave() {
        let slots = Slots::new(3);
        let inside = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..20_000 {
                        if slots.try_enter() {
                            assert!(inside.fetch_add(1, Relaxed) < 3);
                            inside.fetch_sub(1, Relaxed);
                            slots.leave();
                        }
                    }
                });
            }
        });
        assert_eq!(slots.used(), 0);
    }
}
