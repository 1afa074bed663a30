//! Checks what threads share under every order in which they can take turns.

use crate::run::{Done, cargo, step};

/// Apart from the other builds: `--cfg loom` goes to every crate, and would have all of them
/// built anew each time. Without link-time optimisation, which takes longer than the models.
pub(crate) fn all() -> Done {
    step(
        cargo()
            // This one would win over the next, and no test would be there to fail.
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env("RUSTFLAGS", "--cfg loom")
            .env("CARGO_TARGET_DIR", "target/loom")
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
            .args([
                "test",
                "-p",
                "l7rp-core",
                "--test",
                "loom",
                "--test",
                "loom_limits",
                "--release",
            ]),
        "each failing test is a fault under some order of turns; \
         crates/l7rp-core/tests/loom.rs and loom_limits.rs say what they claim",
    )
}
