//! Two ends of a channel in one process; lies are told by whoever holds the other end.

use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::net::{UnixDatagram, UnixListener};

use rustix::io::FdFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;

fn pair() -> (UnixStream, UnixStream) {
    UnixStream::pair().unwrap()
}

fn within(channel: &UnixStream) -> Within<'_> {
    Within::new(channel, PATIENCE).unwrap()
}

fn header(sockets: usize) -> Header {
    let label = |i| Label { name: "web".to_owned(), bind: format!("127.0.0.1:{i}"), kept: false };
    Header { ready: vec![], sockets: (0..sockets).map(label).collect() }
}

/// Descriptors to send, and the stream that ends when the last copy of them is closed.
fn marked(count: usize) -> (Vec<OwnedFd>, UnixStream) {
    let (end, watched) = pair();
    ((0..count).map(|_| end.try_clone().unwrap().into()).collect(), watched)
}

fn borrowed(all: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    all.iter().map(AsFd::as_fd).collect()
}

/// That no copy of what was sent is open any more.
fn assert_closed(mut watched: UnixStream) {
    watched.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(watched.read(&mut [0]).unwrap(), 0);
}

#[test]
fn sockets_arrive_in_order_and_accept() {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    for count in [0, 1, BATCH, 300, 1000] {
        let listeners: Vec<TcpListener> =
            (0..count).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
        let offered = |(i, listener): (usize, TcpListener)| Offered {
            name: format!("listener {i}"),
            bind: listener.local_addr().unwrap().to_string(),
            kept: i % 3 == 0,
            socket: listener.into(),
        };
        let sockets: Vec<Offered> = listeners.into_iter().enumerate().map(offered).collect();
        let (old, new) = pair();
        let received = std::thread::scope(|scope| {
            scope.spawn(|| send(&old, &Offer { sockets, ready: vec!["p".to_owned()] }).unwrap());
            receive(&new).unwrap()
        });
        assert_eq!(received.ready, ["p"]);
        assert_eq!(received.sockets.len(), count);
        for (i, Offered { name, bind, kept, socket }) in received.sockets.into_iter().enumerate() {
            assert_eq!((name, kept), (format!("listener {i}"), i % 3 == 0));
            assert!(rustix::io::fcntl_getfd(&socket).unwrap().contains(FdFlags::CLOEXEC));
            let bound = to_bound(socket).unwrap();
            assert_eq!(bound.local().unwrap().to_string(), bind);
            let Bound::Tcp(listener) = bound else { panic!("{bound:?}") };
            let client = TcpStream::connect(&bind).unwrap();
            let (accepted, peer) = listener.accept().unwrap();
            assert_eq!(peer, client.local_addr().unwrap());
            assert!(accepted.nodelay().unwrap());
        }
    }
}

#[test]
fn names_may_have_any_characters() {
    let odd = ["", "\"\\\n\0\u{1b}", "größe 🦀", "a:b,c", &"x".repeat(100_000)];
    let (kept, watched) = marked(odd.len());
    let sockets = odd.iter().zip(kept).map(|(odd, socket)| Offered {
        name: (*odd).to_owned(),
        bind: format!("unix:/{odd}"),
        kept: false,
        socket,
    });
    let offer = Offer { sockets: sockets.collect(), ready: vec![] };
    let (old, new) = pair();
    let received = std::thread::scope(|scope| {
        scope.spawn(|| send(&old, &offer).unwrap());
        receive(&new).unwrap()
    });
    drop(offer);
    assert!(received.ready.is_empty());
    for (odd, got) in odd.iter().zip(&received.sockets) {
        assert_eq!((got.name.as_str(), got.bind.clone()), (*odd, format!("unix:/{odd}")));
    }
    drop(received);
    assert_closed(watched);
}

#[test]
fn what_is_not_as_announced_is_refused_and_closed() {
    for (announced, batches, text) in [
        (2, &[1, 1][..], "2 sockets were announced, but 1 came"),
        (1, &[2], "1 sockets were announced, but 2 came"),
        (1, &[0], "1 sockets were announced, but 0 came"),
        (300, &[BATCH, BATCH], "47 sockets were announced, but 253 came"),
        (300, &[BATCH], "ended during the handover"),
        (1, &[], "ended during the handover"),
        (MAX_SOCKETS + 1, &[], "at most 16384"),
    ] {
        let (old, new) = pair();
        let (all, watched) = marked(BATCH);
        let error = std::thread::scope(|scope| {
            scope.spawn(move || {
                // The other end may be closed before all is sent.
                let _ = within(&old).put(&header(announced));
                for &count in batches {
                    let _ = within(&old).put_descriptors(&borrowed(&all[..count]));
                }
            });
            let error = receive(&new).unwrap_err().to_string();
            drop(new);
            error
        });
        assert!(error.contains(text), "{announced} {batches:?}: {error}");
        assert_closed(watched);
    }
}

