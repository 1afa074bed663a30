//! `l7rp load`: makes load, and tells what came of it.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::Args;
use clap::builder::RangedU64ValueParser;
use http::Method;

use super::arguments::time;
use super::terminal::{error, failed, print, visible, visible_json};
use super::{FAILED, WRONG};
use crate::config::file::Size;
use crate::running::raise_open_files;
use crate::tools::load::{self, Ask, Control, End, Field, Ink, Pace, Plan, Trust, Url};
use crate::tools::stop::Stop;

/// Descriptors that are not connections: a few, and some for each thread.
const OTHER_FILES: u64 = 32;
const THREAD_FILES: u64 = 8;
/// Octets of a body.
const MOST_BODY: u64 = 1 << 40;

/// `l7rp load`
#[expect(clippy::struct_excessive_bools, reason = "flags are")]
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "--help lists all options. Exit codes: 0 all requests were answered, whatever \
                  the\nstatus; 1 one has failed or was given up, or there was no load; 2 wrong usage.",
    after_long_help = NOTES
)]
pub struct Load {
    /// http://HOST:PORT/PATH or https://...
    #[arg(value_parser = str::parse::<Url>)]
    pub url: Url,
    /// Requests at once, at most
    ///
    /// With HTTP/1.1 there are as many connections.
    #[arg(short = 'c', long, value_name = "N", default_value_t = 64)]
    #[arg(value_parser = RangedU64ValueParser::<u32>::new().range(1..=100_000))]
    pub concurrency: u32,
    /// Requests each second [default: as answers come]
    ///
    /// A request that finds all connections busy waits for one, and its latency counts from when
    /// it was due.
    #[arg(long, value_name = "N")]
    #[arg(value_parser = RangedU64ValueParser::<u64>::new().range(1..=10_000_000))]
    pub rate: Option<u64>,
    /// How long requests are started
    ///
    /// Those in flight at its end are waited for, and are no failures.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = moment)]
    pub duration: Duration,
    /// Make so many requests instead
    #[arg(long, value_name = "N", conflicts_with = "duration")]
    #[arg(value_parser = RangedU64ValueParser::<u64>::new().range(1..))]
    pub requests: Option<u64>,
    /// Before that, for so long, nothing counts
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = moment)]
    #[arg(hide_default_value = true)]
    pub warm_up: Duration,
    /// A connection for each request
    #[arg(long, conflicts_with = "http2")]
    pub new_connections: bool,
    /// Method [default: GET, or POST if there is a body]
    #[arg(short = 'X', long, value_name = "METHOD", value_parser = method)]
    pub method: Option<Method>,
    /// A header line, `Name: value`; may be repeated
    #[arg(short = 'H', long, value_name = "LINE", value_parser = str::parse::<Field>)]
    pub header: Vec<Field>,
    /// Send a body: 100, 16KiB, 1MiB
    #[arg(long, value_name = "SIZE", default_value = "0", value_parser = body_size)]
    #[arg(hide_default_value = true)]
    pub body_size: u64,
    /// Send it in chunks, without a length
    #[arg(long, conflicts_with = "http2", hide_short_help = true)]
    pub chunked: bool,
    /// An answer that is not complete by then has failed
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = moment)]
    #[arg(hide_short_help = true)]
    pub timeout: Duration,
    /// HTTP/2: by prior knowledge, with https by ALPN
    #[arg(long)]
    pub http2: bool,
    /// Requests at once on a connection, with --http2
    #[arg(long, value_name = "N", default_value_t = 16, requires = "http2")]
    #[arg(value_parser = RangedU64ValueParser::<u32>::new().range(1..=100_000))]
    #[arg(hide_short_help = true)]
    pub streams: u32,
    /// File with the CAs to trust, PEM [default: those of the system]
    #[arg(long, value_name = "FILE", hide_short_help = true)]
    pub cacert: Option<PathBuf>,
    /// Trust any certificate
    #[arg(long, conflicts_with = "cacert", hide_short_help = true)]
    pub insecure: bool,
    /// Threads [default: at most one for each core]
    ///
    /// Each has the same number of places for requests. By default there are as many threads as
    /// divide them evenly.
    #[arg(long, value_name = "N", hide_short_help = true)]
    #[arg(value_parser = RangedU64ValueParser::<u32>::new().range(1..=1024))]
    pub threads: Option<u32>,
    /// Connections beside the busy ones, idle after one request each
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    #[arg(value_parser = RangedU64ValueParser::<u32>::new().range(..=1_000_000))]
    #[arg(conflicts_with_all = ["http2", "new_connections"], hide_short_help = true)]
    pub hold: u32,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const NOTES: &str = "\
Latency counts from when a request was due, in a closed loop from when it was sent, to the last
octet of its answer. Connecting is a part of it for a request that needs a new connection: with
--new-connections, after an answer that closes the last one, and after a failure. The rate is that
of the answers before the cut-off, with --requests until the last answer. A kept connection that the
peer closes without a word, or sends on what was not asked for, is opened again once for the same
request, and counted. A request that an HTTP/2 server says it has not begun with (GOAWAY,
REFUSED_STREAM) is sent again on new connections: until --timeout if they answer others, else 5
times.

