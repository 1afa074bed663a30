//! `l7rp top`: what a running instance is about, live, until somebody has seen enough.

mod draw;

use std::io::{self, IsTerminal};
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::Duration;

use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};

use super::ask::Instance;
use super::status::fetch;
use super::terminal::{error, failed};
use super::{WRONG, arguments};
use crate::admin::status::Status;
use crate::tools::stop::Stop;
use draw::{Screen, draw};

/// How soon a key or an answer is taken notice of.
const SOON: Duration = Duration::from_millis(50);

type Answer = Result<Status, String>;

pub(super) fn run(asked: &arguments::Top) -> ExitCode {
    if !io::stdout().is_terminal() {
        error("top needs a terminal to draw on; `l7rp status` prints the same once");
        return ExitCode::from(WRONG);
    }
    let stopped = match Stop::install_on_terminal().and_then(watch) {
        Ok(stopped) => stopped,
        Err(e) => return failed(&format!("cannot start: {e}")),
    };
    // From here on a panic restores the terminal as well.
    let shown = match ratatui::try_init() {
        Ok(mut terminal) => show(&mut terminal, asked, &stopped),
        Err(e) => Err(e),
    };
    ratatui::restore();
    match shown {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => failed(&format!("cannot use the terminal: {e}")),
    }
}

/// Waits for a signal; its end of the channel goes away when one has come.
fn watch(mut stop: Stop) -> io::Result<Receiver<()>> {
    let (ends, stopped) = sync_channel::<()>(1);
    thread::Builder::new().name("signals".to_owned()).spawn(move || {
        stop.wait();
        drop(ends);
    })?;
    Ok(stopped)
}

fn show(
    terminal: &mut DefaultTerminal,
    asked: &arguments::Top,
    stopped: &Receiver<()>,
) -> io::Result<()> {
    let (answers, seen) = sync_channel::<Answer>(1);
    // Nobody asks faster than answers are taken; the end of this is the end of that.
    let (_on, off) = sync_channel::<()>(1);
    let (instance, interval) = (asked.admin.clone(), asked.interval);
    thread::Builder::new()
        .name("asking".to_owned())
        .spawn(move || keep_asking(&instance, interval, &answers, &off))?;
    let mut screen = Screen::new(&asked.admin);
    loop {
        terminal.draw(|frame| draw(frame, &mut screen))?;
        loop {
            if stopped.try_recv() == Err(TryRecvError::Disconnected) {
                return Ok(());
            }
            if let Ok(answer) = seen.try_recv() {
                screen.take(answer);
                break;
            }
            if event::poll(SOON)? {
                if let Event::Key(key) = event::read()?
                    && key.kind != KeyEventKind::Release
                    && !press(&mut screen, key.code, key.modifiers)
                {
                    return Ok(());
                }
                break;
            }
        }
    }
}

fn keep_asking(
    instance: &Instance,
    interval: Duration,
    answers: &SyncSender<Answer>,
    off: &Receiver<()>,
) {
    loop {
        let answer = fetch(instance).map(|(_, status)| status);
        if answers.send(answer).is_err() {
            return;
        }
        if off.recv_timeout(interval) != Err(RecvTimeoutError::Timeout) {
            return;
        }
    }
}

/// Does what a key asks for; `false`: to end.
fn press(screen: &mut Screen, key: KeyCode, modifiers: KeyModifiers) -> bool {
    match key {
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => return false,
        KeyCode::Char('q') | KeyCode::Esc => return false,
        KeyCode::Char('p') => screen.pause(),
        KeyCode::Char('s') => screen.next_order(),
        KeyCode::Up | KeyCode::Char('k') => screen.scroll(-1),
        KeyCode::Down | KeyCode::Char('j') => screen.scroll(1),
        KeyCode::PageUp => screen.scroll(-10),
        KeyCode::PageDown => screen.scroll(10),
        KeyCode::Home => screen.scroll(isize::MIN),
        _ => {}
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys() {
        let mut screen = Screen::new(&Instance::Tcp("a:1".to_owned()));
        let none = KeyModifiers::NONE;
        for (key, modifiers, goes_on) in [
            (KeyCode::Char('q'), none, false),
            (KeyCode::Esc, none, false),
            (KeyCode::Char('c'), KeyModifiers::CONTROL, false),
            (KeyCode::Char('c'), none, true),
            (KeyCode::Char('p'), none, true),
            (KeyCode::Char('s'), none, true),
            (KeyCode::Up, none, true),
            (KeyCode::Home, none, true),
        ] {
            assert_eq!(press(&mut screen, key, modifiers), goes_on, "{key:?}");
        }
    }
}
