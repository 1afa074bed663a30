//! Files that a configuration names: read as the proxy reads them, so that what is wrong is told
//! before anything is changed.

use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{Check, Complaint};
use crate::clock::wall_ms;
use crate::config::Files;
use crate::config::file::KeyPath;
use crate::config::plan::AdminToken;
use crate::tls::TlsError;
use crate::tls::files::{self, Chain, Named};

/// Characters of a token: fewer can be guessed.
const SHORTEST_TOKEN: usize = 16;
/// Octets of its file; a larger one is something else.
const LARGEST_TOKEN: u64 = 4 << 10;

/// A file that is mentioned, and where.
pub(super) struct Mention<'a> {
    pub(super) file: Option<&'a str>,
    pub(super) at: &'a KeyPath,
}

impl From<TlsError> for Complaint {
    fn from(error: TlsError) -> Self {
        Self { message: error.message, help: error.help }
    }
}

impl Check<'_> {
    /// A bundle of CAs: its path from where the proxy runs.
    pub(super) fn ca(&mut self, written: &str, at: &KeyPath) -> PathBuf {
        let path = self.path(written);
        if self.files == Files::Check
            && !written.is_empty()
            && let Some(read) =
                self.read(files::authorities(Named { path: &path, name: written }), at)
            && read.ignored > 0
        {
            let message = format!(
                "{} of the certificates in `{written}` cannot be used as a CA",
                read.ignored
            );
            self.warn(at, message);
        }
        path
    }

    /// A certificate and its key: their paths, and the certificate if both are good.
    pub(super) fn pair(
        &mut self,
        cert: &Mention<'_>,
        key: &Mention<'_>,
    ) -> (Option<PathBuf>, Option<PathBuf>, Option<Chain>) {
        let cert_path = cert.file.map(|file| self.path(file));
        let key_path = key.file.map(|file| self.path(file));
        if self.files == Files::Ignore {
            return (cert_path, key_path, None);
        }
        let cert_file = named(cert, cert_path.as_deref());
        let key_file = named(key, key_path.as_deref());
        let chain = cert_file.and_then(|file| self.read(files::chain(file), cert.at));
        let signer = key_file.and_then(|file| self.read(files::key(file), key.at));
        let mut good = None;
        if let (Some(chain), Some(signer)) = (chain, signer)
            && let (Some(cert_file), Some(key_file)) = (cert_file, key_file)
            && self.read(files::pair(&chain, signer, cert_file, key_file), key.at).is_some()
        {
            let now = (wall_ms() / 1000).cast_signed();
            if let Some(warning) = chain.warning(cert_file.name, now) {
                self.warn(cert.at, warning);
            }
            good = Some(chain);
        }
        (cert_path, key_path, good)
    }

    /// Warns of names that the certificate at `at` is not for: clients would refuse it.
    pub(super) fn covered(&mut self, hosts: &[String], chain: &Chain, cert: &str, at: &KeyPath) {
        if chain.names.is_empty() {
            let message = format!("the certificate in `{cert}` is for no name");
            self.warn(&at.key("cert"), format!("{message}: it has no subject alternative name"));
            return;
        }
        for (i, host) in hosts.iter().enumerate().filter(|(_, host)| !chain.is_for(host)) {
            let names = chain.names.join("`, `");
            let message =
                format!("the certificate in `{cert}` is not for `{host}`, but for `{names}`");
            self.warn(&at.key("hosts").index(i), message);
        }
    }

    /// The token of the admin endpoints.
    pub(super) fn token(&mut self, written: &str, at: &KeyPath) -> Option<AdminToken> {
        if written.is_empty() {
            self.wrong(at, "`token_file` is empty");
            return None;
        }
        let path = self.path(written);
        let secret = match self.files {
            Files::Check => self.or_complain(token(&path, written), at)?,
            Files::Ignore => String::new(),
        };
        Some(AdminToken::new(path, secret))
    }

    fn read<T>(&mut self, read: Result<T, TlsError>, at: &KeyPath) -> Option<T> {
        self.or_complain(read.map_err(Complaint::from), at)
    }
}

/// Reads a token. What is in the file is never repeated in a message.
fn token(path: &Path, name: &str) -> Result<String, Complaint> {
    const MAKE: &str = "make one: `(umask 077; head -c 32 /dev/urandom | base64 > FILE)`";
    let unreadable = |e: io::Error| Complaint::new(format!("cannot read `{name}`: {e}"));
    // A pipe would be waited for.
    if !std::fs::metadata(path).map_err(unreadable)?.is_file() {
        return Err(Complaint::new(format!("`{name}` is no regular file")));
    }
    let file = std::fs::File::open(path).map_err(unreadable)?;
    let mode = file.metadata().map_err(unreadable)?.mode() & 0o7777;
    if mode & 0o006 != 0 {
        let message =
            format!("`{name}` is open to everybody on this machine: its mode is {mode:04o}");
        return Err(Complaint::new(message).help("chmod 0600, or 0640 with a group of its own"));
    }
    let mut bytes = Vec::new();
    file.take(LARGEST_TOKEN + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    let token = bytes.trim_ascii();
    if bytes.len() as u64 > LARGEST_TOKEN {
        let message = format!("`{name}` is too large for a token: more than {LARGEST_TOKEN} bytes");
        return Err(Complaint::new(message));
    }
    if token.is_empty() {
        return Err(Complaint::new(format!("`{name}` is empty")).help(MAKE));
    }
    if token.len() < SHORTEST_TOKEN {
        let (least, is) = (SHORTEST_TOKEN, token.len());
        let message =
            format!("the token in `{name}` must have at least {least} characters, has {is}");
        return Err(Complaint::new(message).help(MAKE));
    }
    if !token.iter().all(u8::is_ascii_graphic) {
        let message = format!("the token in `{name}` has characters that no HTTP field can carry");
        return Err(
            Complaint::new(message).help("one line of letters, digits and signs, no blanks")
        );
    }
    Ok(String::from_utf8_lossy(token).into_owned())
}

fn named<'a>(written: &Mention<'a>, path: Option<&'a Path>) -> Option<Named<'a>> {
    let name = written.file.filter(|name| !name.is_empty())?;
    Some(Named { path: path?, name })
}
