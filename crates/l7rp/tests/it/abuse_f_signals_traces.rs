//! Spans that say something else than what was, or that never come; and an environment that is not
//! what the specification of OpenTelemetry has in mind.

use std::collections::BTreeSet;
use std::time::Duration;

use l7rp_testkit::{Origin, Proxy, SOON, Signal, Then, eventually, let_pass, reply, within};

use crate::collector::{CALLER, Collector, TRACE, program};
use crate::http2_tools::{Conn, request};
use crate::setup::{Setup, get, over};
use crate::tls_kit::Ca;
use crate::tries::{in_turn, retrying, say};

fn part_of(trace: &str, flags: &str) -> String {
    format!("traceparent: 00-{trace}-{CALLER}-{flags}\r\n")
}

fn section(address: &str) -> String {
    format!("tracing: {{ endpoint: \"{address}\" }}")
}

fn traced(setup: Setup, collector: &Collector) -> Proxy {
    Proxy::start_by(&mut program(), &setup.top(&section(&collector.address())).yaml())
}

/// "Span Status MUST be left unset if HTTP status code was in the 1xx, 2xx or 3xx ranges, unless
/// there was another error, in which case status MUST be set to Error."
#[test]
fn an_answer_that_breaks_off_is_an_error() {
    const HALF: &str = "HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\nhalf";
    let collector = Collector::start();
    let origin = Origin::start(reply::raw(HALF));
    let proxy = traced(over(&[&origin]), &collector);
    let _ = proxy.client().send(get("a.test", "/", &part_of(TRACE, "01"))).try_response();
    let spans = collector.trace(TRACE, 2);
    assert_eq!(spans[0]["attributes"]["error.type"], "response_truncated");
    assert_eq!((&spans[0]["status"], &spans[1]["status"]), (&2.into(), &2.into()), "{spans:#?}");
}

/// `url.full` is where the request went.
#[test]
fn the_url_of_a_try_is_the_one_that_was_asked_for() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    let url = format!("{}/base", origin.url());
    let setup = over(&[])
        .upstream(&url, "weight: 1")
        .route("path_prefix: /api, rewrite: { strip_prefix: /api }");
    let proxy = traced(setup, &collector);
    let answer = proxy.client().ask(get("a.test", "/api/x", &part_of(TRACE, "01")));
    assert_eq!((answer.status(), origin.last().target()), (200, "/base/x"));
    let spans = collector.trace(TRACE, 2);
    assert_eq!(spans[0]["attributes"]["url.path"], "/api/x");
    assert_eq!(spans[1]["attributes"]["url.full"], format!("{url}/x"));
}

/// A request is sent twice: whoever answers it must be able to tell the two apart.
#[test]
fn a_request_that_is_sent_again_has_another_parent() {
    let collector = Collector::start();
    let origin = Origin::start(crate::reuse::stale);
    let proxy = traced(over(&[&origin]).one_worker(), &collector);
    assert_eq!(proxy.get("/first").status(), 200);
    let answer = proxy.client().ask(get("a.test", "/second", &part_of(TRACE, "01")));
    assert_eq!(answer.status(), 200);
    let seen = origin.seen();
    let parents: Vec<_> = seen
        .iter()
        .filter(|seen| seen.message.target() == "/second")
        .map(|seen| seen.message.get("traceparent").expect("a field").to_owned())
        .collect();
    assert_eq!(parents.len(), 2);
    assert_ne!(parents[0], parents[1], "two requests, one span");
    let spans = collector.trace(TRACE, 3);
    for (span, parent) in spans[1..].iter().zip(&parents) {
        assert_eq!(span["span_id"].as_str(), parent.split('-').nth(2), "{spans:#?}");
    }
    assert_eq!(spans[1]["attributes"]["error.type"], "upstream_closed");
    assert_eq!(spans[2]["attributes"]["http.request.resend_count"], 1);
    // It was no retry.
    assert_eq!(spans[2]["attributes"]["proxy.retry_attempt"], 0);
    assert_eq!(spans[0]["attributes"]["proxy.retry_attempt"], 0);
    let at = |span: usize, key: &str| spans[span][key].as_u64().expect("a time");
    assert!(at(1, "end") <= at(2, "start") && at(2, "end") <= at(0, "end"), "{spans:#?}");
}

