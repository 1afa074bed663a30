//! Counts of instructions, those that were counted before, and what to think of the difference.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// Instructions by benchmark: `function.case`.
pub(crate) type Counts = BTreeMap<String, u64>;

/// How many percent a count may grow.
pub(crate) const MOST: u64 = 5;

const HEADER: &str = "\
# Instructions of a hundred calls of each benchmark, counted by the compiler named here.
# Written by `cargo xtask instructions --accept`.
";

/// What was counted before.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Baseline {
    /// The compiler that it was counted with, as it names itself.
    pub(crate) rustc: String,
    pub(crate) counts: Counts,
}

impl Baseline {
    /// Reads what [`Baseline::text`] has written. `Err`: a line that it would not write.
    pub(crate) fn read(text: &str) -> Result<Self, &str> {
        let mut baseline = Self::default();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            let (name, value) = line.split_once(' ').ok_or(line)?;
            if name == "rustc" {
                line.clone_into(&mut baseline.rustc);
                continue;
            }
            let count = value.trim_start().parse().map_err(|_| line)?;
            baseline.counts.insert(name.to_owned(), count);
        }
        Ok(baseline)
    }

    /// One line for each benchmark, so that a difference shows what has changed.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("{HEADER}\n{}\n\n", self.rustc);
        for (name, count) in &self.counts {
            // Writing to a String cannot fail.
            let _ = writeln!(text, "{name:<40} {count:>10}");
        }
        text
    }
}

/// What has become of one benchmark.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// Within a few percent.
    Same,
    /// More than that: a fault.
    More,
    /// So many fewer that the baseline lets a later fault pass.
    Less,
    /// Not counted before.
    New,
    /// Not counted any more.
    Gone,
}

/// One benchmark, before and now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Row<'a> {
    pub(crate) name: &'a str,
    pub(crate) before: Option<u64>,
    pub(crate) now: Option<u64>,
}

/// All benchmarks there were or are, by name.
pub(crate) fn compare<'a>(before: &'a Counts, now: &'a Counts) -> Vec<Row<'a>> {
    let names: BTreeSet<&String> = before.keys().chain(now.keys()).collect();
    let row = |name: &'a String| Row {
        name,
        before: before.get(name).copied(),
        now: now.get(name).copied(),
    };
    names.into_iter().map(row).collect()
}

impl Row<'_> {
    pub(crate) fn verdict(&self) -> Verdict {
        match (self.before, self.now) {
            (Some(before), Some(now)) if now * 100 > before * (100 + MOST) => Verdict::More,
            (Some(before), Some(now)) if now * 100 < before * (100 - MOST) => Verdict::Less,
            (Some(_), Some(_)) => Verdict::Same,
            (None, _) => Verdict::New,
            (_, None) => Verdict::Gone,
        }
    }

    /// A line of the table.
    pub(crate) fn line(&self) -> String {
        let number = |n: Option<u64>| n.map_or_else(|| "-".to_owned(), |n| n.to_string());
        let (before, now) = (number(self.before), number(self.now));
        let change = match (self.before, self.now) {
            (Some(before), Some(now)) => {
                format!("{:+.1} %", (now as f64 / before as f64 - 1.0) * 100.0)
            }
            _ => String::new(),
        };
        let remark = match self.verdict() {
            Verdict::Same => "",
            Verdict::More => "TOO MANY",
            Verdict::Less => "fewer",
            Verdict::New => "NEW",
            Verdict::Gone => "GONE",
        };
        let line = format!("{:<40} {before:>10} {now:>10} {change:>9}  {remark}", self.name);
        line.trim_end().to_owned()
    }
}

/// What a decision may cost among many, by what it costs among few.
pub(crate) struct Bar {
    /// Names of benchmarks begin with this; they end in `_of_` and the number.
    pub(crate) of: &'static str,
    pub(crate) many: u32,
    pub(crate) few: u32,
    pub(crate) at_most: f64,
}

/// What is asked of decisions among many.
pub(crate) const BARS: [Bar; 2] = [
    Bar { of: "find_route.", many: 100_000, few: 10, at_most: 1.5 },
    Bar { of: "pick.", many: 1_000, few: 3, at_most: 2.0 },
];

impl Bar {
    /// Each benchmark among many that the bar is for, and how many times as much it costs.
    pub(crate) fn ratios<'a>(&self, counts: &'a Counts) -> Vec<(&'a str, f64)> {
        let (many, few) = (format!("_of_{}", self.many), format!("_of_{}", self.few));
        let ratio = |(name, count): (&'a String, &u64)| {
            let stem = name.strip_suffix(&many).filter(|stem| stem.starts_with(self.of))?;
            let among_few = counts.get(&format!("{stem}{few}"))?;
            Some((stem, *count as f64 / *among_few as f64))
        };
        counts.iter().filter_map(ratio).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts<const N: usize>(all: [(&str, u64); N]) -> Counts {
        all.map(|(name, count)| (name.to_owned(), count)).into()
    }

    #[test]
    fn what_is_written_can_be_read() {
        let baseline = Baseline {
            rustc: "rustc 1.95.0 (x 2026)".to_owned(),
            counts: counts([("a.b", 1), ("c", u64::MAX)]),
        };
        assert_eq!(Baseline::read(&baseline.text()), Ok(baseline));
        assert_eq!(Baseline::read(""), Ok(Baseline::default()));
        for bad in ["a", "a b", "a 1 2", "a -1"] {
            assert_eq!(Baseline::read(bad), Err(bad));
        }
    }

    #[test]
    fn five_percent_are_borne_and_no_more() {
        for (before, now, want) in [
            (Some(100), Some(100), Verdict::Same),
            (Some(100), Some(105), Verdict::Same),
            (Some(100), Some(106), Verdict::More),
            (Some(1_000), Some(1_051), Verdict::More),
            (Some(100), Some(95), Verdict::Same),
            (Some(100), Some(94), Verdict::Less),
            (Some(0), Some(1), Verdict::More),
            (Some(0), Some(0), Verdict::Same),
            (None, Some(1), Verdict::New),
            (Some(1), None, Verdict::Gone),
        ] {
            let row = Row { name: "a", before, now };
            assert_eq!(row.verdict(), want, "{row:?}");
        }
    }

    #[test]
    fn every_benchmark_has_a_line() {
        let (before, now) = (counts([("a", 100), ("b", 1)]), counts([("a", 110), ("c", 2)]));
        let words = |row: &Row<'_>| row.line().split_whitespace().collect::<Vec<_>>().join(" ");
        let lines: Vec<String> = compare(&before, &now).iter().map(words).collect();
        assert_eq!(lines, ["a 100 110 +10.0 % TOO MANY", "b 1 - GONE", "c - 2 NEW"]);
    }

    #[test]
    fn many_are_compared_with_few_of_the_same_kind() {
        let bar = Bar { of: "pick.", many: 1_000, few: 3, at_most: 2.0 };
        let all = counts([
            ("pick.a_of_3", 10),
            ("pick.a_of_100", 11),
            ("pick.a_of_1000", 25),
            ("pick.alone_of_1000", 9),
            ("other.b_of_3", 1),
            ("other.b_of_1000", 9),
        ]);
        assert_eq!(bar.ratios(&all), [("pick.a", 2.5)]);
    }
}
