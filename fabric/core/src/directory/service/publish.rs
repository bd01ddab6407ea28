//! PUBLISH and MISS_REPORT (design 1.6, 1.9).

use std::collections::BTreeMap;

use super::{ConnectionId, Service};
use crate::directory::limits::SWEEP_PRESSURE_STEP;
use crate::directory::table::{Place, PutOutcome, PutRefused, TIER_MAX};
use crate::load::MissReason;
use crate::wire::{
    Member, MissReports, NsNumber, Publish, PublishOp, PublishReply, RaisedEpoch, Records, Refusal,
};
use crate::{NsEpoch, RankId, Time};

/// Changes that are warmed up and applied together.
const GROUP: usize = 32;

/// What went wrong within one PUBLISH.
#[derive(Default)]
struct Refused {
    puts: u32,
    raised: BTreeMap<NsNumber, NsEpoch>,
    /// Whether the memory was swept for room already.
    swept: bool,
}

impl Service {
    /// Applies the changes of a rank, in its order, each message once.
    ///
    /// # Errors
    /// [`Refusal`] if the rank must join again, or if the message came over a foreign connection.
    pub fn handle_publish(
        &mut self,
        now: Time,
        connection: ConnectionId,
        publish: &Publish<'_>,
    ) -> Result<PublishReply<'static>, Refusal> {
        let id = publish.member.rank;
        let rank = self.ranks.get(&id).filter(|rank| rank.member == publish.member && rank.is_connected());
        let Some(rank) = rank else {
            self.stats.publishes_foreign += 1;
            return Err(Refusal::UnknownRank);
        };
        if rank.control != Some(connection) {
            self.stats.publishes_foreign += 1;
            return Err(Refusal::ForeignConnection);
        }
        let (applied, has_begun) = (rank.applied, rank.has_begun);
        if publish.seq_no <= applied {
            self.stats.publishes_duplicate += 1;
            let last = rank.last_reply.clone().filter(|_| publish.seq_no == applied);
            return Ok(last.unwrap_or(PublishReply::Applied {
                seq_no: publish.seq_no,
                refused: 0,
                raised: Records::new(),
            }));
        }
        let follows = has_begun && publish.seq_no == applied + 1;
        if !(publish.first || follows) {
            self.stats.publishes_gap += 1;
            return Ok(PublishReply::Gap { expected: if has_begun { applied + 1 } else { 0 } });
        }
        if publish.first && !self.begin_source(id) {
            return Err(Refusal::Overloaded);
        }
        let refused = self.apply(now, publish.member, &publish.ops);
        if publish.last {
            self.end_source(id);
        }
        self.set_load(id, publish.load);
        self.stats.publishes += 1;
        let reply = PublishReply::Applied {
            seq_no: publish.seq_no,
            refused: refused.puts,
            raised: refused.raised.into_iter().map(|(ns, epoch)| RaisedEpoch { ns, epoch }).collect(),
        };
        if let Some(rank) = self.ranks.get_mut(&id) {
            rank.applied = publish.seq_no;
            rank.last_reply = Some(reply.clone());
        }
        Ok(reply)
    }

    fn apply(&mut self, now: Time, member: Member, ops: &Records<'_, PublishOp>) -> Refused {
        let mut refused = Refused::default();
        let mut group = Vec::with_capacity(GROUP);
        let mut ops = ops.iter();
        loop {
            group.clear();
            group.extend(ops.by_ref().take(GROUP));
            if group.is_empty() {
                return refused;
            }
            std::hint::black_box(self.table.warm(group.iter().map(|op| op.fingerprint)));
            for op in &group {
                self.apply_one(now, member, op, &mut refused);
            }
        }
    }

    fn apply_one(&mut self, now: Time, member: Member, op: &PublishOp, refused: &mut Refused) {
        let Some((source, previous)) =
            self.ranks.get(&member.rank).and_then(|rank| Some((rank.source?, rank.previous)))
        else {
            return;
        };
        let is_same_rank = |other: u32| other == source || Some(other) == previous;
        if !op.present {
            let removed = self.table.remove(op.fingerprint, op.generation, is_same_rank);
            self.stats.removes += u64::from(removed);
            self.stats.removes_stale += u64::from(!removed);
            return;
        }
        let Some(namespace) = self.namespaces.get(op.ns).copied() else {
            refused.puts = refused.puts.saturating_add(1);
            return;
        };
        if op.ns_epoch > namespace.epoch {
            // The rank has seen a later epoch than this directory, which is new: OPEN would have said so.
            self.raise_epoch(now, op.ns, op.ns_epoch, Some(member.rank));
        }
        let Some(namespace) = self.namespaces.get(op.ns).copied() else { return };
        if op.ns_epoch != namespace.epoch {
            self.stats.puts_cleared += 1;
            refused.raised.insert(op.ns, namespace.epoch);
            return;
        }
        if op.generation.0 == 0 {
            // Generation 0 is never valid (design 1.3): no read of it could be accepted.
            self.stats.puts_stale += 1;
            return;
        }
        let place = Place {
            source,
            ns: namespace.instance,
            slot: op.slot,
            generation: op.generation,
            tier: op.tier.min(TIER_MAX),
        };
        let mut outcome = self.put(op, place, is_same_rank);
        if outcome == Err(PutRefused::Memory) && !refused.swept {
            refused.swept = true;
            self.sweep(SWEEP_PRESSURE_STEP);
            outcome = self.put(op, place, is_same_rank);
        }
        match outcome {
            Ok(PutOutcome::Inserted | PutOutcome::Updated) => self.stats.puts += 1,
            Ok(PutOutcome::Stale) => self.stats.puts_stale += 1,
            Err(PutRefused::Crowded) => {
                self.stats.puts_crowded += 1;
                refused.puts = refused.puts.saturating_add(1);
            }
            Err(PutRefused::Memory | PutRefused::Collisions) => {
                self.stats.puts_full += 1;
                refused.puts = refused.puts.saturating_add(1);
            }
        }
    }

    fn put(
        &mut self,
        op: &PublishOp,
        place: Place,
        is_same_rank: impl Fn(u32) -> bool,
    ) -> Result<PutOutcome, PutRefused> {
        // A rank that is only silent is not displaced: it is believed again when it is heard, without announcing.
        let (sources, instances) = (&self.sources, &self.namespaces.instances);
        self.table.put(op.fingerprint, place, is_same_rank, |old| {
            instances.is_dead(old.ns) || !sources.get(old.source as usize).is_some_and(|source| source.shown)
        })
    }

    /// Replicas that did not serve. A word that belongs to somebody else removes the replica, if its generation is
    /// still the one that was read; an error hides the owner from the engine that reports.
    pub fn handle_miss_reports(&mut self, now: Time, reports: &MissReports<'_>) {
        for report in reports.reports.iter() {
            match report.reason {
                MissReason::Stale => self.stats.misses_stale += 1,
                MissReason::TagMismatch => self.stats.misses_tag += 1,
                MissReason::ChecksumMismatch => self.stats.misses_checksum += 1,
                MissReason::Unreachable => self.stats.misses_unreachable += 1,
            }
            let Some((source, previous)) = self.sources_of(report.member) else { continue };
            if report.reason == MissReason::Unreachable {
                self.hides.report(now, reports.asker, report.member.rank);
            } else {
                self.table.remove(report.fingerprint, report.generation, |other| {
                    Some(other) == source || Some(other) == previous
                });
            }
        }
    }

    fn sources_of(&self, member: Member) -> Option<(Option<u32>, Option<u32>)> {
        let id: RankId = member.rank;
        let rank = self.ranks.get(&id).filter(|rank| rank.member == member)?;
        Some((rank.source, rank.previous))
    }
}
