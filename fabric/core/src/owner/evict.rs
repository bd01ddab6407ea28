//! What takes slots away from keys: eviction, moving extents, clear, invalidation; and the prefix rule's bookkeeping.

use super::entry::EntryState;
use super::list::NIL;
use super::machine::Owner;
use super::policy::Departure;
use super::space::{ExtentState, Pending, SlotState};
use super::{OwnerAction, PutError};
use crate::{Fingerprint, NsEpoch, NsId, SlotId, Time};

/// A slab looks for a colder extent elsewhere after at least this many evictions of its own, so that looking, which
/// costs O(extents), stays cheap per eviction.
const BALANCE_INTERVAL_MIN: u64 = 64;
/// An extent moves when its objects were last used at least this many times longer ago than the objects which the
/// starved slab evicts: moving loses a whole extent at once, so near ties must not swing back and forth.
const BALANCE_AGE_RATIO: u64 = 2;
/// Extents move by choice only while this share of all slot ids is unused; below it only slabs without any slot take
/// extents, so that ids last.
const BALANCE_IDS_DIVISOR: u32 = 4;

impl Owner {
    /// Evicts a key by force, whatever the policy says. Returns whether it was published.
    pub fn handle_evict(&mut self, now: Time, fingerprint: Fingerprint) -> bool {
        let found =
            self.entries.find(fingerprint).filter(|&at| self.entries.get(at).state == EntryState::Published);
        if let Some(at) = found {
            self.evict(at);
            self.serve_starved(now);
        }
        found.is_some()
    }

    /// The directory cleared a namespace: everything stored in it under an epoch before `epoch` goes through O1,
    /// fillings are aborted, waiting puts end. What was submitted under `epoch` or later stays, so a repeated CLEAR does
    /// no harm. The directory has hidden the entries already, so nothing is announced. O(objects).
    pub fn handle_clear(&mut self, now: Time, ns: NsId, epoch: NsEpoch) {
        self.remember_cleared(ns, epoch);
        let doomed: Vec<u32> = self.entries.indices().filter(|&at| self.entries.get(at).ns == ns).collect();
        for at in doomed {
            self.clear_entry(at, epoch);
        }
        self.serve_starved(now);
    }

    /// Rule O5: every word becomes invalid, everything is unpublished, every put in progress ends with
    /// [`PutError::Cleared`] (after its fill was answered, where one runs).
    pub fn handle_invalidate_all(&mut self, now: Time) {
        let all: Vec<u32> = self.entries.indices().collect();
        for at in all {
            if self.entries.get(at).state == EntryState::Published {
                self.unpublish(at, Departure::Dropped, true);
            } else {
                self.abandon(at, None);
            }
        }
        self.serve_starved(now);
    }

    /// Clears one entry: published under an older epoch, it goes; otherwise its older puts end.
    pub(super) fn clear_entry(&mut self, at: u32, epoch: NsEpoch) {
        let entry = self.entries.get(at);
        if entry.state == EntryState::Published {
            if entry.ns_epoch < epoch {
                self.unpublish(at, Departure::Dropped, false);
            }
            return;
        }
        self.abandon(at, Some(epoch));
    }

    /// Ends the puts of an unpublished entry, those before `epoch` if given. If its filler is among them, the slot is
    /// invalidated at once, so that the fill publishes nothing even if it ends well.
    fn abandon(&mut self, at: u32, epoch: Option<NsEpoch>) {
        let entry = self.entries.get(at);
        let filler = entry.puts.head().filter(|_| entry.state == EntryState::Filling);
        let doomed: Vec<u32> = entry
            .puts
            .iter(&self.puts)
            .filter(|&index| epoch.is_none_or(|epoch| self.puts.get(index).ns_epoch < epoch))
            .collect();
        for index in doomed {
            if filler == Some(index) && self.entries.get(at).filling == self.entries.get(at).generation {
                let slot = self.entries.get(at).slot;
                self.entries.get_mut(at).generation = self.invalidate_word(slot);
            }
            self.withdraw(index, PutError::Cleared);
        }
    }

    /// Evicts to make room: O1 now, and the key is reported.
    pub(super) fn evict(&mut self, at: u32) {
        self.stats.evicted += 1;
        let slab = &mut self.space.slabs[self.entries.get(at).slab as usize];
        slab.evictions += 1;
        slab.eviction_age = self.nodes.age(at);
        self.unpublish(at, Departure::Evicted, true);
    }

