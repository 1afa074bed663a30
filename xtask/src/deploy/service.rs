//! The service under systemd, installed and operated by the commands of its page in the docs.

use std::path::Path;

use crate::deploy::{folder, machine};
use crate::run::{Done, Failed, command, step};
use crate::{read, root};

/// The page whose commands are run.
const PAGE: &str = "docs/src/operating/systemd.md";
/// What is looked at between them, under systemd; `#@ SECTION` stands for the commands of a section.
pub(crate) const OPERATE: &str = "xtask/deploy/operate.sh";
/// The same where systemd does not run.
pub(crate) const BY_HAND: &str = "xtask/deploy/by_hand.sh";
/// What the stories are told with.
const WORDS: &str = "xtask/deploy/words.sh";
const PLACE: &str = "#@ ";

/// Installs `program` on a view of this machine, as the page says, and operates it.
pub(crate) fn check(program: &Path) -> Done {
    let folder = folder("service")?;
    let advice = "is the disk full?";
    // What the commands find in a checkout in which `cargo build --release` was run.
    let checkout = folder.join("checkout");
    let built = checkout.join("target/release");
    step(command("rm").arg("-rf").arg(&checkout), advice)?;
    step(command("mkdir").arg("-p").arg(&built), advice)?;
    step(command("cp").arg("-r").arg(root().join("deploy")).arg(&checkout), advice)?;
    step(command("cp").arg(program).arg(built.join("l7rp")), advice)?;
    machine::run(Path::new("/"), &folder, &script(OPERATE)?)
}

/// The story with the page's commands in it.
pub(crate) fn script(story: &str) -> Result<String, Failed> {
    told(&(read(WORDS)? + &read(story)?), &read(PAGE)?)
}

fn told(story: &str, page: &str) -> Result<String, Failed> {
    let mut script = String::new();
    for line in story.lines() {
        if let Some(section) = line.strip_prefix(PLACE) {
            // Shown as they are run.
            script += "set -x\n";
            script += &commands(page, section)?;
            script += "{ set +x; } 2> /dev/null\n";
        } else {
            script += line;
            script.push('\n');
        }
    }
    Ok(script)
}

/// What a section of the page has in listings of shell commands. What builds is done before: it
/// needs a network.
fn commands(page: &str, section: &str) -> Result<String, Failed> {
    let text = page.split(&format!("\n## {section}\n")).nth(1);
    let text = text.and_then(|rest| rest.split("\n## ").next()).unwrap_or_default();
    let listings = text.split("\n```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    let lines = listings.flat_map(str::lines).filter(|line| !line.starts_with("cargo "));
    let commands: String = lines.flat_map(|line| [line, "\n"]).collect();
    if commands.is_empty() {
        return Err(Failed::new(
            format!("{PAGE} has no section \"{section}\" with commands (```sh)"),
            format!("if it has been rewritten, {OPERATE} and {BY_HAND} must follow"),
        ));
    }
    Ok(commands)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_those_of_the_page() {
        let page = "# T\n\n## One\n\nA:\n\n```sh\ncargo build\na \\\n  b\n```\n\nB:\n\n```sh\nc\n```\n\
                    \n```ini\nno\n```\n\n## Two\n\n```sh\nd\n```\n";
        assert_eq!(commands(page, "One").unwrap(), "a \\\n  b\nc\n");
        let script = told("x\n#@ Two\ny\n", page).unwrap();
        assert_eq!(script, "x\nset -x\nd\n{ set +x; } 2> /dev/null\ny\n");
        assert!(commands(page, "Three").unwrap_err().to_string().contains("\"Three\""));
    }

    #[test]
    fn every_section_that_is_operated_is_on_the_page() {
        for story in [OPERATE, BY_HAND] {
            let script = script(story).unwrap();
            assert!(!script.lines().any(|line| line.starts_with(PLACE)), "{script}");
            assert!(script.contains("\nsystemctl enable --now l7rp\n"), "{script}");
            assert!(!script.contains("cargo"), "{script}");
        }
    }
}
