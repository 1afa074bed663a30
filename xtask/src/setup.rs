//! Installs what is missing. Does nothing, quickly, when all is there.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run::{Done, Failed, cargo, command, step, succeeds};
use crate::tools::{self, Packages, Subcommand, System};
use crate::{read, root};

/// Packages start their services as they are installed unless this file says no.
const SERVICE_POLICY: &str = "/usr/sbin/policy-rc.d";

/// All that the recipes need.
pub(crate) fn everything() -> Done {
    for_lint()?;
    for_tests()?;
    for_instructions()?;
    for_docs()?;
    println!("setup: all that testing, linting, counting and the documentation need is there");
    Ok(())
}

/// What `cargo xtask test` needs, and no more: cargo-deny takes minutes to compile.
pub(crate) fn for_tests() -> Done {
    system_programs(tools::SYSTEM)?;
    python_packages(&Packages::TESTS)
}

/// What `cargo xtask deploy-check` needs.
pub(crate) fn for_deploy() -> Done {
    system_programs(tools::DEPLOY)?;
    python_packages(&Packages::DEPLOY)
}

/// What `cargo xtask install-check` needs.
pub(crate) fn for_install() -> Done {
    system_programs(tools::INSTALL)
}

fn python_packages(wanted: &Packages) -> Done {
    if wanted.are_there() {
        return Ok(());
    }
    let mut pip = command("/usr/bin/python3");
    pip.args(["-m", "pip", "install", "--quiet", "--upgrade", "--no-warn-script-location"]);
    pip.env("PIP_ROOT_USER_ACTION", "ignore").arg("--target").arg(wanted.folder());
    pip.args(wanted.packages);
    step(&mut pip, "pip must reach its package index; a second try often helps")
}

fn system_programs(wanted: &'static [System]) -> Done {
    let missing = tools::missing(wanted);
    if missing.is_empty() {
        return Ok(());
    }
    if tools::find("apt-get").is_none() {
        return Err(Failed::new(
            format!(
                "this is no Debian system, and these programs are missing:{}",
                listed(&missing)
            ),
            "install them with your system's package manager. `cargo test --workspace` runs \
             without them; the tests that need one fail and name it",
        ));
    }
    apt_install(&missing)?;
    let still = tools::missing(wanted);
    if still.is_empty() {
        return Ok(());
    }
    Err(Failed::new(
        format!("apt-get was content, but these programs are still missing:{}", listed(&still)),
        "install them by hand",
    ))
}

/// What counting instructions needs; where the runner is.
pub(crate) fn for_instructions() -> Result<PathBuf, Failed> {
    system_programs(tools::SYSTEM)?;
    let lock = read("Cargo.lock")?;
    let version = tools::locked(&lock, tools::RUNNER).ok_or_else(|| {
        Failed::new(
            format!("Cargo.lock has no {}", tools::RUNNER),
            "it comes with the library gungraun, which the benchmarks are written with",
        )
    })?;
    program(tools::RUNNER, version, &[])
}

/// What makes the book of the documentation; where it is.
pub(crate) fn for_docs() -> Result<PathBuf, Failed> {
    let features = ["--no-default-features", "--features", "search"];
    program(tools::BOOK, tools::BOOK_VERSION, &features)
}

/// A program that comes as the crate `name`, compiled into a folder of this repository's own if
/// it is not there; where it is.
fn program(name: &str, version: &str, features: &[&str]) -> Result<PathBuf, Failed> {
    let path = root().join(tools::TOOLS_FOLDER).join("bin").join(name);
    if !tools::is_version(&path, version) {
        let mut install = cargo();
        install.args(["install", "--locked", "--root", tools::TOOLS_FOLDER]);
        install.args([name, "--version", version]).args(features);
        step(&mut install, "read the compiler's message above; the crate registry is needed")?;
    }
    Ok(path)
}

/// What `cargo xtask lint` needs.
pub(crate) fn for_lint() -> Done {
    component("fmt", "rustfmt")?;
    component("clippy", "clippy")?;
    subcommand(&tools::DENY)
}

/// Compiles a cargo subcommand if it is not there.
pub(crate) fn subcommand(tool: &Subcommand) -> Done {
    if tool.is_installed() {
        return Ok(());
    }
    step(
        cargo().args(["install", "--locked", tool.package, "--version", tool.version]),
        "read the compiler's message above; a C compiler and the crate registry are needed",
    )
}

