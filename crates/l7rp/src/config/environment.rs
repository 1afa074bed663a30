//! What the environment says of tracing, by the names that OpenTelemetry has given it: it fills in
//! what neither the flags nor the file say. The rest of these names (`OTEL_SERVICE_NAME`,
//! `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_BSP_*` but for the queue, `OTEL_EXPORTER_OTLP_HEADERS`,
//! `…_COMPRESSION`) is read by its library.

use std::time::Duration;

use super::plan::Tracing;

/// Fills in `tracing`. Gives what is wrong in the environment: it is left out, as the
/// specification wants it, and told.
pub fn fill_in(tracing: &mut Tracing, get: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let get = |name: &str| get(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
    let named = |name: &str| {
        let names = ["OTEL_EXPORTER_OTLP_TRACES_", "OTEL_EXPORTER_OTLP_"];
        let names = names.map(|start| format!("{start}{name}"));
        names.into_iter().find_map(|name| Some((get(&name)?, name)))
    };
    let of_traces = |name: &str| named(name).map(|(value, _)| value);
    let number = |text: &str| text.parse::<u64>().ok().filter(|n| *n > 0);
    let mut wrong = Vec::new();
    let is_off = get("OTEL_SDK_DISABLED").is_some_and(|v| v.eq_ignore_ascii_case("true"))
        || get("OTEL_TRACES_EXPORTER").is_some_and(|v| v == "none");
    if is_off {
        tracing.endpoint.clear();
        return wrong;
    }
    if tracing.endpoint.is_empty()
        && let Some((endpoint, name)) = named("ENDPOINT")
    {
        match read_endpoint(&endpoint) {
            Some((address, insecure)) => {
                tracing.endpoint = address;
                tracing.insecure = insecure;
            }
            None if is_harmless(&endpoint) => {
                wrong.push(format!("{name}: `{endpoint}` is no http://HOST:PORT of a collector"));
            }
            // There may be a password in it.
            None => wrong.push(format!("{name} is no http://HOST:PORT of a collector")),
        }
    }
    if tracing.endpoint.is_empty() {
        return wrong;
    }
    if let Some((protocol, name)) = named("PROTOCOL").filter(|(protocol, _)| protocol != "grpc") {
        wrong
            .push(format!("{name}: `{}` is not spoken here, only `grpc`", protocol.escape_debug()));
    }
    tracing.ca_file = of_traces("CERTIFICATE");
    tracing.identity = of_traces("CLIENT_CERTIFICATE").zip(of_traces("CLIENT_KEY"));
    let queue =
        get("OTEL_BSP_MAX_QUEUE_SIZE").map(|queue| (queue, "OTEL_BSP_MAX_QUEUE_SIZE".into()));
    let timeout = named("TIMEOUT");
    for (text, name) in queue.iter().chain(&timeout).filter(|(text, _)| number(text).is_none()) {
        wrong.push(format!("{name}: `{}` is no number from 1", text.escape_debug()));
    }
    if let Some(queue) = queue.and_then(|(text, _)| number(&text)) {
        tracing.queue = usize::try_from(queue).unwrap_or(usize::MAX);
    }
    if let Some(ms) = timeout.and_then(|(text, _)| number(&text)) {
        tracing.timeout = Duration::from_millis(ms);
    }
    // Somebody has said already.
    if tracing.ratio.is_none() {
        let (sampler, argument) = (get("OTEL_TRACES_SAMPLER"), get("OTEL_TRACES_SAMPLER_ARG"));
        wrong.extend(sample(tracing, sampler.as_deref(), argument.as_deref()));
    }
    wrong
}

/// Chooses which requests are traced; what is wrong with the wish, if anything is.
fn sample(tracing: &mut Tracing, sampler: Option<&str>, argument: Option<&str>) -> Option<String> {
    let sampler = sampler?;
    let root = sampler.strip_prefix("parentbased_");
    let mut wrong = None;
    let ratio = match root.unwrap_or(sampler) {
        "always_on" => 1.0,
        "always_off" => 0.0,
        "traceidratio" => match argument.map(str::parse::<f64>) {
            Some(Ok(ratio)) if (0.0..=1.0).contains(&ratio) => ratio,
            // As the specification wants it: as if it were not there.
            bad => {
                wrong = bad.map(|_| {
                    let text = argument.unwrap_or_default().escape_debug();
                    format!("OTEL_TRACES_SAMPLER_ARG: `{text}` is no number from 0 to 1")
                });
                1.0
            }
        },
        _ => {
            return Some(format!(
                "OTEL_TRACES_SAMPLER: `{}` is not known here: say always_on, always_off or \
                 traceidratio, with parentbased_ in front if the caller decides",
                sampler.escape_debug()
            ));
        }
    };
    tracing.ratio = Some(ratio);
    tracing.follows_parent = root.is_some();
    wrong
}

/// Whether it can only be a host and a port, and perhaps a scheme.
fn is_harmless(endpoint: &str) -> bool {
    let address = endpoint.split_once("://").map_or(endpoint, |(_, address)| address);
    address.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_:[]".contains(&b))
}

/// `http://host:port` or `https://host:port`, with or without a slash; the port may be absent.
fn read_endpoint(text: &str) -> Option<(String, bool)> {
    let (scheme, rest) = text.split_once("://")?;
    let insecure = match scheme.to_ascii_lowercase().as_str() {
        "http" => true,
        "https" => false,
        _ => return None,
    };
    let authority = rest.trim_end_matches('/');
    if authority.is_empty() || authority.contains(['/', '?', '#', '@', ' ']) {
        return None;
    }
    let after_host = authority.rsplit_once(']').map_or(authority, |(_, after)| after);
    let address = match after_host.rsplit_once(':') {
        Some((_, port)) => {
            port.parse::<u16>().ok()?;
            authority.to_owned()
        }
        None => format!("{authority}:4317"),
    };
    Some((address, insecure))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(file: Tracing, variables: &[(&str, &str)]) -> (Tracing, Vec<String>) {
        let mut tracing = file;
        let get = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.to_string())
        };
        let wrong = fill_in(&mut tracing, get);
        (tracing, wrong)
    }

    const HERE: (&str, &str) = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://otel:4317");

    #[test]
    fn an_endpoint_is_taken_where_nobody_has_named_one() {
        for (value, endpoint, insecure) in [
            ("http://otel:4317", "otel:4317", true),
            ("https://otel:4317/", "otel:4317", false),
            ("HTTPS://otel", "otel:4317", false),
            ("http://[::1]:4317", "[::1]:4317", true),
            ("http://[::1]", "[::1]:4317", true),
        ] {
            let (tracing, wrong) =
                filled(Tracing::default(), &[("OTEL_EXPORTER_OTLP_ENDPOINT", value)]);
            assert_eq!((tracing.endpoint.as_str(), tracing.insecure), (endpoint, insecure));
            assert!(wrong.is_empty(), "{wrong:?}");
        }
        for value in ["otel:4317", "unix:/x", "http://", "http://a/b", "http://a:b", "http://u@a"] {
            let (tracing, wrong) =
                filled(Tracing::default(), &[("OTEL_EXPORTER_OTLP_ENDPOINT", value)]);
            assert_eq!((tracing.endpoint.as_str(), wrong.len()), ("", 1), "{value}");
        }
        let of_traces = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:1");
        assert_eq!(filled(Tracing::default(), &[HERE, of_traces]).0.endpoint, "traces:1");
        let file = Tracing { endpoint: "file:1".to_owned(), ..Tracing::default() };
        assert_eq!(filled(file, &[HERE]).0.endpoint, "file:1");
    }

    #[test]
    fn it_can_be_switched_off() {
        let file = Tracing { endpoint: "file:1".to_owned(), ..Tracing::default() };
        for off in [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")] {
            assert_eq!(filled(file.clone(), &[HERE, off]).0.endpoint, "");
        }
        assert_eq!(filled(file, &[("OTEL_SDK_DISABLED", "false")]).0.endpoint, "file:1");
    }

    #[test]
    fn samplers() {
        for (sampler, argument, follows_parent, ratio) in [
            ("always_on", "", false, 1.0),
            ("always_off", "", false, 0.0),
            ("traceidratio", "0.25", false, 0.25),
            ("parentbased_always_on", "", true, 1.0),
            ("parentbased_always_off", "", true, 0.0),
            ("parentbased_traceidratio", "0.5", true, 0.5),
            ("parentbased_traceidratio", "", true, 1.0),
        ] {
            let given =
                [HERE, ("OTEL_TRACES_SAMPLER", sampler), ("OTEL_TRACES_SAMPLER_ARG", argument)];
            let (tracing, wrong) = filled(Tracing::default(), &given);
            assert!(wrong.is_empty(), "{wrong:?}");
            assert_eq!((tracing.follows_parent, tracing.sample_ratio()), (follows_parent, ratio));
            // The file has the say.
            let file = Tracing { ratio: Some(0.125), ..Tracing::default() };
            let (tracing, _) = filled(file, &given);
            assert_eq!((tracing.ratio, tracing.follows_parent), (Some(0.125), true));
        }
        for (sampler, argument, follows_parent, ratio) in [
            ("jaeger_remote", "", true, 0.01),
            ("traceidratio", "2", false, 1.0),
            ("x\n", "", true, 0.01),
        ] {
            let given =
                [HERE, ("OTEL_TRACES_SAMPLER", sampler), ("OTEL_TRACES_SAMPLER_ARG", argument)];
            let (tracing, wrong) = filled(Tracing::default(), &given);
            assert_eq!(wrong.len(), 1);
            assert!(!wrong[0].contains('\n'));
            assert_eq!((tracing.follows_parent, tracing.sample_ratio()), (follows_parent, ratio));
        }
    }

    #[test]
    fn what_is_wrong_is_told_by_its_own_name() {
        for (name, value, told) in [
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "`http/json` is not spoken here"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", "x", "`x` is not spoken here"),
            ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "soon", "`soon` is no number"),
            ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "`0` is no number from 1"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "otel:4317", "`otel:4317` is no http://"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://u:secret@otel", "is no http://"),
            ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://otel/secret", "is no http://"),
        ] {
            let (tracing, wrong) = filled(Tracing::default(), &[HERE, (name, value)]);
            assert_eq!(wrong.len(), 1, "{wrong:?}");
            assert!(wrong[0].starts_with(name) && wrong[0].contains(told), "{wrong:?}");
            assert!(!wrong[0].contains("secret"), "{wrong:?}");
            assert_eq!((tracing.queue, tracing.timeout), (2048, Duration::from_secs(10)));
        }
    }

    #[test]
    fn how_much_waits_and_how_long() {
        let generic = ("OTEL_EXPORTER_OTLP_TIMEOUT", "1");
        let own = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "300");
        let queue = ("OTEL_BSP_MAX_QUEUE_SIZE", "16");
        let (tracing, wrong) = filled(Tracing::default(), &[HERE, generic, own, queue]);
        assert!(wrong.is_empty(), "{wrong:?}");
        assert_eq!((tracing.queue, tracing.timeout), (16, Duration::from_millis(300)));
    }

    #[test]
    fn files_of_tls() {
        let (tracing, _) = filled(
            Tracing::default(),
            &[
                HERE,
                ("OTEL_EXPORTER_OTLP_CERTIFICATE", "ca.pem"),
                ("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "c.pem"),
                ("OTEL_EXPORTER_OTLP_CLIENT_KEY", "k.pem"),
            ],
        );
        assert_eq!(tracing.ca_file.as_deref(), Some("ca.pem"));
        assert_eq!(tracing.identity, Some(("c.pem".to_owned(), "k.pem".to_owned())));
    }
}
