//! What one side does not take, the other side keeps: memory does not grow with it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::{Client, Gate, Origin, Proxy, SOON, Then, eventually, let_pass, reply};

use crate::setup::{assert_counts, get, in_flight, settled};
use crate::tries::{assert_at_rest, retrying};

const MIB: usize = 1 << 20;
/// More than all buffers of the kernel on the way hold.
const ENDLESS: usize = 1 << 30;

/// What the kernel may hold on one connection between two processes.
fn kernel_holds() -> usize {
    let most = |name: &str| -> usize {
        let text = std::fs::read_to_string(format!("/proc/sys/net/ipv4/{name}"));
        let text = text.expect("a kernel that tells its limits");
        text.split_ascii_whitespace().last().and_then(|n| n.parse().ok()).expect("a number")
    };
    most("tcp_rmem") + most("tcp_wmem")
}

/// The most resident memory of all samples, and that at first.
struct Most<'p> {
    proxy: &'p Proxy,
    before: u64,
    since: u64,
}

impl<'p> Most<'p> {
    fn of(proxy: &'p Proxy) -> Self {
        let before = proxy.resident();
        Self { proxy, before, since: before }
    }

    /// Octets more than at first, at the most so far.
    fn grown(&mut self) -> u64 {
        self.since = self.since.max(self.proxy.resident());
        self.since - self.before
    }
}

/// Case `mem-slow-reader-h1`, with fewer clients and without compression.
#[test]
fn mem_slow_reader_h1() {
    const READERS: usize = 24;
    let sent: Arc<Vec<AtomicUsize>> = Arc::new((0..READERS).map(|_| AtomicUsize::new(0)).collect());
    let total = Arc::new(AtomicUsize::new(0));
    let (each, all) = (sent.clone(), total.clone());
    let origin = Origin::start(move |call| {
        let Some(n) = call.request.target().strip_prefix("/endless/") else {
            return reply::name("honest")(call);
        };
        let n: usize = n.parse().unwrap_or_default();
        call.send(format!("HTTP/1.1 200 OK\r\nContent-Length: {ENDLESS}\r\n\r\n"));
        let part = vec![b'x'; 64 << 10];
        while each[n].load(SeqCst) < ENDLESS && call.send(&part) {
            each[n].fetch_add(part.len(), SeqCst);
            all.fetch_add(part.len(), SeqCst);
        }
        Then::Close
    });
    let proxy = retrying(&[&origin], "max_attempts: 3").start();
    assert_eq!(proxy.get("/honest").text(), "honest");
    let mut most = Most::of(&proxy);
    let mut readers: Vec<Client> = (0..READERS)
        .map(|n| {
            let mut client = proxy.client();
            assert_eq!(
                client.send(get("a.test", &format!("/endless/{n}"), "")).head().status(),
                200
            );
            client
        })
        .collect();
    settled(&total);
    let limit = 2 * MIB + 2 * kernel_holds();
    for (n, sent) in sent.iter().enumerate() {
        let sent = sent.load(SeqCst);
        assert!(sent < limit, "the upstream of {n} has sent {sent}, more than {limit}");
    }
    assert!(most.grown() < (READERS * MIB / 2) as u64, "grown by {}", most.grown());
    // Now they read, but slowly; whoever is honest does not notice.
    let mut slowest = Duration::ZERO;
    for _ in 0..8 {
        for client in &mut readers {
            assert!(!client.wire.read_some(64 << 10).expect("more").is_empty());
        }
        let began = Instant::now();
        assert_eq!(proxy.get("/honest").text(), "honest");
        slowest = slowest.max(began.elapsed());
        let_pass(Duration::from_millis(20));
    }
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    assert!(most.grown() < (READERS * MIB / 2) as u64, "grown by {}", most.grown());
    drop(readers);
    assert_at_rest(&proxy);
    let idle = || proxy.metrics().sum("proxy_upstream_connections", &[]);
    eventually(SOON, || origin.open() as f64 == idle());
}