/// The compiler's own tool for profiles, added to the toolchain if it is not there: no other
/// version reads what the compiler has written.
pub(crate) fn profdata() -> Result<PathBuf, Failed> {
    let libdir = command("rustc").args(["--print", "target-libdir"]).output();
    let path = libdir.ok().and_then(|output| {
        let libdir = String::from_utf8(output.stdout).ok()?;
        Some(Path::new(libdir.trim()).parent()?.join("bin/llvm-profdata"))
    });
    let path = path.ok_or_else(|| Failed::new("no rustc on the path", "install Rust by rustup"))?;
    if !path.is_file() {
        step(
            command("rustup").args(["component", "add", "llvm-tools"]),
            "rustup must reach its server; or install the component by hand",
        )?;
    }
    Ok(path)
}

/// Adds a part of the pinned toolchain if it is not there.
fn component(subcommand: &str, name: &str) -> Done {
    if succeeds(cargo().args([subcommand, "--version"])) {
        return Ok(());
    }
    if tools::find("rustup").is_none() {
        return Err(Failed::new(
            format!("{name} is missing and there is no rustup to add it"),
            format!("install {name} the way this Rust was installed"),
        ));
    }
    step(
        command("rustup").args(["component", "add", name]),
        "rustup must reach its server; or install the component by hand",
    )
}

fn listed(tools: &[&System]) -> String {
    let line = |tool: &&System| format!("\n  {} ({}): {}", tool.program, tool.package, tool.why);
    tools.iter().map(line).collect()
}

fn apt_install(missing: &[&System]) -> Done {
    println!("missing:{}", listed(missing));
    let _quiet = NoServices::hold()?;
    // An old or empty package list is the usual reason for "unable to locate package".
    step(
        as_root("apt-get")?.args(["update", "-q"]),
        "apt-get must reach its package server; a second try often helps",
    )?;
    let mut install = as_root("env")?;
    install.args(["DEBIAN_FRONTEND=noninteractive", "RUNLEVEL=1"]);
    install.args(["apt-get", "install", "-q", "-y", "--no-install-recommends"]);
    // Somebody else's installation is waited for.
    install.args(["-o", "DPkg::Lock::Timeout=600"]);
    install.args(missing.iter().map(|tool| tool.package));
    step(&mut install, "install the packages named above by hand, then call this again")?;
    disable_services(missing)
}

/// Nor shall the services that we brought in start with the machine.
fn disable_services(installed: &[&System]) -> Done {
    let services: Vec<&str> = installed.iter().filter_map(|tool| tool.service).collect();
    if services.is_empty() || tools::find("systemctl").is_none() {
        return Ok(());
    }
    step(
        as_root("systemctl")?.arg("--quiet").arg("disable").args(services),
        "disable the services by hand, or they start with the machine",
    )
}

/// `program`, as root: directly if we are, else through sudo.
pub(crate) fn as_root(program: &str) -> Result<Command, Failed> {
    let user = command("id").arg("-u").output();
    if user.is_ok_and(|output| output.stdout.trim_ascii() == b"0") {
        return Ok(command(program));
    }
    if tools::find("sudo").is_none() {
        return Err(Failed::new(
            "packages must be installed, and there is neither root nor sudo",
            "have someone with root call `cargo xtask setup`, or install the packages by hand",
        ));
    }
    let mut sudo = command("sudo");
    sudo.arg(program);
    Ok(sudo)
}

/// While this lives, installing a server does not start it: nginx, haproxy and prometheus would
/// take ports 80 and 9090 of a machine whose owner asked for a test run.
struct NoServices;

impl NoServices {
    /// `None` when the machine has a policy of its own: that is its owner's word, and stays.
    fn hold() -> Result<Option<Self>, Failed> {
        if Path::new(SERVICE_POLICY).exists() {
            println!("{SERVICE_POLICY} is there already and decides whether services start");
            return Ok(None);
        }
        // 101 is "action forbidden by policy".
        let script = format!(
            "printf '#!/bin/sh\\nexit 101\\n' > {SERVICE_POLICY} && chmod 755 {SERVICE_POLICY}"
        );
        // Made before it is written, so that a half-done step is undone too.
        let held = Self;
        step(
            as_root("sh")?.args(["-c", &script]),
            "packages that start services are not installed without it",
        )?;
        Ok(Some(held))
    }
}

impl Drop for NoServices {
    fn drop(&mut self) {
        let removed = as_root("rm").map(|mut rm| succeeds(rm.args(["-f", SERVICE_POLICY])));
        if !removed.unwrap_or(false) {
            eprintln!(
                "could not remove {SERVICE_POLICY}: while it is there no package starts its service"
            );
        }
    }
}
