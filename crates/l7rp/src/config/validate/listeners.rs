//! Listeners.

use ipnet::IpNet;

use super::files::Mention;
use super::{Check, Complaint, Unique, headers, net, words};
use crate::config::file::{
    AutocertSection, CertSection, ClientAuthMode, ClientAuthSection, File, KeyPath,
    ListenerSection, TlsSection,
};
use crate::config::plan::{
    Autocert, Bind, Certificate, ClientAuth, Listener, ListenerTimeouts, ListenerTls,
    MessageLimits, TlsVersion,
};

/// Stands in for an address that is wrong.
pub(super) const NOWHERE: Bind = Bind::Tcp(std::net::SocketAddr::V4(std::net::SocketAddrV4::new(
    std::net::Ipv4Addr::UNSPECIFIED,
    0,
)));

pub(super) fn check(check: &mut Check<'_>, file: &File, binds: &mut Unique) -> Vec<Listener> {
    let mut names = Unique::new("listener name");
    let around = KeyPath::root().key("listeners");
    file.listeners
        .iter()
        .enumerate()
        .map(|(i, written)| listener(check, written, &around.index(i), &mut names, binds))
        .collect()
}

fn listener(
    check: &mut Check<'_>,
    written: &ListenerSection,
    at: &KeyPath,
    names: &mut Unique,
    binds: &mut Unique,
) -> Listener {
    let name = check.name(written.name.as_ref(), at, names);
    let bind = check.bind(written.bind.as_ref(), at, binds);
    let tls = written.tls.as_ref().map(|tls| self::tls(check, tls, &at.key("tls")));
    let tls_doubtful = check.doubtful_key(at, "tls");
    if written.enable_http3 && tls.is_none() && !tls_doubtful {
        let complaint = Complaint::new("`enable_http3` needs `tls`");
        check.complain(&at.key("enable_http3"), complaint.help("HTTP/3 is always encrypted"));
    }
    let trusted_proxies = check.cidrs(&written.trusted_proxies, &at.key("trusted_proxies"));
    if written.proxy_protocol
        && written.trusted_proxies.is_empty()
        && !check.doubtful_key(at, "trusted_proxies")
    {
        let complaint = Complaint::new("`proxy_protocol` needs `trusted_proxies`");
        let help = "whoever may connect could claim to be any client";
        check.complain(&at.key("proxy_protocol"), complaint.help(help));
    }
    Listener {
        name,
        bind,
        tls,
        timeouts: timeouts(check, written, &at.key("timeouts")),
        http3: written.enable_http3,
        trusted_proxies,
        proxy_protocol: written.proxy_protocol,
        decision_header_for: check
            .cidrs(&written.decision_header_for, &at.key("decision_header_for")),
        max_connections: written.max_connections,
        limits: limits(check, written, &at.key("limits")),
        max_in_flight: written.max_in_flight,
    }
}

impl Check<'_> {
    /// A name that must be there and be unique.
    pub(super) fn name(
        &mut self,
        written: Option<&String>,
        around: &KeyPath,
        names: &mut Unique,
    ) -> String {
        let Some(name) = self.need(written, around, "name") else { return String::new() };
        let at = around.key("name");
        self.or_complain(words::name(name), &at);
        names.add(self, name, &at);
        name.to_owned()
    }

    pub(super) fn bind(
        &mut self,
        written: Option<&String>,
        around: &KeyPath,
        binds: &mut Unique,
    ) -> Bind {
        let at = around.key("bind");
        let Some(text) = self.need(written, around, "bind") else { return NOWHERE };
        let Some(bind) = self.or_complain(net::bind(text), &at) else { return NOWHERE };
        binds.add_bind(self, &bind, &at);
        bind
    }

    pub(super) fn cidrs(&mut self, written: &[String], at: &KeyPath) -> Vec<IpNet> {
        let mut nets = Vec::with_capacity(written.len());
        for (i, text) in written.iter().enumerate() {
            nets.extend(self.or_complain(net::cidr(text), &at.index(i)));
        }
        nets
    }

    /// Whether a key may be absent only because it could not be read.
    pub(super) fn doubtful_key(&self, around: &KeyPath, key: &str) -> bool {
        self.poisoned.contains(&around.key(key)) || self.misspelt(around, key)
    }
}

fn timeouts(check: &mut Check<'_>, written: &ListenerSection, at: &KeyPath) -> ListenerTimeouts {
    let timeouts = &written.timeouts;
    ListenerTimeouts {
        read_header: check.time_above_zero(timeouts.read_header, &at.key("read_header")),
        read: check.time_above_zero(timeouts.read, &at.key("read")),
        write: check.time_above_zero(timeouts.write, &at.key("write")),
        idle: check.time_above_zero(timeouts.idle, &at.key("idle")),
        max_header_bytes: check.size(timeouts.max_header_bytes, 1024, &at.key("max_header_bytes")),
    }
}

