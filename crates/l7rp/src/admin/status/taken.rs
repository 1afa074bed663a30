//! Reads it all, without a lock that a request could wait for.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use l7rp_core::http1::request::Method;
use l7rp_core::names::{Nanos, Status as Answered};
use l7rp_core::upstream::breaker::Mode;

use super::{
    Breaker, Certificate, Classes, Config, Connections, Listener, Pool, Probe, Route, Status,
    Upstream,
};
use crate::clock::wall_ms;
use crate::config::plan;
use crate::live::{self, Going, Process, Snapshot};
use crate::observe::event::timestamp;
use crate::observe::stats::{Count, ListenerStats, RouteStats, by_status, connections, state_name};
use crate::sync::lock;
use crate::upstream::pool::{Pool as Live, Upstream as Member};

pub(super) fn status(process: &Process) -> Status {
    let (now, wall) = (process.clock.now(), wall_ms());
    let snapshot = process.snapshot();
    let going = Going::on(process);
    let unready = process.why_unready();
    Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        time: timestamp(wall),
        uptime_ms: now.since(Nanos(0)).as_millis() as u64,
        ready: unready.is_none(),
        why_unready: unready.map(|why| why.words().to_owned()),
        draining: process.is_draining(),
        workers: process.workers as u64,
        in_flight: process.slots.used().into(),
        max_in_flight: process.slots.max().into(),
        connections: going.connections,
        tunnels: going.tunnels,
        log_lines_dropped: process.events.log().dropped(),
        panics: process.panics.all().values().sum(),
        config: config(process, &snapshot),
        listeners: snapshot.listeners.iter().map(|one| listener(one, wall)).collect(),
        routes: snapshot.routes.iter().map(|one| route(one, &snapshot)).collect(),
        pools: snapshot.pools.iter().map(|one| pool(one, now)).collect(),
    }
}

fn config(process: &Process, snapshot: &Snapshot) -> Config {
    let reloads = &process.reloads;
    Config {
        generation: snapshot.generation,
        taken: timestamp(snapshot.taken_ms),
        reloads: reloads.ok.get(),
        rejected: reloads.rejected.get(),
        last_rejected: reloads.last_failed.load(Relaxed),
        last_error: Some(lock(&reloads.last_error).clone()).filter(|why| !why.is_empty()),
    }
}

fn listener(of: &live::Listener, wall: u64) -> Listener {
    let sum = |count: &dyn Fn(&ListenerStats) -> u64| of.stats.iter().map(count).sum();
    let all = |counts: &[Count]| counts.iter().map(Count::get).sum();
    let http3 = of.plan.http3.then_some("h3");
    Listener {
        name: of.plan.name.clone(),
        bind: of.plan.bind.to_string(),
        protocols: ["http/1.1", "h2"].into_iter().chain(http3).map(str::to_owned).collect(),
        tls: of.tls.is_some(),
        certificates: of
            .tls
            .iter()
            .flat_map(|tls| tls.certificates())
            .map(|shown| Certificate {
                host: shown.host,
                expires: timestamp(shown.not_after.max(0) as u64 * 1000),
                expires_in_s: shown.not_after - (wall / 1000).cast_signed(),
            })
            .collect(),
        connections: of.connections.used().into(),
        max_connections: of.connections.max().into(),
        in_flight: of.slots.used().into(),
        max_in_flight: of.slots.max().into(),
        no_route: sum(&|s| s.no_route.get()),
        bad_requests: sum(&|s| all(&s.bad)),
        shed: sum(&|s| all(&s.shed)),
        tls_failures: sum(&|s| all(&s.tls_failures)),
    }
}

