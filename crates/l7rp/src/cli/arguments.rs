//! Flags and subcommands, as written.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::RangedU64ValueParser;
use clap::{ArgAction, ArgGroup, Args, Parser, Subcommand};

use super::ask::Instance;
use super::init::Init;
use super::load::Load;
use crate::config::{self, plan::Bind};
use crate::observe::event::Level;
use crate::tools::backend::{Flap, is_name};

/// A layer-7 reverse proxy and load balancer
#[derive(Clone, Debug, Parser)]
#[command(
    name = "l7rp",
    version,
    override_usage = "l7rp [OPTIONS]  or  l7rp <COMMAND> [OPTIONS]",
    args_conflicts_with_subcommands = true,
    disable_help_subcommand = true,
    disable_version_flag = true,
    max_term_width = 100,
    // One blank line less, so that all of it fits a screen.
    help_template = "{about-with-newline}{usage-heading} {usage}\n\n{all-args}{after-help}",
    after_long_help = "Exit codes: 0 all is well, 1 failed at run time, 2 wrong usage or \
                       configuration, 3 ended by force, 4 changes found by plan, or something by --lint.\n\
                       Long flags may begin with one dash: -config=FILE."
)]
pub struct Arguments {
    /// What to do instead of serving.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// How to serve.
    #[command(flatten)]
    pub serve: Serve,
    /// Print version
    // In place of clap's own, so that the short help has a line for another subcommand.
    #[arg(short = 'V', long, action = ArgAction::Version, hide_short_help = true)]
    version: Option<bool>,
}

#[expect(clippy::struct_excessive_bools, reason = "flags are")]
/// Flags of serving and of checking what would be served.
#[derive(Args, Clone, Debug)]
pub struct Serve {
    /// Configuration file
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    pub config: PathBuf,
    /// Check the configuration and start nothing
    // `check` in the list of commands names it.
    #[arg(long, hide_short_help = true)]
    pub check: bool,
    /// Reload when the configuration, or a file that it names, has changed
    #[arg(long, conflicts_with_all = ["check", "backends"], hide_short_help = true)]
    pub watch: bool,
    /// With --check: do not look at certificates and keys, as they may be elsewhere
    #[arg(long, requires = "check", hide_short_help = true)]
    pub no_files: bool,
    /// With --check: tell also what is valid but cannot be meant
    ///
    /// Routes that can never be taken, limits that are never reached, times that contradict each
    /// other. Exit code 4 if anything is told.
    #[arg(long, requires = "check", conflicts_with = "backends", hide_short_help = true)]
    pub lint: bool,
    /// debug, info, warn or error [default: info]
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    #[arg(hide_possible_values = true, hide_default_value = true, hide_short_help = true)]
    pub log_level: Level,
    /// Address of /metrics, /-/ready and so on; '': none
    ///
    /// Wins over the configuration, whose default is 127.0.0.1:9090.
    #[arg(long, value_name = "ADDR", value_parser = metrics_bind, hide_short_help = true)]
    pub metrics_bind: Option<MetricsBind>,
    /// Collector of OpenTelemetry spans (OTLP over gRPC), host:port; '': none
    #[arg(long, value_name = "ADDR", value_parser = collector)]
    #[arg(help_heading = "Tracing", hide_short_help = true)]
    pub tracing_endpoint: Option<String>,
    /// Share of the requests that are traced if the caller has not decided: 0 to 1
    #[arg(long, value_name = "RATIO", value_parser = ratio)]
    #[arg(help_heading = "Tracing", hide_short_help = true)]
    pub tracing_sample_ratio: Option<f64>,
    /// Reach the collector without TLS
    #[arg(long, help_heading = "Tracing", hide_short_help = true)]
    pub tracing_insecure: bool,
    /// Without a file: address to listen on
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080")]
    #[arg(requires = "backends", conflicts_with = "config")]
    pub listen: String,
    /// Without a file: backends, with commas between them
    #[arg(long, value_name = "URLS", conflicts_with = "config")]
    pub backends: Option<String>,
    /// Without a file: requests in flight; beyond it 503 [default: 256]
    #[arg(long, value_name = "N", default_value_t = 256, hide_default_value = true)]
    #[arg(hide_short_help = true)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    #[arg(requires = "backends", conflicts_with = "config")]
    pub max_in_flight: u32,
}

