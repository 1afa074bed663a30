//! `l7rp`: serves what a file or the flags describe.

use std::process::ExitCode;

use super::WRONG;
use super::arguments::Serve;
use super::terminal::{color, error, note, wrong};
use crate::config::{self, Files, Plan, Severity};
use crate::lifecycle;

pub(super) fn run(flags: &Serve) -> ExitCode {
    let read = match read(flags, Files::Check, Severity::Error) {
        Ok(read) => read,
        Err(code) => return code,
    };
    note(&read.warnings);
    if !read.not_yet.is_empty() {
        return wrong(&read.not_yet);
    }
    lifecycle::serve(read.plan, flags.log_level)
}

/// What a file and the flags lead to.
pub(super) struct Read {
    pub(super) plan: Plan,
    /// What is worth a look, for people.
    pub(super) warnings: String,
    /// What cannot be served, for people.
    pub(super) not_yet: String,
}

/// Reads the file, if there is to be one, and puts the flags over it. An error has been told.
/// `severity`: of what cannot be served yet.
pub(super) fn read(flags: &Serve, files: Files, severity: Severity) -> Result<Read, ExitCode> {
    let mut read = match &flags.backends {
        Some(backends) => without_file(flags, backends)?,
        None => from_file(flags, files, severity)?,
    };
    if let Some(bind) = &flags.metrics_bind {
        read.plan.admin.clone_from(&bind.0);
    }
    let tracing = &mut read.plan.tracing;
    if let Some(endpoint) = &flags.tracing_endpoint {
        tracing.endpoint.clone_from(endpoint);
        if !endpoint.is_empty() {
            read.not_yet.push_str(&tracing_is_not_yet(severity));
        }
    }
    if let Some(ratio) = flags.tracing_sample_ratio {
        tracing.sample_ratio = ratio;
    }
    tracing.insecure |= flags.tracing_insecure;
    Ok(read)
}

fn from_file(flags: &Serve, files: Files, severity: Severity) -> Result<Read, ExitCode> {
    match config::load(&flags.config, files) {
        Ok(loaded) => Ok(Read {
            warnings: loaded.render_warnings(color()),
            not_yet: loaded.render_not_yet(severity, color()),
            plan: loaded.plan,
        }),
        Err(e) => Err(wrong(&e.render(color()))),
    }
}

fn without_file(flags: &Serve, backends: &str) -> Result<Read, ExitCode> {
    match config::from_flags(&flags.listen, backends, flags.max_in_flight) {
        Ok(plan) => Ok(Read { plan, warnings: String::new(), not_yet: String::new() }),
        Err(wrongs) => {
            for wrong in &wrongs {
                error(wrong);
            }
            Err(ExitCode::from(WRONG))
        }
    }
}

fn tracing_is_not_yet(severity: Severity) -> String {
    let level = match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    };
    format!("{level}: --tracing-endpoint is understood but this version cannot serve it yet\n")
}
