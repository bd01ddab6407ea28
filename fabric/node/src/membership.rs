//! The core thread's dealings with the directory: carries out what the announcer decides.

use std::collections::{BTreeMap, HashMap};
use std::sync::mpsc::{Sender, SyncSender};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfabric_core::directory::{AnnouncerAction, ClearId, FlushId, JoinError, LinkId, RequestTag};
use kvfabric_core::limits::PROTOCOL_VERSION;
use kvfabric_core::wire::{decode_reply, Attach, NsName, Refusal};
use kvfabric_core::{NsId, Time};
use kvfabric_transport_control::liveness::LivenessClient;
use kvfabric_transport_control::ConnectionId;

use crate::backend::{self, Directory as _, Membership as _, QuicDirectory};
use crate::command::Command;
use crate::driver::Driver;
use crate::shared::DirectoryView;
use crate::system::random_u64;
use crate::StartError;

/// A request to the directory that is not answered within this time is said again by the announcer where it matters.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);
/// How long opening a namespace may wait for the directory's number: stores made before it are announced later.
const OPEN_PATIENCE: Duration = Duration::from_secs(2);
/// A name that is in use at start is tried again this long: the kernel may be about to report its former owner's death.
const NAME_IN_USE_PATIENCE: Duration = Duration::from_millis(1500);

/// The connection to the directory, and who waits for what.
pub(crate) struct Membership {
    pub(crate) target: String,
    pub(crate) name: String,
    pub(crate) peer_timeout: Duration,
    pub(crate) starting: Option<Starting>,
    link: Option<Link>,
    liveness: Option<LivenessClient>,
    last_failure: String,
    flushes: HashMap<FlushId, SyncSender<bool>>,
    clears: HashMap<ClearId, SyncSender<bool>>,
    opening: Vec<(NsId, Time, SyncSender<NsId>)>,
    opened: Vec<NsId>,
    next_name: u64,
    /// While closing: how long to wait for the answer to the farewell.
    pub(crate) leave_until: Option<Time>,
}

/// One connection to the directory.
struct Link {
    id: LinkId,
    connection: ConnectionId,
    directory: Arc<QuicDirectory>,
}

/// A start that waits for its first admission.
pub(crate) struct Starting {
    pub(crate) reply: Sender<Result<(), StartError>>,
    pub(crate) begun: Instant,
    pub(crate) timeout: Duration,
}

impl Membership {
    pub(crate) fn new(target: String, name: String, peer_timeout: Duration, starting: Starting) -> Self {
        Self {
            target,
            name,
            peer_timeout,
            starting: Some(starting),
            link: None,
            liveness: None,
            last_failure: "no answer in time".into(),
            flushes: HashMap::new(),
            clears: HashMap::new(),
            opening: Vec::new(),
            opened: Vec::new(),
            next_name: 0,
            leave_until: None,
        }
    }

    fn is_current(&self, link: LinkId) -> bool {
        self.link.as_ref().is_some_and(|known| known.id == link)
    }

    fn current(&self, link: LinkId) -> Option<Arc<QuicDirectory>> {
        self.link.as_ref().filter(|known| known.id == link).map(|known| known.directory.clone())
    }

    /// When a waiting start or opening must be looked at.
    pub(crate) fn poll_timeout(&self, now: Time) -> Option<Time> {
        let starting = self
            .starting
            .as_ref()
            .map(|starting| now.after(starting.timeout.saturating_sub(starting.begun.elapsed())));
        self.opening.iter().map(|(_, until, _)| *until).chain(starting).chain(self.leave_until).min()
    }

    /// Whether closing need not wait for the directory any more.
    pub(crate) fn has_left(&self, now: Time) -> bool {
        self.link.is_none() || self.leave_until.is_none_or(|until| until <= now)
    }

    fn name_next(&mut self) -> u64 {
        self.next_name += 1;
        self.next_name
    }

    fn start_failed(&mut self, error: StartError) {
        match self.starting.take() {
            Some(starting) => {
                let _ = starting.reply.send(Err(error));
            }
            None => tracing::error!(%error, "this rank can never join again; restart the process"),
        }
    }
}

