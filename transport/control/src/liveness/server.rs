//! The directory's side: one thread for all ranks.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{eventfd, EventfdFlags, Timespec};

use super::{LivenessError, LivenessId, Ticket, PING, PONG, WELCOME};
use crate::error::BindError;
use crate::limits::{
    LIVENESS_CONNECTIONS_MAX, LIVENESS_PROVE_TIMEOUT, LIVENESS_READ_BYTES_MAX, LIVENESS_SILENT_MAX,
    LIVENESS_UNPROVEN_MAX, PEER_TIMEOUT, TICKETS_MAX, TICKET_BYTES, TICKET_LIFETIME,
};
use crate::socket;

/// epoll's data for the listener and the waker; connections count from 2.
const LISTENER: u64 = 0;
const WAKER: u64 = 1;
const FIRST_CONNECTION: u64 = 2;
/// Events taken from the kernel at once.
const EVENTS: usize = 256;
/// Rounds of events taken before time limits are looked at, so that a flood cannot put them off.
const ROUNDS: usize = 64;

/// Settings of the directory's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Without ping for this long a rank counts as missing (`KVFABRIC_PEER_TIMEOUT_MS`).
    pub peer_timeout: Duration,
    /// A ticket expires after this long.
    pub ticket_lifetime: Duration,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self { peer_timeout: PEER_TIMEOUT, ticket_lifetime: TICKET_LIFETIME }
    }
}

/// Why a liveness connection ended from the directory's point of view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// The rank's process ended, or closed the connection.
    Peer,
    /// The rank sent what a rank never sends.
    Garbage,
    /// Nothing was heard for so long that the host must be gone.
    Silent,
    /// The directory asked for it.
    Local,
}

/// What happened to a ticket or its connection. For one id: `Unclaimed` alone, or `Alive`, then `Missed` and `Answering`
/// in turn, then `Closed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LivenessEvent {
    /// The ticket was shown: the rank is connected.
    Alive(LivenessId),
    /// No ping for the peer timeout.
    Missed(LivenessId),
    /// Pings are back.
    Answering(LivenessId),
    /// The connection ended.
    Closed(LivenessId, Closed),
    /// The ticket expired without being shown.
    Unclaimed(LivenessId),
}

type Sink = Box<dyn FnMut(LivenessEvent) + Send>;

/// Listens for ranks. Dropping it closes all connections without events.
#[derive(Debug)]
pub struct LivenessServer {
    local: SocketAddr,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    waker: OwnedFd,
    ticket_lifetime: Duration,
}

#[derive(Debug, Default)]
struct State {
    next_id: u64,
    tickets: HashMap<Ticket, LivenessId>,
    expiries: BTreeMap<LivenessId, (Instant, Ticket)>,
    disconnects: Vec<LivenessId>,
    stopped: bool,
}

impl State {
    fn insert(&mut self, ticket: Ticket, lifetime: Duration) -> LivenessId {
        self.next_id += 1;
        let id = LivenessId(self.next_id);
        self.tickets.insert(ticket, id);
        self.expiries.insert(id, (Instant::now() + lifetime, ticket));
        id
    }
}

impl Shared {
    /// The state is valid between any two statements, so a panic elsewhere does not spoil it.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        // An event counter that is full wakes the thread as well.
        let _ = rustix::io::write(&self.waker, &1u64.to_ne_bytes());
    }
}

impl LivenessServer {
    /// Listens on TCP `address`. `sink` is called on the server's thread and must not block.
    ///
    /// # Errors
    /// [`BindError`], which names the address and the remedy.
    pub fn bind(
        address: SocketAddr,
        config: ServerConfig,
        sink: impl FnMut(LivenessEvent) + Send + 'static,
    ) -> Result<Self, BindError> {
        let listener = socket::bind_tcp(address)?;
        Self::start(listener, config, sink).map_err(|error| match error {
            LivenessError::Io { action, kind } => BindError::Io { protocol: "TCP", address, action, kind },
            _ => BindError::Io { protocol: "TCP", address, action: "start", kind: ErrorKind::Other },
        })
    }

