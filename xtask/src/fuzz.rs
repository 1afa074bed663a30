//! Fuzzing. Targets are found, not listed: a new file in `fuzz/fuzz_targets` is enough here
//! (cargo itself wants a `[[bin]]` entry in `fuzz/Cargo.toml` as well, and we say so).

use std::process::Command;

use crate::run::{Done, Failed, cargo, step};
use crate::{read, root, seeds, setup, tools};

const DEFAULT_SECONDS: u64 = 60;

/// What `cargo xtask fuzz` was given; `None`: not a way to call it.
pub(crate) fn seconds(arguments: &[String]) -> Option<u64> {
    match arguments {
        [] => Some(DEFAULT_SECONDS),
        [flag, n] if flag == "--seconds" => n.parse().ok().filter(|n| *n > 0),
        _ => None,
    }
}

/// Runs every target for so long.
pub(crate) fn run_all(seconds: u64) -> Done {
    let targets = targets()?;
    if targets.is_empty() {
        return Ok(());
    }
    setup::subcommand(&tools::FUZZ)?;
    for target in &targets {
        let mut run = cargo_fuzz("run");
        run.arg(target).arg(format!("fuzz/corpus/{target}"));
        // What we ship; what libFuzzer finds goes to the first folder, which git ignores.
        let seeds = format!("fuzz/seeds/{target}");
        if root().join(&seeds).is_dir() {
            run.arg(seeds);
        }
        make_corpus_folder(target)?;
        if target == seeds::TARGET {
            seeds::write()?;
        }
        run.arg("--")
            .arg(format!("-max_total_time={seconds}"))
            .args(["-timeout=10", "-print_final_stats=1"]);
        step(
            &mut run,
            "the input is in fuzz/artifacts: make it a unit test, then mend the code (CONTRIBUTING.md)",
        )?;
    }
    println!("\nfuzz: {} target(s) ran {seconds} s each without a finding", targets.len());
    Ok(())
}

/// Type-checks every target, which needs neither cargo-fuzz nor a C++ compiler: a change that
/// leaves a target behind is told where it is made.
pub(crate) fn check() -> Done {
    let mut check = cargo();
    check.args(["check", "--quiet", "--locked", "--manifest-path", "fuzz/Cargo.toml"]);
    // Nothing is linked, but without a name for it libFuzzer would be compiled.
    check.env("CUSTOM_LIBFUZZER_PATH", "/nowhere/libnone.a");
    step(&mut check, "mend the target in fuzz/fuzz_targets, or run `cargo update` in fuzz/")
}

/// Builds every target.
pub(crate) fn build_all() -> Done {
    if targets()?.is_empty() {
        return Ok(());
    }
    setup::subcommand(&tools::FUZZ)?;
    step(&mut cargo_fuzz("build"), "mend what the compiler names")
}

/// Sanitizers are unstable flags; this variable lets the pinned stable compiler take them, so
/// that no second toolchain is needed.
fn cargo_fuzz(verb: &str) -> Command {
    let mut command = cargo();
    command.env("RUSTC_BOOTSTRAP", "1").args(["fuzz", verb, "--fuzz-dir", "fuzz"]);
    command
}

fn make_corpus_folder(target: &str) -> Done {
    std::fs::create_dir_all(root().join("fuzz/corpus").join(target)).map_err(|e| {
        Failed::new(format!("cannot make fuzz/corpus/{target}: {e}"), "is the disk full?")
    })
}

/// The names of all targets, in order.
fn targets() -> Result<Vec<String>, Failed> {
    let mut found = Vec::new();
    if let Ok(folder) = std::fs::read_dir(root().join("fuzz/fuzz_targets")) {
        for path in folder.filter_map(Result::ok).map(|entry| entry.path()) {
            if path.extension().is_some_and(|e| e == "rs") {
                found.extend(path.file_stem().map(|stem| stem.display().to_string()));
            }
        }
    }
    found.sort();
    let manifest = read("fuzz/Cargo.toml")?;
    if let Some(unknown) = found.iter().find(|name| !is_declared(&manifest, name)) {
        return Err(Failed::new(
            format!("fuzz/fuzz_targets/{unknown}.rs has no entry in fuzz/Cargo.toml"),
            format!("add:\n{}", entry(unknown)),
        ));
    }
    if found.is_empty() {
        println!("fuzz: no targets in fuzz/fuzz_targets");
    }
    Ok(found)
}

fn is_declared(manifest: &str, target: &str) -> bool {
    let line = format!("name = \"{target}\"");
    manifest.split("[[bin]]").skip(1).any(|entry| entry.lines().any(|l| l.trim() == line))
}

fn entry(target: &str) -> String {
    format!(
        "\n[[bin]]\nname = \"{target}\"\npath = \"fuzz_targets/{target}.rs\"\ntest = false\ndoc = false\nbench = false\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_seconds_or_nothing() {
        let given =
            |words: &[&str]| seconds(&words.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(given(&[]), Some(DEFAULT_SECONDS));
        assert_eq!(given(&["--seconds", "5"]), Some(5));
        assert_eq!(given(&["--seconds", "0"]), None);
        assert_eq!(given(&["--seconds"]), None);
        assert_eq!(given(&["5"]), None);
    }

    #[test]
    fn a_target_is_declared_by_its_own_entry() {
        let manifest = format!("[package]\nname = \"fuzz\"\n{}", entry("head"));
        assert!(is_declared(&manifest, "head"));
        assert!(!is_declared(&manifest, "body"));
        assert!(!is_declared(&manifest, "fuzz"), "the package's name is no target");
    }
}
