//! Events of the process, one JSON line each: what changed, from, to and why.

use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

use serde::Serialize;

use super::log::Log;
use crate::clock;
use crate::config::diff::Items;

/// Severity; lines below the chosen one are not written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
#[repr(u8)]
#[expect(missing_docs, reason = "the usual four")]
pub enum Level {
    Debug,
    Info,
    Warn,
    Error,
}

impl Level {
    /// As written in a line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Debug => "debug",
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }

    fn from_u8(n: u8) -> Self {
        match n {
            0 => Self::Debug,
            1 => Self::Info,
            2 => Self::Warn,
            _ => Self::Error,
        }
    }
}

/// Something that happened to the process.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[expect(missing_docs, reason = "variants and fields are the names in the line")]
pub enum Event {
    ProxyStarted {
        version: &'static str,
        pid: u32,
        listeners: Vec<String>,
        admin: Option<String>,
        workers: usize,
        routes: usize,
        pools: usize,
        max_open_files: u64,
        /// What nobody has written and whoever started it should know.
        #[serde(skip_serializing_if = "Option::is_none")]
        note: Option<&'static str>,
    },
    UpstreamResolved {
        pool: String,
        upstream: String,
        from: Vec<String>,
        to: Vec<String>,
    },
    UpstreamResolveFailed {
        pool: String,
        upstream: String,
        host: String,
        error: String,
        effect: &'static str,
    },
    UpstreamHealthChanged {
        pool: String,
        upstream: String,
        from: &'static str,
        to: &'static str,
        why: String,
    },
    CircuitBreakerChanged {
        pool: String,
        upstream: String,
        from: &'static str,
        to: &'static str,
        why: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        open_ms: Option<u64>,
    },
    UpstreamError {
        pool: String,
        upstream: String,
        reason: &'static str,
        error: String,
        note: &'static str,
    },
    AcceptFailed {
        listener: String,
        error: String,
        effect: &'static str,
    },
    WorkerFailed {
        worker: usize,
        error: String,
    },
    ExchangePanicked {
        location: String,
        message: String,
    },
    CertificateObtained {
        host: String,
        /// URL of the CA's directory.
        authority: String,
        until: String,
        renew_from: String,
        took_ms: u64,
    },
    CertificateFailed {
        /// Empty: it is not about one name.
        host: String,
        authority: String,
        error: String,
        next_try: String,
    },
    ReadinessChanged {
        from: &'static str,
        to: &'static str,
        why: &'static str,
    },
    TraceExportFailed {
        endpoint: String,
        error: String,
        effect: &'static str,
    },
    TraceExportRecovered {
        endpoint: String,
    },
    UpstreamDrained {
        pool: String,
        upstream: String,
        from: &'static str,
        to: &'static str,
        why: &'static str,
        by: String,
    },
    UpstreamUndrained {
        pool: String,
        upstream: String,
        from: &'static str,
        to: &'static str,
        why: &'static str,
        by: String,
    },
    UpstreamWeightChanged {
        pool: String,
        upstream: String,
        from: u32,
        to: u32,
        why: &'static str,
        by: String,
        /// The one that is in force with it.
        generation: u64,
    },
    CircuitBreakerForced {
        pool: String,
        upstream: String,
        /// `open`, `closed`, or `auto`: nobody forced it.
        from: &'static str,
        to: &'static str,
        /// What it was itself.
        state_from: &'static str,
        state_to: &'static str,
        why: &'static str,
        by: String,
    },
    LogLevelChanged {
        from: &'static str,
        to: &'static str,
        why: &'static str,
        by: String,
    },
    ConfigReloaded {
        cause: &'static str,
        /// Who asked for it over the admin address.
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<String>,
        generation: u64,
        took_ms: f64,
        kept_connections: u64,
        /// Those that came in where nobody listens any more.
        leaving_connections: u64,
        kept_tunnels: u64,
        in_flight: u64,
        closed: u64,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        warnings: Vec<String>,
        #[serde(flatten)]
        changes: Box<AllChanges>,
    },
    ConfigRejected {
        cause: &'static str,
        #[serde(skip_serializing_if = "Option::is_none")]
        by: Option<String>,
        /// The one that stays in force.
        generation: u64,
        took_ms: f64,
        errors: Vec<String>,
    },
    ReloadIgnored {
        why: &'static str,
    },
    UpgradeStarted {
        pid: u32,
    },
    UpgradeComplete {
        pid: u32,
        took_ms: f64,
    },
    UpgradeFailed {
        why: String,
    },
    UpgradeIgnored {
        why: &'static str,
    },
    SocketsUnused {
        sockets: Vec<String>,
    },
    ShutdownStarted {
        why: &'static str,
        in_progress: u64,
        tunnels: u64,
        connections: u64,
        delay_ms: u64,
        grace_ms: u64,
    },
    ShutdownComplete {
        took_ms: f64,
        cut: u64,
        tunnels_closed: u64,
    },
    ShutdownForced {
        took_ms: f64,
        cut: u64,
    },
}

