//! `/status`, and what `l7rp status` and `l7rp top` make of it.

use l7rp_testkit::{Origin, Proxy, SOON, Signal, Value, eventually, reply};

use crate::setup::{get, over};

const REFUSED: &str = "health checks: connect_refused";

fn status(proxy: &Proxy) -> Value {
    let answer = proxy.ask_admin("/status");
    assert_eq!(answer.status(), 200);
    assert_eq!(answer.get("content-type"), Some("application/json"));
    serde_json::from_str(&answer.text()).expect("JSON")
}

/// Two backends, of which one is down; a third whose name nobody knows.
fn mixed(up: &Origin, down: &Origin) -> Proxy {
    let check = "path: /healthz, interval: 1500ms, timeout: 1s, healthy_threshold: 1";
    let proxy = over(&[up, down])
        .upstream("http://nobody.invalid", "weight: 3, max_in_flight: 7, backup: true")
        .pool(&format!("health: {{ active: {{ {check}, unhealthy_threshold: 1 }} }}"))
        .listener("max_connections: 50, max_in_flight: 40")
        .top("- { name: gone, host: '*.test', path_prefix: /gone, respond: { status: 410 } }")
        .start();
    eventually(SOON, || {
        let now = status(&proxy);
        let upstreams = &now["pools"][0]["upstreams"];
        upstreams[0]["eligible"] == true && upstreams[1]["why_not"] == REFUSED
    });
    proxy
}

