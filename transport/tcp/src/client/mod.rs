//! The reader's side: a provider that one thread drives by post and poll.

mod connection;
mod landing;
mod options;
mod resolve;

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfabric_memory::MemoryKind;
use kvfabric_transport_api::{
    ConnectError, Event, OpToken, PeerKey, PeerTarget, PostError, Provider, ReadDone, ReadError, ReadOp, Wake,
};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{eventfd, EventfdFlags, Timespec};
use rustls::pki_types::ServerName;

use self::connection::{Connection, Fault};
pub use self::options::{ProviderOptions, StartError, TlsClient};
use self::resolve::Resolver;
use crate::limits;
use crate::socket::{self, IoVec};
use crate::stream::Stream;
use crate::wire::Hello;

/// Events taken from the kernel at once.
const EVENTS: usize = 64;
/// With at most this many connections at work, a poll asks each socket at once instead of asking epoll first.
const DIRECT_POLL_MAX: usize = 4;
/// A poll that asks sockets directly looks at the others, and at its timers, once in this many.
const LOOK_AROUND_INTERVAL: u32 = 64;
const WAKE: u64 = u64::MAX;

#[derive(Debug)]
struct Waker(OwnedFd);

impl Wake for Waker {
    fn wake(&self) {
        // A full counter means that a wake is pending anyway.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }
}

#[derive(Default)]
struct Place {
    used: u32,
    connection: Option<Connection>,
}

struct Peer {
    target: PeerTarget,
    /// Addresses not tried yet, last first.
    addresses: Vec<SocketAddr>,
    /// Places of its connections; empty while the host name is being resolved.
    connections: Vec<usize>,
    ready: usize,
    up: bool,
    deadline: Instant,
}

/// Reads from owners over TCP. Belongs to one thread.
pub struct TcpProvider {
    options: ProviderOptions,
    epoll: OwnedFd,
    waker: Arc<Waker>,
    peers: HashMap<PeerKey, Peer>,
    /// Peers that are not up yet.
    connecting: usize,
    places: Vec<Place>,
    free: Vec<usize>,
    /// Connections with something to do.
    ready: VecDeque<usize>,
    /// Connections whose replies are due.
    busy: Vec<usize>,
    /// Where each operation in flight is.
    ops: HashMap<OpToken, usize>,
    /// What happened outside of poll.
    pending: Vec<Event>,
    resolver: Resolver,
    vectors: Vec<IoVec>,
    sink: Box<[u8]>,
    /// A wake was taken back and not reported by `poll` yet.
    woken: bool,
    polls: u32,
}

impl fmt::Debug for TcpProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TcpProvider({} peers, {} reads in flight)", self.peers.len(), self.ops.len())
    }
}

fn name(index: usize, used: u32) -> u64 {
    (u64::from(used) << 32) | (index as u64 & 0xffff_ffff)
}

