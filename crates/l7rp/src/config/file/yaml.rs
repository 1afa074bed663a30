//! YAML text to tree.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::options::{DuplicateKeyPolicy, NonFiniteFloatPolicy};
use serde_saphyr::{Error, Location, Options, Spanned};

use super::nodes::{Entry, KeyPath, Kind, Node, Place, Tree};
use crate::config::wrong::Wrong;

/// No configuration written by people or their tools comes near it.
const LARGEST_FILE: usize = 8 << 20;

/// Parses the text. Duplicate keys do not end the parse: the first of them counts, and the
/// others are reported beside the tree.
pub fn parse(text: &str) -> Result<(Tree, Vec<Wrong>), Wrong> {
    if text.len() > LARGEST_FILE {
        let message = format!("the file is larger than {} MiB", LARGEST_FILE >> 20);
        return Err(Wrong::new(KeyPath::root(), message));
    }
    let raw: Spanned<Raw> =
        serde_saphyr::from_str_with_options(text, options()).map_err(|e| syntax(&e, text))?;
    let mut growth = Growth { text, next_id: 0, wrongs: Vec::new() };
    let root = growth.node(raw, &KeyPath::root());
    match root.kind {
        Kind::Map(_) => {
            let begins = text.match_indices('\n').map(|(n, _)| n + 1);
            let lines = std::iter::once(0).chain(begins).collect();
            Ok((Tree { root, lines }, growth.wrongs))
        }
        Kind::Null => {
            let wrong = Wrong::new(KeyPath::root(), "the file is empty")
                .help("at least `listeners` and `routes` are needed");
            Err(wrong.place(0..0))
        }
        _ => {
            let message = format!("expected keys like `listeners`, found {}", root.describe());
            Err(Wrong::new(KeyPath::root(), message).place(root.place))
        }
    }
}

fn options() -> Options {
    serde_saphyr::options! {
        // Room for 100,000 routes with some ten keys each; the largest file bounds it further.
        budget: serde_saphyr::budget! { max_depth: 64, max_nodes: 2_500_000, max_events: 5_000_000 },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: 50_000,
            max_replay_stack_depth: 16,
        },
        duplicate_keys: DuplicateKeyPolicy::PassThrough,
        strict_booleans: true,
        leading_zero_numbers_as_strings: true,
        underscored_numbers_as_strings: true,
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
        with_snippet: false,
    }
}

/// A syntax error in words that fit a configuration file.
fn syntax(error: &Error, text: &str) -> Wrong {
    let mut place = error.location().map_or(0..0, |at| place(at, text));
    if matches!(error, Error::MultipleDocuments { .. })
        && let Some(at) = text[..place.start].rfind("---")
    {
        place = at..at + 3;
    }
    let (message, help) = explain(error);
    let tab = text[..place.start]
        .rsplit('\n')
        .next()
        .is_some_and(|line| line.trim_start_matches(' ').starts_with('\t'));
    let mut wrong = Wrong::new(KeyPath::root(), message).place(place);
    if let Some(help) = help {
        wrong = wrong.help(help);
    } else if tab {
        wrong = wrong.help("YAML is indented with spaces, not with tabs");
    }
    wrong
}

fn explain(error: &Error) -> (String, Option<&'static str>) {
    const DEEP: &str = "the file is nested too deeply";
    const LARGE: &str = "the file expands to more than a configuration can need";
    match error.without_snippet() {
        Error::MultipleDocuments { .. } => (
            "the file has more than one document".into(),
            Some("`---` begins another document; keep one"),
        ),
        Error::Budget { breach: serde_saphyr::budget::BudgetBreach::Depth { .. }, .. } => {
            (DEEP.into(), None)
        }
        Error::Budget { .. }
        | Error::AliasReplayLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. }
        | Error::AliasReplayCounterOverflow { .. }
        | Error::AliasExpansionLimitExceeded { .. } => {
            (LARGE.into(), Some("look for aliases (`*name`) that contain one another"))
        }
        Error::RecursiveReferencesRequireWeakTypes { .. } => {
            ("an alias is part of what it stands for".into(), None)
        }
        Error::UnknownAnchor { .. } => (
            "an alias without its anchor".into(),
            Some("text that begins with `*` must be in quotes"),
        ),
        Error::AliasError { error, .. } => explain(error),
        Error::ExternalMessage { msg, .. } if msg.contains("recursion limit") => {
            (DEEP.into(), None)
        }
        Error::ExternalMessage { msg, .. } => (format!("not valid YAML: {msg}"), advice(msg)),
        other => {
            let full = other.to_string();
            let message = full.split(" at line ").next().unwrap_or_default();
            (format!("not valid YAML: {message}"), None)
        }
    }
}

