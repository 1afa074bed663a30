//! The tries of one request, as the log, the spans and the decision tell of them.

use std::time::Duration;

use l7rp_core::failure::Failure;
use l7rp_core::names::Nanos;

/// One try.
#[derive(Clone, Copy, Debug)]
pub struct Try<'a> {
    /// The upstream's URL, as configured.
    pub url: &'a str,
    /// The host in it.
    pub host: &'a str,
    /// The port that it leads to.
    pub port: u16,
    /// When it began.
    pub began: Nanos,
    /// How it ended, and after what time; `None`: it has not.
    pub ended: Option<(End, Duration)>,
    /// The connection that it had, if it came to one.
    pub link: Option<Link>,
    /// It was the second of two that race.
    pub is_hedge: bool,
    /// Its connection was closed under it, or it was turned away unread, and the request was sent
    /// again at once, at no cost: that is told of as another try.
    pub is_repeated: bool,
    /// The id of its span; 0: it has none.
    pub span: u64,
}

/// How a try ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With a response of this status.
    Answered(u16),
    /// Without one.
    Failed(Failure),
    /// Another has won, and it was given up.
    Lost,
}

/// A connection, as a try found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// It had served before.
    pub reused: bool,
    /// How long it had been open.
    pub age: Duration,
}

/// An upstream that a request could not go to, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal<'a> {
    /// Its URL, as configured.
    pub url: &'a str,
    /// One of a few words.
    pub why: &'static str,
    /// What has made it so, where the word does not say it.
    pub cause: Option<String>,
}
