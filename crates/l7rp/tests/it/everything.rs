//! A proxy that has something of every kind, and traffic that moves nearly every count it keeps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use l7rp_testkit::{Call, Client, Metrics, Origin, Proxy, SOON, Then, eventually, let_pass, reply};
use rustls::ClientConfig;

use crate::http2_tools::{Conn, Raw, frame, kind};
use crate::setup::{assert_counts, get, in_flight, start};
use crate::tls_kit::{Ca, HOST, shake, tls};
use crate::tries::{NEVER_OPENS, NOTHING_LEFT, PLENTY, in_turn, say};
use crate::upgrade::OFFER;

/// What is above 0 after two rounds of traffic, so that a test that reads it reads something.
pub const TOUCHED: &[&str] = &[
    "proxy_requests_total",
    "proxy_request_duration_seconds_count",
    "proxy_upstream_requests_total",
    "proxy_upstream_duration_seconds_count",
    "proxy_upstream_eligible",
    "proxy_upstream_connections",
    "proxy_circuit_breaker_state",
    "proxy_circuit_breaker_transitions_total",
    "proxy_health_eligibility_transitions_total",
    "proxy_no_route_total",
    "proxy_hedge_fired_total",
    "proxy_hedge_winner_total",
    "proxy_retry_attempts_total",
    "proxy_retry_budget_exhausted_total",
    "proxy_rate_limited_total",
    "proxy_shed_total",
    "proxy_bad_requests_total",
    "proxy_connections",
    "proxy_connections_total",
    "proxy_tunnels",
    "proxy_tls_handshake_failures_total",
    "proxy_certificate_expiry_timestamp_seconds",
    "proxy_http2_floods_total",
    "proxy_config_reloads_total",
    "proxy_config_reload_duration_seconds_count",
    "proxy_build_info",
];

/// A configuration with one of everything.
pub struct Everything {
    pub proxy: Proxy,
    pub yaml: String,
    /// Every name and address of the file that a label may have.
    pub names: Vec<String>,
    client: Arc<ClientConfig>,
    sick: Arc<AtomicBool>,
    /// Tunnels that stay open.
    tunnels: Vec<Client>,
    _kept: (Ca, Vec<Origin>),
}

/// Fails at the first try, is slow at the first or the second, or does as it is told.
fn turned(call: &mut Call<'_>, nth: usize) -> Then {
    match (call.request.target().split('?').next(), nth) {
        (Some("/again"), 0) => say(call, 503, "", ""),
        (Some("/hedge"), 0) | (Some("/primary"), 1) => reply::hang(call),
        (Some("/primary"), _) => {
            let_pass(Duration::from_millis(250));
            say(call, 200, "", "primary")
        }
        _ => reply::told(call),
    }
}

impl Everything {
    pub fn start() -> Self {
        let sick = Arc::new(AtomicBool::new(false));
        let is_sick = sick.clone();
        let told: Vec<_> = (0..6).map(|_| Origin::start(reply::told)).collect();
        let checked = Origin::start(move |call| {
            if is_sick.load(SeqCst) { say(call, 500, "", "") } else { reply::told(call) }
        });
        let turns: [Origin; 2] = in_turn(turned);
        let ca = Ca::new("ca");
        let yaml = yaml(&tls(&[&ca.issue("a", &[HOST])], ""), &told, &checked, &turns);
        let client = Arc::new(ca.client());
        let origins: Vec<_> = told.into_iter().chain(turns).chain([checked]).collect();
        let names =
            "web https small good touchy checked narrow spent turns r t c n s again limited";
        let names = names.split(' ').map(str::to_owned).chain(origins.iter().map(Origin::url));
        let names = names.collect();
        let proxy = start(&yaml);
        let kept = (ca, origins);
        Self { proxy, yaml, names, client, sick, tunnels: Vec::new(), _kept: kept }
    }

    fn ask(&self, host: &str, path: &str) -> u16 {
        self.proxy.client().ask(get(host, path, "")).status()
    }

    /// A round of traffic; the first and the second together touch everything.
    pub fn round(&mut self) {
        let nth = self.tunnels.len();
        for path in ["/", "/404", "/500", "/reset"] {
            self.ask("a.test", path);
        }
        for _ in 0..3 {
            self.ask("t.test", "/500");
        }
        assert_eq!(self.ask("t.test", "/"), 503, "the breaker is open");
        assert_eq!(self.ask("nowhere.test", "/"), 404);
        for path in ["again", "503", "hedge", "primary"] {
            self.ask("again.test", &format!("/{path}?{nth}"));
        }
        self.ask("s.test", "/503");
        let answers: Vec<_> = (0..4).map(|_| self.ask("limited.test", "/")).collect();
        assert!(answers.contains(&429), "{answers:?}");
        self.refused();
        let mut tunnel = self.proxy.client();
        let offer = OFFER.replace("/t", "/upgrade");
        assert_eq!(tunnel.send(offer).head().status(), 101);
        self.tunnels.push(tunnel);
        self.abandoned();
        self.falls_ill(nth.is_multiple_of(2));
        self.reloads();
    }

    /// Has the upstream whose health is checked fail, or not any more, until that was seen.
    fn falls_ill(&self, sick: bool) {
        self.sick.store(sick, SeqCst);
        let expected = if sick { 0.0 } else { 1.0 };
        assert_counts(&self.proxy, "proxy_upstream_eligible", &[("pool", "checked")], expected);
    }

