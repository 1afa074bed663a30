//! Another plan is put in force while everything goes on: what can fail is done first, and
//! changes nothing; then all of it changes at once for whatever begins from then on.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use l7rp_core::names::Nanos;
use tokio::sync::mpsc;

use super::{FIRST_ANSWERS, Going, Running, StartError, has_first_answers, open_admin};
use crate::config::plan::{Bind, Plan};
use crate::live::Snapshot;
use crate::serve::doors::{Opened, already_open};
use crate::serve::listen::Bound;
use crate::serve::run_worker::Order;

/// How long a reload waits for addresses that have gone to be closed, so that the next may use
/// them. It takes a tenth of a second.
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
    /// What went on, and was left alone.
    pub going: Going,
    /// Requests and tunnels that were ended by it.
    pub closed: u64,
}

/// What has to be opened for a plan.
struct Opening {
    /// New doors, with handles of their sockets for each worker.
    doors: Vec<(Opened, Vec<Vec<Bound>>)>,
    /// For each listener, which door of the process or, counted on from there, of `doors`.
    of_listeners: Vec<usize>,
    admin: Admin,
}

/// What becomes of the admin endpoints.
enum Admin {
    Stays,
    Goes,
    Moves(Bind, Bound, Bound),
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
        let Opening { doors, of_listeners, admin } = self.open_for(&plan)?;
        let was_open = self.doors.len();
        let (doors, handles): (Vec<_>, Vec<_>) = doors.into_iter().unzip();
        self.doors.extend(doors);
        let doors: Vec<_> = of_listeners.iter().map(|&ix| self.doors[ix].door.clone()).collect();
        let new = self.process.prepare(plan, &doors);
        self.warm_up(&new);
        let old = self.process.put_in_force(new);
        let in_force = self.process.clock.now();
        let snapshot = self.process.snapshot();
        for (&ix, listener) in of_listeners.iter().zip(&snapshot.plan.listeners) {
            self.doors[ix].name.clone_from(&listener.name);
        }
        for (opened, handles) in self.doors[was_open..].iter().zip(handles) {
            self.accept(opened, handles);
        }
        self.upkeep.keep(&snapshot.pools);
        self.move_admin(admin);
        let going = Going::on(&self.process);
        self.close_all_but(&of_listeners, &old);
        let closed = (going.cut + going.tunnels_closed) - (before.cut + before.tunnels_closed);
        let generation = self.process.generation();
        Ok(Reloaded { before: old, in_force, workers_stay, generation, going, closed })
    }

    /// Opens what `plan` needs and is not open.
    fn open_for(&mut self, plan: &Plan) -> Result<Opening, StartError> {
        let open: Vec<_> = self.doors.iter().map(|o| (o.name.as_str(), &o.bind)).collect();
        let mut doors = Vec::new();
        let mut of_listeners = Vec::new();
        let found = already_open(&plan.listeners, &open);
        for (listener, found) in plan.listeners.iter().zip(found) {
            if let Some(ix) = found {
                of_listeners.push(ix);
                continue;
            }
            self.last_door += 1;
            of_listeners.push(self.doors.len() + doors.len());
            let beside_own = self.has_port_of(&listener.bind);
            let workers = self.workers.len();
            let id = self.last_door;
            let opened = Opened::open(listener, &mut Vec::new(), id, workers, beside_own)?;
            let handles = opened.handles(workers)?;
            doors.push((opened, handles));
        }
        let admin = match (&self.admin, &plan.admin) {
            (Some(old), Some(bind)) if old.bind == *bind => Admin::Stays,
            (_, None) => Admin::Goes,
            (_, Some(bind)) => {
                let beside_own = self.has_port_of(bind);
                let (bind, one, other) = open_admin(bind.clone(), &mut Vec::new(), beside_own)?;
                Admin::Moves(bind, one, other)
            }
        };
        Ok(Opening { doors, of_listeners, admin })
    }

    fn move_admin(&mut self, admin: Admin) {
        let new = match admin {
            Admin::Stays => return,
            Admin::Goes => None,
            Admin::Moves(bind, one, other) => Some(self.serve_admin(bind, one, other)),
        };
        if let Some(old) = std::mem::replace(&mut self.admin, new) {
            old.task.abort();
        }
    }

    /// Whether this process listens on the port, at whatever address.
    fn has_port_of(&self, bind: &Bind) -> bool {
        let Bind::Tcp(address) = bind else { return false };
        let same =
            |other: &Bind| matches!(other, Bind::Tcp(other) if other.port() == address.port());
        let admin = self.admin.as_ref().is_some_and(|admin| same(&admin.bind));
        address.port() != 0 && (admin || self.doors.iter().any(|opened| same(&opened.bind)))
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

    /// Closes the doors that no listener uses any more, once they are empty.
    fn close_all_but(&mut self, used: &[usize], last: &Arc<Snapshot>) {
        let mut ix = 0;
        let gone: Vec<_> = self
            .doors
            .extract_if(.., |_| {
                ix += 1;
                !used.contains(&(ix - 1))
            })
            .collect();
        if gone.is_empty() {
            return;
        }
        let (done, mut all) = mpsc::channel::<()>(1);
        for mut opened in gone {
            opened.door.close(last.clone());
            opened.forget();
            for worker in &self.workers {
                let (door, done) = (opened.door.id, done.clone());
                let _ = worker.orders.send(Order::Close { door, done });
            }
        }
        drop(done);
        let (closed, wait): (_, Receiver<()>) = sync_channel(1);
        self.runtime.spawn(async move {
            // Ends when each worker has dropped its end.
            let _ = all.recv().await;
            let _ = closed.try_send(());
        });
        let _ = wait.recv_timeout(CLOSED);
    }
}
