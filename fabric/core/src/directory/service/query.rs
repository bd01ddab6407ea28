//! LOOKUP, LOCATE, WHO: questions without side effects.

use std::borrow::Cow;

use smallvec::SmallVec;

use super::Service;
use crate::directory::table::Place;
use crate::limits::REPLICAS_PER_ANSWER_MAX;
use crate::wire::{
    Bitmap, EngineKey, LocateReply, LookupReply, Member, Query, RankRecord, Refusal, ReplicaRecord, Reply,
    Request, WhoReply, REPLICAS_PER_MESSAGE_MAX,
};
use crate::{Fingerprint, Time};

/// No index yet.
const UNNAMED: u16 = u16::MAX;

impl Service {
    /// Answers any request that changes nothing; others are refused as unsupported. Many threads may ask at once.
    #[must_use]
    pub fn answer(&self, now: Time, request: &Request<'_>) -> Reply<'static> {
        match request {
            Request::Lookup(lookup) => match self.lookup(now, &lookup.0) {
                Ok(reply) => Reply::Lookup(reply),
                Err(refusal) => Reply::Refused(refusal),
            },
            Request::Locate(locate) => match self.locate(now, &locate.0) {
                Ok(reply) => Reply::Locate(reply),
                Err(refusal) => Reply::Refused(refusal),
            },
            Request::Who(who) => Reply::Who(self.who(who.member)),
            Request::GetStats(_) => Reply::Stats(self.stats()),
            _ => Reply::Refused(Refusal::Unsupported),
        }
    }

    /// Which sources are visible to this asker.
    fn visible_to(&self, now: Time, asker: EngineKey) -> Cow<'_, [u8]> {
        let mut visible = Cow::Borrowed(self.visible.as_slice());
        if asker == EngineKey::ANONYMOUS {
            return visible;
        }
        for rank in self.hides.hidden_from(now, asker) {
            let Some(rank) = self.ranks.get(&rank) else { continue };
            for number in [rank.source, rank.previous].into_iter().flatten() {
                if let Some(flag) = visible.to_mut().get_mut(number as usize) {
                    *flag = 0;
                }
            }
        }
        visible
    }

    /// One bit per key: whether some rank that the asker may be able to reach offers it. No side effects.
    ///
    /// # Errors
    /// [`Refusal::UnknownNamespace`]: the number is of another life of the directory.
    pub fn lookup(&self, now: Time, query: &Query<'_>) -> Result<LookupReply<'static>, Refusal> {
        let instance = self.namespaces.get(query.ns).ok_or(Refusal::UnknownNamespace)?.instance;
        let visible = self.visible_to(now, query.asker);
        let visible: &[u8] = &visible;
        let mut hits = Bitmap::zeros(query.keys.len());
        self.table.lookup(query.keys.bytes(), hits.bytes_mut(), |source, ns| {
            ns == instance && visible.get(source as usize) == Some(&1)
        });
        Ok(LookupReply { hits })
    }

    /// The visible replicas of each key, at most [`REPLICAS_PER_ANSWER_MAX`], the least loaded owners first. Owners of
    /// equal load are ordered differently for different keys and askers, so that readers spread. No side effects.
    ///
    /// # Errors
    /// [`Refusal::UnknownNamespace`]: the number is of another life of the directory.
    pub fn locate(&self, now: Time, query: &Query<'_>) -> Result<LocateReply<'static>, Refusal> {
        let instance = self.namespaces.get(query.ns).ok_or(Refusal::UnknownNamespace)?.instance;
        let visible = self.visible_to(now, query.asker);
        let keys = query.keys.len();
        let per_key = (REPLICAS_PER_MESSAGE_MAX / keys.max(1)).min(REPLICAS_PER_ANSWER_MAX);
        let mut reply = LocateReply::with_capacity(keys);
        let mut named = vec![UNNAMED; self.sources.len()];
        let mut chosen = SmallVec::<[(u8, u64, Place); 8]>::new();
        let mut records = SmallVec::<[ReplicaRecord; 4]>::new();
        self.table.locate(query.keys.bytes(), |fingerprint, places| {
            chosen.clear();
            for place in places {
                if place.ns == instance && visible.get(place.source as usize) == Some(&1) {
                    if let Some(source) = self.sources.get(place.source as usize) {
                        let order = spread(fingerprint, query.asker, source.member);
                        chosen.push((source.load, order, *place));
                    }
                }
            }
            chosen.sort_unstable_by_key(|(load, order, place)| (*load, *order, place.source));
            records.clear();
            for (load, _, place) in chosen.iter().take(per_key) {
                let source = place.source as usize;
                let (Some(index), Some(owner)) = (named.get_mut(source), self.sources.get(source)) else {
                    continue;
                };
                if *index == UNNAMED {
                    *index = reply.push_rank(RankRecord { member: owner.member, load: *load });
                }
                records.push(ReplicaRecord {
                    rank_index: *index,
                    tier: place.tier,
                    slot: place.slot,
                    generation: place.generation,
                });
            }
            reply.push_key(&records);
        });
        Ok(reply)
    }

    /// How to reach a rank.
    #[must_use]
    pub fn who(&self, member: Member) -> WhoReply<'static> {
        match self.ranks.get(&member.rank).filter(|rank| rank.member == member) {
            Some(rank) => WhoReply::Known(rank.info()),
            None => WhoReply::Unknown,
        }
    }
}

/// A number that differs between keys, askers and owners.
fn spread(fingerprint: Fingerprint, asker: EngineKey, owner: Member) -> u64 {
    let mixed = (fingerprint.0[1] ^ asker.0 ^ owner.incarnation.get()).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    mixed ^ mixed >> 32
}
