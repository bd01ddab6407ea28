//! An endpoint: one UDP socket that takes connections and makes them.

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{IdleTimeout, TransportConfig, VarInt};
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::admission::{Admission, Arrival, Verdict};
use crate::connection::{exchange, Connection, Handler, PeerInfo};
use crate::error::{code, BindError, CloseReason, ConnectError, RequestError};
use crate::frame::Kind;
use crate::limits::{
    CLOSE_TIMEOUT, CONNECTIONS_MAX, CONNECTION_WINDOW_BYTES, CONNECT_ADDRESSES_MAX, CONNECT_STAGGER,
    CONNECT_TIMEOUT, HANDSHAKES_PENDING_MAX, HANDSHAKES_PER_SOURCE_PER_S, HANDSHAKE_TIMEOUT, IDLE_TIMEOUT,
    KEEP_ALIVE, REFUSED_WAIT_MAX, REFUSED_WAIT_MIN, SEND_WINDOW_BYTES, STREAMS_MAX, STREAM_WINDOW_BYTES,
};
use crate::reconnect::Backoff;
use crate::socket;
use crate::tls::{library, NameRule, Tls, TlsError};

/// Settings of an [`Endpoint`].
#[derive(Clone, Debug)]
pub struct EndpointConfig {
    /// Certificates.
    pub tls: Tls,
    /// Limit of one connect, resolving included.
    pub connect_timeout: Duration,
    /// A silent connection is probed this often.
    pub keep_alive: Duration,
    /// A connection without any sign of the peer for this long is lost.
    pub idle_timeout: Duration,
    /// Handshakes a second admitted from one source address.
    pub handshakes_per_source_per_s: u32,
}

impl EndpointConfig {
    /// The settings of [`limits`](crate::limits).
    #[must_use]
    pub fn new(tls: Tls) -> Self {
        Self {
            tls,
            connect_timeout: CONNECT_TIMEOUT,
            keep_alive: KEEP_ALIVE,
            idle_timeout: IDLE_TIMEOUT,
            handshakes_per_source_per_s: HANDSHAKES_PER_SOURCE_PER_S,
        }
    }

    fn transport(&self) -> Result<Arc<TransportConfig>, TlsError> {
        let mut transport = TransportConfig::default();
        transport
            .max_concurrent_bidi_streams(VarInt::from_u32(STREAMS_MAX))
            .max_concurrent_uni_streams(VarInt::from_u32(STREAMS_MAX))
            .stream_receive_window(VarInt::from_u32(STREAM_WINDOW_BYTES))
            .receive_window(VarInt::from_u32(CONNECTION_WINDOW_BYTES))
            .send_window(SEND_WINDOW_BYTES)
            // Requests are finished one after the other rather than all at the same late time.
            .send_fairness(false)
            .datagram_receive_buffer_size(None)
            .keep_alive_interval(Some(self.keep_alive))
            .max_idle_timeout(Some(IdleTimeout::try_from(self.idle_timeout).map_err(library)?));
        Ok(Arc::new(transport))
    }

    fn server(&self, transport: &Arc<TransportConfig>) -> Result<quinn::ServerConfig, TlsError> {
        let crypto = QuicServerConfig::try_from(self.tls.control_server_config()?).map_err(library)?;
        let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
        config
            .transport_config(Arc::clone(transport))
            .migration(false)
            .max_incoming(HANDSHAKES_PENDING_MAX)
            // Handshakes are judged as they arrive, so a first flight is all that ever waits.
            .incoming_buffer_size(64 << 10)
            .incoming_buffer_size_total(16 << 20);
        Ok(config)
    }
}

/// One UDP socket, server and client at once. Clones are handles of the same endpoint; when the last one is dropped its
/// connections are closed.
#[derive(Clone, Debug)]
pub struct Endpoint {
    inner: Arc<Inner>,
}

struct Inner {
    quic: quinn::Endpoint,
    local: SocketAddr,
    config: EndpointConfig,
    transport: Arc<TransportConfig>,
    host_client: quinn::ClientConfig,
    handler: Arc<dyn Handler>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Endpoint")
            .field("local", &self.local)
            .field("security", self.config.tls.security())
            .finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.quic.close(VarInt::from_u32(code::CLOSED), b"endpoint dropped");
    }
}

impl Endpoint {
    /// Listens on UDP `address` (port 0: the kernel chooses) and can connect as well. Needs a tokio runtime around it.
    ///
    /// # Errors
    /// [`BindError`], which names the address and the remedy.
    pub fn bind(
        config: EndpointConfig,
        address: SocketAddr,
        handler: Arc<dyn Handler>,
    ) -> Result<Self, BindError> {
        config.tls.security().check_listen(address)?;
        Self::start(config, socket::bind_udp(address)?, handler, true)
    }

