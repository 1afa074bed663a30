//! The WebSocket protocol, spoken by a client and a server of one library with the proxy between them.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use l7rp_testkit::{Proxy, SOON, Value};
use tungstenite::error::Error;
use tungstenite::protocol::CloseFrame;
use tungstenite::protocol::frame::coding::CloseCode;
use tungstenite::{Message, WebSocket};

use crate::setup::{assert_counts, in_flight, over};

pub type Socket = WebSocket<TcpStream>;

/// Serves sockets with `script`, a thread for each; where it listens.
pub fn serving(script: impl Fn(Socket) + Clone + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address");
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let script = script.clone();
            thread::spawn(move || {
                patient(&stream);
                script(tungstenite::accept(stream).expect("a handshake"));
            });
        }
    });
    address
}

fn patient(stream: &TcpStream) {
    stream.set_read_timeout(Some(SOON)).expect("time-outs can be set");
    stream.set_write_timeout(Some(SOON)).expect("time-outs can be set");
    stream.set_nodelay(true).expect("it is TCP");
}

fn proxy_to(address: SocketAddr) -> Proxy {
    over(&[]).upstream(&format!("http://{address}"), "max_in_flight: 100").start()
}

#[track_caller]
pub fn open(proxy: &Proxy) -> Socket {
    let stream = TcpStream::connect(proxy.address()).expect("the proxy accepts");
    patient(&stream);
    let (socket, answer) =
        tungstenite::client("ws://a.test/ws", stream).expect("the handshake succeeds");
    assert_eq!(answer.status(), 101);
    socket
}

/// Sends back what comes.
pub fn echo(mut socket: Socket) {
    while let Ok(message) = socket.read() {
        if (message.is_text() || message.is_binary()) && socket.send(message).is_err() {
            return;
        }
    }
}

#[track_caller]
pub fn returns(socket: &mut Socket, message: &Message) {
    socket.send(message.clone()).expect("it is taken");
    let got = socket.read().expect("it comes back");
    assert!(got == *message, "{} octets became {}", message.len(), got.len());
}

fn long(seed: usize, length: usize) -> Vec<u8> {
    (seed..seed + length).map(|n| (n.wrapping_mul(2_654_435_761) >> 16) as u8).collect()
}

#[test]
fn text_and_binary_pass_in_every_size() {
    let proxy = proxy_to(serving(echo));
    let mut socket = open(&proxy);
    // The borders of the three forms of a length, and more than any buffer holds.
    for length in [0, 1, 125, 126, 65_535, 65_536, 1 << 20] {
        returns(&mut socket, &Message::text("\u{17c}".repeat(length / 2)));
        returns(&mut socket, &Message::binary(long(length, length)));
    }
    socket.close(None).expect("it closes");
    assert!(matches!(socket.read(), Ok(Message::Close(None))));
    assert!(matches!(socket.read(), Err(Error::ConnectionClosed)));
    drop(socket);
    let line = proxy.logged_path("/ws");
    assert_eq!((&line["status"], &line["reason"]), (&101.into(), &Value::Null));
    // Frames from the client are masked, hence longer by 4.
    let up = line["bytes_in"].as_u64().expect("a count");
    let down = line["bytes_out"].as_u64().expect("a count");
    assert!(down > 2 << 20, "{line}");
    assert_eq!(up - down, 4 * 15, "{line}");
}

#[test]
fn pings_are_answered_across_the_tunnel() {
    let (told, heard) = channel();
    let proxy = proxy_to(serving(move |mut socket| {
        socket.send(Message::Ping(b"from the server".to_vec().into())).expect("it is taken");
        while let Ok(message) = socket.read() {
            let _ = told.send(message);
        }
    }));
    let mut socket = open(&proxy);
    let asks = |words: &str| Message::Ping(words.as_bytes().to_vec().into());
    let answers = |words: &str| Message::Pong(words.as_bytes().to_vec().into());
    assert_eq!(socket.read().expect("a ping"), asks("from the server"));
    // Its answer goes out with what is written next.
    socket.send(asks("from the client")).expect("it is taken");
    assert_eq!(socket.read().expect("a pong"), answers("from the client"));
    let mut got = [heard.recv_timeout(SOON), heard.recv_timeout(SOON)].map(|m| m.expect("a frame"));
    got.sort_by_key(Message::is_pong);
    assert_eq!(got, [asks("from the client"), answers("from the server")]);
}

