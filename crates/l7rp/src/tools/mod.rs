//! What proves a configuration: a test backend that misbehaves on demand, a load generator, and a
//! demo that needs nothing else. They use the engine; nothing uses them.

pub mod backend;
pub mod demo;
pub mod load;
pub mod stop;
