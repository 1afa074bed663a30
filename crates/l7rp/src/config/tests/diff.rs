//! What a reload would change.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::view::{SHOWN, shown};
use crate::config::Diff;
use crate::config::diff::{Change, Changed, Items};

const OLD: &str = "
listeners:
  - { name: web, bind: '127.0.0.1:80' }
  - { name: old, bind: '127.0.0.1:81' }
upstream_pools:
  - { name: a, upstreams: [{ url: 'http://u1' }, { url: 'http://u2' }] }
  - { name: b, upstreams: [{ url: 'http://u1' }] }
routes:
  - { name: one, host: one.test, pool: a }
  - { name: two, host: two.test, pool: b, listeners: [old] }
";

fn between(new: &str) -> Diff {
    Diff::between(&shown(OLD), &shown(new))
}

/// The old file with a piece of it replaced.
fn with(piece: &str, by: &str) -> String {
    assert_eq!(OLD.matches(piece).count(), 1, "{piece}");
    OLD.replace(piece, by)
}

fn change(key: &str, from: impl Into<Value>, to: impl Into<Value>) -> Change {
    Change { key: key.into(), from: from.into(), to: to.into() }
}

fn changed(name: &str, what: Vec<Change>) -> Vec<Changed> {
    vec![Changed { name: name.into(), what }]
}

fn kept(kept: usize) -> Items {
    Items { kept, ..Items::default() }
}

/// Nothing changes in the old file.
fn same() -> Diff {
    Diff {
        listeners: kept(2),
        pools: kept(2),
        upstreams: kept(3),
        routes: kept(2),
        ..Diff::default()
    }
}

#[test]
fn the_same_file_changes_nothing() {
    let diff = between(OLD);
    assert_eq!(diff, same());
    assert!(diff.is_empty());
    assert!(diff.needs_restart().is_empty());
}

#[test]
fn a_place_that_has_moved_is_no_change() {
    let moved = OLD
        .replace(
            "  - { name: a,",
            "  - { name: new, upstreams: [{ url: 'http://n' }] }\n  - { name: a,",
        )
        .replace("  - { name: web,", "  - { name: new, bind: '127.0.0.1:82' }\n  - { name: web,");
    let items = |added: &str, kept| Items { added: vec![added.into()], kept, ..Items::default() };
    let expected = Diff {
        listeners: items("new", 2),
        pools: items("new", 2),
        upstreams: items("new http://n", 3),
        ..same()
    };
    assert_eq!(between(&moved), expected);
}

#[test]
fn a_listener_changes() {
    let items = Items {
        changed: changed("old", vec![change("bind", "127.0.0.1:81", "127.0.0.1:90")]),
        kept: 1,
        ..Items::default()
    };
    assert_eq!(between(&with(":81", ":90")), Diff { listeners: items, ..same() });
}

#[test]
fn an_upstream_is_apart_from_its_pool() {
    let new = with(
        "[{ url: 'http://u1' }, { url: 'http://u2' }]",
        "[{ url: 'http://u0' }, { url: 'http://u1', weight: 7 }]",
    );
    let upstreams = Items {
        added: vec!["a http://u0".into()],
        removed: vec!["a http://u2".into()],
        changed: changed("a http://u1", vec![change("weight", 1, 7)]),
        kept: 1,
    };
    assert_eq!(between(&new), Diff { upstreams, ..same() });
    let new = with("name: b,", "name: b, slow_start: 1.5s, health: { active: { path: /up } },");
    let active = json!({
        "path": "/up", "method": "GET", "interval": "2s", "timeout": "1s",
        "healthy_threshold": 2, "unhealthy_threshold": 3, "expected_status": [200],
    });
    let pools = Items {
        changed: changed(
            "b",
            vec![change("health.active", Value::Null, active), change("slow_start", "0s", "1.5s")],
        ),
        kept: 1,
        ..Items::default()
    };
    assert_eq!(between(&new), Diff { pools, ..same() });
}

