//! The file as a tree of values that know where they are written.

use std::fmt;
use std::ops::Range;

/// Where something is written: bytes of the text.
pub type Place = Range<usize>;

/// A whole file.
#[derive(Clone, Debug)]
pub struct Tree {
    /// The outermost value.
    pub root: Node,
    /// Where each line begins.
    pub lines: Vec<usize>,
}

/// One value.
#[derive(Clone, Debug)]
pub struct Node {
    /// Tells nodes of a tree apart.
    pub id: usize,
    /// What it is.
    pub kind: Kind,
    /// Where it is written. A container in block style begins at its first entry and has
    /// no length.
    pub place: Place,
    /// Its text in the file, if it is a scalar: `0x1f` is a number, but not written `31`.
    pub raw: String,
}

/// What a value is.
#[derive(Clone, Debug)]
pub enum Kind {
    /// Blank, or `null`.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A number without a fraction.
    Int(i128),
    /// A number with one.
    Float(f64),
    /// Text.
    Str(String),
    /// A list.
    Seq(Vec<Node>),
    /// Keys and values in file order; no key is there twice.
    Map(Vec<Entry>),
}

/// A key and its value.
#[derive(Clone, Debug)]
pub struct Entry {
    /// The key.
    pub key: String,
    /// Where the key is written.
    pub key_place: Place,
    /// The value.
    pub value: Node,
}

/// One step from a value to a value in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Step {
    /// To the value of a key.
    Key(String),
    /// To an entry of a list.
    Index(usize),
}

/// The way from the root to a value.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct KeyPath(pub Vec<Step>);

impl KeyPath {
    /// The root.
    pub fn root() -> Self {
        Self::default()
    }

    /// One key further.
    #[must_use]
    pub fn key(&self, key: &str) -> Self {
        self.step(Step::Key(key.to_owned()))
    }

    /// One entry of a list further.
    #[must_use]
    pub fn index(&self, index: usize) -> Self {
        self.step(Step::Index(index))
    }

    fn step(&self, step: Step) -> Self {
        let mut steps = Vec::with_capacity(self.0.len() + 1);
        steps.extend_from_slice(&self.0);
        steps.push(step);
        Self(steps)
    }

    /// The last key on the way, as it is written in messages.
    pub fn last_key(&self) -> String {
        let key = self.0.iter().rev().find_map(|step| match step {
            Step::Key(key) => Some(key.as_str()),
            Step::Index(_) => None,
        });
        format!("`{}`", key.unwrap_or_default())
    }

    /// The path itself, then what contains it, up to the root.
    pub fn outwards(&self) -> impl Iterator<Item = Self> + '_ {
        (0..=self.0.len()).rev().map(|n| Self(self.0[..n].to_vec()))
    }
}

impl fmt::Display for KeyPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.0.iter().enumerate() {
            match step {
                Step::Key(key) if i == 0 => f.write_str(key)?,
                Step::Key(key) => write!(f, ".{key}")?,
                Step::Index(index) => write!(f, "[{index}]")?,
            }
        }
        Ok(())
    }
}

impl Node {
    /// The value of a key, if this has keys.
    pub fn get(&self, key: &str) -> Option<&Node> {
        self.entry(key).map(|entry| &entry.value)
    }

    fn entry(&self, key: &str) -> Option<&Entry> {
        match &self.kind {
            Kind::Map(entries) => entries.iter().find(|entry| entry.key == key),
            _ => None,
        }
    }

    /// The entry of a list, if this is one.
    pub fn item(&self, index: usize) -> Option<&Node> {
        match &self.kind {
            Kind::Seq(items) => items.get(index),
            _ => None,
        }
    }

    /// What it is, for people.
    pub fn describe(&self) -> String {
        match &self.kind {
            Kind::Null => "nothing".to_owned(),
            Kind::Bool(_) => format!("`{}`", self.raw),
            Kind::Int(_) | Kind::Float(_) => format!("the number `{}`", self.raw),
            Kind::Str(text) if text.chars().count() > 40 => "a long text".to_owned(),
            Kind::Str(text) => format!("the text `{}`", text.escape_debug()),
            Kind::Seq(_) => "a list".to_owned(),
            Kind::Map(_) => "a section with keys".to_owned(),
        }
    }

    /// Where to put a marker under it: a container in block style lends the place of the
    /// first thing in it.
    fn visible(&self) -> Place {
        if !self.place.is_empty() {
            return self.place.clone();
        }
        match &self.kind {
            Kind::Map(entries) => {
                entries.first().map_or(self.place.clone(), |e| e.key_place.clone())
            }
            Kind::Seq(items) => items.first().map_or(self.place.clone(), Node::visible),
            _ => self.place.clone(),
        }
    }
}

impl Tree {
    /// The number of the line that a byte is on, from 1.
    pub fn line(&self, at: usize) -> usize {
        self.lines.partition_point(|begin| *begin <= at)
    }

    /// The value at `path`.
    pub fn get(&self, path: &KeyPath) -> Option<&Node> {
        path.0.iter().try_fold(&self.root, |node, step| match step {
            Step::Key(key) => node.get(key),
            Step::Index(index) => node.item(*index),
        })
    }

    /// Where to point for a complaint about the value at `path`, or about the innermost
    /// thing around it that is written at all.
    pub fn locate(&self, path: &KeyPath) -> Place {
        let mut node = &self.root;
        let mut place = node.visible();
        for step in &path.0 {
            match step {
                Step::Key(key) => {
                    let Some(entry) = node.entry(key) else { return place };
                    node = &entry.value;
                    place = if node.place.is_empty() {
                        entry.key_place.clone()
                    } else {
                        node.place.clone()
                    };
                }
                Step::Index(index) => {
                    let Some(item) = node.item(*index) else { return place };
                    node = item;
                    place = node.visible();
                }
            }
        }
        place
    }

    /// Where the last key of `path` is written.
    pub fn locate_key(&self, path: &KeyPath) -> Place {
        let Some((Step::Key(key), around)) = path.0.split_last() else { return self.locate(path) };
        self.get(&KeyPath(around.to_vec()))
            .and_then(|node| node.entry(key))
            .map_or_else(|| self.locate(path), |entry| entry.key_place.clone())
    }
}
