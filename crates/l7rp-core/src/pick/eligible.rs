use crate::sync::atomic::{AtomicI64, AtomicU64, Ordering::Relaxed};

/// Which upstreams of a pool may be used: one bit each. While all may, as they mostly do, none of
/// the words is looked at.
///
/// All accesses are relaxed: a bit carries nothing but itself, and a pick that sees it a moment
/// late is the same as a pick made a moment earlier.
#[derive(Debug)]
pub struct Eligible {
    words: Box<[AtomicU64]>,
    /// Bits that are set; a moment behind them, and so perhaps below 0 for as long.
    count: AtomicI64,
    len: usize,
}

impl Eligible {
    /// `len` upstreams, none of them eligible.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let words = (0..len.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        Self { words, count: AtomicI64::new(0), len }
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
        let is_change = (before & bit != 0) != eligible;
        if is_change {
            self.count.fetch_add(if eligible { 1 } else { -1 }, Relaxed);
        }
        is_change
    }

    /// Whether `ix` is eligible.
    #[must_use]
    pub fn get(&self, ix: usize) -> bool {
        self.words.get(ix / 64).is_some_and(|word| word.load(Relaxed) >> (ix % 64) & 1 == 1)
    }

    /// How many are eligible.
    #[must_use]
    pub fn count(&self) -> usize {
        usize::try_from(self.count.load(Relaxed)).unwrap_or(0)
    }

    /// The `k`-th eligible one, from 0. `None` if there are not that many, which can happen
    /// just after [`Eligible::count`] said otherwise.
    #[must_use]
    pub fn nth(&self, mut k: usize) -> Option<usize> {
        if k < self.len && self.count() == self.len {
            return Some(k);
        }
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
        self.words
            .iter()
            .enumerate()
            .flat_map(|(i, word)| ones(word.load(Relaxed)).map(move |bit| i * 64 + bit))
    }

    /// Those who are not eligible, in order.
    pub fn others(&self) -> impl Iterator<Item = usize> {
        let words = if self.count() == self.len { &[][..] } else { &self.words };
        words.iter().enumerate().flat_map(|(i, word)| {
            ones(!word.load(Relaxed)).map(move |bit| i * 64 + bit).filter(|&ix| ix < self.len)
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

/// The positions of the set bits of `word`, in order.
fn ones(mut word: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = word.trailing_zeros() as usize;
        word &= word.wrapping_sub(1);
        (bit < 64).then_some(bit)
    })
}

/// The position of the `k`-th set bit; `word` has more than `k` set bits.
///
/// Broadword selection, after Vigna: first which octet, then which bit of it, both by comparing
/// running sums with `k` in all eight octets of a word at once. Halving needs six counts of
/// bits, each a dozen steps on a processor that is not known to count in one.
fn nth_bit(word: u64, k: u32) -> u32 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    const TOPS: u64 = 0x80 * ONES;
    const NIBBLES: u64 = 0x0f * ONES;
    const PAIRS: u64 = 0x33 * ONES;
    const EVEN: u64 = 0x55 * ONES;
    // How many octets of `sums` are at most k; all of them are below 128.
    let at_most = |sums: u64, k: u64| {
        let tops = ((k * ONES) | TOPS).wrapping_sub(sums) & TOPS;
        (tops >> 7).wrapping_mul(ONES) >> 56
    };

    let pairs = word - ((word >> 1) & EVEN);
    let nibbles = (pairs & PAIRS) + ((pairs >> 2) & PAIRS);
    // Octet i: the set bits up to and with octet i of the word.
    let sums = ((nibbles + (nibbles >> 4)) & NIBBLES).wrapping_mul(ONES);
    let octet = 8 * at_most(sums, u64::from(k));
    let k = u64::from(k) - (((sums << 8) >> octet) & 0xff);

    // Bit i of that octet goes to octet i, as 0 or 1.
    let spread = ((word >> octet) & 0xff).wrapping_mul(ONES) & 0x8040_2010_0804_0201;
    let bits = ((spread + (TOPS - ONES)) >> 7) & ONES;
    (octet + at_most(bits.wrapping_mul(ONES), k)) as u32
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
    fn the_count_is_right_whoever_changes_what() {
        let set = Eligible::new(70);
        std::thread::scope(|scope| {
            for seed in 0..4 {
                let set = &set;
                scope.spawn(move || {
                    let mut rng = fastrand::Rng::with_seed(seed);
                    for _ in 0..20_000 {
                        set.set(rng.usize(..70), rng.bool());
                        assert!(set.nth(rng.usize(..80)).is_none_or(|ix| ix < 70));
                    }
                });
            }
        });
        let list: Vec<_> = set.iter().collect();
        assert_eq!(set.count(), list.len());
        assert!((0..70).all(|k| set.nth(k) == list.get(k).copied()));
        // And where it decides alone.
        for ix in 0..70 {
            set.set(ix, true);
        }
        assert!((0..70).all(|k| set.nth(k) == Some(k)) && set.nth(70).is_none());
    }

    #[test]
    fn finds_the_bit_in_any_word() {
        let mut rng = fastrand::Rng::with_seed(2);
        let edges = [u64::MAX, 0x80 << 56, 0xff, 0xff << 56, 0x8080_8080_8080_8080];
        let single = (0..64).map(|bit| 1 << bit);
        let random = (0..10_000).map(|_| rng.u64(..) & rng.u64(..) | rng.u64(..) & rng.u64(..));
        for word in edges.into_iter().chain(single).chain(random) {
            let positions = (0..64).filter(|bit| word >> bit & 1 == 1);
            for (k, want) in (0..).zip(positions) {
                assert_eq!(nth_bit(word, k), want, "{k} of {word:#x}");
            }
        }
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
                let others: Vec<_> = (0..len).filter(|ix| !list.contains(ix)).collect();
                assert_eq!(set.others().collect::<Vec<_>>(), others);
                assert_eq!(set.count(), list.len());
                for k in 0..=len {
                    assert_eq!(set.nth(k), list.get(k).copied(), "{k} of {list:?}");
                }
            }
        }
    }
}
