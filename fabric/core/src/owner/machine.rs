//! The state machine: puts, fills, touches; getters. What takes slots away from keys is in `evict`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::config::CLEARED_NAMESPACES_MAX;
use super::entry::{Entries, Entry, EntryState, Nodes};
use super::list::{List, NIL};
use super::policy::Newcomer;
use super::put::Puts;
use super::room::Room;
use super::space::{stride_bytes, ExtentState, SlotState, Space};
use super::{
    Announcement, ConfigError, FillError, OwnerAction, OwnerConfig, Put, PutError, PutId, SlabRecord, Stored,
};
use crate::hash::{next_generation, KeyHash};
use crate::word::Word;
use crate::{limits, Fingerprint, Generation, LayoutId, NsEpoch, NsId, SlotId, Time};

/// Storing a resident key counts as a use of it only if its last use lies back further than this many uses of others
/// and than this share of the residents: engines store restored blocks again (design 1.5).
const RESTORE_TICKS_MIN: u64 = 64;
const RESTORE_DIVISOR: u64 = 16;

/// A published object of this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resident {
    /// Slot.
    pub slot: SlotId,
    /// Generation.
    pub generation: Generation,
    /// K of the key.
    pub key: KeyHash,
    /// Layout.
    pub layout: LayoutId,
    /// Cache group.
    pub group_id: u32,
    /// Object size, bytes.
    pub object_bytes: u64,
    /// Offset of the object in the pool, bytes.
    pub offset: u64,
    /// Namespace.
    pub ns: NsId,
    /// Epoch under which it was stored.
    pub ns_epoch: NsEpoch,
}

/// The directory numbers a namespace anew (it lost its state).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Renumbering {
    /// Number so far.
    pub old: NsId,
    /// Number from now on.
    pub new: NsId,
    /// Epoch from now on.
    pub ns_epoch: NsEpoch,
}

/// Counters and gauges of an owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnerStats {
    /// Objects published now.
    pub resident: u64,
    /// Objects being filled now.
    pub filling: u64,
    /// Keys waiting for a slot now.
    pub waiting: u64,
    /// Puts in progress now.
    pub puts: u64,
    /// Bytes of the pool for which memory was obtained.
    pub backed_bytes: u64,
    /// Bytes of resident objects.
    pub resident_bytes: u64,
    /// Slots in quarantine now.
    pub quarantined: u64,
    /// Slot ids ever issued.
    pub slot_ids: u64,
    /// Puts whose bytes were published.
    pub stored: u64,
    /// Puts whose key was resident, or filled by another put.
    pub already_resident: u64,
    /// Puts that failed.
    pub failed: u64,
    /// Objects evicted to make room.
    pub evicted: u64,
    /// Objects dropped by clear, invalidation or a newer epoch.
    pub dropped: u64,
    /// Touches that found their object.
    pub touched: u64,
    /// Touches of an object that was gone.
    pub touched_stale: u64,
    /// Extents that moved from one slab to another.
    pub extents_moved: u64,
    /// Evicted keys that `take_evicted_keys` lost because nobody took them.
    pub evicted_keys_lost: u64,
    /// Fills that ended after their slot had been invalidated, and published nothing (rule O2).
    pub fills_discarded: u64,
    /// Events that named an unknown put, extent or a put twice.
    pub events_ignored: u64,
}

/// The owner side of a rank.
///
/// After each `handle_*` call the driver carries out what `poll_action` gives, in that order, until there is nothing
/// left. Every `handle_put` ends with exactly one [`OwnerAction::PutDone`], every [`OwnerAction::Fill`] must be answered by
/// `handle_filled`, every [`OwnerAction::AllocateExtent`] by `handle_extent`.
#[derive(Debug)]
pub struct Owner {
    pub(super) config: OwnerConfig,
    /// The last generation that was given out.
    generation: Generation,
    pub(super) actions: VecDeque<OwnerAction>,
    pub(super) entries: Entries,
    pub(super) nodes: Nodes,
    pub(super) puts: Puts,
    pub(super) space: Space,
    /// Slabs with waiting entries.
    pub(super) starved: BTreeSet<u32>,
    cleared: BTreeMap<NsId, NsEpoch>,
    pub(super) evicted_keys: VecDeque<Box<[u8]>>,
    pub(super) stats: OwnerStats,
}

