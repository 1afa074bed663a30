//! `l7rp man`: manual pages, made from the same definition as the help.

use std::process::ExitCode;

use clap::CommandFactory;

use super::WRONG;
use super::arguments::{Arguments, Man};
use super::terminal::{error, failed, print};

pub(super) fn run(asked: &Man) -> ExitCode {
    let mut command = Arguments::command();
    // Gives the subcommands their full names.
    command.build();
    let command = match &asked.subcommand {
        None => command,
        Some(name) => match command.find_subcommand(name) {
            // `l7rp-backend`, for the page; clap has put a blank between.
            Some(found) => found.clone().display_name(format!("l7rp-{name}")),
            None => {
                error(&format!("there is no subcommand `{name}`; see `l7rp -h`"));
                return ExitCode::from(WRONG);
            }
        },
    };
    let mut page = Vec::new();
    match clap_mangen::Man::new(command).render(&mut page) {
        Ok(()) => print(page),
        Err(e) => failed(&format!("cannot make the page: {e}")),
    }
}
