//! Standard output and error, without the panics of `print!` when a reader has left.

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

/// Without what could move the cursor of a terminal, or turn the direction of its text: it may
/// come from elsewhere.
pub(super) fn safe(text: &str) -> String {
    let turns = |c| matches!(c, '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if c.is_control() || turns(c) { out.extend(c.escape_debug()) } else { out.push(c) }
    }
    out
}
