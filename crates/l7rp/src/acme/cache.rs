//! What is kept on disk of one CA, in a folder of its own: readable by us alone, and replaced as
//! a whole, so that nobody ever finds half of something.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use l7rp_core::renewal::Tries;
use rustix::fs::{FlockOperation, flock};
use rustls::sign::CertifiedKey;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::tls::TlsError;
use crate::tls::files::{self, Chain, Named};

/// A folder with what is kept of one CA.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    folder: PathBuf,
}

/// Held while certificates are asked for: by one process at a time.
#[derive(Debug)]
pub(super) struct Turn {
    _lock: File,
}

/// Tells whether a file is still the same.
pub(super) type Stamp = (u64, SystemTime, u64);

/// A certificate from the cache.
pub(super) struct Cached {
    pub(super) chain: Chain,
    pub(super) key: CertifiedKey,
}

/// What CAs are to find.
#[derive(Default)]
pub(super) struct Challenges {
    /// TLS-ALPN-01, by name.
    pub(super) certificates: HashMap<String, Arc<CertifiedKey>>,
    /// HTTP-01, by token.
    pub(super) tokens: HashMap<String, String>,
}

/// As it is written.
#[derive(Default, Serialize, Deserialize)]
struct Written {
    failures: u32,
    not_before: i64,
}

/// Where the tries are written that are not about one name.
const TRIES: &str = "tries.json";
const ACCOUNT: &str = "account.json";
const CHALLENGES: &str = "challenges";
const TOKEN: &str = ".token";

impl Cache {
    /// The folder for `directory_url` in `cache_dir`, which is made if it is not there.
    pub(super) fn open(cache_dir: &Path, directory_url: &str) -> Result<Self, TlsError> {
        let error = |message: String, help: &str| TlsError {
            file: Some(cache_dir.to_owned()),
            message,
            help: Some(help.to_owned()),
        };
        let name = cache_dir.display();
        let cannot = |e: io::Error| {
            let help = "it must be a directory that the proxy may write to";
            error(format!("cannot use `cache_dir` {name}: {e}"), help)
        };
        private().create(cache_dir).map_err(cannot)?;
        let mode = fs::metadata(cache_dir).map_err(cannot)?.permissions().mode();
        if mode & 0o022 != 0 {
            let message =
                format!("`cache_dir` {name} can be changed by others (mode {:03o})", mode & 0o777);
            return Err(error(message, &format!("private keys are kept there: chmod 700 {name}")));
        }
        // The digest tells apart what looks the same as a name of a file.
        let name = file_name(directory_url.trim_start_matches("https://"));
        let digest = xxh3_64(directory_url.as_bytes()) as u32;
        let folder = cache_dir.join(format!("{name}-{digest:08x}"));
        private().create(folder.join(CHALLENGES)).map_err(cannot)?;
        let cache = Self { folder };
        let probe = cache.folder.join(format!("probe{}", std::process::id()));
        fs::write(&probe, "").and_then(|()| fs::remove_file(&probe)).map_err(cannot)?;
        Ok(cache)
    }

    /// The turn to ask for certificates; `None`: another process has it.
    pub(super) fn take_turn(&self) -> io::Result<Option<Turn>> {
        // Somebody may have tidied up.
        private().create(self.folder.join(CHALLENGES))?;
        let mut options = OpenOptions::new();
        let lock = options.write(true).create(true).truncate(false).mode(0o600);
        let lock = lock.open(self.folder.join("lock"))?;
        match flock(&lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Turn { _lock: lock })),
            Err(e) if e == rustix::io::Errno::WOULDBLOCK => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Changes whenever a certificate is put there.
    pub(super) fn stamp(&self) -> io::Result<Stamp> {
        stamp(&self.folder)
    }

    /// As [`Cache::stamp`], for challenges.
    pub(super) fn challenges_stamp(&self) -> io::Result<Stamp> {
        stamp(&self.folder.join(CHALLENGES))
    }

    fn certificate_file(&self, host: &str) -> PathBuf {
        self.folder.join(format!("{}.pem", file_name(host)))
    }

    /// Changes when the certificate for `host` is replaced; `None`: there is none.
    pub(super) fn certificate_stamp(&self, host: &str) -> Option<Stamp> {
        stamp(&self.certificate_file(host)).ok()
    }

    /// The certificate for `host`.
    pub(super) fn certificate(&self, host: &str) -> Result<Cached, Vec<TlsError>> {
        read_pair(&self.certificate_file(host))
    }

    /// Keeps a certificate, key first, in the place of the one before. It is looked at once more
    /// before that: what cannot be served does not replace what can.
    pub(super) fn put_certificate(&self, host: &str, pem: &str) -> Result<Cached, String> {
        let new = format!("{}.new", file_name(host));
        let words = |e: io::Error| format!("cannot keep the certificate: {e}");
        self.write(&new, pem.as_bytes()).map_err(words)?;
        let path = self.folder.join(&new);
        let cached = read_pair(&path).map_err(|errors| {
            let errors: Vec<_> = errors.iter().map(ToString::to_string).collect();
            format!("what the CA has sent cannot be used: {}", errors.join("; "))
        })?;
        if !cached.chain.is_for(host) {
            return Err(format!("the CA has sent a certificate that is not for {host}"));
        }
        fs::rename(&path, self.certificate_file(host)).map_err(words)?;
        self.sync().map_err(words)?;
        Ok(cached)
    }

