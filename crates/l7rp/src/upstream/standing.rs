//! What is known of an upstream beside its breaker: whether its name has addresses, what probes
//! say, and whether an operator has taken it out.

use std::time::Duration;

use l7rp_core::names::Nanos;
use l7rp_core::upstream::health::Health;

use super::probe::Checks;

/// What a probe has found.
#[derive(Clone, Debug)]
pub struct Probed {
    /// When it ended.
    pub at: Nanos,
    /// From its begin to the head of the answer, or to its failure.
    pub took: Duration,
    /// A good answer.
    pub good: bool,
    /// `status:CODE`, or one of a fixed list.
    pub why: String,
}

/// What is known of one upstream beside its breaker.
#[derive(Clone, Debug)]
pub(super) struct Standing {
    /// Its name has addresses.
    pub(super) resolved: bool,
    /// What is asked of it, and what the answers say; `None`: nobody probes it.
    pub(super) checked: Option<(Checks, Health)>,
    /// An operator wants no new requests to go there.
    pub(super) drained: bool,
    /// The last answer.
    pub(super) last_probe: Option<Probed>,
    /// Why it was last judged not to be eligible.
    pub(super) out_for: Option<String>,
}

impl Standing {
    /// A new upstream, which is judged by `checks` before it is used.
    pub(super) fn new(resolved: bool, checks: Option<Checks>) -> Self {
        let checked = checks.map(|checks| {
            let health =
                Health::new(checks.plan.healthy_threshold, checks.plan.unhealthy_threshold);
            (checks, health)
        });
        Self { resolved, checked, drained: false, last_probe: None, out_for: None }
    }

    /// Has it judged by `checks` from now on. What is known stays known where the same is asked;
    /// and whoever was eligible stays so until the new probes say otherwise. Whether the next
    /// answer is news: something else is asked, or the first ones have not all come.
    pub(super) fn set_checks(&mut self, checks: Option<Checks>) -> bool {
        let was_healthy = self.is_healthy();
        let known = self.checked.take();
        let same =
            matches!((&known, &checks), (Some((old, _)), Some(new)) if old.asks_the_same(new));
        self.checked = checks.map(|checks| {
            let (healthy, unhealthy) =
                (checks.plan.healthy_threshold, checks.plan.unhealthy_threshold);
            let health = match known {
                Some((old, health)) if old.asks_the_same(&checks) => {
                    health.with_thresholds(healthy, unhealthy)
                }
                _ if was_healthy => Health::trusted(healthy, unhealthy),
                _ => Health::new(healthy, unhealthy),
            };
            (checks, health)
        });
        if !same {
            (self.last_probe, self.out_for) = (None, None);
        }
        !same || self.checked.as_ref().is_some_and(|(_, health)| health.is_settling())
    }

    /// What probes say.
    pub(super) fn health(&mut self) -> Option<&mut Health> {
        self.checked.as_mut().map(|(_, health)| health)
    }

    /// Whether probes, scoring or an operator have taken it out.
    pub(super) fn is_taken_out(&self) -> bool {
        self.drained || !self.is_healthy()
    }

    /// Whether it may be chosen if its breaker agrees.
    pub(super) fn is_well(&self) -> bool {
        self.resolved && !self.drained && self.is_healthy()
    }

    /// Why it is not healthy, as far as anybody has found out.
    pub(super) fn why_unhealthy(&self) -> String {
        let bad_probe = self.last_probe.as_ref().filter(|probe| !probe.good);
        let (before, why) = match (&self.out_for, bad_probe) {
            (Some(why), _) => ("", why),
            (None, Some(probe)) => ("no verdict yet, last probe ", &probe.why),
            (None, None) => return "no verdict yet".to_owned(),
        };
        // A status is bad only beside the ones that were asked for.
        match &self.checked {
            Some((checks, _)) if why.starts_with("status:") => {
                format!("{before}{why}, expected {}", checks.expected())
            }
            _ => format!("{before}{why}"),
        }
    }

    /// Whether probes, if there are any, say so.
    pub(super) fn is_healthy(&self) -> bool {
        self.checked.as_ref().is_none_or(|(_, health)| health.is_eligible())
    }
}
