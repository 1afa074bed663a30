//! `l7rp load`: what it makes is what a server sees, and what it tells is what has happened.

use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use l7rp_testkit::{Call, Gate, Origin, SOON, Signal, Then, Value, eventually, let_pass, reply};
use rustix::process::{Pid, kill_process};

use crate::setup::PROGRAM;

/// What the tool has said.
pub struct Told {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Told {
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|e| panic!("{e}: {}{}", self.out, self.err))
    }
}

/// Begins a load: `line` and the URL.
pub fn begin(line: &str, url: &str) -> Child {
    let words = line.split_whitespace().chain([url]);
    let mut command = Command::new(PROGRAM);
    command.arg("load").args(words).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it runs")
}

pub fn end(child: Child) -> Told {
    let output = child.wait_with_output().expect("it ends");
    let text = |octets| String::from_utf8(octets).expect("UTF-8");
    Told { code: output.status.code(), out: text(output.stdout), err: text(output.stderr) }
}

pub fn load(line: &str, url: &str) -> Told {
    end(begin(line, url))
}

/// A load without a failure, told as JSON.
#[track_caller]
pub fn good(line: &str, url: &str) -> Value {
    let told = load(&format!("--json {line}"), url);
    let json = told.json();
    assert_eq!(told.code, Some(0), "{json:#}{}", told.err);
    assert_eq!(told.err, "");
    assert_eq!(errors(&json), 0, "{json:#}");
    assert_eq!(json["requests"], json["answers"], "{json:#}");
    assert_eq!(in_buckets(&json, 0.0), count(&json["answers"]), "{json:#}");
    json
}

pub fn count(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no count"))
}

pub fn errors(json: &Value) -> u64 {
    json["errors"].as_object().expect("kinds").values().map(count).sum()
}

/// Answers in the buckets that end above so many microseconds.
fn in_buckets(json: &Value, above_us: f64) -> u64 {
    let buckets = json["latency"]["buckets"].as_array().expect("buckets").iter();
    let buckets = buckets.filter(|bucket| us(&bucket["up_to_us"]) > above_us);
    buckets.map(|bucket| count(&bucket["count"])).sum()
}

pub fn us(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no time"))
}

#[test]
fn a_closed_loop_is_seen_by_the_server_as_it_is_told() {
    let origin = Origin::start(reply::name("one"));
    let json = good("--requests 201 -c 4 --threads 2", &format!("{}/x?y=1", origin.url()));
    assert_eq!(origin.requests(), 201);
    assert_eq!((json["answers"].clone(), origin.accepted()), (201.into(), 4));
    assert_eq!(json["statuses"], serde_json::json!({ "200": 201 }));
    assert_eq!((&json["mode"], &json["http"]), (&"closed".into(), &"1.1".into()));
    assert_eq!((&json["connections_opened"], &json["reconnects"]), (&4.into(), &0.into()));
    let first = &origin.seen()[0].message;
    assert_eq!((first.method(), first.target()), ("GET", "/x?y=1"));
    assert_eq!(first.get("host"), Some(origin.address.to_string().as_str()));
    // Octets are those on the wire.
    assert_eq!(count(&json["sent_bytes"]), 201 * first.head.len() as u64);
    assert_eq!(count(&json["received_bytes"]), 201 * reply::ok("one").len() as u64);
    let latency = &json["latency"];
    let order = ["min_us", "p50_us", "p90_us", "p99_us", "p999_us", "max_us"];
    assert!(order.map(|key| us(&latency[key])).is_sorted(), "{latency:#}");
    for between in ["min_us", "mean_us"] {
        assert!(us(&latency[between]) > 0.0 && us(&latency[between]) <= us(&latency["max_us"]));
    }
}

#[test]
fn each_status_is_counted_and_none_is_a_failure() {
    let origin = Origin::start(|call| {
        let status = [200, 200, 404, 503, 204][call.number % 5];
        let length = if status == 204 { "" } else { "Content-Length: 0\r\n" };
        call.send(format!("HTTP/1.1 {status} X\r\n{length}\r\n"));
        Then::Next
    });
    let json = good("--requests 100 -c 1", &origin.url());
    let expected = serde_json::json!({ "200": 40, "204": 20, "404": 20, "503": 20 });
    assert_eq!(json["statuses"], expected);
}

