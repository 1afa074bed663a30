//! Hostile and benign messages against the running program: every record of the two files goes
//! through it over raw sockets, and what the client and the backend saw is judged.
//!
//! The expectations assume one cleartext listener and a route for everything to one upstream,
//! deadlines of 2 s, bodies up to 10 MiB, targets up to 16 KiB, and no retries.

#![expect(
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "a test that cannot talk to the program has failed; deadlines and pauses are real here"
)]

mod case;
mod client;
mod judge;
mod origin;
mod proxy;
mod wire;

use std::fmt::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use case::{RequestCase, ResponseCase};
use client::{After, Client, ask};
use judge::Observed;
use l7rp_testkit::{Proxy, within};
use origin::Origin;
use proxy::Holdings;
use wire::Stop;

/// What the program is known not to do yet, and why. Each entry must still fail.
const NOT_YET: &[(&str, &str)] = &[];

/// Programs that take cases at the same time; most cases wait for a deadline or for nothing.
const AT_ONCE: usize = 6;

#[test]
fn requests_are_forwarded_or_refused_as_the_corpus_says() {
    verify(&case::requests(), |c| (&c.id, &c.class, &c.desc), request);
}

#[test]
fn responses_are_passed_on_or_refused_as_the_corpus_says() {
    verify(&case::responses(), |c| (&c.id, &c.class, &c.desc), response);
}

/// A case that went wrong.
struct Failed {
    class: String,
    id: String,
    text: String,
}

/// Runs all cases and says everything that is wrong in one message.
fn verify<T: Sync>(
    cases: &[T],
    name: impl Fn(&T) -> (&String, &String, &String) + Sync,
    run: impl Fn(&T, &Proxy, &Origin) -> Result<(), String> + Sync,
) {
    let next = AtomicUsize::new(0);
    let (name, run, next) = (&name, &run, &next);
    let mut failed: Vec<Failed> = thread::scope(|scope| {
        let batch = || {
            let mut failed = Vec::new();
            let origin = Origin::start();
            let proxy = proxy::start(origin.addr);
            // The first may take as long as a program needs to start on a busy machine.
            let first = ask(proxy.address(), "first").or_else(|_| ask(proxy.address(), "first"));
            assert!(first.is_ok(), "{first:?}");
            origin.begin(None);
            let before = Holdings::of(&proxy);
            while let Some(case) = cases.get(next.fetch_add(1, Relaxed)) {
                let (id, class, desc) = name(case);
                if let Err(text) = run(case, &proxy, &origin) {
                    let text = format!("  {id} ({desc})\n{text}");
                    failed.push(Failed { class: class.clone(), id: id.clone(), text });
                }
            }
            origin.begin(None);
            for leak in proxy::leaks(&proxy, &before) {
                failed.push(Failed { class: "after all".into(), id: String::new(), text: leak });
            }
            failed
        };
        let batches: Vec<_> = (0..AT_ONCE).map(|_| scope.spawn(batch)).collect();
        batches.into_iter().flat_map(|b| b.join().expect("a batch")).collect()
    });
    let ids: Vec<&String> = cases.iter().map(|c| name(c).0).collect();
    for (id, why) in NOT_YET.iter().filter(|(id, _)| ids.iter().any(|known| *known == id)) {
        let before = failed.len();
        failed.retain(|f| f.id != *id);
        let text = format!("  {id} passes: take it out of NOT_YET ({why})");
        if failed.len() == before {
            failed.push(Failed { class: "not yet".into(), id: (*id).to_owned(), text });
        }
    }
    failed.sort_by(|a, b| (&a.class, &a.id).cmp(&(&b.class, &b.id)));
    let mut report = format!("{} of {} cases failed", failed.len(), cases.len());
    let mut class = "";
    for one in &failed {
        if one.class != class {
            class = &one.class;
            let _ = write!(report, "\n\n{class}");
        }
        let _ = write!(report, "\n{}", one.text);
    }
    assert!(failed.is_empty(), "{report}\n");
}

