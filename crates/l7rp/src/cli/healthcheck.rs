//! `l7rp healthcheck`: whether a running instance is alive, or ready, as an exit code. Images
//! without a shell have no other program to ask with.

use std::process::ExitCode;

use super::arguments;
use super::terminal::{failed, print, visible};

pub(super) fn run(asked: &arguments::Healthcheck) -> ExitCode {
    let (path, word) = if asked.ready { ("/readyz", "ready") } else { ("/livez", "alive") };
    match asked.admin.check(path) {
        Ok(()) => print(format!("{word}\n")),
        Err(why) => failed(&visible(&format!("{} is not {word}: {why}", asked.admin))),
    }
}
