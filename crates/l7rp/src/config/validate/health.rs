//! Health checks and breakers.

use l7rp_core::grpc;

use super::{Check, Complaint, words};
use crate::config::file::{
    Active, CircuitBreaker, Health as Written, KeyPath, Passive, StatusSpec, show_duration,
};
use crate::config::plan::{ActiveHealth, Breaker, PassiveHealth};

/// Both kinds of health checks of a pool.
pub(super) struct Health {
    pub(super) active: Option<ActiveHealth>,
    pub(super) passive: Option<PassiveHealth>,
}

pub(super) fn check(check: &mut Check<'_>, written: &Written, at: &KeyPath) -> Health {
    let passive_at = at.key("passive");
    if written.passive.is_some() && written.active.is_none() && !check.doubtful_key(at, "active") {
        let complaint = Complaint::new("`passive` needs `active`");
        let help = "scoring only takes upstreams out; it is probes that bring them back";
        check.complain(&passive_at, complaint.help(help));
    }
    Health {
        active: written
            .active
            .as_ref()
            .map(|active| self::active(check, active, &at.key("active"))),
        passive: written.passive.as_ref().map(|passive| self::passive(check, passive, &passive_at)),
    }
}

fn active(check: &mut Check<'_>, written: &Active, at: &KeyPath) -> ActiveHealth {
    check.or_complain(words::path(&written.path), &at.key("path"));
    check.or_complain(words::method(&written.method), &at.key("method"));
    let interval_at = at.key("interval");
    let interval = check.time_above_zero(written.interval, &interval_at);
    let timeout = check.time_above_zero(written.timeout, &at.key("timeout"));
    if !interval.is_zero() && interval <= timeout {
        let message = format!(
            "`interval` ({}) must be longer than `timeout` ({})",
            show_duration(interval),
            show_duration(timeout)
        );
        // Whichever of the two is in the file is the one to point at.
        let written = check.tree.get(&interval_at).is_some();
        let place = if written { interval_at } else { at.key("timeout") };
        check.wrong(&place, message);
    }
    let status_at = at.key("expected_status");
    if written.expected_status.is_empty() {
        check.wrong(&status_at, "with no `expected_status` every probe would fail");
    }
    ActiveHealth {
        path: written.path.clone(),
        method: written.method.clone(),
        interval,
        timeout,
        healthy_threshold: check
            .at_least_one(written.healthy_threshold, &at.key("healthy_threshold")),
        unhealthy_threshold: check
            .at_least_one(written.unhealthy_threshold, &at.key("unhealthy_threshold")),
        expected_status: check.statuses(&written.expected_status, &status_at),
    }
}

fn passive(check: &mut Check<'_>, written: &Passive, at: &KeyPath) -> PassiveHealth {
    PassiveHealth {
        error_threshold: check
            .share_above_zero(written.error_threshold, &at.key("error_threshold")),
        latency_threshold_p99: check
            .time(written.latency_threshold_p99, &at.key("latency_threshold_p99")),
        half_life: check.time_above_zero(written.half_life, &at.key("half_life")),
    }
}

pub(super) fn breaker(check: &mut Check<'_>, written: &CircuitBreaker, at: &KeyPath) -> Breaker {
    let open_min = check.time_above_zero(written.open_min, &at.key("open_min"));
    let open_max = check.time_above_zero(written.open_max, &at.key("open_max"));
    if open_min > open_max && !open_max.is_zero() {
        let message = format!(
            "`open_min` ({}) is longer than `open_max` ({})",
            show_duration(open_min),
            show_duration(open_max)
        );
        let min_at = at.key("open_min");
        let written = check.tree.get(&min_at).is_some();
        check.wrong(&if written { min_at } else { at.key("open_max") }, message);
    }
    let min_at = at.key("min_observations");
    let min_observations = check.at_least_one(written.min_observations, &min_at);
    // Each upstream holds as many words.
    let window_size = check.between(written.window_size, 1, 65_536, &at.key("window_size"));
    if min_observations > window_size && window_size > 0 {
        let message = format!(
            "with `min_observations` {min_observations} above `window_size` {window_size} it would never open"
        );
        let written = check.tree.get(&min_at).is_some();
        check.wrong(&if written { min_at } else { at.key("window_size") }, message);
    }
    Breaker {
        failure_ratio: check.share_above_zero(written.failure_ratio, &at.key("failure_ratio")),
        min_observations,
        window: check.time_above_zero(written.window, &at.key("window")),
        window_size,
        open_min,
        open_max,
        half_open_probes: check.between(
            written.half_open_probes,
            1,
            4095,
            &at.key("half_open_probes"),
        ),
        consecutive_failures: written.consecutive_failures,
        failure_statuses: check.statuses(&written.failure_statuses, &at.key("failure_statuses")),
        failure_grpc_statuses: check
            .grpc_statuses(&written.failure_grpc_statuses, &at.key("failure_grpc_statuses")),
    }
}

impl Check<'_> {
    /// Statuses of gRPC calls, by name.
    pub(super) fn grpc_statuses(&mut self, written: &[String], at: &KeyPath) -> Vec<u8> {
        let mut statuses = Vec::with_capacity(written.len());
        for (i, name) in written.iter().enumerate() {
            if let Some(status) = grpc::STATUSES.iter().position(|status| status == name) {
                statuses.push(status as u8);
            } else {
                let message = format!("`{}` is not a gRPC status", name.escape_debug());
                let help = format!("the statuses are {}", grpc::STATUSES.join(", "));
                self.complain(&at.index(i), Complaint::new(message).help(help));
            }
        }
        statuses
    }

    /// Ranges of statuses, both ends included.
    fn statuses(&mut self, written: &[StatusSpec], at: &KeyPath) -> Vec<(u16, u16)> {
        let mut ranges = Vec::with_capacity(written.len());
        for (i, spec) in written.iter().enumerate() {
            match spec {
                StatusSpec::Class(class) => ranges.push((class * 100, class * 100 + 99)),
                StatusSpec::Code(code) => match u16::try_from(*code) {
                    Ok(code) if (100..=599).contains(&code) => ranges.push((code, code)),
                    _ => {
                        let message = format!("a status is from 100 to 599, is {code}");
                        self.wrong(&at.index(i), message);
                    }
                },
                StatusSpec::Other(text) => {
                    let complaint =
                        Complaint::new(format!("`{}` is not a status", text.escape_debug()));
                    self.complain(
                        &at.index(i),
                        complaint.help("write `503`, or `5xx` for a class"),
                    );
                }
            }
        }
        ranges
    }
}
