//! The one shell of a page: in a network of its own, where only loopback is, so that every port is
//! free and nothing outside is there.

#![expect(
    clippy::disallowed_methods,
    reason = "a page has a limit of real time, and others are asked"
)]

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::page::Peer;
use super::serving;
use crate::run::{Failed, command, succeeds};

/// For all of a page.
const LIMIT: Duration = Duration::from_mins(2);
/// How long a program may take to listen, or to say what its page says.
const PATIENCE: Duration = Duration::from_secs(15);
/// Makes `example.crt` and `example.key`, and both in one `example.pem`.
const CERTIFICATE: &str = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes \
    -days 30 -subj /CN=www.example.com -keyout example.key -out example.crt &&
    cat example.key example.crt > example.pem";
const POLL: Duration = Duration::from_millis(20);

/// What a command has come to.
pub(super) struct Outcome {
    pub(super) status: String,
    /// Both outputs, as a terminal would show them.
    pub(super) output: String,
}

/// A shell, and what it has started; all of it ends with this.
pub(super) struct Shell {
    child: Child,
    stdin: ChildStdin,
    done: Receiver<String>,
    /// Where commands and outputs lie.
    notes: PathBuf,
    folder: PathBuf,
    began: Instant,
    count: usize,
}

impl Shell {
    /// A shell in the empty folder `folder`, with the program in `programs` on its path.
    pub(super) fn start(folder: PathBuf, notes: PathBuf, programs: &Path) -> Result<Self, Failed> {
        for path in [&folder, &notes] {
            let made = std::fs::remove_dir_all(path).or_else(|e| {
                if e.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(e) }
            });
            made.and_then(|()| std::fs::create_dir_all(path)).map_err(|e| file(path, &e))?;
        }
        let path = format!(
            "{}:{}:/usr/local/sbin:/usr/sbin:/sbin",
            programs.display(),
            std::env::var("PATH").unwrap_or_default()
        );
        let mut shell = command("unshare");
        shell.args(alone()?).args(["bash", "--noprofile", "--norc", "-s"]).current_dir(&folder);
        shell.env_clear().env("PATH", path).env("HOME", &folder).env("LC_ALL", "C.UTF-8");
        shell.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = shell.spawn().map_err(|e| crate::run::not_started(&shell, &e))?;
        let (Some(stdin), Some(stdout)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Failed::new("a shell without pipes", "try again"));
        };
        let (tell, done) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    break;
                }
            }
        });
        let began = Instant::now();
        let mut shell = Self { child, stdin, done, notes, folder, began, count: 0 };
        let up = shell.run("ip link set lo up")?;
        if up.status != "0" {
            return Err(Failed::new(format!("no loopback: {}", up.output), "install iproute2"));
        }
        Ok(shell)
    }

    /// Runs a command to its end, or starts it if it ends in `&`.
    pub(super) fn run(&mut self, text: &str) -> Result<Outcome, Failed> {
        self.count += 1;
        let source = self.notes.join(format!("{}.sh", self.count));
        let output = self.output();
        std::fs::write(&source, format!("{text}\n")).map_err(|e| file(&source, &e))?;
        // Read as a file of its own, so that a quote that is never closed ends with it.
        let line = format!(
            "{{ . '{}'; }} </dev/null >'{}' 2>&1; echo \"done $? ${{!:-0}}\"\n",
            source.display(),
            output.display()
        );
        let told = self.stdin.write_all(line.as_bytes()).and_then(|()| self.stdin.flush());
        let (status, started) = match told {
            Ok(()) => self.wait()?,
            Err(e) => (format!("the shell has ended: {e}"), 0),
        };
        if text.ends_with(" &") && text.contains("l7rp ") {
            if text.starts_with("l7rp ") {
                // Until then it is another shell.
                self.until(|_| serving::has_begun(started));
            }
            self.until(serving::all_listen);
        }
        let output = std::fs::read(&output).unwrap_or_default();
        Ok(Outcome { status, output: String::from_utf8_lossy(&output).into_owned() })
    }

    /// What the last command has printed, once it is `enough`, or when there is no more time.
    pub(super) fn printed(&self, enough: impl Fn(&str) -> bool) -> String {
        let read = || {
            String::from_utf8_lossy(&std::fs::read(self.output()).unwrap_or_default()).into_owned()
        };
        self.until(|_| enough(&read()));
        read()
    }

    /// Has another proxy read its configuration.
    pub(super) fn check_peer(&mut self, program: Peer, text: &str) -> Result<Outcome, Failed> {
        let (name, text) = match program {
            Peer::Nginx => ("nginx.conf", nginx(text)),
            Peer::Haproxy => ("haproxy.cfg", haproxy(text)),
        };
        self.write(name, &text)?;
        // The files that all of them name.
        let made = self.run(CERTIFICATE)?;
        if made.status != "0" {
            return Ok(made);
        }
        self.run(match program {
            Peer::Nginx => "nginx -t -q -p . -c nginx.conf -g 'error_log stderr warn;'",
            Peer::Haproxy => "haproxy -c -q -f haproxy.cfg",
        })
    }

    /// Writes a file into the page's folder.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<(), Failed> {
        let path = self.folder.join(name);
        std::fs::write(&path, text).map_err(|e| file(&path, &e))
    }

    fn output(&self) -> PathBuf {
        self.notes.join(format!("{}.out", self.count))
    }

    /// The exit code of what has been told last, and the process in the background that was started
    /// last.
    fn wait(&mut self) -> Result<(String, u32), Failed> {
        let left = LIMIT.saturating_sub(self.began.elapsed());
        match self.done.recv_timeout(left) {
            Ok(line) => {
                let line = line.strip_prefix("done ").unwrap_or(&line);
                let (status, started) = line.split_once(' ').unwrap_or((line, ""));
                Ok((status.to_owned(), started.parse().unwrap_or(0)))
            }
            Err(RecvTimeoutError::Timeout) => Err(Failed::new(
                format!("the page takes longer than {} s", LIMIT.as_secs()),
                "what does not end by itself is started with ` &`",
            )),
            Err(RecvTimeoutError::Disconnected) => {
                Err(Failed::new("the shell of the page has ended", "a page must not `exit`"))
            }
        }
    }

    fn until(&self, holds: impl Fn(u32) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !holds(self.child.id()) && Instant::now() < end {
            sleep(POLL);
        }
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        // The shell leads the group of all that it has started. What cannot be ended is gone.
        let group = format!("-{}", self.child.id());
        let _ = succeeds(command("kill").args(["-KILL", "--", &group]));
        let _ = self.child.wait();
    }
}