/// Answers at once, but for one time when everybody waits.
fn stalls(at: usize, time: Duration) -> impl Fn(&mut Call<'_>) -> Then + Send + Sync {
    let busy = Mutex::new(());
    move |call| {
        let turn = busy.lock().unwrap_or_else(PoisonError::into_inner);
        if call.number == at {
            let_pass(time);
        }
        drop(turn);
        call.send(reply::ok("x"));
        Then::Next
    }
}

#[test]
fn an_open_loop_shows_a_stall_that_a_closed_loop_hides() {
    const STALL: Duration = Duration::from_secs(1);
    const HALF_US: f64 = 500_000.0;
    let origin = Origin::start(stalls(100, STALL));
    let open = good("--rate 200 --duration 3s -c 4", &origin.url());
    assert_eq!((&open["mode"], &open["requested_rate_per_s"]), (&"open".into(), &200.into()));
    assert_eq!(count(&open["answers"]) + count(&open["never_started"]), 600);
    assert_eq!(origin.requests() as u64, count(&open["answers"]));
    // 200 were due in that second, and half of them had to wait for half of it or longer.
    assert!(us(&open["latency"]["p90_us"]) > HALF_US, "{open:#}");
    assert!(in_buckets(&open, HALF_US) >= 90, "{open:#}");

    let origin = Origin::start(stalls(100, STALL));
    let closed = good("--requests 600 -c 4", &origin.url());
    assert!(us(&closed["latency"]["max_us"]) >= 1_000_000.0, "{closed:#}");
    // Four had to wait, however many would have come.
    assert!(us(&closed["latency"]["p99_us"]) < HALF_US, "{closed:#}");
}

#[test]
fn a_constant_rate_is_kept_by_all_threads_together() {
    let origin = Origin::start(reply::name("x"));
    let json = good("--rate 300 --requests 150 -c 6 --threads 3", &origin.url());
    // The last of them is due after 149 / 300 s.
    assert!(json["duration_s"].as_f64().expect("seconds") >= 149.0 / 300.0, "{json:#}");
    assert_eq!((origin.requests(), &json["never_started"]), (150, &0.into()));
    // Nobody is late who has only waited for a request to be due.
    good("--rate 1 --requests 2 -c 1 --timeout 800ms", &origin.url());
}

#[test]
fn threads_have_equal_parts() {
    let origin = Origin::start(reply::name("x"));
    let json = good("--requests 30 -c 3", &origin.url());
    assert_eq!(3 % count(&json["threads"]), 0, "{json:#}");
    for (line, words) in [
        ("-c 3 --threads 2", ["--concurrency 3", "--threads 1 would do", "a multiple of 2 "]),
        ("-c 40 --http2 --threads 3", ["--concurrency 40, 16 on", "--threads 1", "of 48 "]),
    ] {
        let told = load(line, &origin.url());
        assert_eq!((told.code, told.out.as_str()), (Some(2), ""), "{}", told.err);
        assert!(words.iter().all(|words| told.err.contains(words)), "{}", told.err);
    }
}

#[test]
fn what_cannot_be_started_is_told() {
    let origin = Origin::start(reply::slow("x", Duration::from_millis(250)));
    let told = load("--rate 100 --duration 1s -c 1 --json", &origin.url());
    let json = told.json();
    let (answers, never) = (count(&json["answers"]), count(&json["never_started"]));
    assert_eq!((told.code, answers + never), (Some(0), 100), "{json:#}");
    assert!((1..=5).contains(&answers), "{json:#}");
    // Those that were answered had waited since they were due.
    assert_eq!(in_buckets(&json, 250_000.0), answers);
    let told = load("--rate 100 --duration 300ms -c 1", &origin.url());
    assert!(told.out.contains("were due but never started"), "{}", told.out);
}

