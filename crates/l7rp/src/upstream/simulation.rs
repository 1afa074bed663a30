//! The decisions about upstreams that fail, played through in virtual time: the real pool and the
//! real plan of tries, driven as an exchange drives them, against a plain model that is asked the
//! same after every step. One seed is one run, and always the same one.
//!
//! | file | has |
//! |---|---|
//! | `setup` | a random configuration |
//! | `backend` | upstreams that behave well and badly |
//! | `world` | the queue of events and the clock |
//! | `requests` | the tries of a request, as `exchange` makes them |
//! | `both` | the pool and the model side by side, and the comparison |
//! | `model` | the model |
//! | `seen` | the last steps, and counts of what a run has come to |

mod backend;
mod both;
mod model;
mod requests;
mod seen;
mod setup;
mod world;

use std::sync::Arc;

use l7rp_core::names::Nanos;

use super::pool::{Making, Pool};
use crate::observe::event::{Events, Level};
use crate::observe::log::Log;
use seen::{Seen, Trail};
use setup::Setup;
use world::World;

/// Runs, unless `L7RP_SIMULATION_SEEDS` says how many.
const SEEDS: u64 = 300;
/// Events of one run.
const STEPS: u32 = 3_000;

fn play(seed: u64, events: &Arc<Events>) -> Seen {
    let mut rng = fastrand::Rng::with_seed(seed);
    // The pool draws from the thread's own generator.
    fastrand::seed(rng.u64(..));
    let setup = Setup::new(&mut rng);
    let making = Making::new(setup.workers, events);
    let pool = Pool::new(&setup.pool, None, &making, Nanos(0));
    let trail = Trail::new(format!(
        "The simulation fails with seed {seed}; L7RP_SIMULATION_SEED={seed} plays it alone.\n\
         {setup}\nThe last steps:"
    ));
    let mut world = World::new(&setup, &pool, rng, trail);
    for _ in 0..STEPS {
        world.step();
    }
    world.finish()
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is not a number: {text}")))
}

#[test]
fn the_pool_decides_like_the_plain_model() {
    let events = Arc::new(Events::new(Log::start(std::io::sink()).unwrap(), Level::Error));
    if let Some(seed) = number("L7RP_SIMULATION_SEED") {
        play(seed, &events);
        return;
    }
    let mut seen = Seen::default();
    let seeds = number("L7RP_SIMULATION_SEEDS").unwrap_or(SEEDS);
    for seed in 0..seeds {
        seen.add(&play(seed, &events));
    }
    assert_eq!(play(0, &events), play(0, &events), "a seed is not always the same run");
    println!("{seen:#?}");
    // Runs without one of these would show nothing about it.
    let rare = seen.rare(50);
    assert!(rare.is_empty() || seeds < SEEDS, "hardly seen: {rare:?}");
}
