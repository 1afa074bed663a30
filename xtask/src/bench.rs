//! Measurements: the program beside other proxies. How is told in `bench/README.md`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::run::{Done, Failed, announce, cargo, command, not_started, step, written};
use crate::setup;

/// The processor time of a small request, as a share of `HAProxy`'s. Looked at, not judged:
/// it changes with the machine and with who else is on it.
const MAX_RATIO: &str = "0.9";
/// How `compare.py` says that the ratio is greater.
const OVER_RATIO: i32 = 3;
const WHERE: &str =
    "what could not be measured is named above; the proxies' own words are in target/bench/run";
/// The system's own, as for the tests.
const PYTHON: &str = "/usr/bin/python3";

/// Without arguments, the whole of it, into files that the README shows; `--quick`, one line;
/// others are for `compare.py`, and nothing is written into the repository.
pub(crate) fn run(arguments: &[String]) -> Done {
    match arguments {
        [] => {
            measure(&[])?;
            step(
                python().args(["bench/publish.py", "target/bench/results.json"]),
                "the figures are in target/bench/results.json; publish.py says what it misses",
            )
        }
        [flag] if flag == "--quick" => quick(),
        _ => measure(arguments),
    }
}

/// Whether the kit is sound, without measuring anything.
pub(crate) fn check() -> Done {
    step(
        python().args(["-m", "compileall", "-q", "bench"]),
        "mend the syntax that Python complains of",
    )?;
    step(
        python().args(["-m", "unittest", "discover", "-q", "-s", "bench/tests", "-t", "bench"]),
        "mend the kit in bench/benchkit, or the test that is wrong about it",
    )
}

/// One line, in half a minute. Fails if the kit does not work, whatever the figure is.
pub(crate) fn quick() -> Done {
    prepare("tools")?;
    let mut compare = compare();
    compare.args(["--quick", "small", "-p", "l7rp,haproxy", "--max-ratio", MAX_RATIO]);
    announce(&compare);
    let status = compare.status().map_err(|e| not_started(&compare, &e))?;
    if status.code() == Some(OVER_RATIO) {
        println!("bench: over {MAX_RATIO}. Is the machine busy? If not, look at what has changed");
    } else if !status.success() {
        return Err(Failed::new(format!("`{}`: {status}", written(&compare)), WHERE));
    }
    Ok(())
}

fn measure(arguments: &[String]) -> Done {
    prepare("wheels")?;
    step(compare().args(arguments), WHERE)
}

/// Installs the peers (a part of `install_peers.sh`) and builds the program.
fn prepare(peers: &str) -> Done {
    setup::for_tests()?;
    step(
        command("bash").args(["bench/install_peers.sh", "--work", "target/bench", peers]),
        "rustc must be on the path, and pip must reach its package index",
    )?;
    step(cargo().args(["build", "--release"]), "mend what the compiler names")
}

fn compare() -> Command {
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| OsString::from("target"));
    let program: PathBuf = Path::new(&target).join("release/l7rp");
    let mut compare = python();
    compare.args(["bench/compare.py", "--work", "target/bench", "--l7rp"]).arg(program);
    compare
}

fn python() -> Command {
    let mut python = command(PYTHON);
    // No compiled files beside the sources.
    python.env("PYTHONPYCACHEPREFIX", "target/bench/python-cache");
    python
}