impl Owner {
    /// A new owner with an empty pool. No memory is asked for before the first put.
    ///
    /// # Errors
    /// [`ConfigError`] if the configuration cannot work.
    pub fn new(config: OwnerConfig) -> Result<Self, ConfigError> {
        config.validate()?;
        let space = Space::new(config.capacity_bytes, config.extent_bytes, config.slots_max, config.policy);
        Ok(Self {
            config,
            generation: Generation(0),
            actions: VecDeque::new(),
            entries: Entries::default(),
            nodes: Nodes::default(),
            puts: Puts::default(),
            space,
            starved: BTreeSet::new(),
            cleared: BTreeMap::new(),
            evicted_keys: VecDeque::new(),
            stats: OwnerStats::default(),
        })
    }

    /// A put was submitted.
    pub fn handle_put(&mut self, now: Time, put: PutId, request: Put) {
        if self.puts.find(put).is_some() {
            self.stats.events_ignored += 1;
            return;
        }
        if let Err(error) = self.admit(&request).and_then(|()| self.start(now, put, request)) {
            self.finish(put, Err(error));
        }
        self.serve_starved(now);
    }

    /// The system answered an [`OwnerAction::AllocateExtent`].
    pub fn handle_extent(&mut self, now: Time, extent: u32, result: Result<(), ()>) {
        let state = self.space.extents.get(extent as usize).map(|place| place.state);
        let Some(ExtentState::Allocating { slab }) = state else {
            self.stats.events_ignored += 1;
            return;
        };
        match result {
            // Another slab took the last slot ids meanwhile; without ids no extent is of use to anybody.
            Ok(()) if self.space.slot_ids_left() == 0 => {
                self.space.refuse(extent, self.space.memory_retry_at);
                self.space.slabs[slab as usize].pending = None;
            }
            Ok(()) => {
                self.stats.backed_bytes += self.space.extents[extent as usize].length_bytes;
                self.assign(extent, slab);
            }
            Err(()) => {
                self.space.refuse(extent, now.after(super::config::MEMORY_RETRY));
                self.space.slabs[slab as usize].pending = None;
            }
        }
        self.serve_starved(now);
    }

    /// A [`OwnerAction::Fill`] ended: with the object's checksum, or without all bytes in place.
    pub fn handle_filled(&mut self, now: Time, put: PutId, result: Result<u64, FillError>) {
        let filler =
            self.puts.find(put).map(|index| (index, self.puts.get(index).entry)).filter(|&(index, at)| {
                let entry = self.entries.get(at);
                entry.state == EntryState::Filling && entry.puts.head() == Some(index)
            });
        let Some((index, at)) = filler else {
            self.stats.events_ignored += 1;
            return;
        };
        let abort = self.puts.get(index).abort;
        let entry = self.entries.get(at);
        let current = entry.filling == entry.generation;
        match result {
            Ok(check) if current => self.publish(at, check),
            // Rule O2: the slot was invalidated while it was being filled, so nothing is published.
            Ok(_) => {
                self.stats.fills_discarded += 1;
                self.refill(at, abort.unwrap_or(PutError::Cleared));
            }
            Err(error) => self.refill(at, abort.unwrap_or(error.into())),
        }
        self.serve_starved(now);
    }

    /// The driver gives a put up: cancelled, or its deadline passed. A running fill is asked to stop, and then the put
    /// ends only after `handle_filled`; if that brings all bytes after all, they are published.
    pub fn handle_cancel(&mut self, now: Time, put: PutId, reason: PutError) {
        let Some(index) = self.puts.find(put) else {
            self.stats.events_ignored += 1;
            return;
        };
        self.withdraw(index, reason);
        self.serve_starved(now);
    }