    /// What is refused or gets nowhere: full, malformed, no TLS, a flood.
    fn refused(&self) {
        let proxy = &self.proxy;
        let mut alone = proxy.client();
        alone.send(get("n.test", "/hint", "")).head();
        assert_eq!(self.ask("n.test", "/"), 503);
        alone.reset();
        assert_counts(proxy, "proxy_upstream_inflight", &[("pool", "narrow")], 0.0);
        let mut inside = Client::connect(proxy.listener("small"));
        assert_eq!(inside.get("/").status(), 200);
        let mut outside = Client::connect(proxy.listener("small"));
        assert_eq!(outside.get("/").status(), 503);
        assert_eq!(proxy.client().ask("GET / HTTP/1.1\r\n\r\n").status(), 400);
        let https = proxy.listener("https");
        assert_eq!(shake(&self.client, https, HOST).client.get("/").status(), 200);
        let mut plain = Client::connect(https);
        plain.send("nonsense\r\n\r\n");
        let _ = plain.wire.read_to_end();
        assert_eq!(Conn::open(proxy).get("/").status, 200);
        let mut flood = Raw::open(proxy, b"");
        let pings = frame(kind::PING, 0, 0, &[7; 8]).repeat(1000);
        assert!((0..1000).any(|_| !flood.write(&pings)), "pings without end are taken");
    }

    /// A client that leaves.
    fn abandoned(&self) {
        let labels = [("pool", "good"), ("status", "cancel")];
        let name = "proxy_upstream_requests_total";
        let before = self.proxy.metrics().sum(name, &labels);
        let mut client = self.proxy.client();
        client.send(get("a.test", "/hint", "")).head();
        client.reset();
        assert_counts(&self.proxy, name, &labels, before + 1.0);
    }

    /// One that is taken, and one that is refused.
    fn reloads(&self) {
        self.proxy.reload(&self.yaml);
        let refused = self.proxy.try_reload("nonsense: true\n");
        assert_eq!(refused["event"], "config_rejected", "{refused}");
        self.proxy.rewrite_yaml(&self.yaml);
    }

    /// Waits until everything that the traffic was to move has moved.
    pub fn settle(&self) {
        eventually(SOON, || in_flight(&self.proxy) == self.tunnels.len() as f64);
        let metrics = self.proxy.metrics();
        for name in TOUCHED {
            assert!(metrics.sum(name, &[]) > 0.0, "{name} is 0:\n{}", metrics.text);
        }
    }
}

fn yaml(tls: &str, told: &[Origin], checked: &Origin, turns: &[Origin]) -> String {
    let url = |origin: &Origin| format!("{{ url: \"{}\" }}", origin.url());
    let two = |of: &[Origin]| of.iter().map(url).collect::<Vec<_>>().join(", ");
    let [good, touchy, spent] = [&told[..2], &told[2..3], &told[3..5]].map(two);
    let (turns, checked) = (two(turns), url(checked));
    let narrow = told[5].url();
    format!(
        "listeners:
- {{ name: web, bind: \"127.0.0.1:0\" }}
- {{ name: https, bind: \"127.0.0.1:0\", {tls} }}
- {{ name: small, bind: \"127.0.0.1:0\", max_connections: 1 }}
upstream_pools:
- {{ name: good, {NEVER_OPENS}, upstreams: [{good}] }}
- {{ name: touchy, circuit_breaker: {{ consecutive_failures: 2, open_min: 60s, open_max: 60s }},
    upstreams: [{touchy}] }}
- {{ name: checked, upstreams: [{checked}], health: {{ active: {{ interval: 300ms, timeout: 250ms }} }} }}
- {{ name: narrow, upstreams: [{{ url: \"{narrow}\", max_in_flight: 1 }}] }}
- {{ name: spent, {NEVER_OPENS}, {NOTHING_LEFT}, upstreams: [{spent}] }}
- {{ name: turns, {NEVER_OPENS}, {PLENTY}, upstreams: [{turns}] }}
routes:
- {{ name: r, host: a.test, pool: good }}
- {{ name: t, host: t.test, pool: touchy }}
- {{ name: c, host: c.test, pool: checked }}
- {{ name: n, host: n.test, pool: narrow }}
- {{ name: s, host: s.test, pool: spent, middleware: [{{ retry: {{ max_attempts: 2 }} }}] }}
- {{ name: again, host: again.test, pool: turns, middleware: [
    {{ retry: {{ max_attempts: 2, backoff: 1ms, hedge_after: 100ms }} }}] }}
- {{ name: limited, host: limited.test, respond: {{ status: 200 }}, middleware: [
    {{ rate_limit: {{ scope: per-ip, per_ip_rps: 1, burst: 1 }} }}] }}
"
    )
}

/// A sample's name and its labels.
pub type Series = (String, BTreeMap<String, String>);

/// Every sample of a scrape. No value of a label may hold a quotation mark.
pub fn samples(metrics: &Metrics) -> BTreeMap<Series, f64> {
    let lines = metrics.text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| {
            let (series, value) = line.rsplit_once(' ').expect("a value");
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
            let labels = labels.strip_suffix('}').expect("a bracket");
            let pairs = labels.split("\",").filter(|pair| !pair.is_empty()).map(|pair| {
                let (label, value) = pair.split_once("=\"").expect("a label");
                (label.to_owned(), value.trim_end_matches('"').to_owned())
            });
            ((name.to_owned(), pairs.collect()), value.parse().expect("a number"))
        })
        .collect()
}
