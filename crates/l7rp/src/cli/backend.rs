//! `l7rp backend`: a backend until a signal ends it.

use std::process::ExitCode;
use std::time::Duration;

use super::arguments::Backend;
use super::terminal::{failed, print};
use crate::tools::backend::{self, Ending, Faults, Options};
use crate::tools::stop::Stop;

pub(super) fn run(asked: &Backend) -> ExitCode {
    let mut stop = match Stop::install() {
        Ok(stop) => stop,
        Err(e) => return failed(&format!("cannot catch signals: {e}")),
    };
    match backend::start(options(asked)) {
        Ok(backend) => {
            print(format!("backend {} listening on {}\n", asked.name, backend.addr()));
            stop.wait();
            ExitCode::SUCCESS
        }
        Err(e) => failed(&format!("cannot listen on {}: {e}", asked.listen)),
    }
}

fn options(asked: &Backend) -> Options {
    let ending = match (asked.hang, asked.close, asked.drop_mid) {
        (true, _, _) => Ending::Hang,
        (_, true, _) => Ending::Close,
        (_, _, true) => Ending::DropMid,
        _ => Ending::Answer,
    };
    Options {
        listen: asked.listen,
        name: asked.name.clone(),
        fail_every: asked.fail_every,
        faults: Faults {
            every: asked.fault_every,
            slow: asked.slow.unwrap_or(Duration::ZERO),
            ending,
            drip: asked.drip.unwrap_or(Duration::ZERO),
            status: asked.status,
            flap: asked.flap,
        },
    }
}
