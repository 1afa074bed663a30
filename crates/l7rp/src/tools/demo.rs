//! A proxy and three backends on this machine, to play with: it needs nothing else.

use std::fmt::Write;
use std::io::{self, ErrorKind};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::time::timeout;

use super::backend::{self, Backend, Faults, Options};
use crate::config::{self, Files, Source};
use crate::observe::event::{Events, Level};
use crate::observe::log::Log;
use crate::orders::Desk;
use crate::running::{self, Running};

/// How long requests in flight may take when the demo ends; somebody waits at the keyboard.
const GRACE: Duration = Duration::from_secs(2);
/// Every so many requests the moody backend lets one wait, and refuses one.
const SLOW_EVERY: u64 = 3;
const FAIL_EVERY: u64 = 10;
const SLOW: Duration = Duration::from_millis(250);

/// What a demo is to be like.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// Port of the proxy; a free one is taken if it is in use.
    pub proxy: u16,
    /// Port of the admin endpoints, likewise.
    pub admin: u16,
    /// One log line for each request.
    pub access_log: bool,
}

/// A running demo.
#[derive(Debug)]
pub struct Demo {
    // First, so that it goes before the backends that it sends to.
    running: Running,
    _backends: [Backend; 3],
    text: String,
}

impl Demo {
    /// What to tell the user: addresses, configuration, what to try.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Real address of the proxy.
    pub fn proxy(&self) -> String {
        self.running.listeners().next().map_or_else(String::new, |(_, address)| address)
    }

    /// Stops the proxy, then the backends.
    pub fn stop(mut self) {
        self.running.leave();
        self.running.drain();
        if let Ok(runtime) = Builder::new_current_thread().enable_time().build() {
            // In time or not: what is left is cut below.
            let _ = runtime.block_on(async { timeout(GRACE, self.running.drained()).await });
        }
        self.running.stop();
    }
}

/// Starts a demo whose events go to `log`.
///
/// # Errors
/// What failed, for people.
pub fn start(wish: Wish, log: Log) -> Result<Demo, String> {
    let backends = backends().map_err(|e| format!("cannot start a backend: {e}"))?;
    let port = |wanted| free_port(wanted).map_err(|e| format!("no free port: {e}"));
    let (proxy, admin) = (port(wish.proxy)?, port(wish.admin)?);
    let text = configuration(proxy, admin, &backends, wish.access_log);
    let source = Source { name: "the demo's configuration".to_owned(), text };
    let loaded =
        config::parse(&source, Path::new(""), Files::Ignore).map_err(|e| e.render(false))?;
    // Without the access log, only what is worth attention may come between the lines.
    let least = if wish.access_log { Level::Info } else { Level::Warn };
    let events = Arc::new(Events::new(log, least));
    let (files, none, desk) = (running::raise_open_files(), &mut Vec::new(), Desk::default());
    let running =
        running::start(loaded.plan, &events, files, none, None, desk).map_err(|e| e.to_string())?;
    wait_until_ready(&running);
    let text = words(&running, wish, &backends, &source.text);
    Ok(Demo { running, _backends: backends, text })
}

