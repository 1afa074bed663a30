//! What was seen, held against what a case allows.

use crate::case::{Action, BackendVerdict, RequestCase, RequestVerdict, ResponseVerdict};
use crate::client::{After, Answer, HTTP2};
use crate::origin::{Connection, Seen};
use crate::wire::Stop;

/// What came of one case.
#[derive(Clone, Debug)]
pub(crate) struct Observed {
    pub(crate) interim: Vec<u16>,
    pub(crate) finals: Vec<Answer>,
    /// Why no further answer could be read.
    pub(crate) stop: Option<Stop>,
    pub(crate) after: After,
    pub(crate) connections: Vec<Connection>,
    /// What the client received.
    pub(crate) raw: Vec<u8>,
    /// What the next client received.
    pub(crate) next: Vec<u8>,
    /// The breaker has taken it for a failure of the backend.
    pub(crate) blamed: bool,
}

impl Observed {
    /// The case's own requests at the backend.
    fn seen(&self) -> impl Iterator<Item = &Seen> {
        self.connections.iter().flat_map(|c| &c.seen).filter(|s| !s.is_own())
    }

    fn complete(&self) -> usize {
        self.seen().filter(|s| s.complete).count()
    }

    /// For people.
    pub(crate) fn summary(&self) -> String {
        let statuses: Vec<u16> = self.finals.iter().map(|a| a.status).collect();
        let whole: Vec<bool> = self.finals.iter().map(|a| a.complete).collect();
        let reached: Vec<String> = self
            .seen()
            .map(|s| {
                format!(
                    "{} {} ({} octets, complete: {})",
                    s.method,
                    s.target,
                    s.body.content.len(),
                    s.complete
                )
            })
            .take(5)
            .collect();
        let mut interim = self.interim.clone();
        interim.dedup();
        format!(
            "answers {statuses:?} complete {whole:?} interim {interim:?} stop {:?}; then {:?}; \
             at the backend {reached:?}",
            self.stop, self.after
        )
    }
}

/// Collects what is wrong.
#[derive(Default)]
pub(crate) struct Faults(pub(crate) Vec<String>);

impl Faults {
    fn check(&mut self, good: bool, what: impl FnOnce() -> String) {
        if !good {
            self.0.push(what());
        }
    }
}

/// What holds after every case whatever its verdict.
pub(crate) fn always(observed: &Observed) -> Vec<String> {
    let mut faults = Faults::default();
    for connection in &observed.connections {
        for leftover in &connection.leftover {
            faults.0.push(format!("the backend could not read: {leftover}"));
        }
        for seen in &connection.seen {
            faults.check(seen.is_marked(), || {
                format!("unmarked at the backend: {} {}", seen.method, seen.target)
            });
        }
    }
    faults.0
}

pub(crate) fn request(
    case: &RequestCase,
    verdict: &RequestVerdict,
    observed: &Observed,
) -> Vec<String> {
    let mut faults = Faults::default();
    match verdict.action {
        Action::Forward => forwarded(case, verdict, observed, &mut faults),
        Action::Reject | Action::Local => refused(verdict, observed, &mut faults),
        Action::H2 => match &observed.stop {
            Some(Stop::Garbage(what)) if what == HTTP2 => return faults.0,
            stop => faults.0.push(format!("HTTP/2 is not spoken: {stop:?}")),
        },
    }
    match (&observed.after, verdict.close) {
        (After::Closed, None | Some(true)) | (After::Usable, None | Some(false)) => {}
        (after, close) => faults.0.push(format!("close: {close:?}, but then {after:?}")),
    }
    for status in &observed.interim {
        let good =
            verdict.interim_ok.contains(status) && !verdict.interim_forbidden.contains(status);
        faults.check(good, || format!("interim {status}"));
    }
    for seen in observed.seen() {
        let secret = verdict.backend_must_not_see_target.contains(&seen.target);
        faults.check(!secret, || format!("the backend saw {}", seen.target));
        // Marks are asked for in every case anyway; see `always`.
        faults.check(!verdict.every_forwarded_marked || seen.is_marked(), || "no mark".to_owned());
        faults.check(seen.complete || verdict.partial_upstream_ok, || {
            format!("the backend saw a part of {}", seen.target)
        });
    }
    // Whoever gave up in the middle of a request cannot use its connection again.
    for connection in &observed.connections {
        let half = connection.seen.iter().any(|s| !s.complete);
        faults.check(!half || connection.ended, || "half a request, and still open".to_owned());
    }
    faults.0
}

