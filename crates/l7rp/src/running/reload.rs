//! Another plan is put in force while everything goes on: what can fail is done first, and
//! changes nothing; then all of it changes at once for whatever begins from then on.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use l7rp_core::names::Nanos;
use tokio::sync::mpsc;

use super::{
    AdminSocket, FIRST_ANSWERS, Running, StartError, has_first_answers, open_admin, tracer,
};
use crate::config::plan::{Bind, Plan};
use crate::live::{Going, Made, Process, Snapshot};
use crate::serve::doors::{Opened, already_open, parts};
use crate::serve::listen::{Bound, overlap};
use crate::serve::run_worker::Order;
use crate::tls::Material;

/// How long a reload waits for an address that it wants and that an earlier one has given up. It
/// takes a tenth of a second, and a second at most.
const CLOSED: Duration = Duration::from_secs(2);

/// What a reload has come to.
#[derive(Debug)]
pub struct Reloaded {
    /// What was in force before.
    pub before: Arc<Snapshot>,
    /// When the plan came in force. What was left behind is closed after that.
    pub in_force: Nanos,
    /// Another number of workers was asked for, which takes a new process.
    pub workers_stay: bool,
    /// The generation that is in force now.
    pub generation: u64,
    /// What went on.
    pub going: Going,
    /// Connections, among those, that came in where nobody listens any more.
    pub leaving: u64,
    /// Requests and tunnels that were ended by it.
    pub closed: u64,
}

/// An address that is being given up.
#[derive(Debug)]
pub(super) struct Closing {
    bind: Bind,
    /// Ends when its sockets are closed.
    done: Receiver<()>,
}

/// What has to be opened for a plan.
#[derive(Default)]
struct Opening {
    /// New doors.
    doors: Vec<Opened>,
    /// Handles of their sockets, for each worker.
    handles: Vec<Vec<Vec<Bound>>>,
    /// For each listener, which door of the process or, counted on from there, of `doors`.
    of_listeners: Vec<usize>,
    /// Doors that stay open although they are no listener's own; and the listener that serves
    /// them, because its address covers theirs.
    parts: Vec<(usize, usize)>,
    admin: Admin,
}

/// What becomes of the admin endpoints.
#[derive(Default)]
enum Admin {
    #[default]
    Stays,
    Goes,
    Moves(AdminSocket),
}

impl Running {
    /// Puts `plan` in force.
    ///
    /// # Errors
    /// An address cannot be had; then nothing has changed.
    pub fn reload(&mut self, mut plan: Plan) -> Result<Reloaded, StartError> {
        let before = Going::on(&self.process);
        // Threads stay as they are; the next start brings others.
        let workers = self.process.snapshot().plan.workers;
        let workers_stay = std::mem::replace(&mut plan.workers, workers) != workers;
        let issued = self.acme.open(&plan)?;
        let tls = Material::read(&plan, &self.resumption, &issued)?;
        let old = self.process.snapshot();
        let Process { events, clock, .. } = &*self.process;
        let tracer = tracer(&plan, old.tracer.as_ref(), events, *clock, &self.runtime)?;
        drop(old);
        let Opening { doors, handles, of_listeners, parts, admin } = self.open_for(&plan)?;
        let was_open = self.doors.len();
        self.doors.extend(doors);
        let mut ids: Vec<Vec<u64>> =
            of_listeners.iter().map(|&ix| vec![self.doors[ix].door.id]).collect();
        for &(ix, listener) in &parts {
            ids[listener].push(self.doors[ix].door.id);
        }
        let names: Vec<_> = plan.listeners.iter().map(|listener| listener.name.clone()).collect();
        let used: Vec<_> = of_listeners.iter().copied().zip(0..).chain(parts).collect();
        let new = self.process.prepare(plan, Made { doors: ids, tls, tracer });
        self.warm_up(&new);
        let leaving = self.shut_unused(&used, &names, was_open);
        let old = self.process.put_in_force(new);
        let in_force = self.process.clock.now();
        for &(ix, listener) in &used {
            self.doors[ix].name.clone_from(&names[listener]);
        }
        for (opened, handles) in self.doors[was_open..].iter().zip(handles) {
            self.accept(opened, handles);
        }
        self.upkeep.keep(&self.process.snapshot().pools);
        self.keep_certificates();
        self.move_admin(admin);
        self.empty_shut();
        let going = Going::on(&self.process);
        let closed = (going.cut + going.tunnels_closed) - (before.cut + before.tunnels_closed);
        let generation = self.process.generation();
        Ok(Reloaded { before: old, in_force, workers_stay, generation, going, leaving, closed })
    }

    /// Puts `plan` in force, which needs nothing that the one in force does not: nothing is opened
    /// or read, and nothing can fail. The generation that is in force then.
    pub fn amend(&mut self, plan: Plan) -> u64 {
        let made = self.process.snapshot().made();
        let new = self.process.prepare(plan, made);
        self.process.put_in_force(new);
        self.upkeep.keep(&self.process.snapshot().pools);
        self.process.generation()
    }

    /// Opens what `plan` needs and is not open. What was opened before a failure is given up.
    fn open_for(&mut self, plan: &Plan) -> Result<Opening, StartError> {
        let mut opening = Opening::default();
        match self.try_open_for(plan, &mut opening) {
            Ok(()) => Ok(opening),
            Err(e) => {
                for mut door in opening.doors {
                    self.spare.extend(door.forget());
                }
                Err(e)
            }
        }
    }

