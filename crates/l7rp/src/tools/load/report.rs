//! What came of a run, for people and for programs.

use std::collections::BTreeMap;
use std::fmt::Write;

use l7rp_core::names::Nanos;
use serde::Serialize;

use super::picture::{self, Ink, buckets, time};
use super::schedule::{End, Pace, never_taken};
use super::tally::{Kind, Tally};
use super::{Outcome, Plan};

/// From this share of its time on a thread is said to have been the limit.
const SATURATED: f64 = 0.9;
const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99.9", 0.999)];

/// What came of a run. The fields are those of the JSON.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    url: String,
    /// `1.1` or `2`
    http: &'static str,
    /// `closed` or `open`
    mode: &'static str,
    concurrency: usize,
    connections: usize,
    threads: usize,
    warm_up_s: f64,
    /// From the end of the warm-up to the cut-off, or to the last answer (0 without any) if there
    /// was a number of requests to be made.
    duration_s: f64,
    /// Ended by a signal.
    interrupted: bool,
    /// Requests that count: `answers` and those in `errors`.
    requests: u64,
    answers: u64,
    /// Answers within `duration_s`, for each second of it.
    rate_per_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    requested_rate_per_s: Option<u64>,
    /// Open loop: requests that were due, but for which no connection was free before the cut-off.
    never_started: u64,
    warm_up_requests: u64,
    /// Given up by a second signal.
    cut: u64,
    /// Octets of messages as they are on the wire; of HTTP/2, of bodies only.
    sent_bytes: u64,
    received_bytes: u64,
    connections_opened: u64,
    /// Connections that were opened in the place of kept ones that the peer had closed.
    reconnects: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    held: Option<Held>,
    statuses: BTreeMap<u16, u64>,
    errors: BTreeMap<&'static str, u64>,
    /// What the first of each kind was like.
    error_examples: BTreeMap<&'static str, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    latency: Option<Latency>,
    tool: Tool,
    #[serde(skip)]
    tally: Tally,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Held {
    opened: usize,
    /// Of these, at the end.
    open: usize,
}

/// Of the answers, from when each request was due to its last octet.
#[derive(Clone, Debug, Serialize)]
struct Latency {
    min_us: f64,
    mean_us: f64,
    p50_us: f64,
    p90_us: f64,
    p99_us: f64,
    p999_us: f64,
    max_us: f64,
    /// Each has those above the border before it.
    buckets: Vec<UpTo>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct UpTo {
    up_to_us: f64,
    count: u64,
}

/// The busiest of the tool's threads, as shares of the time in which requests were started.
#[derive(Clone, Copy, Debug, Serialize)]
struct Tool {
    running_ratio: f64,
    /// In wait of a core.
    waiting_ratio: f64,
}

impl Report {
    /// `next`: the number of the first request that no thread has taken.
    pub(super) fn new(plan: &Plan, start: Nanos, next: u64, mut outcomes: Vec<Outcome>) -> Self {
        let threads = outcomes.len();
        let busiest = outcomes.iter().map(|outcome| outcome.busy);
        let busiest = busiest.max_by(|a, b| a.sum().total_cmp(&b.sum())).unwrap_or_default();
        let open = outcomes.iter().map(|outcome| outcome.held_open).sum();
        let cut_off = outcomes.iter().map(|outcome| outcome.cut_off).min().unwrap_or(start);
        let mut tally = outcomes.swap_remove(0).tally;
        for outcome in &outcomes {
            tally.add(&outcome.tally);
        }
        let from = start.plus(plan.warm_up);
        let until = if cut_off == Nanos::NEVER { tally.last } else { cut_off };
        let duration = until.since(from);
        let planned = match plan.end {
            End::After(time) => Some(time),
            End::Requests(_) => None,
        };
        let interrupted = cut_off != Nanos::NEVER && planned != Some(duration);
        let errors: u64 = tally.errors.iter().sum();
        let statuses = (0..).zip(&tally.statuses).filter(|(_, count)| **count > 0);
        Self {
            url: plan.url.to_string(),
            http: if plan.streams.is_some() { "2" } else { "1.1" },
            mode: if plan.pace == Pace::Closed { "closed" } else { "open" },
            concurrency: plan.concurrency,
            connections: plan.connections(),
            threads,
            warm_up_s: plan.warm_up.as_secs_f64(),
            duration_s: duration.as_secs_f64(),
            interrupted,
            requests: tally.answers() + errors,
            answers: tally.answers(),
            rate_per_s: tally.measured as f64 / duration.as_secs_f64().max(1e-9),
            requested_rate_per_s: match plan.pace {
                Pace::Open(rate) => Some(rate),
                Pace::Closed => None,
            },
            never_started: tally.never_started + never_taken(plan, start, cut_off, next),
            warm_up_requests: tally.warm_up,
            cut: tally.cut,
            sent_bytes: tally.sent,
            received_bytes: tally.received,
            connections_opened: tally.opened,
            reconnects: tally.reconnects,
            held: (plan.hold > 0).then_some(Held { opened: plan.hold, open }),
            statuses: statuses.map(|(status, count)| (status, *count)).collect(),
            errors: Kind::ALL.map(|kind| (kind.name(), tally.errors[kind as usize])).into(),
            error_examples: Kind::ALL
                .into_iter()
                .filter_map(|kind| Some((kind.name(), tally.examples[kind as usize].clone()?)))
                .collect(),
            latency: Latency::of(&tally),
            tool: Tool { running_ratio: busiest.running, waiting_ratio: busiest.waiting },
            tally,
        }
    }

