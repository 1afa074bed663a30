//! l7rp
fn main() {}
