//! One reader's connection: greeting, then requests in and replies out.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kvfabric_memory::RawWord;

use super::{Counters, Shared};
use crate::limits::{GREETING_TIMEOUT, REQUESTS_QUEUED_MAX, REQUEST_BUFFER_BYTES, TURN_BYTES};
use crate::served::ServedObject;
use crate::socket::{self, IoVec};
use crate::stream::Stream;
use crate::wire::{
    Hello, Reply, Request, RequestParser, Status, Verdict, Welcome, WireError, HELLO_BYTES, REPLY_BYTES,
};

/// Why a connection is to be closed.
#[derive(Debug)]
pub(crate) enum Close {
    /// The reader ended it, or the network did.
    Lost,
    /// The greeting was not accepted.
    Refused(&'static str),
    /// The reader broke the protocol.
    Protocol(WireError),
    /// Idle or stalled for too long.
    TimedOut,
}

impl From<io::Error> for Close {
    fn from(_: io::Error) -> Self {
        Self::Lost
    }
}

/// What a turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// There is more to do at once; others go first.
    Again,
    /// Nothing to do until the socket says so.
    Asleep,
}

enum State {
    /// Nothing is allocated for the reader until its token was accepted (design 1.9); this is all there is of it.
    Greeting {
        hello: [u8; HELLO_BYTES],
        filled: usize,
    },
    Serving(Box<Serving>),
}

pub(crate) struct Connection {
    pub stream: Stream,
    state: State,
    /// The socket may have something to read, may take bytes, has been closed by the reader.
    pub readable: bool,
    pub writable: bool,
    pub ended: bool,
    /// Waits for its turn.
    pub queued: bool,
    opened: Instant,
    /// When bytes last moved, to the precision of the worker's clock.
    active: Instant,
}

/// Bytes that go out together: a word and the next reply's header fit.
struct Small {
    bytes: [u8; RawWord::BYTES + REPLY_BYTES],
    filled: usize,
    sent: usize,
}

impl Small {
    fn has_room(&self) -> bool {
        self.filled + REPLY_BYTES <= self.bytes.len()
    }

    fn push(&mut self, bytes: &[u8; 32]) {
        if let Some(room) = self.bytes.get_mut(self.filled..self.filled + bytes.len()) {
            room.copy_from_slice(bytes);
            self.filled += bytes.len();
        }
    }

    fn pending(&self) -> &[u8] {
        self.bytes.get(self.sent..self.filled).unwrap_or_default()
    }

    fn advance(&mut self, bytes: usize) -> usize {
        let taken = bytes.min(self.filled - self.sent);
        self.sent += taken;
        if self.sent == self.filled {
            (self.sent, self.filled) = (0, 0);
        }
        taken
    }
}

/// The part of an object that is being sent.
struct Body {
    slot: u32,
    at: *const u8,
    left: usize,
}

// SAFETY: the pointer leads into memory that `Served` keeps readable for its lifetime, on any thread; a connection
// holds it only while the worker holds the shared `Arc`.
unsafe impl Send for Body {}

struct Serving {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    parser: RequestParser,
    /// The buffer may hold whole requests for which the queue had no room.
    unparsed: bool,
    queue: VecDeque<Request>,
    small: Small,
    body: Option<Body>,
}

