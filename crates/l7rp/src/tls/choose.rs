//! Which certificate a client is shown: the one for exactly the name that it asks for, else the
//! one with the longest wildcard, else the fallback.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{SignatureAlgorithm, SignatureScheme};

use super::issued::Issued;

/// The protocol by which a CA looks at a challenge (RFC 8737).
pub(super) const ACME: &[u8] = b"acme-tls/1";

/// Certificates for one name, with keys of different kinds: the best first.
type Choices = Vec<Arc<CertifiedKey>>;

/// All certificates of a listener.
#[derive(Debug, Default)]
pub struct Chooser {
    exact: HashMap<String, Choices>,
    /// By what is behind `*.`.
    wildcards: HashMap<String, Choices>,
    fallback: Choices,
    /// What a CA issues at run time, and the names that are served of it, in lower case.
    issued: Option<(Arc<Issued>, HashSet<String>)>,
}

impl Chooser {
    /// One that has only what a CA issues at run time for `names`.
    pub fn new(issued: Option<Arc<Issued>>, names: &[String]) -> Self {
        let names = names.iter().map(|name| normal(name)).collect();
        Self { issued: issued.map(|issued| (issued, names)), ..Self::default() }
    }

    /// Adds a certificate. The first one, with those for the same names, is the fallback.
    pub fn add(&mut self, names: &[String], certificate: &Arc<CertifiedKey>) {
        let mut same = self.fallback.is_empty();
        for name in names {
            let name = normal(name);
            let choices = match name.strip_prefix("*.") {
                Some(suffix) => self.wildcards.entry(suffix.to_owned()).or_default(),
                None => self.exact.entry(name).or_default(),
            };
            // The same name with a key of another kind goes with the fallback too.
            let fallback = |one| self.fallback.iter().any(|other| Arc::ptr_eq(one, other));
            same |= choices.iter().any(fallback);
            insert(choices, certificate);
        }
        if same {
            insert(&mut self.fallback, certificate);
        }
    }

    /// Whether a client that asked for `sni` in the handshake has been shown a certificate that
    /// is there for `host` too. That of the fallback is there for its own names only.
    pub fn is_good_for(&self, sni: Option<&str>, host: &str) -> bool {
        let shown = sni.and_then(|sni| self.named(&normal(sni))).unwrap_or_else(|| self.last());
        self.named(&normal(host)).is_some_and(|good| {
            good.iter().any(|good| shown.iter().any(|shown| Arc::ptr_eq(shown, good)))
        })
    }

    /// Those for a name in lower case, without the fallback.
    fn named(&self, name: &str) -> Option<Choices> {
        if let Some(choices) = self.exact.get(name) {
            return Some(choices.clone());
        }
        if let Some(one) = self.issued(name) {
            return Some(vec![one]);
        }
        let suffixes = name.match_indices('.').map(|(at, _)| &name[at + 1..]);
        suffixes
            .filter(|_| !name.starts_with('.'))
            .find_map(|suffix| self.wildcards.get(suffix))
            .cloned()
    }

    /// What a CA has issued for `name`. One from the configuration for exactly the same name goes
    /// first, a wildcard goes after.
    fn issued(&self, name: &str) -> Option<Arc<CertifiedKey>> {
        let (issued, names) = self.issued.as_ref()?;
        names.contains(name).then(|| issued.certificate(name))?.map(|one| one.key)
    }

    /// The fallback; without one, any of those that came at run time, but always the same.
    fn last(&self) -> Choices {
        if !self.fallback.is_empty() {
            return self.fallback.clone();
        }
        let names = self.issued.iter().flat_map(|(_, names)| names);
        let there = names.filter_map(|name| Some((name, self.issued(name)?)));
        let first = there.min_by_key(|(name, _)| name.as_str());
        first.map(|(_, certificate)| certificate).into_iter().collect()
    }

    fn choose(&self, sni: Option<&str>, schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        let name = sni.map(normal);
        let choices = name.and_then(|name| self.named(&name)).unwrap_or_else(|| self.last());
        let possible = choices.iter().find(|one| one.key.choose_scheme(schemes).is_some());
        // If the client can use none, the handshake ends with an alert that says so.
        possible.or(choices.first()).cloned()
    }
}

impl ResolvesServerCert for Chooser {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let mut offered = hello.alpn().into_iter().flatten();
        if offered.next() == Some(ACME) && offered.next().is_none() {
            let (issued, _) = self.issued.as_ref()?;
            return issued.challenge(&normal(hello.server_name()?));
        }
        self.choose(hello.server_name(), hello.signature_schemes())
    }
}

fn normal(name: &str) -> String {
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

/// Keeps the order of preference: ECDSA costs a server a tenth of RSA. Of the same kind, the
/// first in the configuration stays first.
fn insert(choices: &mut Choices, certificate: &Arc<CertifiedKey>) {
    let rank = |one: &Arc<CertifiedKey>| match one.key.algorithm() {
        SignatureAlgorithm::ECDSA => 0,
        SignatureAlgorithm::ED25519 => 1,
        _ => 2,
    };
    let at = choices.partition_point(|one| rank(one) <= rank(certificate));
    choices.insert(at, certificate.clone());
}
