//! Layer-4 listeners and pools.

use super::pools::selector;
use super::{Check, Complaint, Unique, net};
use crate::config::file::{File, KeyPath, TcpPoolSection, nearest};
use crate::config::plan::{TcpListener, TcpPool, TcpUpstream};

pub(super) fn check(
    check: &mut Check<'_>,
    file: &File,
    binds: &mut Unique,
) -> (Vec<TcpListener>, Vec<TcpPool>) {
    let mut names = Unique::new("TCP pool name");
    let around = KeyPath::root().key("tcp_pools");
    let pools: Vec<TcpPool> = file
        .tcp_pools
        .iter()
        .enumerate()
        .map(|(i, written)| pool(check, written, &around.index(i), &mut names))
        .collect();
    let mut names = Unique::new("listener name");
    for (i, listener) in file.listeners.iter().enumerate() {
        if let Some(name) = &listener.name {
            let at = KeyPath::root().key("listeners").index(i).key("name");
            names.seen.entry(name.clone()).or_insert(at);
        }
    }
    let around = KeyPath::root().key("tcp_listeners");
    let mut listeners = Vec::with_capacity(file.tcp_listeners.len());
    for (i, written) in file.tcp_listeners.iter().enumerate() {
        let at = around.index(i);
        let name = check.name(written.name.as_ref(), &at, &mut names);
        let bind = check.bind(written.bind.as_ref(), &at, binds);
        let pool = check.need(written.pool.as_ref(), &at, "pool").unwrap_or_default();
        let known = pools.iter().map(|pool| pool.name.as_str());
        let pool = check.named("TCP pool", pool, known, "tcp_pools", &at.key("pool"));
        listeners.push(TcpListener { name, bind, pool: pool.unwrap_or_default() });
    }
    (listeners, pools)
}

fn pool(
    check: &mut Check<'_>,
    written: &TcpPoolSection,
    at: &KeyPath,
    names: &mut Unique,
) -> TcpPool {
    let name = check.name(written.name.as_ref(), at, names);
    check.not_empty(written.upstreams.is_empty(), at, written.name.as_deref());
    let around = at.key("upstreams");
    let mut addresses = Unique::new("upstream address");
    let mut upstreams = Vec::with_capacity(written.upstreams.len());
    for (i, one) in written.upstreams.iter().enumerate() {
        let at = around.index(i);
        let address_at = at.key("address");
        let address = check.need(one.address.as_ref(), &at, "address").unwrap_or_default();
        let mut parts = None;
        if !address.is_empty() {
            parts = check.or_complain(net::host_port(address), &address_at);
            addresses.add(check, address, &address_at);
        }
        let (host, port) = parts.unwrap_or_default();
        let weight = check.weight(one.weight.0, &at.key("weight"));
        upstreams.push(TcpUpstream { address: address.to_owned(), host, port, weight });
    }
    TcpPool {
        name,
        selector: selector(check, &written.selector, &at.key("selector")),
        connect_timeout: check
            .time_above_zero(written.connect_timeout.0, &at.key("connect_timeout")),
        upstreams,
    }
}

impl Check<'_> {
    /// The index of a thing in the list `key` of the file.
    pub(super) fn named<'n>(
        &mut self,
        what: &str,
        name: &str,
        known: impl Iterator<Item = &'n str> + Clone,
        key: &str,
        at: &KeyPath,
    ) -> Option<usize> {
        let index = known.clone().position(|other| other == name);
        if name.is_empty() || index.is_some() || self.doubtful(key) {
            return index;
        }
        let complaint = Complaint::new(format!("unknown {what} `{}`", name.escape_debug()));
        let all: Vec<String> = known.clone().map(|name| format!("`{name}`")).collect();
        let help = match nearest(name, known) {
            Some(near) => format!("did you mean `{near}`?"),
            None if all.is_empty() => format!("there are no `{key}`"),
            None => format!("known: {}", all.join(", ")),
        };
        self.complain(at, complaint.help(help));
        None
    }
}