/// What to do about the syntax errors that people make most.
fn advice(message: &str) -> Option<&'static str> {
    [
        ("tabs disallowed", "YAML is indented with spaces, not with tabs"),
        (
            "mapping values are not allowed",
            "text with `: ` in it must be in quotes; or the indentation is off",
        ),
        ("did not find expected key", "keys that belong together are indented by as much"),
        ("did not find expected '-'", "entries that belong together are indented by as much"),
        ("unexpected character: `\\u", "remove the character; it is invisible in most editors"),
        ("unexpected character", "text that begins with this character must be in quotes"),
        (
            "trailing content",
            "a quote in quoted text is doubled in '…' and has a backslash in \"…\"",
        ),
    ]
    .into_iter()
    .find_map(|(part, advice)| message.contains(part).then_some(advice))
}

/// The bytes that a location stands for. Some errors know only line and column.
fn place(at: Location, text: &str) -> Place {
    let span = at.span();
    let start = span.byte_offset().map(|n| n as usize).or_else(|| {
        let mut begin = 0;
        for _ in 1..at.line() {
            begin += text[begin..].find('\n')? + 1;
        }
        let ahead = usize::try_from(at.column().saturating_sub(1)).ok()?;
        let line = text[begin..].split('\n').next()?;
        Some(begin + line.char_indices().nth(ahead).map_or(line.len(), |(n, _)| n))
    });
    let start = floor(text, start.unwrap_or(text.len()));
    let length = span.byte_len().map_or(0, |n| n as usize);
    start..floor(text, start.saturating_add(length))
}

fn floor(text: &str, mut at: usize) -> usize {
    at = at.min(text.len());
    while !text.is_char_boundary(at) {
        at -= 1;
    }
    at
}

/// What the YAML library makes of a value, still with its own locations.
enum Raw {
    Scalar(Kind),
    Seq(Vec<Spanned<Raw>>),
    Map(Vec<(Spanned<Raw>, Spanned<Raw>)>),
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_unit<E>(self) -> Result<Raw, E> {
        Ok(Raw::Scalar(Kind::Null))
    }

    fn visit_none<E>(self) -> Result<Raw, E> {
        Ok(Raw::Scalar(Kind::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Raw, E> {
        Ok(Raw::Scalar(Kind::Bool(value)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Raw, E> {
        Ok(Raw::Scalar(Kind::Int(value.into())))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Raw, E> {
        Ok(Raw::Scalar(Kind::Int(value.into())))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Raw, E> {
        Ok(Raw::Scalar(Kind::Float(value)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Raw, E> {
        Ok(Raw::Scalar(Kind::Str(value.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Raw, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = from.next_element()? {
            items.push(item);
        }
        Ok(Raw::Seq(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Raw, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = from.next_entry()? {
            entries.push(entry);
        }
        Ok(Raw::Map(entries))
    }
}

struct Growth<'a> {
    text: &'a str,
    next_id: usize,
    wrongs: Vec<Wrong>,
}

impl Growth<'_> {
    fn node(&mut self, raw: Spanned<Raw>, path: &KeyPath) -> Node {
        let place = place(raw.defined, self.text);
        let id = self.next_id;
        self.next_id += 1;
        let kind = match raw.value {
            Raw::Scalar(kind) => kind,
            Raw::Seq(items) => Kind::Seq(
                items
                    .into_iter()
                    .enumerate()
                    .map(|(i, raw)| self.node(raw, &path.index(i)))
                    .collect(),
            ),
            Raw::Map(entries) => Kind::Map(self.entries(entries, path)),
        };
        let raw = match kind {
            Kind::Seq(_) | Kind::Map(_) => String::new(),
            _ => self.text[place.clone()].to_owned(),
        };
        Node { id, kind, place, raw }
    }

    fn entries(&mut self, raw: Vec<(Spanned<Raw>, Spanned<Raw>)>, path: &KeyPath) -> Vec<Entry> {
        let mut entries: Vec<Entry> = Vec::with_capacity(raw.len());
        let mut seen = std::collections::HashMap::new();
        for (key, value) in raw {
            let key_place = place(key.defined, self.text);
            let key = match key.value {
                Raw::Scalar(Kind::Str(text)) => text,
                Raw::Scalar(_) => self.text[key_place.clone()].to_owned(),
                Raw::Seq(_) | Raw::Map(_) => {
                    let wrong = Wrong::new(path.clone(), "a key must be a word")
                        .help("text that begins with `[`, `{` or `?` must be in quotes");
                    self.wrongs.push(wrong.place(key_place));
                    continue;
                }
            };
            let at = path.key(&key);
            if let Some(first) = seen.insert(key.clone(), key_place.start) {
                let line = 1 + self.text[..first].matches('\n').count();
                let message =
                    format!("the key `{key}` is there twice; the first is on line {line}");
                self.wrongs.push(Wrong::new(at, message).place(key_place));
                seen.insert(key, first);
                continue;
            }
            let value = self.node(value, &at);
            entries.push(Entry { key, key_place, value });
        }
        entries
    }
}
