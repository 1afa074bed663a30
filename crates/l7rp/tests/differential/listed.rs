//! The differences that are known, and why they are right.

/// A proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Name(pub(crate) &'static str);

pub(crate) const NAMES: [Name; 3] = [Name("l7rp"), Name("nginx"), Name("haproxy")];

/// A difference to one or all of the others.
#[derive(Debug)]
pub(crate) struct Listed {
    /// `*`: any.
    proxy: &'static str,
    /// What it is in, as the view of a request calls it.
    aspects: &'static [&'static str],
    /// Empty: any.
    cases: &'static [&'static str],
    #[expect(dead_code, reason = "for people")]
    why: &'static str,
}

impl Listed {
    pub(crate) fn covers(&self, name: Name, case: &str, aspect: &str) -> bool {
        (self.proxy == "*" || self.proxy == name.0)
            && self.aspects.contains(&aspect)
            && (self.cases.is_empty() || self.cases.contains(&case))
    }
}

const fn listed(
    proxy: &'static str,
    aspects: &'static [&'static str],
    cases: &'static [&'static str],
    why: &'static str,
) -> Listed {
    Listed { proxy, aspects, cases, why }
}

/// What l7rp adds to every request.
const ADDED: &[&str] = &[
    "field x-forwarded-for",
    "field x-forwarded-proto",
    "field x-forwarded-host",
    "field x-real-ip",
    "field x-request-id",
];

pub(crate) const LISTED: &[Listed] = &[
    listed("*", ADDED, &[], "l7rp says who asks; the others do if they are configured to"),
    listed(
        "*",
        &["field forwarded"],
        &["b-048"],
        "what a client that is not trusted says about others on the way is not passed on",
    ),
    listed(
        "*",
        &["requests"],
        &["ex-003"],
        "an expectation other than exactly 100-continue is answered 417 (RFC 9110 §10.1.1)",
    ),
    listed(
        "*",
        &["field x-secret-hop", "field x-hop", "field authorization", "field cookie"],
        &["hp-005", "hp-011", "hp-014"],
        "fields that Connection names go no further (RFC 9110 §7.6.1); the others pass them on",
    ),
    listed(
        "*",
        &["field proxy-connection", "field keep-alive"],
        &["hp-007"],
        "both are about one connection, whether or not they are named (RFC 9110 §7.6.1)",
    ),
    listed(
        "*",
        &["field http2-settings"],
        &["up-002", "up-003"],
        "it belongs to an offer of h2c, which is not passed on (RFC 9113 §3.1)",
    ),
    // nginx
    listed(
        "nginx",
        &["framing"],
        &[],
        "it counts a body that has arrived before it connects, and then sends its length",
    ),
    listed("nginx", &["trailers"], &["b-009", "tr-012"], "it drops trailers of requests"),
    listed(
        "nginx",
        &["requests"],
        &["b-016", "m-008", "t-017", "te-007", "te-008"],
        "it refuses OPTIONS *, methods in small letters, bad percent triplets, and tabs around \
         a value; all of them are allowed or none of a proxy's business",
    ),
    listed(
        "nginx",
        &["field connection", "field te"],
        &["b-037"],
        "TE: trailers is not passed on, for it drops trailers",
    ),
    listed(
        "nginx",
        &["field connection", "field upgrade"],
        &["b-050", "up-001", "up-009"],
        "it passes an offer to upgrade on only where a configuration spells it out",
    ),
    listed(
        "nginx",
        &["field expect"],
        &["b-051", "b-052", "ex-004", "ex-007", "ex-008"],
        "it answers 100 itself; l7rp lets the backend decide",
    ),
    // HAProxy
    listed(
        "haproxy",
        &["requests"],
        &["b-032", "b-033", "b-067", "ex-001", "pl-005", "up-007"],
        "it speaks HTTP/1.0 to the backend for a client that does, and this backend takes 1.1 \
         only; a proxy sends its own version (RFC 9110 §2.5)",
    ),
    listed(
        "haproxy",
        &["requests"],
        &["pl-003"],
        "it forwards a request with both Content-Length and Transfer-Encoding",
    ),
    listed(
        "haproxy",
        &["requests"],
        &["pl-011"],
        "it forwards an HTTP/1.1 request without Host, which is to be refused (RFC 9112 §3.2)",
    ),
    listed(
        "haproxy",
        &["target"],
        &["b-018"],
        "it passes the absolute form on, which is for proxies (RFC 9112 §3.2.2)",
    ),
    listed(
        "haproxy",
        &["field connection"],
        &[
            "hp-001", "hp-002", "hp-003", "hp-004", "hp-005", "hp-010", "hp-011", "hp-012",
            "hp-014", "up-002", "up-003", "up-008", "up-010",
        ],
        "it passes on what Connection says, though it is for this connection alone",
    ),
    listed(
        "haproxy",
        &["field upgrade"],
        &["hp-015", "up-002", "up-003", "up-006", "up-008"],
        "it passes offers on that are h2c, or that Connection does not name",
    ),
    listed(
        "haproxy",
        &["trailers"],
        &["tr-001", "tr-002", "tr-003", "tr-004", "tr-005"],
        "it passes on trailer fields that must not be there: framing, routing, credentials \
         (RFC 9110 §6.5.1)",
    ),
];
