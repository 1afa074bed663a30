//! `l7rp plan` beside a running instance, and what that instance shows of its plan.

use std::fs;
use std::process::{Command, Stdio};

use l7rp_testkit::{Origin, Proxy};
use serde_json::Value;

use crate::setup::{PROGRAM, over, start};

/// Runs `l7rp plan` with the text as its file; the exit code and what it prints.
fn plan(proxy: &Proxy, yaml: &str, flags: &[&str]) -> (Option<i32>, String) {
    let path = proxy.directory().join("new.yaml");
    fs::write(&path, yaml).expect("written");
    let output = Command::new(PROGRAM)
        .args(["plan", "--config"])
        .arg(&path)
        .args(flags)
        .stdin(Stdio::null())
        .output()
        .expect("it runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).expect("UTF-8"))
}

#[test]
fn a_running_instance_shows_its_plan_without_secrets() {
    let origin = Origin::refusing();
    let fields = "middleware: [{ headers: { add_request: { X-Key: hunter2 } } }]";
    let proxy = over(&[&origin]).route(fields).start();
    let answer = proxy.ask_admin("/-/plan");
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.get("content-type"), Some("application/json"));
    let plan: Value = serde_json::from_str(&answer.text()).expect("JSON");
    assert_eq!(plan["routes"][0]["pool"], "b");
    assert_eq!(plan["upstream_pools"][0]["upstreams"][0]["url"], origin.url());
    let key = &plan["routes"][0]["middleware"]["headers"]["add_request"]["X-Key"];
    assert!(key.as_str().is_some_and(|key| key.starts_with("digest:")), "{plan}");
    assert!(!answer.text().contains("hunter2"));
    assert!(proxy.ask_admin("/").text().contains(" /-/plan "));
}

#[test]
fn a_file_is_compared_with_the_instance_that_runs() {
    let origin = Origin::refusing();
    let setup = over(&[&origin]).top("admin: { bind: \"127.0.0.1:0\" }");
    let proxy = start(&setup.yaml());
    let against = format!("http://{}", proxy.admin());
    let same = plan(&proxy, &setup.yaml(), &["--against", &against]);
    assert_eq!(
        same,
        (Some(0), "= 1 listener, 1 pool, 1 upstream, 1 route\nnothing changes\n".into())
    );
    let new = setup.upstream("http://127.0.0.1:1", "weight: 2");
    let (code, text) = plan(&proxy, &new.yaml(), &["--against", &against]);
    assert_eq!(code, Some(4));
    let expected = "+ upstream b http://127.0.0.1:1\n\
                    = 1 listener, 1 pool, 1 upstream, 1 route\n\
                    1 to add, 0 to change, 0 to remove, 4 kept\n";
    assert_eq!(text, expected);
}

#[test]
fn without_against_the_admin_address_of_the_file_is_asked() {
    let origin = Origin::refusing();
    let proxy = over(&[&origin]).start();
    let bind = format!("admin: {{ bind: \"{}\" }}", proxy.admin());
    let (code, text) = plan(&proxy, &over(&[&origin]).top(&bind).yaml(), &[]);
    let change = format!("~ admin.bind: 127.0.0.1:0 → {}\n", proxy.admin());
    assert_eq!((code, text.lines().next()), (Some(4), Some(change.trim_end())), "{text}");

    let socket = proxy.directory().join("admin.sock").display().to_string();
    let yaml = over(&[&origin]).top(&format!("admin: {{ bind: \"unix:{socket}\" }}")).yaml();
    let _local = start(&yaml);
    let (code, text) = plan(&proxy, &yaml, &[]);
    assert_eq!(code, Some(0), "{text}");
}
