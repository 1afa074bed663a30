//! The rules of the house that are absences: what must not be said where. Each rule is a test,
//! and each message says why the rule is there. ARCHITECTURE.md has the whole picture.

#![expect(
    clippy::expect_used,
    clippy::panic,
    reason = "a test that cannot read the sources has failed"
)]

mod documents;
mod pages;
mod source;

use std::path::{Path, PathBuf};

use source::{Source, crate_modules, find};

/// Shipped code: decisions and actions. The test kit and the chores have other manners.
const CORE: &str = "crates/l7rp-core/src/";
const PROXY: &str = "crates/l7rp/src/";

#[test]
fn core_depends_on_data_structures_only() {
    const ALLOWED: &[&str] = &[
        "bytes",
        "foldhash",
        "httparse",
        "ipnet",
        "itoa",
        "memchr",
        "smallvec",
        "xxhash-rust",
        // Only under `--cfg loom`, for tests.
        "loom",
    ];
    let mut hits = shipped_dependencies("crates/l7rp-core/Cargo.toml");
    hits.retain(|name| !ALLOWED.contains(&name.as_str()));
    refuse(
        &hits,
        "the core decides and does nothing else: a runtime, a logger or a serializer in its reach \
         ends that. If the crate is a pure data structure or parser, add it to ALLOWED here",
    );
}

#[test]
fn the_program_is_built_on_no_other_http() {
    let mut hits = shipped_dependencies("crates/l7rp/Cargo.toml");
    hits.retain(|name| ["tonic", "tower", "hyper"].iter().any(|banned| name.starts_with(banned)));
    refuse(
        &hits,
        "deny.toml bans hyper and tower, and lets tonic have them: a peer for tests, in whose \
         name they would come back",
    );
}

#[test]
fn core_does_no_input_or_output() {
    const ACTS: &[&str] = &[
        "std::fs",
        "std::thread",
        "std::process",
        "std::env",
        "TcpStream",
        "TcpListener",
        "UdpSocket",
        "println!",
        "eprintln!",
        "print!",
        "eprint!",
        "dbg!",
    ];
    refuse(
        &named(&sources(CORE), ACTS),
        "the same arguments must give the same decision, on every machine and in every test",
    );
}

#[test]
fn core_modules_do_not_know_their_siblings() {
    const SHARED: &[&str] = &["names", "failure", "head", "hex", "window", "sync"];
    let sources = sources(CORE);
    let modules: Vec<&str> = sources.iter().map(|source| module(source, CORE)).collect();
    let mut hits = Vec::new();
    for (source, own) in sources.iter().zip(&modules).filter(|(_, own)| **own != "lib") {
        for (at, other) in crate_modules(&source.shipped) {
            if other != *own
                && modules.contains(&other.as_str())
                && !SHARED.contains(&other.as_str())
            {
                hits.push(format!("{}: {own} names {other}", source.place(at)));
            }
        }
    }
    refuse(
        &hits,
        "each decision is to be read, tested and changed alone; what two of them share belongs \
         in names, failure, head, hex or window, and whoever calls both brings them together",
    );
}

#[test]
fn dependencies_run_one_way() {
    const ACTORS: &[&str] = &["cli", "lifecycle", "admin", "serve", "tools"];
    let mut hits = Vec::new();
    for source in &sources(PROXY) {
        let own = module(source, PROXY);
        for (at, other) in crate_modules(&source.shipped) {
            let other = other.as_str();
            let upwards = match own {
                "exchange" => ACTORS.contains(&other),
                "upstream" => ACTORS.contains(&other) || other == "exchange",
                "config" => {
                    ACTORS.contains(&other) || ["exchange", "upstream", "live"].contains(&other)
                }
                "cli" | "tools" | "main" | "lib" => false,
                _ => other == "tools" || other == "cli",
            };
            if upwards {
                hits.push(format!("{}: {own} names {other}", source.place(at)));
            }
        }
    }
    refuse(
        &hits,
        "main → cli, lifecycle → config, live, serve, admin; serve → exchange → upstream: a \
         module that knows who calls it cannot be called by another",
    );
}