fn route(of: &live::Route, snapshot: &Snapshot) -> Route {
    let plan = &of.plan;
    let mut by_class = Classes::default();
    let shards = of.stats.iter();
    let seen = shards.flat_map(|shard| Method::ALL.into_iter().filter_map(|m| shard.seen(m)));
    for (status, count) in by_status(seen.map(|method| &method.status)) {
        *match status / 100 {
            1 => &mut by_class.informational,
            2 => &mut by_class.success,
            3 => &mut by_class.redirection,
            4 => &mut by_class.client_error,
            _ => &mut by_class.server_error,
        } += count;
    }
    let Classes { informational, success, redirection, client_error, server_error } = by_class;
    let sum =
        |count: fn(&RouteStats) -> &Count| -> u64 { of.stats.iter().map(|s| count(s).get()).sum() };
    // What has ended is read first, so that nothing seems to have ended before it began.
    let ended = sum(|s| &s.tunnels_ended);
    let (action, pool) = match plan.action {
        plan::Action::Pool(ix) => ("pool", snapshot.pools.get(ix)),
        plan::Action::Redirect { .. } => ("redirect", None),
        plan::Action::Respond { .. } => ("respond", None),
    };
    Route {
        name: plan.name.clone(),
        host: match &plan.host {
            plan::HostPattern::Any => None,
            plan::HostPattern::Exact(host) => Some(host.clone()),
            plan::HostPattern::Wildcard(domain) => Some(format!("*.{domain}")),
        },
        path_prefix: plan.path_prefix.clone(),
        action: action.to_owned(),
        pool: pool.map(|pool| pool.plan.name.clone()),
        requests: informational + success + redirection + client_error + server_error,
        by_class,
        rate_limited: sum(|s| &s.rate_limited),
        tunnels: sum(|s| &s.tunnels_opened).saturating_sub(ended),
    }
}

fn pool(of: &Live, now: Nanos) -> Pool {
    // What time alone has let in again is eligible, even if nobody has asked yet.
    of.wake(now);
    let algorithm = serde_json::to_value(of.plan.selector.algorithm);
    let members = of.upstreams.iter().zip(&of.plan.upstreams).enumerate();
    Pool {
        name: of.plan.name.clone(),
        algorithm: algorithm
            .ok()
            .and_then(|name| Some(name.as_str()?.to_owned()))
            .unwrap_or_default(),
        in_flight: of.lineage.slots.used().into(),
        max_in_flight: of.lineage.slots.max().into(),
        budget_exhausted: of.lineage.budget_exhausted.load(Relaxed),
        upstreams: members.map(|(ix, (one, plan))| upstream(of, ix, one, plan, now)).collect(),
    }
}

fn upstream(pool: &Live, ix: usize, of: &Member, plan: &plan::Upstream, now: Nanos) -> Upstream {
    let (mut requests, mut failures) = (0, 0);
    for (http, count) in by_status(of.stats.iter().map(|shard| &shard.status)) {
        requests += count;
        failures += if pool.is_failure(Answered { http, grpc: None }) { count } else { 0 };
    }
    let errors: u64 = of.stats.iter().map(|shard| shard.errors.get()).sum();
    let cancels: u64 = of.stats.iter().map(|shard| shard.cancels.get()).sum();
    let (idle, active) = connections(&of.stats);
    let (eligible, hold) = (pool.is_eligible(ix), of.hold());
    let obstacle = pool.obstacle(ix, now);
    Upstream {
        url: of.url.clone(),
        weight: plan.weight.into(),
        backup: plan.backup,
        eligible,
        drained: hold.drained,
        why_not: if eligible { None } else { obstacle.map(|obstacle| obstacle.to_string()) },
        breaker: Breaker {
            state: state_name(of.breaker.state()).to_owned(),
            forced: hold.breaker != Mode::Auto,
            admits_in_ms: match of.breaker.admits_at() {
                None => Some(0),
                Some(Nanos::NEVER) => None,
                // Rounded up: at 0 it does.
                Some(at) => Some(at.since(now).as_nanos().div_ceil(1_000_000) as u64),
            },
        },
        in_flight: of.seat.in_flight().into(),
        max_in_flight: plan.max_in_flight.into(),
        ewma_ms: pool.latency(of, now).map(|seconds| round(seconds * 1000.0)),
        requests: requests + errors + cancels,
        failures: failures + errors,
        last_probe: of.last_probe().map(|probed| Probe {
            ago_ms: now.since(probed.at).as_millis() as u64,
            took_ms: millis(probed.took),
            good: probed.good,
            reason: probed.why,
        }),
        addresses: of.current_addresses().iter().map(ToString::to_string).collect(),
        connections: Connections { idle, active },
    }
}

fn millis(time: Duration) -> f64 {
    round(time.as_secs_f64() * 1000.0)
}

/// To a microsecond: what is beyond is noise.
fn round(ms: f64) -> f64 {
    (ms * 1000.0).round() / 1000.0
}
