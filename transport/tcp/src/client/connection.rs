//! One connection to an owner: connect, handshake, greeting, then requests out and replies in.

use std::collections::VecDeque;
use std::io;
use std::time::Instant;

use kvfabric_transport_api::{ConnectError, Event, PeerKey, ReadError, ReadOp};

use super::landing::{Flight, Landing};
use crate::limits::{RECEIVE_TURN_BYTES, REQUESTS_PER_FRAME_MAX, WAKE_BYTES, WAKE_BYTES_MIN};
use crate::socket::{self, IoVec};
use crate::stream::Stream;
use crate::wire::{
    encode_frame_header, Hello, Request, Verdict, Welcome, WireError, FRAME_HEADER_BYTES, WELCOME_BYTES,
};

/// Why a connection, and with it its peer, is given up.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// The network or the peer ended it.
    Lost(String),
    /// The peer broke the protocol.
    Protocol(&'static str),
    /// It was never ready. `elsewhere`: another address of the peer may do better.
    Connect { error: ConnectError, elsewhere: bool },
}

impl Fault {
    fn connect(error: &io::Error, elsewhere: bool) -> Self {
        Self::Connect { error: ConnectError::Unreachable(error.to_string()), elsewhere }
    }

    pub(super) fn read_error(&self) -> ReadError {
        match self {
            Self::Lost(reason) => ReadError::PeerLost(reason.clone()),
            Self::Protocol(what) => ReadError::Protocol(what),
            Self::Connect { error, .. } => ReadError::PeerLost(error.to_string()),
        }
    }

    pub(super) fn connect_error(&self) -> ConnectError {
        match self {
            Self::Lost(reason) => ConnectError::Unreachable(reason.clone()),
            Self::Protocol(what) => ConnectError::Protocol((*what).to_owned()),
            Self::Connect { error, .. } => error.clone(),
        }
    }

    pub(super) fn reason(&self) -> String {
        match self {
            Self::Lost(reason) => reason.clone(),
            Self::Protocol(what) => format!("the peer broke the protocol: {what}"),
            Self::Connect { error, .. } => error.to_string(),
        }
    }
}

impl From<WireError> for Fault {
    fn from(error: WireError) -> Self {
        Self::Protocol(error.text())
    }
}

fn lost(error: &io::Error) -> Fault {
    Fault::Lost(error.to_string())
}

fn blocked(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Connecting,
    Securing,
    Greeting { welcome: [u8; WELCOME_BYTES], filled: usize },
    Ready,
}

pub(super) struct Connection {
    pub peer: PeerKey,
    stream: Stream,
    phase: Phase,
    hello: Hello,
    /// The socket may have something to read, may take bytes, has been closed by the peer.
    pub readable: bool,
    writable: bool,
    ended: bool,
    /// Waits in the provider's ready queue.
    pub queued: bool,
    /// The poll that served it last.
    pub served: u32,
    /// Place in the provider's list of connections whose replies are due.
    pub busy_at: Option<usize>,
    out: Vec<u8>,
    out_sent: usize,
    /// Where the frame begins to which the next request is added, and how many it has; none once it has begun to go.
    frame: Option<(usize, u16)>,
    flights: VecDeque<Flight>,
    next_sequence: u64,
    landing: Landing,
    /// When bytes last moved, or the first request after a pause was posted.
    active: Instant,
    wake_bytes: usize,
}

