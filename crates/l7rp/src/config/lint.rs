//! What is valid and yet cannot be meant: rules that match nothing, limits that are never
//! reached, times that contradict each other. Only what holds whatever the traffic is told: a
//! finding cannot be switched off, so there must be no false one.
//!
//! What a file does not say is not held against it: a default that another key makes pointless is
//! nobody's mistake.

mod admin;
mod limits;
mod loops;
mod pools;
mod routes;
mod timeouts;
mod tries;
mod unreachable;

use super::file::{KeyPath, Kind, Tree};
use super::plan::{Action, Plan, Pool, Retry, Route};
use super::wrong::Wrong;

/// Everything in a valid configuration that cannot be meant, in file order. `tree`: where `plan`
/// comes from.
pub fn lint(plan: &Plan, tree: &Tree) -> Vec<Wrong> {
    let mut lint = Lint { plan, tree, found: Vec::new() };
    unreachable::check(&mut lint);
    routes::check(&mut lint);
    tries::check(&mut lint);
    pools::check(&mut lint);
    loops::check(&mut lint);
    limits::check(&mut lint);
    timeouts::check(&mut lint);
    admin::check(&mut lint);
    lint.found.sort_by(Wrong::in_file_order);
    lint.found
}

/// How the rule about weights that nobody heeds is written behind its message.
pub const UNUSED_WEIGHT: &str = "[unused-weight]";

/// The name of the rule about upstreams that are the proxy itself.
pub const SELF_LOOP: &str = "self-loop";

/// The state of looking.
struct Lint<'a> {
    plan: &'a Plan,
    tree: &'a Tree,
    found: Vec<Wrong>,
}

impl<'a> Lint<'a> {
    /// Tells something by the name of its rule, which stays the same from version to version.
    fn tell(&mut self, rule: &str, at: &KeyPath, message: &str, help: impl Into<String>) {
        let wrong = Wrong::new(at.clone(), format!("{message} [{rule}]")).help(help);
        self.found.push(wrong.place(self.tree.locate(at)));
    }

    /// Whether the file says something there.
    fn written(&self, at: &KeyPath) -> bool {
        self.tree.get(at).is_some_and(|node| !matches!(node.kind, Kind::Null))
    }

    /// Those of `keys` that the file has there.
    fn written_keys<'k>(&self, at: &KeyPath, keys: &[&'k str]) -> Vec<&'k str> {
        keys.iter().filter(|key| self.written(&at.key(key))).copied().collect()
    }

    /// A middleware of a route; the route itself if there is none.
    fn middleware(&self, route: usize, key: &str) -> KeyPath {
        let route = at("routes", route);
        let list = route.key("middleware");
        let Some(Kind::Seq(items)) = self.tree.get(&list).map(|node| &node.kind) else {
            return route;
        };
        let item = items.iter().position(|item| item.get(key).is_some());
        item.map_or(route, |item| list.index(item).key(key))
    }

    /// The name of a route and the line on which it begins.
    fn route_named(&self, route: usize) -> String {
        let line = self.tree.line(self.tree.locate(&at("routes", route)).start);
        format!("`{}` on line {line}", self.plan.routes[route].name)
    }

    /// The listeners of a route, by index.
    fn listeners_of(&self, route: &Route) -> Vec<usize> {
        match route.listeners.as_slice() {
            [] => (0..self.plan.listeners.len()).collect(),
            some => some.to_vec(),
        }
    }

    /// The routes to a pool.
    fn routes_to(&self, pool: usize) -> impl Iterator<Item = (usize, &'a Route)> + use<'a> {
        let routes = self.plan.routes.iter().enumerate();
        routes.filter(move |(_, route)| route.action == Action::Pool(pool))
    }

    /// The pool of a route, if it has one.
    fn pool_of(&self, route: &Route) -> Option<&'a Pool> {
        match route.action {
            Action::Pool(ix) => self.plan.pools.get(ix),
            _ => None,
        }
    }
}

impl Retry {
    fn retries(&self) -> bool {
        self.max_attempts > 1
    }

    fn hedges(&self) -> bool {
        !self.hedge_after.is_zero() || self.hedge_after_percentile > 0.0
    }
}

/// An entry of a list at the root.
fn at(list: &str, index: usize) -> KeyPath {
    KeyPath::root().key(list).index(index)
}

/// Names for people: `` `a`, `b` ``.
fn listed<T: AsRef<str>>(names: &[T]) -> String {
    let names: Vec<_> = names.iter().map(|name| format!("`{}`", name.as_ref())).collect();
    names.join(", ")
}
