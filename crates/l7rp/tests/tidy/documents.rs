//! Rules about text that is not code.

use crate::{read, refuse, relative, root, walk};

#[test]
fn no_text_names_a_place_on_somebodys_machine() {
    // In halves, so that this file is no hit itself.
    let places = [["/ho", "me/"], ["/ro", "ot/"], ["/wo", "rk/"], ["/Us", "ers/"]]
        .map(|halves| halves.concat());
    let mut files = Vec::new();
    walk(&root(), &mut files);
    let mut hits = Vec::new();
    for path in files {
        // What is not text names nothing.
        let Ok(text) = std::fs::read_to_string(&path) else {
            continue;
        };
        for (number, line) in text.lines().enumerate() {
            if places.iter().any(|place| begins_a_path(line, place)) {
                hits.push(format!("{}:{}: {}", relative(&path), number + 1, line.trim()));
            }
        }
    }
    refuse(&hits, "it is true on one machine only, and tells strangers about it");
}

/// Whether `place` stands in `line` as the beginning of an absolute path.
fn begins_a_path(line: &str, place: &str) -> bool {
    let before = |at: usize| line[..at].chars().next_back();
    line.match_indices(place)
        .any(|(at, _)| !before(at).is_some_and(|c| c.is_alphanumeric() || "._-}~*/)".contains(c)))
}

#[test]
fn a_path_begins_where_nothing_precedes_it() {
    assert!(begins_a_path("in /a/b", "/a/"));
    assert!(begins_a_path("\"/a/b\"", "/a/"));
    assert!(!begins_a_path("x/a/b", "/a/"));
    assert!(!begins_a_path("${X}/a/b", "/a/"));
}

#[test]
fn documents_name_recipes_that_exist() {
    let help = read("xtask/src/main.rs");
    let mut hits = Vec::new();
    for document in ["README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md", ".ci/run"] {
        let text = read(document);
        for (at, call) in text.match_indices("cargo xtask ") {
            let rest = &text[at + call.len()..];
            let end =
                rest.find(|c: char| !c.is_ascii_lowercase() && c != '-').unwrap_or(rest.len());
            let recipe = &rest[..end];
            if !recipe.is_empty() && !help.contains(&format!("\n  {recipe} ")) {
                hits.push(format!("{document}: cargo xtask {recipe}"));
            }
        }
    }
    refuse(&hits, "a command in a document that does not work costs every reader an hour");
}

#[test]
fn the_readme_begins_with_two_commands_that_ci_runs() {
    let readme = read("README.md");
    let first_screen: Vec<&str> = readme.lines().take(30).collect();
    for command in ["cargo run --release -- demo", "cargo xtask test"] {
        assert!(
            first_screen.contains(&command),
            "README.md: `{command}` is not on the first screen"
        );
    }
    // demo-check runs the first, `ci` both.
    assert!(read(".ci/run").lines().any(|line| line == "cargo xtask ci"));
}
