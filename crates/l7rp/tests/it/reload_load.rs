//! Two hundred reloads under load, in which everything that can change does: nothing fails,
//! nothing is cut, and nothing is left behind.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use l7rp_testkit::{Client, Origin, Proxy, SOON, Then, eventually, let_pass, own_address, reply};
use rustls::ClientConfig;

use crate::reload::{Over, file, pool, tunnel};
use crate::setup::{assert_counts, start};
use crate::tls_kit::{HOST, Pair, Shaken, shake, tls};
use crate::tls_reload::{Changing, changing};
use crate::tries::assert_at_rest;
use crate::upgrade::{OFFER, echo, echoes};

const RELOADS: usize = 200;
/// After so many, a rest.
const REST: usize = 50;
/// The pace of each client.
const PAUSE: Duration = Duration::from_millis(4);

/// All upstreams, and the addresses of the listeners.
struct Stage {
    origins: [Origin; 3],
    echoing: Origin,
    uploads: Origin,
    broken: Origin,
    stable: SocketAddr,
    moving: [SocketAddr; 2],
    /// Where TLS is spoken, with what, and by whom.
    secure: SocketAddr,
    certificates: Changing,
    believing: Arc<ClientConfig>,
}

impl Stage {
    fn new() -> Self {
        let certificates = changing();
        Self {
            origins: ["a", "b", "c"].map(|name| Origin::start(reply::name(name))),
            echoing: Origin::start(echo),
            uploads: Origin::start(|call| match call.body().map(<[u8]>::len) {
                Ok(length) => {
                    call.send(reply::ok(&length.to_string()));
                    Then::Next
                }
                Err(_) => Then::Close,
            }),
            broken: Origin::start(reply::raw_kept("HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n")),
            stable: own_address(),
            moving: [own_address(), own_address()],
            secure: own_address(),
            believing: Arc::new(certificates.ca.client()),
            certificates,
        }
    }

    /// Where the second listener is in the file with this number.
    fn moving_at(&self, n: usize) -> SocketAddr {
        self.moving[n / 4 % 2]
    }

    /// To whom the certificate is issued that the file with this number names.
    fn issued_to(n: usize) -> &'static str {
        ["one", "two"][n % 2]
    }

    /// The certificate in the file with this number: sometimes another path is named, sometimes
    /// something else is at the same path.
    fn certificate(&self, n: usize) -> &Pair {
        let Changing { served, others, .. } = &self.certificates;
        let [one, two] = others;
        match n % 4 {
            0 | 1 => {
                served.becomes(&others[n % 2]);
                served
            }
            2 => one,
            _ => two,
        }
    }

    /// A connection by TLS.
    #[track_caller]
    fn shake(&self) -> Shaken {
        shake(&self.believing, self.secure, HOST)
    }

    /// The file with this number: it differs in something from each of its neighbours, and what
    /// is not there in every one of them comes and goes.
    fn file(&self, n: usize) -> String {
        let [a, b, c] = &self.origins;
        let sets = [vec![a, b], vec![b, c], vec![c, a], vec![a, b, c]];
        let rules = [", connect_timeout: 5s", ", circuit_breaker: { window_size: 80 }"][n / 3 % 2];
        let selector = ["p2c-ewma", "round-robin", "least-conn"][n % 3];
        let keys = format!("{rules}, selector: {{ algorithm: {selector} }}");
        let never = "circuit_breaker: { consecutive_failures: 1, open_min: 10m, open_max: 10m }";
        let weight = [", max_in_flight: 900", ", max_in_flight: 901"][n % 2];
        let mut pools = vec![
            pool("b", &sets[n % 4], &keys),
            pool("t", &[&self.echoing], ""),
            pool("broken", &[&self.broken], &format!(", {never}{weight}")),
        ];
        let fields = format!("middleware: [{{ headers: {{ add_response: {{ X-N: \"{n}\" }} }} }}]");
        let all = format!("name: r, pool: b, {fields}");
        let mut routes = vec![
            all.as_str(),
            "name: t, path_prefix: /t, pool: t",
            "name: broken, path_prefix: /broken, pool: broken",
        ];
        if n.is_multiple_of(2) {
            pools.push(pool("u", &[&self.uploads], ""));
            routes.push("name: up, path_prefix: /up, pool: u");
            routes.push("name: gone, path_prefix: /gone, pool: t");
        }
        let web = format!("name: web, bind: \"{}\"", self.stable);
        let side = format!("name: side, bind: \"{}\"", self.moving_at(n));
        let certificate = tls(&[self.certificate(n)], "");
        let secure = format!("name: secure, bind: \"{}\", {certificate}", self.secure);
        file(&[&web, &side, &secure], &pools, &routes) + "access_log: { enabled: false }\n"
    }
}

