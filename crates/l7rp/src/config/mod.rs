//! Configuration: as written ([`file`]), as meant ([`plan`]), and what is wrong with it
//! ([`wrong`]).

pub mod plan;
