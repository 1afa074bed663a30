//! The records of the two files, as written. A field that is not known here is an error: a
//! check that nobody runs is worse than none.

use std::collections::BTreeMap;

use serde::Deserialize;

const REQUESTS: &str = include_str!("h1_requests.jsonl");
const RESPONSES: &str = include_str!("h1_responses.jsonl");

/// Octets, in base64 in the file.
#[derive(Clone, Default, Deserialize)]
#[serde(try_from = "String")]
pub(crate) struct Octets(pub(crate) Vec<u8>);

impl TryFrom<String> for Octets {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let mut out = Vec::with_capacity(text.len() / 4 * 3);
        let (mut bits, mut count) = (0u32, 0);
        for b in text.bytes().filter(|b| *b != b'=') {
            let six = match b {
                b'A'..=b'Z' => b - b'A',
                b'a'..=b'z' => b - b'a' + 26,
                b'0'..=b'9' => b - b'0' + 52,
                b'+' => 62,
                b'/' => 63,
                _ => return Err(format!("not base64: {text}")),
            };
            bits = (bits << 6) | u32::from(six);
            count += 6;
            if count >= 8 {
                count -= 8;
                out.push((bits >> count) as u8);
                bits &= (1 << count) - 1;
            }
        }
        Ok(Self(out))
    }
}

/// What a client sends, and what must come of it.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "the file's fields are all named, so that a new one is noticed")]
pub(crate) struct RequestCase {
    pub(crate) id: String,
    pub(crate) class: String,
    pub(crate) desc: String,
    source: String,
    #[serde(rename = "raw_b64")]
    pub(crate) raw: Octets,
    pub(crate) raw_len: usize,
    tier: u8,
    pub(crate) expect: RequestVerdict,
    #[serde(default)]
    pub(crate) also_ok: Vec<RequestVerdict>,
    /// Final answers expected.
    #[serde(default = "one")]
    pub(crate) responses: usize,
    #[serde(default)]
    pub(crate) statuses_seq: Vec<Vec<u16>>,
    #[serde(default)]
    pub(crate) half_close: bool,
    /// Offsets at which the sender pauses.
    #[serde(default)]
    pub(crate) split: Vec<usize>,
}

fn one() -> usize {
    1
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Action {
    Forward,
    Reject,
    /// A success that the proxy itself answers with.
    Local,
    /// HTTP/2 is spoken from then on.
    H2,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "notes are for people")]
#[expect(clippy::struct_excessive_bools, reason = "the fields of the file")]
pub(crate) struct RequestVerdict {
    pub(crate) action: Action,
    pub(crate) status: Vec<u16>,
    pub(crate) close: Option<bool>,
    pub(crate) forwarded_requests: usize,
    #[serde(default)]
    pub(crate) forwarded_max_not_exact: bool,
    #[serde(default)]
    pub(crate) no_response_ok: bool,
    #[serde(default)]
    pub(crate) partial_upstream_ok: bool,
    #[serde(default)]
    pub(crate) backend: BackendVerdict,
    #[serde(default)]
    pub(crate) backend_must_not_see_target: Vec<String>,
    #[serde(default)]
    pub(crate) every_forwarded_marked: bool,
    #[serde(default)]
    pub(crate) interim_ok: Vec<u16>,
    #[serde(default)]
    pub(crate) interim_forbidden: Vec<u16>,
    pub(crate) response_body_len: Option<usize>,
    notes: Option<String>,
}

/// What the first request that reached the backend must have been.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct BackendVerdict {
    pub(crate) method: Option<String>,
    pub(crate) target: Option<String>,
    pub(crate) target_any_of: Option<Vec<String>>,
    pub(crate) target_len: Option<usize>,
    pub(crate) host: Option<String>,
    pub(crate) host_any_of: Option<Vec<String>>,
    #[serde(rename = "body_b64")]
    pub(crate) body: Option<Octets>,
    pub(crate) body_len: Option<usize>,
    pub(crate) header: BTreeMap<String, String>,
    pub(crate) header_absent: Vec<String>,
    pub(crate) header_present: Vec<String>,
    pub(crate) connection_has: Vec<String>,
    pub(crate) te_any_of: Option<Vec<Option<String>>>,
    pub(crate) upgrade_any_of: Option<Vec<Option<String>>>,
    pub(crate) te_clean: bool,
    pub(crate) single_content_length: Option<usize>,
    pub(crate) trailer_absent: Vec<String>,
}

