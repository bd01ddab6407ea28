//! A rank's pool and word table as plain data: what a one-sided read sees, at the instant it looks.

use std::collections::BTreeMap;

use crate::owner::SlabRecord;
use crate::word::Word;
use crate::{Generation, SlotId};

/// Where an object lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte in the pool.
    pub offset: usize,
    /// Object size, bytes.
    pub length_bytes: usize,
}

/// Pool and words of one life of a rank.
#[derive(Clone, Debug, Default)]
pub struct SlotMemory {
    pool: Vec<u8>,
    words: BTreeMap<SlotId, Word>,
    /// Slabs in service by first slot.
    slabs: BTreeMap<SlotId, SlabRecord>,
}

impl SlotMemory {
    /// Makes the pool at least this long.
    pub fn grow(&mut self, length_bytes: usize) {
        if self.pool.len() < length_bytes {
            self.pool.resize(length_bytes, 0xee);
        }
    }

    /// A slab came into service.
    pub fn add_slab(&mut self, slab: SlabRecord) {
        self.slabs.insert(slab.first_slot, slab);
    }

    /// A slab's slots never serve again; their words stay.
    pub fn retire_slab(&mut self, slab: SlabRecord) {
        self.slabs.remove(&slab.first_slot);
    }

    /// Where a slot's object lies, if the slot is in service.
    #[must_use]
    pub fn extent(&self, slot: SlotId) -> Option<Extent> {
        let (_, slab) = self.slabs.range(..=slot).next_back()?;
        let index = slot.0 - slab.first_slot.0;
        if index >= slab.slots {
            return None;
        }
        let stride_bytes = slab.object_bytes.next_multiple_of(crate::limits::OBJECT_ALIGN_BYTES);
        Some(Extent {
            offset: usize::try_from(slab.base_offset + u64::from(index) * stride_bytes).ok()?,
            length_bytes: usize::try_from(slab.object_bytes).ok()?,
        })
    }

    /// Rule O1's stores.
    pub fn invalidate(&mut self, slot: SlotId, generation: Generation) {
        self.words.insert(slot, Word::invalid(generation));
    }

    /// Rule O2's stores: only while the word still carries the generation that was filled.
    pub fn publish(&mut self, slot: SlotId, word: Word) -> bool {
        match self.words.get_mut(&slot) {
            Some(here) if here.generation == word.generation => {
                *here = word;
                true
            }
            _ => false,
        }
    }

    /// What a read of the word sees now.
    #[must_use]
    pub fn word(&self, slot: SlotId) -> Word {
        self.words.get(&slot).copied().unwrap_or_default()
    }

    /// What a read of bytes sees now; what lies outside the pool reads as nothing.
    #[must_use]
    pub fn fetch(&self, offset: usize, length_bytes: usize) -> Option<&[u8]> {
        self.pool.get(offset..offset.checked_add(length_bytes)?)
    }

    /// A part of a copy into the pool.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) {
        if let Some(room) = self.pool.get_mut(offset..offset + bytes.len()) {
            room.copy_from_slice(bytes);
        }
    }
}
