//! A difference in words.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;

use serde_json::Value;

use crate::cli::terminal::visible;
use crate::config::Diff;
use crate::config::diff::{Change, Changed};

/// Characters of a value that are shown: a section whole, not the order of a thousand routes.
const WIDTH: usize = 600;
/// Characters shown before the place where two long values differ.
const CONTEXT: usize = 10;

/// One line for each item that is not the same, with what it means for those who are served;
/// then how much there is of what. `new` is the newer of the two that were compared.
pub(super) fn render(diff: &Diff, new: &Value) -> String {
    let facts = Facts::of(diff, new);
    let mut out = String::new();
    let (mut added, mut changed, mut removed) = (0, diff.settings.len(), 0);
    let mut kept = Vec::new();
    for (kind, items) in diff.lists() {
        for name in &items.added {
            line(&mut out, '+', kind, name, facts.of_added(kind, name));
        }
        for item in &items.changed {
            line(&mut out, '~', kind, &item.name, &facts.of_changed(kind, item));
            for change in &item.what {
                let _ = writeln!(out, "    {}", from_to(change));
            }
        }
        for name in &items.removed {
            line(&mut out, '-', kind, name, of_removed(kind));
        }
        added += items.added.len();
        changed += items.changed.len();
        removed += items.removed.len();
        kept.push((kind, items.kept));
    }
    for change in &diff.settings {
        let _ = writeln!(out, "~ {}{}", from_to(change), in_brackets(of_setting(&change.key)));
    }
    let counts: Vec<_> =
        kept.iter().filter(|(_, n)| *n > 0).map(|(kind, n)| counted(*n, kind)).collect();
    if !counts.is_empty() {
        let _ = writeln!(out, "= {}", counts.join(", "));
    }
    let kept: usize = kept.iter().map(|(_, n)| n).sum();
    let _ = if diff.is_empty() {
        writeln!(out, "nothing changes")
    } else {
        writeln!(out, "{added} to add, {changed} to change, {removed} to remove, {kept} kept")
    };
    out
}

fn line(out: &mut String, mark: char, kind: &str, name: &str, meaning: &str) {
    let _ = writeln!(out, "{mark} {kind} {}{}", visible(name), in_brackets(meaning));
}

fn in_brackets(meaning: &str) -> String {
    if meaning.is_empty() { String::new() } else { format!(" ({meaning})") }
}

fn counted(n: usize, kind: &str) -> String {
    if n == 1 { format!("1 {kind}") } else { format!("{n} {kind}s") }
}

/// What the lines need to know beyond the difference.
struct Facts {
    /// Upstreams that are probed, named as in the difference.
    probed: HashSet<String>,
    /// Upstreams of each pool that are there before and after.
    staying: HashMap<String, usize>,
}

impl Facts {
    fn of(diff: &Diff, new: &Value) -> Self {
        let added: HashSet<_> = diff.upstreams.added.iter().collect();
        let mut facts = Self { probed: HashSet::new(), staying: HashMap::new() };
        for pool in new["upstream_pools"].as_array().into_iter().flatten() {
            let name = pool["name"].as_str().unwrap_or_default();
            for upstream in pool["upstreams"].as_array().into_iter().flatten() {
                let full = format!("{name} {}", upstream["url"].as_str().unwrap_or_default());
                let stays = !added.contains(&full);
                *facts.staying.entry(name.to_owned()).or_default() += usize::from(stays);
                if pool["health"]["active"].is_object() {
                    facts.probed.insert(full);
                }
            }
        }
        facts
    }

    fn of_added(&self, kind: &str, name: &str) -> &'static str {
        match kind {
            "upstream" if self.probed.contains(name) => "starts by the health checks",
            _ => "",
        }
    }

    fn of_changed(&self, kind: &str, item: &Changed) -> String {
        match kind {
            "listener" | "tcp listener" if item.what.iter().any(|change| change.key == "bind") => {
                "bound before the old address is drained".to_owned()
            }
            "pool" => match self.staying.get(&item.name) {
                None | Some(0) => String::new(),
                Some(1) => "1 upstream keeps its state".to_owned(),
                Some(n) => format!("{n} upstreams keep their state"),
            },
            _ => String::new(),
        }
    }
}

fn of_removed(kind: &str) -> &'static str {
    match kind {
        "listener" | "tcp listener" => "stops accepting, empties its queue, drains",
        "upstream" => "requests in flight finish",
        _ => "",
    }
}

fn of_setting(key: &str) -> &'static str {
    match key {
        "workers" => "takes effect at the next start",
        "routes.order" => "matters among routes of one host and path",
        _ => "",
    }
}

/// `key: from → to`; long values from where they differ.
fn from_to(change: &Change) -> String {
    let (from, to) = (shown(&change.from), shown(&change.to));
    let same = from.chars().zip(to.chars()).take_while(|(a, b)| a == b).count();
    let is_long = from.chars().count().max(to.chars().count()) > WIDTH;
    let skip = if is_long { same.saturating_sub(CONTEXT) } else { 0 };
    format!("{}: {} → {}", visible(&change.key), cut(&from, skip), cut(&to, skip))
}

