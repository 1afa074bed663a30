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

pub(crate) const LISTED: &[Listed] = &[Listed {
    proxy: "*",
    aspects: &[
        "field x-forwarded-for",
        "field x-forwarded-proto",
        "field x-forwarded-host",
        "field x-real-ip",
        "field x-request-id",
    ],
    cases: &[],
    why: "l7rp says who asks without being told to; the others have it in their manuals",
}];