/// How `unshare` is called here: as root, or with a user namespace where those are allowed.
fn alone() -> Result<&'static [&'static str], Failed> {
    const WAYS: [&[&str]; 2] = [&["--net"], &["--user", "--map-root-user", "--net"]];
    let works = |way: &&&[&str]| succeeds(command("unshare").args(**way).arg("true"));
    WAYS.iter().find(works).copied().ok_or_else(|| {
        Failed::new(
            "`unshare --net` is allowed neither by itself nor with `--user`",
            "allow user namespaces (`sysctl kernel.unprivileged_userns_clone=1`), or run it as root",
        )
    })
}

/// A whole file of nginx from one, or from what stands within its `http`.
fn nginx(text: &str) -> String {
    if text.contains("http {") {
        return text.to_owned();
    }
    // Debian's own folders are root's.
    let folders = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .map(|name| format!("{name}_temp_path {name};\n"))
        .concat();
    format!("pid nginx.pid;\nevents {{}}\nhttp {{\naccess_log off;\n{folders}{text}}}\n")
}

/// A whole file of `HAProxy` from its sections, with the times that it warns about without.
fn haproxy(text: &str) -> String {
    if text.lines().any(|line| line.starts_with("defaults")) {
        return text.to_owned();
    }
    format!(
        "defaults\n  mode http\n  timeout connect 5s\n  timeout client 30s\n  timeout server 30s\n{text}"
    )
}

fn file(path: &Path, e: &std::io::Error) -> Failed {
    Failed::new(format!("cannot write {}: {e}", path.display()), "is the disk full?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_page_shows_of_another_proxy_is_made_whole() {
        assert!(nginx("server { listen 80; }\n").contains("http {\naccess_log off;"));
        assert_eq!(nginx("events {}\nhttp {\n}\n"), "events {}\nhttp {\n}\n");
        assert!(haproxy("frontend http\n").starts_with("defaults\n"));
        assert_eq!(haproxy("defaults\n  mode tcp\n"), "defaults\n  mode tcp\n");
    }
}
