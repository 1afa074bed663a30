//! The last lines of a process, and a standard output that takes what it likes.

use std::io::Read;
use std::process::Stdio;
use std::time::Duration;

use l7rp_testkit::{Client, Origin, Signal, let_pass, reply};
use serde_json::Value;

use crate::log_sink::{Plain, dropped};
use crate::setup::over;

/// Asks so often that the reader cannot keep up.
fn fill(proxy: &Plain, requests: usize) {
    let mut client = Client::connect(proxy.address);
    let path = format!("/{}", "p".repeat(800));
    for _ in 0..requests {
        assert_eq!(client.get(&path).status(), 200);
    }
}

/// Lines that are none.
fn torn(text: &str) -> Vec<String> {
    let lines = text.split_inclusive('\n');
    let is_good = |line: &&str| line.ends_with('\n') && serde_json::from_str::<Value>(line).is_ok();
    lines.filter(|line| !is_good(line)).map(|line| line.chars().take(100).collect()).collect()
}

/// A reader that is a second too late finds whole lines all the same.
#[test]
fn the_last_line_of_a_process_whose_reader_is_late_is_whole() {
    let origin = Origin::start(reply::name("x"));
    let mut proxy = Plain::start(over(&[&origin]), Stdio::piped());
    let mut reader = proxy.child.stdout.take().expect("a pipe");
    fill(&proxy, 300);
    assert_eq!(proxy.end(Signal::TERM), Some(0));
    let mut text = String::new();
    reader.read_to_string(&mut text).expect("text");
    assert_eq!(torn(&text), Vec::<String>::new());
}

/// Whoever has started it may have made its end of the pipe one that does not wait.
#[test]
fn an_output_that_does_not_wait_gets_whole_lines() {
    let origin = Origin::start(reply::name("x"));
    let (reader, writer) = std::io::pipe().expect("a pipe");
    rustix::io::ioctl_fionbio(&writer, true).expect("it is set");
    let mut proxy = Plain::start(over(&[&origin]), writer);
    fill(&proxy, 400);
    let_pass(Duration::from_millis(500));
    let mut reader = reader;
    let text = std::thread::spawn(move || {
        let mut text = String::new();
        reader.read_to_string(&mut text).expect("text");
        text
    });
    let_pass(Duration::from_millis(500));
    fill(&proxy, 50);
    let_pass(Duration::from_millis(500));
    let lost = dropped(proxy.admin);
    assert_eq!(proxy.end(Signal::TERM), Some(0));
    drop(proxy);
    let text = text.join().expect("it reads");
    let told = text.lines().filter(|line| line.contains("request_completed")).count() as u64;
    println!("{told} lines came and {lost} were dropped, of 450");
    assert_eq!(torn(&text), Vec::<String>::new());
    assert_eq!(told + lost, 450, "{told} lines came and {lost} were dropped");
}
