//! What `top` shows, and how.

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line as Drawn, Span};
use ratatui::widgets::Paragraph;

use super::Answer;
use crate::admin::status::Status;
use crate::cli::ask::Instance;
use crate::cli::board::{Counters, Line, Order, Tone, Wish, lines};
use crate::cli::terminal::visible;

/// What is known, and how it is to be shown.
pub(super) struct Screen {
    instance: String,
    now: Option<Status>,
    before: Option<Status>,
    /// Why it could not be asked the last time.
    lost: Option<String>,
    paused: bool,
    order: Order,
    /// Lines above the first that is shown.
    above: usize,
}

impl Screen {
    pub(super) fn new(instance: &Instance) -> Self {
        Self {
            instance: visible(&instance.to_string()),
            now: None,
            before: None,
            lost: None,
            paused: false,
            order: Order::File,
            above: 0,
        }
    }

    /// Takes in an answer. While it is paused, none.
    pub(super) fn take(&mut self, answer: Answer) {
        if self.paused {
            return;
        }
        match answer {
            Ok(status) => {
                self.before = self.now.replace(status);
                self.lost = None;
            }
            Err(why) => self.lost = Some(why),
        }
    }

    pub(super) fn pause(&mut self) {
        self.paused = !self.paused;
    }

    pub(super) fn next_order(&mut self) {
        self.order = match self.order {
            Order::File => Order::Requests,
            Order::Requests => Order::Errors,
            Order::Errors => Order::File,
        };
    }

    pub(super) fn scroll(&mut self, by: isize) {
        self.above = self.above.saturating_add_signed(by);
    }

    /// What must not be scrolled away.
    fn alarm(&self) -> Vec<Line> {
        let old = if self.now.is_some() { "; below is what it said last" } else { "" };
        let alarm = |why: &String| {
            let first = format!("NOT REACHED, trying again{old}");
            [first, why.clone()].map(|words| vec![(words, Tone::Bad)]).to_vec()
        };
        self.lost.as_ref().map(alarm).unwrap_or_default()
    }

    fn lines(&self, width: usize) -> Vec<Line> {
        match &self.now {
            Some(now) => {
                let counters = Counters::Rates(self.before.as_ref());
                lines(now, Wish { counters, order: self.order, width })
            }
            None if self.lost.is_none() => {
                vec![vec![(format!("asking {} …", self.instance), Tone::Faint)]]
            }
            None => Vec::new(),
        }
    }

    fn foot(&self) -> String {
        let order = match self.order {
            Order::File => "as configured",
            Order::Requests => "busiest first",
            Order::Errors => "failing first",
        };
        let paused = if self.paused { " PAUSED |" } else { "" };
        format!("{paused} q quit | p pause | s sort: {order} | {}", self.instance)
    }
}

/// Draws it all.
pub(super) fn draw(frame: &mut Frame<'_>, screen: &mut Screen) {
    let alarm = screen.alarm();
    let area = frame.area();
    let rows = [
        Constraint::Length(alarm.len() as u16),
        Constraint::Min(0),
        Constraint::Length(area.height.min(1)),
    ];
    let [top, body, foot] = Layout::vertical(rows).areas(area);
    let all = screen.lines(body.width.into());
    screen.above = screen.above.min(all.len().saturating_sub(body.height.into()));
    let shown: Vec<Drawn<'_>> =
        all.into_iter().skip(screen.above).take(body.height.into()).map(drawn).collect();
    frame.render_widget(Paragraph::new(alarm.into_iter().map(drawn).collect::<Vec<_>>()), top);
    frame.render_widget(Paragraph::new(shown), body);
    let style = Style::new().add_modifier(Modifier::REVERSED);
    frame.render_widget(Paragraph::new(screen.foot()).style(style), foot);
}

fn drawn(line: Line) -> Drawn<'static> {
    let span = |(text, tone)| Span::styled(text, style(tone));
    line.into_iter().map(span).collect::<Vec<_>>().into()
}

