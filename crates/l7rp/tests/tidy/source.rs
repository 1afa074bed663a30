//! Reading Rust as text: what is code, what is a comment, a literal or a test. Not a parser: it
//! knows just enough not to be fooled by a word in a comment.

use std::ops::Range;

/// One file of Rust.
pub(crate) struct Source {
    /// Its path from the repository's top folder.
    pub(crate) name: String,
    /// The code, byte for byte in its place; comments and what is inside literals are blank.
    pub(crate) code: String,
    /// The same without what is compiled for tests only.
    pub(crate) shipped: String,
    /// What string literals of shipped code hold, and where they begin.
    pub(crate) strings: Vec<(usize, String)>,
}

impl Source {
    pub(crate) fn new(name: &str, text: &str) -> Self {
        let (code, mut strings) = blank(text);
        let tests = if is_test_file(name, &code) {
            std::iter::once(0..code.len()).collect()
        } else {
            test_items(&code)
        };
        let mut shipped = code.clone().into_bytes();
        for range in &tests {
            erase(&mut shipped[range.clone()]);
        }
        strings.retain(|(at, _)| !tests.iter().any(|range| range.contains(at)));
        let shipped = String::from_utf8_lossy(&shipped).into_owned();
        Self { name: name.to_owned(), code, shipped, strings }
    }

    /// The modules in files of their own that this file declares for tests only: their paths
    /// without `.rs`.
    pub(crate) fn test_modules(&self) -> Vec<String> {
        let (folder, file) = self.name.rsplit_once('/').unwrap_or(("", &self.name));
        let folder = match file {
            "mod.rs" | "lib.rs" | "main.rs" => folder.to_owned(),
            _ => self.name.trim_end_matches(".rs").to_owned(),
        };
        let declarations = test_items(&self.code).into_iter().filter_map(|range| {
            let name = self.code[range].strip_suffix(';')?.rsplit_once("mod ")?.1;
            Some(format!("{folder}/{name}"))
        });
        declarations.collect()
    }

    /// From now on all of the file counts as test.
    pub(crate) fn is_for_tests(&mut self) {
        self.shipped.clear();
        self.strings.clear();
    }

    /// `path:line` of a place in the file.
    pub(crate) fn place(&self, at: usize) -> String {
        let line = self.code[..at].matches('\n').count() + 1;
        format!("{}:{line}", self.name)
    }
}

/// Where `needle` stands in `code` as whole words: `unsafe` is not found in `unsafe_code`.
pub(crate) fn find(code: &str, needle: &str) -> Vec<usize> {
    let bytes = code.as_bytes();
    let whole = |at: usize, end: usize| {
        let left = at == 0 || !(is_word(bytes[at]) && is_word(bytes[at - 1]));
        let right = end == bytes.len() || !(is_word(bytes[end - 1]) && is_word(bytes[end]));
        left && right
    };
    let hits = code.match_indices(needle).map(|(at, _)| at);
    hits.filter(|&at| whole(at, at + needle.len())).collect()
}

/// The top-level modules of its own crate that `code` names, as `crate::a` and `crate::{a, b}`.
pub(crate) fn crate_modules(code: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for at in find(code, "crate::") {
        let start = at + "crate::".len();
        if code[start..].starts_with('{') {
            let end = closing(code.as_bytes(), start);
            found.extend(listed(&code[start + 1..end]).into_iter().map(|name| (at, name)));
        } else {
            found.push((at, word(&code[start..])));
        }
    }
    found
}

/// The first word of each item of a `use` list, not of the lists within it.
fn listed(list: &str) -> Vec<String> {
    let mut depth = 0;
    let items = list.split(|c| {
        depth += i32::from(c == '{') - i32::from(c == '}');
        c == ',' && depth == 0
    });
    items.map(|item| word(item.trim_start())).filter(|name| !name.is_empty()).collect()
}

fn word(text: &str) -> String {
    text.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect()
}

