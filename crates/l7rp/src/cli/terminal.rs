//! Standard output and error, without the panics of `print!` when a reader has left.

use std::fmt::Write as _;
use std::io::{ErrorKind, IsTerminal, Write};
use std::process::ExitCode;

use super::{FAILED, WRONG};

/// Writes to standard output. `l7rp schema | head` is no failure.
pub(super) fn print(text: impl AsRef<[u8]>) -> ExitCode {
    let mut out = std::io::stdout().lock();
    match out.write_all(text.as_ref()).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            error(&format!("cannot write to standard output: {e}"));
            ExitCode::from(FAILED)
        }
        _ => ExitCode::SUCCESS,
    }
}

/// Writes to standard error. If that is not possible, there is nobody to tell.
pub(super) fn note(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// Tells what went wrong.
pub(super) fn error(message: &str) {
    note(&format!("error: {message}\n"));
}

/// Tells what failed at run time.
pub(super) fn failed(message: &str) -> ExitCode {
    error(message);
    ExitCode::from(FAILED)
}

/// Tells what is wrong with the configuration; `text` is complete.
pub(super) fn wrong(text: &str) -> ExitCode {
    note(text);
    ExitCode::from(WRONG)
}

/// Whether standard error should have colours (<https://no-color.org>).
pub(super) fn color() -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    std::io::stderr().is_terminal() && !is_set("NO_COLOR") && !is_dumb
}

/// `text` as it may be shown on a terminal, whoever has sent it: what would do something there,
/// or change the order of what is read, is written out.
pub(super) fn visible(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if acts(c) {
            shown.extend(c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// The same of JSON that is printed: it means what it meant.
pub(super) fn visible_json(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\n' => shown.push(c),
            c if acts(c) => {
                let _ = write!(shown, "\\u{:04x}", u32::from(c));
            }
            c => shown.push(c),
        }
    }
    shown
}

/// Whether a terminal does something else with it than show it: control characters, and those
/// that are not seen or turn the direction of what is.
fn acts(c: char) -> bool {
    let hides = matches!(
        c,
        '\u{ad}' | '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}'
    );
    c.is_control() || hides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_acts_on_a_terminal() {
        for (text, shown) in [
            ("plain ünïcode 名", "plain ünïcode 名"),
            ("\u{1b}[2J", "\\u{1b}[2J"),
            ("a\r\nb\tc", "a\\u{d}\\u{a}b\\u{9}c"),
            ("\u{9b}31m\u{7f}", "\\u{9b}31m\\u{7f}"),
            ("user\u{202e}txt", "user\\u{202e}txt"),
        ] {
            assert_eq!(visible(text), shown, "{text:?}");
        }
        let value = serde_json::json!({ "a": "\u{1b}\u{9b}\u{202e}\u{7f}" });
        let shown = visible_json(&format!("{value:#}"));
        assert!(!shown.chars().any(|c| c != '\n' && acts(c)), "{shown:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&shown).unwrap(), value);
    }
}