    /// As [`Endpoint::bind`], with a TCP listener on the same port for liveness.
    ///
    /// # Errors
    /// [`BindError`], which names the address and the remedy.
    pub fn bind_with_liveness(
        config: EndpointConfig,
        address: SocketAddr,
        handler: Arc<dyn Handler>,
    ) -> Result<(Self, TcpListener), BindError> {
        config.tls.security().check_listen(address)?;
        let (udp, tcp) = socket::bind_both(address)?;
        Ok((Self::start(config, udp, handler, true)?, tcp))
    }

    /// Connects only, from a port that the kernel chooses; peers can still send requests on those connections.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn client(config: EndpointConfig, handler: Arc<dyn Handler>) -> Result<Self, BindError> {
        Self::start(config, socket::bind_udp_client()?, handler, false)
    }

    fn start(
        config: EndpointConfig,
        socket: UdpSocket,
        handler: Arc<dyn Handler>,
        listens: bool,
    ) -> Result<Self, BindError> {
        let unspecified = SocketAddr::from(([0, 0, 0, 0], 0));
        let local = socket
            .local_addr()
            .map_err(|error| BindError::from_io("UDP", unspecified, "read its address", &error))?;
        if tokio::runtime::Handle::try_current().is_err() {
            return Err(BindError::NoRuntime { address: local });
        }
        let transport = config.transport()?;
        let server = listens.then(|| config.server(&transport)).transpose()?;
        let host_client = client_config(&config.tls, NameRule::Host, &transport)?;
        let quic = quinn::Endpoint::new(
            quinn::EndpointConfig::default(),
            server,
            socket,
            Arc::new(quinn::TokioRuntime),
        )
        .map_err(|error| BindError::from_io("UDP", local, "start", &error))?;
        if listens {
            let rate = config.handshakes_per_source_per_s;
            let authenticated = config.tls.authenticates();
            tokio::spawn(accept(quic.clone(), Arc::clone(&handler), rate, authenticated));
        }
        Ok(Self { inner: Arc::new(Inner { quic, local, config, transport, host_client, handler }) })
    }

    /// The UDP address that the socket is bound to.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.inner.local
    }

    /// Open connections, both ways, those in handshake included.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.inner.quic.open_connections()
    }

    /// The certificates in use.
    #[must_use]
    pub fn tls(&self) -> &Tls {
        &self.inner.config.tls
    }

    /// Connects to `target`, `HOST:PORT`. The peer's certificate must be of our authority and carry HOST.
    ///
    /// # Errors
    /// [`ConnectError`], which names the target; within the endpoint's connect timeout.
    pub async fn connect(&self, target: &str) -> Result<Connection, ConnectError> {
        self.connect_with(target, None).await
    }

    /// Connects to the rank `rank_name` at `target`, `HOST:PORT`. The peer's certificate must be of our authority and
    /// allow that name ([`san_allows`](crate::san_allows)), whatever its host is called.
    ///
    /// # Errors
    /// [`ConnectError`], which names the target; within the endpoint's connect timeout.
    pub async fn connect_rank(&self, target: &str, rank_name: &str) -> Result<Connection, ConnectError> {
        self.connect_with(target, Some(rank_name)).await
    }

    async fn connect_with(&self, target: &str, rank_name: Option<&str>) -> Result<Connection, ConnectError> {
        let limit = self.inner.config.connect_timeout;
        let refused = Arc::new(AtomicBool::new(false));
        let quic = match timeout(limit, self.race(target, rank_name, &refused)).await {
            Ok(result) => result?,
            Err(_) if refused.load(Ordering::Relaxed) => {
                return Err(ConnectError::Refused { target: target.to_owned() });
            }
            Err(_) => return Err(ConnectError::Timeout { target: target.to_owned(), timeout: limit }),
        };
        let peer = PeerInfo::of(&quic, self.inner.config.tls.authenticates());
        if let Some(expected) = rank_name.filter(|name| !peer.allows(name)) {
            // The verifier has refused such a certificate already, except in a resumed session of another rank.
            quic.close(VarInt::from_u32(code::WRONG_NAME), b"wrong name");
            return Err(ConnectError::WrongName {
                target: target.to_owned(),
                expected: expected.to_owned(),
                names: peer.names().to_vec(),
            });
        }
        let connection = Connection::new(quic, peer, true);
        tokio::spawn(connection.clone().serve(Arc::clone(&self.inner.handler)));
        Ok(connection)
    }

    /// Tries the target's addresses one after the other, a little apart, and takes the first that answers.
    async fn race(
        &self,
        target: &str,
        rank_name: Option<&str>,
        refused: &Arc<AtomicBool>,
    ) -> Result<quinn::Connection, ConnectError> {
        let inner = &self.inner;
        let (host, addresses) = resolve(target, inner.local, inner.config.connect_timeout).await?;
        let (client, server_name) = match rank_name {
            None => (inner.host_client.clone(), host),
            Some(rank) => {
                let rule = NameRule::Rank(rank.to_owned());
                let client = client_config(&inner.config.tls, rule, &inner.transport)
                    .map_err(|error| local_error(target, &error))?;
                // Not looked at under this rule.
                (client, "kvfabric".to_owned())
            }
        };
        let attempt = Attempt {
            endpoint: inner.quic.clone(),
            client,
            server_name,
            target: target.to_owned(),
            refused: Arc::clone(refused),
            seed: u64::from(inner.local.port()),
        };
        let mut addresses = addresses.into_iter();
        let mut attempts = JoinSet::new();
        let mut failure = None;
        loop {
            if let Some(address) = addresses.next() {
                attempts.spawn(attempt.clone().run(address));
            }
            let more = addresses.len() > 0;
            tokio::select! {
                joined = attempts.join_next() => match joined {
                    Some(Ok(Ok(quic))) => return Ok(quic),
                    Some(Ok(Err(error))) => failure = Some(more_telling(failure, error)),
                    Some(Err(error)) => failure = Some(more_telling(failure, local_error(target, &error))),
                    None => {
                        let none = ConnectError::Unreachable { target: target.to_owned(), local: inner.local };
                        return Err(failure.unwrap_or(none));
                    }
                },
                () = sleep(CONNECT_STAGGER), if more => {}
            }
        }
    }

    /// Closes all connections with `reason` and stops listening. Returns at once; see [`Endpoint::shutdown`].
    pub fn close(&self, reason: &str) {
        self.inner.quic.close(VarInt::from_u32(code::CLOSED), reason.as_bytes());
    }

    /// Closes all connections and waits until peers were told, at most [`CLOSE_TIMEOUT`].
    pub async fn shutdown(&self, reason: &str) {
        self.close(reason);
        // A peer that does not answer has the idle timeout; there is nothing more to do here.
        let _ = timeout(CLOSE_TIMEOUT, self.inner.quic.wait_idle()).await;
    }
}

