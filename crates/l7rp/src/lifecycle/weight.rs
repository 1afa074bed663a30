//! Another weight of one upstream: the plan in force is put in force once more, with that, and
//! nothing is read for it. The next reload brings the file's weights back.

use super::{Service, serving};
use crate::observe::event::{BY_ADMIN, Event};
use crate::orders::{Weighed, Weight};

impl Service {
    /// Puts a weight in force.
    ///
    /// # Errors
    /// Why that cannot be; then nothing has changed.
    pub(super) fn weigh(&mut self, wanted: &Weight, by: String) -> Result<Weighed, String> {
        let process = self.running.process().clone();
        let mut plan = process.snapshot().plan.clone();
        let Weight { pool, upstream, weight } = wanted;
        let pools = plan.pools.iter_mut().filter(|known| known.name == *pool);
        let all = pools.flat_map(|pool| &mut pool.upstreams);
        let mut from = None;
        for found in all.filter(|known| known.url == *upstream) {
            from = Some(std::mem::replace(&mut found.weight, *weight));
        }
        let from = from.ok_or_else(|| {
            format!("a reload has just taken `{upstream}` out of the pool `{pool}`")
        })?;
        if from == *weight {
            return Ok(Weighed { from, generation: process.generation() });
        }
        let generation = self.running.amend(plan);
        self.manager.ready(&serving(&self.running));
        self.events.emit(&Event::UpstreamWeightChanged {
            pool: pool.clone(),
            upstream: upstream.clone(),
            from,
            to: *weight,
            why: BY_ADMIN,
            by,
            generation,
        });
        Ok(Weighed { from, generation })
    }
}
