//! The task that sees to it that there is always a certificate: it looks at the cache for what
//! other processes have got, and asks the CA for what is due.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use l7rp_core::renewal::{Fault, Tries, renew_at};
use tokio::sync::watch;

use super::cache::{Cache, Cached, Stamp};
use super::client::Caller;
use super::order::{Ordering, Refusal, Way};
use super::{Authority, Orders, Tokens};
use crate::clock::wall_ms;
use crate::observe::event::{Event, Events, timestamp};
use crate::sync::lock;
use crate::tls::issued::Certificate;
use crate::tls::{Issued, TlsError};

/// How often the cache is looked at.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// One certificate, at most.
const PATIENCE: Duration = Duration::from_mins(5);
/// What is wrong with a certificate that is due as it comes.
const DUE: Fault = Fault::Name { other_way: false };
/// Stands for the CA itself among the names.
const AUTHORITY: &str = "";

/// Keeps the certificates of one CA.
#[derive(Debug)]
pub(super) struct Keeper {
    authority: Authority,
    cache: Cache,
    caller: Caller,
    issued: Arc<Issued>,
    /// By name.
    known: HashMap<String, Known>,
    tries: HashMap<String, Tries>,
    /// They could not be written: what is on disk does not count.
    unsaved: bool,
    /// Of what was last looked at.
    seen: Option<Stamp>,
    seen_challenges: Option<Stamp>,
    /// Those among all tokens that are of this CA.
    tokens: Vec<String>,
    /// Why the last look has failed, so that it is said once.
    trouble: Option<String>,
}

/// A certificate that is served.
#[derive(Debug)]
struct Known {
    stamp: Option<Stamp>,
    /// In seconds since 1970.
    renew_at: i64,
}

/// What the task works with beside the cache.
pub(super) struct Around {
    pub(super) events: Arc<Events>,
    pub(super) tokens: Arc<Tokens>,
}

impl Keeper {
    /// One that serves what is in the cache for `hosts`.
    pub(super) fn new(
        authority: Authority,
        cache: Cache,
        issued: Arc<Issued>,
        hosts: &[String],
    ) -> Result<Self, TlsError> {
        let caller = Caller::new(&authority)?;
        let mut keeper = Self {
            authority,
            cache,
            caller,
            issued,
            known: HashMap::new(),
            tries: HashMap::new(),
            unsaved: false,
            seen: None,
            seen_challenges: None,
            tokens: Vec::new(),
            trouble: None,
        };
        keeper.look_for_certificates(hosts);
        Ok(keeper)
    }

    /// Keeps what the orders of the day ask for, for ever.
    pub(super) async fn run(mut self, mut orders: watch::Receiver<Orders>, around: Around) {
        loop {
            let now = orders.borrow_and_update().clone();
            let trouble = self.look(&now.hosts, &around).err().map(|e| e.to_string());
            if let Some(words) = trouble.as_ref().filter(|_| trouble != self.trouble) {
                self.complain(AUTHORITY, format!("cannot read the cache: {words}"), &around);
            }
            self.trouble = trouble;
            if let Some(host) = self.due(&now.hosts) {
                self.renew(&host, &now, &around).await;
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                changed = orders.changed() => if changed.is_err() { return },
            }
        }
    }

    /// The name whose certificate is to be asked for now.
    fn due(&self, hosts: &[String]) -> Option<String> {
        let now = wall_seconds();
        if self.tries_of(AUTHORITY).next(now) > now {
            return None;
        }
        let due = hosts.iter().filter_map(|host| {
            let renew_at = self.known.get(host).map_or(0, |known| known.renew_at);
            let at = renew_at.max(self.tries_of(host).next(now));
            (at <= now).then_some((at, host))
        });
        due.min().map(|(_, host)| host.clone())
    }

    fn tries_of(&self, name: &str) -> Tries {
        self.tries.get(name).copied().unwrap_or_default()
    }

    /// Takes in what has changed in the cache.
    fn look(&mut self, hosts: &[String], around: &Around) -> io::Result<()> {
        let challenges = Some(self.cache.challenges_stamp()?);
        if challenges != self.seen_challenges {
            self.look_for_challenges(around)?;
            self.seen_challenges = challenges;
        }
        let new = hosts.iter().any(|host| !self.known.contains_key(host));
        let seen = Some(self.cache.stamp()?);
        if new || seen != self.seen {
            self.look_for_certificates(hosts);
            self.seen = seen;
        }
        Ok(())
    }

    fn look_for_challenges(&mut self, around: &Around) -> io::Result<()> {
        let found = self.cache.challenges()?;
        let before = std::mem::replace(&mut self.tokens, found.tokens.keys().cloned().collect());
        self.issued.set_challenges(found.certificates);
        around.tokens.rcu(|all| {
            let mut all = HashMap::clone(all);
            all.retain(|token, _| !before.contains(token));
            all.extend(found.tokens.clone());
            all
        });
        Ok(())
    }

    fn look_for_certificates(&mut self, hosts: &[String]) {
        if !self.unsaved {
            self.tries = self.cache.tries();
        }
        for host in hosts {
            let stamp = self.cache.certificate_stamp(host);
            if stamp.is_none() || self.known.get(host).is_some_and(|known| known.stamp == stamp) {
                continue;
            }
            // What cannot be read is as good as none: it is asked for anew.
            if let Ok(cached) = self.cache.certificate(host) {
                self.serve(host, cached, stamp);
            }
        }
    }

