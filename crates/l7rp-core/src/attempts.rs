//! Whether a failed try may be followed by another.

use crate::failure::{Again, Failure};

/// What is known about one request that bears on trying it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its method may be repeated (RFC 9110 §9.2.2).
    pub idempotent: bool,
    /// All that was sent so far can be sent again.
    pub replayable: bool,
    /// Upstreams that have let it wait for a connection in vain.
    pub connect_timeouts: u32,
}

/// A request waits for a connection in vain at this many upstreams at most: each costs a whole
/// `connect_timeout`.
const MAX_CONNECT_TIMEOUTS: u32 = 3;

/// What to do after a failed try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Try another upstream.
    Another,
    /// Try the same upstream once more on a new connection: the pooled one was stale.
    SameAnew,
    /// The failure is the client's answer.
    GiveUp,
}

/// Decides after `failure`. `pooled`: the try went out on a connection that had served before
/// and the upstream gave no octet of an answer.
///
/// A request of which nothing was sent moves on whatever its method. One that died with a
/// pooled connection is most likely to have met the upstream's idle timeout; it is repeated
/// only if its method allows, because the upstream may have acted on it (RFC 9110 §9.2.2).
pub fn after(failure: Failure, request: Request, pooled: bool) -> Next {
    match failure.meaning().again {
        Again::Unsent if request.connect_timeouts >= MAX_CONNECT_TIMEOUTS => Next::GiveUp,
        Again::Unsent => Next::Another,
        Again::IfRepeatable
            if pooled
                && request.idempotent
                && request.replayable
                && failure == Failure::UpstreamClosed =>
        {
            Next::SameAnew
        }
        Again::IfRepeatable | Again::No => Next::GiveUp,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table() {
        let get = Request { idempotent: true, replayable: true, connect_timeouts: 0 };
        let post = Request { idempotent: false, ..get };
        let long_put = Request { replayable: false, ..get };
        let patient = Request { connect_timeouts: 2, ..get };
        let tired = Request { connect_timeouts: 3, ..get };
        for (failure, request, pooled, next) in [
            (Failure::ConnectRefused, post, false, Next::Another),
            (Failure::ConnectTimeout, long_put, false, Next::Another),
            (Failure::Unresolved, get, false, Next::Another),
            (Failure::ConnectTimeout, patient, false, Next::Another),
            (Failure::ConnectTimeout, tired, false, Next::GiveUp),
            (Failure::UpstreamClosed, get, true, Next::SameAnew),
            (Failure::UpstreamClosed, get, false, Next::GiveUp),
            (Failure::UpstreamClosed, post, true, Next::GiveUp),
            (Failure::UpstreamClosed, long_put, true, Next::GiveUp),
            (Failure::ResponseTimeout, get, true, Next::GiveUp),
            (Failure::LocalShortage, get, false, Next::GiveUp),
            (Failure::ClientGone, get, true, Next::GiveUp),
            (Failure::TotalTimeout, get, true, Next::GiveUp),
        ] {
            assert_eq!(after(failure, request, pooled), next, "{failure:?} {request:?} {pooled}");
        }
    }
}
