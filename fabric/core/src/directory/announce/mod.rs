//! A rank's side of the directory: joins, opens namespaces, announces (design 1.6, 1.9).
//!
//! **Namespace numbers.** A rank gives each namespace a number of its own, [`NsId`], when it is opened, and keeps it for
//! as long as it lives: slots, puts and announcements carry that one. What the directory calls the namespace
//! ([`NsNumber`]) may change when the directory starts anew; it is looked up when a message is
//! built, never stored elsewhere. Epochs belong to the namespace, not to the directory's life: the rank reports the
//! latest epoch that it has seen, and the directory's is never lower afterwards.
//!
//! **Announcing.** Changes are queued and sent in batches, one PUBLISH at a time, each with the next position in the
//! rank's sequence, again and again until it is acknowledged. After each join, after a gap and when the queue overflows,
//! the rank announces everything: [`Announcer::needs_snapshot`] asks the driver for all that is published, and the
//! directory drops what is not in it. While an announcement is due nothing is queued, because it will contain
//! everything; so stores complete while the directory is away, at no cost in memory, and are announced later.

mod flushes;
mod link;
mod namespaces;
mod queue;

#[cfg(test)]
mod tests;

use core::time::Duration;
use std::collections::{BTreeMap, VecDeque};

use self::flushes::Flushes;
use self::link::Link;
use self::namespaces::{Namespaces, Standing};
use self::queue::{Announcing, InFlight};
use super::limits::{FLUSHES_MAX, RANK_CLEARS_MAX};
use crate::limits::REANNOUNCE_JITTER;
use crate::owner::Announcement;
use crate::wire::{
    Advertised, Attach, Clear, ClearRank, JoinReply, Member, Name, NsName, NsNumber, Refusal, Reply, Request,
};
use crate::{Incarnation, NsEpoch, NsId, Time};

/// A flush, named by the driver; unique while it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlushId(pub u64);

/// A clear, named by the driver; unique while it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClearId(pub u64);

/// One connection to the directory. Replies that belong to an earlier one are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(pub u64);

/// What a request is for; its reply goes to [`Announcer::handle_reply`] with the same tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestTag {
    /// JOIN.
    Join,
    /// OPEN of a namespace.
    OpenNs(NsId),
    /// PUBLISH with this position.
    Publish(u64),
    /// CLEAR.
    Clear(ClearId),
    /// LEAVE.
    Leave,
}

/// Who the rank is.
#[derive(Clone, Debug)]
pub struct AnnouncerConfig {
    /// Cluster.
    pub cluster: Name<'static>,
    /// Name of the rank.
    pub name: Name<'static>,
    /// Name of its engine.
    pub engine: Name<'static>,
    /// The process.
    pub incarnation: Incarnation,
    /// Where it can be reached.
    pub advertised: Advertised<'static>,
}

/// What the driver must do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnnouncerAction {
    /// Send a request to the directory; its reply goes to [`Announcer::handle_reply`]. A request without a reply needs
    /// no report: it is sent again when it matters.
    Send {
        /// The connection to send it over; drop it if that one is gone.
        link: LinkId,
        /// For the reply.
        tag: RequestTag,
        /// The request.
        request: Request<'static>,
    },
    /// Open the liveness connection and say this first. Its end is [`Announcer::handle_disconnected`].
    OpenLiveness {
        /// The control connection that it belongs to.
        link: LinkId,
        /// First message.
        attach: Attach,
    },
    /// Call [`Announcer::handle_snapshot`] with all that is published.
    NeedSnapshot,
    /// A namespace was cleared while this rank did not hear of it: clear it here too.
    EpochChanged {
        /// Namespace.
        ns: NsId,
        /// Its epoch: what was stored under a lower one must go (rule O1).
        epoch: NsEpoch,
    },
    /// A flush is over.
    FlushDone {
        /// Flush.
        flush: FlushId,
        /// Whether the directory has acknowledged all that was queued before; false at its deadline, and if the
        /// directory had no room.
        ok: bool,
    },
    /// A clear that this rank asked for is over.
    ClearDone {
        /// Clear.
        clear: ClearId,
        /// Whether every live rank has cleared.
        complete: bool,
    },
    /// The directory did not admit this rank.
    JoinRefused {
        /// Why.
        error: JoinError,
    },
}

