//! The pools of a plan that is to be put in force, and from which of those in force each goes on.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use l7rp_core::names::Nanos;

use crate::config::plan::{self, Plan};
use crate::upstream::pool::{Making, Pool};

/// Those that were there before, new generations of them, and new ones.
pub(super) fn of_plan(
    plan: &Plan,
    old: &[Arc<Pool>],
    making: &Making,
    now: Nanos,
) -> Vec<Arc<Pool>> {
    let pools = plan.pools.iter().zip(before(&plan.pools, old));
    let pools = pools.map(|(pool, before)| match before {
        Some(before) if before.plan == *pool => before.clone(),
        before => Pool::new(pool, before.map(AsRef::as_ref), making, now),
    });
    pools.collect()
}

/// For each of `new` the one that it takes over from: that with its name; or, if nobody knows its
/// name, one that is gone and has upstreams in common, the most alike first. What an operator
/// wants of an upstream is wanted in one pool: no two take over from the same.
fn before<'a>(new: &[plan::Pool], old: &'a [Arc<Pool>]) -> Vec<Option<&'a Arc<Pool>>> {
    let by_name: HashMap<_, _> = old.iter().map(|pool| (pool.plan.name.as_str(), pool)).collect();
    let stays: HashSet<_> = new.iter().map(|pool| pool.name.as_str()).collect();
    let mut gone: Vec<_> =
        old.iter().filter(|pool| !stays.contains(pool.plan.name.as_str())).collect();
    let mut before: Vec<_> =
        new.iter().map(|pool| by_name.get(pool.name.as_str()).copied()).collect();
    let alike: [fn(&Pool, &plan::Pool) -> bool; 3] =
        [has_new_name, has_same_upstreams, Pool::shares_upstreams];
    for is_alike in alike {
        for (pool, before) in new.iter().zip(&mut before).filter(|(_, before)| before.is_none()) {
            let found = gone.iter().position(|gone| is_alike(gone, pool));
            *before = found.map(|ix| gone.remove(ix));
        }
    }
    before
}

/// All but the name is as it was.
fn has_new_name(old: &Pool, new: &plan::Pool) -> bool {
    has_same_upstreams(old, new)
        && plan::Pool { name: old.plan.name.clone(), ..new.clone() } == old.plan
}

fn has_same_upstreams(old: &Pool, new: &plan::Pool) -> bool {
    let (old, new) = (&old.plan.upstreams, &new.upstreams);
    old.len() == new.len() && old.iter().zip(new).all(|(old, new)| old.url == new.url)
}
