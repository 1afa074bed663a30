//! Spans, as an independent collector gets them; and the fields of a trace, as upstreams do.

use std::process::{Command, Stdio};
use std::time::Duration;

use l7rp_testkit::{Message, Origin, Proxy, SOON, Signal, Value, complete, eventually, reply};

use crate::collector::{CALLER, Collector, TRACE, program};
use crate::setup::{PROGRAM, Setup, get, over};
use crate::tls_kit::Ca;

fn traceparent(trace: &str, flags: &str) -> String {
    format!("00-{trace}-{CALLER}-{flags}")
}

/// Fields of a request that is part of `trace`.
fn part_of(trace: &str, flags: &str) -> String {
    let parent = traceparent(trace, flags);
    format!("traceparent: {parent}\r\ntracestate: v=1,w=2\r\nbaggage: user=7\r\n")
}

/// A proxy that sends its spans to `collector` at once.
fn traced(setup: Setup, collector: &Collector, keys: &str) -> Proxy {
    let address = collector.address();
    let setup = setup.top(&format!("tracing: {{ endpoint: \"{address}\"{keys} }}"));
    Proxy::start_by(&mut program(), &setup.yaml())
}

/// Trace, span and flags in the field that an upstream got.
fn told(message: &Message) -> (String, String, String) {
    let value = message.get("traceparent").expect("a traceparent");
    let parts: Vec<_> = value.split('-').collect();
    assert_eq!((parts.len(), parts[0]), (4, "00"), "{value}");
    (parts[1].to_owned(), parts[2].to_owned(), parts[3].to_owned())
}

#[test]
fn both_spans_of_a_request() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    let proxy = traced(over(&[&origin]), &collector, "");
    let request = get("api.test:81", "/a/b?secret=1", &part_of(TRACE, "01"));
    assert_eq!(proxy.client().ask(request).text(), "x");
    let spans = collector.trace(TRACE, 2);
    let (server, client) = (&spans[0], &spans[1]);
    assert_eq!((&server["name"], &server["kind"]), (&"proxy.request".into(), &2.into()));
    assert_eq!((&client["name"], &client["kind"]), (&"proxy.upstream.request".into(), &3.into()));
    assert_eq!(server["parent"], CALLER);
    assert_eq!(client["parent"], server["span_id"]);
    // The upstream is told of the try, and the rest is the caller's.
    let seen = origin.last();
    let (trace, span, flags) = told(&seen);
    assert_eq!((trace.as_str(), flags.as_str()), (TRACE, "01"));
    assert_eq!(client["span_id"], span);
    assert_eq!((seen.get("tracestate"), seen.get("baggage")), (Some("v=1,w=2"), Some("user=7")));
    // The caller is elsewhere; whose flags say so, says it of the server's span alone.
    assert_eq!((server["flags"].as_u64(), client["flags"].as_u64()), (Some(0x301), Some(0x101)));
    for span in &spans {
        assert_eq!(span["resource"]["service.name"], "l7rp");
        assert_eq!(span["resource"]["service.version"], env!("CARGO_PKG_VERSION"));
        assert_eq!((&span["scope"], &span["status"]), (&"l7rp".into(), &0.into()));
    }
    let (start, end) = (server["start"].as_u64(), server["end"].as_u64());
    let (from, to) = (client["start"].as_u64(), client["end"].as_u64());
    assert!(start <= from && from < to && to <= end.map(|end| end + 1_000_000), "{spans:#?}");
    let url = origin.url();
    for (key, value) in [
        ("http.request.method", Value::from("GET")),
        ("url.scheme", "http".into()),
        ("url.path", "/a/b".into()),
        ("server.address", "api.test".into()),
        ("server.port", 81.into()),
        ("client.address", "127.0.0.1".into()),
        ("network.protocol.version", "1.1".into()),
        ("http.response.status_code", 200.into()),
        ("proxy.route", "r".into()),
        ("proxy.pool", "b".into()),
        ("proxy.upstream", url.as_str().into()),
        ("proxy.retry_attempt", 0.into()),
        ("proxy.hedge_fired", false.into()),
    ] {
        assert_eq!(server["attributes"][key], value, "{key}");
    }
    for (key, value) in [
        ("http.request.method", Value::from("GET")),
        ("url.full", format!("{url}/a/b").into()),
        ("server.address", "127.0.0.1".into()),
        ("http.response.status_code", 200.into()),
        ("proxy.upstream", url.as_str().into()),
        ("proxy.retry_attempt", 0.into()),
    ] {
        assert_eq!(client["attributes"][key], value, "{key}");
    }
    assert!(!collector.lines_hold("secret"), "what is behind the question mark is nobody's");
    assert_eq!(proxy.logged_path("/a/b")["trace_id"], TRACE);
}

