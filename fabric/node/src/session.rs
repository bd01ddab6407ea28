//! The rank's membership: connect to the directory, JOIN, liveness, and again whenever it is lost (rules M1 to M3).

use std::sync::mpsc::Sender;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvfabric_core::wire::{
    decode_reply, encode_request, Advertised, Join, JoinReply, Joined, Leave, Member, Name, Reply, Request,
};
use kvfabric_core::Incarnation;
use kvfabric_transport_control::liveness::{ClientConfig, LivenessClient, Ticket};
use kvfabric_transport_control::{Backoff, Connection, Endpoint};
use tokio::sync::{watch, Notify};

use crate::command::Command;
use crate::handler::RankHandler;
use crate::StartError;

/// A JOIN is answered from memory; a directory that takes longer is not well.
const JOIN_TIMEOUT: Duration = Duration::from_secs(2);
/// A name that is in use at start is tried again this long: the kernel may be about to report its former owner's death.
const NAME_IN_USE_PATIENCE: Duration = Duration::from_millis(1500);

/// An admitted membership.
#[derive(Clone, Debug)]
pub(crate) struct Session {
    pub(crate) connection: Connection,
    pub(crate) member: Member,
    pub(crate) session: u64,
}

/// What JOIN says of this rank.
#[derive(Clone)]
pub(crate) struct Identity {
    pub(crate) cluster: Name<'static>,
    pub(crate) name: Name<'static>,
    pub(crate) engine: Name<'static>,
    pub(crate) incarnation: Incarnation,
    pub(crate) advertised: Advertised<'static>,
}

pub(crate) struct SessionTask {
    pub(crate) endpoint: Endpoint,
    pub(crate) target: String,
    pub(crate) identity: Identity,
    pub(crate) handler: Arc<RankHandler>,
    pub(crate) core: Sender<Command>,
    pub(crate) peer_timeout: Duration,
    pub(crate) stop: watch::Receiver<bool>,
}

/// Why an attempt to join failed.
enum JoinFailure {
    /// Try again.
    Unreachable(String),
    NameInUse,
    /// This process can never join again.
    Final(String),
}

impl SessionTask {
    /// Runs until told to stop. The first success, or the error that start should report, goes to `started`.
    pub(crate) async fn run(mut self, start_timeout: Duration, started: Sender<Result<(), StartError>>) {
        let begun = Instant::now();
        let backoff = Backoff::default();
        let mut started = Some(started);
        let mut failures = 0;
        while !*self.stop.borrow() {
            match self.join().await {
                Ok((session, liveness, lost)) => {
                    failures = 0;
                    self.handler.set_directory(Some(&session.connection));
                    tracing::info!(directory = %self.target, rank = session.member.rank.0, "joined the directory");
                    let _ = self.core.send(Command::DirectoryUp { session: session.clone() });
                    if let Some(started) = started.take() {
                        let _ = started.send(Ok(()));
                    }
                    let why = self.wait_for_loss(&session, &lost).await;
                    self.handler.set_directory(None);
                    let _ = self.core.send(Command::DirectoryDown);
                    if *self.stop.borrow() {
                        leave(&session).await;
                    } else {
                        tracing::warn!(directory = %self.target, reason = %why, "lost the directory; joining again");
                        session.connection.close("liveness lost");
                    }
                    drop_liveness(liveness).await;
                }
                Err(failure) => {
                    if let Some(error) = self.judge(&failure, begun, start_timeout, started.is_some()) {
                        match started.take() {
                            Some(started) => {
                                let _ = started.send(Err(error));
                            }
                            None => {
                                tracing::error!(%error, "this rank can never join again; restart the process");
                                let _ = self.core.send(Command::Fenced);
                            }
                        }
                        return;
                    }
                    let delay = backoff.delay_jittered(failures, self.identity.incarnation.get());
                    failures = failures.saturating_add(1);
                    tokio::select! {
                        () = tokio::time::sleep(delay) => {}
                        _ = self.stop.changed() => {}
                    }
                }
            }
        }
    }