    /// PUBLISHED -> (O1) -> QUARANTINE.
    fn unpublish(&mut self, at: u32, departure: Departure, announce: bool) {
        let entry = self.entries.get(at);
        let (slot, slab, fingerprint) = (entry.slot, entry.slab, entry.fingerprint());
        let announcement = self.announcement(entry, false);
        self.invalidate_word(slot);
        if announce {
            self.actions.push_back(OwnerAction::Announce(announcement));
        }
        self.space.slabs[slab as usize].policy.remove(&mut self.nodes, at, fingerprint, departure);
        self.uncount_child(at);
        let key_bytes = self.entries.remove(at);
        self.stats.resident -= 1;
        if departure == Departure::Evicted {
            self.keep_evicted_key(key_bytes);
        } else {
            self.stats.dropped += 1;
        }
        let extent = self.space.slots[slot.0 as usize].extent;
        let place = &mut self.space.extents[extent as usize];
        place.ticks -= self.nodes.get(at).tick;
        if let ExtentState::Moving { .. } = place.state {
            self.space.slots[slot.0 as usize].state = SlotState::Retired;
        } else {
            self.space.slots[slot.0 as usize].state = SlotState::Quarantine;
            self.space.slabs[slab as usize].quarantine.push(&mut self.space.slots, slot);
        }
    }

    fn keep_evicted_key(&mut self, key_bytes: Box<[u8]>) {
        self.evicted_keys.push_back(key_bytes);
        if self.evicted_keys.len() > self.config.evicted_keys_max {
            self.evicted_keys.pop_front();
            self.stats.evicted_keys_lost += 1;
        }
    }

    /// Evicts the policy's victim, and one more while the quarantine is short. Returns whether anything was evicted.
    pub(super) fn evict_coldest(&mut self, slab: u32) -> bool {
        let mut evicted = false;
        for _ in 0..2 {
            let hungry = &mut self.space.slabs[slab as usize];
            if evicted && hungry.quarantine.len > hungry.quarantine_quota() {
                break;
            }
            let entries = &self.entries;
            let refused = |at: u32| entries.get(at).children > 0;
            match hungry.policy.victim(&self.nodes, &refused) {
                Some(at) => self.evict(at),
                None => break,
            }
            evicted = true;
        }
        evicted
    }

    pub(super) fn pop_free(&mut self, slab: u32) -> Option<SlotId> {
        self.space.slabs[slab as usize].free.pop(&self.space.slots)
    }

    /// QUARANTINE -> FREE, for the slot that waited longest; `any` also when fewer wait than should.
    pub(super) fn pop_quarantine(&mut self, slab: u32, any: bool) -> Option<SlotId> {
        let slab = &mut self.space.slabs[slab as usize];
        (any || slab.quarantine.len > slab.quarantine_quota())
            .then(|| slab.quarantine.pop(&self.space.slots))?
    }

    /// Lets a slab that evicts young objects have the coldest extent of the richest, if that is much colder.
    pub(super) fn balance(&mut self, slab: u32) {
        let hungry = &mut self.space.slabs[slab as usize];
        if hungry.pending.is_some() || hungry.evictions < hungry.balance_at {
            return;
        }
        hungry.balance_at = hungry.evictions + BALANCE_INTERVAL_MIN.max(u64::from(hungry.slots) / 8);
        let (age, bytes, ready_at) = (
            hungry.eviction_age,
            hungry.length_bytes(),
            hungry.evictions + u64::from(hungry.quarantine_quota()),
        );
        if self.space.slot_ids_left() < self.config.slots_max / BALANCE_IDS_DIVISOR {
            return;
        }
        let Some(extent) = self.space.coldest_of_richest(slab) else { return };
        let place = &self.space.extents[extent as usize];
        let ExtentState::Assigned { slab: richest } = place.state else { return };
        let richer =
            self.space.slabs[richest as usize].length_bytes() > bytes.saturating_add(place.length_bytes);
        if richer && self.nodes.clock - place.mean_tick() >= age.saturating_mul(BALANCE_AGE_RATIO) {
            self.move_extent(extent, slab, ready_at);
        }
    }

