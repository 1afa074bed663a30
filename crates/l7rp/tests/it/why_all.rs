//! That every cause in the table of failures has a line that explains it, in `why` and the files
//! beside it, or a reason why nobody outside can bring it about.

use l7rp_core::failure::{Failure, Malformed, Scope};

use crate::why::BAD_RESPONSES;
use crate::why_clients::BAD_REQUESTS;

/// Where the lines are.
const SHOWN: [&str; 4] = [
    include_str!("why.rs"),
    include_str!("why_tries.rs"),
    include_str!("why_clients.rs"),
    include_str!("why_limits.rs"),
];

/// What has no line.
const NOT_SHOWN: [(&str, &str); 2] = [
    ("capacity_connections", "no request is read: it is counted, and has no line"),
    ("internal_error", "a fault of ours, which unit tests of the exchange make"),
];

/// What no request can be.
const NO_REQUEST: [Malformed; 2] = [Malformed::StatusCode, Malformed::Interim];
/// What no response can be.
const NO_RESPONSE: [Malformed; 5] = [
    Malformed::Target,
    Malformed::HostMissing,
    Malformed::HostRepeated,
    Malformed::HostInvalid,
    Malformed::EarlyUpgrade,
];

/// A list of variants that does not compile unless it has them all.
macro_rules! every {
    ($all:ident: $of:ident { $($name:ident $(($inner:path))? $({ $key:ident: $value:expr })?),* $(,)? }
     $({ $rest:pat })?) => {
        const $all: &[$of] = &[$($of::$name $(($inner))? $({ $key: $value })?),*];
        const _: fn($of) = |one| match one {
            $($of::$name $(($inner))? $({ $key: _ })? => {})*
            $($rest => {})?
        };
    };
}

every!(MALFORMED: Malformed {
    StartLine, Target, FieldName, FieldValue, LineEnding, HostMissing, HostRepeated,
    HostInvalid, ContentLength, TransferEncoding, LengthAndChunked, Chunk, Trailer, EarlyUpgrade,
    StatusCode, Interim,
});

every!(FAILURES: Failure {
    TargetTooLong, HeadTooLarge, TooManyFields, VersionUnsupported, MethodRefused,
    ExpectationUnknown, Misdirected, BodyTooLarge, HeadTimeout, BodyTimeout, BodyTooSlow,
    TunnelIdle, ClientGone, ClientStalled, NoRoute, Forbidden, RateLimited { wait: 1 },
    Capacity(Scope::Process), Capacity(Scope::Listener), Capacity(Scope::Pool),
    Capacity(Scope::Upstream), Capacity(Scope::Connections), NoUpstream, BreakerOpen { wait: 1 },
    Unresolved, ConnectRefused, ConnectTimeout, ConnectFailed, TlsCertificate, TlsProtocol,
    LocalShortage, UpstreamClosed, StreamRefused { gone: false }, ResponseTimeout, TotalTimeout,
    DeadlineExceeded, ResponseHeadTooLarge, ResponseTruncated, ResponseStalled, Draining, Internal,
} { Failure::BadRequest(_) | Failure::BadResponse(_) });

#[test]
fn every_failure_is_explained() {
    for failure in FAILURES {
        let reason = failure.meaning().reason;
        let is_shown = SHOWN.iter().any(|text| text.contains(&format!("\"{reason}\"")));
        let is_excused = NOT_SHOWN.iter().any(|(name, _)| *name == reason);
        assert!(is_shown != is_excused, "{reason}: shown {is_shown}, excused {is_excused}");
    }
}

#[test]
fn everything_that_is_malformed_is_explained() {
    for why in MALFORMED {
        let is_in = |all: &[(&str, &str)]| all.iter().any(|(_, reason)| *reason == why.name());
        assert!(is_in(&BAD_REQUESTS) != NO_REQUEST.contains(why), "{why:?} of requests");
        assert!(is_in(&BAD_RESPONSES) != NO_RESPONSE.contains(why), "{why:?} of responses");
    }
}

#[test]
fn every_reason_not_to_try_again_is_shown() {
    use l7rp_core::attempts::Stop;
    every!(STOPS: Stop {
        NoRule, Method, Outcome, Final, Attempts, Body, Told, Draining, Deadline, StayAway,
        Patience, Budget, NoUpstream,
    });
    for stop in STOPS {
        let word = format!("\"{}\"", stop.name());
        assert!(SHOWN.iter().any(|text| text.contains(&word)), "{word}");
    }
}
