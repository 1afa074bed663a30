//! `l7rp completions`: for the shells that `clap_complete` knows.

use std::process::ExitCode;

use clap::CommandFactory;

use super::arguments::{Arguments, Completions};
use super::terminal::print;

pub(super) fn run(asked: &Completions) -> ExitCode {
    let mut text = Vec::new();
    clap_complete::generate(asked.shell, &mut Arguments::command(), "l7rp", &mut text);
    print(text)
}
