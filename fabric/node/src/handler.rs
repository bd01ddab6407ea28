//! What peers and the directory may ask of a rank: HELLO, TOUCH, CLEAR.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvfabric_core::wire::{
    decode_request, encode_reply, Address, Hello, HelloAck, HelloReply, Name, Records, Refusal, Reply,
    Request, Token, Touch, UnixOffer, TCP_TOKENS_MAX,
};
use kvfabric_core::Incarnation;
use kvfabric_transport_control::{CloseReason, Connection, Handler, Responder};
use kvfabric_transport_tcp::TokenStore;

use crate::command::Command;

/// A token not shown within this time is void: connecting takes milliseconds.
const TOKEN_LIFETIME: Duration = Duration::from_secs(10);

/// Most TOUCH messages that wait for the core thread: one from each of some dozens of peers in a tenth of a second.
const TOUCHES_QUEUED_MAX: usize = 64;

/// What this rank says of itself in HELLO_ACK.
pub(crate) struct Offer {
    pub(crate) cluster: Name<'static>,
    pub(crate) name: Name<'static>,
    pub(crate) incarnation: Incarnation,
    pub(crate) unix: Option<Address<'static>>,
    pub(crate) tcp: Option<Address<'static>>,
    pub(crate) tokens: Arc<TokenStore>,
}

/// Serves the control connections of a rank.
pub(crate) struct RankHandler {
    offer: Offer,
    core: Sender<Command>,
    /// Connection to the directory, 0 while there is none: only the directory may clear.
    directory: AtomicU64,
    /// TOUCH messages that wait for the core thread, which counts them down.
    touches: Arc<AtomicUsize>,
}

impl RankHandler {
    pub(crate) fn new(offer: Offer, core: Sender<Command>, touches: Arc<AtomicUsize>) -> Self {
        Self { offer, core, directory: AtomicU64::new(0), touches }
    }

    /// Tells which connection leads to the directory.
    pub(crate) fn set_directory(&self, connection: Option<&Connection>) {
        self.directory.store(connection.map_or(0, |connection| connection.id().0), Ordering::Release);
    }

    fn hello(&self, connection: &Connection, hello: &Hello<'_>) -> Reply<'_> {
        if !connection.peer().allows(hello.name.as_str()) {
            return Reply::Refused(Refusal::ForeignConnection);
        }
        if hello.cluster.as_str() != self.offer.cluster.as_str() {
            return Reply::Hello(HelloReply::ClusterMismatch);
        }
        if hello.wanted != self.offer.incarnation {
            return Reply::Hello(HelloReply::WrongIncarnation { found: self.offer.incarnation });
        }
        let mut tcp_tokens = Records::new();
        if self.offer.tcp.is_some() && hello.tcp_tokens_wanted > 0 {
            let wanted = usize::from(hello.tcp_tokens_wanted).min(TCP_TOKENS_MAX);
            match self.offer.tokens.issue(wanted, Instant::now(), TOKEN_LIFETIME) {
                Ok(tokens) => tokens.into_iter().for_each(|token| tcp_tokens.push(Token(token))),
                Err(error) => {
                    tracing::warn!(peer = hello.name.as_str(), %error, "no tokens for a peer");
                    return Reply::Hello(HelloReply::Busy);
                }
            }
        }
        Reply::Hello(HelloReply::Ack(HelloAck {
            name: self.offer.name.borrowed(),
            incarnation: self.offer.incarnation,
            unix: self.offer.unix.as_ref().map(|path| UnixOffer { path: path.borrowed() }),
            tcp: self.offer.tcp.as_ref().map(Address::borrowed),
            tcp_tokens,
            slabs: Records::new(),
        }))
    }

    fn touch(&self, touch: &Touch<'_>) {
        if touch.incarnation != self.offer.incarnation {
            return;
        }
        // Advisory and lossy by design: what is more than the core keeps up with is left out.
        if self.touches.fetch_add(1, Ordering::AcqRel) >= TOUCHES_QUEUED_MAX
            || self.core.send(Command::Touched { entries: touch.entries.iter().collect() }).is_err()
        {
            self.touches.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Handler for RankHandler {
    fn handle_request(&self, connection: &Connection, request: Bytes, responder: Responder) {
        let reply = match decode_request(&request) {
            Ok(Request::Hello(hello)) => self.hello(connection, &hello),
            Ok(Request::Touch(touch)) => {
                self.touch(&touch);
                Reply::Done(kvfabric_core::wire::Done)
            }
            Ok(Request::ClearRank(clear)) => {
                if connection.id().0 == self.directory.load(Ordering::Acquire) {
                    // Answered by the core thread once O1 is done; a responder that is dropped is a refusal.
                    let _ = self.core.send(Command::ClearRank { clear, responder });
                    return;
                }
                Reply::Refused(Refusal::ForeignConnection)
            }
            Ok(_) => Reply::Refused(Refusal::Unsupported),
            Err(error) => {
                tracing::debug!(peer = %connection.peer().address(), %error, "a request could not be read");
                Reply::Refused(error.refusal())
            }
        };
        respond(responder, &reply);
    }

    fn handle_notification(&self, connection: &Connection, message: Bytes) {
        match decode_request(&message) {
            Ok(Request::Touch(touch)) => self.touch(&touch),
            Ok(other) => {
                tracing::debug!(peer = %connection.peer().address(), kind = other.name(), "unexpected notification");
            }
            Err(error) => {
                tracing::debug!(peer = %connection.peer().address(), %error, "a notification could not be read");
            }
        }
    }

    fn handle_closed(&self, connection: &Connection, reason: &CloseReason) {
        tracing::debug!(peer = %connection.peer().address(), %reason, "control connection closed");
    }
}

/// Encodes and sends a reply. A reply that breaks a limit of the protocol is our bug and becomes a refusal.
pub(crate) fn respond(responder: Responder, reply: &Reply<'_>) {
    let mut frame = Vec::with_capacity(64);
    if encode_reply(reply, &mut frame).is_err() {
        tracing::error!(reply = reply.name(), "a reply breaks a limit of the protocol");
        frame.clear();
        if encode_reply(&Reply::Refused(Refusal::Overloaded), &mut frame).is_err() {
            return;
        }
    }
    responder.reply(frame);
}
