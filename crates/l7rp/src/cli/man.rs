//! `l7rp man`: manual pages, made from the same definition as the help.

use std::process::ExitCode;

use clap::CommandFactory;

use super::WRONG;
use super::arguments::{Arguments, Man};
use super::terminal::{error, failed, print};

const SOURCE: &str = concat!("l7rp ", env!("CARGO_PKG_VERSION"));

pub(super) fn run(asked: &Man) -> ExitCode {
    let mut command = Arguments::command();
    // Gives the subcommands their full names.
    command.build();
    let command = match asked.subcommand.as_deref() {
        None => Some(command),
        // `l7rp-backend`, for the page; clap has put a blank between.
        Some(name) => command
            .find_subcommand(name)
            .map(|found| found.clone().display_name(format!("l7rp-{name}"))),
    };
    let Some(command) = command else {
        error("there is no such subcommand; see `l7rp -h`");
        return ExitCode::from(WRONG);
    };
    let mut page = Vec::new();
    match clap_mangen::Man::new(command).source(SOURCE).render(&mut page) {
        Ok(()) => print(page),
        Err(e) => failed(&format!("cannot make the page: {e}")),
    }
}
