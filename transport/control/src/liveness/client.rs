//! The rank's side: one thread that pings and listens.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{LivenessError, Ticket, PING, PONG, WELCOME};
use crate::limits::{LIVENESS_CONNECT_TIMEOUT, PEER_TIMEOUT, PING_INTERVAL};

/// Settings of the rank's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientConfig {
    /// Time between pings.
    pub interval: Duration,
    /// A ping that is not answered within this time means that the directory is stopped or cut off.
    pub timeout: Duration,
    /// Limit of connecting and showing the ticket.
    pub connect_timeout: Duration,
}

impl Default for ClientConfig {
    fn default() -> Self {
        Self { interval: PING_INTERVAL, timeout: PEER_TIMEOUT, connect_timeout: LIVENESS_CONNECT_TIMEOUT }
    }
}

impl ClientConfig {
    /// Settings that go with a peer timeout (`KVFABRIC_PEER_TIMEOUT_MS`): four pings within it.
    #[must_use]
    pub fn for_peer_timeout(timeout: Duration) -> Self {
        Self { interval: (timeout / 4).max(Duration::from_millis(1)), timeout, ..Self::default() }
    }
}

/// Why a liveness connection ended from the rank's point of view. The rank joins again, with a new ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// The directory's process died, or closed the connection because this rank was fenced or too slow.
    Closed,
    /// The directory does not answer pings.
    Silent,
    /// The other side sent what a directory never sends.
    Garbage,
}

/// An open liveness connection. Dropping it closes the connection, which the directory takes as the end of this process.
#[derive(Debug)]
pub struct LivenessClient {
    address: SocketAddr,
    stopped: Arc<AtomicBool>,
    stream: TcpStream,
    thread: Option<JoinHandle<()>>,
}

impl LivenessClient {
    /// Connects, shows `ticket` and starts pinging. Blocks, at most `config.connect_timeout`. `on_lost` is called once
    /// on the client's thread when the connection is lost, never after the client was dropped.
    ///
    /// # Errors
    /// [`LivenessError`].
    pub fn connect(
        address: SocketAddr,
        ticket: Ticket,
        config: ClientConfig,
        on_lost: impl FnOnce(Lost) + Send + 'static,
    ) -> Result<Self, LivenessError> {
        let stream = introduce(address, ticket, config.connect_timeout)?;
        let reader = stream.try_clone().map_err(LivenessError::io("share the socket"))?;
        let stopped = Arc::new(AtomicBool::new(false));
        let thread = std::thread::Builder::new()
            .name("kvf-liveness".to_owned())
            .spawn({
                let stopped = Arc::clone(&stopped);
                move || {
                    let lost = Pinger::new(reader, config).run(&stopped);
                    if let Some(lost) = lost.filter(|_| !stopped.load(Ordering::Acquire)) {
                        on_lost(lost);
                    }
                }
            })
            .map_err(LivenessError::io("start a thread"))?;
        Ok(Self { address, stopped, stream, thread: Some(thread) })
    }

    /// The directory's liveness address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for LivenessClient {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::Release);
        // Wakes the thread; fails only if the connection is gone, and then the thread is awake already.
        let _ = self.stream.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // `on_lost` may own and drop this client: a thread cannot wait for itself.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// Connects and exchanges the ticket for a welcome.
fn introduce(address: SocketAddr, ticket: Ticket, timeout: Duration) -> Result<TcpStream, LivenessError> {
    let connect_error = |error: std::io::Error| match error.kind() {
        ErrorKind::TimedOut | ErrorKind::WouldBlock => LivenessError::Timeout { address, timeout },
        kind => LivenessError::Connect { address, kind },
    };
    let started = Instant::now();
    let mut stream = TcpStream::connect_timeout(&address, timeout).map_err(connect_error)?;
    let left = timeout.saturating_sub(started.elapsed()).max(Duration::from_millis(1));
    stream.set_nodelay(true).map_err(LivenessError::io("set TCP_NODELAY"))?;
    stream.set_write_timeout(Some(left)).map_err(LivenessError::io("set a time limit"))?;
    stream.set_read_timeout(Some(left)).map_err(LivenessError::io("set a time limit"))?;
    stream.write_all(&ticket.to_bytes()).map_err(connect_error)?;
    let mut answer = [0u8; 1];
    match stream.read_exact(&mut answer) {
        Ok(()) if answer == [WELCOME] => Ok(stream),
        Ok(()) => Err(LivenessError::Refused { address }),
        Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => {
            Err(LivenessError::Refused { address })
        }
        Err(error) => Err(connect_error(error)),
    }
}

struct Pinger {
    stream: TcpStream,
    config: ClientConfig,
    next_ping: Instant,
    /// When the oldest ping was sent that has no answer yet.
    unanswered_since: Option<Instant>,
    unanswered: u64,
}

impl Pinger {
    fn new(stream: TcpStream, config: ClientConfig) -> Self {
        Self { stream, config, next_ping: Instant::now(), unanswered_since: None, unanswered: 0 }
    }

    /// Pings until the connection is lost, or `None` when stopped.
    fn run(mut self, stopped: &AtomicBool) -> Option<Lost> {
        loop {
            if stopped.load(Ordering::Acquire) {
                return None;
            }
            if let Some(lost) = self.ping_if_due().or_else(|| self.read_answers()) {
                return Some(lost);
            }
            // Judged after reading: a process that was stopped itself finds its answers waiting.
            let silent = |since: Instant| since.elapsed() > self.config.timeout;
            if self.unanswered_since.is_some_and(silent) {
                return Some(Lost::Silent);
            }
        }
    }

    fn ping_if_due(&mut self) -> Option<Lost> {
        let now = Instant::now();
        if now < self.next_ping {
            return None;
        }
        // A missed interval is not made up for: one ping says all there is to say.
        self.next_ping = now + self.config.interval;
        match self.stream.write(&[PING]) {
            Ok(_) => {
                self.unanswered += 1;
                self.unanswered_since.get_or_insert(now);
                None
            }
            // A full socket buffer: the directory has not read for long, which its silence will show.
            Err(error) if is_transient(error.kind()) => None,
            Err(_) => Some(Lost::Closed),
        }
    }

    /// Waits for answers until the next ping is due.
    fn read_answers(&mut self) -> Option<Lost> {
        let wait = self.next_ping.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        if self.stream.set_read_timeout(Some(wait)).is_err() {
            return Some(Lost::Closed);
        }
        let mut answers = [0u8; 64];
        match self.stream.read(&mut answers) {
            Ok(0) => Some(Lost::Closed),
            Ok(count) => {
                if answers.iter().take(count).any(|byte| *byte != PONG) {
                    return Some(Lost::Garbage);
                }
                let count = u64::try_from(count).unwrap_or(u64::MAX);
                if count > self.unanswered {
                    return Some(Lost::Garbage);
                }
                self.unanswered -= count;
                // Later pings of several under way were sent after the oldest; from now is close enough.
                self.unanswered_since = (self.unanswered > 0).then(Instant::now);
                None
            }
            Err(error) if is_transient(error.kind()) => None,
            Err(_) => Some(Lost::Closed),
        }
    }
}

fn is_transient(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
