//! A call and what has become of it, whoever makes it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tonic::Code;

/// Where the service is.
pub const SERVICE: &str = "/peer.Echo/";

/// A call, as the peers are told of it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Call {
    /// What to do, and what kind of call that is:
    /// - `Unary` gives the message back, `Late` so many milliseconds later;
    /// - `Missing` is answered with `NOT_FOUND` and the message as reason;
    /// - `Collect` joins all messages;
    /// - `Expand`, asked with `N MILLIS`, counts so far at this pace;
    /// - `Partial` gives the message twice and then `ABORTED`;
    /// - `Chat` gives each message back when it comes, and the next is sent after that;
    /// - `Hold` does so once, and does not end.
    pub method: &'static str,
    pub path: String,
    pub metadata: Vec<(&'static str, String)>,
    pub messages: Vec<String>,
    /// Seconds until the deadline.
    pub timeout: Option<f64>,
    /// The client gives up when the last answer has come.
    pub cancel: bool,
}

impl Call {
    pub fn new(method: &'static str, messages: &[&str]) -> Self {
        let messages = messages.iter().map(ToString::to_string).collect();
        Self { method, path: format!("{SERVICE}{method}"), messages, ..Self::default() }
    }

    /// Metadata. Values of names in `-bin` are octets, each of them the `char` of its number.
    pub fn with(mut self, name: &'static str, value: &str) -> Self {
        self.metadata.push((name, value.to_owned()));
        self
    }
}

/// What has become of a call.
#[derive(Debug, Default, PartialEq, Deserialize)]
pub struct Outcome {
    pub code: i32,
    pub message: String,
    /// Metadata before the messages, and behind them.
    pub initial: BTreeMap<String, String>,
    pub trailing: BTreeMap<String, String>,
    pub messages: Vec<String>,
}

impl Outcome {
    pub fn code(&self) -> Code {
        Code::from_i32(self.code)
    }

    /// Fails if the call did.
    #[track_caller]
    pub fn assert_ok(&self, who: impl std::fmt::Display) {
        assert_eq!((self.code(), self.message.as_str()), (Code::Ok, ""), "{who}: {self:?}");
    }
}