/// Why a rank was not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// Another process of that name is connected. Tried again by itself.
    #[error("another process with this rank's name is connected to the directory")]
    NameInUse,
    /// No room. Tried again by itself.
    #[error("the directory has no room for another rank")]
    Full,
    /// A newer process of that name was admitted. Final.
    #[error("this process was replaced by a newer one with its name; it must not come back")]
    Closed,
    /// Another cluster. Final.
    #[error("the directory serves another cluster")]
    ClusterMismatch,
    /// The directory refused the message. Final unless it is overloaded.
    #[error("the directory refused: {0}")]
    Refused(Refusal),
}

impl JoinError {
    /// Whether the announcer tries again.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::NameInUse | Self::Full => true,
            Self::Refused(refusal) => refusal.is_retryable(),
            Self::Closed | Self::ClusterMismatch => false,
        }
    }

    /// Whether the cause lies on this rank's side.
    #[must_use]
    pub fn is_local(&self) -> bool {
        !matches!(self, Self::Full)
    }
}

/// Too many namespaces on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many namespaces on this rank")]
pub struct OpenError;

impl OpenError {
    /// Never: namespaces are not closed.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        false
    }

    /// Always.
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }
}

/// Counters, from the process's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AnnouncerStats {
    /// Messages acknowledged.
    pub publishes: u64,
    /// Messages sent again.
    pub retries: u64,
    /// Complete announcements begun.
    pub snapshots: u64,
    /// Gaps that the directory found.
    pub gaps: u64,
    /// Times that the queue overflowed.
    pub overflows: u64,
    /// Publications not sent because their namespace was cleared since.
    pub cleared: u64,
    /// Publications that the directory had no room for.
    pub refused: u64,
}

/// The rank's side of the directory.
#[derive(Debug)]
pub struct Announcer {
    config: AnnouncerConfig,
    link: Link,
    link_id: LinkId,
    namespaces: Namespaces,
    load: u8,

    /// Changes not yet sent, oldest first.
    queue: VecDeque<Announcement>,
    /// When the oldest of them must be sent.
    queue_due: Time,
    /// Changes ever seen: the position after the youngest in the queue.
    position: u64,
    /// Changes up to this position are acknowledged.
    acknowledged: u64,
    announcing: Announcing,
    in_flight: Option<InFlight>,
    next_seq_no: u64,

    flushes: Flushes,
    clears: BTreeMap<ClearId, Time>,
    actions: VecDeque<AnnouncerAction>,
    stats: AnnouncerStats,
}

impl Announcer {
    /// A rank that is not connected yet.
    #[must_use]
    pub fn new(config: AnnouncerConfig) -> Self {
        Self {
            config,
            link: Link::Away,
            link_id: LinkId(0),
            namespaces: Namespaces::default(),
            load: 0,
            queue: VecDeque::new(),
            queue_due: Time::FAR_FUTURE,
            position: 0,
            acknowledged: 0,
            announcing: Announcing::Needed { at: Time::ZERO, asked: false },
            in_flight: None,
            next_seq_no: 1,
            flushes: Flushes::default(),
            clears: BTreeMap::new(),
            actions: VecDeque::new(),
            stats: AnnouncerStats::default(),
        }
    }

    /// Opens a namespace and returns this rank's own number of it, at once and for good; the directory is asked when it
    /// is there.
    ///
    /// # Errors
    /// [`OpenError`]: the limit [`RANK_NAMESPACES_MAX`](crate::directory::limits::RANK_NAMESPACES_MAX) is reached.
    pub fn open(&mut self, now: Time, name: NsName) -> Result<NsId, OpenError> {
        let ns = self.namespaces.open(name).ok_or(OpenError)?;
        self.work(now);
        Ok(ns)
    }

