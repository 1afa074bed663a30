//! Where requests come in: listening sockets, and the protocols spoken on them.

pub mod doors;
pub mod h1;
pub mod h2;
pub mod listen;
pub mod run_worker;