fn cut(text: &str, skip: usize) -> String {
    let mut rest = text.chars().skip(skip);
    let mut out = String::from(if skip > 0 { "…" } else { "" });
    out.extend(rest.by_ref().take(WIDTH));
    if rest.next().is_some() {
        out.push('…');
    }
    out
}

fn shown(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) if !text.is_empty() && !text.contains(char::is_whitespace) => {
            visible(text)
        }
        value => visible(&value.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;
    use crate::config::{Files, Source, parse, view};

    const OLD: &str = "
listeners: [{ name: web, bind: '127.0.0.1:1' }, { name: old, bind: '127.0.0.1:2' }]
upstream_pools:
  - { name: a, upstreams: [{ url: 'http://u1' }, { url: 'http://u2' }, { url: 'http://u3' }] }
  - { name: b, upstreams: [{ url: 'http://u1' }] }
  - { name: c, upstreams: [{ url: 'http://u1' }] }
routes:
  - { name: one, host: one.test, pool: a }
  - { name: two, host: two.test, pool: b }
  - { name: three, host: three.test, pool: c }
";

    const NEW: &str = "
listeners: [{ name: web, bind: '127.0.0.1:3' }]
upstream_pools:
  - name: a
    connect_timeout: 1.5s
    health: { active: { path: /up } }
    upstreams: [{ url: 'http://u1' }, { url: 'http://u2', weight: 2 }, { url: 'http://u4' }]
  - { name: b, slow_start: 1s, upstreams: [{ url: 'http://u1' }] }
  - { name: c, slow_start: 1s, upstreams: [{ url: 'http://u5' }] }
routes:
  - { name: two, host: two.test, pool: a }
  - { name: one, host: one.test, pool: a, timeouts: { total: 5s } }
  - { name: three, host: three.test, pool: c }
  - { name: four, host: four.test, pool: b }
workers: 2
";

    fn rendered(old: &str, new: &str) -> String {
        let plan = |text: &str| {
            let source = Source { name: "x".into(), text: text.into() };
            view(&parse(&source, Path::new(""), Files::Ignore).unwrap().plan)
        };
        let (old, new) = (plan(old), plan(new));
        render(&Diff::between(&old, &new), &new)
    }

    #[test]
    fn each_change_has_a_line_and_says_what_it_means() {
        let active = r#"{"expected_status":[200],"healthy_threshold":2,"interval":"2s","method":"GET","path":"/up","timeout":"1s","unhealthy_threshold":3}"#;
        let expected = format!(
            "~ listener web (bound before the old address is drained)
    bind: 127.0.0.1:1 → 127.0.0.1:3
- listener old (stops accepting, empties its queue, drains)
~ pool a (2 upstreams keep their state)
    connect_timeout: 5s → 1.5s
    health.active: none → {active}
~ pool b (1 upstream keeps its state)
    slow_start: 0s → 1s
~ pool c
    slow_start: 0s → 1s
+ upstream a http://u4 (starts by the health checks)
+ upstream c http://u5
~ upstream a http://u2
    weight: 1 → 2
- upstream a http://u3 (requests in flight finish)
- upstream c http://u1 (requests in flight finish)
+ route four
~ route two
    pool: b → a
~ route one
    timeouts.total: 0s → 5s
~ workers: auto → 2 (takes effect at the next start)
~ routes.order: [\"one\",\"two\"] → [\"two\",\"one\"] (matters among routes of one host and path)
= 2 upstreams, 1 route
3 to add, 9 to change, 3 to remove, 3 kept
"
        );
        assert_eq!(rendered(OLD, NEW), expected);
    }

    #[test]
    fn nothing_changes_in_a_line() {
        let expected = "= 2 listeners, 3 pools, 5 upstreams, 3 routes\nnothing changes\n";
        assert_eq!(rendered(OLD, OLD), expected);
    }

    #[test]
    fn values() {
        let (long, longer) = ("x".repeat(WIDTH + 10), "x".repeat(WIDTH + 20));
        for (from, to, expected) in [
            (json!(null), json!("a"), "none → a".to_owned()),
            (json!(""), json!("a b"), "\"\" → \"a b\"".to_owned()),
            (json!(1.5), json!([1, "b"]), "1.5 → [1,\"b\"]".to_owned()),
            (json!("\u{1b}[2J"), json!("\u{9b}x\n"), "\\u{1b}[2J → \"\\u{9b}x\\n\"".to_owned()),
            (json!(long), json!("y"), format!("{}… → y", "x".repeat(WIDTH))),
            (json!(long), json!(longer), format!("…{} → …{}", "x".repeat(10), "x".repeat(20))),
        ] {
            assert_eq!(from_to(&Change { key: "k".into(), from, to }), format!("k: {expected}"));
        }
    }
}
