//! Keys of the admin endpoints that do nothing.

use super::Lint;
use crate::config::file::KeyPath;
use crate::config::plan::Bind;

/// A token that nobody is asked for.
pub(super) fn check(lint: &mut Lint<'_>) {
    let at = KeyPath::root().key("admin").key("token_file");
    if !lint.written(&at) {
        return;
    }
    let why = match &lint.plan.admin {
        Some(Bind::Tcp(_)) => return,
        Some(Bind::Unix(_)) => "who comes over a Unix-domain socket is let in by its permissions",
        None => "nothing listens at `admin.bind`",
    };
    let help = "leave it out, or give `admin.bind` an address and a port";
    lint.tell("unused-key", &at, &format!("nobody is asked for the token: {why}"), help);
}
