//! The breaker once more, in the plainest way: one thread, lists, no words and no bits.

use std::collections::VecDeque;

use super::*;

struct Model {
    rules: Rules,
    phase: Phase,
    /// Every phase has its own number.
    number: usize,
    trips: u32,
}

enum Phase {
    Closed { since: Nanos, in_a_row: u32, results: VecDeque<(Nanos, Verdict)> },
    Open { end: Nanos },
    HalfOpen { out: usize, good: usize, last: Nanos },
}

impl Model {
    fn new(rules: Rules) -> Self {
        Self { rules, phase: Self::closed(at(0)), number: 0, trips: 0 }
    }

    fn closed(since: Nanos) -> Phase {
        Phase::Closed { since, in_a_row: 0, results: VecDeque::new() }
    }

    fn state(&self) -> State {
        match self.phase {
            Phase::Closed { .. } => State::Closed,
            Phase::Open { .. } => State::Open,
            Phase::HalfOpen { .. } => State::HalfOpen,
        }
    }

    fn enter(&mut self, phase: Phase) {
        self.phase = phase;
        self.number += 1;
    }

    fn admits_at(&self) -> Option<Nanos> {
        match self.phase {
            Phase::Closed { .. } => None,
            Phase::Open { end } => Some(end),
            Phase::HalfOpen { out, good, last } => (out + good
                >= self.rules.half_open_probes as usize)
                .then(|| last.plus(self.rules.probe_timeout)),
        }
    }

    fn admits(&self, now: Nanos) -> bool {
        self.admits_at().is_none_or(|t| now >= t)
    }

    /// The phase in which the permit counts.
    fn admit(&mut self, now: Nanos) -> usize {
        let new = Phase::HalfOpen { out: 1, good: 0, last: now };
        let full = self.admits_at().is_some();
        match &mut self.phase {
            Phase::Closed { .. } => {}
            Phase::HalfOpen { out, last, .. } if !full => {
                *out += 1;
                *last = now;
            }
            Phase::Open { .. } | Phase::HalfOpen { .. } => self.enter(new),
        }
        self.number
    }

    fn settle(&mut self, phase: usize, verdict: Verdict, now: Nanos) -> Told {
        if phase != self.number {
            return Told::Nothing;
        }
        match &mut self.phase {
            Phase::Open { .. } => Told::Nothing,
            Phase::HalfOpen { out, good, .. } => match verdict {
                Verdict::Failure => {
                    self.trips += 1;
                    Told::Opened
                }
                Verdict::Success => {
                    *out -= 1;
                    *good += 1;
                    if *good < self.rules.half_open_probes as usize {
                        return Told::Nothing;
                    }
                    self.enter(Self::closed(now));
                    Told::Closed
                }
            },
            Phase::Closed { since, in_a_row, results } => {
                if results.len() == self.rules.window_size as usize {
                    results.pop_front();
                }
                results.push_back((now, verdict));
                if verdict == Verdict::Success {
                    *in_a_row = 0;
                    return Told::Nothing;
                }
                *in_a_row += 1;
                let opens = match self.rules.trip {
                    Trip::Consecutive(limit) => *in_a_row >= limit,
                    Trip::Ratio { above, min_observations } => {
                        // Ages are told in whole milliseconds.
                        results.retain(|(t, _)| {
                            u128::from(now.0 / MS - t.0 / MS) <= self.rules.window.as_millis()
                        });
                        let bad = results.iter().filter(|r| r.1 == Verdict::Failure).count();
                        results.len() >= min_observations as usize
                            && bad as f64 / results.len() as f64 > above
                    }
                };
                if !opens {
                    return Told::Nothing;
                }
                let soon = now.since(*since) < self.rules.window;
                self.trips = if soon { self.trips + 1 } else { 1 };
                Told::Opened
            }
        }
    }

    /// Takes over how long it stays open, if that can be.
    fn open(&mut self, now: Nanos, open_for: Duration) {
        let base = (1..self.trips).fold(self.rules.open_min, |time, _| time * 2);
        let [low, high] = [0.8, 1.2].map(|by| {
            base.mul_f64(by).clamp(self.rules.open_min, self.rules.open_max).as_secs_f64()
        });
        let got = open_for.as_secs_f64();
        assert!(low - 1e-8 <= got && got <= high + 1e-8, "{got} is not in {low}..{high}");
        let end = Nanos(now.plus(open_for).0.div_ceil(MS) * MS);
        self.enter(Phase::Open { end });
    }

    fn give_back(&mut self, phase: usize) {
        if let Phase::HalfOpen { out, .. } = &mut self.phase
            && phase == self.number
        {
            *out -= 1;
        }
    }
}

#[derive(PartialEq)]
enum Told {
    Nothing,
    Closed,
    Opened,
}

