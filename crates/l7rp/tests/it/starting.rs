//! A start works or says why not; one bad name never stops it.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use l7rp_testkit::{Client, Origin, Proxy, SOON, Signal, eventually, reply};

use crate::setup::{PROGRAM, get, over, start};

/// Starts what must not start: exit code and what was told.
#[track_caller]
fn does_not_start(yaml: &str) -> (i32, String) {
    let mut proxy = Proxy::spawn(PROGRAM, yaml);
    let code = proxy.wait_exit(SOON);
    assert!(proxy.events("proxy_started").is_empty());
    (code, proxy.errors())
}

#[test]
fn a_port_in_use_is_named_with_its_holder() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let holder = format!("(pid {})", std::process::id());
    let listener = over(&[&Origin::refusing()]).yaml().replace("127.0.0.1:0", &address);
    let admin =
        over(&[&Origin::refusing()]).top(&format!("admin: {{ bind: \"{address}\" }}")).yaml();
    for yaml in [listener, admin] {
        let (code, errors) = does_not_start(&yaml);
        assert_eq!(code, 1, "{errors}");
        assert!(errors.contains(&address) && errors.contains(&holder), "{errors}");
    }
}

#[test]
fn a_second_proxy_does_not_share_the_port() {
    let origin = Origin::start(reply::name("x"));
    let first = over(&[&origin]).start();
    let address = first.address().to_string();
    let yaml = over(&[&origin]).yaml().replace("127.0.0.1:0", &address);
    let (code, errors) = does_not_start(&yaml);
    assert_eq!(code, 1, "{errors}");
    assert!(errors.contains(&format!("(pid {})", first.pid())), "{errors}");
    assert_eq!(first.get("/").status(), 200);
}

#[test]
fn a_port_is_free_again_after_the_end() {
    let origin = Origin::start(reply::name("x"));
    let mut first = over(&[&origin]).start();
    // A connection that the proxy closes first leaves its address waiting.
    let mut client = first.client();
    client.get("/");
    let address = first.address().to_string();
    first.signal(Signal::TERM);
    assert!(client.is_closed_within(SOON));
    assert_eq!(first.wait_exit(SOON), 0);
    let again = start(&over(&[&origin]).yaml().replace("127.0.0.1:0", &address));
    assert_eq!(again.get("/").status(), 200);
}

#[test]
fn a_file_that_is_not_there() {
    for path in ["/nonexistent/l7rp.yaml", "/"] {
        let mut proxy = Proxy::run(PROGRAM, ["--config", path]);
        assert_eq!(proxy.wait_exit(SOON), 2);
        assert!(proxy.errors().contains(path), "{}", proxy.errors());
        assert!(proxy.lines().is_empty());
    }
}

#[test]
fn an_empty_file() {
    for text in ["", "# nothing\n", "\n\n"] {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("empty.yaml");
        std::fs::write(&path, text).expect("a file");
        let mut proxy = Proxy::run(PROGRAM, [Path::new("--config"), &path]);
        assert_eq!(proxy.wait_exit(SOON), 2, "{text:?}");
        let errors = proxy.errors();
        assert!(errors.contains("empty.yaml") && errors.contains("listeners"), "{errors}");
    }
}

#[test]
fn all_that_is_wrong_is_told_with_its_place() {
    let yaml = "listeners:\n- { name: web, bind: \"127.0.0.1:0\" }\nroutes:\n\
                - { name: r, pool: nowhere }\nroutse: []\n";
    let (code, errors) = does_not_start(yaml);
    assert_eq!(code, 2);
    for word in ["config.yaml:4:", "config.yaml:5:", "nowhere", "routse"] {
        assert!(errors.contains(word), "{word}: {errors}");
    }
}

#[test]
fn what_cannot_be_served_yet_is_not_ignored() {
    let yaml = over(&[&Origin::refusing()])
        .top("tcp_pools: [{ name: t, upstreams: [{ address: \"a:1\" }] }]")
        .yaml();
    let (code, errors) = does_not_start(&yaml);
    assert_eq!(code, 2);
    assert!(errors.contains("tcp_pools"), "{errors}");
}

