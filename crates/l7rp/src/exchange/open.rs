//! A connection for a try: one that is there, one that somebody else is opening, or a new one.

use std::sync::Arc;

use l7rp_core::failure::Failure;
use l7rp_core::names::Nanos;

use super::Exchange;
use super::attempt::report;
use crate::upstream::connect::{Connected, connect};
use crate::upstream::connection::Connection;
use crate::upstream::opening::Turn;
use crate::upstream::pool::{Pool, Upstream};

/// A pooled connection, or else a new one; whether it is pooled.
pub(super) async fn open(
    x: &Exchange<'_>,
    pool: &Pool,
    upstream: &Arc<Upstream>,
    deadline: Nanos,
    may_reuse: bool,
) -> Result<(Connection, bool), Failure> {
    if !may_reuse {
        return Ok((open_new(x, pool, upstream, deadline, None).await?, false));
    }
    if let Some(pooled) = pooled(x, pool, upstream) {
        return Ok((pooled, true));
    }
    let clock = x.worker.process.clock;
    let until = clock.now().plus(pool.plan.connect_timeout).min(deadline);
    // Those that come at once share what one of them opens.
    while upstream.is_shared() {
        let theirs = match x.worker.h2.openings.turn(upstream.id) {
            Ok(turn) => {
                let opened = open_new(x, pool, upstream, deadline, Some(turn)).await?;
                return Ok((opened, false));
            }
            Err(theirs) => theirs,
        };
        match tokio::time::timeout_at(clock.instant(until), theirs.over()).await {
            Ok(over) => over?,
            Err(_) if until == deadline => return Err(x.out_of_time(deadline)),
            Err(_) => return Err(Failure::ConnectTimeout),
        }
        if let Some(shared) = shared(x, pool, upstream) {
            return Ok((shared, false));
        }
    }
    Ok((open_new(x, pool, upstream, deadline, None).await?, false))
}

/// A request's place on a connection that carries many.
fn shared(x: &Exchange<'_>, pool: &Pool, upstream: &Arc<Upstream>) -> Option<Connection> {
    let worker = x.worker;
    let now = worker.process.clock.now();
    let stream = worker.h2.take(upstream, now, pool.plan.keepalive.idle_timeout)?;
    Some(Connection::shared(stream, upstream, worker.index))
}

fn pooled(x: &Exchange<'_>, pool: &Pool, upstream: &Arc<Upstream>) -> Option<Connection> {
    let worker = x.worker;
    let only_fresh = !x.incoming.head.method.is_idempotent();
    shared(x, pool, upstream).or_else(|| {
        worker.idle.take(upstream, worker.process.clock.now(), only_fresh, worker.index)
    })
}

/// A new connection. `turn`: of those who would share it.
async fn open_new(
    x: &Exchange<'_>,
    pool: &Pool,
    upstream: &Arc<Upstream>,
    deadline: Nanos,
    turn: Option<Turn>,
) -> Result<Connection, Failure> {
    let worker = x.worker;
    let now = worker.process.clock.now();
    let left = deadline.since(now);
    let limit = pool.plan.connect_timeout.min(left);
    let connected = match connect(upstream, limit).await {
        // Idle connections are worth less than this request.
        Err((Failure::LocalShortage, _)) if worker.idle.make_room(worker.index) => {
            connect(upstream, limit).await
        }
        connected => connected,
    };
    match connected {
        Ok(Connected { stream, is_http2 }) => {
            let connection = Connection::new(stream, upstream, worker.index);
            if !is_http2 {
                return Ok(connection);
            }
            let keep_for = pool.plan.keepalive.idle_timeout;
            let opened = worker.h2.open(connection, now, keep_for, turn).await;
            let stream = opened.map_err(|e| {
                report(x, pool, upstream, Failure::UpstreamClosed, &e.to_string());
                Failure::UpstreamClosed
            })?;
            Ok(Connection::shared(stream, upstream, worker.index))
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
