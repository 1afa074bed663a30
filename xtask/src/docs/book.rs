//! The book as a whole: its summary, its links, and its building.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::{PAGES, built, links, name};
use crate::run::{Done, Failed, command, step};
use crate::{read, root};

const SUMMARY: &str = "docs/src/SUMMARY.md";
/// What links to pages from outside of the book, and is looked through as they are.
const OUTSIDE: [&str; 6] = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "bench/README.md",
];

/// Builds the book with the program `mdbook`, and follows its links.
pub(super) fn build(mdbook: &Path) -> Done {
    step(command(mdbook).args(["build", "docs"]), "mend what mdbook names")?;
    built::finish()
}

/// The pages, as the summary lists them.
pub(super) fn pages() -> Result<Vec<String>, Failed> {
    let links = links::links(&read(SUMMARY)?).map_err(|(line, what)| {
        Failed::new(format!("{SUMMARY}:{line}: {what}"), "it is a list of links")
    })?;
    Ok(links.into_iter().map(|link| link.path).collect())
}

/// Pages that are missing or in no list, and links that lead nowhere.
pub(super) fn wrongs(pages: &[String]) -> Result<Vec<String>, Failed> {
    let listed: HashSet<&str> = pages.iter().map(String::as_str).collect();
    let mut wrongs = Vec::new();
    for page in pages {
        if !root().join(PAGES).join(page).is_file() {
            wrongs.push(format!("{SUMMARY}: {page} does not exist"));
        }
    }
    let mut there = Vec::new();
    markdown(Path::new(PAGES), &mut there)?;
    for path in &there {
        let name = name(path);
        if name != "SUMMARY.md" && !listed.contains(name.as_str()) {
            wrongs.push(format!("{PAGES}/{name} is not in {SUMMARY}"));
        }
    }
    let mut anchors = HashMap::new();
    for path in there.into_iter().chain(OUTSIDE.map(PathBuf::from)) {
        dead_links(&path, &mut anchors, &mut wrongs)?;
    }
    Ok(wrongs)
}

/// Adds the links of the file `path` that lead nowhere. `anchors`: those of the files so far.
fn dead_links(
    path: &Path,
    anchors: &mut HashMap<PathBuf, Vec<String>>,
    wrongs: &mut Vec<String>,
) -> Done {
    let file = path.display().to_string();
    let text = read(&file)?;
    let links = match links::links(&text) {
        Ok(links) => links,
        Err((line, what)) => {
            wrongs.push(format!("{file}:{line}: {what}"));
            return Ok(());
        }
    };
    for link in links {
        let mut wrong = |what: &str| {
            let anchor = link.anchor.iter().flat_map(|anchor| ["#", anchor]).collect::<String>();
            wrongs.push(format!("{file}:{}: {}{anchor}: {what}", link.line, link.path));
        };
        let folder = path.parent().unwrap_or(Path::new(""));
        let target = if link.path.is_empty() {
            Some(path.to_owned())
        } else {
            links::resolved(folder, &link.path)
        };
        let Some(target) = target.filter(|target| root().join(target).exists()) else {
            wrong("there is no such file");
            continue;
        };
        let Some(anchor) = &link.anchor else { continue };
        let known = anchors.entry(target.clone()).or_insert_with(|| {
            read(&target.display().to_string()).map_or_else(|_| Vec::new(), |t| links::anchors(&t))
        });
        if !known.contains(anchor) {
            wrong("that page has no such heading");
        }
    }
    Ok(())
}

/// All Markdown files below `folder`.
fn markdown(folder: &Path, found: &mut Vec<PathBuf>) -> Done {
    let entries = std::fs::read_dir(root().join(folder)).map_err(|e| {
        Failed::new(format!("cannot read {}: {e}", folder.display()), "is the checkout whole?")
    })?;
    for entry in entries.filter_map(Result::ok) {
        let path = folder.join(entry.file_name());
        if entry.path().is_dir() {
            markdown(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    found.sort();
    Ok(())
}
