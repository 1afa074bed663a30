//! What is valid and cannot be meant: each rule by a file in which it tells something, and by one
//! that is nearly the same and in which it does not.

mod limits;
mod loops;
mod pools;
mod precedence;
mod routes;
mod shipped;
mod tries;

use super::{With, accepted, listener, pool, rest, route};

/// Line, column, path and message of everything that is told.
fn told(text: &str) -> Vec<String> {
    let loaded = accepted(text);
    let place = |wrong: &crate::config::Wrong| {
        let (line, column) = wrong.line_column(&loaded.source).unwrap();
        assert!(wrong.help.is_some(), "{wrong:?}");
        format!("{line}:{column} {}: {}", wrong.path, wrong.message)
    };
    loaded.lint().iter().map(place).collect()
}

/// Checks files in each of which one thing is told.
fn found(table: &[(String, &str)]) {
    for (text, expected) in table {
        assert_eq!(told(text), [*expected], "{text}");
    }
}

/// Checks files in which nothing is told.
fn clean(table: &[String]) {
    for text in table {
        assert_eq!(told(text), Vec::<String>::new(), "{text}");
    }
}

/// More routes to the same pool, from line 10 on.
fn routes(routes: &[&str]) -> String {
    let routes: Vec<_> =
        routes.iter().map(|keys| format!("  - {{ {keys}, pool: backend }}\n")).collect();
    rest(&routes.concat())
}

/// A route with this `retry`, and more, to a pool of two.
fn retry(retry: &str, more: &str) -> String {
    let route = format!("middleware: [{{ retry: {{ {retry} }} }}]\n{more}");
    two(&With { route: &route, ..With::default() }.text())
}

/// The same file with another upstream in the pool.
fn two(text: &str) -> String {
    text.replace("9001\" }]", "9001\" }, { url: \"http://127.0.0.1:9002\" }]")
}

/// The same file with these upstreams.
fn upstreams(text: &str, upstreams: &str) -> String {
    text.replace("{ url: \"http://127.0.0.1:9001\" }", upstreams)
}

/// The same file with a second listener, from line 4 on.
fn and_listener(text: &str, listener: &str) -> String {
    text.replace("upstream_pools:", &format!("  - {{ {listener} }}\nupstream_pools:"))
}

/// A TLS listener with these keys in `tls`.
fn tls(keys: &str) -> String {
    listener(&format!("tls: {{ {keys} }}"))
}

const CERT: &str = "certs: [{ cert: a, key: a, hosts: [a.test, \"*.b.test\"] }]";

/// The file with its route sending nobody to a pool, and its pool gone.
fn answering(text: &str, answer: &str) -> String {
    let (before, after) = text.split_once("upstream_pools:").unwrap();
    let (_, after) = after.split_once("routes:").unwrap();
    format!("{before}routes:{}", after.replace("pool: backend", answer))
}
