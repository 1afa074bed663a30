//! The addresses that are listened on and their sockets: which of them a plan needs, which are
//! there already, and which have to be opened. A socket whose address stays in the configuration
//! is never closed, whatever else changes about its listener.

use std::io;
use std::sync::Arc;

use super::listen::{self, BindError, Bound};
use crate::config::plan::{self, Bind};
use crate::live::Door;

/// An address with its sockets.
#[derive(Debug)]
pub struct Opened {
    /// What connections remember of it.
    pub door: Arc<Door>,
    /// The listener that uses it.
    pub name: String,
    /// As configured.
    pub bind: Bind,
    /// One for each worker; or fewer, if they were handed to the process. The workers have
    /// handles of their own.
    pub sockets: Vec<Bound>,
    /// Nobody can connect yet.
    fresh: bool,
}

/// A socket that the process was given by who started it.
#[derive(Debug)]
pub struct Given {
    /// The listener that it is meant for.
    pub name: String,
    /// The address as the one who hands it over has configured it, if that is known.
    pub bind: Option<String>,
    /// Whoever handed it over has it still, and looks after it when this process has ended.
    pub kept: bool,
    /// The socket.
    pub socket: Bound,
}

/// Why an address could not be had.
#[derive(Debug)]
pub struct OpenError {
    /// The listener that wants it.
    pub listener: String,
    /// What went wrong.
    pub error: BindError,
}

impl std::fmt::Display for OpenError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "listener {}: {}", self.listener, self.error)
    }
}

/// For each listener, which of the open addresses it goes on with: its own, or else one that
/// another listener has had, if the address is the same.
pub fn already_open(listeners: &[plan::Listener], open: &[(&str, &Bind)]) -> Vec<Option<usize>> {
    let mut left: Vec<Option<(&str, &Bind)>> = open.iter().copied().map(Some).collect();
    let mut take = |fits: &dyn Fn(&str, &Bind) -> bool| {
        let ix = left.iter().position(|one| one.is_some_and(|(name, bind)| fits(name, bind)))?;
        left[ix] = None;
        Some(ix)
    };
    let mut found: Vec<_> = listeners
        .iter()
        .map(|listener| take(&|name, bind| name == listener.name && *bind == listener.bind))
        .collect();
    for (listener, found) in listeners.iter().zip(&mut found) {
        // Port 0 is another port each time.
        let is_definite = !matches!(listener.bind, Bind::Tcp(address) if address.port() == 0);
        if found.is_none() && is_definite {
            *found = take(&|_, bind| *bind == listener.bind);
        }
    }
    found
}

impl Opened {
    /// Takes what was given for `listener`, or binds. `beside_own`: as for [`listen::bind`].
    ///
    /// # Errors
    /// The address cannot be had.
    pub fn open(
        listener: &plan::Listener,
        given: &mut Vec<Given>,
        id: u64,
        workers: usize,
        beside_own: bool,
    ) -> Result<Self, OpenError> {
        let (name, bind) = (listener.name.clone(), listener.bind.clone());
        let door = Arc::new(Door::new(id));
        let given = take_given(&name, &bind, given);
        let fresh = given.is_none();
        let sockets = match given {
            Some((sockets, kept)) => {
                if kept {
                    door.keep_for_another();
                }
                sockets
            }
            None => listen::bind_for_clients(&bind, workers, beside_own)
                .map_err(|error| OpenError { listener: name.clone(), error })?,
        };
        Ok(Self { door, name, bind, sockets, fresh })
    }

    /// Nobody shall come in any more. The sockets are closed when the workers have closed their
    /// handles; who looks for a Unix-domain socket finds none from now on. Gives what somebody
    /// else keeps: it can be used again.
    pub fn forget(&mut self) -> Vec<Given> {
        let sockets = std::mem::take(&mut self.sockets);
        if !self.door.is_kept() {
            remove_file(&self.bind);
            return Vec::new();
        }
        let given = |socket| Given { name: self.name.clone(), bind: None, kept: true, socket };
        sockets.into_iter().map(given).collect()
    }

