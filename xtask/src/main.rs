//! The project's chores. People and CI call the same recipes, so that neither can drift from
//! the other: `cargo xtask help`.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a chore talks to the person who called it"
)]

mod baseline;
mod bench;
mod ci;
mod demo;
mod deploy;
mod docs;
mod fuzz;
mod install;
mod instructions;
mod lint;
mod loom;
mod pgo;
mod quickstart;
mod run;
mod seeds;
mod setup;
mod test;
mod tools;

use std::process::ExitCode;

use run::{Done, Failed};

const HELP: &str = "\
usage: cargo xtask RECIPE

  setup               install what is missing to test and lint
  test [ARGS]         install what the tests need, then run all of them
                      (ARGS go to cargo test: `cargo xtask test --test tidy`)
  lint                formatting, clippy, dependencies, documentation, toolchain
  loom                what threads share, under every order in which they can take turns
  instructions [--accept]
                      count the instructions of what is done for each request: no more than
                      before (--accept: that is what they are from now on)
  advisories          known faults in dependencies (asks the network)
  demo-check          `cargo run --release -- demo` starts, answers and stops
  deploy-check [--where-possible]
                      what operators install: manifests against their schemas, the image run
                      without an engine, the service under a systemd of its own. Needs root
                      and namespaces (--where-possible: without them less is judged)
  install-check [--where-possible]
                      from an empty Debian: the README's build and quick start, then the
                      installation and all that docs/src/operating/systemd.md tells, under
                      systemd and by hand. Needs root, namespaces and Debian's package server
                      (--where-possible: without them nothing is judged, and it says so)
  quickstart-check    the README's quick start works as it is written
  docs                write the pages of the documentation that are made from the program, and
                      build the book into target/book
  docs-check [PART]   run every command of the documentation, check every configuration and link
                      in it, and build the book (PART: only the pages with that in their names)
  fuzz [--seconds N]  run every fuzz target for N seconds (default 60)
  fuzz-build          build every fuzz target
  bench [ARGS]        install other proxies, measure all of them, and write the figures and
                      plots that the README shows (with ARGS, which go to bench/compare.py,
                      nothing is written); an hour on a quiet machine
  bench --quick       what a small request costs here and in HAProxy, in half a minute
  pgo                 a binary that the compiler has arranged by what it has seen of it at work
  ci                  what CI runs: test, demo-check, quickstart-check, docs-check; deploy-check
                      where possible; lint, loom, instructions, the tests of the measurements,
                      bench --quick (whose figure decides nothing); install-check where
                      possible, if less than 50 minutes have gone
  help                this text
";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some((recipe, rest)) = arguments.split_first() else {
        eprint!("{HELP}");
        return ExitCode::from(2);
    };
    match dispatch(recipe, rest) {
        Some(Ok(())) => ExitCode::SUCCESS,
        Some(Err(failed)) => {
            eprintln!("\nxtask {recipe} failed: {failed}");
            ExitCode::FAILURE
        }
        None => {
            let given = arguments.join(" ");
            eprintln!("cargo xtask {given}: no such recipe, or an argument too many\n\n{HELP}");
            ExitCode::from(2)
        }
    }
}

/// `None`: not a way to call us.
fn dispatch(recipe: &str, rest: &[String]) -> Option<Done> {
    if recipe == "test" {
        return Some(test::all(rest));
    }
    if recipe == "bench" {
        return Some(bench::run(rest));
    }
    if recipe == "docs-check" {
        return Some(docs::check(rest));
    }
    if recipe == "fuzz" {
        return fuzz::seconds(rest).map(fuzz::run_all);
    }
    if recipe == "instructions" {
        return instructions::asked(rest);
    }
    if recipe == "deploy-check" {
        return where_possible(rest).map(deploy::check);
    }
    if recipe == "install-check" {
        return where_possible(rest).map(install::check);
    }
    if !rest.is_empty() {
        return None;
    }
    Some(match recipe {
        "setup" => setup::everything(),
        "lint" => lint::all(),
        "loom" => loom::all(),
        "advisories" => lint::advisories(),
        "pgo" => pgo::build(),
        "demo-check" => demo::check(),
        "docs" => docs::write(),
        "quickstart-check" => quickstart::check(),
        "fuzz-build" => fuzz::build_all(),
        "ci" => ci::all(),
        "help" | "-h" | "--help" => {
            print!("{HELP}");
            Ok(())
        }
        _ => return None,
    })
}

/// Whether what cannot be done here is to be left out.
fn where_possible(arguments: &[String]) -> Option<bool> {
    match arguments {
        [] => Some(false),
        [flag] if flag == "--where-possible" => Some(true),
        _ => None,
    }
}

/// The repository's top folder.
fn root() -> &'static std::path::Path {
    // The recipes are only ever run from the checkout that they were compiled in.
    std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(std::path::Path::new("."))
}

/// A file of the repository, as text.
fn read(name: &str) -> Result<String, Failed> {
    std::fs::read_to_string(root().join(name))
        .map_err(|e| Failed::new(format!("cannot read {name}: {e}"), "is the checkout whole?"))
}
