//! What gRPC says in fields of its own: how a call went, and how long it may take
//! ("gRPC over HTTP2", in the documentation of gRPC).

use std::time::Duration;

/// The names of all statuses, by number.
pub const STATUSES: [&str; 17] = [
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
];

const UNKNOWN: u8 = 2;

/// Whether a content type is that of gRPC. The variant for browsers has its status elsewhere.
pub fn is_content_type(value: &[u8]) -> bool {
    const KIND: &[u8] = b"application/grpc";
    let Some(rest) = value.get(KIND.len()..) else { return false };
    value[..KIND.len()].eq_ignore_ascii_case(KIND)
        && matches!(rest.first(), None | Some(b'+' | b';' | b' '))
}

/// The status in a `grpc-status` field. What is none is unknown.
pub fn status(value: &[u8]) -> u8 {
    let number = std::str::from_utf8(value).ok().and_then(|text| text.parse().ok());
    number.filter(|n| usize::from(*n) < STATUSES.len()).unwrap_or(UNKNOWN)
}

/// The time in a `grpc-timeout` field: at most eight digits and a unit.
pub fn timeout(value: &[u8]) -> Option<Duration> {
    let (unit, digits) = value.split_last()?;
    if digits.is_empty() || digits.len() > 8 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let n: u64 = std::str::from_utf8(digits).ok()?.parse().ok()?;
    Some(match unit {
        b'H' => Duration::from_secs(n * 3600),
        b'M' => Duration::from_secs(n * 60),
        b'S' => Duration::from_secs(n),
        b'm' => Duration::from_millis(n),
        b'u' => Duration::from_micros(n),
        b'n' => Duration::from_nanos(n),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_types() {
        for (value, is) in [
            ("application/grpc", true),
            ("Application/GRPC+proto", true),
            ("application/grpc;charset=x", true),
            ("application/grpc-web", false),
            ("application/grpc-web+proto", false),
            ("application/grp", false),
            ("application/json", false),
            ("", false),
        ] {
            assert_eq!(is_content_type(value.as_bytes()), is, "{value}");
        }
    }

    #[test]
    fn statuses() {
        for (value, number) in [("0", 0), ("14", 14), ("16", 16), ("17", 2), ("", 2), ("x", 2)] {
            assert_eq!(status(value.as_bytes()), number, "{value}");
        }
        assert_eq!((STATUSES[4], STATUSES[14]), ("DEADLINE_EXCEEDED", "UNAVAILABLE"));
    }

    #[test]
    fn timeouts() {
        let second = Duration::from_secs(1);
        for (value, time) in [
            ("1S", Some(second)),
            ("99999999H", Some(Duration::from_hours(99_999_999))),
            ("2M", Some(second * 120)),
            ("1000m", Some(second)),
            ("1000000u", Some(second)),
            ("0n", Some(Duration::ZERO)),
            ("123456789S", None),
            ("S", None),
            ("1", None),
            ("1s", None),
            ("-1S", None),
            ("", None),
        ] {
            assert_eq!(timeout(value.as_bytes()), time, "{value}");
        }
    }
}
