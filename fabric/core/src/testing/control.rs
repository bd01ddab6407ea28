//! The control plane: messages between the lives and the directory.

use std::collections::BTreeMap;

use super::world::{Event, LifeId, World};
use crate::load::{DirectoryUnavailable, LocateId, MissReason, Replica, Replicas, ReportId};
use crate::owner::Announcement;
use crate::wire::Member;
use crate::{Fingerprint, Generation, NsEpoch, NsId, RankId, Time};

#[derive(Debug)]
pub(super) enum ControlEvent {
    Announce(LifeId, Announcement),
    Locate(LifeId, LocateId, Vec<Fingerprint>),
    Located(LifeId, LocateId, Option<Vec<Replicas>>),
    Report(LifeId, ReportId, Fingerprint, Member, Generation, MissReason),
    Reported(LifeId, ReportId),
}

#[derive(Debug, Default)]
pub(super) struct Control {
    nodes: BTreeMap<LifeId, usize>,
    up: bool,
    cut: std::collections::BTreeSet<usize>,
    reports_lost: bool,
    miswired: BTreeMap<Fingerprint, Fingerprint>,
    table: BTreeMap<Fingerprint, Vec<Replica>>,
    members: BTreeMap<LifeId, Member>,
    named: u32,
}

impl Control {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn node_of(&self, life: LifeId) -> Option<usize> {
        self.nodes.get(&life).copied()
    }
}

impl World {
    /// Starts the directory, empty.
    pub fn start_directory(&mut self) {
        self.control.up = true;
        self.control.table.clear();
    }

    /// Ends the directory's process.
    pub fn crash_directory(&mut self) {
        self.control.up = false;
    }

    /// No control message passes between a node and the directory until healed.
    pub fn cut_directory(&mut self, node: usize) {
        self.control.cut.insert(node);
    }

    /// Undoes [`World::cut_directory`].
    pub fn heal_directory(&mut self, node: usize) {
        self.control.cut.remove(&node);
    }

    /// Loses every miss report, or none.
    pub fn lose_reports(&mut self, lost: bool) {
        self.control.reports_lost = lost;
    }

    /// Makes the directory answer for `asked` with what it knows of `answered`.
    pub fn miswire(&mut self, asked: u64, answered: u64) {
        self.control.miswired.insert(World::key(asked).fingerprint(), World::key(answered).fingerprint());
    }

    pub(super) fn life_started(&mut self, id: LifeId) {
        let Some(life) = self.lives.get_mut(&id) else { return };
        self.control.named += 1;
        let rank = RankId(self.control.named);
        self.control.nodes.insert(id, life.node);
        self.control.members.insert(id, Member { rank, incarnation: life.rank.incarnation() });
        life.rank.handle_number(Some(rank));
    }

    pub(super) fn life_ended(&mut self, _id: LifeId) {}

    pub(super) fn namespace_of(&self, _id: LifeId) -> Option<(NsId, NsEpoch)> {
        Some((NsId(1), NsEpoch(1)))
    }

    fn send(&mut self, event: ControlEvent) {
        if self.random.one_in(self.options.loss_odds) || !self.control.up {
            return;
        }
        let (ControlEvent::Announce(life, ..)
        | ControlEvent::Locate(life, ..)
        | ControlEvent::Located(life, ..)
        | ControlEvent::Report(life, ..)
        | ControlEvent::Reported(life, ..)) = event;
        if self.control.node_of(life).is_some_and(|n| self.control.cut.contains(&n)) {
            return;
        }
        let delay = self.random.delay(self.options.delay_min, self.options.delay_max);
        self.events.push(self.now.after(delay), Event::Control(event));
    }

    pub(super) fn announce(&mut self, id: LifeId, announcement: Announcement) {
        self.send(ControlEvent::Announce(id, announcement));
    }

    pub(super) fn locate(&mut self, id: LifeId, locate: LocateId, _ns: NsId, keys: &[Fingerprint]) {
        self.send(ControlEvent::Locate(id, locate, keys.to_vec()));
    }

    pub(super) fn report_miss(
        &mut self,
        id: LifeId,
        report: ReportId,
        fingerprint: Fingerprint,
        member: Member,
        generation: Generation,
        reason: MissReason,
    ) {
        if self.control.reports_lost {
            return;
        }
        self.send(ControlEvent::Report(id, report, fingerprint, member, generation, reason));
    }

    pub(super) fn clear_done(&mut self, _id: LifeId, _clear: u64) {}

    pub(super) fn control_timeout(&self) -> Option<Time> {
        None
    }

    pub(super) fn fire_control_timers(&mut self) {}

    pub(super) fn handle_control(&mut self, event: ControlEvent) {
        let now = self.now;
        match event {
            ControlEvent::Announce(id, a) => {
                let Some(member) = self.control.members.get(&id) else { return };
                let replicas = self.control.table.entry(a.fingerprint).or_default();
                if a.present {
                    replicas.retain(|r| r.incarnation != member.incarnation);
                    replicas.push(Replica {
                        rank: member.rank,
                        incarnation: member.incarnation,
                        slot: a.slot,
                        generation: a.generation,
                        tier: 0,
                        load: 0,
                    });
                } else {
                    replicas.retain(|r| (r.incarnation, r.generation) != (member.incarnation, a.generation));
                }
            }
            ControlEvent::Locate(id, locate, keys) => {
                let answer = keys
                    .iter()
                    .map(|k| self.control.miswired.get(k).unwrap_or(k))
                    .map(|k| self.control.table.get(k).map(|r| Replicas::from_slice(r)).unwrap_or_default())
                    .collect();
                self.send(ControlEvent::Located(id, locate, Some(answer)));
            }
            ControlEvent::Located(id, locate, answer) => {
                if let Some(life) = self.lives.get_mut(&id) {
                    life.rank.handle_located(now, locate, answer.ok_or(DirectoryUnavailable));
                    self.drain(id);
                }
            }
            ControlEvent::Report(id, report, fingerprint, member, generation, reason) => {
                if reason != MissReason::Unreachable {
                    if let Some(replicas) = self.control.table.get_mut(&fingerprint) {
                        replicas
                            .retain(|r| (r.incarnation, r.generation) != (member.incarnation, generation));
                    }
                }
                self.send(ControlEvent::Reported(id, report));
            }
            ControlEvent::Reported(id, report) => {
                if let Some(life) = self.lives.get_mut(&id) {
                    life.rank.handle_miss_reported(now, report);
                    self.drain(id);
                }
            }
        }
    }
}
