//! Every way an exchange can fail, and one table of what each means.
//!
//! The table is a `match` without a `_` arm: a new variant does not compile until someone
//! has decided its status, who is to blame, whether another try makes sense, and its names.

/// Who caused a failure. Breakers and health listen only to [`Blame::Upstream`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The client: its request, its absence, its slowness.
    Client,
    /// The upstream that was chosen.
    Upstream,
    /// This proxy's configuration or its own limits and shortages.
    Proxy,
}

/// What may be known about the request's effect when a try failed (RFC 9110 §9.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Again {
    /// Nothing was sent: any request may be tried on another upstream.
    Unsent,
    /// The upstream says that it did nothing with it: any request that can be sent again may be
    /// tried on another.
    Unprocessed,
    /// The upstream may have seen it: only what is safe to repeat.
    IfRepeatable,
    /// No other try can help.
    No,
}

/// Why a message was refused. Each is a `reason` in logs and a `details` in `Proxy-Status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Malformed {
    /// Request or status line.
    StartLine,
    /// Request target.
    Target,
    /// Name of a field.
    FieldName,
    /// Value of a field.
    FieldValue,
    /// A line not ended by CR LF.
    LineEnding,
    /// Host field absent.
    HostMissing,
    /// Several Host fields.
    HostRepeated,
    /// Host field or authority that is none.
    HostInvalid,
    /// Content-Length that is no number, is repeated or is a list.
    ContentLength,
    /// Transfer-Encoding other than exactly `chunked`, or with HTTP/1.0.
    TransferEncoding,
    /// Content-Length beside Transfer-Encoding (RFC 9112 §6.1).
    LengthAndChunked,
    /// Chunk size, extension or ending.
    Chunk,
    /// Trailer section, or a field in it that must not be there.
    Trailer,
    /// Octets behind an offer to upgrade, before it was accepted.
    EarlyUpgrade,
    /// Status code outside 100–599.
    StatusCode,
    /// 101 that nobody asked for, or a body on an interim response.
    Interim,
}

impl Malformed {
    /// The name used in logs, metrics and `Proxy-Status` details.
    pub fn name(self) -> &'static str {
        match self {
            Self::StartLine => "malformed_start_line",
            Self::Target => "malformed_target",
            Self::FieldName => "malformed_field_name",
            Self::FieldValue => "malformed_field_value",
            Self::LineEnding => "malformed_line_ending",
            Self::HostMissing => "host_missing",
            Self::HostRepeated => "host_repeated",
            Self::HostInvalid => "host_invalid",
            Self::ContentLength => "bad_content_length",
            Self::TransferEncoding => "bad_transfer_encoding",
            Self::LengthAndChunked => "content_length_with_transfer_encoding",
            Self::Chunk => "bad_chunk",
            Self::Trailer => "bad_trailer",
            Self::EarlyUpgrade => "early_upgrade_data",
            Self::StatusCode => "bad_status_code",
            Self::Interim => "bad_interim_response",
        }
    }
}

/// What was shed by, when something is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The whole process.
    Process,
    /// One listener.
    Listener,
    /// One pool.
    Pool,
    /// Every upstream of the pool is at its own limit.
    Upstream,
    /// Connections of a listener.
    Connections,
}

impl Scope {
    /// Every scope, in the order of [`Scope::index`].
    pub const ALL: [Self; 5] =
        [Self::Process, Self::Listener, Self::Pool, Self::Upstream, Self::Connections];

    /// Position in [`Scope::ALL`].
    pub fn index(self) -> usize {
        match self {
            Self::Process => 0,
            Self::Listener => 1,
            Self::Pool => 2,
            Self::Upstream => 3,
            Self::Connections => 4,
        }
    }

    /// The label in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Process => "process",
            Self::Listener => "listener",
            Self::Pool => "pool",
            Self::Upstream => "upstream",
            Self::Connections => "connections",
        }
    }
}

