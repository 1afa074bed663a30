//! One certificate, from the order to the chain (RFC 8555, section 7.4).

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use instant_acme::{
    Account, AccountCredentials, AuthorizationStatus, ChallengeHandle, ChallengeType, Error,
    Identifier, NewAccount, NewOrder, Order, OrderStatus, RetryPolicy,
};
use rcgen::{CertificateParams, CustomExtension, DistinguishedName, KeyPair};

use super::cache::{Cache, SEEN_BY_OTHERS};
use super::client::Caller;
use super::{Authority, Tokens};
use crate::sync::lock;
use crate::tls::Issued;

/// What a CA may take to look at a challenge, and to issue.
const POLLS: RetryPolicy = RetryPolicy::new().timeout(Duration::from_secs(90));

/// Of what a CA says, as much goes to the log.
const MAX_WORDS: usize = 1000;

/// How a CA is shown that a name is ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// By a certificate in a TLS handshake (RFC 8737).
    TlsAlpn,
    /// By a file over HTTP (RFC 8555, section 8.3).
    Http,
}

/// Why there is no certificate.
#[derive(Debug)]
pub(super) struct Refusal {
    /// For people: the CA's own words, if it was the CA.
    pub(super) words: String,
    /// It is about this name; otherwise others would fare no better.
    pub(super) of_name: bool,
}

impl Refusal {
    pub(super) fn of_authority(words: String) -> Self {
        Self { words, of_name: false }
    }

    pub(super) fn of_name(words: impl Into<String>) -> Self {
        Self { words: words.into(), of_name: true }
    }
}

impl From<Error> for Refusal {
    fn from(e: Error) -> Self {
        /// What is not about the name (RFC 8555, section 6.7).
        const OF_AUTHORITY: [&str; 7] = [
            "accountDoesNotExist",
            "externalAccountRequired",
            "invalidContact",
            "rateLimited",
            "serverInternal",
            "unsupportedContact",
            "userActionRequired",
        ];
        let of_name = match &e {
            Error::Api(problem) => {
                let kind = problem.r#type.as_deref().unwrap_or_default();
                !OF_AUTHORITY.contains(&kind.rsplit(':').next().unwrap_or_default())
            }
            _ => false,
        };
        let words = e.to_string().chars().take(MAX_WORDS).collect();
        Self { words, of_name }
    }
}

/// What belongs to an order.
pub(super) struct Ordering<'a> {
    pub(super) authority: &'a Authority,
    pub(super) cache: &'a Cache,
    pub(super) caller: &'a Caller,
    pub(super) issued: &'a Issued,
    pub(super) tokens: &'a Tokens,
    /// Those of them that are of this order.
    pub(super) published: &'a Mutex<Vec<String>>,
    pub(super) way: Way,
}

