//! Routes that no request can take, because others take all that they match.
//!
//! In the order of precedence a rule comes after one with a narrower host or a longer prefix, and
//! none of those matches all that it matches. So what hides a route has the same host and the same
//! prefix. One without conditions comes after all with conditions, and these leave something; so
//! only routes with conditions hide each other, in the order of the file.

use std::collections::{BTreeSet, HashMap};

use l7rp_core::http1::encode::Changes;

use super::{Lint, at};
use crate::config::plan::{HostPattern, Route};

pub(super) fn check(lint: &mut Lint<'_>) {
    let guarded = guarded(lint);
    let mut groups: HashMap<(&HostPattern, &str), Group> = HashMap::new();
    for (index, route) in lint.plan.routes.iter().enumerate() {
        let never = route.predicates.iter().position(|(name, _)| guarded.drops(name.as_bytes()));
        if let Some(predicate) = never {
            let name = &route.predicates[predicate].0;
            let at = at("routes", index).key("header_predicates").index(predicate).key("name");
            let message = format!(
                "the route `{}` can never be taken: no request has `{name}`, which is taken from no client",
                route.name
            );
            let help = "it is an `identity_header`, or differs from one by `_` alone";
            lint.tell("guarded-predicate", &at, &message, help);
            continue;
        }
        if route.methods.is_empty() && route.predicates.is_empty() {
            continue;
        }
        let group = groups.entry((&route.host, &route.path_prefix)).or_default();
        if let Some(hidden_by) = group.hides(lint, route) {
            hidden(lint, index, &hidden_by);
        }
        group.add(index, route);
    }
}

/// The fields by which only the proxy speaks.
pub(super) fn guarded(lint: &Lint<'_>) -> Changes {
    let tls = lint.plan.listeners.iter().filter_map(|listener| listener.tls.as_ref());
    let names = tls.filter_map(|tls| tls.client_auth.as_ref()?.identity_header.clone());
    Changes { guarded: names.collect(), ..Changes::default() }
}

fn hidden(lint: &mut Lint<'_>, index: usize, by: &BTreeSet<usize>) {
    let name = &lint.plan.routes[index].name;
    let named: Vec<_> = by.iter().map(|&route| lint.route_named(route)).collect();
    let (together, match_) = if by.len() > 1 { ("together ", "match") } else { ("", "matches") };
    let message = format!(
        "the route `{name}` can never be taken: {} {together}{match_} all that it matches",
        named.join(" and ")
    );
    lint.tell("unreachable-route", &at("routes", index), &message, "put it first, or remove it");
}

/// Routes with the same host and prefix, each with conditions, found by one of their predicates:
/// programs make files with thousands of them.
#[derive(Default)]
struct Group<'a> {
    without_predicates: Vec<usize>,
    by_predicate: HashMap<&'a (String, String), Vec<usize>>,
}

impl<'a> Group<'a> {
    fn add(&mut self, index: usize, route: &'a Route) {
        match route.predicates.first() {
            None => self.without_predicates.push(index),
            Some(first) => self.by_predicate.entry(first).or_default().push(index),
        }
    }

    /// The earlier routes that match all that `route` matches, if there are such.
    fn hides(&self, lint: &Lint<'a>, route: &Route) -> Option<BTreeSet<usize>> {
        let routes = &lint.plan.routes;
        let known =
            route.predicates.iter().filter_map(|predicate| self.by_predicate.get(predicate));
        let mut earlier: Vec<usize> = known.flatten().copied().collect();
        earlier.extend(&self.without_predicates);
        let asks_no_more = |&ix: &usize| {
            routes[ix].predicates.iter().all(|predicate| route.predicates.contains(predicate))
        };
        earlier.retain(asks_no_more);
        earlier.sort_unstable();
        let mut by = BTreeSet::new();
        for listener in lint.listeners_of(route) {
            let methods: Vec<Option<&String>> = match route.methods.as_slice() {
                [] => vec![None],
                some => some.iter().map(Some).collect(),
            };
            for method in methods {
                let takes = |&&ix: &&usize| {
                    let Route { listeners, methods, .. } = &routes[ix];
                    (listeners.is_empty() || listeners.contains(&listener))
                        && (methods.is_empty() || method.is_some_and(|m| methods.contains(m)))
                };
                by.insert(*earlier.iter().find(takes)?);
            }
        }
        Some(by).filter(|by| !by.is_empty())
    }
}