/// Answers at once, but what comes first is not answered at all.
fn hangs_once(call: &mut Call<'_>) -> Then {
    if call.number == 0 {
        return reply::hang(call);
    }
    call.send(reply::ok("x"));
    Then::Next
}

#[test]
fn a_request_that_hangs_takes_no_part_of_the_rate() {
    let origin = Origin::start(hangs_once);
    let line = "--json --rate 20 --duration 2s -c 2 --threads 2 --timeout 3s";
    let json = load(line, &origin.url()).json();
    let (answers, never) = (count(&json["answers"]), count(&json["never_started"]));
    assert_eq!((&json["errors"]["timeout"], answers + never), (&1.into(), 39), "{json:#}");
    // The other place was free for most of those that each thread could have had.
    assert!(answers > 30, "{json:#}");
}

#[test]
fn the_rate_of_a_number_of_requests_is_that_until_the_last_answer() {
    let origin = Origin::start(|call| {
        if call.number >= 20 {
            return reply::hang(call);
        }
        call.send(reply::ok("x"));
        Then::Next
    });
    let json = load("--json --requests 24 -c 4 --timeout 2s", &origin.url()).json();
    assert_eq!((&json["answers"], &json["errors"]["timeout"]), (&20.into(), &4.into()));
    let seconds = json["duration_s"].as_f64().expect("seconds");
    assert!(seconds < 2.0, "{json:#}");
    let answers = json["rate_per_s"].as_f64().expect("a rate") * seconds;
    assert!((answers - 20.0).abs() < 0.01, "{json:#}");
}

#[test]
fn what_is_waited_for_at_the_end_does_not_make_the_tool_less_busy() {
    const DRAIN: Duration = Duration::from_secs(3);
    /// The share of its time that the one thread was busy.
    fn busy(line: &str, late: impl Fn(&Call<'_>) -> bool + Send + Sync + 'static) -> f64 {
        let origin = Origin::start(move |call| {
            if late(call) {
                let_pass(DRAIN);
            }
            call.send(reply::ok("x"));
            Then::Next
        });
        let json = good(&format!("-c 4 --threads 1 {line}"), &origin.url());
        let share = |key| json["tool"][key].as_f64().expect("a share");
        share("running_ratio") + share("waiting_ratio")
    }
    let usual = busy("--requests 2000", |_| false);
    // One place is late from the beginning on.
    let one = busy("--requests 2000", |call| call.number == 0);
    // At the cut-off all of them are.
    let begun = OnceLock::new();
    let is_late =
        move |_: &Call<'_>| begun.get_or_init(Instant::now).elapsed() > Duration::from_millis(500);
    let all = busy("--duration 600ms", is_late);
    assert!(one > usual / 2.0 && all > usual / 2.0, "{usual}, {one}, {all}");
}

#[test]
fn what_is_in_flight_at_the_cut_off_is_waited_for() {
    let origin = Origin::start(reply::slow("x", Duration::from_millis(300)));
    for line in ["--duration 1s -c 8", "--duration 1s -c 8 --rate 20"] {
        let before = origin.requests();
        let json = good(line, &origin.url());
        let answers = count(&json["answers"]);
        assert_eq!((origin.requests() - before) as u64, answers, "{json:#}");
        assert!((8..=32).contains(&answers), "{json:#}");
        assert_eq!((&json["interrupted"], &json["cut"]), (&false.into(), &0.into()));
    }
}

#[test]
fn the_warm_up_does_not_count() {
    let origin = Origin::start(reply::slow("x", Duration::from_millis(5)));
    let json = good("--warm-up 200ms --requests 40 -c 4", &origin.url());
    let warm_up = count(&json["warm_up_requests"]);
    assert!(warm_up > 0 && json["answers"] == 40, "{json:#}");
    assert_eq!(origin.requests() as u64, warm_up + 40);
    let sent = count(&json["sent_bytes"]);
    assert_eq!(sent, 40 * origin.last().head.len() as u64);
    // Its answers come when it is over.
    let origin = Origin::start(reply::slow("x", Duration::from_millis(300)));
    let json = good("--warm-up 100ms --requests 4 -c 4", &origin.url());
    let answers = us(&json["rate_per_s"]) * us(&json["duration_s"]);
    assert!((answers - 4.0).abs() < 0.01, "{json:#}");
}

#[test]
fn new_connections_are_new() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok");
        Then::Close
    });
    let json = good("--requests 30 -c 3 --new-connections", &origin.url());
    assert_eq!((origin.accepted(), origin.requests()), (30, 30));
    assert_eq!(json["connections_opened"], 30);
    let seen = origin.seen();
    assert!(seen.iter().all(|seen| seen.message.get("connection") == Some("close")));
    // Nor is one kept that the server would keep.
    let keeps = Origin::start(reply::name("x"));
    good("--requests 10 -c 1 --new-connections", &keeps.url());
    assert_eq!(keeps.accepted(), 10);
}

