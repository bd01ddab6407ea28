//! The owner's side: answers requests out of registered memory, never blocking one reader on another.

mod connection;
mod worker;

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{eventfd, EventfdFlags};
use socket2::Socket;
use thiserror::Error;

use crate::limits;
use crate::served::Served;
use crate::socket;
use crate::tokens::TokenStore;

/// How a server behaves.
#[derive(Clone)]
pub struct ServerOptions {
    /// I/O threads, 1 to [`limits::THREADS_MAX`].
    pub threads: usize,
    /// Connections at most; more are closed at once.
    pub connections_max: usize,
    /// A connection without requests for this long is closed.
    pub idle_timeout: Duration,
    /// A reply that makes no progress for this long ends its connection.
    pub stall_timeout: Duration,
    /// Size of the socket buffers, bytes; `None` leaves them to the kernel's tuning.
    pub socket_buffer_bytes: Option<usize>,
    /// For at most this long a thread looks for more work before it sleeps, and only while work keeps coming that fast.
    /// Zero turns it off.
    pub busy_poll: Duration,
    /// TLS, where connections are to be wrapped in it. The configuration decides whether readers need certificates.
    pub tls: Option<Arc<rustls::ServerConfig>>,
}

impl Default for ServerOptions {
    fn default() -> Self {
        Self {
            threads: 1,
            connections_max: limits::CONNECTIONS_MAX,
            idle_timeout: limits::IDLE_TIMEOUT,
            stall_timeout: limits::STALL_TIMEOUT,
            socket_buffer_bytes: None,
            busy_poll: limits::BUSY_POLL,
            tls: None,
        }
    }
}

impl fmt::Debug for ServerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerOptions")
            .field("threads", &self.threads)
            .field("connections_max", &self.connections_max)
            .field("idle_timeout", &self.idle_timeout)
            .field("stall_timeout", &self.stall_timeout)
            .field("socket_buffer_bytes", &self.socket_buffer_bytes)
            .field("busy_poll", &self.busy_poll)
            .field("tls", &self.tls.is_some())
            .finish()
    }
}

/// Why a server did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServeError {
    /// Somebody else listens there.
    #[error("the data address {0} is in use by another process")]
    AddressInUse(SocketAddr),
    /// The address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
    /// An option is outside its limits.
    #[error("the number of {0} is outside its limits")]
    Option(&'static str),
    /// A shortage on this side.
    #[error("cannot start the data server: {0}")]
    System(#[from] std::io::Error),
}

impl ServeError {
    /// All causes lie on this side.
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }

    /// Whether the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::AddressInUse(_) | Self::System(_))
    }
}

/// What a server has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerStats {
    /// Connections open now.
    pub connections: usize,
    /// Objects answered with bytes and word.
    pub objects_sent: u64,
    /// Object bytes sent.
    pub bytes_sent: u64,
    /// Requests for slots that do not exist, or of another size.
    pub requests_refused: u64,
    /// Connections closed for a bad token, incarnation, version or certificate, or for taking too long over it.
    pub greetings_refused: u64,
    /// Connections closed because a limit was reached.
    pub connections_refused: u64,
    /// Connections closed because the reader broke the protocol.
    pub protocol_errors: u64,
    /// Connections closed because they were idle or stalled for too long.
    pub timeouts: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub connections: AtomicUsize,
    pub greetings: AtomicUsize,
    pub objects_sent: AtomicU64,
    pub bytes_sent: AtomicU64,
    pub requests_refused: AtomicU64,
    pub greetings_refused: AtomicU64,
    pub connections_refused: AtomicU64,
    pub protocol_errors: AtomicU64,
    pub timeouts: AtomicU64,
}

/// What all I/O threads of a server share.
pub(crate) struct Shared {
    pub memory: Arc<dyn Served>,
    pub tokens: Arc<TokenStore>,
    pub incarnation: u64,
    pub options: ServerOptions,
    pub counters: Counters,
    pub stop: AtomicBool,
    pub inboxes: Vec<Inbox>,
}

/// Hands accepted sockets to an I/O thread, and wakes it.
pub(crate) struct Inbox {
    pub sockets: Mutex<Vec<OwnedFd>>,
    pub wake: OwnedFd,
}

