//! What CI runs, in the order that a newcomer would.

use std::time::{Duration, Instant};

use crate::run::Done;
use crate::{bench, demo, deploy, docs, install, instructions, lint, loom, quickstart, test};

/// When the empty machine is still begun with. It takes a quarter of an hour, and half of one where
/// the package server is slow; CI gives an hour and a half to all.
const LATEST: Duration = Duration::from_mins(50);

/// Tests come first: on a bare machine that shows that `cargo xtask test` needs nothing that
/// another recipe installs.
#[expect(clippy::disallowed_methods, reason = "how long the machine has taken is the question")]
pub(crate) fn all() -> Done {
    let began = Instant::now();
    test::all(&[])?;
    demo::check()?;
    quickstart::check()?;
    docs::check(&[])?;
    deploy::check(true)?;
    lint::all()?;
    loom::all()?;
    instructions::check()?;
    bench::check()?;
    bench::quick()?;
    if began.elapsed() < LATEST {
        install::check(true)?;
    } else {
        println!("ci: no time is left for `cargo xtask install-check`: this machine is slow");
    }
    println!("\nci: all is well");
    Ok(())
}
