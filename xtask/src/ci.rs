//! What CI runs, in the order that a newcomer would.

use crate::run::Done;
use crate::{bench, demo, deploy, docs, install, instructions, lint, loom, quickstart, test};

/// Tests come first: on a bare machine that shows that `cargo xtask test` needs nothing that
/// another recipe installs.
pub(crate) fn all() -> Done {
    test::all(&[])?;
    demo::check()?;
    quickstart::check()?;
    docs::check(&[])?;
    deploy::check(true)?;
    install::check(true)?;
    lint::all()?;
    loom::all()?;
    instructions::check()?;
    bench::check()?;
    bench::quick()?;
    println!("\nci: all is well");
    Ok(())
}
