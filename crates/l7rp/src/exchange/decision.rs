//! The field that says what was decided about a request, for peers that the listener names: a
//! dictionary of RFC 9651.

use std::ptr;

use l7rp_core::failure::Failure;

use super::client::Client;
use super::record::Record;
use crate::observe::tries::End;

/// Tries that are told of.
const MOST_TRIES: usize = 8;

/// The field's value; empty: this client is not told. `failure`: of an answer that is made here.
pub(super) fn of(record: &Record<'_>, client: &Client, failure: Option<Failure>) -> Vec<u8> {
    let told = &record.listener().plan.decision_header_for;
    if told.is_empty() || !client.peer.is_some_and(|peer| told.iter().any(|n| n.contains(&peer))) {
        return Vec::new();
    }
    let mut text = Vec::with_capacity(256);
    string(&mut text, "route=", record.route.map_or("", |route| &route.plan.name));
    string(&mut text, "pool=", record.pool.map_or("", |pool| &pool.plan.name));
    string(&mut text, "upstream=", record.used().map_or("", |used| used.url));
    text.extend_from_slice(b"tries=");
    text.extend_from_slice(itoa::Buffer::new().format(record.counted()).as_bytes());
    let hedged = record.tries.iter().any(|one| one.is_hedge);
    text.extend_from_slice(if hedged { b", hedge=?1" } else { b", hedge=?0" });
    if let Some(failure) = failure {
        text.extend_from_slice(b", reason=");
        text.extend_from_slice(failure.meaning().reason.as_bytes());
    }
    failed(&mut text, record, failure.is_none());
    text
}

/// The tries that the answer is not from. `answered`: it is from one of them.
fn failed(out: &mut Vec<u8>, record: &Record<'_>, answered: bool) {
    let mut before = ", failed=(";
    for one in record.tries.iter().take(MOST_TRIES) {
        let is_given = answered && record.used().is_some_and(|used| ptr::eq(used, one));
        let mut digits = itoa::Buffer::new();
        let word = match one.ended {
            _ if is_given || one.is_repeated => continue,
            Some((End::Answered(status), _)) => digits.format(status),
            Some((End::Failed(failure), _)) => failure.meaning().reason,
            // It has lost to the one that the answer is from.
            Some((End::Lost, _)) | None => continue,
        };
        out.extend_from_slice(before.as_bytes());
        quoted(out, one.url);
        out.extend_from_slice(b";why=");
        out.extend_from_slice(word.as_bytes());
        before = " ";
    }
    if before == " " {
        out.push(b')');
    }
}

/// A member, unless it is empty.
fn string(out: &mut Vec<u8>, name: &str, value: &str) {
    if !value.is_empty() {
        out.extend_from_slice(name.as_bytes());
        quoted(out, value);
        out.extend_from_slice(b", ");
    }
}

/// A string of RFC 9651 §3.3.3: what is not visible ASCII becomes a question mark.
fn quoted(out: &mut Vec<u8>, value: &str) {
    out.push(b'"');
    for c in value.chars() {
        match c {
            '"' | '\\' => out.extend([b'\\', c as u8]),
            ' '..='~' => out.push(c as u8),
            _ => out.push(b'?'),
        }
    }
    out.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_those_of_the_rfc() {
        for (value, text) in [
            ("api", "\"api\""),
            ("a \"b\" \\", "\"a \\\"b\\\" \\\\\""),
            ("b\u{fc}\r\n", "\"b???\""),
        ] {
            let mut out = Vec::new();
            quoted(&mut out, value);
            assert_eq!(out, text.as_bytes());
        }
    }
}
