//! A binary that the compiler has arranged by what it has seen of it at work (profile-guided
//! optimisation). Two builds and half a minute of load; for whoever wants the last few per cent.

use std::path::Path;
use std::process::Command;

use crate::run::{Done, Failed, cargo, command, free_ports, step};
use crate::{root, setup};

/// Everything of it is below this folder, also the binary.
const FOLDER: &str = "target/pgo";
/// Longer than all loads of [`TRAINING`] together.
const SECONDS: &str = "120";

/// What the binary is watched at: a mixture of all that is usual, so that nothing that the
/// benchmarks do not measure is arranged to be slow. `$L` is the program.
const TRAINING: &str = r#"
set -eu; pids=; trap 'kill $pids 2>/dev/null || true' EXIT
"$L" backend --listen 127.0.0.1:UPSTREAM >/dev/null & upstream=$!; pids=$upstream
"$L" --config training.yaml >/dev/null & proxy=$!; pids="$upstream $proxy"
for _ in $(seq 100); do curl -so /dev/null http://127.0.0.1:CLEAR/ && break; sleep 0.1; done
load() { "$L" load --insecure --duration 2s "$@" >/dev/null; }
load http://127.0.0.1:CLEAR/a/b?c=d -H 'User-Agent: Mozilla/5.0' -H 'Accept: */*' -H 'Cookie: a=b'
load http://127.0.0.1:CLEAR/bytes?n=16KiB
load http://127.0.0.1:CLEAR/bytes?n=1MiB -c 8
load http://127.0.0.1:CLEAR/chunked?n=16KiB\&chunk=4KiB
load http://127.0.0.1:CLEAR/upload --body-size 16KiB
load http://127.0.0.1:CLEAR/upload --body-size 16KiB --chunked
load http://127.0.0.1:CLEAR/ --new-connections
load http://127.0.0.1:CLEAR/ -c 1000
load http://127.0.0.1:CLEAR/ --http2
load https://127.0.0.1:SECRET/
load https://127.0.0.1:SECRET/ --new-connections
load https://127.0.0.1:SECRET/ --http2
kill -TERM "$proxy" "$upstream"; wait "$proxy" "$upstream"
"#;

/// The proxy that is watched: defaults, and what most people add to them.
const CONFIGURATION: &str = r#"
workers: 1
listeners:
  - { name: clear, bind: "127.0.0.1:CLEAR" }
  - { name: secret, bind: "127.0.0.1:SECRET", tls: { certs: [{ cert: c.pem, key: k.pem }] } }
upstream_pools: [{ name: p, upstreams: [{ url: "http://127.0.0.1:UPSTREAM" }] }]
routes: [{ name: r, pool: p, middleware: [{ retry: { max_attempts: 2 } }] }]
admin: { bind: "127.0.0.1:0" }
"#;

/// Builds it, and says where it is.
pub(crate) fn build() -> Done {
    // For curl and openssl.
    setup::for_tests()?;
    let tool = setup::profdata()?;
    let folder = root().join(FOLDER);
    let file = |e: std::io::Error| {
        Failed::new(format!("cannot write below {}: {e}", folder.display()), "is the disk full?")
    };
    let (seen, merged) = (folder.join("seen"), folder.join("merged.profdata"));
    // What another build was seen at would be taken for this one's.
    let _ = std::fs::remove_dir_all(&seen);
    std::fs::create_dir_all(&seen).map_err(file)?;
    step(&mut release(&folder, "generate", &seen), "mend what the compiler names")?;
    let (script, configuration) = with_free_ports()?;
    std::fs::write(folder.join("training.sh"), script).map_err(file)?;
    std::fs::write(folder.join("training.yaml"), configuration).map_err(file)?;
    step(
        command("openssl")
            .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"])
            .args(["-nodes", "-days", "2", "-subj", "/CN=localhost", "-out", "c.pem"])
            .args(["-keyout", "k.pem"])
            .current_dir(&folder),
        "openssl must be able to make a certificate",
    )?;
    step(
        command("timeout")
            .args([SECONDS, "sh", "training.sh"])
            .env("L", folder.join("release/l7rp"))
            .current_dir(&folder),
        "run target/pgo/training.sh by hand, and see what fails",
    )?;
    step(
        command(tool).arg("merge").arg("-o").args([&merged, &seen]),
        "is there another version of LLVM than the compiler's?",
    )?;
    step(&mut release(&folder, "use", &merged), "mend what the compiler names")?;
    println!("\npgo: {}", folder.join("release/l7rp").display());
    Ok(())
}

/// A release build with `-C profile-WHAT=PATH`.
fn release(folder: &Path, what: &str, path: &Path) -> Command {
    let mut build = cargo();
    build.args(["build", "--release", "--package", "l7rp", "--target-dir"]).arg(folder);
    build.env("RUSTFLAGS", format!("-Cprofile-{what}={}", path.display()));
    build
}

/// [`TRAINING`] and [`CONFIGURATION`] with ports that nobody has.
fn with_free_ports() -> Result<(String, String), Failed> {
    let (mut script, mut configuration) = (TRAINING.to_owned(), CONFIGURATION.to_owned());
    for (name, free) in ["UPSTREAM", "CLEAR", "SECRET"].into_iter().zip(free_ports::<3>()?) {
        script = script.replace(name, &free.to_string());
        configuration = configuration.replace(name, &free.to_string());
    }
    Ok((script, configuration))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_port_is_left_by_its_name() {
        let (script, configuration) = with_free_ports().unwrap();
        for name in ["UPSTREAM", "CLEAR", "SECRET"] {
            assert!(TRAINING.contains(name) && !script.contains(name), "{name}");
            assert!(CONFIGURATION.contains(name) && !configuration.contains(name), "{name}");
        }
    }
}