impl Inbox {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            sockets: Mutex::new(Vec::new()),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        })
    }

    pub(crate) fn wake(&self) {
        // A full counter means that the thread is about to wake anyway.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }
}

/// Serves an owner's memory to readers until it is dropped.
pub struct TcpServer {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    address: SocketAddr,
}

impl fmt::Debug for TcpServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpServer({}, {:?})", self.address, self.stats())
    }
}

impl TcpServer {
    /// Listens on `address` (port 0 takes a free one) and serves `memory`.
    ///
    /// # Errors
    /// [`ServeError`]; a port in use is told apart and named.
    pub fn start(
        address: SocketAddr,
        memory: Arc<dyn Served>,
        tokens: Arc<TokenStore>,
        incarnation: u64,
        options: ServerOptions,
    ) -> Result<Self, ServeError> {
        let listener = socket::listen(address).map_err(|source| match source.kind() {
            std::io::ErrorKind::AddrInUse => ServeError::AddressInUse(address),
            _ => ServeError::Listen { address, source },
        })?;
        Self::with_socket(listener, memory, tokens, incarnation, options)
    }

    /// Serves `memory` on a socket that listens already, for callers that bind early.
    ///
    /// # Errors
    /// [`ServeError`].
    pub fn with_listener(
        listener: std::net::TcpListener,
        memory: Arc<dyn Served>,
        tokens: Arc<TokenStore>,
        incarnation: u64,
        options: ServerOptions,
    ) -> Result<Self, ServeError> {
        listener.set_nonblocking(true)?;
        Self::with_socket(listener.into(), memory, tokens, incarnation, options)
    }

    fn with_socket(
        listener: Socket,
        memory: Arc<dyn Served>,
        tokens: Arc<TokenStore>,
        incarnation: u64,
        options: ServerOptions,
    ) -> Result<Self, ServeError> {
        if options.threads == 0 || options.threads > limits::THREADS_MAX {
            return Err(ServeError::Option("I/O threads"));
        }
        if options.connections_max == 0 {
            return Err(ServeError::Option("connections"));
        }
        let address = listener
            .local_addr()?
            .as_socket()
            .ok_or_else(|| std::io::Error::from(std::io::ErrorKind::Unsupported))?;
        let inboxes = (0..options.threads).map(|_| Inbox::new()).collect::<Result<Vec<_>, _>>()?;
        let threads = options.threads;
        let shared = Arc::new(Shared {
            memory,
            tokens,
            incarnation,
            options,
            counters: Counters::default(),
            stop: AtomicBool::new(false),
            inboxes,
        });
        let mut server = Self { shared, threads: Vec::with_capacity(threads), address };
        let mut listener = Some(listener);
        for index in 0..threads {
            // The first thread accepts and deals the sockets out in turn.
            let worker = worker::Worker::new(Arc::clone(&server.shared), index, listener.take())?;
            let name = format!("kvfabric-tcp-{index}");
            server.threads.push(std::thread::Builder::new().name(name).spawn(move || worker.run())?);
        }
        Ok(server)
    }

    /// Where it listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> ServerStats {
        let counters = &self.shared.counters;
        ServerStats {
            connections: counters.connections.load(Ordering::Relaxed),
            objects_sent: counters.objects_sent.load(Ordering::Relaxed),
            bytes_sent: counters.bytes_sent.load(Ordering::Relaxed),
            requests_refused: counters.requests_refused.load(Ordering::Relaxed),
            greetings_refused: counters.greetings_refused.load(Ordering::Relaxed),
            connections_refused: counters.connections_refused.load(Ordering::Relaxed),
            protocol_errors: counters.protocol_errors.load(Ordering::Relaxed),
            timeouts: counters.timeouts.load(Ordering::Relaxed),
        }
    }
}

impl Drop for TcpServer {
    /// Closes the listener and every connection, and waits for the threads: afterwards nothing reads the memory.
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        for inbox in &self.shared.inboxes {
            inbox.wake();
        }
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!("an I/O thread of the data server had panicked");
            }
        }
    }
}
