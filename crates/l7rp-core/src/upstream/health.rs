//! Active checks: how many probes it takes to believe one.

/// What the probes of one upstream have shown so far.
///
/// One slow answer must not take an upstream out, and one lucky answer must not bring it back:
/// it takes several in a row, and a single one to the contrary begins the count anew.
#[derive(Clone, Debug)]
pub struct Health {
    healthy_threshold: u32,
    unhealthy_threshold: u32,
    state: State,
    /// Probes in a row that gave the same answer, until they are enough to be believed.
    run: Run,
    /// No probe was ever bad.
    faultless: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Never judged, so not used.
    New,
    In,
    Out,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Run {
    Good(u32),
    Bad(u32),
}

impl Health {
    /// An upstream of which nothing is known. It is not eligible before `healthy_threshold`
    /// good probes in a row, and then until `unhealthy_threshold` bad ones in a row. A threshold
    /// of 0 counts as 1.
    #[must_use]
    pub fn new(healthy_threshold: u32, unhealthy_threshold: u32) -> Self {
        Self {
            healthy_threshold: healthy_threshold.max(1),
            unhealthy_threshold: unhealthy_threshold.max(1),
            state: State::New,
            run: Run::Good(0),
            faultless: true,
        }
    }

    /// An upstream that has been in use before anybody probed it, or while something else was
    /// asked of it: it stays eligible until `unhealthy_threshold` bad probes in a row.
    #[must_use]
    pub fn trusted(healthy_threshold: u32, unhealthy_threshold: u32) -> Self {
        Self { state: State::In, ..Self::new(healthy_threshold, unhealthy_threshold) }
    }

    /// The same knowledge under other thresholds. No probe, no change: they apply from the next
    /// one on.
    #[must_use]
    pub fn with_thresholds(&self, healthy_threshold: u32, unhealthy_threshold: u32) -> Self {
        let Self { state, run, faultless, .. } = *self;
        Self { state, run, faultless, ..Self::new(healthy_threshold, unhealthy_threshold) }
    }

    /// Takes in the outcome of a probe. `Some`: whether the upstream is eligible from now on.
    ///
    /// That is said when it changes, and also when the first judgement is that it is not: the
    /// operator wants to hear why a new upstream does not come in, but once.
    pub fn probed(&mut self, good: bool) -> Option<bool> {
        self.faultless &= good;
        self.run = match (good, self.run) {
            (true, Run::Good(n)) => Run::Good(n.saturating_add(1)),
            (true, Run::Bad(_)) => Run::Good(1),
            (false, Run::Bad(n)) => Run::Bad(n.saturating_add(1)),
            (false, Run::Good(_)) => Run::Bad(1),
        };
        let state = match self.run {
            Run::Good(n) if n >= self.healthy_threshold => State::In,
            Run::Bad(n) if n >= self.unhealthy_threshold => State::Out,
            _ => self.state,
        };
        let changed = state != self.state;
        self.state = state;
        changed.then(|| self.is_eligible())
    }

    /// Takes the upstream out because of how it treats real requests; `false`: it was not in.
    ///
    /// Then all of `healthy_threshold` good probes are needed anew.
    pub fn eject(&mut self) -> bool {
        let was_in = self.is_eligible();
        if was_in {
            self.state = State::Out;
            self.run = Run::Good(0);
        }
        was_in
    }

    /// Whether it may be picked.
    #[must_use]
    pub fn is_eligible(&self) -> bool {
        self.state == State::In
    }

