//! Hexadecimal digits: every request gets some dozens of them.

/// The 16 digits of `value`, eight at a time.
#[must_use]
pub fn digits(value: u64) -> [u8; 16] {
    let mut all = [0; 16];
    let (high, low) = all.split_at_mut(8);
    high.copy_from_slice(&eight((value >> 32) as u32).to_be_bytes());
    low.copy_from_slice(&eight(value as u32).to_be_bytes());
    all
}

/// The 32 digits of `value`.
#[must_use]
pub fn long_digits(value: u128) -> [u8; 32] {
    let mut all = [0; 32];
    let (high, low) = all.split_at_mut(16);
    high.copy_from_slice(&digits((value >> 64) as u64));
    low.copy_from_slice(&digits(value as u64));
    all
}

/// The digits of `value`, the first in the highest octet.
fn eight(value: u32) -> u64 {
    const ONES: u64 = 0x0101_0101_0101_0101;
    // Four bits to each octet.
    let x = u64::from(value);
    let x = (x << 16 | x) & 0x0000_ffff_0000_ffff;
    let x = (x << 8 | x) & 0x00ff_00ff_00ff_00ff;
    let x = (x << 4 | x) & 0x0f0f_0f0f_0f0f_0f0f;
    // From ten on they are letters, which stand further on.
    let is_letter = (x + ONES * 6) >> 4 & ONES;
    x + ONES * u64::from(b'0') + is_letter * u64::from(b'a' - b'0' - 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn digits_are_those_of_the_standard_library(value: u128) {
            let long = format!("{value:032x}");
            prop_assert_eq!(&long_digits(value)[..], long.as_bytes());
            prop_assert_eq!(&digits(value as u64)[..], &long.as_bytes()[16..]);
        }
    }
}
