//! Routes that take each other's requests.

use std::collections::{BTreeSet, HashMap};

use super::{Check, Complaint, line};
use crate::config::file::KeyPath;
use crate::config::plan::{HostPattern, Route};

/// The routes that were already looked at, found by what they match. Files with thousands of
/// routes are made by programs; comparing each with each would take seconds.
#[derive(Default)]
pub(super) struct Earlier {
    groups: HashMap<(HostPattern, String), Group>,
}

/// Routes with the same host and `path_prefix`.
#[derive(Default)]
struct Group {
    by_conditions: HashMap<Conditions, Vec<Seen>>,
    without_predicates: Vec<Seen>,
}

/// Methods and predicates, in any order.
type Conditions = (BTreeSet<String>, BTreeSet<(String, String)>);

struct Seen {
    index: usize,
    name: String,
    listeners: Vec<usize>,
    methods: BTreeSet<String>,
}

impl Seen {
    fn shares_a_listener(&self, route: &Route) -> bool {
        self.listeners.is_empty()
            || route.listeners.is_empty()
            || self.listeners.iter().any(|listener| route.listeners.contains(listener))
    }

    /// Whether it takes all methods of the other.
    fn covers(&self, methods: &BTreeSet<String>) -> bool {
        self.methods.is_empty() || (!methods.is_empty() && methods.is_subset(&self.methods))
    }
}

impl Earlier {
    /// Complains about a route that an earlier one makes ambiguous or unreachable, and
    /// remembers it.
    pub(super) fn meet(&mut self, check: &mut Check<'_>, index: usize, route: &Route) {
        let key = (route.host.clone(), route.path_prefix.clone());
        let group = self.groups.entry(key).or_default();
        let methods: BTreeSet<String> = route.methods.iter().cloned().collect();
        let predicates: BTreeSet<(String, String)> = route.predicates.iter().cloned().collect();
        let conditions = (methods.clone(), predicates);
        let same = group.by_conditions.get(&conditions).into_iter().flatten();
        let mut same = same.filter(|seen| seen.shares_a_listener(route));
        let mut above = group.without_predicates.iter().filter(|seen| {
            !route.predicates.is_empty() && seen.shares_a_listener(route) && seen.covers(&methods)
        });
        if let Some(first) = same.next() {
            let place = place(check, first);
            let message =
                format!("the route `{}` matches exactly what {place} matches", route.name);
            let help = "host, path_prefix, methods and header_predicates are the same";
            check.ambiguous(first.index, index, Complaint::new(message).help(help));
        } else if let Some(first) = above.next() {
            let place = place(check, first);
            let message = format!(
                "the route `{}` is after {place}, which has the same host and path_prefix but no header_predicates",
                route.name
            );
            let help = "put the route with header_predicates first";
            check.ambiguous(first.index, index, Complaint::new(message).help(help));
        }
        let seen = || Seen {
            index,
            name: route.name.clone(),
            listeners: route.listeners.clone(),
            methods: methods.clone(),
        };
        if route.predicates.is_empty() {
            group.without_predicates.push(seen());
        }
        group.by_conditions.entry(conditions).or_default().push(seen());
    }
}

fn path(index: usize) -> KeyPath {
    KeyPath::root().key("routes").index(index)
}

fn place(check: &Check<'_>, first: &Seen) -> String {
    format!("`{}` on line {}", first.name, line(check.tree, &path(first.index)))
}

impl Check<'_> {
    /// Complains about two routes, unless what tells them apart could not be read.
    fn ambiguous(&mut self, first: usize, second: usize, complaint: Complaint) {
        const KEYS: [&str; 5] =
            ["listeners", "host", "path_prefix", "methods", "header_predicates"];
        let clear = |at: &KeyPath| {
            KEYS.iter().all(|key| {
                let at = at.key(key);
                !self.poisoned.iter().any(|path| path.0.starts_with(&at.0))
                    && !self.wrongs.iter().any(|wrong| wrong.path.0.starts_with(&at.0))
            }) && !KEYS.iter().any(|key| self.misspelt(at, key))
        };
        let (first, second) = (path(first), path(second));
        if clear(&first) && clear(&second) {
            self.complain(&second, complaint);
        }
    }
}
