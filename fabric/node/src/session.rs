//! The connection to the directory: made again whenever it is lost. What is said over it is the core's matter.

use std::sync::mpsc::Sender;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kvfabric_core::wire::{encode_request, Request};
use kvfabric_transport_control::{Backoff, Connection, Endpoint};
use tokio::sync::watch;

use crate::command::Command;
use crate::handler::RankHandler;

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
        let backoff = Backoff::default();
        let mut failures = 0;
        while !*self.stop.borrow() {
            let connected = tokio::select! {
                connected = self.endpoint.connect(&self.target) => connected,
                _ = self.stop.wait_for(|stop| *stop) => return,
            };
            match connected {
                Ok(connection) => {
                    failures = 0;
                    self.handler.set_directory(Some(&connection));
                    let _ = self.core.send(Command::LinkUp { connection: connection.clone() });
                    let why = tokio::select! {
                        reason = connection.closed() => reason.to_string(),
                        _ = self.stop.wait_for(|stop| *stop) => return,
                    };
                    self.handler.set_directory(None);
                    let _ = self.core.send(Command::LinkDown { connection: connection.id(), why });
                }
                Err(error) => {
                    let _ = self.core.send(Command::LinkFailed { reason: error.to_string() });
                }
            }
            let delay = backoff.delay_jittered(failures, self.seed);
            failures = failures.saturating_add(1);
            tokio::select! {
                () = tokio::time::sleep(delay) => {}
                _ = self.stop.wait_for(|stop| *stop) => return,
            }
        }
    }
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