/// Takes requests as slowly as it is told, and tells how much it has taken.
struct Sink {
    taken: Arc<AtomicUsize>,
    began: Arc<AtomicUsize>,
    ended: Arc<AtomicBool>,
    origin: Origin,
}

/// An upstream that reads `part` octets every 50 ms of each request, or only the head and a bit.
fn sink(part: usize) -> Sink {
    let (taken, began) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let ended = Arc::new(AtomicBool::new(false));
    let (count, first, end) = (taken.clone(), began.clone(), ended.clone());
    let origin = Origin::start(move |call| {
        // One octet of the body, for a beginning.
        if call.wire.read_exact(1).is_ok() {
            first.fetch_add(1, SeqCst);
        }
        while !end.load(SeqCst) {
            let_pass(Duration::from_millis(50));
            if part > 0 {
                let Ok(some) = call.wire.read_some(part) else { break };
                count.fetch_add(some.len(), SeqCst);
            }
        }
        Then::Reset
    });
    Sink { taken, began, ended, origin }
}

/// A client that sends as fast as it can until it is stopped; how much it has sent.
fn flood(client: &Client, sent: &Arc<AtomicUsize>, chunked: bool) -> thread::JoinHandle<()> {
    let (mut sender, sent) = (client.wire.twin(), sent.clone());
    thread::spawn(move || {
        let data = "x".repeat(64 << 10);
        let part = if chunked { format!("10000\r\n{data}\r\n") } else { data };
        while sent.load(SeqCst) < ENDLESS && sender.write(part.as_bytes()).is_ok() {
            sent.fetch_add(part.len(), SeqCst);
        }
    })
}

/// Every regular file that a process has open.
fn files_of(proxy: &Proxy) -> Vec<String> {
    let directory = format!("/proc/{}/fd", proxy.pid());
    let entries = std::fs::read_dir(directory).expect("it runs").flatten();
    let links = entries.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    let names = links.map(|link| link.to_string_lossy().into_owned());
    let special = |name: &String| name.starts_with("/dev/") || !name.starts_with('/');
    names.filter(|name| !special(name)).collect()
}

/// Case `mem-slow-upstream-upload`, with fewer clients.
#[track_caller]
fn uploads_wait(part: usize) {
    const CLIENTS: usize = 10;
    let Sink { taken, began, ended, origin } = sink(part);
    let proxy = retrying(&[&origin], "retry_methods: [GET, PUT]").start();
    let mut most = Most::of(&proxy);
    let files = files_of(&proxy);
    let sent = Arc::new(AtomicUsize::new(0));
    let mut clients = Vec::new();
    let mut senders = Vec::new();
    for n in 0..CLIENTS {
        let chunked = n % 2 == 1;
        let framing = if chunked {
            "Transfer-Encoding: chunked".to_owned()
        } else {
            format!("Content-Length: {ENDLESS}")
        };
        let mut client = proxy.client();
        let asked = Instant::now();
        client.send(format!("PUT /{n} HTTP/1.1\r\nHost: a.test\r\n{framing}\r\n\r\n"));
        client.send(if chunked { "1\r\nx\r\n" } else { "x" });
        // It is there long before the rest.
        eventually(SOON, || began.load(SeqCst) == n + 1);
        assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
        senders.push(flood(&client, &sent, chunked));
        clients.push(client);
    }
    let until = Instant::now() + Duration::from_millis(1500);
    // A process that begins to work needs some; the rest is a buffer for each.
    let limit = (6 * MIB + CLIENTS * MIB) as u64;
    while Instant::now() < until {
        let ahead = sent.load(SeqCst).saturating_sub(taken.load(SeqCst));
        let most_ahead = CLIENTS * (4 * MIB + 2 * kernel_holds());
        assert!(ahead < most_ahead, "the clients are {ahead} ahead, more than {most_ahead}");
        assert!(most.grown() < limit, "grown by {}", most.grown());
        let_pass(Duration::from_millis(20));
    }
    assert!(sent.load(SeqCst) < CLIENTS * ENDLESS);
    assert_eq!(in_flight(&proxy), CLIENTS as f64);
    assert_eq!(files_of(&proxy), files, "nothing is kept in a file");
    let entries = std::fs::read_dir(proxy.directory()).expect("a directory").count();
    assert_eq!(entries, 1, "nothing but the configuration");
    for client in &clients {
        let _ = client.wire.shut();
    }
    ended.store(true, SeqCst);
    for sender in senders {
        sender.join().expect("it ends");
    }
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
    assert_at_rest(&proxy);
}

