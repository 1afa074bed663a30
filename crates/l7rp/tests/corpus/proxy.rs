//! The program under test, set up as the expectations assume.

use std::net::SocketAddr;
use std::time::Duration;

use l7rp_testkit::{Proxy, within};

pub(crate) fn start(upstream: SocketAddr) -> Proxy {
    let file = format!(
        "listeners:
  - name: http
    bind: \"127.0.0.1:0\"
    timeouts: {{ read_header: 2s, read: 2s, write: 2s, idle: 2s, max_header_bytes: 64KiB }}
    limits: {{ max_headers: 100, max_target_bytes: 16384, max_body_bytes: 10MiB }}
upstream_pools:
  - name: backend
    upstreams: [{{ url: \"http://{upstream}\" }}]
    connect_timeout: 2s
    # One failure is enough to be seen, and does not keep the next client out.
    circuit_breaker: {{ consecutive_failures: 1, open_min: 1ms, open_max: 1ms, half_open_probes: 1 }}
    response_header_timeout: 2s
routes:
  - name: all
    pool: backend
workers: 1
"
    );
    Proxy::start(env!("CARGO_BIN_EXE_l7rp"), &file)
}

/// What the program holds at one moment.
#[derive(Debug)]
pub(crate) struct Holdings {
    in_flight: f64,
    clients: f64,
    upstreams_idle: f64,
    upstreams_active: f64,
    panics: f64,
    descriptors: f64,
    memory: f64,
}

impl Holdings {
    pub(crate) fn of(proxy: &Proxy) -> Self {
        let metrics = proxy.metrics();
        let upstreams = |state| metrics.sum("proxy_upstream_connections", &[("state", state)]);
        // A gauge that is not there would pass for 0.
        assert!(metrics.series("proxy_upstream_inflight").count() == 1, "{}", metrics.text);
        assert!(metrics.series("proxy_connections").count() == 1, "{}", metrics.text);
        assert!(metrics.text.contains(" proxy_panics_total "), "{}", metrics.text);
        Self {
            in_flight: metrics.sum("proxy_upstream_inflight", &[]),
            clients: metrics.sum("proxy_connections", &[]),
            upstreams_idle: upstreams("idle"),
            upstreams_active: upstreams("active"),
            panics: metrics.sum("proxy_panics_total", &[]),
            descriptors: metrics.sum("process_open_fds", &[]),
            memory: metrics.sum("process_resident_memory_bytes", &[]),
        }
    }

    /// What is held that should not be, now that all is over.
    fn leaks_since(&self, before: &Self) -> Vec<String> {
        /// Buffers that are kept for later, and what an allocator needs.
        const BAND: f64 = 24.0 * 1024.0 * 1024.0;
        let mut found = Vec::new();
        let mut check = |good: bool, what: &str| {
            if !good {
                found.push(format!("  {what}: {self:?}, at the beginning {before:?}"));
            }
        };
        check(self.in_flight < 1.0, "requests in flight after all have ended");
        check(self.clients < 1.0, "clients connected after all have left");
        check(self.upstreams_active < 1.0, "upstream connections in use by nobody");
        check(self.panics < 1.0, "panics");
        let descriptors = before.descriptors + self.upstreams_idle;
        check(self.descriptors <= descriptors, "descriptors left open");
        check(self.memory <= before.memory + BAND, "memory has grown");
        found
    }
}

/// Waits until what was borrowed is given back; what is not.
pub(crate) fn leaks(proxy: &Proxy, before: &Holdings) -> Vec<String> {
    let none = || Holdings::of(proxy).leaks_since(before).is_empty().then_some(Vec::new());
    within(Duration::from_secs(10), none).unwrap_or_else(|| Holdings::of(proxy).leaks_since(before))
}

/// How often the breaker has opened.
pub(crate) fn opened(proxy: &Proxy) -> f64 {
    proxy.metrics().sum("proxy_circuit_breaker_transitions_total", &[("to", "open")])
}

/// Waits until the upstream may be asked again, if its breaker is open.
pub(crate) fn is_ready(proxy: &Proxy) -> bool {
    within(Duration::from_secs(5), || (proxy.ask_admin("/readyz").status() == 204).then_some(()))
        .is_some()
}
