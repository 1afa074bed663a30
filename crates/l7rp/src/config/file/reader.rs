//! Tree to structs, with every error of the file.
//!
//! serde stops at the first error. So the value that it stopped at is left out, and the
//! whole tree is read again, until nothing is wrong: a tree is small and reading it takes
//! microseconds. What was left out is remembered, so that later checks do not complain about
//! what follows from it.

use std::collections::HashSet;

use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};

use super::File;
use super::fault::{Fault, What, meant};
use super::nodes::{Entry, KeyPath, Kind, Node, Step, Tree};
use crate::config::wrong::{MOST_WRONGS, Wrong};

/// Far more than there are errors and keys; guards against going round for ever.
const MOST_ROUNDS: usize = 1_000;

/// A file that has been read.
#[derive(Debug)]
pub struct Reading {
    /// What could be read.
    pub file: File,
    /// What could not.
    pub wrongs: Vec<Wrong>,
    /// Where that was.
    pub poisoned: HashSet<KeyPath>,
    /// There were so many errors that `file` is meaningless.
    pub gave_up: bool,
}

/// Reads the tree.
pub fn read(tree: &Tree) -> Reading {
    let mut reading = Reading {
        file: File::default(),
        wrongs: Vec::new(),
        poisoned: HashSet::new(),
        gave_up: false,
    };
    let mut skipped = HashSet::new();
    for _ in 0..MOST_ROUNDS {
        let root = Value { node: &tree.root, path: KeyPath::root(), skipped: &skipped };
        let fault = match File::deserialize(root) {
            Ok(file) => {
                reading.file = file;
                return reading;
            }
            Err(fault) => fault,
        };
        let path = fault.path.unwrap_or_default();
        let known = tree.get(&path).is_none_or(|node| !skipped.insert(node.id));
        if matches!(fault.what, What::Blank) {
            // One round for all values of the same key, however many there are.
            skip_blank(&tree.root, &path.0, &mut skipped);
        }
        if let What::Wrong { message, help, at_key } = fault.what {
            let place = if at_key { tree.locate_key(&path) } else { tree.locate(&path) };
            let mut wrong = Wrong::new(path.clone(), message).place(place);
            wrong.help = help;
            reading.wrongs.push(wrong);
            reading.poisoned.insert(path);
        }
        if known || reading.wrongs.len() >= MOST_WRONGS {
            break;
        }
    }
    reading.gave_up = true;
    if reading.wrongs.is_empty() {
        reading.wrongs.push(Wrong::new(KeyPath::root(), "the file cannot be read to its end"));
    }
    reading
}

/// Leaves out every blank value that differs from `path` only in the entries of lists.
fn skip_blank(node: &Node, path: &[Step], skipped: &mut HashSet<usize>) {
    match (path.split_first(), &node.kind) {
        (None, Kind::Null) => {
            skipped.insert(node.id);
        }
        (Some((Step::Key(key), rest)), _) => {
            if let Some(value) = node.get(key) {
                skip_blank(value, rest, skipped);
            }
        }
        (Some((Step::Index(_), rest)), Kind::Seq(items)) => {
            for item in items {
                skip_blank(item, rest, skipped);
            }
        }
        _ => {}
    }
}

/// A value of the tree, on its way into a struct.
struct Value<'a> {
    node: &'a Node,
    path: KeyPath,
    skipped: &'a HashSet<usize>,
}

