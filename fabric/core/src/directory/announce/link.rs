//! Joining, opening namespaces, leaving.

use super::namespaces::Standing;
use super::queue::Announcing;
use super::{Announcer, AnnouncerAction, JoinError, RequestTag};
use crate::directory::limits::MEMBERSHIP_RETRY;
use crate::wire::{Attach, Join, JoinReply, Joined, Leave, Member, NsReply, OpenNs, Request};
use crate::{NsId, Time};

/// How the rank stands with the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    /// Not connected.
    Away,
    /// Connected; JOIN is said at this time.
    Joining {
        /// When JOIN is said next.
        again_at: Time,
    },
    /// Admitted.
    Joined {
        /// As whom.
        member: Member,
    },
    /// Refused for good, or left: nothing is announced any more.
    Over,
}

impl Announcer {
    pub(super) fn drop_link(&mut self, now: Time) {
        if !matches!(self.link, Link::Over) {
            self.link = Link::Away;
        }
        self.namespaces.forget_numbers();
        self.need_snapshot(now);
        let clears: Vec<_> = self.clears.keys().copied().collect();
        for clear in clears {
            self.finish_clear(clear, false);
        }
    }

    pub(super) fn next_link_work(&self) -> Option<Time> {
        match self.link {
            Link::Joining { again_at } => Some(again_at),
            Link::Joined { .. } => self.namespaces.next_ask(),
            Link::Away | Link::Over => None,
        }
    }

    pub(super) fn work_link(&mut self, now: Time) {
        match self.link {
            Link::Joining { again_at } if now >= again_at => {
                self.link = Link::Joining { again_at: now.after(MEMBERSHIP_RETRY) };
                let join = Join {
                    cluster: self.config.cluster.clone(),
                    name: self.config.name.clone(),
                    engine: self.config.engine.clone(),
                    incarnation: self.config.incarnation,
                    advertised: self.config.advertised.clone(),
                };
                self.send(RequestTag::Join, Request::Join(join));
            }
            Link::Joined { .. } => {
                for ns in self.namespaces.to_ask(now) {
                    self.ask(now, ns);
                }
            }
            _ => {}
        }
    }

    fn ask(&mut self, now: Time, ns: NsId) {
        let Some(namespace) = self.namespaces.get_mut(ns) else { return };
        namespace.standing = Standing::Asked { again_at: now.after(MEMBERSHIP_RETRY) };
        let open = OpenNs { name: namespace.name, known_epoch: namespace.epoch };
        self.send(RequestTag::OpenNs(ns), Request::OpenNs(open));
    }

    pub(super) fn handle_joined(&mut self, now: Time, joined: &Joined) {
        if !matches!(self.link, Link::Joining { .. }) {
            return;
        }
        let member = Member { rank: joined.rank, incarnation: self.config.incarnation };
        self.link = Link::Joined { member };
        let attach = Attach { member, liveness_token: joined.liveness_token };
        self.actions.push_back(AnnouncerAction::OpenLiveness { link: self.link_id, attach });
        self.work(now);
    }

    pub(super) fn handle_join_refused(&mut self, now: Time, reply: &JoinReply) {
        let error = match reply {
            JoinReply::Joined(_) => return,
            JoinReply::NameInUse => JoinError::NameInUse,
            JoinReply::Closed => JoinError::Closed,
            JoinReply::ClusterMismatch => JoinError::ClusterMismatch,
            JoinReply::Full => JoinError::Full,
        };
        self.refuse_join(now, error);
    }

    pub(super) fn refuse_join(&mut self, now: Time, error: JoinError) {
        if !matches!(self.link, Link::Joining { .. }) {
            return;
        }
        if error.is_retryable() {
            self.link = Link::Joining { again_at: now.after(MEMBERSHIP_RETRY) };
        } else {
            self.end();
        }
        self.actions.push_back(AnnouncerAction::JoinRefused { error });
    }

    /// The directory does not know this rank any more: it joins again, over the same connection.
    pub(super) fn handle_unknown(&mut self, now: Time, tag: RequestTag) {
        let known = match tag {
            // A late answer to a message that is not waited for says nothing about now.
            RequestTag::Publish(seq_no) => {
                self.in_flight.as_ref().is_some_and(|sent| sent.publish.seq_no == seq_no)
            }
            _ => false,
        };
        if known && matches!(self.link, Link::Joined { .. }) {
            self.drop_link(now);
            self.link = Link::Joining { again_at: Time::ZERO };
            self.work(now);
        }
    }

    pub(super) fn handle_ns_reply(&mut self, now: Time, ns: NsId, reply: &NsReply) {
        let asked = self.namespaces.get(ns).map(|namespace| namespace.standing);
        if !matches!(asked, Some(Standing::Asked { .. } | Standing::Full { .. })) {
            return;
        }
        match *reply {
            NsReply::Opened { number, epoch } => {
                self.namespaces.set_number(ns, number);
                self.epoch_changed(ns, epoch);
            }
            NsReply::Full => {
                if let Some(namespace) = self.namespaces.get_mut(ns) {
                    namespace.standing = Standing::Full { again_at: now.after(MEMBERSHIP_RETRY) };
                }
            }
        }
    }

    /// Leaves for good: the directory closes this incarnation. Nothing is announced any more.
    pub fn handle_leave(&mut self) {
        if let Link::Joined { member } = self.link {
            self.send(RequestTag::Leave, Request::Leave(Leave { member }));
        }
        self.end();
    }

    fn end(&mut self) {
        self.link = Link::Over;
        self.queue.clear();
        self.in_flight = None;
        self.announcing = Announcing::Done;
        while let Some((flush, _)) = self.flushes.pop_reached(u64::MAX) {
            self.actions.push_back(AnnouncerAction::FlushDone { flush, ok: false });
        }
    }
}
