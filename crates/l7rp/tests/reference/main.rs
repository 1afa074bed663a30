//! The pages of the documentation that are made from the program: what it says of its
//! configuration and of its command line. `cargo xtask docs` writes them; without that, a page
//! that is not in step fails here.

#![expect(clippy::expect_used, clippy::panic, reason = "a test that cannot go on has failed")]

mod command_line;
mod configuration;

use std::path::PathBuf;
use std::process::Command;

/// Set by `cargo xtask docs`: pages are written instead of compared.
const WRITE: &str = "L7RP_WRITE_DOCS";

#[test]
fn the_page_of_the_configuration_is_in_step() {
    let schema = serde_json::from_str(&said(&["schema"])).expect("a schema");
    in_step("configuration.md", &configuration::page(&schema));
}

#[test]
fn the_page_of_the_command_line_is_in_step() {
    in_step("command-line.md", &command_line::page(said));
}

/// What the program prints, as in a terminal that is wide enough.
fn said(arguments: &[&str]) -> String {
    let mut program = Command::new(env!("CARGO_BIN_EXE_l7rp"));
    let output = program.args(arguments).env_remove("COLUMNS").output().expect("it runs");
    assert!(output.status.success(), "{arguments:?}: {}", output.status);
    String::from_utf8(output.stdout).expect("UTF-8")
}

fn in_step(name: &str, page: &str) {
    let path = [env!("CARGO_MANIFEST_DIR"), "../../docs/src/reference", name];
    let path: PathBuf = path.iter().collect();
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, page).expect("written");
        return;
    }
    let there = std::fs::read_to_string(&path).unwrap_or_default();
    if there == page {
        return;
    }
    let mut lines = there.lines().zip(page.lines()).enumerate();
    let first = lines.find(|(_, (there, made))| there != made);
    let (number, there, made) = match first {
        Some((number, (there, made))) => (number + 1, there, made),
        None => (there.lines().count().min(page.lines().count()) + 1, "", ""),
    };
    panic!(
        "docs/src/reference/{name} is not what the program says; `cargo xtask docs` writes it \
         anew\nline {number}: {there}\n instead of: {made}"
    );
}
