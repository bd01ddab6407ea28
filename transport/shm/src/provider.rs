//! The reading side: copies out of mapped pools, a bounded part each poll.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfabric_memory::{ObjectRead, OwnerMemory, PeerMemory, PeerReadError, PoolView};
use kvfabric_transport_api::{
    ConnectError, Event, Landed, OpToken, PeerKey, PeerTarget, PostError, Provider, ReadDone, ReadError,
    ReadOp, Wake,
};
use rustix::event::{epoll, Timespec};
use rustix::io::Errno;

use crate::limits::{
    LOST_PEER_DRAIN, PEERS_MAX, POLLS_PER_SOCKET_CHECK, POLL_BYTES_MAX, READS_IN_FLIGHT_MAX,
    READ_BYTES_CHARGED_MIN, UNMAP_INLINE_BYTES_MAX,
};
use crate::link::{Link, LinkError, Progress};
use crate::socket;

/// Epoll data of the wake descriptor; sockets count from 1.
const WAKE_ID: u64 = 0;
const EPOLL_EVENTS: usize = 32;

/// Where a peer's bytes come from.
#[derive(Debug)]
enum Source {
    /// Another process, over its socket.
    Link(Box<Link>),
    /// Another process whose socket is gone; its memory is read out until `until`.
    Lost { memory: Option<PeerMemory>, until: Instant, reason: String, error: ReadError },
    /// This process's own pool.
    Local(Arc<OwnerMemory>),
}

#[derive(Debug)]
struct Peer {
    source: Source,
    /// Epoll data of its socket; [`WAKE_ID`] while it has none there.
    socket_id: u64,
    /// Reads that wait for newer slabs; `true` once they have been asked for on its behalf.
    waiting: VecDeque<(ReadOp, bool)>,
    /// Reads in the common queue, the running one included.
    queued: usize,
}

impl Peer {
    fn view(&self) -> Option<PoolView<'_>> {
        match &self.source {
            Source::Link(link) => link.memory.as_ref().map(PeerMemory::view),
            Source::Lost { memory, .. } => memory.as_ref().map(PeerMemory::view),
            Source::Local(memory) => Some(memory.view()),
        }
    }

    fn begin(&self, op: &ReadOp) -> Result<ObjectRead, PeerReadError> {
        let length = op.destination.total_bytes();
        let (slot, size, offset, checksum) = (op.slot, op.object_bytes, op.object_offset, op.checksum);
        match &self.source {
            Source::Link(link) => link
                .memory
                .as_ref()
                .ok_or(PeerReadError::UnknownSlot(slot))?
                .begin_read(slot, size, offset, length, checksum),
            Source::Lost { memory, .. } => memory
                .as_ref()
                .ok_or(PeerReadError::UnknownSlot(slot))?
                .begin_read(slot, size, offset, length, checksum),
            Source::Local(memory) => memory.begin_read(slot, size, offset, length, checksum),
        }
    }

    fn accepts_reads(&self) -> bool {
        match &self.source {
            Source::Link(link) => link.is_up(),
            Source::Lost { .. } => false,
            Source::Local(_) => true,
        }
    }
}

/// A read that waits for its turn, or was begun.
#[derive(Debug)]
struct Queued {
    peer: PeerKey,
    op: ReadOp,
    /// Set for a read that has already waited for newer slabs.
    last_try: bool,
}

/// The same-host transport's reading side. One belongs to one thread; a process may have several.
pub struct ShmProvider {
    epoll: OwnedFd,
    waker: Arc<Waker>,
    peers: BTreeMap<PeerKey, Peer>,
    sockets: BTreeMap<u64, PeerKey>,
    next_socket_id: u64,
    queue: VecDeque<Queued>,
    /// The read whose bytes are being copied: the front one, taken off the queue.
    active: Option<(Queued, ObjectRead)>,
    /// Retired outside of a poll, or by the end of their peer.
    retired: VecDeque<ReadDone>,
    /// To be reported after `retired`.
    notices: VecDeque<Event>,
    waiting: usize,
    /// A wake was taken back by `poll` and not reported yet.
    woken: bool,
    polls_until_check: u32,
}