impl Ordering<'_> {
    /// Gets a certificate for `host`: key and chain, as one PEM text.
    pub(super) async fn obtain(&self, host: &str) -> Result<String, Refusal> {
        let account = self.account().await?;
        let identifiers = [Identifier::Dns(host.to_owned())];
        let order = account.new_order(&NewOrder::new(&identifiers)).await;
        let mut order = order.inspect_err(|e| self.forget_account(e))?;
        self.prove(&mut order, host).await?;
        let internal = |e: rcgen::Error| Refusal::of_name(format!("cannot make a request: {e}"));
        let key = KeyPair::generate().map_err(internal)?;
        let mut params = CertificateParams::new(vec![host.to_owned()]).map_err(internal)?;
        params.distinguished_name = DistinguishedName::new();
        let request = params.serialize_request(&key).map_err(internal)?;
        order.finalize_csr(request.der()).await?;
        let chain = order.poll_certificate(&POLLS).await?;
        Ok(key.serialize_pem() + &chain)
    }

    /// Our account with the CA; a new one the first time.
    async fn account(&self) -> Result<Account, Refusal> {
        let builder = || Account::builder_with_http(Box::new(self.caller.clone()));
        let kept = self.cache.account();
        let kept = kept.and_then(|text| serde_json::from_slice::<AccountCredentials>(&text).ok());
        if let Some(credentials) = kept {
            return Ok(builder().from_credentials(credentials).await?);
        }
        let contact = self.authority.email.iter().map(|email| format!("mailto:{email}"));
        let contact: Vec<_> = contact.collect();
        let contact: Vec<_> = contact.iter().map(String::as_str).collect();
        let new = NewAccount {
            contact: &contact,
            terms_of_service_agreed: true,
            only_return_existing: false,
        };
        let directory = self.authority.directory_url.clone();
        let (account, credentials) = builder().create(&new, directory, None).await?;
        let text = serde_json::to_vec(&credentials).map_err(Error::from)?;
        // Without it the next order would make another account: a CA counts those, too.
        let kept = self.cache.put_account(Some(&text));
        kept.map_err(|e| Refusal::of_authority(format!("cannot keep the account: {e}")))?;
        Ok(account)
    }

    /// A CA that does not know us any more is made acquainted again, the next time.
    fn forget_account(&self, e: &Error) {
        if let Error::Api(problem) = e
            && problem.r#type.as_deref().is_some_and(|kind| kind.ends_with(":accountDoesNotExist"))
        {
            let _ = self.cache.put_account(None);
        }
    }

    /// Shows the CA that `host` is ours.
    async fn prove(&self, order: &mut Order, host: &str) -> Result<(), Refusal> {
        let mut authorizations = order.authorizations();
        while let Some(authorization) = authorizations.next().await {
            let mut authorization = authorization?;
            match authorization.status {
                AuthorizationStatus::Valid => continue,
                AuthorizationStatus::Pending => {}
                _ => return Err(Refusal::of_name("the CA has given up on the order")),
            }
            let wanted = match self.way {
                Way::TlsAlpn => [ChallengeType::TlsAlpn01, ChallengeType::Http01],
                Way::Http => [ChallengeType::Http01, ChallengeType::TlsAlpn01],
            };
            let is_offered = |kind: &ChallengeType| {
                authorization.challenges.iter().any(|challenge| challenge.r#type == *kind)
            };
            let kind = wanted.into_iter().find(is_offered);
            let challenge = kind.and_then(|kind| authorization.challenge(kind));
            let Some(mut challenge) = challenge else {
                let words = "the CA offers neither tls-alpn-01 nor http-01";
                return Err(Refusal::of_name(words));
            };
            self.publish(&challenge, host)?;
            tokio::time::sleep(SEEN_BY_OTHERS).await;
            challenge.set_ready().await?;
        }
        match order.poll_ready(&POLLS).await {
            Ok(OrderStatus::Ready | OrderStatus::Valid) => Ok(()),
            Ok(_) => Err(Refusal::of_name(why_refused(order).await)),
            Err(e) => Err(e.into()),
        }
    }

    /// Lets the CA find what it will look for, here and where other processes serve.
    fn publish(&self, challenge: &ChallengeHandle<'_>, host: &str) -> Result<(), Refusal> {
        let cannot = |e: &dyn std::fmt::Display| {
            Refusal::of_authority(format!("cannot make the challenge public: {e}"))
        };
        let proof = challenge.key_authorization();
        if challenge.r#type == ChallengeType::Http01 {
            let (token, text) = (&challenge.token, proof.as_str());
            self.cache.put_token(token, text).map_err(|e| cannot(&e))?;
            lock(self.published).push(token.clone());
            self.tokens.rcu(|all| {
                let mut all = HashMap::clone(all);
                all.insert(token.clone(), text.to_owned());
                all
            });
            return Ok(());
        }
        let certificate = || {
            let mut params = CertificateParams::new(vec![host.to_owned()])?;
            let digest = proof.digest();
            params.custom_extensions = vec![CustomExtension::new_acme_identifier(digest.as_ref())];
            let key = KeyPair::generate()?;
            Ok::<_, rcgen::Error>(key.serialize_pem() + &params.self_signed(&key)?.pem())
        };
        let pem = certificate().map_err(|e| cannot(&e))?;
        let key = self.cache.put_certificate_challenge(host, &pem).map_err(|e| cannot(&e))?;
        self.issued.put_challenge(host, &key);
        Ok(())
    }
}

/// What the CA has against an order that it has refused.
async fn why_refused(order: &mut Order) -> String {
    let mut authorizations = order.authorizations();
    while let Some(Ok(mut authorization)) = authorizations.next().await {
        let Ok(state) = authorization.refresh().await else { continue };
        if let Some(problem) = state.challenges.iter().find_map(|one| one.error.as_ref()) {
            return problem.to_string();
        }
    }
    "the CA has refused it, and does not say why".to_owned()
}
