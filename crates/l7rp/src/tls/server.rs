//! TLS with clients.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};

use rustls::crypto::aws_lc_rs::Ticketer;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, ProducesTickets, WebPkiClientVerifier};
use rustls::version::{TLS12, TLS13};
use rustls::{RootCertStore, ServerConfig};

use super::choose::{ACME, Chooser};
use super::files::{self, Named};
use super::issued::Issued;
use super::{TlsError, provider};
use crate::config::plan::{Certificate, ClientAuth, ListenerTls, TlsVersion};
use crate::sync::lock;

/// A certificate, as metrics tell of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    /// The first name that it is served for.
    pub host: String,
    /// Until when it is valid, in seconds since 1970.
    pub not_after: i64,
}

/// Whose client certificates are believed, and whether one is needed: what has been proved in a
/// handshake under one rule must not be taken for proof under another.
type Rule = (bool, Vec<Vec<u8>>);

/// What clients get so that their next handshake is shorter: one for the process, used by all
/// listeners, before and after a reload. Keys change every 6 hours, and the keys before are good
/// for another 6.
#[derive(Debug)]
pub struct Resumption {
    open: Arc<dyn ProducesTickets>,
    /// For listeners that ask for client certificates. A resumed handshake does not ask again, so
    /// a ticket from where no certificate is needed must be of no use there. Kept as long as there
    /// is such a listener.
    guarded: Mutex<HashMap<Rule, Weak<dyn ProducesTickets>>>,
}

impl Resumption {
    /// New keys.
    ///
    /// # Errors
    /// If the system has no random numbers.
    pub fn new() -> Result<Self, TlsError> {
        Ok(Self { open: ticketer()?, guarded: Mutex::new(HashMap::new()) })
    }

    fn tickets(&self, rule: Option<Rule>) -> Result<Arc<dyn ProducesTickets>, TlsError> {
        let Some(rule) = rule else { return Ok(self.open.clone()) };
        let mut guarded = lock(&self.guarded);
        guarded.retain(|_, tickets| tickets.strong_count() > 0);
        if let Some(tickets) = guarded.get(&rule).and_then(Weak::upgrade) {
            return Ok(tickets);
        }
        let tickets = ticketer()?;
        guarded.insert(rule, Arc::downgrade(&tickets));
        Ok(tickets)
    }
}

fn ticketer() -> Result<Arc<dyn ProducesTickets>, TlsError> {
    Ticketer::new().map_err(|e| TlsError {
        file: None,
        message: format!("cannot make keys for TLS session tickets: {e}"),
        help: None,
    })
}

/// The TLS of a listener.
#[derive(Debug)]
pub struct Terminator {
    pub(super) config: Arc<ServerConfig>,
    chooser: Arc<Chooser>,
    shown: Vec<Shown>,
    issued: Option<(Arc<Issued>, Vec<String>)>,
    /// What clients have to prove.
    rule: Option<Rule>,
}

impl Terminator {
    /// Reads the files of `plan`. `issued`: where the certificates of `autocert` are to be had.
    ///
    /// # Errors
    /// Everything that is wrong with the files.
    pub fn new(
        plan: &ListenerTls,
        resumption: &Resumption,
        issued: Option<&Arc<Issued>>,
    ) -> Result<Self, Vec<TlsError>> {
        let mut errors = Vec::new();
        let hosts = plan.autocert.as_ref().map_or(&[][..], |autocert| &autocert.allowed_hosts);
        let mut chooser = Chooser::new(issued.cloned(), hosts);
        let mut shown = Vec::with_capacity(plan.certs.len());
        for certificate in &plan.certs {
            match add(&mut chooser, certificate) {
                Ok(one) => shown.push(one),
                Err(mut wrong) => errors.append(&mut wrong),
            }
        }
        let chooser = Arc::new(chooser);
        let config = config(plan, chooser.clone(), resumption);
        let issued = issued.map(|issued| (issued.clone(), hosts.to_vec()));
        match config {
            Ok((config, rule)) if errors.is_empty() => {
                Ok(Self { config: Arc::new(config), chooser, shown, issued, rule })
            }
            Ok(_) => Err(errors),
            Err(wrong) => {
                errors.push(wrong);
                Err(errors)
            }
        }
    }

