//! Nothing that a file may hold makes the parser panic.

use proptest::prelude::*;

use super::check;

/// Pieces of configurations, put together in any order.
fn pieces() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "listeners:",
        "upstream_pools:",
        "routes:",
        "\n  - ",
        "\n    ",
        "\n",
        ": ",
        "- ",
        "name: a",
        "bind: ",
        "\"127.0.0.1:80\"",
        "url: http://a",
        "{",
        "}",
        "[",
        "]",
        ", ",
        "&a ",
        "*a",
        "<<: ",
        "|\n",
        ">\n",
        "'",
        "\"",
        "#",
        "---\n",
        "...\n",
        "? ",
        "!!int ",
        "!x ",
        "~",
        "null",
        "true",
        "1.5",
        "-3",
        "1m30s",
        "64KiB",
        "\t",
        "\r\n",
        "\u{feff}",
        "é",
        "\u{0}",
        "middleware: ",
        "retry: ",
        "tls: ",
        "host: ",
        "*.a",
        "pool: a",
        "%YAML 1.2\n",
        "upstreams: ",
        "5xx",
    ]);
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

/// Rendering must hold up too: it cuts texts at byte positions.
fn survives(text: &str) {
    match check(text) {
        Ok(loaded) => {
            let _ = loaded.render_warnings(false);
        }
        Err(refused) => assert!(!refused.render(true).is_empty()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn any_text(text in any::<String>()) {
        survives(&text);
    }

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        survives(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn nearly_a_configuration(text in pieces()) {
        survives(&text);
    }

    #[test]
    fn a_configuration_with_a_hole(from in 0..6000usize, length in 0..40usize, with in pieces()) {
        let full = include_str!("full.yaml");
        let mut text: Vec<char> = full.chars().collect();
        let from = from.min(text.len());
        let to = (from + length).min(text.len());
        text.splice(from..to, with.chars().take(20));
        survives(&text.into_iter().collect::<String>());
    }
}
