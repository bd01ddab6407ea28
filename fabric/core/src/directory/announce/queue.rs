//! The publish queue: batches, positions, acknowledgements, complete announcements.

use std::collections::VecDeque;

use super::namespaces::Standing;
use super::{Announcer, AnnouncerAction, Link, RequestTag};
use crate::directory::limits::PUBLISH_BATCH_OPS;
use crate::limits::{PUBLISH_DELAY, PUBLISH_QUEUE_MAX, PUBLISH_RETRY};
use crate::owner::Announcement;
use crate::wire::{NsNumber, Publish, PublishOp, PublishReply, Records, Request};
use crate::Time;

/// How far the announcement of everything is.
#[derive(Debug)]
pub(super) enum Announcing {
    /// Everything must be announced, from this time on.
    Needed {
        /// Not before.
        at: Time,
        /// Whether the driver was asked for a snapshot.
        asked: bool,
    },
    /// A snapshot is being sent.
    Running {
        /// What is left of it.
        left: VecDeque<Announcement>,
        /// Whether a message of it was built.
        begun: bool,
        /// Changes up to this position are in the snapshot.
        position: u64,
    },
    /// Everything was announced; changes are sent as they come.
    Done,
}

/// The one PUBLISH that waits for its acknowledgement.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) publish: Publish<'static>,
    again_at: Time,
    /// Changes up to this position are acknowledged with it.
    covers: u64,
}

/// What becomes of one change when a message is built.
enum Fate {
    Send(PublishOp),
    /// Its namespace was cleared since it was stored.
    Cleared,
    /// The directory has no room for its namespace.
    Refused,
    /// Its namespace has no number yet.
    Wait,
}

impl Announcer {
    /// A change of what this rank offers, in the owner's order.
    pub fn handle_announcement(&mut self, now: Time, announcement: Announcement) {
        self.position += 1;
        if matches!(self.announcing, Announcing::Needed { .. }) || matches!(self.link, Link::Over) {
            // The snapshot will contain it.
            return;
        }
        if self.queue.len() >= PUBLISH_QUEUE_MAX {
            self.stats.overflows += 1;
            self.need_snapshot(now);
        } else {
            if self.queue.is_empty() {
                self.queue_due = now.after(PUBLISH_DELAY);
            }
            self.queue.push_back(announcement);
        }
        if self.queue.len() >= PUBLISH_BATCH_OPS || self.queue.is_empty() {
            self.work(now);
        }
    }

    /// Whether the driver should call [`Announcer::handle_snapshot`] now.
    #[must_use]
    pub fn needs_snapshot(&self) -> bool {
        self.member().is_some() && matches!(self.announcing, Announcing::Needed { asked: true, .. })
    }

    /// All that this rank offers at this moment: nothing that was announced before and nothing that will be announced
    /// later may be missing or added. Removals in it are ignored. Not asked for: ignored.
    pub fn handle_snapshot(&mut self, now: Time, published: impl Iterator<Item = Announcement>) {
        if !self.needs_snapshot() {
            return;
        }
        let left: VecDeque<Announcement> = published.filter(|entry| entry.present).collect();
        self.queue.clear();
        self.in_flight = None;
        self.announcing = Announcing::Running { left, begun: false, position: self.position };
        self.stats.snapshots += 1;
        self.work(now);
    }

    /// From now on nothing is queued until a snapshot was taken.
    pub(super) fn need_snapshot(&mut self, now: Time) {
        self.queue = VecDeque::new();
        self.in_flight = None;
        if !matches!(self.link, Link::Over) {
            self.announcing = Announcing::Needed { at: now, asked: false };
        }
    }

    pub(super) fn next_publish(&self) -> Option<Time> {
        self.member()?;
        if let Some(sent) = &self.in_flight {
            return Some(sent.again_at);
        }
        match &self.announcing {
            Announcing::Needed { at, asked: false } => Some(*at),
            // Waits for the driver, or for a namespace, which has its own time.
            Announcing::Needed { .. } | Announcing::Running { .. } => None,
            Announcing::Done => match self.queue.front() {
                Some(first) if !matches!(self.fate(first), Fate::Wait) => Some(self.queue_due),
                _ => None,
            },
        }
    }