#[test]
fn a_request_that_is_not_sampled_has_no_span_and_passes_as_it_is() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    let proxy = traced(over(&[&origin]), &collector, ", sample_ratio: 1.0");
    let mut client = proxy.client();
    assert_eq!(client.ask(get("a.test", "/1", &part_of(TRACE, "00"))).status(), 200);
    let seen = origin.last();
    assert_eq!(seen.get("traceparent"), Some(traceparent(TRACE, "00").as_str()));
    assert_eq!((seen.get("tracestate"), seen.get("baggage")), (Some("v=1,w=2"), Some("user=7")));
    assert!(proxy.logged_path("/1").get("trace_id").is_none());
    let other = TRACE.replace('0', "1");
    assert_eq!(client.ask(get("a.test", "/2", &part_of(&other, "01"))).status(), 200);
    collector.trace(&other, 2);
    assert_eq!(collector.spans().len(), 2, "what came before would have come first");
}

#[test]
fn a_trace_that_begins_here_goes_on_with_the_decision() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    for (ratio, flags) in [("0", "00"), ("1.0", "01")] {
        let keys = format!(", sample_ratio: {ratio}");
        let proxy = traced(over(&[&origin]), &collector, &keys);
        let mut seen = Vec::new();
        for lines in ["", "traceparent: 00-abc-def-01\r\ntracestate: v=1\r\nbaggage: b=1\r\n"] {
            assert_eq!(proxy.client().ask(get("a.test", "/", lines)).status(), 200);
            let last = origin.last();
            // State without a trace that it belongs to is nothing.
            assert_eq!(last.get("tracestate"), None);
            assert_eq!(last.get("baggage").is_some(), !lines.is_empty());
            seen.push(told(&last));
        }
        // Of two callers neither can be believed.
        let two = part_of(TRACE, "01") + &part_of(&TRACE.replace('0', "1"), "01");
        assert_eq!(proxy.client().ask(get("a.test", "/", &two)).status(), 200);
        seen.push(told(&origin.last()));
        assert!(seen.iter().all(|(trace, _, _)| trace != TRACE));
        assert!(seen.iter().all(|(_, _, own)| own == flags), "{seen:?}");
        assert!(seen[0].0 != seen[1].0 && seen[1].0 != seen[2].0);
        if flags == "01" {
            for (trace, span, _) in &seen {
                let spans = collector.trace(trace, 2);
                assert_eq!(spans[0]["parent"], "");
                assert_eq!(spans[1]["span_id"], span.as_str());
            }
            assert_eq!(collector.spans().len(), 6);
        }
    }
}

#[test]
fn without_a_collector_all_passes_as_it_is() {
    let origin = Origin::start(reply::name("x"));
    let proxy = over(&[&origin]).start();
    for lines in [part_of(TRACE, "01"), "traceparent: 00-abc-def-01\r\ntracestate: v=1\r\n".into()]
    {
        assert_eq!(proxy.client().ask(get("a.test", "/", &lines)).status(), 200);
        let seen = String::from_utf8_lossy(&origin.last().head).into_owned();
        for line in lines.lines() {
            assert!(seen.contains(line), "{line} in {seen}");
        }
    }
    assert_eq!(proxy.client().ask(get("a.test", "/", "")).status(), 200);
    assert_eq!(origin.last().get("traceparent"), None);
    assert!(proxy.metrics().series("proxy_trace_spans_total").next().is_none());
}

