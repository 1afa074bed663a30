//! PEM files with certificates, keys and CAs. What is in them is never repeated in a message.

use std::path::Path;
use std::sync::Arc;

use rustls::crypto::aws_lc_rs::sign::any_supported_type;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::{CertifiedKey, SigningKey};
use rustls::{InconsistentKeys, RootCertStore};
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::{TlsError, date};

/// A file, and what to call it in messages.
#[derive(Clone, Copy, Debug)]
pub struct Named<'a> {
    /// Where it is.
    pub path: &'a Path,
    /// As the configuration has it.
    pub name: &'a str,
}

impl Named<'_> {
    fn error(&self, problem: impl std::fmt::Display) -> TlsError {
        self.about(format!("`{}` {problem}", self.name))
    }

    fn about(&self, message: String) -> TlsError {
        TlsError { file: Some(self.path.to_owned()), message, help: None }
    }
}

/// Larger files are something else.
const LARGEST: u64 = 4 << 20;

/// What must be in a PEM file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pem {
    Certificate,
    Key,
}

/// A certificate with those that lead to its CA, and what is to be known of it.
#[derive(Clone, Debug)]
pub struct Chain {
    /// The certificate itself first.
    pub certificates: Vec<CertificateDer<'static>>,
    /// DNS names, wildcards and IP addresses that it is for, in lower case.
    pub names: Vec<String>,
    /// Seconds since 1970 from which on it is valid.
    pub not_before: i64,
    /// Seconds since 1970 until which it is valid.
    pub not_after: i64,
}

impl Chain {
    /// What is worth a warning about the certificate in `name` at `now`, in seconds since 1970.
    pub fn warning(&self, name: &str, now: i64) -> Option<String> {
        if now > self.not_after {
            Some(format!("the certificate in `{name}` expired at {}", date(self.not_after)))
        } else if now < self.not_before {
            let from = date(self.not_before);
            Some(format!("the certificate in `{name}` is not valid before {from}"))
        } else {
            None
        }
    }

    /// Whether clients accept the certificate for `host`, which may be a wildcard itself.
    pub fn is_for(&self, host: &str) -> bool {
        self.names.iter().any(|name| covers(name, host))
    }
}

/// Whether a certificate's `name` is good for `host`: a wildcard stands for one label.
fn covers(name: &str, host: &str) -> bool {
    let one_label = || {
        let suffix = name.strip_prefix("*.")?;
        let (label, rest) = host.split_once('.')?;
        Some(!label.is_empty() && rest.eq_ignore_ascii_case(suffix))
    };
    name.eq_ignore_ascii_case(host) || one_label().unwrap_or(false)
}

/// Reads a certificate chain.
pub fn chain(file: Named<'_>) -> Result<Chain, TlsError> {
    let certificates = certificates(file)?;
    for (i, der) in certificates.iter().enumerate() {
        if X509Certificate::from_der(der).is_err() {
            return Err(file.error(format!("is damaged: its certificate {} is not X.509", i + 1)));
        }
    }
    let nothing = || file.error("has no certificate");
    let first = certificates.first().ok_or_else(nothing)?;
    let (_, parsed) = X509Certificate::from_der(first).map_err(|_| nothing())?;
    let validity = parsed.validity();
    let (not_before, not_after) = (validity.not_before.timestamp(), validity.not_after.timestamp());
    let names = names(&parsed);
    Ok(Chain { certificates, names, not_before, not_after })
}

/// Reads a private key: PKCS#8, PKCS#1 or SEC1.
pub fn key(file: Named<'_>) -> Result<Arc<dyn SigningKey>, TlsError> {
    let bytes = read(file, Pem::Key)?;
    let damaged = |_| file.error("is damaged: its private key is not base64 of DER");
    let der = PrivateKeyDer::from_pem_slice(&bytes).map_err(damaged)?;
    any_supported_type(&der).map_err(|_| {
        let mut error = file.error("has a private key that cannot be used");
        error.help = Some(
            "RSA with 2048 to 8192 bits, ECDSA with P-256, P-384 or P-521, and Ed25519 can".into(),
        );
        error
    })
}