#[test]
fn a_connection_that_was_closed_while_kept_is_opened_again() {
    let origin = Origin::start(|call| {
        call.send(reply::ok("x"));
        if call.on_connection == 3 { Then::Close } else { Then::Next }
    });
    let json = good("--requests 40 -c 1", &origin.url());
    assert_eq!((origin.requests(), origin.accepted()), (40, 10));
    assert_eq!((&json["connections_opened"], &json["reconnects"]), (&10.into(), &9.into()));
    // One that says so is no surprise.
    let polite = Origin::start(|call| {
        call.send("HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nuntil the end");
        Then::Close
    });
    let json = good("--requests 10 -c 2", &polite.url());
    assert_eq!((&json["connections_opened"], &json["reconnects"]), (&10.into(), &0.into()));
}

#[test]
fn what_comes_unasked_is_no_answer() {
    let origin = Origin::start(|call| {
        call.send(reply::ok("x"));
        // The tool has read the one when the other comes, and waits for its next request.
        let_pass(Duration::from_millis(100));
        call.send("HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n");
        Then::Close
    });
    let json = good("--rate 1 --requests 3 -c 1", &origin.url());
    assert_eq!(json["statuses"], serde_json::json!({ "200": 3 }));
    assert_eq!((&json["connections_opened"], &json["reconnects"]), (&3.into(), &2.into()));
}

#[test]
fn bodies_arrive_whole() {
    for (size, octets) in [("1", 1), ("16KiB", 16 << 10), ("64KiB", 64 << 10), ("300001", 300_001)]
    {
        for chunked in [false, true] {
            let origin = Origin::start(reply::name("x"));
            let flag = if chunked { "--chunked" } else { "" };
            good(&format!("--requests 4 -c 2 --body-size {size} {flag}"), &origin.url());
            assert_eq!(origin.requests(), 4);
            for seen in origin.seen() {
                let message = seen.message;
                assert_eq!((message.method(), message.is_chunked()), ("POST", chunked));
                assert_eq!(message.body.len(), octets);
                let pattern = b"0123456789abcdef".iter().cycle();
                assert!(message.body.iter().zip(pattern).all(|(a, b)| a == b));
            }
        }
    }
}

#[test]
fn the_request_is_as_asked_for() {
    let origin = Origin::start(reply::name("x"));
    let told = Command::new(PROGRAM)
        .args(["load", "--requests", "1", "-c1", "-X", "PATCH", "--header", "Host: b.test"])
        .args(["-H", "X-Two: a b", "-H", "x-two:c", &origin.url()])
        .output();
    assert!(told.expect("it runs").status.success());
    let seen = origin.last();
    assert_eq!((seen.method(), seen.get("host")), ("PATCH", Some("b.test")));
    assert_eq!(seen.all("x-two"), ["a b", "c"]);
    // No body follows an answer to HEAD, whatever it says.
    let head = Origin::start(reply::raw_kept("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"));
    good("--requests 6 -c 2 --method HEAD", &head.url());
    assert_eq!((head.requests(), head.accepted()), (6, 2));
}

