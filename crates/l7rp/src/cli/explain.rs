//! `l7rp explain`: what would become of a request, by a file or in a running instance.

mod text;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::json;

use super::ask::Instance;
use super::terminal::{color, error, failed, note, print, visible, visible_json, wrong};
use super::{WRONG, arguments};
use crate::clock::Clock;
use crate::config::plan::Plan;
use crate::config::{self, Files};
use crate::explain::{Asked, Explanation, explain};
use crate::live::{Made, Process};
use crate::observe::event::{Events, Level};
use crate::observe::log::Log;
use crate::tls::Material;

pub(super) fn run(of: &arguments::Explain) -> ExitCode {
    let asked = Asked {
        url: of.url.clone(),
        method: of.request.clone(),
        headers: of.header.clone(),
        client: of.client,
        listener: of.listener.clone(),
    };
    let explained = match &of.admin {
        Some(instance) => ask(instance, &asked),
        None => by_file(&of.config, &asked),
    };
    match explained {
        Ok(explanation) if of.json => print(visible_json(&format!("{:#}\n", json!(explanation)))),
        Ok(explanation) => print(text::render(&explanation)),
        Err(code) => code,
    }
}

/// What a running instance says. An error has been told.
fn ask(instance: &Instance, asked: &Asked) -> Result<Explanation, ExitCode> {
    let told = instance.post("/-/explain", &json!(asked), "verdict").and_then(|value| {
        serde_json::from_value(value).map_err(|e| format!("its answer is of another version: {e}"))
    });
    told.map_err(|why| failed(&visible(&format!("cannot ask {instance}: {why}"))))
}

/// What a file says. An error has been told.
fn by_file(path: &Path, asked: &Asked) -> Result<Explanation, ExitCode> {
    // Certificates are not needed to tell where a request goes.
    let loaded = config::load(path, Files::Ignore).map_err(|e| wrong(&e.render(color())))?;
    note(&loaded.render_warnings(color()));
    let not_yet = loaded.render_not_yet(color());
    if !not_yet.is_empty() {
        return Err(wrong(&not_yet));
    }
    let process = at_rest(loaded.plan)
        .map_err(|e| failed(&format!("cannot make what the configuration describes: {e}")))?;
    explain(&process.snapshot(), None, asked).map_err(|why| {
        error(&why);
        ExitCode::from(WRONG)
    })
}

/// All that serves `plan`, with nothing going on in it.
fn at_rest(plan: Plan) -> std::io::Result<Process> {
    let events = Arc::new(Events::new(Log::start(std::io::sink())?, Level::Error));
    let doors = plan.listeners.iter().map(|_| Vec::new()).collect();
    let tls = Material {
        listeners: plan.listeners.iter().map(|_| None).collect(),
        pools: plan.pools.iter().map(|_| None).collect(),
    };
    let made = Made { doors, tls, tracer: None };
    Ok(Process::new(Clock::new(), &events, 1, 1024, plan, made))
}
