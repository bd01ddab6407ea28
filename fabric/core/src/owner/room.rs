//! Where a put's slot comes from, and the queues of those that wait for one.

use super::entry::EntryState;
use super::machine::Owner;
use super::space::ExtentState;
use super::space::Pending;
use super::{OwnerAction, PutError};
use crate::{SlotId, Time};

/// Outcome of looking for a slot.
pub(super) enum Room {
    Slot(SlotId),
    /// Something in progress will free one.
    Later,
    Never(PutError),
}

impl Owner {
    /// Puts an entry into its slab's queue.
    pub(super) fn enqueue(&mut self, at: u32, first: bool) {
        let entry = self.entries.get_mut(at);
        entry.state = EntryState::Waiting;
        let slab = entry.slab;
        let waiting = &mut self.space.slabs[slab as usize].waiting;
        if first {
            waiting.push_head(&mut self.nodes, at);
        } else {
            waiting.push_tail(&mut self.nodes, at);
        }
        self.stats.waiting += 1;
        self.starved.insert(slab);
    }

    pub(super) fn dequeue(&mut self, at: u32) {
        let slab = self.entries.get(at).slab;
        let waiting = &mut self.space.slabs[slab as usize].waiting;
        waiting.remove(&mut self.nodes, at);
        self.stats.waiting -= 1;
        if waiting.is_empty() {
            self.starved.remove(&slab);
        }
    }

    /// Gives freed slots to the entries that wait for them.
    pub(super) fn serve_starved(&mut self, now: Time) {
        let mut next = self.starved.first().copied();
        while let Some(slab) = next {
            while let Some(at) = self.space.slabs[slab as usize].waiting.head() {
                match self.find_room(now, slab) {
                    Room::Slot(slot) => {
                        self.dequeue(at);
                        self.fill(at, slot);
                    }
                    Room::Later => break,
                    Room::Never(error) => {
                        self.dequeue(at);
                        self.forget(at, error);
                    }
                }
            }
            next = self.starved.range(slab + 1..).next().copied();
        }
    }

    /// Ends all puts of an entry that holds no slot, and the entry.
    pub(super) fn forget(&mut self, at: u32, error: PutError) {
        while let Some(index) = self.entries.get(at).puts.head() {
            let id = self.puts.detach(&mut self.entries.get_mut(at).puts, index);
            self.finish(id, Err(error));
        }
        self.entries.remove(at);
    }

    pub(super) fn assign(&mut self, extent: u32, slab: u32) {
        let record = self.space.assign(extent, slab);
        self.actions.push_back(OwnerAction::AddSlab(record));
    }

    /// Looks for a slot for `slab`: free, out of full quarantine, by growing, by an extent on its way, by evicting, out
    /// of any quarantine, and only then by taking another slab's extent.
    pub(super) fn find_room(&mut self, now: Time, slab: u32) -> Room {
        if let Some(slot) = self.pop_free(slab).or_else(|| self.pop_quarantine(slab, false)) {
            return Room::Slot(slot);
        }
        if let Some(Pending::Allocation { .. }) = self.space.slabs[slab as usize].pending {
            return Room::Later;
        }
        if self.space.slabs[slab as usize].pending.is_none() {
            if let Some(extent) = self.space.grow(now, slab) {
                self.space.slabs[slab as usize].pending = Some(Pending::Allocation { extent });
                let place = &self.space.extents[extent as usize];
                self.actions.push_back(OwnerAction::AllocateExtent {
                    extent,
                    offset: place.offset,
                    length_bytes: place.length_bytes,
                });
                return Room::Later;
            }
        }
        if self.settle_move(slab, false) {
            return self.pop_free(slab).map_or(Room::Later, Room::Slot);
        }
        if self.evict_coldest(slab) {
            self.balance(slab);
            return self.pop_quarantine(slab, true).map_or(Room::Later, Room::Slot);
        }
        if let Some(slot) = self.pop_quarantine(slab, true) {
            return Room::Slot(slot);
        }
        if self.settle_move(slab, true) {
            return self.pop_free(slab).map_or(Room::Later, Room::Slot);
        }
        self.take_extent(slab)
    }

    /// A slab that has nothing to evict and nothing free.
    fn take_extent(&mut self, slab: u32) -> Room {
        let hungry = &self.space.slabs[slab as usize];
        // Its own fills will end.
        if hungry.slots > 0 {
            return Room::Later;
        }
        // Not even an extent on its way here could be used.
        if self.space.slot_ids_left() == 0 {
            return Room::Never(PutError::PoolFull);
        }
        // The fills in an extent on its way here will end.
        if hungry.pending.is_some() {
            return Room::Later;
        }
        if let Some(extent) = self.space.coldest_of_richest(slab) {
            self.move_extent(extent, slab, 0);
            self.settle_move(slab, true);
            return self.pop_free(slab).map_or(Room::Later, Room::Slot);
        }
        // An extent may rest on its way to a slab that wants it no more.
        if self.settle_unwanted() {
            return self.take_extent(slab);
        }
        let stride = self.space.slabs[slab as usize].stride_bytes;
        let mut fitting = self.space.extents.iter().filter(|place| place.length_bytes >= stride);
        if fitting.any(|place| place.state != ExtentState::Unbacked) {
            return Room::Later;
        }
        let refused = self.space.extents.iter().any(|place| place.state == ExtentState::Unbacked);
        Room::Never(if refused { PutError::NoMemory } else { PutError::PoolFull })
    }
}
