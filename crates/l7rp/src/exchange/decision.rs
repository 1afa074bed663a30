//! The field that says what was decided about a request, for peers that the listener names: a
//! dictionary of RFC 9651.

use std::fmt::Write;
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
    let mut text = String::new();
    string(&mut text, "route", record.route.map_or("", |route| &route.plan.name));
    string(&mut text, "pool", record.pool.map_or("", |pool| &pool.plan.name));
    string(&mut text, "upstream", record.used().map_or("", |used| used.url));
    let hedged = u8::from(record.tries.iter().any(|one| one.is_hedge));
    let _ = write!(text, "tries={}, hedge=?{hedged}", record.tries.len());
    if let Some(failure) = failure {
        let _ = write!(text, ", reason={}", failure.meaning().reason);
    }
    let mut before = ", failed=(";
    for one in record.tries.iter().take(MOST_TRIES) {
        let is_given = failure.is_none() && record.used().is_some_and(|used| ptr::eq(used, one));
        let word = match one.ended {
            _ if is_given => continue,
            Some((End::Answered(status), _)) => status.to_string(),
            Some((End::Failed(failure), _)) => failure.meaning().reason.to_owned(),
            // It has lost to the one that the answer is from.
            Some((End::Lost, _)) | None => continue,
        };
        let _ = write!(text, "{before}{};why={word}", quoted(one.url));
        before = " ";
    }
    if before == " " {
        text.push(')');
    }
    text.into_bytes()
}

/// A member, unless it is empty.
fn string(out: &mut String, name: &str, value: &str) {
    if !value.is_empty() {
        let _ = write!(out, "{name}={}, ", quoted(value));
    }
}

/// A string of RFC 9651 §3.3.3: what is not visible ASCII becomes a question mark.
fn quoted(value: &str) -> String {
    let mut text = String::with_capacity(value.len() + 2);
    text.push('"');
    for c in value.chars() {
        match c {
            '"' | '\\' => text.extend(['\\', c]),
            ' '..='~' => text.push(c),
            _ => text.push('?'),
        }
    }
    text.push('"');
    text
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
            assert_eq!(quoted(value), text);
        }
    }
}
