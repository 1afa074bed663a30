//! The request's way through the proxy: the stages of `exchange/mod.rs`, in their order.

use std::net::IpAddr;
use std::time::Duration;

use l7rp_core::failure::{Failure, Scope};
use l7rp_core::limit::Slots;
use l7rp_core::route::{HostPattern, Outcome, Rule};

use super::candidates::PoolView;
use super::{Explanation, RouteOutcome, RouteView, Stage, StageOutcome, Verdict, lossy};
use crate::acme;
use crate::config::file::show_duration;
use crate::config::plan::{Action, HostHeader};
use crate::exchange::forwarded::{self, Sender};
use crate::exchange::{Incoming, judge};
use crate::live::{Listener, Process, Route, Snapshot};
use crate::upstream::pool::Pool;

/// A request on its way.
pub(super) struct Walk<'a> {
    pub(super) snapshot: &'a Snapshot,
    pub(super) process: Option<&'a Process>,
    pub(super) listener: &'a Listener,
    pub(super) incoming: Incoming<'a>,
    pub(super) peer: Option<IpAddr>,
    pub(super) sender: &'a Sender,
    /// The client's address.
    pub(super) client: &'a str,
    pub(super) sni: Option<&'a str>,
    pub(super) out: Explanation,
}

impl<'a> Walk<'a> {
    /// Goes all the way.
    ///
    /// # Errors
    /// Why the request is refused.
    pub(super) fn run(&mut self) -> Result<Verdict, Failure> {
        if let Some(answer) = self.own_answer() {
            return Ok(answer);
        }
        self.client_certificate();
        self.host()?;
        let route = self.route()?;
        self.address(route)?;
        self.rate(route)?;
        let max = self.snapshot.plan.max_in_flight;
        let slots = self.process.map(|process| &process.slots);
        self.load("load_process", slots, max, Scope::Process)?;
        let listener = self.listener;
        let max = listener.plan.max_in_flight;
        self.load("load_listener", Some(&listener.slots), max, Scope::Listener)?;
        let body = judge::admit_body(route, listener, &self.incoming);
        self.judged(
            "body_limit",
            body,
            match judge::max_body(route, listener) {
                u64::MAX => String::new(),
                max => format!("at most {max} octets"),
            },
        )?;
        let pool = match self.action(route)? {
            Ok(pool) => pool,
            Err(answer) => return Ok(answer),
        };
        let max = pool.plan.max_in_flight;
        self.load("load_pool", Some(&pool.lineage.slots), max, Scope::Pool)?;
        self.changes(route, pool);
        self.tries(route, pool);
        self.choice(pool)?;
        let says = format!("it is passed on to pool {}", pool.plan.name);
        Ok(Verdict { status: None, reason: None, says })
    }

    fn push(&mut self, stage: &str, outcome: StageOutcome, says: impl Into<String>) {
        self.out.stages.push(Stage { stage: stage.to_owned(), outcome, says: says.into() });
    }

    /// A stage that passes, or is off where there is nothing to say.
    fn tell(&mut self, stage: &str, says: String) {
        let outcome = if says.is_empty() { StageOutcome::Off } else { StageOutcome::Passed };
        self.push(stage, outcome, says);
    }

    fn judged(
        &mut self,
        stage: &str,
        result: Result<(), Failure>,
        says: String,
    ) -> Result<(), Failure> {
        match result {
            Ok(()) => self.tell(stage, says),
            Err(_) => self.push(stage, StageOutcome::Ends, says),
        }
        result
    }

    fn answered(&mut self, stage: &str, status: u16, says: String) -> Verdict {
        self.push(stage, StageOutcome::Ends, says.clone());
        Verdict { status: Some(status), reason: None, says }
    }

    /// What the proxy answers by itself, whatever the routes say.
    fn own_answer(&mut self) -> Option<Verdict> {
        match judge::own_probe(self.snapshot, &self.incoming) {
            Some(judge::Probe::Ready) if self.process.is_some_and(|p| !p.is_ready()) => {
                let says = "the proxy answers that it is not ready".to_owned();
                return Some(self.answered("own_probe", 503, says));
            }
            Some(_) => {
                let says = "the proxy answers a probe of itself".to_owned();
                return Some(self.answered("own_probe", 204, says));
            }
            None => self.push("own_probe", StageOutcome::Off, ""),
        }
        let tokens = self.process.map(|process| &process.tokens);
        if tokens.is_some_and(|tokens| acme::answer(tokens, self.incoming.path()).is_some()) {
            let says = "the proxy answers the challenge of a CA".to_owned();
            return Some(self.answered("acme_proof", 200, says));
        }
        self.push("acme_proof", StageOutcome::Off, "");
        None
    }

