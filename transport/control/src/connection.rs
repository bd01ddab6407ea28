//! An established connection: requests and notifications both ways.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use quinn::{ReadError, RecvStream, SendStream, WriteError};
use rustls::pki_types::CertificateDer;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::error::{code, CloseReason, Refusal, RequestError};
use crate::frame::{self, FrameError, Header, Kind};
use crate::limits::{
    ANSWER_TIMEOUT, FRAME_BYTES_MAX, NOTIFY_TIMEOUT, REPLY_WRITE_TIMEOUT, REQUEST_BYTES_PENDING_MAX,
    REQUEST_READ_TIMEOUT,
};
use crate::names::san_allows;
use crate::tls::peer_names;

/// Number of a connection, unique within this process and never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Who is at the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    names: Vec<String>,
    address: SocketAddr,
    authenticated: bool,
}

impl PeerInfo {
    pub(crate) fn of(quic: &quinn::Connection, authenticated: bool) -> Self {
        let names = if authenticated {
            quic.peer_identity()
                .and_then(|identity| identity.downcast::<Vec<CertificateDer<'static>>>().ok())
                .and_then(|chain| chain.first().map(peer_names))
                .unwrap_or_default()
        } else {
            Vec::new()
        };
        let address = quic.remote_address();
        Self { names, address: SocketAddr::new(address.ip().to_canonical(), address.port()), authenticated }
    }

    /// Names (DNS and IP) of the peer's certificate; empty without authentication.
    #[must_use]
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The peer's UDP address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Whether the peer proved its names with a certificate of our authority.
    #[must_use]
    pub fn is_authenticated(&self) -> bool {
        self.authenticated
    }

    /// Whether the peer may speak for `rank_name` ([`san_allows`]); without authentication every name is allowed.
    #[must_use]
    pub fn allows(&self, rank_name: &str) -> bool {
        !self.authenticated || san_allows(&self.names, rank_name)
    }
}

/// Takes what peers send, on both sides of every connection of an endpoint.
///
/// Methods run on the connection's own task and must not block: a state machine behind a mutex answers at once through
/// the [`Responder`], with no further task in between, or keeps the responder and answers later from any thread.
/// Requests have streams of their own, so they arrive in no particular order.
pub trait Handler: Send + Sync + 'static {
    /// A request arrived.
    fn handle_request(&self, connection: &Connection, request: Bytes, responder: Responder);

    /// A notification arrived. Dropped by default.
    fn handle_notification(&self, connection: &Connection, message: Bytes) {
        let _ = (connection, message);
    }

    /// A connection is established, by either side; comes before anything else of that connection.
    fn handle_connected(&self, connection: &Connection) {
        let _ = connection;
    }

    /// A connection ended; comes once, and no request of that connection begins after it. Requests that arrived before
    /// may still be held, their responders then lead nowhere.
    fn handle_closed(&self, connection: &Connection, reason: &CloseReason) {
        let _ = (connection, reason);
    }
}

/// The right to answer one request, once. Dropping it tells the peer that there is no answer.
#[derive(Debug)]
pub struct Responder {
    answer: oneshot::Sender<Result<Bytes, Refusal>>,
}

impl Responder {
    /// Answers. Returns whether somebody still waits.
    pub fn reply(self, body: impl Into<Bytes>) -> bool {
        self.answer.send(Ok(body.into())).is_ok()
    }

    /// Refuses. Returns whether somebody still waits.
    pub fn refuse(self, refusal: Refusal) -> bool {
        self.answer.send(Err(refusal)).is_ok()
    }

    /// Whether nobody waits for the answer any more.
    #[must_use]
    pub fn is_abandoned(&self) -> bool {
        self.answer.is_closed()
    }
}

/// A connection to a peer. Clones are handles of the same connection; it stays open until closed or until its endpoint
/// is dropped.
#[derive(Clone)]
pub struct Connection {
    inner: Arc<Inner>,
}

struct Inner {
    quic: quinn::Connection,
    id: ConnectionId,
    peer: PeerInfo,
    initiated: bool,
    /// Bytes of incoming requests that are being read or handed over.
    pending_bytes: AtomicUsize,
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("id", &self.inner.id)
            .field("peer", &self.inner.peer)
            .field("initiated", &self.inner.initiated)
            .finish_non_exhaustive()
    }
}