impl Driver {
    pub(crate) fn handle_directory(&mut self, command: Command) {
        let now = self.now();
        match command {
            Command::LinkUp { connection } => {
                let jitter = Duration::from_micros(random_u64().map_or(0, |number| number % 200_000));
                // The first announcement has nothing to say and need not wait for others.
                let jitter = if self.membership.starting.is_some() { Duration::ZERO } else { jitter };
                let link = self.rank.handle_directory_connected(now, jitter);
                let directory = Arc::new(QuicDirectory::new(connection.clone()));
                self.membership.link = Some(Link { id: link, connection: connection.id(), directory });
            }
            Command::LinkDown { connection, why }
                if self.membership.link.as_ref().is_some_and(|known| known.connection == connection) =>
            {
                self.lose_directory(&why);
            }
            Command::LinkFailed { reason } => {
                tracing::debug!(%reason, "cannot connect to the directory");
                self.membership.last_failure = reason;
            }
            Command::Reply { tag: RequestTag::Leave, .. } => self.membership.leave_until = None,
            Command::Reply { link, tag, frame } => match decode_reply(&frame) {
                Ok(reply) => self.rank.handle_directory_reply(now, link, tag, &reply),
                Err(error) => tracing::warn!(%error, "the directory's answer cannot be read"),
            },
            Command::LivenessOpened { link, result } => self.handle_liveness_opened(link, result),
            Command::LivenessLost { link, why } if self.membership.is_current(link) => {
                self.lose_directory(&why);
            }
            Command::OpenNamespace { name, reply } => self.open_namespace(name, reply),
            Command::Flush { within, reply } => {
                let flush = FlushId(self.membership.name_next());
                self.membership.flushes.insert(flush, reply);
                self.rank.handle_flush(now, flush, now.after(within));
            }
            Command::Clear { ns, within, reply } => {
                let clear = ClearId(self.membership.name_next());
                self.membership.clears.insert(clear, reply);
                self.rank.handle_clear(now, clear, ns, now.after(within));
            }
            Command::ClearRank { clear, responder } => {
                self.control.begin_clear(clear.clear, responder);
                self.rank.handle_clear_rank(now, &clear);
            }
            _ => {}
        }
        self.update_view();
    }

    fn handle_liveness_opened(&mut self, link: LinkId, result: Result<LivenessClient, String>) {
        if !self.membership.is_current(link) {
            return;
        }
        match result {
            Ok(client) => {
                self.membership.liveness = Some(client);
                if let Some(member) = self.rank.member() {
                    tracing::info!(directory = %self.membership.target, rank = member.rank.0, "joined the directory");
                }
                if let Some(starting) = self.membership.starting.take() {
                    let _ = starting.reply.send(Ok(()));
                }
            }
            Err(reason) => {
                self.membership.last_failure.clone_from(&reason);
                self.lose_directory(&reason);
            }
        }
    }

    /// The membership is gone, whichever part of it broke: everything is made anew.
    fn lose_directory(&mut self, why: &str) {
        let now = self.now();
        if let Some(link) = self.membership.link.take() {
            if self.closing.is_none() {
                tracing::warn!(directory = %self.membership.target, reason = why, "lost the directory; joining again");
            }
            link.directory.disconnect("membership lost");
        }
        if let Some(liveness) = self.membership.liveness.take() {
            // Dropping joins its thread, which may take a moment.
            self.control.runtime.spawn_blocking(move || drop(liveness));
        }
        self.rank.handle_directory_disconnected(now);
    }

    fn open_namespace(&mut self, name: NsName, reply: SyncSender<NsId>) {
        let now = self.now();
        match self.rank.open_namespace(now, name) {
            Ok(ns) => {
                if !self.membership.opened.contains(&ns) {
                    self.membership.opened.push(ns);
                }
                self.membership.opening.push((ns, now.after(OPEN_PATIENCE), reply));
            }
            // The caller sees a closed channel.
            Err(error) => tracing::error!(%error, "cannot open a namespace"),
        }
    }

    /// Answers those whose namespace has a number, or who waited long enough.
    pub(crate) fn settle_openings(&mut self) {
        let now = self.now();
        let (rank, opening) = (&self.rank, &mut self.membership.opening);
        opening.retain(|(ns, until, reply)| {
            let done = rank.directory_ns(*ns).is_some() || *until <= now;
            if done {
                let _ = reply.try_send(*ns);
            }
            !done
        });
        if let Some(starting) = &self.membership.starting {
            if starting.begun.elapsed() >= starting.timeout {
                let error = StartError::DirectoryUnreachable {
                    address: self.membership.target.clone(),
                    reason: self.membership.last_failure.clone(),
                };
                self.membership.start_failed(error);
            }
        }
    }

