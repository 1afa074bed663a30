//! Whether a request may come in at all, and how many tries it may cost.

mod budget;
mod slots;

pub use budget::RetryBudget;
pub use slots::Slots;
