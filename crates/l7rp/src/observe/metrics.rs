//! Metrics in the Prometheus text format. Every series belongs to something in force: a
//! route, a pool, an upstream, a listener, so that their number is bounded by the
//! configuration, whatever clients send.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::atomic::Ordering::Relaxed;

use l7rp_core::failure::Scope;
use l7rp_core::http1::request::Method;
use l7rp_core::upstream::breaker::Mode;

use super::stats::{
    BAD_REASONS, BUCKETS, Count, DurationSum, ListenerStats, RouteStats, STATES, TLS_FAILURES,
    UpstreamStats, by_status, connections, state_name, tls_failure_name,
};
use crate::http2::meter::Flood;
use crate::live::{Going, Process, Snapshot};
use crate::upstream::pool::Upstream;

/// All metrics of the process.
pub fn render(process: &Process) -> String {
    let snapshot = process.snapshot();
    for pool in &snapshot.pools {
        // What time alone has let in again is eligible, even if nobody has asked yet.
        pool.wake(process.clock.now());
    }
    let mut text = Text(String::with_capacity(16 << 10));
    routes(&mut text, &snapshot);
    tunnels(&mut text, &snapshot);
    tries(&mut text, &snapshot);
    breakers(&mut text, &snapshot);
    upstreams(&mut text, &snapshot);
    listeners(&mut text, &snapshot, Going::on(process).connections);
    shed(&mut text, process);
    own(&mut text, process);
    resources(&mut text, process);
    text.0
}

/// The text format, line by line.
struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        self.0.push_str(name);
        for (ix, (label, value)) in labels.iter().enumerate() {
            self.0.push(if ix == 0 { '{' } else { ',' });
            self.0.push_str(label);
            self.0.push_str("=\"");
            for c in value.chars() {
                match c {
                    '\\' => self.0.push_str("\\\\"),
                    '"' => self.0.push_str("\\\""),
                    '\n' => self.0.push_str("\\n"),
                    c => self.0.push(c),
                }
            }
            self.0.push('"');
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {value}");
    }

    fn histogram(&mut self, name: &str, labels: &[(&str, &str)], sum: &DurationSum) {
        let bucket = format!("{name}_bucket");
        let mut total = 0;
        for (ix, count) in sum.buckets.iter().enumerate() {
            total += count;
            let bound = BUCKETS.get(ix).map_or_else(|| "+Inf".to_owned(), ToString::to_string);
            let mut with = labels.to_vec();
            with.push(("le", &bound));
            self.sample(&bucket, &with, total);
        }
        self.sample(&format!("{name}_sum"), labels, sum.seconds);
        self.sample(&format!("{name}_count"), labels, total);
    }
}

fn routes(text: &mut Text, snapshot: &Snapshot) {
    let name = "proxy_requests_total";
    text.family(
        name,
        "counter",
        "Requests that a route was found for, by route, method and status.",
    );
    for route in &snapshot.routes {
        for method in Method::ALL {
            let seen = route.stats.iter().filter_map(|shard| shard.seen(method));
            for (status, count) in by_status(seen.map(|m| &m.status)) {
                let labels = [
                    ("route", route.plan.name.as_str()),
                    ("method", method.label()),
                    ("status", &status.to_string()),
                ];
                text.sample(name, &labels, count);
            }
        }
    }
    let name = "proxy_request_duration_seconds";
    text.family(name, "histogram", "From a request's head to the last octet of its answer.");
    for route in &snapshot.routes {
        for method in Method::ALL {
            let mut sum = DurationSum::default();
            let mut any = false;
            for seen in route.stats.iter().filter_map(|shard| shard.seen(method)) {
                seen.duration.add_to(&mut sum);
                any = true;
            }
            if any {
                let labels = [("route", route.plan.name.as_str()), ("method", method.label())];
                text.histogram(name, &labels, &sum);
            }
        }
    }
}