impl TcpProvider {
    /// A provider without peers.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn new(options: ProviderOptions) -> Result<Self, StartError> {
        if !(1..=limits::CONNECTIONS_PER_PEER_MAX).contains(&options.connections_per_peer) {
            return Err(StartError::Option("connections per peer"));
        }
        if !(1..=limits::REQUESTS_QUEUED_MAX).contains(&options.requests_in_flight) {
            return Err(StartError::Option("requests in flight"));
        }
        let epoll = epoll::create(CreateFlags::CLOEXEC).map_err(std::io::Error::from)?;
        let waker =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(std::io::Error::from)?;
        epoll::add(&epoll, &waker, EventData::new_u64(WAKE), EventFlags::IN).map_err(std::io::Error::from)?;
        let waker = Arc::new(Waker(waker));
        Ok(Self {
            options,
            epoll,
            resolver: Resolver::new(Arc::clone(&waker) as Arc<dyn Wake>),
            waker,
            peers: HashMap::new(),
            connecting: 0,
            places: Vec::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            busy: Vec::new(),
            ops: HashMap::new(),
            pending: Vec::new(),
            vectors: Vec::with_capacity(limits::IO_VECTORS_MAX),
            sink: vec![0; limits::SINK_BYTES].into_boxed_slice(),
            woken: false,
            polls: 0,
        })
    }

    fn refuse_connect(&mut self, peer: PeerKey, error: ConnectError) {
        self.pending.push(Event::ConnectFailed { peer, error });
    }

    /// Opens the peer's connections to its next address, or to the first after it that can be tried at all.
    fn open(&mut self, key: PeerKey, now: Instant) -> Result<(), ConnectError> {
        let mut error = ConnectError::Unreachable("the host name has no address".to_owned());
        while let Some(address) = self.peers.get_mut(&key).and_then(|peer| peer.addresses.pop()) {
            match self.open_at(key, address, now) {
                Ok(()) => return Ok(()),
                Err(found) => error = found,
            }
            if let Some(peer) = self.peers.get_mut(&key) {
                let opened = std::mem::take(&mut peer.connections);
                self.close_connections(&opened, &|| ReadError::PeerLost(String::new()));
            }
        }
        Err(error)
    }

    fn open_at(&mut self, key: PeerKey, address: SocketAddr, now: Instant) -> Result<(), ConnectError> {
        let Some(peer) = self.peers.get(&key) else { return Ok(()) };
        let tokens: Vec<_> =
            peer.target.tcp_tokens.iter().take(self.options.connections_per_peer).copied().collect();
        let incarnation = peer.target.incarnation;
        let host = peer.target.tcp_address.as_deref().unwrap_or_default().to_owned();
        for token in tokens {
            let local = |error: std::io::Error| ConnectError::LocalShortage(error.to_string());
            let socket = socket::begin_connect(address, self.options.socket_buffer_bytes)
                .map_err(|error| connect_error(address, &error))?;
            let stream = match &self.options.tls {
                None => Stream::plain(socket),
                Some(tls) => {
                    let name = tls.server_name.clone().map_or_else(|| host_name(&host), Ok)?;
                    let session = rustls::ClientConnection::new(Arc::clone(&tls.config), name)
                        .map_err(|error| ConnectError::LocalShortage(format!("TLS: {error}")))?;
                    Stream::tls(socket, session.into())
                }
            };
            let index = self.free.pop().unwrap_or_else(|| {
                self.places.push(Place::default());
                self.places.len() - 1
            });
            let Some(place) = self.places.get_mut(index) else { continue };
            let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
            let data = EventData::new_u64(name(index, place.used));
            if let Err(error) = epoll::add(&self.epoll, stream.fd(), data, flags) {
                self.free.push(index);
                return Err(local(error.into()));
            }
            place.connection = Some(Connection::new(key, stream, Hello { token, incarnation }, now));
            if let Some(peer) = self.peers.get_mut(&key) {
                peer.connections.push(index);
            }
        }
        Ok(())
    }

    /// Closes the peer's connections. Their operations retire with what `outcome` says.
    fn close_connections(&mut self, indexes: &[usize], outcome: &dyn Fn() -> ReadError) {
        for &index in indexes {
            let Some(place) = self.places.get_mut(index) else { continue };
            let Some(mut connection) = place.connection.take() else { continue };
            place.used = place.used.wrapping_add(1);
            for op in connection.take_ops() {
                self.pending.push(Event::Read(ReadDone {
                    token: op.token,
                    destination: op.destination,
                    outcome: Err(outcome()),
                }));
            }
            if let Some(at) = connection.busy_at {
                self.leave_busy(at);
            }
            self.free.push(index);
            // Dropping the stream closes the socket, which takes it out of the epoll set.
        }
    }

    fn leave_busy(&mut self, at: usize) {
        if at >= self.busy.len() {
            return;
        }
        self.busy.swap_remove(at);
        if let Some(&moved) = self.busy.get(at) {
            if let Some(connection) = self.connection(moved) {
                connection.busy_at = Some(at);
            }
        }
    }

    /// With many connections at work only epoll tells which has something, so it must tell early: a connection that
    /// asked to be woken late would keep its last bytes to itself. Called for each connection that joins in.
    fn look_through_epoll(&mut self) {
        let first = match self.busy.len() {
            0..=DIRECT_POLL_MAX => return,
            length if length == DIRECT_POLL_MAX + 1 => 0,
            length => length - 1,
        };
        for at in first..self.busy.len() {
            let Some(&index) = self.busy.get(at) else { return };
            if let Some(connection) = self.connection(index) {
                connection.wake_early();
            }
        }
    }

    fn connection(&mut self, index: usize) -> Option<&mut Connection> {
        self.places.get_mut(index)?.connection.as_mut()
    }

    fn enqueue(&mut self, index: usize) {
        let Some(connection) = self.connection(index) else { return };
        if !connection.queued {
            connection.queued = true;
            self.ready.push_back(index);
        }
    }

    /// A connection failed, and its peer with it; or the peer's next address is tried.
    fn fail(&mut self, key: PeerKey, fault: &Fault, now: Instant) {
        let Some(peer) = self.peers.get_mut(&key) else { return };
        let indexes = std::mem::take(&mut peer.connections);
        peer.ready = 0;
        let (up, retry) = (peer.up, matches!(fault, Fault::Connect { elsewhere: true, .. }));
        let retry = retry && !up && !peer.addresses.is_empty() && now < peer.deadline;
        self.close_connections(&indexes, &|| fault.read_error());
        if retry {
            match self.open(key, now) {
                Ok(()) => return,
                Err(error) => return self.give_up(key, error),
            }
        }
        if up {
            self.peers.remove(&key);
            self.pending.push(Event::Disconnected { peer: key, reason: fault.reason() });
        } else {
            self.give_up(key, fault.connect_error());
        }
    }

    /// A peer that was not up yet is given up.
    fn give_up(&mut self, key: PeerKey, error: ConnectError) {
        if let Some(peer) = self.peers.remove(&key) {
            self.close_connections(&peer.connections, &|| ReadError::PeerLost(String::new()));
            self.connecting -= 1;
            self.refuse_connect(key, error);
        }
    }

    /// Takes what the kernel has to say, waiting up to `wait` for it.
    fn gather(&mut self, wait: Duration) {
        let timeout = Timespec::try_from(wait).unwrap_or(Timespec { tv_sec: 3600, tv_nsec: 0 });
        let mut buffer = [const { MaybeUninit::uninit() }; EVENTS];
        // An interrupted wait is an early return; any other failure would mean a bad descriptor, which is ours alone.
        let Ok((events, _)) = epoll::wait(&self.epoll, &mut buffer, Some(&timeout)) else { return };
        for event in events {
            let (flags, data) = (event.flags, event.data);
            let named = data.u64();
            if named == WAKE {
                let _ = rustix::io::read(&self.waker.0, &mut [0; 8]);
                self.woken = true;
                continue;
            }
            let index = (named & 0xffff_ffff) as usize;
            let Some(place) = self.places.get_mut(index) else { continue };
            if name(index, place.used) != named {
                continue;
            }
            if let Some(connection) = &mut place.connection {
                let ended = flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
                connection.mark(flags.contains(EventFlags::IN), flags.contains(EventFlags::OUT), ended);
                self.enqueue(index);
            }
        }
    }

    /// Does what can be done on one connection. Afterwards it is in the ready queue iff there may be more at once.
    fn serve(&mut self, index: usize, events: &mut Vec<Event>, now: Instant) {
        let Some(connection) = self.places.get_mut(index).and_then(|place| place.connection.as_mut()) else {
            return;
        };
        let key = connection.peer;
        connection.served = self.polls;
        let result = if connection.is_ready() {
            connection
                .flush()
                .and_then(|()| connection.receive(&mut self.vectors, &mut self.sink, events, now))
                .map(|()| false)
        } else {
            connection.advance()
        };
        let (more, idle) = (connection.is_ready() && connection.readable, !connection.is_busy());
        match result {
            Ok(became_ready) => {
                if idle {
                    if let Some(at) = connection.busy_at.take() {
                        self.leave_busy(at);
                    }
                }
                if more {
                    self.enqueue(index);
                }
                if became_ready {
                    self.one_more_ready(key);
                }
            }
            Err(fault) => self.fail(key, &fault, now),
        }
    }

    fn one_more_ready(&mut self, key: PeerKey) {
        let Some(peer) = self.peers.get_mut(&key) else { return };
        peer.ready += 1;
        if peer.ready == peer.connections.len() && !peer.up {
            peer.up = true;
            self.connecting -= 1;
            self.pending.push(Event::Connected { peer: key });
        }
    }

    /// Looks at deadlines of connecting peers and at stalled replies.
    fn check_timers(&mut self, now: Instant) {
        if self.connecting > 0 {
            let late: Vec<PeerKey> = self
                .peers
                .iter()
                .filter(|(_, peer)| !peer.up && now >= peer.deadline)
                .map(|(&key, _)| key)
                .collect();
            for key in late {
                self.give_up(key, ConnectError::Unreachable("no welcome in time".to_owned()));
            }
        }
        let limit = self.options.stall_timeout;
        let stalled = self.busy.iter().find_map(|&index| {
            let connection = self.places.get(index)?.connection.as_ref()?;
            connection.is_stalled(now, limit).then_some(connection.peer)
        });
        if let Some(key) = stalled {
            self.fail(key, &Fault::Lost(format!("no progress for {} ms", limit.as_millis())), now);
        }
    }

    fn take_resolved(&mut self, now: Instant) {
        while let Some((key, generation, result)) = self.resolver.take() {
            let Some(peer) = self.peers.get_mut(&key) else { continue };
            // An answer for an earlier connect of the same key, which was given up meanwhile.
            if peer.up || !peer.connections.is_empty() || !self.resolver.is_current(key, generation) {
                continue;
            }
            let outcome = match result {
                Ok(addresses) => {
                    peer.addresses = addresses;
                    peer.addresses.reverse();
                    self.open(key, now)
                }
                Err(error) => Err(ConnectError::Unreachable(error.to_string())),
            };
            if let Err(error) = outcome {
                self.give_up(key, error);
            }
        }
    }

    /// Forgets the reads that are being reported from here on.
    fn report(&mut self, events: &[Event]) {
        for event in events {
            if let Event::Read(done) = event {
                self.ops.remove(&done.token);
            }
        }
    }
}