fn forwarded(
    case: &RequestCase,
    verdict: &RequestVerdict,
    observed: &Observed,
    faults: &mut Faults,
) {
    let complete = observed.complete();
    let (most, answers) = (verdict.forwarded_requests, observed.finals.len());
    if verdict.forwarded_max_not_exact {
        faults.check((1..=most).contains(&complete), || format!("{complete} requests forwarded"));
        faults.check(answers == complete, || format!("{answers} answers to {complete}"));
    } else {
        faults.check(complete == most, || format!("{complete} requests forwarded"));
        faults.check(answers == case.responses, || format!("{answers} answers"));
    }
    let first = observed.finals.first();
    faults.check(first.is_some_and(|a| verdict.status.contains(&a.status)), || {
        format!("status {:?}", first.map(|a| a.status))
    });
    for (answer, allowed) in observed.finals.iter().zip(&case.statuses_seq) {
        faults.check(allowed.contains(&answer.status), || format!("then status {}", answer.status));
    }
    faults.check(observed.finals.iter().all(|a| a.complete), || "half an answer".to_owned());
    if let Some(length) = verdict.response_body_len {
        let seen = first.map(|a| a.body.content.len());
        faults.check(seen == Some(length), || format!("a body of {seen:?} octets"));
    }
    match observed.seen().next() {
        Some(seen) => backend(&verdict.backend, seen, faults),
        None => faults.0.push("nothing reached the backend".to_owned()),
    }
}

fn refused(verdict: &RequestVerdict, observed: &Observed, faults: &mut Faults) {
    let complete = observed.complete();
    faults.check(complete <= verdict.forwarded_requests, || format!("{complete} forwarded"));
    match observed.finals.first() {
        Some(answer) => {
            let good = answer.complete && verdict.status.contains(&answer.status);
            faults.check(good, || format!("status {}", answer.status));
        }
        None => faults.check(verdict.no_response_ok && observed.after == After::Closed, || {
            format!("no answer: {:?}", observed.stop)
        }),
    }
}

fn backend(verdict: &BackendVerdict, seen: &Seen, faults: &mut Faults) {
    let same = |wanted: &Option<String>, got: &str| wanted.as_ref().is_none_or(|w| w == got);
    let among = |list: &Option<Vec<String>>, got: &str| {
        list.as_ref().is_none_or(|list| list.iter().any(|w| w == got))
    };
    let head = &seen.head;
    let host = head.first("host").unwrap_or_default();
    faults.check(same(&verdict.method, &seen.method), || format!("method {}", seen.method));
    let target = same(&verdict.target, &seen.target) && among(&verdict.target_any_of, &seen.target);
    faults.check(target, || format!("target {}", seen.target));
    let length = seen.target.len();
    faults.check(verdict.target_len.is_none_or(|l| l == length), || format!("target of {length}"));
    let good_host = same(&verdict.host, host) && among(&verdict.host_any_of, host);
    faults.check(good_host && head.all("host").count() == 1, || format!("host {host}"));
    let content = &seen.body.content;
    let good_body = verdict.body.as_ref().is_none_or(|b| b.0 == *content)
        && verdict.body_len.is_none_or(|l| l == content.len());
    faults.check(good_body, || format!("body \"{}\"", content.escape_ascii()));
    for (name, value) in &verdict.header {
        let got: Vec<_> = head.all(name).collect();
        faults.check(got == [value], || format!("{name}: {got:?}"));
    }
    for name in &verdict.header_absent {
        faults.check(head.first(name).is_none(), || format!("{name} is there"));
    }
    for name in &verdict.header_present {
        faults.check(head.first(name).is_some(), || format!("{name} is not there"));
    }
    hop_fields(verdict, seen, faults);
}

