//! The error that serde carries from a value to whoever reads the tree.

use std::fmt;

use serde::de;

use super::near::nearest;
use super::nodes::KeyPath;

/// Why reading stopped, and where.
#[derive(Debug)]
pub(super) struct Fault {
    pub(super) path: Option<KeyPath>,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    /// A scalar is blank: its default stands.
    Blank,
    Wrong {
        message: String,
        help: Option<String>,
        at_key: bool,
    },
}

impl Fault {
    pub(super) fn new(message: String) -> Self {
        Self { path: None, what: What::Wrong { message, help: None, at_key: false } }
    }

    pub(super) fn help(mut self, text: String) -> Self {
        if let What::Wrong { help, .. } = &mut self.what {
            *help = Some(text);
        }
        self
    }

    pub(super) fn key(mut self) -> Self {
        if let What::Wrong { at_key, .. } = &mut self.what {
            *at_key = true;
        }
        self
    }

    /// Says where, unless that is known better.
    pub(super) fn at(mut self, path: &KeyPath) -> Self {
        self.path.get_or_insert_with(|| path.clone());
        self
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            What::Blank => f.write_str("blank"),
            What::Wrong { message, .. } => f.write_str(message),
        }
    }
}

impl std::error::Error for Fault {}

impl de::Error for Fault {
    fn custom<T: fmt::Display>(message: T) -> Self {
        Self::new(message.to_string())
    }

    fn invalid_type(found: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        match found {
            de::Unexpected::Unit => Self { path: None, what: What::Blank },
            other => Self::new(format!("expected {expected}, found {}", say(&other))),
        }
    }

    fn invalid_value(found: de::Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        Self::new(format!("expected {expected}, found {}", say(&found)))
    }

    fn unknown_field(field: &str, known: &'static [&'static str]) -> Self {
        Self::new(format!("unknown key `{}`", field.escape_debug())).help(meant(field, known)).key()
    }
}

fn say(found: &de::Unexpected<'_>) -> String {
    match found {
        de::Unexpected::Bool(value) => format!("`{value}`"),
        de::Unexpected::Unsigned(n) => format!("the number `{n}`"),
        de::Unexpected::Signed(n) => format!("the number `{n}`"),
        de::Unexpected::Float(n) => format!("the number `{n}`"),
        de::Unexpected::Str(text) => format!("the text `{}`", text.escape_debug()),
        de::Unexpected::Seq => "a list".to_owned(),
        de::Unexpected::Map => "a section with keys".to_owned(),
        other => other.to_string(),
    }
}

/// The name that was probably meant, or all there are.
pub(super) fn meant(name: &str, known: &[&str]) -> String {
    if let Some(near) = nearest(name, known.iter().copied()) {
        return format!("did you mean `{near}`?");
    }
    let all: Vec<String> = known.iter().map(|k| format!("`{k}`")).collect();
    format!("known here: {}", all.join(", "))
}