fn blocked(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

impl Connection {
    pub(crate) fn new(stream: Stream, now: Instant) -> Self {
        Self {
            stream,
            state: State::Greeting { hello: [0; HELLO_BYTES], filled: 0 },
            readable: true,
            writable: true,
            ended: false,
            queued: false,
            opened: now,
            active: now,
        }
    }

    pub(crate) fn is_greeting(&self) -> bool {
        matches!(self.state, State::Greeting { .. })
    }

    /// Does what can be done without blocking, up to one turn's worth.
    pub(crate) fn turn(&mut self, shared: &Shared, now: Instant) -> Result<Turn, Close> {
        if self.is_greeting() && !self.greet(shared, now)? {
            return Ok(Turn::Asleep);
        }
        let State::Serving(serving) = &mut self.state else { return Ok(Turn::Asleep) };
        if self.writable && self.stream.wants_flush() {
            self.writable = self.stream.flush()?;
        }
        let mut budget = TURN_BYTES;
        loop {
            let received = serving.receive(&mut self.stream, &mut self.readable, self.ended)?;
            let sent = if self.writable {
                serving.send(&mut self.stream, shared, &mut budget, &mut self.writable)?
            } else {
                0
            };
            if received || sent > 0 {
                self.active = now;
            }
            let more_to_send = self.writable && serving.has_output();
            let more_to_read = serving.wants_input(self.readable);
            match (more_to_send || more_to_read, budget) {
                (false, _) => return Ok(Turn::Asleep),
                (true, 0) => return Ok(Turn::Again),
                (true, _) => {}
            }
        }
    }

    /// Goes on with the greeting. Returns whether it is over.
    fn greet(&mut self, shared: &Shared, now: Instant) -> Result<bool, Close> {
        match self.stream.handshake() {
            Ok(true) => {}
            Ok(false) => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return Err(Close::Refused("the TLS handshake failed"));
            }
            Err(error) => return Err(error.into()),
        }
        let State::Greeting { hello, filled } = &mut self.state else { return Ok(true) };
        while *filled < HELLO_BYTES {
            let room = hello.get_mut(*filled..).unwrap_or_default();
            match self.stream.receive_into(room) {
                Ok(0) => return Err(Close::Lost),
                Ok(taken) => *filled += taken,
                Err(error) if blocked(&error) => {
                    self.readable = false;
                    return Ok(false);
                }
                Err(error) => return Err(error.into()),
            }
        }
        let (verdict, reason) = judge(shared, hello, now);
        let incarnation = if verdict == Verdict::TokenRefused { 0 } else { shared.incarnation };
        let welcome = Welcome { verdict, incarnation }.encode();
        if verdict != Verdict::Ready {
            // A fresh socket takes 32 bytes; if it does not, the reader sees a closed connection instead of the reason.
            let _ = self.stream.send_from(&welcome);
            let _ = rustix::net::shutdown(self.stream.fd(), rustix::net::Shutdown::Write);
            return Err(Close::Refused(reason));
        }
        socket::tune(self.stream.fd(), shared.options.socket_buffer_bytes)?;
        let mut serving = Serving::new();
        serving.small.push(&welcome);
        self.state = State::Serving(Box::new(serving));
        shared.counters.greetings.fetch_sub(1, Ordering::Relaxed);
        Ok(true)
    }

    /// Whether a timer has run out.
    pub(crate) fn expired(&self, shared: &Shared, now: Instant) -> Option<Close> {
        let quiet = now.saturating_duration_since(self.active);
        match &self.state {
            State::Greeting { .. } if now.saturating_duration_since(self.opened) > GREETING_TIMEOUT => {
                Some(Close::Refused("no greeting in time"))
            }
            State::Greeting { .. } => None,
            State::Serving(serving) => {
                let limit = if serving.has_output() || self.stream.wants_flush() {
                    shared.options.stall_timeout
                } else {
                    shared.options.idle_timeout
                };
                (quiet > limit).then_some(Close::TimedOut)
            }
        }
    }
}

/// Judges a hello, the token first.
fn judge(shared: &Shared, hello: &[u8; HELLO_BYTES], now: Instant) -> (Verdict, &'static str) {
    let token = hello.first_chunk::<32>().copied().unwrap_or_default();
    if shared.tokens.redeem(&token, now).is_err() {
        return (Verdict::TokenRefused, "the token was refused");
    }
    match Hello::decode(hello) {
        Ok(hello) if hello.incarnation == shared.incarnation => (Verdict::Ready, ""),
        Ok(_) | Err(WireError::Incarnation) => {
            (Verdict::WrongIncarnation, "another incarnation was asked for")
        }
        Err(_) => (Verdict::WrongVersion, "another protocol version"),
    }
}