fn client_config(
    tls: &Tls,
    rule: NameRule,
    transport: &Arc<TransportConfig>,
) -> Result<quinn::ClientConfig, TlsError> {
    let crypto = QuicClientConfig::try_from(tls.control_client_config(rule)?).map_err(library)?;
    let mut config = quinn::ClientConfig::new(Arc::new(crypto));
    config.transport_config(Arc::clone(transport));
    Ok(config)
}

/// Of two failed addresses, the failure that says more: silence says least.
fn more_telling(first: Option<ConnectError>, second: ConnectError) -> ConnectError {
    match first {
        Some(first) if !first.is_retryable() || second.is_retryable() => first,
        _ => second,
    }
}

/// Host and addresses of `target`, those first that the resolver prefers, and only those that a socket bound to `local`
/// can reach.
async fn resolve(
    target: &str,
    local: SocketAddr,
    limit: Duration,
) -> Result<(String, Vec<SocketAddr>), ConnectError> {
    let invalid = || ConnectError::InvalidTarget { target: target.to_owned() };
    let (host, addresses) = if let Ok(address) = target.parse::<SocketAddr>() {
        (address.ip().to_string(), vec![address])
    } else {
        let (host, port) = target.rsplit_once(':').ok_or_else(invalid)?;
        let port: u16 = port.parse().map_err(|_| invalid())?;
        if host.is_empty() || host.contains([':', '[', ']', '/', ' ']) {
            return Err(invalid());
        }
        let unresolved = |detail: String| ConnectError::Unresolved { target: target.to_owned(), detail };
        let found: Vec<SocketAddr> = timeout(limit, tokio::net::lookup_host((host, port)))
            .await
            .map_err(|_| unresolved("the resolver does not answer".to_owned()))?
            .map_err(|error| unresolved(error.to_string()))?
            .collect();
        if found.is_empty() {
            return Err(unresolved("the name has no address".to_owned()));
        }
        (host.to_owned(), found)
    };
    // An IPv6 socket reaches IPv4 hosts only when bound to the wildcard.
    let reachable = |address: &SocketAddr| match local {
        SocketAddr::V4(_) => address.is_ipv4(),
        SocketAddr::V6(local) => address.is_ipv6() || local.ip().is_unspecified(),
    };
    let addresses: Vec<SocketAddr> =
        addresses.into_iter().filter(reachable).take(CONNECT_ADDRESSES_MAX).collect();
    if addresses.is_empty() {
        return Err(ConnectError::Unreachable { target: target.to_owned(), local });
    }
    Ok((host, addresses))
}