    fn client_certificate(&mut self) {
        let tls = self.listener.plan.tls.as_ref();
        let says = match tls.and_then(|tls| tls.client_auth.as_ref()) {
            Some(auth) if auth.required => {
                "one that is good is required when TLS begins; here it is taken for given"
            }
            Some(_) => "asked for when TLS begins; here none is assumed",
            None => "",
        };
        self.tell("client_certificate", says.to_owned());
    }

    fn host(&mut self) -> Result<(), Failure> {
        const STAGE: &str = "certificate_host";
        let host = self.incoming.head.host.of(self.incoming.buf);
        let (Some(sni), true) = (self.sni, self.listener.plan.tls.is_some()) else {
            self.push(STAGE, StageOutcome::Off, "");
            return Ok(());
        };
        let name = host.split(|&b| b == b':').next().unwrap_or_default();
        let says = format!("TLS begins for {sni}");
        match self.listener.tls.as_deref() {
            None if name.eq_ignore_ascii_case(sni.as_bytes()) => {
                self.push(STAGE, StageOutcome::Passed, says);
            }
            None => {
                let says = format!(
                    "{says} and the request is for {}: only with the certificates can it be told \
                     whether one is for both",
                    lossy(host)
                );
                self.push(STAGE, StageOutcome::Unknown, says);
            }
            tls => {
                return self.judged(STAGE, judge::admit_host(tls, Some(sni), &self.incoming), says);
            }
        }
        Ok(())
    }