    /// Whether a request has failed or was given up, or none was answered. No status is a failure.
    pub fn has_failed(&self) -> bool {
        self.errors.values().any(|count| *count > 0) || self.cut > 0 || self.answers == 0
    }

    /// As a table and a picture, at most 80 columns wide unless the URL or an error is long.
    pub fn text(&self, ink: Ink) -> String {
        let mut text = format!("{}\n\n", self.headline());
        for (name, words) in self.table() {
            // Writing into memory does not fail.
            let _ = writeln!(text, "{name:<12}{words}");
        }
        if self.latency.is_some() {
            text += "\nlatency up to\n";
            text += &picture::picture(&self.tally.latency, &QUANTILES, ink);
        }
        for warning in self.warnings() {
            let _ = write!(text, "\n{warning}\n");
        }
        text
    }

    fn headline(&self) -> String {
        let pace = match self.requested_rate_per_s {
            Some(rate) => format!("open loop at {rate}/s"),
            None => "closed loop".to_owned(),
        };
        format!(
            "{}\nHTTP/{}, {pace}, {} at once, {} connections, {} threads, {:.1} s{}",
            self.url,
            self.http,
            self.concurrency,
            self.connections,
            self.threads,
            self.duration_s,
            if self.interrupted { " (interrupted)" } else { "" },
        )
    }