#[test]
fn mem_slow_upstream_upload() {
    uploads_wait(64 << 10);
}

#[test]
fn mem_silent_upstream_upload() {
    uploads_wait(0);
}

/// A body that is kept for another try costs what it is and what it goes through, and that is
/// free again afterwards: the next ones need no more.
#[test]
fn bodies_that_are_kept_are_bounded_and_let_go() {
    const CLIENTS: usize = 60;
    const KEPT: usize = 60 << 10;
    const ROUNDS: usize = 20;
    let gates: [Gate; ROUNDS] = Default::default();
    let of_round = gates.clone();
    let whole = Arc::new(AtomicUsize::new(0));
    let came = whole.clone();
    let origin = Origin::start(move |call| {
        let round: usize = call.request.target()[1..].parse().unwrap_or_default();
        if call.body().is_ok_and(|body| body.len() == KEPT) {
            came.fetch_add(1, SeqCst);
        }
        reply::held("x", &of_round[round])(call)
    });
    let proxy = retrying(&[&origin], "retry_methods: [PUT]").start();
    let body = "b".repeat(KEPT);
    let mut most = Most::of(&proxy);
    let mut grown = Vec::new();
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| proxy.client()).collect();
    for (round, gate) in gates.iter().enumerate() {
        for client in &mut clients {
            client.send(format!(
                "PUT /{round} HTTP/1.1\r\nHost: a.test\r\nContent-Length: {KEPT}\r\n\r\n{body}"
            ));
        }
        eventually(SOON, || whole.load(SeqCst) == CLIENTS * (round + 1));
        assert_eq!(in_flight(&proxy), CLIENTS as f64);
        grown.push(most.grown());
        gate.open();
        for client in &mut clients {
            assert_eq!(client.response().text(), "x");
        }
        assert_at_rest(&proxy);
    }
    // The body, a buffer for long ones, two for heads, and what an allocator rounds them up to
    // and has not given back yet: as for any upload.
    let limit = (6 * MIB + CLIENTS * MIB) as u64;
    let [first, .., last] = grown[..] else { panic!("rounds") };
    assert!(last < limit, "grown by {grown:?}, more than {limit}");
    // Whatever were kept for good would be kept nineteen times more. What is at hand at once
    // differs by chance, and so does the most of it.
    assert!(last - first < (8 * CLIENTS * KEPT) as u64, "grown by {grown:?}");
}

/// What frames a body is kept with it, and counts: content of an octet may be a kilobyte.
#[test]
fn what_frames_a_body_that_is_kept_is_bounded_too() {
    const CHUNKS: usize = 24_000;
    let gate = Gate::default();
    let origin = Origin::start(reply::held("x", &gate));
    let proxy = retrying(&[&origin], "retry_methods: [PUT]").start();
    assert_eq!(in_flight(&proxy), 0.0);
    let mut most = Most::of(&proxy);
    let mut client = proxy.client();
    client.send("PUT / HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n");
    let part = format!("1;x={}\r\nb\r\n", "e".repeat(1000)).repeat(24);
    for _ in 0..CHUNKS / 24 {
        client.send(&part);
    }
    client.send("0\r\n\r\n");
    eventually(SOON, || origin.seen().iter().any(|seen| seen.message.complete));
    assert_eq!(origin.last().body.len(), CHUNKS);
    let grown = most.grown();
    gate.open();
    assert_eq!(client.response().text(), "x");
    assert!(grown < 8 * MIB as u64, "grown by {grown}");
    assert_at_rest(&proxy);
}
