//! A collector of spans that shares no code with the proxy, in a process of its own.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use l7rp_testkit::{SOON, Value, within};

use crate::setup::PROGRAM;
use crate::tls_kit::Pair;

/// A trace that somebody else has begun, and the span that it comes from.
pub const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
pub const CALLER: &str = "b7ad6b7169203331";

/// The program, which sends its spans at once.
pub fn program() -> Command {
    let mut command = Command::new(PROGRAM);
    command.stdin(Stdio::null()).stderr(Stdio::piped()).env("OTEL_BSP_SCHEDULE_DELAY", "100");
    command
}

/// The system's own, which has the system's packages; another may come first on the path.
const PYTHON: &str = "/usr/bin/python3";
const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// Killed when dropped. It ends by itself too when nobody is left to talk to it.
pub struct Collector {
    child: Child,
    input: ChildStdin,
    lines: Arc<Mutex<Vec<Value>>>,
    port: u64,
}

impl Collector {
    #[track_caller]
    pub fn start() -> Self {
        Self::run(&[])
    }

    /// One that speaks TLS.
    #[track_caller]
    pub fn secure(pair: &Pair) -> Self {
        Self::run(&[&pair.cert, &pair.key])
    }

    #[track_caller]
    fn run(files: &[&Path]) -> Self {
        let mut child = Command::new(PYTHON)
            .arg(format!("{HERE}/tests/it/collector.py"))
            .args(files)
            .env("PYTHONPATH", format!("{HERE}/../../target/python"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 runs; `cargo xtask setup` installs it");
        let (input, output) = (child.stdin.take(), child.stdout.take());
        let lines = Arc::<Mutex<Vec<Value>>>::default();
        let to_lines = lines.clone();
        // It ends with the process.
        thread::spawn(move || {
            let lines = BufReader::new(output.expect("a pipe")).lines().map_while(Result::ok);
            for line in lines {
                let line = serde_json::from_str(&line).expect("JSON");
                to_lines.lock().unwrap_or_else(PoisonError::into_inner).push(line);
            }
        });
        let mut all = Self { child, input: input.expect("a pipe"), lines, port: 0 };
        let port = within(SOON * 2, || {
            let ended = all.child.try_wait().expect("it can be waited for").is_some();
            all.lines().first().and_then(Value::as_u64).map(Some).or(ended.then_some(None))
        });
        all.port = port.flatten().expect("it starts; `cargo xtask setup` installs what it needs");
        all
    }

    /// `host:port`.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    fn lines(&self) -> Vec<Value> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// All spans that have come.
    pub fn spans(&self) -> Vec<Value> {
        self.lines().into_iter().filter(|line| line.get("span_id").is_some()).collect()
    }

    /// Whether anything that has come holds this.
    pub fn lines_hold(&self, text: &str) -> bool {
        self.lines().iter().any(|line| line.to_string().contains(text))
    }

    /// The metadata of all calls that have come.
    pub fn calls(&self) -> Vec<Value> {
        self.lines().iter().filter_map(|line| line.get("call").cloned()).collect()
    }

    /// Has it refuse spans, or take them again.
    pub fn refuse(&mut self, refuses: bool) {
        let word = if refuses { "refuse" } else { "accept" };
        writeln!(self.input, "{word}").expect("it listens");
    }

    /// The spans of the trace with this id, once there are `count`; first the request's, then its
    /// tries in the order in which they began.
    #[track_caller]
    pub fn trace(&self, id: &str, count: usize) -> Vec<Value> {
        let mut spans = Vec::new();
        let all = within(SOON + Duration::from_secs(5), || {
            spans = self.spans();
            spans.retain(|span| span["trace_id"] == id);
            (spans.len() >= count).then_some(())
        });
        assert!(all.is_some(), "of {count} spans of {id} these have come: {spans:#?}");
        assert_eq!(spans.len(), count, "{spans:#?}");
        spans.sort_by_key(|span| {
            (span["kind"].as_u64(), span["attributes"]["proxy.retry_attempt"].as_u64())
        });
        spans
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
