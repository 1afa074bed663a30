//! The other proxies, as child processes in the foreground.

use std::fmt::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use l7rp_testkit::within;

/// How long one may take to start.
const START: Duration = Duration::from_secs(10);

/// A running nginx or haproxy; killed when dropped.
pub(crate) struct Other {
    child: Child,
    pub(crate) address: SocketAddr,
    /// Its files live as long as it does.
    _directory: tempfile::TempDir,
}

impl Other {
    pub(crate) fn nginx(upstream: SocketAddr) -> Self {
        Self::start("nginx", &["-e", "stderr", "-c"], |address, directory| {
            nginx(address, upstream, directory)
        })
    }

    pub(crate) fn haproxy(upstream: SocketAddr) -> Self {
        Self::start("haproxy", &["-q", "-db", "-f"], |address, _| haproxy(address, upstream))
    }

    /// Starts `program`, whose last argument is a file with what `config` gives.
    fn start(
        program: &str,
        arguments: &[&str],
        config: impl Fn(SocketAddr, &Path) -> String,
    ) -> Self {
        // Another process may take the port that was free a moment ago: then the next.
        let mut why = String::new();
        for _ in 0..3 {
            match Self::try_start(program, arguments, &config) {
                Ok(other) => return other,
                Err(e) => {
                    let _ = writeln!(why, "{e}");
                }
            }
        }
        panic!("{program} does not start:\n{why}");
    }

    fn try_start(
        program: &str,
        arguments: &[&str],
        config: &impl Fn(SocketAddr, &Path) -> String,
    ) -> Result<Self, String> {
        let address = free_address();
        let directory = tempfile::tempdir().expect("a directory");
        let file = directory.path().join("config");
        std::fs::write(&file, config(address, directory.path())).expect("a file");
        let errors = directory.path().join("errors");
        let child = Command::new(find(program))
            .args(arguments)
            .arg(&file)
            .current_dir(directory.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(&errors).expect("a file"))
            .spawn()
            .map_err(|e| e.to_string())?;
        let mut other = Self { child, address, _directory: directory };
        let up = within(START, || {
            // One that has ended will never answer; what answers then is another's.
            let ended = other.child.try_wait().ok().flatten().is_some();
            (ended || TcpStream::connect(address).is_ok()).then_some(!ended)
        });
        if up == Some(true) {
            return Ok(other);
        }
        Err(std::fs::read_to_string(&errors).unwrap_or_default())
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Debian's servers live in sbin, which is not on every person's path.
fn find(program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let sbin = ["/usr/local/sbin", "/usr/sbin", "/sbin"].map(PathBuf::from);
    let mut all = std::env::split_paths(&path).chain(sbin).map(|folder| folder.join(program));
    all.find(|p| p.is_file()).unwrap_or_else(|| {
        panic!(
            "{program} is not installed: `cargo xtask setup` installs it, and what else is missing"
        )
    })
}

fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address")
}

/// As near to what l7rp does by itself as nginx can be set: what it is told here is what it would
/// else do differently on purpose, and no subject of a comparison.
fn nginx(address: SocketAddr, upstream: SocketAddr, directory: &Path) -> String {
    let directory = directory.display();
    format!(
        "daemon off;
master_process off;
worker_processes 1;
pid {directory}/pid;
error_log stderr crit;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  client_max_body_size 10m;
  large_client_header_buffers 8 32k;
  underscores_in_headers on;
  ignore_invalid_headers off;
  merge_slashes off;
  upstream backend {{ server {upstream}; keepalive 8; }}
  server {{
    listen {address};
    location / {{
      proxy_pass http://backend;
      proxy_http_version 1.1;
      proxy_set_header Host $http_host;
      proxy_set_header Connection \"\";
      proxy_request_buffering off;
      proxy_ignore_client_abort on;
    }}
  }}
}}
"
    )
}

fn haproxy(address: SocketAddr, upstream: SocketAddr) -> String {
    format!(
        "global
  maxconn 256
  tune.bufsize 65536
  tune.http.maxhdr 128
defaults
  mode http
  timeout connect 2s
  timeout client 1s
  timeout server 1s
  retries 0
frontend web
  bind {address}
  default_backend backend
backend backend
  server only {upstream}
"
    )
}
