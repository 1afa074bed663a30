//! `l7rp --check` and `l7rp check`: reads a configuration and starts nothing.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::FOUND;
use super::arguments::{CONFIG, Check, Serve};
use super::serve::{Read, read};
use super::terminal::{color, note, print, wrong};
use crate::config::{self, Files, Plan};

/// With `--check`: the file and the flags over it.
pub(super) fn of_flags(flags: &Serve) -> ExitCode {
    match read(flags, files(flags.no_files)) {
        Ok(Read { plan, warnings, not_yet, lint, .. }) => {
            report(&plan, &warnings, &not_yet, &lint, flags.lint)
        }
        Err(unusable) => wrong(&unusable.text),
    }
}

/// With `check FILE` or `check --config FILE`; clap has seen to it that it is one of them.
pub(super) fn file(asked: &Check) -> ExitCode {
    let path = asked.file.as_ref().or(asked.config.as_ref());
    match config::load(path.map_or(Path::new(CONFIG), PathBuf::as_path), files(asked.no_files)) {
        Ok(loaded) => {
            let not_yet = loaded.render_not_yet(color());
            let lint = loaded.render_lint(asked.lint, color());
            let warnings = loaded.render_warnings(color());
            report(&loaded.plan, &warnings, &not_yet, &lint, asked.lint)
        }
        Err(e) => wrong(&e.render(color())),
    }
}

pub(super) fn files(no_files: bool) -> Files {
    if no_files { Files::Ignore } else { Files::Check }
}

/// What a start or a reload would refuse (`not_yet`) is refused here, too. `asked`: whoever asks
/// for `--lint` wants to hear of everything by the exit code.
fn report(plan: &Plan, warnings: &str, not_yet: &str, lint: &str, asked: bool) -> ExitCode {
    note(warnings);
    if !not_yet.is_empty() {
        return wrong(not_yet);
    }
    note(lint);
    let code = print(summary(plan));
    let found = asked && !(warnings.is_empty() && lint.is_empty());
    if code == ExitCode::SUCCESS && found { ExitCode::from(FOUND) } else { code }
}

/// The line that scripts look for.
fn summary(plan: &Plan) -> String {
    format!(
        "config OK: {} listener(s), {} pool(s), {} route(s)\n",
        plan.listeners.len() + plan.tcp_listeners.len(),
        plan.pools.len() + plan.tcp_pools.len(),
        plan.routes.len(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Source, parse};

    #[test]
    fn tcp_is_counted_in() {
        let text = "
listeners: [{ name: a, bind: '127.0.0.1:1' }]
upstream_pools: [{ name: p, upstreams: [{ url: 'http://127.0.0.1:2' }] }]
routes:
  - { name: r, host: a.test, pool: p }
  - { name: s, host: b.test, pool: p }
tcp_listeners: [{ name: t, bind: '127.0.0.1:3', pool: q }]
tcp_pools: [{ name: q, upstreams: [{ address: '127.0.0.1:4' }] }]
";
        let source = Source { name: "x".into(), text: text.into() };
        let loaded = parse(&source, Path::new(""), Files::Ignore).unwrap();
        assert_eq!(summary(&loaded.plan), "config OK: 2 listener(s), 2 pool(s), 2 route(s)\n");
    }
}