fn is_word(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_' || b >= 0x80
}

fn erase(bytes: &mut [u8]) {
    for b in bytes.iter_mut().filter(|b| **b != b'\n') {
        *b = b' ';
    }
}

fn is_test_file(name: &str, code: &str) -> bool {
    name.ends_with("/tests.rs") || name.contains("/tests/") || code.contains("#![cfg(test)]")
}

/// The items that carry a test attribute, from the attribute to the item's end.
fn test_items(code: &str) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for attribute in ["#[cfg(test)]", "#[cfg(all(test", "#[test]"] {
        for (at, _) in code.match_indices(attribute) {
            if !ranges.iter().any(|range| range.contains(&at)) {
                ranges.push(at..item_end(code.as_bytes(), at));
            }
        }
    }
    ranges
}

/// After the item at `at`: its `;`, or the brace that closes its body.
fn item_end(code: &[u8], at: usize) -> usize {
    let mut depth = 0;
    for i in at..code.len() {
        match code[i] {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth -= 1,
            b';' if depth == 0 => return i + 1,
            b'{' if depth == 0 => return (closing(code, i) + 1).min(code.len()),
            _ => {}
        }
    }
    code.len()
}

/// The brace that closes the one at `open`, or the end.
fn closing(code: &[u8], open: usize) -> usize {
    let mut depth = 0;
    for (i, &b) in code.iter().enumerate().skip(open) {
        match b {
            b'{' => depth += 1,
            b'}' => {
                depth -= 1;
                if depth == 0 {
                    return i;
                }
            }
            _ => {}
        }
    }
    code.len()
}

/// `text` with comments and the insides of literals blank, and its string literals.
fn blank(text: &str) -> (String, Vec<(usize, String)>) {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut strings = Vec::new();
    let mut i = 0;
    while i < bytes.len() {
        let rest = &bytes[i..];
        let end = i + match rest[0] {
            b'/' if rest.starts_with(b"//") => erased(&mut code[i..], line_comment(rest)),
            b'/' if rest.starts_with(b"/*") => erased(&mut code[i..], block_comment(rest)),
            b'"' => {
                let length = quoted(rest, b'"');
                inside(&mut code, &mut strings, text, i + 1..i + length - 1);
                length
            }
            b'\'' => {
                let length = char_literal(text, i);
                if length > 1 {
                    erase(&mut code[i + 1..i + length - 1]);
                }
                length
            }
            b if is_word(b) => {
                let length = rest.iter().take_while(|&&b| is_word(b)).count();
                match raw_string(&rest[..length], &rest[length..]) {
                    Some((hashes, body)) => {
                        let start = i + length + hashes + 1;
                        inside(&mut code, &mut strings, text, start..start + body);
                        length + 2 * (hashes + 1) + body
                    }
                    None => length,
                }
            }
            _ => 1,
        };
        i = end.min(bytes.len());
    }
    (String::from_utf8_lossy(&code).into_owned(), strings)
}

fn erased(code: &mut [u8], length: usize) -> usize {
    erase(&mut code[..length]);
    length
}

/// Blanks and remembers what a string literal holds.
fn inside(code: &mut [u8], strings: &mut Vec<(usize, String)>, text: &str, range: Range<usize>) {
    let range = range.start..range.end.clamp(range.start, code.len());
    erase(&mut code[range.clone()]);
    strings.push((range.start, text[range].to_owned()));
}

fn line_comment(rest: &[u8]) -> usize {
    rest.iter().take_while(|&&b| b != b'\n').count()
}

/// Block comments nest.
fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut i) = (0, 0);
    while i < rest.len() {
        let step = match (rest[i..].starts_with(b"/*"), rest[i..].starts_with(b"*/")) {
            (true, _) => {
                depth += 1;
                2
            }
            (_, true) => {
                depth -= 1;
                2
            }
            _ => 1,
        };
        i += step;
        if depth == 0 {
            break;
        }
    }
    i
}

