//! Rules about pages of reference: each name of the code is on its page, and no other.

use std::collections::BTreeSet;

use crate::source::Source;
use crate::{PROXY, read, refuse, sources};

const FAILURES: &str = "docs/src/failures.md";
const METRICS: &str = "docs/src/reference/metrics.md";
const LOG: &str = "docs/src/reference/log.md";
const TRACES: &str = "docs/src/reference/traces.md";
const RETRIES: &str = "docs/src/decisions/retries.md";

/// The rows below the first header of `page` that begins with these cells.
fn rows(page: &str, header: &[&str]) -> Vec<Vec<String>> {
    let text = read(page);
    let mut lines = text.lines().map(cells);
    let found: Vec<_> = std::iter::from_fn(|| {
        lines
            .find(|row| row.len() >= header.len() && row.iter().zip(header).all(|(a, b)| a == b))?;
        Some(lines.by_ref().skip(1).take_while(|row| !row.is_empty()).collect::<Vec<_>>())
    })
    .flatten()
    .collect();
    assert!(!found.is_empty(), "{page}: no table {header:?}: has it another head now?");
    found
}

/// The cells of a row of a table; none: the line is no row.
fn cells(line: &str) -> Vec<String> {
    let inner = line.strip_prefix('|').and_then(|line| line.strip_suffix('|'));
    inner.map_or_else(Vec::new, |row| row.split('|').map(|c| c.trim().to_owned()).collect())
}

/// What stands in backticks.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The first cells of rows, without their backticks.
fn names(rows: &[Vec<String>]) -> BTreeSet<String> {
    rows.iter().flat_map(|row| quoted(&row[0])).collect()
}

/// Fails with what only one of them has.
fn compare(page: &str, on_page: &BTreeSet<String>, in_code: &BTreeSet<String>) {
    assert!(!in_code.is_empty(), "{page}: nothing was found in the code: this test must follow");
    let missing = in_code.difference(on_page).map(|name| format!("{page}: missing: {name}"));
    let made_up = on_page.difference(in_code).map(|name| format!("{page}: no such: {name}"));
    let hits: Vec<_> = missing.chain(made_up).collect();
    refuse(&hits, "who is woken at night looks a word up there, and must find it, and it alone");
}

fn source(name: &str) -> Source {
    Source::new(name, &read(name))
}

/// The literals of shipped code that stand right behind `before`.
fn behind(source: &Source, before: &str) -> BTreeSet<String> {
    let stands = |at: usize| source.code[..at - 1].trim_end().ends_with(before);
    source.strings.iter().filter(|(at, _)| stands(*at)).map(|(_, text)| text.clone()).collect()
}

/// The same within what follows `from` up to its closing brace at the begin of a line or an item.
fn behind_within(source: &Source, from: &str, before: &str) -> BTreeSet<String> {
    let start = source.code.find(from).unwrap_or_else(|| panic!("{}: no {from}", source.name));
    let end = source.code[start..].find("\n    }\n").map_or(source.code.len(), |n| start + n);
    let part = source.strings.iter().filter(|(at, _)| (start..end).contains(at));
    let part = part.filter(|(at, _)| source.code[..at - 1].trim_end().ends_with(before));
    part.map(|(_, text)| text.clone()).collect()
}

/// Status, reason and type of each failure in the table of the code; and the reasons that stand for
/// whatever is malformed.
fn failures() -> (BTreeSet<String>, BTreeSet<String>) {
    let core = source("crates/l7rp-core/src/failure.rs");
    let malformed = behind_within(&core, "pub fn name(self)", "=>");
    let text = read("crates/l7rp-core/src/failure.rs");
    let table = text.split("pub fn meaning(self)").nth(1).unwrap_or_default();
    let table = table.split("\n    }\n").next().unwrap_or_default();
    let mut all = BTreeSet::new();
    let mut shared = ("", "");
    for line in table.lines() {
        let words: Vec<_> = line.split('"').skip(1).step_by(2).collect();
        let status = line.split_once("=> row(").and_then(|(_, rest)| rest.split(',').next());
        match (status, words.as_slice()) {
            (Some(status), [kind, reason, _]) => {
                all.insert(format!("{status} {reason} {kind}"));
            }
            // The reasons follow, a line each.
            (Some(status), [kind]) => shared = (status, *kind),
            // What is malformed.
            (Some(status), [kind, _]) => {
                assert!(line.contains("why.name()"), "{line}");
                assert!(
                    ["400 http_request_error", "502 http_protocol_error"]
                        .contains(&format!("{status} {kind}").as_str())
                );
            }
            (None, [reason]) if line.contains("Scope::") => {
                let (status, kind) = shared;
                all.insert(format!("{status} {reason} {kind}"));
            }
            _ => {}
        }
    }
    (all, malformed)
}

