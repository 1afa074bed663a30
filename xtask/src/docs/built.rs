//! The book as it was built: it takes along what its pages link to outside of them, and no link
//! of it is dead. On GitHub a page's links lead into the repository; a book stands alone.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use super::{PAGES, links};
use crate::root;
use crate::run::{Done, Failed};

/// Where the book is, as `docs/book.toml` says.
const BOOK: &str = "target/book";

/// Completes the book, and fails if a link of it is dead.
pub(super) fn finish() -> Done {
    let book = root().join(BOOK);
    let mut pages = BTreeMap::new();
    read_pages(&book, Path::new(""), &mut pages)?;
    for (page, html) in &mut pages {
        let (mended, files) = with_files(page, html, |file| root().join(file).is_file());
        if files.is_empty() {
            continue;
        }
        for file in files {
            let copy = book.join(&file);
            let folder = copy.parent().unwrap_or(&book);
            let copied = std::fs::create_dir_all(folder)
                .and_then(|()| std::fs::copy(root().join(&file), &copy));
            copied.map_err(|e| failed(&file, &e))?;
        }
        *html = mended;
        std::fs::write(book.join(page), &*html).map_err(|e| failed(page, &e))?;
    }
    let dead = dead(&pages, |file| book.join(file).is_file());
    if dead.is_empty() {
        return Ok(());
    }
    Err(Failed::new(
        dead.join("\n"),
        "mend the link in the page. One that leads out of the book names a file, not a folder",
    ))
}

/// Adds the pages in `folder` of the book and below.
fn read_pages(book: &Path, folder: &Path, pages: &mut BTreeMap<PathBuf, String>) -> Done {
    let entries = std::fs::read_dir(book.join(folder)).map_err(|e| failed(folder, &e))?;
    for entry in entries.filter_map(Result::ok) {
        let path = folder.join(entry.file_name());
        if entry.path().is_dir() {
            read_pages(book, &path, pages)?;
        } else if path.extension().is_some_and(|extension| extension == "html") {
            let html = std::fs::read_to_string(entry.path()).map_err(|e| failed(&path, &e))?;
            pages.insert(path, html);
        }
    }
    Ok(())
}

fn failed(path: &Path, e: &std::io::Error) -> Failed {
    Failed::new(
        format!("{BOOK}/{}: {e}", path.display()),
        "remove that folder and try again; is the disk full?",
    )
}

/// A page whose links to files of the repository lead to copies in the book, and those files.
fn with_files(page: &Path, html: &str, is_file: impl Fn(&Path) -> bool) -> (String, Vec<PathBuf>) {
    let folder = page.parent().unwrap_or(Path::new(""));
    let mut mended = html.to_owned();
    let mut files = Vec::new();
    for target in targets(html) {
        if links::resolved(folder, target).is_some() {
            continue;
        }
        // It leads out of the book, as it did out of the pages' folder.
        let source = links::resolved(&Path::new(PAGES).join(folder), target);
        let Some(file) = source.filter(|file| is_file(file)) else { continue };
        let up = "../".repeat(folder.components().count());
        let copy = format!("\"{up}{}\"", file.display());
        mended = mended.replace(&format!("\"{target}\""), &copy);
        files.push(file);
    }
    (mended, files)
}

/// The links that lead nowhere, each with its page.
fn dead(pages: &BTreeMap<PathBuf, String>, is_file: impl Fn(&Path) -> bool) -> Vec<String> {
    let ids: BTreeMap<&Path, HashSet<&str>> =
        pages.iter().map(|(page, html)| (page.as_path(), values(html, "id").collect())).collect();
    let mut dead = Vec::new();
    for (page, html) in pages {
        let folder = page.parent().unwrap_or(Path::new(""));
        let is_dead = |target: &&str| {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let resolved = match path {
                "" => Some(page.clone()),
                // Of the page for what is not found: from the top, wherever it is shown.
                "/" => Some("index.html".into()),
                _ => links::resolved(folder, path),
            };
            let Some(file) = resolved.filter(|file| is_file(file)) else { return true };
            !anchor.is_empty()
                && !ids.get(file.as_path()).is_some_and(|there| there.contains(anchor))
        };
        let wrongs: HashSet<&str> = targets(html).filter(is_dead).collect();
        dead.extend(wrongs.iter().map(|w| format!("{BOOK}/{}: {w} is dead", page.display())));
    }
    dead.sort();
    dead
}

/// What a page refers to, but for what is elsewhere on the net.
fn targets(html: &str) -> impl Iterator<Item = &str> {
    let elsewhere = |target: &&str| !target.contains("://") && !target.starts_with("mailto:");
    values(html, "href").chain(values(html, "src")).filter(elsewhere)
}

/// The values of an attribute, in all tags of a page.
fn values<'h>(html: &'h str, attribute: &str) -> impl Iterator<Item = &'h str> {
    let begins = format!(" {attribute}=\"");
    // Text has no `<` that begins no tag.
    let tags = html.split('<').skip(1).filter_map(|rest| rest.split('>').next());
    tags.filter_map(move |tag| tag.split_once(&begins)?.1.split('"').next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_those_of_tags() {
        let html = "<a class=\"x\" href=\"a.html#b\" id=\"c\">href=\"no\"</a>\n\
                    <img\n src=\"p.svg\"><a href=\"https://h.test/\">h</a> \
                    <code> id=\"no\"</code> <p data-id=\"no\">";
        assert_eq!(targets(html).collect::<Vec<_>>(), ["a.html#b", "p.svg"]);
        assert_eq!(values(html, "id").collect::<Vec<_>>(), ["c"]);
    }

    #[test]
    fn files_of_the_repository_go_along() {
        let html = "<a href=\"../../../examples/a.yaml\">a</a> <a href=\"b.html\">b</a> \
                    <a href=\"../../../gone.yaml\">g</a> <a href=\"../c.html\">c</a>";
        let there = |file: &Path| file == Path::new("examples/a.yaml");
        let (mended, files) = with_files(Path::new("operating/x.html"), html, there);
        assert_eq!(mended, html.replace("../../../examples", "../examples"));
        assert_eq!(files, [Path::new("examples/a.yaml")]);
    }

    #[test]
    fn dead_links_are_named() {
        let a = "<h1 id=\"top\">A</h1> <a href=\"#top\">1</a> <a href=\"b/c.html#there\">2</a> \
                 <a href=\"/\">3</a> <a href=\"#gone\">4</a> <a href=\"b\">5</a>";
        let c = "<h2 id=\"there\">C</h2> <a href=\"../index.html#gone\">1</a> \
                 <img src=\"../../out.svg\"> <img src=\"in.svg\"> <a href=\"in.svg#x\">2</a>";
        let pages = BTreeMap::from([
            (PathBuf::from("index.html"), a.to_owned()),
            (PathBuf::from("b/c.html"), c.to_owned()),
        ]);
        let files = ["index.html", "b/c.html", "b/in.svg"].map(Path::new);
        let want = [
            "b/c.html: ../../out.svg",
            "b/c.html: ../index.html#gone",
            "b/c.html: in.svg#x",
            "index.html: #gone",
            "index.html: b",
        ]
        .map(|wrong| format!("{BOOK}/{wrong} is dead"));
        assert_eq!(dead(&pages, |file| files.contains(&file)), want);
    }
}