impl Connection {
    pub(super) fn new(peer: PeerKey, stream: Stream, hello: Hello, now: Instant) -> Self {
        Self {
            peer,
            stream,
            phase: Phase::Connecting,
            hello,
            readable: false,
            writable: false,
            ended: false,
            queued: false,
            served: 0,
            busy_at: None,
            out: Vec::new(),
            out_sent: 0,
            frame: None,
            flights: VecDeque::new(),
            next_sequence: 0,
            landing: Landing::new(),
            active: now,
            wake_bytes: 1,
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.phase == Phase::Ready
    }

    pub(super) fn is_busy(&self) -> bool {
        !self.flights.is_empty()
    }

    pub(super) fn requests(&self) -> usize {
        self.flights.len()
    }

    pub(super) fn mark(&mut self, readable: bool, writable: bool, ended: bool) {
        self.ended |= ended;
        self.readable |= readable || ended;
        self.writable |= writable || ended;
    }

    /// Whether a reply has made no progress for too long.
    pub(super) fn is_stalled(&self, now: Instant, limit: std::time::Duration) -> bool {
        self.is_busy() && now.saturating_duration_since(self.active) > limit
    }

    /// Adds a request; it goes out with the next [`Connection::flush`], together with its neighbours. `now` starts the
    /// clock of the first request after a pause.
    pub(super) fn request(&mut self, op: ReadOp, now: Option<Instant>) {
        let request = Request {
            sequence: self.next_sequence,
            slot: op.slot,
            object_bytes: op.object_bytes,
            object_offset: op.object_offset,
            length_bytes: op.destination.total_bytes(),
        };
        self.next_sequence += 1;
        let (at, count) = match self.frame {
            Some((at, count)) if usize::from(count) < REQUESTS_PER_FRAME_MAX => (at, count + 1),
            _ => {
                let at = self.out.len();
                self.out.extend_from_slice(&[0; FRAME_HEADER_BYTES]);
                (at, 1)
            }
        };
        self.frame = Some((at, count));
        if let Some(header) = self.out.get_mut(at..at + FRAME_HEADER_BYTES) {
            header.copy_from_slice(&encode_frame_header(count));
        }
        self.out.extend_from_slice(&request.encode());
        if let Some(now) = now {
            self.active = now;
        }
        self.flights.push_back(Flight {
            sequence: request.sequence,
            length_bytes: request.length_bytes,
            op: Some(op),
        });
    }

    /// Takes an operation out, whatever its reply has come to. No receive names its destination from here on, and none
    /// is running, because receives are this thread's own calls: it has retired.
    pub(super) fn take_op(&mut self, is_it: impl Fn(&ReadOp) -> bool) -> Option<ReadOp> {
        let flight = self.flights.iter_mut().find(|flight| flight.op.as_ref().is_some_and(&is_it))?;
        flight.op.take()
    }

    /// Takes all operations out, in order.
    pub(super) fn take_ops(&mut self) -> impl Iterator<Item = ReadOp> + '_ {
        self.flights.drain(..).filter_map(|flight| flight.op)
    }

    /// Goes on with connecting. Returns whether the connection has become ready.
    pub(super) fn advance(&mut self) -> Result<bool, Fault> {
        loop {
            match &mut self.phase {
                Phase::Connecting => {
                    if !self.writable {
                        return Ok(false);
                    }
                    socket::connect_outcome(self.stream.fd()).map_err(|e| Fault::connect(&e, true))?;
                    self.phase = Phase::Securing;
                }
                Phase::Securing => {
                    if !self.stream.handshake().map_err(|error| tls_fault(&error))? {
                        return Ok(false);
                    }
                    self.out.extend_from_slice(&self.hello.encode());
                    self.phase = Phase::Greeting { welcome: [0; WELCOME_BYTES], filled: 0 };
                }
                Phase::Greeting { .. } => {
                    self.flush().map_err(|fault| greeting_fault(&fault))?;
                    return self.welcome();
                }
                Phase::Ready => return Ok(false),
            }
        }
    }

    fn welcome(&mut self) -> Result<bool, Fault> {
        let Phase::Greeting { welcome, filled } = &mut self.phase else { return Ok(false) };
        while *filled < WELCOME_BYTES {
            match self.stream.receive_into(welcome.get_mut(*filled..).unwrap_or_default()) {
                Ok(0) => {
                    let error = ConnectError::Unreachable("the peer closed the connection".to_owned());
                    return Err(Fault::Connect { error, elsewhere: false });
                }
                Ok(taken) => *filled += taken,
                Err(error) if blocked(&error) => {
                    self.readable = false;
                    return Ok(false);
                }
                Err(error) => return Err(tls_fault(&error)),
            }
        }
        let refusal = |error| Fault::Connect { error, elsewhere: false };
        let Welcome { verdict, incarnation } = Welcome::decode(welcome)
            .map_err(|error| refusal(ConnectError::Protocol(error.text().to_owned())))?;
        let wanted = self.hello.incarnation;
        match verdict {
            Verdict::Ready if incarnation == wanted => {}
            Verdict::Ready | Verdict::WrongIncarnation => {
                return Err(refusal(ConnectError::WrongIncarnation { wanted, found: incarnation }));
            }
            Verdict::TokenRefused => {
                return Err(refusal(ConnectError::Unreachable("the peer refused the token".to_owned())));
            }
            Verdict::WrongVersion => {
                return Err(refusal(ConnectError::Protocol("another protocol version".to_owned())));
            }
        }
        self.phase = Phase::Ready;
        Ok(true)
    }