fn local_error(target: &str, error: &dyn std::fmt::Display) -> ConnectError {
    ConnectError::Local { target: target.to_owned(), detail: error.to_string() }
}

/// What trying one address needs.
#[derive(Clone)]
struct Attempt {
    endpoint: quinn::Endpoint,
    client: quinn::ClientConfig,
    server_name: String,
    target: String,
    /// Set while the peer is there but refuses, which a later timeout should say.
    refused: Arc<AtomicBool>,
    seed: u64,
}

impl Attempt {
    /// Handshake and greeting; a peer that is busy with handshakes is asked again. Bounded by the caller.
    async fn run(self, address: SocketAddr) -> Result<quinn::Connection, ConnectError> {
        let backoff = Backoff::new(REFUSED_WAIT_MIN, REFUSED_WAIT_MAX);
        let mut refusals = 0;
        loop {
            let reason = match self.greet(address).await? {
                Ok(quic) => return Ok(quic),
                Err(reason) => reason,
            };
            let target = self.target.clone();
            match reason {
                CloseReason::Refused => {
                    self.refused.store(true, Ordering::Relaxed);
                    sleep(backoff.delay_jittered(refusals, self.seed)).await;
                    refusals += 1;
                }
                CloseReason::Tls(detail) => return Err(ConnectError::Tls { target, detail }),
                CloseReason::Local => return Err(ConnectError::EndpointClosed { target }),
                reason => return Err(ConnectError::Lost { target, reason }),
            }
        }
    }

    async fn greet(
        &self,
        address: SocketAddr,
    ) -> Result<Result<quinn::Connection, CloseReason>, ConnectError> {
        let connecting = self
            .endpoint
            .connect_with(self.client.clone(), address, &self.server_name)
            .map_err(|error| match error {
                quinn::ConnectError::EndpointStopping => {
                    ConnectError::EndpointClosed { target: self.target.clone() }
                }
                error => local_error(&self.target, &error),
            })?;
        let quic = match connecting.await {
            Ok(quic) => quic,
            Err(error) => return Ok(Err(CloseReason::from_quic(&error))),
        };
        Ok(match exchange(&quic, Kind::Greeting, Bytes::new()).await {
            Ok(_) => Ok(quic),
            Err(RequestError::ConnectionLost { reason }) => Err(reason),
            Err(error) => Err(CloseReason::Protocol(error.to_string())),
        })
    }
}

/// Takes connections until the endpoint is closed.
async fn accept(quic: quinn::Endpoint, handler: Arc<dyn Handler>, rate: u32, authenticated: bool) {
    let admission = Arc::new(Mutex::new(Admission::new(rate)));
    while let Some(incoming) = quic.accept().await {
        let arrival = Arrival {
            source: incoming.remote_address().ip(),
            validated: incoming.remote_address_validated() || !incoming.may_retry(),
        };
        let verdict = if quic.open_connections() >= CONNECTIONS_MAX {
            Verdict::Refuse
        } else {
            lock(&admission).handle_arrival(Instant::now(), arrival)
        };
        match verdict {
            Verdict::Accept => {
                let pending = Pending(Arc::clone(&admission));
                tokio::spawn(establish(incoming, pending, Arc::clone(&handler), authenticated));
            }
            Verdict::Retry => {
                // Fails only for an address that is validated already, which is not asked again.
                let _ = incoming.retry();
            }
            Verdict::Refuse => {
                tracing::debug!(source = %arrival.source, "handshake refused");
                incoming.refuse();
            }
        }
    }
}

/// A handshake under way; ends when dropped.
struct Pending(Arc<Mutex<Admission>>);

impl Drop for Pending {
    fn drop(&mut self) {
        lock(&self.0).handle_done();
    }
}

/// Admission is plain counters: usable even if a thread panicked while holding it.
fn lock(admission: &Mutex<Admission>) -> MutexGuard<'_, Admission> {
    admission.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn establish(
    incoming: quinn::Incoming,
    pending: Pending,
    handler: Arc<dyn Handler>,
    authenticated: bool,
) {
    let source = incoming.remote_address();
    let connecting = match incoming.accept() {
        Ok(connecting) => connecting,
        Err(error) => {
            tracing::debug!(%source, %error, "handshake failed");
            return;
        }
    };
    match timeout(HANDSHAKE_TIMEOUT, connecting).await {
        Ok(Ok(quic)) => {
            drop(pending);
            let peer = PeerInfo::of(&quic, authenticated);
            Connection::new(quic, peer, false).serve(handler).await;
        }
        Ok(Err(error)) => tracing::debug!(%source, %error, "handshake failed"),
        Err(_) => tracing::debug!(%source, "handshake timed out"),
    }
}