fn request(case: &RequestCase, proxy: &Proxy, origin: &Origin) -> Result<(), String> {
    origin.begin(None);
    let breaker = Breaker { opened_before: proxy::opened(proxy), may_open: false };
    let mut client = Client::connect(proxy.address());
    client.send(&case.raw.0, &case.split, case.half_close);
    let to_head = case.raw.0.starts_with(b"HEAD ");
    let may_send = !case.half_close;
    let observed =
        observe(&mut client, case.responses, to_head, may_send, &breaker, proxy, origin)?;
    verdicts(&observed, std::iter::once(&case.expect).chain(&case.also_ok), |verdict| {
        judge::request(case, verdict, &observed)
    })
}

fn response(case: &ResponseCase, proxy: &Proxy, origin: &Origin) -> Result<(), String> {
    origin.begin(Some(Arc::new(case.clone())));
    if case.pooled {
        ask(proxy.address(), "before")?;
    }
    let mut all = std::iter::once(&case.expect).chain(&case.also_ok);
    let may_open = all.any(|verdict| verdict.breaker.as_deref() == Some("failure"));
    let breaker = Breaker { opened_before: proxy::opened(proxy), may_open };
    let mut client = Client::connect(proxy.address());
    client.send(&case.client_request.0, &[], false);
    let to_head = case.client_request.0.starts_with(b"HEAD ");
    if case.after_idle.is_some() {
        let told = origin.wait_until_idle_was_told();
        assert!(told, "{}: the backend was not asked", case.id);
    }
    let observed = observe(&mut client, 1, to_head, true, &breaker, proxy, origin)?;
    verdicts(&observed, std::iter::once(&case.expect).chain(&case.also_ok), |verdict| {
        judge::response(verdict, &observed, case.pooled)
    })
}

/// What the breaker may do during a case.
struct Breaker {
    opened_before: f64,
    /// The backend may be blamed, which takes a moment to show.
    may_open: bool,
}

impl Breaker {
    fn has_opened(&self, proxy: &Proxy) -> bool {
        proxy::opened(proxy) > self.opened_before
    }
}

/// Reads all answers, finds out what became of the connection, and lets another client ask.
fn observe(
    client: &mut Client,
    answers: usize,
    to_head: bool,
    may_send: bool,
    expected: &Breaker,
    proxy: &Proxy,
    origin: &Origin,
) -> Result<Observed, String> {
    let mut finals = Vec::new();
    let mut stop = None;
    while finals.len() < answers && stop.is_none() {
        let (answer, why) = client.answer(to_head);
        finals.extend(answer);
        stop = why;
    }
    if expected.may_open {
        let _ = within(Duration::from_secs(1), || expected.has_opened(proxy).then_some(()));
    }
    if !proxy::is_ready(proxy) {
        return Err("    the backend is not asked again\n".to_owned());
    }
    let after = match &stop {
        Some(Stop::Eof | Stop::Reset) => After::Closed,
        Some(Stop::Timeout) => After::Stuck,
        Some(Stop::Garbage(what)) => After::Garbage(what.clone()),
        None => client.after(may_send),
    };
    let next = ask(proxy.address(), "next")?;
    let blamed = expected.has_opened(proxy);
    if !origin.settle(Duration::from_secs(5)) {
        return Err("    half a request stays at the backend on an open connection\n".to_owned());
    }
    Ok(Observed {
        interim: client.interim.clone(),
        finals,
        stop,
        after,
        connections: origin.connections(),
        raw: client.raw().to_vec(),
        next,
        blamed,
    })
}

/// One verdict must hold wholly, and what holds always.
fn verdicts<'a, V: std::fmt::Debug + 'a>(
    observed: &Observed,
    all: impl Iterator<Item = &'a V>,
    judge: impl Fn(&V) -> Vec<String>,
) -> Result<(), String> {
    let mut report = String::new();
    let always = judge::always(observed);
    let mut held = false;
    for (ix, verdict) in all.enumerate() {
        let faults = judge(verdict);
        held |= faults.is_empty();
        let which = if ix == 0 { "expected" } else { "or" };
        let mut wanted = format!("{verdict:?}");
        wanted.truncate(wanted.floor_char_boundary(300));
        let _ = write!(report, "    {which} {wanted}\n      but {}\n", faults.join("; "));
    }
    if held && always.is_empty() {
        return Ok(());
    }
    if held {
        report.clear();
    }
    for fault in always {
        let _ = writeln!(report, "    never {fault}");
    }
    let _ = write!(report, "    seen {}", observed.summary());
    Err(report)
}