impl std::fmt::Debug for Octets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

/// What an upstream sends, and what must come of it.
#[derive(Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "the file's fields are all named, so that a new one is noticed")]
pub(crate) struct ResponseCase {
    pub(crate) id: String,
    pub(crate) class: String,
    pub(crate) desc: String,
    source: String,
    #[serde(rename = "client_request_b64")]
    pub(crate) client_request: Octets,
    pub(crate) when: When,
    #[serde(rename = "raw_b64")]
    pub(crate) raw: Octets,
    pub(crate) raw_len: usize,
    pub(crate) then: Then,
    /// Arrives on the connection while it is idle.
    #[serde(rename = "after_idle_b64")]
    pub(crate) after_idle: Option<Octets>,
    /// The connection to the upstream must have served before.
    #[serde(default)]
    pub(crate) pooled: bool,
    /// What a second try gets.
    #[serde(rename = "retry_raw_b64")]
    pub(crate) retry_raw: Option<Octets>,
    pub(crate) expect: ResponseVerdict,
    #[serde(default)]
    pub(crate) also_ok: Vec<ResponseVerdict>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum When {
    AfterRequest,
    AfterHead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Then {
    Keep,
    Fin,
    Rst,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "notes are for people")]
pub(crate) struct ResponseVerdict {
    /// 0: closed without one.
    pub(crate) client_status: Vec<u16>,
    pub(crate) client_complete: Option<bool>,
    #[serde(rename = "client_body_b64")]
    pub(crate) client_body: Option<Octets>,
    pub(crate) upstream_reuse: Option<bool>,
    /// `success`, `failure` or `neutral`, if it matters.
    pub(crate) breaker: Option<String>,
    #[serde(default)]
    pub(crate) client_must_not_see: Vec<String>,
    #[serde(default)]
    pub(crate) next_client_must_not_see: Vec<String>,
    #[serde(default)]
    pub(crate) client_header_absent: Vec<String>,
    #[serde(default)]
    pub(crate) client_sees: BTreeMap<String, String>,
    #[serde(default)]
    pub(crate) client_sees_count: BTreeMap<String, usize>,
    pub(crate) interim_ok: Option<Vec<u16>>,
    #[serde(rename = "tunnel_bytes_b64")]
    pub(crate) tunnel_bytes: Option<Octets>,
    pub(crate) client_close: Option<bool>,
    pub(crate) max_backend_attempts: Option<usize>,
    notes: Option<String>,
}

pub(crate) fn requests() -> Vec<RequestCase> {
    let cases: Vec<RequestCase> = records(REQUESTS);
    assert!(cases.iter().all(|case| case.raw.0.len() == case.raw_len), "damaged file");
    cases
}

pub(crate) fn responses() -> Vec<ResponseCase> {
    let mut cases: Vec<ResponseCase> = records(RESPONSES);
    assert!(cases.iter().all(|case| case.raw.0.len() == case.raw_len), "damaged file");
    // Its note asks for it again with more than sockets hold: then the request cannot be out when
    // the answer is, and the connection must not be used again.
    let mut large = cases.iter().find(|case| case.id == "e-001").expect("e-001").clone();
    "e-001, 8 MiB".clone_into(&mut large.id);
    large.client_request = Octets(
        b"POST /up HTTP/1.1\r\nHost: origin.test\r\nContent-Length: 8388608\r\n\r\n".to_vec(),
    );
    large.client_request.0.resize(large.client_request.0.len() + (8 << 20), b'x');
    large.expect.upstream_reuse = Some(false);
    cases.push(large);
    cases
}

fn records<T: for<'de> Deserialize<'de>>(text: &str) -> Vec<T> {
    let record = |(ix, line): (usize, &str)| {
        serde_json::from_str(line).unwrap_or_else(|e| panic!("record {}: {e}", ix + 1))
    };
    text.lines().enumerate().map(record).collect()
}
