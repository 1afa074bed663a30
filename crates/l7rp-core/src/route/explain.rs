use super::host::MAX_HOST;
use super::matcher::{Refusal, Request, parent_domain, path_of, refusal};
use super::table::{HostPattern, Table, normal};

/// What became of one rule for one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Index of the rule.
    pub rule: usize,
    /// What became of it.
    pub outcome: Outcome,
}

/// Why a rule was taken or not; the first reason counts, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is the one.
    Taken,
    /// It is for another host.
    Host,
    /// It is for another path.
    Prefix,
    /// It is not for this listener.
    Listener,
    /// It is not for this method.
    Method,
    /// The field of this name is missing or has another value.
    Predicate(String),
    /// It matches, but another rule has precedence.
    Outranked,
}

impl Table {
    /// What became of every rule, in order of precedence. For people: it goes through all rules
    /// and allocates. [`Table::find`] gives the same answer.
    #[must_use]
    pub fn why(&self, request: &Request<'_>) -> Vec<Verdict> {
        let path = path_of(request.path);
        let mut buffer = [0; MAX_HOST];
        let host = request.host.as_ref().map(|host| host.normal(&mut buffer));
        let mut taken = false;
        let verdict = |&ix: &u32| {
            let rule = self.rules.get(ix as usize)?;
            let outcome = if !host_matches(&rule.host, host) {
                Outcome::Host
            } else if !prefix_matches(rule.prefix.as_bytes(), path) {
                Outcome::Prefix
            } else if let Some(refusal) = refusal(rule, request) {
                match refusal {
                    Refusal::Listener => Outcome::Listener,
                    Refusal::Method => Outcome::Method,
                    Refusal::Predicate(name) => Outcome::Predicate(name.to_owned()),
                }
            } else if std::mem::replace(&mut taken, true) {
                Outcome::Outranked
            } else {
                Outcome::Taken
            };
            Some(Verdict { rule: ix as usize, outcome })
        };
        self.order.iter().filter_map(verdict).collect()
    }
}

fn host_matches(pattern: &HostPattern, host: Option<&[u8]>) -> bool {
    match pattern {
        HostPattern::Any => true,
        HostPattern::Exact(name) => host == Some(&normal(name)),
        HostPattern::Wildcard(suffix) => host.and_then(parent_domain) == Some(&normal(suffix)),
    }
}

/// Whether `prefix` covers `path` and ends where a segment of it does.
fn prefix_matches(prefix: &[u8], path: &[u8]) -> bool {
    if !path.starts_with(b"/") {
        return prefix == b"/";
    }
    match path.strip_prefix(prefix) {
        Some(rest) if prefix.starts_with(b"/") => {
            rest.is_empty() || rest.starts_with(b"/") || prefix.ends_with(b"/")
        }
        _ => false,
    }
}
