//! Messages and descriptors over a stream, all of them within one limit of time.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::BATCH;
use crate::clock::Clock;

/// Changes with every change of what is sent; nothing but this version is understood.
const VERSION: u32 = 1;

/// Names and addresses of as many sockets as may be.
const MAX_JSON: usize = 4 << 20;

/// Control data for one batch of descriptors.
const SPACE: usize = rustix::cmsg_space!(ScmRights(BATCH));

/// A stream that is read and written until `limit` has passed since this was made.
pub(super) struct Within<'a> {
    channel: &'a UnixStream,
    clock: Clock,
    limit: Duration,
}

impl<'a> Within<'a> {
    pub(super) fn new(channel: &'a UnixStream, limit: Duration) -> io::Result<Self> {
        // A stream that comes from a runtime does not block.
        channel.set_nonblocking(false)?;
        Ok(Self { channel, clock: Clock::new(), limit })
    }

    /// Sends a message.
    pub(super) fn put<T: Serialize>(&mut self, message: &T) -> io::Result<()> {
        let json = serde_json::to_vec(message)?;
        check_length(json.len())?;
        self.write_all(&VERSION.to_be_bytes())?;
        self.write_all(&(json.len() as u32).to_be_bytes())?;
        self.write_all(&json)
    }

    /// Receives a message.
    pub(super) fn get<T: DeserializeOwned>(&mut self) -> io::Result<T> {
        let version = self.number()?;
        if version != VERSION {
            return Err(wrong(format!(
                "the other process speaks version {version} of the handover and this one version \
                 {VERSION}: stop the old one and start the new one instead"
            )));
        }
        let length = self.number()? as usize;
        check_length(length)?;
        let mut json = vec![0; length];
        self.read_exact(&mut json)?;
        serde_json::from_slice(&json)
            .map_err(|error| wrong(format!("the other process sent an unknown message: {error}")))
    }

    fn number(&mut self) -> io::Result<u32> {
        let mut octets = [0; 4];
        self.read_exact(&mut octets)?;
        Ok(u32::from_be_bytes(octets))
    }

    /// Sends up to [`BATCH`] descriptors, with one octet to carry them.
    pub(super) fn put_descriptors(&self, batch: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); SPACE];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !control.push(SendAncillaryMessage::ScmRights(batch)) {
            return Err(wrong(format!("{} descriptors are too many for one batch", batch.len())));
        }
        self.channel.set_write_timeout(Some(self.left()?))?;
        let octet = [IoSlice::new(&[0])];
        let sent =
            retry_on_intr(|| sendmsg(self.channel, &octet, &mut control, SendFlags::NOSIGNAL));
        self.settled(sent.map_err(Into::into)).map(drop)
    }

    /// Receives what [`Self::put_descriptors`] sent.
    pub(super) fn get_descriptors(&self) -> io::Result<Vec<OwnedFd>> {
        self.get_descriptors_into(&mut [MaybeUninit::uninit(); SPACE])
    }

    pub(super) fn get_descriptors_into(
        &self,
        space: &mut [MaybeUninit<u8>],
    ) -> io::Result<Vec<OwnedFd>> {
        let mut control = RecvAncillaryBuffer::new(space);
        self.channel.set_read_timeout(Some(self.left()?))?;
        let mut octet = [0];
        let received = retry_on_intr(|| {
            let mut octets = [IoSliceMut::new(&mut octet)];
            recvmsg(self.channel, &mut octets, &mut control, RecvFlags::CMSG_CLOEXEC)
        });
        let descriptors = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
            _ => None,
        });
        let descriptors = descriptors.flatten().collect();
        let cut = received.as_ref().is_ok_and(|r| r.flags.contains(ReturnFlags::CTRUNC));
        self.settled(received.map(|r| r.bytes).map_err(Into::into))?;
        if cut {
            return Err(wrong(
                "not all of the sockets that were sent arrived: raise the limit of open files \
                 (LimitNOFILE= or ulimit -n) of the new process"
                    .to_owned(),
            ));
        }
        Ok(descriptors)
    }

    /// What is left of the limit.
    fn left(&self) -> io::Result<Duration> {
        let left = self.limit.saturating_sub(Duration::from_nanos(self.clock.now().0));
        if left.is_zero() { Err(self.late()) } else { Ok(left) }
    }

    /// What came of a call, with errors for people. No call here asks for 0 octets.
    fn settled(&self, octets: io::Result<usize>) -> io::Result<usize> {
        use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof, WouldBlock};
        match octets.as_ref().map_err(io::Error::kind) {
            Err(WouldBlock) => Err(self.late()),
            Ok(0) | Err(BrokenPipe | ConnectionReset) => {
                Err(io::Error::new(UnexpectedEof, "the other process ended during the handover"))
            }
            _ => octets,
        }
    }

    fn late(&self) -> io::Error {
        let text = format!("the other process took longer than {:?} to read or write", self.limit);
        io::Error::new(io::ErrorKind::TimedOut, text)
    }
}

impl Read for Within<'_> {
    fn read(&mut self, octets: &mut [u8]) -> io::Result<usize> {
        self.channel.set_read_timeout(Some(self.left()?))?;
        let mut channel = self.channel;
        self.settled(channel.read(octets))
    }
}

impl Write for Within<'_> {
    fn write(&mut self, octets: &[u8]) -> io::Result<usize> {
        self.channel.set_write_timeout(Some(self.left()?))?;
        let mut channel = self.channel;
        self.settled(channel.write(octets))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn check_length(octets: usize) -> io::Result<()> {
    if octets > MAX_JSON {
        return Err(wrong(format!(
            "a message of {octets} octets, and at most {MAX_JSON} can be handed over"
        )));
    }
    Ok(())
}

fn wrong(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, text)
}
