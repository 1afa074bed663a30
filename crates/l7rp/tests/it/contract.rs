//! The names, types and labels of all metrics: what dashboards and alerts are built on.

use std::collections::{BTreeMap, BTreeSet};

use l7rp_testkit::{Metrics, Origin, reply};

use crate::everything::{Everything, TOUCHED, samples};
use crate::reload::{file, pool};
use crate::setup::over;
use crate::tls_kit::{Ca, HOST, tls};

const COUNTER: &str = "counter";
const GAUGE: &str = "gauge";
const HISTOGRAM: &str = "histogram";

/// Every family: name, type, labels.
const FAMILIES: &[(&str, &str, &str)] = &[
    ("proxy_requests_total", COUNTER, "route method status"),
    ("proxy_request_duration_seconds", HISTOGRAM, "route method"),
    ("proxy_upstream_requests_total", COUNTER, "pool upstream status"),
    ("proxy_upstream_duration_seconds", HISTOGRAM, "pool upstream"),
    ("proxy_upstream_inflight", GAUGE, "pool upstream"),
    ("proxy_upstream_eligible", GAUGE, "pool upstream"),
    ("proxy_upstream_connections", GAUGE, "pool upstream state"),
    ("proxy_circuit_breaker_state", GAUGE, "pool upstream"),
    ("proxy_circuit_breaker_forced", GAUGE, "pool upstream"),
    ("proxy_circuit_breaker_transitions_total", COUNTER, "pool upstream to"),
    ("proxy_health_eligibility_transitions_total", COUNTER, "pool upstream to reason"),
    ("proxy_no_route_total", COUNTER, "listener"),
    ("proxy_panics_total", COUNTER, "location"),
    ("proxy_hedge_fired_total", COUNTER, "route"),
    ("proxy_hedge_winner_total", COUNTER, "route winner"),
    ("proxy_retry_attempts_total", COUNTER, "route outcome"),
    ("proxy_retry_budget_exhausted_total", COUNTER, "pool"),
    ("proxy_rate_limited_total", COUNTER, "route"),
    ("proxy_tunnels", GAUGE, "route"),
    ("proxy_shed_total", COUNTER, "scope"),
    ("proxy_bad_requests_total", COUNTER, "listener reason"),
    ("proxy_connections", GAUGE, "listener"),
    ("proxy_connections_leaving", GAUGE, ""),
    ("proxy_connections_total", COUNTER, "listener protocol"),
    ("proxy_tls_handshake_failures_total", COUNTER, "listener reason"),
    ("proxy_certificate_expiry_timestamp_seconds", GAUGE, "listener host"),
    ("proxy_http2_floods_total", COUNTER, "listener reason"),
    ("proxy_http2_stalled_streams_total", COUNTER, "listener"),
    ("proxy_config_reloads_total", COUNTER, "outcome"),
    ("proxy_config_reload_duration_seconds", HISTOGRAM, ""),
    ("proxy_config_last_reload_successful", GAUGE, ""),
    ("proxy_config_last_reload_success_timestamp_seconds", GAUGE, ""),
    ("proxy_config_generation", GAUGE, ""),
    ("proxy_access_log_dropped_total", COUNTER, ""),
    ("proxy_build_info", GAUGE, "version"),
    ("process_start_time_seconds", GAUGE, ""),
    ("proxy_took_over", GAUGE, ""),
    ("process_cpu_seconds_total", COUNTER, ""),
    ("process_virtual_memory_bytes", GAUGE, ""),
    ("process_resident_memory_bytes", GAUGE, ""),
    ("process_threads", GAUGE, ""),
    ("process_open_fds", GAUGE, ""),
    ("process_max_fds", GAUGE, ""),
];

/// Labels whose values are a fixed list, all of which are always there.
const FIXED: &[(&str, &str, &str)] = &[
    ("proxy_upstream_connections", "state", "active idle"),
    ("proxy_circuit_breaker_transitions_total", "to", "closed half_open open"),
    ("proxy_hedge_winner_total", "winner", "hedge primary"),
    ("proxy_retry_attempts_total", "outcome", "failure success"),
    ("proxy_shed_total", "scope", "connections listener pool process upstream"),
    ("proxy_connections_total", "protocol", "http1 http2"),
    ("proxy_config_reloads_total", "outcome", "ok rejected"),
    ("proxy_health_eligibility_transitions_total", "to", "eligible ineligible"),
];

const BOUNDS: &str = "0.001 0.005 0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 +Inf";

fn set<'a>(words: impl IntoIterator<Item = &'a str>) -> BTreeSet<&'a str> {
    words.into_iter().collect()
}

