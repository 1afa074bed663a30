//! Who may change something. Looking is free for all who can connect, but for web pages from
//! elsewhere.
//!
//! A Unix-domain socket has its file's permissions. Over TCP a token must be shown; without one
//! configured, only this machine is let in. Web pages are let in nowhere: a browser that has one
//! open can reach what its user can, on this machine too, and so could the page (cross-site
//! request forgery; and DNS rebinding, where the page's own name is made to lead here).

use std::net::IpAddr;

use crate::config::plan::AdminToken;

/// What is known of a request. Fields as they came; absent: `None`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Knock<'a> {
    /// Who asks; `None`: somebody on a Unix-domain socket.
    pub(super) peer: Option<IpAddr>,
    pub(super) host: &'a [u8],
    pub(super) origin: Option<&'a [u8]>,
    /// `Sec-Fetch-Site`.
    pub(super) fetch_site: Option<&'a [u8]>,
    pub(super) authorization: Option<&'a [u8]>,
    pub(super) content_type: Option<&'a [u8]>,
    pub(super) has_body: bool,
    /// One of these fields is there twice: which one counts is a matter of opinion.
    pub(super) is_ambiguous: bool,
    /// So many wrong tokens have come lately that no more are looked at.
    pub(super) is_locked: bool,
}

/// Why it is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// It says twice what must be said once.
    Ambiguous,
    /// A page that came from elsewhere has sent it.
    OtherSite,
    /// It is meant for another name than this machine has.
    OtherHost,
    /// It comes from another machine, and no token is configured.
    NoTokenConfigured,
    /// It shows no token.
    NoToken,
    /// It shows another token.
    WrongToken,
    /// Too many have shown another token.
    Locked,
    /// It has a body that is not said to be JSON, or is said to be something else.
    NotJson,
}

/// Whether a POST that changes nothing may be answered.
pub(super) fn decide_look(knock: &Knock<'_>) -> Result<(), Refusal> {
    only_from_here(knock)?;
    decide_read(knock)
}

/// Whether what a GET asks for may be shown. A browser lets no page read what another site has
/// answered, and so a link to here may come from anywhere; but the page may be of the site that
/// the browser takes this to be.
pub(super) fn decide_read(knock: &Knock<'_>) -> Result<(), Refusal> {
    let may_be_a_page = match knock.peer {
        Some(peer) => peer.to_canonical().is_loopback(),
        None => is_browser(knock),
    };
    // A name without a dot is given by whoever runs this network, not by a page's owner.
    if may_be_a_page && knock.host.contains(&b'.') { only_own_name(knock) } else { Ok(()) }
}

/// Whether a request may change something, with this token configured.
pub(super) fn decide(knock: &Knock<'_>, token: Option<&AdminToken>) -> Result<(), Refusal> {
    only_from_here(knock)?;
    match (knock.peer, token) {
        // Programs say whatever name they like; a browser says that of the page it has open.
        (None, _) if is_browser(knock) => only_own_name(knock)?,
        (None, _) => {}
        (Some(peer), None) if peer.to_canonical().is_loopback() => only_own_name(knock)?,
        (Some(_), None) => return Err(Refusal::NoTokenConfigured),
        (Some(_), Some(token)) => {
            let offered = knock.authorization.and_then(bearer).ok_or(Refusal::NoToken)?;
            // Who has the right one is not held up by others who guess.
            if !token.is(offered) {
                return Err(if knock.is_locked { Refusal::Locked } else { Refusal::WrongToken });
            }
        }
    }
    // A form without fields has no body either, but says what it is. What says nothing is no form.
    let is_json = knock.content_type.map_or(!knock.has_body, is_json);
    if is_json { Ok(()) } else { Err(Refusal::NotJson) }
}

fn is_browser(knock: &Knock<'_>) -> bool {
    knock.origin.is_some() || knock.fetch_site.is_some()
}

