//! As written → as meant. Every rule of the configuration is here and in the children of
//! this module, one file for each subject.
//!
//! A check never ends the checking: it complains and goes on with something harmless in
//! place of the value, because the plan is thrown away anyway when anybody complained.

mod files;
mod headers;
mod health;
mod listeners;
mod middleware;
mod net;
mod pools;
mod precedence;
mod routes;
mod tcp;
mod words;

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(super) use net::{bind, upstream_url};

use super::Files;
use super::file::{KeyPath, Kind, Reading, Size, Step, Time, Tree, nearest};
use super::plan::{Drain, Plan, Tracing};
use super::wrong::{MOST_WRONGS, Wrong};

/// A plan, to be used only if nothing is wrong.
pub struct Checked {
    /// Meaningless if anything is wrong.
    pub plan: Option<Plan>,
    /// What breaks a rule.
    pub wrongs: Vec<Wrong>,
    /// What is allowed but probably not meant.
    pub warnings: Vec<Wrong>,
}

/// What is wrong with a value, before it is known where the value is written.
#[derive(Debug)]
pub(super) struct Complaint {
    pub(super) message: String,
    pub(super) help: Option<String>,
}

impl Complaint {
    pub(super) fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), help: None }
    }

    pub(super) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

/// Checks everything that could be read.
pub fn plan(reading: &Reading, tree: &Tree, base: &Path, files: Files) -> Checked {
    let mut check = Check {
        tree,
        poisoned: &reading.poisoned,
        base,
        files,
        wrongs: Vec::new(),
        warnings: Vec::new(),
    };
    let file = &reading.file;
    let root = KeyPath::root();
    let mut binds = Unique::new("bind address");
    let listeners = listeners::check(&mut check, file, &mut binds);
    let pools = pools::check(&mut check, file);
    let (tcp_listeners, tcp_pools) = tcp::check(&mut check, file, &mut binds);
    let routes = routes::check(&mut check, file);
    check.something_to_do(file);
    let at = root.key("admin").key("bind");
    let admin = (!file.admin.bind.is_empty()).then(|| bind(&file.admin.bind));
    let admin = admin.and_then(|bind| check.or_complain(bind, &at));
    if let Some(bind) = &admin {
        binds.add_bind(&mut check, bind, &at);
    }
    let token_at = root.key("admin").key("token_file");
    let admin_token = file.admin.token_file.as_deref();
    let admin_token = admin_token.and_then(|written| check.token(written, &token_at));
    let drain_at = root.key("drain");
    let drain = Drain {
        delay: check.time(file.drain.delay, &drain_at.key("delay")),
        timeout: check.time(file.drain.timeout, &drain_at.key("timeout")),
    };
    let plan = Plan {
        listeners,
        pools,
        routes,
        tcp_listeners,
        tcp_pools,
        admin,
        admin_token,
        max_in_flight: file.limits.max_in_flight,
        drain,
        workers: check.workers(file.workers.0),
        access_log: file.access_log.enabled,
        tracing: check.tracing(file),
        by_flags: Vec::new(),
        probes_on_data: false,
    };
    Checked { plan: Some(plan), wrongs: check.wrongs, warnings: check.warnings }
}

/// The state of checking.
struct Check<'a> {
    tree: &'a Tree,
    poisoned: &'a HashSet<KeyPath>,
    base: &'a Path,
    files: Files,
    wrongs: Vec<Wrong>,
    warnings: Vec<Wrong>,
}