/// Where the second listener is, and whether it is on its way: an odd number is.
#[derive(Default)]
struct Whereabouts(Mutex<(usize, Option<SocketAddr>)>);

impl Whereabouts {
    fn now(&self) -> (usize, SocketAddr) {
        let (step, address) = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (step, address.expect("it is known"))
    }

    /// A reload begins or has ended; after it, the address is this one.
    fn step(&self, address: SocketAddr) {
        let mut now = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *now = (now.0 + 1, Some(address));
    }

    /// A connection to the address that is configured. It may be refused only if it has gone
    /// since it was looked up.
    #[track_caller]
    fn connect(&self) -> Client {
        loop {
            let (step, address) = self.now();
            match TcpStream::connect_timeout(&address, SOON) {
                Ok(stream) => return Client::from(stream),
                Err(e) => {
                    assert_eq!(e.kind(), io::ErrorKind::ConnectionRefused);
                    let is_same = self.now() == (step, address) && step % 2 == 0;
                    assert!(!is_same, "{address} refuses");
                    let_pass(Duration::from_millis(1));
                }
            }
        }
    }
}

/// What all clients share.
struct Load<'a> {
    stage: &'a Stage,
    side: &'a Whereabouts,
    over: &'a AtomicBool,
    answers: &'a AtomicUsize,
}

impl Load<'_> {
    fn goes_on(&self) -> bool {
        let_pass(PAUSE);
        !self.over.load(SeqCst)
    }

    /// Asks once; whether the connection stays.
    #[track_caller]
    fn ask(&self, client: &mut Client) -> bool {
        let answer = client.get("/");
        assert_eq!(answer.status(), 200, "{answer:?}");
        assert!(["a", "b", "c"].contains(&answer.text().as_str()));
        self.answers.fetch_add(1, SeqCst);
        answer.get("connection") != Some("close")
    }

    /// A listener that stays never ends a connection.
    fn keep_asking(&self, mut client: Client) {
        while self.goes_on() {
            assert!(self.ask(&mut client), "a connection to a stable listener is ended");
        }
    }

    fn shake_anew(&self) {
        while self.goes_on() {
            let Shaken { mut client, shown, .. } = self.stage.shake();
            assert!(["one", "two"].contains(&shown.as_str()), "{shown}");
            self.ask(&mut client);
        }
    }

    fn ask_anew(&self) {
        while self.goes_on() {
            self.ask(&mut Client::connect(self.stage.stable));
        }
    }

    /// Stays on one connection to the moving listener until it is told to go.
    fn follow(&self) {
        let mut client = self.side.connect();
        while self.goes_on() {
            if !self.ask(&mut client) {
                client = self.side.connect();
            }
        }
    }

    fn follow_anew(&self) {
        while self.goes_on() {
            self.ask(&mut self.side.connect());
        }
    }

    /// Says something in each of the tunnels in turn.
    fn talk(&self, mut tunnels: Vec<Client>) -> Vec<Client> {
        let mut round = 0;
        while self.goes_on() {
            round += 1;
            for (n, client) in tunnels.iter_mut().enumerate() {
                echoes(client, &format!("{round} {n};"));
            }
        }
        tunnels
    }

    /// One upload that lasts until the end; it has begun when this returns.
    fn upload(&self, mut client: Client) {
        const CHUNK: &str = "4\r\nslow\r\n";
        let mut sent = 0;
        while self.goes_on() {
            client.send(CHUNK);
            sent += 4;
        }
        let answer = client.ask("0\r\n\r\n");
        assert_eq!((answer.status(), answer.text()), (200, sent.to_string()));
    }
}

/// What a process holds: octets and descriptors.
type Held = (u64, usize);