/// Not for a page from elsewhere.
fn only_from_here(knock: &Knock<'_>) -> Result<(), Refusal> {
    if knock.is_ambiguous {
        return Err(Refusal::Ambiguous);
    }
    if is_from_here(knock) { Ok(()) } else { Err(Refusal::OtherSite) }
}

/// Whether no browser says that it is for a page from elsewhere.
fn is_from_here(knock: &Knock<'_>) -> bool {
    let same_host = |origin: &[u8]| {
        let rest = [&b"http://"[..], b"https://"].iter().find_map(|s| origin.strip_prefix(*s));
        rest.is_some_and(|host| !host.is_empty() && host.eq_ignore_ascii_case(knock.host))
    };
    let same_site = |site: &[u8]| site == b"same-origin" || site == b"none";
    knock.origin.is_none_or(same_host) && knock.fetch_site.is_none_or(same_site)
}

/// Another name may lead here without being ours.
fn only_own_name(knock: &Knock<'_>) -> Result<(), Refusal> {
    let own = std::str::from_utf8(knock.host).is_ok_and(is_own_name);
    if own { Ok(()) } else { Err(Refusal::OtherHost) }
}

/// `localhost` or an address, with any port or none.
fn is_own_name(host: &str) -> bool {
    let is_port = |port: &str| port.bytes().all(|b| b.is_ascii_digit());
    if let Some((address, rest)) = host.strip_prefix('[').and_then(|host| host.split_once(']')) {
        let after = rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port);
        return after && address.parse::<std::net::Ipv6Addr>().is_ok();
    }
    let name = match host.split_once(':') {
        Some((name, port)) if is_port(port) => name,
        Some(_) => return false,
        None => host,
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<std::net::Ipv4Addr>().is_ok()
}