#[test]
fn a_name_that_does_not_resolve_harms_only_its_route() {
    let origin = Origin::start(reply::name("good"));
    let began = Instant::now();
    let proxy = start(&format!(
        "listeners:\n- {{ name: web, bind: \"127.0.0.1:0\" }}\n\
         upstream_pools:\n\
         - {{ name: good, upstreams: [{{ url: \"{}\" }}] }}\n\
         - {{ name: ghost, upstreams: [{{ url: \"http://no-such-host.invalid:80\" }}] }}\n\
         routes:\n\
         - {{ name: ghost, path_prefix: /ghost, pool: ghost }}\n\
         - {{ name: r, pool: good }}\n",
        origin.url()
    ));
    assert!(began.elapsed() < Duration::from_secs(4), "the start was held up");
    assert_eq!(proxy.get("/").text(), "good");
    for _ in 0..5 {
        let asked = Instant::now();
        let answer = proxy.get("/ghost/x");
        assert!(asked.elapsed() < Duration::from_secs(1));
        assert_eq!(answer.status(), 503);
        assert_eq!(answer.get("retry-after"), Some("1"));
        assert!(
            answer.get("proxy-status").is_some_and(|s| s.contains("error=dns_error")),
            "{answer:?}"
        );
    }
    let metrics = proxy.metrics();
    assert_eq!(metrics.sum("proxy_upstream_eligible", &[("pool", "ghost")]), 0.0);
    assert_eq!(proxy.ask_admin("/readyz").status(), 204, "one pool is enough");
    let limit = Duration::from_secs(20);
    let event = proxy.wait_for_event("upstream_resolve_failed", |_| true, limit);
    assert_eq!(event["host"], "no-such-host.invalid");
    assert_eq!(event["pool"], "ghost");
    assert_eq!(proxy.events("upstream_resolve_failed").len(), 1);
}

#[test]
fn nothing_to_send_to_is_not_ready() {
    let proxy = over(&[]).upstream("http://no-such-host.invalid:80", "weight: 1").start();
    let answer = proxy.ask_admin("/readyz");
    assert_eq!((answer.status(), answer.text().as_str()), (503, "no backend ready\n"));
}

#[test]
fn a_name_is_resolved_and_asked_for_again() {
    let origin = Origin::start(reply::name("x"));
    let url = format!("http://localhost:{}", origin.address.port());
    let proxy = over(&[]).upstream(&url, "weight: 1").pool("dns: { refresh: 100ms }").start();
    for _ in 0..4 {
        assert_eq!(proxy.get("/").text(), "x");
    }
    let event = proxy.wait_for_event("upstream_resolved", |_| true, SOON);
    assert!(event["to"].as_array().is_some_and(|to| to.contains(&"127.0.0.1".into())), "{event}");
    // Asked for again, but told only once: the answer is the same.
    l7rp_testkit::let_pass(Duration::from_millis(500));
    assert_eq!(proxy.events("upstream_resolved").len(), 1);
}

#[test]
fn a_unix_domain_socket_is_listened_on() {
    let origin = Origin::start(reply::name("x"));
    let yaml = over(&[&origin]).yaml().replace("127.0.0.1:0", "unix:{dir}/web.sock");
    let mut proxy = start(&yaml);
    let path = proxy.directory().join("web.sock");
    for _ in 0..4 {
        let mut client = Client::connect_unix(&path);
        assert_eq!(client.ask(get("a.test", "/", "")).text(), "x");
        assert_eq!(client.ask(get("a.test", "/", "")).text(), "x");
    }
    // No address can be claimed by a client without one.
    let mut client = Client::connect_unix(&path);
    client.ask(get("a.test", "/forged", "X-Forwarded-For: 192.0.2.1\r\n"));
    assert!(!origin.last().all("x-forwarded-for").join(",").contains("192.0.2.1"));
    assert!(proxy.logged_path("/forged")["client_ip"].is_string());
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
}