    /// The error that ends the task, if the failure is one.
    fn judge(
        &self,
        failure: &JoinFailure,
        begun: Instant,
        start_timeout: Duration,
        starting: bool,
    ) -> Option<StartError> {
        let refused = |reason: &str| StartError::JoinRefused {
            name: self.identity.name.as_str().to_owned(),
            reason: reason.to_owned(),
        };
        match failure {
            JoinFailure::Final(reason) => Some(refused(reason)),
            JoinFailure::NameInUse if starting && begun.elapsed() > NAME_IN_USE_PATIENCE.min(start_timeout) => {
                Some(refused("another live process has this name; give this rank another --name, or end that process"))
            }
            JoinFailure::Unreachable(reason) if starting && begun.elapsed() >= start_timeout => {
                Some(StartError::DirectoryUnreachable { address: self.target.clone(), reason: reason.clone() })
            }
            JoinFailure::NameInUse => {
                tracing::debug!("the name is still in use at the directory");
                None
            }
            JoinFailure::Unreachable(reason) => {
                tracing::debug!(directory = %self.target, %reason, "cannot join yet");
                None
            }
        }
    }

    async fn join(&self) -> Result<(Session, LivenessClient, Arc<Notify>), JoinFailure> {
        let connection = self
            .endpoint
            .connect(&self.target)
            .await
            .map_err(|error| JoinFailure::Unreachable(error.to_string()))?;
        let join = Join {
            cluster: self.identity.cluster.borrowed(),
            name: self.identity.name.borrowed(),
            engine: self.identity.engine.borrowed(),
            incarnation: self.identity.incarnation,
            advertised: self.identity.advertised.borrowed(),
        };
        let reply = request(&connection, &Request::Join(join), JOIN_TIMEOUT)
            .await
            .map_err(JoinFailure::Unreachable)?;
        let joined = match decode_reply(&reply) {
            Ok(Reply::Joined(JoinReply::Joined(joined))) => joined,
            Ok(Reply::Joined(JoinReply::NameInUse)) => return Err(JoinFailure::NameInUse),
            Ok(Reply::Joined(JoinReply::Closed)) => {
                return Err(JoinFailure::Final("a newer process of this name took its place".into()));
            }
            Ok(Reply::Joined(JoinReply::ClusterMismatch)) => {
                return Err(JoinFailure::Final(format!(
                    "the directory does not serve cluster {:?}; check --cluster",
                    self.identity.cluster.as_str()
                )));
            }
            Ok(Reply::Joined(JoinReply::Full)) => {
                return Err(JoinFailure::Unreachable("the directory has no room for another rank".into()));
            }
            Ok(Reply::Refused(refusal)) => return Err(JoinFailure::Final(refusal.to_string())),
            Ok(other) => return Err(JoinFailure::Final(format!("unexpected answer {}", other.name()))),
            Err(error) => return Err(JoinFailure::Final(error.to_string())),
        };
        self.attach(connection, joined).await
    }

    /// Opens the liveness connection that JOIN gave a ticket for.
    async fn attach(
        &self,
        connection: Connection,
        joined: Joined,
    ) -> Result<(Session, LivenessClient, Arc<Notify>), JoinFailure> {
        let lost = Arc::new(Notify::new());
        let address = connection.peer().address();
        let config = ClientConfig::for_peer_timeout(self.peer_timeout);
        let ticket = Ticket::from_bytes(joined.liveness_ticket);
        let signal = lost.clone();
        // Connecting blocks, for a bounded time.
        let attached = tokio::task::spawn_blocking(move || {
            LivenessClient::connect(address, ticket, config, move |why| {
                tracing::debug!(?why, "liveness lost");
                signal.notify_one();
            })
        })
        .await;
        let liveness = match attached {
            Ok(Ok(liveness)) => liveness,
            Ok(Err(error)) => return Err(JoinFailure::Unreachable(error.to_string())),
            Err(error) => return Err(JoinFailure::Unreachable(error.to_string())),
        };
        let member = Member { rank: joined.rank, incarnation: self.identity.incarnation };
        Ok((Session { connection, member, session: joined.session }, liveness, lost))
    }

    async fn wait_for_loss(&mut self, session: &Session, lost: &Notify) -> String {
        tokio::select! {
            reason = session.connection.closed() => reason.to_string(),
            () = lost.notified() => "the liveness connection ended".to_owned(),
            _ = self.stop.wait_for(|stop| *stop) => "stopping".to_owned(),
        }
    }
}

async fn leave(session: &Session) {
    let farewell = Request::Leave(Leave { member: session.member });
    if let Err(error) = request(&session.connection, &farewell, Duration::from_millis(500)).await {
        tracing::debug!(%error, "the directory did not hear the farewell; it sees the connection close");
    }
}

/// Dropping joins a thread, which may take a moment.
async fn drop_liveness(liveness: LivenessClient) {
    let _ = tokio::task::spawn_blocking(move || drop(liveness)).await;
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