/// A server that closes with 4001 when told to, and tells what closed it.
fn closing() -> (SocketAddr, Receiver<Option<CloseFrame>>) {
    let (told, heard) = channel();
    let address = serving(move |mut socket| {
        loop {
            match socket.read() {
                Ok(Message::Close(frame)) => drop(told.send(frame)),
                Ok(Message::Text(_)) => socket.close(Some(frame(4001, "over"))).expect("it closes"),
                Ok(_) => {}
                Err(_) => return,
            }
        }
    });
    (address, heard)
}

fn frame(code: u16, reason: &str) -> CloseFrame {
    CloseFrame { code: CloseCode::from(code), reason: reason.to_owned().into() }
}

#[test]
fn either_side_closes_with_a_code() {
    let (address, heard) = closing();
    let proxy = proxy_to(address);
    let mut socket = open(&proxy);
    socket.close(Some(frame(1000, "done"))).expect("it closes");
    assert_eq!(heard.recv_timeout(SOON).expect("a close"), Some(frame(1000, "done")));
    assert_eq!(socket.read().expect("a close"), Message::Close(Some(frame(1000, "done"))));
    assert!(matches!(socket.read(), Err(Error::ConnectionClosed)));
    drop(socket);

    let mut socket = open(&proxy);
    socket.send(Message::text("close it")).expect("it is taken");
    assert_eq!(socket.read().expect("a close"), Message::Close(Some(frame(4001, "over"))));
    assert!(matches!(socket.read(), Err(Error::ConnectionClosed)));
    assert_eq!(heard.recv_timeout(SOON).expect("a close"), Some(frame(4001, "over")));
    drop(socket);

    assert_counts(&proxy, "proxy_tunnels", &[], 0.0);
    assert_eq!(in_flight(&proxy), 0.0);
    assert!(proxy.events("request_completed").iter().all(|line| line["reason"].is_null()));
}

#[test]
fn fragments_stay_fragments() {
    use tungstenite::protocol::frame::Frame;
    use tungstenite::protocol::frame::coding::{Data, OpCode};
    let proxy = proxy_to(serving(echo));
    let mut socket = open(&proxy);
    let parts: Vec<_> = (0..5).map(|n| long(n, 10_000 * n)).collect();
    for (n, part) in parts.iter().enumerate() {
        let kind = if n == 0 { Data::Binary } else { Data::Continue };
        let last = n + 1 == parts.len();
        let frame = Frame::message(part.clone(), OpCode::Data(kind), last);
        socket.send(Message::Frame(frame)).expect("it is taken");
        // Control frames may stand between them.
        socket.send(Message::Ping(vec![n as u8].into())).expect("it is taken");
    }
    let mut pongs = 0;
    let whole = loop {
        match socket.read().expect("a message") {
            Message::Pong(_) => pongs += 1,
            message => break message,
        }
    };
    assert!(whole == Message::binary(parts.concat()));
    assert_eq!(pongs, 4);
}

/// Sends back each message twice, and says something of its own after each.
fn talkative(mut socket: Socket) {
    while let Ok(Message::Binary(data)) = socket.read() {
        let own = Message::text(format!("{} octets", data.len()));
        for message in [Message::Binary(data.clone()), own, Message::Binary(data)] {
            if socket.send(message).is_err() {
                return;
            }
        }
    }
}

#[test]
fn many_frames_of_many_clients_do_not_mix() {
    let proxy = proxy_to(serving(talkative));
    thread::scope(|scope| {
        for who in 0..8 {
            let proxy = &proxy;
            scope.spawn(move || {
                let mut socket = open(proxy);
                let message = |n: usize| long(who * 1000 + n, n * 37 % 900);
                for burst in 0..4 {
                    let numbers = burst * 60..(burst + 1) * 60;
                    for n in numbers.clone() {
                        socket.send(Message::binary(message(n))).expect("it is taken");
                    }
                    for n in numbers {
                        let data = message(n);
                        let own = Message::text(format!("{} octets", data.len()));
                        let same = Message::binary(data);
                        for expected in [&same, &own, &same] {
                            assert!(socket.read().expect("a message") == *expected, "{who} {n}");
                        }
                    }
                }
            });
        }
    });
    assert_counts(&proxy, "proxy_tunnels", &[], 0.0);
    assert_counts(&proxy, "proxy_requests_total", &[("status", "101")], 8.0);
}
