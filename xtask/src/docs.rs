//! The documentation: what in it is made from the program, and whether all of it is true. Every
//! command of a page is run, and every configuration is read.

mod book;
mod built;
mod expected;
mod links;
mod page;
mod serving;
mod shell;

use std::path::{Path, PathBuf};

use crate::run::{Done, Failed, cargo, step};
use crate::{read, root, setup};
use page::{Step, What};
use shell::{Outcome, Shell};

/// Where the pages are.
const PAGES: &str = "docs/src";
/// Where what is made of them goes.
const MADE: &str = "target/docs";
/// The environment variable that has the test write what it compares otherwise.
const WRITE: &str = "L7RP_WRITE_DOCS";

/// Writes the pages that are made from the program, and builds the book.
pub(crate) fn write() -> Done {
    step(reference().env(WRITE, "1"), "mend what the compiler names")?;
    book::build(&setup::for_docs()?)?;
    println!("\ndocs: the book is target/book/index.html");
    Ok(())
}

/// Whether all of it is true; `only`: these pages, by a part of their names.
pub(crate) fn check(only: &[String]) -> Done {
    setup::for_tests()?;
    // This builds the program, too.
    step(&mut reference(), "`cargo xtask docs` writes the pages that are made from the program")?;
    let pages = book::pages()?;
    let mut wrongs = Vec::new();
    if only.is_empty() {
        wrongs.extend(book::wrongs(&pages)?);
    }
    let asked = |page: &&String| only.is_empty() || only.iter().any(|part| page.contains(part));
    for page in pages.iter().filter(asked) {
        let Ok(text) = read(&format!("{PAGES}/{page}")) else { continue };
        println!("{PAGES}/{page}");
        if let Err(wrong) = run(page, &text)? {
            wrongs.push(wrong);
        }
    }
    if !wrongs.is_empty() {
        return Err(Failed::new(
            wrongs.join("\n"),
            "mend the page, or the program. `cargo xtask docs-check PART` runs only the pages whose \
             names have PART in them",
        ));
    }
    if only.is_empty() {
        book::build(&setup::for_docs()?)?;
    }
    println!("\ndocs-check: all that the pages say is so");
    Ok(())
}

fn reference() -> std::process::Command {
    let mut test = cargo();
    test.args(["test", "--quiet", "--package", "l7rp", "--test", "reference"]);
    test
}

/// The folder of the program that the test has been built with.
fn programs() -> PathBuf {
    let target =
        std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
    root().join(target).join("debug")
}

/// Does what a page asks for, up to the first that is wrong.
fn run(page: &str, text: &str) -> Result<Result<(), String>, Failed> {
    let wrong = |line: usize, what: &str| Ok(Err(format!("{PAGES}/{page}:{line}: {what}")));
    let steps = match page::steps(text) {
        Ok(steps) if steps.is_empty() => return Ok(Ok(())),
        Ok(steps) => steps,
        Err((line, what)) => return wrong(line, &what),
    };
    let made = root().join(MADE);
    let name = page.trim_end_matches(".md");
    let mut shell =
        Shell::start(made.join("pages").join(name), made.join("notes").join(name), &programs())?;
    for step in &steps {
        match act(&mut shell, step) {
            Ok(Ok(())) => {}
            Ok(Err(what)) => return wrong(step.line, &what),
            Err(failed) => return wrong(step.line, &failed.to_string()),
        }
    }
    Ok(Ok(()))
}

/// Does one thing; what is wrong with it.
fn act(shell: &mut Shell, step: &Step) -> Result<Result<(), String>, Failed> {
    Ok(match &step.what {
        What::Command { text, expected } => {
            let Outcome { status, mut output } = shell.run(text)?;
            let is_met = |output: &str| expected::is_met(expected, output);
            let background = text.ends_with(" &");
            if background && !expected.is_empty() {
                output = shell.printed(is_met);
            }
            if status != "0" {
                Err(format!("`{text}` ends with {status}\n{}", indented("printed", &output)))
            } else if is_met(&output) || (background && expected.is_empty()) {
                Ok(())
            } else {
                let expected = indented("expected", &expected.join("\n"));
                Err(format!("`{text}`\n{expected}\n{}", indented("printed", &output)))
            }
        }
        What::Config { text, name } => {
            let name = name.clone().unwrap_or_else(|| format!("line-{}.yaml", step.line));
            shell.write(&name, text)?;
            let outcome = shell.run(&format!("l7rp check --lint --no-files {name}"))?;
            judged("this configuration is not taken as it is", &outcome)
        }
        What::Peer { program, text } => {
            let outcome = shell.check_peer(*program, text)?;
            judged(&format!("{program:?} does not take this"), &outcome)
        }
    })
}

fn judged(what: &str, outcome: &Outcome) -> Result<(), String> {
    if outcome.status == "0" { Ok(()) } else { Err(format!("{what}\n{}", outcome.output)) }
}

fn indented(title: &str, text: &str) -> String {
    let lines = text.trim_end().lines().map(|line| format!("\n    {line}"));
    format!("  {title}:{}", lines.collect::<String>())
}

/// The name of a page, as the summary has it.
fn name(path: &Path) -> String {
    path.strip_prefix(PAGES).unwrap_or(path).display().to_string()
}
