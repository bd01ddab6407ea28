//! The directory service: drives `core::directory::Service` over QUIC and the liveness listener.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use kvfabric_core::directory::{
    ClearRequest, ConnectionId, Service, ServiceAction, ServiceConfig, TableConfig,
};
use kvfabric_core::limits::CLEAR_TIMEOUT;
use kvfabric_core::wire::{
    decode_reply, decode_request, Attach, ClearAck, ClearRank, ClearReply, JoinReply, Member, Refusal, Reply,
    Request, Stats,
};
use kvfabric_core::{NsEpoch, RankId, Time};
use kvfabric_transport_control::liveness::{LivenessEvent, LivenessId, LivenessServer, ServerConfig, Ticket};
use kvfabric_transport_control::{CloseReason, Connection, Endpoint, Handler, Responder, Tls};
use parking_lot::{Mutex, RwLock};

use crate::handler::respond;
use crate::session::request;
use crate::system::{end_runtime, endpoint_config, random_u64, runtime, security};
use crate::{DirectoryConfig, StartError};

/// The core's own silence limit. Silence is judged by the liveness threads, which report it at once; this bound only
/// catches a report that was lost.
const CORE_SILENCE_LIMIT: Duration = Duration::from_secs(60);
/// How often ranks that answer pings are confirmed to the core.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(5);
/// Longest sleep of the timer.
const TIMER_MAX: Duration = Duration::from_millis(250);

/// A directory that serves until it is dropped or closed.
pub struct DirectoryServer {
    state: Arc<State>,
    endpoint: Endpoint,
    liveness: Option<Arc<LivenessServer>>,
    metrics: Option<crate::metrics::MetricsServer>,
    runtime: Option<tokio::runtime::Runtime>,
}

struct State {
    started: Instant,
    service: RwLock<Service>,
    lookups: AtomicU64,
    lookup_keys: AtomicU64,
    next_clear: AtomicU64,
    connections: Mutex<HashMap<u64, Connection>>,
    clears: Mutex<HashMap<u64, Responder>>,
    /// Liveness tickets that were issued, and the live connections that showed them.
    tickets: Mutex<HashMap<LivenessId, (Member, u64)>>,
    answering: Mutex<HashMap<LivenessId, bool>>,
    liveness: OnceLock<Weak<LivenessServer>>,
    runtime: tokio::runtime::Handle,
}

/// Control and liveness connections share the core's space of names.
fn control_name(connection: &Connection) -> ConnectionId {
    ConnectionId(connection.id().0 << 1)
}

fn liveness_name(id: LivenessId) -> ConnectionId {
    ConnectionId(id.0 << 1 | 1)
}

impl DirectoryServer {
    /// Starts to listen and to serve.
    ///
    /// # Errors
    /// [`StartError`]: port in use, certificates, development certificates beyond loopback.
    pub fn start(config: DirectoryConfig) -> Result<Self, StartError> {
        let tls = Tls::load(&security(&config.security))
            .map_err(|error| StartError::Security(error.to_string()))?;
        let (runtime, handle) = runtime("kvf-directory")?;
        let session = random_u64()?;
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let service = Service::new(ServiceConfig {
            cluster: config.cluster.clone().into_boxed_str(),
            session,
            epoch_base: NsEpoch(u32::try_from(epoch).unwrap_or(u32::MAX / 2)),
            table: TableConfig { seed: [random_u64()?, random_u64()?], bytes_max: config.table_bytes_max },
            peer_timeout: CORE_SILENCE_LIMIT,
        });
        let state = Arc::new(State {
            started: Instant::now(),
            service: RwLock::new(service),
            lookups: AtomicU64::new(0),
            lookup_keys: AtomicU64::new(0),
            next_clear: AtomicU64::new(1),
            connections: Mutex::default(),
            clears: Mutex::default(),
            tickets: Mutex::default(),
            answering: Mutex::default(),
            liveness: OnceLock::new(),
            runtime: handle.clone(),
        });
        let listen_error = |reason: String| StartError::Listen { address: config.listen.to_string(), reason };
        let (endpoint, listener) = {
            let _guard = handle.enter();
            Endpoint::bind_with_liveness(
                endpoint_config(tls, config.peer_timeout),
                config.listen,
                Arc::new(DirectoryHandler(state.clone())),
            )
            .map_err(|error| listen_error(error.to_string()))?
        };
        let events = state.clone();
        let liveness = LivenessServer::start(
            listener,
            ServerConfig { peer_timeout: config.peer_timeout, ..ServerConfig::default() },
            move |event| events.handle_liveness(event),
        )
        .map_err(|error| listen_error(error.to_string()))?;
        let liveness = Arc::new(liveness);
        // Set once, before any rank can have joined: the port was not known to anybody until now.
        let _ = state.liveness.set(Arc::downgrade(&liveness));
        let timer = Arc::downgrade(&state);
        handle.spawn(run_timer(timer));
        let metrics = match config.metrics_listen {
            Some(address) => {
                let source = state.clone();
                Some(crate::metrics::MetricsServer::start(&handle, address, move || {
                    crate::metrics::directory_text(&source.stats())
                })?)
            }
            None => None,
        };
        Ok(Self { state, endpoint, liveness: Some(liveness), metrics, runtime: runtime.started() })
    }

