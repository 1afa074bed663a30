//! What is looked at in calls of gRPC: whether it is one, its deadline, its outcome.

use std::time::Duration;

use l7rp_core::grpc;
use l7rp_core::head::{Field, value};
use l7rp_core::http1::request::Request;

/// Whether a request is a call.
pub(super) fn is_call(buf: &[u8], head: &Request) -> bool {
    value(&head.fields, buf, "content-type").is_some_and(grpc::is_content_type)
}

/// How long a call may take, by its own word.
pub(super) fn timeout(buf: &[u8], head: &Request) -> Option<Duration> {
    value(&head.fields, buf, "grpc-timeout").and_then(grpc::timeout)
}

/// How a call went, if the head of the response says so already.
pub(super) fn status(buf: &[u8], fields: &[Field]) -> Option<u8> {
    value(fields, buf, "grpc-status").map(grpc::status)
}

/// How a call went, by the trailer section of the response.
pub(super) fn status_in_trailer(section: &[u8]) -> Option<u8> {
    section.split(|&b| b == b'\n').find_map(|line| {
        let (name, value) = line.split_at(memchr::memchr(b':', line)?);
        name.eq_ignore_ascii_case(b"grpc-status").then(|| grpc::status(value[1..].trim_ascii()))
    })
}

/// Whether a call's response says when to try again, or never to: that is the client's to obey.
pub(super) fn pushes_back(buf: &[u8], fields: &[Field]) -> bool {
    value(fields, buf, "grpc-retry-pushback-ms").is_some_and(|ms| ms != b"0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trailer_section_has_the_status_in_any_place() {
        for (section, status) in [
            ("0\r\ngrpc-status: 14\r\n\r\n", Some(14)),
            ("0\r\nx: 1\r\nGrpc-Status:5\r\ngrpc-message: no\r\n\r\n", Some(5)),
            ("0\r\nx-grpc-status: 5\r\n\r\n", None),
            ("0\r\n\r\n", None),
        ] {
            assert_eq!(status_in_trailer(section.as_bytes()), status, "{section:?}");
        }
    }
}
