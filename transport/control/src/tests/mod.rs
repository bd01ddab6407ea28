//! Tests of the QUIC part, on loopback.

mod failures;
mod hostile;
mod requests;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

use crate::{
    certs, CloseReason, Connection, ConnectionId, Endpoint, EndpointConfig, Handler, Responder, Security, Tls,
};

/// Generous bound of everything that should happen soon.
pub(crate) const SOON: Duration = Duration::from_secs(20);

/// A directory that goes with the test.
pub(crate) struct TempDir(PathBuf);

impl TempDir {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("kvfabric-control-test-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Certificates of a new authority, with `names` besides the usual ones.
pub(crate) fn new_tls(names: &[&str]) -> Tls {
    let dir = TempDir::new();
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    certs::generate(dir.path(), &names).unwrap();
    Tls::load(&Security::Dir(dir.path().to_owned())).unwrap()
}

pub(crate) fn v4() -> SocketAddr {
    "127.0.0.1:0".parse().unwrap()
}

pub(crate) fn bind(tls: &Tls, handler: Arc<dyn Handler>) -> Endpoint {
    Endpoint::bind(EndpointConfig::new(tls.clone()), v4(), handler).unwrap()
}

pub(crate) fn client(tls: &Tls) -> Endpoint {
    Endpoint::client(EndpointConfig::new(tls.clone()), Arc::new(Recorder::default())).unwrap()
}

pub(crate) async fn connect(client: &Endpoint, server: &Endpoint) -> Connection {
    client.connect(&server.local_addr().to_string()).await.unwrap()
}

/// Bytes that tell position and seed, so that a mix-up shows.
pub(crate) fn pattern(length: usize, seed: u64) -> Bytes {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes.into()
}

/// What a [`Recorder`] saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Connected(ConnectionId),
    Closed(ConnectionId, CloseReason),
    Notified(ConnectionId, Bytes),
}

/// Answers each request with its bytes reversed, except some that begin with a command, and records the rest.
#[derive(Default)]
pub(crate) struct Recorder {
    seen: Mutex<Vec<Seen>>,
    connections: Mutex<Vec<Connection>>,
    held: Mutex<Vec<Responder>>,
}

impl Recorder {
    pub(crate) fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn connection(&self) -> Connection {
        self.connections.lock().unwrap()[0].clone()
    }

    /// Waits for the first request that is held.
    pub(crate) async fn first_held(&self) -> Responder {
        let started = Instant::now();
        loop {
            if let Some(responder) = self.take_held().pop() {
                return responder;
            }
            assert!(started.elapsed() < SOON, "no request arrived in time");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    fn take_held(&self) -> Vec<Responder> {
        std::mem::take(&mut *self.held.lock().unwrap())
    }

    /// Waits until `condition` holds of what was seen.
    pub(crate) async fn until(&self, condition: impl Fn(&[Seen]) -> bool) {
        let started = Instant::now();
        while !condition(&self.seen()) {
            assert!(started.elapsed() < SOON, "not seen in time: {:?}", self.seen());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    fn record(&self, seen: Seen) {
        self.seen.lock().unwrap().push(seen);
    }
}

pub(crate) const HOLD: &[u8] = b"hold";
pub(crate) const DROP: &[u8] = b"drop";
pub(crate) const TOO_MUCH: &[u8] = b"too much";

impl Handler for Recorder {
    fn handle_request(&self, _connection: &Connection, request: Bytes, responder: Responder) {
        match &request[..] {
            HOLD => self.held.lock().unwrap().push(responder),
            DROP => drop(responder),
            TOO_MUCH => {
                responder.reply(vec![0; crate::limits::FRAME_BYTES_MAX + 1]);
            }
            _ => {
                responder.reply(request.iter().rev().copied().collect::<Vec<u8>>());
            }
        }
    }

    fn handle_notification(&self, connection: &Connection, message: Bytes) {
        self.record(Seen::Notified(connection.id(), message));
    }

    fn handle_connected(&self, connection: &Connection) {
        self.connections.lock().unwrap().push(connection.clone());
        self.record(Seen::Connected(connection.id()));
    }

    fn handle_closed(&self, connection: &Connection, reason: &CloseReason) {
        self.record(Seen::Closed(connection.id(), reason.clone()));
    }
}

pub(crate) fn reversed(bytes: &Bytes) -> Bytes {
    bytes.iter().rev().copied().collect::<Vec<u8>>().into()
}