/// What a reload has changed.
#[derive(Clone, Debug, Default, Serialize)]
#[expect(missing_docs, reason = "fields are the names in the line")]
pub struct AllChanges {
    pub listeners: Changes,
    pub routes: Changes,
    pub pools: Changes,
    pub upstreams: Changes,
    pub settings: Vec<String>,
    pub needs_restart: Vec<String>,
}

/// What has become of the items of one kind. Long lists are cut, for this is one line.
#[derive(Clone, Debug, Default, Serialize)]
#[expect(missing_docs, reason = "fields are the names in the line")]
pub struct Changes {
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub added: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub removed: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changed: Vec<String>,
    pub kept: usize,
}

impl Changes {
    /// Those of `items`.
    pub fn of(items: &Items) -> Self {
        const MOST: usize = 20;
        let cut = |names: &mut dyn ExactSizeIterator<Item = &String>| {
            let more = names.len().saturating_sub(MOST);
            let rest = (more > 0).then(|| format!("and {more} more"));
            names.take(MOST).cloned().chain(rest).collect()
        };
        Self {
            added: cut(&mut items.added.iter()),
            removed: cut(&mut items.removed.iter()),
            changed: cut(&mut items.changed.iter().map(|changed| &changed.name)),
            kept: items.kept,
        }
    }
}

impl Event {
    fn level(&self) -> Level {
        match self {
            Self::UpstreamHealthChanged { to: "eligible", .. }
            | Self::ReadinessChanged { to: "ready", .. }
            | Self::CircuitBreakerChanged { to: "closed" | "half_open", .. }
            | Self::ProxyStarted { .. }
            | Self::UpstreamResolved { .. }
            | Self::CertificateObtained { .. }
            | Self::TraceExportRecovered { .. }
            | Self::UpstreamUndrained { .. }
            | Self::UpstreamWeightChanged { .. }
            | Self::CircuitBreakerForced { to: "auto", .. }
            | Self::LogLevelChanged { .. }
            | Self::ConfigReloaded { .. }
            | Self::UpgradeStarted { .. }
            | Self::UpgradeComplete { .. }
            | Self::ShutdownStarted { .. }
            | Self::ShutdownComplete { .. } => Level::Info,
            Self::CertificateFailed { .. }
            | Self::TraceExportFailed { .. }
            | Self::ReadinessChanged { .. }
            | Self::UpstreamResolveFailed { .. }
            | Self::UpstreamHealthChanged { .. }
            | Self::CircuitBreakerChanged { .. }
            | Self::UpstreamDrained { .. }
            | Self::CircuitBreakerForced { .. }
            | Self::UpstreamError { .. }
            | Self::AcceptFailed { .. }
            | Self::ReloadIgnored { .. }
            | Self::UpgradeIgnored { .. }
            | Self::SocketsUnused { .. }
            | Self::ShutdownForced { .. } => Level::Warn,
            Self::WorkerFailed { .. }
            | Self::ExchangePanicked { .. }
            | Self::ConfigRejected { .. }
            | Self::UpgradeFailed { .. } => Level::Error,
        }
    }
}

/// The reason of what somebody did over the admin address.
pub const BY_ADMIN: &str = "admin";

