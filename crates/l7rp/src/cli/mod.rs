//! The command line: what was asked, and the exit code that answers it.
//!
//! | module | does |
//! |---|---|
//! | `arguments` | flags and subcommands, as written |
//! | `go_flags` | `-config=x` → `--config=x` |
//! | `ask` | a running instance, asked at its admin address |
//! | `board` | what an instance says of itself, as lines |
//! | `terminal` | standard output and error |
//! | all others | one subcommand each |

mod arguments;
mod ask;
mod backend;
mod board;
mod check;
mod completions;
mod demo;
mod explain;
mod go_flags;
mod healthcheck;
mod init;
mod load;
mod man;
mod plan;
mod schema;
mod serve;
mod status;
mod terminal;
mod top;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches};

pub use arguments::Arguments;

/// Exit code of what failed at run time.
const FAILED: u8 = 1;
/// Exit code of bad usage and bad configuration.
const WRONG: u8 = 2;
/// Exit code of `plan` when something changes.
const CHANGES: u8 = 4;
/// Exit code of `--lint` when anything is told.
const FOUND: u8 = 4;

/// Does what the arguments ask for; the first is the name of the program.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    // What is held for a connection is small; a few such objects would hold a huge page each, which
    // makes no request faster. Where the kernel refuses, more memory is used and nothing else.
    let _ = rustix::thread::disable_transparent_huge_pages(true);
    if let Some(code) = crate::lifecycle::start_aside() {
        return code;
    }
    let arguments = match parse(arguments) {
        Ok(arguments) => arguments,
        Err(e) => {
            let code = u8::try_from(e.exit_code()).unwrap_or(WRONG);
            // A terminal that is gone takes nothing; the exit code still tells.
            let _ = e.print();
            return ExitCode::from(code);
        }
    };
    match arguments.command {
        None if arguments.serve.check => check::of_flags(&arguments.serve),
        None => serve::run(&arguments.serve),
        Some(arguments::Command::Init(asked)) => init::run(&asked),
        Some(arguments::Command::Check(asked)) => check::file(&asked),
        Some(arguments::Command::Plan(asked)) => plan::run(&asked),
        Some(arguments::Command::Explain(asked)) => explain::run(&asked),
        Some(arguments::Command::Schema) => schema::run(),
        Some(arguments::Command::Status(asked)) => status::run(&asked),
        Some(arguments::Command::Top(asked)) => top::run(&asked),
        Some(arguments::Command::Healthcheck(asked)) => healthcheck::run(&asked),
        Some(arguments::Command::Backend(asked)) => backend::run(&asked),
        Some(arguments::Command::Load(asked)) => load::run(&asked),
        Some(arguments::Command::Demo(asked)) => demo::run(&asked),
        Some(arguments::Command::Completions(asked)) => completions::run(&asked),
        Some(arguments::Command::Man(asked)) => man::run(&asked),
    }
}