    /// The account with the CA, as [`Cache::put_account`] was given it.
    pub(super) fn account(&self) -> Option<Vec<u8>> {
        fs::read(self.folder.join(ACCOUNT)).ok()
    }

    /// Keeps the account with the CA. `None`: the CA does not know it any more.
    pub(super) fn put_account(&self, account: Option<&[u8]>) -> io::Result<()> {
        match account {
            Some(account) => self.write(ACCOUNT, account),
            None => fs::remove_file(self.folder.join(ACCOUNT)),
        }
    }

    /// What has failed so far, by name; that of the CA itself has none.
    pub(super) fn tries(&self) -> HashMap<String, Tries> {
        let text = fs::read(self.folder.join(TRIES)).unwrap_or_default();
        let all: BTreeMap<String, Written> = serde_json::from_slice(&text).unwrap_or_default();
        let tries = |one: Written| Tries { failures: one.failures, not_before: one.not_before };
        all.into_iter().map(|(name, one)| (name, tries(one))).collect()
    }

    /// Keeps what has failed so far.
    pub(super) fn put_tries(&self, all: &HashMap<String, Tries>) -> io::Result<()> {
        let written =
            |tries: &Tries| Written { failures: tries.failures, not_before: tries.not_before };
        let failed = all.iter().filter(|(_, tries)| tries.failures > 0);
        let all: BTreeMap<_, _> = failed.map(|(name, tries)| (name, written(tries))).collect();
        self.write(TRIES, &serde_json::to_vec_pretty(&all)?)
    }

    /// What CAs are to find, of all processes.
    pub(super) fn challenges(&self) -> io::Result<Challenges> {
        let mut all = Challenges::default();
        for entry in fs::read_dir(self.folder.join(CHALLENGES))? {
            let path = entry?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            if let Some(token) = name.strip_suffix(TOKEN) {
                // Gone since: whoever put it there needs it no more.
                let Ok(text) = fs::read_to_string(&path) else { continue };
                all.tokens.insert(token.to_owned(), text);
            } else if let Some(host) = name.strip_suffix(".pem") {
                let Ok(key) = read_challenge(&path) else { continue };
                all.certificates.insert(host.to_owned(), key);
            }
        }
        Ok(all)
    }

    /// Lets a CA find `pem` for `host`, key first, by TLS-ALPN-01.
    pub(super) fn put_certificate_challenge(
        &self,
        host: &str,
        pem: &str,
    ) -> io::Result<Arc<CertifiedKey>> {
        let name = format!("{CHALLENGES}/{}.pem", file_name(host));
        self.write(&name, pem.as_bytes())?;
        read_challenge(&self.folder.join(name)).map_err(io::Error::other)
    }

    /// Lets a CA find `text` at `token`, by HTTP-01.
    pub(super) fn put_token(&self, token: &str, text: &str) -> io::Result<()> {
        // It comes from the CA, and must name nothing but a file here.
        let good = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        if token.is_empty() || token.len() > 200 || !token.bytes().all(good) {
            return Err(io::Error::other("the CA's token is not one (RFC 8555, section 8.3)"));
        }
        self.write(&format!("{CHALLENGES}/{token}{TOKEN}"), text.as_bytes())
    }

    /// Nothing is to be found any more.
    pub(super) fn clear_challenges(&self) -> io::Result<()> {
        for entry in fs::read_dir(self.folder.join(CHALLENGES))? {
            fs::remove_file(entry?.path())?;
        }
        Ok(())
    }

    /// Writes a file as a whole.
    fn write(&self, name: &str, content: &[u8]) -> io::Result<()> {
        let path = self.folder.join(name);
        // Two processes never write the same at once: they have their turn, or the names differ.
        let new = path.with_extension(format!("tmp{}", std::process::id()));
        let mut options = OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o600).open(&new)?;
        file.write_all(content)?;
        file.sync_all()?;
        fs::rename(&new, &path)?;
        self.sync()
    }

    /// What was renamed stays so, even if the machine stops now.
    fn sync(&self) -> io::Result<()> {
        File::open(&self.folder)?.sync_all()
    }
}

/// Makes folders that are nobody else's business.
fn private() -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder
}

fn stamp(path: &Path) -> io::Result<Stamp> {
    let meta = fs::metadata(path)?;
    Ok((meta.ino(), meta.modified()?, meta.len()))
}

fn read_pair(path: &Path) -> Result<Cached, Vec<TlsError>> {
    let name = path.display().to_string();
    let file = Named { path, name: &name };
    let (chain, key) = files::both(file, file)?;
    Ok(Cached { chain, key })
}

/// Not compared with each other, as [`read_pair`] does: the library that can do so refuses what it
/// takes for a certificate of a server (RFC 8737, section 3).
fn read_challenge(path: &Path) -> Result<Arc<CertifiedKey>, TlsError> {
    let name = path.display().to_string();
    let file = Named { path, name: &name };
    Ok(Arc::new(CertifiedKey::new(files::chain(file)?.certificates, files::key(file)?)))
}

/// A name for a file, of what may hold anything.
fn file_name(of: &str) -> String {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let name: String = of.chars().map(|c| if good(c) { c } else { '_' }).collect();
    // Neither hidden nor a way out of here.
    name.trim_start_matches('.').to_owned()
}

/// A pause that is long enough for other processes to see a challenge.
pub(super) const SEEN_BY_OTHERS: Duration = Duration::from_millis(1500);