#[test]
fn status_tells_what_is_in_force_and_how_it_goes() {
    let (up, down) = (Origin::start(reply::name("x")), Origin::refusing());
    let proxy = mixed(&up, &down);
    for path in ["/", "/a", "/gone"] {
        proxy.client().ask(get("a.test", path, ""));
    }
    eventually(SOON, || status(&proxy)["routes"][0]["requests"] == 2);
    eventually(SOON, || status(&proxy)["routes"][1]["by_class"]["4xx"] == 1);
    let now = status(&proxy);
    assert_eq!(now["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(now["pid"], proxy.pid());
    assert_eq!((&now["ready"], &now["draining"]), (&true.into(), &false.into()));
    assert_eq!(now["config"]["generation"], 1);
    assert_eq!(now["config"]["last_error"], Value::Null);
    let listener = &now["listeners"][0];
    assert_eq!((&listener["name"], &listener["bind"]), (&"web".into(), &"127.0.0.1:0".into()));
    assert_eq!(
        (&listener["max_connections"], &listener["max_in_flight"]),
        (&50.into(), &40.into())
    );
    let route = &now["routes"][0];
    assert_eq!((&route["host"], &route["pool"]), (&Value::Null, &"b".into()));
    assert_eq!(route["by_class"]["2xx"], 2);
    let route = &now["routes"][1];
    assert_eq!((&route["host"], &route["action"]), (&"*.test".into(), &"respond".into()));
    let upstreams = &now["pools"][0]["upstreams"];
    let [good, bad, unknown] = [&upstreams[0], &upstreams[1], &upstreams[2]];
    assert_eq!((&good["url"], &good["eligible"]), (&up.url().into(), &true.into()));
    assert_eq!((&good["requests"], &good["failures"]), (&2.into(), &0.into()));
    assert_eq!((&good["why_not"], &good["last_probe"]["good"]), (&Value::Null, &true.into()));
    assert_eq!(good["last_probe"]["reason"], "status:200");
    assert!(good["ewma_ms"].is_f64() && good["connections"]["idle"] != 0, "{good}");
    assert_eq!(bad["eligible"], false);
    assert_eq!(bad["why_not"], REFUSED);
    assert_eq!(bad["last_probe"]["good"], false);
    assert_eq!(bad["addresses"][0], down.url().trim_start_matches("http://"));
    assert_eq!(unknown["why_not"], "name not resolved");
    assert_eq!((&unknown["weight"], &unknown["max_in_flight"]), (&3.into(), &7.into()));
    assert_eq!((&unknown["backup"], &unknown["last_probe"]), (&true.into(), &Value::Null));
}

#[test]
fn why_is_told_before_there_is_a_verdict_and_after() {
    let origin = Origin::start(|call| {
        call.send("HTTP/1.1 204 Well\r\n\r\n");
        l7rp_testkit::Then::Next
    });
    let why = |of: &Proxy| status(of)["pools"][0]["upstreams"][0]["why_not"].clone();
    for (keys, words) in [
        ("interval: 1h", "no verdict yet, last probe status:204, expected 200"),
        (
            "interval: 1h, unhealthy_threshold: 1, expected_status: [200, 3xx]",
            "status:204, expected 200 or 3xx",
        ),
    ] {
        let proxy = over(&[&origin]).pool(&format!("health: {{ active: {{ {keys} }} }}")).start();
        eventually(SOON, || why(&proxy) == format!("health checks: {words}"));
    }
}

/// Nothing has changed then: the verdict is the news.
#[test]
fn a_first_verdict_that_is_bad_is_told() {
    let origin = Origin::refusing();
    let proxy = over(&[&origin]).pool("health: { active: { unhealthy_threshold: 1 } }").start();
    let event = proxy.wait_for_event("upstream_health_changed", |_| true, SOON);
    assert_eq!((&event["from"], &event["to"]), (&"new".into(), &"ineligible".into()));
    assert_eq!(event["why"], "connect_refused");
}

#[test]
fn status_has_what_its_schema_says_and_no_more() {
    let (up, down) = (Origin::start(reply::name("x")), Origin::refusing());
    let proxy = mixed(&up, &down);
    let schema: Value =
        serde_json::from_str(&proxy.ask_admin("/-/status.schema.json").text()).expect("JSON");
    assert!(schema["$schema"].is_string());
    let mut wrong = Vec::new();
    compare(&schema, &schema, &status(&proxy), "", &mut wrong);
    assert_eq!(wrong, [""; 0]);
    let mut broken = status(&proxy);
    broken["pools"][0]["upstreams"][0]["breaker"] = serde_json::json!({ "state": 1, "more": 2 });
    compare(&schema, &schema, &broken, "", &mut wrong);
    let at = "/pools/0/upstreams/0/breaker";
    let said = [
        format!("{at}/admits_in_ms is missing"),
        format!("{at}/forced is missing"),
        format!("{at}/more is unknown"),
        format!("{at}/state is no string"),
    ];
    wrong.sort();
    assert_eq!(wrong, said);
}

/// What of `value` is not as `schema` has it; enough of JSON Schema for one that is derived.
fn compare(whole: &Value, schema: &Value, value: &Value, at: &str, wrong: &mut Vec<String>) {
    let schema = match schema["$ref"].as_str() {
        Some(link) => whole.pointer(link.trim_start_matches('#')).expect("it leads somewhere"),
        None => schema,
    };
    if let Some(any) = schema["anyOf"].as_array() {
        let fits = |one: &&Value| (one["type"] == "null") == value.is_null();
        return compare(whole, any.iter().find(fits).expect("one fits"), value, at, wrong);
    }
    let kinds = match &schema["type"] {
        Value::Array(kinds) => kinds.clone(),
        kind => vec![kind.clone()],
    };
    let is = |kind: &Value| match kind.as_str().expect("a type") {
        "null" => value.is_null(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => false,
    };
    if !kinds.iter().any(is) {
        wrong.push(format!("{at} is no {}", kinds[0].as_str().unwrap_or_default()));
    }
    for key in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if value.get(key).is_none() {
            wrong.push(format!("{at}/{key} is missing"));
        }
    }
    for (key, inner) in value.as_object().into_iter().flatten() {
        match schema["properties"].get(key) {
            Some(known) => compare(whole, known, inner, &format!("{at}/{key}"), wrong),
            None => wrong.push(format!("{at}/{key} is unknown")),
        }
    }
    for (ix, inner) in value.as_array().into_iter().flatten().enumerate() {
        compare(whole, &schema["items"], inner, &format!("{at}/{ix}"), wrong);
    }
}

#[test]
fn status_tells_of_a_breaker_and_of_a_refused_reload() {
    let origin = Origin::start(reply::raw("HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n"));
    let proxy = over(&[&origin])
        .pool("circuit_breaker: { consecutive_failures: 1, open_min: 30s, open_max: 30s }")
        .start();
    proxy.get("/");
    let upstream = || status(&proxy)["pools"][0]["upstreams"][0].clone();
    eventually(SOON, || upstream()["breaker"]["state"] == "open");
    let why = upstream()["why_not"].as_str().unwrap_or_default().to_owned();
    assert!(why.starts_with("breaker open for another "), "{why}");
    assert_eq!(upstream()["failures"], 1);
    let wait = upstream()["breaker"]["admits_in_ms"].as_u64().expect("a time");
    assert!(wait > 1000 && wait <= 30_000, "{wait}");
    assert_eq!(status(&proxy)["ready"], false);
    std::fs::write(proxy.directory().join("config.yaml"), "nonsense: 1\n").expect("written");
    proxy.signal(Signal::HUP);
    eventually(SOON, || status(&proxy)["config"]["rejected"] == 1);
    let config = status(&proxy)["config"].clone();
    assert_eq!((&config["last_rejected"], &config["generation"]), (&true.into(), &1.into()));
    assert!(
        config["last_error"].as_str().expect("words").contains("config.yaml:1:1: "),
        "{config}"
    );
}
