//! How the fuzzer's octets are taken. Marks that HTTP never has stand between the parts, so that
//! a part may grow or move without the others losing their meaning.

use std::time::Duration;

/// Between what the client sends and the upstream's answers, and between these.
const NEXT: &[u8] = b"\xff\xff";
/// The sender waits a moment.
const PAUSE: &[u8] = b"\xff\xfd";
/// Long enough that the proxy mostly reads what was sent before.
const A_MOMENT: Duration = Duration::from_micros(300);
/// More would make an input slow and find nothing new.
const MAX_PAUSES: usize = 6;

/// Answers behind which the upstream may be silent until a time-out: more would be slow as well.
const MAX_SILENT: usize = 5;

/// What one side sends, in parts with pauses between them.
#[derive(Clone, Default)]
pub struct Script(Vec<Vec<u8>>);

/// One input.
#[derive(Clone, Default)]
pub struct Input {
    pub client: Script,
    /// The last one again for each further request.
    pub answers: Vec<Script>,
    /// Answers go out when a head is there, not when the whole request is.
    pub early: bool,
    /// By answer, the last again: the connection ends after it.
    closes: u8,
    /// It ends with a reset.
    pub resets: bool,
}

impl Input {
    /// `None`: too short to be one.
    pub fn read(data: &[u8]) -> Option<Self> {
        let (mode, rest) = data.split_first()?;
        let mut parts = split(rest, NEXT).into_iter().map(|part| Script(split(&part, PAUSE)));
        let client = parts.next()?;
        Some(Self {
            client,
            answers: parts.take(4).collect(),
            early: mode & 1 > 0,
            resets: mode & 2 > 0,
            closes: mode >> 2,
        })
    }

    /// The answer to the request with this number, and whether the connection ends after it.
    pub fn answer(&self, number: usize) -> (Script, bool) {
        let at = number.min(self.answers.len().saturating_sub(1));
        // Without an answer nothing would ever end.
        let Some(answer) = self.answers.get(at) else { return (Script::default(), true) };
        (answer.clone(), self.closes >> at & 1 > 0 || number >= MAX_SILENT)
    }
}

impl Script {
    /// Sends all; a peer that does not want it is no fault.
    pub fn play(&self, to: &mut impl std::io::Write) {
        for (ix, part) in self.0.iter().enumerate() {
            if ix > 0 && ix <= MAX_PAUSES {
                std::thread::sleep(A_MOMENT);
            }
            if to.write_all(part).is_err() {
                return;
            }
        }
    }

    /// All octets.
    pub fn octets(&self) -> Vec<u8> {
        self.0.concat()
    }
}

fn split(mut data: &[u8], mark: &[u8]) -> Vec<Vec<u8>> {
    let mut parts = Vec::new();
    while let Some(at) = data.windows(mark.len()).position(|w| w == mark) {
        parts.push(data[..at].to_vec());
        data = &data[at + mark.len()..];
    }
    parts.push(data.to_vec());
    parts
}
