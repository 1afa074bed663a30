//! Messages that nobody has a reason to refuse, through l7rp, nginx and haproxy, each in front
//! of the same recording backend: what arrives there is the same thing, apart from what is
//! listed in [`listed`] with reasons.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a test that cannot talk to the programs has failed; pauses are real here"
)]

#[expect(dead_code, reason = "shared with the corpus test, which uses all of it")]
#[path = "../corpus/case.rs"]
mod case;
#[expect(dead_code, reason = "shared with the corpus test, which uses all of it")]
#[path = "../corpus/client.rs"]
mod client;
mod listed;
#[expect(dead_code, reason = "shared with the corpus test, which uses all of it")]
#[path = "../corpus/origin.rs"]
mod origin;
mod proxies;
#[path = "../corpus/proxy.rs"]
#[expect(dead_code, reason = "shared with the corpus test, which uses all of it")]
mod proxy;
#[path = "../corpus/wire.rs"]
mod wire;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use case::{Action, RequestCase};
use client::Client;
use listed::{LISTED, NAMES, Name};
use origin::{Origin, Seen};
use proxies::Other;

/// What one request was to the backend, by aspect: what a difference can be in.
type View = BTreeMap<String, String>;

/// The requests of one case as the backend saw them.
type Views = Vec<View>;

#[test]
fn the_backend_sees_what_it_sees_behind_others() {
    let cases: Vec<_> = case::requests()
        .into_iter()
        .filter(|c| c.class == "benign" || c.expect.action == Action::Forward)
        .collect();
    assert!(cases.len() > 100, "where are they?");
    let cases = &cases[..];
    let [ours, others @ ..] = thread::scope(|scope| {
        NAMES
            .map(|name| scope.spawn(move || all_views(name, cases)))
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    });
    let mut unlisted = String::new();
    let mut used = BTreeSet::new();
    for (name, theirs) in NAMES[1..].iter().zip(&others) {
        for ((case, ours), theirs) in cases.iter().zip(&ours).zip(theirs) {
            for (aspect, difference) in differences(ours, theirs) {
                let found = LISTED.iter().position(|l| l.covers(*name, &case.id, &aspect));
                used.extend(found);
                if found.is_none() {
                    let Name(name) = name;
                    let _ = writeln!(unlisted, "{} {name} {aspect}: {difference}", case.id);
                }
            }
        }
    }
    assert!(unlisted.is_empty(), "differences without a listed reason:\n{unlisted}");
    for (ix, listed) in LISTED.iter().enumerate() {
        assert!(used.contains(&ix), "there is no such difference any more: {listed:?}");
    }
}

fn all_views(name: Name, cases: &[RequestCase]) -> Vec<Views> {
    let origin = Origin::start();
    match name {
        Name("nginx") => {
            let nginx = Other::nginx(origin.addr);
            cases.iter().map(|case| views(case, nginx.address, &origin)).collect()
        }
        Name("haproxy") => {
            let haproxy = Other::haproxy(origin.addr);
            cases.iter().map(|case| views(case, haproxy.address, &origin)).collect()
        }
        _ => {
            let proxy = proxy::start(origin.addr);
            cases.iter().map(|case| views(case, proxy.address(), &origin)).collect()
        }
    }
}

/// Sends one case, reads the answers, and gives what the backend saw.
fn views(case: &RequestCase, address: SocketAddr, origin: &Origin) -> Views {
    origin.begin(None);
    let mut client = Client::connect(address);
    client.send(&case.raw.0, &case.split, case.half_close);
    let to_head = case.raw.0.starts_with(b"HEAD ");
    for _ in 0..case.responses {
        let (answer, stop) = client.answer(to_head);
        if answer.is_none() || stop.is_some() {
            break;
        }
    }
    // Half a request may stay there; then the difference is told as one.
    origin.settle(Duration::from_secs(2));
    origin.connections().iter().flat_map(|c| &c.seen).map(view).collect()
}

fn view(seen: &Seen) -> View {
    let head = &seen.head;
    let framing = match head.framing() {
        Ok(None) => "none",
        Ok(Some(wire::Framing::Length(_))) => "length",
        Ok(Some(_)) => "chunked",
        Err(_) => "broken",
    };
    let text = |octets: &[u8]| octets.escape_ascii().to_string();
    let mut view = View::from([
        ("method".to_owned(), seen.method.clone()),
        ("target".to_owned(), seen.target.clone()),
        ("framing".to_owned(), framing.to_owned()),
        ("body".to_owned(), text(&seen.body.content)),
        ("complete".to_owned(), seen.complete.to_string()),
        ("trailers".to_owned(), format!("{:?}", seen.body.trailers)),
    ]);
    for (name, value) in &head.fields {
        if matches!(name.as_str(), "content-length" | "transfer-encoding") {
            continue;
        }
        let all = view.entry(format!("field {name}")).or_default();
        let _ = write!(all, "[{}]", value.escape_default());
    }
    view
}

/// The aspects that are not the same, and how.
fn differences(ours: &Views, theirs: &Views) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    if ours.len() != theirs.len() {
        found.insert("requests".to_owned(), format!("{}, but {}", ours.len(), theirs.len()));
        return found;
    }
    for (ours, theirs) in ours.iter().zip(theirs) {
        let aspects: BTreeSet<_> = ours.keys().chain(theirs.keys()).collect();
        for aspect in aspects {
            let (a, b) = (ours.get(aspect), theirs.get(aspect));
            if a != b {
                let shown = |v: Option<&String>| {
                    v.map_or("nothing".to_owned(), |v| v.chars().take(60).collect())
                };
                found.insert(aspect.clone(), format!("{}, but {}", shown(a), shown(b)));
            }
        }
    }
    found
}
