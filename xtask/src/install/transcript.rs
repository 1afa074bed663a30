//! What was run and what it answered, as a person would have seen it: shown, and kept in a file.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use crate::run::{Done, Failed, announce, not_started, written};

/// A file that grows with what is run.
pub(super) struct Transcript {
    file: File,
}

impl Transcript {
    /// Begins it anew.
    pub(super) fn begin(path: &Path) -> Result<Self, Failed> {
        let file = File::create(path).map_err(|e| {
            Failed::new(format!("cannot write {}: {e}", path.display()), "is it somebody else's?")
        })?;
        Ok(Self { file })
    }

    /// Adds a line, which is shown, too.
    pub(super) fn tell(&mut self, line: &str) -> Done {
        println!("{line}");
        writeln!(self.file, "{line}")
            .map_err(|e| Failed::new(format!("the transcript: {e}"), "is the disk full?"))
    }

    /// Runs a command under a heading and adds what it says; fails if it fails.
    pub(super) fn step(&mut self, heading: &str, command: &mut Command, advice: &str) -> Done {
        #[expect(clippy::disallowed_methods, reason = "how long a step takes is for people")]
        let began = Instant::now();
        announce(command);
        self.tell(&format!("\n##### {heading}"))?;
        let failed =
            |e: std::io::Error| Failed::new(format!("`{}`: {e}", written(command)), advice);
        // One pipe for both, so that their lines keep their order.
        let (reader, writer) = std::io::pipe().map_err(failed)?;
        let second = writer.try_clone().map_err(failed)?;
        command.stdin(Stdio::null()).stdout(writer).stderr(second);
        let mut child = command.spawn().map_err(|e| not_started(command, &e))?;
        // Ours would keep the pipe from ending.
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut lines = BufReader::new(reader);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
            self.tell(String::from_utf8_lossy(&line).trim_end())?;
            line.clear();
        }
        let status = child.wait().map_err(|e| not_started(command, &e))?;
        self.tell(&format!("({heading}: {status}, {} s)", began.elapsed().as_secs()))?;
        if status.success() {
            return Ok(());
        }
        Err(Failed::new(format!("`{}`: {status}", written(command)), advice))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::command;

    #[test]
    fn it_has_what_was_said_on_both_ways_and_how_it_ended() {
        let path = std::env::temp_dir().join(format!("l7rp-transcript-{}", std::process::id()));
        let mut transcript = Transcript::begin(&path).unwrap();
        let script = "echo a; echo b >&2; echo c; exit 3";
        let error = transcript.step("Try", command("sh").args(["-c", script]), "mend it");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(text.contains("##### Try\na\nb\nc\n(Try: exit status: 3, "), "{text}");
        assert!(error.unwrap_err().to_string().contains("mend it"));
    }
}
