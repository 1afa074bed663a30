//! Active health checks: each upstream is asked by a task of its own, on connections of its
//! own, so that none waits for another.

use std::future::poll_fn;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use l7rp_core::failure::Failure;
use l7rp_core::http1::Limits;
use l7rp_core::http1::body::Body;
use l7rp_core::http1::response::{Response, parse_response};
use l7rp_core::names::Nanos;
use tokio::sync::watch;

use super::connect::{Connected, connect};
use super::h2;
use super::pool::Upstream;
use super::upkeep::Orders;
use crate::clock::Clock;
use crate::config::plan::{self, ActiveHealth, HostHeader};
use crate::config::view::statuses;
use crate::stream::Stream;

/// First probes of a pool's upstreams are this far apart, so that a start is no burst.
const APART: Duration = Duration::from_millis(20);
/// Octets of a response head.
const MAX_HEAD: Limits = Limits { max_head: 64 << 10, max_fields: 256, max_target: 0 };
/// Octets of a body that are read to be polite; the head has said all.
const MAX_BODY: usize = 64 << 10;

/// What is asked of an upstream, and what counts as a good answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Checks {
    /// As configured.
    pub plan: ActiveHealth,
    request: String,
}

impl Checks {
    /// Those of an upstream of `pool`, if it has any.
    pub fn of(pool: &plan::Pool, upstream: &plan::Upstream) -> Option<Self> {
        let plan = pool.active.clone()?;
        let host = match &pool.host_header {
            HostHeader::Literal(host) => host,
            HostHeader::Preserve | HostHeader::Upstream => &upstream.authority,
        };
        let request = format!(
            "{} {} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: l7rp/{} (health check)\r\n\
             Accept: */*\r\nConnection: close\r\n\r\n",
            plan.method,
            plan.path,
            env!("CARGO_PKG_VERSION"),
        );
        Some(Self { plan, request })
    }

    /// The statuses of good answers, for people.
    pub(super) fn expected(&self) -> String {
        let words = statuses(&self.plan.expected_status);
        let words =
            words.iter().map(|one| one.as_str().map_or_else(|| one.to_string(), str::to_owned));
        words.collect::<Vec<_>>().join(" or ")
    }

    /// Whether an answer to the one says what an answer to the other would: how often and how
    /// patiently it is asked does not matter.
    pub(super) fn asks_the_same(&self, other: &Self) -> bool {
        let same_answers = self.plan.expected_status == other.plan.expected_status;
        same_answers && self.request == other.request
    }
}

/// The pause before the first probe of the upstream at `ix` of so many.
pub fn first_pause(checks: &Checks, ix: usize, of: usize) -> Duration {
    let apart = APART.min(checks.plan.interval / of.max(1) as u32);
    apart * ix as u32 + apart.mul_f64(fastrand::f64() / 4.0)
}

/// Probes an upstream for ever: at first without a pause until it has been judged, then once
/// every interval. A reload gives other orders; a probe that is under way then still counts.
/// `first_pause`: before the first probe of one that was never probed.
pub async fn keep_probed(mut orders: watch::Receiver<Orders>, first_pause: Duration, clock: Clock) {
    if orders.borrow().upstream.probed_at.load(Relaxed) == 0 {
        tokio::time::sleep(first_pause).await;
    }
    while let Some(Orders { upstream, checks: Some(checks), .. }) =
        when_due(&mut orders, clock).await
    {
        // Nobody is asked for a name without addresses: that the name has none keeps it out,
        // and the moment that it has some it should be judged.
        if upstream.current_addresses().is_empty() {
            tokio::time::sleep(APART).await;
            continue;
        }
        let Checks { plan, request } = &checks;
        let began = clock.now();
        let asked = tokio::time::timeout(plan.timeout, ask(&upstream, request, plan)).await;
        let verdict = match &asked {
            Ok(Ok((status, _))) => Some((is_expected(plan, *status), format!("status:{status}"))),
            // What this machine lacks says nothing about the upstream.
            Ok(Err(Failure::LocalShortage)) => None,
            Ok(Err(failure)) => Some((false, failure.meaning().reason.to_owned())),
            Err(_) => Some((false, "timeout".to_owned())),
        };
        let lacked = verdict.is_none();
        take_in(&orders, &checks, verdict, began, clock);
        if lacked {
            tokio::time::sleep(plan.interval).await;
        }
        if let Ok(Ok((_, Some(answer)))) = asked {
            // Closing over unread octets would look like an abort in the upstream's log.
            let _ = tokio::time::timeout(plan.timeout / 4, answer.drain()).await;
        }
    }
}

