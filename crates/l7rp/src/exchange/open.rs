//! A connection for a try: one that is there, one that somebody else is opening, or a new one.

use std::sync::Arc;
use std::time::Duration;

use l7rp_core::failure::Failure;
use l7rp_core::names::Nanos;

use super::Exchange;
use super::attempt::report;
use crate::upstream::connect::{Connected, connect};
use crate::upstream::connection::Connection;
use crate::upstream::opening::Turn;
use crate::upstream::pool::{Pool, Speaks, Upstream};

/// How long a request waits for what others open, before it opens a connection for itself.
const PATIENCE: Duration = Duration::from_secs(1);

/// Which connections will do for a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    /// One that is there.
    Pooled,
    /// Another than the one before, but one that others use as well.
    Other,
    /// A new one of its own.
    New,
}

impl Which {
    /// For a first try; `may_reuse`: on a connection that is there.
    pub(super) fn first(may_reuse: bool) -> Self {
        if may_reuse { Self::Pooled } else { Self::New }
    }

    /// After one that came to nothing so. Those that were sent away with their connection are many
    /// at once; who was turned away alone may be so again where others are before it.
    pub(super) fn again(failure: Failure) -> Self {
        match failure {
            Failure::StreamRefused { gone: true } => Self::Other,
            _ => Self::New,
        }
    }
}

/// A pooled connection, or else a new one; whether it is pooled, and so taken without waiting.
pub(super) async fn open(
    x: &Exchange<'_>,
    pool: &Pool,
    upstream: &Arc<Upstream>,
    deadline: Nanos,
    which: Which,
    now: Nanos,
) -> Result<(Connection, bool), Failure> {
    let clock = x.worker.process.clock;
    let shares = which != Which::New && upstream.is_shared() && !needs_h1(x, upstream);
    let pooled = match which {
        Which::Pooled => pooled(x, pool, upstream, shares, now),
        Which::Other if shares => shared(x, pool, upstream, now),
        Which::Other | Which::New => None,
    };
    if let Some(pooled) = pooled {
        return Ok((pooled, true));
    }
    // Those that come at once share what one of them opens.
    let patience = now.plus(PATIENCE);
    while shares && clock.now() < patience {
        let theirs = match x.worker.h2.openings.turn(upstream.id) {
            Ok(turn) => {
                let opened = Box::pin(open_new(x, pool, upstream, deadline, Some(turn))).await?;
                return Ok((opened, false));
            }
            Err(theirs) => theirs,
        };
        let until = clock.instant(patience.min(deadline));
        match tokio::time::timeout_at(until, theirs.over()).await {
            Ok(over) => over?,
            Err(_) if deadline <= patience => return Err(x.out_of_time(deadline)),
            Err(_) => break,
        }
        if let Some(shared) = shared(x, pool, upstream, clock.now()) {
            return Ok((shared, false));
        }
    }
    Ok((Box::pin(open_new(x, pool, upstream, deadline, None)).await?, false))
}

/// Whether only HTTP/1.1 will do: another protocol is offered, which HTTP/2 does not know.
fn needs_h1(x: &Exchange<'_>, upstream: &Upstream) -> bool {
    x.incoming.head.upgrade.len > 0 && upstream.speaks == Speaks::AsAgreed
}

/// A request's place on a connection that carries many.
fn shared(
    x: &Exchange<'_>,
    pool: &Pool,
    upstream: &Arc<Upstream>,
    now: Nanos,
) -> Option<Connection> {
    let (worker, keep_for) = (x.worker, pool.plan.keepalive.idle_timeout);
    let (stream, opened) = worker.h2.take(upstream, now, keep_for)?;
    Some(Connection::shared(stream, upstream, worker.index, opened))
}

fn pooled(
    x: &Exchange<'_>,
    pool: &Pool,
    upstream: &Arc<Upstream>,
    shares: bool,
    now: Nanos,
) -> Option<Connection> {
    let worker = x.worker;
    let only_fresh = !x.incoming.head.method.is_idempotent();
    let place = shares.then(|| shared(x, pool, upstream, now)).flatten();
    place.or_else(|| worker.idle.take(upstream, now, only_fresh, worker.index))
}

/// A new connection. `turn`: of those who would share it. Few requests need one, so the state that
/// this takes is apart from that of all the others.
async fn open_new(
    x: &Exchange<'_>,
    pool: &Pool,
    upstream: &Arc<Upstream>,
    deadline: Nanos,
    turn: Option<Turn>,
) -> Result<Connection, Failure> {
    let worker = x.worker;
    let clock = worker.process.clock;
    let left = deadline.since(clock.now());
    let limit = pool.plan.connect_timeout.min(left);
    let only_h1 = needs_h1(x, upstream);
    let connected = match connect(upstream, limit, only_h1).await {
        // Idle connections are worth less than this request.
        Err((Failure::LocalShortage, _)) if worker.idle.make_room(worker.index) => {
            connect(upstream, limit, only_h1).await
        }
        connected => connected,
    };
    match connected {
        Ok(Connected { stream, is_http2 }) => {
            let now = clock.now();
            let connection = Connection::new(stream, upstream, worker.index, now);
            if !is_http2 {
                return Ok(connection);
            }
            let keep_for = pool.plan.keepalive.idle_timeout;
            let opened = worker.h2.open(connection, now, keep_for, turn).await;
            let stream = opened.map_err(|e| {
                report(x, pool, upstream, Failure::UpstreamClosed, &e.to_string());
                Failure::UpstreamClosed
            })?;
            Ok(Connection::shared(stream, upstream, worker.index, now))
        }
        // Others may have more time.
        Err((Failure::ConnectTimeout, _)) if limit == left => Err(x.out_of_time(deadline)),
        Err((failure, words)) => {
            if let Some(turn) = turn {
                turn.failed(failure);
            }
            upstream.ask_again();
            report(x, pool, upstream, failure, &words);
            Err(failure)
        }
    }
}