    /// A block of this rank was read, by this rank or another. Stale touches are ignored: touches are hints.
    pub fn handle_touch(&mut self, _now: Time, slot: SlotId, generation: Generation) {
        let entry = self
            .space
            .slots
            .get(slot.0 as usize)
            .filter(|cell| cell.state == SlotState::Published)
            .map(|cell| cell.link)
            .filter(|&at| self.entries.get(at).generation == generation);
        match entry {
            Some(at) => {
                self.stats.touched += 1;
                self.touch(at);
            }
            None => self.stats.touched_stale += 1,
        }
    }

    /// The published object of a key.
    #[must_use]
    pub fn resident(&self, fingerprint: Fingerprint) -> Option<Resident> {
        let entry = self.entries.get(self.entries.find(fingerprint)?);
        (entry.state == EntryState::Published).then(|| {
            let slab = &self.space.slabs[entry.slab as usize];
            Resident {
                slot: entry.slot,
                generation: entry.generation,
                key: entry.key,
                layout: slab.layout,
                group_id: slab.group_id,
                object_bytes: slab.object_bytes,
                offset: self.offset(entry.slot),
                ns: entry.ns,
                ns_epoch: entry.ns_epoch,
            }
        })
    }

    /// Everything published, in the order of slots, for announcing it again.
    pub fn published(&self) -> impl Iterator<Item = Announcement> + '_ {
        let published = self.space.slots.iter().filter(|cell| cell.state == SlotState::Published);
        published.map(|cell| self.announcement(self.entries.get(cell.link), true))
    }

    /// The slab record of a slot's present extent, where the slot is in service.
    #[must_use]
    pub fn slab_of(&self, slot: SlotId) -> Option<SlabRecord> {
        let cell = self.space.slots.get(slot.0 as usize)?;
        (cell.state != SlotState::Retired).then(|| self.space.extents[cell.extent as usize].record)
    }

    /// The slabs in service, in the order of extents.
    pub fn slabs(&self) -> impl Iterator<Item = SlabRecord> + '_ {
        let in_service = |state| matches!(state, ExtentState::Assigned { .. } | ExtentState::Moving { .. });
        self.space.extents.iter().filter(move |place| in_service(place.state)).map(|place| place.record)
    }

    /// The next thing to do.
    pub fn poll_action(&mut self) -> Option<OwnerAction> {
        self.actions.pop_front()
    }

    /// Keys that were published and then evicted since the last call, oldest first; the newest
    /// [`EVICTED_KEYS_MAX`](super::EVICTED_KEYS_MAX) at most.
    pub fn take_evicted_keys(&mut self) -> Vec<Box<[u8]>> {
        core::mem::take(&mut self.evicted_keys).into()
    }

    /// Counters and gauges.
    #[must_use]
    pub fn stats(&self) -> OwnerStats {
        let mut stats = self.stats;
        stats.puts = self.puts.len() as u64;
        stats.slot_ids = self.space.slots.len() as u64;
        for slab in &self.space.slabs {
            stats.quarantined += u64::from(slab.quarantine.len);
            stats.resident_bytes += u64::from(slab.policy.len()) * slab.object_bytes;
        }
        stats
    }

    /// The directory lost its numbering of namespaces: what is stored under `old` belongs to `new` at the given epoch.
    ///
    /// Namespaces that are not named keep their number; the driver names all it knows. What was cleared under the old
    /// numbering is forgotten, as the directory forgot it. O(objects).
    pub fn handle_renumbered(&mut self, changes: &[Renumbering]) {
        self.cleared.clear();
        let changes: BTreeMap<NsId, Renumbering> =
            changes.iter().map(|change| (change.old, *change)).collect();
        for at in 0..self.entries.capacity() {
            let entry = self.entries.get_mut(at);
            if let Some(change) = changes.get(&entry.ns) {
                (entry.ns, entry.ns_epoch) = (change.new, change.ns_epoch);
                for put in entry.puts.iter(&self.puts).collect::<Vec<_>>() {
                    self.puts.get_mut(put).ns_epoch = change.ns_epoch;
                }
            }
        }
    }

    pub(super) fn remember_cleared(&mut self, ns: NsId, epoch: NsEpoch) {
        let known = self.cleared.entry(ns).or_insert(epoch);
        *known = epoch.max(*known);
        if self.cleared.len() > CLEARED_NAMESPACES_MAX {
            self.cleared.pop_first();
        }
    }

    fn admit(&self, request: &Put) -> Result<(), PutError> {
        if request.object_bytes == 0 {
            return Err(PutError::EmptyObject);
        }
        let capacity_bytes = self.config.capacity_bytes;
        if request.object_bytes > limits::OBJECT_BYTES_MAX
            || stride_bytes(request.object_bytes) > capacity_bytes
        {
            return Err(PutError::ObjectTooLarge { object_bytes: request.object_bytes, capacity_bytes });
        }
        if self.cleared.get(&request.ns).is_some_and(|&epoch| request.ns_epoch < epoch) {
            return Err(PutError::Cleared);
        }
        if self.puts.len() >= self.config.puts_max {
            return Err(PutError::Overloaded);
        }
        Ok(())
    }

    /// First put wins: joins what is there under the key, or begins anew.
    fn start(&mut self, now: Time, put: PutId, request: Put) -> Result<(), PutError> {
        let fingerprint = request.key.fingerprint();
        if let Some(at) = self.entries.find(fingerprint) {
            let entry = self.entries.get(at);
            if entry.ns == request.ns && entry.ns_epoch < request.ns_epoch {
                // The directory cleared the namespace since, and hides what is here; its CLEAR has yet to arrive.
                self.clear_entry(at, request.ns_epoch);
            }
        }
        match self.entries.find(fingerprint) {
            Some(at) => self.join(put, at, &request),
            None => self.begin(now, put, request),
        }
    }

    fn join(&mut self, put: PutId, at: u32, request: &Put) -> Result<(), PutError> {
        let entry = self.entries.get_mut(at);
        let slab = &self.space.slabs[entry.slab as usize];
        let same = entry.key == request.key
            && (slab.layout, slab.group_id, slab.object_bytes)
                == (request.layout, request.group_id, request.object_bytes);
        if !same {
            return Err(PutError::LayoutConflict);
        }
        if entry.state == EntryState::Published {
            // An engine stores again what it has just loaded; that is one use, not two.
            if self.nodes.age(at) > RESTORE_TICKS_MIN.max(self.stats.resident / RESTORE_DIVISOR) {
                self.touch(at);
            }
            self.finish(put, Ok(Stored::Resident));
            return Ok(());
        }
        if request.ns_epoch < entry.ns_epoch {
            // The namespace was cleared after this put was submitted: its bytes must not appear under the newer epoch.
            return Err(PutError::Cleared);
        }
        entry.ns_epoch = request.ns_epoch;
        self.puts.attach(&mut entry.puts, put, at, request.ns_epoch);
        Ok(())
    }

    fn begin(&mut self, now: Time, put: PutId, request: Put) -> Result<(), PutError> {
        if !self.space.could_fit(stride_bytes(request.object_bytes)) {
            return Err(PutError::PoolFull);
        }
        let Some(slab) = self.space.slab(request.layout, request.group_id, request.object_bytes) else {
            return Err(PutError::Overloaded);
        };
        let room = if self.space.slabs[slab as usize].waiting.is_empty() {
            self.find_room(now, slab)
        } else {
            Room::Later
        };
        match room {
            Room::Never(error) => return Err(error),
            Room::Later if self.stats.waiting >= self.config.waiting_max as u64 => {
                return Err(PutError::PoolFull)
            }
            Room::Later | Room::Slot(_) => {}
        }
        let parent = request.parent.filter(|&parent| parent != request.key.fingerprint());
        let at = self.entries.insert(Entry {
            key: request.key,
            key_bytes: request.key_bytes,
            parent,
            generation: Generation(0),
            filling: Generation(0),
            puts: List::default(),
            ns: request.ns,
            ns_epoch: request.ns_epoch,
            slab,
            slot: SlotId(0),
            counted_by: (NIL, 0),
            children: 0,
            serial: 0,
            state: EntryState::Waiting,
        });
        self.nodes.reset(at);
        self.puts.attach(&mut self.entries.get_mut(at).puts, put, at, request.ns_epoch);
        match room {
            Room::Slot(slot) => self.fill(at, slot),
            Room::Later | Room::Never(_) => self.enqueue(at, false),
        }
        Ok(())
    }

    /// FREE -> FILLING. Rule O1 precedes the copy.
    pub(super) fn fill(&mut self, at: u32, slot: SlotId) {
        let generation = self.invalidate_word(slot);
        let cell = &mut self.space.slots[slot.0 as usize];
        cell.state = SlotState::Filling;
        cell.link = at;
        self.space.extents[cell.extent as usize].filling += 1;
        self.stats.filling += 1;
        let entry = self.entries.get_mut(at);
        entry.state = EntryState::Filling;
        entry.slot = slot;
        (entry.generation, entry.filling) = (generation, generation);
        if let Some(index) = entry.puts.head() {
            let put = self.puts.get(index).id;
            self.actions.push_back(OwnerAction::Fill { put, slot, generation });
        }
        self.count_child(at);
    }

    /// Rule O2, after its condition was checked.
    fn publish(&mut self, at: u32, check: u64) {
        let clock = self.tick();
        let entry = self.entries.get_mut(at);
        entry.state = EntryState::Published;
        let slot = entry.slot;
        let slab = &self.space.slabs[entry.slab as usize];
        let tag = entry.key.tag(slab.layout, slab.object_bytes, self.config.incarnation);
        let check = if self.config.checksums { check } else { 0 };
        let word = Word { generation: entry.generation, tag, check };
        self.actions.push_back(OwnerAction::PublishWord { slot, word });

        let mut stored = Stored::Filled;
        while let Some(index) = self.entries.get(at).puts.head() {
            let id = self.puts.detach(&mut self.entries.get_mut(at).puts, index);
            self.finish(id, Ok(stored));
            stored = Stored::Resident;
        }
        let announcement = self.announcement(self.entries.get(at), true);
        self.actions.push_back(OwnerAction::Announce(announcement));

        let cell = &mut self.space.slots[slot.0 as usize];
        cell.state = SlotState::Published;
        let extent = cell.extent;
        self.space.extents[extent as usize].filling -= 1;
        self.space.extents[extent as usize].ticks += clock;
        self.stats.filling -= 1;
        self.stats.resident += 1;
        self.nodes.get_mut(at).tick = clock;
        let parent = self.resident_parent(at);
        let entry = self.entries.get(at);
        let newcomer =
            Newcomer { entry: at, fingerprint: entry.fingerprint(), parent, has_child: entry.children > 0 };
        self.space.slabs[entry.slab as usize].policy.insert(&mut self.nodes, newcomer);
        if let ExtentState::Moving { .. } = self.space.extents[extent as usize].state {
            self.evict(at);
        }
    }

    /// A fill brought nothing: its put ends, and the oldest waiter fills the slot from its own source.
    fn refill(&mut self, at: u32, error: PutError) {
        let entry = self.entries.get_mut(at);
        let slot = entry.slot;
        if let Some(index) = entry.puts.head() {
            let id = self.puts.detach(&mut entry.puts, index);
            self.finish(id, Err(error));
        }
        self.uncount_child(at);
        self.stats.filling -= 1;
        let extent = self.space.slots[slot.0 as usize].extent;
        self.space.extents[extent as usize].filling -= 1;
        let orphaned = self.entries.get(at).puts.is_empty();
        match self.space.extents[extent as usize].state {
            ExtentState::Moving { .. } => {
                self.invalidate_word(slot);
                self.space.slots[slot.0 as usize].state = SlotState::Retired;
                if !orphaned {
                    self.enqueue(at, true);
                }
            }
            // `fill` invalidates the word.
            _ if !orphaned => self.fill(at, slot),
            _ => {
                self.invalidate_word(slot);
                self.space.slots[slot.0 as usize].state = SlotState::Free;
                let slab = self.entries.get(at).slab;
                self.space.slabs[slab as usize].free.push(&mut self.space.slots, slot);
            }
        }
        if orphaned {
            self.entries.remove(at);
        }
    }

    /// Takes a put away from its entry, or asks its fill to stop.
    pub(super) fn withdraw(&mut self, index: u32, reason: PutError) {
        let at = self.puts.get(index).entry;
        let entry = self.entries.get_mut(at);
        if entry.state == EntryState::Filling && entry.puts.head() == Some(index) {
            let record = self.puts.get_mut(index);
            if record.abort.is_none() {
                record.abort = Some(reason);
                let put = record.id;
                self.actions.push_back(OwnerAction::AbortFill { put });
            }
            return;
        }
        let id = self.puts.detach(&mut entry.puts, index);
        let orphaned = entry.puts.is_empty();
        self.finish(id, Err(reason));
        if orphaned {
            self.dequeue(at);
            self.entries.remove(at);
        }
    }

    /// Rule O1.
    pub(super) fn invalidate_word(&mut self, slot: SlotId) -> Generation {
        self.generation = next_generation(self.generation);
        let generation = self.generation;
        self.actions.push_back(OwnerAction::InvalidateWord { slot, generation });
        generation
    }

    pub(super) fn finish(&mut self, put: PutId, outcome: Result<Stored, PutError>) {
        match outcome {
            Ok(Stored::Filled) => self.stats.stored += 1,
            Ok(Stored::Resident) => self.stats.already_resident += 1,
            Err(_) => self.stats.failed += 1,
        }
        self.actions.push_back(OwnerAction::PutDone { put, outcome });
    }

    pub(super) fn announcement(&self, entry: &Entry, present: bool) -> Announcement {
        Announcement {
            present,
            fingerprint: entry.fingerprint(),
            ns: entry.ns,
            ns_epoch: entry.ns_epoch,
            slot: entry.slot,
            generation: entry.generation,
        }
    }

    fn tick(&mut self) -> u64 {
        self.nodes.clock += 1;
        self.nodes.clock
    }

    fn touch(&mut self, at: u32) {
        let clock = self.tick();
        let entry = self.entries.get(at);
        let extent = self.space.slots[entry.slot.0 as usize].extent;
        let slab = entry.slab;
        let node = self.nodes.get_mut(at);
        let ticks = &mut self.space.extents[extent as usize].ticks;
        *ticks = *ticks - node.tick + clock;
        node.tick = clock;
        let parent = self.resident_parent(at);
        self.space.slabs[slab as usize].policy.touch(&mut self.nodes, at, parent);
    }

    fn offset(&self, slot: SlotId) -> u64 {
        let record = &self.space.extents[self.space.slots[slot.0 as usize].extent as usize].record;
        record.base_offset + u64::from(slot.0 - record.first_slot.0) * stride_bytes(record.object_bytes)
    }
}

impl From<FillError> for PutError {
    fn from(error: FillError) -> Self {
        match error {
            FillError::Failed => Self::FillFailed,
            FillError::Cancelled => Self::Cancelled,
            FillError::DeadlineExceeded => Self::DeadlineExceeded,
        }
    }
}
