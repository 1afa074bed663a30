//! Whether the files of a configuration have changed: looked at by name once a second, so that
//! it does not matter whether they are written, replaced, or reached by a link that is moved.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use xxhash_rust::xxh3::xxh3_128;

use super::Plan;

/// How often they are looked at, and for how long they must have been still.
const EVERY: Duration = Duration::from_secs(1);

/// What a file was like.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Seen {
    /// Device, inode, size, change time.
    outside: Option<(u64, u64, u64, i64, i64)>,
    /// Hash of what is in it; `None`: it cannot be read.
    inside: Option<u128>,
}

/// The files of a configuration.
#[derive(Debug)]
pub struct Watch {
    file: PathBuf,
    known: BTreeMap<PathBuf, Seen>,
    /// They have changed, and may still be changing.
    restless: bool,
}

impl Watch {
    /// Watches `file`, and what `plan` names.
    pub fn new(file: &Path, plan: &Plan) -> Self {
        let mut watch = Self { file: file.to_owned(), known: BTreeMap::new(), restless: false };
        watch.also(plan);
        watch
    }

    /// Watches what `plan` names, and nothing else beside the file itself.
    pub fn also(&mut self, plan: &Plan) {
        let mut before = std::mem::take(&mut self.known);
        for path in files(plan).into_iter().chain([self.file.clone()]) {
            let seen = before.remove(&path).unwrap_or_else(|| look(&path, &Seen::default()));
            self.known.insert(path, seen);
        }
    }

    /// Waits until something has changed, and has then been still for a second.
    pub async fn changed(&mut self) {
        loop {
            tokio::time::sleep(EVERY).await;
            if self.look() {
                return;
            }
        }
    }

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
    files
}

fn look(path: &Path, before: &Seen) -> Seen {
    let outside = std::fs::metadata(path)
        .ok()
        .map(|m| (m.dev(), m.ino(), m.size(), m.ctime(), m.ctime_nsec()));
    if outside.is_some() && outside == before.outside {
        return before.clone();
    }
    Seen { outside, inside: std::fs::read(path).ok().map(|text| xxh3_128(&text)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::from_flags;

    fn watch(file: &Path) -> Watch {
        let plan = from_flags("127.0.0.1:0", "http://127.0.0.1:1", 1).unwrap();
        Watch::new(file, &plan)
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