/// The first has answered before the second was asked.
#[test]
fn the_span_of_an_answer_that_was_kept_ends_when_it_came() {
    let collector = Collector::start();
    let origins: [Origin; 2] = in_turn(|call, nth| {
        if nth == 0 {
            return say(call, 503, "", "busy");
        }
        let_pass(Duration::from_millis(800));
        reply::close(call)
    });
    let setup = retrying(&origins.each_ref(), "max_attempts: 2").one_worker();
    let proxy = traced(setup, &collector);
    let answer = proxy.client().ask(get("a.test", "/", &part_of(TRACE, "01")));
    assert_eq!(answer.text(), "busy");
    let spans = collector.trace(TRACE, 3);
    let at = |span: usize, key: &str| spans[span][key].as_u64().expect("a time");
    assert!(at(1, "end") <= at(2, "start"), "they were one after the other: {spans:#?}");
}

/// What the grace of a drain cuts off is what one would look for later.
#[test]
fn spans_of_what_a_drain_cuts_are_sent() {
    let collector = Collector::start();
    let origin = Origin::start(reply::hang);
    let setup = over(&[&origin]).top("drain: { timeout: 200ms }");
    let mut proxy = traced(setup, &collector);
    let mut client = proxy.client();
    client.send(get("a.test", "/cut", &part_of(TRACE, "01")));
    eventually(SOON, || origin.requests() == 1);
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
    let line = proxy.logged_path("/cut");
    assert_eq!(line["trace_id"], TRACE, "{line}");
    collector.trace(TRACE, 2);
}

/// What was counted stays counted.
#[test]
fn no_reload_takes_counted_spans_away() {
    let (one, two) = (Collector::start(), Collector::start());
    let origin = Origin::start(reply::name("x"));
    let proxy = traced(over(&[&origin]), &one);
    assert_eq!(proxy.client().ask(get("a.test", "/", &part_of(TRACE, "01"))).status(), 200);
    let exported = || proxy.metrics().sum("proxy_trace_spans_total", &[("outcome", "exported")]);
    eventually(SOON, || exported() == 2.0);
    proxy.reload(&over(&[&origin]).top(&section(&two.address())).yaml());
    assert_eq!(exported(), 2.0);
}

/// Threads of the exporter of spans: the one that sends, and the one that waits for its end.
fn senders(proxy: &Proxy) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", proxy.pid())).expect("it runs");
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    let names = tasks.filter_map(|task| name(task.ok()?).ok());
    names.filter(|name| name.starts_with("OpenTelemetry") || name.starts_with("l7rp-spans")).count()
}

/// Reloads that change the collector, with something to send between them; at the end there is
/// none.
fn wander(proxy: &Proxy, origin: &Origin, collectors: &[String]) {
    for collector in collectors {
        proxy.reload(&over(&[origin]).top(&section(collector)).yaml());
        for _ in 0..3 {
            let asked = proxy.client().ask(get("a.test", "/", &part_of(TRACE, "01")));
            assert_eq!(asked.status(), 200);
        }
        let_pass(Duration::from_millis(150));
    }
    proxy.reload(&over(&[origin]).yaml());
}

/// Five seconds are what the last spans may take, and ten are what the library gives a call.
#[test]
fn exporters_that_nobody_answers_leave_no_thread() {
    let origin = Origin::start(reply::name("x"));
    let deaf: Vec<_> = (0..10).map(|_| Origin::never_accepting()).collect();
    let all: Vec<_> = deaf.iter().map(|origin| origin.address.to_string()).collect();
    let proxy = Proxy::start_by(&mut program(), &over(&[&origin]).yaml());
    assert_eq!(senders(&proxy), 0);
    wander(&proxy, &origin, &all);
    let gone = within(Duration::from_secs(25), || (senders(&proxy) == 0).then_some(()));
    assert!(gone.is_some(), "{} threads send to where nothing is in force", senders(&proxy));
}

/// Guard: those that are answered end, and so do those that are refused.
#[test]
fn exporters_that_are_answered_leave_no_thread() {
    let (one, two) = (Collector::start(), Collector::start());
    let origin = Origin::start(reply::name("x"));
    let nobody = Origin::refusing().address.to_string();
    let all: Vec<_> = (0..5).flat_map(|_| [one.address(), nobody.clone(), two.address()]).collect();
    let mut command = program();
    command.env("OTEL_EXPORTER_OTLP_TIMEOUT", "500");
    let proxy = Proxy::start_by(&mut command, &over(&[&origin]).yaml());
    wander(&proxy, &origin, &all);
    eventually(SOON * 2, || senders(&proxy) == 0);
    assert_eq!(one.spans().len() + two.spans().len(), 10 * 6, "nothing is lost on the way");
}

