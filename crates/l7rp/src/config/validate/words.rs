//! Tokens, methods, paths and names.

use l7rp_core::head::is_token;

use super::Complaint;

/// A name of our own things: it ends up in logs and in the labels of metrics.
pub(super) fn name(text: &str) -> Result<(), Complaint> {
    if text.chars().any(char::is_control) {
        return Err(Complaint::new(format!(
            "the name `{}` has a control character",
            text.escape_debug()
        )));
    }
    if text.trim() != text {
        return Err(Complaint::new(format!("the name `{text}` begins or ends with a space")));
    }
    Ok(())
}

/// A method that the proxy forwards.
pub(super) fn method(text: &str) -> Result<(), Complaint> {
    const USUAL: [&str; 7] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"];
    if !is_token(text.as_bytes()) {
        return Err(Complaint::new(format!("`{}` is not a method", text.escape_debug())));
    }
    let upper = text.to_ascii_uppercase();
    if upper == "CONNECT" || upper == "TRACE" {
        return Err(Complaint::new(format!("`{upper}` is never forwarded")));
    }
    if upper != text && USUAL.contains(&upper.as_str()) {
        let complaint =
            Complaint::new(format!("methods are case-sensitive: `{text}` is not `{upper}`"));
        return Err(complaint.help(format!("write `{upper}`")));
    }
    Ok(())
}

/// The path of a request, or its beginning.
pub(super) fn path(text: &str) -> Result<(), Complaint> {
    if text.is_empty() {
        return Err(Complaint::new("a path cannot be empty").help("write `/` for every path"));
    }
    if !text.starts_with('/') {
        let complaint =
            Complaint::new(format!("`{}` does not start with `/`", text.escape_debug()));
        return Err(complaint.help(format!("write `/{}`", text.escape_debug())));
    }
    for c in text.chars() {
        match c {
            '?' => return Err(Complaint::new("a query (`?`) is not part of a path")),
            '#' => return Err(Complaint::new("a fragment (`#`) is never sent by clients")),
            '!'..='~' => {}
            _ => {
                let complaint =
                    Complaint::new(format!("`{}` cannot be in a path", c.escape_debug()));
                return Err(complaint
                    .help("write it as clients send it, percent-encoded (`%20` for a space)"));
            }
        }
    }
    Ok(())
}
