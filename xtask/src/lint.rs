//! What is judged without running the program.

use crate::run::{Done, Failed, cargo, command, step};
use crate::setup;
use crate::{fuzz, read};

/// Every judgement that needs no network.
pub(crate) fn all() -> Done {
    setup::for_lint()?;
    toolchain()?;
    step(cargo().args(["fmt", "--all", "--check"]), "`cargo fmt --all` formats the sources")?;
    step(
        cargo().args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]),
        "mend what clippy names, or write #[expect(…, reason = …)] where it is wrong",
    )?;
    fuzz::check()?;
    step(
        command("python3").args(["docs/pictures.py", "--check"]),
        "`docs/pictures.py` draws the pictures of the docs anew",
    )?;
    step(
        cargo().args(["deny", "--log-level", "error", "check", "bans", "licenses", "sources"]),
        "deny.toml says what is banned and why, and which licences are allowed",
    )?;
    step(
        cargo().env("RUSTDOCFLAGS", "-D warnings").args(["doc", "--workspace", "--no-deps"]),
        "mend the comments that rustdoc names",
    )
}

/// Known faults in dependencies. Apart, because the answer changes without any change of ours:
/// it must not decide whether a change may land.
pub(crate) fn advisories() -> Done {
    setup::subcommand(&crate::tools::DENY)?;
    step(
        cargo().args(["deny", "check", "advisories"]),
        "`cargo update -p CRATE`, or replace the crate",
    )
}

/// The version that we promise to build with is the one that we build with.
fn toolchain() -> Done {
    println!("\n==> rust-version is the pinned toolchain");
    let pinned = read("rust-toolchain.toml")?;
    let stated = read("Cargo.toml")?;
    let (pinned, stated) = (value(&pinned, "channel"), value(&stated, "rust-version"));
    if agree(pinned, stated) {
        return Ok(());
    }
    Err(Failed::new(
        format!("rust-toolchain.toml pins {pinned:?}, Cargo.toml states rust-version {stated:?}"),
        "change both together: no other version is ever tested",
    ))
}

/// The quoted value of the first line `key = "value"`.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| {
        let rest = line.trim().strip_prefix(key)?.trim_start().strip_prefix('=')?;
        rest.split('"').nth(1)
    })
}

fn agree(pinned: Option<&str>, stated: Option<&str>) -> bool {
    let (Some(pinned), Some(stated)) = (pinned, stated) else {
        return false;
    };
    pinned.strip_prefix(stated).is_some_and(|patch| patch.is_empty() || patch.starts_with('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_a_value() {
        let text = "[toolchain]\nchannels = \"no\"\nchannel = \"1.95.0\" # why\n";
        assert_eq!(value(text, "channel"), Some("1.95.0"));
        assert_eq!(value(text, "profile"), None);
    }

    #[test]
    fn the_stated_version_may_leave_out_the_patch() {
        for (pinned, stated, want) in [
            ("1.95.0", "1.95", true),
            ("1.95.0", "1.95.0", true),
            ("1.95.0", "1.9", false),
            ("1.95.0", "1.94", false),
        ] {
            assert_eq!(agree(Some(pinned), Some(stated)), want, "{pinned} {stated}");
        }
        assert!(!agree(None, None));
    }
}
