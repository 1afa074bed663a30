//! The field section of a message, as ranges of the buffer it was read into, and what a
//! proxy must know of each field: which end at this hop (RFC 9110 §7.6.1), which frame the
//! message, which we write ourselves.

/// Names that this proxy acts on. All others are [`Name::Other`] and pass through unseen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Name {
    /// Any other field.
    Other,
    /// `Connection`
    Connection,
    /// `Content-Length`
    ContentLength,
    /// `Transfer-Encoding`
    TransferEncoding,
    /// `Host`
    Host,
    /// `Keep-Alive`
    KeepAlive,
    /// `Proxy-Connection`
    ProxyConnection,
    /// `TE`
    Te,
    /// `Trailer`
    Trailer,
    /// `Upgrade`
    Upgrade,
    /// `Expect`
    Expect,
    /// `X-Forwarded-For`
    XForwardedFor,
    /// `X-Forwarded-Proto`
    XForwardedProto,
    /// `X-Forwarded-Host`
    XForwardedHost,
    /// `X-Real-IP`
    XRealIp,
    /// `Forwarded`
    Forwarded,
    /// `X-Request-ID`
    XRequestId,
    /// `Date`
    Date,
    /// `traceparent`
    Traceparent,
    /// `tracestate`
    Tracestate,
    /// `X-L7rp-Decision`
    XL7rpDecision,
}

impl Name {
    /// The name with these octets; case does not matter.
    #[inline]
    pub fn of(octets: &[u8]) -> Self {
        let first = octets.first().map_or(0, |b| b | 0x20);
        let (is_it, name) = match (octets.len(), first) {
            (2, _) => (is(octets, b"te"), Self::Te),
            (4, b'h') => (is(octets, b"host"), Self::Host),
            (4, b'd') => (is(octets, b"date"), Self::Date),
            (6, _) => (is(octets, b"expect"), Self::Expect),
            (7, b'u') => (is(octets, b"upgrade"), Self::Upgrade),
            (7, b't') => (is(octets, b"trailer"), Self::Trailer),
            (9, b'f') => (is(octets, b"forwarded"), Self::Forwarded),
            (9, b'x') => (is(octets, b"x-real-ip"), Self::XRealIp),
            (10, b'c') => (is(octets, b"connection"), Self::Connection),
            (10, b'k') => (is(octets, b"keep-alive"), Self::KeepAlive),
            (10, b't') => (is(octets, b"tracestate"), Self::Tracestate),
            (11, _) => (is(octets, b"traceparent"), Self::Traceparent),
            (12, b'x') => (is(octets, b"x-request-id"), Self::XRequestId),
            (14, b'c') => (is(octets, b"content-length"), Self::ContentLength),
            (15, b'x') if octets[2] | 0x20 == b'f' => {
                (is(octets, b"x-forwarded-for"), Self::XForwardedFor)
            }
            (15, b'x') => (is(octets, b"x-l7rp-decision"), Self::XL7rpDecision),
            (16, b'p') => (is(octets, b"proxy-connection"), Self::ProxyConnection),
            (16, b'x') => (is(octets, b"x-forwarded-host"), Self::XForwardedHost),
            (17, b't') => (is(octets, b"transfer-encoding"), Self::TransferEncoding),
            (17, b'x') => (is(octets, b"x-forwarded-proto"), Self::XForwardedProto),
            _ => return Self::Other,
        };
        if is_it { name } else { Self::Other }
    }

    /// Whether the field belongs to one connection and must not be forwarded
    /// (RFC 9110 §7.6.1). `Transfer-Encoding` is among them: framing is written anew.
    /// `Trailer` is not: trailers are passed on, and so is their announcement (§6.6.2).
    #[inline]
    pub fn is_hop_by_hop(self) -> bool {
        matches!(
            self,
            Self::Connection
                | Self::KeepAlive
                | Self::ProxyConnection
                | Self::Te
                | Self::TransferEncoding
                | Self::Upgrade
        )
    }

    /// Whether `Connection` may name the field to have it dropped. A client must not be
    /// able to take away what frames or addresses the message, or what we say of the client.
    #[inline]
    pub fn may_be_named_by_connection(self) -> bool {
        matches!(
            self,
            Self::Other | Self::Expect | Self::Date | Self::Traceparent | Self::Tracestate
        )
    }
}

/// A range of the head's buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// Offset of the first octet.
    pub at: u32,
    /// Number of octets.
    pub len: u32,
}

impl Span {
    /// The octets in `base`, the buffer that the head was parsed from. Empty if the span
    /// does not lie in it.
    #[inline]
    pub fn of(self, base: &[u8]) -> &[u8] {
        let at = self.at as usize;
        base.get(at..at + self.len as usize).unwrap_or_default()
    }

    /// Offset after the last octet.
    #[inline]
    pub fn end(self) -> usize {
        self.at as usize + self.len as usize
    }
}

/// One field line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Name as sent.
    pub name: Span,
    /// Value without the white space around it.
    pub value: Span,
    /// What the name means to us.
    pub id: Name,
}