impl Connection {
    pub(crate) fn new(quic: quinn::Connection, peer: PeerInfo, initiated: bool) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        let id = ConnectionId(NEXT_ID.fetch_add(1, Ordering::Relaxed));
        Self { inner: Arc::new(Inner { quic, id, peer, initiated, pending_bytes: AtomicUsize::new(0) }) }
    }

    /// This connection's number.
    #[must_use]
    pub fn id(&self) -> ConnectionId {
        self.inner.id
    }

    /// Who is at the other end.
    #[must_use]
    pub fn peer(&self) -> &PeerInfo {
        &self.inner.peer
    }

    /// Whether this side made the connection.
    #[must_use]
    pub fn is_initiator(&self) -> bool {
        self.inner.initiated
    }

    /// Why the connection ended; `None` while it lives.
    #[must_use]
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.inner.quic.close_reason().as_ref().map(CloseReason::from_quic)
    }

    /// Smoothed round-trip time.
    #[must_use]
    pub fn rtt(&self) -> Duration {
        self.inner.quic.rtt()
    }

    /// Waits until the connection ended, and says why.
    pub async fn closed(&self) -> CloseReason {
        CloseReason::from_quic(&self.inner.quic.closed().await)
    }

    /// Ends the connection at once; requests under way fail on both sides. The peer sees `reason`.
    pub fn close(&self, reason: &str) {
        self.inner.quic.close(quinn::VarInt::from_u32(code::CLOSED), reason.as_bytes());
    }

    /// Sends a request on a stream of its own and waits for the reply, at most `deadline`. Dropping the future cancels
    /// the request: the peer's responder becomes abandoned.
    ///
    /// # Errors
    /// [`RequestError`]; after a timeout or a lost connection the peer may or may not have acted.
    pub async fn request(&self, body: Bytes, deadline: Duration) -> Result<Bytes, RequestError> {
        check_length(body.len())?;
        match timeout(deadline, exchange(&self.inner.quic, Kind::Request, body)).await {
            Ok(result) => result,
            Err(_) => Err(RequestError::Timeout { deadline }),
        }
    }

    /// Sends a one-way message. Done when the connection has taken it; it is lost if the connection is.
    ///
    /// # Errors
    /// [`RequestError`]; a timeout after [`NOTIFY_TIMEOUT`] means that the peer takes no more for now.
    pub async fn notify(&self, body: Bytes) -> Result<(), RequestError> {
        check_length(body.len())?;
        let sending = async {
            let mut stream = Outgoing::new(self.inner.quic.open_uni().await.map_err(|error| lost(&error))?);
            frame::write(&mut stream.send, Kind::Notification, body).await.map_err(write_error)?;
            stream.done = true;
            Ok(())
        };
        match timeout(NOTIFY_TIMEOUT, sending).await {
            Ok(result) => result,
            Err(_) => Err(RequestError::Timeout { deadline: NOTIFY_TIMEOUT }),
        }
    }

    /// Takes the peer's streams until the connection ends. At most
    /// [`STREAMS_MAX`](crate::limits::STREAMS_MAX) of each kind are open, so tasks are bounded by the transport.
    pub(crate) async fn serve(self, handler: Arc<dyn Handler>) {
        handler.handle_connected(&self);
        let mut streams = JoinSet::new();
        let error = loop {
            let accepted = tokio::select! {
                stream = self.inner.quic.accept_bi() => stream.map(|(send, recv)| (Some(send), recv)),
                stream = self.inner.quic.accept_uni() => stream.map(|recv| (None, recv)),
            };
            // Those that ended meanwhile; waiting for each would wake this task once more for every request.
            while streams.try_join_next().is_some() {}
            match accepted {
                Ok((Some(send), recv)) => {
                    streams.spawn(serve_request(self.clone(), Arc::clone(&handler), send, recv));
                }
                Ok((None, recv)) => {
                    streams.spawn(serve_notification(self.clone(), Arc::clone(&handler), recv));
                }
                Err(error) => break error,
            }
        };
        // A request whose bytes have arrived could still reach the handler: not after it heard of the end.
        streams.shutdown().await;
        handler.handle_closed(&self, &CloseReason::from_quic(&error));
    }

    fn reserve(&self, length_bytes: usize) -> Result<PendingBytes<'_>, Incoming> {
        let pending = &self.inner.pending_bytes;
        let before = pending.fetch_add(length_bytes, Ordering::Relaxed);
        let reserved = PendingBytes { pending, length_bytes };
        if before + length_bytes > REQUEST_BYTES_PENDING_MAX {
            return Err(Incoming::Refuse(Refusal::Busy));
        }
        Ok(reserved)
    }
}

