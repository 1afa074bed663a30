//! Counts the instructions of what is done for each request, and compares them with what they
//! were: a count says the same on a busy machine, and finds what no clock can tell from noise.

use std::fs;
use std::path::Path;

use crate::baseline::{BARS, Baseline, Counts, MOST, Row, Verdict, compare};
use crate::run::{Done, Failed, cargo, command, step};
use crate::{read, root, setup};

/// What was counted before.
const BASELINE: &str = "xtask/instructions.txt";
/// Where the runner leaves what it has counted.
const RESULTS: &str = "target/instructions";
const ACCEPT: &str = "`cargo xtask instructions --accept`";

/// `None`: not a way to call us.
pub(crate) fn asked(arguments: &[String]) -> Option<Done> {
    match arguments {
        [] => Some(check()),
        [flag] if flag == "--accept" => Some(accept()),
        _ => None,
    }
}

/// Fails where more is done than before, or too much more among many than among few.
pub(crate) fn check() -> Done {
    let text = read(BASELINE)?;
    let before = Baseline::read(&text).map_err(|line| {
        Failed::new(format!("{BASELINE}: cannot read {line:?}"), format!("{ACCEPT} writes it anew"))
    })?;
    let now = count()?;
    let rows = compare(&before.counts, &now.counts);
    println!("\n{:<40} {:>10} {:>10}", "instructions of a hundred calls", "before", "now");
    for row in &rows {
        println!("{}", row.line());
    }
    let missed = bars(&now.counts);
    judge(&rows, &before.rustc, &now.rustc)?;
    if missed.is_empty() {
        return Ok(());
    }
    Err(Failed::new(
        format!("more among many than may be: {}", missed.join(", ")),
        "see which of them is no longer found by its place",
    ))
}

/// Writes down what is counted now.
fn accept() -> Done {
    let now = count()?;
    bars(&now.counts);
    let written = fs::write(root().join(BASELINE), now.text());
    written.map_err(|e| Failed::new(format!("cannot write {BASELINE}: {e}"), "may you write?"))?;
    println!("\n{BASELINE} is written: commit it with the change that explains it");
    Ok(())
}

/// Runs the benchmarks.
fn count() -> Result<Baseline, Failed> {
    let runner = setup::for_instructions()?;
    // What an earlier run has left would be taken for counted.
    let results = root().join(RESULTS);
    if results.exists() {
        fs::remove_dir_all(&results).map_err(|e| unreadable(&results, &e))?;
    }
    step(
        cargo()
            .env("GUNGRAUN_RUNNER", runner)
            .env("GUNGRAUN_HOME", &results)
            // One profile for each benchmark, and nothing about caches, which takes longer.
            .env("GUNGRAUN_CALLGRIND_ARGS", "--separate-threads=no --cache-sim=no")
            .args(["bench", "--package", "l7rp-core", "--package", "l7rp"])
            .args(["--bench", "instructions", "--bench", "record"]),
        "read the message above; valgrind must be able to run here",
    )?;
    let mut counts = Counts::new();
    collect(&results, &mut counts)?;
    if counts.is_empty() {
        return Err(Failed::new(
            format!("the benchmarks ran, and there is no count below {RESULTS}"),
            "has the runner another place for its files in this version?",
        ));
    }
    Ok(Baseline { rustc: rustc()?, counts })
}

/// The counts in the files `callgrind.FUNCTION.CASE.out` of a folder and those below.
fn collect(folder: &Path, counts: &mut Counts) -> Done {
    let entries = fs::read_dir(folder).map_err(|e| unreadable(folder, &e))?;
    for entry in entries {
        let path = entry.map_err(|e| unreadable(folder, &e))?.path();
        if path.is_dir() {
            collect(&path, counts)?;
            continue;
        }
        let file = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        if let Some(name) = file.strip_prefix("callgrind.").and_then(|n| n.strip_suffix(".out")) {
            let text = fs::read_to_string(&path).map_err(|e| unreadable(&path, &e))?;
            let count = total(&text).ok_or_else(|| {
                Failed::new(
                    format!("{} has no total of instructions", path.display()),
                    "has callgrind another format in this version?",
                )
            })?;
            counts.insert(name.to_owned(), count);
        }
    }
    Ok(())
}

