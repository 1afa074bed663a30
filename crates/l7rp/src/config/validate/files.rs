//! Files that a configuration names: read as the proxy reads them, so that what is wrong is told
//! before anything is changed.

use std::path::{Path, PathBuf};

use super::{Check, Complaint};
use crate::clock::wall_ms;
use crate::config::Files;
use crate::config::file::KeyPath;
use crate::tls::TlsError;
use crate::tls::files::{self, Chain, Named};

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

    fn read<T>(&mut self, read: Result<T, TlsError>, at: &KeyPath) -> Option<T> {
        self.or_complain(read.map_err(Complaint::from), at)
    }
}

fn named<'a>(written: &Mention<'a>, path: Option<&'a Path>) -> Option<Named<'a>> {
    let name = written.file.filter(|name| !name.is_empty())?;
    Some(Named { path: path?, name })
}
