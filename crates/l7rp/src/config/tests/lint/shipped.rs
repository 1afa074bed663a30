//! What is told of the configurations that come with the product.

use super::{accepted, told};

/// The configurations in the README; those of the book are checked by `cargo xtask docs-check`.
fn in_readme() -> Vec<String> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md");
    let readme = std::fs::read_to_string(path).unwrap();
    let cut = |begin: &str, end: &str| {
        let parts = readme.split(begin).skip(1);
        parts.map(|rest| rest.split(end).next().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let mut all = cut("<<'EOF'\n", "\nEOF\n");
    all.extend(cut("```yaml\n", "```"));
    all
}

#[test]
fn nothing_in_those_that_people_copy() {
    let all = in_readme();
    assert!(all.len() >= 2, "{all:?}");
    for text in all {
        assert_eq!(told(&text), Vec::<String>::new(), "{text}");
        assert_eq!(accepted(&text).warning_lines(), Vec::<String>::new(), "{text}");
    }
}

#[test]
fn what_shows_every_key_has_some_that_say_nothing() {
    let pool = "upstream_pools[0]";
    assert_eq!(
        told(include_str!("../full.yaml")),
        [
            format!(
                "34:17 {pool}.selector.hash_key: `hash_key` does nothing: the algorithm is `p2c-ewma` [unused-key]"
            ),
            format!(
                "35:16 {pool}.selector.epsilon: `epsilon` does nothing: the algorithm is `p2c-ewma` [unused-key]"
            ),
            format!(
                "36:22 {pool}.selector.virtual_nodes: `virtual_nodes` does nothing: the algorithm is `p2c-ewma` [unused-key]"
            ),
            format!(
                "39:58 {pool}.upstreams[1].weight: `weight` does nothing: the algorithm is `p2c-ewma` [unused-weight]"
            ),
            format!(
                "42:30 {pool}.response_header_timeout: `response_header_timeout` (30s) never ends a try: `timeouts.total` of each route to the pool `backend` is over by then (30s at most) [unreached-timeout]"
            ),
        ]
    );
}
