//! The question, written down as a request of HTTP/1.1, so that it is read as strictly as any
//! other; and the listener that it comes in by.

use std::net::{IpAddr, Ipv4Addr};

use serde::{Deserialize, Serialize};

use super::ListenerView;
use crate::config::plan::{self, Bind};
use crate::live::{Listener, Snapshot};

/// A question.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Asked {
    /// `http://HOST/PATH`, `https://HOST/PATH`, or a path alone.
    pub url: String,
    /// GET if there is none.
    #[serde(default)]
    pub method: Option<String>,
    /// Lines, `Name: value`. As with curl, `Name;` has no value, and `Host:` is sent without.
    #[serde(default)]
    pub headers: Vec<String>,
    /// The other end of the connection; 127.0.0.1 if there is none.
    #[serde(default)]
    pub client: Option<IpAddr>,
    /// The name of the listener; if there is none, the one that the URL is best for.
    #[serde(default)]
    pub listener: Option<String>,
}

/// A question, written down.
#[derive(Debug)]
pub(super) struct Written {
    pub(super) head: Vec<u8>,
    pub(super) target: String,
    /// The name that a client asks for when TLS begins.
    pub(super) sni: Option<String>,
    /// Whether it is to be TLS, and the port; `None`: the URL is a path.
    origin: Option<(bool, u16)>,
}

/// What a URL says.
struct Url<'a> {
    is_tls: bool,
    host: &'a str,
    port: Option<u16>,
    target: String,
}

impl Asked {
    pub(super) fn method(&self) -> &str {
        self.method.as_deref().unwrap_or("GET")
    }

    /// # Errors
    /// What cannot be sent.
    pub(super) fn write(&self) -> Result<Written, String> {
        let texts = [&self.url].into_iter().chain(&self.method).chain(&self.headers);
        if texts.into_iter().any(|text| text.contains(['\r', '\n'])) {
            return Err("a line break has no place in a URL, method or header".to_owned());
        }
        let url = self.url.split('#').next().unwrap_or_default();
        let (origin, target) = if url.starts_with('/') || url == "*" {
            (None, url.to_owned())
        } else {
            let url = Url::parse(url)?;
            let target = url.target.clone();
            (Some(url), target)
        };
        let mut head = format!("{} {target} HTTP/1.1\r\n", self.method());
        let mut host = origin.as_ref().map(Url::authority);
        let mut lines = String::new();
        for line in &self.headers {
            let (name, value) = match line.split_once(':') {
                Some((name, value)) => (name, value.trim()),
                None => match line.strip_suffix(';') {
                    Some(name) => (name, ""),
                    None => return Err(format!("header `{line}`: write `Name: value`")),
                },
            };
            if name.eq_ignore_ascii_case("host") {
                host = None;
            }
            if !value.is_empty() || line.ends_with(';') {
                lines.extend([name, ": ", value, "\r\n"]);
            }
        }
        let sni = match &origin {
            Some(url) => Some(url.host.to_owned()),
            None => self.host_field().map(str::to_owned),
        };
        if let Some(host) = host {
            head.extend(["Host: ", &host, "\r\n"]);
        }
        Ok(Written {
            head: (head + &lines + "\r\n").into_bytes(),
            target,
            sni: sni.filter(|name| !name.starts_with('[') && name.parse::<IpAddr>().is_err()),
            origin: origin.map(|url| (url.is_tls, url.port())),
        })
    }

    /// The name in the first Host line.
    fn host_field(&self) -> Option<&str> {
        let lines = self.headers.iter().filter_map(|line| line.split_once(':'));
        let mut hosts = lines.filter(|(name, _)| name.eq_ignore_ascii_case("host"));
        hosts.next().and_then(|(_, value)| value.trim().split(':').next())
    }

    /// The other end of the connection.
    pub(super) fn peer(&self, listener: &Listener) -> Option<IpAddr> {
        match (self.client, &listener.plan.bind) {
            (Some(ip), _) => Some(ip.to_canonical()),
            (None, Bind::Tcp(_)) => Some(Ipv4Addr::LOCALHOST.into()),
            (None, Bind::Unix(_)) => None,
        }
    }