/// Whether these octets are `lower`, whatever their case. Of a length that is known, they are all
/// compared at once, as it takes less than to stop at the first that differs.
#[inline]
pub(crate) fn is<const N: usize>(octets: &[u8], lower: &[u8; N]) -> bool {
    octets.as_array::<N>().is_some_and(|octets| {
        let differ = |(a, b): (&u8, &u8)| a.to_ascii_lowercase() ^ b;
        octets.iter().zip(lower).map(differ).fold(0, |all, one| all | one) == 0
    })
}

/// Whether `list` (comma-separated, RFC 9110 §5.6.1) has this member; case does not matter.
pub fn list_has(list: &[u8], member: &[u8]) -> bool {
    list.split(|&b| b == b',').any(|item| item.trim_ascii().eq_ignore_ascii_case(member))
}

/// Whether a received `X-Request-ID` is kept: 1 to 128 visible ASCII characters.
pub fn request_id_is_well_formed(value: &[u8]) -> bool {
    (1..=128).contains(&value.len()) && value.iter().all(u8::is_ascii_graphic)
}

/// Whether an octet may stand in a token (RFC 9110 §5.6.2).
pub fn is_token_octet(octet: u8) -> bool {
    octet.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&octet)
}

/// Whether this is a token (RFC 9110 §5.6.2): a method, the name of a field or of a protocol.
pub fn is_token(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(|&octet| is_token_octet(octet))
}

/// The value of the first field with this name, whose case does not matter. `buf`: what the head
/// was parsed from.
pub fn value<'a>(fields: &[Field], buf: &'a [u8], name: &str) -> Option<&'a [u8]> {
    let is_named = |field: &&Field| field.name.of(buf).eq_ignore_ascii_case(name.as_bytes());
    fields.iter().find(is_named).map(|field| field.value.of(buf))
}

/// The value of the cookie with this name in a `Cookie` field value (RFC 6265 §5.4).
pub fn cookie<'a>(value: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    value.split(|&b| b == b';').find_map(|pair| {
        let pair = pair.trim_ascii();
        let at = memchr::memchr(b'=', pair)?;
        (&pair[..at] == name).then(|| &pair[at + 1..])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_known_in_any_case() {
        for (text, name) in [
            ("TE", Name::Te),
            ("hOST", Name::Host),
            ("Date", Name::Date),
            ("expect", Name::Expect),
            ("UPGRADE", Name::Upgrade),
            ("trailer", Name::Trailer),
            ("Forwarded", Name::Forwarded),
            ("X-Real-IP", Name::XRealIp),
            ("Connection", Name::Connection),
            ("Keep-Alive", Name::KeepAlive),
            ("x-request-id", Name::XRequestId),
            ("Content-length", Name::ContentLength),
            ("X-Forwarded-For", Name::XForwardedFor),
            ("Proxy-Connection", Name::ProxyConnection),
            ("x-forwarded-host", Name::XForwardedHost),
            ("transfer-encoding", Name::TransferEncoding),
            ("X-Forwarded-Proto", Name::XForwardedProto),
            ("x-forwarded_for", Name::Other),
            ("", Name::Other),
            ("hosts", Name::Other),
        ] {
            assert_eq!(Name::of(text.as_bytes()), name, "{text}");
        }
    }

    #[test]
    fn a_name_with_another_octet_is_another() {
        for name in
            ["te", "host", "x-real-ip", "x-request-id", "x-l7rp-decision", "x-forwarded-proto"]
        {
            let known = Name::of(name.as_bytes());
            assert_ne!(known, Name::Other, "{name}");
            assert_eq!(Name::of(name.to_ascii_uppercase().as_bytes()), known, "{name}");
            for at in 0..name.len() {
                for octet in 0..=u8::MAX {
                    let mut other = name.as_bytes().to_vec();
                    other[at] = octet;
                    let same = octet.to_ascii_lowercase() == name.as_bytes()[at];
                    assert_eq!(Name::of(&other) == known, same, "{name} {at} {octet}");
                }
            }
        }
    }

    #[test]
    fn list_members() {
        assert!(list_has(b"close", b"close"));
        assert!(list_has(b" Upgrade ,\tCLOSE", b"close"));
        assert!(!list_has(b"closed, not-close", b"close"));
        assert!(!list_has(b"", b"close"));
    }

    #[test]
    fn request_ids() {
        assert!(request_id_is_well_formed(b"abc-123"));
        assert!(!request_id_is_well_formed(b""));
        assert!(!request_id_is_well_formed(b"a b"));
        assert!(!request_id_is_well_formed("é".as_bytes()));
        assert!(request_id_is_well_formed(&[b'x'; 128]));
        assert!(!request_id_is_well_formed(&[b'x'; 129]));
    }

    #[test]
    fn cookies() {
        assert_eq!(cookie(b"a=1; session_id=xyz; b=2", b"session_id"), Some(&b"xyz"[..]));
        assert_eq!(cookie(b"session_id=", b"session_id"), Some(&b""[..]));
        assert_eq!(cookie(b"my_session_id=1; flag", b"session_id"), None);
    }
}