/// Reads the arguments; the first is the name of the program.
///
/// # Errors
/// They make no sense, or ask for help or the version only.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Arguments, clap::Error> {
    let mut command = Arguments::command();
    // Adds the flags that clap itself brings, so that `-help` is known as well.
    command.build();
    let arguments = go_flags::rewrite(arguments.into_iter().collect(), &command);
    let mut matches = Arguments::command().try_get_matches_from(arguments)?;
    Arguments::from_arg_matches_mut(&mut matches).map_err(|e| e.format(&mut command))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Arguments, clap::Error> {
        parse(line.split(' ').map(OsString::from))
    }

    fn code(line: &str) -> i32 {
        read(line).map_or_else(|e| e.exit_code(), |_| 0)
    }

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn short_help_fits_a_screen() {
        let help = Arguments::command().term_width(80).render_help().to_string();
        assert!(help.lines().count() <= 24, "{} lines:\n{help}", help.lines().count());
        for line in help.lines() {
            assert!(line.chars().count() <= 80, "{line}");
        }
        for name in [
            "init",
            "backend",
            "demo",
            "check",
            "plan",
            "status",
            "top",
            "explain",
            "load",
            "healthcheck",
        ] {
            let mut command = Arguments::command();
            let command = command.find_subcommand_mut(name).unwrap();
            let help = command.clone().term_width(80).render_help().to_string();
            assert!(help.lines().count() <= 24, "{name}:\n{help}");
        }
    }

    #[test]
    fn long_help_names_every_flag() {
        let help = Arguments::command().term_width(80).render_long_help().to_string();
        for flag in Arguments::command().get_arguments().filter_map(clap::Arg::get_long) {
            assert!(help.contains(&format!("--{flag}")), "--{flag} is missing in\n{help}");
        }
    }

    #[test]
    fn version() {
        for flag in ["--version", "-version", "-V"] {
            let e = read(&format!("l7rp {flag}")).unwrap_err();
            assert_eq!(e.to_string(), concat!("l7rp ", env!("CARGO_PKG_VERSION"), "\n"));
            assert_eq!(e.exit_code(), 0);
        }
    }

    #[test]
    fn what_is_taken() {
        for line in [
            "l7rp",
            "l7rp --config a.yaml --check --no-files",
            "l7rp -config=a.yaml -log-level debug",
            "l7rp --config a.yaml --metrics-bind=",
            "l7rp --listen 127.0.0.1:1 --backends http://a,http://b --max-in-flight 1",
            "l7rp --backends http://a",
            "l7rp -tracing-endpoint localhost:4317 -tracing-sample-ratio 0.05 -tracing-insecure",
            "l7rp init --backend http://a",
            "l7rp init -backend=http://a -backend http://b --host a --host b --retries --force -output x",
            "l7rp init --backend http://a --autocert a.test --email a@b --rate-limit 5 --admin=",
            "l7rp init --backend http://a --tls a,b --health-path /up --algorithm ip-hash",
            "l7rp check --no-files a.yaml",
            "l7rp check -lint a.yaml",
            "l7rp check --config a.yaml --no-files",
            "l7rp plan a.yaml --against b.yaml",
            "l7rp --config a.yaml --check --lint",
            "l7rp plan",
            "l7rp plan --config a.yaml --against b.yaml --json --no-files",
            "l7rp plan -config=a.yaml -against=http://[::1]:9090/",
            "l7rp explain http://a.test/x",
            "l7rp explain --config a.yaml -X POST -H a:b -H c:d --client ::1 --listener l --json /",
            "l7rp explain -admin=unix:/run/a.sock a.test",
            "l7rp backend --listen 127.0.0.1:9001 --name one --fail-every 3",
            "l7rp backend -name=one --hang --slow 300 --fault-every 2",
            "l7rp backend --drop-mid --drip 5 --flap 10,500ms",
            "l7rp load http://a:81/x?y",
            "l7rp load -c 8 --rate 1000 --duration 500ms --warm-up 1 --threads 2 http://a",
            "l7rp load --requests 5 --new-connections --timeout 1s --json https://[::1]/",
            "l7rp load -X PUT -H A:b -H C:d --body-size 16KiB --chunked --hold 9 http://a",
            "l7rp load -http2 -streams 4 -cacert ca.pem https://a",
            "l7rp status",
            "l7rp status --admin 127.0.0.1:9090",
            "l7rp status -admin=unix:/run/l7rp.sock --json",
            "l7rp top --admin http://[::1]:9090 --interval 500ms",
            "l7rp healthcheck",
            "l7rp healthcheck -ready -admin=unix:/run/l7rp.sock",
            "l7rp demo",
            "l7rp completions bash",
            "l7rp man",
        ] {
            assert_eq!(code(line), 0, "{line}: {}", read(line).unwrap_err());
        }
    }

    /// Checks lines that are refused, and that the words beside them are said.
    fn refused(table: &[(&str, &str)]) {
        for (line, says) in table {
            let e = read(line).expect_err(line);
            assert_eq!(e.exit_code(), 2, "{line}");
            assert!(e.to_string().contains(says), "{line}: {e}");
        }
    }

    #[test]
    fn a_file_is_named_once() {
        for line in ["l7rp check a.yaml --config a.yaml", "l7rp plan a.yaml --config a.yaml"] {
            let e = read(line).expect_err(line);
            assert!(e.exit_code() == 2 && e.to_string().contains("--config"), "{line}: {e}");
        }
    }

    #[test]
    fn what_is_bad_usage() {
        refused(&[
            ("l7rp --confg a.yaml", "--config"),
            ("l7rp --config a.yaml --listen 127.0.0.1:1 --backends http://a", "--listen"),
            ("l7rp --config a.yaml --backends http://a", "--backends"),
            ("l7rp --config a.yaml --max-in-flight 3", "--max-in-flight"),
            ("l7rp --listen 127.0.0.1:1", "--backends"),
            ("l7rp --backends http://a --max-in-flight 0", "1.."),
            ("l7rp --no-files", "--check"),
            ("l7rp --lint", "--check"),
            ("l7rp --check --lint --backends http://a", "--lint"),
            ("l7rp --log-level loud", "debug, info, warn, error"),
            ("l7rp --tracing-sample-ratio 1.5", "0 to 1"),
            ("l7rp --metrics-bind 9090", "an address to listen on"),
            ("l7rp chekc a.yaml", "check"),
            ("l7rp init", "--backend"),
            ("l7rp init --backend http://a --force", "--output"),
            ("l7rp init --backend http://a --email a@b", "--autocert"),
            ("l7rp init --backend http://a --tls a", "a comma"),
            ("l7rp init --backend http://a --tls a,b --autocert a.test", "--autocert"),
            ("l7rp init --backend http://a --algorithm random", "round-robin"),
            ("l7rp init --backend http://a --rate-limit 0", "1..=1000000"),
            ("l7rp check", "FILE"),
            ("l7rp plan a.yaml b.yaml", "b.yaml"),
            ("l7rp plan --against https://a:9090", "http://HOST:PORT"),
            ("l7rp plan --against http://a", "http://HOST:PORT"),
            ("l7rp plan --against http://:9090", "http://HOST:PORT"),
            ("l7rp plan --against http://a:0", "http://HOST:PORT"),
            ("l7rp plan --against http://a:9090/-/plan", "http://HOST:PORT"),
            ("l7rp explain", "URL"),
            ("l7rp explain --config a.yaml --admin http://a:1 /", "--admin"),
            ("l7rp explain --admin https://a:1 /", "http://HOST:PORT"),
            ("l7rp explain --client localhost /", "--client"),
            ("l7rp status --admin ftp://127.0.0.1:9090", "http://HOST:PORT"),
            ("l7rp healthcheck --admin localhost", "http://HOST:PORT"),
            ("l7rp top --interval 1ms", "100ms"),
            ("l7rp demo --config a.yaml", "--config"),
            ("l7rp --config a.yaml demo", "demo"),
        ]);
    }

    #[test]
    fn what_is_bad_usage_of_the_tools() {
        refused(&[
            ("l7rp backend --hang --close", "--close"),
            ("l7rp backend --status 99", "200..600"),
            ("l7rp backend --fault-every 0", "1.."),
            ("l7rp backend --flap 5", "UP,DOWN"),
            ("l7rp backend --flap 0,0", "UP,DOWN"),
            ("l7rp backend --slow soon", "300ms"),
            ("l7rp load", "URL"),
            ("l7rp load a.test", "http://HOST"),
            ("l7rp load --rate 0 http://a", "1.."),
            ("l7rp load -c 0 http://a", "1.."),
            ("l7rp load --requests 5 --duration 1s http://a", "--duration"),
            ("l7rp load --streams 5 http://a", "--http2"),
            ("l7rp load --http2 --chunked http://a", "--chunked"),
            ("l7rp load --header nonsense http://a", "Name: value"),
            ("l7rp load --header Connection:close http://a", "--new-connections"),
            ("l7rp load --body-size 1KB http://a", "1KiB"),
            ("l7rp load --body-size 2TiB http://a", "1TiB"),
            ("l7rp load --duration soon http://a", "10s"),
        ]);
    }
}
