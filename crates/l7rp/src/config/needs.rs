//! What is understood but cannot be served by this version. Refusing to serve is better than
//! serving without something that the operator counts on.
//!
//! Each feature has one line in `NOT_YET`; the line goes when the feature comes.

use super::file::{KeyPath, Kind, Node, Tree};
use super::wrong::Wrong;

/// A feature: the keys that ask for it, when they do, and what to call it.
struct Feature {
    /// `[]` stands for every entry of a list.
    keys: &'static str,
    asked: fn(&Node) -> bool,
    name: &'static str,
}

const fn feature(keys: &'static str, asked: fn(&Node) -> bool, name: &'static str) -> Feature {
    Feature { keys, asked, name }
}

/// What cannot be served.
const NOT_YET: &[Feature] = &[
    feature("listeners[].enable_http3", on, "`enable_http3`"),
    feature("listeners[].proxy_protocol", on, "`proxy_protocol`"),
    feature("routes[].middleware[].compress", given, "`compress`"),
    feature("tcp_listeners", filled, "`tcp_listeners`"),
    feature("tcp_pools", filled, "`tcp_pools`"),
];

/// Every place of a valid file that asks for something that cannot be served yet.
pub fn unsupported(tree: &Tree) -> Vec<Wrong> {
    let mut wrongs = Vec::new();
    for feature in NOT_YET {
        let mut found = Vec::new();
        places(&tree.root, feature.keys, &KeyPath::root(), &mut found);
        for (path, node) in found {
            if (feature.asked)(node) {
                let message =
                    format!("{} is understood but this version cannot serve it yet", feature.name);
                let wrong = Wrong::new(path.clone(), message).help("remove it to start");
                wrongs.push(wrong.place(tree.locate_key(&path)));
            }
        }
    }
    wrongs.sort_by(Wrong::in_file_order);
    wrongs
}

/// The values that `keys` leads to.
fn places<'t>(node: &'t Node, keys: &str, path: &KeyPath, found: &mut Vec<(KeyPath, &'t Node)>) {
    let (key, rest) = keys.split_once('.').unwrap_or((keys, ""));
    let (key, list) = key.strip_suffix("[]").map_or((key, false), |key| (key, true));
    let Some(value) = node.get(key) else { return };
    let path = path.key(key);
    let mut go_on = |node: &'t Node, path: KeyPath| {
        if rest.is_empty() {
            found.push((path, node));
        } else {
            places(node, rest, &path, found);
        }
    };
    match &value.kind {
        Kind::Seq(items) if list => {
            for (i, item) in items.iter().enumerate() {
                go_on(item, path.index(i));
            }
        }
        _ if list => {}
        _ => go_on(value, path),
    }
}

/// The key is there, with or without a value.
fn given(_: &Node) -> bool {
    true
}

/// There is something in it: a blank section asks for the defaults and for nothing else.
fn filled(node: &Node) -> bool {
    match &node.kind {
        Kind::Null => false,
        Kind::Str(text) => !text.is_empty(),
        Kind::Seq(items) => !items.is_empty(),
        Kind::Map(entries) => !entries.is_empty(),
        Kind::Bool(_) | Kind::Int(_) | Kind::Float(_) => true,
    }
}

fn on(node: &Node) -> bool {
    matches!(node.kind, Kind::Bool(true))
}