    /// Takes an extent out of service for its slab: O1 on its slots. It is handed over by `settle_move`.
    pub(super) fn move_extent(&mut self, extent: u32, to: u32, ready_at: u64) {
        let place = &mut self.space.extents[extent as usize];
        let ExtentState::Assigned { slab: from } = place.state else { return };
        place.state = ExtentState::Moving { from, to };
        let record = place.record;
        self.space.slabs[to as usize].pending = Some(Pending::Move { extent, ready_at });
        self.stats.extents_moved += 1;
        for slot in record.first_slot.0..record.first_slot.0 + record.slots {
            let cell = self.space.slots[slot as usize];
            let loser = &mut self.space.slabs[from as usize];
            match cell.state {
                SlotState::Published => self.evict(cell.link),
                SlotState::Free => loser.free.len -= 1,
                SlotState::Quarantine => loser.quarantine.len -= 1,
                // Stays until its fill is answered.
                SlotState::Filling => continue,
                SlotState::Retired => {}
            }
            self.space.slots[slot as usize].state = SlotState::Retired;
        }
        let loser = &mut self.space.slabs[from as usize];
        loser.extents.retain(|&other| other != extent);
        loser.slots -= record.slots;
        loser.policy.set_room(loser.slots);
    }

    /// Hands over the extent on its way to `slab` if its last fill has ended and it has rested, or `now` without rest.
    pub(super) fn settle_move(&mut self, slab: u32, now: bool) -> bool {
        let hungry = &self.space.slabs[slab as usize];
        let Some(Pending::Move { extent, ready_at }) = hungry.pending else { return false };
        let place = &self.space.extents[extent as usize];
        let settled =
            place.filling == 0 && (now || hungry.evictions >= ready_at) && self.space.slot_ids_left() > 0;
        if settled {
            self.actions.push_back(OwnerAction::RetireSlab(place.record));
            self.assign(extent, slab);
        }
        settled
    }

    /// Hands over one extent that is on its way to a slab without waiting puts. Returns whether there was one.
    pub(super) fn settle_unwanted(&mut self) -> bool {
        let idle = |slab: &super::space::Slab| slab.waiting.is_empty() && slab.pending.is_some();
        let idle: Vec<u32> =
            (0u32..).zip(&self.space.slabs).filter(|(_, slab)| idle(slab)).map(|(index, _)| index).collect();
        idle.into_iter().any(|slab| self.settle_move(slab, true))
    }

    /// Links an entry that got a slot to its parent, if that holds one too.
    pub(super) fn count_child(&mut self, at: u32) {
        let parent = self.entries.get(at).parent.and_then(|fingerprint| self.entries.find(fingerprint));
        let holds_slot = |at: u32| self.entries.get(at).state != EntryState::Waiting;
        if let Some(parent) = parent.filter(|&parent| holds_slot(parent)) {
            let record = self.entries.get_mut(parent);
            record.children += 1;
            let serial = record.serial;
            let (published, home) = (record.state == EntryState::Published, record.slab);
            self.entries.get_mut(at).counted_by = (parent, serial);
            if published {
                let grandparent = self.resident_parent(parent);
                self.space.slabs[home as usize].policy.adopt(&mut self.nodes, parent, grandparent);
            }
        }
    }

    /// Undoes `count_child`. A parent that has gone meanwhile counts nothing any more.
    pub(super) fn uncount_child(&mut self, at: u32) {
        let counted_by = core::mem::replace(&mut self.entries.get_mut(at).counted_by, (NIL, 0));
        if let Some(parent) = self.counting_parent(counted_by) {
            self.entries.get_mut(parent).children -= 1;
        }
    }

    fn counting_parent(&self, (parent, serial): (u32, u32)) -> Option<u32> {
        let alive = parent != NIL && {
            let record = self.entries.get(parent);
            record.serial == serial && record.state != EntryState::Vacant
        };
        alive.then_some(parent)
    }

    /// The parent of an entry, if it is published in the same slab.
    pub(super) fn resident_parent(&self, at: u32) -> Option<u32> {
        let entry = self.entries.get(at);
        self.counting_parent(entry.counted_by).filter(|&parent| {
            let record = self.entries.get(parent);
            record.state == EntryState::Published && record.slab == entry.slab
        })
    }
}