impl fmt::Debug for ShmProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ShmProvider({} peers, {} reads)", self.peers.len(), self.in_flight())
    }
}

#[derive(Debug)]
struct Waker {
    fd: OwnedFd,
    pending: AtomicBool,
}

impl Wake for Waker {
    fn wake(&self) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            socket::wake(&self.fd);
        }
    }
}

impl ShmProvider {
    /// A provider without peers.
    ///
    /// # Errors
    /// When the system has no descriptors left.
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let waker = Arc::new(Waker { fd: socket::wake_fd()?, pending: AtomicBool::new(false) });
        epoll::add(&epoll, &waker.fd, epoll::EventData::new_u64(WAKE_ID), epoll::EventFlags::IN)?;
        Ok(Self {
            epoll,
            waker,
            peers: BTreeMap::new(),
            sockets: BTreeMap::new(),
            next_socket_id: WAKE_ID + 1,
            queue: VecDeque::new(),
            active: None,
            retired: VecDeque::new(),
            notices: VecDeque::new(),
            waiting: 0,
            woken: false,
            polls_until_check: 0,
        })
    }

    /// Makes this process's own pool a peer: same reads, same word check, no socket. The next poll reports it connected.
    pub fn add_local(&mut self, peer: PeerKey, memory: Arc<OwnerMemory>) {
        self.forget(peer, &ReadError::Aborted);
        self.peers.insert(
            peer,
            Peer { source: Source::Local(memory), socket_id: WAKE_ID, waiting: VecDeque::new(), queued: 0 },
        );
        self.notices.push_back(Event::Connected { peer });
    }

    fn try_connect(&mut self, peer: PeerKey, target: &PeerTarget) -> Result<(), ConnectError> {
        if self.peers.len() >= PEERS_MAX {
            return Err(ConnectError::LocalShortage("too many peers".into()));
        }
        let link = Link::connect(target, Instant::now())?;
        let source = Source::Link(Box::new(link));
        self.peers.insert(peer, Peer { source, socket_id: WAKE_ID, waiting: VecDeque::new(), queued: 0 });
        self.register(peer).inspect_err(|_| drop(self.peers.remove(&peer)))?;
        self.polls_until_check = 0;
        Ok(())
    }

    /// Has the socket watched, once it is connected: one that waits for room in the peer's backlog counts as hung up.
    fn register(&mut self, key: PeerKey) -> Result<(), ConnectError> {
        let Some(peer) = self.peers.get_mut(&key) else { return Ok(()) };
        let Source::Link(link) = &peer.source else { return Ok(()) };
        if peer.socket_id != WAKE_ID || link.is_waiting() {
            return Ok(());
        }
        let socket_id = self.next_socket_id;
        let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
        epoll::add(&self.epoll, &link.fd, epoll::EventData::new_u64(socket_id), flags)
            .map_err(|error| ConnectError::LocalShortage(io::Error::from(error).to_string()))?;
        self.next_socket_id += 1;
        self.sockets.insert(socket_id, key);
        peer.socket_id = socket_id;
        Ok(())
    }

    /// Takes a peer out, ends its reads, and lets go of its memory.
    fn forget(&mut self, peer: PeerKey, error: &ReadError) {
        self.retire_queued(peer, error);
        let Some(removed) = self.peers.remove(&peer) else { return };
        self.sockets.remove(&removed.socket_id);
        self.waiting -= removed.waiting.len();
        for (op, _) in removed.waiting {
            self.retired.push_back(done(op, Err(error.clone())));
        }
        match removed.source {
            Source::Link(link) => release(link.memory),
            Source::Lost { memory, .. } => release(memory),
            Source::Local(_) => {}
        }
    }

    /// Ends the reads of a peer that are queued or running. Nothing touches their destinations: copies run inside
    /// `poll` alone.
    fn retire_queued(&mut self, peer: PeerKey, error: &ReadError) {
        if self.active.as_ref().is_some_and(|(queued, _)| queued.peer == peer) {
            if let Some((queued, _)) = self.active.take() {
                self.retired.push_back(done(queued.op, Err(error.clone())));
            }
        }
        if self.peers.get(&peer).is_some_and(|peer| peer.queued > 0) {
            for queued in std::mem::take(&mut self.queue) {
                if queued.peer == peer {
                    self.retired.push_back(done(queued.op, Err(error.clone())));
                } else {
                    self.queue.push_back(queued);
                }
            }
        }
        if let Some(peer) = self.peers.get_mut(&peer) {
            peer.queued = 0;
        }
    }

    /// The socket of a peer is gone or useless: no new reads, and those that wait for slabs end now. The queued ones go
    /// on for a bounded time, unless the peer broke the protocol.
    fn lose(&mut self, key: PeerKey, error: &LinkError) {
        let Some(peer) = self.peers.get_mut(&key) else { return };
        let (reason, read_error) = match error {
            LinkError::Lost(why) => (why.clone(), ReadError::PeerLost(why.clone())),
            LinkError::Protocol(why) => {
                (format!("the peer broke the protocol: {why}"), ReadError::Protocol(why))
            }
        };
        let memory = match &mut peer.source {
            Source::Link(link) => link.memory.take(),
            Source::Lost { .. } | Source::Local(_) => return,
        };
        self.waiting -= peer.waiting.len();
        for (op, _) in std::mem::take(&mut peer.waiting) {
            self.retired.push_back(done(op, Err(read_error.clone())));
        }
        let drain = if matches!(error, LinkError::Lost(_)) { LOST_PEER_DRAIN } else { Duration::ZERO };
        // Replacing the source closes the socket, which also takes it out of epoll.
        peer.source = Source::Lost { memory, until: Instant::now() + drain, reason, error: read_error };
        self.sockets.remove(&peer.socket_id);
    }

    fn check_sockets(&mut self) {
        let mut buffer = [std::mem::MaybeUninit::<epoll::Event>::uninit(); EPOLL_EVENTS];
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        let ready: Vec<u64> = match epoll::wait(&self.epoll, &mut buffer[..], Some(&zero)) {
            Ok((events, _)) => events.iter().map(|event| { event.data }.u64()).collect(),
            Err(_) => Vec::new(),
        };
        let now = Instant::now();
        for id in ready {
            if id == WAKE_ID {
                self.clear_wake();
                self.woken = true;
            } else if let Some(&key) = self.sockets.get(&id) {
                self.handle_socket(key, now);
            }
        }
        self.handle_time(now);
    }

    fn handle_socket(&mut self, key: PeerKey, now: Instant) {
        let Some(Peer { source: Source::Link(link), .. }) = self.peers.get_mut(&key) else { return };
        if !link.is_up() {
            match link.handle_connect_readable(now) {
                Ok(Progress::Connected) => self.notices.push_back(Event::Connected { peer: key }),
                Ok(_) => {}
                Err(error) => self.connect_failed(key, error),
            }
            return;
        }
        match link.handle_readable() {
            Ok(Progress::Slabs) => self.slabs_arrived(key, now),
            Ok(_) => {}
            Err(error) => self.lose(key, &error),
        }
    }

    fn connect_failed(&mut self, peer: PeerKey, error: ConnectError) {
        self.forget(peer, &ReadError::Aborted);
        self.notices.push_back(Event::ConnectFailed { peer, error });
    }

    /// Newer slabs are known: the reads that waited for this answer have their last try, later ones ask again.
    fn slabs_arrived(&mut self, key: PeerKey, now: Instant) {
        let Some(peer) = self.peers.get_mut(&key) else { return };
        for (op, asked) in std::mem::take(&mut peer.waiting) {
            if asked {
                self.waiting -= 1;
                peer.queued += 1;
                self.queue.push_back(Queued { peer: key, op, last_try: true });
            } else {
                peer.waiting.push_back((op, asked));
            }
        }
        self.ask_for_slabs(key, now);
    }

    fn ask_for_slabs(&mut self, key: PeerKey, now: Instant) {
        let Some(peer) = self.peers.get_mut(&key) else { return };
        let Source::Link(link) = &mut peer.source else { return };
        if peer.waiting.is_empty() || link.is_fetching() {
            return;
        }
        match link.fetch_slabs(now) {
            Ok(()) => peer.waiting.iter_mut().for_each(|(_, asked)| *asked = true),
            Err(error) => self.lose(key, &error),
        }
    }

    fn handle_time(&mut self, now: Instant) {
        let due: Vec<PeerKey> = self
            .peers
            .iter()
            .filter(|(_, peer)| peer_deadline(peer).is_some_and(|deadline| deadline <= now))
            .map(|(key, _)| *key)
            .collect();
        for key in due {
            let Some(peer) = self.peers.get_mut(&key) else { continue };
            match &mut peer.source {
                Source::Link(link) if !link.is_up() => {
                    let moved = link.handle_connect_time(now);
                    if let Err(error) = moved.and_then(|()| self.register(key)) {
                        self.connect_failed(key, error);
                    }
                }
                Source::Link(link) => {
                    if link.handle_fetch_time(now) {
                        self.waiting -= peer.waiting.len();
                        for (op, _) in std::mem::take(&mut peer.waiting) {
                            // A late list says nothing about the slot: the owner may only be slow (rule X1).
                            let late = ReadError::PeerLost("no list of slabs in time".into());
                            self.retired.push_back(done(op, Err(late)));
                        }
                    }
                }
                Source::Lost { error, .. } => {
                    let error = error.clone();
                    self.retire_queued(key, &error);
                }
                Source::Local(_) => {}
            }
        }
    }

    /// Reports the end of lost peers whose reads have all retired.
    fn finish_lost(&mut self) {
        let finished: Vec<PeerKey> = self
            .peers
            .iter()
            .filter(|(_, peer)| matches!(peer.source, Source::Lost { .. }) && peer.queued == 0)
            .map(|(key, _)| *key)
            .collect();
        for key in finished {
            if let Some(Peer { source: Source::Lost { memory, reason, .. }, .. }) = self.peers.remove(&key) {
                release(memory);
                self.notices.push_back(Event::Disconnected { peer: key, reason });
            }
        }
    }

    fn clear_wake(&self) {
        socket::clear_wake(&self.waker.fd);
        self.waker.pending.store(false, Ordering::Release);
    }

    /// Copies up to [`POLL_BYTES_MAX`] bytes.
    fn copy_some(&mut self, events: &mut Vec<Event>) {
        let mut budget = POLL_BYTES_MAX;
        while budget > 0 {
            let (queued, mut read) = match self.active.take() {
                Some(active) => active,
                None => match self.begin_next(events) {
                    Some(active) => active,
                    None => return,
                },
            };
            let before = read.remaining_bytes();
            let view = self.peers.get_mut(&queued.peer).and_then(|peer| {
                // Counted down now rather than after the copy; up again below where the read goes on.
                peer.queued -= 1;
                peer.view()
            });
            let outcome = match view {
                Some(view) => match view.step(&mut read, &queued.op.destination, budget) {
                    Ok(true) => match view.finish(&read) {
                        Ok((word, check)) => {
                            // Built in place: moving the word about would wait for all stores of the copy, about half
                            // a microsecond for 4 KiB out of memory.
                            events.push(Event::Read(ReadDone {
                                token: queued.op.token,
                                destination: queued.op.destination,
                                outcome: Ok(Landed { word, check }),
                            }));
                            budget = budget.saturating_sub(before.max(READ_BYTES_CHARGED_MIN));
                            continue;
                        }
                        Err(error) => Err(error),
                    },
                    Ok(false) => Ok(()),
                    Err(error) => Err(error),
                },
                None => Err(PeerReadError::UnknownSlot(queued.op.slot)),
            };
            if let Some(peer) = self.peers.get_mut(&queued.peer) {
                peer.queued += 1;
            }
            let copied = before - read.remaining_bytes();
            budget = budget.saturating_sub(copied.max(READ_BYTES_CHARGED_MIN));
            match outcome {
                Ok(()) => self.active = Some((queued, read)),
                Err(error) => self.retire(queued, Err(read_error(error)), events),
            }
        }
    }

    /// Takes reads off the queue until one can begin.
    fn begin_next(&mut self, events: &mut Vec<Event>) -> Option<(Queued, ObjectRead)> {
        loop {
            let queued = self.queue.pop_front()?;
            let begun = match self.peers.get(&queued.peer) {
                Some(peer) => peer.begin(&queued.op),
                None => Err(PeerReadError::UnknownSlot(queued.op.slot)),
            };
            match begun {
                Ok(read) => return Some((queued, read)),
                Err(PeerReadError::UnknownSlot(_)) if !queued.last_try => self.wait_for_slabs(queued, events),
                Err(error) => self.retire(queued, Err(read_error(error)), events),
            }
        }
    }

    /// The slot may lie in a slab that is newer than our list: the peer is asked once.
    fn wait_for_slabs(&mut self, queued: Queued, events: &mut Vec<Event>) {
        let key = queued.peer;
        match self.peers.get_mut(&key) {
            Some(peer) if matches!(peer.source, Source::Link(_)) => {
                peer.queued -= 1;
                peer.waiting.push_back((queued.op, false));
                self.waiting += 1;
                self.polls_until_check = 0;
                self.ask_for_slabs(key, Instant::now());
            }
            Some(Peer { source: Source::Lost { error, .. }, .. }) => {
                let error = error.clone();
                self.retire(queued, Err(error), events);
            }
            _ => {
                let slot = queued.op.slot;
                self.retire(queued, Err(ReadError::UnknownSlot(slot)), events);
            }
        }
    }

    fn retire(&mut self, queued: Queued, outcome: Result<Landed, ReadError>, events: &mut Vec<Event>) {
        if let Some(peer) = self.peers.get_mut(&queued.peer) {
            peer.queued -= 1;
        }
        events.push(Event::Read(done(queued.op, outcome)));
    }

    fn report(&mut self, events: &mut Vec<Event>) {
        events.extend(self.retired.drain(..).map(Event::Read));
        events.extend(self.notices.drain(..));
    }
}

