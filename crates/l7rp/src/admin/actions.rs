//! What can be changed: POST, with a JSON object that says what.

use std::net::IpAddr;

use clap::ValueEnum;
use l7rp_core::limit::{Decision, Rate};
use l7rp_core::upstream::breaker::Mode;
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

use super::access::{self, Knock, Refusal};
use super::http::{Answer, Asked, JSON};
use crate::config::file::nearest;
use crate::config::plan::Algorithm;
use crate::live::{Process, Snapshot};
use crate::observe::event::{BY_ADMIN, Event, Level};
use crate::observe::stats::state_name;
use crate::orders::{NotTaken, Order, Outcome, Weighed, Weight};
use crate::upstream::pool::{Pool, Upstream};

/// Wrong tokens: so many a second, and at once.
const GUESSES: (f64, u32) = (3.0, 5);

/// Their paths.
pub(super) const PATHS: [&str; 6] = [
    "/-/reload",
    "/-/upstreams/drain",
    "/-/upstreams/undrain",
    "/-/upstreams/weight",
    "/-/upstreams/breaker",
    "/-/log-level",
];

/// Does what a POST asks for, if it may.
pub(super) async fn answer(asked: &Asked<'_>, process: &Process) -> Answer {
    if let Err(refusal) = may_change(asked, process) {
        return refused(refusal);
    }
    let done = match asked.path {
        b"/-/reload" => reload(asked, process).await,
        b"/-/upstreams/drain" => drain(asked, process, true),
        b"/-/upstreams/undrain" => drain(asked, process, false),
        b"/-/upstreams/weight" => weight(asked, process).await,
        b"/-/upstreams/breaker" => breaker(asked, process),
        b"/-/log-level" => log_level(asked, process),
        _ => Err(Answer::text("404 Not Found", "not found\n")),
    };
    done.unwrap_or_else(|not_done| not_done)
}

/// What decides who may; `is_locked`: see there.
fn knock<'a>(asked: &'a Asked<'_>, is_locked: bool) -> Knock<'a> {
    const DECISIVE: [&str; 4] = ["origin", "sec-fetch-site", "authorization", "content-type"];
    Knock {
        peer: asked.peer,
        host: asked.host(),
        origin: asked.field("origin"),
        fetch_site: asked.field("sec-fetch-site"),
        authorization: asked.field("authorization"),
        content_type: asked.field("content-type"),
        has_body: !asked.body.is_empty(),
        is_ambiguous: DECISIVE.iter().any(|name| asked.repeats(name)),
        is_locked,
    }
}

/// Whether a POST that changes nothing may be answered; if not, what is said instead.
pub(super) fn may_ask(asked: &Asked<'_>) -> Result<(), Answer> {
    access::decide_look(&knock(asked, false)).map_err(refused)
}

/// Whether something may be shown; if not, what is said instead.
pub(super) fn may_see(asked: &Asked<'_>) -> Result<(), Answer> {
    access::decide_read(&knock(asked, false)).map_err(refused)
}

fn may_change(asked: &Asked<'_>, process: &Process) -> Result<(), Refusal> {
    let guesses = Rate::new(GUESSES.0, GUESSES.1);
    let now = process.clock.now();
    let is_locked = matches!(process.guesses.peek(&guesses, now), Decision::Refused { .. });
    let token = &process.snapshot().plan.admin_token;
    let decision = access::decide(&knock(asked, is_locked), token.as_ref());
    if decision == Err(Refusal::WrongToken) {
        let _ = process.guesses.try_take(&guesses, now);
    }
    decision
}

fn refused(refusal: Refusal) -> Answer {
    let (status, fields, words) = match refusal {
        Refusal::Ambiguous => (
            "400 Bad Request",
            "",
            "send Origin, Sec-Fetch-Site, Authorization and Content-Type at most once each",
        ),
        Refusal::OtherSite => (
            "403 Forbidden",
            "",
            "this is for no page from elsewhere: ask from the same origin, or from a program",
        ),
        Refusal::OtherHost => (
            "403 Forbidden",
            "",
            "ask for localhost or an address, or show a token with a POST: another name may be made to lead here",
        ),
        Refusal::NoTokenConfigured => (
            "403 Forbidden",
            "",
            "only this machine may change something: configure `admin.token_file` to let others in",
        ),
        Refusal::NoToken => (
            "401 Unauthorized",
            "WWW-Authenticate: Bearer\r\n",
            "show the token in the file `admin.token_file`: `Authorization: Bearer TOKEN`",
        ),
        Refusal::WrongToken => (
            "403 Forbidden",
            "",
            "that is not the token in the file `admin.token_file`, as it was read last",
        ),
        Refusal::Locked => (
            "429 Too Many Requests",
            "Retry-After: 1\r\n",
            "too many wrong tokens: wait a second, or ask over a Unix-domain socket",
        ),
        Refusal::NotJson => (
            "415 Unsupported Media Type",
            "Accept: application/json\r\n",
            "send JSON, and say so: `Content-Type: application/json`",
        ),
    };
    Answer { fields, ..Answer::text(status, format!("{words}\n")) }
}

