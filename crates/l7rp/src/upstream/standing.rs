//! Who may be chosen: health, name and breaker of each upstream come together in one bit.
//!
//! The bits are read by every pick and written rarely. Whoever changes what a bit is made from
//! makes it anew, under the pool's lock: the last to do so sees what all others have changed.

use l7rp_core::upstream::health::Health;

use super::member::Upstream;

/// What is known of one upstream beside its breaker.
#[derive(Debug)]
pub(super) struct Standing {
    /// Its name has addresses.
    pub(super) resolved: bool,
    /// What probes say; `None`: nobody probes it.
    pub(super) health: Option<Health>,
}

impl Standing {
    pub(super) fn new(upstream: &Upstream, health: Option<Health>) -> Self {
        Self { resolved: !upstream.is_named(), health }
    }

    /// Whether it may be chosen if its breaker agrees.
    pub(super) fn is_well(&self) -> bool {
        self.resolved && self.is_healthy()
    }

    /// Whether probes, if there are any, say so.
    pub(super) fn is_healthy(&self) -> bool {
        self.health.as_ref().is_none_or(Health::is_eligible)
    }
}
