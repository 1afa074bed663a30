//! Middleware of a route.

use std::collections::HashMap;

use super::{Check, Complaint, headers, line};
use crate::config::file::{
    CompressSection, Fields, HeadersSection, KeyPath, MiddlewareItem, RateLimitSection,
    RetrySection, Scope,
};
use crate::config::plan::{Compress, HeaderChanges, RateLimit, Retry};

/// What a route's list comes to; the order of the list does not matter.
#[derive(Default)]
pub(super) struct Chain {
    pub(super) rate_limit: Option<RateLimit>,
    pub(super) retry: Option<Retry>,
    pub(super) headers: HeaderChanges,
    pub(super) compress: Option<Compress>,
}

pub(super) fn check(check: &mut Check<'_>, items: &[MiddlewareItem], at: &KeyPath) -> Chain {
    let mut chain = Chain::default();
    let mut seen: HashMap<&str, KeyPath> = HashMap::new();
    for (i, item) in items.iter().enumerate() {
        let at = at.index(i);
        for key in one_key(check, item, &at) {
            let at = at.key(key);
            if let Some(first) = seen.get(key) {
                let complaint = Complaint::new(format!("`{key}` is there twice in this route"));
                let first = format!("the first is on line {}", line(check.tree, first));
                check.complain(&at, complaint.help(first));
            }
            seen.insert(key, at);
        }
        if let Some(written) = &item.rate_limit {
            chain.rate_limit = Some(rate_limit(check, written, &at.key("rate_limit")));
        }
        if let Some(written) = &item.retry {
            chain.retry = Some(retry(check, written, &at.key("retry")));
        }
        if let Some(written) = &item.headers {
            chain.headers = changes(check, written, &at.key("headers"));
        }
        if let Some(written) = &item.compress {
            chain.compress = Some(compress(check, written, &at.key("compress")));
        }
    }
    chain
}

/// The keys of an item, which should be one.
fn one_key(check: &mut Check<'_>, item: &MiddlewareItem, at: &KeyPath) -> Vec<&'static str> {
    let keys: Vec<&'static str> = [
        ("rate_limit", item.rate_limit.is_some()),
        ("retry", item.retry.is_some()),
        ("headers", item.headers.is_some()),
        ("compress", item.compress.is_some()),
    ]
    .into_iter()
    .filter_map(|(key, given)| given.then_some(key))
    .collect();
    if keys.is_empty() && !check.poisoned.iter().any(|path| path.0.starts_with(&at.0)) {
        let complaint = Complaint::new("an empty middleware entry");
        let help = "write one of `rate_limit`, `retry`, `headers`, `compress`";
        check.complain(at, complaint.help(help));
    }
    if let [first, second, ..] = keys.as_slice() {
        let message = format!("`{first}` and `{second}` in one middleware entry");
        let help = format!("begin a new entry: `- {second}:`");
        check.complain(&at.key(second), Complaint::new(message).help(help));
    }
    keys
}

fn rate_limit(check: &mut Check<'_>, written: &RateLimitSection, at: &KeyPath) -> RateLimit {
    let rps = written.per_ip_rps;
    if rps.is_nan() || rps <= 0.0 {
        check.wrong(&at.key("per_ip_rps"), format!("`per_ip_rps` must be above 0, is {rps}"));
    }
    if written.burst <= 0 {
        let message = format!("`burst` must be above 0, is {}", written.burst);
        check.wrong(&at.key("burst"), message);
    } else if written.burst > u32::MAX.into() {
        check.between(written.burst, 1, u32::MAX.into(), &at.key("burst"));
    }
    RateLimit {
        per_ip: written.scope == Scope::PerIp,
        rps,
        burst: u32::try_from(written.burst).unwrap_or(1),
        trust_proxy_hops: written.trust_proxy_hops,
    }
}

/// Octets of one request's body that may be kept.
const MOST_KEPT: usize = 1 << 30;

