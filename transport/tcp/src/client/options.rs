//! How a provider behaves, and why it may not start.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use rustls::pki_types::ServerName;
use thiserror::Error;

use crate::limits;

/// TLS for connections to owners.
#[derive(Clone)]
pub struct TlsClient {
    /// Trust roots, client certificate, versions.
    pub config: Arc<rustls::ClientConfig>,
    /// The name that the owner's certificate must bear; `None` takes the host of the address.
    pub server_name: Option<ServerName<'static>>,
}

impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsClient").field("server_name", &self.server_name).finish_non_exhaustive()
    }
}

/// How a provider behaves.
#[derive(Clone, Debug)]
pub struct ProviderOptions {
    /// Connections to each peer, as far as it issued tokens; 1 to [`limits::CONNECTIONS_PER_PEER_MAX`].
    pub connections_per_peer: usize,
    /// Requests in flight on one connection; 1 to [`limits::REQUESTS_QUEUED_MAX`].
    pub requests_in_flight: usize,
    /// From connect to the owner's welcome.
    pub connect_timeout: Duration,
    /// A reply that makes no progress for this long ends the connection.
    pub stall_timeout: Duration,
    /// Size of the socket buffers, bytes; `None` leaves them to the kernel's tuning.
    pub socket_buffer_bytes: Option<usize>,
    /// TLS, where the owners ask for it.
    pub tls: Option<TlsClient>,
}

impl Default for ProviderOptions {
    fn default() -> Self {
        Self {
            connections_per_peer: 2,
            requests_in_flight: limits::REQUESTS_IN_FLIGHT,
            connect_timeout: limits::GREETING_TIMEOUT,
            stall_timeout: limits::STALL_TIMEOUT,
            socket_buffer_bytes: None,
            tls: None,
        }
    }
}

/// Why a provider could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// An option is outside its limits.
    #[error("the number of {0} is outside its limits")]
    Option(&'static str),
    /// A shortage on this side.
    #[error("cannot start the tcp provider: {0}")]
    System(#[from] std::io::Error),
}

impl StartError {
    /// All causes lie on this side.
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }

    /// Whether the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::System(_))
    }
}
