//! The connection to the directory: made again whenever it is lost. What is said over it is the core's matter.

use std::sync::mpsc::Sender;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvfabric_core::wire::{encode_request, Request};
use kvfabric_transport_control::{Backoff, Connection, Endpoint, LinkState, Reconnecting};
use tokio::sync::watch;

use crate::command::Command;
use crate::handler::RankHandler;

/// How long a link outlives the wish to stop: longer than closing waits for the directory's answer.
const FAREWELL_MAX: Duration = Duration::from_secs(2);

/// Connects to the directory until told to stop.
pub(crate) struct LinkTask {
    pub(crate) endpoint: Endpoint,
    pub(crate) target: String,
    pub(crate) handler: Arc<RankHandler>,
    pub(crate) core: Sender<Command>,
    /// Spreads the attempts of different ranks.
    pub(crate) seed: u64,
    pub(crate) stop: watch::Receiver<bool>,
}

impl LinkTask {
    pub(crate) async fn run(mut self) {
        let link = Reconnecting::start(self.endpoint.clone(), &self.target, Backoff::default(), self.seed);
        let mut states = link.watch();
        let mut up: Option<Connection> = None;
        loop {
            let state = states.borrow_and_update().clone();
            // States may be skipped: one connection may follow another without a moment in between.
            if let Some(before) = up.take_if(|before| !is_state_of(&state, before)) {
                self.handler.set_directory(None);
                let why =
                    before.close_reason().map_or_else(|| "replaced".to_owned(), |reason| reason.to_string());
                let _ = self.core.send(Command::LinkDown { connection: before.id(), why });
            }
            match state {
                LinkState::Connected(connection) if up.is_none() => {
                    self.handler.set_directory(Some(&connection));
                    let _ = self.core.send(Command::LinkUp { connection: connection.clone() });
                    up = Some(connection);
                }
                LinkState::Connecting { last_error: Some(error), .. } => {
                    let _ = self.core.send(Command::LinkFailed { reason: error.to_string() });
                }
                _ => {}
            }
            tokio::select! {
                changed = states.changed() => if changed.is_err() { return },
                _ = self.stop.wait_for(|stop| *stop) => break,
            }
        }
        // The farewell is still to be said over this connection; dropping the link would close it.
        if let Some(connection) = up {
            let _ = tokio::time::timeout(FAREWELL_MAX, connection.closed()).await;
        }
    }
}

fn is_state_of(state: &LinkState, connection: &Connection) -> bool {
    matches!(state, LinkState::Connected(current) if current.id() == connection.id())
}

/// One request and its reply, errors in words.
pub(crate) async fn request(
    connection: &Connection,
    body: &Request<'_>,
    deadline: Duration,
) -> Result<Bytes, String> {
    let mut frame = Vec::with_capacity(256);
    encode_request(body, &mut frame).map_err(|error| error.to_string())?;
    connection.request(frame.into(), deadline).await.map_err(|error| error.to_string())
}