    fn route(&mut self) -> Result<&'a Route, Failure> {
        let (snapshot, listener) = (self.snapshot, self.listener);
        let why = judge::with_request(snapshot, listener, &self.incoming, |request| {
            snapshot.table.why(request)
        });
        let verdicts = why.unwrap_or_default();
        let name = |ix: usize| snapshot.routes.get(ix).map_or("", |r| r.plan.name.as_str());
        let taken = verdicts.iter().find(|v| v.outcome == Outcome::Taken).map(|v| name(v.rule));
        let host = lossy(self.incoming.head.host.of(self.incoming.buf));
        let facts = Facts {
            host: if host.is_empty() { "a request without one".to_owned() } else { host },
            path: short(self.incoming.path()),
            method: short(self.incoming.head.method_text.of(self.incoming.buf)),
            taken: taken.unwrap_or_default(),
            snapshot,
        };
        for verdict in &verdicts {
            let Some(rule) = snapshot.table.rules().get(verdict.rule) else { continue };
            let (outcome, says) = facts.words(rule, &verdict.outcome);
            let route = name(verdict.rule).to_owned();
            self.out.routes.push(RouteView { route, outcome, says });
        }
        // The look-up that serves has the word.
        let found = judge::route(snapshot, listener, &self.incoming);
        self.out.route = found.as_ref().ok().map(|route| route.plan.name.clone());
        let says = match &found {
            Ok(route) => route.plan.name.clone(),
            Err(Failure::NoRoute) => "no route takes it".to_owned(),
            Err(_) => "its host is none".to_owned(),
        };
        self.judged("route", found.as_ref().map(|_| ()).map_err(|e| *e), says)?;
        found
    }

    fn address(&mut self, route: &Route) -> Result<(), Failure> {
        let (allow, deny) = (&route.plan.allow, &route.plan.deny);
        let result = judge::admit_address(route, self.sender.ip(self.peer));
        let says = match (allow.is_empty() && deny.is_empty(), result) {
            (true, _) => String::new(),
            (_, Ok(())) => format!("{} is let in", self.client),
            (_, Err(_)) => format!("{} is kept out by allow and deny", self.client),
        };
        self.judged("address", result, says)
    }

    fn rate(&mut self, route: &Route) -> Result<(), Failure> {
        let (Some(limiter), Some(plan)) = (&route.limiter, &route.plan.rate_limit) else {
            self.push("rate_limit", StageOutcome::Off, "");
            return Ok(());
        };
        let who = forwarded::limited_client(&self.incoming, self.peer, self.sender, limiter.hops);
        let whose = if plan.per_ip {
            format!("for each client, here {}", forwarded::peer_text(who))
        } else {
            "for all together".to_owned()
        };
        let rule = format!("{} a second and {} at once, {whose}", plan.rps, plan.burst);
        if self.process.is_none() {
            self.push("rate_limit", StageOutcome::Passed, rule);
            return Ok(());
        }
        match limiter.look(who, self.incoming.arrived) {
            Ok(more) => {
                let says = format!("{rule}: it passes, and {more} more could follow now");
                self.judged("rate_limit", Ok(()), says)
            }
            Err(wait) => {
                let says = format!("{rule}: used up, the next passes in {wait} s");
                self.judged("rate_limit", Err(Failure::RateLimited { wait }), says)
            }
        }
    }

    fn load(
        &mut self,
        stage: &str,
        slots: Option<&Slots>,
        max: u32,
        scope: Scope,
    ) -> Result<(), Failure> {
        let live = slots.filter(|_| self.process.is_some());
        let says = match (max, live) {
            (0, _) => String::new(),
            (_, Some(slots)) => format!("{} of {} in flight", slots.used(), slots.max()),
            (max, None) => format!("at most {max} in flight"),
        };
        let full = live.is_some_and(|slots| !slots.has_room());
        let result = if full { Err(Failure::Capacity(scope)) } else { Ok(()) };
        self.judged(stage, result, says)
    }

    /// The pool, or the answer that the route gives by itself.
    fn action(&mut self, route: &Route) -> Result<Result<&'a Pool, Verdict>, Failure> {
        Ok(match &route.plan.action {
            Action::Pool(ix) => {
                let pool = self.snapshot.pools.get(*ix).ok_or(Failure::Internal)?;
                self.push("action", StageOutcome::Passed, format!("pool {}", pool.plan.name));
                Ok(pool)
            }
            Action::Redirect { scheme, code } => {
                let says = format!("a redirect to {scheme}");
                Err(self.answered("action", *code, says))
            }
            Action::Respond { status, content_type, .. } => {
                let says = format!("a fixed answer, {content_type}");
                Err(self.answered("action", *status, says))
            }
        })
    }

    /// What the upstream gets and the client does: path, Host and fields.
    fn changes(&mut self, route: &Route, pool: &Pool) {
        let target = self.incoming.target();
        let parts = judge::rewritten(route, target);
        let rewritten = lossy(&[parts.0, parts.1, parts.2].concat());
        let below = pool.plan.upstreams.iter().any(|upstream| !upstream.base_path.is_empty());
        let mut says = String::new();
        if target != b"*" && rewritten.as_bytes() != target {
            says = format!("the upstream gets {rewritten}");
        }
        if target != b"*" && below {
            says += if says.is_empty() { "" } else { ", " };
            says += "below the path of its URL";
        }
        self.tell("rewrite", says);
        let says = match &pool.plan.host_header {
            HostHeader::Preserve => String::new(),
            HostHeader::Upstream => "the upstream is told the host of its URL".to_owned(),
            HostHeader::Literal(_) => {
                let host = judge::upstream_host(&pool.plan, &self.incoming, "");
                format!("the upstream is told {}", lossy(host))
            }
        };
        self.tell("host_header", says);
        let of = &route.plan.headers;
        let guarded = &route.request_changes.guarded;
        self.tell("request_headers", field_changes(&of.add_request, &of.remove_request, guarded));
        self.tell("response_headers", field_changes(&of.add_response, &of.remove_response, &[]));
    }

    /// Other tries, and until when.
    fn tries(&mut self, route: &Route, pool: &Pool) {
        let (is_call, of_client) = judge::call(&self.incoming);
        let method = self.incoming.head.method_text.of(self.incoming.buf);
        let (mut retry, mut hedge) = (String::new(), String::new());
        if let (Some(rules), Some(plan)) = (&route.retry, &route.plan.retry) {
            let statuses: Vec<_> = plan.retry_on.iter().map(ToString::to_string).collect();
            if rules.may_retry(method, is_call) {
                let max = plan.max_attempts;
                retry = format!("up to {max} tries, on {}", statuses.join(", "));
            }
            if rules.may_hedge(method) && judge::may_race(self.incoming.head) {
                let fixed = show_duration(plan.hedge_after);
                let percentile = plan.hedge_after_percentile;
                hedge = match (percentile > 0.0, plan.hedge_after.is_zero()) {
                    (true, true) => format!("a second try after p{percentile}"),
                    (true, false) => format!("a second try after p{percentile}, at first {fixed}"),
                    _ => format!("a second try beside the first after {fixed}"),
                };
            }
        }
        self.tell("retry", retry);
        self.tell("hedge", hedge);
        let limit = |time: Duration, what: &str| {
            if time.is_zero() { None } else { Some(format!("{} {what}", show_duration(time))) }
        };
        let all = [
            limit(route.plan.total_timeout, "in all"),
            of_client.map(|time| format!("{} by the call's own word", show_duration(time))),
            limit(pool.plan.connect_timeout, "to connect"),
            limit(pool.plan.response_header_timeout, "to the head of the response"),
        ];
        let all: Vec<String> = all.into_iter().flatten().collect();
        self.tell("deadline", all.join(", "));
    }

    fn choice(&mut self, pool: &Pool) -> Result<(), Failure> {
        let tie = judge::tie(self.snapshot, &pool.plan, &self.incoming, self.client);
        let key = judge::key(tie);
        let mut view = PoolView::of(pool, tie);
        let result = if self.process.is_some() {
            view.add_live(pool, key, self.incoming.arrived)
        } else {
            view.add_home(pool, key);
            Ok(())
        };
        self.out.pool = Some(view);
        let says = if result.is_ok() { "one of the pool" } else { "nobody can be chosen" };
        self.judged("upstream", result, says.to_owned())
    }
}