#[test]
fn every_try_has_a_span_of_its_own() {
    let collector = Collector::start();
    let bad = Origin::start(reply::close);
    let worse = Origin::start(reply::raw("HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n"));
    let setup = over(&[&bad, &worse])
        .pool("selector: { algorithm: round-robin }")
        .route("middleware: [{ retry: { max_attempts: 2, backoff: 1ms } }]");
    let proxy = traced(setup, &collector, "");
    let answer = proxy.client().ask(get("a.test", "/", &part_of(TRACE, "01")));
    let spans = collector.trace(TRACE, 3);
    assert_eq!(spans[0]["attributes"]["http.response.status_code"], answer.status());
    assert_eq!(spans[0]["attributes"]["proxy.retry_attempt"], 1);
    assert_eq!(spans[0]["status"], 2, "a server's error is one");
    let mut seen = vec![told(&bad.last()).1, told(&worse.last()).1];
    let mut own: Vec<_> =
        spans[1..].iter().map(|s| s["span_id"].as_str().expect("an id").to_owned()).collect();
    seen.sort();
    own.sort();
    assert_eq!(seen, own, "each upstream is told of its own try");
    let mut types = Vec::new();
    for (number, span) in spans[1..].iter().enumerate() {
        assert_eq!(span["parent"], spans[0]["span_id"]);
        assert_eq!(span["attributes"]["proxy.retry_attempt"], number);
        assert_eq!(span["status"], 2);
        types.push(span["attributes"]["error.type"].as_str().expect("a type").to_owned());
    }
    types.sort();
    assert_eq!(types, ["503", "upstream_closed"]);
}

#[test]
fn a_race_has_two_spans_and_its_loser_no_fault() {
    let collector = Collector::start();
    let slow = Origin::start(reply::hang);
    let fast = Origin::start(reply::name("fast"));
    let setup = over(&[&slow, &fast])
        .pool(
            "selector: { algorithm: round-robin }, retry_budget: { ratio: 1, min_per_second: 100 }",
        )
        .route("middleware: [{ retry: { hedge_after: 20ms } }]");
    let proxy = traced(setup, &collector, "");
    // One of the two goes to the slow one first.
    for n in 1..3 {
        let trace = TRACE.replace('0', &n.to_string());
        let answer = proxy.client().ask(get("a.test", "/", &part_of(&trace, "01")));
        assert_eq!(answer.text(), "fast");
        if proxy.logged(|line| line["trace_id"] == trace.as_str())["hedged"] == false {
            continue;
        }
        let spans = collector.trace(&trace, 3);
        assert_eq!(spans[0]["attributes"]["proxy.hedge_fired"], true);
        assert_eq!(spans[0]["attributes"]["proxy.upstream"], fast.url());
        assert_eq!(spans[1]["attributes"]["error.type"], "lost_race");
        assert_eq!((&spans[1]["status"], &spans[2]["status"]), (&0.into(), &0.into()));
        assert_eq!(spans[2]["attributes"]["proxy.hedge_fired"], true);
        return;
    }
    panic!("nothing raced");
}

#[test]
fn what_the_proxy_itself_refuses_is_told() {
    let collector = Collector::start();
    let proxy = traced(over(&[&Origin::refusing()]).route("host: a.test"), &collector, "");
    let ask = |host, n: u32| {
        let trace = TRACE.replace('0', &n.to_string());
        let answer = proxy.client().ask(get(host, "/", &part_of(&trace, "01")));
        (answer.status(), collector.trace(&trace, if n == 1 { 1 } else { 2 }))
    };
    let (status, spans) = ask("other.test", 1);
    assert_eq!((status, &spans[0]["status"]), (404, &0.into()));
    assert_eq!(spans[0]["attributes"]["error.type"], "no_route");
    let (status, spans) = ask("a.test", 2);
    assert_eq!((status, &spans[0]["status"]), (502, &2.into()));
    assert_eq!(spans[0]["attributes"]["error.type"], "connect_refused");
    assert_eq!(spans[1]["attributes"]["error.type"], "connect_refused");
    assert_eq!(spans[1]["attributes"].get("http.response.status_code"), None);
}

