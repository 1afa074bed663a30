//! What would become of a request, and why: which route takes it and why the others do not, what
//! is done with it in which order, and who of the pool would get it. Nothing is sent, taken or
//! counted; every decision is made by the code that serves.
//!
//! | file | has |
//! |---|---|
//! | `request` | the question, written down as a request; the listener it comes in by |
//! | `walk` | the request's way through the proxy, in the order of `exchange/mod.rs` |
//! | `candidates` | the pool: who is there, who may be chosen, who would be |

mod candidates;
mod request;
mod walk;

#[cfg(test)]
mod tests;

use l7rp_core::failure::Failure;
use l7rp_core::http1::request::{Request, parse_request};
use l7rp_core::names::Nanos;
use serde::{Deserialize, Serialize};

use crate::exchange::Incoming;
use crate::exchange::forwarded::{self, peer_text};
use crate::live::{Listener, Process, Snapshot};

pub use candidates::{Candidate, PoolView, Tie};
pub use request::Asked;

/// What would become of a request.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Explanation {
    /// The request, as it is understood.
    pub request: RequestView,
    /// Where it comes in.
    pub listener: ListenerView,
    /// Every route, in order of precedence; none where the request is refused before that.
    pub routes: Vec<RouteView>,
    /// The one that takes it.
    pub route: Option<String>,
    /// What is done with it, in order; the last stage is where it ends.
    pub stages: Vec<Stage>,
    /// The pool that it goes to.
    pub pool: Option<PoolView>,
    /// What comes of it.
    pub verdict: Verdict,
    /// A running instance was asked, so that all is as it was at that moment.
    pub live: bool,
}

/// A request, as it is understood.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct RequestView {
    /// As sent.
    pub method: String,
    /// The Host field, or the authority of the target; `None`: none, or nothing that can be read.
    pub host: Option<String>,
    /// Path and query.
    pub target: String,
    /// The client's address.
    pub client: String,
    /// Where that was found.
    pub client_by: String,
}

/// The listener that a request comes in by.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct ListenerView {
    /// Its name.
    pub name: String,
    /// Its address.
    pub bind: String,
    /// It speaks TLS.
    pub tls: bool,
    /// Why this one.
    pub by: String,
    /// What is odd about that.
    pub note: Option<String>,
}

/// What becomes of one route.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct RouteView {
    /// Its name.
    pub route: String,
    /// What counts: that it is taken, or the first thing that keeps it from that.
    pub outcome: RouteOutcome,
    /// The same for people.
    pub says: String,
}

/// Why a route is taken or not.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RouteOutcome {
    /// It takes the request.
    Taken,
    /// It is for another host.
    Host,
    /// It is for another path.
    Path,
    /// It is for another listener.
    Listener,
    /// It is for other methods.
    Method,
    /// It asks for a field.
    Header,
    /// Another goes before it.
    Outranked,
}

/// One thing that is done with a request.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Stage {
    /// Its name.
    pub stage: String,
    /// What comes of it.
    pub outcome: StageOutcome,
    /// The same for people; empty where there is nothing to say.
    pub says: String,
}

/// What comes of a stage.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StageOutcome {
    /// There is nothing to do.
    Off,
    /// The request goes on.
    Passed,
    /// It ends here.
    Ends,
    /// Only a running instance can tell.
    Unknown,
}

/// What comes of a request.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub struct Verdict {
    /// The status of the proxy's own answer; `None`: the request is passed on.
    pub status: Option<u16>,
    /// The reason in the access log, where it is refused.
    pub reason: Option<String>,
    /// For people.
    pub says: String,
}

impl Verdict {
    fn refused(failure: Failure) -> Self {
        let meaning = failure.meaning();
        let mut says = format!("{} ({})", meaning.text, meaning.reason);
        if let Some(seconds) = failure.retry_after() {
            says.extend(["; Retry-After: ", &seconds.to_string()]);
        }
        Self { status: Some(meaning.status), reason: Some(meaning.reason.to_owned()), says }
    }
}

/// What would become of a request under `snapshot`. `process`: the one where it is in force, if
/// it is; its load, health and latencies are looked at.
///
/// # Errors
/// The question makes no sense: it says what is wrong with it.
pub fn explain(
    snapshot: &Snapshot,
    process: Option<&Process>,
    asked: &Asked,
) -> Result<Explanation, String> {
    let written = asked.write()?;
    let (listener, shown) = asked.listener(snapshot, &written)?;
    let peer = asked.peer(listener);
    let mut head = Request::default();
    let parsed = parse_request(&written.head, &mut head, listener.limits);
    let arrived = process.map_or(Nanos(0), |process| process.clock.now());
    let incoming = Incoming { buf: &written.head, head: &head, rest: b"", arrived };
    let sender = forwarded::sender(listener, peer, &incoming);
    let client = sender.ip(peer);
    let mut explanation = Explanation {
        request: RequestView {
            method: asked.method().to_owned(),
            host: None,
            target: written.target.clone(),
            client: peer_text(client).to_string(),
            client_by: client_by(listener, &sender, asked),
        },
        listener: shown,
        routes: Vec::new(),
        route: None,
        stages: Vec::new(),
        pool: None,
        verdict: Verdict { status: None, reason: None, says: String::new() },
        live: process.is_some(),
    };
    if let Err(failure) = parsed {
        explanation.stages.push(Stage {
            stage: "parse".to_owned(),
            outcome: StageOutcome::Ends,
            says: "it is no request that the proxy takes".to_owned(),
        });
        explanation.verdict = Verdict::refused(failure);
        return Ok(explanation);
    }
    explanation.request.host = Some(lossy(head.host.of(&written.head))).filter(|h| !h.is_empty());
    let mut walk = walk::Walk {
        snapshot,
        process,
        listener,
        incoming,
        peer,
        sender: &sender,
        client: &peer_text(client),
        sni: written.sni.as_deref(),
        out: explanation,
    };
    let verdict = walk.run().unwrap_or_else(Verdict::refused);
    explanation = walk.out;
    explanation.verdict = verdict;
    Ok(explanation)
}

fn client_by(listener: &Listener, sender: &forwarded::Sender, asked: &Asked) -> String {
    match (sender.is_named(), sender.is_trusted(), &listener.plan.trusted_proxies) {
        (true, ..) => "named by a trusted proxy, the peer".to_owned(),
        (_, true, _) => "the peer, a trusted proxy that names nobody else".to_owned(),
        (.., proxies) if proxies.is_empty() => "the peer; no proxy is trusted".to_owned(),
        _ if asked.client.is_none() => "the peer, no trusted proxy; --client names another".into(),
        _ => "the peer, which is no trusted proxy".to_owned(),
    }
}

/// Octets as text.
fn lossy(octets: &[u8]) -> String {
    String::from_utf8_lossy(octets).into_owned()
}