fn connect_error(address: SocketAddr, error: &std::io::Error) -> ConnectError {
    match error.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
            ConnectError::LocalShortage(error.to_string())
        }
        _ => ConnectError::Unreachable(format!("{address}: {error}")),
    }
}

/// The host part of `HOST:PORT`, as a certificate names it.
fn host_name(address: &str) -> Result<ServerName<'static>, ConnectError> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    ServerName::try_from(host).map_err(|_| {
        ConnectError::Unreachable(format!("{address:?} is not a name that a certificate can bear"))
    })
}

impl Provider for TcpProvider {
    fn connect(&mut self, peer: PeerKey, target: PeerTarget) {
        // A key that is in use starts anew.
        self.disconnect(peer);
        let Some(address) = target.tcp_address.clone() else {
            return self.refuse_connect(peer, ConnectError::NoAddress);
        };
        if target.tcp_tokens.is_empty() {
            let error = ConnectError::Protocol("the peer issued no data token".to_owned());
            return self.refuse_connect(peer, error);
        }
        if self.peers.len() >= limits::PEERS_MAX {
            return self.refuse_connect(peer, ConnectError::LocalShortage("too many peers".to_owned()));
        }
        let now = Instant::now();
        let literal = address.parse::<SocketAddr>().ok();
        let state = Peer {
            target,
            addresses: literal.into_iter().collect(),
            connections: Vec::new(),
            ready: 0,
            up: false,
            deadline: now + self.options.connect_timeout,
        };
        self.peers.insert(peer, state);
        self.connecting += 1;
        let outcome = match literal {
            Some(_) => self.open(peer, now),
            None => self.resolver.start(peer, address),
        };
        if let Err(error) = outcome {
            self.give_up(peer, error);
        }
    }