/// The instructions in a profile of callgrind: the first of its totals, if that is what it names
/// first.
fn total(profile: &str) -> Option<u64> {
    let first = |key| profile.lines().find_map(|line| line.strip_prefix(key)?.split(' ').next());
    if first("events: ")? != "Ir" {
        return None;
    }
    first("totals: ")?.parse().ok()
}

fn rustc() -> Result<String, Failed> {
    let output = command("rustc").arg("--version").output();
    let output = output.map_err(|e| crate::run::not_started(&command("rustc"), &e))?;
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

fn unreadable(path: &Path, e: &std::io::Error) -> Failed {
    Failed::new(format!("{}: {e}", path.display()), "`cargo xtask instructions` makes it anew")
}

/// Prints what decisions among many cost; which of them may not.
fn bars(counts: &Counts) -> Vec<String> {
    let mut missed = Vec::new();
    for bar in &BARS {
        println!("\namong {} at most {} times what it is among {}", bar.many, bar.at_most, bar.few);
        let ratios = bar.ratios(counts);
        if ratios.is_empty() {
            missed.push(format!("{} (no benchmark is named so)", bar.of));
        }
        for (name, ratio) in ratios {
            let fits = ratio <= bar.at_most;
            let remark = if fits { "" } else { "  MISSED" };
            println!("{name:<40} {ratio:>10.2}{remark}");
            if !fits {
                missed.push(name.to_owned());
            }
        }
    }
    missed
}

/// Fails where the counts do not fit those of before.
fn judge(rows: &[Row<'_>], before: &str, now: &str) -> Done {
    let of = |verdicts: &[Verdict]| {
        let named = rows.iter().filter(|row| verdicts.contains(&row.verdict()));
        named.map(|row| row.name).collect::<Vec<_>>().join(", ")
    };
    let compiler = if before == now {
        String::new()
    } else {
        format!(". The compiler is another, which may be the reason: {now}; before {before}")
    };
    let more = of(&[Verdict::More]);
    if !more.is_empty() {
        return Err(Failed::new(
            format!("over {MOST} % more instructions than before: {more}{compiler}"),
            format!("find what has grown; if it is worth that, {ACCEPT} and say why"),
        ));
    }
    let unknown = of(&[Verdict::New, Verdict::Gone]);
    if !unknown.is_empty() {
        return Err(Failed::new(
            format!("{BASELINE} is about other benchmarks: {unknown}{compiler}"),
            format!("{ACCEPT} writes it anew"),
        ));
    }
    let less = of(&[Verdict::Less]);
    if !less.is_empty() {
        println!("\nover {MOST} % fewer than before: {less}{compiler}");
        println!("{ACCEPT} lowers the baseline, so that it stays that way");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_total_of_a_profile() {
        let profile = "version: 1\nevents: Ir Dr Dw\n\nfn=(1) totals\n0 7\n\ntotals: 123 4 5\n";
        assert_eq!(total(profile), Some(123));
        assert_eq!(total("events: Ir\ntotals: 5\n"), Some(5));
        assert_eq!(total("events: Dr Ir\ntotals: 5 6\n"), None);
        assert_eq!(total("events: Ir\n"), None);
        assert_eq!(total(""), None);
    }

    #[test]
    fn more_and_unknown_fail_and_fewer_do_not() {
        let row = |before, now| Row { name: "a.b", before, now };
        let judged = |row| judge(&[row], "rustc 1", "rustc 1").map_err(|e| e.to_string());
        assert_eq!(judged(row(Some(100), Some(105))), Ok(()));
        assert_eq!(judged(row(Some(100), Some(10))), Ok(()));
        for bad in [row(Some(100), Some(106)), row(None, Some(1)), row(Some(1), None)] {
            let error = judged(bad).unwrap_err();
            assert!(error.contains("a.b") && error.contains(ACCEPT), "{error}");
            assert!(!error.contains("compiler"), "{error}");
        }
    }

    #[test]
    fn another_compiler_fails_the_same_way_and_is_named() {
        let rows = [Row { name: "a", before: Some(100), now: Some(106) }];
        let error = judge(&rows, "rustc 1", "rustc 2").unwrap_err().to_string();
        assert!(error.contains("rustc 2; before rustc 1"), "{error}");
        let rows = [Row { name: "a", before: Some(100), now: Some(100) }];
        assert!(judge(&rows, "rustc 1", "rustc 2").is_ok());
    }
}
