//! What a plan looks like to whoever may see it.

use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::{accepted, rest, route};
use crate::config::view;

/// Every key, and no value that another key has by default.
pub(super) const SHOWN: &str = include_str!("shown.yaml");

pub(super) fn shown(text: &str) -> Value {
    view(&accepted(text).plan)
}

#[test]
fn every_key_is_shown_as_the_file_has_it() {
    insta::assert_json_snapshot!(shown(SHOWN));
}

#[test]
fn names_stand_for_places() {
    let view = shown(SHOWN);
    assert_eq!(view["routes"][0]["pool"], "main");
    assert_eq!(view["routes"][0]["listeners"], json!(["local"]));
    assert_eq!(view["tcp_listeners"][0]["pool"], "redis");
}

#[test]
fn values_of_fields_are_digests_and_appear_nowhere() {
    let view = shown(SHOWN);
    let digest = |secret: &str| format!("digest:{:016x}", xxh3_64(secret.as_bytes()));
    let route = &view["routes"][0];
    let headers = &route["middleware"]["headers"];
    assert_eq!(headers["add_request"], json!({ "X-Key": digest("hunter2") }));
    assert_eq!(headers["add_response"], json!({ "X-Token": digest("hunter3") }));
    let predicates = json!([{ "name": "x-canary", "value": digest("open-sesame") }]);
    assert_eq!(route["header_predicates"], predicates);
    for secret in ["hunter2", "hunter3", "open-sesame"] {
        assert!(SHOWN.contains(secret) && !view.to_string().contains(secret), "{secret}");
    }
}

#[test]
fn what_is_written_in_another_way_is_the_same() {
    for (one, other) in [
        (rest("drain: { timeout: 90s }"), rest("drain: { timeout: 1m30s }")),
        (rest("drain: { delay: 1500ms }"), rest("drain: { delay: 1.5s }")),
        (route("host: A.Test"), route("host: a.test.")),
        (route(""), route("path_prefix: /")),
        (rest(""), rest("workers: auto")),
        (rest("workers: 0x2"), rest("workers: 2")),
    ] {
        assert_eq!(shown(&one), shown(&other), "{one}\n{other}");
    }
}