/// Every way an exchange can fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The request breaks the grammar or its framing is in doubt.
    BadRequest(Malformed),
    /// Request target over the limit.
    TargetTooLong,
    /// Request head over the limit of octets.
    HeadTooLarge,
    /// More fields than allowed.
    TooManyFields,
    /// Not HTTP/1.0 or HTTP/1.1.
    VersionUnsupported,
    /// CONNECT or TRACE.
    MethodRefused,
    /// An `Expect` other than `100-continue`.
    ExpectationUnknown,
    /// The host is not one of the certificate that the client was shown (RFC 9110 §15.5.20).
    Misdirected,
    /// Request body over the limit.
    BodyTooLarge,
    /// The head was not complete in time.
    HeadTimeout,
    /// The request body made no progress in time.
    BodyTimeout,
    /// The request body came more slowly than the listener allows.
    BodyTooSlow,
    /// Neither side of a tunnel had anything to say for too long.
    TunnelIdle,
    /// The client left.
    ClientGone,
    /// The client does not take the response.
    ClientStalled,
    /// No route matches.
    NoRoute,
    /// The client's address is not let in.
    Forbidden,
    /// The client, or everybody together, has asked too often.
    RateLimited {
        /// Seconds until it may ask again.
        wait: u32,
    },
    /// Something is full.
    Capacity(Scope),
    /// No upstream is eligible.
    NoUpstream,
    /// The breakers of all that are healthy are open.
    BreakerOpen {
        /// Seconds until the first of them lets a request through.
        wait: u32,
    },
    /// The upstream's name has no address.
    Unresolved,
    /// The upstream refused the connection.
    ConnectRefused,
    /// The connection was not established in time.
    ConnectTimeout,
    /// The connection failed otherwise.
    ConnectFailed,
    /// The upstream's certificate was refused.
    TlsCertificate,
    /// The TLS handshake with the upstream failed otherwise.
    TlsProtocol,
    /// Descriptors, ports or memory of this machine ran out.
    LocalShortage,
    /// The upstream closed or reset before a whole response head.
    UpstreamClosed,
    /// The upstream has said that it did nothing with the request (RFC 9113 §8.7).
    StreamRefused {
        /// It takes no more requests on that connection.
        gone: bool,
    },
    /// No response head in time.
    ResponseTimeout,
    /// The route's total time is over.
    TotalTimeout,
    /// The time is over that the client itself has set.
    DeadlineExceeded,
    /// The response breaks the grammar or its framing is in doubt.
    BadResponse(Malformed),
    /// The response head is over the limit.
    ResponseHeadTooLarge,
    /// The upstream closed in the middle of the body.
    ResponseTruncated,
    /// The upstream stopped sending in the middle of the body.
    ResponseStalled,
    /// The grace of a shutdown is over.
    Draining,
    /// A fault of ours.
    Internal,
}

/// A row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meaning {
    /// Status of the response, if one can still be sent. 499: none is sent, only logged.
    pub status: u16,
    /// Who caused it.
    pub blame: Blame,
    /// Whether another try makes sense.
    pub again: Again,
    /// Error type of `Proxy-Status` (RFC 9209 §2.3).
    pub proxy_status: &'static str,
    /// `reason` in log and metrics, distinct for each cause.
    pub reason: &'static str,
    /// One line for the person who reads the response.
    pub text: &'static str,
}

const fn row(
    status: u16,
    blame: Blame,
    again: Again,
    proxy_status: &'static str,
    reason: &'static str,
    text: &'static str,
) -> Meaning {
    Meaning { status, blame, again, proxy_status, reason, text }
}