/// The token in `Bearer TOKEN`.
fn bearer(authorization: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = authorization.split_at_checked(b"Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| rest.trim_ascii())
}

fn is_json(content_type: &[u8]) -> bool {
    let kind = content_type.split(|&b| b == b';').next().unwrap_or_default();
    kind.trim_ascii().eq_ignore_ascii_case(b"application/json")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "0123456789abcdef";

    fn token() -> AdminToken {
        AdminToken::new("/token".into(), SECRET.to_owned())
    }

    fn from(peer: &str) -> Knock<'static> {
        let peer = (peer != "unix").then(|| peer.parse().unwrap());
        Knock { peer, host: b"127.0.0.1:9090", ..Knock::default() }
    }

    #[test]
    fn without_a_token_only_this_machine_may() {
        for (peer, want) in [
            ("unix", Ok(())),
            ("127.0.0.1", Ok(())),
            ("127.9.9.9", Ok(())),
            ("::1", Ok(())),
            ("::ffff:127.0.0.1", Ok(())),
            ("10.0.0.1", Err(Refusal::NoTokenConfigured)),
            ("0.0.0.0", Err(Refusal::NoTokenConfigured)),
            ("::", Err(Refusal::NoTokenConfigured)),
            ("::ffff:10.0.0.1", Err(Refusal::NoTokenConfigured)),
            ("fe80::1", Err(Refusal::NoTokenConfigured)),
        ] {
            assert_eq!(decide(&from(peer), None), want, "{peer}");
            let shown = Knock { authorization: Some(b"Bearer 0123456789abcdef"), ..from(peer) };
            assert_eq!(decide(&shown, None), want, "{peer}: a token that nobody has configured");
        }
    }

    #[test]
    fn with_a_token_all_over_tcp_must_show_it() {
        for (shown, want) in [
            (None, Err(Refusal::NoToken)),
            (Some(""), Err(Refusal::NoToken)),
            (Some("Bearer"), Err(Refusal::NoToken)),
            (Some("Basic 0123456789abcdef"), Err(Refusal::NoToken)),
            (Some("0123456789abcdef"), Err(Refusal::NoToken)),
            (Some("Bearer "), Err(Refusal::WrongToken)),
            (Some("Bearer 0123456789abcde"), Err(Refusal::WrongToken)),
            (Some("Bearer 0123456789abcdefg"), Err(Refusal::WrongToken)),
            (Some("Bearer 0123456789ABCDEF"), Err(Refusal::WrongToken)),
            (Some("Bearer 0123456789abcdef"), Ok(())),
            (Some("bearer  0123456789abcdef "), Ok(())),
        ] {
            for peer in ["127.0.0.1", "::1", "10.0.0.1", "unix"] {
                let authorization = shown.map(str::as_bytes);
                // Any name: that is for those who need no token.
                let knock = Knock { authorization, host: b"proxy.example", ..from(peer) };
                let want = if peer == "unix" { Ok(()) } else { want };
                assert_eq!(decide(&knock, Some(&token())), want, "{peer} {shown:?}");
                let locked = Knock { is_locked: true, ..knock };
                let tried = matches!(want, Err(Refusal::WrongToken));
                let want = if peer != "unix" && tried { Err(Refusal::Locked) } else { want };
                assert_eq!(decide(&locked, Some(&token())), want, "{peer} {shown:?}, locked");
            }
        }
        let unread = AdminToken::new("/token".into(), String::new());
        let empty = Knock { authorization: Some(b"Bearer "), ..from("127.0.0.1") };
        assert_eq!(decide(&empty, Some(&unread)), Err(Refusal::WrongToken));
    }

    #[test]
    fn pages_from_elsewhere_may_not_even_with_the_token() {
        let other = Err(Refusal::OtherSite);
        for (host, origin, site, want) in [
            ("localhost:9090", Some("http://localhost:9090"), Some("same-origin"), Ok(())),
            ("localhost:9090", Some("https://LOCALHOST:9090"), None, Ok(())),
            ("localhost:9090", None, Some("none"), Ok(())),
            ("localhost:9090", Some("http://localhost:8080"), None, other),
            ("localhost:9090", Some("http://localhost"), None, other),
            ("localhost:9090", Some("http://evil.example"), None, other),
            ("localhost:9090", Some("http://localhost:9090.evil.example"), None, other),
            ("localhost:9090", Some("null"), None, other),
            ("localhost:9090", Some(""), None, other),
            ("localhost:9090", Some("file://localhost:9090"), None, other),
            ("", Some("http://"), None, other),
            ("localhost:9090", None, Some("cross-site"), other),
            ("localhost:9090", None, Some("same-site"), other),
            ("localhost:9090", None, Some(""), other),
            ("localhost:9090", Some("http://localhost:9090"), Some("cross-site"), other),
        ] {
            let (origin, fetch_site) = (origin.map(str::as_bytes), site.map(str::as_bytes));
            for peer in ["127.0.0.1", "unix"] {
                let knock = Knock { host: host.as_bytes(), origin, fetch_site, ..from(peer) };
                assert_eq!(decide(&knock, None), want, "{peer} {host} {origin:?} {site:?}");
                let shown = Knock { authorization: Some(b"Bearer 0123456789abcdef"), ..knock };
                assert_eq!(decide(&shown, Some(&token())), want, "{host} {origin:?} {site:?}");
            }
        }
    }

    #[test]
    fn a_name_that_is_made_to_lead_here_is_none_of_ours() {
        for (host, is_own) in [
            ("localhost", true),
            ("LocalHost:1", true),
            ("127.0.0.1", true),
            ("127.0.0.1:9090", true),
            ("192.0.2.7:9090", true),
            ("[::1]", true),
            ("[::1]:9090", true),
            ("", false),
            (":9090", false),
            ("evil.example", false),
            ("evil.example:9090", false),
            ("localhost.evil.example", false),
            ("127.0.0.1.evil.example", false),
            ("localhost.", false),
            ("localhost:9090x", false),
            ("localhost:1:2", false),
            ("::1", false),
            ("[evil.example]", false),
            ("[::1]evil.example", false),
            ("[::1]:x", false),
            ("\u{fffd}", false),
        ] {
            let knock = Knock { host: host.as_bytes(), ..from("127.0.0.1") };
            let want = if is_own { Ok(()) } else { Err(Refusal::OtherHost) };
            assert_eq!(decide(&knock, None), want, "{host}");
            let unix = Knock { peer: None, ..knock };
            assert_eq!(decide(&unix, None), Ok(()), "{host}: curl --unix-socket says any");
            let page = Knock { fetch_site: Some(b"same-origin"), ..unix };
            assert_eq!(decide(&page, None), want, "{host}: a browser does not");
        }
    }

    #[test]
    fn what_is_said_twice_is_not_weighed() {
        for peer in ["127.0.0.1", "unix", "10.0.0.1"] {
            let knock = Knock {
                authorization: Some(b"Bearer 0123456789abcdef"),
                is_ambiguous: true,
                ..from(peer)
            };
            assert_eq!(decide(&knock, Some(&token())), Err(Refusal::Ambiguous), "{peer}");
            assert_eq!(decide(&knock, None), Err(Refusal::Ambiguous), "{peer}");
            assert_eq!(decide_look(&knock), Err(Refusal::Ambiguous), "{peer}");
        }
    }

    #[test]
    fn to_look_takes_no_token_but_no_page_from_elsewhere() {
        for peer in ["127.0.0.1", "unix", "10.0.0.1"] {
            let knock = Knock { has_body: true, ..from(peer) };
            assert_eq!(decide_look(&knock), Ok(()), "{peer}");
            let page = Knock { origin: Some(b"http://b.test"), ..knock };
            assert_eq!(decide_look(&page), Err(Refusal::OtherSite), "{peer}");
            // A link from elsewhere may be followed.
            let link = Knock { fetch_site: Some(b"cross-site"), ..from(peer) };
            assert_eq!(decide_read(&link), Ok(()), "{peer}");
        }
    }

    /// Nor does a token help here: it could be guessed without end.
    #[test]
    fn a_page_whose_name_is_made_to_lead_here_sees_nothing() {
        for (peer, want) in
            [("127.0.0.1", Err(Refusal::OtherHost)), ("unix", Ok(())), ("10.0.0.1", Ok(()))]
        {
            let knock = Knock { host: b"evil.example:9090", ..from(peer) };
            assert_eq!(decide_read(&Knock { host: b"proxy:9090", ..knock }), Ok(()), "{peer}");
            for decide in [decide_read, decide_look] {
                assert_eq!(decide(&knock), want, "{peer}");
            }
        }
        let browser =
            Knock { fetch_site: Some(b"same-origin"), host: b"evil.example", ..from("unix") };
        assert_eq!(decide_read(&browser), Err(Refusal::OtherHost));
    }

    #[test]
    fn a_body_must_be_said_to_be_json() {
        for (content_type, want) in [
            (None, Err(Refusal::NotJson)),
            (Some("text/plain"), Err(Refusal::NotJson)),
            (Some("application/x-www-form-urlencoded"), Err(Refusal::NotJson)),
            (Some("text/plain; application/json"), Err(Refusal::NotJson)),
            (Some("application/jsonp"), Err(Refusal::NotJson)),
            (Some("application/json"), Ok(())),
            (Some("Application/JSON ; charset=utf-8"), Ok(())),
        ] {
            let content_type = content_type.map(str::as_bytes);
            for peer in ["127.0.0.1", "unix"] {
                let knock = Knock { content_type, has_body: true, ..from(peer) };
                assert_eq!(decide(&knock, None), want, "{content_type:?}");
                // An order without one: but no form, which a page may send to anybody.
                let want = if content_type.is_none() { Ok(()) } else { want };
                let empty = Knock { has_body: false, ..knock };
                assert_eq!(decide(&empty, None), want, "{content_type:?}, empty");
            }
        }
    }
}
