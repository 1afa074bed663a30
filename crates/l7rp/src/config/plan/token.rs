//! The secret of those who may change a running proxy.

use std::fmt;
use std::hint::black_box;
use std::path::PathBuf;

/// What those who come over TCP must show to change something.
#[derive(Clone, PartialEq, Eq)]
pub struct AdminToken {
    /// The file that it is in.
    pub path: PathBuf,
    /// Empty: it was not read, and nothing is equal to it.
    secret: String,
}

impl AdminToken {
    /// The one in a file.
    pub fn new(path: PathBuf, secret: String) -> Self {
        Self { path, secret }
    }

    /// Whether this is it. How long that takes says at most how long it is: every octet is looked
    /// at, whatever the first ones are.
    pub fn is(&self, offered: &[u8]) -> bool {
        let secret = self.secret.as_bytes();
        let pairs = secret.iter().zip(offered);
        let differs = pairs.fold(0, |differs, (a, b)| black_box(differs | (a ^ b)));
        !secret.is_empty() && secret.len() == offered.len() && differs == 0
    }
}

/// Without the secret.
impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdminToken").field("path", &self.path).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_all_of_it_is_it() {
        let token = AdminToken::new("/t".into(), "0123456789abcdef".to_owned());
        assert!(token.is(b"0123456789abcdef"));
        for other in
            ["", "0123456789abcde", "0123456789abcdefg", "x123456789abcdef", "0123456789abcdex"]
        {
            assert!(!token.is(other.as_bytes()), "{other}");
        }
        assert!(!AdminToken::new("/t".into(), String::new()).is(b""));
        assert!(!format!("{token:?}").contains("0123"));
    }
}
