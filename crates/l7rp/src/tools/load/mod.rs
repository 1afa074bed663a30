//! A load generator: many requests, in a closed loop or at a constant rate, and what became of them.
//!
//! | file | does |
//! |---|---|
//! | `plan` | what is to be done, and by how many threads |
//! | `schedule` | when which request is due, and when it is over |
//! | `request` | the request, made once |
//! | `target`, `h1`, `h2`, `hold` | connections: new, of either version, idle |
//! | `desk`, `alarm` | what one thread's connections share; an exact timer |
//! | `tally` | what one thread counts |
//! | `report`, `picture` | all of it, for people and programs |
//!
//! Each thread has an equal part of the connections. All take requests from one count, and meet
//! one another only at the beginning and at the end.

mod alarm;
mod busy;
mod desk;
mod h1;
mod h2;
mod hold;
mod picture;
mod plan;
mod report;
mod request;
mod schedule;
mod tally;
mod target;

use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread;

use l7rp_core::names::Nanos;
use tokio::runtime::Builder;
use tokio::sync::watch;
use tokio::task::{JoinSet, LocalSet};

pub use picture::Ink;
pub use plan::{Plan, Trust};
pub use report::Report;
pub use request::{Ask, Field, Url};
pub use schedule::{End, Pace};
pub use tally::Kind;

use crate::clock::Clock;
use alarm::Alarm;
use busy::Busy;
use desk::{Desk, OPENING};
use h1::Connection;
use request::{Message, Octets};
use schedule::{Part, Queue, Schedule};
use tally::{Failure, Tally};
use target::Target;

/// What all threads work with.
#[derive(Debug)]
struct Work {
    plan: Plan,
    octets: Octets,
    message: Message,
    queue: Queue,
    /// Answers have no body.
    to_head: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Connections are opened.
    Opening,
    /// The load began then.
    Running(Nanos),
    /// No more requests are started.
    Ending,
    /// Those in flight are given up.
    GivenUp,
}

/// Ends a run before its time.
#[derive(Clone, Debug)]
pub struct Control(watch::Sender<Phase>);

impl Control {
    /// For one run.
    #[expect(clippy::new_without_default, reason = "it has no meaning without a run")]
    pub fn new() -> Self {
        Self(watch::Sender::new(Phase::Opening))
    }

    /// No more requests are started; at the second call those in flight are given up.
    pub fn end(&self) {
        self.0.send_modify(|phase| {
            *phase = match phase {
                Phase::Opening | Phase::Running(_) => Phase::Ending,
                Phase::Ending | Phase::GivenUp => Phase::GivenUp,
            };
        });
    }

    fn begin(&self, start: Nanos) {
        self.0.send_if_modified(|phase| {
            let begins = *phase == Phase::Opening;
            if begins {
                *phase = Phase::Running(start);
            }
            begins
        });
    }
}

/// What one thread comes back with.
struct Outcome {
    tally: Tally,
    cut_off: Nanos,
    held_open: usize,
    busy: Busy,
}

/// Opens the connections, makes the load, and tells what came of it.
///
/// # Errors
/// Why there was no load at all, for people.
pub fn run(plan: Plan, control: &Control) -> Result<Report, String> {
    let target = Target::new(&plan)?;
    let threads = plan.even_threads();
    let work = Arc::new(Work {
        octets: Octets::new(&plan.url, &plan.ask),
        message: Message::new(&plan.url, &plan.ask)?,
        queue: Queue::new(&plan),
        to_head: plan.ask.method() == http::Method::HEAD,
        plan,
    });
    let clock = Clock::new();
    let (ready, readied) = sync_channel(threads);
    let mut running = Vec::with_capacity(threads);
    for index in 0..threads {
        let part = Part { index: index as u64, threads: threads as u64 };
        let (work, target) = (work.clone(), target.clone());
        let (control, ready) = (control.clone(), ready.clone());
        let body = move || thread_body(clock, work, target, part, &control, ready);
        let thread = thread::Builder::new().name(format!("l7rp-load-{index}")).spawn(body);
        running.push(thread.map_err(|e| format!("cannot start a thread: {e}"))?);
    }
    drop(ready);
    // A thread that cannot even begin tells nothing.
    let told: Vec<Result<(), String>> = readied.iter().collect();
    let is_complete = told.len() == threads;
    let failure = told.into_iter().find_map(Result::err);
    let start = clock.now();
    if is_complete && failure.is_none() {
        control.begin(start);
    } else {
        control.end();
    }
    let mut outcomes = Vec::with_capacity(threads);
    for thread in running {
        let outcome = thread.join().map_err(|_| "a thread has panicked".to_owned())?;
        outcomes.push(outcome?);
    }
    match failure {
        Some(failure) => Err(failure),
        None => Ok(Report::new(&work.plan, start, work.queue.next(), outcomes)),
    }
}