    /// Whether it has never been judged and every probe so far was good. Then the next probe
    /// need not wait for its turn: a start or a reload should not take seconds for nothing.
    #[must_use]
    pub fn is_settling(&self) -> bool {
        self.state == State::New && self.faultless
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Probes as `+` and `-`, an ejection as `x`; what each says: `I` in, `O` out, `.` nothing.
    /// For an ejection, `O`: it was in.
    fn play(health: &mut Health, events: &str) -> String {
        let one = |event| match event {
            'x' if health.eject() => 'O',
            'x' => '.',
            _ => match health.probed(event == '+') {
                Some(true) => 'I',
                Some(false) => 'O',
                None => '.',
            },
        };
        events.chars().map(one).collect()
    }

    #[test]
    fn table() {
        for (healthy, unhealthy, events, said) in [
            // A new upstream comes in after enough good probes in a row.
            (2, 3, "++", ".I"),
            (2, 3, "+-++", "...I"),
            (1, 1, "+", "I"),
            // One that is in leaves after enough bad ones in a row, and comes back.
            (2, 3, "++--+--+---", ".I........O"),
            (2, 3, "++---+-++", ".I..O...I"),
            (1, 1, "+-+-", "IOIO"),
            // What does not change is not said again.
            (2, 2, "+++++-----", ".I....O..."),
            // The first judgement is said even if it is no change, once.
            (2, 3, "--------", "..O....."),
            (2, 3, "--+---++", ".....O.I"),
            (2, 3, "---+---++", "..O.....I"),
            // Ejected: a fresh run is needed, and the good probes before do not count.
            (2, 3, "+++x++", ".I.O.I"),
            (2, 3, "++x+-++", ".IO...I"),
            (2, 3, "++xx---++", ".IO.....I"),
            (3, 3, "+++--x-++++", "..I..O...I."),
            // One that is not in cannot be ejected, and its run goes on.
            (2, 3, "x+x+", "...I"),
            (0, 0, "+-", "IO"),
        ] {
            let mut health = Health::new(healthy, unhealthy);
            assert!(!health.is_eligible());
            assert_eq!(play(&mut health, events), said, "{healthy} {unhealthy} {events}");
        }
    }

    #[test]
    fn one_that_is_trusted_is_in_until_probes_say_otherwise() {
        for (events, said) in [("++", ".."), ("--+---", ".....O"), ("---++", "..O.I"), ("x+", "O.")]
        {
            let mut health = Health::trusted(2, 3);
            assert!(health.is_eligible() && !health.is_settling());
            assert_eq!(play(&mut health, events), said, "{events}");
        }
    }

    #[test]
    fn other_thresholds_keep_what_is_known() {
        for (before, (healthy, unhealthy), after, said) in [
            // In stays in, out stays out, new stays new; runs go on.
            ("++", (4, 2), "--", ".O"),
            ("---", (3, 3), "+++", "..I"),
            ("+", (2, 2), "+", "I"),
            ("-", (2, 2), "-", "O"),
            // Enough already is not enough before the next probe has agreed.
            ("++--", (2, 1), "-", "O"),
            ("++--", (2, 1), "+-", ".O"),
        ] {
            let mut health = Health::new(2, 3);
            play(&mut health, before);
            let was = (health.is_eligible(), health.is_settling());
            let mut health = health.with_thresholds(healthy, unhealthy);
            assert_eq!((health.is_eligible(), health.is_settling()), was, "{before}");
            assert_eq!(play(&mut health, after), said, "{before} {after}");
        }
    }

    #[test]
    fn only_what_is_new_and_faultless_settles() {
        for (events, settling) in [
            ("", true),
            ("+", true),
            ("++", true),
            ("+++", false),
            ("-", false),
            ("+-", false),
            ("-+", false),
            ("--+", false),
            ("+++x", false),
            ("+++x+", false),
            ("x", true),
        ] {
            let mut health = Health::new(3, 2);
            play(&mut health, events);
            assert_eq!(health.is_settling(), settling, "{events}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 1_000, failure_persistence: None, ..ProptestConfig::default()
        })]

        #[test]
        fn what_is_said_follows_from_the_last_events(
            healthy in 1..5_usize,
            unhealthy in 1..5_usize,
            events in "([+x-]{0,6}(\\+{0,6}|-{0,6})){0,8}",
        ) {
            let mut health = Health::new(healthy as u32, unhealthy as u32);
            let (mut eligible, mut judged) = (false, false);
            // Without the ejections of what was not in.
            let mut history = String::new();
            for event in events.chars() {
                let said = play(&mut health, event.encode_utf8(&mut [0; 4]));
                if event != 'x' || eligible {
                    history.push(event);
                }
                let was = (eligible, judged);
                if history.ends_with('x') {
                    eligible = false;
                } else if history.ends_with(&"+".repeat(healthy)) {
                    (eligible, judged) = (true, true);
                } else if history.ends_with(&"-".repeat(unhealthy)) {
                    (eligible, judged) = (false, true);
                }
                let spoke = was != (eligible, judged);
                let want = match (spoke, eligible) {
                    (false, _) => ".",
                    (true, true) => "I",
                    (true, false) => "O",
                };
                prop_assert_eq!(&said, want, "{}", history);
                prop_assert_eq!(health.is_eligible(), eligible);
                prop_assert_eq!(health.is_settling(), !judged && !history.contains('-'));
            }
        }
    }
}
