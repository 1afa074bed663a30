//! Whether an upstream may be used.