/// Where events go, and from which severity on.
#[derive(Debug)]
pub struct Events {
    log: Log,
    least: AtomicU8,
}

#[derive(Serialize)]
struct Line<'a> {
    time: String,
    level: &'static str,
    msg: &'a str,
    #[serde(flatten)]
    event: &'a Event,
}

impl Events {
    /// Events of at least this severity go to `log`.
    pub fn new(log: Log, least: Level) -> Self {
        Self { log, least: AtomicU8::new(least as u8) }
    }

    /// The writer behind.
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// The least severity that is written.
    pub fn least(&self) -> Level {
        Level::from_u8(self.least.load(Relaxed))
    }

    /// Changes the least severity that is written. That it was is always written.
    pub fn set_least(&self, level: Level, by: String) -> Level {
        let before = Level::from_u8(self.least.swap(level as u8, Relaxed));
        if before != level {
            let (from, to) = (before.name(), level.name());
            self.write(&Event::LogLevelChanged { from, to, why: BY_ADMIN, by });
        }
        before
    }

    /// Writes one event, if it is severe enough.
    pub fn emit(&self, event: &Event) {
        if event.level() >= self.least() {
            self.write(event);
        }
    }

    fn write(&self, event: &Event) {
        let level = event.level();
        let named = serde_json::to_value(event).unwrap_or_default();
        let msg = named.get("event").and_then(|v| v.as_str()).unwrap_or("event");
        let line = Line { time: timestamp(clock::wall_ms()), level: level.name(), msg, event };
        if let Ok(mut text) = serde_json::to_vec(&line) {
            text.push(b'\n');
            self.log.lines(text, 1);
        }
    }
}

/// RFC 3339 with milliseconds, UTC.
pub fn timestamp(ms: u64) -> String {
    let mut out = Vec::with_capacity(24);
    write_timestamp(&mut out, ms);
    String::from_utf8(out).unwrap_or_default()
}

/// Appends what [`timestamp`] gives.
pub fn write_timestamp(out: &mut Vec<u8>, ms: u64) {
    let (days, in_day) = (ms / 86_400_000, ms % 86_400_000);
    let (year, month, day) = civil(days);
    let mut part = |mark: Option<u8>, value: u64, digits: u32| {
        out.extend(mark);
        out.extend((0..digits).rev().map(|place| b'0' + (value / 10u64.pow(place) % 10) as u8));
    };
    part(None, year, 4);
    part(Some(b'-'), month, 2);
    part(Some(b'-'), day, 2);
    part(Some(b'T'), in_day / 3_600_000, 2);
    part(Some(b':'), in_day / 60_000 % 60, 2);
    part(Some(b':'), in_day / 1000 % 60, 2);
    part(Some(b'.'), in_day % 1000, 3);
    out.push(b'Z');
}

/// Year, month and day of a day counted from 1970-01-01 in the Gregorian calendar. Years are
/// reckoned from March, so that the leap day is the last.
fn civil(days: u64) -> (u64, u64, u64) {
    let from_march = days + 719_468;
    let era = from_march / 146_097;
    let day_of_era = from_march % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timestamps() {
        for (ms, text) in [
            (0, "1970-01-01T00:00:00.000Z"),
            (951_782_399_999, "2000-02-28T23:59:59.999Z"),
            (951_782_400_000, "2000-02-29T00:00:00.000Z"),
            (1_795_910_400_123, "2026-11-29T00:00:00.123Z"),
            (4_107_542_400_000, "2100-03-01T00:00:00.000Z"),
        ] {
            assert_eq!(timestamp(ms), text);
        }
    }

    #[test]
    fn an_event_is_one_json_line_with_its_name() {
        let event = Event::ReloadIgnored { why: "a \"reason\"" };
        let line = Line { time: timestamp(0), level: "warn", msg: "reload_ignored", event: &event };
        assert_eq!(
            serde_json::to_string(&line).unwrap(),
            r#"{"time":"1970-01-01T00:00:00.000Z","level":"warn","msg":"reload_ignored","event":"reload_ignored","why":"a \"reason\""}"#
        );
    }
}
