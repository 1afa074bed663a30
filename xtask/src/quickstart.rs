//! Whether the README's quick start works as it is written. The lines are taken from the README,
//! so that they cannot differ from what readers type; only the ports are exchanged for free
//! ones, since 8080 and 9090 are taken on many a machine.

use std::path::PathBuf;

use crate::run::{Done, Failed, cargo, command, free_ports, step};
use crate::{read, root, setup};

/// Longer than anything in it should take: it starts three programs and asks a few times.
const SECONDS: &str = "60";
/// Enough to meet both backends.
const REQUESTS: usize = 10;

/// Runs the quick start in a folder of its own.
pub(crate) fn check() -> Done {
    // For curl.
    setup::for_tests()?;
    step(cargo().args(["build", "--release"]), "mend what the compiler names")?;
    let script = with_free_ports(&script(&read("README.md")?)?)?;
    let folder = Folder::new()?;
    let file = |e: std::io::Error| {
        Failed::new(format!("cannot write {}: {e}", folder.0.display()), "is the disk full?")
    };
    std::fs::copy(root().join("target/release/l7rp"), folder.0.join("l7rp")).map_err(file)?;
    std::fs::write(folder.0.join("quickstart.sh"), &script).map_err(file)?;
    println!("\nquickstart-check: the README's lines, between checks of ours\n{script}");
    step(
        command("timeout").args([SECONDS, "sh", "quickstart.sh"]).current_dir(&folder.0),
        "the README's quick start must work word for word: mend the program, or the README",
    )
}

/// The section's first two listings, with checks between their lines.
fn script(readme: &str) -> Result<String, Failed> {
    let (Some(serve), Some(ask)) = (listing(readme, 0), listing(readme, 1)) else {
        return Err(Failed::new(
            "README.md has no section \"Quick start\" with two ```sh listings",
            "if it has been rewritten, xtask/src/quickstart.rs must follow",
        ));
    };
    let mut lines = vec![
        // Whatever happens, nothing of it is left running.
        "set -eu; pids=; trap 'kill $pids 2>/dev/null || true' EXIT".to_owned(),
        "up() { for _ in $(seq 100); do curl -s -o /dev/null \"$1\" && return; sleep 0.1; done; echo \"nothing answers at $1\"; exit 1; }".to_owned(),
    ];
    for line in serve.lines().filter(|line| !line.starts_with("cargo build")) {
        if line == "./l7rp --config config.yaml" {
            lines.push(format!("{line} --metrics-bind 127.0.0.1:0 & proxy=$!; pids=$proxy"));
        } else {
            lines.push(line.to_owned());
        }
    }
    for line in ask.lines() {
        if line.ends_with(" &") {
            lines.push(format!("{line} pids=\"$pids $!\""));
        } else if let Some(arguments) = line.strip_prefix("curl ") {
            lines.extend(
                ["9001", "9002", "8080"].map(|port| format!("up http://127.0.0.1:{port}/")),
            );
            lines.push(format!("for _ in $(seq {REQUESTS}); do curl -fsS {arguments}; echo; done"));
        } else {
            lines.push(line.to_owned());
        }
    }
    // A shell starts background programs with SIGINT ignored, so it is the other signal here.
    lines.push(
        "kill -TERM \"$proxy\"; wait \"$proxy\"; echo \"the proxy stopped with exit code 0\""
            .to_owned(),
    );
    Ok(lines.join("\n"))
}

/// The command by which the README builds the program.
pub(crate) fn build_command(readme: &str) -> Option<&str> {
    listing(readme, 0)?.lines().find(|line| line.starts_with("cargo build"))
}

/// The text of the `n`th shell listing of the quick start.
fn listing(readme: &str, n: usize) -> Option<&str> {
    let section = readme.split("\n## Quick start\n").nth(1)?.split("\n## ").next()?;
    section.split("```sh\n").nth(n + 1)?.split("\n```").next()
}

fn with_free_ports(script: &str) -> Result<String, Failed> {
    let mut text = script.to_owned();
    for (port, free) in [":8080", ":9001", ":9002"].into_iter().zip(free_ports::<3>()?) {
        text = text.replace(port, &format!(":{free}"));
    }
    Ok(text)
}

/// A folder in `target`, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Result<Self, Failed> {
        let path = root().join(format!("target/quickstart-{}", std::process::id()));
        std::fs::create_dir_all(&path).map_err(|e| {
            Failed::new(format!("cannot make {}: {e}", path.display()), "is the disk full?")
        })?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left lies in target/, which `cargo clean` removes.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_script_has_the_lines_of_the_readme() {
        let readme = read("README.md").unwrap();
        let script = script(&readme).unwrap();
        for line in [
            "cat > config.yaml <<'EOF'",
            "      - url: http://127.0.0.1:9001",
            "./l7rp --check --config config.yaml",
        ] {
            assert!(script.lines().any(|l| l == line), "{line} is not in\n{script}");
        }
        for start in [
            "./l7rp --config config.yaml --metrics-bind ",
            "./l7rp backend --listen 127.0.0.1:9001 --name one & ",
            "for _ in $(seq 10); do curl -fsS http://127.0.0.1:8080/anything;",
        ] {
            assert!(script.lines().any(|l| l.starts_with(start)), "{start} is not in\n{script}");
        }
        assert!(!script.contains("cargo build"), "built before");
        assert!(build_command(&readme).unwrap().starts_with("cargo build --release"));
    }

    #[test]
    fn ports_are_exchanged_everywhere_by_the_same() {
        let text = with_free_ports("a:8080 b:8080 c:9001").unwrap();
        let ports: Vec<&str> = text.split(' ').map(|word| &word[2..]).collect();
        assert_eq!(ports[0], ports[1]);
        assert_ne!(ports[0], ports[2]);
    }
}