fn tunnels(text: &mut Text, snapshot: &Snapshot) {
    let name = "proxy_tunnels";
    text.family(name, "gauge", "Upgraded connections.");
    for route in &snapshot.routes {
        let sum = |count: fn(&RouteStats) -> &Count| -> u64 {
            route.stats.iter().map(|shard| count(shard).get()).sum()
        };
        let ended = sum(|s| &s.tunnels_ended);
        let open = sum(|s| &s.tunnels_opened).saturating_sub(ended);
        text.sample(name, &[("route", &route.plan.name)], open);
    }
}

/// What routes do beyond one try for one request, and what they refuse.
fn tries(text: &mut Text, snapshot: &Snapshot) {
    type Of = fn(&RouteStats) -> &Count;
    let mut family = |name: &str, help: &str, label: Option<&str>, counts: &[(&str, Of)]| {
        text.family(name, "counter", help);
        for route in &snapshot.routes {
            for (value, of) in counts {
                let count: u64 = route.stats.iter().map(|shard| of(shard).get()).sum();
                let mut labels = vec![("route", route.plan.name.as_str())];
                labels.extend(label.map(|label| (label, *value)));
                text.sample(name, &labels, count);
            }
        }
    };
    family(
        "proxy_rate_limited_total",
        "Requests refused because there were too many.",
        None,
        &[("", |s| &s.rate_limited)],
    );
    family(
        "proxy_retry_attempts_total",
        "Tries after the first, by whether they gave an answer that no other try was wanted for.",
        Some("outcome"),
        &[("success", |s| &s.retries_succeeded), ("failure", |s| &s.retries_failed)],
    );
    family(
        "proxy_hedge_fired_total",
        "Second tries beside a slow first one.",
        None,
        &[("", |s| &s.hedges)],
    );
    family(
        "proxy_hedge_winner_total",
        "Races of two tries, by who has won.",
        Some("winner"),
        &[("primary", |s| &s.won_by_primary), ("hedge", |s| &s.won_by_hedge)],
    );
    let name = "proxy_retry_budget_exhausted_total";
    text.family(name, "counter", "Extra tries that the pool's budget did not allow.");
    for pool in &snapshot.pools {
        text.sample(
            name,
            &[("pool", &pool.plan.name)],
            pool.lineage.budget_exhausted.load(Relaxed),
        );
    }
}

fn breakers(text: &mut Text, snapshot: &Snapshot) {
    let name = "proxy_circuit_breaker_state";
    text.family(name, "gauge", "0: closed, 1: open, 2: half-open.");
    each_upstream(snapshot, |labels, upstream, _| {
        let state = upstream.breaker.state();
        let place = STATES.iter().position(|s| *s == state).unwrap_or_default();
        text.sample(name, labels, place);
    });
    let name = "proxy_circuit_breaker_forced";
    text.family(name, "gauge", "1 while an operator keeps a circuit breaker open or closed.");
    each_upstream(snapshot, |labels, upstream, _| {
        text.sample(name, labels, u8::from(upstream.hold().breaker != Mode::Auto));
    });
    let name = "proxy_circuit_breaker_transitions_total";
    text.family(name, "counter", "Changes of a circuit breaker, by what it has changed to.");
    each_upstream(snapshot, |labels, upstream, _| {
        for state in STATES {
            let with = [labels[0], labels[1], ("to", state_name(state))];
            text.sample(name, &with, upstream.transitions.breaker_count(state));
        }
    });
    let name = "proxy_health_eligibility_transitions_total";
    text.family(name, "counter", "Changes of an upstream's health, by what to and why.");
    each_upstream(snapshot, |labels, upstream, _| {
        for (to, reason, count) in upstream.transitions.health_counts() {
            let with = [labels[0], labels[1], ("to", to), ("reason", &reason)];
            text.sample(name, &with, count);
        }
    });
}

