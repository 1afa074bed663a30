//! `l7rp init`: a configuration to begin with, made from a few flags.

mod text;

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;

use super::terminal::{color, failed, print, visible, wrong};
use crate::config::file::Algorithm;
use crate::config::lint::SELF_LOOP;
use crate::config::{self, Files, Loaded, Source};

/// `l7rp init`
#[derive(Args, Clone, Debug)]
#[command(after_help = "Exit codes: 0 written, 1 it cannot be written, 2 the flags make no \
                        configuration.")]
pub struct Init {
    /// Where requests go, http://HOST:PORT; may be repeated
    #[arg(long, value_name = "URL", required = true)]
    pub backend: Vec<String>,
    /// Address to listen on
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080")]
    pub listen: String,
    /// A host to serve; may be repeated [default: any]
    #[arg(long, value_name = "NAME")]
    pub host: Vec<String>,
    /// Files of a certificate and its key
    #[arg(long, value_name = "CERT,KEY", value_parser = tls, conflicts_with = "autocert")]
    pub tls: Option<Tls>,
    /// A name to get a certificate for; may be repeated
    #[arg(long, value_name = "NAME")]
    pub autocert: Vec<String>,
    /// Address that the CA may write to
    #[arg(long, value_name = "ADDRESS", requires = "autocert")]
    pub email: Option<String>,
    /// Path at which backends say that they are well
    #[arg(long, value_name = "PATH")]
    pub health_path: Option<String>,
    /// How a backend is chosen, like round-robin or ip-hash
    #[arg(long, value_name = "NAME", value_parser = algorithm)]
    pub algorithm: Option<Algorithm>,
    /// Try GET and HEAD again on another backend
    #[arg(long)]
    pub retries: bool,
    /// Requests a second that each client may make
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub rate_limit: Option<u32>,
    /// Admin address
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9090")]
    pub admin: String,
    /// Write to this file [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Replace the file
    #[arg(long, requires = "output")]
    pub force: bool,
}

/// Files of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    cert: String,
    key: String,
}

/// By the name that the configuration has for it.
fn algorithm(text: &str) -> Result<Algorithm, String> {
    serde_json::from_value(text.into()).map_err(|e| e.to_string())
}

fn tls(text: &str) -> Result<Tls, String> {
    match text.split_once(',') {
        Some((cert, key)) if !cert.is_empty() && !key.is_empty() => {
            Ok(Tls { cert: cert.to_owned(), key: key.to_owned() })
        }
        _ => Err("write the two files with a comma between them: site.crt,site.key".to_owned()),
    }
}

pub(super) fn run(asked: &Init) -> ExitCode {
    let text = match made(asked) {
        Ok(text) => text,
        Err(why) => return wrong(&why),
    };
    let Some(path) = &asked.output else { return print(text) };
    match write(path, &text, asked.force) {
        Ok(()) => {
            let path = visible(&path.display().to_string());
            print(format!("{path} is written; its last lines say what to do next\n"))
        }
        Err(e) if e.kind() == ErrorKind::AlreadyExists => {
            let path = visible(&path.display().to_string());
            failed(&format!("{path} is there already; --force replaces it"))
        }
        Err(e) => failed(&visible(&format!("cannot write {}: {e}", path.display()))),
    }
}

/// The text of the file; or what is wrong with the flags, complete.
fn made(asked: &Init) -> Result<String, String> {
    if asked.retries && asked.backend.len() < 2 {
        let why = "error: --retries: there is nobody to try again with; name another --backend\n";
        return Err(why.to_owned());
    }
    let text = text::of(asked);
    // What is written is right: whoever begins with it has no other mistakes than their own.
    let source = Source { name: "what would be written".to_owned(), text };
    let loaded = config::parse(&source, Path::new(""), Files::Ignore)
        .map_err(|refused| refused.render(color()))?;
    if let Some(why) = leads_back(&loaded) {
        let listen = visible(&asked.listen);
        return Err(format!(
            "error: --backend: {why}; give --listen another address than {listen}\n"
        ));
    }
    let told = loaded.render_warnings(color())
        + &loaded.render_not_yet(color())
        + &loaded.render_lint(true, color());
    if told.is_empty() { Ok(source.text) } else { Err(told) }
}

