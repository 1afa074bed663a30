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
/// What the lines between the README's need. A shell starts background programs with SIGINT
/// ignored, so it is the other signal. Whatever happens, nothing of it is left running.
const BEGIN: &str = r#"set -eu; pids=; trap 'kill $pids 2>/dev/null || true' EXIT
up() { for _ in $(seq 100); do curl -s -o /dev/null "$@" && return; sleep 0.1; done; echo "no answer: $*"; exit 1; }
stop() { kill -TERM "$proxy"; wait "$proxy"; echo "the proxy stopped with exit code 0"; }"#;

/// Runs the quick start in a folder of its own.
pub(crate) fn check() -> Done {
    // For curl.
    setup::for_tests()?;
    step(cargo().args(["build", "--release"]), "mend what the compiler names")?;
    let script = with_free_ports(&script(&read("README.md")?, " --metrics-bind 127.0.0.1:0")?)?;
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

/// The section's commands with checks between them, for the checkout on a machine on which they
/// have been built, and where nobody else has their ports.
pub(crate) fn in_the_checkout(readme: &str) -> Result<String, Failed> {
    Ok(format!("cd /srv/l7rp\n{}", script(readme, "")?))
}

/// The section's listings but for what builds, with checks between their lines. `more` is added
/// where the proxy is started.
fn script(readme: &str, more: &str) -> Result<String, Failed> {
    let listings = (listing(readme, 0), listing(readme, 1), listing(readme, 2));
    let (Some(serve), Some(ask), Some(without_file)) = listings else {
        return Err(Failed::new(
            "README.md has no section \"Quick start\" with three ```sh listings",
            "if it has been rewritten, xtask/src/quickstart.rs must follow",
        ));
    };
    let mut lines = vec![BEGIN.to_owned()];
    let mut request = String::new();
    for line in [serve, ask].into_iter().flat_map(str::lines) {
        if line.starts_with("cargo build") {
            continue;
        }
        if line.starts_with("./") || line.starts_with("curl ") {
            lines.push(format!("echo '$ {line}'"));
        }
        if line.starts_with("./l7rp --config ") {
            lines.push(format!("{line}{more} & proxy=$!; pids=$proxy"));
        } else if line.ends_with(" &") {
            lines.push(format!("{line} pids=\"$pids $!\""));
        } else if let Some(arguments) = line.strip_prefix("curl ") {
            request = asked(arguments);
            lines.push(request.clone());
        } else {
            lines.push(line.to_owned());
            if line == "EOF" {
                lines.push("echo '$ cat config.yaml'; cat config.yaml".to_owned());
            }
        }
    }
    lines.push("stop".to_owned());
    for line in without_file.lines() {
        lines.push(format!("echo '$ {line}'"));
        lines.push(format!("{line}{more} & proxy=$!; pids=\"$pids $proxy\""));
        lines.push(request.clone());
    }
    lines.push("stop".to_owned());
    Ok(lines.join("\n"))
}

/// Asks often enough to meet both backends; each answer must be one of theirs.
fn asked(arguments: &str) -> String {
    let mut lines: Vec<String> =
        ["9001", "9002"].map(|port| format!("up http://127.0.0.1:{port}/")).into();
    // No upstream is eligible before its first probe.
    lines.push(format!("up -f {arguments}"));
    lines.push(format!("for _ in $(seq {REQUESTS}); do curl -fsS {arguments}; done > answers"));
    lines.push("cat answers".to_owned());
    lines.push(format!(
        "test \"$(grep -c -E '^(one|two) request=' answers)\" = {REQUESTS}; rm answers"
    ));
    lines.join("\n")
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
        let script = script(&readme, " --more").unwrap();
        for line in [
            "cat > config.yaml <<'EOF'",
            "      - url: http://127.0.0.1:9001",
            "./l7rp --check --config config.yaml",
        ] {
            assert!(script.lines().any(|l| l == line), "{line} is not in\n{script}");
        }
        for start in [
            "./l7rp --config config.yaml --more & ",
            "./l7rp --listen 127.0.0.1:8080 --backends http://127.0.0.1:9001,http://127.0.0.1:9002 --more & ",
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
