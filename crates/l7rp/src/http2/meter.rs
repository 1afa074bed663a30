//! Counts the frames that a peer sends. Each costs us work, and most of those that cost a peer
//! next to nothing are not needed often: a peer that sends many of them does it for their sake.

use std::time::Duration;

use l7rp_core::names::Nanos;

/// Frames of the cheap kinds that may come at once, and each second after that.
const BURST: u32 = 1000;
const EACH_SECOND: u32 = 200;
/// Octets of a field section that are sent in one frame: more frames than it takes are not needed.
const FRAME: usize = 16 << 10;
/// Octets sent that earn one more cheap frame: who reads much opens its window often.
const EARNS_ONE: u64 = 1024;

/// Streams of one connection that we had to reset because of what came on them.
const MAX_PROVOKED: u32 = 100;

/// What a peer floods with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Flood {
    /// `SETTINGS`, `PING`, `PRIORITY`, `WINDOW_UPDATE`, `RST_STREAM`, or frames of no known kind.
    Control,
    /// DATA frames without data.
    EmptyData,
    /// CONTINUATION frames.
    Continuation,
    /// What makes us reset streams.
    Provoked,
}

impl Flood {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Control, Self::EmptyData, Self::Continuation, Self::Provoked];

    /// The label in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Control => "control_flood",
            Self::EmptyData => "empty_data_flood",
            Self::Continuation => "continuation_flood",
            Self::Provoked => "provoked_resets",
        }
    }
}

/// Finds the frames in a stream of octets, however it is cut.
#[derive(Debug, Default)]
struct Frames {
    /// Octets to come before the next frame.
    skip: usize,
    head: [u8; 9],
    head_len: usize,
}

impl Frames {
    /// The head of the next frame in `octets`, which then begin behind it.
    fn next(&mut self, octets: &mut &[u8]) -> Option<[u8; 9]> {
        let skipped = self.skip.min(octets.len());
        self.skip -= skipped;
        *octets = &octets[skipped..];
        let n = (9 - self.head_len).min(octets.len());
        self.head[self.head_len..self.head_len + n].copy_from_slice(&octets[..n]);
        self.head_len += n;
        *octets = &octets[n..];
        if self.head_len < 9 {
            return None;
        }
        self.head_len = 0;
        self.skip = length(&self.head);
        Some(self.head)
    }
}

fn length(head: &[u8; 9]) -> usize {
    usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2])
}

/// One connection's frames, as they are read and written.
#[derive(Debug)]
pub struct Meter {
    read: Frames,
    written: Frames,
    /// What is to come of the code of a reset that is being written, and what has.
    code_left: usize,
    code: u32,
    provoked: u32,
    continuations: u32,
    most_continuations: u32,
    /// Cheap frames that may still come.
    left: u32,
    filled_at: Nanos,
    earned: u64,
}

impl Meter {
    /// For a connection on which so many octets come before the first frame, and a field section
    /// may have so many.
    pub fn new(before: usize, max_head: usize, now: Nanos) -> Self {
        Self {
            read: Frames { skip: before, ..Frames::default() },
            written: Frames::default(),
            code_left: 0,
            code: 0,
            provoked: 0,
            continuations: 0,
            most_continuations: max_head.div_ceil(FRAME).max(4) as u32,
            left: BURST,
            filled_at: now,
            earned: 0,
        }
    }

    /// Takes in the next octets that were sent to the peer.
    pub fn sent(&mut self, mut octets: &[u8]) -> Option<Flood> {
        const DATA: u8 = 0;
        const RST_STREAM: u8 = 3;
        self.earned += octets.len() as u64;
        while !octets.is_empty() {
            if self.code_left > 0 {
                self.code = self.code << 8 | u32::from(octets[0]);
                self.code_left -= 1;
                octets = &octets[1..];
                if self.code_left == 0 && self.is_provoked() {
                    return Some(Flood::Provoked);
                }
            } else if let Some(head) = self.written.next(&mut octets) {
                match head[3] {
                    // Some open their windows after each of these, the stream's and the
                    // connection's.
                    DATA => self.left = self.left.saturating_add(2).min(BURST),
                    RST_STREAM => {
                        self.written.skip = 0;
                        (self.code_left, self.code) = (4, 0);
                    }
                    _ => {}
                }
            }
        }
        None
    }

    /// Counts a reset with this code; whether there were too many.
    fn is_provoked(&mut self) -> bool {
        // Those that need not be the peer's doing: no error, an error of ours, what is still under
        // way on a stream that is over, one that is refused or not wanted any more (RFC 9113,
        // section 7).
        let by_peer = !matches!(self.code, 0 | 2 | 5 | 7 | 8);
        self.provoked += u32::from(by_peer);
        by_peer && self.provoked >= MAX_PROVOKED
    }

    /// Takes in the next octets of the peer.
    pub fn read(&mut self, mut octets: &[u8], now: Nanos) -> Option<Flood> {
        while let Some(head) = self.read.next(&mut octets) {
            let flood = self.frame(head[3], head[4], length(&head), now);
            if flood.is_some() {
                return flood;
            }
        }
        None
    }