/// What was done, or why not.
type Done = Result<Answer, Answer>;

fn bad(words: &str) -> Answer {
    Answer::text("400 Bad Request", format!("{words}\n"))
}

fn conflict(words: &str) -> Answer {
    Answer::text("409 Conflict", format!("{words}\n"))
}

fn by(peer: Option<IpAddr>) -> String {
    peer.map_or_else(|| "unix".to_owned(), |peer| peer.to_canonical().to_string())
}

/// The object in a body, which has these keys and no others.
fn object(body: &[u8], keys: &[&str]) -> Result<Map<String, Value>, Answer> {
    let body = if body.is_empty() { b"{}" } else { body };
    let value = serde_json::from_slice(body).map_err(|e| bad(&format!("this is no JSON: {e}")))?;
    let Value::Object(map) = value else { return Err(bad("send a JSON object")) };
    if let Some(key) = map.keys().find(|key| !keys.contains(&key.as_str())) {
        let key = shortened(key);
        let known = match keys {
            [] => "there are none".to_owned(),
            keys => format!("there are `{}`", keys.join("`, `")),
        };
        return Err(bad(&format!("unknown key {key:?}: {known}")));
    }
    match keys.iter().find(|key| !map.contains_key(**key)) {
        Some(key) => Err(bad(&format!("`{key}` is missing"))),
        None => Ok(map),
    }
}

fn text<'m>(map: &'m Map<String, Value>, key: &str) -> Result<&'m str, Answer> {
    map.get(key).and_then(Value::as_str).ok_or_else(|| bad(&format!("`{key}` must be a string")))
}

/// One of these words.
fn one_of<'m>(map: &'m Map<String, Value>, key: &str, words: &[&str]) -> Result<&'m str, Answer> {
    let word = text(map, key)?;
    if words.contains(&word) {
        return Ok(word);
    }
    Err(bad(&format!("`{key}` must be one of `{}`", words.join("`, `"))))
}

/// An upstream that a request names.
struct Named<'s> {
    pool: &'s Pool,
    upstream: &'s Upstream,
}

/// Finds the upstream that `pool` and `upstream` name.
fn named<'s>(map: &Map<String, Value>, snapshot: &'s Snapshot) -> Result<Named<'s>, Answer> {
    let (name, url) = (text(map, "pool")?, text(map, "upstream")?);
    let pools = || snapshot.pools.iter();
    let pool = pools().find(|pool| pool.plan.name == name).ok_or_else(|| {
        unknown("pool", name, pools().map(|pool| pool.plan.name.as_str()).collect())
    })?;
    let all = || pool.upstreams.iter();
    let upstream = all().find(|upstream| upstream.url == url).ok_or_else(|| {
        unknown("upstream", url, all().map(|upstream| upstream.url.as_str()).collect())
    })?;
    Ok(Named { pool, upstream })
}

fn shortened(word: &str) -> String {
    const MOST: usize = 100;
    word.chars().take(MOST).collect()
}

fn unknown(what: &str, name: &str, known: Vec<&str>) -> Answer {
    const MOST: usize = 20;
    let name = shortened(name);
    let hint = match nearest(&name, known.iter().copied()) {
        Some(near) => format!("did you mean `{near}`?"),
        None if known.is_empty() => "there is none".to_owned(),
        None => {
            let more = known.len().saturating_sub(MOST);
            let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
            let first: Vec<_> = known.into_iter().take(MOST).collect();
            format!("there are `{}`{rest}", first.join("`, `"))
        }
    };
    Answer::text("404 Not Found", format!("no {what} {name:?}: {hint}\n"))
}

/// Nothing is changed any more in a process that is on its way out.
fn is_going(process: &Process) -> Result<(), Answer> {
    if process.is_succeeded() {
        return Err(conflict("another process has taken over: ask again, on a new connection"));
    }
    if process.is_upgrading() {
        return Err(conflict("another process is about to take over, and would not hear of it"));
    }
    if process.is_draining() {
        return Err(conflict("the process is draining: it takes no changes any more"));
    }
    Ok(())
}

fn drain(asked: &Asked<'_>, process: &Process, drained: bool) -> Done {
    let map = object(asked.body, &["pool", "upstream"])?;
    let snapshot = process.snapshot();
    let Named { pool, upstream } = named(&map, &snapshot)?;
    is_going(process)?;
    let is_news = pool.set_drained(&upstream.url, drained, process.clock.now());
    let word = |drained| if drained { "drained" } else { "in_use" };
    let from = word(drained != is_news);
    let to = word(drained);
    if is_news {
        let (pool, upstream) = (pool.plan.name.clone(), upstream.url.clone());
        let (why, by) = (BY_ADMIN, by(asked.peer));
        process.events.emit(&if drained {
            Event::UpstreamDrained { pool, upstream, from, to, why, by }
        } else {
            Event::UpstreamUndrained { pool, upstream, from, to, why, by }
        });
    }
    Ok(Answer::json(&json!({
        "pool": pool.plan.name,
        "upstream": upstream.url,
        "from": from,
        "to": to,
        "in_flight": upstream.seat.in_flight(),
        "eligible_left": pool.eligible(),
    })))
}

fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Auto => "auto",
        Mode::Open => "open",
        Mode::Closed => "closed",
    }
}

fn breaker(asked: &Asked<'_>, process: &Process) -> Done {
    let map = object(asked.body, &["pool", "upstream", "state"])?;
    let mode = match one_of(&map, "state", &["open", "closed", "auto"])? {
        "open" => Mode::Open,
        "closed" => Mode::Closed,
        _ => Mode::Auto,
    };
    let snapshot = process.snapshot();
    let Named { pool, upstream } = named(&map, &snapshot)?;
    is_going(process)?;
    let Some(forced) = pool.set_breaker(&upstream.url, mode, process.clock.now()) else {
        return Err(conflict("a reload has just taken it out: ask again"));
    };
    let (from, to) = (mode_name(forced.before), mode_name(mode));
    let state_to = state_name(forced.state);
    if from != to || forced.change.is_some() {
        process.events.emit(&Event::CircuitBreakerForced {
            pool: pool.plan.name.clone(),
            upstream: upstream.url.clone(),
            from,
            to,
            state_from: forced.change.map_or(state_to, |change| state_name(change.from)),
            state_to,
            why: BY_ADMIN,
            by: by(asked.peer),
        });
    }
    Ok(Answer::json(&json!({
        "pool": pool.plan.name,
        "upstream": upstream.url,
        "from": from,
        "to": to,
        "state": state_to,
    })))
}

async fn weight(asked: &Asked<'_>, process: &Process) -> Done {
    let map = object(asked.body, &["pool", "upstream", "weight"])?;
    let weight = map.get("weight").and_then(Value::as_u64).filter(|n| (1..=65_535).contains(n));
    let weight = weight.ok_or_else(|| bad("`weight` must be a whole number from 1 to 65535"))?;
    let weight = u32::try_from(weight).unwrap_or(1);
    let snapshot = process.snapshot();
    let Named { pool, upstream } = named(&map, &snapshot)?;
    is_going(process)?;
    let (name, url) = (pool.plan.name.clone(), upstream.url.clone());
    let wanted = Weight { pool: name, upstream: url, weight };
    let order = |reply| Order::Weight { weight: wanted.clone(), by: by(asked.peer), reply };
    let done = ordered(process, order).await?;
    let Weighed { from, generation } = done.map_err(|why| conflict(&why.replace('\n', " ")))?;
    let mut answer = json!({
        "pool": wanted.pool,
        "upstream": wanted.upstream,
        "from": from,
        "to": weight,
        "generation": generation,
        "until": "the next reload",
    });
    let name = match pool.plan.selector.algorithm {
        Algorithm::WeightedRr | Algorithm::ConsistentHashBounded | Algorithm::IpHash => None,
        Algorithm::RoundRobin => Some("round-robin"),
        Algorithm::LeastConn => Some("least-conn"),
        Algorithm::P2cEwma => Some("p2c-ewma"),
    };
    if let Some(name) = name {
        answer["note"] = format!("the pool's algorithm, {name}, does not look at weights").into();
    }
    Ok(Answer::json(&answer))
}

async fn reload(asked: &Asked<'_>, process: &Process) -> Done {
    object(asked.body, &[])?;
    is_going(process)?;
    let order = |reply| Order::Reload { by: by(asked.peer), reply };
    let outcome = ordered(process, order).await?;
    let answer = Answer::json(&outcome);
    Ok(match outcome {
        Outcome::Ok { .. } => answer,
        Outcome::Rejected { .. } => Answer::new("422 Unprocessable Content", JSON, answer.body),
    })
}

/// Has the main thread do something.
async fn ordered<T>(
    process: &Process,
    order: impl FnOnce(oneshot::Sender<T>) -> Order,
) -> Result<T, Answer> {
    const GOING: &str = "the process is on its way out: it takes no changes any more";
    let (reply, done) = oneshot::channel();
    process.desk.order(order(reply)).map_err(|why| match why {
        NotTaken::Closed => conflict("this process cannot: it has no file to read again, or ends"),
        NotTaken::Busy => conflict("other changes are waiting already: ask again in a moment"),
    })?;
    done.await.map_err(|_| conflict(GOING))
}

fn log_level(asked: &Asked<'_>, process: &Process) -> Done {
    let map = object(asked.body, &["level"])?;
    let name = one_of(&map, "level", &["debug", "info", "warn", "error"])?;
    let Ok(level) = Level::from_str(name, false) else { return Err(bad("no such level")) };
    let from = process.events.set_least(level, by(asked.peer)).name();
    Ok(Answer::json(&json!({ "from": from, "to": level.name() })))
}

/// The least severity of lines.
pub(super) fn show_log_level(process: &Process) -> Answer {
    Answer::json(&json!({ "level": process.events.least().name() }))
}