#[test]
fn a_route_changes_what_it_does() {
    let new = with("two.test, pool: b", "two.test, redirect: { scheme: https, code: 308 }");
    let redirect = json!({ "scheme": "https", "code": 308 });
    let routes = Items {
        changed: changed(
            "two",
            vec![change("pool", "b", Value::Null), change("redirect", Value::Null, redirect)],
        ),
        kept: 1,
        ..Items::default()
    };
    assert_eq!(between(&new), Diff { routes, ..same() });
}

#[test]
fn items_come_in_the_order_of_the_files() {
    let new = with(
        "routes:",
        "routes:\n  - { name: z, host: z.test, pool: a }\n  - { name: m, host: m.test, pool: a }\n  - { name: c, host: c.test, pool: a }",
    );
    let diff = between(&new);
    assert_eq!(diff.routes.added, ["z", "m", "c"]);
    let back = Diff::between(&shown(&new), &shown(OLD));
    assert_eq!(back.routes.removed, ["z", "m", "c"]);
    assert_eq!((diff.settings, back.settings), (vec![], vec![]));
}

#[test]
fn the_order_of_routes_counts_where_it_differs() {
    let routes = |names: &[&str]| {
        let routes: Vec<_> = names.iter().map(|name| json!({ "name": name })).collect();
        json!({ "routes": routes })
    };
    for (old, new, order) in [
        ("abcdef", "abcdef", None),
        ("abcdef", "acbdef", Some(("bc", "cb"))),
        ("abcdef", "fabcde", Some(("abcdef", "fabcde"))),
        // What comes and goes has no order.
        ("abcdef", "xadeyf", None),
        ("abcdef", "xedcf", Some(("cde", "edc"))),
    ] {
        let letters =
            |text: &'static str| text.split("").filter(|s| !s.is_empty()).collect::<Vec<_>>();
        let diff = Diff::between(&routes(&letters(old)), &routes(&letters(new)));
        let expected = order.map(|(from, to)| change("routes.order", letters(from), letters(to)));
        assert_eq!(diff.settings, Vec::from_iter(expected), "{old} {new}");
        assert!(diff.routes.changed.is_empty(), "{old} {new}");
    }
}

#[test]
fn settings_and_what_needs_a_restart() {
    let rest = "workers: 3\ndrain: { timeout: 1m }\nadmin: { bind: '127.0.0.1:9' }\n";
    let diff = between(&format!("{OLD}{rest}"));
    let settings = vec![
        change("admin.bind", "127.0.0.1:9090", "127.0.0.1:9"),
        change("drain.timeout", "30s", "1m"),
        change("workers", "auto", 3),
    ];
    assert_eq!(diff, Diff { settings, ..same() });
    assert_eq!(diff.needs_restart(), ["workers"]);
}

#[test]
fn a_secret_that_changes_is_a_change_without_the_secret() {
    let old = SHOWN;
    let diff = Diff::between(&shown(old), &shown(&old.replace("hunter2", "hunter4")));
    let [item] = diff.routes.changed.as_slice() else { panic!("{diff:?}") };
    let [change] = item.what.as_slice() else { panic!("{diff:?}") };
    assert_eq!(
        (item.name.as_str(), &*change.key),
        ("canary", "middleware.headers.add_request.X-Key")
    );
    assert!(!format!("{diff:?}").contains("hunter"));
}

/// The ways to everything within `value` that is no object.
fn leaves(value: &Value, way: &[String], found: &mut Vec<Vec<String>>) {
    match value.as_object() {
        Some(object) if !object.is_empty() => {
            for (key, value) in object {
                leaves(value, &[way, std::slice::from_ref(key)].concat(), found);
            }
        }
        _ => found.push(way.to_vec()),
    }
}