/// Tells what a probe that began then has found, to whoever wants to know the same by now.
fn take_in(
    orders: &watch::Receiver<Orders>,
    asked: &Checks,
    verdict: Option<(bool, String)>,
    began: Nanos,
    clock: Clock,
) {
    let Orders { upstream, lineage, checks, .. } = orders.borrow().clone();
    if !checks.is_some_and(|checks| checks.asks_the_same(asked)) {
        return;
    }
    upstream.probed_at.store(began.0.max(1), Relaxed);
    if let Some((good, why)) = verdict {
        lineage.probed(&upstream, good, why, clock.now());
    }
}

/// Waits until the next probe is due, by orders that may change meanwhile. `None`: there will be
/// no more.
async fn when_due(orders: &mut watch::Receiver<Orders>, clock: Clock) -> Option<Orders> {
    let jitter = 0.95 + fastrand::f64() / 10.0;
    loop {
        let now = orders.borrow_and_update().clone();
        let interval = now.checks.as_ref()?.plan.interval;
        let last = now.upstream.probed_at.load(Relaxed);
        let due = Nanos(last).plus(interval.mul_f64(jitter));
        if last == 0 || now.upstream.is_settling() || clock.now() >= due {
            return Some(now);
        }
        tokio::select! {
            () = tokio::time::sleep_until(clock.instant(due)) => {}
            changed = orders.changed() => changed.ok()?,
        }
    }
}

fn is_expected(plan: &ActiveHealth, status: u16) -> bool {
    plan.expected_status.iter().any(|&(from, to)| (from..=to).contains(&status))
}

/// The answer to a probe, as far as its head.
struct Answer {
    stream: Stream,
    head: Response,
    buf: Vec<u8>,
    body_at: usize,
}

/// Sends one probe and waits for the head of the response: its status, and what is left to be
/// read of it.
async fn ask(
    upstream: &Upstream,
    request: &str,
    plan: &ActiveHealth,
) -> Result<(u16, Option<Answer>), Failure> {
    // The whole probe has a limit; the connection needs none of its own.
    let connected = connect(upstream, plan.timeout * 2, false).await;
    let Connected { stream, is_http2 } = connected.map_err(|(failure, _)| failure)?;
    if is_http2 {
        return Ok((h2::ask(stream, request, upstream.is_tls).await?, None));
    }
    let answer = ask_h1(stream, request, plan).await?;
    Ok((answer.head.status, Some(answer)))
}

async fn ask_h1(mut stream: Stream, request: &str, plan: &ActiveHealth) -> Result<Answer, Failure> {
    let mut sent = 0;
    while sent < request.len() {
        let written = poll_fn(|cx| stream.poll_write(cx, &request.as_bytes()[sent..], &[])).await;
        match written {
            Ok(n) if n > 0 => sent += n,
            // It may have answered before it closed.
            _ => break,
        }
    }
    let mut head = Response::default();
    let mut buf = Vec::with_capacity(4 << 10);
    let to_head = plan.method.eq_ignore_ascii_case("HEAD");
    let mut at = 0;
    let body_at = loop {
        match parse_response(&buf[at..], &mut head, to_head, MAX_HEAD)? {
            Some(len) if head.status >= 200 => break at + len,
            Some(len) => at += len,
            None => read(&mut stream, &mut buf).await.ok_or(Failure::UpstreamClosed)?,
        }
        if at > MAX_HEAD.max_head {
            return Err(Failure::ResponseHeadTooLarge);
        }
    };
    Ok(Answer { stream, head, buf, body_at })
}

impl Answer {
    /// Reads the body to its end, within bounds.
    async fn drain(mut self) {
        let mut body = Body::new(self.head.framing, MAX_BODY);
        let mut taken = 0;
        let mut from = self.body_at;
        loop {
            match body.scan(&self.buf[from..]) {
                Ok(seen) if !seen.done && taken < MAX_BODY => {}
                _ => return,
            }
            taken += self.buf.len() - from;
            from = 0;
            self.buf.clear();
            if read(&mut self.stream, &mut self.buf).await.is_none() {
                return;
            }
        }
    }
}

/// Reads what comes next; `None`: the end.
async fn read(stream: &mut Stream, buf: &mut Vec<u8>) -> Option<()> {
    match poll_fn(|cx| stream.poll_fill(cx, buf)).await {
        Ok(n) if n > 0 => Some(()),
        _ => None,
    }
}
