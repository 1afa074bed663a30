/// Several draws out of one: the caller gives 64 random bits, `SplitMix64` (Steele, Lea, Flood,
/// OOPSLA 2014) makes as many independent-looking words of them as a pick needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(draw: u64) -> Self {
        Self(draw)
    }

    /// 0..n, by multiply-shift: no division, and a bias of at most n/2⁶⁴. `n` of 0 gives 0.
    pub(super) fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_for_consecutive_seeds_and_draws() {
        let mut first = [0u32; 7];
        let mut second = [0u32; 7];
        for seed in 0..70_000 {
            let mut dice = Dice::new(seed);
            first[dice.below(7) as usize] += 1;
            second[dice.below(7) as usize] += 1;
        }
        for count in first.into_iter().chain(second) {
            assert!((9_500..10_500).contains(&count), "{first:?} {second:?}");
        }
        assert_eq!(Dice::new(1).below(0), 0);
        assert_eq!(Dice::new(1).below(1), 0);
    }
}
