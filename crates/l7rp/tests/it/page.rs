//! The live page, as a browser shows it.

use std::fmt::Display;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use l7rp_testkit::{Call, Client, Message, Origin, Proxy, SOON, Then, reply};

use crate::setup::{get, over};

fn ask(proxy: &Proxy, path: &str, accept: &str) -> Message {
    Client::connect(proxy.admin()).ask(get("admin", path, &format!("Accept: {accept}\r\n")))
}

/// The page at `admin` once its script has run for some seconds of its own time.
fn seen(admin: impl Display) -> String {
    let profile = tempfile::tempdir().expect("a directory");
    let output = Command::new("chromium")
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(["--virtual-time-budget=4000", "--dump-dom"])
        .arg(format!("http://{admin}/"))
        .stderr(Stdio::null())
        .output()
        .expect("chromium, of the package of that name, is installed");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn people_get_the_page_and_programs_the_list() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let page = ask(&proxy, "/", "text/html,application/xhtml+xml,*/*;q=0.8");
    assert_eq!(page.get("content-type"), Some("text/html; charset=utf-8"));
    let policy = page.get("content-security-policy").expect("a policy");
    assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");
    assert!(!policy.contains("unsafe") && !policy.contains('*'), "{policy}");
    assert_eq!(page.get("x-content-type-options"), Some("nosniff"));
    assert_eq!(page.get("referrer-policy"), Some("no-referrer"));
    let list = ask(&proxy, "/", "*/*");
    assert_eq!(list.get("content-type"), Some("text/plain; charset=utf-8"));
    let list = list.text();
    let (looks, changes) = list.split_once("POST: ").expect("what changes is named apart");
    assert!(changes.contains("/-/upstreams/drain"), "{changes}");
    for path in looks.split_whitespace() {
        let answer = ask(&proxy, path, "*/*");
        assert!([200, 204].contains(&answer.status()), "{path}: {answer:?}");
        assert!(page.text().contains(&format!("href=\"{path}\"")), "{path}");
    }
    for (path, kind) in [("/-/page.js", "text/javascript"), ("/-/page.css", "text/css")] {
        assert!(page.text().contains(path));
        let part = ask(&proxy, path, "*/*");
        assert!(part.get("content-type").is_some_and(|t| t.starts_with(kind)), "{part:?}");
        // Nothing from elsewhere.
        assert!(!part.text().contains("://"), "{path}");
    }
    assert!(!page.text().contains("://") && !page.text().contains(" style="));
}

#[test]
fn a_browser_shows_routes_and_upstreams_as_text() {
    let (up, down) = (Origin::start(reply::name("x")), Origin::refusing());
    let check = "path: /, interval: 1500ms, timeout: 1s, healthy_threshold: 1";
    let name = "<script>document.title=`owned`</script><img src=x onerror=document.title=`owned`>";
    let proxy = over(&[&up, &down])
        .pool(&format!("health: {{ active: {{ {check}, unhealthy_threshold: 1 }} }}"))
        .top(&format!("- {{ name: '{name}', path_prefix: /odd, respond: {{ status: 204 }} }}"))
        .start();
    proxy.client().ask(get("a.test", "/odd", ""));
    let url = down.url();
    proxy.wait_for_event(
        "upstream_health_changed",
        |event| event["upstream"] == url.as_str(),
        SOON,
    );
    let page = seen(proxy.admin());
    assert!(page.contains("<title>l7rp: ✔ ready</title>"), "{page}");
    assert!(page.contains(">r</td>"), "{page}");
    assert!(page.contains("&lt;script&gt;document.title=`owned`&lt;/script&gt;"), "{page}");
    assert!(!page.contains("<img"), "{page}");
    assert!(page.contains(&format!(">{url}</td>")), "{page}");
    assert!(page.contains("✘ out: health checks: connect_refused"), "{page}");
    assert!(page.contains("✔ status:200, "), "{page}");
    assert!(page.contains("role=\"alert\" hidden"), "{page}");
}

#[test]
fn a_browser_says_that_the_proxy_is_gone() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    let asked = AtomicUsize::new(0);
    // What the admin address says, until it has said once how it is.
    let gone = Origin::start(move |call: &mut Call<'_>| {
        let path = call.request.target().to_owned();
        if path == "/status" && asked.fetch_add(1, SeqCst) > 0 {
            return Then::Close;
        }
        let answer = ask(&proxy, &path, if path == "/" { "text/html" } else { "*/*" });
        let (kind, body) = (answer.get("content-type").unwrap_or_default(), answer.text());
        call.send(format!(
            "HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ));
        Then::Close
    });
    let page = seen(gone.url().trim_start_matches("http://"));
    assert!(page.contains("<title>l7rp: not reached</title>"), "{page}");
    assert!(page.contains("✘ The proxy cannot be reached since "), "{page}");
    assert!(page.contains("<main id=\"main\" class=\"stale\">"), "{page}");
    assert!(page.contains(">r</td>"), "what it said last: {page}");
}
