//! The page of the configuration, made from its JSON Schema, whose descriptions are the doc
//! comments of the code.

use std::collections::HashMap;
use std::fmt::Write as _;

use serde_json::Value;

const HEAD: &str = r#"<!-- Made by `cargo xtask docs` from the schema (`l7rp schema`): change the doc comments there. -->

# Configuration

One YAML file, `/etc/l7rp/config.yaml` unless `--config` names another. It is read strictly: an unknown
key, a wrong type, or a name that nothing has is an error with file, line and column, and all errors
of a file are reported at once. `l7rp check FILE` reads a file as the proxy would, `l7rp check --lint
FILE` also tells what is valid but cannot be meant, and `l7rp schema` prints the JSON Schema from which
this page is made, which editors can use.

```yaml
# config.yaml
listeners:
  - name: http
    bind: "127.0.0.1:8080"

upstream_pools:
  - name: backend
    upstreams:
      - url: http://127.0.0.1:9001
      - url: http://127.0.0.1:9002

routes:
  - name: api
    host: api.example.com
    path_prefix: /v1
    pool: backend
```

```console
$ l7rp check --lint config.yaml
config OK: 1 listener(s), 1 pool(s), 1 route(s)
```

How values are written:

- **time**: a number with a unit, `100ms`, `1.5s`, `1m30s`; units are `ns`, `us`, `ms`, `s`, `m`, `h`.
  A bare number is refused, but for `0`.
- **size**: a number of bytes, or with a unit, `64KiB`, `10MiB`.
- **status**: a number such as `503`, or in quotes a class such as `"5xx"`.
- **list**: `[a, b]`, or each on its own line after `- `. **Entries** of a list of sections begin with
  their first key: `- name: backend`.
- **number** is a whole one, **fraction** may have a point.

A key that is absent has its default; a section that is absent has the defaults of its keys, unless it
says that nothing is done without it. `/-/plan` on the admin address shows what is in force with all
defaults written out. What this version reads but cannot serve yet says so below, and is refused.
"#;

/// What people write first comes first.
const FIRST: [&str; 3] = ["listeners", "upstream_pools", "routes"];

/// The page.
pub fn page(schema: &Value) -> String {
    let mut page = Page { schema, text: HEAD.to_owned(), places: HashMap::new() };
    let root = Section { path: String::new(), object: schema };
    let mut sections = Vec::new();
    page.gather(root, &mut sections);
    for section in &sections {
        page.section(section);
    }
    page.text
}

/// An object of the schema, and where in the file it stands.
struct Section<'s> {
    path: String,
    object: &'s Value,
}

impl Section<'_> {
    fn title(&self) -> String {
        if self.path.is_empty() { "The file".to_owned() } else { format!("`{}`", self.path) }
    }
}

struct Page<'s> {
    schema: &'s Value,
    text: String,
    /// Where the objects are that have names in the schema, by name.
    places: HashMap<&'s str, String>,
}

impl<'s> Page<'s> {
    /// All objects from `section` on, each where it stands first.
    fn gather(&mut self, section: Section<'s>, all: &mut Vec<Section<'s>>) {
        let (path, object) = (section.path.clone(), section.object);
        all.push(section);
        for (key, value) in keys(object) {
            let Some((name, list)) = self.named(value) else { continue };
            let object = &self.schema["$defs"][name];
            if object["properties"].is_null() || self.places.contains_key(name) {
                continue;
            }
            let dot = if path.is_empty() { "" } else { "." };
            let path = format!("{path}{dot}{key}{}", if list { "[]" } else { "" });
            self.places.insert(name, path.clone());
            self.gather(Section { path, object }, all);
        }
    }

    /// The name of the definition that a key refers to, and whether it is a list of them.
    fn named(&self, value: &'s Value) -> Option<(&'s str, bool)> {
        if let Some(name) = reference(value).or_else(|| value["anyOf"].get(0).and_then(reference)) {
            // One that only refers to another is that other.
            let inner = reference(&self.schema["$defs"][name]);
            return Some((inner.unwrap_or(name), false));
        }
        reference(&value["items"]).map(|name| (name, true))
    }

    fn section(&mut self, section: &Section<'s>) {
        let _ = write!(self.text, "\n## {}\n\n", section.title());
        if !section.path.is_empty() {
            let _ = writeln!(self.text, "{}\n", described(section.object));
        }
        for (key, value) in keys(section.object) {
            let required = section.object["required"].as_array();
            let required = required.is_some_and(|names| names.iter().any(|name| name == key));
            let kind = self.kind(value);
            let default = if required { ", required".to_owned() } else { self.default(value) };
            let _ = writeln!(self.text, "- **`{key}`** ({kind}{default}): {}", described(value));
            self.choices(value);
        }
    }