/// Words say all of it; colours only help to find it.
fn style(tone: Tone) -> Style {
    let plain = Style::new();
    match tone {
        Tone::Plain => plain,
        Tone::Head => plain.add_modifier(Modifier::BOLD),
        Tone::Faint => plain.add_modifier(Modifier::DIM),
        Tone::Good => plain.fg(Color::Green),
        Tone::Warn => plain.fg(Color::Yellow),
        Tone::Bad => plain.fg(Color::Red),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use serde_json::json;

    use super::*;

    fn upstream(url: &str, requests: u64, why_not: Option<&str>) -> serde_json::Value {
        json!({
            "url": url, "weight": 1, "backup": false, "eligible": why_not.is_none(),
            "drained": false, "why_not": why_not,
            "breaker": { "state": "closed", "forced": false, "admits_in_ms": 0 },
            "in_flight": 2, "max_in_flight": 9, "ewma_ms": 1.25, "requests": requests,
            "failures": 0, "last_probe": null, "addresses": [],
            "connections": { "idle": 0, "active": 0 },
        })
    }

    fn status(uptime_ms: u64, requests: u64, name: &str) -> Status {
        let route = |name: &str, requests: u64| {
            json!({
                "name": name, "host": null, "path_prefix": "/", "action": "pool", "pool": "b",
                "requests": requests, "rate_limited": 0, "tunnels": 0,
                "by_class": { "1xx": 0, "2xx": requests, "3xx": 0, "4xx": 0, "5xx": 0 },
            })
        };
        let value = json!({
            "version": "1.2.3", "pid": 1, "time": "", "uptime_ms": uptime_ms, "ready": true,
            "draining": false, "workers": 2, "in_flight": 3, "max_in_flight": 0,
            "connections": 4, "tunnels": 0, "log_lines_dropped": 0, "panics": 0,
            "config": {
                "generation": 1, "taken": "", "reloads": 0, "rejected": 0,
                "last_rejected": false, "last_error": null,
            },
            "listeners": [],
            "routes": [route("idle", 5), route(name, requests)],
            "pools": [{
                "name": "b", "algorithm": "p2c-ewma", "in_flight": 0, "max_in_flight": 0,
                "budget_exhausted": 0,
                "upstreams": [
                    upstream("http://a", requests, None),
                    upstream("http://c", 0, Some("health checks: status:503")),
                ],
            }],
        });
        serde_json::from_value(value).unwrap()
    }

    fn seen(screen: &mut Screen, width: u16, height: u16) -> Vec<String> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, screen)).unwrap();
        let buffer = terminal.backend().buffer();
        let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
        (0..height).map(|y| row(y).trim_end().to_owned()).collect()
    }

    fn row<'a>(seen: &'a [String], begins: &str) -> &'a str {
        let found = seen.iter().find(|line| line.trim_start().starts_with(begins));
        found.unwrap_or_else(|| panic!("no {begins} in {seen:#?}"))
    }

    fn screen() -> Screen {
        Screen::new(&Instance::Tcp("a.test:9090".to_owned()))
    }

    #[test]
    fn rates_are_differences() {
        let mut screen = screen();
        assert_eq!(seen(&mut screen, 80, 4)[0], "asking http://a.test:9090 …");
        screen.take(Ok(status(10_000, 100, "busy")));
        let first = seen(&mut screen, 80, 20);
        assert!(first[0].starts_with("l7rp 1.2.3 ready, up 10s"), "{first:#?}");
        assert!(row(&first, "busy").contains('…'), "{first:#?}");
        screen.take(Ok(status(12_000, 103, "busy")));
        let second = seen(&mut screen, 80, 20);
        let words: Vec<_> = row(&second, "busy").split_whitespace().collect();
        assert_eq!(words, ["busy", "*/", "b", "1.5", "1.5", "0", "0", "0", "0"]);
        let words: Vec<_> = row(&second, "http://a").split_whitespace().collect();
        assert_eq!(words, ["http://a", "in", "2/9", "1.2", "ms", "1.5", "0"]);
        assert!(row(&second, "http://c").contains("out: status:503 "));
        // Another process: nothing to compare with.
        screen.take(Ok(status(1000, 1, "busy")));
        assert!(row(&seen(&mut screen, 80, 20), "busy").contains('…'));
    }

    #[test]
    fn order_pause_and_loss() {
        let mut screen = screen();
        screen.take(Ok(status(1000, 1, "busy")));
        screen.take(Ok(status(2000, 9, "busy")));
        let at = |seen: &[String], name: &str| seen.iter().position(|l| l.starts_with(name));
        let as_configured = seen(&mut screen, 80, 20);
        assert!(at(&as_configured, "idle") < at(&as_configured, "busy"));
        screen.next_order();
        let busiest = seen(&mut screen, 80, 20);
        assert!(at(&busiest, "busy") < at(&busiest, "idle"));
        assert!(busiest[19].contains("s sort: busiest first"), "{busiest:#?}");
        screen.pause();
        screen.take(Err("cannot ask".to_owned()));
        let paused = seen(&mut screen, 80, 20);
        assert!(paused[19].starts_with(" PAUSED") && !paused[0].starts_with("NOT"));
        screen.pause();
        screen.take(Err("cannot ask: refused".to_owned()));
        let lost = seen(&mut screen, 80, 20);
        assert!(lost[0].starts_with("NOT REACHED, trying again; below is"), "{lost:#?}");
        assert!(lost[1] == "cannot ask: refused" && lost[2].starts_with("l7rp 1.2.3"));
        screen.scroll(isize::MAX);
        assert_eq!(seen(&mut screen, 80, 8)[..2], lost[..2]);
        screen.take(Ok(status(3000, 9, "busy")));
        assert!(seen(&mut screen, 80, 20)[0].starts_with("l7rp 1.2.3"));
    }

    #[test]
    fn it_fits_and_scrolls() {
        let mut screen = screen();
        let long = "a-route-with-a-very-long-name".repeat(8);
        screen.take(Ok(status(1000, 1, &long)));
        screen.take(Ok(status(2000, 2, &long)));
        let all = seen(&mut screen, 80, 30);
        let line = row(&all, "a-route");
        assert!(line.contains('…') && line.ends_with(" 0"), "{line}");
        screen.scroll(isize::MAX);
        let end = seen(&mut screen, 80, 5);
        assert!(end.iter().any(|line| line.contains("http://c")), "{end:#?}");
        for (width, height) in [(0, 0), (1, 1), (3, 2), (20, 1)] {
            seen(&mut screen, width, height);
        }
    }

    #[test]
    fn what_it_is_sent_does_nothing_to_the_terminal() {
        let mut screen = screen();
        screen.take(Ok(status(1000, 1, "\u{1b}[2J\u{9b}x")));
        let seen = seen(&mut screen, 100, 20);
        assert!(row(&seen, "\\u{1b}[2J\\u{9b}x").contains("*/"));
    }
}