impl Failure {
    /// What this failure means.
    #[rustfmt::skip] // a table, a row a line
    pub fn meaning(self) -> Meaning {
        use Again::{IfRepeatable, No, Unprocessed, Unsent};
        use Blame::{Client, Proxy, Upstream};
        match self {
            Self::BadRequest(why) => row(400, Client, No, "http_request_error", why.name(), "bad request"),
            Self::TargetTooLong => row(414, Client, No, "http_request_error", "target_too_long", "request target too long"),
            Self::HeadTooLarge => row(431, Client, No, "http_request_error", "head_too_large", "request header section too large"),
            Self::TooManyFields => row(431, Client, No, "http_request_error", "too_many_fields", "too many request header fields"),
            Self::VersionUnsupported => row(505, Client, No, "http_request_error", "version_unsupported", "HTTP version not supported"),
            Self::MethodRefused => row(405, Client, No, "http_request_denied", "method_refused", "method not allowed"),
            Self::ExpectationUnknown => row(417, Client, No, "http_request_error", "expectation_unknown", "expectation cannot be met"),
            Self::Misdirected => row(421, Client, No, "http_request_error", "misdirected", "host does not belong to this connection's certificate"),
            Self::BodyTooLarge => row(413, Client, No, "http_request_error", "body_too_large", "request body too large"),
            Self::HeadTimeout => row(408, Client, No, "http_request_error", "head_timeout", "request header section not received in time"),
            Self::BodyTimeout => row(408, Client, No, "http_request_error", "body_timeout", "request body not received in time"),
            Self::BodyTooSlow => row(408, Client, No, "http_request_error", "body_too_slow", "request body received too slowly"),
            Self::TunnelIdle => row(408, Client, No, "connection_read_timeout", "tunnel_idle", "tunnel without traffic for too long"),
            Self::ClientGone => row(499, Client, No, "connection_terminated", "client_gone", "client closed the connection"),
            Self::ClientStalled => row(499, Client, No, "connection_write_timeout", "client_stalled", "client does not read the response"),
            Self::NoRoute => row(404, Client, No, "destination_not_found", "no_route", "no route for this request"),
            Self::Forbidden => row(403, Client, No, "http_request_denied", "forbidden", "not allowed from this address"),
            Self::RateLimited { .. } => row(429, Client, No, "http_request_denied", "rate_limited", "too many requests"),
            Self::Capacity(scope) => row(503, Proxy, No, "connection_limit_reached", match scope {
                Scope::Process => "capacity_process",
                Scope::Listener => "capacity_listener",
                Scope::Pool => "capacity_pool",
                Scope::Upstream => "capacity_upstream",
                Scope::Connections => "capacity_connections",
            }, "proxy capacity exhausted"),
            Self::NoUpstream => row(503, Proxy, No, "destination_unavailable", "no_upstream", "no upstream available"),
            Self::BreakerOpen { .. } => row(503, Proxy, No, "destination_unavailable", "breaker_open", "no upstream available: circuit breaker open"),
            Self::Unresolved => row(503, Proxy, Unsent, "dns_error", "unresolved", "upstream name not resolved"),
            Self::ConnectRefused => row(502, Upstream, Unsent, "connection_refused", "connect_refused", "upstream refused the connection"),
            Self::ConnectTimeout => row(504, Upstream, Unsent, "connection_timeout", "connect_timeout", "upstream connection not established in time"),
            Self::ConnectFailed => row(502, Upstream, Unsent, "destination_ip_unroutable", "connect_failed", "upstream connection failed"),
            Self::TlsCertificate => row(502, Upstream, Unsent, "tls_certificate_error", "tls_certificate", "upstream certificate not accepted"),
            Self::TlsProtocol => row(502, Upstream, Unsent, "tls_protocol_error", "tls_protocol", "TLS handshake with the upstream failed"),
            Self::LocalShortage => row(503, Proxy, No, "proxy_internal_error", "local_shortage", "proxy is out of a local resource"),
            Self::StreamRefused { .. } => row(503, Proxy, Unprocessed, "connection_terminated", "stream_refused", "upstream did not process the request"),
            Self::UpstreamClosed => row(502, Upstream, IfRepeatable, "connection_terminated", "upstream_closed", "upstream closed the connection without a response"),
            Self::ResponseTimeout => row(504, Upstream, IfRepeatable, "http_response_timeout", "response_timeout", "upstream did not respond in time"),
            Self::TotalTimeout => row(504, Upstream, No, "http_response_timeout", "total_timeout", "request took longer than the route allows"),
            Self::DeadlineExceeded => row(408, Client, No, "http_response_timeout", "deadline_exceeded", "the deadline that the request itself has set is over"),
            Self::BadResponse(why) => row(502, Upstream, IfRepeatable, "http_protocol_error", why.name(), "upstream sent an invalid response"),
            Self::ResponseHeadTooLarge => row(502, Upstream, IfRepeatable, "http_response_header_section_size", "response_head_too_large", "upstream response header section too large"),
            Self::ResponseTruncated => row(502, Upstream, No, "http_response_incomplete", "response_truncated", "upstream closed before the end of the response"),
            Self::ResponseStalled => row(504, Upstream, No, "connection_read_timeout", "response_stalled", "upstream stopped sending the response"),
            Self::Draining => row(503, Proxy, No, "proxy_internal_response", "draining", "proxy is shutting down"),
            Self::Internal => row(500, Proxy, No, "proxy_internal_error", "internal_error", "internal error"),
        }
    }

