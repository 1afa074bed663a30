//! Another machine on this one: namespaces in which systemd is the first process. What is done
//! there ends with them.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::deploy::write;
use crate::run::{Done, Failed, command, step, succeeds};
use crate::{root, setup};

/// For a start of systemd and everything that a script does then, on a busy machine.
const SECONDS: &str = "300";

/// All that a boot needs of the system: mounts, a control group, a view over another folder.
const PROBE: &str = "set -eu; mount -t tmpfs tmpfs /tmp; cd /tmp; mkdir cgroup upper work view; \
    mount -t cgroup2 cgroup2 cgroup; mkdir cgroup/l7rp-probe-$$; rmdir cgroup/l7rp-probe-$$; \
    mount -t overlay overlay -o lowerdir=/etc,upperdir=upper,workdir=work view; mount -t devpts \
    -o newinstance devpts view";

/// What keeps such machines from being here.
pub(crate) fn obstacle() -> Option<Failed> {
    let mut probe = match setup::as_root("unshare") {
        Ok(unshare) => unshare,
        Err(_) => command("false"),
    };
    let all = ["--mount", "--pid", "--fork", "--net", "--uts", "--ipc", "--cgroup"];
    if succeeds(probe.args(all).args(["sh", "-c", PROBE])) {
        return None;
    }
    Some(Failed::new(
        "namespaces, mounts and control groups of its own are not allowed here",
        "call it as root (or with sudo), where they are: a container needs --privileged for that",
    ))
}

/// Boots a view of `system` and runs `script` there with bash; its output is shown. `folder` is
/// `/check` for it.
pub(crate) fn run(system: &Path, folder: &Path, script: &str) -> Done {
    let advice = "the line with FAILED says what did not come true, and the journal why";
    step(&mut boot(system, folder, script)?, advice)
}

/// What does that.
pub(crate) fn boot(system: &Path, folder: &Path, script: &str) -> Result<Command, Failed> {
    write(&folder.join("script"), script)?;
    // Of the first process, which may not be ours to read later.
    let mut boot = setup::as_root("sh")?;
    boot.arg(root().join("xtask/deploy/boot.sh")).arg("outside");
    boot.args([system, folder]).arg(SECONDS).stdin(Stdio::null());
    Ok(boot)
}