fn any_rules(rng: &mut fastrand::Rng) -> Rules {
    let trip = if rng.bool() {
        Trip::Consecutive(rng.u32(1..6))
    } else {
        let above = [0.0, 0.1, 0.5, 0.9][rng.usize(..4)];
        Trip::Ratio { above, min_observations: rng.u32(..12) }
    };
    let open_min = ms(rng.u64(..500));
    Rules {
        trip,
        window: ms(rng.u64(..2_000)),
        window_size: rng.u32(1..30),
        open_min,
        open_max: open_min + ms(rng.u64(..3_000)),
        half_open_probes: rng.u32(1..6),
        probe_timeout: ms(rng.u64(..3_000)),
    }
}

/// Both of them, and what they have let in.
struct Pair<'a> {
    breaker: &'a Breaker,
    model: Model,
    rng: fastrand::Rng,
    out: Vec<(Permit<'a>, usize)>,
    /// Of ten results, so many are failures.
    badness: u32,
    /// Closed, opened, opened again, probes lost: how often.
    seen: [u32; 4],
}

impl Pair<'_> {
    fn arrive(&mut self, now: Nanos) {
        let (before, generation) = (self.model.state(), self.breaker.load().generation());
        let wanted = self.model.admits(now).then(|| self.model.admit(now));
        let got = self.breaker.admit(now);
        assert_eq!(got.is_some(), wanted.is_some());
        let Some((admission, phase)) = got.zip(wanted) else { return };
        assert_eq!(admission.change, HALF_OPENED.filter(|_| before == State::Open));
        assert_eq!(admission.permit.is_probe(), before != State::Closed);
        let lost = before == State::HalfOpen && self.breaker.load().generation() != generation;
        self.seen[3] += u32::from(lost);
        self.out.push((admission.permit, phase));
    }

    fn end_one(&mut self, now: Nanos) {
        let (permit, phase) = self.out.swap_remove(self.rng.usize(..self.out.len()));
        if self.rng.u32(..10) == 0 {
            drop(permit);
            self.model.give_back(phase);
            return;
        }
        let failed = self.rng.u32(..10) < self.badness;
        let verdict = if failed { Verdict::Failure } else { Verdict::Success };
        let from = self.model.state();
        let told = self.model.settle(phase, verdict, now);
        let change = permit.settle(verdict, now, self.rng.u64(..));
        match told {
            Told::Nothing => assert_eq!(change, None),
            Told::Closed => {
                assert_eq!(change, CLOSED);
                self.seen[0] += 1;
            }
            Told::Opened => {
                let open_for = change.and_then(|c| c.open_for).unwrap();
                assert_eq!(change, Some(opened(from, open_for)));
                self.model.open(now, open_for);
                self.seen[1 + usize::from(from == State::HalfOpen)] += 1;
            }
        }
    }

    fn agree(&self, now: Nanos) {
        assert_eq!(self.breaker.state(), self.model.state());
        assert_eq!(self.breaker.load().generation() as usize, self.model.number);
        assert_eq!(self.breaker.admits_at(), self.model.admits_at());
        assert_eq!(self.breaker.admits(now), self.model.admits(now));
    }
}

/// So many random steps; what was seen.
fn compare(seed: u64, steps: u32) -> [u32; 4] {
    let mut rng = fastrand::Rng::with_seed(seed);
    let rules = any_rules(&mut rng);
    let breaker = Breaker::new(&rules);
    let model = Model::new(rules);
    let mut pair =
        Pair { breaker: &breaker, model, rng, out: Vec::new(), badness: 0, seen: [0; 4] };
    let mut now = at(0);
    for _ in 0..steps {
        // Long good and long bad times, so that all states are seen.
        if pair.rng.u32(..100) == 0 {
            pair.badness = pair.rng.u32(..11);
        }
        let pause = match pair.rng.u32(..20) {
            0 => 2_000 * MS,
            1..6 => 20 * MS,
            _ => MS / 2,
        };
        now = now.plus(Duration::from_nanos(pair.rng.u64(..pause)));
        pair.agree(now);
        if !pair.out.is_empty() && pair.rng.u32(..10) < 6 {
            pair.end_one(now);
        } else {
            pair.arrive(now);
        }
        pair.agree(now);
    }
    pair.seen
}

#[test]
fn agrees_with_the_plain_model() {
    let mut seen = [0; 4];
    for seed in 0..400 {
        let run = std::panic::catch_unwind(|| compare(seed, 2_000));
        let counts = run.unwrap_or_else(|_| panic!("they differ with seed {seed}"));
        for (sum, n) in seen.iter_mut().zip(counts) {
            *sum += n;
        }
    }
    // A run without all of them would show nothing.
    assert!(seen.iter().all(|&n| n > 100), "{seen:?}");
}