#[test]
fn a_collector_that_is_down_hurts_nobody() {
    let mut collector = Collector::start();
    collector.refuse(true);
    let origin = Origin::start(reply::name("x"));
    let setup = over(&[&origin]);
    let address = collector.address();
    let setup = setup.top(&format!("tracing: {{ endpoint: \"{address}\", sample_ratio: 1.0 }}"));
    let mut command = program();
    // The library tries again for as long.
    command.env("OTEL_EXPORTER_OTLP_TIMEOUT", "300");
    let proxy = Proxy::start_by(&mut command, &setup.yaml());
    let mut client = proxy.client();
    for _ in 0..3000 {
        assert_eq!(client.get("/").status(), 200);
    }
    let failed = proxy.wait_for_event("trace_export_failed", |_| true, SOON * 2);
    assert_eq!(failed["endpoint"], address.as_str());
    assert!(failed["error"].as_str().is_some_and(|e| !e.is_empty()), "{failed}");
    let outcome = |word| proxy.metrics().sum("proxy_trace_spans_total", &[("outcome", word)]);
    eventually(SOON, || outcome("failed") > 0.0);
    assert_eq!(outcome("exported"), 0.0);
    collector.refuse(false);
    eventually(SOON * 2, || client.get("/").status() == 200 && outcome("exported") > 0.0);
    proxy.wait_for_event("trace_export_recovered", |_| true, SOON);
    // Nothing is lost without being counted.
    let total = || outcome("failed") + outcome("exported") + outcome("dropped");
    let done = client.get("/");
    assert_eq!(done.status(), 200);
    let requests = || proxy.metrics().sum("proxy_requests_total", &[]);
    eventually(SOON * 2, || total() == 2.0 * requests());
}

#[test]
fn nobody_at_the_endpoint_holds_up_the_end() {
    let origin = Origin::start(reply::name("x"));
    let nobody = Origin::refusing();
    let nobody = nobody.url().trim_start_matches("http://").to_owned();
    let setup =
        over(&[&origin]).top(&format!("tracing: {{ endpoint: \"{nobody}\", sample_ratio: 1.0 }}"));
    let mut proxy = Proxy::start_by(&mut program(), &setup.yaml());
    for _ in 0..20 {
        assert_eq!(proxy.get("/").status(), 200);
    }
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
}

#[test]
fn the_last_spans_are_sent_before_the_end() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    let address = collector.address();
    let setup = over(&[&origin]).top(&format!("tracing: {{ endpoint: \"{address}\" }}"));
    let mut command = Command::new(PROGRAM);
    command.stderr(Stdio::piped()).env("OTEL_BSP_SCHEDULE_DELAY", "60000");
    let mut proxy = Proxy::start_by(&mut command, &setup.yaml());
    assert_eq!(proxy.client().ask(get("a.test", "/", &part_of(TRACE, "01"))).status(), 200);
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    collector.trace(TRACE, 2);
}

#[test]
fn the_environment_says_what_file_and_flags_do_not() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    let mut command = program();
    command
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{}", collector.address()))
        .env("OTEL_TRACES_SAMPLER", "always_on")
        .env("OTEL_SERVICE_NAME", "edge")
        .env("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        .env("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=seven");
    let proxy = Proxy::start_by(&mut command, &over(&[&origin]).yaml());
    // Whatever the caller says: it is no sampler that asks it.
    assert_eq!(proxy.client().ask(get("a.test", "/", &part_of(TRACE, "00"))).status(), 200);
    let spans = collector.trace(TRACE, 2);
    assert_eq!(spans[0]["resource"]["service.name"], "edge");
    assert_eq!(spans[0]["resource"]["deployment.environment.name"], "test");
    assert_eq!(spans[0]["parent"], CALLER);
    assert_eq!(collector.calls()[0]["x-tenant"], "seven");
    assert_eq!(told(&origin.last()).2, "01");

    let mut command = program();
    let endpoint = format!("http://{}", collector.address());
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint).env("OTEL_SDK_DISABLED", "true");
    let proxy = Proxy::start_by(&mut command, &over(&[&origin]).yaml());
    assert!(proxy.metrics().series("proxy_trace_spans_total").next().is_none());
}