    fn try_open_for(&mut self, plan: &Plan, opening: &mut Opening) -> Result<(), StartError> {
        let open: Vec<_> = self.doors.iter().map(|o| (o.name.as_str(), &o.bind)).collect();
        let found = already_open(&plan.listeners, &open);
        let workers = self.workers.len();
        for (listener, found) in plan.listeners.iter().zip(found) {
            let new = self.doors.len() + opening.doors.len();
            opening.of_listeners.push(found.unwrap_or(new));
            if found.is_none() {
                self.wait_for(&listener.bind);
                let beside_own = self.overlaps(&listener.bind, &opening.doors);
                self.last_door += 1;
                let (id, spare) = (self.last_door, &mut self.spare);
                opening.doors.push(Opened::open(listener, spare, id, workers, beside_own)?);
            }
        }
        let left = self.doors.iter().enumerate().map(|(ix, opened)| (ix, &opened.bind));
        let left: Vec<_> = left.filter(|(ix, _)| !opening.of_listeners.contains(ix)).collect();
        opening.parts = parts(&plan.listeners, &left);
        opening.admin = match (&self.admin, &plan.admin) {
            (Some(old), Some(bind)) if old.bind == *bind => Admin::Stays,
            (_, None) => Admin::Goes,
            (_, Some(bind)) => {
                let beside_own = self.overlaps(bind, &opening.doors);
                Admin::Moves(open_admin(bind.clone(), &mut self.spare, beside_own)?)
            }
        };
        // Nobody can connect before all addresses are had: who could would be reset.
        for opened in &mut opening.doors {
            opening.handles.push(opened.handles(workers)?);
        }
        Ok(())
    }

    fn move_admin(&mut self, admin: Admin) {
        let new = match admin {
            Admin::Stays => return,
            Admin::Goes => None,
            Admin::Moves(socket) => Some(self.serve_admin(socket)),
        };
        if let Some(old) = std::mem::replace(&mut self.admin, new) {
            old.close();
        }
    }

    /// Whether this process listens at an address that has something in common with `bind`.
    fn overlaps(&self, bind: &Bind, new: &[Opened]) -> bool {
        let doors = self.doors.iter().chain(new).map(|opened| &opened.bind);
        let admin = self.admin.iter().map(|admin| &admin.bind);
        doors.chain(admin).any(|own| overlap(own, bind))
    }

    /// Waits until an address is given up that has something in common with `bind`.
    fn wait_for(&mut self, bind: &Bind) {
        self.closing.retain(|closing| {
            let waits = overlap(&closing.bind, bind);
            let open = if waits { CLOSED } else { Duration::ZERO };
            // Nothing is ever sent: its end says that it is done.
            let done = closing.done.recv_timeout(open);
            matches!(done, Err(std::sync::mpsc::RecvTimeoutError::Timeout))
        });
    }

    /// Has new upstreams looked up and probed before they are counted on: nothing that worked
    /// should fail for a moment because it has just been changed.
    fn warm_up(&mut self, new: &Snapshot) {
        let old = self.process.snapshot();
        let clock = self.process.clock;
        let mut cold = Vec::new();
        for pool in &new.pools {
            let before = old.pools.iter().find(|before| before.plan.name == pool.plan.name);
            let worked = before.is_none_or(|before| before.has_eligible(clock.now()));
            if worked && !pool.has_eligible(clock.now()) {
                self.upkeep.begin(pool);
                cold.push(pool.clone());
            }
        }
        self.wait_until(FIRST_ANSWERS, move || {
            cold.iter().all(|pool| has_first_answers(pool) && pool.has_eligible(clock.now()))
        });
    }

    /// Says of the doors that are not used any more that they are closed, while what is in force
    /// still uses them; how many connections came in there.
    fn shut_unused(&mut self, used: &[(usize, usize)], names: &[String], was_open: usize) -> u64 {
        let last = self.process.snapshot();
        let mut inside = 0;
        for (ix, opened) in self.doors.iter().enumerate() {
            if used.iter().any(|(used, _)| *used == ix) {
                continue;
            }
            // Only a new address: another one had another listener, with routes of its own.
            let moved_to = used.iter().find_map(|&(to, listener)| {
                let moved = to >= was_open && names[listener] == opened.name;
                moved.then(|| self.doors[to].door.id)
            });
            opened.door.close(last.clone(), moved_to);
            inside += opened.door.inside.load(Relaxed) as u64;
        }
        inside
    }

    /// Has the doors that are closed emptied, and their sockets closed.
    fn empty_shut(&mut self) {
        let gone: Vec<_> = self.doors.extract_if(.., |opened| opened.door.is_closed()).collect();
        for mut opened in gone {
            self.spare.extend(opened.forget());
            let (each, mut all) = mpsc::channel::<()>(1);
            for worker in &self.workers {
                let (door, done) = (opened.door.id, each.clone());
                let _ = worker.orders.send(Order::Close { door, done });
            }
            drop(each);
            let (closed, done) = sync_channel::<()>(1);
            self.runtime.spawn(async move {
                // Ends when each worker has dropped its end.
                let _ = all.recv().await;
                drop(closed);
            });
            self.closing.push(Closing { bind: opened.bind, done });
        }
    }
}