impl Serving {
    fn new() -> Self {
        Self {
            buffer: vec![0; REQUEST_BUFFER_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
            parser: RequestParser::default(),
            unparsed: false,
            queue: VecDeque::with_capacity(REQUESTS_QUEUED_MAX),
            small: Small { bytes: [0; 64], filled: 0, sent: 0 },
            body: None,
        }
    }

    fn has_output(&self) -> bool {
        self.small.filled > 0 || self.body.is_some() || !self.queue.is_empty()
    }

    fn has_room(&self) -> bool {
        self.queue.len() < REQUESTS_QUEUED_MAX
    }

    /// With a full queue nothing is read: the reader's own sends block then, which is the backpressure.
    fn wants_input(&self, readable: bool) -> bool {
        self.has_room() && (readable || self.unparsed)
    }

    /// Reads and parses requests while there is room. Returns whether anything came.
    fn receive(&mut self, stream: &mut Stream, readable: &mut bool, ended: bool) -> Result<bool, Close> {
        let mut came = false;
        if self.unparsed {
            self.parse()?;
        }
        while *readable && self.has_room() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
            let room = self.buffer.get_mut(self.end..).unwrap_or_default();
            let room_bytes = room.len();
            match stream.receive_into(room) {
                Ok(0) => return Err(Close::Lost),
                Ok(taken) => {
                    came = true;
                    self.end += taken;
                    // Less than asked for: drained, and the next byte raises an edge. A closed stream has no next byte.
                    *readable = taken == room_bytes || ended;
                    self.parse()?;
                }
                Err(error) if blocked(&error) => *readable = false,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(came)
    }

    fn parse(&mut self) -> Result<(), Close> {
        let mut bytes = self.buffer.get(self.start..self.end).unwrap_or_default();
        self.unparsed = false;
        loop {
            if self.queue.len() >= REQUESTS_QUEUED_MAX {
                self.unparsed = !bytes.is_empty();
                break;
            }
            match self.parser.next_request(&mut bytes) {
                Ok(Some(request)) => self.queue.push_back(request),
                Ok(None) => break,
                Err(error) => return Err(Close::Protocol(error)),
            }
        }
        self.start = self.end - bytes.len();
        Ok(())
    }

    /// Sends until the budget is spent, the socket is full or nothing is left. Returns the bytes that went.
    fn send(
        &mut self,
        stream: &mut Stream,
        shared: &Shared,
        budget: &mut usize,
        writable: &mut bool,
    ) -> Result<usize, Close> {
        let mut total = 0;
        while *budget > 0 {
            self.compose(shared);
            let small = self.small.pending();
            let mut vectors = [IoVec::new(small.as_ptr(), small.len()); 2];
            let mut count = usize::from(!small.is_empty());
            if let (Some(body), Some(vector)) = (&self.body, vectors.get_mut(count)) {
                *vector = IoVec::new(body.at, body.left.min(*budget));
                count += 1;
            }
            if count == 0 {
                break;
            }
            // After a body its word follows at once, so that the kernel need not send a partial segment before it.
            let more = self.body.is_some() || !self.queue.is_empty();
            // SAFETY: the small bytes are ours; a body's range lies within an object that `Served` keeps readable.
            match unsafe { stream.send(vectors.get(..count).unwrap_or_default(), more) } {
                Ok(sent) => {
                    total += sent;
                    *budget = budget.saturating_sub(sent);
                    self.sent(sent, shared);
                }
                Err(error) if blocked(&error) => {
                    *writable = false;
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(total)
    }

    /// Appends the next reply's header where there is room, and finds its object.
    fn compose(&mut self, shared: &Shared) {
        while self.body.is_none() && self.small.has_room() {
            let Some(request) = self.queue.pop_front() else { return };
            let (status, at) = locate(shared, &request);
            let length_bytes = if status == Status::Ok { request.length_bytes } else { 0 };
            self.small.push(&Reply { sequence: request.sequence, status, length_bytes }.encode());
            match (at, usize::try_from(length_bytes)) {
                (Some(at), Ok(left)) => self.body = Some(Body { slot: request.slot, at, left }),
                _ => {
                    shared.counters.requests_refused.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }

    /// Accounts for bytes that were sent. A body's word is loaded here and nowhere else: after the send that took its
    /// last byte has returned, that is, after the kernel's copy of every byte (design 1.7).
    fn sent(&mut self, bytes: usize, shared: &Shared) {
        let rest = bytes - self.small.advance(bytes);
        let Some(body) = &mut self.body else { return };
        body.at = body.at.wrapping_add(rest);
        body.left -= rest.min(body.left);
        let Counters { objects_sent, bytes_sent, .. } = &shared.counters;
        bytes_sent.fetch_add(rest as u64, Ordering::Relaxed);
        if body.left == 0 {
            // A slot that exists no more has no valid word: zeros, which no reader accepts.
            let word = shared.memory.load_word_after_data(body.slot).unwrap_or_default();
            self.body = None;
            self.small.push(&word.to_le_bytes());
            objects_sent.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Finds the bytes of a request, with every bound checked against the owner's own numbers.
fn locate(shared: &Shared, request: &Request) -> (Status, Option<*const u8>) {
    let Some(ServedObject { base, length_bytes }) = shared.memory.object(request.slot) else {
        return (Status::UnknownSlot, None);
    };
    let offset = usize::try_from(request.object_offset).ok();
    match offset {
        Some(offset) if length_bytes == request.object_bytes && request.is_sound() => {
            (Status::Ok, Some(base.as_ptr().cast_const().wrapping_add(offset)))
        }
        _ => (Status::SizeMismatch, None),
    }
}
