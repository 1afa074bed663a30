//! A whole connection: what any client and any upstream send, in any parts, through the running
//! engine. It does not panic or hang, sends the upstream nothing that a strict reader would not
//! take for exactly the client's requests, and gives back all that it took.
#![no_main]

#[path = "connection/input.rs"]
mod input;
#[path = "connection/strict.rs"]
mod strict;
#[path = "connection/upstream.rs"]
mod upstream;

use std::io::Read;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use l7rp::config::{Files, Source, parse};
use l7rp::http2::PREFACE;
use l7rp::live::Process;
use l7rp::observe::event::{Events, Level};
use l7rp::observe::log::Log;
use l7rp::orders::Desk;
use l7rp::running::{Running, start};
use libfuzzer_sys::{Corpus, fuzz_target};

use input::Input;
use strict::Count;
use upstream::{Seen, Upstream};

/// Longer than all time-outs that one input can run into, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(5);

struct Scene {
    process: Arc<Process>,
    /// Until the end; only one thread may change it.
    _running: Mutex<Running>,
    upstream: Upstream,
    proxy: SocketAddr,
}

/// Longer pipelines take long and show nothing new.
const MAX_REQUESTS: usize = 20;

fuzz_target!(|data: &[u8]| -> Corpus {
    static SCENE: OnceLock<Scene> = OnceLock::new();
    let Some(input) = Input::read(data) else { return Corpus::Reject };
    let octets = input.client.octets();
    // What follows that is of another protocol, which is not counted here.
    if octets.windows(PREFACE.len()).any(|part| part == PREFACE) {
        return Corpus::Reject;
    }
    let sent = strict::count(&octets);
    if sent.begun > MAX_REQUESTS {
        return Corpus::Reject;
    }
    let scene = SCENE.get_or_init(Scene::start);
    let input = Arc::new(input);
    scene.upstream.begin(input.clone());
    scene.client(&input);
    scene.quiet();
    let seen = scene.upstream.end(PATIENCE);
    judge(&sent, &seen);
    let panics = scene.process.panics.all();
    assert!(panics.is_empty(), "{panics:?}");
    Corpus::Keep
});

fn judge(sent: &Count, seen: &Seen) {
    assert!(seen.faults.is_empty(), "{:?}", seen.faults);
    let (begun, whole) = (seen.begun.len(), seen.whole.len());
    assert!(begun <= sent.begun, "{begun} requests begun at the upstream of {sent:?}");
    assert!(whole <= sent.whole, "{whole} whole requests at the upstream of {sent:?}");
}

impl Scene {
    fn start() -> Self {
        let upstream = Upstream::start();
        let text = file(upstream.address);
        let source = Source { name: "fuzz".to_owned(), text };
        let loaded = match parse(&source, Path::new("."), Files::Ignore) {
            Ok(loaded) => loaded,
            Err(refused) => panic!("{}", refused.render(false)),
        };
        let log = Log::start(std::io::sink()).expect("a thread");
        let events = Arc::new(Events::new(log, Level::Error));
        let mut plan = loaded.plan;
        plan.admin = None;
        let running =
            start(plan, &events, 1024, &mut Vec::new(), None, Desk::default()).expect("it starts");
        let address = running.listeners().next().map(|(_, address)| address);
        let proxy = address.and_then(|a| a.parse().ok()).expect("an address");
        let process = running.process().clone();
        Self { process, _running: Mutex::new(running), upstream, proxy }
    }

    /// Sends what the client sends, then reads to the end.
    fn client(&self, input: &Input) {
        let mut stream = TcpStream::connect(self.proxy).expect("the proxy accepts");
        stream.set_nodelay(true).expect("an open socket");
        input.client.play(&mut stream);
        // A proxy that has closed with a reset is gone already.
        let _ = stream.shutdown(Shutdown::Write);
        let until = Instant::now() + PATIENCE;
        let mut part = [0; 16 << 10];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "the connection does not end");
            let _ = stream.set_read_timeout(Some(left));
            match stream.read(&mut part) {
                Ok(0) => return,
                Ok(_) => {}
                Err(e) => {
                    let kind = e.kind();
                    assert_ne!(kind, std::io::ErrorKind::WouldBlock, "the connection hangs");
                    return;
                }
            }
        }
    }

    /// Waits until nothing is held any more.
    fn quiet(&self) {
        let until = Instant::now() + PATIENCE;
        loop {
            let held = held(&self.process);
            if held == [0; 5] {
                return;
            }
            assert!(Instant::now() < until, "still held: {held:?}");
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// Slots of the process, the listener, its connections, the pool and the upstream.
fn held(process: &Process) -> [u32; 5] {
    let snapshot = process.snapshot();
    let (listener, pool) = (&snapshot.listeners[0], &snapshot.pools[0]);
    [
        process.slots.used(),
        listener.slots.used(),
        listener.connections.used(),
        pool.lineage.slots.used(),
        pool.upstreams[0].seat.in_flight(),
    ]
}

/// Short time-outs, so that silence is soon over; nobody is trusted, so that each request gets an
/// id of its own.
fn file(upstream: SocketAddr) -> String {
    format!(
        "listeners:
  - name: http
    bind: \"127.0.0.1:0\"
    trusted_proxies: [192.0.2.1]
    timeouts: {{ read_header: 10ms, read: 10ms, write: 10ms, idle: 10ms, max_header_bytes: 8KiB }}
    limits: {{ max_headers: 50, max_target_bytes: 2048, max_trailer_bytes: 1024, max_body_bytes: 64KiB }}
upstream_pools:
  - name: backend
    upstreams: [{{ url: \"http://{upstream}\" }}]
    connect_timeout: 1s
    response_header_timeout: 10ms
routes:
  - name: all
    pool: backend
    timeouts: {{ total: 100ms }}
    tunnel_idle_timeout: 10ms
workers: 1
access_log: {{ enabled: false }}
"
    )
}
