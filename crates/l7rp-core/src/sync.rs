//! Where the atomics come from: the standard library, or loom when the crate is built with
//! `--cfg loom`, which tries every order in which threads can take turns.

#[cfg(not(loom))]
pub use std::sync::atomic;

#[cfg(loom)]
pub use loom::sync::atomic;
