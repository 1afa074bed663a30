//! The backend over raw sockets, as a proxy meets it.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::*;

/// Longer than anything takes, shorter than anybody's patience.
const PATIENCE: Duration = Duration::from_secs(20);
/// Long enough to show that nothing comes.
const SILENCE: Duration = Duration::from_millis(200);

struct Client(BufReader<TcpStream>);

#[derive(Debug, PartialEq, Eq)]
struct Reply {
    status: u16,
    fields: Vec<(String, String)>,
    body: Vec<u8>,
}

impl Reply {
    fn field(&self, name: &str) -> Option<&str> {
        let field = self.fields.iter().find(|(n, _)| n.eq_ignore_ascii_case(name))?;
        Some(&field.1)
    }

    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

impl Client {
    fn of(backend: &Backend) -> Self {
        let stream = TcpStream::connect(backend.addr()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self(BufReader::new(stream))
    }

    fn send(&mut self, octets: impl AsRef<[u8]>) {
        self.0.get_mut().write_all(octets.as_ref()).unwrap();
    }

    fn get(&mut self, path: &str) -> Reply {
        self.send(format!("GET {path} HTTP/1.1\r\nHost: t\r\n\r\n"));
        self.reply()
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.strip_suffix("\r\n").unwrap_or_else(|| panic!("a cut line: {line:?}")).to_owned()
    }

    fn head(&mut self) -> Reply {
        let line = self.line();
        let status = line.strip_prefix("HTTP/1.1 ").unwrap()[..3].parse().unwrap();
        let mut fields = Vec::new();
        loop {
            let line = self.line();
            if line.is_empty() {
                return Reply { status, fields, body: Vec::new() };
            }
            let (name, value) = line.split_once(": ").unwrap();
            fields.push((name.to_owned(), value.to_owned()));
        }
    }

    fn reply(&mut self) -> Reply {
        let mut reply = self.head();
        if reply.field("Transfer-Encoding").is_some() {
            loop {
                let size = usize::from_str_radix(&self.line(), 16).unwrap();
                let at = reply.body.len();
                reply.body.resize(at + size, 0);
                self.0.read_exact(&mut reply.body[at..]).unwrap();
                assert_eq!(self.line(), "");
                if size == 0 {
                    return reply;
                }
            }
        }
        let length = reply.field("Content-Length").map_or(0, |n| n.parse().unwrap());
        reply.body.resize(length, 0);
        self.0.read_exact(&mut reply.body).unwrap();
        reply
    }

    /// All until the backend closes.
    fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        self.0.read_to_end(&mut rest).unwrap();
        rest
    }
}

fn backend(change: impl FnOnce(&mut Options)) -> Backend {
    let mut options = Options::new("one");
    change(&mut options);
    start(options).unwrap()
}

fn faulty(faults: Faults) -> Backend {
    backend(|options| options.faults = faults)
}

#[test]
fn requests_are_counted_over_one_connection() {
    let backend = backend(|_| {});
    let mut client = Client::of(&backend);
    for n in 1..=3 {
        let reply = client.get("/anything");
        assert_eq!((reply.status, reply.text()), (200, format!("one request={n}\n").as_str()));
        assert_eq!(reply.field("Content-Type"), Some("text/plain; charset=utf-8"));
        assert_eq!(reply.field("X-Backend"), Some("one"));
        assert_eq!(reply.field("Connection"), None);
    }
    assert_eq!(backend.requests(), 3);
}

#[test]
fn the_health_check_is_not_counted() {
    let backend = backend(|options| options.fail_every = 1);
    let mut client = Client::of(&backend);
    let reply = client.get("/healthz");
    assert_eq!((reply.status, reply.field("Content-Length")), (204, None));
    assert_eq!(backend.requests(), 0);
    assert_eq!(client.get("/").status, 503);
}

#[test]
fn every_nth_request_fails() {
    let backend = backend(|options| options.fail_every = 3);
    let mut client = Client::of(&backend);
    let statuses: Vec<u16> = (0..6).map(|_| client.get("/").status).collect();
    assert_eq!(statuses, [200, 200, 503, 200, 200, 503]);
    client.get("/");
    client.get("/");
    assert_eq!(client.get("/").text(), "simulated failure\n");
}

#[test]
fn pipelined_requests_are_answered_in_order() {
    let backend = backend(|_| {});
    let mut client = Client::of(&backend);
    let request = "POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\n\r\nhello";
    client.send(request.repeat(50));
    for n in 1..=50 {
        assert_eq!(client.reply().text(), format!("one request={n}\n"));
    }
}

#[test]
fn a_request_cut_at_any_octet_is_understood() {
    let backend = backend(|_| {});
    let request = "PUT /upload HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n\
                   3\r\nabc\r\n0\r\nX: y\r\n\r\n";
    let mut client = Client::of(&backend);
    for cut in 1..request.len() {
        client.send(&request[..cut]);
        client.send(&request[cut..]);
        assert_eq!(client.reply().text(), "body=3\n", "cut at {cut}");
    }
}

#[test]
fn bodies_of_requests_are_read_and_measured() {
    let backend = backend(|_| {});
    let mut client = Client::of(&backend);
    client.send("POST /upload HTTP/1.1\r\nHost: t\r\nContent-Length: 3000000\r\n\r\n");
    client.send(vec![b'x'; 3_000_000]);
    assert_eq!(client.reply().text(), "body=3000000\n");

    client.send("POST /upload HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n");
    for _ in 0..100 {
        client.send("2710\r\n");
        client.send(vec![b'y'; 10_000]);
        client.send("\r\n");
    }
    client.send("0\r\n\r\n");
    assert_eq!(client.reply().text(), "body=1000000\n");
}

#[test]
fn a_client_may_ask_before_it_sends_a_body() {
    let backend = backend(|_| {});
    let mut client = Client::of(&backend);
    client.send(
        "POST /upload HTTP/1.1\r\nHost: t\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n",
    );
    assert_eq!(client.head().status, 100);
    client.send("ok");
    assert_eq!(client.reply().text(), "body=2\n");
}

#[test]
fn an_answer_to_head_has_no_body() {
    let backend = backend(|_| {});
    let mut client = Client::of(&backend);
    for (path, length) in [("/", Some("14")), ("/bytes?n=1GiB", Some("1073741824"))] {
        client.send(format!("HEAD {path} HTTP/1.1\r\nHost: t\r\n\r\n"));
        let head = client.head();
        assert_eq!((head.status, head.field("Content-Length")), (200, length), "{path}");
    }
    client.send("HEAD /chunked?n=5 HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n");
    assert_eq!(client.head().field("Transfer-Encoding"), Some("chunked"));
    assert_eq!(client.rest(), b"");
}

#[test]
fn http_1_0_is_closed_unless_asked() {
    let backend = backend(|_| {});
    let mut client = Client::of(&backend);
    client.send("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    assert_eq!(client.reply().field("Connection"), Some("keep-alive"));
    client.send("GET / HTTP/1.0\r\n\r\n");
    assert_eq!(client.reply().field("Connection"), Some("close"));
    assert_eq!(client.rest(), b"");

    let mut client = Client::of(&backend);
    client.send("GET /chunked?n=20&chunk=3 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
    let head = client.head();
    assert_eq!((head.field("Transfer-Encoding"), head.field("Connection")), (None, Some("close")));
    assert_eq!(client.rest(), b"0123456789abcdef0123");
}

#[test]
fn what_is_no_request_is_refused_and_closed() {
    let backend = backend(|_| {});
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n", 400),
        ("GET / HTTP/1.1\nHost: t\n\n", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx", 400),
        ("POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\nx\r\n", 400),
        (&format!("GET / HTTP/1.1\r\nHost: t\r\nX: {}", "x".repeat(200_000)), 431),
    ] {
        let mut client = Client::of(&backend);
        client.send(request);
        client.send("GET / HTTP/1.1\r\nHost: smuggled\r\n\r\n");
        assert_eq!(client.reply().status, status, "{}", &request[..18]);
        assert_eq!(client.rest(), b"", "{}", &request[..18]);
    }
}

#[test]
fn echo_shows_the_request() {
    let backend = backend(|_| {});
    let mut client = Client::of(&backend);
    client.send(
        "PATCH /echo?a=1 HTTP/1.1\r\nhost: t\r\nX-A:  b c \r\nX-a: d\r\n\
         Content-Length: 4\r\n\r\n\0\r\n\r",
    );
    assert_eq!(
        client.reply().text(),
        "PATCH /echo?a=1 HTTP/1.1\nhost: t\nX-A: b c\nX-a: d\nContent-Length: 4\n\nbody=4\n"
    );
}

#[test]
fn generated_bodies_have_their_size_and_pattern() {
    let backend = backend(|_| {});
    let mut client = Client::of(&backend);
    for path in
        ["/bytes?n=3000001", "/chunked?n=3000001&chunk=7KiB", "/chunked?n=3000001&chunk=1MiB"]
    {
        let reply = client.get(path);
        assert_eq!(reply.body.len(), 3_000_001, "{path}");
        let is_pattern =
            reply.body.iter().enumerate().all(|(i, &b)| b == b"0123456789abcdef"[i % 16]);
        assert!(is_pattern, "{path}");
    }
    assert_eq!(client.get("/bytes?n=0").body, b"");
    assert_eq!(client.get("/chunked?n=0").body, b"");
    assert_eq!(client.get("/bytes?n=much").status, 400);
    assert_eq!(client.get("/chunked?n=1&chunk=0").status, 400);
}

#[test]
fn a_body_larger_than_memory_can_be_begun() {
    let backend = backend(|_| {});
    let mut client = Client::of(&backend);
    client.send("GET /bytes?n=100000GiB HTTP/1.1\r\nHost: t\r\n\r\n");
    assert_eq!(client.head().field("Content-Length"), Some("107374182400000"));
    let mut some = vec![0; 1 << 20];
    client.0.read_exact(&mut some).unwrap();
    drop(client);
    // And it does not keep the backend from the others.
    assert_eq!(Client::of(&backend).get("/").status, 200);
}

#[test]
fn statuses_on_demand() {
    let backend = backend(|_| {});
    let mut client = Client::of(&backend);
    for code in [200, 204, 205, 304, 404, 503, 599] {
        assert_eq!(client.get(&format!("/status?code={code}")).status, code);
    }
    assert_eq!(client.get("/status?code=101").status, 400);
}

#[test]
fn slow_on_demand_does_not_hold_up_others() {
    let backend = backend(|_| {});
    let mut slow = Client::of(&backend);
    slow.send("GET /slow?ms=3600000 HTTP/1.1\r\nHost: t\r\n\r\n");
    assert_eq!(Client::of(&backend).get("/slow?ms=1").text(), "waited 1 ms\n");
    assert_nothing_comes(&mut slow);
}

fn assert_nothing_comes(client: &mut Client) {
    client.0.get_ref().set_read_timeout(Some(SILENCE)).unwrap();
    let error = client.0.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WouldBlock);
}

#[test]
fn fault_hang() {
    let backend = faulty(Faults { every: 2, ending: Ending::Hang, ..Faults::default() });
    let mut client = Client::of(&backend);
    assert_eq!(client.get("/").status, 200);
    client.send("GET / HTTP/1.1\r\nHost: t\r\n\r\n");
    assert_nothing_comes(&mut client);
    assert_eq!(Client::of(&backend).get("/healthz").status, 204);
}

#[test]
fn fault_close() {
    let backend = faulty(Faults { ending: Ending::Close, ..Faults::default() });
    let mut client = Client::of(&backend);
    assert_eq!(client.get("/healthz").status, 204);
    client.send("POST / HTTP/1.1\r\nHost: t\r\nContent-Length: 3\r\n\r\nabc");
    assert_eq!(client.rest(), b"");
}

#[test]
fn fault_drop_mid() {
    let backend = faulty(Faults { ending: Ending::DropMid, ..Faults::default() });
    let mut client = Client::of(&backend);
    client.send("GET /bytes?n=100000 HTTP/1.1\r\nHost: t\r\n\r\n");
    assert_eq!(client.head().field("Content-Length"), Some("100000"));
    assert_eq!(client.rest().len(), 50_000);

    let mut client = Client::of(&backend);
    client.send("GET /chunked?n=1000&chunk=10 HTTP/1.1\r\nHost: t\r\n\r\n");
    assert_eq!(client.head().field("Transfer-Encoding"), Some("chunked"));
    let rest = client.rest();
    assert!(!rest.is_empty() && !rest.ends_with(b"0\r\n\r\n"), "{}", rest.escape_ascii());
}

#[test]
fn fault_slow() {
    let slow = Duration::from_millis(150);
    let backend = faulty(Faults { slow, ..Faults::default() });
    let mut client = Client::of(&backend);
    client.send("GET / HTTP/1.1\r\nHost: t\r\n\r\n");
    client.0.get_ref().set_read_timeout(Some(slow / 3)).unwrap();
    let early = client.0.fill_buf().map(<[u8]>::len);
    assert_eq!(early.unwrap_err().kind(), ErrorKind::WouldBlock);
    client.0.get_ref().set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(client.reply().status, 200);
}

#[test]
fn fault_drip() {
    let drip = Duration::from_millis(5);
    let backend = faulty(Faults { drip, ..Faults::default() });
    let mut client = Client::of(&backend);
    client.send("GET / HTTP/1.1\r\nHost: t\r\n\r\n");
    let head = client.head();
    let length: usize = head.field("Content-Length").unwrap().parse().unwrap();
    let mut reads = 0;
    let mut body = Vec::new();
    while body.len() < length {
        let piece = client.0.fill_buf().unwrap().to_vec();
        client.0.consume(piece.len());
        body.extend(piece);
        reads += 1;
    }
    assert_eq!(body, b"one request=1\n");
    // A busy machine may bring two octets together, not all of them.
    assert!(reads > 3, "{reads} reads");
}

#[test]
fn fault_status() {
    let backend = faulty(Faults { every: 2, status: Some(429), ..Faults::default() });
    let mut client = Client::of(&backend);
    let statuses = ["/", "/", "/bytes?n=3", "/bytes?n=3"].map(|path| client.get(path).status);
    assert_eq!(statuses, [200, 429, 200, 429]);
}

#[test]
fn fault_flap() {
    let flap = Flap { up: Duration::ZERO, down: Duration::from_secs(1) };
    let backend = faulty(Faults { flap: Some(flap), ..Faults::default() });
    let mut client = Client::of(&backend);
    assert_eq!((client.get("/healthz").status, client.get("/").status), (503, 503));
}

#[test]
fn an_address_in_use_is_told() {
    let first = backend(|_| {});
    let options = Options { listen: first.addr(), ..Options::new("two") };
    assert_eq!(start(options).unwrap_err().kind(), ErrorKind::AddrInUse);
}

#[test]
fn dropping_ends_it_and_frees_the_address() {
    let first = backend(|_| {});
    let address = first.addr();
    let mut client = Client::of(&first);
    client.get("/");
    drop(first);
    assert_eq!(client.rest(), b"");
    let again = start(Options { listen: address, ..Options::new("two") }).unwrap();
    assert_eq!(again.addr(), address);
}