/// Share of [`REQUEST_BYTES_PENDING_MAX`], given back when dropped.
struct PendingBytes<'a> {
    pending: &'a AtomicUsize,
    length_bytes: usize,
}

impl Drop for PendingBytes<'_> {
    fn drop(&mut self) {
        self.pending.fetch_sub(self.length_bytes, Ordering::Relaxed);
    }
}

/// A stream that is reset when its work is given up half-way, so that the peer neither waits nor takes a part for the
/// whole (a dropped stream would end as if complete).
struct Outgoing {
    send: SendStream,
    done: bool,
}

impl Outgoing {
    fn new(send: SendStream) -> Self {
        Self { send, done: false }
    }
}

impl Drop for Outgoing {
    fn drop(&mut self) {
        if !self.done {
            // Fails if the stream is closed already, which is as good.
            let _ = self.send.reset(quinn::VarInt::from_u32(code::CANCELLED));
        }
    }
}

fn check_length(length_bytes: usize) -> Result<(), RequestError> {
    if length_bytes > FRAME_BYTES_MAX {
        return Err(RequestError::TooLarge { length_bytes, limit_bytes: FRAME_BYTES_MAX });
    }
    Ok(())
}

fn lost(error: &quinn::ConnectionError) -> RequestError {
    RequestError::ConnectionLost { reason: CloseReason::from_quic(error) }
}

fn write_error(error: WriteError) -> RequestError {
    match error {
        WriteError::ConnectionLost(error) => lost(&error),
        WriteError::Stopped(code) => RequestError::Refused { refusal: Refusal::from_code(code.into_inner()) },
        WriteError::ClosedStream | WriteError::ZeroRttRejected => {
            RequestError::Refused { refusal: Refusal::Malformed }
        }
    }
}

fn reply_error(error: FrameError) -> RequestError {
    match error {
        FrameError::TooLarge { length_bytes } => {
            RequestError::ReplyTooLarge { length_bytes, limit_bytes: FRAME_BYTES_MAX }
        }
        FrameError::Read(ReadError::ConnectionLost(error)) => lost(&error),
        FrameError::Read(ReadError::Reset(code)) => {
            RequestError::Refused { refusal: Refusal::from_code(code.into_inner()) }
        }
        FrameError::Malformed | FrameError::Read(_) => RequestError::MalformedReply,
    }
}

/// One frame out, one frame back.
pub(crate) async fn exchange(
    quic: &quinn::Connection,
    kind: Kind,
    body: Bytes,
) -> Result<Bytes, RequestError> {
    let (send, mut recv) = quic.open_bi().await.map_err(|error| lost(&error))?;
    let mut outgoing = Outgoing::new(send);
    frame::write(&mut outgoing.send, kind, body).await.map_err(write_error)?;
    let header = frame::read_header(&mut recv).await.map_err(reply_error)?;
    if header.kind != Kind::Reply {
        return Err(RequestError::MalformedReply);
    }
    let reply = frame::read_body(&mut recv, header).await.map_err(reply_error)?;
    outgoing.done = true;
    Ok(reply)
}

/// How an incoming frame ends that does not reach the handler.
enum Incoming {
    Refuse(Refusal),
    /// The peer gave it up, or the connection ended.
    Gone,
}

impl From<FrameError> for Incoming {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::TooLarge { .. } => Self::Refuse(Refusal::RequestTooLarge),
            FrameError::Malformed => Self::Refuse(Refusal::Malformed),
            FrameError::Read(_) => Self::Gone,
        }
    }
}