impl Provider for ShmProvider {
    fn connect(&mut self, peer: PeerKey, target: PeerTarget) {
        if let Some(known) = self.peers.get(&peer) {
            match &known.source {
                Source::Link(link) if !link.is_up() => return,
                Source::Link(_) | Source::Local(_) => {
                    self.notices.push_back(Event::Connected { peer });
                    return;
                }
                Source::Lost { .. } => self.forget(peer, &ReadError::PeerLost("connecting anew".into())),
            }
        }
        if let Err(error) = self.try_connect(peer, &target) {
            self.notices.push_back(Event::ConnectFailed { peer, error });
        }
    }

    fn disconnect(&mut self, peer: PeerKey) {
        self.forget(peer, &ReadError::Aborted);
    }

    fn post(&mut self, peer: PeerKey, op: ReadOp) -> Result<(), PostError> {
        if self.in_flight() >= READS_IN_FLIGHT_MAX {
            return Err(PostError::QueueFull(Box::new(op)));
        }
        let Some(known) = self.peers.get_mut(&peer).filter(|known| known.accepts_reads()) else {
            return Err(PostError::NotConnected(Box::new(op)));
        };
        let length = op.destination.total_bytes();
        if length == 0 || op.object_offset.checked_add(length).is_none_or(|end| end > op.object_bytes) {
            return Err(PostError::BadRange(Box::new(op)));
        }
        known.queued += 1;
        self.queue.push_back(Queued { peer, op, last_try: false });
        Ok(())
    }

