//! What `status` and `top` show of an instance: lines of words, made from what it says of itself
//! by now and, for rates, a moment ago.
//!
//! What an instance says is not trusted: no control character of it reaches a terminal.

mod table;

use std::fmt::Write;

use crate::admin::status::{Config, Listener, Pool, Route, Status, Upstream};
use crate::cli::terminal::visible;

use table::{Column, left, right, table};

/// How a piece of text is to be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Plain,
    Head,
    Faint,
    Good,
    Warn,
    Bad,
}

/// A piece of text, and how it is to be taken.
pub(super) type Piece = (String, Tone);
/// One line.
pub(super) type Line = Vec<Piece>;

/// In which order routes and upstreams are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Order {
    /// As in the configuration.
    #[default]
    File,
    /// The busiest first.
    Requests,
    /// Those that fail most first.
    Errors,
}

/// What is shown of counters.
#[derive(Clone, Copy, Debug)]
pub(super) enum Counters<'a> {
    /// As they are.
    Totals,
    /// What is added to them each second, since then; `None`: not known yet.
    Rates(Option<&'a Status>),
}

/// What is to be shown, and how.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wish<'a> {
    pub(super) counters: Counters<'a>,
    pub(super) order: Order,
    /// Columns of the terminal; tables are made to fit, unless that leaves nothing of them.
    pub(super) width: usize,
}

/// All lines.
pub(super) fn lines(now: &Status, wish: Wish<'_>) -> Vec<Line> {
    let since = Since::new(now, wish.counters);
    let mut lines = headline(now);
    lines.push(Line::new());
    lines.extend(table(
        &[
            left("LISTENER"),
            left("BIND"),
            left("SPEAKS"),
            right("CONNECTIONS"),
            right("IN FLIGHT"),
            right("NO ROUTE"),
            right("BAD"),
            right("SHED"),
        ],
        now.listeners.iter().map(listener).collect(),
        wish.width,
    ));
    for certificate in now.listeners.iter().flat_map(|listener| &listener.certificates) {
        let (host, days) =
            (visible(&certificate.host), certificate.expires_in_s.div_euclid(86_400));
        let (words, tone) = match days {
            ..0 => ("has expired".to_owned(), Tone::Bad),
            0..14 => (format!("expires in {days} days"), Tone::Warn),
            _ => (format!("expires in {days} days"), Tone::Faint),
        };
        lines.push(vec![(format!("  certificate of {host} {words}"), tone)]);
    }
    lines.push(Line::new());
    lines.extend(routes(now, &since, wish));
    for pool in &now.pools {
        lines.push(Line::new());
        lines.extend(self::pool(pool, &since, wish));
    }
    lines
}

fn headline(now: &Status) -> Vec<Line> {
    let state = match (now.draining, now.ready) {
        (true, _) => ("draining".to_owned(), Tone::Warn),
        (false, true) => ("ready".to_owned(), Tone::Good),
        (false, false) => {
            let why = now.why_unready.as_deref().unwrap_or("it does not say why");
            (format!("not ready: {}", visible(why)), Tone::Bad)
        }
    };
    let mut lines = vec![
        vec![
            (format!("l7rp {} ", visible(&now.version)), Tone::Head),
            state,
            (
                format!(
                    ", up {}, process {}, {} workers",
                    span(now.uptime_ms),
                    now.pid,
                    now.workers
                ),
                Tone::Plain,
            ),
        ],
        vec![(
            format!(
                "{} in flight, {} connections, {} tunnels",
                of(now.in_flight, now.max_in_flight),
                now.connections,
                now.tunnels
            ),
            Tone::Plain,
        )],
    ];
    for (count, what) in
        [(now.log_lines_dropped, "log lines dropped"), (now.panics, "panics caught")]
    {
        if count > 0 {
            lines[1].push((format!(", {count} {what}"), Tone::Warn));
        }
    }
    lines.extend(config(&now.config));
    lines
}

fn config(of: &Config) -> Vec<Line> {
    let Config { generation, taken, reloads, rejected, last_rejected, last_error } = of;
    let taken = visible(taken);
    let words =
        format!("configuration {generation} of {taken}; {reloads} reloads, {rejected} refused");
    let mut lines = vec![vec![(words, Tone::Plain)]];
    if *last_rejected {
        let why = visible(last_error.as_deref().unwrap_or_default());
        lines.push(vec![(format!("the last reload was refused: {why}"), Tone::Bad)]);
    }
    lines
}