fn limits(check: &mut Check<'_>, written: &ListenerSection, at: &KeyPath) -> MessageLimits {
    let limits = &written.limits;
    MessageLimits {
        max_headers: check.between(limits.max_headers, 1, 10_000, &at.key("max_headers")) as usize,
        max_target_bytes: check.size(limits.max_target_bytes, 1, &at.key("max_target_bytes")),
        max_trailer_bytes: check.size(limits.max_trailer_bytes, 0, &at.key("max_trailer_bytes")),
        max_body_bytes: limits.max_body_bytes.0,
        min_body_rate: limits.min_body_rate.0,
    }
}

fn tls(check: &mut Check<'_>, written: &TlsSection, at: &KeyPath) -> ListenerTls {
    if written.certs.is_empty()
        && written.autocert.is_none()
        && !check.doubtful_key(at, "certs")
        && !check.doubtful_key(at, "autocert")
    {
        check.wrong(at, "`tls` needs `certs` or `autocert`");
    }
    let certs_at = at.key("certs");
    ListenerTls {
        min_version: version(check, &written.min_version, &at.key("min_version")),
        certs: written
            .certs
            .iter()
            .enumerate()
            .map(|(i, written)| cert(check, written, &certs_at.index(i)))
            .collect(),
        autocert: written.autocert.as_ref().map(|w| autocert(check, w, &at.key("autocert"))),
        client_auth: written
            .client_auth
            .as_ref()
            .map(|w| client_auth(check, w, &at.key("client_auth"))),
    }
}

fn version(check: &mut Check<'_>, written: &str, at: &KeyPath) -> TlsVersion {
    const HELP: &str = "write \"1.2\" or \"1.3\"";
    match written {
        "1.3" => return TlsVersion::V13,
        "1.2" => {}
        "1.0" | "1.1" | "1" | "TLS1.0" | "TLS1.1" | "TLSv1.0" | "TLSv1.1" | "SSLv3" => {
            let complaint =
                Complaint::new(format!("`min_version` cannot be below 1.2, is {written}"));
            check.complain(at, complaint.help(HELP));
        }
        other => {
            let complaint =
                Complaint::new(format!("unknown TLS version `{}`", other.escape_debug()));
            check.complain(at, complaint.help(HELP));
        }
    }
    TlsVersion::V12
}

fn cert(check: &mut Check<'_>, written: &CertSection, at: &KeyPath) -> Certificate {
    let hosts = check.tls_names(&written.hosts, true, &at.key("hosts"));
    let cert = check.need(written.cert.as_ref(), at, "cert");
    let key = check.need(written.key.as_ref(), at, "key");
    let (cert_path, key_path, chain) = check.pair(
        &Mention { file: cert, at: &at.key("cert") },
        &Mention { file: key, at: &at.key("key") },
    );
    if let (Some(chain), Some(cert)) = (chain, cert) {
        check.covered(&hosts, &chain, cert, at);
    }
    Certificate { cert: cert_path.unwrap_or_default(), key: key_path.unwrap_or_default(), hosts }
}

impl Check<'_> {
    fn tls_names(&mut self, written: &[String], wildcards: bool, at: &KeyPath) -> Vec<String> {
        let mut names = Vec::with_capacity(written.len());
        for (i, text) in written.iter().enumerate() {
            names.extend(self.or_complain(net::tls_name(text, wildcards), &at.index(i)));
        }
        names
    }
}

fn autocert(check: &mut Check<'_>, written: &AutocertSection, at: &KeyPath) -> Autocert {
    let cache_dir = check.need(written.cache_dir.as_ref(), at, "cache_dir").unwrap_or_default();
    if written.allowed_hosts.is_empty() && !check.doubtful_key(at, "allowed_hosts") {
        let complaint = Complaint::new("`autocert` needs `allowed_hosts`");
        check.complain(at, complaint.help("otherwise anybody could make it ask for any name"));
    }
    if let Some(url) = &written.directory_url
        && !url.starts_with("https://")
    {
        check.wrong(
            &at.key("directory_url"),
            format!("`directory_url` must begin with `https://`, is `{url}`"),
        );
    }
    let ca_file = written.ca_file.as_ref();
    Autocert {
        cache_dir: check.path(cache_dir),
        allowed_hosts: check.tls_names(&written.allowed_hosts, false, &at.key("allowed_hosts")),
        email: written.email.clone(),
        directory_url: written.directory_url.clone(),
        ca_file: ca_file.map(|file| check.ca(file, &at.key("ca_file"))),
    }
}

fn client_auth(check: &mut Check<'_>, written: &ClientAuthSection, at: &KeyPath) -> ClientAuth {
    let ca_file = check.need(written.ca_file.as_ref(), at, "ca_file");
    ClientAuth {
        ca_file: ca_file.map(|file| check.ca(file, &at.key("ca_file"))).unwrap_or_default(),
        required: written.mode == ClientAuthMode::Require,
        identity_header: written
            .identity_header
            .as_ref()
            .and_then(|name| check.or_complain(headers::ours(name), &at.key("identity_header"))),
    }
}