    pub(super) fn work_publish(&mut self, now: Time) {
        if self.member().is_none() {
            return;
        }
        if let Announcing::Needed { at, asked } = &mut self.announcing {
            if now >= *at && !*asked {
                *asked = true;
                self.actions.push_back(AnnouncerAction::NeedSnapshot);
            }
            return;
        }
        if let Some(sent) = &mut self.in_flight {
            if now < sent.again_at {
                return;
            }
            sent.again_at = now.after(PUBLISH_RETRY);
            self.stats.retries += 1;
            let (tag, publish) = (RequestTag::Publish(sent.publish.seq_no), sent.publish.clone());
            self.send(tag, Request::Publish(publish));
            return;
        }
        let hurry = self.flushes.len() > 0 || self.queue.len() >= PUBLISH_BATCH_OPS;
        let due = matches!(self.announcing, Announcing::Running { .. }) || hurry || now >= self.queue_due;
        if due {
            self.build(now);
        }
    }

    fn fate(&self, change: &Announcement) -> Fate {
        let namespace = self.namespaces.get(change.ns);
        let standing = namespace.map(|namespace| namespace.standing);
        if !change.present {
            // A removal names its entry by key and generation; the namespace does not matter.
            let number = match standing {
                Some(Standing::Open(number)) => number,
                _ => NsNumber(0),
            };
            return Fate::Send(PublishOp::new(change, number));
        }
        match (namespace, standing) {
            (Some(namespace), _) if change.ns_epoch < namespace.epoch => Fate::Cleared,
            (_, Some(Standing::Open(number))) => Fate::Send(PublishOp::new(change, number)),
            (_, Some(Standing::Unasked | Standing::Asked { .. })) => Fate::Wait,
            (_, Some(Standing::Full { .. }) | None) => Fate::Refused,
        }
    }

    /// The next change to send, with its fate. Taken from the snapshot first.
    fn next_fate(&mut self) -> Option<Fate> {
        let next = match &self.announcing {
            Announcing::Running { left, .. } => left.front(),
            _ => self.queue.front(),
        };
        let fate = self.fate(next?);
        if !matches!(fate, Fate::Wait) {
            match &mut self.announcing {
                Announcing::Running { left, .. } => left.pop_front(),
                _ => self.queue.pop_front(),
            };
        }
        Some(fate)
    }

    /// Builds and sends the next message.
    fn build(&mut self, now: Time) {
        let mut ops = Records::new();
        let (mut waits, mut spoilt) = (false, false);
        while ops.len() < PUBLISH_BATCH_OPS {
            match self.next_fate() {
                Some(Fate::Send(op)) => ops.push(op),
                Some(Fate::Cleared) => self.stats.cleared += 1,
                Some(Fate::Refused) => {
                    self.stats.refused += 1;
                    spoilt = true;
                }
                Some(Fate::Wait) => {
                    waits = true;
                    break;
                }
                None => break,
            }
        }
        if spoilt {
            self.flushes.spoil(self.acknowledged);
        }
        let (first, last, covers) = match &mut self.announcing {
            Announcing::Running { left, begun, position } => {
                let last = left.is_empty();
                if waits && ops.is_empty() {
                    return;
                }
                let first = !core::mem::replace(begun, true);
                (first, last, if last { *position } else { self.acknowledged })
            }
            _ => {
                let covers = self.position - self.queue.len() as u64;
                if ops.is_empty() {
                    // All were cleared or refused: nothing to tell.
                    self.acknowledged = covers;
                    return;
                }
                (false, false, covers)
            }
        };
        let Some(member) = self.member() else { return };
        let seq_no = self.next_seq_no;
        self.next_seq_no += 1;
        let publish = Publish { member, seq_no, first, last, load: self.load, ops };
        self.in_flight =
            Some(InFlight { publish: publish.clone(), again_at: now.after(PUBLISH_RETRY), covers });
        self.send(RequestTag::Publish(seq_no), Request::Publish(publish));
    }

    pub(super) fn handle_publish_reply(&mut self, now: Time, seq_no: u64, reply: &PublishReply<'_>) {
        let Some(sent) = self.in_flight.take_if(|sent| sent.publish.seq_no == seq_no) else { return };
        match reply {
            PublishReply::Applied { refused, raised, .. } => {
                if *refused > 0 {
                    self.stats.refused += u64::from(*refused);
                    self.flushes.spoil(self.acknowledged);
                }
                self.stats.publishes += 1;
                self.acknowledged = self.acknowledged.max(sent.covers);
                if sent.publish.last {
                    self.announcing = Announcing::Done;
                }
                // What is left has waited for this answer long enough.
                self.queue_due = now;
                for raised in raised.iter() {
                    if let Some(ns) = self.namespaces.by_number(raised.ns) {
                        self.epoch_changed(ns, raised.epoch);
                    }
                }
            }
            PublishReply::Gap { .. } => {
                self.stats.gaps += 1;
                self.need_snapshot(now);
            }
        }
    }
}
