//! Liveness: one plain TCP connection for each rank beside QUIC, on threads of its own (design 1.9).
//!
//! The kernel closes the connection when the process dies, so death is noticed at once however busy its or our reactor
//! is; a process that is stopped or cut off misses its pings. The rank shows the ticket that it got when it joined, as
//! its first 32 bytes; then one byte for each ping, answered by one byte. Nothing else is ever sent, and anything else
//! ends that connection and no other. Liveness hides or shows entries, it is no part of safety.

mod client;
mod server;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

pub use client::{ClientConfig, LivenessClient, Lost};
pub use server::{Closed, LivenessEvent, LivenessServer, ServerConfig};

use crate::limits::TICKET_BYTES;

const PING: u8 = 0x01;
const PONG: u8 = 0x02;
/// The server's answer to a ticket that it accepts.
const WELCOME: u8 = 0x03;

/// Number of one ticket and of the connection that shows it; never used again by that server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LivenessId(pub u64);

impl fmt::Display for LivenessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// A random one-time token that ties a liveness connection to a join. It travels to the rank over QUIC.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket([u8; TICKET_BYTES]);

impl Ticket {
    /// A ticket from its bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; TICKET_BYTES]) -> Self {
        Self(bytes)
    }

    /// The ticket that carries a secret random number; both sides of a join know the number.
    #[must_use]
    pub const fn from_number(number: u64) -> Self {
        let mut bytes = [0; TICKET_BYTES];
        let number = number.to_le_bytes();
        let mut at = 0;
        while at < number.len() {
            bytes[at] = number[at];
            at += 1;
        }
        Self(bytes)
    }

    /// The ticket's bytes.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; TICKET_BYTES] {
        self.0
    }

    fn random() -> Result<Self, LivenessError> {
        let mut bytes = [0u8; TICKET_BYTES];
        getrandom::fill(&mut bytes).map_err(|error| LivenessError::Random { detail: error.to_string() })?;
        Ok(Self(bytes))
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Ticket(…)")
    }
}

/// Why liveness could not be set up.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LivenessError {
    /// The server cannot be reached.
    #[error(
        "liveness: cannot connect to {address}: {kind}; check that the directory runs and that TCP passes"
    )]
    Connect {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        kind: io::ErrorKind,
    },
    /// The server did not accept the ticket: used, expired, or of another life of the server.
    #[error("liveness: {address} does not accept the ticket; join again")]
    Refused {
        /// The address.
        address: SocketAddr,
    },
    /// The server did not answer in time.
    #[error("liveness: no answer from {address} within {timeout:?}")]
    Timeout {
        /// The address.
        address: SocketAddr,
        /// The limit.
        timeout: Duration,
    },
    /// Too many tickets are out; they expire by themselves.
    #[error("liveness: {limit} tickets are waiting to be used; try again later")]
    TooManyTickets {
        /// The limit.
        limit: usize,
    },
    /// The operating system's random source failed.
    #[error("liveness: no random bytes: {detail}")]
    Random {
        /// What it said.
        detail: String,
    },
    /// The operating system refused something else.
    #[error("liveness: cannot {action}: {kind}")]
    Io {
        /// What was tried.
        action: &'static str,
        /// What the system said.
        kind: io::ErrorKind,
    },
}

impl LivenessError {
    /// Whether the same call may succeed later; a refused ticket needs a new one.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Connect { .. } | Self::Timeout { .. } | Self::TooManyTickets { .. })
    }

    /// Whether the cause lies on this side.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::TooManyTickets { .. } | Self::Random { .. } | Self::Io { .. })
    }

    fn io(action: &'static str) -> impl Fn(io::Error) -> Self {
        move |error| Self::Io { action, kind: error.kind() }
    }
}
