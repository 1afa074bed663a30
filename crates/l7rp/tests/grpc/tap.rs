//! What goes over a connection, as somebody between its ends sees it.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

use crate::{meanwhile, wait};

/// What a client of HTTP/2 sends before its first frame.
const PREFACE: usize = 24;
const FRAME_HEAD: usize = 9;
const HEADERS: u8 = 1;
const GOAWAY: u8 = 7;

/// An address that leads to another one, for one connection.
pub struct Tap {
    pub address: SocketAddr,
    seen: Arc<Mutex<Seen>>,
}

/// What has gone through.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// The last stream that the client has begun.
    pub begun: u32,
    /// The last streams that the server was willing to serve, as it said each time.
    pub goaways: Vec<u32>,
}

impl Tap {
    pub fn to(server: SocketAddr) -> Self {
        let listener = wait(TcpListener::bind("127.0.0.1:0")).expect("a port");
        let address = listener.local_addr().expect("an address");
        let seen = Arc::<Mutex<Seen>>::default();
        let (up, down) = (seen.clone(), seen.clone());
        meanwhile(async move {
            let (client, _) = listener.accept().await.expect("a client");
            // Whoever comes later is refused, as by a server that has gone.
            drop(listener);
            let server = TcpStream::connect(server).await.expect("it accepts");
            for stream in [&client, &server] {
                stream.set_nodelay(true).expect("it is TCP");
            }
            let (from_client, to_client) = client.into_split();
            let (from_server, to_server) = server.into_split();
            meanwhile(pass_on(from_client, to_server, PREFACE, move |kind, stream, _| {
                if kind == HEADERS {
                    up.lock().unwrap_or_else(PoisonError::into_inner).begun = stream;
                }
            }));
            pass_on(from_server, to_client, 0, move |kind, _, payload| {
                if kind == GOAWAY {
                    let mut seen = down.lock().unwrap_or_else(PoisonError::into_inner);
                    seen.goaways.push(number(&payload[..4]));
                }
            })
            .await;
        });
        Self { address, seen }
    }

    pub fn seen(&self) -> Seen {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Passes everything on, and shows the frames that are behind the first `skip` octets: kind,
/// stream, payload.
async fn pass_on(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut skip: usize,
    show: impl Fn(u8, u32, &[u8]),
) {
    let mut buf = Vec::new();
    let mut passed = 0;
    while let Ok(1..) = from.read_buf(&mut buf).await {
        // Noted before the other end knows of it.
        let arrived = buf.len();
        let mut seen = skip.min(arrived);
        skip -= seen;
        while let Some(frame) = frame(&buf[seen..]) {
            show(frame[3], number(&frame[5..FRAME_HEAD]), &frame[FRAME_HEAD..]);
            seen += frame.len();
        }
        if to.write_all(&buf[passed..]).await.is_err() {
            return;
        }
        buf.drain(..seen);
        passed = arrived - seen;
    }
    let _ = to.shutdown().await;
}

/// The first frame, if it is whole.
fn frame(octets: &[u8]) -> Option<&[u8]> {
    octets.get(..FRAME_HEAD + number(octets.get(..3)?) as usize)
}

fn number(octets: &[u8]) -> u32 {
    let all = octets.iter().fold(0, |sum, octet| sum << 8 | u32::from(*octet));
    // The highest bit of the name of a stream means nothing.
    all & (u32::MAX >> 1)
}