    /// The certificates of the configuration, in its order, and those that a CA has issued.
    pub fn certificates(&self) -> impl Iterator<Item = Shown> {
        let issued = self.issued.iter().flat_map(|(issued, hosts)| {
            hosts.iter().filter_map(|host| {
                let not_after = issued.certificate(&host.to_ascii_lowercase())?.not_after;
                Some(Shown { host: host.clone(), not_after })
            })
        });
        self.shown.iter().cloned().chain(issued)
    }

    /// Whether what was proved in a handshake by `then`, if there was one, is proof here as well.
    pub fn accepts_proof_of(&self, then: Option<&Self>) -> bool {
        self.rule.is_none() || then.is_some_and(|then| then.rule == self.rule)
    }

    /// Whether a request for `host` belongs on a connection whose handshake asked for `sni`: the
    /// certificate that was shown is there for that name too.
    pub fn is_good_for(&self, sni: Option<&str>, host: &str) -> bool {
        self.chooser.is_good_for(sni, host)
    }
}

fn add(chooser: &mut Chooser, plan: &Certificate) -> Result<Shown, Vec<TlsError>> {
    let (cert_name, key_name) = (plan.cert.display().to_string(), plan.key.display().to_string());
    let cert = Named { path: &plan.cert, name: &cert_name };
    let key = Named { path: &plan.key, name: &key_name };
    let (chain, certified) = files::both(cert, key)?;
    let names = if plan.hosts.is_empty() { &chain.names } else { &plan.hosts };
    chooser.add(names, &Arc::new(certified));
    let host = names.first().cloned().unwrap_or_else(|| cert_name.clone());
    Ok(Shown { host, not_after: chain.not_after })
}

fn config(
    plan: &ListenerTls,
    chooser: Arc<Chooser>,
    resumption: &Resumption,
) -> Result<(ServerConfig, Option<Rule>), TlsError> {
    let internal = |e: rustls::Error| TlsError {
        file: None,
        message: format!("cannot set up TLS: {e}"),
        help: None,
    };
    let versions: &[_] = match plan.min_version {
        TlsVersion::V12 => &[&TLS13, &TLS12],
        TlsVersion::V13 => &[&TLS13],
    };
    let (verifier, rule) = match &plan.client_auth {
        Some(auth) => client_auth(auth).map(|(verifier, rule)| (verifier, Some(rule)))?,
        None => (WebPkiClientVerifier::no_client_auth(), None),
    };
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(versions)
        .map_err(internal)?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(chooser);
    // The strongest suite that both know, rather than the one that the client has put first.
    config.ignore_client_order = true;
    config.ticketer = resumption.tickets(rule.clone())?;
    // Tickets are enough: what is kept here would be lost on a reload, and is a lock for all.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    // A request in the first flight could be sent again by anybody who has seen it (0-RTT).
    config.max_early_data_size = 0;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    if plan.autocert.is_some() {
        config.alpn_protocols.push(ACME.to_vec());
    }
    Ok((config, rule))
}

fn client_auth(auth: &ClientAuth) -> Result<(Arc<dyn ClientCertVerifier>, Rule), TlsError> {
    let name = auth.ca_file.display().to_string();
    let roots = files::authorities(Named { path: &auth.ca_file, name: &name })?.roots;
    let rule = (auth.required, keys(&roots));
    let builder = WebPkiClientVerifier::builder_with_provider(roots, provider());
    let builder = if auth.required { builder } else { builder.allow_unauthenticated() };
    let verifier = builder.build().map_err(|e| TlsError {
        file: Some(auth.ca_file.clone()),
        message: format!("`{name}` cannot be used to check client certificates: {e}"),
        help: None,
    })?;
    Ok((verifier, rule))
}

fn keys(roots: &RootCertStore) -> Vec<Vec<u8>> {
    let mut keys: Vec<Vec<u8>> = roots
        .roots
        .iter()
        .map(|root| {
            let constraints = root.name_constraints.as_deref().unwrap_or_default();
            [&*root.subject, &*root.subject_public_key_info, constraints].concat()
        })
        .collect();
    keys.sort_unstable();
    keys
}
