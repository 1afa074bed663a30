//! What changes from one configuration to another, both as [`view`](super::view()) shows them.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};

use serde::Serialize;
use serde_json::Value;

/// What changes from one configuration to another.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Diff {
    /// Listeners.
    pub listeners: Items,
    /// Pools, apart from their upstreams.
    pub pools: Items,
    /// Upstreams of all pools; each is named by its pool and its URL or address: `POOL URL`.
    pub upstreams: Items,
    /// Routes.
    pub routes: Items,
    /// Layer-4 listeners.
    pub tcp_listeners: Items,
    /// Layer-4 pools, apart from their upstreams.
    pub tcp_pools: Items,
    /// All that is no item of a list; and the order of routes, as `routes.order`. That of the other
    /// lists means nothing.
    pub settings: Vec<Change>,
}

/// What changes in a list whose items have names. In the order of the files.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Items {
    /// In the new one only.
    pub added: Vec<String>,
    /// In the old one only.
    pub removed: Vec<String>,
    /// In both, and different.
    pub changed: Vec<Changed>,
    /// How many are the same in both.
    pub kept: usize,
}

/// An item that is different.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Changed {
    /// Its name.
    pub name: String,
    /// What is different. Not empty.
    pub what: Vec<Change>,
}

/// A value that is different.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Change {
    /// Where, with dots: `timeouts.idle`.
    pub key: String,
    /// What it was; null: absent.
    pub from: Value,
    /// What it is; null: absent.
    pub to: Value,
}

/// Keys of lists, which are compared item by item.
const LISTS: [&str; 5] = ["listeners", "upstream_pools", "routes", "tcp_listeners", "tcp_pools"];
/// The same for a pool.
const IN_POOLS: [&str; 1] = ["upstreams"];
/// Settings that are read once, when the process starts.
const AT_START: [&str; 1] = ["workers"];

impl Diff {
    /// Compares two views. Takes any value; what is no view has no items.
    pub fn between(old: &Value, new: &Value) -> Self {
        let items =
            |list, apart: &[&str]| Items::between(&named(old, list), &named(new, list), apart);
        let mut settings = changes(old, new, &LISTS);
        settings.extend(order(&named(old, "routes"), &named(new, "routes")));
        Self {
            listeners: items("listeners", &[]),
            pools: items("upstream_pools", &IN_POOLS),
            upstreams: Items::between(&upstreams(old), &upstreams(new), &[]),
            routes: items("routes", &[]),
            tcp_listeners: items("tcp_listeners", &[]),
            tcp_pools: items("tcp_pools", &IN_POOLS),
            settings,
        }
    }

    /// Whether nothing changes.
    pub fn is_empty(&self) -> bool {
        self.settings.is_empty() && self.lists().iter().all(|(_, items)| items.is_same())
    }

    /// Keys of settings that a reload cannot change.
    pub fn needs_restart(&self) -> Vec<String> {
        let keys = self.settings.iter().map(|change| &change.key);
        keys.filter(|key| AT_START.contains(&key.as_str())).cloned().collect()
    }

    /// All lists, each with the word for one of its items.
    pub fn lists(&self) -> [(&'static str, &Items); 6] {
        [
            ("listener", &self.listeners),
            ("pool", &self.pools),
            ("upstream", &self.upstreams),
            ("route", &self.routes),
            ("tcp listener", &self.tcp_listeners),
            ("tcp pool", &self.tcp_pools),
        ]
    }
}

/// An item and its name.
type Named<'v> = (Cow<'v, str>, &'v Value);

impl Items {
    fn between(old: &[Named<'_>], new: &[Named<'_>], apart: &[&str]) -> Self {
        let mut items = Self::default();
        let mut left: HashMap<_, _> = numbered(old).collect();
        for (key, now) in numbered(new) {
            let name = || key.0.to_owned();
            match left.remove(&key) {
                None => items.added.push(name()),
                Some(was) => match changes(was, now, apart) {
                    what if what.is_empty() => items.kept += 1,
                    what => items.changed.push(Changed { name: name(), what }),
                },
            }
        }
        let removed = numbered(old).filter(|(key, _)| left.contains_key(key));
        items.removed.extend(removed.map(|((name, _), _)| name.to_owned()));
        items
    }

    fn is_same(&self) -> bool {
        self.added.is_empty() && self.removed.is_empty() && self.changed.is_empty()
    }
}

/// Items that can be told apart even if one name is there twice: by its first use, its second…
fn numbered<'a>(items: &'a [Named<'_>]) -> impl Iterator<Item = ((&'a str, usize), &'a Value)> {
    let mut uses: HashMap<&str, usize> = HashMap::new();
    items.iter().map(move |(name, value)| {
        let uses = uses.entry(name).or_default();
        *uses += 1;
        ((&**name, *uses), *value)
    })
}

fn list<'v>(of: &'v Value, key: &str) -> &'v [Value] {
    of.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn text<'v>(of: &'v Value, key: &str) -> &'v str {
    of.get(key).and_then(Value::as_str).unwrap_or_default()
}

fn named<'v>(view: &'v Value, key: &str) -> Vec<Named<'v>> {
    list(view, key).iter().map(|item| (text(item, "name").into(), item)).collect()
}

fn upstreams(view: &Value) -> Vec<Named<'_>> {
    let mut found = Vec::new();
    for (pools, id) in [("upstream_pools", "url"), ("tcp_pools", "address")] {
        for pool in list(view, pools) {
            let name = text(pool, "name");
            let each = list(pool, "upstreams").iter();
            found.extend(each.map(|one| (format!("{name} {}", text(one, id)).into(), one)));
        }
    }
    found
}

/// The routes between the first and the last that have changed places, if any have.
fn order(old: &[Named<'_>], new: &[Named<'_>]) -> Option<Change> {
    let in_both = |these: &[Named<'_>], those: &[Named<'_>]| -> Vec<String> {
        let those: BTreeSet<_> = numbered(those).map(|(key, _)| key).collect();
        let both = numbered(these).filter(|(key, _)| those.contains(key));
        both.map(|((name, _), _)| name.to_owned()).collect()
    };
    let (mut from, mut to) = (in_both(old, new), in_both(new, old));
    let differs = |(a, b)| a != b;
    let first = from.iter().zip(&to).position(differs)?;
    let last = from.iter().zip(&to).rposition(differs)?;
    let between = |names: &mut Vec<String>| names.drain(first..=last).collect();
    Some(Change { key: "routes.order".to_owned(), from: between(&mut from), to: between(&mut to) })
}

/// What is different within an item, but for what is under the keys `apart`.
fn changes(old: &Value, new: &Value, apart: &[&str]) -> Vec<Change> {
    let mut found = Vec::new();
    compare(old, new, "", apart, &mut found);
    found
}

fn compare(old: &Value, new: &Value, at: &str, apart: &[&str], found: &mut Vec<Change>) {
    if old == new {
        return;
    }
    let (Value::Object(was), Value::Object(is)) = (old, new) else {
        found.push(Change { key: at.to_owned(), from: old.clone(), to: new.clone() });
        return;
    };
    let keys: BTreeSet<&String> = was.keys().chain(is.keys()).collect();
    for key in keys.into_iter().filter(|key| !apart.contains(&key.as_str())) {
        let at = if at.is_empty() { key.clone() } else { format!("{at}.{key}") };
        // Absent and null are the same: another version may know more keys.
        let (was, is) = (was.get(key), is.get(key));
        compare(was.unwrap_or(&Value::Null), is.unwrap_or(&Value::Null), &at, &[], found);
    }
}