#[test]
fn interim_answers_are_not_counted() {
    let interim = "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n";
    let origin = Origin::start(move |call| {
        call.send(interim);
        call.send(format!("{interim}{}", reply::ok("x")));
        Then::Next
    });
    let json = good("--requests 6 -c 2", &origin.url());
    assert_eq!(json["statuses"], serde_json::json!({ "200": 6 }));
}

#[test]
fn answers_of_any_length_and_framing_are_read_to_their_end() {
    let body = "x".repeat(700_000);
    let chunks = format!("{:x}\r\n{body}\r\n5\r\nabcde\r\n0\r\nX-Sum: 1\r\n\r\n", body.len());
    for (answer, accepted) in [
        (format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()), 1),
        (format!("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}"), 1),
        (format!("HTTP/1.0 200 OK\r\n\r\n{body}"), 3),
    ] {
        let octets = answer.len() as u64;
        let origin = Origin::start(move |call| {
            // Cut where it hurts.
            for part in answer.as_bytes().chunks(99_991) {
                call.send(part);
            }
            if accepted == 1 { Then::Next } else { Then::Close }
        });
        let json = good("--requests 3 -c 1", &origin.url());
        assert_eq!((origin.requests(), origin.accepted()), (3, accepted));
        assert_eq!(count(&json["received_bytes"]), 3 * octets);
    }
}

#[test]
fn idle_connections_are_held_beside_the_busy_ones() {
    let origin = Origin::start(|call| {
        call.send(reply::ok("x"));
        // Of those that are held, the first is not kept.
        if call.number == 0 { Then::Close } else { Then::Next }
    });
    let json = good("--requests 50 -c 2 --hold 20", &origin.url());
    assert_eq!((origin.accepted(), origin.requests()), (22, 70));
    assert_eq!(json["held"], serde_json::json!({ "opened": 20, "open": 19 }));
}

pub fn signal(child: &Child) {
    let pid = Pid::from_child(child);
    kill_process(pid, Signal::INT).expect("it runs");
}

#[test]
fn a_signal_ends_the_load_and_not_what_is_in_flight() {
    let gate = Gate::default();
    let origin = Origin::start(reply::held("x", &gate));
    let child = begin("--json --duration 1h -c 3", &origin.url());
    eventually(SOON, || origin.requests() == 3);
    signal(&child);
    gate.open();
    let told = end(child);
    let json = told.json();
    assert_eq!((told.code, &json["interrupted"]), (Some(0), &true.into()), "{json:#}");
    assert_eq!(count(&json["answers"]), origin.requests() as u64);
}

#[test]
fn a_second_signal_ends_that_too() {
    let origin = Origin::start(|call| {
        if call.number > 0 {
            return reply::hang(call);
        }
        call.send(reply::ok("x"));
        Then::Next
    });
    let child = begin("--json --duration 1h --timeout 1h -c 3", &origin.url());
    eventually(SOON, || origin.requests() == 4);
    signal(&child);
    // Two signals that come at once may be one.
    let ended = std::thread::scope(|scope| {
        let pid = Pid::from_child(&child);
        let ended = scope.spawn(|| end(child));
        eventually(SOON, || {
            if !ended.is_finished() {
                // It may have ended by now.
                let _ = kill_process(pid, Signal::INT);
            }
            ended.is_finished()
        });
        ended.join().expect("it ends")
    });
    let json = ended.json();
    assert_eq!((ended.code, &json["cut"], errors(&json)), (Some(1), &3.into(), 0), "{json:#}");
    assert_eq!(json["answers"], 1);
}

#[test]
fn the_text_fits_a_terminal() {
    let origin = Origin::start(reply::name("x"));
    let told = load("--requests 300 -c 4", &origin.url());
    assert_eq!((told.code, told.err.as_str()), (Some(0), ""));
    for line in told.out.lines() {
        assert!(line.is_ascii() && line.len() <= 80 && !line.contains('\u{1b}'), "{line:?}");
    }
    for says in ["closed loop, 4 at once", "300 of 300 requests", "200: 300", "p99.9", "####"] {
        assert!(told.out.contains(says), "{says}: {}", told.out);
    }
}