    fn disconnect(&mut self, peer: PeerKey) {
        if let Some(state) = self.peers.remove(&peer) {
            self.connecting -= usize::from(!state.up);
            self.close_connections(&state.connections, &|| ReadError::Aborted);
        }
    }

    fn post(&mut self, peer: PeerKey, op: ReadOp) -> Result<(), PostError> {
        let Some(state) = self.peers.get(&peer).filter(|state| state.up) else {
            return Err(PostError::NotConnected(Box::new(op)));
        };
        let length_bytes = op.destination.total_bytes();
        let sound = length_bytes > 0
            && op.object_bytes <= limits::OBJECT_BYTES_MAX
            && op.object_offset.checked_add(length_bytes).is_some_and(|end| end <= op.object_bytes);
        // Other kinds of memory cannot be received into by a system call.
        let host = op.destination.regions().iter().all(|region| region.kind() == MemoryKind::Host);
        if !sound || !host {
            return Err(PostError::BadRange(Box::new(op)));
        }
        let requests = |index: &usize| {
            let connection = self.places.get(*index).and_then(|place| place.connection.as_ref());
            connection.map_or(usize::MAX, Connection::requests)
        };
        let chosen = state.connections.iter().copied().min_by_key(requests);
        let Some(index) = chosen.filter(|index| requests(index) < self.options.requests_in_flight) else {
            return Err(PostError::QueueFull(Box::new(op)));
        };
        let busy_at = self.busy.len();
        let Some(connection) = self.connection(index) else {
            return Err(PostError::NotConnected(Box::new(op)));
        };
        let token = op.token;
        let now = if connection.is_busy() { None } else { Some(Instant::now()) };
        connection.request(op, now);
        if connection.busy_at.is_none() {
            connection.busy_at = Some(busy_at);
            self.busy.push(index);
            self.look_through_epoll();
        }
        self.ops.insert(token, index);
        self.enqueue(index);
        Ok(())
    }

