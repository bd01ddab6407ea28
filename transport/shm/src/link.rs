//! A connection to one peer's server, as a state machine without waits.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

use kvfabric_memory::limits::SLABS_MAX;
use kvfabric_memory::{MapError, PeerMemory, Slab};
use kvfabric_transport_api::{ConnectError, PeerTarget};
use rustix::io::Errno;

use crate::frame::{Answer, FrameError, Refusal, Request, NONCE_BYTES};
use crate::limits::{CONNECT_RETRY, CONNECT_TIMEOUT, FRAME_BYTES_MAX, SLABS_RESTARTS_MAX, SLABS_TIMEOUT};
use crate::socket;

/// Why an established connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum LinkError {
    /// The other side is gone.
    Lost(String),
    /// It sent what the protocol does not allow.
    Protocol(&'static str),
}

/// What a look at the socket brought.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Nothing to report.
    None,
    /// Memory is mapped and the slabs are known.
    Connected,
    /// The slabs were asked for and are known now.
    Slabs,
}

/// A list of slabs on its way.
#[derive(Debug)]
struct Fetch {
    collected: Vec<Slab>,
    version: Option<u64>,
    restarts: u32,
    deadline: Instant,
}

#[derive(Debug)]
enum Stage {
    /// The peer's backlog is full.
    Waiting { retry_at: Instant },
    /// HELLO was sent.
    Greeting,
    /// The first list of slabs is on its way.
    Listing,
    /// Ready.
    Up,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) fd: OwnedFd,
    address: rustix::net::SocketAddrUnix,
    incarnation: u64,
    nonce: [u8; NONCE_BYTES],
    stage: Stage,
    /// When connecting has taken too long.
    deadline: Instant,
    fetch: Option<Fetch>,
    pub(crate) memory: Option<PeerMemory>,
}

impl Link {
    /// Begins to connect.
    pub(crate) fn connect(target: &PeerTarget, now: Instant) -> Result<Self, ConnectError> {
        let path = target.unix_path.as_deref().ok_or(ConnectError::NoAddress)?;
        let shortage = |error: io::Error| ConnectError::LocalShortage(error.to_string());
        let address = socket::address(Path::new(path))
            .map_err(|error| ConnectError::Unreachable(format!("{path}: {error}")))?;
        let mut nonce = [0; NONCE_BYTES];
        getrandom::fill(&mut nonce).map_err(|error| ConnectError::LocalShortage(error.to_string()))?;
        let mut link = Self {
            fd: socket::socket().map_err(shortage)?,
            address,
            incarnation: target.incarnation,
            nonce,
            stage: Stage::Waiting { retry_at: now },
            deadline: now + CONNECT_TIMEOUT,
            fetch: None,
            memory: None,
        };
        link.try_connect(now)?;
        Ok(link)
    }

