//! Whether this tool was the limit: what its threads did with their time.

use std::time::Duration;

/// Time of a thread on a core, and in wait of one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Busy {
    pub(super) running: f64,
    pub(super) waiting: f64,
}

impl Busy {
    /// Seconds of the calling thread so far; none where the system does not tell.
    pub(super) fn now() -> Self {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
        Self::parse(&text).unwrap_or_default()
    }

    fn parse(text: &str) -> Option<Self> {
        let mut nanoseconds = text.split_ascii_whitespace().map(|word| word.parse::<f64>().ok());
        let mut seconds = || Some(nanoseconds.next()?? / 1e9);
        Some(Self { running: seconds()?, waiting: seconds()? })
    }

    /// Shares of `time`, which has passed since `before`.
    pub(super) fn since(self, before: Self, time: Duration) -> Self {
        let time = time.as_secs_f64().max(1e-9);
        let share = |now: f64, before: f64| ((now - before) / time).clamp(0.0, 1.0);
        Self {
            running: share(self.running, before.running),
            waiting: share(self.waiting, before.waiting),
        }
    }

    /// Both together.
    pub(super) fn sum(self) -> f64 {
        self.running + self.waiting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_the_time() {
        let before = Busy::parse("1000000000 500000000 7\n").unwrap();
        let after = Busy::parse("3000000000 1500000000 9\n").unwrap();
        let busy = after.since(before, Duration::from_secs(4));
        assert_eq!(busy, Busy { running: 0.5, waiting: 0.25 });
        // Clocks that do not agree make no more than all of it.
        let all = Busy { running: 1.0, waiting: 1.0 };
        assert_eq!(after.since(before, Duration::from_secs(1)), all);
        assert_eq!((Busy::parse(""), Busy::parse("1 x 2")), (None, None));
    }
}