fn retry(check: &mut Check<'_>, written: &RetrySection, at: &KeyPath) -> Retry {
    const SAFE: [&str; 3] = ["GET", "HEAD", "OPTIONS"];
    let mut retry_on = Vec::with_capacity(written.retry_on.len());
    for (i, status) in written.retry_on.iter().enumerate() {
        match u16::try_from(*status) {
            Ok(status) if (100..=599).contains(&status) => retry_on.push(status),
            _ => {
                let at = at.key("retry_on").index(i);
                check.wrong(&at, format!("a status is from 100 to 599, is {status}"));
            }
        }
    }
    let hedgeable_at = at.key("hedgeable");
    for (i, method) in written.hedgeable.iter().enumerate() {
        if !SAFE.contains(&method.to_ascii_uppercase().as_str()) {
            let complaint = Complaint::new(format!("`{}` cannot be hedged", method.escape_debug()));
            let help = "a hedge is done twice: only `GET`, `HEAD` and `OPTIONS`";
            check.complain(&hedgeable_at.index(i), complaint.help(help));
        }
    }
    let percentile = written.hedge_after_percentile;
    if !(0.0..100.0).contains(&percentile) {
        let message = format!("a percentile is from 0 to below 100, is {percentile}");
        check.wrong(&at.key("hedge_after_percentile"), message);
    }
    if written.max_attempts < 1 {
        let message = format!("`max_attempts` must be at least 1, is {}", written.max_attempts);
        let help = "the first try counts: 1 is no retry";
        check.complain(&at.key("max_attempts"), Complaint::new(message).help(help));
    } else {
        check.between(written.max_attempts, 1, 100, &at.key("max_attempts"));
    }
    let hedgeable = check.methods(&written.hedgeable, &hedgeable_at);
    let kept_at = at.key("max_replayable_body");
    let max_replayable_body = check.size(written.max_replayable_body, 0, &kept_at);
    if max_replayable_body > MOST_KEPT {
        let complaint = Complaint::new("`max_replayable_body` must be at most 1GiB");
        let help = "every request may hold as much memory";
        check.complain(&kept_at, complaint.help(help));
    }
    Retry {
        max_attempts: u32::try_from(written.max_attempts).unwrap_or(1),
        methods: check.methods(&written.retry_methods, &at.key("retry_methods")),
        retry_on,
        retry_on_grpc: check.grpc_statuses(&written.retry_on_grpc, &at.key("retry_on_grpc")),
        max_replayable_body,
        hedge_after: check.time(written.hedge_after, &at.key("hedge_after")),
        hedge_after_percentile: percentile,
        hedgeable,
        backoff: check.time(written.backoff, &at.key("backoff")),
    }
}

fn changes(check: &mut Check<'_>, written: &HeadersSection, at: &KeyPath) -> HeaderChanges {
    HeaderChanges {
        add_request: added(check, &written.add_request, &at.key("add_request")),
        remove_request: removed(check, &written.remove_request, &at.key("remove_request")),
        add_response: added(check, &written.add_response, &at.key("add_response")),
        remove_response: removed(check, &written.remove_response, &at.key("remove_response")),
    }
}

fn added(check: &mut Check<'_>, fields: &Fields, at: &KeyPath) -> Vec<(String, String)> {
    let mut seen: HashMap<String, &str> = HashMap::new();
    for (name, value) in &fields.0 {
        let at = at.key(name);
        if let Some(lower) = check.or_complain_key(headers::changeable(name), &at)
            && let Some(first) = seen.insert(lower, name)
        {
            let message = format!("`{name}` and `{first}` are the same header");
            check.or_complain_key::<()>(Err(Complaint::new(message)), &at);
        }
        check.or_complain(headers::value(value), &at);
    }
    fields.0.clone()
}

fn removed(check: &mut Check<'_>, names: &[String], at: &KeyPath) -> Vec<String> {
    let mut removed = Vec::with_capacity(names.len());
    for (i, name) in names.iter().enumerate() {
        removed.extend(check.or_complain(headers::changeable(name), &at.index(i)));
    }
    removed
}

fn compress(check: &mut Check<'_>, written: &CompressSection, at: &KeyPath) -> Compress {
    let at = at.key("skip_content_types");
    for (i, kind) in written.skip_content_types.iter().enumerate() {
        if kind.split('/').filter(|part| !part.is_empty()).count() != 2 {
            let complaint =
                Complaint::new(format!("`{}` is not a media type", kind.escape_debug()));
            check.complain(&at.index(i), complaint.help("write it like `image/png` or `image/*`"));
        }
    }
    Compress {
        min_bytes: written.min_bytes.0,
        skip_content_types: written.skip_content_types.clone(),
    }
}

impl Check<'_> {
    /// Like `or_complain`, about the key and not about its value.
    fn or_complain_key<T>(&mut self, result: Result<T, Complaint>, at: &KeyPath) -> Option<T> {
        let told = self.wrongs.len();
        let value = self.or_complain(result, at);
        if let Some(wrong) = self.wrongs.get_mut(told) {
            wrong.place = Some(self.tree.locate_key(at));
        }
        value
    }
}