/// Guard: nor does such a one hold up the end.
#[test]
fn a_collector_that_nobody_answers_at_holds_up_no_end() {
    let origin = Origin::start(reply::name("x"));
    let deaf = Origin::never_accepting();
    let setup = over(&[&origin]).top(&section(&deaf.address.to_string()));
    let mut proxy = Proxy::start_by(&mut program(), &setup.yaml());
    for _ in 0..20 {
        let asked = proxy.client().ask(get("a.test", "/", &part_of(TRACE, "01")));
        assert_eq!(asked.status(), 200);
    }
    proxy.signal(Signal::TERM);
    assert_eq!(proxy.wait_exit(SOON), 0);
}

/// Guard: a line is no condition for a span.
#[test]
fn without_an_access_log_there_are_spans() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    let proxy = traced(over(&[&origin]).top("access_log: { enabled: false }"), &collector);
    assert_eq!(proxy.client().ask(get("a.test", "/", &part_of(TRACE, "01"))).status(), 200);
    collector.trace(TRACE, 2);
    assert!(proxy.events("request_completed").is_empty());
}

/// Guard: the process that takes over traces, and what the other still had to send comes.
#[test]
fn a_process_that_takes_over_traces_as_well() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    let mut command = program();
    command.env("OTEL_BSP_SCHEDULE_DELAY", "60000");
    let address = crate::reloading::free_port();
    let setup = over(&[&origin]).top(&section(&collector.address()));
    let yaml = setup.yaml().replace("127.0.0.1:0", &format!("127.0.0.1:{address}"));
    let mut proxy = Proxy::start_by(&mut command, &yaml);
    assert_eq!(proxy.client().ask(get("a.test", "/", &part_of(TRACE, "01"))).status(), 200);
    proxy.signal(Signal::USR2);
    let event = proxy.wait_for_event("upgrade_complete", |_| true, SOON * 2);
    assert_eq!(proxy.wait_end(SOON), 0);
    collector.trace(TRACE, 2);
    let other = TRACE.replace('0', "1");
    let asked = proxy.client().ask(get("a.test", "/", &part_of(&other, "01")));
    assert_eq!(asked.status(), 200);
    let pid = event["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok());
    let pid = pid.and_then(rustix::process::Pid::from_raw).expect("a process id");
    rustix::process::kill_process(pid, Signal::TERM).expect("it runs");
    collector.trace(&other, 2);
}

/// What is wrong is told, and a password is no part of it.
#[test]
fn an_endpoint_that_is_refused_is_told_without_its_password() {
    let origin = Origin::start(reply::name("x"));
    let mut command = program();
    command.env("OTEL_EXPORTER_OTLP_ENDPOINT", "https://user:s3cret@otel.test:4317");
    let proxy = Proxy::start_by(&mut command, &over(&[&origin]).yaml());
    let event = proxy.reload(&over(&[&origin]).yaml());
    eventually(SOON, || proxy.errors().contains("OTEL_EXPORTER_OTLP_ENDPOINT"));
    assert!(!proxy.errors().contains("s3cret"), "{}", proxy.errors());
    assert!(!event.to_string().contains("s3cret"), "{event}");
}

/// "Invalid or unrecognized input MUST be logged and MUST be otherwise ignored, i.e. the
/// implementation MUST behave as if `OTEL_TRACES_SAMPLER_ARG` is not set": then it is 1.
#[test]
fn a_sampler_with_a_bad_argument_is_that_sampler_without_one() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    let mut command = program();
    command
        .env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://{}", collector.address()))
        .env("OTEL_TRACES_SAMPLER", "traceidratio")
        .env("OTEL_TRACES_SAMPLER_ARG", "a lot");
    let proxy = Proxy::start_by(&mut command, &over(&[&origin]).yaml());
    assert_eq!(proxy.client().ask(get("a.test", "/", &part_of(TRACE, "00"))).status(), 200);
    collector.trace(TRACE, 2);
}

/// The variables "count where flags and file say nothing", and the file says how many.
#[test]
fn a_sampler_of_the_environment_does_not_change_what_the_file_says() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    let mut command = program();
    command.env("OTEL_TRACES_SAMPLER", "always_on");
    let address = collector.address();
    let setup =
        over(&[&origin]).top(&format!("tracing: {{ endpoint: \"{address}\", sample_ratio: 0 }}"));
    let proxy = Proxy::start_by(&mut command, &setup.yaml());
    assert_eq!(proxy.client().ask(get("a.test", "/", &part_of(TRACE, "01"))).status(), 200);
    collector.trace(TRACE, 2);
}