/// Waits for the first health checks, so that the first request finds somebody.
fn wait_until_ready(running: &Running) {
    let ready = async {
        while !running.process().is_ready() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    if let Ok(runtime) = Builder::new_current_thread().enable_time().build() {
        // Ready or not: the demo says where to look.
        let _ = runtime.block_on(async { timeout(GRACE, ready).await });
    }
}

fn backends() -> io::Result<[Backend; 3]> {
    let moody = Options {
        fail_every: FAIL_EVERY,
        faults: Faults { every: SLOW_EVERY, slow: SLOW, ..Faults::default() },
        ..Options::new("moody")
    };
    Ok([
        backend::start(Options::new("one"))?,
        backend::start(Options::new("two"))?,
        backend::start(moody)?,
    ])
}

/// `wanted`, or another one if that is in use. It may be taken by somebody else before we
/// listen there; then the start says so.
fn free_port(wanted: u16) -> io::Result<u16> {
    let listen = |port| TcpListener::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
    let listener = match listen(wanted) {
        Err(e) if e.kind() == ErrorKind::AddrInUse => listen(0),
        other => other,
    }?;
    Ok(listener.local_addr()?.port())
}

fn configuration(proxy: u16, admin: u16, backends: &[Backend; 3], access_log: bool) -> String {
    let [one, two, moody] = backends.each_ref().map(Backend::addr);
    format!(
        "\
listeners:
  - name: http
    bind: \"127.0.0.1:{proxy}\"

upstream_pools:
  - name: demo
    selector:
      algorithm: p2c-ewma
    upstreams:
      - url: http://{one}
      - url: http://{two}
      - url: http://{moody}
    health:
      active: {{ path: /healthz, interval: 2s, timeout: 1s, expected_status: [204] }}

routes:
  - name: all
    path_prefix: /
    pool: demo
    middleware:
      - retry: {{ max_attempts: 3, hedge_after: 100ms }}

admin:
  bind: \"127.0.0.1:{admin}\"

access_log:
  enabled: {access_log}
"
    )
}

fn words(running: &Running, wish: Wish, backends: &[Backend; 3], configuration: &str) -> String {
    let proxy = running.listeners().next().map_or_else(String::new, |(_, address)| address);
    let admin = running.admin().unwrap_or_default();
    let [one, two, moody] = backends.each_ref().map(Backend::addr);
    let mut text = String::new();
    for (wanted, address) in [(wish.proxy, &proxy), (wish.admin, &admin)] {
        if wanted != 0 && !address.ends_with(&format!(":{wanted}")) {
            // Writing into memory does not fail, here and below.
            let _ = writeln!(text, "Port {wanted} is in use; another one is taken.");
        }
    }
    let slow = SLOW.as_millis();
    let _ = write!(
        text,
        "\
proxy   http://{proxy}
admin   http://{admin}
one     http://{one}
two     http://{two}
moody   http://{moody}   (takes {slow} ms every {SLOW_EVERY}rd time, fails every {FAIL_EVERY}th)

This is what is served. Put it into a file, change it, and run `l7rp --config FILE`:

"
    );
    for line in configuration.lines() {
        let indent = if line.is_empty() { "" } else { "    " };
        let _ = writeln!(text, "{indent}{line}");
    }
    let _ = write!(
        text,
        "
Try in another terminal:

  One request:
    curl -i http://{proxy}/

  Who answers: `moody` is slow now and then, so it gets the least; and when it fails or is
  slow, another is asked, so that every answer is good
    for i in $(seq 60); do curl -s http://{proxy}/; done | cut -d' ' -f1 | sort | uniq -c
    curl -s http://{admin}/metrics | grep -E 'retry|hedge'

  What a backend is told:
    curl http://{proxy}/echo

  What the proxy has counted, and whether it is ready:
    curl -s http://{admin}/metrics | grep upstream_requests
    curl -i http://{admin}/-/ready

  A request that two servers could understand in two ways is refused:
    curl -i -H 'Content-Length: 5' -H 'Transfer-Encoding: chunked' -d hello http://{proxy}/

Ctrl-C stops everything.
"
    );
    text
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;

    fn ask(address: &str, path: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: demo\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn it_serves_and_says_where() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let wish = Wish { proxy: port, admin: 0, access_log: false };
        let demo = start(wish, Log::start(io::sink()).unwrap()).unwrap();
        let text = demo.text().to_owned();
        assert!(text.contains(&format!("Port {port} is in use; another one is taken.\n")));
        assert!(text.contains(&format!("\nproxy   http://{}\n", demo.proxy())), "{text}");
        let mut answers: Vec<String> = (0..30).map(|_| ask(&demo.proxy(), "/")).collect();
        answers.retain(|answer| answer.starts_with("HTTP/1.1 200 "));
        assert_eq!(answers.len(), 30, "{answers:?}");
        let admin = text.lines().find_map(|line| line.strip_prefix("admin   http://")).unwrap();
        assert!(ask(admin, "/-/ready").starts_with("HTTP/1.1 200 "));
        let proxy = demo.proxy();
        demo.stop();
        assert!(TcpStream::connect(proxy).is_err());
    }

    #[test]
    fn the_configuration_that_it_shows_is_the_one_to_copy() {
        let backends = backends().unwrap();
        let text = configuration(8080, 9090, &backends, false);
        let source = Source { name: "demo".to_owned(), text };
        let loaded = config::parse(&source, Path::new(""), Files::Check).unwrap();
        assert!(loaded.not_yet.is_empty() && loaded.warnings.is_empty());
        assert_eq!(loaded.plan.pools[0].upstreams.len(), 3);
    }
}