    /// Seconds after which the client may come again, where that can be said.
    pub fn retry_after(self) -> Option<u32> {
        match self {
            Self::RateLimited { wait } | Self::BreakerOpen { wait } => Some(wait),
            Self::Capacity(_)
            | Self::NoUpstream
            | Self::Unresolved
            | Self::LocalShortage
            | Self::Draining => Some(1),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: [Failure; 35] = [
        Failure::TargetTooLong,
        Failure::HeadTooLarge,
        Failure::TooManyFields,
        Failure::VersionUnsupported,
        Failure::MethodRefused,
        Failure::ExpectationUnknown,
        Failure::BodyTooLarge,
        Failure::Misdirected,
        Failure::HeadTimeout,
        Failure::BodyTimeout,
        Failure::BodyTooSlow,
        Failure::TunnelIdle,
        Failure::ClientGone,
        Failure::ClientStalled,
        Failure::NoRoute,
        Failure::Forbidden,
        Failure::RateLimited { wait: 1 },
        Failure::NoUpstream,
        Failure::BreakerOpen { wait: 1 },
        Failure::Unresolved,
        Failure::ConnectRefused,
        Failure::ConnectTimeout,
        Failure::ConnectFailed,
        Failure::TlsCertificate,
        Failure::TlsProtocol,
        Failure::LocalShortage,
        Failure::UpstreamClosed,
        Failure::StreamRefused { gone: false },
        Failure::ResponseTimeout,
        Failure::TotalTimeout,
        Failure::DeadlineExceeded,
        Failure::ResponseHeadTooLarge,
        Failure::ResponseTruncated,
        Failure::ResponseStalled,
        Failure::Draining,
    ];

    #[test]
    fn reasons_are_distinct() {
        let mut reasons: Vec<_> = PLAIN.iter().map(|f| f.meaning().reason).collect();
        reasons.extend(Scope::ALL.map(|s| Failure::Capacity(s).meaning().reason));
        let all = reasons.len();
        reasons.sort_unstable();
        reasons.dedup();
        assert_eq!(reasons.len(), all);
    }

    #[test]
    fn statuses_tell_who_is_to_blame() {
        for failure in PLAIN {
            let m = failure.meaning();
            match m.blame {
                // 505 is the one server error that a client causes.
                Blame::Client => {
                    assert!((400..500).contains(&m.status) || m.status == 505, "{failure:?}");
                }
                Blame::Upstream | Blame::Proxy => assert!(m.status >= 500, "{failure:?}"),
            }
        }
    }

    #[test]
    fn only_what_was_not_sent_may_always_move_on() {
        let unsent: Vec<_> =
            PLAIN.into_iter().filter(|f| f.meaning().again == Again::Unsent).collect();
        assert_eq!(
            unsent,
            [
                Failure::Unresolved,
                Failure::ConnectRefused,
                Failure::ConnectTimeout,
                Failure::ConnectFailed,
                Failure::TlsCertificate,
                Failure::TlsProtocol
            ]
        );
    }

    #[test]
    fn scopes_keep_their_index() {
        for (ix, scope) in Scope::ALL.into_iter().enumerate() {
            assert_eq!(scope.index(), ix);
        }
    }
}
