//! Connections that are opened beside the busy ones, serve one request each, and are then idle.

use std::rc::Rc;

use tokio::task::JoinSet;

use super::desk::{Desk, Moved};
use super::h1::{Connection, exchange};
use super::tally::Failure;
use crate::timer::Timer;

/// Opens so many. An error is that of the last which could not be opened.
pub(super) async fn open(desk: &Rc<Desk>, count: usize) -> Result<Vec<Connection>, Failure> {
    let mut opening = JoinSet::new();
    for _ in 0..count {
        opening.spawn_local(one(desk.clone()));
    }
    let mut held = Vec::with_capacity(count);
    while let Some(opened) = opening.join_next().await {
        // A task of ours neither panics nor is aborted.
        let Ok(opened) = opened else { continue };
        held.extend(opened?);
    }
    Ok(held)
}

async fn one(desk: Rc<Desk>) -> Result<Option<Connection>, Failure> {
    let mut connection = Some(Connection::new(desk.open_early().await?));
    let mut timer = Timer::new(desk.clock);
    let now = desk.clock.now();
    exchange(&desk, &mut connection, &mut timer, &mut Moved::default(), now).await?;
    Ok(connection)
}