    /// Where it listens (UDP and TCP).
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        self.endpoint.local_addr()
    }

    /// Address of the Prometheus endpoint, if there is one.
    #[must_use]
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(crate::metrics::MetricsServer::local_addr)
    }

    /// Figures.
    #[must_use]
    pub fn stats(&self) -> DirectoryStats {
        self.state.stats()
    }

    /// Stops serving, telling the connected ranks. Bounded.
    pub fn close(self) {
        drop(self);
    }
}

impl Drop for DirectoryServer {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            end_runtime(runtime, self.endpoint.clone(), Some("the directory stops"));
            self.liveness = None;
        }
    }
}

/// Figures of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectoryStats {
    /// LOOKUP and LOCATE requests answered.
    pub lookups: u64,
    /// Keys in them.
    pub lookup_keys: u64,
    /// Figures of the core.
    pub core: Stats,
}

impl State {
    fn now(&self) -> Time {
        Time::from_micros(u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    fn stats(&self) -> DirectoryStats {
        DirectoryStats {
            lookups: self.lookups.load(Ordering::Relaxed),
            lookup_keys: self.lookup_keys.load(Ordering::Relaxed),
            core: self.service.read().stats(),
        }
    }

    /// Runs something that may change the core, then carries out what the core wants done.
    fn with_service<T>(self: &Arc<Self>, act: impl FnOnce(&mut Service, Time) -> T) -> T {
        let now = self.now();
        let mut actions = Vec::new();
        let result = {
            let mut service = self.service.write();
            let result = act(&mut service, now);
            while let Some(action) = service.poll_action() {
                actions.push(action);
            }
            result
        };
        for action in actions {
            self.carry_out(action);
        }
        result
    }

    fn carry_out(self: &Arc<Self>, action: ServiceAction) {
        match action {
            ServiceAction::SendToRank { rank, connection, message } => {
                let Some(connection) = self.connections.lock().get(&(connection.0 >> 1)).cloned() else {
                    return;
                };
                let state = self.clone();
                self.runtime.spawn(async move { state.clear_rank(rank, connection, message).await });
            }
            ServiceAction::CloseConnection { connection } => {
                if connection.0 & 1 == 1 {
                    if let Some(liveness) = self.liveness.get().and_then(Weak::upgrade) {
                        liveness.disconnect(LivenessId(connection.0 >> 1));
                    }
                } else if let Some(connection) = self.connections.lock().get(&(connection.0 >> 1)) {
                    connection.close("the rank was fenced or joined anew");
                }
            }
            ServiceAction::ClearDone { request, complete } => {
                if let Some(responder) = self.clears.lock().remove(&request.0) {
                    respond(responder, &Reply::Clear(ClearReply { complete }));
                }
            }
            ServiceAction::RankChanged { member, change } => {
                tracing::info!(rank = member.rank.0, incarnation = %member.incarnation, ?change, "rank changed");
            }
        }
    }

    async fn clear_rank(self: Arc<Self>, rank: RankId, connection: Connection, message: ClearRank) {
        let answer = request(&connection, &Request::ClearRank(message), CLEAR_TIMEOUT).await;
        let ack = match answer.as_deref().map(decode_reply) {
            Ok(Ok(Reply::ClearAck(ack))) => ack,
            // A rank that cannot be asked is judged by the clear's deadline and by liveness.
            other => {
                tracing::warn!(rank = rank.0, ?other, "a rank did not acknowledge a clear");
                if connection.close_reason().is_some() {
                    return;
                }
                ClearAck { clear: message.clear, done: false }
            }
        };
        self.with_service(|service, _| service.handle_clear_ack(rank, ack));
    }

    fn handle_liveness(self: &Arc<Self>, event: LivenessEvent) {
        match event {
            LivenessEvent::Alive(id) => {
                let Some((member, liveness_token)) = self.tickets.lock().get(&id).copied() else { return };
                let attach = Attach { member, liveness_token };
                let result =
                    self.with_service(|service, now| service.handle_attach(now, liveness_name(id), &attach));
                match result {
                    Ok(()) => {
                        self.answering.lock().insert(id, true);
                    }
                    Err(error) => {
                        tracing::warn!(rank = member.rank.0, %error, "a liveness connection was refused");
                        if let Some(liveness) = self.liveness.get().and_then(Weak::upgrade) {
                            liveness.disconnect(id);
                        }
                    }
                }
            }
            LivenessEvent::Missed(id) => {
                self.answering.lock().insert(id, false);
                self.with_service(|service, _| service.handle_silent(liveness_name(id)));
            }
            LivenessEvent::Answering(id) => {
                self.answering.lock().insert(id, true);
                let _ = self.with_service(|service, now| service.handle_heard(now, liveness_name(id)));
            }
            LivenessEvent::Closed(id, why) => {
                tracing::debug!(%id, ?why, "liveness connection closed");
                self.answering.lock().remove(&id);
                self.tickets.lock().remove(&id);
                self.with_service(|service, now| service.handle_connection_closed(now, liveness_name(id)));
            }
            LivenessEvent::Unclaimed(id) => {
                self.tickets.lock().remove(&id);
            }
        }
    }

    /// Confirms to the core that ranks answer pings.
    fn confirm_answering(self: &Arc<Self>) {
        let ids: Vec<LivenessId> =
            self.answering.lock().iter().filter(|(_, answering)| **answering).map(|(id, _)| *id).collect();
        self.with_service(|service, now| {
            for id in ids {
                // A rank that was fenced since is unknown, which is right.
                let _ = service.handle_heard(now, liveness_name(id));
            }
        });
    }

    fn join(self: &Arc<Self>, connection: &Connection, request: &Request<'_>) -> Option<Reply<'static>> {
        let Request::Join(join) = request else { return None };
        if !connection.peer().allows(join.name.as_str()) {
            return Some(Reply::Refused(Refusal::ForeignConnection));
        }
        let Some(liveness) = self.liveness.get().and_then(Weak::upgrade) else {
            return Some(Reply::Refused(Refusal::Overloaded));
        };
        let issued = random_u64().map_err(|error| error.to_string()).and_then(|token| {
            match liveness.issue_ticket(Ticket::from_number(token)) {
                Ok(id) => Ok((token, id)),
                Err(error) => Err(error.to_string()),
            }
        });
        let (token, id) = match issued {
            Ok(issued) => issued,
            Err(error) => {
                tracing::error!(%error, "cannot admit a rank");
                return Some(Reply::Refused(Refusal::Overloaded));
            }
        };
        let reply =
            self.with_service(|service, now| service.handle_join(now, control_name(connection), token, join));
        match reply {
            JoinReply::Joined(joined) => {
                let member = Member { rank: joined.rank, incarnation: join.incarnation };
                self.tickets.lock().insert(id, (member, token));
            }
            _ => liveness.disconnect(id),
        }
        Some(Reply::Joined(reply))
    }
}

struct DirectoryHandler(Arc<State>);

impl Handler for DirectoryHandler {
    fn handle_connected(&self, connection: &Connection) {
        self.0.connections.lock().insert(connection.id().0, connection.clone());
    }

    fn handle_closed(&self, connection: &Connection, reason: &CloseReason) {
        tracing::debug!(peer = %connection.peer().address(), %reason, "control connection closed");
        self.0.connections.lock().remove(&connection.id().0);
        self.0.with_service(|service, now| service.handle_connection_closed(now, control_name(connection)));
    }

    fn handle_request(&self, connection: &Connection, frame: Bytes, responder: Responder) {
        let state = &self.0;
        let request = match decode_request(&frame) {
            Ok(request) => request,
            Err(error) => {
                tracing::debug!(peer = %connection.peer().address(), %error, "a request could not be read");
                respond(responder, &Reply::Refused(error.refusal()));
                return;
            }
        };
        let reply = match &request {
            // Many lookups may run at once, beside each other.
            Request::Lookup(kvfabric_core::wire::Lookup(query))
            | Request::Locate(kvfabric_core::wire::Locate(query)) => {
                state.lookups.fetch_add(1, Ordering::Relaxed);
                state.lookup_keys.fetch_add(query.keys.len() as u64, Ordering::Relaxed);
                state.service.read().answer(state.now(), &request)
            }
            Request::Who(_) | Request::GetStats(_) => state.service.read().answer(state.now(), &request),
            // Liveness has listeners of its own here.
            Request::Attach(_) | Request::Ping(_) => Reply::Refused(Refusal::Unsupported),
            Request::Join(_) => match state.join(connection, &request) {
                Some(reply) => reply,
                None => return,
            },
            _ => {
                let clear = ClearRequest(state.next_clear.fetch_add(1, Ordering::Relaxed));
                if matches!(request, Request::Clear(_)) {
                    state.clears.lock().insert(clear.0, responder);
                    let refused = state.with_service(|service, now| {
                        service.handle_request(now, control_name(connection), 0, clear, &request)
                    });
                    if let Some(reply) = refused {
                        if let Some(responder) = state.clears.lock().remove(&clear.0) {
                            respond(responder, &reply);
                        }
                    }
                    return;
                }
                let reply = state.with_service(|service, now| {
                    service.handle_request(now, control_name(connection), 0, clear, &request)
                });
                reply.unwrap_or(Reply::Refused(Refusal::Unsupported))
            }
        };
        respond(responder, &reply);
    }
}

async fn run_timer(state: Weak<State>) {
    let mut confirmed = Instant::now();
    loop {
        let wait = match state.upgrade() {
            None => return,
            Some(state) => {
                if confirmed.elapsed() >= CONFIRM_INTERVAL {
                    confirmed = Instant::now();
                    state.confirm_answering();
                }
                let now = state.now();
                let due = state.service.read().poll_timeout();
                if due.is_some_and(|due| due <= now) {
                    state.with_service(|service, now| service.handle_timeout(now));
                }
                due.map_or(TIMER_MAX, |due| due.since(now).clamp(Duration::from_millis(1), TIMER_MAX))
            }
        };
        tokio::time::sleep(wait).await;
    }
}
