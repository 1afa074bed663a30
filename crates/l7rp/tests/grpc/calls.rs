//! What a call is to its ends does not depend on the program between them.

use tonic::Code;

use crate::bench::{Bench, Peer};
use crate::call::Call;

#[test]
fn metadata_and_a_message_go_both_ways() {
    let bench = Bench::start();
    let call = Call::new("Unary", &["grüße"])
        .with("peer-text", "a, b")
        .with("peer-octets-bin", "\u{0}\u{ff},\u{1}");
    for way in bench.ways() {
        let outcome = way.call(&call);
        outcome.assert_ok(&way);
        assert_eq!(outcome.messages, ["grüße"], "{way}");
        for (fields, before) in [(&outcome.initial, "got"), (&outcome.trailing, "end")] {
            for (name, value) in &call.metadata {
                assert_eq!(
                    fields.get(&format!("{before}-{name}")),
                    Some(value),
                    "{way} {fields:?}"
                );
            }
        }
    }
}

#[test]
fn many_messages_become_one() {
    let bench = Bench::start();
    for way in bench.ways() {
        let outcome = way.call(&Call::new("Collect", &["a", "", "bc", "d"]));
        outcome.assert_ok(&way);
        assert_eq!(outcome.messages, ["abcd"], "{way}");
    }
}

#[test]
fn one_message_becomes_many() {
    let bench = Bench::start();
    let expected: Vec<_> = (0..300).map(|number| number.to_string()).collect();
    for way in bench.ways() {
        let outcome = way.call(&Call::new("Expand", &["300 0"]));
        outcome.assert_ok(&way);
        assert_eq!(outcome.messages, expected, "{way}");
    }
}

/// The client sends a message when the answer to the one before is there, so a message that is
/// kept back anywhere is the last.
#[test]
fn messages_are_answered_while_the_client_has_more() {
    let bench = Bench::start();
    for way in bench.ways() {
        let outcome = way.call(&Call::new("Chat", &["one", "two", "", "three"]));
        outcome.assert_ok(&way);
        assert_eq!(outcome.messages, ["one", "two", "", "three"], "{way}");
    }
}

#[test]
fn a_deadline_passes_for_both_ends() {
    let bench = Bench::start();
    let call = Call { timeout: Some(0.5), ..Call::new("Late", &["60000"]) };
    for way in bench.ways() {
        // A connection that is there before takes nothing of the time.
        way.call(&Call::new("Unary", &["x"])).assert_ok(&way);
        let outcome = way.call_in_vain(&call);
        match (way.client, outcome.code()) {
            // tonic's own timer is called so; where the server's was faster it has the word.
            (Peer::Tonic, Code::Cancelled) => {
                assert_eq!(outcome.message, "Timeout expired", "{way}");
            }
            (_, code) => assert_eq!(code, Code::DeadlineExceeded, "{way}: {outcome:?}"),
        }
    }
}

#[test]
fn a_client_that_gives_up_is_seen_to() {
    let bench = Bench::start();
    for way in bench.ways() {
        let outcome = way.call_in_vain(&Call { cancel: true, ..Call::new("Hold", &["one"]) });
        assert_eq!(outcome.code(), Code::Cancelled, "{way}");
        assert_eq!(outcome.messages, ["one"], "{way}");
    }
}

#[test]
fn an_error_keeps_its_words() {
    let bench = Bench::start();
    for way in bench.ways() {
        let outcome = way.call(&Call::new("Missing", &["ein Löwe ☂, 100 %"]));
        assert_eq!(outcome.code(), Code::NotFound, "{way}");
        assert_eq!(outcome.message, "ein Löwe ☂, 100 %", "{way}");
        assert!(outcome.messages.is_empty(), "{way}");
    }
}

#[test]
fn messages_before_an_error_arrive() {
    let bench = Bench::start();
    for way in bench.ways() {
        let outcome = way.call(&Call::new("Partial", &["half"]).with("peer-text", "a"));
        assert_eq!(outcome.messages, ["half", "half"], "{way}");
        assert_eq!(
            (outcome.code(), outcome.message.as_str()),
            (Code::Aborted, "half way"),
            "{way}"
        );
        assert_eq!(outcome.trailing["end-peer-text"], "a", "{way}");
    }
}

#[test]
fn messages_of_four_mebibytes_go_both_ways() {
    let bench = Bench::start();
    // Of a length that is no multiple of any frame's, and no part of it like another.
    let numbers: Vec<_> = (0..800_000).map(|number| number.to_string()).collect();
    let message = &numbers.join(" ")[..=4 << 20];
    for way in bench.ways() {
        let outcome = way.call(&Call::new("Unary", &[message]));
        outcome.assert_ok(&way);
        assert!(outcome.messages == [message], "{way}: another message");
    }
}

/// tonic as a server would answer whatever it is called.
#[test]
fn what_no_route_takes_is_not_implemented() {
    let bench = Bench::start();
    for way in bench.ways() {
        let path = "/peer.Other/Unary".to_owned();
        let outcome = way.call(&Call { path, ..Call::new("Unary", &["x"]) });
        assert_eq!(outcome.code(), Code::Unimplemented, "{way}: {outcome:?}");
        assert!(outcome.messages.is_empty(), "{way}");
    }
    assert_eq!(bench.proxy.logged_path("/peer.Other/Unary")["reason"], "no_route");
}