fn listener(of: &Listener) -> Vec<Piece> {
    let speaks = visible(&of.protocols.join(" "));
    vec![
        plain(visible(&of.name)),
        plain(visible(&of.bind)),
        plain(if of.tls { format!("{speaks} (TLS)") } else { speaks }),
        plain(self::of(of.connections, of.max_connections)),
        plain(self::of(of.in_flight, of.max_in_flight)),
        count(of.no_route, Tone::Plain),
        count(of.bad_requests, Tone::Plain),
        count(of.shed, Tone::Warn),
    ]
}

fn routes(now: &Status, since: &Since<'_>, wish: Wish<'_>) -> Vec<Line> {
    let old = |route: &Route| since.before?.routes.iter().find(|old| old.name == route.name);
    let mut routes: Vec<_> = now.routes.iter().map(|route| (route, old(route))).collect();
    sort(&mut routes, wish.order, |(route, old)| match wish.order {
        Order::File => 0.0,
        Order::Requests => since.change(route.requests, old.map(|old| old.requests)),
        Order::Errors => {
            since.change(route.by_class.server_error, old.map(|old| old.by_class.server_error))
        }
    });
    let rows = routes.iter().map(|(route, old)| {
        let to = route.pool.as_ref().map_or_else(|| visible(&route.action), |pool| visible(pool));
        let host = route.host.as_deref().map_or_else(|| "*".to_owned(), visible);
        let (by, then) = (&route.by_class, old.map(|old| &old.by_class));
        vec![
            plain(visible(&route.name)),
            plain(format!("{host}{}", visible(&route.path_prefix))),
            plain(to),
            since.show(route.requests, old.map(|old| old.requests), Tone::Plain),
            since.show(by.success, then.map(|c| c.success), Tone::Plain),
            since.show(by.redirection, then.map(|c| c.redirection), Tone::Plain),
            since.show(by.client_error, then.map(|c| c.client_error), Tone::Plain),
            since.show(by.server_error, then.map(|c| c.server_error), Tone::Bad),
            since.show(route.rate_limited, old.map(|old| old.rate_limited), Tone::Warn),
        ]
    });
    let requests = right(if since.is_rates { "REQUESTS/S" } else { "REQUESTS" });
    let columns: [Column; 9] = [
        left("ROUTE"),
        left("FOR"),
        left("TO"),
        requests,
        right("2XX"),
        right("3XX"),
        right("4XX"),
        right("5XX"),
        right("LIMITED"),
    ];
    table(&columns, rows.collect(), wish.width)
}

fn pool(of: &Pool, since: &Since<'_>, wish: Wish<'_>) -> Vec<Line> {
    let well = of.upstreams.iter().filter(|upstream| upstream.eligible).count();
    let mut words = format!(
        " {}, {well} of {} in, {} in flight",
        visible(&of.algorithm),
        of.upstreams.len(),
        self::of(of.in_flight, of.max_in_flight)
    );
    if of.budget_exhausted > 0 {
        let _ = write!(words, ", {} tries beyond the budget", of.budget_exhausted);
    }
    let tone = if well == 0 { Tone::Bad } else { Tone::Plain };
    let mut lines = vec![vec![(format!("POOL {}", visible(&of.name)), Tone::Head), (words, tone)]];
    let before = since.before.and_then(|old| old.pools.iter().find(|old| old.name == of.name));
    let old = |one: &Upstream| before?.upstreams.iter().find(|old| old.url == one.url);
    let mut upstreams: Vec<_> = of.upstreams.iter().map(|one| (one, old(one))).collect();
    sort(&mut upstreams, wish.order, |(one, old)| match wish.order {
        Order::File => 0.0,
        Order::Requests => since.change(one.requests, old.map(|old| old.requests)),
        Order::Errors => since.change(one.failures, old.map(|old| old.failures)),
    });
    let rows = upstreams.iter().map(|(one, old)| {
        vec![
            plain(format!("  {}", visible(&one.url))),
            standing(one),
            plain(self::of(one.in_flight, one.max_in_flight)),
            plain(one.ewma_ms.map_or_else(|| "-".to_owned(), |ms| format!("{ms:.1} ms"))),
            since.show(one.requests, old.map(|old| old.requests), Tone::Plain),
            since.show(one.failures, old.map(|old| old.failures), Tone::Bad),
        ]
    });
    let columns: [Column; 6] = if since.is_rates {
        [
            left("  UPSTREAM"),
            left("STATE"),
            right("IN FLIGHT"),
            right("LATENCY"),
            right("TRIES/S"),
            right("FAILED/S"),
        ]
    } else {
        [
            left("  UPSTREAM"),
            left("STATE"),
            right("IN FLIGHT"),
            right("LATENCY"),
            right("TRIES"),
            right("FAILED"),
        ]
    };
    lines.extend(table(&columns, rows.collect(), wish.width));
    lines
}

