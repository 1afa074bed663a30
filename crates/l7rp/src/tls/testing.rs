//! Certificates made for tests.

use std::path::PathBuf;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};

use crate::config::plan::{Certificate, ListenerTls, TlsVersion};

/// A CA, and a folder for what it issues.
pub(crate) struct Ca {
    issuer: CertifiedIssuer<'static, KeyPair>,
    folder: tempfile::TempDir,
}

impl Ca {
    /// A CA whose certificate is in `ca.pem`.
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let ca = Self { issuer, folder: tempfile::tempdir().unwrap() };
        ca.write("ca.pem", &ca.issuer.pem());
        ca
    }

    pub(crate) fn path(&self, file: &str) -> PathBuf {
        self.folder.path().join(file)
    }

    pub(crate) fn write(&self, file: &str, text: &str) -> PathBuf {
        std::fs::write(self.path(file), text).unwrap();
        self.path(file)
    }

    /// Issues a certificate to `name.crt` and `name.key`.
    pub(crate) fn issue(&self, name: &str, hosts: &[&str]) -> Certificate {
        self.issue_with(name, hosts, &KeyPair::generate().unwrap(), |_| {})
    }

    pub(crate) fn issue_with(
        &self,
        name: &str,
        hosts: &[&str],
        key: &KeyPair,
        change: impl FnOnce(&mut CertificateParams),
    ) -> Certificate {
        let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(hosts).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        change(&mut params);
        let certificate = params.signed_by(key, &self.issuer).unwrap();
        Certificate {
            cert: self.write(&format!("{name}.crt"), &certificate.pem()),
            key: self.write(&format!("{name}.key"), &key.serialize_pem()),
            hosts: Vec::new(),
        }
    }
}

/// A certificate that was over long ago.
pub(crate) fn expired(params: &mut CertificateParams) {
    params.not_after = rcgen::date_time_ymd(2020, 1, 2);
}

/// A listener with these certificates and nothing else.
pub(crate) fn listener(certs: Vec<Certificate>) -> ListenerTls {
    ListenerTls { min_version: TlsVersion::V12, certs, autocert: None, client_auth: None }
}
