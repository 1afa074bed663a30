//! Runs the tests and adds up what they said.

use std::io::{BufRead, BufReader};
use std::process::Stdio;

use crate::run::{Done, Failed, announce, cargo, not_started, written};
use crate::setup;

/// Installs what the tests need and runs all of them; `extra` goes to `cargo test`.
pub(crate) fn all(extra: &[String]) -> Done {
    setup::for_tests()?;
    let mut command = cargo();
    // All of the failures in one run, not the first binary's only.
    command.args(["test", "--workspace", "--no-fail-fast"]).args(extra);
    announce(&command);
    let mut child =
        command.stdout(Stdio::piped()).spawn().map_err(|e| not_started(&command, &e))?;
    let mut sum = Sum::default();
    if let Some(output) = child.stdout.take() {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            println!("{line}");
            sum.add(&line);
        }
    }
    let status = child.wait().map_err(|e| not_started(&command, &e))?;
    println!("\n{} passed, {} failed, {} skipped", sum.passed, sum.failed, sum.skipped);
    if !status.success() {
        return Err(Failed::new(
            format!("`{}`: {status}", written(&command)),
            "the failing tests are listed above; `cargo xtask test NAME` runs one alone",
        ));
    }
    if sum.passed == 0 {
        return Err(Failed::new("no test ran", "does the name that you gave exist?"));
    }
    Ok(())
}

/// Over all test binaries: cargo prints a line for each and no total.
#[derive(Debug, Default, PartialEq)]
struct Sum {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Sum {
    fn add(&mut self, line: &str) {
        let Some(rest) = line.strip_prefix("test result: ") else {
            return;
        };
        let words: Vec<&str> = rest.split_whitespace().collect();
        for pair in words.windows(2) {
            let Ok(count) = pair[0].parse::<u64>() else {
                continue;
            };
            match pair[1] {
                "passed;" => self.passed += count,
                "failed;" => self.failed += count,
                "ignored;" => self.skipped += count,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_up_the_closing_lines() {
        let mut sum = Sum::default();
        sum.add("test result: ok. 12 passed; 0 failed; 1 ignored; 0 measured; 3 filtered out; finished in 0.05s");
        sum.add("test a::b ... ok");
        sum.add("test result: FAILED. 3 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out");
        assert_eq!(sum, Sum { passed: 15, failed: 2, skipped: 1 });
    }
}