    /// # Errors
    /// There is none of that name.
    pub(super) fn listener<'a>(
        &self,
        snapshot: &'a Snapshot,
        written: &Written,
    ) -> Result<(&'a Listener, ListenerView), String> {
        let all = &snapshot.listeners;
        let first_that = |is_it: &dyn Fn(&plan::Listener) -> bool| {
            all.iter().find(|listener| is_it(&listener.plan))
        };
        let has_port = |listener: &plan::Listener, port| matches!(&listener.bind, Bind::Tcp(address) if address.port() == port);
        let found = match (&self.listener, written.origin) {
            (Some(name), _) => {
                let named = first_that(&|l| l.name == *name).ok_or_else(|| {
                    let names: Vec<_> = all.iter().map(|l| l.plan.name.as_str()).collect();
                    format!("there is no listener `{name}`; there are: {}", names.join(", "))
                })?;
                Some((named, "named".to_owned()))
            }
            (None, Some((is_tls, port))) => {
                let fits = |l: &plan::Listener| has_port(l, port) && l.tls.is_some() == is_tls;
                let by_port = first_that(&fits).or_else(|| first_that(&|l| has_port(l, port)));
                let by_scheme = || first_that(&|l| l.tls.is_some() == is_tls);
                let scheme = if is_tls { "https" } else { "http" };
                by_port.map(|found| (found, format!("the one at port {port}"))).or_else(|| {
                    let by = format!("none has port {port}; the first for {scheme}");
                    by_scheme().map(|found| (found, by))
                })
            }
            (None, None) => None,
        };
        let found = found.or_else(|| all.first().map(|first| (first, "the first".to_owned())));
        let (listener, by) = found.ok_or("there is no listener")?;
        let tls = listener.plan.tls.is_some();
        let note = match written.origin {
            Some((true, _)) if !tls => Some("it speaks no TLS: no https gets through".to_owned()),
            Some((false, _)) if tls => Some("it speaks TLS only: no http gets through".to_owned()),
            _ => None,
        };
        let (name, bind) = (listener.plan.name.clone(), listener.plan.bind.to_string());
        Ok((listener, ListenerView { name, bind, tls, by, note }))
    }
}

impl<'a> Url<'a> {
    fn parse(text: &'a str) -> Result<Self, String> {
        let (scheme, rest) = text.split_once("://").unwrap_or(("http", text));
        let is_tls = match scheme.to_ascii_lowercase().as_str() {
            "http" => false,
            "https" => true,
            _ => return Err(format!("URL `{text}`: the scheme is http or https")),
        };
        let end = rest.find(['/', '?']).unwrap_or(rest.len());
        let (authority, target) = rest.split_at(end);
        if authority.contains('@') {
            return Err("URL: leave out who asks; write -H 'Authorization: …'".to_owned());
        }
        let colon = authority.rfind(':').filter(|&at| !authority[at..].contains(']'));
        let (host, port) = authority.split_at(colon.unwrap_or(authority.len()));
        let port = match port.trim_start_matches(':') {
            "" => None,
            digits => Some(digits.parse().map_err(|_| format!("URL: `{digits}` is no port"))?),
        };
        if host.is_empty() {
            return Err(format!("URL `{text}`: it has no host"));
        }
        let slash = if target.starts_with('/') { "" } else { "/" };
        Ok(Self { is_tls, host, port, target: format!("{slash}{target}") })
    }

    fn default_port(&self) -> u16 {
        if self.is_tls { 443 } else { 80 }
    }

    fn port(&self) -> u16 {
        self.port.unwrap_or_else(|| self.default_port())
    }

    /// As clients write it into Host.
    fn authority(&self) -> String {
        match self.port {
            Some(port) if port != self.default_port() => format!("{}:{port}", self.host),
            _ => self.host.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(url: &str, headers: &[&str]) -> Result<String, String> {
        let headers = headers.iter().map(ToString::to_string).collect();
        let asked = Asked { url: url.to_owned(), headers, ..Asked::default() };
        asked.write().map(|written| String::from_utf8(written.head).unwrap())
    }

    #[test]
    fn a_question_becomes_what_curl_sends() {
        for (url, headers, head) in [
            ("http://a.test", &[][..], "GET / HTTP/1.1\r\nHost: a.test\r\n\r\n"),
            ("a.test/x?y#z", &[], "GET /x?y HTTP/1.1\r\nHost: a.test\r\n\r\n"),
            ("HTTPS://a.test:443?y", &[], "GET /?y HTTP/1.1\r\nHost: a.test\r\n\r\n"),
            ("https://[::1]:80/", &[], "GET / HTTP/1.1\r\nHost: [::1]:80\r\n\r\n"),
            ("/p", &["host: b"], "GET /p HTTP/1.1\r\nhost: b\r\n\r\n"),
            ("http://a/", &["Host: b", "X-A:1"], "GET / HTTP/1.1\r\nHost: b\r\nX-A: 1\r\n\r\n"),
            ("http://a/", &["Host:", "X-B;", "X-C:"], "GET / HTTP/1.1\r\nX-B: \r\n\r\n"),
        ] {
            assert_eq!(written(url, headers), Ok(head.to_owned()), "{url} {headers:?}");
        }
    }

    #[test]
    fn what_cannot_be_sent_is_told() {
        for (url, headers, says) in [
            ("ftp://a/", &[][..], "scheme"),
            ("http:///x", &[], "no host"),
            ("http://a:b/", &[], "`b` is no port"),
            ("http://u:p@a/", &[], "Authorization"),
            ("/a\r\nX: y", &[], "line break"),
            ("/", &["X: a\nY: b"], "line break"),
            ("/", &["nonsense"], "Name: value"),
        ] {
            let why = written(url, headers).unwrap_err();
            assert!(why.contains(says), "{url}: {why}");
        }
    }
}
