//! The files of `examples/`: each is run as its first lines say, with other ports, and what it
//! promises is looked at, in `examples_*.rs`.

use std::collections::{BTreeMap, VecDeque};
use std::fs;
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use l7rp_testkit::{Client, Message, Proxy, SOON, eventually};

use crate::reloading::free_port;
use crate::setup::PROGRAM;

/// An example that is about to be run.
pub struct Example {
    name: String,
    folder: tempfile::TempDir,
    text: String,
    /// The ports of the file, and those that stand for them.
    ports: BTreeMap<u16, u16>,
    /// Those of them where something of the test listens.
    served: Vec<u16>,
}

impl Example {
    /// The example of this name, with free ports for all of its own.
    pub fn read(name: &str) -> Self {
        Self::with(name, &[])
    }

    /// As [`Example::read`], with ports at which the test itself serves in the place of others;
    /// backends that would listen there are not started.
    pub fn with(name: &str, served: &[(u16, u16)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let script = "certificates.sh";
        fs::copy(examples().join(script), folder.path().join(script)).expect("a script");
        let text = fs::read_to_string(examples().join(format!("{name}.yaml"))).expect("a file");
        // Sockets are no file that a second run could have, too.
        let text = text.replace("/tmp/", &format!("{}/", folder.path().display()));
        let mut ports = served.iter().copied().collect();
        let text = exchange(&text, &mut ports);
        let served = served.iter().map(|(_, port)| *port).collect();
        Self { name: name.to_owned(), folder, text, ports, served }
    }

    /// What stands for this address of the file.
    #[track_caller]
    pub fn at(&self, port: u16) -> SocketAddr {
        ([127, 0, 0, 1], self.ports[&port]).into()
    }

    /// Writes something else in the place of what only its user can have.
    #[track_caller]
    pub fn replace(mut self, from: &str, to: &str) -> Self {
        assert!(self.text.contains(from), "{from} is not in\n{}", self.text);
        self.text = self.text.replace(from, to);
        self
    }

    /// Runs the commands up to the one that starts the proxy, which then is ready.
    #[track_caller]
    pub fn start(self) -> Running {
        fs::write(self.folder.path().join(format!("{}.yaml", self.name)), &self.text)
            .expect("written");
        let mut commands: VecDeque<String> = commands(&self.text).into();
        let mut beside = Vec::new();
        let serves = format!("l7rp --config {}.yaml", self.name);
        loop {
            let command = commands.pop_front().expect("a command that starts the proxy");
            if command.trim_end_matches(" &") == serves {
                break;
            }
            let is_served =
                self.served.iter().any(|port| command.contains(&format!("127.0.0.1:{port}")));
            if !is_served {
                run(self.folder.path(), &command, &mut beside);
            }
        }
        let checked = run(
            self.folder.path(),
            &format!("l7rp check --lint {}.yaml 2>&1", self.name),
            &mut beside,
        );
        assert!(checked.starts_with("config OK: "), "{checked}");
        // The default would be the same for all tests.
        let own_admin = self.text.contains("\nadmin:");
        let admin = if own_admin { "" } else { " --metrics-bind 127.0.0.1:0" };
        let script = inside(self.folder.path(), &format!("exec {serves}{admin}"));
        let proxy = Proxy::start_with("bash", &["-c", &script]);
        if !proxy.started()["admin"].to_string().contains("unix:") {
            eventually(SOON, || proxy.ask_admin("/readyz").status() == 204);
        }
        assert_eq!(proxy.errors(), "", "it has nothing to complain of");
        Running { example: self, proxy, commands, beside }
    }
}

/// An example whose proxy runs.
pub struct Running {
    pub example: Example,
    pub proxy: Proxy,
    /// What its first lines say to do next.
    commands: VecDeque<String>,
    /// What runs beside it, in the order of the commands.
    pub beside: Vec<Proxy>,
}

/// Starts the example of this name.
#[track_caller]
pub fn start(name: &str) -> Running {
    Example::read(name).start()
}

impl Running {
    /// Does what the first lines say to do next; what is printed.
    #[track_caller]
    pub fn run(&mut self) -> String {
        let command = self.commands.pop_front().expect("another command");
        run(self.example.folder.path(), &command, &mut self.beside)
    }

    /// Does all that is left to do; what each prints.
    #[track_caller]
    pub fn rest<const N: usize>(&mut self) -> [String; N] {
        assert_eq!(self.commands.len(), N, "{:?}", self.commands);
        std::array::from_fn(|_| self.run())
    }

    /// The answer to a GET at this address of the file.
    #[track_caller]
    pub fn get(&self, port: u16, path: &str) -> Message {
        Client::connect(self.example.at(port)).get(path)
    }

