//! Extents, slabs and slots: who owns which place of the pool (design 1.9).
//!
//! An extent is cut from the pool when a slab first needs it, and its length is a multiple of that slab's stride, so
//! that a pool of N times the object size holds N objects. Slot ids name one place for ever: an extent that moves to
//! another slab gets new ids, and its old cells stay RETIRED.

use std::collections::BTreeMap;

use super::list::{List, NIL};
use super::policy::{Policy, PolicyKind};
use super::SlabRecord;
use crate::{limits, LayoutId, SlotId, Time};

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlotState {
    Free,
    Filling,
    Published,
    Quarantine,
    /// Its extent went to another slab.
    Retired,
}

/// A slot. 12 bytes, because ids are never reused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) state: SlotState,
    pub(super) extent: u32,
    /// FILLING, PUBLISHED: the entry. FREE, QUARANTINE, and RETIRED out of these: the next slot in the queue.
    pub(super) link: u32,
}

/// A FIFO of slots through their `link`. Slots that retire while they are in it stay linked and are skipped.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotQueue {
    head: u32,
    tail: u32,
    /// Members that are not retired.
    pub(super) len: u32,
}

impl Default for SlotQueue {
    fn default() -> Self {
        Self { head: NIL, tail: NIL, len: 0 }
    }
}

impl SlotQueue {
    pub(super) fn push(&mut self, slots: &mut [Slot], slot: SlotId) {
        slots[slot.0 as usize].link = NIL;
        if self.tail == NIL {
            self.head = slot.0;
        } else {
            slots[self.tail as usize].link = slot.0;
        }
        self.tail = slot.0;
        self.len += 1;
    }

    pub(super) fn pop(&mut self, slots: &[Slot]) -> Option<SlotId> {
        while self.head != NIL {
            let slot = self.head;
            let cell = slots[slot as usize];
            self.head = cell.link;
            if self.head == NIL {
                self.tail = NIL;
            }
            if cell.state != SlotState::Retired {
                self.len -= 1;
                return Some(SlotId(slot));
            }
        }
        None
    }
}

/// Who may use an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExtentState {
    /// The system refused its memory.
    Unbacked,
    /// Memory is being allocated for this slab.
    Allocating { slab: u32 },
    /// Belongs to this slab.
    Assigned { slab: u32 },
    /// On its way from one slab to another: nothing is published in it, some fills may still run.
    Moving { from: u32, to: u32 },
}

/// A part of the pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub(super) offset: u64,
    pub(super) length_bytes: u64,
    pub(super) state: ExtentState,
    /// Its slots (no slots while it has never been assigned).
    pub(super) record: SlabRecord,
    pub(super) filling: u32,
    /// Sum of the ticks of its published objects; over all its slots it says how cold the extent is.
    pub(super) ticks: u64,
}

/// What a slab without a free slot waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pending {
    Allocation {
        extent: u32,
    },
    /// An extent of another slab. It rests in quarantine until this slab has evicted `ready_at` objects, or has nothing left to evict.
    Move {
        extent: u32,
        ready_at: u64,
    },
}

/// All objects of one layout, group and size.
#[derive(Debug)]
pub(super) struct Slab {
    pub(super) layout: LayoutId,
    pub(super) group_id: u32,
    pub(super) object_bytes: u64,
    pub(super) stride_bytes: u64,
    pub(super) extents: Vec<u32>,
    pub(super) slots: u32,
    pub(super) free: SlotQueue,
    pub(super) quarantine: SlotQueue,
    /// Entries that wait for a slot, oldest first.
    pub(super) waiting: List,
    pub(super) pending: Option<Pending>,
    pub(super) policy: Box<dyn Policy>,
    pub(super) evictions: u64,
    /// The owner's clock minus the tick of the last object evicted: how long objects live here.
    pub(super) eviction_age: u64,
    /// Value of `evictions` at which the balance with other slabs is looked at again.
    pub(super) balance_at: u64,
}

impl Slab {
    /// Slots that should rest in quarantine.
    pub(super) fn quarantine_quota(&self) -> u32 {
        self.slots / limits::QUARANTINE_DIVISOR
    }

    pub(super) fn length_bytes(&self) -> u64 {
        u64::from(self.slots) * self.stride_bytes
    }
}

/// The pool's places.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) capacity_bytes: u64,
    extent_bytes: u64,
    slots_max: u32,
    policy: PolicyKind,
    /// Offset of the part that no extent has yet.
    pub(super) cut_bytes: u64,
    pub(super) extents: Vec<Extent>,
    pub(super) slots: Vec<Slot>,
    pub(super) slabs: Vec<Slab>,
    by_layout: BTreeMap<(LayoutId, u32, u64), u32>,
    /// Extents in state UNBACKED.
    unbacked: u32,
    /// No memory is asked for before.
    pub(super) memory_retry_at: Time,
}

/// Distance of objects of this size in an extent.
pub(super) fn stride_bytes(object_bytes: u64) -> u64 {
    object_bytes.next_multiple_of(limits::OBJECT_ALIGN_BYTES)
}

impl Space {
    pub(super) fn new(capacity_bytes: u64, extent_bytes: u64, slots_max: u32, policy: PolicyKind) -> Self {
        Self {
            capacity_bytes,
            extent_bytes,
            slots_max,
            policy,
            cut_bytes: 0,
            extents: Vec::new(),
            slots: Vec::new(),
            slabs: Vec::new(),
            by_layout: BTreeMap::new(),
            unbacked: 0,
            memory_retry_at: Time::ZERO,
        }
    }

    pub(super) fn slot_ids_left(&self) -> u32 {
        self.slots_max - self.next_slot()
    }