    fn abort(&mut self, token: OpToken) {
        let queued = if self.active.as_ref().is_some_and(|(queued, _)| queued.op.token == token) {
            self.active.take().map(|(queued, _)| queued)
        } else {
            // Aborts come in the order of posting as a rule, so that the search ends at once.
            let found = self.queue.iter().position(|queued| queued.op.token == token);
            found.and_then(|index| self.queue.remove(index))
        };
        if let Some(queued) = queued {
            if let Some(peer) = self.peers.get_mut(&queued.peer) {
                peer.queued -= 1;
            }
            self.retired.push_back(done(queued.op, Err(ReadError::Aborted)));
            return;
        }
        if self.waiting == 0 {
            return;
        }
        for peer in self.peers.values_mut() {
            let found = peer.waiting.iter().position(|(op, _)| op.token == token);
            if let Some((op, _)) = found.and_then(|index| peer.waiting.remove(index)) {
                self.waiting -= 1;
                self.retired.push_back(done(op, Err(ReadError::Aborted)));
                return;
            }
        }
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> bool {
        let before = events.len();
        let idle = self.queue.is_empty() && self.active.is_none();
        if idle || self.polls_until_check == 0 {
            self.polls_until_check = POLLS_PER_SOCKET_CHECK;
            self.check_sockets();
        }
        self.polls_until_check -= 1;
        self.report(events);
        if !self.queue.is_empty() || self.active.is_some() {
            self.copy_some(events);
        }
        if self.polls_until_check == POLLS_PER_SOCKET_CHECK - 1 {
            self.finish_lost();
            self.report(events);
        }
        // A wake that was taken back here must not be lost: the caller looks at what it was for before it sleeps.
        let woken = std::mem::take(&mut self.woken);
        woken || events.len() > before || !self.queue.is_empty() || self.active.is_some()
    }

    fn wait(&mut self, timeout: Duration) {
        let busy = !self.queue.is_empty() || self.active.is_some();
        if busy || !self.retired.is_empty() || !self.notices.is_empty() {
            return;
        }
        let now = Instant::now();
        let next = self.peers.values().filter_map(peer_deadline).min();
        let timeout = next.map_or(timeout, |next| timeout.min(next.saturating_duration_since(now)));
        let timeout = Timespec::try_from(timeout).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        let mut buffer = [std::mem::MaybeUninit::<epoll::Event>::uninit(); EPOLL_EVENTS];
        match epoll::wait(&self.epoll, &mut buffer[..], Some(&timeout)) {
            Ok((events, _)) => {
                // Sockets stay ready and are served by the next poll; the wake is taken back here.
                if events.iter().any(|event| { event.data }.u64() == WAKE_ID) {
                    self.clear_wake();
                }
                self.polls_until_check = 0;
            }
            Err(Errno::INTR) => {}
            Err(error) => tracing::warn!(%error, "waiting on the shared-memory sockets failed"),
        }
    }

    fn waker(&self) -> Arc<dyn Wake> {
        Arc::clone(&self.waker) as Arc<dyn Wake>
    }

    fn in_flight(&self) -> usize {
        self.queue.len() + usize::from(self.active.is_some()) + self.waiting + self.retired.len()
    }
}

fn peer_deadline(peer: &Peer) -> Option<Instant> {
    match &peer.source {
        Source::Link(link) => link.poll_deadline(),
        Source::Lost { until, .. } => Some(*until),
        Source::Local(_) => None,
    }
}

fn done(op: ReadOp, outcome: Result<Landed, ReadError>) -> ReadDone {
    ReadDone { token: op.token, destination: op.destination, outcome }
}

fn read_error(error: PeerReadError) -> ReadError {
    match error {
        PeerReadError::UnknownSlot(slot) => ReadError::UnknownSlot(slot),
        PeerReadError::SizeMismatch => ReadError::SizeMismatch,
        PeerReadError::Stopped => ReadError::Aborted,
        PeerReadError::Unbacked(_) => ReadError::Protocol("it announced memory that it does not have"),
        _ => ReadError::Protocol("an unforeseen failure of the copy"),
    }
}

/// Unmaps. Giving back the page tables of a large pool takes longer than the drain bound allows, so that is done by a
/// thread that ends with it.
fn release(memory: Option<PeerMemory>) {
    let Some(memory) = memory else { return };
    if memory.pool_bytes() <= UNMAP_INLINE_BYTES_MAX {
        return;
    }
    let spawned = std::thread::Builder::new().name("kvfabric-unmap".into()).spawn(move || drop(memory));
    if let Err(error) = spawned {
        tracing::debug!(%error, "unmapped a peer's pool on the data thread");
    }
}
