//! Whether a request is traced, and how that is said from hop to hop (W3C Trace Context, Level 2:
//! <https://www.w3.org/TR/trace-context-2/>).

use crate::hex;

/// What a caller says of the trace that its request is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parent {
    /// The whole trace. Not 0.
    pub trace: u128,
    /// The caller's span. Not 0.
    pub span: u64,
    /// As sent, without the bits that nobody has given a meaning.
    flags: u8,
}

/// Length of the value of a `traceparent` field.
pub const LENGTH: usize = 55;

const SAMPLED: u8 = 1;
/// The trace's id was drawn at random.
const RANDOM: u8 = 2;

impl Parent {
    /// Whether the caller records its part.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// Reads the value of a `traceparent` field (§2.2). `None`: it is none, and who gets it is to
    /// begin a trace of its own.
    #[must_use]
    pub fn parse(value: &[u8]) -> Option<Self> {
        let (head, rest) = value.split_at_checked(LENGTH)?;
        let version = number(&head[..2])? as u8;
        let dashes = [2, 35, 52].iter().all(|&at| head[at] == b'-');
        // What a later version adds begins with a dash; 255 is for ever invalid.
        let ends = rest.is_empty() || (version > 0 && rest[0] == b'-');
        if !dashes || !ends || version == 0xff {
            return None;
        }
        let (trace, span) = (number(&head[3..35])?, number(&head[36..52])? as u64);
        let flags = number(&head[53..])? as u8 & (SAMPLED | RANDOM);
        (trace != 0 && span != 0).then_some(Self { trace, span, flags })
    }
}

/// A number in lower-case hexadecimal digits: others are not allowed.
fn number(digits: &[u8]) -> Option<u128> {
    digits.iter().try_fold(0, |sum, digit| {
        let value = match digit {
            b'0'..=b'9' => digit - b'0',
            b'a'..=b'f' => digit - b'a' + 10,
            _ => return None,
        };
        Some(sum << 4 | u128::from(value))
    })
}

/// Which requests are traced that nobody has decided about before.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampler {
    /// The caller's word is final, where there is one.
    pub follows_parent: bool,
    /// The share of all others, from 0 to 1.
    pub ratio: f64,
}

/// One request's place in its trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The whole trace.
    pub id: u128,
    /// This hop's own span.
    pub span: u64,
    /// The caller's; `None`: the trace begins here.
    pub parent: Option<u64>,
    /// This hop records its part.
    pub is_sampled: bool,
    flags: u8,
}

impl Trace {
    /// Decides about a request. `id` and `span` are random bits: of the trace, if it begins here,
    /// and of this hop's span.
    #[must_use]
    pub fn begin(sampler: Sampler, parent: Option<Parent>, id: u128, span: u64) -> Self {
        // 0 is no id.
        let (id, span) = (parent.map_or(id.max(1), |parent| parent.trace), span.max(1));
        let is_sampled = match parent {
            Some(parent) if sampler.follows_parent => parent.is_sampled(),
            _ => is_among(id, sampler.ratio),
        };
        let flags = parent.map_or(0, |parent| parent.flags & RANDOM) | u8::from(is_sampled);
        Self { id, span, parent: parent.map(|parent| parent.span), is_sampled, flags }
    }

    /// The value of the `traceparent` field for whoever is called from `span`.
    #[must_use]
    pub fn traceparent(&self, span: u64) -> [u8; LENGTH] {
        let mut text = *b"00-00000000000000000000000000000000-0000000000000000-00";
        text[3..35].copy_from_slice(&hex::long_digits(self.id));
        text[36..52].copy_from_slice(&hex::digits(span));
        // Two bits at most.
        text[54] = b'0' + self.flags;
        text
    }
}

