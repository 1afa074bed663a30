//! Keys of a pool that its algorithm, or another key, makes pointless.

use std::collections::HashMap;

use super::unreachable::guarded;
use super::{Lint, at};
use crate::config::file::KeyPath;
use crate::config::plan::{Algorithm, HashKey, Pool};

pub(super) fn check(lint: &mut Lint<'_>) {
    for (index, pool) in lint.plan.pools.iter().enumerate() {
        let at = at("upstream_pools", index);
        selector(lint, pool, &at.key("selector"));
        weights(lint, pool, &at.key("upstreams"));
        hash_key(lint, pool, &at.key("selector").key("hash_key"));
        backups(lint, pool, &at.key("upstreams"));
        same(lint, pool, &at.key("upstreams"));
        breaker(lint, pool, &at.key("circuit_breaker"));
    }
}

fn named(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::RoundRobin => "round-robin",
        Algorithm::WeightedRr => "weighted-rr",
        Algorithm::LeastConn => "least-conn",
        Algorithm::P2cEwma => "p2c-ewma",
        Algorithm::ConsistentHashBounded => "consistent-hash-bounded",
        Algorithm::IpHash => "ip-hash",
    }
}

/// Settings of algorithms other than the one that is chosen.
fn selector(lint: &mut Lint<'_>, pool: &Pool, at: &KeyPath) {
    use Algorithm::{ConsistentHashBounded, IpHash, P2cEwma};
    const KEYS: [(&str, &[Algorithm]); 4] = [
        ("ewma_half_life", &[P2cEwma]),
        ("hash_key", &[ConsistentHashBounded]),
        ("epsilon", &[ConsistentHashBounded]),
        ("virtual_nodes", &[ConsistentHashBounded, IpHash]),
    ];
    let chosen = pool.selector.algorithm;
    for (key, users) in KEYS {
        // By the client's address is what `ip-hash` means.
        let same =
            key == "hash_key" && chosen == IpHash && pool.selector.hash_key == HashKey::ClientIp;
        if users.contains(&chosen) || same || !lint.written(&at.key(key)) {
            continue;
        }
        let users: Vec<_> = users.iter().map(|user| format!("`{}`", named(*user))).collect();
        let message = format!("`{key}` does nothing: the algorithm is `{}`", named(chosen));
        lint.tell(
            "unused-key",
            &at.key(key),
            &message,
            format!("it is for {}", users.join(" and ")),
        );
    }
}

fn weights(lint: &mut Lint<'_>, pool: &Pool, at: &KeyPath) {
    use Algorithm::{ConsistentHashBounded, IpHash, WeightedRr};
    let chosen = pool.selector.algorithm;
    if matches!(chosen, WeightedRr | ConsistentHashBounded | IpHash) {
        return;
    }
    if let Some(ix) = pool.upstreams.iter().position(|upstream| upstream.weight != 1) {
        let message = format!("`weight` does nothing: the algorithm is `{}`", named(chosen));
        let help = "it is for `weighted-rr`, `consistent-hash-bounded` and `ip-hash`";
        lint.tell("unused-weight", &at.index(ix).key("weight"), &message, help);
    }
}

fn hash_key(lint: &mut Lint<'_>, pool: &Pool, at: &KeyPath) {
    if let (Algorithm::ConsistentHashBounded, HashKey::Header(name)) =
        (pool.selector.algorithm, &pool.selector.hash_key)
        && guarded(lint).drops(name.as_bytes())
    {
        let message = format!(
            "`{name}` is taken from no client: all requests are spread by the client's address"
        );
        let help = "it is an `identity_header`, or differs from one by `_` alone";
        lint.tell("guarded-hash-key", at, &message, help);
    }
}

fn backups(lint: &mut Lint<'_>, pool: &Pool, at: &KeyPath) {
    if pool.upstreams.iter().all(|upstream| upstream.backup) {
        let message = format!(
            "`backup` does nothing: all upstreams of the pool `{}` stand by, and for nobody",
            pool.name
        );
        let help = "leave it out at those that are to serve";
        lint.tell("backups-only", &at.index(0).key("backup"), &message, help);
    }
}

/// One upstream twice, in different words.
fn same(lint: &mut Lint<'_>, pool: &Pool, at: &KeyPath) {
    let mut seen = HashMap::new();
    for (ix, one) in pool.upstreams.iter().enumerate() {
        let place = (one.scheme as u8, one.host.as_str(), one.port, one.base_path.as_str());
        let Some(first) = seen.insert(place, &one.url) else { continue };
        let message = format!("`{}` is the same upstream as `{first}`", one.url);
        let help = "it is counted, limited and judged as two; `weight` gives one of them more";
        lint.tell("same-upstream", &at.index(ix).key("url"), &message, help);
    }
}

/// What a breaker that opens by ratio would go by, in one that does not.
fn breaker(lint: &mut Lint<'_>, pool: &Pool, at: &KeyPath) {
    if pool.breaker.consecutive_failures == 0 {
        return;
    }
    for key in lint.written_keys(at, &["failure_ratio", "min_observations", "window_size"]) {
        let message = format!(
            "`{key}` does nothing: with `consecutive_failures` the breaker opens by no ratio"
        );
        lint.tell("unused-key", &at.key(key), &message, "leave out one or the other");
    }
}