/// A chain with its key, if it is its key.
pub fn pair(
    chain: &Chain,
    key: Arc<dyn SigningKey>,
    chain_file: Named<'_>,
    key_file: Named<'_>,
) -> Result<CertifiedKey, TlsError> {
    let certified = CertifiedKey::new(chain.certificates.clone(), key);
    let mismatch = match certified.keys_match() {
        // `Unknown`: this kind of key does not tell.
        Ok(()) | Err(rustls::Error::InconsistentKeys(InconsistentKeys::Unknown)) => {
            return Ok(certified);
        }
        Err(rustls::Error::InconsistentKeys(_)) => {
            format!(
                "`{}` is not the key of the certificate in `{}`",
                key_file.name, chain_file.name
            )
        }
        Err(e) => return Err(chain_file.error(format!("cannot be used: {e}"))),
    };
    let mut error = key_file.about(mismatch);
    let other = |der: &CertificateDer<'static>| {
        CertifiedKey::new(vec![der.clone()], certified.key.clone()).keys_match().is_ok()
    };
    error.help = chain.certificates.iter().position(other).map(|at| {
        format!("it is that of certificate {} there: the server's own must be the first", at + 1)
    });
    Err(error)
}

/// Reads a chain and its key, with everything that is wrong with either.
pub fn both(cert: Named<'_>, key: Named<'_>) -> Result<(Chain, CertifiedKey), Vec<TlsError>> {
    match (chain(cert), self::key(key)) {
        (Ok(chain), Ok(signer)) => match pair(&chain, signer, cert, key) {
            Ok(certified) => Ok((chain, certified)),
            Err(error) => Err(vec![error]),
        },
        (chain, signer) => Err(chain.err().into_iter().chain(signer.err()).collect()),
    }
}

/// A bundle of CAs.
#[derive(Clone, Debug)]
pub struct Authorities {
    /// What certificates are checked against.
    pub roots: Arc<RootCertStore>,
    /// Those that are trusted themselves too, should an upstream show one.
    pub certificates: Vec<CertificateDer<'static>>,
    /// How many of them cannot be used as a CA.
    pub ignored: usize,
}

/// Reads a bundle of CAs. If none of its certificates can be used as one, it is an error.
pub fn authorities(file: Named<'_>) -> Result<Authorities, TlsError> {
    let certificates = certificates(file)?;
    let mut roots = RootCertStore::empty();
    let (used, ignored) = roots.add_parsable_certificates(certificates.iter().cloned());
    if used == 0 {
        return Err(file.error("has no certificate that can be used as a CA"));
    }
    Ok(Authorities { roots: Arc::new(roots), certificates, ignored })
}

fn certificates(file: Named<'_>) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let bytes = read(file, Pem::Certificate)?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    all.map_err(|_| file.error("is damaged: one of its blocks is not base64 of DER"))
}

/// The whole file, if it has what is asked for.
fn read(file: Named<'_>, what: Pem) -> Result<Vec<u8>, TlsError> {
    let unreadable = |e: std::io::Error| {
        let mut error = file.about(format!("cannot read `{}`: {e}", file.name));
        error.help = Some(format!("looked for at {}", file.path.display()));
        error
    };
    let size = std::fs::metadata(file.path).map_err(unreadable)?.len();
    if size > LARGEST {
        return Err(file.error(format!("is too large for a PEM file: {size} bytes")));
    }
    let bytes = std::fs::read(file.path).map_err(unreadable)?;
    look(&String::from_utf8_lossy(&bytes), what).map_err(|problem| file.error(problem))?;
    Ok(bytes)
}

/// Whether a block of the right kind is there and looks like base64 of DER. The parser does not
/// tell what else there is, which is what people need to know.
fn look(text: &str, what: Pem) -> Result<(), String> {
    let mut labels = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once("-----BEGIN ") {
        let Some((label, body)) = after.split_once("-----") else { break };
        let end = format!("-----END {label}-----");
        let Some((body, after)) = body.split_once(&end) else {
            return Err(format!("is cut off: `BEGIN {label}` has no `END {label}`"));
        };
        rest = after;
        let fits = match what {
            Pem::Certificate => label == "CERTIFICATE",
            Pem::Key => label.ends_with("PRIVATE KEY"),
        };
        if !fits {
            labels.push(label.to_owned());
            continue;
        }
        if label.starts_with("ENCRYPTED") || body.contains("Proc-Type: 4,ENCRYPTED") {
            return Err("is encrypted; a key without a passphrase is needed".to_owned());
        }
        if !is_der(body) {
            return Err(format!("is damaged: its `{label}` block is not base64 of DER"));
        }
        return Ok(());
    }
    let wanted = match what {
        Pem::Certificate => "certificate (`BEGIN CERTIFICATE`)",
        Pem::Key => "private key (`BEGIN PRIVATE KEY`)",
    };
    if labels.is_empty() {
        return Err(format!("is not a PEM file with a {wanted}"));
    }
    labels.dedup();
    Err(format!("has no {wanted}, only `{}`", labels.join("`, `")))
}

