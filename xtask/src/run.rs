//! Running other programs, and saying which one failed.

use std::ffi::OsString;
use std::fmt;
use std::net::TcpListener;
use std::process::{Command, Stdio};

use crate::root;

/// How a recipe ends.
pub(crate) type Done = Result<(), Failed>;

/// What went wrong and what a person can do about it.
#[derive(Debug, Clone)]
pub(crate) struct Failed {
    what: String,
    advice: String,
}

impl Failed {
    pub(crate) fn new(what: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { what: what.into(), advice: advice.into() }
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n  what to do: {}", self.what, self.advice)
    }
}

/// The cargo that runs us, so that every step uses the pinned toolchain.
pub(crate) fn cargo() -> Command {
    command(std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo")))
}

/// A program, to be run in the repository's top folder.
pub(crate) fn command(program: impl Into<OsString>) -> Command {
    let mut command = Command::new(program.into());
    command.current_dir(root());
    command
}

/// Runs `command` with our output, and fails if it fails.
pub(crate) fn step(command: &mut Command, advice: &str) -> Done {
    announce(command);
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Failed::new(format!("`{}`: {status}", written(command)), advice)),
        Err(e) => Err(not_started(command, &e)),
    }
}

/// What cannot be done here is a failure, or, `where_possible`, told together with what is judged
/// `instead`.
pub(crate) fn left_out(where_possible: bool, obstacle: &Failed, instead: &str) -> Done {
    if !where_possible {
        return Err(obstacle.clone());
    }
    println!("\nLEFT OUT: {obstacle}\n  what is judged instead: {instead}");
    Ok(())
}

/// Ports of this machine that nobody has; the same one is not drawn twice.
pub(crate) fn free_ports<const N: usize>() -> Result<[u16; N], Failed> {
    // Held until all are drawn.
    let mut held = Vec::new();
    let mut ports = [0; N];
    for port in &mut ports {
        let drawn = TcpListener::bind("127.0.0.1:0")
            .and_then(|socket| Ok((socket.local_addr()?.port(), socket)));
        let (free, socket) =
            drawn.map_err(|e| Failed::new(format!("no free port: {e}"), "close some programs"))?;
        *port = free;
        held.push(socket);
    }
    Ok(ports)
}

/// Whether `command` runs and succeeds; its output is thrown away.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// Tells what is about to run.
pub(crate) fn announce(command: &Command) {
    println!("\n==> {}", written(command));
}

/// The error for a program that cannot be started at all.
pub(crate) fn not_started(command: &Command, e: &std::io::Error) -> Failed {
    let program = command.get_program().display();
    Failed::new(
        format!("cannot start `{program}`: {e}"),
        "`cargo xtask setup` installs what is missing",
    )
}

/// The command as a person would type it.
pub(crate) fn written(command: &Command) -> String {
    let mut words = Vec::new();
    for (name, value) in command.get_envs() {
        let value = value.unwrap_or_default().display().to_string();
        words.push(format!("{}={value:?}", name.display()));
    }
    let program = std::path::Path::new(command.get_program());
    words.push(program.file_name().unwrap_or(command.get_program()).display().to_string());
    words.extend(command.get_args().map(|argument| argument.display().to_string()));
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_names_the_command_and_the_way_out() {
        let error = step(command("sh").args(["-c", "exit 3"]), "read the output").unwrap_err();
        let text = error.to_string();
        assert!(text.contains("`sh -c exit 3`"), "{text}");
        assert!(text.contains("what to do: read the output"), "{text}");
    }

    #[test]
    fn an_obstacle_fails_unless_what_is_possible_was_asked_for() {
        let obstacle = Failed::new("no room", "make some");
        assert!(left_out(false, &obstacle, "").unwrap_err().to_string().contains("no room"));
        assert!(left_out(true, &obstacle, "").is_ok());
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let error = step(&mut command("no-such-program-here"), "").unwrap_err();
        assert!(error.to_string().contains("no-such-program-here"), "{error}");
    }

    #[test]
    fn commands_are_shown_with_their_environment() {
        let mut doc = command("/usr/bin/cargo");
        doc.arg("doc").env("RUSTDOCFLAGS", "-D warnings");
        assert_eq!(written(&doc), r#"RUSTDOCFLAGS="-D warnings" cargo doc"#);
    }
}
