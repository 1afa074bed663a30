//! Configuration: as written ([`mod@file`]), as meant ([`plan`]), what makes the one into the
//! other ([`validate`]), what is wrong ([`wrong`]), what cannot be served yet ([`needs`]);
//! what the environment adds ([`environment`]); and
//! the plan as it may be shown ([`mod@view`]), from which a reload is foretold ([`diff`]); and
//! what is valid and yet cannot be meant ([`mod@lint`]).

pub mod diff;
pub mod environment;
pub mod file;
pub mod flags;
pub mod lint;
pub mod needs;
pub mod plan;
pub mod validate;
pub mod view;
pub mod watch;
pub mod wrong;

#[cfg(test)]
mod tests;

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};

pub use diff::Diff;
pub use flags::{WITHOUT_FILE, bind_address, from_flags};
pub use plan::Plan;
pub use view::view;
use wrong::Severity;
pub use wrong::{Refused, Wrong};

/// The text of a configuration, and what to call it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The path as the user gave it.
    pub name: String,
    /// All of it.
    pub text: String,
}

/// Whether the files that a configuration names are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Files {
    /// Certificates, keys and CAs must be readable.
    Check,
    /// They need not exist here: the check runs elsewhere than the proxy.
    Ignore,
}

/// A configuration that was taken.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// What it means.
    pub plan: Plan,
    /// What this version cannot serve: with any of it, serving must not begin.
    pub not_yet: Vec<Wrong>,
    /// What is worth a look.
    pub warnings: Vec<Wrong>,
    /// Where it has its addresses.
    pub places: Places,
    /// The text, to show these in.
    pub source: Source,
}

/// Where addresses are written, for what turns out to be wrong with them only when they are used.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// Of each listener, by name.
    listeners: Vec<(String, String)>,
    admin: Option<String>,
}

impl Places {
    fn of(plan: &Plan, tree: &file::Tree, source: &Source) -> Self {
        let at = |path: file::KeyPath| {
            let place = tree.locate(&path);
            Wrong::new(path, "").place(place).at(source)
        };
        let root = file::KeyPath::root;
        let listeners = plan.listeners.iter().enumerate().map(|(ix, listener)| {
            let path = root().key("listeners").index(ix).key("bind");
            (listener.name.clone(), at(path))
        });
        Self { listeners: listeners.collect(), admin: Some(at(root().key("admin").key("bind"))) }
    }

    /// Of the listener with this name: `FILE:LINE:COLUMN: KEY`.
    pub fn listener(&self, name: &str) -> Option<&str> {
        self.listeners.iter().find(|(known, _)| known == name).map(|(_, at)| at.as_str())
    }

    /// Of the admin endpoints.
    pub fn admin(&self) -> Option<&str> {
        self.admin.as_deref()
    }
}

impl Loaded {
    /// What cannot be served, for people; empty if all can.
    pub fn render_not_yet(&self, color: bool) -> String {
        self.render(&self.not_yet, Severity::Error, color)
    }

    /// The warnings, for people; empty if there are none.
    pub fn render_warnings(&self, color: bool) -> String {
        self.render(&self.warnings, Severity::Warning, color)
    }

    /// What is valid and yet cannot be meant, in file order.
    pub fn lint(&self) -> Vec<Wrong> {
        // It was read before: there is a tree, and nothing is wrong with it.
        file::parse(&self.source.text)
            .map_or_else(|wrong| vec![wrong], |(tree, _)| lint::lint(&self.plan, &tree))
    }

    /// The same, for people; empty if there is nothing. `all`: and not only what is worth a word
    /// to whoever asked for none: shares that were asked for, and are not heeded.
    pub fn render_lint(&self, all: bool, color: bool) -> String {
        let mut found = self.lint();
        found.retain(|wrong| all || wrong.message.ends_with(lint::UNUSED_WEIGHT));
        self.render(&found, Severity::Warning, color)
    }

    /// The warnings, for a log: a line for each.
    pub fn warning_lines(&self) -> Vec<String> {
        self.warnings.iter().map(|wrong| wrong.line(&self.source)).collect()
    }

    /// What cannot be served, for a log: a line for each.
    pub fn not_yet_lines(&self) -> Vec<String> {
        self.not_yet.iter().map(|wrong| wrong.line(&self.source)).collect()
    }

    fn render(&self, wrongs: &[Wrong], severity: Severity, color: bool) -> String {
        let mut out = String::new();
        for wrong in wrongs {
            out.push_str(&wrong.render(&self.source, severity, color));
            out.push_str("\n\n");
        }
        out
    }
}

/// Why a configuration was not taken.
#[derive(Debug)]
pub enum LoadError {
    /// The file cannot be read: a message with the path and the system's words.
    Unreadable(String),
    /// It can, but is wrong.
    Refused(Refused),
}

impl LoadError {
    /// For a log: a line for each thing that is wrong, with its place.
    pub fn lines(&self) -> Vec<String> {
        match self {
            Self::Unreadable(message) => vec![message.clone()],
            Self::Refused(refused) => {
                refused.wrongs.iter().map(|wrong| wrong.line(&refused.source)).collect()
            }
        }
    }

    /// For people.
    pub fn render(&self, color: bool) -> String {
        match self {
            Self::Unreadable(message) => format!("error: {message}\n"),
            Self::Refused(refused) => refused.render(color),
        }
    }
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for LoadError {}

/// Octets of a configuration file; a larger one is none.
const MAX_FILE: u64 = 64 << 20;

/// Reads and checks a file. Files that it names are looked for beside it.
pub fn load(path: &Path, files: Files) -> Result<Loaded, LoadError> {
    let name = path.display().to_string();
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_FILE + 1).read_to_end(&mut bytes))
        .map_err(|e| LoadError::Unreadable(format!("cannot read the configuration {name}: {e}")))?;
    if bytes.len() as u64 > MAX_FILE {
        let message = format!("the configuration {name} is larger than 64 MiB");
        return Err(LoadError::Unreadable(message));
    }
    let text = String::from_utf8(bytes).map_err(|e| {
        let valid = e.utf8_error().valid_up_to();
        let line = 1 + memchr::memchr_iter(b'\n', &e.as_bytes()[..valid]).count();
        LoadError::Unreadable(format!("the configuration {name} is not UTF-8 text: line {line}"))
    })?;
    let base = path.parent().map_or_else(PathBuf::new, Path::to_path_buf);
    parse(&Source { name, text }, &base, files).map_err(LoadError::Refused)
}

/// Checks a text. Files that it names are looked for in `base`.
pub fn parse(source: &Source, base: &Path, files: Files) -> Result<Loaded, Refused> {
    let refuse = |wrongs| Refused::new(source.clone(), wrongs);
    let (tree, mut wrongs) = file::parse(&source.text).map_err(|wrong| refuse(vec![wrong]))?;
    let mut reading = file::read(&tree);
    wrongs.append(&mut reading.wrongs);
    if reading.gave_up {
        return Err(refuse(wrongs));
    }
    // A key that is there twice has a doubtful value: nothing is to follow from it.
    reading.poisoned.extend(wrongs.iter().map(|wrong| wrong.path.clone()));
    let checked = validate::plan(&reading, &tree, base, files);
    wrongs.extend(checked.wrongs);
    match checked.plan {
        Some(plan) if wrongs.is_empty() => Ok(Loaded {
            places: Places::of(&plan, &tree, source),
            plan,
            not_yet: needs::unsupported(&tree),
            warnings: checked.warnings,
            source: source.clone(),
        }),
        _ => Err(refuse(wrongs)),
    }
}

/// JSON Schema of the file, for editors.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(file::File).to_value()
}
