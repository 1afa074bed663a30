//! From an empty machine: what the README and the page on systemd tell is enough.

mod transcript;

use std::path::{Path, PathBuf};
use std::process::Command;

use transcript::Transcript;

use crate::deploy::{machine, make, service, write};
use crate::run::{Done, Failed, cargo, command, left_out, step, succeeds};
use crate::{quickstart, read, root, setup};

/// Where everything is made; what is kept of it.
const FOLDER: &str = "target/install-check";
const TRANSCRIPT: &str = "transcript.txt";
const MAKE: &str = "xtask/deploy/empty_machine.sh";

/// A root folder with Debian's least, a C compiler, git and systemd; in it a clean checkout, built
/// and tried by the README's commands, installed and operated by the page's. `where_possible`: what
/// is missing to make it is told, and no failure.
pub(crate) fn check(where_possible: bool) -> Done {
    if let Some(obstacle) = obstacle() {
        let instead = "quickstart-check has the README's commands on this machine, deploy-check \
                       those of the page on systemd";
        return left_out(where_possible, &obstacle, instead);
    }
    let folder = make(FOLDER)?;
    let mut transcript = Transcript::begin(&folder.join(TRANSCRIPT))?;
    transcript.tell(&format!("install-check of {}", version()))?;
    empty_machine(&folder, &mut transcript)?;
    let system = folder.join("root");
    let advice = "the line with FAILED says what did not come true";
    let mut run = chroot(&system, &folder, &quickstart::in_the_checkout(&read("README.md")?)?)?;
    transcript.step("The README's quick start", &mut run, "the README's lines must work")?;
    if let Some(obstacle) = machine::obstacle() {
        let instead = "the service is started by hand, as its user and with its limits";
        left_out(true, &obstacle, instead)?;
        transcript.tell(&format!("\nNOT under systemd: {obstacle}"))?;
    } else {
        let mut boot = machine::boot(&system, &folder, &service::script(service::OPERATE)?)?;
        transcript.step("The service under systemd", &mut boot, advice)?;
    }
    let mut run = chroot(&system, &folder, &service::script(service::BY_HAND)?)?;
    transcript.step("The service by hand", &mut run, advice)?;
    transcript.tell("\ninstall-check: all is well")?;
    println!("The transcript is {FOLDER}/{TRANSCRIPT}");
    remove(&[system, folder.join("source")])
}

/// What keeps a machine from being made here.
fn obstacle() -> Option<Failed> {
    if let Err(missing) = setup::for_install() {
        return Some(missing);
    }
    let advice = "call it as root (or with sudo), where namespaces and mounts are allowed: a \
                  container needs --privileged for that";
    let mut probe = setup::as_root("unshare").unwrap_or_else(|_| command("false"));
    probe.args(["--mount", "--pid", "--fork", "--net"]);
    if !succeeds(probe.args(["sh", "-c", "mount -t tmpfs tmpfs /tmp && mount -t proc proc /proc"]))
    {
        return Some(Failed::new("namespaces of its own are not allowed here", advice));
    }
    let mut ask = command("sh");
    if !succeeds(ask.arg(root().join(MAKE)).arg("reach")) {
        let advice = "the server is that of `apt-get indextargets`, the release this machine's";
        return Some(Failed::new("Debian's package server does not answer", advice));
    }
    None
}

/// Makes the machine, and builds there.
fn empty_machine(folder: &Path, transcript: &mut Transcript) -> Done {
    let readme = read("README.md")?;
    let build = quickstart::build_command(&readme).ok_or_else(|| {
        Failed::new("README.md: the quick start does not build", "install.rs must follow it")
    })?;
    // Crates are fetched here, where whatever is needed to reach the registry is set up.
    step(cargo().args(["fetch", "--locked"]), "the crate registry must be reached")?;
    remove(&[folder.join("root"), folder.join("source")])?;
    transcript.step("Source", &mut source(&folder.join("source")), "is the checkout whole?")?;
    let script = root().join(MAKE);
    let mut debian = setup::as_root("sh")?;
    debian.arg(&script).arg("debian").arg(folder);
    transcript.step("Debian", &mut debian, "the line with `E:` says why")?;
    let mut make = setup::as_root("unshare")?;
    make.arg("--mount").arg("sh").arg(&script).arg("build").arg(folder);
    make.args([toolchain()?, crates()?]).arg(build);
    transcript.step("Build", &mut make, "the compiler's message says why")
}

/// What is committed and nothing else; where there is no git, all that is there.
fn source(to: &Path) -> Command {
    if root().join(".git").exists() {
        let mut clone = command("git");
        clone.args(["clone", "--quiet", "--bare", "--no-hardlinks"]).arg(root()).arg(to);
        return clone;
    }
    let copy = "mkdir \"$0\" && find . -mindepth 1 -maxdepth 1 ! -name target \
                -exec cp --recursive --target-directory=\"$0\" {} +";
    let mut shell = command("sh");
    shell.args(["-euc", copy]).arg(to);
    shell
}

/// Runs a script in the machine, without systemd.
fn chroot(system: &Path, folder: &Path, script: &str) -> Result<Command, Failed> {
    write(&folder.join("script"), script)?;
    let mut run = setup::as_root("timeout")?;
    run.args(["300", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--net", "sh"]);
    run.arg(root().join("xtask/deploy/chroot.sh")).args([system, folder]);
    Ok(run)
}

fn remove(folders: &[PathBuf]) -> Done {
    let mut rm = setup::as_root("rm")?;
    step(rm.args(["-rf", "--one-file-system"]).args(folders), "is something mounted there?")
}

/// What is judged.
fn version() -> String {
    let output = command("git").args(["log", "-1", "--format=%h %s"]).output();
    let line = output.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    line.ok().filter(|line| !line.is_empty()).unwrap_or_else(|| "a folder without git".to_owned())
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