/// Which backend is the proxy itself, if one is: the listener may be one that nobody has named.
fn leads_back(loaded: &Loaded) -> Option<String> {
    let rule = format!(" [{SELF_LOOP}]");
    loaded.lint().iter().find_map(|wrong| wrong.message.strip_suffix(&rule).map(str::to_owned))
}

fn write(path: &Path, text: &str, force: bool) -> std::io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true);
    if force {
        options.create(true).truncate(true)
    } else {
        options.create_new(true)
    };
    options.open(path)?.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use proptest::prelude::*;
    use proptest::sample::subsequence;

    use super::*;
    use crate::cli::arguments::Command;
    use crate::cli::parse;

    fn init(flags: &[String]) -> Init {
        let words = ["l7rp", "init"].into_iter().map(str::to_owned).chain(flags.iter().cloned());
        match parse(words.map(OsString::from)).unwrap().command {
            Some(Command::Init(init)) => *init,
            other => panic!("{other:?}"),
        }
    }

    fn checked(text: &str) -> Loaded {
        let source = Source { name: "x".to_owned(), text: text.to_owned() };
        let loaded = config::parse(&source, Path::new(""), Files::Ignore);
        let loaded = loaded.unwrap_or_else(|e| panic!("{}\n{text}", e.render(false)));
        let told = loaded.render_warnings(false) + &loaded.render_lint(true, false);
        assert_eq!(told, "", "{text}");
        loaded
    }

    /// The text with all that it suggests.
    fn accepting(text: &str) -> String {
        let line = |line: &str| {
            let inner = line.trim_start();
            let is_suggested = line.starts_with("    ")
                && inner
                    .strip_prefix('#')
                    .is_some_and(|rest| !rest.starts_with(' ') || rest.starts_with("  "));
            if is_suggested { line.replacen('#', "", 1) + "\n" } else { format!("{line}\n") }
        };
        text.lines().map(line).collect()
    }

    fn one_of(options: &'static [&'static str]) -> impl Strategy<Value = Vec<String>> {
        (0..options.len()).prop_map(|i| options[i].split_whitespace().map(str::to_owned).collect())
    }

    /// Some of these, each after `flag`.
    fn some_of(
        flag: &'static str,
        values: &'static [&'static str],
        least: usize,
    ) -> impl Strategy<Value = Vec<String>> {
        subsequence(values, least..=values.len()).prop_map(move |values| {
            values.into_iter().flat_map(|value| [flag.to_owned(), value.to_owned()]).collect()
        })
    }

    fn flags() -> impl Strategy<Value = Vec<String>> {
        const BACKENDS: &[&str] =
            &["http://10.0.0.1:80", "https://b.test", "h2c://[::1]:9/base", "http://localhost:1"];
        (
            some_of("--backend", BACKENDS, 1),
            some_of("--host", &["a.test", "*.b.test", "10.0.0.9", "B.test."], 0),
            one_of(&["", "--listen [::]:443", "--listen unix:/run/web", "--listen 127.0.0.1:1"]),
            one_of(&[
                "",
                "--tls a.crt,/etc/k\"e'y\\#.pem",
                "--autocert a.test --autocert x.b.test --autocert b.test",
                "--autocert a.test --autocert x.b.test --autocert b.test --email me@a.test",
            ]),
            one_of(&["", "--health-path /", "--health-path /up:,deep"]),
            one_of(&[
                "",
                "--algorithm round-robin",
                "--algorithm weighted-rr",
                "--algorithm least-conn",
                "--algorithm p2c-ewma",
                "--algorithm consistent-hash-bounded",
                "--algorithm ip-hash",
            ]),
            one_of(&["", "--retries"]),
            one_of(&["", "--rate-limit 1", "--rate-limit 1000000"]),
            one_of(&["", "--admin unix:/run/admin", "--admin 0.0.0.0:1234", "--admin="]),
        )
            .prop_map(|(a, b, c, d, e, f, g, h, i)| [a, b, c, d, e, f, g, h, i].concat())
    }

    proptest! {
        #[test]
        fn what_is_written_is_right(flags in flags()) {
            let asked = init(&flags);
            let text = match made(&asked) {
                Ok(text) => text,
                // What no other file could say.
                Err(why) if why.contains("--retries") => {
                    prop_assert!(asked.retries && asked.backend.len() == 1);
                    return Ok(());
                }
                Err(why) if why.contains("comes back to it") => {
                    let has = |word: &str| flags.iter().any(|flag| flag == word);
                    prop_assert!(has("127.0.0.1:1") && has("http://localhost:1"));
                    return Ok(());
                }
                Err(why) if why.contains("[misdirected-host]") => {
                    prop_assert!(!asked.autocert.is_empty());
                    return Ok(());
                }
                Err(why) => panic!("{flags:?}\n{why}"),
            };
            let plan = checked(&text).plan;
            let suggested = checked(&accepting(&text)).plan;
            prop_assert_eq!(plan.pools[0].upstreams.len(), asked.backend.len());
            prop_assert_eq!(plan.routes.len(), asked.host.len().max(1));
            prop_assert_eq!(plan.pools[0].active.is_some(), asked.health_path.is_some());
            prop_assert!(suggested.pools[0].active.is_some());
            let is_secure = asked.tls.is_some() || !asked.autocert.is_empty();
            prop_assert_eq!(plan.listeners[0].tls.is_some(), is_secure);
            for (route, suggested) in plan.routes.iter().zip(&suggested.routes) {
                prop_assert_eq!(route.rate_limit.is_some(), asked.rate_limit.is_some());
                prop_assert_eq!(route.retry.is_some(), asked.retries);
                prop_assert_eq!(suggested.retry.is_some(), asked.backend.len() > 1);
            }
            for line in text.lines() {
                prop_assert!(line.chars().count() <= 100, "{}", line);
            }
        }
    }

    #[test]
    fn flags_that_make_no_configuration_are_told() {
        for (flags, says) in [
            ("--backend localhost", "localhost"),
            ("--backend http://a --backend http://a", "duplicate"),
            ("--backend http://a --listen 8080", "8080"),
            ("--backend http://a --listen 127.0.0.1:9090", "admin.bind"),
            ("--backend http://a --host a/b", "a/b"),
            ("--backend http://a --health-path up", "up"),
            ("--backend http://a --host a.test --autocert b.test", "a.test"),
            ("--backend http://a --retries", "name another --backend"),
            ("--backend http://127.0.0.1:8080", "another address than 127.0.0.1:8080"),
            ("--backend http://localhost:80 --listen [::]:80", "is the listener `http` itself"),
            ("--backend unix:/run/app.sock", "not supported"),
            ("--backend http://unix:/run/app.sock", "not supported"),
        ] {
            let flags: Vec<_> = flags.split(' ').map(str::to_owned).collect();
            let why = made(&init(&flags)).unwrap_err();
            assert!(why.contains(says), "{flags:?}: {why}");
        }
    }

    #[test]
    fn nothing_that_is_given_ends_the_line_it_is_in() {
        let hostile = "x\n    evil: 1 # \u{2028}\u{85}\r\"'";
        let mut asked = init(&["--backend".to_owned(), "http://a".to_owned()]);
        asked.tls = Some(Tls { cert: hostile.to_owned(), key: hostile.to_owned() });
        asked.output = Some(hostile.into());
        let plan = checked(&made(&asked).unwrap()).plan;
        let tls = plan.listeners[0].tls.as_ref().unwrap();
        assert_eq!(tls.certs[0].cert.to_str(), Some(hostile));
    }
}