/// The families that a scrape declares, and their types.
fn declared(metrics: &Metrics) -> BTreeMap<&str, &str> {
    let types = metrics.text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    types.filter_map(|line| line.split_once(' ')).collect()
}

#[test]
fn every_metric_has_its_name_its_type_and_its_labels() {
    let mut all = Everything::start();
    (0..2).for_each(|_| all.round());
    all.settle();
    let metrics = all.proxy.metrics();
    let expected: BTreeMap<_, _> = FAMILIES.iter().map(|(name, kind, _)| (*name, *kind)).collect();
    assert_eq!(declared(&metrics), expected);
    let samples = samples(&metrics);
    let mut left: BTreeSet<_> = samples.keys().collect();
    for (name, kind, labels) in FAMILIES {
        let labels = set(labels.split_ascii_whitespace());
        let parts: &[&str] =
            if *kind == HISTOGRAM { &["_bucket", "_sum", "_count"] } else { &[""] };
        for part in parts {
            let mut labels = labels.clone();
            labels.extend((*part == "_bucket").then_some("le"));
            let name = format!("{name}{part}");
            let mut bounds = BTreeSet::new();
            for series in samples.keys().filter(|(n, _)| *n == name) {
                assert_eq!(set(series.1.keys().map(String::as_str)), labels, "{series:?}");
                bounds.extend(series.1.get("le").map(String::as_str));
                left.remove(series);
            }
            if *part == "_bucket" {
                assert_eq!(bounds, set(BOUNDS.split(' ')), "{name}");
            }
        }
    }
    assert!(left.is_empty(), "of no family: {left:?}");
    for (name, label, values) in FIXED {
        let found = samples.keys().filter(|(n, _)| n == name).map(|(_, labels)| &*labels[*label]);
        assert_eq!(set(found), set(values.split(' ')), "{label} of {name}");
    }
}

#[test]
fn what_a_reload_removes_is_in_no_metric_any_more() {
    let mut all = Everything::start();
    (0..2).for_each(|_| all.round());
    all.settle();
    let before = samples(&all.proxy.metrics());
    let is_of = |labels: &BTreeMap<String, String>, names: &[String]| {
        ["route", "pool", "upstream", "listener"]
            .iter()
            .any(|label| labels.get(*label).is_some_and(|value| names.contains(value)))
    };
    // It was there: every family that speaks of what the file names.
    for (name, kind, labels) in FAMILIES {
        let speaks = ["route", "pool", "listener"].iter().any(|label| labels.contains(label));
        let name = if *kind == HISTOGRAM { format!("{name}_count") } else { (*name).to_owned() };
        if speaks && TOUCHED.contains(&name.as_str()) {
            let of_it =
                before.iter().filter(|((n, labels), _)| *n == name && is_of(labels, &all.names));
            assert!(of_it.map(|(_, value)| value).sum::<f64>() > 0.0, "{name}");
        }
    }
    let new = Origin::start(reply::name("new"));
    let other = "name: other, bind: \"127.0.0.1:0\"";
    all.proxy.reload(&file(&[other], &[pool("b", &[&new], "")], &["name: all, pool: b"]));
    let after = samples(&all.proxy.metrics());
    let stays: Vec<_> = after.keys().filter(|(_, labels)| is_of(labels, &all.names)).collect();
    assert!(stays.is_empty(), "{stays:#?}");
    // What has come is there, and begins at nothing.
    let requests =
        ("proxy_no_route_total".to_owned(), [("listener".into(), "other".into())].into());
    assert_eq!(after.get(&requests), Some(&0.0));
    assert!(after.keys().any(|(_, labels)| labels.get("route").is_some_and(|r| r == "all")));
}

#[test]
fn of_several_certificates_for_one_name_the_first_to_expire_is_told() {
    const NAME: &str = "proxy_certificate_expiry_timestamp_seconds";
    let ca = Ca::new("ca");
    let until = |name: &str, year: i32| {
        ca.issue_with(name, &[HOST], |params| params.not_after = rcgen::date_time_ymd(year, 1, 1))
    };
    let (late, early) = (until("late", 2150), until("early", 2149));
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).listener(&tls(&[&late, &early, &late], "")).start();
    let metrics = proxy.metrics();
    // 2149-01-01, once.
    let expected = format!("{NAME}{{listener=\"web\",host=\"{HOST}\"}} 5648745600");
    let lines: Vec<_> = metrics.text.lines().filter(|line| line.starts_with(NAME)).collect();
    assert_eq!(lines, [expected]);
}
