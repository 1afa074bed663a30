//! Whether a request may come in at all, and how many tries it may cost.

mod buckets;
mod budget;
mod rate;
mod slots;

pub use buckets::{Buckets, client_key};
pub use budget::RetryBudget;
pub use rate::{Bucket, Decision, Rate};
pub use slots::Slots;