    fn next_slot(&self) -> u32 {
        u32::try_from(self.slots.len()).unwrap_or(self.slots_max)
    }

    /// The slab of a layout, made if there is none. `None` if there are too many already.
    pub(super) fn slab(&mut self, layout: LayoutId, group_id: u32, object_bytes: u64) -> Option<u32> {
        if let Some(&slab) = self.by_layout.get(&(layout, group_id, object_bytes)) {
            return Some(slab);
        }
        if self.slabs.len() >= super::SLABS_MAX {
            return None;
        }
        let slab = u32::try_from(self.slabs.len()).ok()?;
        self.slabs.push(Slab {
            layout,
            group_id,
            object_bytes,
            stride_bytes: stride_bytes(object_bytes),
            extents: Vec::new(),
            slots: 0,
            free: SlotQueue::default(),
            quarantine: SlotQueue::default(),
            waiting: List::default(),
            pending: None,
            policy: self.policy.build(),
            evictions: 0,
            eviction_age: 0,
            balance_at: 0,
        });
        self.by_layout.insert((layout, group_id, object_bytes), slab);
        Some(slab)
    }

    /// Whether some extent, cut already or not, could ever hold an object of this stride.
    pub(super) fn could_fit(&self, stride_bytes: u64) -> bool {
        self.capacity_bytes - self.cut_bytes >= stride_bytes
            || self.extents.iter().any(|extent| extent.length_bytes >= stride_bytes)
    }

    /// An extent for which memory should be asked now: one that was refused before, or a new one.
    pub(super) fn grow(&mut self, now: Time, slab: u32) -> Option<u32> {
        if now < self.memory_retry_at || self.slot_ids_left() == 0 {
            return None;
        }
        let stride = self.slabs[slab as usize].stride_bytes;
        let state = ExtentState::Allocating { slab };
        if self.unbacked > 0 {
            let fits =
                |extent: &Extent| extent.state == ExtentState::Unbacked && extent.length_bytes >= stride;
            if let Some(index) = self.extents.iter().position(fits) {
                self.extents[index].state = state;
                self.unbacked -= 1;
                return u32::try_from(index).ok();
            }
        }
        if self.extents.len() >= super::EXTENTS_MAX {
            return None;
        }
        let wished = self.extent_bytes.max(limits::EXTENT_OBJECTS_MIN.saturating_mul(stride));
        let length_bytes = wished.min(self.capacity_bytes - self.cut_bytes) / stride * stride;
        if length_bytes == 0 {
            return None;
        }
        let index = u32::try_from(self.extents.len()).ok()?;
        self.extents.push(Extent {
            offset: self.cut_bytes,
            length_bytes,
            state,
            record: SlabRecord {
                layout: LayoutId(0),
                group_id: 0,
                object_bytes: 0,
                first_slot: SlotId(0),
                slots: 0,
                base_offset: self.cut_bytes,
            },
            filling: 0,
            ticks: 0,
        });
        self.cut_bytes += length_bytes;
        Some(index)
    }

    /// The system refused memory for an extent.
    pub(super) fn refuse(&mut self, extent: u32, retry_at: Time) {
        self.extents[extent as usize].state = ExtentState::Unbacked;
        self.unbacked += 1;
        self.memory_retry_at = retry_at;
    }

    /// Gives an extent whose memory is there to a slab: new slots, free. The caller announces the record.
    pub(super) fn assign(&mut self, extent: u32, slab: u32) -> SlabRecord {
        let first_slot = SlotId(self.next_slot());
        let ids_left = self.slot_ids_left();
        let target = &mut self.slabs[slab as usize];
        let place = &mut self.extents[extent as usize];
        let slots = u32::try_from(place.length_bytes / target.stride_bytes).unwrap_or(u32::MAX).min(ids_left);
        let record = SlabRecord {
            layout: target.layout,
            group_id: target.group_id,
            object_bytes: target.object_bytes,
            first_slot,
            slots,
            base_offset: place.offset,
        };
        place.record = record;
        place.state = ExtentState::Assigned { slab };
        place.ticks = 0;
        for slot in first_slot.0..first_slot.0 + slots {
            self.slots.push(Slot { state: SlotState::Free, extent, link: NIL });
            target.free.push(&mut self.slots, SlotId(slot));
        }
        target.slots += slots;
        target.extents.push(extent);
        target.pending = None;
        target.policy.set_room(target.slots);
        record
    }

    /// The coldest extent of the richest other slab that can hold an object of `slab`, and that slab.
    ///
    /// Extents without running fills come first, because they can move at once.
    pub(super) fn coldest_of_richest(&self, slab: u32) -> Option<u32> {
        let stride = self.slabs[slab as usize].stride_bytes;
        let mut richest: Option<(u64, u32)> = None;
        for (index, other) in (0u32..).zip(&self.slabs) {
            let fits = |&extent: &u32| self.extents[extent as usize].length_bytes >= stride;
            if index != slab
                && richest.is_none_or(|(bytes, _)| other.length_bytes() > bytes)
                && other.extents.iter().any(fits)
            {
                richest = Some((other.length_bytes(), index));
            }
        }
        let (_, richest) = richest?;
        self.slabs[richest as usize]
            .extents
            .iter()
            .copied()
            .filter(|&extent| self.extents[extent as usize].length_bytes >= stride)
            .min_by_key(|&extent| {
                let place = &self.extents[extent as usize];
                (place.filling != 0, place.mean_tick())
            })
    }
}

impl Extent {
    /// Mean over the slots of the tick of their objects; empty slots count as never touched.
    pub(super) fn mean_tick(&self) -> u64 {
        self.ticks / u64::from(self.record.slots.max(1))
    }
}
