//! What is told of routes, held against the table that requests are looked up in.

use std::collections::BTreeSet;

use l7rp_core::route::{HostPattern, Request, Rule, Table, parse_host};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

use super::super::check;
use crate::config::plan::{self, Plan};

const HOSTS: [&str; 3] = ["a.test", "b.test", "none"];
const PATHS: [&str; 5] = ["/", "/v1", "/v1/", "/v1/x", "/v1/z"];
const METHODS: [&str; 3] = ["GET", "POST", "PUT"];
const FIELDS: [&str; 2] = ["x-a", "x-b"];

/// The keys of a route by which it is chosen.
fn keys() -> impl Strategy<Value = String> {
    let host = select(vec!["", "host: a.test, ", "host: '*.test', "]);
    let prefix = select(vec!["/", "/v1", "/v1/", "/v1/x"]);
    let listeners = subsequence(vec!["l0", "l1"], 0..=2);
    let methods = subsequence(vec!["GET", "POST"], 0..=2);
    let fields = subsequence(FIELDS.to_vec(), 0..=2);
    (host, prefix, listeners, methods, fields).prop_map(
        |(host, prefix, listeners, methods, fields)| {
            let fields: Vec<_> =
                fields.iter().map(|name| format!("{{ name: {name}, value: '1' }}")).collect();
            format!(
                "{host}path_prefix: {prefix}, listeners: [{}], methods: [{}], header_predicates: [{}]",
                listeners.join(", "),
                methods.join(", "),
                fields.join(", ")
            )
        },
    )
}

fn file(routes: &[String]) -> String {
    let mut text = "listeners: [{ name: l0, bind: '127.0.0.1:80' }, { name: l1, bind: '127.0.0.1:81' }]\nroutes:\n".to_owned();
    for (ix, keys) in routes.iter().enumerate() {
        text.extend(["  - { name: r", &ix.to_string(), ", ", keys, ", respond: {} }\n"]);
    }
    text
}

fn table(plan: &Plan) -> Table {
    let rule = |route: &plan::Route| Rule {
        host: match &route.host {
            plan::HostPattern::Any => HostPattern::Any,
            plan::HostPattern::Exact(host) => HostPattern::Exact(host.clone()),
            plan::HostPattern::Wildcard(suffix) => HostPattern::Wildcard(suffix.clone()),
        },
        prefix: route.path_prefix.clone(),
        methods: route.methods.clone(),
        predicates: route.predicates.clone(),
        listeners: route.listeners.clone(),
    };
    Table::new(plan.routes.iter().map(rule).collect())
}

/// The routes that no request takes, of all requests that routes can tell apart.
fn never_taken(plan: &Plan) -> BTreeSet<usize> {
    let table = table(plan);
    let mut never: BTreeSet<usize> = (0..plan.routes.len()).collect();
    for case in 0..2 * HOSTS.len() * PATHS.len() * METHODS.len() * 4 {
        let (listener, case) = (case % 2, case / 2);
        let (host, case) = (HOSTS[case % HOSTS.len()], case / HOSTS.len());
        let (path, case) = (PATHS[case % PATHS.len()], case / PATHS.len());
        let (method, fields) = (METHODS[case % METHODS.len()], case / METHODS.len());
        let has_field = |name: &str, _: &str| {
            FIELDS.iter().position(|field| *field == name).is_some_and(|bit| fields >> bit & 1 == 1)
        };
        let request = Request {
            listener,
            host: parse_host(host.as_bytes()).ok(),
            path: path.as_bytes(),
            method: method.as_bytes(),
            has_field: &has_field,
        };
        if let Some(taken) = table.find(&request) {
            never.remove(&taken);
        }
    }
    never
}

proptest! {
    #[test]
    fn those_that_no_request_takes_are_told_and_no_others(routes in vec(keys(), 1..7)) {
        // Many of them are refused; those that are not have something to tell.
        if let Ok(loaded) = check(&file(&routes)) {
            let told = loaded.lint();
            let told = told.iter().filter(|wrong| wrong.message.ends_with("[unreachable-route]"));
            let told: BTreeSet<String> = told.map(|wrong| wrong.path.to_string()).collect();
            let never = never_taken(&loaded.plan);
            let never: BTreeSet<_> = never.iter().map(|ix| format!("routes[{ix}]")).collect();
            prop_assert_eq!(told, never, "{}", loaded.source.text);
        }
    }
}