    pub(crate) fn carry_out_directory(&mut self, action: AnnouncerAction) {
        match action {
            AnnouncerAction::Send { link, tag, request } => {
                let Some(directory) = self.membership.current(link) else { return };
                let answer = match tag {
                    RequestTag::Join | RequestTag::Leave => directory.enter(&request, REQUEST_TIMEOUT),
                    _ => directory.announce(&request, REQUEST_TIMEOUT),
                };
                let core = self.control.core.clone();
                self.control.runtime.spawn(async move {
                    match answer.await {
                        Ok(frame) => {
                            let _ = core.send(Command::Reply { link, tag, frame });
                        }
                        Err(error) => tracing::debug!(?tag, %error, "the directory did not answer"),
                    }
                });
            }
            AnnouncerAction::OpenLiveness { link, attach } => self.open_liveness(link, &attach),
            // The rank keeps these to itself.
            AnnouncerAction::NeedSnapshot | AnnouncerAction::EpochChanged { .. } => {}
            AnnouncerAction::FlushDone { flush, ok } => {
                if let Some(reply) = self.membership.flushes.remove(&flush) {
                    let _ = reply.try_send(ok);
                }
            }
            AnnouncerAction::ClearDone { clear, complete } => {
                if let Some(reply) = self.membership.clears.remove(&clear) {
                    let _ = reply.try_send(complete);
                }
            }
            AnnouncerAction::JoinRefused { error } => self.handle_join_refused(&error),
        }
    }

    fn open_liveness(&mut self, link: LinkId, attach: &Attach) {
        let Some(directory) = self.membership.current(link) else { return };
        let (token, peer_timeout) = (attach.liveness_token, self.membership.peer_timeout);
        let core = self.control.core.clone();
        // Connecting blocks, for a bounded time.
        self.control.runtime.spawn_blocking(move || {
            let lost = core.clone();
            let lost = Box::new(move |why| {
                let _ = lost.send(Command::LivenessLost { link, why });
            });
            let result = directory.attach(token, peer_timeout, lost);
            let _ = core.send(Command::LivenessOpened { link, result });
        });
    }

    fn handle_join_refused(&mut self, error: &JoinError) {
        let kind = *error;
        let refused =
            |reason: String| StartError::JoinRefused { name: self.membership.name.clone(), kind, reason };
        let error = match error {
            JoinError::NameInUse => {
                let patience = |starting: &Starting| starting.begun.elapsed() < NAME_IN_USE_PATIENCE;
                if self.membership.starting.as_ref().is_none_or(patience) {
                    tracing::debug!("the name is still in use at the directory");
                    return;
                }
                refused(
                    "another live process has this name; give this rank another --name, or end that process"
                        .into(),
                )
            }
            JoinError::Full => {
                self.membership.last_failure = error.to_string();
                return;
            }
            JoinError::Refused(Refusal::Unsupported) => refused(
                "the process at this address is no directory, perhaps a rank; check --directory".into(),
            ),
            JoinError::Refused(refusal @ Refusal::Version { .. }) => refused(format!(
                "{refusal}, this rank speaks {PROTOCOL_VERSION}; run the same release on both"
            )),
            JoinError::ClusterMismatch => refused(format!("{error}; check --cluster")),
            other => refused(other.to_string()),
        };
        self.membership.start_failed(error);
    }

    /// What lookups need to know, as it is now.
    fn update_view(&mut self) {
        let asker = self.control.engine;
        let member = self.rank.member();
        let attached = self.membership.liveness.is_some();
        self.control.membership =
            self.membership.link.as_ref().map(|link| link.directory.clone() as Arc<dyn backend::Membership>);
        let view = match (&self.membership.link, member) {
            (Some(link), Some(_)) if attached => {
                let number = |ns: &NsId| Some((*ns, self.rank.directory_ns(*ns)?));
                let numbers: BTreeMap<_, _> = self.membership.opened.iter().filter_map(number).collect();
                Some(DirectoryView { directory: link.directory.clone(), asker, numbers })
            }
            _ => None,
        };
        self.control.directory = view.as_ref().map(|view| view.directory.clone());
        *self.shared.view.write() = view;
    }
}