/// Changes each single value of the item at `pointer`, which must be found in the items that `list`
/// picks, under `name`. How many there were.
fn change_each(
    view: &Value,
    pointer: &str,
    name: &str,
    list: fn(&mut Diff) -> &mut Items,
) -> usize {
    let item = view.pointer(pointer).expect("it is there");
    let mut ways = Vec::new();
    leaves(item, &[], &mut ways);
    ways.retain(|way| !["name", "url", "address", "upstreams"].contains(&way[0].as_str()));
    for way in &ways {
        let mut new = view.clone();
        let place = new.pointer_mut(&format!("{pointer}/{}", way.join("/"))).expect("it is there");
        let from = std::mem::replace(place, "another".into());
        let mut expected = Diff::between(view, view);
        list(&mut expected).kept -= 1;
        list(&mut expected).changed = changed(name, vec![change(&way.join("."), from, "another")]);
        assert_eq!(Diff::between(view, &new), expected, "{pointer} {way:?}");
    }
    ways.len()
}

#[test]
fn each_single_value_that_changes_is_found_and_nothing_else() {
    let view = shown(SHOWN);
    let mut tried = 0;
    for (pointer, name, list) in [
        ("/listeners/0", "web", (|diff| &mut diff.listeners) as fn(&mut Diff) -> &mut Items),
        ("/upstream_pools/1", "main", |diff| &mut diff.pools),
        ("/upstream_pools/1/upstreams/0", "main https://a.test:8443/base", |d| &mut d.upstreams),
        ("/routes/0", "canary", |diff| &mut diff.routes),
        ("/routes/1", "moved", |diff| &mut diff.routes),
        ("/routes/2", "any", |diff| &mut diff.routes),
        ("/tcp_listeners/0", "redis", |diff| &mut diff.tcp_listeners),
        ("/tcp_pools/1", "redis", |diff| &mut diff.tcp_pools),
        ("/tcp_pools/1/upstreams/0", "redis 10.0.0.10:6379", |diff| &mut diff.upstreams),
    ] {
        tried += change_each(&view, pointer, name, list);
    }
    assert!(tried > 100, "{tried}");
}

#[test]
fn each_single_setting_that_changes_is_found_and_nothing_else() {
    let view = shown(SHOWN);
    let mut ways = Vec::new();
    leaves(&view, &[], &mut ways);
    ways.retain(|way| !view[&way[0]].is_array());
    assert_eq!(ways.len(), 14, "{ways:?}");
    for way in ways {
        let mut new = view.clone();
        let place = new.pointer_mut(&format!("/{}", way.join("/"))).expect("it is there");
        let from = std::mem::replace(place, "another".into());
        let settings = vec![change(&way.join("."), from, "another")];
        let expected = Diff { settings, ..Diff::between(&view, &view) };
        assert_eq!(Diff::between(&view, &new), expected, "{way:?}");
    }
}

/// Any value, and often one that looks like a view.
fn values() -> impl Strategy<Value = Value> {
    let key = prop::sample::select(vec!["name", "url", "address", "upstreams", "a", "b"]);
    let lists = vec!["listeners", "upstream_pools", "routes", "tcp_listeners", "tcp_pools", "a"];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<i8>().prop_map(Value::from),
        "[ab]{0,2}".prop_map(Value::from),
    ];
    let inner = leaf.prop_recursive(4, 40, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::btree_map(key.clone().prop_map(str::to_owned), inner, 0..5)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    });
    let list = prop::sample::select(lists).prop_map(str::to_owned);
    let view = prop::collection::btree_map(list, inner.clone(), 0..6)
        .prop_map(|map| Value::Object(map.into_iter().collect()));
    prop_oneof![view, inner]
}

proptest! {
    #[test]
    fn nothing_differs_from_itself(value in values()) {
        prop_assert!(Diff::between(&value, &value).is_empty());
    }

    #[test]
    fn what_was_added_is_removed_on_the_way_back(old in values(), new in values()) {
        let (there, back) = (Diff::between(&old, &new), Diff::between(&new, &old));
        for ((_, there), (_, back)) in there.lists().into_iter().zip(back.lists()) {
            prop_assert_eq!(&there.added, &back.removed);
            prop_assert_eq!(&there.removed, &back.added);
            prop_assert_eq!(there.changed.len(), back.changed.len());
            prop_assert_eq!(there.kept, back.kept);
        }
        prop_assert_eq!(there.is_empty(), back.is_empty());
    }
}