    fn try_connect(&mut self, now: Instant) -> Result<(), ConnectError> {
        match rustix::net::connect(&self.fd, &self.address) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::INTR) => {
                self.stage = Stage::Waiting { retry_at: now + CONNECT_RETRY };
                return Ok(());
            }
            Err(error @ (Errno::NOENT | Errno::NOTDIR | Errno::CONNREFUSED | Errno::PROTOTYPE)) => {
                return Err(ConnectError::NotSameHost(format!("{:?}: {error}", self.address)));
            }
            Err(error) => return Err(ConnectError::Unreachable(format!("{:?}: {error}", self.address))),
        }
        match socket::peer_is_allowed(self.fd.as_fd()) {
            Ok(true) => {}
            Ok(false) => {
                return Err(ConnectError::Unreachable("the socket belongs to another user".into()));
            }
            Err(error) => return Err(ConnectError::LocalShortage(error.to_string())),
        }
        self.stage = Stage::Greeting;
        socket::send(self.fd.as_fd(), &Request::Hello { nonce: self.nonce }.encode(), &[])
            .map_err(|error| ConnectError::Unreachable(error.to_string()))
    }

    pub(crate) fn is_up(&self) -> bool {
        matches!(self.stage, Stage::Up)
    }

    /// Whether the peer's backlog is full.
    pub(crate) fn is_waiting(&self) -> bool {
        matches!(self.stage, Stage::Waiting { .. })
    }

    pub(crate) fn is_fetching(&self) -> bool {
        self.fetch.is_some()
    }

    /// When [`Link::handle_time`] has something to do.
    pub(crate) fn poll_deadline(&self) -> Option<Instant> {
        match &self.stage {
            Stage::Waiting { retry_at } => Some((*retry_at).min(self.deadline)),
            Stage::Greeting | Stage::Listing => Some(self.deadline),
            Stage::Up => self.fetch.as_ref().map(|fetch| fetch.deadline),
        }
    }

    /// Time has passed while connecting.
    pub(crate) fn handle_connect_time(&mut self, now: Instant) -> Result<(), ConnectError> {
        if self.is_up() {
            return Ok(());
        }
        if now >= self.deadline {
            return Err(ConnectError::Unreachable("the peer did not answer in time".into()));
        }
        match self.stage {
            Stage::Waiting { retry_at } if now >= retry_at => self.try_connect(now),
            _ => Ok(()),
        }
    }

    /// Whether the slabs that were asked for did not come in time. Asks no more then.
    pub(crate) fn handle_fetch_time(&mut self, now: Instant) -> bool {
        let late = self.is_up() && self.fetch.as_ref().is_some_and(|fetch| now >= fetch.deadline);
        if late {
            self.fetch = None;
        }
        late
    }

    /// Asks for the slabs, unless they are on their way.
    pub(crate) fn fetch_slabs(&mut self, now: Instant) -> Result<(), LinkError> {
        if self.fetch.is_some() {
            return Ok(());
        }
        let deadline = now + SLABS_TIMEOUT;
        self.fetch = Some(Fetch { collected: Vec::new(), version: None, restarts: 0, deadline });
        self.ask(0)
    }

    fn ask(&self, start: usize) -> Result<(), LinkError> {
        let since = self.memory.as_ref().map_or(0, PeerMemory::slab_version);
        let start = u32::try_from(start).map_err(|_| LinkError::Protocol("too many slabs"))?;
        socket::send(self.fd.as_fd(), &Request::Slabs { since, start }.encode(), &[])
            .map_err(|error| LinkError::Lost(error.to_string()))
    }

    /// Receives one answer while connecting.
    pub(crate) fn handle_connect_readable(&mut self, now: Instant) -> Result<Progress, ConnectError> {
        if matches!(self.stage, Stage::Waiting { .. }) {
            return Ok(Progress::None);
        }
        let Some((answer, fds)) = self.receive().map_err(connect_error)? else { return Ok(Progress::None) };
        match (&self.stage, answer) {
            (Stage::Greeting, Answer::Hello { nonce, incarnation, pool_bytes, words_bytes }) => {
                if nonce != self.nonce {
                    return Err(ConnectError::Protocol("the peer does not echo the nonce".into()));
                }
                if incarnation != self.incarnation {
                    let (wanted, found) = (self.incarnation, incarnation);
                    return Err(ConnectError::WrongIncarnation { wanted, found });
                }
                let [pool, words] = <[OwnedFd; 2]>::try_from(fds)
                    .map_err(|_| ConnectError::Protocol("HELLO without its two descriptors".into()))?;
                self.memory = Some(PeerMemory::map(pool, words, pool_bytes, words_bytes).map_err(
                    |error| match error {
                        MapError::Map { .. } => ConnectError::LocalShortage(error.to_string()),
                        other => ConnectError::Protocol(other.to_string()),
                    },
                )?);
                self.stage = Stage::Listing;
                self.fetch_slabs(now).map_err(connect_error)?;
                Ok(Progress::None)
            }
            (Stage::Listing, Answer::Slabs { version, total, start, slabs }) => {
                let done = self.handle_slabs(version, total, start, slabs).map_err(connect_error)?;
                if done {
                    self.stage = Stage::Up;
                    return Ok(Progress::Connected);
                }
                Ok(Progress::None)
            }
            (_, Answer::Refused(why)) => Err(ConnectError::Unreachable(refusal(why).into())),
            _ => Err(ConnectError::Protocol("an answer that was not asked for".into())),
        }
    }

    /// Receives one answer on an established connection.
    pub(crate) fn handle_readable(&mut self) -> Result<Progress, LinkError> {
        let Some((answer, _)) = self.receive()? else { return Ok(Progress::None) };
        match answer {
            Answer::Slabs { version, total, start, slabs } if self.fetch.is_some() => {
                let done = self.handle_slabs(version, total, start, slabs)?;
                Ok(if done { Progress::Slabs } else { Progress::None })
            }
            // The answer to a request that was given up as late: of no use any more.
            Answer::Slabs { .. } => Ok(Progress::None),
            Answer::Refused(why) => Err(LinkError::Lost(refusal(why).into())),
            Answer::Hello { .. } => Err(LinkError::Protocol("an answer that was not asked for")),
        }
    }

    fn receive(&mut self) -> Result<Option<(Answer, Vec<OwnedFd>)>, LinkError> {
        let mut buffer = vec![0u8; FRAME_BYTES_MAX];
        let packet = match socket::receive(self.fd.as_fd(), &mut buffer) {
            Ok(packet) => packet,
            Err(error) if socket::would_block(&error) => return Ok(None),
            Err(error) => return Err(LinkError::Lost(error.to_string())),
        };
        if packet.truncated {
            return Err(LinkError::Protocol("a frame longer than allowed"));
        }
        if packet.length_bytes == 0 {
            return Err(LinkError::Lost("closed by the peer".into()));
        }
        match Answer::decode(buffer.get(..packet.length_bytes).unwrap_or(&[])) {
            Ok(answer) => Ok(Some((answer, packet.fds))),
            Err(error) => Err(LinkError::Protocol(frame_error(error))),
        }
    }

    /// Takes a part of the list; returns whether the list is complete and in use.
    fn handle_slabs(
        &mut self,
        version: u64,
        total: u32,
        start: u32,
        slabs: Vec<Slab>,
    ) -> Result<bool, LinkError> {
        let (Some(memory), Some(fetch)) = (self.memory.as_mut(), self.fetch.as_mut()) else {
            return Err(LinkError::Protocol("an answer that was not asked for"));
        };
        if version == memory.slab_version() && slabs.is_empty() {
            self.fetch = None;
            return Ok(true);
        }
        let total = total as usize;
        if total > SLABS_MAX {
            return Err(LinkError::Protocol("too many slabs"));
        }
        if fetch.version.is_some_and(|known| known != version) {
            fetch.restarts += 1;
            if fetch.restarts > SLABS_RESTARTS_MAX {
                return Err(LinkError::Protocol("a slab list that never holds still"));
            }
            fetch.collected.clear();
            // This part may be the new list's beginning; anything else is asked for anew.
            if start != 0 {
                fetch.version = None;
                return self.ask(0).map(|()| false);
            }
        }
        if start as usize != fetch.collected.len() || (slabs.is_empty() && fetch.collected.len() < total) {
            return Err(LinkError::Protocol("a part of the slab list that was not asked for"));
        }
        fetch.version = Some(version);
        fetch.collected.extend(slabs);
        if fetch.collected.len() < total {
            let next = fetch.collected.len();
            return self.ask(next).map(|()| false);
        }
        let collected = std::mem::take(&mut fetch.collected);
        self.fetch = None;
        memory
            .update_slabs(version, collected)
            .map_err(|_| LinkError::Protocol("slabs that its pool cannot hold"))?;
        Ok(true)
    }
}

fn connect_error(error: LinkError) -> ConnectError {
    match error {
        LinkError::Lost(why) => ConnectError::Unreachable(why),
        LinkError::Protocol(why) => ConnectError::Protocol(why.into()),
    }
}

fn refusal(why: Refusal) -> &'static str {
    match why {
        Refusal::Version => "the peer speaks another version of the shared-memory protocol",
        Refusal::User => "the peer serves another user",
        Refusal::Busy => "the peer has too many connections",
    }
}

fn frame_error(error: FrameError) -> &'static str {
    match error {
        FrameError::Magic => "a frame without the protocol's mark",
        FrameError::Version(_) => "a frame of another protocol version",
        FrameError::Kind => "an unknown kind of frame",
        FrameError::Length => "a frame of the wrong length",
        FrameError::Count => "a slab list longer than its total",
    }
}
