//! `l7rp status`: what a running instance is about, once.

use std::io::IsTerminal;
use std::process::ExitCode;

use serde_json::Value;

use super::arguments;
use super::ask::Instance;
use super::board::{Counters, Order, Wish, lines};
use super::terminal::{failed, print, visible, visible_json};
use crate::admin::status::Status;

/// Columns that are always made use of.
const LEAST_WIDTH: usize = 80;

pub(super) fn run(asked: &arguments::Status) -> ExitCode {
    let (value, status) = match fetch(&asked.admin) {
        Ok(answer) => answer,
        Err(why) => return failed(&format!("{why}; --admin names another instance")),
    };
    if asked.json {
        return print(visible_json(&format!("{value:#}\n")));
    }
    // What is not read on a terminal is cut nowhere.
    let size = || ratatui::crossterm::terminal::size().ok();
    let width = if std::io::stdout().is_terminal() {
        size().map_or(LEAST_WIDTH, |(width, _)| LEAST_WIDTH.max(width.into()))
    } else {
        usize::MAX
    };
    let wish = Wish { counters: Counters::Totals, order: Order::File, width };
    let mut text = String::new();
    for line in lines(&status, wish) {
        let words: String = line.iter().map(|(text, _)| text.as_str()).collect();
        text += words.trim_end();
        text.push('\n');
    }
    print(text)
}

/// What the instance says of itself: as sent, and as understood. An error says why that is not to
/// be had, and may be shown.
pub(super) fn fetch(instance: &Instance) -> Result<(Value, Status), String> {
    let ask = || {
        let value = instance.get("/status", "version")?;
        let status = serde_json::from_value(value.clone());
        let status = status.map_err(|e| format!("its answer is not that of this version: {e}"))?;
        Ok((value, status))
    };
    ask().map_err(|why: String| visible(&format!("cannot ask {instance}: {why}")))
}
