//! The distribution of latencies: counts between fixed borders, and a picture of them for terminals.
//!
//! The borders are the same in every run, so that two runs can be laid side by side.

use std::fmt::Write;

use hdrhistogram::Histogram;

/// Borders within a factor of ten, in hundredths.
const STEPS: [u64; 12] = [100, 120, 150, 180, 220, 270, 330, 390, 470, 560, 680, 820];
/// Lines of a picture: if there are more, two or four ranges become one.
const MOST_LINES: usize = 24;
/// Columns of the longest bar.
const WIDTH: usize = 34;

/// What bars are drawn with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ink {
    /// `#`
    Ascii,
    /// Block characters, to an eighth of a column.
    Blocks,
}

/// Latencies above the border before, up to this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bucket {
    /// Nanoseconds.
    pub(super) up_to: u64,
    pub(super) count: u64,
}

/// Border number `n` in nanoseconds; the first is 100 ns.
fn border(n: usize) -> u64 {
    let decade = 10u64.saturating_pow((n / STEPS.len()) as u32);
    STEPS[n % STEPS.len()].saturating_mul(decade)
}

/// The counts from the first range that has one to the last, with the empty ones between.
pub(super) fn buckets(latency: &Histogram<u64>) -> Vec<Bucket> {
    every(latency, 1)
}

/// The same between each `step`th border only.
fn every(latency: &Histogram<u64>, step: usize) -> Vec<Bucket> {
    let mut buckets: Vec<Bucket> = Vec::new();
    let mut n = 0;
    for value in latency.iter_recorded() {
        while border(n) < value.value_iterated_to() && border(n) < u64::MAX {
            n += step;
            if !buckets.is_empty() {
                buckets.push(Bucket { up_to: border(n), count: 0 });
            }
        }
        if buckets.is_empty() {
            buckets.push(Bucket { up_to: border(n), count: 0 });
        }
        if let Some(last) = buckets.last_mut() {
            last.count += value.count_since_last_iteration();
        }
    }
    buckets
}

/// A line for each range: its upper end, a bar, the count, the share, and the percentiles in it.
/// 80 columns at most.
pub(super) fn picture(latency: &Histogram<u64>, marks: &[(&str, f64)], ink: Ink) -> String {
    let fits = |step: &usize| every(latency, *step).len() <= MOST_LINES;
    let buckets = every(latency, [1, 2, 4].into_iter().find(fits).unwrap_or(4));
    let most = buckets.iter().map(|bucket| bucket.count).max().unwrap_or(0);
    let mut text = String::new();
    let mut below = 0;
    for Bucket { up_to, count } in buckets {
        let share = 100.0 * count as f64 / latency.len().max(1) as f64;
        let line =
            format!("{:>9}  {}  {count:>10}  {share:>5.1} %", time(up_to), bar(count, most, ink));
        text += &line;
        for (name, quantile) in marks {
            let place = latency.value_at_quantile(*quantile);
            if below < place && place <= up_to {
                // Writing into memory does not fail.
                let _ = write!(text, " {name}");
            }
        }
        text.push('\n');
        below = up_to;
    }
    text
}

/// A bar of fixed width. What is there at all can be seen.
fn bar(count: u64, most: u64, ink: Ink) -> String {
    const EIGHTHS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];
    let parts = match ink {
        Ink::Ascii => 1,
        Ink::Blocks => EIGHTHS.len(),
    };
    let long = (WIDTH * parts) as u128 * u128::from(count) / u128::from(most.max(1));
    let long = (long as usize).max(usize::from(count > 0));
    let mut bar = match ink {
        Ink::Ascii => "#".repeat(long),
        Ink::Blocks => "█".repeat(long / parts) + EIGHTHS[long % parts],
    };
    bar.extend(std::iter::repeat_n(' ', WIDTH - bar.chars().count()));
    bar
}

