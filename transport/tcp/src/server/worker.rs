//! An I/O thread: an edge-triggered epoll set, a ready queue, and turns of bounded size.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::Timespec;
use socket2::Socket;

use super::connection::{Close, Connection, Turn};
use super::Shared;
use crate::limits::{ACCEPT_PAUSE, GREETINGS_MAX, TICK};
use crate::stream::Stream;

/// Events taken from the kernel at once.
const EVENTS: usize = 256;
const LISTENER: u64 = u64::MAX;
const WAKE: u64 = u64::MAX - 1;

pub(crate) struct Worker {
    shared: Arc<Shared>,
    index: usize,
    epoll: OwnedFd,
    listener: Option<Socket>,
    /// When accepting goes on after the system refused a file descriptor.
    accept_at: Option<Instant>,
    next_inbox: usize,
    /// Places of connections. An event names its place and the place's use, so that an event of a connection that was
    /// closed meanwhile cannot reach its successor.
    places: Vec<Place>,
    free: Vec<usize>,
    ready: VecDeque<usize>,
    next_tick: Instant,
}

#[derive(Default)]
struct Place {
    used: u32,
    connection: Option<Connection>,
}

/// Looks for the next work without sleeping, as long as work keeps coming within the limit: a sleep and a wake cost more
/// than so short a spin, in time and in CPU. As soon as gaps grow longer, the thread sleeps at once.
struct Spin {
    limit: Duration,
    idle_since: Instant,
    /// How many gaps were short lately.
    short_gaps: u8,
}

impl Spin {
    const SHORT_GAPS_MIN: u8 = 4;
    const SHORT_GAPS_MAX: u8 = 16;

    fn new(limit: Duration, now: Instant) -> Self {
        Self { limit, idle_since: now, short_gaps: 0 }
    }

    fn goes_on(&self, now: Instant) -> bool {
        self.short_gaps >= Self::SHORT_GAPS_MIN && now.saturating_duration_since(self.idle_since) < self.limit
    }

    fn found(&mut self, now: Instant) {
        self.short_gaps = if now.saturating_duration_since(self.idle_since) < self.limit {
            (self.short_gaps + 1).min(Self::SHORT_GAPS_MAX)
        } else {
            self.short_gaps / 2
        };
    }

    fn begin(&mut self) {
        self.idle_since = Instant::now();
    }
}

fn name(index: usize, used: u32) -> u64 {
    (u64::from(used) << 32) | (index as u64 & 0xffff_ffff)
}