/// Calls `each` for every upstream with its labels and whether it is eligible.
fn each_upstream(snapshot: &Snapshot, mut each: impl FnMut(&[(&str, &str)], &Upstream, bool)) {
    for pool in &snapshot.pools {
        for (ix, upstream) in pool.upstreams.iter().enumerate() {
            let labels = [("pool", pool.plan.name.as_str()), ("upstream", upstream.url.as_str())];
            each(&labels, upstream, pool.is_eligible(ix));
        }
    }
}

fn upstreams(text: &mut Text, snapshot: &Snapshot) {
    let name = "proxy_upstream_requests_total";
    text.family(name, "counter", "Tries at an upstream, by status; err and cancel had none.");
    each_upstream(snapshot, |labels, upstream, _| {
        let mut sample = |status: &str, count: u64| {
            let with = [labels[0], labels[1], ("status", status)];
            text.sample(name, &with, count);
        };
        for (status, count) in by_status(upstream.stats.iter().map(|s| &s.status)) {
            sample(&status.to_string(), count);
        }
        sample("err", sum(upstream, |s| &s.errors));
        sample("cancel", sum(upstream, |s| &s.cancels));
    });
    let name = "proxy_upstream_duration_seconds";
    text.family(name, "histogram", "From the begin of a try to the last octet of its response.");
    each_upstream(snapshot, |labels, upstream, _| {
        let mut durations = DurationSum::default();
        for shard in upstream.stats.iter() {
            shard.duration.add_to(&mut durations);
        }
        text.histogram(name, labels, &durations);
    });
    let name = "proxy_upstream_inflight";
    text.family(name, "gauge", "Requests in progress at an upstream.");
    each_upstream(snapshot, |labels, upstream, _| {
        text.sample(name, labels, upstream.seat.in_flight());
    });
    let name = "proxy_upstream_eligible";
    text.family(name, "gauge", "Whether an upstream may be chosen.");
    each_upstream(snapshot, |labels, _, eligible| text.sample(name, labels, u8::from(eligible)));
    let name = "proxy_upstream_connections";
    text.family(name, "gauge", "Connections to an upstream, idle and in use.");
    each_upstream(snapshot, |labels, upstream, _| {
        let (idle, active) = connections(&upstream.stats);
        text.sample(name, &[labels[0], labels[1], ("state", "idle")], idle);
        text.sample(name, &[labels[0], labels[1], ("state", "active")], active);
    });
}

fn sum(upstream: &Upstream, count: impl Fn(&UpstreamStats) -> &Count) -> u64 {
    upstream.stats.iter().map(|shard| count(shard).get()).sum()
}

fn listeners(text: &mut Text, snapshot: &Snapshot, connections: u64) {
    let name = "proxy_connections";
    text.family(name, "gauge", "Clients connected.");
    for listener in &snapshot.listeners {
        let labels = [("listener", listener.plan.name.as_str())];
        text.sample(name, &labels, listener.connections.used());
    }
    let name = "proxy_connections_leaving";
    text.family(name, "gauge", "Clients connected where nobody listens any more.");
    let listening: u64 = snapshot.listeners.iter().map(|l| u64::from(l.connections.used())).sum();
    text.sample(name, &[], connections.saturating_sub(listening));
    let name = "proxy_connections_total";
    text.family(name, "counter", "Clients that have connected and spoken, by protocol.");
    for listener in &snapshot.listeners {
        let of_h1: u64 = listener.stats.iter().map(|s| s.opened_h1.get()).sum();
        let of_h2: u64 = listener.stats.iter().map(|s| s.opened_h2.get()).sum();
        for (protocol, count) in [("http1", of_h1), ("http2", of_h2)] {
            let labels = [("listener", listener.plan.name.as_str()), ("protocol", protocol)];
            text.sample(name, &labels, count);
        }
    }
    secured(text, snapshot);
    let name = "proxy_no_route_total";
    text.family(name, "counter", "Requests that no route matched.");
    for listener in &snapshot.listeners {
        let count: u64 = listener.stats.iter().map(|s| s.no_route.get()).sum();
        text.sample(name, &[("listener", &listener.plan.name)], count);
    }
    let name = "proxy_bad_requests_total";
    text.family(name, "counter", "Requests that were refused for what they were, by reason.");
    for listener in &snapshot.listeners {
        for (ix, reason) in BAD_REASONS.into_iter().enumerate() {
            let count: u64 = listener.stats.iter().map(|s| s.bad[ix].get()).sum();
            text.sample(name, &[("listener", &listener.plan.name), ("reason", reason)], count);
        }
    }
}