impl Check<'_> {
    /// Complains, unless it only follows from what could not be read.
    fn complain(&mut self, at: &KeyPath, complaint: Complaint) {
        if self.wrongs.len() >= MOST_WRONGS
            || at.outwards().any(|path| self.poisoned.contains(&path))
        {
            return;
        }
        let mut wrong = Wrong::new(at.clone(), complaint.message).place(self.tree.locate(at));
        wrong.help = complaint.help;
        self.wrongs.push(wrong);
    }

    fn wrong(&mut self, at: &KeyPath, message: impl Into<String>) {
        self.complain(at, Complaint::new(message));
    }

    fn warn(&mut self, at: &KeyPath, message: impl Into<String>) {
        self.warnings.push(Wrong::new(at.clone(), message).place(self.tree.locate(at)));
    }

    fn or_complain<T>(&mut self, result: Result<T, Complaint>, at: &KeyPath) -> Option<T> {
        result.map_err(|complaint| self.complain(at, complaint)).ok()
    }

    /// The value of a key that must be there.
    fn need<'v>(
        &mut self,
        value: Option<&'v String>,
        around: &KeyPath,
        key: &str,
    ) -> Option<&'v str> {
        let at = around.key(key);
        match value {
            Some(text) if !text.is_empty() => return Some(text),
            Some(_) => self.wrong(&at, format!("`{key}` is empty")),
            None if self.poisoned.contains(&at) || self.misspelt(around, key) => {}
            None if self.tree.get(&at).is_some() => self.wrong(&at, format!("`{key}` is empty")),
            None => self.wrong(around, format!("`{key}` is missing")),
        }
        None
    }

    /// Whether a key that was refused was probably meant to be `key`.
    fn misspelt(&self, around: &KeyPath, key: &str) -> bool {
        let Some(Kind::Map(entries)) = self.tree.get(around).map(|node| &node.kind) else {
            return false;
        };
        entries.iter().any(|entry| {
            self.poisoned.contains(&around.key(&entry.key)) && nearest(&entry.key, [key]).is_some()
        })
    }

    /// Whether names in the list `key` are missing only because they could not be read.
    fn doubtful(&self, key: &str) -> bool {
        let listed = |path: &KeyPath| match path.0.as_slice() {
            [Step::Key(list)] | [Step::Key(list), Step::Index(_)] => list == key,
            [Step::Key(list), Step::Index(_), Step::Key(name)] => {
                list == key && nearest(name, ["name"]).is_some()
            }
            _ => false,
        };
        let nameless = |item: &super::file::Node| !matches!(item.get("name").map(|name| &name.kind), Some(Kind::Str(name)) if !name.is_empty());
        self.poisoned.iter().any(listed)
            || self.misspelt(&KeyPath::root(), key)
            || matches!(self.tree.root.get(key).map(|list| &list.kind),
                Some(Kind::Seq(items)) if items.iter().any(nameless))
    }

    fn time(&mut self, time: Time, at: &KeyPath) -> Duration {
        if time.negative {
            self.wrong(at, format!("{} cannot be negative, is {time}", at.last_key()));
        }
        time.length
    }

    fn time_above_zero(&mut self, time: Time, at: &KeyPath) -> Duration {
        if !time.negative && time.length.is_zero() {
            self.wrong(at, format!("{} must be longer than 0", at.last_key()));
        }
        self.time(time, at)
    }

    fn size(&mut self, size: Size, least: u64, at: &KeyPath) -> usize {
        if size.0 < least {
            self.wrong(at, format!("{} must be at least {least}, is {}", at.last_key(), size.0));
        }
        // What does not fit into memory is no bound; the largest number says the same.
        usize::try_from(size.0).unwrap_or(usize::MAX)
    }

    fn at_least_one(&mut self, number: i64, at: &KeyPath) -> u32 {
        self.between(number, 1, u32::MAX.into(), at)
    }

    fn between(&mut self, number: i64, least: i64, most: i64, at: &KeyPath) -> u32 {
        if number < least {
            self.wrong(at, format!("{} must be at least {least}, is {number}", at.last_key()));
        } else if number > most {
            self.wrong(at, format!("{} must be at most {most}, is {number}", at.last_key()));
        }
        u32::try_from(number).unwrap_or_default()
    }

    fn share(&mut self, number: f64, at: &KeyPath) -> f64 {
        if !(0.0..=1.0).contains(&number) {
            self.wrong(at, format!("{} must be from 0 to 1, is {number}", at.last_key()));
        }
        number
    }

    fn share_above_zero(&mut self, number: f64, at: &KeyPath) -> f64 {
        if number > 0.0 && number <= 1.0 {
            return number;
        }
        self.wrong(at, format!("{} must be above 0 and at most 1, is {number}", at.last_key()));
        1.0
    }

    /// A file that the configuration names, from the directory that the configuration is in.
    fn path(&self, written: &str) -> PathBuf {
        self.base.join(written)
    }

    fn something_to_do(&mut self, file: &super::file::File) {
        let root = KeyPath::root();
        if file.listeners.is_empty() && file.tcp_listeners.is_empty() && !self.doubtful("listeners")
        {
            let what = Complaint::new("there are no `listeners`");
            self.complain(&root, what.help("at least one address to listen on is needed"));
        }
        if !file.listeners.is_empty() && file.routes.is_empty() && !self.doubtful("routes") {
            let what = Complaint::new("there are no `routes`");
            self.complain(&root, what.help("without a route every request is answered with 404"));
        }
    }

    fn workers(&mut self, number: Option<u64>) -> Option<usize> {
        const MOST: u64 = 1024;
        let number = number?;
        if !(1..=MOST).contains(&number) {
            let at = KeyPath::root().key("workers");
            self.wrong(&at, format!("`workers` must be `auto` or from 1 to {MOST}, is {number}"));
        }
        Some(number as usize)
    }

    fn tracing(&mut self, file: &super::file::File) -> Tracing {
        let at = KeyPath::root().key("tracing");
        let tracing = &file.tracing;
        if !tracing.endpoint.is_empty() {
            let endpoint = net::host_port(&tracing.endpoint);
            self.or_complain(endpoint, &at.key("endpoint"));
        }
        Tracing {
            endpoint: tracing.endpoint.clone(),
            ratio: tracing.sample_ratio.map(|ratio| self.share(ratio, &at.key("sample_ratio"))),
            insecure: tracing.insecure,
            ..Tracing::default()
        }
    }
}

/// Things of which there must be only one each.
struct Unique {
    what: &'static str,
    seen: HashMap<String, KeyPath>,
}

impl Unique {
    fn new(what: &'static str) -> Self {
        Self { what, seen: HashMap::new() }
    }

    fn add(&mut self, check: &mut Check<'_>, value: &str, at: &KeyPath) {
        if let Some(first) = self.seen.get(value) {
            let complaint = Complaint::new(format!("duplicate {} `{value}`", self.what));
            let first = format!("the first is `{first}` on line {}", line(check.tree, first));
            check.complain(at, complaint.help(first));
        } else {
            self.seen.insert(value.to_owned(), at.clone());
        }
    }

    fn add_bind(&mut self, check: &mut Check<'_>, bind: &super::plan::Bind, at: &KeyPath) {
        // Port 0 is another port each time.
        if !matches!(bind, super::plan::Bind::Tcp(address) if address.port() == 0) {
            self.add(check, &bind.to_string(), at);
        }
    }
}

fn line(tree: &Tree, path: &KeyPath) -> usize {
    tree.line(tree.locate(path).start)
}