#[test]
fn each_failure_is_a_row_of_its_page() {
    let (fixed, malformed) = failures();
    assert!(fixed.len() > 35 && malformed.len() > 10, "{} {}", fixed.len(), malformed.len());
    let rows = rows(FAILURES, &["status", "reason", "Proxy-Status"]);
    let on_page: BTreeSet<_> = rows
        .iter()
        .map(|row| format!("{} {} {}", row[0], quoted(&row[1]).concat(), quoted(&row[2]).concat()))
        .collect();
    assert_eq!(on_page.len(), rows.len(), "{FAILURES}: a row is there twice");
    let mut in_code = fixed;
    for reason in malformed {
        let both = ["400 R http_request_error", "502 R http_protocol_error"];
        let both = both.map(|row| row.replace('R', &reason));
        assert!(both.iter().any(|row| on_page.contains(row)), "{FAILURES}: missing: {reason}");
        in_code.extend(both.into_iter().filter(|row| on_page.contains(row)));
    }
    compare(FAILURES, &on_page, &in_code);
}

#[test]
fn each_metric_is_a_row_of_its_page() {
    let rows = rows(METRICS, &["name", "type", "labels"]);
    let mut in_code = BTreeSet::new();
    for source in &sources(PROXY) {
        if source.name.contains("/observe/") {
            let is_name = |text: &str| {
                let known = text.starts_with("proxy_") || text.starts_with("process_");
                known
                    && text
                        .bytes()
                        .all(|b| b == b'_' || b.is_ascii_lowercase() || b.is_ascii_digit())
            };
            in_code.extend(source.strings.iter().map(|(_, s)| s.clone()).filter(|s| is_name(s)));
        }
    }
    // An event, whose name is of the same form.
    in_code.remove("proxy_started");
    compare(METRICS, &names(&rows), &in_code);
    // Types and labels are those that another test compares with what is served; there is no
    // collector in it.
    let contract = read("crates/l7rp/tests/it/contract.rs");
    let families = contract.split("const FAMILIES").nth(1).and_then(|text| text.split("];").next());
    let mut in_contract: BTreeSet<_> =
        [String::from("proxy_trace_spans_total counter outcome")].into();
    for line in families.unwrap_or_default().lines().filter(|line| line.starts_with("    (")) {
        let words: Vec<_> = line.split('"').collect();
        let (name, kind, labels) = (words[1], words[2].to_lowercase(), words[3]);
        let kind = kind.trim_matches([',', ' ']);
        in_contract.insert(format!("{name} {kind} {labels}").trim_end().to_owned());
    }
    let row = |row: &Vec<String>| {
        let text = format!("{} {} {}", quoted(&row[0]).concat(), row[1], quoted(&row[2]).join(" "));
        text.trim_end().to_owned()
    };
    compare(METRICS, &rows.iter().map(row).collect(), &in_contract);
}

#[test]
fn each_field_of_the_access_log_is_a_row_of_its_page() {
    let code = source("crates/l7rp/src/observe/access_log.rs");
    let mut in_code = behind(&code, "key!(");
    in_code.extend(["time", "level", "msg", "event"].map(str::to_owned));
    compare(LOG, &names(&rows(LOG, &["field", "is"])), &in_code);
}