#[test]
fn the_exchange_knows_no_protocol_library() {
    let mut hits = Vec::new();
    for source in sources(PROXY).iter().filter(|source| module(source, PROXY) == "exchange") {
        for library in ["h2", "h3", "quinn", "rustls", "tokio_rustls"] {
            let foreign = |at: &usize| {
                let before = source.shipped[..*at].trim_end();
                let after = source.shipped[at + library.len()..].trim_start();
                // `upstream::h2` is a module of ours.
                !before.ends_with("::") && (after.starts_with("::") || before.ends_with("use"))
            };
            let places = find(&source.shipped, library).into_iter().filter(foreign);
            hits.extend(places.map(|at| format!("{}: {library}", source.place(at))));
        }
    }
    refuse(
        &hits,
        "an exchange is the same over every protocol; what differs stays in serve/ and upstream/, \
         or each new protocol would change the file that must stay readable",
    );
}

#[test]
fn only_config_knows_yaml() {
    let hits = outside(PROXY, &["config"], &["serde_saphyr"]);
    refuse(&hits, "the file's format is one module's affair: everyone else takes the plan");
}

#[test]
fn only_observe_knows_signal_names() {
    // Not signals: a key of the configuration, and the error types of RFC 9209.
    const OTHERS: &[&str] = &[
        "proxy_protocol",
        "proxy_configuration_error",
        "proxy_internal_error",
        "proxy_internal_response",
        "proxy_loop_detected",
    ];
    let mut hits = Vec::new();
    for source in [sources(PROXY), sources(CORE)].concat_all() {
        if module(&source, PROXY) == "observe" {
            continue;
        }
        for (at, text) in &source.strings {
            for start in find_prefix(text, "proxy_") {
                let name: String = text[start..]
                    .chars()
                    .take_while(|c| c.is_ascii_alphanumeric() || *c == '_')
                    .collect();
                if name != "proxy_" && !OTHERS.contains(&name.as_str()) {
                    hits.push(format!("{}: \"{name}\"", source.place(*at)));
                }
            }
        }
    }
    refuse(
        &hits,
        "names of metrics and log events are a public contract: one place to look them up, one to \
         change them, and their label values stay bounded",
    );
}

#[test]
fn only_the_clock_reads_time() {
    let readers = ["Instant::now", "SystemTime::now", ".elapsed()", "UNIX_EPOCH", "clock_gettime"];
    let mut hits = outside(PROXY, &["clock"], &readers);
    hits.extend(named(&sources(CORE), &readers));
    refuse(&hits, "time is an argument, so that a test can move it instead of sleeping");
}

#[test]
fn unsafe_is_in_one_file() {
    let mut hits = Vec::new();
    for source in all_crates() {
        if source.name != "crates/l7rp/src/sys.rs" {
            hits.extend(find(&source.code, "unsafe").into_iter().map(|at| source.place(at)));
        }
    }
    refuse(
        &hits,
        "what the compiler does not check is read by people, and they must know where: sys.rs",
    );
}

#[test]
fn files_are_short() {
    const LINES: usize = 600;
    let long = |source: &Source| {
        let lines = source.code.lines().count();
        (lines > LINES).then(|| format!("{}: {lines} lines", source.name))
    };
    let hits: Vec<String> = all_crates().iter().filter_map(long).collect();
    refuse(&hits, "a file of more than 600 lines is two ideas: split it where its reader would");
}

#[test]
fn nothing_that_input_reaches_panics() {
    let mut hits = Vec::new();
    for (needle, lint) in [
        (".unwrap()", "clippy::unwrap_used"),
        (".expect(\"", "clippy::expect_used"),
        ("panic!(", "clippy::panic"),
        ("todo!(", "clippy::todo"),
        ("unimplemented!(", "clippy::unimplemented"),
    ] {
        for source in [sources(PROXY), sources(CORE)].concat_all() {
            for at in find(&source.shipped, needle) {
                if !is_expected(&source.code[..at], lint) {
                    hits.push(format!("{}: {needle}", source.place(at)));
                }
            }
        }
    }
    refuse(
        &hits,
        "one bad request must not take the others with it. Where it cannot happen, say why: \
         #[expect(clippy::…, reason = …)] on the function",
    );
}

/// Whether the function that `before` ends in says that it means it. Functions have at most 60
/// lines, which clippy sees to.
fn is_expected(before: &str, lint: &str) -> bool {
    before.lines().rev().take(65).any(|line| line.contains(lint))
}