/// What the words about rules are made of.
struct Facts<'a> {
    host: String,
    path: String,
    method: String,
    taken: &'a str,
    snapshot: &'a Snapshot,
}

impl Facts<'_> {
    fn words(&self, rule: &Rule, outcome: &Outcome) -> (RouteOutcome, String) {
        match outcome {
            Outcome::Taken => (RouteOutcome::Taken, "takes it".to_owned()),
            Outcome::Host => {
                let pattern = match &rule.host {
                    HostPattern::Any => "any".to_owned(),
                    HostPattern::Exact(host) => host.clone(),
                    HostPattern::Wildcard(suffix) => format!("*.{suffix}"),
                };
                (RouteOutcome::Host, format!("host: {pattern} does not match {}", self.host))
            }
            Outcome::Prefix => {
                let says = format!("path: {} is no prefix of {}", rule.prefix, self.path);
                (RouteOutcome::Path, says)
            }
            Outcome::Listener => {
                let names = rule.listeners.iter().filter_map(|&ix| {
                    self.snapshot.listeners.get(ix).map(|listener| listener.plan.name.as_str())
                });
                let names: Vec<_> = names.collect();
                (RouteOutcome::Listener, format!("listener: only {}", names.join(", ")))
            }
            Outcome::Method => {
                let methods = rule.methods.join(", ");
                (RouteOutcome::Method, format!("method: {methods}, not {}", self.method))
            }
            Outcome::Predicate(name) => {
                let says = format!("header: {name} is missing or has another value");
                (RouteOutcome::Header, says)
            }
            Outcome::Outranked => {
                (RouteOutcome::Outranked, format!("matches, outranked by {}", self.taken))
            }
        }
    }
}

/// Names alone: values may be secrets.
fn field_changes(add: &[(String, String)], remove: &[String], guarded: &[String]) -> String {
    let added: Vec<_> = add.iter().map(|(name, _)| name.as_str()).collect();
    let removed: Vec<_> = remove.iter().chain(guarded).map(String::as_str).collect();
    let parts = [("sets", added), ("removes", removed)];
    let parts = parts.iter().filter(|(_, names)| !names.is_empty());
    let parts: Vec<_> = parts.map(|(verb, names)| format!("{verb} {}", names.join(", "))).collect();
    parts.join("; ")
}

/// As much of what a request says as is told for each route.
fn short(octets: &[u8]) -> String {
    const MOST: usize = 200;
    let mut text = lossy(&octets[..octets.len().min(MOST)]);
    if octets.len() > MOST {
        text.push('…');
    }
    text
}