    /// Sends what waits, as far as the socket takes it.
    pub(super) fn flush(&mut self) -> Result<(), Fault> {
        while self.writable {
            let rest = self.out.get(self.out_sent..).unwrap_or_default();
            if rest.is_empty() {
                if self.stream.wants_flush() {
                    self.writable = self.stream.flush().map_err(|error| lost(&error))?;
                }
                break;
            }
            // Part of the frame may be gone after this: it takes no more requests.
            self.frame = None;
            match self.stream.send_from(rest) {
                Ok(sent) => self.out_sent += sent,
                Err(error) if blocked(&error) => self.writable = false,
                Err(error) => return Err(lost(&error)),
            }
        }
        if self.out_sent == self.out.len() {
            self.out.clear();
            self.out_sent = 0;
        }
        Ok(())
    }

    /// Receives what is there, up to one turn's worth. Retired operations go to `events`; afterwards `readable` says
    /// whether there may be more.
    pub(super) fn receive(
        &mut self,
        vectors: &mut Vec<IoVec>,
        sink: &mut [u8],
        events: &mut Vec<Event>,
        now: Instant,
    ) -> Result<(), Fault> {
        let mut budget = RECEIVE_TURN_BYTES;
        while budget > 0 {
            if self.flights.is_empty() {
                return if self.readable { self.expect_nothing() } else { Ok(()) };
            }
            let room = self.landing.compose(&self.flights, vectors, sink);
            // SAFETY: every entry names either our own header, word and sink buffers, to which no reference is used
            // during the call, or pieces of the destination of an operation that this connection holds.
            match unsafe { self.stream.receive(vectors) } {
                Ok(0) => return Err(Fault::Lost("the peer closed the connection".to_owned())),
                Ok(taken) => {
                    self.active = now;
                    budget = budget.saturating_sub(taken);
                    self.landing.land(taken, &mut self.flights, events)?;
                    // Less than asked for: drained, and the next byte raises an edge. A closed stream has none.
                    self.readable = taken == room || self.ended;
                    if !self.readable {
                        return Ok(());
                    }
                }
                Err(error) if blocked(&error) => {
                    self.readable = false;
                    return Ok(());
                }
                Err(error) => return Err(lost(&error)),
            }
        }
        Ok(())
    }

    /// With no reply due the peer may only close the connection.
    fn expect_nothing(&mut self) -> Result<(), Fault> {
        let mut byte = [0; 1];
        match self.stream.receive_into(&mut byte) {
            Ok(0) => Err(Fault::Lost("the peer closed the connection".to_owned())),
            Ok(_) => Err(Fault::Protocol("bytes that nobody asked for")),
            Err(error) if blocked(&error) => {
                self.readable = false;
                Ok(())
            }
            Err(error) => Err(lost(&error)),
        }
    }

    /// Before a sleep: asks to be woken only when enough of a long reply is there, all of it at most. Must be called
    /// again before every sleep, because less may be due by then.
    pub(super) fn prepare_sleep(&mut self) {
        let due = usize::try_from(self.landing.due(&self.flights)).unwrap_or(usize::MAX);
        self.wake_at(if due < WAKE_BYTES_MIN { 1 } else { due.min(WAKE_BYTES) });
    }

    /// Asks to be woken by the first byte again.
    pub(super) fn wake_early(&mut self) {
        self.wake_at(1);
    }

    fn wake_at(&mut self, bytes: usize) {
        // TLS has records of its own length, which nothing here knows. On a refusal the old value stays and is tried to
        // be changed again; a connection that would sleep for ever over it ends by its stall timeout.
        if bytes != self.wake_bytes
            && self.stream.is_plain()
            && socket::set_wake_bytes(self.stream.fd(), bytes).is_ok()
        {
            self.wake_bytes = bytes;
        }
    }
}

fn tls_fault(error: &io::Error) -> Fault {
    let words = match error.kind() {
        io::ErrorKind::InvalidData => format!("TLS: {error}"),
        io::ErrorKind::UnexpectedEof => "the peer closed the connection".to_owned(),
        _ => error.to_string(),
    };
    Fault::Connect { error: ConnectError::Unreachable(words), elsewhere: false }
}

fn greeting_fault(fault: &Fault) -> Fault {
    Fault::Connect { error: fault.connect_error(), elsewhere: false }
}
