//! What is in a page: its fenced blocks, and what they ask to be done.

/// A fenced block.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Block<'p> {
    /// The word behind the fence.
    pub(super) language: &'p str,
    /// The number of the line after the fence.
    pub(super) line: usize,
    /// Without the fence's own indentation.
    pub(super) lines: Vec<&'p str>,
}

/// Something to do, in the order of the page.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// The number of the line that asks for it.
    pub(super) line: usize,
    pub(super) what: What,
}

/// What a [`Step`] is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum What {
    /// A command, and what it is to print.
    Command { text: String, expected: Vec<String> },
    /// A configuration of ours, and the file that it becomes.
    Config { text: String, name: Option<String> },
    /// A configuration of another proxy, which is to take it.
    Peer { program: Peer, text: String },
}

/// Whose configurations are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    Nginx,
    Haproxy,
}

/// All blocks of a page.
///
/// # Errors
/// The line of a fence that nothing closes.
pub(super) fn blocks(text: &str) -> Result<Vec<Block<'_>>, (usize, String)> {
    let mut blocks = Vec::new();
    let mut lines = text.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let Some((indent, fence, language)) = fence(line) else { continue };
        let mut block = Block { language, line: number + 2, lines: Vec::new() };
        loop {
            let Some((_, line)) = lines.next() else {
                return Err((number + 1, "nothing closes this block".to_owned()));
            };
            let end = line.trim();
            if end.len() >= fence && end.bytes().all(|b| b == b'`') {
                break;
            }
            let blanks = line.len() - line.trim_start().len();
            block.lines.push(&line[blanks.min(indent)..]);
        }
        blocks.push(block);
    }
    Ok(blocks)
}

/// The indentation, the length and the language of a fence.
fn fence(line: &str) -> Option<(usize, usize, &str)> {
    let text = line.trim_start();
    let length = text.bytes().take_while(|b| *b == b'`').count();
    let language = text[length..].trim();
    // One line with backticks before and after is code within a line.
    (length >= 3 && !language.contains('`')).then(|| (line.len() - text.len(), length, language))
}

/// The text without its blocks, each of their lines replaced by an empty one.
pub(super) fn prose(text: &str) -> Result<String, (usize, String)> {
    let mut lines: Vec<&str> = text.lines().collect();
    for block in blocks(text)? {
        let first = block.line - 2;
        lines[first..=first + 1 + block.lines.len()].fill("");
    }
    Ok(lines.join("\n"))
}

/// What a page asks to be done.
///
/// # Errors
/// The line that is not as a block has to be, and why.
pub(super) fn steps(text: &str) -> Result<Vec<Step>, (usize, String)> {
    let mut steps = Vec::new();
    for block in blocks(text)? {
        let line = block.line;
        let text = || block.lines.iter().flat_map(|line| [line, "\n"]).collect();
        let peer = |program| What::Peer { program, text: text() };
        match block.language {
            "console" => commands(&block, &mut steps)?,
            "yaml" => {
                let name = block.lines.first().and_then(|line| file_name(line));
                steps.push(Step { line, what: What::Config { text: text(), name } });
            }
            "nginx" => steps.push(Step { line, what: peer(Peer::Nginx) }),
            "haproxy" => steps.push(Step { line, what: peer(Peer::Haproxy) }),
            "" => return Err((line - 1, "this block has no language: write ```text".to_owned())),
            _ => {}
        }
    }
    Ok(steps)
}

/// `NAME.yaml` of a comment that is nothing else.
fn file_name(line: &str) -> Option<String> {
    let name = line.strip_prefix("# ")?.trim();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let stem = name.strip_suffix(".yaml")?;
    stem.chars().all(plain).then(|| name.to_owned())
}

/// The commands of a block, each with the lines that follow it.
fn commands(block: &Block<'_>, steps: &mut Vec<Step>) -> Result<(), (usize, String)> {
    let mut goes_on = false;
    let before = steps.len();
    for (number, line) in (block.line..).zip(&block.lines) {
        let line = line.trim_end();
        if let Some(command) = line.strip_prefix("$ ").filter(|_| !goes_on) {
            let what = What::Command { text: command.to_owned(), expected: Vec::new() };
            steps.push(Step { line: number, what });
            goes_on = command.ends_with('\\');
            continue;
        }
        let last = if steps.len() > before { steps.last_mut() } else { None };
        let Some(Step { what: What::Command { text, expected }, .. }) = last else {
            return Err((number, "a console block begins with `$ ` and a command".to_owned()));
        };
        if goes_on {
            text.push('\n');
            text.push_str(line);
            goes_on = line.ends_with('\\');
        } else {
            expected.push(line.to_owned());
        }
    }
    for step in &mut steps[before..] {
        if let What::Command { expected, .. } = &mut step.what {
            // What only sets commands apart.
            while expected.last().is_some_and(String::is_empty) {
                expected.pop();
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn command(line: usize, text: &str, expected: &[&str]) -> Step {
        let expected = expected.iter().map(|&line| line.to_owned()).collect();
        Step { line, what: What::Command { text: text.to_owned(), expected } }
    }

    #[test]
    fn a_console_block_is_commands_and_what_they_print() {
        let page = "Text\n\n```console\n$ one\n\n$ two \\\n  more\nout\n\nput\n\n$ three &\n```\n";
        assert_eq!(
            steps(page).unwrap(),
            [
                command(4, "one", &[]),
                command(6, "two \\\n  more", &["out", "", "put"]),
                command(12, "three &", &[]),
            ]
        );
        let (line, why) = steps("```console\nout\n$ one\n```\n").unwrap_err();
        assert_eq!((line, why.contains("begins with `$ `")), (2, true));
        // Nor is it the output of a command in a block before.
        assert!(steps("```console\n$ one\n```\n```console\nout\n```\n").is_err());
    }

    #[test]
    fn a_configuration_may_have_a_name() {
        for (first, want) in [
            ("# config.yaml", Some("config.yaml")),
            ("# new-1.yaml", Some("new-1.yaml")),
            ("# ../x.yaml", None),
            ("# the file config.yaml", None),
            ("listeners:", None),
        ] {
            let text = format!("{first}\na: b\n");
            let found = steps(&format!("```yaml\n{text}```\n")).unwrap();
            let name = want.map(str::to_owned);
            assert_eq!(found, [Step { line: 2, what: What::Config { text, name } }], "{first}");
        }
    }

    #[test]
    fn blocks_are_found_where_they_are() {
        let page = "- item\n\n  ````text\n  ```\n    in\n  ````\n\nA ```` ```yaml ```` in text.\n";
        let block = Block { language: "text", line: 4, lines: vec!["```", "  in"] };
        assert_eq!(blocks(page).unwrap(), [block]);
        assert_eq!(blocks("a\n```yaml\nb\n").unwrap_err().0, 2);
        assert_eq!(prose("a\n```text\nb\n```\nc").unwrap(), "a\n\n\n\nc");
        assert!(steps("```\nb\n```\n").is_err(), "it could be anything");
    }

    #[test]
    fn other_languages_ask_for_nothing() {
        assert_eq!(steps("```text\n$ no\n```\n```json\n{}\n```\n").unwrap(), []);
        let peer = What::Peer { program: Peer::Haproxy, text: "global\n".to_owned() };
        let found = steps("```haproxy\nglobal\n```\n").unwrap();
        assert_eq!(found, [Step { line: 2, what: peer }]);
    }
}