/// What `manifest` names under `[dependencies]`, `[target.….dependencies]` and
/// `[build-dependencies]`; tests may use more.
fn shipped_dependencies(manifest: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut section = "";
    let text = read(manifest);
    for line in text.lines().map(str::trim) {
        if line.starts_with('[') {
            section = line.trim_matches(['[', ']']);
        }
        if !section.ends_with("dependencies") || section.ends_with("dev-dependencies") {
            continue;
        }
        let name = line.split(['=', '.', ' ']).next().unwrap_or_default();
        if !name.is_empty() && !name.starts_with(['[', '#']) {
            names.push(name.to_owned());
        }
    }
    assert!(!names.is_empty(), "{manifest}: no dependencies? Then this test must follow");
    names
}

/// Fails with all of the places at once, and the reason.
fn refuse(hits: &[String], why: &str) {
    assert!(hits.is_empty(), "{}\n\nwhy not: {why}\n", hits.join("\n"));
}

/// Where shipped code of `sources` names one of `needles`.
fn named(sources: &[Source], needles: &[&str]) -> Vec<String> {
    let mut hits = Vec::new();
    for source in sources {
        for needle in needles {
            let places = find(&source.shipped, needle).into_iter();
            hits.extend(places.map(|at| format!("{}: {needle}", source.place(at))));
        }
    }
    hits
}

/// Where shipped code of the crate names one of `needles` outside of `modules`.
fn outside(krate: &str, modules: &[&str], needles: &[&str]) -> Vec<String> {
    let mut others = sources(krate);
    others.retain(|source| !modules.contains(&module(source, krate)));
    named(&others, needles)
}

/// The top-level module that a file belongs to: `config` for `config/plan.rs` and `config.rs`.
fn module<'a>(source: &'a Source, krate: &str) -> &'a str {
    let inner = source.name.strip_prefix(krate).unwrap_or(&source.name);
    let first = inner.split('/').next().unwrap_or(inner);
    first.strip_suffix(".rs").unwrap_or(first)
}

/// Where `prefix` begins a word of `text`.
fn find_prefix(text: &str, prefix: &str) -> Vec<usize> {
    let begins =
        |at: &usize| !text[..*at].ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    text.match_indices(prefix).map(|(at, _)| at).filter(begins).collect()
}

trait ConcatAll<T> {
    fn concat_all(self) -> Vec<T>;
}

impl<T, const N: usize> ConcatAll<T> for [Vec<T>; N] {
    fn concat_all(self) -> Vec<T> {
        self.into_iter().flatten().collect()
    }
}

fn all_crates() -> Vec<Source> {
    [sources(CORE), sources(PROXY), sources("crates/l7rp-testkit/src/"), sources("xtask/src/")]
        .concat_all()
}

/// All Rust files below a folder.
fn sources(folder: &str) -> Vec<Source> {
    let mut paths = Vec::new();
    walk(&root().join(folder), &mut paths);
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    assert!(!paths.is_empty(), "no sources in {folder}: has it moved? Then this test must follow");
    let new = |path: &PathBuf| Source::new(&relative(path), &read(&relative(path)));
    let mut sources: Vec<Source> = paths.iter().map(new).collect();
    let tests: Vec<String> = sources.iter().flat_map(Source::test_modules).collect();
    for source in &mut sources {
        let inner = |module: &String| {
            let rest = source.name.strip_prefix(module.as_str());
            rest.is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
        };
        if tests.iter().any(inner) {
            source.is_for_tests();
        }
    }
    sources
}

/// All files below `folder` that could be committed, in order.
fn walk(folder: &Path, found: &mut Vec<PathBuf>) {
    let listing = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut paths: Vec<PathBuf> =
        listing.filter_map(Result::ok).map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        let name = path.file_name().unwrap_or_default();
        let made =
            [".git", "target", "corpus", "artifacts", "coverage"].iter().any(|made| *made == name);
        if path.is_dir() && !path.is_symlink() && !made {
            walk(&path, found);
        } else if path.is_file() && !made {
            found.push(path);
        }
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).expect("below the repository").display().to_string()
}

fn read(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}
