//! Whether what is linked to is there.

use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use super::page;

/// A link of a page to something of ours.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) line: usize,
    /// Without the anchor; empty: the page itself.
    pub(super) path: String,
    pub(super) anchor: Option<String>,
}

/// The links of a page that lead nowhere else on the net.
pub(super) fn links(text: &str) -> Result<Vec<Link>, (usize, String)> {
    let prose = page::prose(text)?;
    let mut links = Vec::new();
    for (number, line) in (1..).zip(prose.lines()) {
        let line = without_code(line);
        let inline = line.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
        let defined = line.split_once("]: ").filter(|(name, _)| name.starts_with('['));
        let html = ["href=\"", "src=\""].into_iter().flat_map(|attribute| {
            line.split(attribute).skip(1).filter_map(|rest| rest.split('"').next())
        });
        for target in inline.chain(defined.map(|(_, target)| target.trim())).chain(html) {
            if target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) =
                target.split_once('#').map_or((target, None), |(p, a)| (p, Some(a)));
            let anchor = anchor.map(str::to_owned);
            links.push(Link { line: number, path: path.to_owned(), anchor });
        }
    }
    Ok(links)
}

/// A line with what is between backticks taken out.
fn without_code(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join("`")
}

/// The anchors of a page's headings, as both mdBook and GitHub name them.
pub(super) fn anchors(text: &str) -> Vec<String> {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut anchors = Vec::new();
    for line in page::prose(text).unwrap_or_default().lines() {
        let title = line.trim_start_matches('#');
        if title.len() == line.len() || !title.starts_with(' ') {
            continue;
        }
        let anchor = anchor(title.trim());
        let again = seen.entry(anchor.clone()).or_default();
        anchors.push(if *again == 0 { anchor } else { format!("{anchor}-{again}") });
        *again += 1;
    }
    anchors
}

fn anchor(title: &str) -> String {
    // Of a link, the text.
    let mut parts = title.split("](");
    let mut text = parts.next().unwrap_or_default().to_owned();
    text.extend(parts.map(|part| part.split_once(')').map_or(part, |(_, rest)| rest)));
    let kept = |c: char| match c {
        _ if c.is_whitespace() => Some('-'),
        '-' | '_' => Some(c),
        _ => c.is_alphanumeric().then_some(c),
    };
    text.to_lowercase().chars().filter_map(kept).collect()
}

/// `link`, from a page in `folder`, without `..`; `None` if it leads out of everything.
pub(super) fn resolved(folder: &Path, link: &str) -> Option<PathBuf> {
    let mut path = folder.to_owned();
    for part in Path::new(link).components() {
        match part {
            Component::Normal(name) => path.push(name),
            Component::ParentDir if path.pop() => {}
            Component::CurDir => {}
            _ => return None,
        }
    }
    Some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_links_and_no_code() {
        let text = "See [a](b.md), [c](../d.md#e-f) and [g](https://h.test/#i).\n\
                    `[no](no.md)` but ![p](pictures/p.svg)\n\n```text\n[no](no.md)\n```\n\
                    [self](#here)\n[r]: r.md\n<img src=\"q.png\">\n";
        let found = links(text).unwrap();
        let found: Vec<_> =
            found.iter().map(|l| (l.line, l.path.as_str(), l.anchor.as_deref())).collect();
        let want = [
            (1, "b.md", None),
            (1, "../d.md", Some("e-f")),
            (2, "pictures/p.svg", None),
            (7, "", Some("here")),
            (8, "r.md", None),
            (9, "q.png", None),
        ];
        assert_eq!(found, want);
    }

    #[test]
    fn anchors_are_those_of_the_book() {
        let text = "# The log\n\n## `listeners[].tls`\n\n```text\n# no\n```\n## What's new?\n\
                    ## Again\n## Again\n#no\n## See [here](there.md) now\n";
        let want = ["the-log", "listenerstls", "whats-new", "again", "again-1", "see-here-now"];
        assert_eq!(anchors(text), want);
    }

    #[test]
    fn paths_are_resolved() {
        let from = |link| resolved(Path::new("docs/src/a"), link).map(|p| p.display().to_string());
        assert_eq!(from("../b.md").as_deref(), Some("docs/src/b.md"));
        assert_eq!(from("./b.md").as_deref(), Some("docs/src/a/b.md"));
        assert_eq!(from("../../../../x"), None);
        assert_eq!(from("/x"), None);
    }
}