fn thread_body(
    clock: Clock,
    work: Arc<Work>,
    target: Target,
    part: Part,
    control: &Control,
    ready: SyncSender<Result<(), String>>,
) -> Result<Outcome, String> {
    let short = |e: &dyn std::fmt::Display| format!("the system is short of something: {e}");
    let runtime = Builder::new_current_thread().enable_all().build().map_err(|e| short(&e))?;
    let tally = Tally::new().map_err(|e| short(&e))?;
    let desk = Rc::new(Desk::new(clock, work, target, tally));
    let tasks = LocalSet::new();
    tasks.block_on(&runtime, async {
        let mut alarm = Alarm::new().map_err(|e| short(&e))?;
        let mut phase = control.0.subscribe();
        let opened = tokio::select! {
            opened = open(&desk, part) => opened.map(Some),
            _ = begin(&mut phase) => Ok(None),
        };
        let told = opened.as_ref().map(|_| ()).map_err(|failure| failure.words.clone());
        // Whoever waits for it is there until the last thread has told.
        let _ = ready.send(told);
        drop(ready);
        let begun = begin(&mut phase).await;
        let (Ok(Some((connections, held))), Some(start)) = (opened, begun) else {
            return Ok(desk.outcome(&[], Busy::default()));
        };
        desk.begin(Schedule::new(&desk.work.plan, start, part, desk.work.queue.clone()));
        let before = Busy::now();
        let mut clients = clients(&desk, connections);
        tokio::select! {
            () = async { while clients.join_next().await.is_some() {} } => {}
            paced = desk.pace(&mut alarm) => paced.map_err(|e| short(&e))?,
            () = ended(&desk, phase) => {}
            () = desk.watch_cut_off() => {}
        }
        Ok(desk.outcome(&held, desk.busy(before, start)))
    })
}

impl Desk {
    fn outcome(&self, held: &[Connection], busy: Busy) -> Outcome {
        let (tally, cut_off) = self.close();
        let held_open = held.iter().filter(|connection| connection.is_open()).count();
        Outcome { tally, cut_off, held_open, busy }
    }
}

/// When the load begins; `None`: it does not.
async fn begin(phase: &mut watch::Receiver<Phase>) -> Option<Nanos> {
    match *phase.wait_for(|phase| *phase != Phase::Opening).await.ok()? {
        Phase::Running(start) => Some(start),
        _ => None,
    }
}

/// Ends the load when that is asked for. Ready when its requests are to be given up.
async fn ended(desk: &Desk, mut phase: watch::Receiver<Phase>) {
    let is_ending = |phase: &Phase| matches!(phase, Phase::Ending | Phase::GivenUp);
    if phase.wait_for(is_ending).await.is_err() {
        // There is nobody who could ask.
        return std::future::pending().await;
    }
    desk.end(desk.clock.now());
    if phase.wait_for(|phase| *phase == Phase::GivenUp).await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Connections that the clients of one thread begin with.
enum Connections {
    H1(Vec<Option<Connection>>),
    /// With the number of requests at once on each.
    H2(Vec<(Rc<h2::Link>, usize)>),
}

/// Opens the connections of this thread, and those that are only held. Fails if there is none.
async fn open(desk: &Rc<Desk>, part: Part) -> Result<(Connections, Vec<Connection>), Failure> {
    let plan = &desk.work.plan;
    let (index, threads) = (part.index as usize, part.threads as usize);
    let count = plan.connections() / threads;
    let more = usize::from(index < plan.hold % threads);
    let held = hold::open(desk, plan.hold / threads + more).await?;
    let streams = if plan.ask.close { Vec::new() } else { early(desk, count).await? };
    let Some(at_once) = plan.streams else {
        let mut connections: Vec<_> =
            streams.into_iter().map(|stream| Some(Connection::new(stream))).collect();
        connections.resize_with(count, || None);
        return Ok((Connections::H1(connections), held));
    };
    // The last connection has what is left.
    let mut places = plan.concurrency / threads;
    let mut streams = streams.into_iter();
    let mut links = Vec::with_capacity(count);
    for _ in 0..count {
        let requests = places.min(at_once);
        places -= requests;
        let link = Rc::new(h2::Link::default());
        if let Some(stream) = streams.next() {
            link.begin(stream).await?;
        }
        links.push((link, requests));
    }
    Ok((Connections::H2(links), held))
}

/// Opens so many; those that fail are opened again when they are needed. Fails if all do, or as
/// many as are opened at once before one has succeeded.
async fn early(desk: &Rc<Desk>, count: usize) -> Result<Vec<crate::stream::Stream>, Failure> {
    let mut opening = JoinSet::new();
    for _ in 0..count {
        let desk = desk.clone();
        opening.spawn_local(async move { desk.open_early().await });
    }
    let (mut streams, mut failed) = (Vec::with_capacity(count), 0);
    while let Some(opened) = opening.join_next().await {
        match opened {
            Ok(Ok(stream)) => streams.push(stream),
            Ok(Err(failure)) => {
                failed += 1;
                if streams.is_empty() && failed == count.min(OPENING) {
                    return Err(failure);
                }
            }
            // A task of ours neither panics nor is aborted.
            Err(_) => {}
        }
    }
    Ok(streams)
}

fn clients(desk: &Rc<Desk>, connections: Connections) -> JoinSet<()> {
    let mut clients = JoinSet::new();
    match connections {
        Connections::H1(connections) => {
            for connection in connections {
                clients.spawn_local(h1::client(desk.clone(), connection));
            }
        }
        Connections::H2(links) => {
            for (link, requests) in links {
                for _ in 0..requests {
                    clients.spawn_local(h2::client(desk.clone(), link.clone()));
                }
            }
        }
    }
    clients
}
