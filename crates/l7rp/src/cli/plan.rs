//! `l7rp plan`: what a reload with a file would change.

mod text;

use std::path::Path;
use std::process::ExitCode;

use serde_json::{Value, json};

use super::arguments::{Against, Plan};
use super::ask::Instance;
use super::check::files;
use super::terminal::{color, error, failed, note, print, wrong};
use super::{CHANGES, WRONG};
use crate::config::plan::Bind;
use crate::config::{self, Diff, Loaded};

pub(super) fn run(asked: &Plan) -> ExitCode {
    let new = match load(asked.file.as_ref().unwrap_or(&asked.config), asked.no_files) {
        Ok(loaded) => loaded,
        Err(code) => return code,
    };
    note(&new.render_warnings(color()));
    let not_yet = new.render_not_yet(color());
    if !not_yet.is_empty() {
        return wrong(&not_yet);
    }
    let old = match in_force(asked, &new) {
        Ok(view) => view,
        Err(code) => return code,
    };
    let mut new = config::view(&new.plan);
    keep_flags(&old, &mut new);
    let diff = Diff::between(&old, &new);
    let code = print(if asked.json { json(&diff) } else { text::render(&diff, &new) });
    if code == ExitCode::SUCCESS && !diff.is_empty() { ExitCode::from(CHANGES) } else { code }
}

fn load(path: &Path, no_files: bool) -> Result<Loaded, ExitCode> {
    config::load(path, files(no_files)).map_err(|e| wrong(&e.render(color())))
}

/// What flags of the running instance have set stays as it is, whatever the file says.
fn keep_flags(old: &Value, new: &mut Value) {
    const FLAGS: &str = "by_flags";
    let keys = old[FLAGS].as_array().into_iter().flatten().filter_map(Value::as_str);
    for key in keys.chain([FLAGS]) {
        new[key] = old[key].clone();
    }
}

/// The view of what the new configuration is compared with. An error has been told.
fn in_force(asked: &Plan, new: &Loaded) -> Result<Value, ExitCode> {
    let told = |instance: &Instance| {
        instance.get("/-/plan", "listeners").map_err(|why| {
            failed(&format!(
                "cannot learn the configuration in force from {instance}: {why}; \
                 --against names another instance (http://HOST:PORT), or a file"
            ))
        })
    };
    match (&asked.against, &new.plan.admin) {
        (Some(Against::File(path)), _) => Ok(config::view(&load(path, asked.no_files)?.plan)),
        (Some(Against::Admin(instance)), _) => told(instance),
        (None, Some(Bind::Tcp(address))) if address.port() != 0 => {
            told(&Instance::Tcp(address.to_string()))
        }
        (None, Some(Bind::Unix(path))) => told(&Instance::Unix(path.clone())),
        (None, Some(Bind::Tcp(_)) | None) => {
            error(&format!(
                "{} has no fixed admin address at which to ask a running instance what is in \
                 force; say --against FILE, or --against http://HOST:PORT",
                new.source.name
            ));
            Err(ExitCode::from(WRONG))
        }
    }
}

fn json(diff: &Diff) -> String {
    let mut shown = json!(diff);
    shown["changes"] = json!(!diff.is_empty());
    shown["needs_restart"] = json!(diff.needs_restart());
    format!("{shown:#}\n")
}
