//! From an empty machine: what the README and the page on systemd tell is enough.

use std::path::PathBuf;

use crate::deploy::{folder, machine, service};
use crate::run::{Done, Failed, cargo, command, step};
use crate::{quickstart, read, root, setup};

/// A root folder with Debian's least, a C compiler, git and systemd; in it a clean checkout, built
/// by the README's command, installed and operated by the page's.
pub(crate) fn check(where_possible: bool) -> Done {
    setup::for_install()?;
    if !machine::is_possible(where_possible)? {
        return Ok(());
    }
    let readme = read("README.md")?;
    let build = quickstart::build_command(&readme).ok_or_else(|| {
        Failed::new("README.md: the quick start does not build", "install.rs must follow it")
    })?;
    let folder = folder("install")?;
    // Crates are fetched here, where whatever is needed to reach the registry is set up.
    step(cargo().args(["fetch", "--locked"]), "the crate registry must be reached")?;
    // What is committed, and nothing else.
    let source = folder.join("source");
    step(command("rm").arg("-rf").arg(&source), "is it somebody else's?")?;
    let mut clone = command("git");
    clone.args(["clone", "--quiet", "--no-hardlinks"]).arg(root()).arg(&source);
    step(&mut clone, "is this a checkout of git?")?;
    let mut make = setup::as_root("unshare")?;
    make.arg("--mount").arg("sh").arg(root().join("xtask/deploy/empty_machine.sh"));
    make.arg(&folder).args([toolchain()?, crates()?]).arg(build);
    step(&mut make, "the line with `E:`, or the compiler's message, says why")?;
    machine::run(&folder.join("root"), &folder, &service::script()?)?;
    println!("\ninstall-check: all is well");
    Ok(())
}

/// The folder of the toolchain that runs us.
fn toolchain() -> Result<PathBuf, Failed> {
    let output = command("rustc").args(["--print", "sysroot"]).output();
    let path = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    path.ok().filter(|path| !path.is_empty()).map(PathBuf::from).ok_or_else(|| {
        Failed::new("rustc does not say where it is", "is `rustc` on the search path?")
    })
}

/// Where cargo keeps crates.
fn crates() -> Result<PathBuf, Failed> {
    let own = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cargo"));
    own.or_else(home)
        .map(|cargo| cargo.join("registry"))
        .filter(|registry| registry.is_dir())
        .ok_or_else(|| Failed::new("cargo has no folder `registry`", "is CARGO_HOME right?"))
}