    /// Lets clients connect. For each of so many workers, handles of the sockets that it accepts
    /// on: each socket has a worker, and each worker a socket.
    ///
    /// # Errors
    /// There is no descriptor left, or somebody else has begun to listen on the address.
    pub fn handles(&mut self, workers: usize) -> Result<Vec<Vec<Bound>>, OpenError> {
        let all = self.try_handles(workers);
        self.fresh = false;
        all.map_err(|error| OpenError {
            listener: self.name.clone(),
            error: BindError { bind: self.bind.clone(), error, holder: None },
        })
    }

    fn try_handles(&self, workers: usize) -> io::Result<Vec<Vec<Bound>>> {
        if self.fresh {
            self.sockets.iter().try_for_each(Bound::listen)?;
        }
        let count = self.sockets.len();
        let mine = |index: usize, n: usize| n % workers == index || index % count == n;
        let of_worker = |index| {
            let all = self.sockets.iter().enumerate();
            let mine = all.filter(move |(n, _)| mine(index, *n));
            mine.map(|(_, socket)| socket.try_clone()).collect()
        };
        (0..workers).map(of_worker).collect()
    }

    /// The address as it is, port 0 resolved.
    pub fn real_address(&self) -> String {
        real_address(&self.bind, self.sockets.first())
    }
}

/// The sockets given for the listener `name` at `bind`, and whether somebody else keeps them.
pub fn take_given(name: &str, bind: &Bind, given: &mut Vec<Given>) -> Option<(Vec<Bound>, bool)> {
    let text = bind.to_string();
    let is_any_port = matches!(bind, Bind::Tcp(address) if address.port() == 0);
    let by_address = |given: &mut Given| match &given.bind {
        Some(bind) => *bind == text && (given.name == name || !is_any_port),
        None => given.socket.local().as_ref() == Some(bind),
    };
    // A unit of the service manager may have one name for the sockets of several addresses.
    let by_name = |given: &mut Given| given.bind.is_none() && given.name == name;
    let mut taken: Vec<_> = given.extract_if(.., by_address).collect();
    if taken.is_empty() {
        taken = given.extract_if(.., by_name).collect();
    }
    let kept = taken.iter().any(|given| given.kept);
    let sockets: Vec<_> = taken.into_iter().map(|given| given.socket).collect();
    (!sockets.is_empty()).then_some((sockets, kept))
}

/// Removes the file of a Unix-domain socket that nobody is to find any more.
pub fn remove_file(bind: &Bind) {
    if let Bind::Unix(path) = bind {
        // Someone may have removed it before.
        let _ = std::fs::remove_file(path);
    }
}

/// Which of the addresses that are open and that no listener has is a part of one that a listener
/// has: it stays, for who connects to it is to be served without a break.
pub fn parts(listeners: &[plan::Listener], left: &[(usize, &Bind)]) -> Vec<(usize, usize)> {
    let wide = |bind: &Bind| listeners.iter().position(|l| listen::covers(&l.bind, bind));
    left.iter().filter_map(|(ix, bind)| Some((*ix, wide(bind)?))).collect()
}

