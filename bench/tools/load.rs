//! Two kinds of HTTP/1.1 load that wrk cannot make.
//!
//!   load rate ADDR PATH PER_SECOND SECONDS CONNECTIONS
//!       Open loop: request k is due at start + k / rate, whether or not earlier ones are answered. One that finds
//!       every connection busy waits in line, and its wait counts: the latency runs from the time it was due.
//!       Prints one JSON line with counts and percentiles in microseconds.
//!
//!   load hold ADDR PATH CONNECTIONS
//!       Opens the connections (one request each), prints "ready N", holds them idle until standard input closes,
//!       then prints "alive N": how many the other side kept.
//!
//! Build: rustc -O load.rs

#[allow(dead_code)]
mod poll;

use poll::{Io, Poll, READ};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

/// How much of the answer in flight is still to come.
enum Answer {
    Head(Vec<u8>),
    Body(usize),
}

struct Conn {
    stream: TcpStream,
    /// When the request in flight was due; `None` while idle.
    due: Option<Instant>,
    answer: Answer,
}

fn open(addr: &str) -> io::Result<Conn> {
    let stream = TcpStream::connect(addr)?;
    stream.set_nodelay(true)?;
    stream.set_nonblocking(true)?;
    Ok(Conn { stream, due: None, answer: Answer::Head(Vec::new()) })
}

/// Status code and body length of a complete head, with the head's own length.
fn parse(data: &[u8]) -> Option<(usize, u16, usize)> {
    let len = data.windows(4).position(|w| w == b"\r\n\r\n")? + 4;
    let text = std::str::from_utf8(&data[..len]).ok()?;
    let status = text.split(' ').nth(1)?.parse().ok()?;
    let size = text
        .lines()
        .filter_map(|l| l.split_once(':'))
        .find(|(n, _)| n.eq_ignore_ascii_case("content-length"));
    Some((len, status, size.and_then(|(_, v)| v.trim().parse().ok()).unwrap_or(0)))
}

enum Step {
    More,
    Complete(bool),
    Lost,
}

impl Conn {
    /// Reads once; tells whether the answer is complete, and whether its status was 200.
    fn read(&mut self, room: &mut [u8]) -> Step {
        let n = match poll::read(self.stream.as_raw_fd(), room) {
            Io::Done(n) => n,
            Io::Wait => return Step::More,
            Io::Closed => return Step::Lost,
        };
        match &mut self.answer {
            Answer::Body(left) => {
                *left = left.saturating_sub(n);
                if *left > 0 {
                    return Step::More;
                }
                self.answer = Answer::Head(Vec::new());
                Step::Complete(true)
            }
            Answer::Head(got) => {
                got.extend_from_slice(&room[..n]);
                let Some((head, status, size)) = parse(got) else { return Step::More };
                let left = (head + size).saturating_sub(got.len());
                self.answer = if left > 0 && status == 200 {
                    Answer::Body(left)
                } else {
                    Answer::Head(Vec::new())
                };
                if left > 0 && status == 200 { Step::More } else { Step::Complete(status == 200) }
            }
        }
    }
}

fn request(addr: &str, path: &str) -> Vec<u8> {
    format!("GET {path} HTTP/1.1\r\nHost: {addr}\r\n\r\n").into_bytes()
}

/// One open-loop run.
struct Run<'a> {
    addr: &'a str,
    request: Vec<u8>,
    poll: Poll,
    conns: Vec<Conn>,
    idle: Vec<usize>,
    waiting: VecDeque<Instant>,
    latencies: Vec<u64>,
    errors: u64,
}

impl Run<'_> {
    /// Gives waiting requests to idle connections.
    fn dispatch(&mut self) {
        while let (Some(&due), Some(&i)) = (self.waiting.front(), self.idle.last()) {
            self.waiting.pop_front();
            self.idle.pop();
            self.conns[i].due = Some(due);
            match poll::write(self.conns[i].stream.as_raw_fd(), &self.request) {
                Io::Done(n) if n == self.request.len() => {}
                _ => self.replace(i),
            }
        }
    }

    /// Counts an error and opens a new connection in place `i`.
    fn replace(&mut self, i: usize) {
        self.errors += 1;
        self.poll.remove(self.conns[i].stream.as_raw_fd());
        if let Ok(conn) = open(self.addr) {
            self.conns[i] = conn;
            self.poll.add(self.conns[i].stream.as_raw_fd(), READ, i as u64);
            self.idle.push(i);
        }
    }

    fn answers(&mut self, limit: Duration, room: &mut [u8]) {
        for e in 0..self.poll.wait(Some(limit)) {
            let i = self.poll.event(e).1 as usize;
            match self.conns[i].read(room) {
                Step::More => {}
                Step::Lost => {
                    let busy = self.conns[i].due.is_some();
                    self.replace(i);
                    if !busy {
                        self.idle.retain(|&k| k != i);
                        self.idle.push(i);
                    }
                }
                Step::Complete(good) => {
                    if let Some(due) = self.conns[i].due.take() {
                        if good {
                            self.latencies.push(due.elapsed().as_nanos() as u64);
                        } else {
                            self.errors += 1;
                        }
                        self.idle.push(i);
                    }
                }
            }
        }
    }
}

