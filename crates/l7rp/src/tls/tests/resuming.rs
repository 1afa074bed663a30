//! Handshakes that are shorter because there was one before.

use rustls::HandshakeKind;

use super::super::testing::{self, Ca};
use super::{Originator, Terminator, a_word, originator, reason, shake, trusting};
use crate::config::plan::{ClientAuth, ListenerTls, UpstreamTls};
use crate::tls::Resumption;

async fn kind(server: &Terminator, client: &Originator) -> HandshakeKind {
    let (accepted, connected) = shake(server, client, "a.test").await;
    a_word(accepted.unwrap().stream, connected.unwrap().0).await
}

fn is_full(kind: HandshakeKind) -> bool {
    kind != HandshakeKind::Resumed
}

#[tokio::test]
async fn a_ticket_is_good_after_a_reload_but_not_in_another_process() {
    let ca = Ca::new("ca");
    let plan = testing::listener(vec![ca.issue("a", &["a.test"])]);
    let resumption = Resumption::new().unwrap();
    let client = originator(&trusting(&ca));
    let server = Terminator::new(&plan, &resumption, None).unwrap();
    assert!(is_full(kind(&server, &client).await));
    assert!(!is_full(kind(&server, &client).await));
    drop(server);
    let reloaded = Terminator::new(&plan, &resumption, None).unwrap();
    assert!(!is_full(kind(&reloaded, &client).await));
    let elsewhere = Terminator::new(&plan, &Resumption::new().unwrap(), None).unwrap();
    assert!(is_full(kind(&elsewhere, &client).await));
}

#[tokio::test]
async fn a_ticket_opens_no_door_that_asks_for_more() {
    let (ca, other) = (Ca::new("ca"), Ca::new("other"));
    let open = testing::listener(vec![ca.issue("a", &["a.test"])]);
    let guarded = |ca: &Ca, required| {
        let client_auth =
            Some(ClientAuth { ca_file: ca.path("ca.pem"), required, identity_header: None });
        ListenerTls { client_auth, ..open.clone() }
    };
    let resumption = Resumption::new().unwrap();
    let new = |plan: &ListenerTls| Terminator::new(plan, &resumption, None).unwrap();
    let (open, optional) = (new(&open), new(&guarded(&ca, false)));
    let (required, others) = (new(&guarded(&ca, true)), new(&guarded(&other, true)));
    for first in [&open, &optional] {
        let client = originator(&trusting(&ca));
        kind(first, &client).await;
        kind(first, &client).await;
        let (accepted, _) = shake(&required, &client, "a.test").await;
        assert_eq!(reason(accepted), "client_certificate_missing");
    }
    let certificate = ca.issue("alice", &["alice.test"]);
    let client_cert = Some((certificate.cert, certificate.key));
    let plan = UpstreamTls { client_cert, ..trusting(&ca) };
    let client = originator(&plan);
    assert!(is_full(kind(&required, &client).await));
    let (accepted, connected) = shake(&required, &client, "a.test").await;
    let accepted = accepted.unwrap();
    assert_eq!(accepted.client_identity.as_deref(), Some("CN=alice"));
    assert!(!is_full(a_word(accepted.stream, connected.unwrap().0).await), "with who it was");
    // The same rule again, as after a reload, while the one before is still there.
    assert!(!is_full(kind(&new(&guarded(&ca, true)), &client).await));
    let (accepted, _) = shake(&others, &client, "a.test").await;
    assert_eq!(reason(accepted), "client_certificate_refused");
}
