//! Whether a request may come in at all.

mod slots;

pub use slots::Slots;
