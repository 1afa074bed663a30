//! Honest clients beside an attack, who are to be served as if there were none.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use l7rp_testkit::Proxy;

use crate::http2_tools::Conn;

/// What a wait may be longer than twice that on an idle proxy. Tests run beside one another on
/// few processors: what an attack must not cost is more than that.
const SLACK: Duration = Duration::from_millis(400);

/// The time under which 99 of 100 are.
pub fn p99(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[(times.len() - 1) * 99 / 100]
}

/// Times of `ask`, again and again until `over`, and at least so many.
pub fn times_until(over: &AtomicBool, least: usize, mut ask: impl FnMut()) -> Vec<Duration> {
    let mut times = Vec::new();
    while !over.load(SeqCst) || times.len() < least {
        let began = Instant::now();
        ask();
        times.push(began.elapsed());
    }
    times
}

/// As it was with an attack, and what honest clients have waited.
pub fn beside<T>(ask: impl FnMut() + Send, attack: impl FnOnce() -> T) -> (T, Vec<Duration>) {
    /// An attack that fails must not leave the honest client asking for ever.
    struct End<'a>(&'a AtomicBool);
    impl Drop for End<'_> {
        fn drop(&mut self) {
            self.0.store(true, SeqCst);
        }
    }
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let asking = scope.spawn(|| times_until(&over, 20, ask));
        let end = End(&over);
        let result = attack();
        drop(end);
        (result, asking.join().expect("it is served"))
    })
}

/// Attacks while a client with a connection of its own asks for `/honest`, which is answered "x"
/// each time and hardly later than before.
#[track_caller]
pub fn beside_honest<T>(proxy: &Proxy, attack: impl FnOnce() -> T) -> T {
    let conn = Conn::open(proxy);
    let mut ask = || assert_eq!(conn.get("/honest").text(), "x");
    let idle = p99(&mut times_until(&AtomicBool::new(true), 100, &mut ask));
    let (result, mut times) = beside(ask, attack);
    let busy = p99(&mut times);
    assert!(busy < idle * 2 + SLACK, "{busy:?}, and {idle:?} without");
    result
}