    /// As [`LivenessServer::bind`], with a listener that is bound already, such as the one of
    /// [`Endpoint::bind_with_liveness`](crate::Endpoint::bind_with_liveness).
    ///
    /// # Errors
    /// [`LivenessError::Io`].
    pub fn start(
        listener: TcpListener,
        config: ServerConfig,
        sink: impl FnMut(LivenessEvent) + Send + 'static,
    ) -> Result<Self, LivenessError> {
        let local = listener.local_addr().map_err(LivenessError::io("read the listener's address"))?;
        listener.set_nonblocking(true).map_err(LivenessError::io("make the listener non-blocking"))?;
        let system = |action| move |errno: rustix::io::Errno| LivenessError::io(action)(errno.into());
        let waker =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(system("create a waker"))?;
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(system("create an epoll"))?;
        epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)
            .map_err(system("use epoll"))?;
        epoll::add(&epoll, &waker, EventData::new_u64(WAKER), EventFlags::IN).map_err(system("use epoll"))?;
        let state = Mutex::new(State::default());
        let shared = Arc::new(Shared { state, waker, ticket_lifetime: config.ticket_lifetime });
        let worker = Worker {
            epoll,
            listener,
            shared: Arc::clone(&shared),
            peer_timeout: config.peer_timeout,
            sink: Box::new(sink),
            connections: BTreeMap::new(),
            by_id: HashMap::new(),
            unproven: 0,
            next_key: FIRST_CONNECTION,
        };
        let thread = std::thread::Builder::new()
            .name("kvf-liveness".to_owned())
            .spawn(move || worker.run())
            .map_err(LivenessError::io("start a thread"))?;
        Ok(Self { local, shared, thread: Some(thread) })
    }

    /// The TCP address that it listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// A new ticket, for one connection, within its lifetime.
    ///
    /// # Errors
    /// [`LivenessError::TooManyTickets`], or [`LivenessError::Random`].
    pub fn issue(&self) -> Result<(LivenessId, Ticket), LivenessError> {
        let ticket = Ticket::random()?;
        let mut state = self.shared.lock();
        if state.tickets.len() >= TICKETS_MAX {
            return Err(LivenessError::TooManyTickets { limit: TICKETS_MAX });
        }
        let id = state.insert(ticket, self.shared.ticket_lifetime);
        Ok((id, ticket))
    }

    /// As [`LivenessServer::issue`], with a ticket that the caller made from a secret random number.
    ///
    /// # Errors
    /// [`LivenessError::TooManyTickets`], also when the ticket waits already.
    pub fn issue_ticket(&self, ticket: Ticket) -> Result<LivenessId, LivenessError> {
        let mut state = self.shared.lock();
        if state.tickets.len() >= TICKETS_MAX || state.tickets.contains_key(&ticket) {
            return Err(LivenessError::TooManyTickets { limit: TICKETS_MAX });
        }
        Ok(state.insert(ticket, self.shared.ticket_lifetime))
    }

    /// Ends a connection, or makes its ticket void, as for a rank that was fenced. A connection reports
    /// [`Closed::Local`], a ticket nothing.
    pub fn disconnect(&self, id: LivenessId) {
        let mut state = self.shared.lock();
        if let Some((_, ticket)) = state.expiries.remove(&id) {
            state.tickets.remove(&ticket);
            return;
        }
        state.disconnects.push(id);
        drop(state);
        self.shared.wake();
    }
}

