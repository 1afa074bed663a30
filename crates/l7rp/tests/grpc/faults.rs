//! What goes wrong beside the calls, or below them, is a gRPC status all the same.

use h2::Reason;
use l7rp_testkit::{Origin, Proxy, SOON, eventually};
use tonic::Code;

use crate::bench::{Bench, proxy_of};
use crate::call::{Call, Outcome};
use crate::python::PythonClient;
use crate::raw::{REPLY, RawServer, Script, head_of};
use crate::tonic_client::endpoint;
use crate::{tonic_client, wait};

/// What becomes of the call when tonic makes it, and when Python does.
#[track_caller]
fn by_both(proxy: &Proxy, call: &Call) -> [Outcome; 2] {
    let by_tonic = wait(async {
        let channel = endpoint(proxy.address(), "a.test", None).connect().await;
        tonic_client::call(channel.expect("it accepts"), call).await
    });
    [by_tonic, PythonClient::start().call(proxy.address(), "a.test", None, call)]
}

#[test]
fn an_upstream_that_is_down_is_unavailable() {
    let proxy = proxy_of(&Origin::refusing().url().replace("http:", "h2c:"));
    for outcome in by_both(&proxy, &Call::new("Unary", &["x"])) {
        assert_eq!(outcome.code(), Code::Unavailable, "{outcome:?}");
    }
    // It was not the listener that was down.
    eventually(SOON, || proxy.events("request_completed").len() == 2);
}

#[test]
fn an_answer_that_is_cut_is_no_success() {
    for replies in 1..3 {
        let server = RawServer::start(Script::Resets(Reason::INTERNAL_ERROR, replies));
        let proxy = proxy_of(&server.url());
        // What the server sends just before the reset may be lost with it.
        for method in ["Unary", "Expand", "Collect"] {
            for outcome in by_both(&proxy, &Call::new(method, &["1 0"])) {
                assert_ne!(outcome.code(), Code::Ok, "{method} {outcome:?}");
            }
        }
        // Here the client says more when it has the reply, and the reset comes after that.
        let messages = vec!["more"; replies + 1];
        for outcome in by_both(&proxy, &Call::new("Chat", &messages)) {
            assert_eq!(outcome.code(), Code::Internal, "{outcome:?}");
            assert_eq!(outcome.messages, vec![REPLY; replies], "{outcome:?}");
        }
        assert_eq!(server.seen().heads.len(), 8);
    }
}

#[test]
fn what_a_server_needs_to_know_arrives() {
    let server = RawServer::start(Script::Resets(Reason::INTERNAL_ERROR, 0));
    let proxy = proxy_of(&server.url());
    by_both(&proxy, &Call { timeout: Some(5.0), ..Call::new("Unary", &["x"]) });
    let heads = server.seen().heads;
    assert_eq!(heads.len(), 2);
    for head in heads {
        // Without it servers of C take the client for a proxy that would drop trailers.
        assert_eq!(head.get("te").expect("it is there"), "trailers", "{head:?}");
        assert_eq!(head.get("content-type").expect("it is there"), "application/grpc", "{head:?}");
        assert!(head.contains_key("grpc-timeout"), "{head:?}");
    }
}

/// This server does not look at deadlines: it can hear of them as resets only.
#[test]
fn a_deadline_is_a_reset_for_the_server() {
    let server = RawServer::start(Script::Waits);
    let proxy = proxy_of(&server.url());
    let outcomes = by_both(&proxy, &Call { timeout: Some(1.0), ..Call::new("Late", &["60000"]) });
    let codes = outcomes.map(|outcome| outcome.code());
    // tonic names its own timer so.
    assert_eq!(codes, [Code::Cancelled, Code::DeadlineExceeded]);
    eventually(SOON, || server.seen().resets.len() == 2);
    assert_eq!(server.seen().resets, [Reason::CANCEL; 2]);
}

#[test]
fn trailers_alone_stay_alone() {
    let bench = Bench::start();
    for host in ["tonic.test", "python.test"] {
        let (head, ends) = head_of(&bench.proxy, host, "/peer.Echo/Missing", "kein Löwe ☂");
        assert!(ends, "{host}: {head:?}");
        assert_eq!(head.get("grpc-status").expect("a status"), "5", "{host}");
        let words = head.get("grpc-message").expect("words").to_str().expect("text");
        // Which letters need it is the server's to say.
        assert!(words.contains("L%C3%B6we") && words.contains("%E2%98%82"), "{host}: {words}");
    }
}
