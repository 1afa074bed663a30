use crate::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Which upstreams of a pool may be used: one bit each, so that a pool of a thousand is
/// counted in sixteen words.
///
/// All accesses are relaxed: a bit carries nothing but itself, and a pick that sees it a moment
/// late is the same as a pick made a moment earlier.
#[derive(Debug)]
pub struct Eligible {
    words: Box<[AtomicU64]>,
    len: usize,
}

impl Eligible {
    /// `len` upstreams, none of them eligible.
    #[must_use]
    pub fn new(len: usize) -> Self {
        Self { words: (0..len.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(), len }
    }

    /// Lets `ix` in or keeps it out; says whether that is a change. An `ix` out of range is none.
    pub fn set(&self, ix: usize, eligible: bool) -> bool {
        if ix >= self.len {
            return false;
        }
        let Some(word) = self.words.get(ix / 64) else { return false };
        let bit = 1 << (ix % 64);
        let before =
            if eligible { word.fetch_or(bit, Relaxed) } else { word.fetch_and(!bit, Relaxed) };
        (before & bit != 0) != eligible
    }

    /// Whether `ix` is eligible.
    #[must_use]
    pub fn get(&self, ix: usize) -> bool {
        self.words.get(ix / 64).is_some_and(|word| word.load(Relaxed) >> (ix % 64) & 1 == 1)
    }

    /// How many are eligible.
    #[must_use]
    pub fn count(&self) -> usize {
        self.words.iter().map(|word| word.load(Relaxed).count_ones() as usize).sum()
    }

    /// The `k`-th eligible one, from 0. `None` if there are not that many, which can happen
    /// just after [`Eligible::count`] said otherwise.
    #[must_use]
    pub fn nth(&self, mut k: usize) -> Option<usize> {
        for (i, word) in self.words.iter().enumerate() {
            let word = word.load(Relaxed);
            let ones = word.count_ones() as usize;
            if k < ones {
                return Some(i * 64 + nth_bit(word, k as u32) as usize);
            }
            k -= ones;
        }
        None
    }

    /// The eligible ones in order.
    pub fn iter(&self) -> impl Iterator<Item = usize> {
        self.words.iter().enumerate().flat_map(|(i, word)| {
            let mut rest = word.load(Relaxed);
            std::iter::from_fn(move || {
                let bit = rest.trailing_zeros() as usize;
                rest &= rest.wrapping_sub(1);
                (bit < 64).then_some(i * 64 + bit)
            })
        })
    }

    /// How many upstreams there are, eligible or not.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no upstreams at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The position of the `k`-th set bit, by halving; `word` has more than `k` set bits.
fn nth_bit(mut word: u64, mut k: u32) -> u32 {
    let mut at = 0;
    for half in [32, 16, 8, 4, 2, 1] {
        let low = (word & ((1 << half) - 1)).count_ones();
        if k >= low {
            k -= low;
            word >>= half;
            at += half;
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_changed() {
        let set = Eligible::new(70);
        assert_eq!((set.len(), set.count()), (70, 0));
        assert!(!set.set(3, false));
        assert!(set.set(3, true));
        assert!(!set.set(3, true));
        assert!(set.set(69, true));
        assert!(!set.set(70, true), "out of range");
        assert!(!set.set(1_000, true), "out of range");
        assert!(set.get(3) && set.get(69) && !set.get(4) && !set.get(70) && !set.get(1_000));
        assert_eq!(set.iter().collect::<Vec<_>>(), [3, 69]);
        assert!(set.set(3, false));
        assert_eq!(set.iter().collect::<Vec<_>>(), [69]);
        assert!(Eligible::new(0).is_empty());
    }

    #[test]
    fn counts_and_finds_like_a_list() {
        let mut rng = fastrand::Rng::with_seed(1);
        for len in [1, 2, 63, 64, 65, 128, 1_000] {
            for density in [1, 2, 10] {
                let set = Eligible::new(len);
                let mut list = Vec::new();
                for ix in 0..len {
                    if rng.usize(..density) == 0 {
                        set.set(ix, true);
                        list.push(ix);
                    }
                }
                assert_eq!(set.iter().collect::<Vec<_>>(), list);
                assert_eq!(set.count(), list.len());
                for k in 0..=len {
                    assert_eq!(set.nth(k), list.get(k).copied(), "{k} of {list:?}");
                }
            }
        }
    }
}