    /// How many tries the upstream at this address of the file has had.
    #[track_caller]
    pub fn tries(&self, port: u16) -> f64 {
        let url = format!("http://{}", self.example.at(port));
        self.proxy.metrics().sum("proxy_upstream_requests_total", &[("upstream", &url)])
    }
}

/// Runs a command; one that ends in `&` goes on `beside`, and accepts connections at the first
/// address that it names.
#[track_caller]
fn run(folder: &Path, command: &str, beside: &mut Vec<Proxy>) -> String {
    if let Some(command) = command.strip_suffix(" &") {
        let process = Proxy::run("bash", ["-c", &inside(folder, &format!("exec {command}"))]);
        beside.push(process);
        let port = addresses(command).next().expect("an address").1;
        eventually(SOON, || TcpStream::connect(("127.0.0.1", port)).is_ok());
        return String::new();
    }
    let output = Command::new("timeout")
        .args(["60", "bash", "-c", &inside(folder, command)])
        .stdin(Stdio::null())
        .output()
        .expect("bash runs");
    let text = |octets| String::from_utf8(octets).expect("text");
    let (told, errors) = (text(output.stdout), text(output.stderr));
    assert!(output.status.success(), "{command}\n{told}\n{errors}");
    told
}

/// A command in this folder, where `l7rp` is the program.
fn inside(folder: &Path, command: &str) -> String {
    let bin = Path::new(PROGRAM).parent().expect("a folder");
    format!("cd '{}' && PATH='{}':$PATH; {command}", folder.display(), bin.display())
}

/// The addresses of this machine that `text` names: where each port begins, and the port.
fn addresses(text: &str) -> impl Iterator<Item = (usize, u16)> {
    let hosts = ["127.0.0.1:", "localhost:"];
    let mut ends: Vec<_> = hosts
        .iter()
        .flat_map(|host| text.match_indices(host).map(|(at, host)| at + host.len()))
        .collect();
    ends.sort_unstable();
    ends.into_iter().filter_map(|at| {
        let digits = text[at..].bytes().take_while(u8::is_ascii_digit).count();
        text[at..at + digits].parse().ok().map(|port| (at, port))
    })
}

/// `text` with a free port for each, the same everywhere.
fn exchange(text: &str, ports: &mut BTreeMap<u16, u16>) -> String {
    let (mut out, mut done) = (String::new(), 0);
    for (at, port) in addresses(text) {
        assert!(port >= 1024, "port {port} is for the administrator of a machine only");
        let other = ports.entry(port).or_insert_with(free_port);
        out.push_str(&text[done..at]);
        out.push_str(&other.to_string());
        done = at + port.to_string().len();
    }
    out + &text[done..]
}

/// The commands in the first lines of an example, each as one line.
fn commands(text: &str) -> Vec<String> {
    let mut commands: Vec<String> = Vec::new();
    let mut goes_on = false;
    for line in head(text).filter_map(|line| line.strip_prefix("#   ")) {
        let (part, more) = line.strip_suffix('\\').map_or((line, false), |part| (part, true));
        match commands.last_mut() {
            Some(last) if goes_on => last.push_str(part.trim_start()),
            _ => commands.push(part.to_owned()),
        }
        goes_on = more;
    }
    commands
}

/// The comment that an example begins with.
fn head(text: &str) -> impl Iterator<Item = &str> {
    text.lines().take_while(|line| line.starts_with('#'))
}

fn examples() -> PathBuf {
    root().join("examples")
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every example: its name, and its text.
fn all() -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(examples()).expect("the examples") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().and_then(|name| name.to_str()).expect("a name");
        match name.strip_suffix(".yaml") {
            Some(name) => {
                let text = fs::read_to_string(&path).expect("a file");
                all.insert(name.to_owned(), text);
            }
            None => assert_eq!(name, "certificates.sh", "no test knows what it is for"),
        }
    }
    all
}

#[test]
fn each_has_a_test_of_its_name() {
    const TESTS: [&str; 4] = [
        include_str!("examples_balancing.rs"),
        include_str!("examples_failing.rs"),
        include_str!("examples_routing.rs"),
        include_str!("examples_secure.rs"),
    ];
    for name in all().keys() {
        let begins = format!("#[test]\nfn {}() {{\n", name.replace('-', "_"));
        let test = TESTS.iter().find_map(|source| source.split_once(&begins));
        let body = test.and_then(|(_, rest)| rest.split("\n}\n").next());
        let reads = format!("(\"{name}\"");
        assert!(
            body.is_some_and(|body| body.contains(&reads)),
            "examples/{name}.yaml: no test in examples_*.rs begins with\n{begins}\nand starts it"
        );
    }
}

#[test]
fn each_says_what_it_is_and_how_to_try_it() {
    for (name, text) in all() {
        let words = head(&text).filter(|line| !line.starts_with("#   ")).count();
        assert!((2..=5).contains(&words), "{name}: {words} lines of words");
        let starts = format!("l7rp --config {name}.yaml");
        let commands = commands(&text);
        assert!(
            commands.iter().any(|c| c.trim_end_matches(" &") == starts),
            "{name}: {commands:?}"
        );
        assert!(text.lines().count() <= 60, "{name} is too long to be copied");
        for line in text.lines() {
            assert!(line.chars().count() <= 100, "{name}: {line}");
        }
    }
}

#[test]
fn nothing_is_told_of_any() {
    for name in all().keys() {
        let file = examples().join(format!("{name}.yaml"));
        let output = Command::new(PROGRAM)
            .args(["check", "--lint", "--no-files"])
            .arg(file)
            .output()
            .expect("it runs");
        let told = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), told.as_ref()), (Some(0), ""), "{name}");
    }
}

#[test]
fn the_page_lists_each_once() {
    let page = fs::read_to_string(root().join("docs/src/examples.md")).expect("the page");
    let link = |name: &str| format!("| [{name}.yaml](../../examples/{name}.yaml) | ");
    let names = all();
    for name in names.keys() {
        assert_eq!(page.matches(&link(name)).count(), 1, "{}", link(name));
    }
    assert_eq!(
        page.matches("../../examples/").count(),
        names.len() + 1,
        "and the script, and no other"
    );
}