#[test]
fn each_word_of_the_access_log_is_explained() {
    let obstacle = source("crates/l7rp/src/upstream/obstacle.rs");
    let words = behind_within(&obstacle, "pub fn word(&self)", "=>");
    compare(LOG, &names(&rows(LOG, &["`why` of an upstream"])), &words);
    let attempts = source("crates/l7rp-core/src/attempts.rs");
    let words = behind_within(&attempts, "pub fn name(self)", "=>");
    compare(RETRIES, &names(&rows(RETRIES, &["`no_retry`"])), &words);
}

#[test]
fn each_attribute_of_a_span_is_a_row_of_its_page() {
    let code = source("crates/l7rp/src/observe/traces.rs");
    let mut in_code = behind(&code, "KeyValue::new(");
    assert!(in_code.remove("service.version"), "it is the resource's");
    compare(TRACES, &names(&rows(TRACES, &["attribute", "on"])), &in_code);
    let spans = code.strings.iter().map(|(_, text)| text.clone());
    let spans = spans.filter(|text| text.starts_with("proxy.") && text.ends_with("request"));
    compare(TRACES, &names(&rows(TRACES, &["span", "kind"])), &spans.collect());
}

#[test]
fn each_event_is_a_row_of_its_page() {
    let code = source("crates/l7rp/src/observe/event.rs").shipped;
    let levels = levels(&code);
    let changes = fields(item(&code, "pub struct AllChanges {"));
    let mut in_code = BTreeSet::new();
    for variant in item(&code, "pub enum Event {").split("\n    }") {
        let Some((name, inner)) = variant.split_once(" {") else { continue };
        let mut fields = fields(inner);
        if let Some(at) = fields.iter().position(|field| field == "changes") {
            fields.splice(at..=at, changes.clone());
        }
        let name = name.trim().trim_start_matches(',').trim();
        let of: BTreeSet<_> = levels.iter().filter(|(n, _)| n == name).map(|(_, l)| *l).collect();
        let order = ["debug", "info", "warn", "error"].into_iter().filter(|l| of.contains(l));
        let level: Vec<_> = order.collect();
        in_code.insert(format!("{}: {}: {}", snake(name), level.join(" "), fields.join(" ")));
    }
    let on_page = rows(LOG, &["event", "level", "fields"]).into_iter().map(|row| {
        format!("{}: {}: {}", quoted(&row[0]).concat(), row[1], quoted(&row[2]).join(" "))
    });
    compare(LOG, &on_page.collect(), &in_code);
}

/// What stands between the braces of an item that begins like this.
fn item<'a>(code: &'a str, begin: &str) -> &'a str {
    let start = code.find(begin).unwrap_or_else(|| panic!("no {begin}")) + begin.len();
    let end = code[start..].find("\n}").map_or(code.len(), |n| start + n);
    &code[start..end]
}

/// The names of fields, a line each.
fn fields(inner: &str) -> Vec<String> {
    let name = |line: &str| {
        let (name, _) = line.trim().trim_start_matches("pub ").split_once(':')?;
        name.bytes().all(|b| b == b'_' || b.is_ascii_lowercase()).then(|| name.to_owned())
    };
    inner.lines().filter_map(name).collect()
}

/// Which event has which severity; more than one, if it depends.
fn levels(code: &str) -> Vec<(String, &'static str)> {
    let body = code.split("fn level(&self) -> Level {").nth(1).unwrap_or_default();
    let body = body.split("\n    }\n").next().unwrap_or_default();
    let mut all = Vec::new();
    let mut waiting: Vec<String> = Vec::new();
    for part in body.split("Self::").skip(1) {
        waiting.push(part.chars().take_while(char::is_ascii_alphanumeric).collect());
        let level = part.split_once("=> Level::").map(|(_, rest)| rest);
        let known = ["debug", "info", "warn", "error"];
        let level = level.and_then(|l| known.into_iter().find(|k| snake(l).starts_with(k)));
        if let Some(level) = level {
            all.extend(waiting.drain(..).map(|name| (name, level)));
        }
    }
    all
}

fn snake(name: &str) -> String {
    let mut text = String::new();
    for c in name.chars() {
        if c.is_ascii_uppercase() && !text.is_empty() {
            text.push('_');
        }
        text.push(c.to_ascii_lowercase());
    }
    text
}