impl Value<'_> {
    /// The value is not what was `expected`.
    fn not(&self, expected: &str) -> Fault {
        let fault = match self.node.kind {
            Kind::Null => Fault { path: None, what: What::Blank },
            _ => Fault::new(format!("expected {expected}, found {}", self.node.describe())),
        };
        fault.at(&self.path)
    }

    /// The value is not the text that was expected. Numbers and booleans mostly miss quotes.
    fn text(&self) -> Result<&str, Fault> {
        match &self.node.kind {
            Kind::Str(text) => Ok(text),
            Kind::Bool(_) | Kind::Int(_) | Kind::Float(_) => {
                Err(self.not("text").help(format!("write it in quotes: `\"{}\"`", self.node.raw)))
            }
            _ => Err(self.not("text")),
        }
    }

    /// Helps with numbers in quotes.
    fn unquote(&self, fault: Fault) -> Fault {
        let digit = |c: char| c.is_ascii_digit();
        match &self.node.kind {
            Kind::Str(text) if text.contains(digit) && text.parse::<f64>().is_ok() => {
                fault.help(format!("write it without quotes: `{text}`"))
            }
            _ => fault,
        }
    }

    fn integer(&self, least: i128, most: i128) -> Result<i128, Fault> {
        match self.node.kind {
            Kind::Int(n) if (least..=most).contains(&n) => Ok(n),
            Kind::Int(_) => Err(self.not(&format!("a number from {least} to {most}"))),
            _ => Err(self.unquote(self.not("a whole number"))),
        }
    }
}

macro_rules! integers {
    ($($method:ident $visit:ident $type:ty;)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
            let n = self.integer(<$type>::MIN.into(), <$type>::MAX.into())?;
            visitor.$visit(n as $type)
        }
    )*};
}

impl<'de> Deserializer<'de> for Value<'_> {
    type Error = Fault;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        let path = self.path.clone();
        let value = match &self.node.kind {
            Kind::Null => visitor.visit_unit(),
            Kind::Bool(value) => visitor.visit_bool(*value),
            Kind::Int(n) => match (u64::try_from(*n), i64::try_from(*n)) {
                (Ok(n), _) => visitor.visit_u64(n),
                (_, Ok(n)) => visitor.visit_i64(n),
                _ => Err(self.not("a smaller number")),
            },
            Kind::Float(n) => visitor.visit_f64(*n),
            Kind::Str(text) => visitor.visit_str(text),
            Kind::Seq(_) => return self.deserialize_seq(visitor),
            Kind::Map(_) => return self.deserialize_map(visitor),
        };
        value.map_err(|fault| fault.at(&path))
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        let fault = match &self.node.kind {
            Kind::Bool(value) => return visitor.visit_bool(*value),
            _ => self.not("`true` or `false`"),
        };
        Err(match self.node.raw.to_ascii_lowercase().trim_matches(['"', '\'']) {
            "true" | "false" => fault.help("write it without quotes".into()),
            "yes" | "on" | "y" => fault.help("write `true`".into()),
            "no" | "off" | "n" => fault.help("write `false`".into()),
            _ => fault,
        })
    }

    integers! {
        deserialize_u8 visit_u8 u8;
        deserialize_u16 visit_u16 u16;
        deserialize_u32 visit_u32 u32;
        deserialize_i8 visit_i8 i8;
        deserialize_i16 visit_i16 i16;
        deserialize_i32 visit_i32 i32;
        deserialize_i64 visit_i64 i64;
        deserialize_u64 visit_u64 u64;
    }

    fn deserialize_f32<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.deserialize_f64(visitor)
    }

    fn deserialize_f64<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.node.kind {
            Kind::Float(n) if n.is_finite() => visitor.visit_f64(n),
            Kind::Int(n) => visitor.visit_f64(n as f64),
            Kind::Float(_) => Err(self.not("a finite number")),
            _ => Err(self.unquote(self.not("a number"))),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.text().and_then(|text| visitor.visit_str(text)).map_err(|fault| fault.at(&self.path))
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        self.deserialize_str(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        match self.node.kind {
            Kind::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Fault> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        let items = match &self.node.kind {
            Kind::Seq(items) => items.as_slice(),
            Kind::Null => &[],
            Kind::Map(_) => {
                return Err(self
                    .not("a list")
                    .help("each entry of a list begins with `- `".into()));
            }
            _ => return Err(self.not("a list").help(format!("write `[{}]`", self.node.raw))),
        };
        visitor.visit_seq(Items { rest: items, next: 0, path: self.path, skipped: self.skipped })
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        let entries = match &self.node.kind {
            Kind::Map(entries) => entries.as_slice(),
            Kind::Null => &[],
            _ => return Err(self.not("keys with values")),
        };
        visitor.visit_map(Entries {
            rest: entries,
            value: None,
            path: self.path,
            skipped: self.skipped,
        })
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        if matches!(self.node.kind, Kind::Map(_) | Kind::Null) {
            return self.deserialize_map(visitor);
        }
        let some: Vec<String> = fields.iter().take(3).map(|f| format!("`{f}`")).collect();
        let more = if fields.len() > 3 { ", …" } else { "" };
        Err(self.not(&format!("a section with keys ({}{more})", some.join(", "))))
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        let text = self.text()?;
        if !variants.contains(&text) {
            let fault = Fault::new(format!("unknown {name} `{}`", text.escape_debug()));
            return Err(fault.help(meant(text, variants)).at(&self.path));
        }
        visitor.visit_enum(text.into_deserializer())
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_unit()
    }

    serde::forward_to_deserialize_any! {
        i128 u128 char bytes byte_buf unit unit_struct tuple tuple_struct identifier
    }
}

struct Entries<'a> {
    rest: &'a [Entry],
    value: Option<&'a Entry>,
    path: KeyPath,
    skipped: &'a HashSet<usize>,
}