/// The address as configured, or the one that the system chose for port 0.
pub fn real_address(bind: &Bind, socket: Option<&Bound>) -> String {
    socket.and_then(Bound::local).unwrap_or_else(|| bind.clone()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::plan::Plan;
    use std::net::TcpListener;

    fn listeners(all: &[(&str, &str)]) -> Vec<plan::Listener> {
        let Plan { listeners, .. } =
            crate::config::from_flags("127.0.0.1:0", "http://127.0.0.1:1", 1).unwrap();
        let like = |(name, bind): &(&str, &str)| plan::Listener {
            name: (*name).to_owned(),
            bind: bind.parse().map_or_else(|_| Bind::Unix((*bind).into()), Bind::Tcp),
            ..listeners[0].clone()
        };
        all.iter().map(like).collect()
    }

    #[test]
    fn an_address_that_stays_stays_open_whatever_it_is_called() {
        for (open, wanted, found) in [
            (&[("a", "127.0.0.1:1")][..], &[("a", "127.0.0.1:1")][..], &[Some(0)][..]),
            (&[("a", "127.0.0.1:1")], &[("b", "127.0.0.1:1")], &[Some(0)]),
            (&[("a", "127.0.0.1:1")], &[("a", "127.0.0.1:2")], &[None]),
            (
                &[("a", "127.0.0.1:1"), ("b", "127.0.0.1:2")],
                &[("a", "127.0.0.1:2"), ("b", "127.0.0.1:1")],
                &[Some(1), Some(0)],
            ),
            // Port 0 is not the same port for another listener.
            (
                &[("a", "127.0.0.1:0"), ("b", "127.0.0.1:0")],
                &[("b", "127.0.0.1:0"), ("c", "127.0.0.1:0")],
                &[Some(1), None],
            ),
            (&[("a", "/run/x")], &[("b", "/run/x"), ("c", "/run/y")], &[Some(0), None]),
        ] {
            let open = listeners(open);
            let open: Vec<_> = open.iter().map(|l| (l.name.as_str(), &l.bind)).collect();
            assert_eq!(already_open(&listeners(wanted), &open), found, "{wanted:?}");
        }
    }

    #[test]
    fn what_is_a_part_of_another_address_stays_open() {
        let wanted = listeners(&[("a", "0.0.0.0:1"), ("b", "[::]:2"), ("c", "127.0.0.1:3")]);
        let left: Vec<Bind> = ["127.0.0.1:1", "[::1]:1", "127.0.0.1:2", "[::1]:2", "0.0.0.0:3"]
            .iter()
            .map(|bind| Bind::Tcp(bind.parse().unwrap()))
            .collect();
        let left: Vec<_> = left.iter().enumerate().collect();
        assert_eq!(parts(&wanted, &left), [(0, 0), (2, 1), (3, 1)]);
    }

    fn opened(sockets: usize) -> Opened {
        let socket = |_| Bound::Tcp(TcpListener::bind("127.0.0.1:0").unwrap());
        Opened {
            door: Arc::new(Door::new(0)),
            name: "a".into(),
            bind: Bind::Tcp(([127, 0, 0, 1], 0).into()),
            sockets: (0..sockets).map(socket).collect(),
            fresh: true,
        }
    }

    #[test]
    fn each_socket_has_a_worker_and_each_worker_a_socket() {
        for sockets in 1..6 {
            for workers in 1..6 {
                let mut opened = opened(sockets);
                let handles = opened.handles(workers).unwrap();
                assert_eq!(handles.len(), workers);
                assert!(handles.iter().all(|of_worker| !of_worker.is_empty()));
                let served = handles.iter().flatten().filter_map(Bound::local);
                let served: Vec<_> = served.collect();
                for address in opened.sockets.iter().filter_map(Bound::local) {
                    let count = served.iter().filter(|other| **other == address).count();
                    let shared = workers > sockets;
                    assert!(count == 1 || shared && count > 0, "{sockets} {workers} {count}");
                }
            }
        }
    }

    fn given(name: &str, bind: Option<&str>) -> Given {
        let socket = Bound::Tcp(TcpListener::bind("127.0.0.1:0").unwrap());
        Given { name: name.into(), bind: bind.map(str::to_owned), kept: bind.is_none(), socket }
    }

    #[test]
    fn given_sockets_are_found_by_name_or_address() {
        let any = Bind::Tcp(([127, 0, 0, 1], 0).into());
        let fixed = Bind::Tcp(([127, 0, 0, 1], 80).into());
        for (offered, name, bind, fits) in [
            // Of a service manager: by name.
            (given("a", None), "a", &fixed, true),
            (given("b", None), "a", &fixed, false),
            // Of the process before: by its address, and by name too if that says nothing.
            (given("b", Some("127.0.0.1:80")), "a", &fixed, true),
            (given("a", Some("127.0.0.1:81")), "a", &fixed, false),
            (given("a", Some("127.0.0.1:0")), "a", &any, true),
            (given("b", Some("127.0.0.1:0")), "a", &any, false),
        ] {
            let kept = offered.kept;
            let mut all = vec![offered];
            let taken = take_given(name, bind, &mut all);
            assert_eq!(taken.is_some(), fits, "{name} {bind}");
            assert_eq!(all.is_empty(), fits);
            assert!(taken.is_none_or(|(sockets, k)| sockets.len() == 1 && k == kept));
        }
        // Of a service manager that gives no names: by its real address.
        let unnamed = given("unknown", None);
        let bind = unnamed.socket.local().unwrap();
        let mut all = vec![given("a", None), unnamed];
        assert!(take_given("a", &bind, &mut all).is_some_and(|(sockets, _)| sockets.len() == 1));
        assert_eq!((all.len(), &all[0].name), (1, &"a".to_owned()), "the address comes first");
    }
}
