//! Why a process should not be sent traffic.

/// Why the process should not be sent traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unready {
    /// It is about to end, and serves meanwhile.
    Leaving,
    /// No pool that a route uses has an upstream that can be chosen.
    NoBackend,
}

impl Unready {
    /// What those are answered who ask whether it is ready.
    pub fn line(self) -> &'static str {
        match self {
            Self::Leaving => "shutting down\n",
            Self::NoBackend => "no backend ready\n",
        }
    }

    /// For people.
    pub fn words(self) -> &'static str {
        match self {
            Self::Leaving => "the process is shutting down",
            Self::NoBackend => "no pool that a route uses has an upstream that can be chosen",
        }
    }
}
