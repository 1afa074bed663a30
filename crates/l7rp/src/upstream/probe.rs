//! Active health checks: each upstream is asked by a task of its own, on connections of its
//! own, so that none waits for another.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use l7rp_core::failure::Failure;
use l7rp_core::http1::Limits;
use l7rp_core::http1::body::Body;
use l7rp_core::http1::response::{Response, parse_response};

use super::connect::connect;
use super::pool::{Pool, Upstream};
use crate::clock::Clock;
use crate::config::plan::{ActiveHealth, HostHeader};
use crate::stream::Stream;

/// First probes of a pool's upstreams are this far apart, so that a start is no burst.
const APART: Duration = Duration::from_millis(20);
/// Octets of a response head.
const MAX_HEAD: Limits = Limits { max_head: 64 << 10, max_fields: 256, max_target: 0 };
/// Octets of a body that are read to be polite; the head has said all.
const MAX_BODY: usize = 64 << 10;

/// Probes the upstream at `ix` of a pool with active checks, for ever: at first without a
/// pause until it has been judged, then once every interval.
pub async fn keep_probed(pool: Arc<Pool>, ix: usize, clock: Clock) {
    let (Some(upstream), Some(plan)) = (pool.upstreams.get(ix).cloned(), pool.plan.active.clone())
    else {
        return;
    };
    let request = request(&pool, &upstream, &plan);
    let apart = APART.min(plan.interval / pool.upstreams.len().max(1) as u32);
    tokio::time::sleep(apart * ix as u32 + apart.mul_f64(fastrand::f64() / 4.0)).await;
    loop {
        // Nobody is asked for a name without addresses: that the name has none keeps it out,
        // and the moment that it has some it should be judged.
        while upstream.current_addresses().is_empty() {
            tokio::time::sleep(APART).await;
        }
        let began = clock.now();
        let asked = tokio::time::timeout(plan.timeout, ask(&upstream, &request, &plan)).await;
        let (good, why) = match &asked {
            Ok(Ok(answer)) => {
                let status = answer.head.status;
                (is_expected(&plan, status), format!("status:{status}"))
            }
            // What this machine lacks says nothing about the upstream.
            Ok(Err(Failure::LocalShortage)) => {
                tokio::time::sleep(plan.interval).await;
                continue;
            }
            Ok(Err(failure)) => (false, failure.meaning().reason.to_owned()),
            Err(_) => (false, "timeout".to_owned()),
        };
        let again = pool.probed(ix, good, why, clock.now());
        if let Ok(Ok(answer)) = asked {
            // Closing over unread octets would look like an abort in the upstream's log.
            let _ = tokio::time::timeout(plan.timeout / 4, answer.drain()).await;
        }
        if !again {
            let pause = plan.interval.mul_f64(0.95 + fastrand::f64() / 10.0);
            tokio::time::sleep_until(clock.instant(began.plus(pause))).await;
        }
    }
}

fn request(pool: &Pool, upstream: &Upstream, plan: &ActiveHealth) -> String {
    let host = match &pool.plan.host_header {
        HostHeader::Literal(host) => host,
        HostHeader::Preserve | HostHeader::Upstream => &upstream.plan.authority,
    };
    format!(
        "{} {} HTTP/1.1\r\nHost: {host}\r\nUser-Agent: l7rp/{} (health check)\r\n\
         Accept: */*\r\nConnection: close\r\n\r\n",
        plan.method,
        plan.path,
        env!("CARGO_PKG_VERSION"),
    )
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

/// Sends one probe and waits for the head of the response.
async fn ask(upstream: &Upstream, request: &str, plan: &ActiveHealth) -> Result<Answer, Failure> {
    // The whole probe has a limit; the connection needs none of its own.
    let connected = connect(upstream, plan.timeout * 2).await;
    let mut stream = connected.map_err(|(failure, _)| failure)?;
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
