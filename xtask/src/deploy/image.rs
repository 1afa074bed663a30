//! The image, without an engine that builds images: the Dockerfile's own command builds the
//! program from what the build would see, and it runs in a root folder that has what the last
//! stage copies and nothing else.

use std::path::PathBuf;

use crate::deploy::{folder, write};
use crate::run::{Done, Failed, command, step};
use crate::{read, root, setup, tools};

const DOCKERFILE: &str = "deploy/docker/Dockerfile";
/// Which files of the checkout the build sees.
const IGNORE: &str = "deploy/docker/Dockerfile.dockerignore";
/// Where the first stage puts what the last one copies.
const OUT: &str = "/out/";
const MEND: &str = "mend the Dockerfile; if it is right, xtask/src/deploy/image.rs must follow";

/// Judges the Dockerfile, and runs the commands of its first stage; the program that they make.
pub(super) fn build() -> Result<PathBuf, Failed> {
    let hadolint = tools::Packages::DEPLOY.folder().join("bin/hadolint");
    step(command(hadolint).args(["--failure-threshold", "style", DOCKERFILE]), MEND)?;
    let text = read(DOCKERFILE)?;
    toolchain(&text, &read("rust-toolchain.toml")?)?;
    let made = folder("image")?;
    step(command("rm").arg("-rf").arg(&made), "is it somebody else's?")?;
    let context = context()?;
    for run in values(&text, "RUN") {
        let script = run
            .replace(OUT, &format!("{}/", folder("image")?.display()))
            // The same but for its speed: the optimizer would take most of CI's time.
            .replace(" --release", "")
            .replace("/release/", "/debug/");
        let mut shell = command("sh");
        shell.args(["-euc", &script]).current_dir(&context);
        // The Dockerfile knows nothing of this machine's own settings.
        shell.env_remove("CARGO_TARGET_DIR").env("CARGO_PROFILE_DEV_DEBUG", "false");
        step(&mut shell, MEND)?;
    }
    Ok(made.join("usr/bin/l7rp"))
}

/// Runs it as the last stage says, in a root folder of what is there copied.
pub(super) fn run() -> Done {
    let text = read(DOCKERFILE)?;
    let last = text.rsplit("\nFROM ").next().unwrap_or_default();
    let one = |keyword: &str| -> Result<String, Failed> {
        let mut all = values(last, keyword).into_iter();
        match (all.next(), all.next()) {
            (Some(value), None) => Ok(value),
            _ => Err(Failed::new(
                format!("{DOCKERFILE}: not exactly one {keyword} in the last stage"),
                MEND,
            )),
        }
    };
    if !last.starts_with("scratch\n") || one("COPY")? != format!("--from=build {OUT} /") {
        let what = format!("{DOCKERFILE}: the last stage is more than what was put into {OUT}");
        return Err(Failed::new(what, MEND));
    }
    let check = one("HEALTHCHECK")?;
    let check = check.split_once("CMD ").map_or("", |(_, command)| command).to_owned();
    let place = folder("container")?;
    write(&place.join("command"), words(&format!("{}{}", one("ENTRYPOINT")?, one("CMD")?))?)?;
    write(&place.join("check"), words(&check)?)?;
    let mut run = setup::as_root("unshare")?;
    run.args(["--mount", "--pid", "--fork", "--kill-child", "--net", "--mount-proc"]);
    run.args(["timeout", "120", "sh"]).arg(root().join("xtask/deploy/container.sh"));
    run.args([folder("image")?, place]).args([one("USER")?, one("STOPSIGNAL")?]);
    step(&mut run, "the line with FAILED says what did not come true")
}

/// A folder with those files of the checkout that the build would get to see.
fn context() -> Result<PathBuf, Failed> {
    let to = folder("context")?;
    let ignore = read(IGNORE)?;
    let seen = seen(&ignore)?;
    // What was built there before saves minutes.
    let copy = format!(
        "find . -mindepth 1 -maxdepth 1 ! -name target -exec rm -rf {{}} + && cd \"$0\" && \
         cp --recursive --preserve=timestamps --target-directory=\"$1\" {}",
        seen.join(" ")
    );
    let mut shell = command("sh");
    shell.args(["-euc", &copy]).arg(root()).arg(&to).current_dir(&to);
    step(&mut shell, "are all files of the checkout there?")?;
    Ok(to)
}

/// The names that a list of this one form lets through: nothing, but for …
fn seen(ignore: &str) -> Result<Vec<&str>, Failed> {
    let mut lines = ignore.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let all = lines.next() == Some("*");
    let names: Option<Vec<&str>> = lines.map(|line| line.strip_prefix('!')).collect();
    names.filter(|names| all && !names.is_empty()).ok_or_else(|| {
        Failed::new(
            format!("{IGNORE} is more than `*` and then lines with `!`"),
            "what is let in must be named: a secret that lies about would be sent to the engine",
        )
    })
}

/// The image that builds has the toolchain that everything is tested with.
fn toolchain(dockerfile: &str, pinned: &str) -> Done {
    let version = pinned.split("channel = \"").nth(1).and_then(|rest| rest.split('"').next());
    let image = dockerfile.split("\nFROM rust:").nth(1).and_then(|rest| rest.split('-').next());
    if version.is_some() && version == image {
        return Ok(());
    }
    Err(Failed::new(
        format!("{DOCKERFILE} builds with rust:{image:?}, rust-toolchain.toml has {version:?}"),
        "change both together",
    ))
}

/// What follows each `keyword` at the beginning of a line, to the end of the instruction.
fn values(dockerfile: &str, keyword: &str) -> Vec<String> {
    let lines = dockerfile.lines().filter(|line| !line.starts_with('#'));
    let joined = lines.collect::<Vec<_>>().join("\n").replace("\\\n", "");
    let values = joined.lines().filter_map(|line| line.strip_prefix(keyword)?.strip_prefix(' '));
    values.map(|value| value.trim().to_owned()).collect()
}

/// The words of lists like `["a", "b"]`, a line each.
fn words(lists: &str) -> Result<String, Failed> {
    let words: Vec<&str> = lists.split('"').skip(1).step_by(2).collect();
    if words.is_empty() || words.iter().any(|word| word.contains(char::is_whitespace)) {
        return Err(Failed::new(format!("{DOCKERFILE}: {lists} is no list of words"), MEND));
    }
    Ok(words.iter().flat_map(|word| [*word, "\n"]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instructions_are_read_over_lines() {
        let text = "# RUN no\nRUN a && \\\n    b\nFROM x\nRUN c\n";
        assert_eq!(values(text, "RUN"), ["a &&     b", "c"]);
        assert_eq!(words("[\"a\", \"b\"][\"c\"]").unwrap(), "a\nb\nc\n");
        assert!(words("a b").is_err());
    }

    #[test]
    fn only_what_is_named_is_seen() {
        assert_eq!(seen("# why\n*\n!a\n!.b\n").unwrap(), ["a", ".b"]);
        for bad in ["", "*\n", "!a\n", "*\n!a\nb\n"] {
            assert!(seen(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_dockerfile_is_what_we_can_read() {
        let text = read(DOCKERFILE).unwrap();
        toolchain(&text, &read("rust-toolchain.toml").unwrap()).unwrap();
        assert!(toolchain(&text, "channel = \"1.0\"").is_err());
        assert!(values(&text, "RUN")[0].contains("target-feature=+crt-static"));
        seen(&read(IGNORE).unwrap()).unwrap();
    }
}