impl Drop for LivenessServer {
    fn drop(&mut self) {
        self.shared.lock().stopped = true;
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // The sink may own and drop this server: a thread cannot wait for itself.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// How far a connection has come.
#[derive(Debug)]
enum Stage {
    Unproven { until: Instant, shown: [u8; TICKET_BYTES], length: usize },
    Proven { id: LivenessId, heard_at: Instant, answering: bool },
}

#[derive(Debug)]
struct Peer {
    stream: TcpStream,
    stage: Stage,
}

struct Worker {
    epoll: OwnedFd,
    listener: TcpListener,
    shared: Arc<Shared>,
    peer_timeout: Duration,
    sink: Sink,
    connections: BTreeMap<u64, Peer>,
    by_id: HashMap<LivenessId, u64>,
    unproven: usize,
    next_key: u64,
}

impl Worker {
    fn run(mut self) {
        let tick = (self.peer_timeout / 8).clamp(Duration::from_millis(5), Duration::from_millis(100));
        let mut events = Vec::with_capacity(EVENTS);
        loop {
            // All that the kernel holds is taken before time limits are judged: after this process itself was stopped,
            // the ranks' pings lie in the socket buffers.
            let mut wait = tick;
            for _ in 0..ROUNDS {
                events.clear();
                let timeout = Timespec {
                    tv_sec: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
                    tv_nsec: wait.subsec_nanos().into(),
                };
                match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(errno) => {
                        tracing::error!(%errno, "liveness: waiting for events failed, peers are no longer watched");
                        return;
                    }
                }
                if events.is_empty() {
                    break;
                }
                for event in &events {
                    match event.data.u64() {
                        LISTENER => self.accept(),
                        WAKER => self.drain_waker(),
                        key => self.handle_readable(key),
                    }
                }
                wait = Duration::ZERO;
            }
            if self.obey() {
                return;
            }
            self.judge(Instant::now());
        }
    }

    fn drain_waker(&self) {
        let mut count = [0u8; 8];
        // Nothing to read means that it was drained already.
        let _ = rustix::io::read(&self.shared.waker, &mut count);
    }

    /// Carries out what other threads asked for; true to stop.
    fn obey(&mut self) -> bool {
        let (stopped, disconnects) = {
            let mut state = self.shared.lock();
            (state.stopped, std::mem::take(&mut state.disconnects))
        };
        for id in disconnects {
            if let Some(key) = self.by_id.get(&id).copied() {
                self.close(key, Closed::Local);
            }
        }
        stopped
    }

    fn accept(&mut self) {
        loop {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) => {
                    // Out of descriptors, or the peer is gone again: the listener stays readable if there is more.
                    tracing::warn!(%error, "liveness: accept failed");
                    std::thread::sleep(Duration::from_millis(1));
                    return;
                }
            };
            if self.connections.len() >= LIVENESS_CONNECTIONS_MAX || self.unproven >= LIVENESS_UNPROVEN_MAX {
                tracing::debug!("liveness: connection limit reached");
                continue;
            }
            if let Err(error) = self.add(stream) {
                tracing::warn!(%error, "liveness: cannot watch a connection");
            }
        }
    }

    fn add(&mut self, stream: TcpStream) -> io::Result<()> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let key = self.next_key;
        self.next_key += 1;
        epoll::add(&self.epoll, &stream, EventData::new_u64(key), EventFlags::IN | EventFlags::RDHUP)?;
        let until = Instant::now() + LIVENESS_PROVE_TIMEOUT;
        let stage = Stage::Unproven { until, shown: [0; TICKET_BYTES], length: 0 };
        self.connections.insert(key, Peer { stream, stage });
        self.unproven += 1;
        Ok(())
    }

    /// Reads what a connection holds. Its key may be of one that ended in this very round.
    fn handle_readable(&mut self, key: u64) {
        let mut budget = LIVENESS_READ_BYTES_MAX;
        loop {
            let Some(peer) = self.connections.get_mut(&key) else { return };
            let mut bytes = [0u8; 64];
            // An unproven peer is read to the end of its ticket and no further.
            let want = match &peer.stage {
                Stage::Unproven { length, .. } => TICKET_BYTES - length,
                Stage::Proven { .. } => bytes.len(),
            };
            let count = match peer.stream.read(&mut bytes[..want.min(64)]) {
                Ok(0) => return self.close(key, Closed::Peer),
                Ok(count) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => return self.close(key, Closed::Peer),
            };
            let received = bytes.get(..count).unwrap_or_default();
            let problem = match peer.stage {
                Stage::Unproven { .. } => self.handle_ticket_bytes(key, received),
                Stage::Proven { .. } => self.handle_pings(key, received),
            };
            if let Err(problem) = problem {
                return self.close(key, problem);
            }
            budget = budget.saturating_sub(count);
            if budget == 0 {
                return self.close(key, Closed::Garbage);
            }
        }
    }

    fn handle_ticket_bytes(&mut self, key: u64, received: &[u8]) -> Result<(), Closed> {
        let Some(Peer { stream, stage: stage @ Stage::Unproven { .. } }) = self.connections.get_mut(&key)
        else {
            return Ok(());
        };
        let Stage::Unproven { shown, length, .. } = stage else { return Ok(()) };
        let end = *length + received.len();
        shown.get_mut(*length..end).ok_or(Closed::Garbage)?.copy_from_slice(received);
        *length = end;
        if end < TICKET_BYTES {
            return Ok(());
        }
        let ticket = Ticket::from_bytes(*shown);
        let id = {
            let mut state = self.shared.lock();
            let id = state.tickets.remove(&ticket).ok_or(Closed::Garbage)?;
            state.expiries.remove(&id);
            id
        };
        // An empty socket buffer takes one byte; if not, the peer is gone.
        let welcomed = stream.write(&[WELCOME]);
        *stage = Stage::Proven { id, heard_at: Instant::now(), answering: true };
        self.unproven -= 1;
        self.by_id.insert(id, key);
        (self.sink)(LivenessEvent::Alive(id));
        welcomed.map(|_| ()).map_err(|_| Closed::Peer)
    }

    fn handle_pings(&mut self, key: u64, received: &[u8]) -> Result<(), Closed> {
        let Some(peer) = self.connections.get_mut(&key) else { return Ok(()) };
        let Stage::Proven { id, heard_at, answering } = &mut peer.stage else { return Ok(()) };
        if received.iter().any(|byte| *byte != PING) {
            return Err(Closed::Garbage);
        }
        *heard_at = Instant::now();
        if !std::mem::replace(answering, true) {
            (self.sink)(LivenessEvent::Answering(*id));
        }
        let answers = [PONG; 64];
        match peer.stream.write(answers.get(..received.len()).unwrap_or(&answers)) {
            Ok(_) => Ok(()),
            // The rank does not read its answers: it will call us silent, and that is its affair.
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(()),
            Err(_) => Err(Closed::Peer),
        }
    }

    /// Applies the time limits.
    fn judge(&mut self, now: Instant) {
        let mut ended = Vec::new();
        for (key, peer) in &mut self.connections {
            match &mut peer.stage {
                Stage::Unproven { until, .. } if now >= *until => ended.push((*key, Closed::Garbage)),
                Stage::Unproven { .. } => {}
                Stage::Proven { id, heard_at, answering } => {
                    let silent = now.saturating_duration_since(*heard_at);
                    if silent >= LIVENESS_SILENT_MAX {
                        ended.push((*key, Closed::Silent));
                    } else if silent >= self.peer_timeout && *answering {
                        *answering = false;
                        (self.sink)(LivenessEvent::Missed(*id));
                    }
                }
            }
        }
        for (key, reason) in ended {
            self.close(key, reason);
        }
        self.expire_tickets(now);
    }

    fn expire_tickets(&mut self, now: Instant) {
        let mut expired = Vec::new();
        {
            let mut state = self.shared.lock();
            // Ids and expiries rise together, because every ticket lives equally long.
            while let Some(first) = state.expiries.first_entry().filter(|first| first.get().0 <= now) {
                let (id, (_, ticket)) = first.remove_entry();
                state.tickets.remove(&ticket);
                expired.push(id);
            }
        }
        for id in expired {
            (self.sink)(LivenessEvent::Unclaimed(id));
        }
    }

    fn close(&mut self, key: u64, reason: Closed) {
        let Some(peer) = self.connections.remove(&key) else { return };
        match peer.stage {
            Stage::Unproven { .. } => self.unproven -= 1,
            Stage::Proven { id, .. } => {
                self.by_id.remove(&id);
                (self.sink)(LivenessEvent::Closed(id, reason));
            }
        }
        // Dropping the stream closes the socket, which takes it out of the epoll as well.
    }
}