    fn table(&self) -> Vec<(&'static str, String)> {
        let mut failed = String::new();
        for (kind, count) in self.errors.iter().filter(|(_, count)| **count > 0) {
            let _ = write!(failed, "{}{count} {kind}", if failed.is_empty() { "" } else { ", " });
        }
        let statuses: Vec<String> =
            self.statuses.iter().map(|(status, count)| format!("{status}: {count}")).collect();
        let mut table = vec![
            ("rate", format!("{:.1}/s", self.rate_per_s)),
            ("answers", format!("{} of {} requests", self.answers, self.requests)),
            ("statuses", if statuses.is_empty() { "none".to_owned() } else { statuses.join("  ") }),
            ("failed", if failed.is_empty() { "none".to_owned() } else { failed }),
        ];
        for (kind, words) in &self.error_examples {
            table.push(("", format!("{kind}: {words}")));
        }
        if self.never_started > 0 {
            table.push(("not started", self.never_started.to_string()));
        }
        if self.cut > 0 {
            table.push(("given up", self.cut.to_string()));
        }
        if self.warm_up_requests > 0 {
            table.push(("warm-up", format!("{} requests, not counted", self.warm_up_requests)));
        }
        table.push(("received", octets(self.received_bytes)));
        table.push(("sent", octets(self.sent_bytes)));
        let again = match self.reconnects {
            0 => String::new(),
            n => format!(", {n} of them for kept ones that were closed"),
        };
        table.push(("connections", format!("{} opened{again}", self.connections_opened)));
        if let Some(Held { opened, open }) = self.held {
            table.push(("held", format!("{opened} idle connections, {open} still open")));
        }
        if let Some(latency) = &self.latency {
            let of = |us: f64| time((us * 1e3) as u64);
            let Latency { min_us, mean_us, max_us, .. } = *latency;
            let all = format!("min {}, mean {}, max {}", of(min_us), of(mean_us), of(max_us));
            table.push(("latency", all));
            let Latency { p50_us, p90_us, p99_us, p999_us, .. } = *latency;
            let named = QUANTILES.iter().zip([p50_us, p90_us, p99_us, p999_us]);
            let all: Vec<String> =
                named.map(|((name, _), us)| format!("{name} {}", of(us))).collect();
            table.push(("", all.join(", ")));
        }
        table
    }

    /// What must be known to read the figures right.
    fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let Tool { running_ratio, waiting_ratio } = self.tool;
        if running_ratio + waiting_ratio >= SATURATED {
            warnings.push(format!(
                "This tool was a limit: a thread of it ran for {:.0} % of the time, and waited\n\
                 for a core for {:.0} %. Latencies and rate are its own as much as the target's.",
                running_ratio * 100.0,
                waiting_ratio * 100.0
            ));
        }
        if self.never_started > 0 {
            warnings.push(format!(
                "{} requests were due but never started: all {} places were taken. No\n\
                 latency has them; the true ones are longer.",
                self.never_started, self.concurrency
            ));
        }
        if self.latency.is_some() && self.requests > self.answers {
            warnings.push(format!(
                "{} of {} requests failed. No latency has them,\nhowever long they took.",
                self.requests - self.answers,
                self.requests
            ));
        }
        warnings
    }
}

impl Latency {
    fn of(tally: &Tally) -> Option<Self> {
        let all = &tally.latency;
        let us = |ns: u64| ns as f64 / 1e3;
        let at = |quantile| us(all.value_at_quantile(quantile));
        let up_to =
            |bucket: &picture::Bucket| UpTo { up_to_us: us(bucket.up_to), count: bucket.count };
        (!all.is_empty()).then(|| Self {
            min_us: us(all.min()),
            mean_us: us(all.mean() as u64),
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p999_us: at(0.999),
            max_us: us(all.max()),
            buckets: buckets(all).iter().map(up_to).collect(),
        })
    }
}

