//! Hosts and routes: a second reading of the rules, one by one, takes the same host for the same
//! and finds the same route.
#![no_main]

use std::cmp::Reverse;
use std::net::Ipv6Addr;

use l7rp_core::route::{HostPattern, Request, Rule, Table, parse_host};
use libfuzzer_sys::fuzz_target;

// Lines: host, target, then for each rule `kind host prefix`.
fuzz_target!(|data: &[u8]| {
    let mut lines = data.split(|b| *b == b'\n');
    let (Some(host), Some(target)) = (lines.next(), lines.next()) else { return };
    let parsed = parse_host(host).ok();
    let mut buffer = [0; l7rp_core::route::MAX_HOST];
    let normal = parsed.as_ref().map(|h| h.normal(&mut buffer).to_vec());
    assert_eq!(normal, naive_host(host), "{}", host.escape_ascii());
    if let Some(normal) = &normal {
        assert_eq!(naive_host(normal).as_ref(), Some(normal), "normal once and for all");
    }

    let rules: Vec<Rule> = lines.take(20).filter_map(rule).collect();
    if !target.starts_with(b"/") && target != b"*" {
        return;
    }
    let table = Table::new(rules.clone());
    let request = Request {
        listener: 0,
        host: parsed,
        path: target,
        method: b"GET",
        has_field: &|_, value| value == "yes",
    };
    let path = target.split(|b| *b == b'?').next().unwrap_or_default();
    let mut order: Vec<usize> = (0..rules.len()).collect();
    order.sort_by_key(|ix| rank(&rules[*ix]));
    let naive = order.into_iter().find(|ix| matches(&rules[*ix], normal.as_deref(), path));
    assert_eq!(table.find(&request), naive, "{rules:?}");
});

fn rule(line: &[u8]) -> Option<Rule> {
    let text = std::str::from_utf8(line).ok()?;
    let mut words = text.splitn(3, ' ');
    let (kind, host, prefix) = (words.next()?, words.next()?, words.next()?);
    let kind = kind.as_bytes();
    Some(Rule {
        host: match kind.first()? {
            b'e' => HostPattern::Exact(host.to_owned()),
            b'w' => HostPattern::Wildcard(host.to_owned()),
            _ => HostPattern::Any,
        },
        prefix: prefix.to_owned(),
        methods: if kind.contains(&b'p') { vec!["POST".to_owned()] } else { Vec::new() },
        predicates: match kind.last()? {
            b'y' => vec![("x".to_owned(), "yes".to_owned())],
            b'n' => vec![("x".to_owned(), "no".to_owned())],
            _ => Vec::new(),
        },
        listeners: if kind.contains(&b'l') { vec![1] } else { Vec::new() },
    })
}

fn pattern(host: &str) -> Vec<u8> {
    naive_host(host.as_bytes()).unwrap_or_else(|| host.as_bytes().to_vec())
}

/// In the order of precedence: host, length of the prefix, conditions.
fn rank(rule: &Rule) -> (u8, Reverse<usize>, Reverse<usize>, bool) {
    let (kind, length) = match &rule.host {
        HostPattern::Exact(_) => (0, 0),
        HostPattern::Wildcard(suffix) => (1, pattern(suffix).len()),
        HostPattern::Any => (2, 0),
    };
    let plain = rule.methods.is_empty() && rule.predicates.is_empty();
    (kind, Reverse(length), Reverse(rule.prefix.len()), plain)
}

fn matches(rule: &Rule, host: Option<&[u8]>, path: &[u8]) -> bool {
    let host = match &rule.host {
        HostPattern::Any => true,
        HostPattern::Exact(name) => host == Some(&pattern(name)[..]),
        HostPattern::Wildcard(suffix) => host
            .and_then(|h| h.splitn(2, |b| *b == b'.').nth(1))
            .is_some_and(|rest| rest == pattern(suffix)),
    };
    let prefix = rule.prefix.as_bytes();
    let below = path.strip_prefix(prefix);
    let path = prefix == b"/"
        || prefix.starts_with(b"/")
            && below.is_some_and(|rest| {
                prefix.ends_with(b"/") || rest.is_empty() || rest.starts_with(b"/")
            });
    let fields = rule.predicates.iter().all(|(_, value)| value == "yes");
    host && path && fields && rule.methods.is_empty() && rule.listeners.is_empty()
}

/// The host in its normal form, port and final dot taken off.
fn naive_host(raw: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(raw).ok()?;
    let (name, port) = match text.rfind(']') {
        Some(end) if text.starts_with('[') => (&text[..=end], &text[end + 1..]),
        _ => text.split_at(text.find(':').unwrap_or(text.len())),
    };
    let digits = port.strip_prefix(':');
    let is_port = |p: &str| {
        p.bytes().all(|b| b.is_ascii_digit())
            && (p.is_empty() || p.trim_start_matches('0').len() <= 5)
            && (p.trim_start_matches('0').is_empty()
                || p.trim_start_matches('0').parse::<u16>().is_ok())
    };
    if !(port.is_empty() || digits.is_some_and(is_port)) {
        return None;
    }
    if let Some(address) = name.strip_prefix('[') {
        let address: Ipv6Addr = address.strip_suffix(']')?.parse().ok()?;
        return Some(format!("[{address}]").into_bytes());
    }
    let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    let known = |c: char| c.is_ascii_alphanumeric() || "-._~!$&'()*+;=".contains(c);
    let good = !name.is_empty()
        && name.len() <= 255
        && name.chars().all(known)
        && name.split('.').all(|label| !label.is_empty());
    good.then(|| name.into_bytes())
}