    fn abort(&mut self, token: OpToken) {
        let Some(&index) = self.ops.get(&token) else { return };
        let Some(connection) = self.connection(index) else { return };
        if let Some(op) = connection.take_op(|op| op.token == token) {
            let outcome = Err(ReadError::Aborted);
            self.pending.push(Event::Read(ReadDone { token, destination: op.destination, outcome }));
        }
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> bool {
        let before = events.len();
        events.append(&mut self.pending);
        let now = Instant::now();
        self.polls = self.polls.wrapping_add(1);
        let direct = (1..=DIRECT_POLL_MAX).contains(&self.busy.len());
        if !direct || self.connecting > 0 || self.polls % LOOK_AROUND_INTERVAL == 0 {
            self.gather(Duration::ZERO);
            self.check_timers(now);
            self.take_resolved(now);
        }
        for _ in 0..self.ready.len() {
            let Some(index) = self.ready.pop_front() else { break };
            if let Some(connection) = self.connection(index) {
                connection.queued = false;
                self.serve(index, events, now);
            }
        }
        if direct {
            let mut at = 0;
            while let Some(&index) = self.busy.get(at) {
                let polls = self.polls;
                if self.connection(index).is_some_and(|connection| connection.served != polls) {
                    self.serve(index, events, now);
                }
                // A connection that became idle has left its place to another one.
                at += usize::from(self.busy.get(at) == Some(&index));
            }
        }
        events.append(&mut self.pending);
        self.report(events.get(before..).unwrap_or_default());
        // A wake that was taken back here must not be lost: the caller looks at what it was for before it sleeps.
        let woken = std::mem::take(&mut self.woken);
        woken || events.len() > before || !self.ready.is_empty()
    }

    fn wait(&mut self, timeout: Duration) {
        if !self.pending.is_empty() || !self.ready.is_empty() {
            return;
        }
        let mut wait = timeout;
        if self.connecting > 0 || !self.busy.is_empty() {
            // Deadlines and stalls are looked at in poll.
            wait = wait.min(Duration::from_millis(100));
        }
        if self.busy.len() <= DIRECT_POLL_MAX {
            for at in 0..self.busy.len() {
                let Some(&index) = self.busy.get(at) else { break };
                if let Some(connection) = self.connection(index) {
                    connection.prepare_sleep();
                }
            }
        }
        self.gather(wait);
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.waker) as Arc<dyn Wake>
    }

    fn in_flight(&self) -> usize {
        self.ops.len()
    }
}