#[test]
fn descriptors_that_the_kernel_kept_back_are_an_error() {
    let (old, new) = pair();
    let (all, watched) = marked(20);
    within(&old).put_descriptors(&borrowed(&all)).unwrap();
    drop(all);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(10))];
    let error = within(&new).get_descriptors_into(&mut space).unwrap_err();
    assert!(error.to_string().contains("limit of open files"), "{error}");
    assert_closed(watched);
}

#[test]
fn what_is_no_message_of_this_version_is_refused() {
    let length = |octets: u32| [&1u32.to_be_bytes()[..], &octets.to_be_bytes()].concat();
    for (sent, text) in [
        (vec![], "ended during the handover"),
        (vec![0, 0, 0], "ended during the handover"),
        (length(1), "ended during the handover"),
        ([0, 0, 0, 2, 0, 0, 0, 0].to_vec(), "speaks version 2 of the handover"),
        (length(4 << 20), "ended during the handover"),
        (length((4 << 20) + 1), "at most 4194304"),
        (length(u32::MAX), "at most 4194304"),
        ([length(2), b"{}".to_vec()].concat(), "unknown message"),
        ([length(2), vec![0xff, 0xfe]].concat(), "unknown message"),
    ] {
        let (mut old, new) = pair();
        old.write_all(&sent).unwrap();
        drop(old);
        let error = receive(&new).unwrap_err().to_string();
        assert!(error.contains(text), "{sent:?}: {error}");
    }
}

#[test]
fn an_offer_that_is_too_large_is_not_sent() {
    let (old, _new) = pair();
    let (mut kept, _watched) = marked(1);
    let name = "x".repeat(5 << 20);
    let socket = kept.pop().unwrap();
    let offered = Offered { name, bind: String::new(), kept: false, socket };
    let error =
        send(&old, &Offer { sockets: vec![offered], ready: vec!["p".to_owned()] }).unwrap_err();
    assert!(error.to_string().contains("at most 4194304"), "{error}");
}

#[test]
fn whoever_neither_reads_nor_writes_is_not_waited_for() {
    let (old, new) = pair();
    let limit = Duration::from_millis(20);
    let text = "x".repeat(3 << 20);
    let error = Within::new(&old, limit).unwrap().put(&text).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    let error = Within::new(&old, limit).unwrap().get_descriptors().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    drop(new);
    let error = within(&old).put(&text).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{error}");
}

#[test]
fn the_answer_is_ready_or_failed_or_missing() {
    let taken = vec!["0.0.0.0:80".to_owned(), "unix:/run/x".to_owned()];
    for said in [Answer::Ready { pid: 4711, taken }, Answer::Failed { why: "a\nb".to_owned() }] {
        let (old, new) = pair();
        // As a runtime would leave it.
        old.set_nonblocking(true).unwrap();
        answer(&new, &said).unwrap();
        assert_eq!(await_answer(&old, PATIENCE).unwrap(), said);
    }
    let (old, new) = pair();
    let error = await_answer(&old, Duration::from_millis(20)).unwrap_err();
    assert_eq!(error.to_string(), "the new process was not ready within 20ms");
    let error = await_answer(&old, Duration::ZERO).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    // It ends, and has not read the offer either.
    within(&old).put(&header(1)).unwrap();
    drop(new);
    let error = await_answer(&old, PATIENCE).unwrap_err().to_string();
    assert!(error.contains("ended before it was ready"), "{error}");
}

#[test]
fn only_listening_stream_sockets_are_accepted_on() {
    let folder = tempfile::tempdir().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    for (socket, text) in [
        (client.into(), "a stream socket that does not listen"),
        (UnixStream::pair().unwrap().0.into(), "a stream socket that does not listen"),
        (UdpSocket::bind("127.0.0.1:0").unwrap().into(), "a datagram socket (IPv4)"),
        (UnixDatagram::unbound().unwrap().into(), "a datagram socket (Unix)"),
        (OwnedFd::from(file), "it is /dev/null, not a socket"),
        (io::pipe().unwrap().0.into(), "it is pipe:["),
    ] {
        let error = to_bound(socket).unwrap_err();
        assert!(error.contains(text), "{error}");
    }
    let path = folder.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    rustix::io::fcntl_setfd(&listener, FdFlags::empty()).unwrap();
    let Bound::Unix(listener) = to_bound(listener.into()).unwrap() else { panic!() };
    assert!(rustix::io::fcntl_getfd(&listener).unwrap().contains(FdFlags::CLOEXEC));
    assert_eq!(listener.accept().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    let _client = UnixStream::connect(&path).unwrap();
    listener.accept().unwrap();
    if let Ok(listener) = TcpListener::bind("[::1]:0") {
        let Bound::Tcp(_) = to_bound(listener.into()).unwrap() else { panic!() };
    }
}