    /// What is to be written, in a word or two.
    fn kind(&self, value: &'s Value) -> String {
        let Some((name, list)) = self.named(value) else { return plain(value) };
        let object = &self.schema["$defs"][name];
        let kind = match self.places.get(name) {
            Some(path) => format!("[`{path}`](#{})", anchor(path)),
            None => match name {
                "Time" => "time".to_owned(),
                "Size" => "size".to_owned(),
                "Status" => "status".to_owned(),
                "Workers" => "number or `auto`".to_owned(),
                "Headers" => "names and values".to_owned(),
                _ if object["oneOf"].is_array() => "one of these".to_owned(),
                _ => plain(object),
            },
        };
        if list { format!("list of {kind}") } else { kind }
    }

    /// The default, if it says anything.
    fn default(&self, value: &'s Value) -> String {
        let section = self.named(value).is_some_and(|(name, _)| self.places.contains_key(name));
        match &value["default"] {
            Value::Array(items) if items.is_empty() => ", default none".to_owned(),
            Value::Array(items) => {
                let items: Vec<String> = items.iter().map(shown).collect();
                format!(", default `[{}]`", items.join(", "))
            }
            // That of a section is that of its keys.
            Value::Object(_) if section => String::new(),
            Value::Object(_) => ", default none".to_owned(),
            Value::Null if section => ", nothing without it".to_owned(),
            Value::Null => ", optional".to_owned(),
            Value::String(text) if text.is_empty() => ", default empty".to_owned(),
            default => format!(", default `{}`", shown(default)),
        }
    }

    /// What each word means, where there are words to choose from.
    fn choices(&mut self, value: &'s Value) {
        let Some((name, _)) = self.named(value) else { return };
        for choice in self.schema["$defs"][name]["oneOf"].as_array().into_iter().flatten() {
            let _ = writeln!(self.text, "  - `{}`: {}", shown(&choice["const"]), described(choice));
        }
    }
}

/// The keys of an object: those that must be there, then the others, as the alphabet has them.
fn keys(object: &Value) -> Vec<(&String, &Value)> {
    let required = |key: &String| {
        let names = object["required"].as_array();
        names.and_then(|names| names.iter().position(|name| name == key)).unwrap_or(usize::MAX)
    };
    let first = |key: &String| FIRST.iter().position(|f| f == key).unwrap_or(usize::MAX);
    let mut keys: Vec<_> = object["properties"].as_object().into_iter().flatten().collect();
    keys.sort_by_key(|(key, _)| (required(key), first(key)));
    keys
}

fn reference(value: &Value) -> Option<&str> {
    value["$ref"].as_str()?.strip_prefix("#/$defs/")
}

/// A type that has no name.
fn plain(value: &Value) -> String {
    let kind = value["type"].as_str().or_else(|| value["type"][0].as_str()).unwrap_or_default();
    let least = value["minimum"].as_i64();
    match (kind, least, value["maximum"].as_i64()) {
        ("integer", Some(least), Some(most)) => format!("number from {least} to {most}"),
        ("integer", Some(least @ 1..), None) => format!("number, at least {least}"),
        ("integer", ..) => "number".to_owned(),
        ("number", ..) => "fraction".to_owned(),
        ("boolean", ..) => "`true` or `false`".to_owned(),
        ("array", ..) if value["items"]["type"] == "integer" => "list of numbers".to_owned(),
        ("array", ..) => "list of texts".to_owned(),
        ("string", ..) => "text".to_owned(),
        _ => panic!("no words for the type of {value}"),
    }
}

/// A value as it is written in the file.
fn shown(value: &Value) -> String {
    match value {
        Value::String(text) if text.starts_with(|c: char| c.is_ascii_digit()) => {
            let quoted = text.ends_with("xx") || text.parse::<f64>().is_ok();
            if quoted { format!("\"{text}\"") } else { text.clone() }
        }
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

fn described(value: &Value) -> String {
    let text = value["description"].as_str();
    text.unwrap_or_else(|| panic!("no description of {value}")).replace('\n', " ")
}

/// As both mdBook and GitHub make it of a heading.
fn anchor(path: &str) -> String {
    path.chars().filter(|c| c.is_alphanumeric() || *c == '_').collect()
}
