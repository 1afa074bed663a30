//! A scrape of `/metrics`.

use std::collections::BTreeMap;

/// Samples by `name{labels}`.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// The text as served.
    pub text: String,
    samples: BTreeMap<String, f64>,
}

impl Metrics {
    pub(crate) fn parse(text: &str) -> Self {
        let samples = text
            .lines()
            .filter(|l| !l.starts_with('#') && !l.is_empty())
            .map(|line| {
                let (name, value) = line.rsplit_once(' ').expect("a sample has a value");
                (name.to_owned(), value.parse().expect("a value is a number"))
            })
            .collect();
        Self { text: text.to_owned(), samples }
    }

    /// The sum of all samples of `name` that carry all of `labels` (`key="value"`).
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.series(name)
            .filter(|(rest, _)| {
                labels.iter().all(|(k, v)| {
                    let pair = format!("{k}=\"{v}\"");
                    rest.contains(&format!("{{{pair}")) || rest.contains(&format!(",{pair}"))
                })
            })
            .map(|(_, value)| value)
            .sum()
    }

    /// All samples of `name`: its labels in braces, and its value.
    pub fn series<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a str, f64)> + 'a {
        self.samples.iter().filter_map(move |(key, value)| {
            let rest = key.strip_prefix(name)?;
            (rest.is_empty() || rest.starts_with('{')).then_some((rest, *value))
        })
    }

    /// How many series there are in all.
    pub fn count(&self) -> usize {
        self.samples.len()
    }
}
