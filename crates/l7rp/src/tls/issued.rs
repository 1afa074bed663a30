//! Certificates that come and go at run time, because a CA issues them.

use std::collections::HashMap;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::sign::CertifiedKey;

/// A certificate that a CA has issued.
#[derive(Clone, Debug)]
pub struct Certificate {
    /// The chain, and its key.
    pub key: Arc<CertifiedKey>,
    /// Until when it is valid, in seconds since 1970.
    pub not_after: i64,
}

/// What one CA has issued, by name in lower case. Listeners that use the same CA share it, before
/// and after a reload.
#[derive(Debug, Default)]
pub struct Issued {
    certificates: ArcSwap<HashMap<String, Certificate>>,
    challenges: ArcSwap<HashMap<String, Arc<CertifiedKey>>>,
}

impl Issued {
    /// That for `name`.
    pub fn certificate(&self, name: &str) -> Option<Certificate> {
        self.certificates.load().get(name).cloned()
    }

    /// Puts a certificate in the place of the one before, if there is one.
    pub fn put(&self, name: &str, certificate: &Certificate) {
        self.certificates.rcu(|all| {
            let mut all = HashMap::clone(all);
            all.insert(name.to_owned(), certificate.clone());
            all
        });
    }

    /// What a CA is shown that looks at a TLS-ALPN-01 challenge for `name`.
    pub(super) fn challenge(&self, name: &str) -> Option<Arc<CertifiedKey>> {
        self.challenges.load().get(name).cloned()
    }

    /// One more of those.
    pub fn put_challenge(&self, name: &str, certificate: &Arc<CertifiedKey>) {
        self.challenges.rcu(|all| {
            let mut all = HashMap::clone(all);
            all.insert(name.to_owned(), certificate.clone());
            all
        });
    }

    /// Replaces all of them.
    pub fn set_challenges(&self, challenges: HashMap<String, Arc<CertifiedKey>>) {
        self.challenges.store(Arc::new(challenges));
    }
}
