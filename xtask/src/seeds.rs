//! First inputs of the fuzz target `connection`, made of the corpora that the tests judge by:
//! the client's octets of one file, the upstream's of the other, with pauses where a case has
//! them. `fuzz/fuzz_targets/connection/input.rs` says how an input is put together.

use std::path::Path;

use crate::run::{Done, Failed};
use crate::{read, root};

/// The target, and its folder below `fuzz/corpus`.
pub(crate) const TARGET: &str = "connection";

const REQUESTS: &str = "crates/l7rp/tests/corpus/h1_requests.jsonl";
const RESPONSES: &str = "crates/l7rp/tests/corpus/h1_responses.jsonl";
const NEXT: &[u8] = b"\xff\xff";
const PAUSE: &[u8] = b"\xff\xfd";
const PLAIN: &[u8] = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
/// Longer ones would let the fuzzer spend its time on length alone.
const MAX_LEN: usize = 4096;
/// The upstream answers before it has the body: a bit of the first octet, as the others.
const EARLY: u8 = 1;
/// Connections to it end with a reset.
const RESETS: u8 = 2;
/// They end after its first answer.
const CLOSES: u8 = 4;

/// Writes them all to the target's corpus.
pub(crate) fn write() -> Done {
    let folder = root().join("fuzz/corpus").join(TARGET);
    let requests = read(REQUESTS)?;
    let responses = read(RESPONSES)?;
    requests.lines().try_for_each(|line| save(&folder, line, of_request(line)))?;
    responses.lines().try_for_each(|line| save(&folder, line, of_response(line)))
}

fn save(folder: &Path, line: &str, seed: Option<Vec<u8>>) -> Done {
    let id = text(line, "id").unwrap_or("unnamed");
    let Some(seed) = seed else {
        return Err(Failed::new(format!("case {id} is not understood"), "see xtask/src/seeds.rs"));
    };
    if seed.len() > MAX_LEN {
        return Ok(());
    }
    std::fs::write(folder.join(id), seed)
        .map_err(|e| Failed::new(format!("cannot write a seed: {e}"), "is the disk full?"))
}

fn of_request(line: &str) -> Option<Vec<u8>> {
    let raw = octets(text(line, "raw_b64")?)?;
    let mut seed = vec![0];
    let mut at = 0;
    for cut in numbers(line, "split") {
        seed.extend_from_slice(raw.get(at..cut)?);
        seed.extend_from_slice(PAUSE);
        at = cut;
    }
    seed.extend_from_slice(raw.get(at..)?);
    Some([&seed, NEXT, PLAIN].concat())
}

fn of_response(line: &str) -> Option<Vec<u8>> {
    let early = if text(line, "when")? == "after_head" { EARLY } else { 0 };
    let ends = match text(line, "then")? {
        "fin" => CLOSES,
        "rst" => CLOSES | RESETS,
        _ => 0,
    };
    let mut seed = vec![early | ends];
    seed.extend(octets(text(line, "client_request_b64")?)?);
    seed.extend_from_slice(NEXT);
    seed.extend(octets(text(line, "raw_b64")?)?);
    if let Some(late) = text(line, "after_idle_b64") {
        seed.extend_from_slice(PAUSE);
        seed.extend(octets(late)?);
    }
    if let Some(second) = text(line, "retry_raw_b64") {
        seed.extend_from_slice(NEXT);
        seed.extend(octets(second)?);
    }
    Some(seed)
}

/// What stands behind `"key": `. Base64 and the words looked for here have nothing escaped, so
/// that no JSON reader is needed.
fn behind<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let key = format!("\"{key}\": ");
    line.find(&key).map(|at| &line[at + key.len()..])
}

fn text<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    behind(line, key)?.strip_prefix('"')?.split('"').next()
}

fn numbers(line: &str, key: &str) -> Vec<usize> {
    let list = behind(line, key).and_then(|rest| rest.strip_prefix('[')?.split(']').next());
    list.unwrap_or_default().split(',').filter_map(|n| n.trim().parse().ok()).collect()
}

/// Reads base64.
fn octets(text: &str) -> Option<Vec<u8>> {
    const SIGNS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = Vec::new();
    let (mut bits, mut count) = (0u32, 0);
    for sign in text.bytes().filter(|b| *b != b'=') {
        bits = (bits << 6) | SIGNS.iter().position(|s| *s == sign)? as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            out.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_cut_where_its_case_pauses() {
        let line = r#"{"id": "x", "raw_b64": "QUJDRA==", "split": [1, 3]}"#;
        let seed = of_request(line).expect("a seed");
        assert_eq!(seed, [b"\0A\xff\xfdBC\xff\xfdD\xff\xff", PLAIN].concat());
    }

    #[test]
    fn every_case_makes_a_seed() {
        let all = |file, of: fn(&str) -> Option<Vec<u8>>| {
            read(file).is_ok_and(|text| text.lines().all(|line| of(line).is_some()))
        };
        assert!(all(REQUESTS, of_request));
        assert!(all(RESPONSES, of_response));
    }

    #[test]
    fn an_answer_says_when_and_how_it_ends() {
        let line = r#"{"client_request_b64": "QQ==", "when": "after_head", "raw_b64": "Qg==", "then": "rst", "after_idle_b64": "Qw==", "retry_raw_b64": "RA=="}"#;
        assert_eq!(of_response(line).expect("a seed"), b"\x07A\xff\xffB\xff\xfdC\xff\xffD");
    }
}