/// What it holds under load, a while after the last reload: workers look for what is not used
/// any more once a second. The least of some samples, for connections come and go.
fn held(proxy: &Proxy) -> Held {
    let_pass(Duration::from_millis(1300));
    let samples = [(); 20].map(|()| {
        let_pass(PAUSE);
        (proxy.resident(), proxy.descriptors())
    });
    samples.into_iter().reduce(|a, b| (a.0.min(b.0), a.1.min(b.1))).expect("one")
}

/// Checks that the last samples are not above those before them, but for noise.
fn assert_flat(samples: &[Held]) {
    let (early, late) = samples.split_at(samples.len() / 2);
    let memory = [early, late].map(|some| some.iter().map(|held| held.0).min().expect("one"));
    assert!(memory[1] < memory[0] + (2 << 20), "memory has grown: {samples:?}");
    let files = [early, late].map(|some| some.iter().map(|held| held.1).min().expect("one"));
    assert!(files[1] <= files[0] + 8, "descriptors have grown: {samples:?}");
}

/// Puts all files in force; what the process held from time to time.
fn reload_all(proxy: &Proxy, stage: &Stage, side: &Whereabouts) -> Vec<Held> {
    let mut samples = Vec::new();
    for n in 1..=RELOADS {
        side.step(stage.moving_at(n - 1));
        let event = proxy.reload(&stage.file(n));
        side.step(stage.moving_at(n));
        assert_eq!((&event["closed"], &event["kept_tunnels"]), (&0.into(), &50.into()), "{event}");
        assert_eq!(proxy.get("/broken").status(), 503, "the breaker is open");
        assert_eq!(stage.shake().shown, Stage::issued_to(n));
        if n.is_multiple_of(REST) {
            samples.push(held(proxy));
        }
    }
    samples
}

/// Tunnels by all ways: on a route that stays, on one that comes and goes, by the listener that
/// moves, and by TLS.
fn tunnels(stage: &Stage) -> Vec<Client> {
    let by = |address, path: &'static str, n| (0..n).map(move |_| tunnel(address, path));
    let stay = by(stage.stable, "/t", 15).chain(by(stage.stable, "/gone", 15));
    let secure = (0..10).map(|_| {
        let mut client = stage.shake().client;
        assert_eq!(client.send(OFFER).head().status(), 101);
        client
    });
    stay.chain(by(stage.moving_at(0), "/t", 10)).chain(secure).collect()
}

#[test]
fn two_hundred_reloads_under_load() {
    let stage = Stage::new();
    let proxy = start(&stage.file(0));
    assert_eq!(proxy.get("/broken").status(), 500);
    eventually(SOON, || proxy.get("/broken").status() == 503);
    let failures = stage.broken.requests();
    let side = Whereabouts::default();
    side.step(stage.moving_at(0));
    side.step(stage.moving_at(0));
    let (over, answers) = (AtomicBool::new(false), AtomicUsize::new(0));
    let load = Load { stage: &stage, side: &side, over: &over, answers: &answers };
    let mut upload = Client::connect(stage.stable);
    upload.send("POST /up HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n");
    eventually(SOON, || stage.uploads.requests() == 1);
    let open = tunnels(&stage);
    assert_counts(&proxy, "proxy_tunnels", &[], 50.0);
    let threads = proxy.threads();
    let (samples, open) = thread::scope(|scope| {
        let load = &load;
        for _ in 0..3 {
            scope.spawn(|| load.keep_asking(Client::connect(stage.stable)));
            scope.spawn(|| load.follow());
        }
        scope.spawn(|| load.keep_asking(stage.shake().client));
        scope.spawn(|| load.shake_anew());
        scope.spawn(|| load.ask_anew());
        scope.spawn(|| load.follow_anew());
        scope.spawn(|| load.upload(upload));
        let talking = scope.spawn(|| load.talk(open));
        let end = Over(&over);
        let samples = reload_all(&proxy, &stage, &side);
        drop(end);
        (samples, talking.join().expect("no tunnel is cut"))
    });
    assert!(answers.load(SeqCst) > 2000, "{answers:?}");
    assert_flat(&samples);
    assert_counts(&proxy, "proxy_config_generation", &[], RELOADS as f64 + 1.0);
    eventually(SOON * 2, || proxy.threads() == threads);
    assert_eq!(stage.broken.requests(), failures);
    assert_counts(&proxy, "proxy_tls_handshake_failures_total", &[], 0.0);
    drop(open);
    assert_counts(&proxy, "proxy_connections", &[], 0.0);
    assert_at_rest(&proxy);
}
