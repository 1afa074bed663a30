//! Tests of the whole way from text to plan.

mod accepted;
mod diff;
mod files;
mod lint;
mod positions;
mod refused;
mod robust;
mod token;
mod view;

use std::path::Path;

use super::{Files, Loaded, Refused, Source, parse};

/// Parses without looking at files.
fn check(text: &str) -> Result<Loaded, Refused> {
    let source = Source { name: "config.yaml".into(), text: text.into() };
    parse(&source, Path::new("/etc/l7rp"), Files::Ignore)
}

/// A plan that must be there.
fn accepted(text: &str) -> Loaded {
    check(text).unwrap_or_else(|refused| panic!("{refused}"))
}

/// A small valid file with more lines in its listener, its pool, its route, and at the end.
#[derive(Clone, Copy, Default)]
struct With<'a> {
    listener: &'a str,
    pool: &'a str,
    route: &'a str,
    rest: &'a str,
}

impl With<'_> {
    fn text(&self) -> String {
        let indent = |text: &str| {
            text.lines()
                .flat_map(|line| {
                    [
                        "    ", line, "
",
                    ]
                })
                .collect::<String>()
        };
        format!(
            "listeners:\n  - name: http\n    bind: \"127.0.0.1:8080\"\n{}upstream_pools:\n  - name: backend\n    upstreams: [{{ url: \"http://127.0.0.1:9001\" }}]\n{}routes:\n  - name: all\n    pool: backend\n{}{}",
            indent(self.listener),
            indent(self.pool),
            indent(self.route),
            self.rest
        )
    }
}

fn listener(listener: &str) -> String {
    With { listener, ..With::default() }.text()
}

fn pool(pool: &str) -> String {
    With { pool, ..With::default() }.text()
}

fn route(route: &str) -> String {
    With { route, ..With::default() }.text()
}

fn rest(rest: &str) -> String {
    With { rest, ..With::default() }.text()
}