/// What to do instead of serving.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Write a configuration to begin with
    Init(Box<Init>),
    /// Check a configuration file, like --check
    Check(Check),
    /// Show what a reload would change
    Plan(Plan),
    /// Show which way a request would take, and why
    Explain(Explain),
    /// Print the JSON Schema of the configuration, for editors
    Schema,
    /// Show how a running instance is doing
    Status(Status),
    /// The same, live
    Top(Top),
    /// Ask a running instance whether it is alive, or ready
    Healthcheck(Healthcheck),
    /// Run a backend that misbehaves on demand
    Backend(Backend),
    /// Make load, and tell what came of it
    Load(Box<Load>),
    /// Run a proxy and three backends to play with
    Demo(Demo),
    /// Print completions for a shell
    Completions(Completions),
    /// Print the manual page
    Man(Man),
}

/// `l7rp check`
#[derive(Args, Clone, Debug)]
#[command(
    after_help = "Exit codes: 0 all is well, 2 wrong usage or configuration, 4 something is \
                        told, with --lint only.",
    group = ArgGroup::new("which").required(true)
)]
pub struct Check {
    /// Configuration file
    #[arg(value_name = "FILE", group = "which")]
    pub file: Option<PathBuf>,
    /// The same, as a flag
    #[arg(long, value_name = "FILE", group = "which")]
    pub config: Option<PathBuf>,
    /// Do not look at certificates and keys, as they may be elsewhere
    #[arg(long)]
    pub no_files: bool,
    /// Tell also what is valid but cannot be meant
    ///
    /// Routes that can never be taken, limits that are never reached, times that contradict each
    /// other. The words in brackets are the names of the rules.
    #[arg(long)]
    pub lint: bool,
}

/// `l7rp plan`
#[derive(Args, Clone, Debug)]
#[command(after_help = "Exit codes: 0 nothing changes, 4 something changes, 1 the running \
                        instance cannot be asked,\n2 wrong usage or configuration.")]
pub struct Plan {
    /// The same as --config
    #[arg(value_name = "FILE", conflicts_with = "config")]
    pub file: Option<PathBuf>,
    /// Configuration file that would be loaded
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    pub config: PathBuf,
    /// What is in force: a file, or http://HOST:PORT, the admin address of a running instance
    /// [default: the admin address in the configuration]
    #[arg(long, value_name = "FILE|URL", value_parser = against)]
    pub against: Option<Against>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Do not look at certificates and keys, as they may be elsewhere
    #[arg(long)]
    pub no_files: bool,
}

/// What a configuration is compared with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Against {
    /// Another file.
    File(PathBuf),
    /// What is in force in this instance.
    Admin(Instance),
}

/// `l7rp explain`
#[derive(Args, Clone, Debug)]
#[command(after_help = "Exit codes: 0 explained, whatever comes of the request; 1 the running \
                        instance cannot be\nasked, or refuses the question; 2 wrong usage or \
                        configuration. Nothing is sent.")]