    fn serve(&mut self, host: &str, cached: Cached, stamp: Option<Stamp>) {
        let Cached { chain, key } = cached;
        let renew_at = renew_at(chain.not_before, chain.not_after, fastrand::f64());
        let certificate = Certificate { key: Arc::new(key), not_after: chain.not_after };
        self.issued.put(host, &certificate);
        self.known.insert(host.to_owned(), Known { stamp, renew_at });
    }

    /// Asks for a certificate, if it is this process's turn and nobody has got one meanwhile.
    async fn renew(&mut self, host: &str, orders: &Orders, around: &Around) {
        let turn = match self.cache.take_turn() {
            Ok(Some(turn)) => turn,
            Ok(None) => return,
            Err(e) => return self.failed(host, of_disk(&e), around),
        };
        self.look_for_certificates(&orders.hosts);
        if self.due(&orders.hosts).as_deref() != Some(host) {
            return;
        }
        let tried = self.tries_of(host);
        let way =
            if orders.has_plain && tried.failures % 2 == 1 { Way::Http } else { Way::TlsAlpn };
        // Written before it is tried: who is ended in between, again and again, must not ask the
        // CA each time.
        let fault = Fault::Name { other_way: orders.has_plain };
        self.tries.insert(host.to_owned(), tried.failed(wall_seconds(), fault, fastrand::f64()));
        if let Err(e) = self.clean_up() {
            return self.failed(host, of_disk(&e), around);
        }
        let began = wall_ms();
        match self.obtain(host, way, around).await {
            Ok(()) => {
                let renew_from = self.known.get(host).map_or(0, |known| known.renew_at);
                // One that is due as it comes would be asked for again and again.
                if renew_from > wall_seconds() {
                    self.tries.remove(host);
                } else {
                    self.tries.insert(host.to_owned(), tried.failed(wall_seconds(), DUE, 0.0));
                }
                self.tries.remove(AUTHORITY);
                let until = self.issued.certificate(host).map_or(0, |one| one.not_after);
                around.events.emit(&Event::CertificateObtained {
                    host: host.to_owned(),
                    authority: self.authority.directory_url.clone(),
                    until: date(until),
                    renew_from: date(renew_from),
                    took_ms: wall_ms().saturating_sub(began),
                });
            }
            Err(refusal) => {
                if !refusal.of_name {
                    self.tries.insert(host.to_owned(), tried);
                }
                self.failed(host, refusal, around);
            }
        }
        let cleaned = self.clean_up();
        if let Err(e) = cleaned.and_then(|()| self.look_for_challenges(around)) {
            self.complain(AUTHORITY, format!("cannot write to the cache: {e}"), around);
        }
        drop(turn);
    }

    /// Nothing is to be found by a CA, and what has failed is kept.
    fn clean_up(&mut self) -> io::Result<()> {
        self.unsaved = true;
        self.cache.clear_challenges()?;
        self.cache.put_tries(&self.tries)?;
        self.unsaved = false;
        Ok(())
    }

    async fn obtain(&mut self, host: &str, way: Way, around: &Around) -> Result<(), Refusal> {
        let published = Mutex::new(Vec::new());
        let ordering = Ordering {
            authority: &self.authority,
            cache: &self.cache,
            caller: &self.caller,
            issued: &self.issued,
            tokens: &around.tokens,
            published: &published,
            way,
        };
        let obtained = tokio::time::timeout(PATIENCE, ordering.obtain(host)).await;
        self.tokens.append(&mut lock(&published));
        let Ok(obtained) = obtained else {
            return Err(Refusal::of_authority(format!("the CA was not done within {PATIENCE:?}")));
        };
        let cached = self.cache.put_certificate(host, &obtained?).map_err(Refusal::of_name)?;
        self.serve(host, cached, self.cache.certificate_stamp(host));
        Ok(())
    }

    /// Tells of a failure; one that is not about the name alone is remembered for all.
    fn failed(&mut self, host: &str, refusal: Refusal, around: &Around) {
        // Told once, so that it is not taken for what a later refusal says.
        let wish = self.caller.take_wish();
        if !refusal.of_name {
            let tries = self.tries_of(AUTHORITY);
            let fault = Fault::Authority { wish };
            let tries = tries.failed(wall_seconds(), fault, fastrand::f64());
            self.tries.insert(AUTHORITY.to_owned(), tries);
        }
        self.complain(host, refusal.words, around);
    }

    fn complain(&self, host: &str, error: String, around: &Around) {
        let now = wall_seconds();
        let next_try =
            self.tries_of(host).next(now).max(self.tries_of(AUTHORITY).next(now)).max(now);
        around.events.emit(&Event::CertificateFailed {
            host: host.to_owned(),
            authority: self.authority.directory_url.clone(),
            error,
            next_try: date(next_try),
        });
    }
}

fn of_disk(e: &io::Error) -> Refusal {
    Refusal::of_authority(format!("cannot write to the cache: {e}"))
}

fn wall_seconds() -> i64 {
    (wall_ms() / 1000).cast_signed()
}

fn date(seconds: i64) -> String {
    timestamp(u64::try_from(seconds).unwrap_or(0).saturating_mul(1000))
}
