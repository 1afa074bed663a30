//! Whether the files of a configuration have changed: looked at by name once a second, so that
//! it does not matter whether they are written, replaced, or reached by a link that is moved. A
//! thread of its own does it, for a file system may hang.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

use tokio::sync::mpsc;
use xxhash_rust::xxh3::Xxh3;

use super::{MAX_FILE, Plan};

/// How often they are looked at, and for how long they must have been still.
const EVERY: Duration = Duration::from_secs(1);

/// Files, and what they were like.
pub type Known = BTreeMap<PathBuf, Seen>;

/// What a file was like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Device, inode, size, change time.
    outside: Option<(u64, u64, u64, i64, i64)>,
    /// Hash of what is in it; `None`: it cannot be read, or is not to be.
    inside: Option<u128>,
}

/// A thread that looks at the files of a configuration.
#[derive(Debug)]
pub struct Watch {
    file: PathBuf,
    changes: mpsc::Receiver<()>,
    /// What has been read of them, and which they are from now on.
    known: SyncSender<(Known, Vec<PathBuf>)>,
    paths: Vec<PathBuf>,
}

impl Watch {
    /// Watches `file`, and what `plan` names.
    ///
    /// # Errors
    /// There is no thread to be had.
    pub fn start(file: &Path, plan: &Plan) -> io::Result<Self> {
        let (told, changes) = mpsc::channel(1);
        let (known, orders) = sync_channel(1);
        let paths = paths(file, plan);
        let watched = look_at(&paths, &Known::new());
        std::thread::Builder::new()
            .name("l7rp-watch".into())
            .spawn(move || watch(watched, &orders, &told))?;
        Ok(Self { file: file.to_owned(), changes, known, paths })
    }

    /// The files.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// Waits until something has changed, and has then been still for a second.
    pub async fn changed(&mut self) {
        if self.changes.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }

    /// The files have been read when they were as `seen`; what `plan` names is watched now.
    pub fn were_read(&mut self, seen: Known, plan: &Plan) {
        self.paths = paths(&self.file, plan);
        // A thread that hangs has not taken the last ones yet, and finds out by itself.
        let _ = self.known.try_send((seen, self.paths.clone()));
        // What it has told before that was read, or it will tell again.
        while self.changes.try_recv().is_ok() {}
    }
}

fn watch(known: Known, orders: &Receiver<(Known, Vec<PathBuf>)>, told: &mpsc::Sender<()>) {
    let mut looking = Looking { known, restless: false };
    loop {
        match orders.recv_timeout(EVERY) {
            Ok((seen, paths)) => {
                let new = paths.into_iter().filter(|path| !seen.contains_key(path));
                let new = look_at(&new.collect::<Vec<_>>(), &Known::new());
                looking = Looking { known: seen.into_iter().chain(new).collect(), restless: false };
            }
            Err(RecvTimeoutError::Timeout) => {
                if looking.look() {
                    let _ = told.try_send(());
                }
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// What is known of files that may be changing.
#[derive(Debug)]
struct Looking {
    known: Known,
    /// They have changed, and may still be changing.
    restless: bool,
}

impl Looking {
    /// Looks once. True: what has changed since the last time that this was true is still now.
    fn look(&mut self) -> bool {
        let mut changes = false;
        for (path, seen) in &mut self.known {
            let now = look(path, seen);
            changes |= now.inside != seen.inside;
            *seen = now;
        }
        let ready = self.restless && !changes;
        self.restless = changes;
        ready
    }
}

/// Looks at files; those that are as `before` are not read.
pub fn look_at(paths: &[PathBuf], before: &Known) -> Known {
    let never = Seen::default();
    let seen = |path: &PathBuf| look(path, before.get(path).unwrap_or(&never));
    paths.iter().map(|path| (path.clone(), seen(path))).collect()
}

fn paths(file: &Path, plan: &Plan) -> Vec<PathBuf> {
    let mut paths = files(plan);
    paths.push(file.to_owned());
    paths
}

/// The files that a plan names.
fn files(plan: &Plan) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for tls in plan.listeners.iter().filter_map(|listener| listener.tls.as_ref()) {
        files.extend(tls.certs.iter().flat_map(|c| [c.cert.clone(), c.key.clone()]));
        files.extend(tls.client_auth.iter().map(|auth| auth.ca_file.clone()));
        files.extend(tls.autocert.iter().filter_map(|autocert| autocert.ca_file.clone()));
    }
    for tls in plan.pools.iter().map(|pool| &pool.tls) {
        files.extend(tls.ca_file.clone());
        files.extend(tls.client_cert.clone().into_iter().flat_map(|(cert, key)| [cert, key]));
    }
    files.extend(plan.admin_token.iter().map(|token| token.path.clone()));
    files
}

fn look(path: &Path, before: &Seen) -> Seen {
    let metadata = std::fs::metadata(path).ok();
    let outside =
        metadata.as_ref().map(|m| (m.dev(), m.ino(), m.size(), m.ctime(), m.ctime_nsec()));
    if outside.is_some() && outside == before.outside {
        return before.clone();
    }
    // What is no file, a pipe for example, may never end; what is huge is no configuration.
    let readable = metadata.is_some_and(|m| m.is_file() && m.len() <= MAX_FILE);
    Seen { outside, inside: readable.then(|| hash(path)).flatten() }
}

fn hash(path: &Path) -> Option<u128> {
    let mut file = File::open(path).ok()?.take(MAX_FILE);
    let (mut hash, mut part) = (Xxh3::new(), vec![0; 64 << 10]);
    loop {
        match file.read(&mut part).ok()? {
            0 => return Some(hash.digest128()),
            n => hash.update(&part[..n]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(file: &Path) -> Looking {
        Looking { known: look_at(&[file.to_owned()], &Known::new()), restless: false }
    }

    #[test]
    fn what_has_changed_is_told_once_it_is_still() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a.yaml");
        std::fs::write(&file, "a").unwrap();
        let mut watch = watch(&file);
        assert_eq!([watch.look(), watch.look()], [false, false]);
        std::fs::write(&file, "b").unwrap();
        assert!(!watch.look(), "it may be half written");
        std::fs::write(&file, "bc").unwrap();
        assert!(!watch.look());
        assert_eq!([watch.look(), watch.look()], [true, false]);
    }

    #[test]
    fn a_link_that_is_moved_is_a_change() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for (data, text) in [("one", "a"), ("two", "b"), ("three", "b")] {
            std::fs::create_dir(at(data)).unwrap();
            std::fs::write(at(data).join("c.yaml"), text).unwrap();
        }
        let point = |to: &str| {
            std::os::unix::fs::symlink(to, at("next")).unwrap();
            std::fs::rename(at("next"), at("data")).unwrap();
        };
        point("one");
        std::os::unix::fs::symlink("data/c.yaml", at("c.yaml")).unwrap();
        let mut watch = watch(&at("c.yaml"));
        point("two");
        assert_eq!([watch.look(), watch.look()], [false, true]);
        point("three");
        assert_eq!([watch.look(), watch.look()], [false, false], "it says the same");
    }

    #[test]
    fn a_file_that_is_gone_and_comes_back_is_a_change() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a.yaml");
        std::fs::write(&file, "a").unwrap();
        let mut watch = watch(&file);
        std::fs::remove_file(&file).unwrap();
        assert_eq!([watch.look(), watch.look()], [false, true]);
        std::fs::write(&file, "a").unwrap();
        assert_eq!([watch.look(), watch.look()], [false, true]);
    }
}