pub struct Explain {
    /// The request's URL, or its path alone
    pub url: String,
    /// Configuration file
    #[arg(long, value_name = "FILE", default_value = CONFIG)]
    pub config: PathBuf,
    /// Ask the running instance at this admin address: http://HOST:PORT or `unix:/PATH`; not
    /// together with --config, as it has its own configuration
    #[arg(long, value_name = "URL", conflicts_with = "config")]
    pub admin: Option<Instance>,
    /// Method [default: GET]
    #[arg(short = 'X', long, value_name = "METHOD")]
    pub request: Option<String>,
    /// A header line, `Name: value`; may be repeated
    #[arg(short = 'H', long, value_name = "LINE")]
    pub header: Vec<String>,
    /// Address that the connection comes from [default: 127.0.0.1]
    #[arg(long, value_name = "IP")]
    pub client: Option<std::net::IpAddr>,
    /// Listener that it comes in by [default: by the URL's port]
    #[arg(long, value_name = "NAME")]
    pub listener: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `l7rp status`
#[derive(Args, Clone, Debug)]
#[command(after_help = "Exit codes: 0 shown, 1 the instance cannot be asked, 2 wrong usage.")]
pub struct Status {
    /// Admin address of the instance: `http://HOST:PORT` or `unix:/PATH`
    #[arg(long, value_name = "URL", default_value = ADMIN)]
    pub admin: Instance,
    /// Print what it says as JSON, whose schema it has at /-/status.schema.json
    #[arg(long)]
    pub json: bool,
}

/// `l7rp top`
#[derive(Args, Clone, Debug)]
#[command(after_help = "Keys: q, Esc, Ctrl-C quit; p pause; s sort as configured, by requests, \
                        by errors; arrows scroll.")]
pub struct Top {
    /// Admin address of the instance: `http://HOST:PORT` or `unix:/PATH`
    #[arg(long, value_name = "URL", default_value = ADMIN)]
    pub admin: Instance,
    /// How often to ask: 1s, 500ms, 1m
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    pub interval: Duration,
}

/// `l7rp healthcheck`
#[derive(Args, Clone, Debug)]
#[command(after_help = "For a container's HEALTHCHECK or an exec probe. It takes 3 seconds at \
                        most.\nExit codes: 0 yes, 1 no or no answer, 2 wrong usage.")]
pub struct Healthcheck {
    /// Admin address of the instance: `http://HOST:PORT` or `unix:/PATH`
    #[arg(long, value_name = "URL", default_value = ADMIN)]
    pub admin: Instance,
    /// Whether traffic should be sent there (/readyz), not only whether it lives (/livez)
    #[arg(long)]
    pub ready: bool,
}

/// The file that is meant unless one is named.
pub const CONFIG: &str = "/etc/l7rp/config.yaml";
/// Where an instance is asked unless its configuration or flags say otherwise.
const ADMIN: &str = "http://127.0.0.1:9090";

/// `l7rp backend`
#[derive(Args, Clone, Debug)]
#[command(after_help = "--help lists the paths that it answers.", after_long_help = PATHS)]
pub struct Backend {
    /// Address to listen on
    ///
    /// With port 0 it takes a free one, and says which.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:9001")]
    pub listen: SocketAddr,
    /// Name in its answers
    #[arg(long, default_value = "backend-1", value_parser = name)]
    pub name: String,
    /// Answer every Nth request with 503
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub fail_every: u64,
    /// Let only every Nth request suffer from the faults below
    #[arg(long, value_name = "N", default_value_t = 1, hide_default_value = true)]
    #[arg(value_parser = RangedU64ValueParser::<u64>::new().range(1..), help_heading = "Faults")]
    pub fault_every: u64,
    /// Read the request and never answer
    #[arg(long, group = "ending", help_heading = "Faults")]
    pub hang: bool,
    /// Read the request and close the connection
    #[arg(long, group = "ending", help_heading = "Faults")]
    pub close: bool,
    /// Send the head and half of the body, then close the connection
    #[arg(long, group = "ending", help_heading = "Faults")]
    pub drop_mid: bool,
    /// Wait before the answer
    #[arg(long, value_name = "MS", value_parser = milliseconds, help_heading = "Faults")]
    pub slow: Option<Duration>,
    /// Wait before each octet of the body
    #[arg(long, value_name = "MS", value_parser = milliseconds, help_heading = "Faults")]
    pub drip: Option<Duration>,
    /// Answer with this status
    #[arg(long, value_name = "CODE", help_heading = "Faults")]
    #[arg(value_parser = clap::value_parser!(u16).range(200..600))]
    pub status: Option<u16>,
    /// Be up and down by turns: seconds, or 500ms, 2m
    ///
    /// While down, everything is answered with 503, `/healthz` too. Begins up. This fault does
    /// not heed --fault-every.
    #[arg(long, value_name = "UP,DOWN", value_parser = flap, help_heading = "Faults")]
    pub flap: Option<Flap>,
}

const PATHS: &str = "\
Paths:
  /healthz                   204, so a probe needs `expected_status: [2xx]`; not counted, and only
                             --flap touches it
  /echo                      method, target and fields, and the length of the body
  /upload                    reads a body of any size and answers its length
  /bytes?n=SIZE              a body of this size, with Content-Length
  /chunked?n=SIZE&chunk=SIZE a body of this size, in chunks
  /status?code=NNN           an answer with this status
  /slow?ms=N                 waits, then answers
  any other                  200 and `NAME request=N`

Sizes are octets, or have a unit: 64KiB, 1MiB, 1GiB. Every answer has a field X-Backend with the
name. A generated body repeats 0123456789abcdef.";

/// `l7rp demo`
#[derive(Args, Clone, Debug)]
pub struct Demo {
    /// Write an access log to standard output
    #[arg(long)]
    pub access_log: bool,
}

/// `l7rp completions`
#[derive(Args, Clone, Debug)]
pub struct Completions {
    /// Which shell
    pub shell: clap_complete::Shell,
}

/// `l7rp man`
#[derive(Args, Clone, Debug)]
pub struct Man {
    /// Subcommand that the page is about
    pub subcommand: Option<String>,
}

/// Where the admin endpoints are to be; `None`: nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MetricsBind(pub Option<Bind>);

fn metrics_bind(text: &str) -> Result<MetricsBind, String> {
    if text.is_empty() {
        return Ok(MetricsBind(None));
    }
    // clap names the flag.
    config::bind_address("", text)
        .map(|bind| MetricsBind(Some(bind)))
        .map_err(|e| e.trim_start_matches(": ").to_owned())
}

fn against(text: &str) -> Result<Against, String> {
    if !text.contains("://") && !text.starts_with("unix:") {
        return Ok(Against::File(text.into()));
    }
    text.parse().map(Against::Admin).map_err(|_| NO_ADMIN.to_owned())
}

const NO_ADMIN: &str =
    "write the path of a file, or http://HOST:PORT or unix:/PATH for an admin address";

fn collector(text: &str) -> Result<String, String> {
    let port = text.rsplit_once(':').filter(|(host, _)| !host.is_empty() && !host.contains('/'));
    match port.map(|(_, port)| port.parse::<u16>()) {
        Some(Ok(1..)) => Ok(text.to_owned()),
        _ if text.is_empty() => Ok(String::new()),
        _ => Err("write HOST:PORT of a collector, or nothing at all for none".to_owned()),
    }
}

fn ratio(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(ratio) if (0.0..=1.0).contains(&ratio) => Ok(ratio),
        _ => Err("it is a number from 0 to 1".to_owned()),
    }
}