impl Worker {
    pub(crate) fn new(shared: Arc<Shared>, index: usize, listener: Option<Socket>) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        if let Some(listener) = &listener {
            epoll::add(&epoll, listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
        }
        if let Some(inbox) = shared.inboxes.get(index) {
            epoll::add(&epoll, &inbox.wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        }
        Ok(Self {
            shared,
            index,
            epoll,
            listener,
            accept_at: None,
            next_inbox: 0,
            places: Vec::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            next_tick: Instant::now() + TICK,
        })
    }

    pub(crate) fn run(mut self) {
        let mut events: Vec<Event> = Vec::with_capacity(EVENTS);
        let mut now = Instant::now();
        let mut spin = Spin::new(self.shared.options.busy_poll, now);
        while !self.shared.stop.load(Ordering::Acquire) {
            let was_idle = self.ready.is_empty();
            let wait = if !was_idle || spin.goes_on(now) {
                Duration::ZERO
            } else if self.free.len() == self.places.len() && self.accept_at.is_none() {
                // Nothing has a timer.
                Duration::from_secs(3600)
            } else {
                self.next_tick.min(self.accept_at.unwrap_or(self.next_tick)).saturating_duration_since(now)
            };
            if let Err(error) = self.wait(&mut events, wait) {
                tracing::error!(%error, "the data server cannot wait for its sockets and stops");
                return;
            }
            now = Instant::now();
            if !events.is_empty() || !was_idle {
                if was_idle {
                    spin.found(now);
                }
                self.take_events(&mut events, now);
                self.take_turns(now);
                if self.ready.is_empty() {
                    spin.begin();
                }
            }
            if now >= self.next_tick {
                self.tick(now);
            }
            if self.accept_at.is_some_and(|at| now >= at) {
                self.resume_accepting();
            }
        }
    }

    fn wait(&self, events: &mut Vec<Event>, wait: Duration) -> io::Result<()> {
        events.clear();
        // Rounded up, so that a timer is due when the thread wakes for it.
        let timeout = Timespec::try_from(wait).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn take_events(&mut self, events: &mut Vec<Event>, now: Instant) {
        for event in events.drain(..) {
            let (flags, data) = (event.flags, event.data);
            match data.u64() {
                LISTENER => self.accept(now),
                WAKE => self.take_inbox(now),
                named => self.mark(named, flags),
            }
        }
    }

    fn mark(&mut self, named: u64, flags: EventFlags) {
        let index = (named & 0xffff_ffff) as usize;
        let Some(place) = self.places.get_mut(index) else { return };
        if name(index, place.used) != named {
            return;
        }
        let Some(connection) = &mut place.connection else { return };
        let ended = flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
        connection.ended |= ended;
        connection.readable |= ended || flags.contains(EventFlags::IN);
        connection.writable |= ended || flags.contains(EventFlags::OUT);
        if !connection.queued {
            connection.queued = true;
            self.ready.push_back(index);
        }
    }

    /// One turn for each connection that is ready now; those with more to do go to the end of the queue.
    fn take_turns(&mut self, now: Instant) {
        for _ in 0..self.ready.len() {
            let Some(index) = self.ready.pop_front() else { return };
            let Some(connection) = self.places.get_mut(index).and_then(|place| place.connection.as_mut())
            else {
                continue;
            };
            connection.queued = false;
            match connection.turn(&self.shared, now) {
                Ok(Turn::Again) => {
                    connection.queued = true;
                    self.ready.push_back(index);
                }
                Ok(Turn::Asleep) => {}
                Err(close) => self.close(index, &close),
            }
        }
    }

    fn close(&mut self, index: usize, close: &Close) {
        let Some(place) = self.places.get_mut(index) else { return };
        let Some(connection) = place.connection.take() else { return };
        place.used = place.used.wrapping_add(1);
        self.free.push(index);
        let counters = &self.shared.counters;
        counters.connections.fetch_sub(1, Ordering::Relaxed);
        if connection.is_greeting() {
            counters.greetings.fetch_sub(1, Ordering::Relaxed);
        }
        match close {
            Close::Lost => {}
            Close::Refused(reason) => {
                counters.greetings_refused.fetch_add(1, Ordering::Relaxed);
                tracing::debug!(reason, "a data connection was refused");
            }
            Close::Protocol(error) => {
                counters.protocol_errors.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(%error, "a reader broke the protocol and was disconnected");
            }
            Close::TimedOut => {
                counters.timeouts.fetch_add(1, Ordering::Relaxed);
                tracing::debug!("a data connection was idle or stalled for too long and was closed");
            }
        }
    }

    fn accept(&mut self, now: Instant) {
        // Bounded, so that a flood of connections does not starve those that are open.
        for _ in 0..64 {
            let Some(listener) = &self.listener else { return };
            let socket = match listener.accept4(libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK) {
                Ok((socket, _)) => OwnedFd::from(socket),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    match error.raw_os_error() {
                        // No descriptor or memory: the connection stays in the backlog; the listener would be reported
                        // again and again.
                        Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM) => {
                            tracing::warn!(%error, "accepting data connections pauses");
                            let _ = epoll::delete(&self.epoll, listener);
                            self.accept_at = Some(now + ACCEPT_PAUSE);
                            return;
                        }
                        // The connection died in the backlog.
                        _ => continue,
                    }
                }
            };
            let counters = &self.shared.counters;
            let over_limit = counters.connections.load(Ordering::Relaxed)
                >= self.shared.options.connections_max
                || counters.greetings.load(Ordering::Relaxed) >= GREETINGS_MAX;
            if over_limit {
                counters.connections_refused.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            counters.connections.fetch_add(1, Ordering::Relaxed);
            counters.greetings.fetch_add(1, Ordering::Relaxed);
            let to = self.next_inbox;
            self.next_inbox = (to + 1) % self.shared.inboxes.len();
            if to == self.index {
                self.admit(socket, now);
            } else if let Some(inbox) = self.shared.inboxes.get(to) {
                inbox.sockets.lock().push(socket);
                inbox.wake();
            }
        }
    }

    fn resume_accepting(&mut self) {
        self.accept_at = None;
        if let Some(listener) = &self.listener {
            if epoll::add(&self.epoll, listener, EventData::new_u64(LISTENER), EventFlags::IN).is_err() {
                self.accept_at = Some(Instant::now() + ACCEPT_PAUSE);
            }
        }
    }

    fn take_inbox(&mut self, now: Instant) {
        let shared = Arc::clone(&self.shared);
        let Some(inbox) = shared.inboxes.get(self.index) else { return };
        let _ = rustix::io::read(&inbox.wake, &mut [0; 8]);
        let sockets = std::mem::take(&mut *inbox.sockets.lock());
        for socket in sockets {
            self.admit(socket, now);
        }
    }

    /// Takes a fresh socket, whose connection is counted already.
    fn admit(&mut self, socket: OwnedFd, now: Instant) {
        let stream = match &self.shared.options.tls {
            None => Ok(Stream::plain(socket)),
            Some(config) => rustls::ServerConnection::new(Arc::clone(config))
                .map(|session| Stream::tls(socket, session.into())),
        };
        let index = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place::default());
            self.places.len() - 1
        });
        let Some(place) = self.places.get_mut(index) else { return };
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let data = EventData::new_u64(name(index, place.used));
        let registered = match stream {
            Ok(stream) => epoll::add(&self.epoll, stream.fd().as_fd(), data, flags).ok().map(|()| stream),
            Err(error) => {
                tracing::warn!(%error, "no TLS session for a data connection");
                None
            }
        };
        match registered {
            Some(stream) => {
                let mut connection = Connection::new(stream, now);
                connection.queued = true;
                place.connection = Some(connection);
                self.ready.push_back(index);
            }
            None => {
                self.free.push(index);
                self.shared.counters.connections.fetch_sub(1, Ordering::Relaxed);
                self.shared.counters.greetings.fetch_sub(1, Ordering::Relaxed);
                self.shared.counters.connections_refused.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn tick(&mut self, now: Instant) {
        self.next_tick = now + TICK;
        for index in 0..self.places.len() {
            let close = self
                .places
                .get(index)
                .and_then(|place| place.connection.as_ref())
                .and_then(|connection| connection.expired(&self.shared, now));
            if let Some(close) = close {
                self.close(index, &close);
            }
        }
    }
}