fn rate(
    addr: &str,
    path: &str,
    per_second: f64,
    seconds: f64,
    connections: usize,
) -> io::Result<()> {
    let mut run = Run {
        addr,
        request: request(addr, path),
        poll: Poll::new()?,
        conns: Vec::new(),
        idle: Vec::new(),
        waiting: VecDeque::new(),
        latencies: Vec::new(),
        errors: 0,
    };
    for i in 0..connections {
        run.conns.push(open(addr)?);
        run.poll.add(run.conns[i].stream.as_raw_fd(), READ, i as u64);
        run.idle.push(i);
    }
    let mut room = vec![0u8; 256 * 1024];
    let total = (per_second * seconds) as u64;
    let start = Instant::now();
    let due_at = |k: u64| start + Duration::from_secs_f64(k as f64 / per_second);
    let give_up = start + Duration::from_secs_f64(seconds + 2.0);
    let mut issued = 0;
    while issued < total || run.latencies.len() as u64 + run.errors < total {
        let now = Instant::now();
        if now > give_up {
            break;
        }
        while issued < total && due_at(issued) <= now {
            run.waiting.push_back(due_at(issued));
            issued += 1;
        }
        run.dispatch();
        let next = due_at(issued).saturating_duration_since(Instant::now());
        run.answers(if issued < total { next } else { Duration::from_millis(50) }, &mut room);
    }
    let unanswered = total.saturating_sub(run.latencies.len() as u64 + run.errors);
    let took = start.elapsed().as_secs_f64();
    run.latencies.sort_unstable();
    let last = run.latencies.len().saturating_sub(1);
    let at = |q: f64| {
        let place = (run.latencies.len() as f64 * q) as usize;
        run.latencies.get(place.min(last)).map_or(0.0, |&nanos| nanos as f64 / 1e3)
    };
    println!(
        "{{\"planned\": {total}, \"answered\": {}, \"errors\": {}, \"unanswered\": {unanswered}, \
         \"seconds\": {took:.3}, \"p50\": {:.1}, \"p99\": {:.1}, \"p999\": {:.1}, \"max\": {:.1}}}",
        run.latencies.len(),
        run.errors,
        at(0.5),
        at(0.99),
        at(0.999),
        at(1.0)
    );
    Ok(())
}

fn hold(addr: &str, path: &str, connections: usize) -> io::Result<()> {
    let text = request(addr, path);
    let mut room = vec![0u8; 64 * 1024];
    let mut held = Vec::new();
    for _ in 0..connections {
        let mut stream = TcpStream::connect(addr)?;
        stream.write_all(&text)?;
        let mut got = Vec::new();
        loop {
            let n = stream.read(&mut room)?;
            got.extend_from_slice(&room[..n]);
            if n == 0 || parse(&got).is_some_and(|(head, _, size)| got.len() >= head + size) {
                break;
            }
        }
        stream.set_nonblocking(true)?;
        held.push(stream);
    }
    println!("ready {}", held.len());
    io::stdout().flush()?;
    io::stdin().read_to_end(&mut Vec::new())?;
    let alive =
        held.iter().filter(|s| matches!(poll::read(s.as_raw_fd(), &mut room), Io::Wait)).count();
    println!("alive {alive}");
    Ok(())
}

fn main() -> io::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let number = |s: &str| s.parse::<f64>().expect("a number");
    match words[..] {
        ["rate", addr, path, per_second, seconds, conns] => {
            rate(addr, path, number(per_second), number(seconds), number(conns) as usize)
        }
        ["hold", addr, path, conns] => hold(addr, path, number(conns) as usize),
        _ => {
            eprintln!(
                "usage: load rate ADDR PATH PER_SECOND SECONDS CONNECTIONS | load hold ADDR PATH CONNECTIONS"
            );
            std::process::exit(2)
        }
    }
}