/// A time for people: three digits, and the unit that suits it.
pub(super) fn time(nanoseconds: u64) -> String {
    let mut value = nanoseconds as f64 / 1e3;
    let mut unit = "us";
    for larger in ["ms", "s"] {
        // 999.6 would be written as 1000.
        if value < 999.5 {
            break;
        }
        (value, unit) = (value / 1e3, larger);
    }
    let digits = match value {
        ..9.995 => 2,
        ..99.95 => 1,
        _ => 0,
    };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARKS: [(&str, f64); 2] = [("p50", 0.5), ("p99", 0.99)];

    fn of(values: &[(u64, u64)]) -> Histogram<u64> {
        let mut latency = Histogram::new_with_bounds(1, 3_600_000_000_000, 3).unwrap();
        for &(value, count) in values {
            latency.record_n(value, count).unwrap();
        }
        latency
    }

    #[test]
    fn times() {
        for (nanoseconds, text) in [
            (0, "0.00 us"),
            (850, "0.85 us"),
            (9_994, "9.99 us"),
            (12_345, "12.3 us"),
            (999_400, "999 us"),
            (999_500, "1.00 ms"),
            (1_500_000, "1.50 ms"),
            (10_000_000, "10.0 ms"),
            (2_000_000_000, "2.00 s"),
            (3_600_000_000_000, "3600 s"),
        ] {
            assert_eq!(time(nanoseconds), text);
        }
    }

    #[test]
    fn buckets_have_all_and_begin_and_end_with_something() {
        for values in [
            &[][..],
            &[(1, 1)],
            &[(100, 2), (101, 3)],
            &[(1_000_000, 5), (1_010_000, 1), (90_000_000, 1)],
            &[(1, 1), (3_600_000_000_000, 1)],
        ] {
            let latency = of(values);
            for step in [1, 2, 4] {
                let buckets = every(&latency, step);
                assert_eq!(buckets.iter().map(|b| b.count).sum::<u64>(), latency.len());
                assert!(buckets.first().is_none_or(|b| b.count > 0), "{values:?}");
                assert!(buckets.last().is_none_or(|b| b.count > 0), "{values:?}");
                assert!(buckets.is_sorted_by(|a, b| a.up_to < b.up_to), "{values:?}");
            }
        }
        let two = buckets(&of(&[(1_000_000, 5), (1_300_000, 1)]));
        let expected = [(1_200_000, 5), (1_500_000, 1)];
        assert_eq!(two, expected.map(|(up_to, count)| Bucket { up_to, count }));
    }

    #[test]
    fn a_picture() {
        let latency =
            of(&[(95_000, 40), (110_000, 900), (130_000, 50), (400_000, 1), (460_000, 9)]);
        let text = picture(&latency, &MARKS, Ink::Ascii);
        let lines: Vec<_> = text.lines().map(str::trim_end).collect();
        assert_eq!(
            lines,
            [
                "   100 us  #                                           40    4.0 %",
                "   120 us  ##################################         900   90.0 % p50",
                "   150 us  #                                           50    5.0 % p99",
                "   180 us                                               0    0.0 %",
                "   220 us                                               0    0.0 %",
                "   270 us                                               0    0.0 %",
                "   330 us                                               0    0.0 %",
                "   390 us                                               0    0.0 %",
                "   470 us  #                                           10    1.0 %",
            ]
        );
        let blocks = picture(&latency, &MARKS, Ink::Blocks);
        assert!(blocks.lines().nth(2).unwrap().contains("  █▉ "), "{blocks}");
    }

    #[test]
    fn a_picture_fits_a_screen() {
        let wide = of(&[(20_000, u64::from(u32::MAX)), (700_000_000, 3), (59_000_000_000, 1)]);
        let text = picture(&wide, &[("p50", 0.5), ("p90", 0.9), ("p99", 0.99)], Ink::Blocks);
        assert!(text.lines().count() <= 30, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        let narrow = of(&[(20_000, 1), (20_001, 1)]);
        assert_eq!(picture(&narrow, &MARKS, Ink::Ascii).lines().count(), 1);
        assert_eq!(picture(&of(&[]), &MARKS, Ink::Ascii), "");
    }
}