#[test]
fn flags_win_over_the_file() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    let mut command = program();
    command.args([
        "--tracing-endpoint",
        &collector.address(),
        "--tracing-sample-ratio",
        "1",
        "--tracing-insecure",
    ]);
    let setup = over(&[&origin]).top("tracing: { endpoint: \"192.0.2.1:1\", sample_ratio: 0 }");
    let proxy = Proxy::start_by(&mut command, &setup.yaml());
    assert_eq!(proxy.client().ask(get("a.test", "/", "")).status(), 200);
    let (trace, _, flags) = told(&origin.last());
    assert_eq!(flags, "01");
    collector.trace(&trace, 2);
}

#[test]
fn a_collector_may_speak_tls() {
    let ca = Ca::new("collector's ca");
    let pair = ca.issue("collector", &["127.0.0.1"]);
    let collector = Collector::secure(&pair);
    let origin = Origin::start(reply::name("x"));
    let address = collector.address();
    let setup =
        over(&[&origin]).top(&format!("tracing: {{ endpoint: \"{address}\", insecure: false }}"));
    let mut command = program();
    command.env("OTEL_EXPORTER_OTLP_CERTIFICATE", ca.file());
    let proxy = Proxy::start_by(&mut command, &setup.yaml());
    assert_eq!(proxy.client().ask(get("a.test", "/", &part_of(TRACE, "01"))).status(), 200);
    collector.trace(TRACE, 2);
    // Whom it does not know it does not tell.
    let mut stranger = program();
    stranger.env("OTEL_EXPORTER_OTLP_TIMEOUT", "300");
    let proxy = Proxy::start_by(&mut stranger, &setup.yaml());
    let other = TRACE.replace('0', "1");
    assert_eq!(proxy.client().ask(get("a.test", "/", &part_of(&other, "01"))).status(), 200);
    proxy.wait_for_event("trace_export_failed", |_| true, SOON * 2);
    assert_eq!(collector.spans().len(), 2);
}

#[test]
fn a_reload_changes_where_spans_go_and_how_many() {
    let (one, two) = (Collector::start(), Collector::start());
    let origin = Origin::start(reply::name("x"));
    let proxy = traced(over(&[&origin]), &one, ", sample_ratio: 0");
    let ask = || {
        assert_eq!(proxy.client().ask(get("a.test", "/", "")).status(), 200);
        told(&origin.last())
    };
    assert_eq!(ask().2, "00");
    let mut generation = 1;
    let mut change = |endpoint: &str, ratio: &str| {
        let section = format!("tracing: {{ endpoint: \"{endpoint}\", sample_ratio: {ratio} }}");
        let yaml = over(&[&origin]).top(&section).yaml();
        let yaml = complete(&yaml, &proxy.directory());
        std::fs::write(proxy.directory().join("config.yaml"), yaml).expect("a file");
        generation += 1;
        proxy.signal(Signal::HUP);
        proxy.wait_for_event("config_reloaded", |e| e["generation"] == generation, SOON);
    };
    change(&one.address(), "1.0");
    let (trace, _, flags) = ask();
    assert_eq!(flags, "01");
    one.trace(&trace, 2);
    change(&two.address(), "1.0");
    let (trace, ..) = ask();
    two.trace(&trace, 2);
    assert_eq!(one.spans().len(), 2);
    change("", "1.0");
    assert_eq!(proxy.client().ask(get("a.test", "/", "")).status(), 200);
    assert_eq!(origin.last().get("traceparent"), None);
}

#[test]
fn a_route_may_take_the_trace_away() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    let setup = over(&[&origin])
        .route("middleware: [{ headers: { remove_request: [traceparent, tracestate] } }]");
    let proxy = traced(setup, &collector, "");
    for flags in ["00", "01"] {
        assert_eq!(proxy.client().ask(get("a.test", "/", &part_of(TRACE, flags))).status(), 200);
        let seen = origin.last();
        assert_eq!((seen.get("traceparent"), seen.get("tracestate")), (None, None));
    }
    collector.trace(TRACE, 2);
    eventually(Duration::from_secs(1), || collector.spans().len() == 2);
}
