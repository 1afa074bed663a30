use std::cmp::Reverse;
use std::collections::HashMap;

use foldhash::fast::FixedState;

use super::host::{MAX_HOST, parse_host};

/// Which hosts a rule is for.
///
/// Names are written as in a Host field; a port is not part of them. What
/// [`parse_host`] refuses cannot be sent either, so a rule for it never matches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostPattern {
    /// Any host, and requests without one.
    Any,
    /// This host.
    Exact(String),
    /// Exactly one label in front of this: `example.com` stands for `*.example.com`.
    Wildcard(String),
}

/// What a request must be for one route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The host.
    pub host: HostPattern,
    /// `/v1` is for `/v1` and what is below, `/v1/` only for what is below. Without a slash in
    /// front it never matches.
    pub prefix: String,
    /// One of these; empty: any method. Case matters.
    pub methods: Vec<String>,
    /// Fields that must be there, as (name in lower case, exact value).
    pub predicates: Vec<(String, String)>,
    /// Listeners by index; empty: all.
    pub listeners: Vec<usize>,
}

/// All rules, arranged for look-up. The cost of one depends on the length of the request's path,
/// not on the number of rules; only rules with the same host and prefix are tried one by one.
#[derive(Debug)]
pub struct Table {
    pub(super) rules: Box<[Rule]>,
    /// Rules in order of precedence.
    pub(super) order: Box<[u32]>,
    pub(super) exact: Hosts,
    /// By what follows the first label.
    pub(super) wildcard: Hosts,
    /// Root for any host.
    pub(super) any: u32,
    pub(super) nodes: Vec<Node>,
}

/// Normal host → the root of its tree. The keys come from the configuration, so nobody can make
/// them collide on purpose, and a fixed seed keeps runs the same.
pub(super) type Hosts = HashMap<Box<[u8]>, u32, FixedState>;

/// A path of whole segments below one host: the root is the empty path, its child `v1` is `/v1`.
#[derive(Debug, Default)]
pub(super) struct Node {
    pub(super) parent: Option<u32>,
    pub(super) children: HashMap<Box<[u8]>, u32, FixedState>,
    /// Rules whose prefix is this path; in order of precedence.
    pub(super) here: Vec<u32>,
    /// Rules whose prefix is this path and a slash; in order of precedence.
    pub(super) below: Vec<u32>,
}

impl Table {
    /// Arranges `rules`, which are given in the order of the file. Look-ups answer with an index
    /// into them.
    #[must_use]
    pub fn new(rules: Vec<Rule>) -> Self {
        let mut order: Vec<u32> = (0..).zip(&rules).map(|(ix, _)| ix).collect();
        // Stable, so the order of the file decides last.
        order.sort_by_cached_key(|&ix| rank(&rules[ix as usize]));
        let mut table = Self {
            rules: Box::default(),
            order: Box::default(),
            exact: Hosts::default(),
            wildcard: Hosts::default(),
            any: 0,
            nodes: vec![Node::default()],
        };
        for &ix in &order {
            let rule = &rules[ix as usize];
            let root = table.root_for(&rule.host);
            table.insert(root, rule.prefix.as_bytes(), ix);
        }
        table.rules = rules.into();
        table.order = order.into();
        table
    }

    /// The rules, as given to [`Table::new`].
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    fn root_for(&mut self, host: &HostPattern) -> u32 {
        let (hosts, name) = match host {
            HostPattern::Any => return self.any,
            HostPattern::Exact(name) => (&mut self.exact, name),
            HostPattern::Wildcard(suffix) => (&mut self.wildcard, suffix),
        };
        *hosts.entry(normal(name)).or_insert_with(|| push(&mut self.nodes, None))
    }

    fn insert(&mut self, root: u32, prefix: &[u8], rule: u32) {
        if !prefix.starts_with(b"/") {
            return;
        }
        let (path, below) = match prefix.strip_suffix(b"/") {
            Some(path) => (path, true),
            None => (prefix, false),
        };
        let mut at = root;
        // The first piece is what stands before the leading slash: nothing.
        for segment in path.split(|&octet| octet == b'/').skip(1) {
            at = self.child(at, segment);
        }
        let node = &mut self.nodes[at as usize];
        if below { node.below.push(rule) } else { node.here.push(rule) }
    }

    fn child(&mut self, parent: u32, segment: &[u8]) -> u32 {
        if let Some(&child) = self.nodes[parent as usize].children.get(segment) {
            return child;
        }
        let child = push(&mut self.nodes, Some(parent));
        self.nodes[parent as usize].children.insert(segment.into(), child);
        child
    }
}

impl Rule {
    /// Whether it asks for more than host, path and listener.
    fn is_specific(&self) -> bool {
        !self.methods.is_empty() || !self.predicates.is_empty()
    }
}

/// The precedence of a rule, lowest first; equal ones are in the order of the file.
fn rank(rule: &Rule) -> impl Ord + use<> {
    let host = match &rule.host {
        HostPattern::Exact(_) => (0, Reverse(0)),
        HostPattern::Wildcard(suffix) => (1, Reverse(normal(suffix).len())),
        HostPattern::Any => (2, Reverse(0)),
    };
    (host, Reverse(rule.prefix.len()), !rule.is_specific())
}

/// The form in which hosts are compared. What is no host is kept as it is and matches nothing.
pub(super) fn normal(name: &str) -> Box<[u8]> {
    let mut buffer = [0; MAX_HOST];
    match parse_host(name.as_bytes()) {
        Ok(host) => host.normal(&mut buffer).into(),
        Err(_) => name.as_bytes().into(),
    }
}

fn push(nodes: &mut Vec<Node>, parent: Option<u32>) -> u32 {
    nodes.push(Node { parent, ..Node::default() });
    (nodes.len() - 1) as u32
}