/// `OTEL_BSP_*` counts, as is promised.
#[test]
fn the_queue_is_as_long_as_the_environment_says() {
    let mut collector = Collector::start();
    collector.refuse(true);
    let origin = Origin::start(reply::name("x"));
    let mut command = program();
    command.env("OTEL_BSP_MAX_QUEUE_SIZE", "16").env("OTEL_BSP_SCHEDULE_DELAY", "60000");
    let setup = over(&[&origin]).top(&section(&collector.address()));
    let proxy = Proxy::start_by(&mut command, &setup.yaml());
    let mut client = proxy.client();
    for _ in 0..100 {
        assert_eq!(client.ask(get("a.test", "/", &part_of(TRACE, "01"))).status(), 200);
    }
    // The first sixteen are on their way, and as many wait.
    let dropped = || proxy.metrics().sum("proxy_trace_spans_total", &[("outcome", "dropped")]);
    let seen = within(Duration::from_secs(3), || (dropped() > 100.0).then_some(()));
    assert!(seen.is_some(), "200 spans, room for 16, and {} found none", dropped());
}

/// Guard: from a client by HTTP/2 to an upstream, all is as by HTTP/1.
#[test]
fn a_trace_goes_through_http2() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    let proxy = traced(over(&[&origin]), &collector);
    let mut asked = request("GET", "/h2?secret=1");
    let parent = format!("00-{TRACE}-{CALLER}-01");
    asked.headers_mut().insert("traceparent", parent.parse().expect("a value"));
    assert_eq!(Conn::open(&proxy).ask(asked).expect("an answer").status, 200);
    let spans = collector.trace(TRACE, 2);
    assert_eq!(spans[0]["attributes"]["network.protocol.version"], "2");
    assert_eq!(spans[0]["parent"], CALLER);
    let told = origin.last().get("traceparent").expect("a field").to_owned();
    assert_eq!(told.split('-').nth(2), spans[1]["span_id"].as_str());
    assert!(!collector.lines_hold("secret"));
}

/// Guard: in a tunnel, too.
#[test]
fn a_tunnel_has_its_spans_when_it_ends() {
    let collector = Collector::start();
    let origin = Origin::start(crate::upgrade::echo);
    let proxy = traced(over(&[&origin]), &collector);
    let mut client = proxy.client();
    let offer =
        crate::upgrade::OFFER.replace("\r\n\r\n", &format!("\r\n{}\r\n", part_of(TRACE, "01")));
    assert_eq!(client.send(offer).head().status(), 101);
    drop(client);
    let spans = collector.trace(TRACE, 2);
    assert_eq!(spans[0]["attributes"]["http.response.status_code"], 101);
    assert_eq!(spans[1]["attributes"]["http.response.status_code"], 101);
    assert_eq!((&spans[0]["status"], &spans[1]["status"]), (&0.into(), &0.into()));
}

/// Guard: whoever has it dropped by `Connection` is not believed less, and nobody gets two.
#[test]
fn a_traceparent_that_connection_names() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    let proxy = traced(over(&[&origin]), &collector);
    for (number, lines) in
        ["Connection: traceparent, tracestate\r\n", "TraceParent-X: 1\r\n"].iter().enumerate()
    {
        let trace = TRACE.replace('0', &(number + 1).to_string());
        let lines = format!("{lines}{}tracestate: a=1\r\n", part_of(&trace, "01").to_uppercase());
        let lines = lines.replace(&trace.to_uppercase(), &trace);
        let lines = lines.replace(&CALLER.to_uppercase(), CALLER);
        assert_eq!(proxy.client().ask(get("a.test", "/", &lines)).status(), 200);
        let seen = origin.last();
        assert_eq!(seen.all("traceparent").len(), 1, "{seen:?}");
        collector.trace(&trace, 2);
    }
}

/// Guard: ids of spans and traces differ.
#[test]
fn no_two_spans_have_one_id() {
    let collector = Collector::start();
    let origin = Origin::start(|call| {
        let _ = call.body();
        call.send(reply::ok("x"));
        Then::Next
    });
    let address = collector.address();
    let setup =
        over(&[&origin]).top(&format!("tracing: {{ endpoint: \"{address}\", sample_ratio: 1.0 }}"));
    let proxy = Proxy::start_by(&mut program(), &setup.yaml());
    let mut client = proxy.client();
    for _ in 0..300 {
        assert_eq!(client.get("/").status(), 200);
    }
    eventually(SOON * 2, || collector.spans().len() == 600);
    let spans = collector.spans();
    let ids: BTreeSet<_> = spans.iter().filter_map(|s| s["span_id"].as_str()).collect();
    let traces: BTreeSet<_> = spans.iter().filter_map(|s| s["trace_id"].as_str()).collect();
    assert_eq!((ids.len(), traces.len()), (600, 300));
}

