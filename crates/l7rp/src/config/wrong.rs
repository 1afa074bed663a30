//! What is wrong with a configuration, and how it is told.

use std::cmp::Ordering;
use std::fmt;

use annotate_snippets::{AnnotationKind, Level, Origin, Renderer, Snippet};

use super::Source;
use super::file::{KeyPath, Place};

/// As many are told of one file; nobody reads further.
pub const MOST_WRONGS: usize = 100;

/// One thing that is wrong, or only worth a warning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// The key, from the root.
    pub path: KeyPath,
    /// What is wrong.
    pub message: String,
    /// What was expected, or what to do.
    pub help: Option<String>,
    /// Where it is written; `None`: the file as a whole.
    pub place: Option<Place>,
}

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The file is refused.
    Error,
    /// The file is taken.
    Warning,
}

impl Wrong {
    /// Something wrong at a key.
    pub fn new(path: KeyPath, message: impl Into<String>) -> Self {
        Self { path, message: message.into(), help: None, place: None }
    }

    /// Adds what was expected, or what to do.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Adds where it is written.
    #[must_use]
    pub fn place(mut self, place: Place) -> Self {
        self.place = Some(place);
        self
    }

    /// Line and column, both from 1.
    pub fn line_column(&self, source: &Source) -> Option<(usize, usize)> {
        let start = self.place.as_ref()?.start;
        let before = source.text.get(..start)?;
        let begin = before.rfind('\n').map_or(0, |n| n + 1);
        Some((1 + before.matches('\n').count(), 1 + before[begin..].chars().count()))
    }

    /// All of it on one line: `FILE:LINE:COLUMN: KEY: message (help)`.
    pub fn line(&self, source: &Source) -> String {
        let help = self.help.as_ref().map(|help| format!(" ({help})"));
        let (at, help) = (self.at(source), help.unwrap_or_default());
        printable(&format!("{at}: {}{help}", self.message))
    }

    /// Where it is: `FILE:LINE:COLUMN: KEY`.
    pub fn at(&self, source: &Source) -> String {
        let at = self.line_column(source).map(|(line, column)| format!(":{line}:{column}"));
        let path = Some(self.path.to_string()).filter(|path| !path.is_empty());
        let path = path.map(|path| format!(": {path}"));
        let [at, path] = [at, path].map(Option::unwrap_or_default);
        format!("{}{at}{path}", source.name)
    }

    /// The order in which wrongs are told: as they are in the file.
    pub fn in_file_order(&self, other: &Self) -> Ordering {
        let start = |wrong: &Self| wrong.place.as_ref().map_or(0, |place| place.start);
        start(self).cmp(&start(other)).then_with(|| self.message.cmp(&other.message))
    }

    /// The whole story for people: message, place, the line itself, and help.
    pub fn render(&self, source: &Source, severity: Severity, color: bool) -> String {
        let level = match severity {
            Severity::Error => Level::ERROR,
            Severity::Warning => Level::WARNING,
        };
        let path = printable(&self.path.to_string());
        let report = level.primary_title(printable(&self.message));
        let mut group = match self.excerpt(source) {
            Some(excerpt) => {
                let annotation = AnnotationKind::Primary.span(excerpt.marked);
                let annotation = if path.is_empty() { annotation } else { annotation.label(path) };
                report.element(
                    Snippet::source(excerpt.line)
                        .line_start(excerpt.number)
                        .path(source.name.as_str())
                        .annotation(annotation),
                )
            }
            None => report.element(Origin::path(source.name.as_str())),
        };
        if let Some(help) = &self.help {
            group = group.element(Level::HELP.message(printable(help)));
        }
        let renderer = if color { Renderer::styled() } else { Renderer::plain() };
        renderer.render(&[group])
    }

    /// The line that it begins on, and what of it to mark.
    fn excerpt(&self, source: &Source) -> Option<Excerpt> {
        let text = source.text.as_str();
        let place = self.place.as_ref()?;
        let before = text.get(..place.start)?;
        let begin = before.rfind('\n').map_or(0, |n| n + 1);
        let line = text[begin..].split('\n').next()?.trim_end_matches('\r');
        let start = (place.start - begin).min(line.len());
        let end = (place.end - begin).clamp(start, line.len());
        // The renderer knows the controls of ASCII; the others have as many bytes as `¿`.
        let line = line.replace(|c: char| c.is_control() && !c.is_ascii(), "¿");
        Some(Excerpt { line, number: 1 + before.matches('\n').count(), marked: start..end })
    }
}

/// Texts of the file are repeated in messages; what is no character for people must not
/// reach the terminal.
fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

struct Excerpt {
    line: String,
    number: usize,
    marked: Place,
}

/// A file that was refused, with all that is wrong with it.
#[derive(Clone, Debug)]
pub struct Refused {
    /// The file.
    pub source: Source,
    /// At least one and at most [`MOST_WRONGS`], in file order.
    pub wrongs: Vec<Wrong>,
}

impl Refused {
    pub(super) fn new(source: Source, mut wrongs: Vec<Wrong>) -> Self {
        wrongs.sort_by(Wrong::in_file_order);
        wrongs.dedup();
        wrongs.truncate(MOST_WRONGS);
        Self { source, wrongs }
    }

    /// Everything that is wrong, for people.
    pub fn render(&self, color: bool) -> String {
        let mut out = String::new();
        for wrong in &self.wrongs {
            out.push_str(&wrong.render(&self.source, Severity::Error, color));
            out.push_str("\n\n");
        }
        let count = self.wrongs.len();
        let count = match count {
            1 => "1 problem".to_owned(),
            MOST_WRONGS.. => format!("the first {MOST_WRONGS} problems"),
            _ => format!("{count} problems"),
        };
        let last = format!("{count} in {}", self.source.name);
        let last = [annotate_snippets::Group::with_title(Level::ERROR.primary_title(last))];
        let renderer = if color { Renderer::styled() } else { Renderer::plain() };
        out.push_str(&renderer.render(&last));
        out.push('\n');
        out
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.render(false))
    }
}

impl std::error::Error for Refused {}