/// What was turned away for want of room.
fn shed(text: &mut Text, process: &Process) {
    let name = "proxy_shed_total";
    text.family(name, "counter", "Requests and connections refused because something was full.");
    for scope in Scope::ALL {
        let count: u64 = process.counts.iter().map(|s| s.shed[scope.index()].get()).sum();
        text.sample(name, &[("scope", scope.name())], count);
    }
}

/// TLS, and HTTP/2 that was abused.
fn secured(text: &mut Text, snapshot: &Snapshot) {
    let name = "proxy_tls_handshake_failures_total";
    text.family(name, "counter", "TLS handshakes that came to nothing, by reason.");
    for listener in snapshot.listeners.iter().filter(|listener| listener.tls.is_some()) {
        for ix in 0..TLS_FAILURES {
            let count: u64 = listener.stats.iter().map(|s| s.tls_failures[ix].get()).sum();
            let reason = tls_failure_name(ix);
            text.sample(name, &[("listener", &listener.plan.name), ("reason", reason)], count);
        }
    }
    let name = "proxy_certificate_expiry_timestamp_seconds";
    text.family(name, "gauge", "When a certificate expires, in seconds since 1970.");
    for listener in &snapshot.listeners {
        // Several may be for one name: what counts is the first of them to expire.
        let mut first = BTreeMap::new();
        for shown in listener.tls.iter().flat_map(|tls| tls.certificates()) {
            let at = first.entry(shown.host).or_insert(shown.not_after);
            *at = shown.not_after.min(*at);
        }
        for (host, at) in first {
            text.sample(name, &[("listener", &listener.plan.name), ("host", &host)], at);
        }
    }
    let name = "proxy_http2_floods_total";
    text.family(name, "counter", "HTTP/2 connections that were closed for what they sent.");
    for listener in &snapshot.listeners {
        let mut sample = |reason: &str, of: &dyn Fn(&ListenerStats) -> u64| {
            let count: u64 = listener.stats.iter().map(of).sum();
            text.sample(name, &[("listener", &listener.plan.name), ("reason", reason)], count);
        };
        for flood in Flood::ALL {
            sample(flood.name(), &|s| s.h2_floods[flood as usize].get());
        }
        sample("reset_flood", &|s| s.h2_resets.get());
    }
    let name = "proxy_http2_stalled_streams_total";
    text.family(name, "counter", "HTTP/2 streams that were reset because nothing was taken.");
    for listener in &snapshot.listeners {
        let count: u64 = listener.stats.iter().map(|s| s.h2_stalled.get()).sum();
        text.sample(name, &[("listener", &listener.plan.name)], count);
    }
}

fn own(text: &mut Text, process: &Process) {
    let name = "proxy_panics_total";
    text.family(name, "counter", "Panics that were caught, by place.");
    for (location, count) in process.panics.all() {
        text.sample(name, &[("location", &location)], count);
    }
    reloads(text, process);
    spans(text, process);
    let name = "proxy_access_log_dropped_total";
    text.family(name, "counter", "Log lines that found no room, or were not worth one.");
    text.sample(name, &[], process.events.log().dropped());
    let name = "proxy_build_info";
    text.family(name, "gauge", "Always 1; the version is a label.");
    text.sample(name, &[("version", env!("CARGO_PKG_VERSION"))], 1);
}

