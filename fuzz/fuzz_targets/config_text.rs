//! Any text as a configuration: it is taken or refused with words, and never panics.
#![no_main]

use std::path::Path;

use l7rp::config::{Files, Source, parse};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let source = Source { name: "config.yaml".to_owned(), text: text.to_owned() };
    match parse(&source, Path::new("."), Files::Ignore) {
        Ok(loaded) => {
            loaded.render_not_yet(false);
            loaded.render_warnings(false);
            // The same text means the same.
            let again = parse(&source, Path::new("."), Files::Ignore);
            assert!(again.is_ok_and(|again| again.plan == loaded.plan));
        }
        Err(refused) => assert!(!refused.render(false).is_empty(), "refused without a word"),
    }
});
