//! The page of the command line: the help of each command.

use std::fmt::Write as _;

const HEAD: &str = "\
<!-- Made by `cargo xtask docs` from the program's help: change that. -->

# Command line

What `l7rp --help` says, and `l7rp COMMAND --help` of each command. `l7rp man` prints the same as a
manual page, `l7rp completions SHELL` what a shell needs to complete it.

| exit code | means |
|---|---|
| 0 | all is well; stopped as asked (SIGTERM, SIGINT) |
| 1 | failed at run time: a port in use, for example; `load`: a request has failed |
| 2 | wrong usage or wrong configuration |
| 3 | ended by force: a second signal while stopping |
| 4 | `plan`: something changes; `--lint`: something is told |

The examples below use this file:

```yaml
# config.yaml
listeners:
  - { name: web, bind: \"127.0.0.1:8080\" }
upstream_pools:
  - { name: backend, upstreams: [{ url: \"http://127.0.0.1:9001\" }] }
routes:
  - { name: api, host: api.example.com, methods: [GET, POST], pool: backend }
```
";

/// What the help of a command is too short for.
const NOTES: [(&str, &str); 6] = [
    ("l7rp check", include_str!("notes/check.md")),
    ("l7rp plan", include_str!("notes/plan.md")),
    ("l7rp explain", include_str!("notes/explain.md")),
    ("l7rp status", include_str!("notes/status.md")),
    ("l7rp load", include_str!("notes/load.md")),
    ("l7rp top", "What is added each second, where `status` has totals.\n\n"),
];

/// The page; `said`: what the program prints.
pub fn page(said: impl Fn(&[&str]) -> String) -> String {
    let whole = said(&["--help"]);
    let mut page = HEAD.to_owned();
    section(&mut page, "l7rp", &whole);
    for command in commands(&whole) {
        section(&mut page, &format!("l7rp {command}"), &said(&[command, "--help"]));
    }
    page
}

fn section(page: &mut String, title: &str, help: &str) {
    let notes = NOTES.iter().filter(|(of, _)| *of == title).map(|(_, text)| *text);
    let _ = write!(page, "\n## {title}\n\n{}```text\n", notes.collect::<String>());
    for line in help.trim_end().lines() {
        // clap leaves blanks on empty lines.
        page.push_str(line.trim_end());
        page.push('\n');
    }
    page.push_str("```\n");
}

/// The names in the list of commands.
fn commands(help: &str) -> impl Iterator<Item = &str> {
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    list.map_while(|line| line.split_whitespace().next())
}

#[test]
fn every_command_of_the_list_is_found() {
    let help = "About\n\nCommands:\n  check  Check it\n  man    Print it\n\nOptions:\n  --config\n";
    assert_eq!(commands(help).collect::<Vec<_>>(), ["check", "man"]);
}
