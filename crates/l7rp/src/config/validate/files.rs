//! Files that a configuration names. What is in them is never repeated in a message.

use std::path::PathBuf;

use super::{Check, Complaint};
use crate::config::Files;
use crate::config::file::KeyPath;

/// What must be in a PEM file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Pem {
    Certificate,
    Key,
}

/// Larger files are something else.
const LARGEST: u64 = 4 << 20;

impl Check<'_> {
    /// A PEM file, and its path from where the proxy runs.
    pub(super) fn pem(&mut self, written: &str, what: Pem, at: &KeyPath) -> PathBuf {
        let path = self.path(written);
        if self.files == Files::Check && !written.is_empty() {
            let looked = look(&path, written, what);
            self.or_complain(looked, at);
        }
        path
    }
}

fn look(path: &std::path::Path, written: &str, what: Pem) -> Result<(), Complaint> {
    let unreadable = |e: std::io::Error| {
        let complaint = Complaint::new(format!("cannot read `{written}`: {e}"));
        complaint.help(format!("looked for at {}", path.display()))
    };
    let size = std::fs::metadata(path).map_err(unreadable)?.len();
    if size > LARGEST {
        return Err(Complaint::new(format!(
            "`{written}` is too large for a PEM file: {size} bytes"
        )));
    }
    let bytes = std::fs::read(path).map_err(unreadable)?;
    pem(&String::from_utf8_lossy(&bytes), what)
        .map_err(|problem| Complaint::new(format!("`{written}` {problem}")))
}

/// Whether a block of the right kind is there and looks like base64 of DER.
fn pem(text: &str, what: Pem) -> Result<(), String> {
    let mut labels = Vec::new();
    let mut rest = text;
    while let Some((_, after)) = rest.split_once("-----BEGIN ") {
        let Some((label, body)) = after.split_once("-----") else { break };
        let end = format!("-----END {label}-----");
        let Some((body, after)) = body.split_once(&end) else {
            return Err(format!("is cut off: `BEGIN {label}` has no `END {label}`"));
        };
        rest = after;
        let fits = match what {
            Pem::Certificate => label == "CERTIFICATE" || label == "TRUSTED CERTIFICATE",
            Pem::Key => label.ends_with("PRIVATE KEY"),
        };
        if !fits {
            labels.push(label.to_owned());
            continue;
        }
        if label.starts_with("ENCRYPTED") || body.contains("Proc-Type: 4,ENCRYPTED") {
            return Err("is encrypted; a key without a passphrase is needed".to_owned());
        }
        if !is_der(body) {
            return Err(format!("is damaged: its `{label}` block is not base64 of DER"));
        }
        return Ok(());
    }
    let wanted = match what {
        Pem::Certificate => "certificate (`BEGIN CERTIFICATE`)",
        Pem::Key => "private key (`BEGIN PRIVATE KEY`)",
    };
    if labels.is_empty() {
        return Err(format!("is not a PEM file with a {wanted}"));
    }
    labels.dedup();
    Err(format!("has no {wanted}, only `{}`", labels.join("`, `")))
}

fn is_der(body: &str) -> bool {
    let digits: Vec<u8> = body.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    let data = digits.strip_suffix(b"==").or_else(|| digits.strip_suffix(b"=")).unwrap_or(&digits);
    let allowed = |b: &u8| b.is_ascii_alphanumeric() || *b == b'+' || *b == b'/';
    // DER of these begins with a SEQUENCE, whose tag 0x30 is an `M` in base64.
    digits.len() >= 16
        && digits.len().is_multiple_of(4)
        && data.iter().all(allowed)
        && data[0] == b'M'
}

#[cfg(test)]
mod tests {
    use super::{Pem, pem};

    #[test]
    fn the_right_block_must_be_there_and_whole() {
        let good = |label: &str| {
            format!("text\n-----BEGIN {label}-----\nMIIBIjANBgkqhkiG9w0B\n-----END {label}-----\n")
        };
        assert_eq!(pem(&good("CERTIFICATE"), Pem::Certificate), Ok(()));
        for label in ["PRIVATE KEY", "RSA PRIVATE KEY", "EC PRIVATE KEY"] {
            assert_eq!(pem(&good(label), Pem::Key), Ok(()), "{label}");
        }
        let both = good("CERTIFICATE") + &good("PRIVATE KEY");
        assert_eq!(pem(&both, Pem::Key), Ok(()));
        for (text, what, message) in [
            (String::new(), Pem::Key, "is not a PEM file with a private key (`BEGIN PRIVATE KEY`)"),
            (
                good("PRIVATE KEY"),
                Pem::Certificate,
                "has no certificate (`BEGIN CERTIFICATE`), only `PRIVATE KEY`",
            ),
            (
                good("ENCRYPTED PRIVATE KEY"),
                Pem::Key,
                "is encrypted; a key without a passphrase is needed",
            ),
            (
                good("CERTIFICATE").replace("MIIB", "M-IB"),
                Pem::Certificate,
                "is damaged: its `CERTIFICATE` block is not base64 of DER",
            ),
            (
                good("CERTIFICATE").replace("END", "ENDE"),
                Pem::Certificate,
                "is cut off: `BEGIN CERTIFICATE` has no `END CERTIFICATE`",
            ),
        ] {
            assert_eq!(pem(&text, what), Err(message.to_owned()));
        }
    }
}