/// The permissions of a file.
#[track_caller]
fn mode(path: &Path) -> u32 {
    std::fs::metadata(path).expect("it is there").permissions().mode() & 0o777
}

#[test]
fn who_may_connect_to_a_socket_is_a_matter_of_its_folder_but_for_the_admin_one() {
    let origin = Origin::start(reply::name("x"));
    let yaml = over(&[&origin]).top("admin: { bind: \"unix:{dir}/admin.sock\" }").yaml();
    let at = |name: &str| yaml.replace("127.0.0.1:0", &format!("unix:{{dir}}/{name}.sock"));
    let mut shell = Command::new("sh");
    shell.args(["-c", "umask 077; exec \"$0\" \"$@\"", PROGRAM]);
    let proxy = Proxy::start_by(shell.stdin(Stdio::null()), &at("web"));
    let path = |name: &str| proxy.directory().join(name);
    assert_eq!(mode(&path("web.sock")), 0o666);
    assert_eq!(mode(&path("admin.sock")), 0o700, "the umask is as it was");
    assert_eq!(Client::connect_unix(&path("web.sock")).get("/").text(), "x");
    proxy.reload(&at("other"));
    assert_eq!(mode(&path("other.sock")), 0o666);
    assert_eq!(mode(&path("admin.sock")), 0o700);
}

#[test]
fn a_left_over_socket_file_is_no_hindrance_but_a_live_one_is() {
    let origin = Origin::start(reply::name("x"));
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("web.sock");
    let yaml = over(&[&origin]).yaml().replace("127.0.0.1:0", &format!("unix:{}", path.display()));
    let mut first = start(&yaml);
    let (code, errors) = does_not_start(&yaml);
    assert_eq!(code, 1, "{errors}");
    assert!(errors.contains("web.sock"), "{errors}");
    first.signal(Signal::KILL);
    first.wait_exit(SOON);
    assert!(UnixStream::connect(&path).is_err());
    let _again = start(&yaml);
    eventually(SOON, || UnixStream::connect(&path).is_ok());
    assert_eq!(Client::connect_unix(&path).get("/").text(), "x");
}

#[test]
fn any_address_of_both_families_is_listened_on() {
    let origin = Origin::start(reply::name("x"));
    let proxy = start(&over(&[&origin]).yaml().replace("127.0.0.1:0", "[::]:0"));
    let port = proxy.address().port();
    let mut client = Client::connect(([127, 0, 0, 1], port).into());
    assert_eq!(client.get("/four").text(), "x");
    // An IPv4 client has its IPv4 address, not a mapped one.
    assert_eq!(proxy.logged_path("/four")["client_ip"], "127.0.0.1");
    assert_eq!(origin.last().get("x-forwarded-for"), Some("127.0.0.1"));
}

#[test]
fn a_name_that_does_not_resolve_is_passed_over_in_its_pool() {
    let origin = Origin::start(reply::name("good"));
    let proxy = over(&[&origin])
        .upstream("http://no-such-host.invalid:80", "weight: 1")
        .pool("selector: { algorithm: round-robin }")
        .start();
    for _ in 0..6 {
        assert_eq!(proxy.get("/one").text(), "good");
    }
    assert_eq!(proxy.logged_path("/one")["attempts"], 1);
    let metrics = proxy.metrics();
    assert_eq!(metrics.sum("proxy_upstream_eligible", &[("upstream", &origin.url())]), 1.0);
    assert_eq!(metrics.sum("proxy_upstream_eligible", &[]), 1.0);
}

#[test]
fn an_upstream_with_an_ipv6_address_is_reached() {
    let loopback = std::net::SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, 0));
    let origin = Origin::start_at(loopback, reply::name("six"));
    let proxy = over(&[&origin]).pool("host_header: upstream").start();
    assert_eq!(proxy.get("/").text(), "six");
    assert_eq!(origin.last().get("host"), Some(origin.address.to_string().as_str()));
}