fn hop_fields(verdict: &BackendVerdict, seen: &Seen, faults: &mut Faults) {
    let head = &seen.head;
    let any_of = |list: &Option<Vec<Option<String>>>, name: &str| {
        let got = head.first(name).map(str::to_ascii_lowercase);
        list.as_ref().is_none_or(|list| list.contains(&got))
    };
    faults.check(any_of(&verdict.te_any_of, "te"), || "te".to_owned());
    faults.check(any_of(&verdict.upgrade_any_of, "upgrade"), || "upgrade".to_owned());
    let members = |name| head.all(name).flat_map(|v| v.split(','));
    for option in &verdict.connection_has {
        let found = members("connection").any(|m| m.trim().eq_ignore_ascii_case(option));
        faults.check(found, || format!("connection does not name {option}"));
    }
    if verdict.te_clean {
        let codings: Vec<_> = head.all("transfer-encoding").collect();
        let clean = codings.is_empty() || codings == ["chunked"];
        faults.check(clean, || format!("transfer-encoding: {codings:?}"));
    }
    if let Some(length) = verdict.single_content_length {
        let got: Vec<_> = head.all("content-length").collect();
        faults.check(got == [length.to_string()], || format!("content-length: {got:?}"));
    }
    for name in &verdict.trailer_absent {
        let found = seen.body.trailers.iter().any(|(n, _)| n == name);
        faults.check(!found, || format!("{name} in the trailer"));
    }
}

pub(crate) fn response(
    verdict: &ResponseVerdict,
    observed: &Observed,
    pooled: bool,
) -> Vec<String> {
    let mut faults = Faults::default();
    let answer = observed.finals.first();
    let status = answer.map_or(0, |a| a.status);
    faults.check(verdict.client_status.contains(&status), || format!("status {status}"));
    let complete = answer.is_some_and(|a| a.complete);
    faults.check(verdict.client_complete.is_none_or(|c| c == complete), || {
        format!("complete: {complete}")
    });
    if let Some(answer) = answer {
        client_sees(verdict, answer, &mut faults);
    }
    if let Some(breaker) = &verdict.breaker {
        faults.check((breaker == "failure") == observed.blamed, || {
            format!("blamed: {}", observed.blamed)
        });
    }
    if let Some(allowed) = &verdict.interim_ok {
        let good = observed.interim.iter().all(|status| allowed.contains(status));
        faults.check(good, || format!("interim {:?}", observed.interim));
    }
    // But for the proxy's own random ids: they have any three digits now and then.
    let text = |octets: &[u8]| -> String {
        let all: String = octets.iter().map(|b| char::from(*b)).collect();
        all.split_inclusive('\n').filter(|line| !line.starts_with("X-Request-ID: ")).collect()
    };
    let (own, next) = (text(&observed.raw), text(&observed.next));
    for secret in &verdict.client_must_not_see {
        faults.check(!own.contains(secret), || format!("the client saw {secret:?}"));
    }
    for secret in &verdict.next_client_must_not_see {
        faults.check(!next.contains(secret), || format!("the next client saw {secret:?}"));
    }
    match (&observed.after, verdict.client_close) {
        (After::Closed, None | Some(true)) | (After::Usable, None | Some(false)) => {}
        (after, _) => faults.0.push(format!("then {after:?}")),
    }
    if verdict.upstream_reuse == Some(false) {
        faults.check(!observed.was_reused(), || "the upstream connection was reused".to_owned());
    }
    // Nothing asks for retries but a pooled connection that turned out stale.
    let tries = observed.seen().count();
    let most = verdict.max_backend_attempts.unwrap_or(if pooled { 2 } else { 1 });
    faults.check(tries <= most, || format!("{tries} tries"));
    faults.0
}

impl Observed {
    /// Whether a connection that the case was served on carried anything later.
    fn was_reused(&self) -> bool {
        self.connections.iter().any(|c| {
            c.seen.iter().position(|s| !s.is_own()).is_some_and(|at| at + 1 < c.seen.len())
        })
    }
}

fn client_sees(verdict: &ResponseVerdict, answer: &Answer, faults: &mut Faults) {
    let content = &answer.body.content;
    if let Some(body) = verdict.client_body.as_ref().or(verdict.tunnel_bytes.as_ref()) {
        faults.check(body.0 == *content, || format!("body \"{}\"", content.escape_ascii()));
    }
    for name in &verdict.client_header_absent {
        faults.check(answer.head.first(name).is_none(), || format!("{name} is there"));
    }
    for (name, value) in &verdict.client_sees {
        let got: Vec<_> = answer.head.all(name).collect();
        faults.check(got == [value], || format!("{name}: {got:?}"));
    }
    for (name, count) in &verdict.client_sees_count {
        let got = answer.head.all(name).count();
        faults.check(got == *count, || format!("{name}: {got} times"));
    }
}