/// Octets for people.
fn octets(n: u64) -> String {
    let mut value = n as f64;
    let mut unit = "B";
    for larger in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, larger);
    }
    if unit == "B" { format!("{n} B") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::busy::Busy;
    use super::super::plan::tests::plan;
    use super::super::tally::Failure;
    use super::*;

    const START: Nanos = Nanos(1_000_000_000);
    /// Whatever was due was taken.
    const ALL: u64 = u64::MAX;

    /// One of two threads, with so many answers.
    fn outcome(answers: u64, cut_off: Nanos) -> Outcome {
        let mut tally = Tally::new().unwrap();
        for n in 0..answers {
            tally.answered(200, Duration::from_micros(100 + n));
        }
        (tally.measured, tally.last) = (answers, START.plus(Duration::from_secs(5)));
        Outcome { tally, cut_off, held_open: 0, busy: Busy { running: 0.5, waiting: 0.1 } }
    }

    #[test]
    fn the_rate_is_that_of_the_time_that_counts() {
        let two = End::After(Duration::from_secs(2));
        let cut_off = START.plus(Duration::from_secs(3));
        let early = START.plus(Duration::from_secs(2));
        for (end, cut_off, seconds, interrupted) in [
            (two, cut_off, 2.0, false),
            (two, early, 1.0, true),
            (End::Requests(40), Nanos::NEVER, 4.0, false),
            (End::Requests(99), early, 1.0, true),
            // Before it has begun.
            (two, Nanos(0), 0.0, true),
        ] {
            let outcomes = vec![outcome(30, cut_off), outcome(10, cut_off)];
            let report = Report::new(&plan(Pace::Closed, end), START, ALL, outcomes);
            assert_eq!((report.duration_s, report.interrupted), (seconds, interrupted), "{end:?}");
            assert_eq!((report.answers, report.threads), (40, 2));
            let is_right = (report.rate_per_s * seconds - 40.0).abs() < 1e-6;
            assert!(seconds == 0.0 || is_right, "{end:?}");
        }
    }

    #[test]
    fn what_must_be_known_is_said() {
        let end = End::After(Duration::from_secs(2));
        let cut_off = START.plus(Duration::from_secs(3));
        let report = |change: &dyn Fn(&mut Outcome)| {
            let mut outcomes = vec![outcome(3, cut_off), outcome(3, cut_off)];
            change(&mut outcomes[1]);
            Report::new(&plan(Pace::Open(9), end), START, ALL, outcomes)
        };
        let calm = report(&|_| {});
        assert!(calm.warnings().is_empty() && !calm.has_failed());
        let busy = report(&|one| one.busy = Busy { running: 0.55, waiting: 0.36 });
        let text = busy.text(Ink::Ascii);
        assert!(text.contains("ran for 55 %") && text.contains("for 36 %"), "{text}");
        let behind = report(&|one| one.tally.never_started = 7);
        assert!(behind.text(Ink::Ascii).contains("7 requests were due"), "{behind:?}");
        let failed = report(&|one| one.tally.failed(Failure::new(Kind::Tls, "no")));
        assert!(failed.has_failed() && failed.text(Ink::Ascii).contains("tls: no"));
        let given_up = report(&|one| one.tally.cut = 1);
        assert!(given_up.has_failed() && given_up.text(Ink::Ascii).contains("given up"));
        assert!(failed.text(Ink::Ascii).contains("1 of 7 requests failed. No latency has them"));
        assert!(
            Report::new(&plan(Pace::Closed, end), START, ALL, vec![outcome(0, cut_off)])
                .has_failed()
        );
    }

    #[test]
    fn the_keys_of_the_json_are_a_contract() {
        let end = End::Requests(1);
        let plan = Plan { hold: 1, ..plan(Pace::Open(9), end) };
        let report = Report::new(&plan, START, ALL, vec![outcome(1, Nanos::NEVER)]);
        let json = serde_json::to_value(&report).unwrap();
        let keys = |value: &serde_json::Value| {
            let mut keys: Vec<_> = value.as_object().unwrap().keys().cloned().collect();
            keys.sort_unstable();
            keys.join(" ")
        };
        assert_eq!(
            keys(&json),
            "answers concurrency connections connections_opened cut duration_s error_examples \
             errors held http interrupted latency mode never_started rate_per_s received_bytes \
             reconnects requested_rate_per_s requests sent_bytes statuses threads tool url \
             warm_up_requests warm_up_s"
        );
        assert_eq!(
            keys(&json["latency"]),
            "buckets max_us mean_us min_us p50_us p90_us p999_us p99_us"
        );
        assert_eq!(keys(&json["latency"]["buckets"][0]), "count up_to_us");
        assert_eq!(keys(&json["tool"]), "running_ratio waiting_ratio");
        assert_eq!(keys(&json["errors"]), "connect protocol reset timeout tls");
    }
}