    fn frame(&mut self, kind: u8, flags: u8, len: usize, now: Nanos) -> Option<Flood> {
        const DATA: u8 = 0;
        const HEADERS: u8 = 1;
        const CONTINUATION: u8 = 9;
        const END_STREAM: u8 = 1;
        if kind == CONTINUATION {
            self.continuations += 1;
            return (self.continuations > self.most_continuations).then_some(Flood::Continuation);
        }
        self.continuations = 0;
        let flood = match kind {
            HEADERS => return None,
            DATA if len > 0 || flags & END_STREAM != 0 => return None,
            DATA => Flood::EmptyData,
            _ => Flood::Control,
        };
        self.refill(now);
        match self.left.checked_sub(1) {
            Some(left) => {
                self.left = left;
                None
            }
            None => Some(flood),
        }
    }

    fn refill(&mut self, now: Nanos) {
        let seconds = now.since(self.filled_at).as_secs_f64();
        let by_time = (seconds * f64::from(EACH_SECOND)) as u32;
        if by_time > 0 {
            let used = f64::from(by_time) / f64::from(EACH_SECOND);
            self.filled_at = self.filled_at.plus(Duration::from_secs_f64(used));
        }
        let by_octets = (self.earned / EARNS_ONE) as u32;
        self.earned %= EARNS_ONE;
        self.left = self.left.saturating_add(by_time).saturating_add(by_octets).min(BURST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
        let len = payload.len() as u32;
        let mut out = len.to_be_bytes()[1..].to_vec();
        out.extend([kind, flags, 0, 0, 0, 1]);
        out.extend_from_slice(payload);
        out
    }

    fn at(ms: u64) -> Nanos {
        Nanos(ms * 1_000_000)
    }

    /// After how many of these frames it is too much, in parts of `cut` octets.
    fn floods_after(each: &[u8], cut: usize, most: usize) -> Option<(usize, Flood)> {
        let mut meter = Meter::new(0, 64 << 10, at(0));
        for n in 0..most {
            for part in each.chunks(cut) {
                if let Some(flood) = meter.read(part, at(0)) {
                    return Some((n, flood));
                }
            }
        }
        None
    }

    #[test]
    fn cheap_frames_are_counted_however_they_are_cut() {
        let ping = frame(6, 0, &[0; 8]);
        for cut in [1, 3, 9, 17] {
            assert_eq!(floods_after(&ping, cut, 5000), Some((1000, Flood::Control)));
        }
        let empty = frame(0, 0, b"");
        assert_eq!(floods_after(&empty, 9, 5000), Some((1000, Flood::EmptyData)));
        let headers = [frame(1, 0, b"x"), vec![]].concat();
        assert_eq!(floods_after(&headers, 9, 5000), None);
        let data = frame(0, 0, &[7; 100]);
        assert_eq!(floods_after(&data, 50, 5000), None);
        let end = frame(0, 1, b"");
        assert_eq!(floods_after(&end, 9, 5000), None);
    }

    #[test]
    fn continuations_in_a_row_are_few() {
        let more = frame(9, 0, b"x");
        assert_eq!(floods_after(&more, 9, 100), Some((4, Flood::Continuation)));
        let section = [frame(1, 0, b"x"), more.repeat(4)].concat();
        assert_eq!(floods_after(&section, 7, 500), None);
    }

    #[test]
    fn resets_that_the_peer_has_provoked_are_counted() {
        let reset = |code: u8| frame(3, 0, &[0, 0, 0, code]);
        for cut in [1, 5, 13, 100] {
            let mut meter = Meter::new(0, 64 << 10, at(0));
            let mut send = |octets: &[u8]| octets.chunks(cut).find_map(|part| meter.sent(part));
            for n in 0..1000 {
                assert_eq!(send(&reset([0, 2, 5, 7, 8][n % 5])), None, "{n}");
            }
            for n in 0..99 {
                let answer = [frame(1, 4, b"head"), frame(0, 1, &[3; 40]), reset(1)].concat();
                assert_eq!(send(&answer), None, "{n}");
            }
            assert_eq!(send(&reset(3)), Some(Flood::Provoked));
        }
    }

    #[test]
    fn time_and_what_is_sent_allow_more() {
        let ping = frame(6, 0, &[0; 8]);
        let mut meter = Meter::new(24, 64 << 10, at(0));
        assert_eq!(meter.read(&[0; 24], at(0)), None);
        // 200 a second go on for ever.
        for n in 0..10_000 {
            assert_eq!(meter.read(&ping, at(n * 5)), None, "{n}");
        }
        let update = frame(8, 0, &[0, 0, 1, 0]);
        for n in 0..10_000 {
            assert_eq!(meter.sent(&frame(0, 0, &[0; 1015])), None);
            assert_eq!(meter.read(&update, at(50_000)), None, "{n}");
        }
    }
}