/// Guard: where nobody names a CA, those of the system count.
#[test]
fn a_collector_is_known_by_the_systems_cas() {
    let ca = Ca::new("the system's ca");
    let pair = ca.issue("collector", &["127.0.0.1"]);
    let collector = Collector::secure(&pair);
    let origin = Origin::start(reply::name("x"));
    let address = collector.address();
    let setup =
        over(&[&origin]).top(&format!("tracing: {{ endpoint: \"{address}\", insecure: false }}"));
    let mut command = program();
    command.env("SSL_CERT_FILE", ca.file());
    let proxy = Proxy::start_by(&mut command, &setup.yaml());
    assert_eq!(proxy.client().ask(get("a.test", "/", &part_of(TRACE, "01"))).status(), 200);
    collector.trace(TRACE, 2);
}

/// Guard: what is wrong in the environment is no reason not to serve.
#[test]
fn an_environment_that_is_all_wrong_stops_nobody() {
    let collector = Collector::start();
    let origin = Origin::start(reply::name("x"));
    let mut command = program();
    for (name, value) in [
        ("OTEL_EXPORTER_OTLP_HEADERS", "a b=c,=,x"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "0"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_BSP_EXPORT_TIMEOUT", "-1"),
        ("OTEL_RESOURCE_ATTRIBUTES", "=,a,b=%zz"),
        ("OTEL_TRACES_SAMPLER", "xray"),
        ("OTEL_TRACES_EXPORTER", "zipkin"),
    ] {
        command.env(name, value);
    }
    let setup = over(&[&origin]).top(&section(&collector.address()));
    let proxy = Proxy::start_by(&mut command, &setup.yaml());
    assert_eq!(proxy.client().ask(get("a.test", "/", &part_of(TRACE, "01"))).status(), 200);
    collector.trace(TRACE, 2);
}

/// Who looks for the mistake looks where it is.
#[test]
fn a_variable_that_is_wrong_is_told_by_its_own_name() {
    let origin = Origin::start(reply::name("x"));
    let mut command = program();
    command.env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "otel:4317");
    let proxy = Proxy::start_by(&mut command, &over(&[&origin]).yaml());
    let name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
    eventually(SOON, || proxy.errors().contains("otel:4317"));
    assert!(proxy.errors().contains(name), "{}", proxy.errors());
}

/// Nobody listens, it has another certificate, it refuses: they are mended in different places.
#[test]
fn why_spans_do_not_get_to_a_collector_is_told() {
    let ca = Ca::new("nobody's ca");
    let secure = Collector::secure(&ca.issue("collector", &["127.0.0.1"]));
    let mut told = BTreeSet::new();
    let origin = Origin::start(reply::name("x"));
    let keys = ", insecure: false";
    for (address, keys) in [(Origin::refusing().address.to_string(), ""), (secure.address(), keys)]
    {
        let setup = over(&[&origin]).top(&format!("tracing: {{ endpoint: \"{address}\"{keys} }}"));
        let mut command = program();
        command.env("OTEL_EXPORTER_OTLP_TIMEOUT", "300");
        let proxy = Proxy::start_by(&mut command, &setup.yaml());
        assert_eq!(proxy.client().ask(get("a.test", "/", &part_of(TRACE, "01"))).status(), 200);
        let event = proxy.wait_for_event("trace_export_failed", |_| true, SOON * 2);
        told.insert(event["error"].as_str().expect("words").to_owned());
    }
    assert_eq!(told.len(), 2, "{told:?}");
}

/// "If and only if one was received/sent."
#[test]
fn a_status_that_nobody_sent_is_no_attribute() {
    let collector = Collector::start();
    let origin = Origin::start(reply::hang);
    let proxy = traced(over(&[&origin]), &collector);
    let mut client = proxy.client();
    client.send(get("a.test", "/left", &part_of(TRACE, "01")));
    eventually(SOON, || origin.requests() == 1);
    client.reset();
    let spans = collector.trace(TRACE, 2);
    assert_eq!(spans[0]["attributes"]["error.type"], "client_gone");
    let status = spans[0]["attributes"].get("http.response.status_code");
    assert_eq!(status, None, "the client was sent nothing");
}
