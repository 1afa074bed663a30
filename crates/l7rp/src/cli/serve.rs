//! `l7rp`: serves what a file or the flags describe.

use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use super::arguments::{CONFIG, Serve};
use super::terminal::{color, note, wrong};
use crate::config::plan::Tracing;
use crate::config::{self, Files, LoadError, Places, Plan};
use crate::lifecycle::{self, Fresh, Task};

pub(super) fn run(flags: &Serve) -> ExitCode {
    let read = match read(flags, Files::Check) {
        Ok(read) => read,
        Err(unusable) => return wrong(&unusable.text),
    };
    note(&read.warnings);
    if !read.not_yet.is_empty() {
        return wrong(&read.not_yet);
    }
    let again = flags.clone();
    let source = Arc::new(move || match self::read(&again, Files::Check) {
        Ok(Read { plan, places, warning_lines: warnings, not_yet_lines, .. })
            if not_yet_lines.is_empty() =>
        {
            Ok(Fresh { plan, places, warnings })
        }
        Ok(read) => Err(read.not_yet_lines),
        Err(unusable) => Err(unusable.lines),
    });
    let watched = flags.watch.then(|| flags.config.clone());
    let Read { plan, places, .. } = read;
    lifecycle::serve(Task { plan, places, source, watched, level: flags.log_level })
}

/// Why nothing can be served.
pub(super) struct Unusable {
    /// For people at a terminal.
    pub(super) text: String,
    /// For a log: one line for each thing that is wrong.
    pub(super) lines: Vec<String>,
}

/// What a file and the flags lead to.
pub(super) struct Read {
    pub(super) plan: Plan,
    /// Where the file has its addresses.
    pub(super) places: Places,
    /// What is worth a look, for people.
    pub(super) warnings: String,
    /// The same for a log.
    pub(super) warning_lines: Vec<String>,
    /// What cannot be served, for people.
    pub(super) not_yet: String,
    /// The same for a log.
    pub(super) not_yet_lines: Vec<String>,
    /// What cannot be meant, for people, if that was asked for.
    pub(super) lint: String,
}

/// Reads the file, if there is to be one, and puts the flags over it.
pub(super) fn read(flags: &Serve, files: Files) -> Result<Read, Unusable> {
    let mut read = match &flags.backends {
        Some(backends) => without_file(flags, backends)?,
        None => from_file(flags, files)?,
    };
    if let Some(bind) = &flags.metrics_bind {
        read.plan.admin.clone_from(&bind.0);
        read.plan.by_flags.push("admin");
    }
    let before = read.plan.tracing.clone();
    let wrong = trace(&mut read.plan.tracing, flags);
    if read.plan.tracing != before {
        read.plan.by_flags.push("tracing");
    }
    for line in wrong {
        let _ = writeln!(read.warnings, "warning: {line}");
        read.warning_lines.push(line);
    }
    Ok(read)
}

/// Puts the flags over what the file says of tracing, and the environment under it. Gives what is
/// wrong in the environment.
fn trace(tracing: &mut Tracing, flags: &Serve) -> Vec<String> {
    if let Some(endpoint) = &flags.tracing_endpoint {
        tracing.endpoint.clone_from(endpoint);
        // The flag is there to be left out.
        tracing.insecure = flags.tracing_insecure;
    }
    tracing.insecure |= flags.tracing_insecure;
    if flags.tracing_sample_ratio.is_some() {
        tracing.ratio = flags.tracing_sample_ratio;
    }
    if flags.tracing_endpoint.as_ref().is_some_and(String::is_empty) {
        return Vec::new();
    }
    config::environment::fill_in(tracing, |name| std::env::var(name).ok())
}

fn from_file(flags: &Serve, files: Files) -> Result<Read, Unusable> {
    match config::load(&flags.config, files) {
        Ok(loaded) => Ok(Read {
            warnings: loaded.render_warnings(color()),
            warning_lines: loaded.warning_lines(),
            not_yet: loaded.render_not_yet(color()),
            not_yet_lines: loaded.not_yet_lines(),
            lint: if flags.check { loaded.render_lint(flags.lint, color()) } else { String::new() },
            places: loaded.places,
            plan: loaded.plan,
        }),
        Err(e) => {
            let text = e.render(color()) + help(&flags.config, &e);
            Err(Unusable { text, lines: e.lines() })
        }
    }
}

/// For those who have named no file, and have none.
fn help(path: &Path, e: &LoadError) -> &'static str {
    match e {
        LoadError::Unreadable(_) if path == Path::new(CONFIG) => {
            "help: write one with `l7rp init`, name one with --config, or try `l7rp demo`\n"
        }
        _ => "",
    }
}

fn without_file(flags: &Serve, backends: &str) -> Result<Read, Unusable> {
    let plan =
        config::from_flags(&flags.listen, backends, flags.max_in_flight).map_err(|lines| {
            let text = lines.iter().flat_map(|line| ["error: ", line, "\n"]).collect();
            Unusable { text, lines }
        })?;
    Ok(Read {
        plan,
        places: Places::default(),
        warnings: String::new(),
        warning_lines: Vec::new(),
        not_yet: String::new(),
        not_yet_lines: Vec::new(),
        lint: String::new(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_has_no_file_and_named_none_is_helped() {
        let unreadable = LoadError::Unreadable("no such file".to_owned());
        assert!(help(Path::new(CONFIG), &unreadable).contains("l7rp demo"));
        assert_eq!(help(Path::new("mine.yaml"), &unreadable), "");
    }
}