fn name(text: &str) -> Result<String, String> {
    if is_name(text) {
        Ok(text.to_owned())
    } else {
        Err("it is 1 to 64 visible ASCII characters".to_owned())
    }
}

fn interval(text: &str) -> Result<Duration, String> {
    const LEAST: Duration = Duration::from_millis(100);
    let interval = time(text, "s").filter(|interval| *interval >= LEAST);
    interval.ok_or_else(|| "write a time of 100ms or more, like 1s or 500ms".to_owned())
}

fn milliseconds(text: &str) -> Result<Duration, String> {
    time(text, "ms").ok_or_else(|| "write milliseconds, or a time like 300ms or 1.5s".to_owned())
}

fn flap(text: &str) -> Result<Flap, String> {
    let times =
        text.split_once(',').and_then(|(up, down)| Some((time(up, "s")?, time(down, "s")?)));
    match times {
        Some((up, down)) if !(up + down).is_zero() => Ok(Flap { up, down }),
        _ => Err("write UP,DOWN in seconds, or with units, like 10,5 or 1m,500ms".to_owned()),
    }
}

/// A time; a bare number is meant in `unit`. Not longer than a year, so that sums are safe.
pub(super) fn time(text: &str, unit: &str) -> Option<Duration> {
    const YEAR: f64 = 365.0 * 86_400.0;
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, written) = text.split_at(end);
    let seconds = match if written.is_empty() { unit } else { written } {
        "ms" => 0.001,
        "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return None,
    } * number.parse::<f64>().ok()?;
    (0.0..=YEAR).contains(&seconds).then(|| Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        for (text, ms) in [
            ("300", Some(300)),
            ("0", Some(0)),
            ("1.5s", Some(1500)),
            ("20ms", Some(20)),
            ("2m", Some(120_000)),
            ("1h", Some(3_600_000)),
            ("", None),
            ("-1", None),
            ("1 s", None),
            ("1e9", None),
            ("99999h", None),
            ("s", None),
        ] {
            assert_eq!(time(text, "ms"), ms.map(Duration::from_millis), "{text}");
        }
    }

    #[test]
    fn metrics_addresses() {
        for (text, bind) in [
            ("", None),
            ("127.0.0.1:0", Some("127.0.0.1:0")),
            ("[::]:9090", Some("[::]:9090")),
            ("unix:/run/a.sock", Some("unix:/run/a.sock")),
        ] {
            let MetricsBind(read) = metrics_bind(text).unwrap();
            assert_eq!(read.map(|b| b.to_string()).as_deref(), bind, "{text}");
        }
        assert!(metrics_bind("unix:relative").is_err() && metrics_bind("localhost").is_err());
    }
}