    /// This rank's own number of a namespace and its epoch, if it was opened.
    #[must_use]
    pub fn ns(&self, name: &NsName) -> Option<(NsId, NsEpoch)> {
        let ns = self.namespaces.id(name)?;
        Some((ns, self.namespaces.get(ns)?.epoch))
    }

    /// The namespace's epoch: to be read when a store is submitted.
    #[must_use]
    pub fn epoch(&self, ns: NsId) -> Option<NsEpoch> {
        self.namespaces.get(ns).map(|namespace| namespace.epoch)
    }

    /// What the directory calls the namespace now: for LOOKUP and LOCATE. `None` while it is away.
    #[must_use]
    pub fn directory_ns(&self, ns: NsId) -> Option<NsNumber> {
        match self.namespaces.get(ns)?.standing {
            Standing::Open(number) => Some(number),
            _ => None,
        }
    }

    /// The rank's number and incarnation, while it is joined.
    #[must_use]
    pub fn member(&self) -> Option<Member> {
        match self.link {
            Link::Joined { member } => Some(member),
            _ => None,
        }
    }

    /// Whether everything is announced and acknowledged.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.member().is_some()
            && matches!(self.announcing, Announcing::Done)
            && self.acknowledged == self.position
    }

    /// Counters.
    #[must_use]
    pub fn stats(&self) -> AnnouncerStats {
        self.stats
    }

    /// Load of this rank, 0..=255, told with the next PUBLISH.
    pub fn set_load(&mut self, load: u8) {
        self.load = load;
    }

    /// The next thing to do.
    pub fn poll_action(&mut self) -> Option<AnnouncerAction> {
        self.actions.pop_front()
    }

    /// When [`Announcer::handle_timeout`] has something to do; `None` for never.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let clears = self.clears.values().copied().min();
        [self.flushes.next_deadline(), clears, self.next_link_work(), self.next_publish()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Looks at what time brings.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some(flush) = self.flushes.pop_late(now) {
            self.actions.push_back(AnnouncerAction::FlushDone { flush, ok: false });
        }
        let late: Vec<ClearId> =
            self.clears.iter().filter(|(_, deadline)| now >= **deadline).map(|(clear, _)| *clear).collect();
        for clear in late {
            self.finish_clear(clear, false);
        }
        self.work(now);
    }

    /// A control connection to the directory is open. `jitter` is a random time: the announcement begins after it, cut
    /// to [`REANNOUNCE_JITTER`], so that ranks do not all come at once.
    pub fn handle_connected(&mut self, now: Time, jitter: Duration) -> LinkId {
        self.drop_link(now);
        self.link_id = LinkId(self.link_id.0 + 1);
        if !matches!(self.link, Link::Over) {
            self.link = Link::Joining { again_at: Time::ZERO };
            let at = now.after(jitter.min(REANNOUNCE_JITTER));
            self.announcing = Announcing::Needed { at, asked: false };
        }
        self.work(now);
        self.link_id
    }

    /// The control connection or the liveness connection is gone.
    pub fn handle_disconnected(&mut self, now: Time) {
        self.drop_link(now);
    }

    /// The directory's reply to an [`AnnouncerAction::Send`].
    pub fn handle_reply(&mut self, now: Time, link: LinkId, tag: RequestTag, reply: &Reply<'_>) {
        if link != self.link_id || matches!(self.link, Link::Away | Link::Over) {
            return;
        }
        if let Reply::Refused(Refusal::UnknownRank | Refusal::ForeignConnection) = reply {
            self.handle_unknown(now, tag);
            return;
        }
        match (tag, reply) {
            (RequestTag::Join, Reply::Joined(JoinReply::Joined(joined))) => self.handle_joined(now, joined),
            (RequestTag::Join, Reply::Joined(refused)) => self.handle_join_refused(now, refused),
            (RequestTag::Join, Reply::Refused(refusal)) => {
                self.refuse_join(now, JoinError::Refused(*refusal));
            }
            (RequestTag::OpenNs(ns), Reply::Ns(reply)) => self.handle_ns_reply(now, ns, reply),
            (RequestTag::Publish(seq_no), Reply::Publish(reply)) => {
                self.handle_publish_reply(now, seq_no, reply);
            }
            (RequestTag::Clear(clear), Reply::Clear(reply)) => self.finish_clear(clear, reply.complete),
            (RequestTag::Clear(clear), Reply::Refused(_)) => self.finish_clear(clear, false),
            // Overloaded, or an answer to something else: the retry will tell.
            _ => {}
        }
        self.work(now);
    }

    /// The directory asks for a clear. If a namespace is returned, the driver clears it (all that was stored under an
    /// epoch below the returned one) and answers [`ClearAck`](crate::wire::ClearAck) when the words are invalid;
    /// otherwise this rank holds nothing of it, and the driver answers at once.
    #[must_use]
    pub fn handle_clear_rank(&mut self, now: Time, clear: &ClearRank) -> Option<(NsId, NsEpoch)> {
        let ns = self.namespaces.id(&clear.ns)?;
        self.namespaces.raise(ns, clear.epoch);
        let epoch = self.namespaces.get(ns)?.epoch;
        self.work(now);
        Some((ns, epoch))
    }

    /// Asks the directory to clear a namespace everywhere, here too; ends with [`AnnouncerAction::ClearDone`]. While the
    /// directory is away the answer is false at once, and nothing is cleared: an epoch that this rank made up could be
    /// mistaken for one that means another clear.
    pub fn handle_clear(&mut self, now: Time, clear: ClearId, ns: NsId, deadline: Time) {
        let namespace = self.namespaces.get(ns).copied();
        let (Some(namespace), Some(_)) = (namespace, self.member()) else {
            self.actions.push_back(AnnouncerAction::ClearDone { clear, complete: false });
            return;
        };
        if self.clears.len() >= RANK_CLEARS_MAX || now >= deadline {
            self.actions.push_back(AnnouncerAction::ClearDone { clear, complete: false });
            return;
        }
        self.clears.insert(clear, deadline);
        self.send(RequestTag::Clear(clear), Request::Clear(Clear { ns: namespace.name }));
    }

    fn finish_clear(&mut self, clear: ClearId, complete: bool) {
        if self.clears.remove(&clear).is_some() {
            self.actions.push_back(AnnouncerAction::ClearDone { clear, complete });
        }
    }

    /// Waits until the directory has acknowledged all that was queued so far; ends with
    /// [`AnnouncerAction::FlushDone`], at its deadline at the latest.
    pub fn handle_flush(&mut self, now: Time, flush: FlushId, deadline: Time) {
        if matches!(self.link, Link::Over) || self.flushes.len() >= FLUSHES_MAX || now >= deadline {
            let ok = now < deadline && self.is_settled();
            self.actions.push_back(AnnouncerAction::FlushDone { flush, ok });
            return;
        }
        self.flushes.insert(flush, self.position, deadline);
        self.work(now);
    }

    fn finish_flushes(&mut self) {
        if self.member().is_none() || !matches!(self.announcing, Announcing::Done) {
            return;
        }
        while let Some((flush, ok)) = self.flushes.pop_reached(self.acknowledged) {
            self.actions.push_back(AnnouncerAction::FlushDone { flush, ok });
        }
    }

    fn send(&mut self, tag: RequestTag, request: Request<'static>) {
        self.actions.push_back(AnnouncerAction::Send { link: self.link_id, tag, request });
    }

    fn epoch_changed(&mut self, ns: NsId, epoch: NsEpoch) {
        if self.namespaces.raise(ns, epoch) {
            self.actions.push_back(AnnouncerAction::EpochChanged { ns, epoch });
        }
    }

    /// Does all that can be done now.
    fn work(&mut self, now: Time) {
        self.work_link(now);
        self.work_publish(now);
        self.finish_flushes();
    }
}
