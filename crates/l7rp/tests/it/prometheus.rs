//! A real Prometheus reads the metrics: what it stores is what they say, and the dashboard and the
//! alert rules in `deploy` find in it what they ask for.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use l7rp_testkit::{Client, Proxy, SOON, Value, within};

use crate::everything::{Everything, Series, samples};
use crate::reloading::free_port;

/// Nothing has panicked, and a family without a sample answers no question.
const UNTOUCHED: &str = "proxy_panics_total";

/// A file of the folder `deploy`.
fn deployed(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "../../deploy", name].iter().collect()
}

/// Labels, and the value.
type Sample = (BTreeMap<String, String>, f64);

/// A running Prometheus; killed when dropped.
struct Prometheus {
    child: Child,
    address: SocketAddr,
    folder: tempfile::TempDir,
}

impl Prometheus {
    /// One that asks this proxy each second, and has the rules of `deploy`.
    fn over(proxy: &Proxy) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let rules = deployed("prometheus/alerts.yml");
        let config = format!(
            "global: {{ scrape_interval: 1s, evaluation_interval: 1s }}\n\
             rule_files: [\"{}\"]\n\
             scrape_configs: [{{ job_name: l7rp, static_configs: [{{ targets: [\"{}\"] }}] }}]\n",
            rules.display(),
            proxy.admin()
        );
        std::fs::write(path("prometheus.yml"), config).expect("a file");
        let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let log = std::fs::File::create(path("log")).expect("a file");
        let child = Command::new("prometheus")
            .arg(format!("--config.file={}", path("prometheus.yml").display()))
            .arg(format!("--storage.tsdb.path={}", path("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("prometheus, of the package of this name, is installed");
        let prometheus = Self { child, address, folder };
        prometheus.until("it has read the metrics", || {
            TcpStream::connect(address).is_ok()
                && prometheus.query("up == 1").is_ok_and(|found| !found.is_empty())
        });
        prometheus
    }

    #[track_caller]
    fn until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let holds = within(SOON * 3, || condition().then_some(()));
        let log = || std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
        assert!(holds.is_some(), "not so: {what}\n{}", log());
    }

    /// The data of an answer of its API.
    fn ask(&self, path: &str) -> Result<Value, String> {
        let request = format!("GET {path} HTTP/1.1\r\nHost: p\r\nConnection: close\r\n\r\n");
        let answer = Client::connect(self.address).ask(request);
        let text = answer.text();
        let value: Value = serde_json::from_str(&text).map_err(|e| format!("{e}: {text}"))?;
        if value["status"] == "success" { Ok(value["data"].clone()) } else { Err(text) }
    }

    /// What an expression finds now: labels, and the value.
    fn query(&self, expression: &str) -> Result<Vec<Sample>, String> {
        let mut path = "/api/v1/query?query=".to_owned();
        for octet in expression.bytes() {
            let _ = write!(path, "%{octet:02x}");
        }
        let data = self.ask(&path)?;
        let found = data["result"].as_array().ok_or("no vector")?.iter().map(|item| {
            let labels = item["metric"].as_object().ok_or("no labels")?.iter();
            let labels = labels.map(|(k, v)| (k.clone(), v.as_str().unwrap_or("").to_owned()));
            let value = item["value"][1].as_str().and_then(|v| v.parse().ok()).ok_or("no value")?;
            Ok((labels.collect(), value))
        });
        found.collect()
    }

    /// Everything of ours that it has now, as it is told by us.
    fn stored(&self) -> BTreeMap<Series, f64> {
        let found = self.query("{__name__=~\"proxy_.*\", job=\"l7rp\"}").expect("an answer");
        let ours = found.into_iter().map(|(mut labels, value)| {
            let name = labels.remove("__name__").unwrap_or_default();
            labels.retain(|label, _| label != "job" && label != "instance");
            ((name, labels), value)
        });
        ours.collect()
    }

    /// Every rule, with what it asks.
    fn rules(&self) -> Vec<Value> {
        let data = self.ask("/api/v1/rules").expect("an answer");
        let groups = data["groups"].as_array().cloned().unwrap_or_default();
        groups.iter().filter_map(|group| group["rules"].as_array().cloned()).flatten().collect()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The names in an expression that can only be those of metrics.
fn names(expression: &str) -> BTreeSet<String> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    let words = expression.split(|c| !is_name(c));
    words
        .filter(|word| ["proxy_", "process_", "job_route:"].iter().any(|p| word.starts_with(p)))
        .map(str::to_owned)
        .collect()
}

/// The dashboard, and of each panel what it asks: title, expression, legend. Its variables stand
/// for everything.
fn dashboard() -> (Value, Vec<(String, String, String)>) {
    let text = std::fs::read_to_string(deployed("grafana/l7rp.json")).expect("a file");
    let board: Value = serde_json::from_str(&text).expect("JSON");
    let filled = |value: &Value| {
        let mut text = value.as_str().expect("text").to_owned();
        for name in ["$instance", "$route", "$pool"] {
            text = text.replace(name, ".*");
        }
        let text = text.replace("$__rate_interval", "2m");
        assert!(!text.contains('$'), "{text} has a variable that the dashboard has not");
        text
    };
    let mut all = Vec::new();
    for panel in board["panels"].as_array().expect("panels") {
        let title = panel["title"].as_str().expect("a title").to_owned();
        for target in panel["targets"].as_array().into_iter().flatten() {
            all.push((title.clone(), filled(&target["expr"]), filled(&target["legendFormat"])));
        }
    }
    for note in board["annotations"]["list"].as_array().expect("annotations") {
        all.push(("annotation".to_owned(), filled(&note["expr"]), filled(&note["titleFormat"])));
    }
    (board, all)
}

/// The labels that a legend shows.
fn shown(legend: &str) -> impl Iterator<Item = &str> {
    legend.split("{{").skip(1).filter_map(|rest| rest.split("}}").next())
}

#[test]
fn a_prometheus_stores_what_we_tell_and_finds_what_it_is_asked_for() {
    let mut all = Everything::start();
    let prometheus = Prometheus::over(&all.proxy);
    all.round();
    // A series is seen to grow only if it was seen before.
    let requests = "sum(proxy_upstream_requests_total)";
    let counted = all.proxy.metrics().sum("proxy_upstream_requests_total", &[]);
    prometheus.until("the first round is stored", || {
        prometheus.query(requests).is_ok_and(|found| found.iter().any(|(_, n)| *n >= counted))
    });
    all.round();
    all.settle();
    let mut told = BTreeMap::new();
    prometheus.until("what it stores is what we tell", || {
        told = samples(&all.proxy.metrics());
        told.retain(|(name, _), _| name.starts_with("proxy_"));
        prometheus.stored() == told
    });
    let mut known: BTreeSet<_> =
        samples(&all.proxy.metrics()).into_keys().map(|(name, _)| name).collect();
    known.insert(UNTOUCHED.to_owned());
    panels_are_answered(&prometheus, &known);
    rules_are_healthy(&prometheus, known);
}

/// Every expression of the dashboard names metrics that exist, finds something, and that has the
/// labels of its legend.
fn panels_are_answered(prometheus: &Prometheus, known: &BTreeSet<String>) {
    let (board, asked) = dashboard();
    assert!(asked.len() > 40, "the dashboard is read");
    for (title, expression, legend) in asked {
        let used = names(&expression);
        assert!(!used.is_empty() && used.is_subset(known), "{title}: {used:?}");
        let found = prometheus.query(&expression).unwrap_or_else(|e| panic!("{title}: {e}"));
        // Nothing has started twice.
        if !used.contains(UNTOUCHED) && !expression.starts_with("changes(process_start") {
            assert!(!found.is_empty(), "{title} is empty: {expression}");
        }
        for (labels, _) in &found {
            let lacks: Vec<_> = shown(&legend).filter(|name| !labels.contains_key(*name)).collect();
            assert!(lacks.is_empty(), "{title} shows {lacks:?}, and has {labels:?}");
        }
    }
    for variable in board["templating"]["list"].as_array().expect("variables") {
        let Some(query) = variable["definition"].as_str() else { continue };
        let (metric, label) = query
            .strip_prefix("label_values(")
            .and_then(|rest| rest.strip_suffix(')')?.rsplit_once(", "))
            .expect("a question for labels");
        let metric = metric.replace("$instance", ".*");
        let found = prometheus.query(&metric).expect("an answer");
        assert!(!found.is_empty() && found.iter().all(|(l, _)| l.contains_key(label)), "{query}");
    }
}

/// Every rule names metrics that exist and was evaluated without an error, and what alerts say can
/// be written.
fn rules_are_healthy(prometheus: &Prometheus, mut known: BTreeSet<String>) {
    prometheus.until("every rule was evaluated", || {
        prometheus.rules().iter().all(|rule| rule["health"] != "unknown")
    });
    let rules = prometheus.rules();
    let of_kind = |kind: &str| rules.iter().filter(|r| r["type"] == kind).collect::<Vec<_>>();
    let (recorded, alerts) = (of_kind("recording"), of_kind("alerting"));
    assert!(recorded.len() > 4 && alerts.len() > 15, "the rules are read: {rules:#?}");
    known.extend(recorded.iter().filter_map(|r| r["name"].as_str().map(str::to_owned)));
    for rule in &rules {
        let expression = rule["query"].as_str().expect("an expression");
        let used = names(expression);
        assert!(used.is_subset(&known), "{}: {used:?}", rule["name"]);
        assert!(!used.is_empty() || expression.contains("up{"), "{rule}");
        assert_eq!(rule["health"], "ok", "{rule}");
        assert!(prometheus.query(expression).is_ok(), "{rule}");
    }
    for rule in recorded {
        let name = rule["name"].as_str().expect("a name");
        // Half an hour has not passed, but the first of it has.
        prometheus.until(name, || prometheus.query(name).is_ok_and(|found| !found.is_empty()));
    }
    for alert in alerts {
        let severity = alert["labels"]["severity"].as_str();
        assert!(severity.is_some_and(|s| ["warning", "critical"].contains(&s)), "{alert}");
        for name in ["summary", "description", "action"] {
            assert!(alert["annotations"][name].as_str().is_some_and(|t| t.len() > 20), "{alert}");
        }
    }
    // A file was refused, a breaker is open: some have something to say.
    let active = || {
        let data = prometheus.ask("/api/v1/alerts").expect("an answer");
        data["alerts"].as_array().expect("alerts").clone()
    };
    prometheus.until("the refused file has raised its alert", || {
        active().iter().any(|alert| alert["labels"]["alertname"] == "L7rpReloadFailed")
    });
    for alert in active() {
        let text = alert["annotations"].to_string();
        assert!(!text.contains("error expanding") && !text.contains("no value"), "{alert}");
    }
}

#[test]
fn the_dashboard_can_be_read() {
    let (board, _) = dashboard();
    assert!(board["schemaVersion"].as_u64() >= Some(39), "{}", board["schemaVersion"]);
    let variables = board["templating"]["list"].as_array().expect("variables");
    let names: Vec<_> = variables.iter().filter_map(|v| v["name"].as_str()).collect();
    assert_eq!(names, ["datasource", "instance", "route", "pool"]);
    let panels = board["panels"].as_array().expect("panels");
    let (mut ids, mut taken) = (BTreeSet::new(), BTreeSet::new());
    let mut rows = Vec::new();
    for panel in panels {
        assert!(ids.insert(panel["id"].as_u64().expect("a number")), "{}", panel["id"]);
        let at = |key: &str| panel["gridPos"][key].as_u64().expect("a number");
        assert!(at("x") + at("w") <= 24, "{}", panel["title"]);
        for (x, y) in (0..at("w")).flat_map(|x| (0..at("h")).map(move |y| (x, y))) {
            assert!(taken.insert((at("x") + x, at("y") + y)), "{} covers another", panel["title"]);
        }
        if panel["type"] == "row" {
            rows.push(panel["title"].as_str().unwrap_or_default());
            continue;
        }
        for text in [&panel["description"], &panel["fieldConfig"]["defaults"]["unit"]] {
            assert!(text.as_str().is_some_and(|t| !t.is_empty()), "{}", panel["title"]);
        }
        let targets = panel["targets"].as_array().expect("targets");
        let sources = targets.iter().map(|target| &target["datasource"]["uid"]);
        for source in sources.chain([&panel["datasource"]["uid"]]) {
            assert_eq!(source, "${datasource}", "{}", panel["title"]);
        }
    }
    assert_eq!(rows, ["Traffic", "Upstreams", "Resilience", "Edge", "Process"]);
}

/// Prometheus' own tool judges the files.
#[test]
fn promtool_takes_the_rules_and_each_alert_fires_when_it_should() {
    for (arguments, file, expected) in [
        (["check", "rules"], "alerts.yml", "SUCCESS"),
        (["check", "config"], "prometheus.yml", "SUCCESS"),
        (["test", "rules"], "alerts.test.yml", "SUCCESS"),
    ] {
        let output = Command::new("promtool")
            .args(arguments)
            .arg(file)
            .current_dir(deployed("prometheus"))
            .output()
            .expect("promtool, of the package prometheus, is installed");
        let words = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{file}: {words}{errors}");
        assert!(words.contains(expected) && errors.is_empty(), "{file}: {words}{errors}");
    }
    // None is left out of the tests.
    let read = |name: &str| std::fs::read_to_string(deployed(name)).expect("a file");
    let tests = read("prometheus/alerts.test.yml");
    for line in read("prometheus/alerts.yml").lines() {
        let Some(alert) = line.trim_start().strip_prefix("- alert: ") else { continue };
        let firing = format!("ALERTS{{alertname=\"{alert}\", alertstate=\"firing\"");
        assert!(tests.matches(&firing).count() >= 2, "{alert} is not tested");
    }
}