impl<'de> MapAccess<'de> for Entries<'_> {
    type Error = Fault;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, Fault> {
        while let Some((entry, rest)) = self.rest.split_first() {
            self.rest = rest;
            if self.skipped.contains(&entry.value.id) {
                continue;
            }
            self.value = Some(entry);
            let key: StrDeserializer<'_, Fault> = entry.key.as_str().into_deserializer();
            return seed.deserialize(key).map(Some).map_err(|f| f.at(&self.path.key(&entry.key)));
        }
        Ok(None)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, Fault> {
        let Some(entry) = self.value.take() else {
            return Err(Fault::new("a value without a key".into()));
        };
        let path = self.path.key(&entry.key);
        let value = Value { node: &entry.value, path: path.clone(), skipped: self.skipped };
        seed.deserialize(value).map_err(|fault| fault.at(&path))
    }
}

struct Items<'a> {
    rest: &'a [Node],
    next: usize,
    path: KeyPath,
    skipped: &'a HashSet<usize>,
}

impl<'de> SeqAccess<'de> for Items<'_> {
    type Error = Fault;

    fn next_element_seed<T: DeserializeSeed<'de>>(
        &mut self,
        seed: T,
    ) -> Result<Option<T::Value>, Fault> {
        let Some(node) = self.rest.get(self.next) else { return Ok(None) };
        let path = self.path.index(self.next);
        self.next += 1;
        if self.skipped.contains(&node.id) {
            // Something stands in, so that the entries after it keep their index.
            return seed.deserialize(Placeholder).map(Some).map_err(|fault| fault.at(&self.path));
        }
        let value = Value { node, path: path.clone(), skipped: self.skipped };
        seed.deserialize(value).map(Some).map_err(|mut fault| {
            let here = fault.path.as_ref().is_none_or(|at| *at == path);
            if here && matches!(fault.what, What::Blank) {
                fault = Fault::new("an entry of this list is blank".into());
            }
            fault.at(&path)
        })
    }
}

/// Fits everything that a list may hold.
struct Placeholder;

macro_rules! zeros {
    ($($method:ident $visit:ident $value:expr;)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
            visitor.$visit($value)
        }
    )*};
}

impl<'de> Deserializer<'de> for Placeholder {
    type Error = Fault;

    zeros! {
        deserialize_i64 visit_i64 0;
        deserialize_u64 visit_u64 0;
        deserialize_f64 visit_f64 0.0;
        deserialize_bool visit_bool false;
        deserialize_str visit_str "";
        deserialize_string visit_str "";
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_unit()
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Fault> {
        visitor.visit_none()
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Fault> {
        let skipped = HashSet::new();
        visitor.visit_map(Entries {
            rest: &[],
            value: None,
            path: KeyPath::root(),
            skipped: &skipped,
        })
    }

    serde::forward_to_deserialize_any! {
        i8 i16 i32 i128 u8 u16 u32 u128 f32 char bytes byte_buf unit unit_struct newtype_struct seq
        tuple tuple_struct map enum identifier ignored_any
    }
}
