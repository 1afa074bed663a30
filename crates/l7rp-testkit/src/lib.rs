//! l7rp-testkit