SIGINT ends the load early, with a report; a second one does not wait for what is in flight.

Exit codes: 0 all requests were answered, whatever the status; 1 one has failed or was given up, or
there was no load at all; 2 wrong usage.";

pub(super) fn run(asked: &Load) -> ExitCode {
    let plan = plan(asked);
    if asked.threads.is_some() && plan.even_threads() != plan.threads {
        error(&uneven(&plan));
        return ExitCode::from(WRONG);
    }
    let files = plan.connections() as u64 + plan.hold as u64 + OTHER_FILES;
    let files = files + THREAD_FILES * plan.even_threads() as u64;
    if asked.http2 && asked.header.iter().any(Field::is_of_connection) {
        error(
            "HTTP/2 has no fields of a connection: leave out --header Upgrade, Keep-Alive, \
             Proxy-Connection, and any TE but trailers",
        );
        return ExitCode::from(WRONG);
    }
    let limit = raise_open_files();
    if files > limit {
        error(&format!(
            "this takes {files} open files, and the limit is {limit}; raise it (ulimit -n), or \
             lower --concurrency or --hold"
        ));
        return ExitCode::from(WRONG);
    }
    let control = Control::new();
    if let Err(e) = Stop::install().and_then(|stop| watch(stop, control.clone())) {
        return failed(&format!("cannot catch signals: {e}"));
    }
    let report = match load::run(plan, &control) {
        Ok(report) => report,
        Err(e) => return failed(&visible(&e)),
    };
    let printed = if asked.json {
        match serde_json::to_string_pretty(&report) {
            Ok(text) => print(visible_json(&text) + "\n"),
            Err(e) => failed(&format!("cannot write the report as JSON: {e}")),
        }
    } else {
        // Words of the peer may be in it.
        let text = report.text(ink());
        let lines: Vec<String> = text.lines().map(visible).collect();
        print(lines.join("\n") + "\n")
    };
    if report.has_failed() { ExitCode::from(FAILED) } else { printed }
}

/// That --threads is wrong, and what would be right.
fn uneven(plan: &Plan) -> String {
    let on_each = plan.streams.map_or(String::new(), |n| format!(", {n} on a connection,"));
    format!(
        "--concurrency {}{on_each} cannot be divided evenly among --threads {}; --threads {} would \
         do, or a multiple of {} as --concurrency",
        plan.concurrency,
        plan.threads,
        plan.even_threads(),
        plan.threads * plan.streams.unwrap_or(1),
    )
}

/// The first signal ends the load, the second what is in flight.
fn watch(mut stop: Stop, control: Control) -> io::Result<()> {
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        loop {
            stop.wait();
            control.end();
        }
    })?;
    Ok(())
}

fn plan(asked: &Load) -> Plan {
    let cores = thread::available_parallelism().map_or(1, usize::from);
    Plan {
        url: asked.url.clone(),
        ask: Ask {
            method: asked.method.clone(),
            fields: asked.header.clone(),
            body: asked.body_size,
            chunked: asked.chunked,
            close: asked.new_connections,
        },
        pace: asked.rate.map_or(Pace::Closed, Pace::Open),
        end: asked.requests.map_or(End::After(asked.duration), End::Requests),
        warm_up: asked.warm_up,
        concurrency: asked.concurrency as usize,
        streams: asked.http2.then_some(asked.streams as usize),
        threads: asked.threads.map_or(cores, |n| n as usize),
        timeout: asked.timeout,
        trust: Trust { ca_file: asked.cacert.clone(), insecure: asked.insecure },
        hold: asked.hold as usize,
    }
}

/// Blocks where they can be seen.
fn ink() -> Ink {
    let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(set).unwrap_or_default();
    let locale = locale.to_ascii_lowercase().replace('-', "");
    if io::stdout().is_terminal() && locale.contains("utf8") { Ink::Blocks } else { Ink::Ascii }
}

fn moment(text: &str) -> Result<Duration, String> {
    time(text, "s").ok_or_else(|| "write a time like 10s, 500ms or 1m".to_owned())
}

fn method(text: &str) -> Result<Method, String> {
    match text.parse() {
        Ok(Method::CONNECT) => Err("there is no load of CONNECT".to_owned()),
        Ok(method) => Ok(method),
        Err(_) => Err("it is a word like GET or POST".to_owned()),
    }
}

fn body_size(text: &str) -> Result<u64, String> {
    match Size::parse(text)? {
        Size(size) if size <= MOST_BODY => Ok(size),
        _ => Err("a body of a load has 1TiB at most".to_owned()),
    }
}
