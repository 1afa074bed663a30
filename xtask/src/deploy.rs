//! What an operator installs, tried out: the manifests for Kubernetes against the schemas, the
//! image without an engine, the service under a systemd of its own.

mod image;
pub(crate) mod machine;
pub(crate) mod service;

use std::path::{Path, PathBuf};
use std::process::Stdio;

use crate::run::{Done, Failed, announce, command, left_out, not_started, step};
use crate::{root, setup, tools};

/// Where everything is made. Outside of it nothing is changed.
const FOLDER: &str = "target/deploy";
const MANIFESTS: &str = "deploy/kubernetes";

/// All of it. Root is needed for namespaces; where they are not allowed, that is a failure unless
/// `where_possible`: then it is told, and the rest is judged.
pub(crate) fn check(where_possible: bool) -> Done {
    setup::for_deploy()?;
    manifests()?;
    let program = image::build()?;
    configurations(&program)?;
    step(
        command("systemd-analyze")
            .args(["security", "--offline=true", "--no-pager"])
            // Tenths.
            .arg("--threshold=20")
            .arg("deploy/systemd/l7rp.service"),
        "the unit may do more than a proxy needs: the table above says what",
    )?;
    if let Some(obstacle) = machine::obstacle() {
        let instead = "the manifests, the image's build, and what the unit says";
        return left_out(where_possible, &obstacle, instead);
    }
    image::run()?;
    service::check(&program)?;
    println!("\ndeploy-check: all is well");
    Ok(())
}

/// Renders the manifests and holds them against the schemas of Kubernetes, what restricted Pods
/// must say, and one another.
fn manifests() -> Done {
    let mut render = command("kubectl");
    render.args(["kustomize", MANIFESTS]).stderr(Stdio::inherit());
    announce(&render);
    let output = render.output().map_err(|e| not_started(&render, &e))?;
    if !output.status.success() {
        return Err(Failed::new(
            format!("{MANIFESTS} cannot be rendered: {}", output.status),
            "mend what kubectl names",
        ));
    }
    let rendered = folder("kubernetes")?.join("rendered.yaml");
    write(&rendered, &output.stdout)?;
    let python = tools::Packages::DEPLOY.folder();
    step(
        command(python.join("bin/kubernetes-validate"))
            .env("PYTHONPATH", &python)
            .arg("--strict")
            .arg(&rendered),
        "mend the manifest that is named; the schema is that of the release that is named",
    )?;
    step(
        command("/usr/bin/python3")
            .env("PYTHONPATH", &python)
            .arg("xtask/deploy/manifests.py")
            .args([&rendered, &folder("kubernetes")?.join("config.yaml")]),
        "make the manifests and the configuration fit one another",
    )
}

/// What is shipped as a configuration is a good one.
fn configurations(program: &Path) -> Done {
    for file in ["deploy/systemd/config.yaml", "target/deploy/kubernetes/config.yaml"] {
        step(
            command(program).args(["check", "--lint", file]),
            "what we give others to begin with must be above reproach",
        )?;
    }
    Ok(())
}

/// A folder below [`FOLDER`], made if it is not there.
pub(crate) fn folder(name: &str) -> Result<PathBuf, Failed> {
    make(&format!("{FOLDER}/{name}"))
}

/// A folder of the repository, made if it is not there.
pub(crate) fn make(name: &str) -> Result<PathBuf, Failed> {
    let path = root().join(name);
    std::fs::create_dir_all(&path)
        .map_err(|e| Failed::new(format!("cannot make {}: {e}", path.display()), "is it full?"))?;
    Ok(path)
}

/// Writes a file.
pub(crate) fn write(path: &Path, content: impl AsRef<[u8]>) -> Done {
    std::fs::write(path, content)
        .map_err(|e| Failed::new(format!("cannot write {}: {e}", path.display()), "is it full?"))
}
