//! The seam between the node and its one-sided transports: post and poll.
//!
//! A provider belongs to one thread (the node gives each its own data thread; a benchmark may drive it from its caller).
//! Nothing here blocks except [`Provider::wait`]. An operation is moved into the provider by [`Provider::post`] together
//! with its destination, and comes back through [`Provider::poll`] exactly once, when every work item that could touch
//! the destination has retired (rule R4). There is no other way to get the destination back.
#![forbid(unsafe_code)]

use std::fmt;
use std::time::Duration;

use kvfabric_memory::{RawWord, ScatterList};
use thiserror::Error;

/// Key of a peer within a provider, chosen by the node; never reused for another incarnation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerKey(pub u64);

/// Names an operation; chosen by the node, unique among the provider's operations in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpToken(pub u64);

/// Reads one object (or a part of it) and then its word. Owns the destination until it comes back as [`ReadDone`].
#[derive(Debug)]
pub struct ReadOp {
    /// Name.
    pub token: OpToken,
    /// Slot at the peer.
    pub slot: u32,
    /// Size of the whole object as the reader knows it, bytes; a peer whose slot has another size refuses.
    pub object_bytes: u64,
    /// First byte wanted, relative to the object.
    pub object_offset: u64,
    /// Destination; its total length is the number of bytes read.
    pub destination: ScatterList,
    /// Whether to compute xxh3-64 of the landed bytes, in object order.
    pub checksum: bool,
}

/// The bytes landed, and the word was fetched after the last of them (rule R2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Landed {
    /// The word, to be judged by core; a provider never judges.
    pub word: RawWord,
    /// xxh3-64 of the landed bytes where it was asked for (0 is reported as 1).
    pub check: Option<u64>,
}

/// A retired operation: nothing can touch the destination any more.
#[derive(Debug)]
pub struct ReadDone {
    /// Name.
    pub token: OpToken,
    /// The destination, back from the provider.
    pub destination: ScatterList,
    /// What happened.
    pub outcome: Result<Landed, ReadError>,
}

/// How a read ended without a word.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ReadError {
    /// Ended by force through [`Provider::abort`].
    #[error("ended by force")]
    Aborted,
    /// The connection broke.
    #[error("connection to the peer lost: {0}")]
    PeerLost(String),
    /// The peer does not know the slot.
    #[error("the peer does not know slot {0}")]
    UnknownSlot(u32),
    /// The peer's object has another size, or the part lies outside it.
    #[error("the peer's object has another size")]
    SizeMismatch,
    /// A shortage on this side; the connection stays up.
    #[error("local shortage: {0}")]
    LocalShortage(&'static str),
    /// The peer broke the protocol; the connection was closed.
    #[error("the peer broke the protocol: {0}")]
    Protocol(&'static str),
}

impl ReadError {
    /// Whether the cause lies on this side; such a failure never counts against the peer.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::Aborted | Self::LocalShortage(_))
    }

    /// Whether the same read may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::PeerLost(_) | Self::LocalShortage(_))
    }
}

/// Why an operation was not taken. It comes back with its destination.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PostError {
    /// The peer is not connected.
    #[error("the peer is not connected")]
    NotConnected(Box<ReadOp>),
    /// A queue of this side is full; try again after a poll.
    #[error("the transport's queue is full")]
    QueueFull(Box<ReadOp>),
    /// The destination is empty, or the part lies outside the object.
    #[error("the read's range lies outside its object")]
    BadRange(Box<ReadOp>),
}

impl PostError {
    /// The operation, unposted.
    #[must_use]
    pub fn into_op(self) -> ReadOp {
        match self {
            Self::NotConnected(op) | Self::QueueFull(op) | Self::BadRange(op) => *op,
        }
    }
}

/// Where a peer can be reached; each provider takes what it understands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerTarget {
    /// The incarnation that the peer must show (rule R1).
    pub incarnation: u64,
    /// Path of the peer's Unix socket, for shm.
    pub unix_path: Option<String>,
    /// `HOST:PORT` of the peer's data listener, for tcp.
    pub tcp_address: Option<String>,
    /// One-time 32-byte tokens for tcp data connections, from the control HELLO.
    pub tcp_tokens: Vec<[u8; 32]>,
}

/// Why a peer could not be connected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The target has no address for this transport.
    #[error("the peer offers no address for this transport")]
    NoAddress,
    /// Not on this host (shm).
    #[error("the peer is not on this host: {0}")]
    NotSameHost(String),
    /// The peer is another incarnation than the one asked for.
    #[error("the peer is incarnation {found:016x}, not {wanted:016x}")]
    WrongIncarnation {
        /// Asked for.
        wanted: u64,
        /// Found.
        found: u64,
    },
    /// Refused, unreachable or too slow.
    #[error("cannot connect: {0}")]
    Unreachable(String),
    /// The peer's memory or messages are not what the protocol allows.
    #[error("the peer broke the protocol: {0}")]
    Protocol(String),
    /// A shortage on this side.
    #[error("local shortage: {0}")]
    LocalShortage(String),
}

/// What a provider reports.
#[derive(Debug)]
pub enum Event {
    /// The peer is ready for reads.
    Connected {
        /// Peer.
        peer: PeerKey,
    },
    /// The peer could not be connected.
    ConnectFailed {
        /// Peer.
        peer: PeerKey,
        /// Why.
        error: ConnectError,
    },
    /// A read retired.
    Read(ReadDone),
    /// The peer's connection is gone; its reads retire through their own events, before this one.
    Disconnected {
        /// Peer.
        peer: PeerKey,
        /// Why, in words.
        reason: String,
    },
}

/// Wakes a provider's [`Provider::wait`] from any thread.
pub trait Wake: Send + Sync + fmt::Debug {
    /// Makes the current or the next `wait` return.
    fn wake(&self);
}

/// A one-sided transport, reader side. (The serving side of each transport is a type of its own in its crate.)
pub trait Provider: Send {
    /// Begins to connect; the result comes as an [`Event`], within a bounded time.
    fn connect(&mut self, peer: PeerKey, target: PeerTarget);

    /// Ends every read of the peer by force and forgets it. Reads retire as [`ReadError::Aborted`] or `PeerLost`.
    fn disconnect(&mut self, peer: PeerKey);

    /// Takes an operation. It may start at once or at the next [`Provider::poll`].
    ///
    /// # Errors
    /// [`PostError`], with the operation inside.
    fn post(&mut self, peer: PeerKey, op: ReadOp) -> Result<(), PostError>;

    /// Ends an operation by force. It still comes back through `poll`, within the transport's drain bound, unless it
    /// has retired already. Unknown tokens are ignored.
    fn abort(&mut self, token: OpToken);

    /// Makes progress without blocking, and appends what happened. Returns whether anything happened or may happen soon.
    fn poll(&mut self, events: &mut Vec<Event>) -> bool;

    /// Sleeps until progress is possible, a wake, or the timeout.
    fn wait(&mut self, timeout: Duration);

    /// A handle that wakes `wait`.
    fn waker(&self) -> std::sync::Arc<dyn Wake>;

    /// Operations taken and not yet reported.
    fn in_flight(&self) -> usize;
}
