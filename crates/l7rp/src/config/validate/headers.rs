//! Names and values of header fields.

use l7rp_core::head::is_token;

use super::Complaint;

/// Fields that frame a message or belong to one connection: the proxy writes them itself.
const OURS: [&str; 8] = [
    "connection",
    "content-length",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// The name of a field; lower case.
pub(super) fn name(text: &str) -> Result<String, Complaint> {
    if is_token(text.as_bytes()) {
        return Ok(text.to_ascii_lowercase());
    }
    Err(Complaint::new(format!("`{}` is not a header name", text.escape_debug())))
}

/// The name of a field that the configuration may add or remove; lower case.
pub(super) fn changeable(text: &str) -> Result<String, Complaint> {
    let name = name(text)?;
    if OURS.contains(&name.as_str()) {
        let message = format!("`{text}` cannot be added or removed");
        let complaint = Complaint::new(message);
        return Err(complaint.help("it belongs to one connection, and the proxy writes it itself"));
    }
    if name == "host" {
        let complaint = Complaint::new("`Host` cannot be added or removed");
        return Err(complaint.help("`host_header` of the pool says what upstreams see"));
    }
    Ok(name)
}

/// The name of a field by which the proxy tells something of its own; lower case.
pub(super) fn ours(text: &str) -> Result<String, Complaint> {
    const TAKEN: [&str; 6] = [
        "forwarded",
        "x-forwarded-for",
        "x-forwarded-host",
        "x-forwarded-proto",
        "x-real-ip",
        "x-request-id",
    ];
    let name = changeable(text)?;
    if TAKEN.contains(&name.as_str()) {
        return Err(Complaint::new(format!("`{text}` tells something else already")));
    }
    Ok(name)
}

/// The value of a field. A line break in it would begin another field.
pub(super) fn value(text: &str) -> Result<(), Complaint> {
    for c in text.chars() {
        if c == '\r' || c == '\n' {
            return Err(Complaint::new("a header value cannot have a line break"));
        }
        if c.is_control() && c != '\t' {
            let message =
                format!("a header value cannot have the character `{}`", c.escape_debug());
            return Err(Complaint::new(message));
        }
    }
    if text.trim_matches([' ', '\t']) != text {
        return Err(Complaint::new("a header value cannot begin or end with a space"));
    }
    Ok(())
}
