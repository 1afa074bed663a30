use std::fmt;

use memchr::memchr;

use super::host::{Host, MAX_HOST};
use super::table::{Hosts, Rule, Table};

/// What a rule may ask about a request.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// The listener it came in by.
    pub listener: usize,
    /// The host it is for; `None`: it names none, as HTTP/1.0 may.
    pub host: Option<Host<'a>>,
    /// The target as sent: path and query, or `*`.
    pub path: &'a [u8],
    /// The method.
    pub method: &'a [u8],
    /// Whether there is a field of this name (given in lower case) with exactly this value.
    pub has_field: &'a dyn Fn(&str, &str) -> bool,
}

impl fmt::Debug for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request")
            .field("listener", &self.listener)
            .field("host", &self.host)
            .field("path", &self.path.escape_ascii().to_string())
            .field("method", &self.method.escape_ascii().to_string())
            .finish_non_exhaustive()
    }
}

impl Table {
    /// The rule that `request` takes; `None`: no route. Allocates nothing.
    #[must_use]
    pub fn find(&self, request: &Request<'_>) -> Option<usize> {
        let path = path_of(request.path);
        let mut buffer = [0; MAX_HOST];
        let host = request.host.as_ref().map(|host| host.normal(&mut buffer));
        let root = |hosts: &Hosts, name: Option<&[u8]>| hosts.get(name?).copied();
        let roots = [
            root(&self.exact, host),
            root(&self.wildcard, host.and_then(parent_domain)),
            Some(self.any),
        ];
        roots.into_iter().flatten().find_map(|root| self.find_below(root, path, request))
    }

    /// Goes down as far as the path and the tree agree, then back up: the longest prefix first.
    fn find_below(&self, root: u32, path: &[u8], request: &Request<'_>) -> Option<usize> {
        let mut at = root;
        let mut rest = path;
        while let [b'/', tail @ ..] = rest
            && let node = self.nodes.get(at as usize)?
            && !node.children.is_empty()
        {
            let segment = &tail[..memchr(b'/', tail).unwrap_or(tail.len())];
            let Some(&child) = node.children.get(segment) else { break };
            at = child;
            rest = &tail[segment.len()..];
        }
        // A prefix that ends in a slash needs that slash in the path. `*` has none, and is
        // matched by the root alone.
        let mut below = !rest.is_empty();
        let mut next = Some(at);
        while let Some(at) = next {
            let node = self.nodes.get(at as usize)?;
            let slashed: &[u32] = if below { &node.below } else { &[] };
            for &ix in slashed.iter().chain(&node.here) {
                if refusal(self.rules.get(ix as usize)?, request).is_none() {
                    return Some(ix as usize);
                }
            }
            below = true;
            next = node.parent;
        }
        None
    }
}

/// The target without its query; an empty one is the root.
pub(super) fn path_of(target: &[u8]) -> &[u8] {
    let path = &target[..memchr(b'?', target).unwrap_or(target.len())];
    if path.is_empty() { b"/" } else { path }
}

/// What a wildcard must be for to match `host`: all but the first label.
pub(super) fn parent_domain(host: &[u8]) -> Option<&[u8]> {
    memchr(b'.', host).map(|dot| &host[dot + 1..])
}

/// What a rule asks beyond host and path, and a request does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal<'a> {
    Listener,
    Method,
    Predicate(&'a str),
}

/// The first thing that `rule` asks in vain, host and path apart; `None`: it matches.
pub(super) fn refusal<'r>(rule: &'r Rule, request: &Request<'_>) -> Option<Refusal<'r>> {
    if !rule.listeners.is_empty() && !rule.listeners.contains(&request.listener) {
        return Some(Refusal::Listener);
    }
    if !rule.methods.is_empty() && !rule.methods.iter().any(|m| m.as_bytes() == request.method) {
        return Some(Refusal::Method);
    }
    let missing = |(name, value): &&(String, String)| !(request.has_field)(name, value);
    rule.predicates.iter().find(missing).map(|(name, _)| Refusal::Predicate(name))
}
