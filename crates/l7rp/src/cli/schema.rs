//! `l7rp schema`: the configuration language, for editors.

use std::process::ExitCode;

use super::terminal::print;
use crate::config;

pub(super) fn run() -> ExitCode {
    print(format!("{:#}\n", config::schema()))
}
