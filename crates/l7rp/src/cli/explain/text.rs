//! An explanation in words, for a terminal of 80 columns.

use std::fmt::Write;

use crate::cli::terminal::visible;
use crate::config::plan::Algorithm;
use crate::explain::{
    Candidate, Explanation, PoolView, RouteOutcome, RouteView, StageOutcome, Verdict,
};

const WIDTH: usize = 80;
/// Columns of what stands in front.
const LABEL: usize = 20;
/// Routes that are all told; where there are more, those for other hosts are counted.
const MANY: usize = 40;

/// The request, the routes, the stages, the pool, and what comes of it all.
pub(super) fn render(of: &Explanation) -> String {
    let mut out = String::new();
    let request = &of.request;
    let host = request.host.as_ref().map_or(String::new(), |host| format!(", host {host}"));
    row(&mut out, "", "request", &format!("{} {}{host}", request.method, request.target));
    row(&mut out, "", "client", &format!("{} ({})", request.client, request.client_by));
    let listener = &of.listener;
    let tls = if listener.tls { " with TLS" } else { "" };
    let mut says = format!("{} at {}{tls} ({})", listener.name, listener.bind, listener.by);
    if let Some(note) = &listener.note {
        let _ = write!(says, "; {note}");
    }
    row(&mut out, "", "listener", &says);
    routes(&mut out, &of.routes);
    out += "\nstages, in order\n";
    for stage in of.stages.iter().filter(|stage| stage.outcome != StageOutcome::Off) {
        let mark = match stage.outcome {
            StageOutcome::Ends => "x ",
            StageOutcome::Unknown => "? ",
            StageOutcome::Passed | StageOutcome::Off => "  ",
        };
        row(&mut out, mark, &stage.stage.replace('_', " "), &stage.says);
    }
    let off = of.stages.iter().filter(|stage| stage.outcome == StageOutcome::Off);
    let off: Vec<_> = off.map(|stage| stage.stage.replace('_', " ")).collect();
    if !off.is_empty() {
        row(&mut out, "  ", "nothing to do", &off.join(", "));
    }
    if let Some(pool) = &of.pool {
        upstreams(&mut out, pool, of.live);
    }
    out += "\n";
    row(&mut out, "", "verdict", &verdict(&of.verdict));
    out
}

fn verdict(of: &Verdict) -> String {
    match of.status {
        Some(status) => format!("{status}: {}", of.says),
        None => of.says.clone(),
    }
}

fn routes(out: &mut String, all: &[RouteView]) {
    if all.is_empty() {
        return;
    }
    *out += "\nroutes, by precedence\n";
    let folds = |route: &&RouteView| all.len() > MANY && route.outcome == RouteOutcome::Host;
    for route in all.iter().filter(|route| !folds(route)) {
        let mark = if route.outcome == RouteOutcome::Taken { "> " } else { "  " };
        row(out, mark, &route.route, &route.says);
    }
    let folded = all.iter().filter(folds).count();
    if folded > 0 {
        row(out, "  ", "others", &format!("{folded} are for other hosts; --json lists them"));
    }
}

fn upstreams(out: &mut String, pool: &PoolView, live: bool) {
    let algorithm = serde_json::to_value(pool.algorithm).unwrap_or_default();
    let algorithm = algorithm.as_str().unwrap_or_default();
    let mut title = format!("pool {}, {algorithm}", pool.name);
    if let Some(tie) = &pool.tie {
        let instead =
            if tie.found == tie.by { String::new() } else { format!(" in place of {}", tie.by) };
        let _ = write!(title, " by {}{instead}, key {}", tie.found, tie.key);
    }
    *out += "\n";
    wrap(out, "", "  ", &title);
    for candidate in &pool.upstreams {
        let mark = if candidate.chosen.is_some_and(|share| share > 0.0) { "> " } else { "  " };
        let says = candidate_says(candidate, pool.algorithm, live);
        row(out, mark, &candidate.url, &says);
    }
}

fn candidate_says(of: &Candidate, algorithm: Algorithm, live: bool) -> String {
    let mut parts = Vec::new();
    match of.chosen {
        Some(1.0) if !live => parts.push("its own if all are well".to_owned()),
        Some(1.0) => parts.push("would be chosen".to_owned()),
        Some(share) if share > 0.0 => parts.push(format!("{:.0} % of the choices", share * 100.0)),
        _ => {}
    }
    if let Some(known) = &of.live {
        parts.extend(known.obstacle.clone());
        parts.push(match of.max_in_flight {
            0 => format!("{} in flight", known.in_flight),
            max => format!("{} of {max} in flight", known.in_flight),
        });
        if let Some(ms) = known.latency_ms {
            parts.push(format!("{ms:.1} ms"));
        }
        if let Some(score) = known.score.filter(|_| algorithm == Algorithm::P2cEwma) {
            parts.push(format!("score {score:.1}"));
        }
        if let Some(share) = known.slow_start {
            parts.push(format!("slow start, takes {:.0} %", share * 100.0));
        }
    } else if of.max_in_flight > 0 {
        parts.push(format!("at most {} in flight", of.max_in_flight));
    }
    if of.weight != 1 {
        parts.push(format!("weight {}", of.weight));
    }
    if of.backup {
        parts.push("stands by".to_owned());
    }
    parts.join(", ")
}

/// A label and what there is to say; below it where the label is long.
fn row(out: &mut String, mark: &str, label: &str, says: &str) {
    let label = format!("{mark}{}", visible(label));
    let indent = " ".repeat(LABEL);
    if label.chars().count() < LABEL {
        wrap(out, &format!("{label:LABEL$}"), &indent, says);
        return;
    }
    wrap(out, "", "    ", &label);
    if !says.is_empty() {
        wrap(out, &indent, &indent, says);
    }
}

/// Words in lines of at most 80 columns, as long as a word fits; `first` goes before the first
/// line, `indent` before the others.
fn wrap(out: &mut String, first: &str, indent: &str, words: &str) {
    let mut line = first.to_owned();
    let mut columns = line.chars().count();
    let mut is_empty = true;
    for word in visible(words).split(' ') {
        let mut word = word;
        let room = WIDTH - indent.len();
        let fits = columns + usize::from(!is_empty) + word.chars().count() <= WIDTH;
        if !fits && !is_empty {
            *out += line.trim_end();
            *out += "\n";
            indent.clone_into(&mut line);
            columns = indent.len();
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
            columns += 1;
        }
        while word.chars().count() > room {
            let (head, tail) = word.split_at(word.char_indices().nth(room).map_or(0, |(at, _)| at));
            let _ = writeln!(out, "{line}{head}");
            indent.clone_into(&mut line);
            columns = indent.len();
            word = tail;
        }
        line += word;
        columns += word.chars().count();
        is_empty = false;
    }
    *out += line.trim_end();
    *out += "\n";
}

#[cfg(test)]
mod tests;