fn is_der(body: &str) -> bool {
    let digits: Vec<u8> = body.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    let data = digits.strip_suffix(b"==").or_else(|| digits.strip_suffix(b"=")).unwrap_or(&digits);
    let allowed = |b: &u8| b.is_ascii_alphanumeric() || *b == b'+' || *b == b'/';
    // DER of these begins with a SEQUENCE, whose tag 0x30 is an `M` in base64.
    digits.len() >= 16
        && digits.len().is_multiple_of(4)
        && data.iter().all(allowed)
        && data[0] == b'M'
}

/// DNS names and IP addresses of the subject alternative names. The common name does not count:
/// no client looks at it any more.
pub(super) fn names(certificate: &X509Certificate<'_>) -> Vec<String> {
    let Ok(Some(extension)) = certificate.subject_alternative_name() else { return Vec::new() };
    let name = |name: &GeneralName<'_>| match name {
        GeneralName::DNSName(name) => Some(name.to_ascii_lowercase()),
        GeneralName::IPAddress(octets) => address(octets),
        _ => None,
    };
    extension.value.general_names.iter().filter_map(name).collect()
}

pub(super) fn address(octets: &[u8]) -> Option<String> {
    if let Ok(v4) = <[u8; 4]>::try_from(octets) {
        return Some(std::net::Ipv4Addr::from(v4).to_string());
    }
    <[u8; 16]>::try_from(octets).ok().map(|v6| std::net::Ipv6Addr::from(v6).to_string())
}

#[cfg(test)]
mod tests {
    use super::{Pem, covers, look};

    #[test]
    fn the_right_block_must_be_there_and_whole() {
        let good = |label: &str| {
            format!("text\n-----BEGIN {label}-----\nMIIBIjANBgkqhkiG9w0B\n-----END {label}-----\n")
        };
        assert_eq!(look(&good("CERTIFICATE"), Pem::Certificate), Ok(()));
        for label in ["PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY"] {
            assert_eq!(look(&good(label), Pem::Key), Ok(()), "{label}");
        }
        let both = good("CERTIFICATE") + &good("PRIVATE KEY");
        assert_eq!(look(&both, Pem::Key), Ok(()));
        for (text, what, message) in [
            (String::new(), Pem::Key, "is not a PEM file with a private key (`BEGIN PRIVATE KEY`)"),
            (
                good("PRIVATE KEY"),
                Pem::Certificate,
                "has no certificate (`BEGIN CERTIFICATE`), only `PRIVATE KEY`",
            ),
            (
                good("ENCRYPTED PRIVATE KEY"),
                Pem::Key,
                "is encrypted; a key without a passphrase is needed",
            ),
            (
                good("CERTIFICATE").replace("MIIB", "M-IB"),
                Pem::Certificate,
                "is damaged: its `CERTIFICATE` block is not base64 of DER",
            ),
            (
                good("CERTIFICATE").replace("END", "ENDE"),
                Pem::Certificate,
                "is cut off: `BEGIN CERTIFICATE` has no `END CERTIFICATE`",
            ),
        ] {
            assert_eq!(look(&text, what), Err(message.to_owned()));
        }
    }

    #[test]
    fn a_wildcard_stands_for_one_label() {
        for (name, host, good) in [
            ("a.test", "A.test", true),
            ("a.test", "b.a.test", false),
            ("*.a.test", "b.a.test", true),
            ("*.a.test", "*.a.test", true),
            ("*.a.test", "c.b.a.test", false),
            ("*.a.test", "a.test", false),
            ("*.a.test", ".a.test", false),
            ("::1", "::1", true),
        ] {
            assert_eq!(covers(name, host), good, "{name} {host}");
        }
    }
}