/// The length of a literal in `quote`s, with both of them.
fn quoted(rest: &[u8], quote: u8) -> usize {
    let mut i = 1;
    while i < rest.len() && rest[i] != quote {
        i += if rest[i] == b'\\' { 2 } else { 1 };
    }
    (i + 1).min(rest.len()).max(2)
}

/// The length of a character literal at `i`; 1 for the tick of a lifetime.
fn char_literal(text: &str, i: usize) -> usize {
    let mut rest = text[i + 1..].chars();
    match rest.next() {
        Some('\\') => quoted(&text.as_bytes()[i..], b'\''),
        Some(c) if rest.next() == Some('\'') => c.len_utf8() + 2,
        _ => 1,
    }
}

/// After the word `prefix`: the hashes and the length of the body of a raw string.
fn raw_string(prefix: &[u8], rest: &[u8]) -> Option<(usize, usize)> {
    if !matches!(prefix, b"r" | b"br" | b"cr") {
        return None;
    }
    let hashes = rest.iter().take_while(|&&b| b == b'#').count();
    let body = rest.get(hashes + 1..).filter(|_| rest[hashes] == b'"')?;
    let close: Vec<u8> = std::iter::once(b'"').chain(std::iter::repeat_n(b'#', hashes)).collect();
    let end = body.windows(close.len()).position(|window| window == close);
    Some((hashes, end.unwrap_or(body.len())))
}

#[test]
fn comments_and_literals_are_no_code() {
    for (text, code) in [
        ("a // unsafe\nb", "a          \nb"),
        ("a /* x /* y */ z */ b", "a                   b"),
        (r#"f("un\"safe") g"#, r#"f("        ") g"#),
        (r##"f(r#"a"b"#) g"##, r##"f(r#"   "#) g"##),
        (r"f('\'', '{', b'}') g", r"f('  ', ' ', b' ') g"),
        ("fn f<'a>(x: &'a str) {}", "fn f<'a>(x: &'a str) {}"),
        ("let r#type = 1; \"//\" x", "let r#type = 1; \"  \" x"),
    ] {
        assert_eq!(Source::new("x.rs", text).code, code, "{text}");
    }
}

#[test]
fn tests_are_not_shipped() {
    let text = "fn a() { b; }\n#[cfg(test)]\n#[expect(x, reason = \"a;b\")]\nmod tests {\n fn c() { \"d\" }\n}\nfn e() { \"f\" }";
    let source = Source::new("x.rs", text);
    assert_eq!(find(&source.shipped, "fn"), [find(text, "fn")[0], find(text, "fn")[2]]);
    assert_eq!(source.strings.len(), 1);
    assert_eq!(source.place(source.strings[0].0), "x.rs:7");
    assert_eq!(Source::new("src/tests.rs", text).shipped.trim(), "");
}

#[test]
fn modules_declared_for_tests_are_known() {
    let text =
        "mod a;\n#[cfg(test)]\npub(crate) mod b;\n#[cfg(test)]\nmod c { }\n#[cfg(test)]\nuse x;";
    assert_eq!(Source::new("src/pick/mod.rs", text).test_modules(), ["src/pick/b"]);
    assert_eq!(Source::new("src/route.rs", text).test_modules(), ["src/route/b"]);
}

#[test]
fn words_are_whole() {
    assert_eq!(find("unsafe_code unsafe { }", "unsafe"), [12]);
    assert_eq!(find("x.unwrap_or(1).unwrap()", ".unwrap()"), [14]);
}

#[test]
fn modules_of_the_crate_are_seen_in_paths_and_lists() {
    let names =
        |code: &str| crate_modules(code).into_iter().map(|(_, name)| name).collect::<Vec<_>>();
    assert_eq!(names("use crate::route::Table; crate::pick()"), ["route", "pick"]);
    assert_eq!(names("use crate::{a::{b, c}, d, e::*};"), ["a", "d", "e"]);
}
