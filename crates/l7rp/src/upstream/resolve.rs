//! Names of upstreams become addresses: off the workers, again and again. While asking
//! fails, the last good answer is used for as long as the pool allows.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use l7rp_core::names::Nanos;
use tokio::sync::watch;

use super::lineage::Lineage;
use super::pool::Upstream;
use super::upkeep::Orders;
use crate::clock::Clock;
use crate::observe::event::{Event, Events};

/// Addresses of one name that are used at most.
const MAX_ADDRESSES: usize = 64;
/// An unresolved name is asked for again this soon, whatever the pool's `refresh`.
const RETRY: Duration = Duration::from_secs(2);
/// A name is not asked for again sooner than this.
const AT_MOST_EVERY: Duration = Duration::from_secs(1);
/// A failing name makes one event in this time.
const QUIET: Duration = Duration::from_secs(30);

/// Keeps the addresses of an upstream current. Never returns. A reload gives other orders.
pub async fn keep_resolved(orders: watch::Receiver<Orders>, clock: Clock, events: Arc<Events>) {
    let mut last_event: Option<Nanos> = None;
    loop {
        let Orders { upstream, .. } = orders.borrow().clone();
        let answer = look_up(&upstream.host, upstream.port).await;
        let Orders { upstream, lineage, dns, .. } = orders.borrow().clone();
        let now = clock.now();
        let wait = match answer {
            Ok(new) => {
                upstream.resolved_at.store(now.0, Relaxed);
                last_event = None;
                adopt(&lineage, &upstream, new, &events);
                dns.refresh
            }
            Err(error) => {
                let last_good = upstream.resolved_at.load(Relaxed);
                let stale = last_good == 0 || now.since(Nanos(last_good)) > dns.max_stale;
                if stale {
                    lineage.set_resolved(&upstream, false);
                }
                if last_event.is_none_or(|t| now.since(t) >= QUIET) {
                    last_event = Some(now);
                    events.emit(&Event::UpstreamResolveFailed {
                        pool: lineage.name.clone(),
                        upstream: upstream.url.clone(),
                        host: upstream.host.clone(),
                        error,
                        effect: if stale {
                            "ineligible until the name resolves"
                        } else {
                            "the last good addresses are used"
                        },
                    });
                }
                dns.refresh.min(RETRY)
            }
        };
        upstream.was_asked_for();
        // Connects that fail may want it sooner, but the resolver is not to be worn out.
        tokio::time::sleep(wait.min(AT_MOST_EVERY)).await;
        let rest = tokio::time::sleep(wait.saturating_sub(AT_MOST_EVERY));
        tokio::select! {
            () = rest => {}
            () = upstream.is_stale() => {}
        }
    }
}

/// Takes over an answer, and says so if it is news.
fn adopt(lineage: &Lineage, upstream: &Upstream, new: Vec<SocketAddr>, events: &Events) {
    let old = upstream.current_addresses();
    let changed = *old != new;
    if changed {
        events.emit(&Event::UpstreamResolved {
            pool: lineage.name.clone(),
            upstream: upstream.url.clone(),
            from: old.iter().map(|a| a.ip().to_string()).collect(),
            to: new.iter().map(|a| a.ip().to_string()).collect(),
        });
        upstream.set_addresses(new);
    }
    lineage.set_resolved(upstream, true);
}

/// Asks the system's resolver; sorted, without repeats.
async fn look_up(host: &str, port: u16) -> Result<Vec<SocketAddr>, String> {
    let mut found: Vec<_> =
        tokio::net::lookup_host((host, port)).await.map_err(|e| e.to_string())?.collect();
    found.sort_unstable();
    found.dedup();
    found.truncate(MAX_ADDRESSES);
    if found.is_empty() { Err("the answer has no address".into()) } else { Ok(found) }
}