/// The state of an upstream, in words.
fn standing(of: &Upstream) -> Piece {
    match (&of.why_not, of.eligible) {
        (why, false) => {
            let why = why.as_deref().unwrap_or("it has just changed");
            // The reason is what the room is for.
            let why = why.strip_prefix("health checks: ").unwrap_or(why);
            (format!("out: {}", visible(why)), Tone::Bad)
        }
        (_, true) if of.breaker.forced => {
            ("in, breaker forced closed by an operator".to_owned(), Tone::Warn)
        }
        (_, true) if of.breaker.state != "closed" => ("in, on trial".to_owned(), Tone::Warn),
        (_, true) if of.backup => ("in, as a backup".to_owned(), Tone::Good),
        (_, true) => ("in".to_owned(), Tone::Good),
    }
}

fn plain(text: String) -> Piece {
    (text, Tone::Plain)
}

/// A count that stands out when there is something to count.
fn count(count: u64, tone: Tone) -> Piece {
    (count.to_string(), if count == 0 { Tone::Faint } else { tone })
}

/// So many, of at most so many; 0: no limit.
fn of(used: u64, most: u64) -> String {
    if most == 0 { used.to_string() } else { format!("{used}/{most}") }
}

fn sort<T>(list: &mut [T], order: Order, by: impl Fn(&T) -> f64) {
    if order != Order::File {
        // Stable: those that are equal stay as in the file.
        list.sort_by(|a, b| by(b).total_cmp(&by(a)));
    }
}

/// Counters as they are, or against what they were.
struct Since<'a> {
    is_rates: bool,
    /// `None`: nothing to compare with.
    before: Option<&'a Status>,
    seconds: f64,
}

impl<'a> Since<'a> {
    fn new(now: &Status, counters: Counters<'a>) -> Self {
        let (is_rates, before) = match counters {
            Counters::Totals => (false, None),
            // Another process has begun to count anew.
            Counters::Rates(before) => {
                (true, before.filter(|b| b.pid == now.pid && b.uptime_ms < now.uptime_ms))
            }
        };
        let ms = before.map_or(0, |before| now.uptime_ms - before.uptime_ms);
        Self { is_rates, before, seconds: ms as f64 / 1000.0 }
    }

    /// What a counter comes to, to sort by.
    fn change(&self, now: u64, then: Option<u64>) -> f64 {
        if self.is_rates { self.rate(now, then).unwrap_or(0.0) } else { now as f64 }
    }

    fn rate(&self, now: u64, then: Option<u64>) -> Option<f64> {
        let more = now.checked_sub(then?)?;
        (self.seconds > 0.0).then(|| more as f64 / self.seconds)
    }

    /// A counter; `tone`: if there is something to count.
    fn show(&self, now: u64, then: Option<u64>, tone: Tone) -> Piece {
        if !self.is_rates {
            return count(now, tone);
        }
        match self.rate(now, then) {
            None => ("…".to_owned(), Tone::Faint),
            Some(0.0) => ("0".to_owned(), Tone::Faint),
            Some(rate @ ..10.0) => (format!("{rate:.1}"), tone),
            Some(rate) => (format!("{rate:.0}"), tone),
        }
    }
}

/// A length of time, for people.
fn span(ms: u64) -> String {
    let s = ms / 1000;
    match s {
        0 => format!("{ms}ms"),
        1..60 => format!("{s}s"),
        60..3600 => format!("{}m{}s", s / 60, s % 60),
        3600..86_400 => format!("{}h{}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d{}h", s / 86_400, s % 86_400 / 3600),
    }
}