/// What became of spans, where there are any.
fn spans(text: &mut Text, process: &Process) {
    let snapshot = process.snapshot();
    let Some(tracer) = &snapshot.tracer else { return };
    let name = "proxy_trace_spans_total";
    text.family(name, "counter", "Spans for the collector, by what became of them.");
    let counts = tracer.counts();
    for (outcome, count) in
        [("exported", &counts.exported), ("failed", &counts.failed), ("dropped", &counts.dropped)]
    {
        text.sample(name, &[("outcome", outcome)], count.load(Relaxed));
    }
}

/// What became of the wish for another configuration.
fn reloads(text: &mut Text, process: &Process) {
    let reloads = &process.reloads;
    let name = "proxy_config_reloads_total";
    text.family(name, "counter", "Reloads, by what they have come to.");
    text.sample(name, &[("outcome", "ok")], reloads.ok.get());
    text.sample(name, &[("outcome", "rejected")], reloads.rejected.get());
    let name = "proxy_config_reload_duration_seconds";
    text.family(name, "histogram", "From the wish to the configuration in force, or refused.");
    let mut sum = DurationSum::default();
    reloads.duration.add_to(&mut sum);
    text.histogram(name, &[], &sum);
    let name = "proxy_config_last_reload_successful";
    text.family(name, "gauge", "1, or 0 if the last reload was refused.");
    text.sample(name, &[], u8::from(!reloads.last_failed.load(Relaxed)));
    let name = "proxy_config_last_reload_success_timestamp_seconds";
    text.family(name, "gauge", "When the configuration in force was taken, in seconds since 1970.");
    let at = match reloads.last_success_ms.load(Relaxed) {
        0 => process.started_ms,
        at => at,
    };
    text.sample(name, &[], at as f64 / 1000.0);
    let name = "proxy_config_generation";
    text.family(
        name,
        "gauge",
        "1 at the start, and one more with each reload or change of a weight.",
    );
    text.sample(name, &[], process.generation());
}

/// What the standard process collector tells, under its names.
fn resources(text: &mut Text, process: &Process) {
    let name = "process_start_time_seconds";
    text.family(name, "gauge", "Start of the process, in seconds since 1970.");
    text.sample(name, &[], process.started_ms as f64 / 1000.0);
    let name = "proxy_took_over";
    text.family(name, "gauge", "1 if the process has taken over from another one, or 0.");
    text.sample(name, &[], u8::from(process.took_over.load(Relaxed)));
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name of the program may hold blanks; what follows its bracket does not.
    let fields: Vec<u64> = stat
        .rsplit_once(')')
        .map(|(_, rest)| rest.split_ascii_whitespace().map(|w| w.parse().unwrap_or(0)).collect())
        .unwrap_or_default();
    let field = |ix: usize| fields.get(ix).copied().unwrap_or(0);
    let ticks = rustix::param::clock_ticks_per_second() as f64;
    let name = "process_cpu_seconds_total";
    text.family(name, "counter", "User and system time.");
    text.sample(name, &[], (field(11) + field(12)) as f64 / ticks);
    let name = "process_virtual_memory_bytes";
    text.family(name, "gauge", "Virtual memory.");
    text.sample(name, &[], field(20));
    let name = "process_resident_memory_bytes";
    text.family(name, "gauge", "Resident memory.");
    text.sample(name, &[], field(21) * rustix::param::page_size() as u64);
    let name = "process_threads";
    text.family(name, "gauge", "Threads.");
    text.sample(name, &[], field(17));
    let name = "process_open_fds";
    text.family(name, "gauge", "Open descriptors.");
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |d| d.count().saturating_sub(1));
    text.sample(name, &[], open);
    let name = "process_max_fds";
    text.family(name, "gauge", "Descriptors that may be open.");
    let max = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    text.sample(name, &[], max.unwrap_or(u64::MAX));
}