/// Reads one incoming frame and gives it to `deliver`; its bytes count against the connection until that returns.
async fn receive<T>(
    connection: &Connection,
    recv: &mut RecvStream,
    deliver: impl FnOnce(Header, Bytes) -> Result<T, Refusal>,
) -> Result<T, Incoming> {
    let reading = async {
        let header = frame::read_header(recv).await?;
        let reserved = connection.reserve(header.length_bytes)?;
        let body = frame::read_body(recv, header).await?;
        Ok::<_, Incoming>((header, body, reserved))
    };
    match timeout(REQUEST_READ_TIMEOUT, reading).await {
        Ok(Ok((header, body, _reserved))) => deliver(header, body).map_err(Incoming::Refuse),
        Ok(Err(end)) => Err(end),
        Err(_) => Err(Incoming::Refuse(Refusal::Timeout)),
    }
}

async fn serve_notification(connection: Connection, handler: Arc<dyn Handler>, mut recv: RecvStream) {
    let outcome = receive(&connection, &mut recv, |header, body| match header.kind {
        Kind::Notification => {
            handler.handle_notification(&connection, body);
            Ok(())
        }
        _ => Err(Refusal::Malformed),
    })
    .await;
    if let Err(Incoming::Refuse(refusal)) = outcome {
        tracing::debug!(connection = %connection.id(), %refusal, "notification refused");
        let _ = recv.stop(refusal.code());
    }
}

async fn serve_request(
    connection: Connection,
    handler: Arc<dyn Handler>,
    send: SendStream,
    mut recv: RecvStream,
) {
    let mut outgoing = Outgoing::new(send);
    let received = receive(&connection, &mut recv, |header, body| match header.kind {
        Kind::Request => {
            let (answer, answered) = oneshot::channel();
            handler.handle_request(&connection, body, Responder { answer });
            Ok(Some(answered))
        }
        Kind::Greeting if body.is_empty() => Ok(None),
        _ => Err(Refusal::Malformed),
    })
    .await;
    let answer = match received {
        Ok(Some(answered)) => wait_for_answer(&outgoing.send, answered).await,
        Ok(None) => Ok(Bytes::new()),
        Err(end) => Err(end),
    };
    match answer {
        Ok(body) => {
            let written =
                timeout(REPLY_WRITE_TIMEOUT, frame::write(&mut outgoing.send, Kind::Reply, body)).await;
            outgoing.done = matches!(written, Ok(Ok(())));
        }
        Err(Incoming::Refuse(refusal)) => {
            tracing::debug!(connection = %connection.id(), %refusal, "request refused");
            // Both fail only for a stream that is closed already.
            let _ = recv.stop(refusal.code());
            let _ = outgoing.send.reset(refusal.code());
            outgoing.done = true;
        }
        Err(Incoming::Gone) => {}
    }
}

/// The handler's answer, which is usually there already.
async fn wait_for_answer(
    send: &SendStream,
    mut answered: oneshot::Receiver<Result<Bytes, Refusal>>,
) -> Result<Bytes, Incoming> {
    let answer = match answered.try_recv() {
        Ok(answer) => Ok(answer),
        Err(oneshot::error::TryRecvError::Closed) => Err(Incoming::Refuse(Refusal::Unanswered)),
        Err(oneshot::error::TryRecvError::Empty) => {
            tokio::select! {
                biased;
                answer = &mut answered => answer.map_err(|_| Incoming::Refuse(Refusal::Unanswered)),
                // The peer gave up waiting, or is gone.
                _ = send.stopped() => Err(Incoming::Gone),
                () = tokio::time::sleep(ANSWER_TIMEOUT) => Err(Incoming::Refuse(Refusal::Timeout)),
            }
        }
    };
    match answer? {
        Ok(body) if body.len() > FRAME_BYTES_MAX => Err(Incoming::Refuse(Refusal::ReplyTooLarge)),
        Ok(body) => Ok(body),
        Err(refusal) => Err(Incoming::Refuse(refusal)),
    }
}
