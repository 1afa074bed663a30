//! The program as a script meets it: exit codes and what is printed where.

#![expect(clippy::expect_used, reason = "a test that cannot go on has failed")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

fn program(line: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_l7rp"));
    command.args(line.split_whitespace()).stdin(Stdio::null());
    command
}

fn output(line: &str) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = program(line).output().expect("it runs");
    let text = |octets| String::from_utf8(octets).expect("UTF-8");
    (status.code(), text(stdout), text(stderr))
}

struct File(#[expect(dead_code, reason = "removed when dropped")] tempfile::TempDir, PathBuf);

fn file(text: &str) -> File {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("config.yaml");
    std::fs::write(&path, text).expect("written");
    File(folder, path)
}

const GOOD: &str = "
listeners: [{ name: http, bind: '127.0.0.1:8080' }]
upstream_pools:
  - { name: a, upstreams: [{ url: 'http://127.0.0.1:9001' }] }
  - { name: b, upstreams: [{ url: 'http://127.0.0.1:9002' }] }
routes:
  - { name: one, host: one.test, pool: a }
  - { name: two, host: two.test, pool: a }
  - { name: three, host: three.test, pool: b }
";

#[test]
fn a_good_file_is_checked_in_one_line() {
    let file = file(GOOD);
    let path = file.1.display();
    for line in [
        format!("--check --config {path}"),
        format!("-check -config={path}"),
        format!("--check --no-files --config {path}"),
        format!("check {path}"),
        format!("check --config {path}"),
    ] {
        let (code, out, err) = output(&line);
        assert_eq!(code, Some(0), "{line}");
        assert_eq!(out, "config OK: 1 listener(s), 2 pool(s), 3 route(s)\n", "{line}");
        assert_eq!(err, "", "{line}");
    }
}

#[test]
fn certificates_that_are_elsewhere_can_be_left_out() {
    let tls = "tls: { certs: [{ cert: none.crt, key: none.key, hosts: [a.test] }] }";
    let file = file(&GOOD.replace("8080' }", &format!("8080', {tls} }}")));
    let path = file.1.display();
    assert_eq!(output(&format!("--check --config {path}")).0, Some(2));
    let (code, out, err) = output(&format!("--check --no-files --config {path}"));
    assert_eq!((code, out.starts_with("config OK: 1 listener(s)")), (Some(0), true), "{err}");
}

#[test]
fn what_cannot_be_meant_is_told_if_asked_for() {
    let both = GOOD.replace("pool: b", "pool: a").replace("9001'", "9001', backup: true");
    let files = [
        GOOD,
        &GOOD.replace("pool: b", "pool: c"),
        &GOOD.replace("9002'", "9002', weight: 2"),
        &both,
    ];
    let files = files.map(file);
    let [good, bad, weight, both] = files.each_ref().map(|file| file.1.display().to_string());
    let ok = "config OK: 1 listener(s), 2 pool(s), 3 route(s)\n";
    let pointless = "`weight` does nothing: the algorithm is `p2c-ewma` [unused-weight]";
    let help = "it is for `weighted-rr`, `consistent-hash-bounded` and `ip-hash`";
    let unused = "warning: no route uses the pool `b`";
    let alone = "all upstreams of the pool `a` stand by, and for nobody [backups-only]";
    for (path, code, out, says) in [
        (&good, 0, ok, &[][..]),
        (&weight, 4, ok, &["warning: ", pointless, "config.yaml:5:68", help]),
        (&both, 4, ok, &[unused, alone]),
        (&bad, 2, "", &["error: "]),
    ] {
        for line in [
            format!("check --lint {path}"),
            format!("--check --lint --config {path}"),
            format!("check -lint --no-files {path}"),
        ] {
            let (was, printed, told) = output(&line);
            assert_eq!((was, printed.as_str()), (Some(code), out), "{line}: {told}");
            assert!(says.iter().all(|says| told.contains(says)), "{line}: {told}");
            assert_eq!(told.is_empty(), says.is_empty(), "{line}: {told}");
        }
    }
    // Otherwise it is not, but for weights that are not heeded.
    for line in [format!("check {weight}"), format!("--check --config {weight}")] {
        let (code, printed, told) = output(&line);
        assert_eq!((code, printed.as_str()), (Some(0), ok), "{line}: {told}");
        assert!(told.contains(pointless), "{line}: {told}");
    }
    let (code, printed, told) = output(&format!("check --config {both}"));
    assert_eq!((code, printed.as_str()), (Some(0), ok), "{told}");
    assert!(told.contains(unused) && !told.contains(alone), "{told}");
}

#[test]
fn what_is_wrong_ends_with_2() {
    let bad = file(&GOOD.replace("pool: b", "pool: c"));
    let not_yet =
        file(&format!("{GOOD}tcp_pools: [{{ name: q, upstreams: [{{ address: 'a:1' }}] }}]\n"));
    let compress = file(&GOOD.replace("pool: b }", "pool: b, middleware: [{ compress: {} }] }"));
    for (line, says) in [
        (format!("--config {}", bad.1.display()), "`c`"),
        (format!("--check --config {}", bad.1.display()), "`c`"),
        (format!("--config {}", not_yet.1.display()), "this version cannot serve it yet"),
        (format!("--check --config {}", not_yet.1.display()), "this version cannot serve it yet"),
        (format!("check {}", not_yet.1.display()), "error: `tcp_pools` is understood"),
        (format!("check {}", compress.1.display()), "error: `compress` is understood"),
        (format!("check --lint {}", compress.1.display()), "this version cannot serve it yet"),
        ("check /none/config.yaml".to_owned(), "/none/config.yaml"),
        ("--confg x".to_owned(), "'--config'"),
        ("--listen 127.0.0.1:0 --backends nonsense".to_owned(), "--backends"),
        ("--listen 127.0.0.1:0 --backends http://a --config x".to_owned(), "cannot be used with"),
        ("--backends http://a --tracing-endpoint http://a".to_owned(), "--tracing-endpoint"),
        ("man nonsense".to_owned(), "l7rp -h"),
        ("load a.test".to_owned(), "write http://HOST"),
        ("load --hold 1000000 http://127.0.0.1:1".to_owned(), "open files"),
    ] {
        let (code, out, err) = output(&line);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{line}: {err}");
        assert!(err.contains(says), "{line}: {err}");
    }
}

#[test]
fn what_a_reload_would_change() {
    let old = file(GOOD);
    let new = file(&GOOD.replace("two.test, pool: a", "two.test, pool: b"));
    let (old, new) = (old.1.display(), new.1.display());
    let same = "= 1 listener, 2 pools, 2 upstreams, 3 routes\nnothing changes\n";
    let changed = "~ route two\n    pool: a → b\n= 1 listener, 2 pools, 2 upstreams, 2 routes\n\
                   0 to add, 1 to change, 0 to remove, 7 kept\n";
    for (line, code, says) in [
        (format!("plan --config {old} --against {old}"), 0, same),
        (format!("plan -config={new} -against={old}"), 4, changed),
    ] {
        assert_eq!(output(&line), (Some(code), says.to_owned(), String::new()), "{line}");
    }
    let (code, json, _) = output(&format!("plan --json --config {new} --against {old}"));
    let json: serde_json::Value = serde_json::from_str(&json).expect("JSON");
    let what = serde_json::json!([{ "key": "pool", "from": "a", "to": "b" }]);
    assert_eq!((code, &json["changes"]), (Some(4), &true.into()));
    assert_eq!(json["routes"]["changed"][0]["what"], what);
    assert_eq!(json["needs_restart"], serde_json::json!([]));
    let (code, json, _) = output(&format!("plan --json --config {old} --against {old}"));
    assert_eq!((code, json.contains("\"changes\": false")), (Some(0), true), "{json}");
}

#[test]
fn a_plan_that_cannot_be_made_says_why() {
    let good = file(GOOD);
    let bad = file(&GOOD.replace("pool: b", "pool: c"));
    let not_yet =
        file(&format!("{GOOD}tcp_pools: [{{ name: q, upstreams: [{{ address: 'a:1' }}] }}]\n"));
    let off = file(&format!("{GOOD}admin: {{ bind: '' }}\n"));
    let any = file(&format!("{GOOD}admin: {{ bind: '127.0.0.1:0' }}\n"));
    let gone = file(&format!("{GOOD}admin: {{ bind: '127.0.0.1:1' }}\n"));
    let [good, bad, not_yet, off, any, gone] =
        [&good, &bad, &not_yet, &off, &any, &gone].map(|file| file.1.display());
    let mut backend = Running::start("backend --listen 127.0.0.1:0");
    let other = backend.line("backend backend-1 listening on ");
    let (reached, refused) = ("--against names", "Connection refused");
    for (line, code, says) in [
        (format!("plan --config {bad} --against {good}"), 2, ["`c`", "routes[2].pool"]),
        (format!("plan --config {good} --against {bad}"), 2, ["`c`", "routes[2].pool"]),
        (format!("plan --config {not_yet} --against {good}"), 2, ["error:", "cannot serve it yet"]),
        (format!("plan --config {good} --against /none.yaml"), 2, ["/none.yaml", "No such file"]),
        (format!("plan --config {off}"), 2, ["no fixed admin address", "--against FILE"]),
        (format!("plan --config {any}"), 2, ["no fixed admin address", "--against FILE"]),
        (format!("plan --config {gone}"), 1, ["127.0.0.1:1:", refused]),
        (format!("plan --config {gone}"), 1, [reached, refused]),
        (format!("plan --config {good} --against http://127.0.0.1:1"), 1, [reached, refused]),
        (
            format!("plan --config {good} --against http://{other}"),
            1,
            [&other, "is not what it should be"],
        ),
    ] {
        let (was, out, err) = output(&line);
        assert_eq!((was, out.as_str()), (Some(code), ""), "{line}: {err}");
        assert!(says.iter().all(|says| err.contains(says)), "{line}: {err}");
    }
    // What cannot be served yet may be in force elsewhere.
    assert_eq!(output(&format!("plan --config {good} --against {not_yet}")).0, Some(4));
}

#[test]
fn an_instance_that_is_silent_is_not_waited_for_without_end() {
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = silent.local_addr().expect("an address");
    let good = file(GOOD);
    let (code, _, err) =
        output(&format!("plan --config {} --against http://{address}", good.1.display()));
    assert_eq!(code, Some(1), "{err}");
    assert!(err.contains(&format!("{address}: it was silent for 5 s")), "{err}");
}

#[test]
fn certificates_that_are_elsewhere_can_be_left_out_of_a_plan() {
    let good = file(GOOD);
    let ca = file(&GOOD.replace("name: b,", "name: b, upstream_tls: { ca_file: none.pem },"));
    let line = format!("plan --config {} --against {}", good.1.display(), ca.1.display());
    assert_eq!(output(&line).0, Some(2));
    let (code, out, err) = output(&format!("{line} --no-files"));
    assert_eq!(code, Some(4), "{err}");
    assert!(out.contains("upstream_tls.ca_file: ") && out.contains("none.pem → none\n"), "{out}");
}

#[test]
fn what_is_printed_for_other_programs() {
    assert_eq!(output("--version").1, concat!("l7rp ", env!("CARGO_PKG_VERSION"), "\n"));
    let (code, schema, _) = output("schema");
    let schema: serde_json::Value = serde_json::from_str(&schema).expect("JSON");
    assert_eq!((code, schema["type"].as_str()), (Some(0), Some("object")));
    assert!(output("completions bash").1.contains("--metrics-bind"));
    assert!(output("man").1.contains(".SH OPTIONS"));
    assert!(output("man backend").1.starts_with(".ie"));
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    let mut child = program("schema").stdout(Stdio::piped()).spawn().expect("it runs");
    drop(child.stdout.take());
    assert_eq!(child.wait().expect("it ends").code(), Some(0));
}

/// A running program; killed if a test leaves it.
struct Running(Child, BufReader<std::process::ChildStdout>);

impl Running {
    fn start(line: &str) -> Self {
        let mut child = program(line).stdout(Stdio::piped()).spawn().expect("it runs");
        let out = child.stdout.take().expect("piped");
        Self(child, BufReader::new(out))
    }

    /// Reads on to a line that begins like this; the rest of it.
    fn line(&mut self, prefix: &str) -> String {
        loop {
            let mut line = String::new();
            assert!(self.1.read_line(&mut line).expect("text") > 0, "no line {prefix:?}");
            if let Some(rest) = line.strip_prefix(prefix) {
                return rest.trim_end().to_owned();
            }
        }
    }

    fn end(mut self, signal: &str) -> Option<i32> {
        let kill = Command::new("kill").args([signal, &self.0.id().to_string()]).status();
        assert!(kill.expect("kill runs").success());
        self.0.wait().expect("it ends").code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended already, if all went well.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn get(address: &str) -> String {
    get_path(address, "/")
}

fn get_path(address: &str, path: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("it listens");
    let request = format!("GET {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

#[test]
fn a_backend_listens_until_a_signal() {
    for signal in ["-INT", "-TERM"] {
        let mut backend = Running::start("backend -listen=127.0.0.1:0 -name=one -fail-every=2");
        let address = backend.line("backend one listening on ");
        assert!(get(&address).ends_with("\r\n\r\none request=1\n"));
        assert!(get(&address).starts_with("HTTP/1.1 503 "));
        assert_eq!(backend.end(signal), Some(0), "{signal}");
    }
}

#[test]
fn no_file_is_needed() {
    let mut one = Running::start("backend --listen 127.0.0.1:0 --name one");
    let mut two = Running::start("backend --listen 127.0.0.1:0 --name two");
    let (first, second) =
        (one.line("backend one listening on "), two.line("backend two listening on "));
    let mut proxy = Running::start(&format!(
        "-listen=127.0.0.1:0 -backends=http://{first},http://{second} -max-in-flight=64 \
         --metrics-bind="
    ));
    let started: serde_json::Value =
        serde_json::from_str(&format!("{{{}", proxy.line("{"))).expect("an event");
    let address = started["listeners"][0].as_str().expect("a listener");
    let address = address.split_once('=').expect("name=address").1.to_owned();
    // Probes are answered beside the traffic, and the backends take turns.
    assert!(get_path(&address, "/livez").starts_with("HTTP/1.1 204 "));
    // Each takes part as soon as it has been probed.
    l7rp_testkit::eventually(l7rp_testkit::SOON, || get(&address).contains("two request="));
    assert!(get_path(&address, "/readyz").starts_with("HTTP/1.1 204 "));
    let named: Vec<_> = (0..4).map(|_| get(&address)).collect();
    for name in ["one request=", "two request="] {
        assert_eq!(named.iter().filter(|answer| answer.contains(name)).count(), 2, "{named:?}");
    }
    // A backend is told its own name, not the proxy's.
    let echoed = get_path(&address, "/echo");
    assert!(
        echoed.contains(&format!("Host: {first}")) || echoed.contains(&format!("Host: {second}")),
        "{echoed}"
    );
    assert_eq!(proxy.end("-TERM"), Some(0));
}

#[test]
fn a_port_in_use_ends_with_1() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address");
    for line in [
        format!("backend --listen {address}"),
        format!("--listen {address} --backends http://127.0.0.1:1 --metrics-bind="),
    ] {
        let (code, _, err) = output(&line);
        assert_eq!(code, Some(1), "{line}: {err}");
        assert!(err.contains(&address.to_string()), "{line}: {err}");
    }
}

#[test]
fn the_demo_runs_until_a_signal() {
    for signal in ["-INT", "-TERM"] {
        let mut demo = Running::start("demo");
        let address = demo.line("proxy   http://");
        demo.line("Ctrl-C stops everything.");
        assert!(get(&address).starts_with("HTTP/1.1 "));
        assert_eq!(demo.end(signal), Some(0), "{signal}");
    }
}

#[test]
fn what_init_writes_is_taken_without_a_word() {
    for flags in [
        "",
        "--backend=http://10.0.0.2 --retries --rate-limit 5 --algorithm round-robin",
        "--listen [::]:443 --host a.test --autocert a.test --email ops@a.test --health-path /up",
        "--tls site.crt,site.key --host a.test --host *.b.test --admin unix:/run/l7rp.sock",
    ] {
        let line = format!("init --backend http://10.0.0.1:80 {flags}");
        let (code, text, err) = output(&line);
        assert_eq!((code, err.as_str()), (Some(0), ""), "{line}");
        let file = file(&text);
        let (code, _, err) = output(&format!("check --lint --no-files {}", file.1.display()));
        assert_eq!((code, err.as_str()), (Some(0), ""), "{line}\n{text}");
        assert!(
            text.ends_with("tells what a reload (SIGHUP) will change.\n"),
            "what is next comes last: {text}"
        );
    }
}

#[test]
fn init_replaces_no_file_unasked() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("new.yaml");
    let read = || std::fs::read_to_string(&path).expect("a file");
    let name = path.display();
    let line = format!("init --backend http://a.test --output {name}");
    let (code, out, err) = output(&line);
    assert_eq!((code, err.as_str()), (Some(0), ""));
    assert!(out.contains(&format!("{name} is written")), "{out}");
    let first = read();
    assert!(first.contains(&format!("l7rp --config {name}\n")), "{first}");

    let other = format!("init --backend http://b.test --output {name}");
    let (code, out, err) = output(&other);
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert_eq!(err, format!("error: {name} is there already; --force replaces it\n"));
    assert_eq!(read(), first);

    // What is wrong replaces nothing either.
    let (code, _, err) = output(&format!("{other} --force --host a/b"));
    assert_eq!((code, err.contains("a/b")), (Some(2), true), "{err}");
    assert_eq!(read(), first);

    assert_eq!(output(&format!("{other} --force")).0, Some(0));
    assert!(read().contains("http://b.test") && !read().contains("http://a.test"));
    let nowhere = folder.path().join("none/new.yaml");
    let (code, _, err) = output(&format!("init --backend http://a --output {}", nowhere.display()));
    assert_eq!((code, err.contains("cannot write")), (Some(1), true), "{err}");
}

#[test]
fn a_proxy_starts_with_what_init_writes() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("config.yaml");
    let path = path.display();
    let mut one = Running::start("backend --listen 127.0.0.1:0 --name one");
    let mut two = Running::start("backend --listen 127.0.0.1:0 --name two --status 503");
    let (first, second) =
        (one.line("backend one listening on "), two.line("backend two listening on "));
    let (code, _, err) = output(&format!(
        "init --listen 127.0.0.1:0 --admin= --backend http://{first} --backend http://{second} \
         --health-path /healthz --retries --rate-limit 1000 --output {path}"
    ));
    assert_eq!(code, Some(0), "{err}");
    let mut proxy = Running::start(&format!("--config {path}"));
    let started: serde_json::Value =
        serde_json::from_str(&format!("{{{}", proxy.line("{"))).expect("an event");
    let address = started["listeners"][0].as_str().expect("a listener");
    let address = address.split_once('=').expect("name=address").1;
    l7rp_testkit::eventually(l7rp_testkit::SOON, || get(address).contains("one request="));
    for _ in 0..10 {
        let answer = get(address);
        assert!(answer.contains("one request="), "the other is tried once at most: {answer}");
    }
    assert_eq!(proxy.end("-TERM"), Some(0));
}
