//! Names of upstreams become addresses: off the workers, again and again. While asking
//! fails, the last good answer is used for as long as the pool allows.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use l7rp_core::names::Nanos;
use tokio::sync::watch;
use tokio::time::Instant;

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
pub async fn keep_resolved(mut orders: watch::Receiver<Orders>, clock: Clock, events: Arc<Events>) {
    let mut last_event: Option<Nanos> = None;
    loop {
        let Orders { upstream, .. } = orders.borrow().clone();
        let answer = look_up(&upstream.host, upstream.port).await;
        let Orders { upstream, lineage, dns, .. } = orders.borrow().clone();
        let now = clock.now();
        let has_failed = answer.is_err();
        match answer {
            Ok(new) => {
                upstream.resolved_at.store(now.0, Relaxed);
                last_event = None;
                adopt(&lineage, &upstream, new, &events);
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
            }
        }
        upstream.was_asked_for();
        when_due(&mut orders, clock.instant(now), has_failed).await;
    }
}

/// Waits until a name that was `asked` for then should be so again, by orders that may change
/// meanwhile.
async fn when_due(orders: &mut watch::Receiver<Orders>, asked: Instant, has_failed: bool) {
    loop {
        let Orders { upstream, dns, .. } = orders.borrow_and_update().clone();
        let wait = if has_failed { dns.refresh.min(RETRY) } else { dns.refresh };
        // Connects that fail may want it sooner, but the resolver is not to be worn out.
        let sooner = async {
            tokio::time::sleep_until(asked + AT_MOST_EVERY).await;
            upstream.is_stale().await;
        };
        tokio::select! {
            () = tokio::time::sleep_until(asked + wait) => return,
            () = sooner => return,
            changed = orders.changed() => if changed.is_err() { return },
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{from_flags, plan::Dns};
    use crate::observe::event::Level;
    use crate::observe::log::Log;
    use crate::upstream::pool::{Making, Pool};

    /// Orders to ask again every so many seconds, for an upstream that is new.
    fn every(secs: u64) -> Orders {
        let plan = from_flags("127.0.0.1:0", "http://name.test", 1).unwrap().pools.remove(0);
        let log = Log::start(std::io::sink()).unwrap();
        let making = Making::new(1, &Arc::new(Events::new(log, Level::Error)));
        let pool = Pool::new(&plan, None, &making, Nanos(1));
        let dns = Dns { refresh: Duration::from_secs(secs), ..plan.dns };
        let (upstream, lineage) = (pool.upstreams[0].clone(), pool.lineage.clone());
        Orders { upstream, lineage, checks: None, dns }
    }

    /// After how many seconds the name is due by the first orders, if others come after `at`
    /// seconds and `meanwhile` is done then.
    async fn due(
        [first, then]: [Orders; 2],
        has_failed: bool,
        at: u64,
        meanwhile: impl FnOnce(),
    ) -> u64 {
        let (sender, mut orders) = watch::channel(first);
        let clock = Clock::new();
        let began = clock.instant(clock.now());
        let change = async {
            tokio::time::sleep(Duration::from_secs(at)).await;
            sender.send_replace(then);
            meanwhile();
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = when_due(&mut orders, began, has_failed) => {}
            () = change => {}
        }
        clock.now().since(Nanos(0)).as_secs_f64().round() as u64
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_is_asked_for_by_the_orders_of_the_day() {
        for (first, then, has_failed, at, expected) in [
            (30, 30, false, 5, 30),
            (3_600, 30, false, 5, 30),
            (3_600, 3, false, 5, 5),
            (10, 3_600, false, 5, 3_600),
            (3_600, 3_600, true, 5, 2),
        ] {
            let when = due([every(first), every(then)], has_failed, at, || {}).await;
            assert_eq!(when, expected, "{first} {then} {has_failed} {at}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_serves_may_want_it_sooner() {
        let (old, heir) = (every(3_600), every(3_600));
        let upstream = heir.upstream.clone();
        let asks = || upstream.ask_again();
        assert_eq!(due([old, heir.clone()], false, 7, asks).await, 7);
        // But the resolver is not worn out.
        asks();
        assert_eq!(due([heir.clone(), heir], false, 7, || {}).await, 1);
    }
}
