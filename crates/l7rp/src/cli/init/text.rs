//! The words of the file. What is given by flags is written as JSON, which YAML reads as it is.
//!
//! A suggestion is a key behind a `#` without a blank; a comment has a blank. Writing into memory
//! does not fail.

use std::fmt::Write;

use serde_json::json;

use super::Init;
use crate::cli::terminal::visible;
use crate::config::file::Algorithm;

/// The whole file.
pub(super) fn of(asked: &Init) -> String {
    let mut out = String::from(HEAD);
    out.push_str(&listener(asked));
    out.push_str(&pool(asked));
    out.push_str(&routes(asked));
    out.push_str(&admin(asked));
    out.push_str(&next(asked));
    out
}

const HEAD: &str = "\
# A configuration of l7rp to begin with. `l7rp schema` has all keys. Where a `#` stands right before
# a key, the key is a suggestion: remove the `#`, and fit what it says.
";

fn listener(asked: &Init) -> String {
    let is_secure = asked.tls.is_some() || !asked.autocert.is_empty();
    let name = if is_secure { "https" } else { "http" };
    let mut out = format!(
        "
# Where requests come in. 127.0.0.1 is this machine alone; \"[::]:PORT\" is everybody.
listeners:
  - name: {name}
    bind: {}
    # Balancers in front, if there are any: what they say about clients is believed.
    #trusted_proxies: [10.0.0.0/8]
",
        json!(asked.listen)
    );
    if let Some(tls) = &asked.tls {
        let _ = write!(
            out,
            "    # Files are looked for beside this one, and read again on each reload.
    tls:
      certs:
        - cert: {}
          key: {}
",
            json!(tls.cert),
            json!(tls.key)
        );
    }
    if !asked.autocert.is_empty() {
        let _ = write!(
            out,
            "    # By ACME, from Let's Encrypt: the names must lead here, and the CA must reach this listener
    # at port 443. Whoever uses it agrees with the terms of the CA.
    tls:
      autocert:
        cache_dir: /var/lib/l7rp/acme # account, keys and certificates; keep it
        allowed_hosts: {}
",
            json!(asked.autocert)
        );
        if let Some(email) = &asked.email {
            let _ = writeln!(out, "        email: {}", json!(email));
        }
    }
    out
}

fn pool(asked: &Init) -> String {
    let mut out = String::from(
        "
# Who answers them: servers that are as good as one another.
upstream_pools:
  - name: backend
",
    );
    let algorithm = asked.algorithm.or((asked.backend.len() > 1).then_some(Algorithm::P2cEwma));
    if let Some(algorithm) = algorithm {
        out.push_str(&selector(algorithm));
    }
    out.push_str("    upstreams:\n");
    for url in &asked.backend {
        let _ = writeln!(out, "      - url: {}", json!(url));
    }
    let health = match &asked.health_path {
        Some(path) => health(path, "", "Only upstreams that answer this well get requests."),
        None => health(
            "/healthz",
            "#",
            "Upstreams that are not well get nothing. Name a path that tells, by 200, if all is well.",
        ),
    };
    out.push_str(&health);
    if asked.backend.iter().any(|url| url.starts_with("https:")) {
        out.push_str(
            "    # For upstreams that know only their own name: the host of the URL, not the client's.
    #host_header: upstream
",
        );
    }
    out
}

fn selector(algorithm: Algorithm) -> String {
    let (why, more) = match algorithm {
        Algorithm::RoundRobin => ("Each in turn.", ""),
        Algorithm::WeightedRr => ("In turn, by `weight`: 1 where an upstream has none.", ""),
        Algorithm::LeastConn => ("Whoever has the fewest requests in flight.", ""),
        Algorithm::P2cEwma => ("The better of two drawn at random, by latency and load.", ""),
        Algorithm::ConsistentHashBounded => (
            "One session, one upstream, as long as it has room. Name the cookie of yours.",
            "      hash_key: \"cookie:session_id\"\n",
        ),
        Algorithm::IpHash => ("One client address, one upstream.", ""),
    };
    format!("    # {why}\n    selector:\n      algorithm: {}\n{more}", json!(algorithm))
}

/// The section on health checks; `mark` makes it a suggestion.
fn health(path: &str, mark: &str, why: &str) -> String {
    format!(
        "    # {why}
    {mark}health:
    {mark}  active:
    {mark}    path: {}
    {mark}    interval: 5s
    {mark}    timeout: 2s
    {mark}    expected_status: [\"2xx\"]
",
        json!(path)
    )
}

fn routes(asked: &Init) -> String {
    let mut out = String::from(
        "\n# Which requests go there. The most exact host wins, then the longest path.\nroutes:\n",
    );
    if asked.host.is_empty() {
        out.push_str("  - name: all\n");
        out.push_str(&middleware(asked, true));
    }
    for (nth, host) in asked.host.iter().enumerate() {
        let _ = write!(out, "  - name: site-{}\n    host: {}\n", nth + 1, json!(host));
        out.push_str(&middleware(asked, nth == 0));
    }
    out
}

const RETRY: &str = "What may be done twice is tried again on another upstream if it fails.";
const RATE: &str = "For each client address; beyond it 429.";

/// What follows the host of a route. Only the first of them explains itself.
fn middleware(asked: &Init, explains: bool) -> String {
    let mut out = String::from("    pool: backend\n");
    let why = |out: &mut String, indent: &str, text: &str| {
        if explains {
            let _ = writeln!(out, "{indent}# {text}");
        }
    };
    let can_retry = asked.backend.len() > 1;
    if !asked.retries && asked.rate_limit.is_none() {
        if can_retry {
            why(&mut out, "    ", RETRY);
            out.push_str("    #middleware:\n");
            out.push_str(&retry("    #  "));
        }
        return out;
    }
    out.push_str("    middleware:\n");
    if let Some(rate) = asked.rate_limit {
        why(&mut out, "      ", RATE);
        let _ = write!(
            out,
            "      - rate_limit:
          scope: per-ip
          per_ip_rps: {rate}
          burst: {} # at once
",
            u64::from(rate) * 2
        );
    }
    if can_retry {
        why(&mut out, "      ", RETRY);
        out.push_str(&retry(if asked.retries { "      " } else { "      #" }));
    }
    out
}

fn retry(indent: &str) -> String {
    format!(
        "{indent}- retry:
{indent}    max_attempts: 2
{indent}    retry_methods: [GET, HEAD]
{indent}    retry_on: [502, 503, 504]
"
    )
}

fn admin(asked: &Init) -> String {
    format!(
        "
# Metrics, status, and changes without a reload. From other machines only with a `token_file`.
admin:
  bind: {}
",
        json!(asked.admin)
    )
}

fn next(asked: &Init) -> String {
    let file = asked.output.as_ref().map_or("FILE".to_owned(), |path| path.display().to_string());
    let file = visible(&file);
    let status = match asked.admin.as_str() {
        "" => String::new(),
        "127.0.0.1:9090" => "#   l7rp status\n".to_owned(),
        admin => {
            let scheme = if admin.starts_with("unix:") { "" } else { "http://" };
            format!("#   l7rp status --admin {scheme}{}\n", visible(admin))
        }
    };
    format!(
        "
# Next:
#   l7rp check --lint {file}
#   l7rp --config {file}
{status}#   l7rp explain --config {file} URL
# tells which way a request would take. When this file has been changed,
#   l7rp plan --config {file}
# tells what a reload (SIGHUP) will change.
"
    )
}
