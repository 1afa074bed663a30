//! `l7rp demo`: everything at once, until a signal ends it.

use std::process::ExitCode;
use std::time::Duration;

use super::arguments;
use super::terminal::{failed, print};
use crate::observe::log::Log;
use crate::tools::demo::{self, Wish};
use crate::tools::stop::Stop;

/// How long the last log lines may take.
const LAST_LINES: Duration = Duration::from_secs(1);

pub(super) fn run(asked: &arguments::Demo) -> ExitCode {
    let prepared = Stop::install().and_then(|stop| Ok((stop, Log::start(std::io::stdout())?)));
    let (mut stop, log) = match prepared {
        Ok(prepared) => prepared,
        Err(e) => return failed(&format!("cannot start: {e}")),
    };
    let wish = Wish { proxy: 8080, admin: 9090, access_log: asked.access_log };
    match demo::start(wish, log.clone()) {
        Ok(demo) => {
            print(demo.text());
            stop.wait();
            demo.stop();
            log.finish(LAST_LINES);
            ExitCode::SUCCESS
        }
        Err(e) => failed(&e),
    }
}