/// Whether the trace belongs to this share of all: decided by the last 63 bits of its id, so that
/// every hop with the same ratio decides the same, and so does every other implementation of
/// OpenTelemetry's `TraceIdRatioBased`.
fn is_among(id: u128, ratio: f64) -> bool {
    let bound = (ratio.clamp(0.0, 1.0) * (1u64 << 63) as f64) as u64;
    (id as u64 >> 1) < bound
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const GOOD: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    const ID: u128 = 0x0af7_6519_16cd_43dd_8448_eb21_1c80_319c;
    const ALL: Sampler = Sampler { follows_parent: true, ratio: 1.0 };

    #[test]
    fn what_a_caller_says_is_understood() {
        let parent = |flags| Some(Parent { trace: ID, span: 0xb7ad_6b71_6920_3331, flags });
        assert_eq!(Parent::parse(GOOD.as_bytes()), parent(1));
        for (text, flags) in [
            (GOOD.replace("-01", "-00"), 0),
            (GOOD.replace("-01", "-03"), 3),
            // Bits without a meaning are not passed on.
            (GOOD.replace("-01", "-ff"), 3),
            (GOOD.replace("00-", "cc-"), 1),
            (GOOD.replace("00-", "cc-") + "-what-comes-later", 1),
        ] {
            assert_eq!(Parent::parse(text.as_bytes()), parent(flags), "{text}");
        }
    }

    #[test]
    fn what_is_no_traceparent_is_none() {
        for text in [
            "",
            "00",
            &GOOD[..54],
            &GOOD.to_uppercase(),
            &format!("{GOOD}-"),
            &format!("{GOOD}0"),
            &format!(" {GOOD}"),
            &GOOD.replace("00-", "ff-"),
            &(GOOD.replace("00-", "cc-") + "x"),
            &GOOD.replace('-', "_"),
            &GOOD.replace("0af7651916cd43dd8448eb211c80319c", &"0".repeat(32)),
            &GOOD.replace("b7ad6b7169203331", &"0".repeat(16)),
            &GOOD.replace("b7ad", "b7ag"),
            &GOOD.replace("-01", "-0x"),
            &GOOD.replace("00-", "+0-"),
        ] {
            assert_eq!(Parent::parse(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn the_callers_word_is_final_unless_it_does_not_count() {
        let (sampled, unsampled) = (Parent::parse(GOOD.as_bytes()), GOOD.replace("-01", "-00"));
        let unsampled = Parent::parse(unsampled.as_bytes());
        for (follows_parent, ratio, parent, expected) in [
            (true, 0.0, sampled, true),
            (true, 1.0, unsampled, false),
            (true, 1.0, None, true),
            (true, 0.0, None, false),
            (false, 0.0, sampled, false),
            (false, 1.0, unsampled, true),
        ] {
            let trace = Trace::begin(Sampler { follows_parent, ratio }, parent, 7, 8);
            assert_eq!(trace.is_sampled, expected, "{follows_parent} {ratio} {parent:?}");
            assert_eq!(trace.id, if parent.is_some() { ID } else { 7 });
            assert_eq!(trace.parent, parent.map(|parent| parent.span));
        }
    }

    #[test]
    fn a_share_is_that_share() {
        let mut rng = fastrand::Rng::with_seed(5);
        for ratio in [0.0, 0.01, 0.5, 1.0] {
            let hits = (0..100_000).filter(|_| is_among(rng.u128(..), ratio)).count();
            assert!((hits as f64 - 1e5 * ratio).abs() <= 500.0, "{ratio}: {hits}");
        }
        // As other implementations have it.
        assert!(
            is_among(u128::from(u64::MAX / 2 - 2), 0.5) && !is_among(u128::from(u64::MAX), 0.5)
        );
        assert!(is_among(0, f64::MIN_POSITIVE.max(1e-18)) && !is_among(0, f64::NAN));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(trace in 1u128.., span in 1u64.., sampled: bool) {
            let ratio = f64::from(u8::from(sampled));
            let sampler = Sampler { follows_parent: true, ratio };
            let begun = Trace::begin(sampler, None, trace, span);
            let text = begun.traceparent(span);
            let read = Parent::parse(&text).unwrap();
            prop_assert_eq!((read.trace, read.span, read.is_sampled()), (trace, span, sampled));
            // Who follows decides the same.
            let next = Trace::begin(ALL, Some(read), 1, 2);
            prop_assert_eq!((next.id, next.parent, next.is_sampled), (trace, Some(span), sampled));
        }

        #[test]
        fn nothing_panics(text in proptest::collection::vec(any::<u8>(), 0..80)) {
            let _ = Parent::parse(&text);
        }
    }
}
