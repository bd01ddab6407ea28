//! Slabs: where a slot's object lies in the pool.

use thiserror::Error;

use crate::limits::SLABS_MAX;

/// Objects start at multiples of a cache line within a slab (design 1.7).
pub const OBJECT_ALIGN_BYTES: u64 = 64;

/// Consecutive slots of one size in one extent (design 1.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slab {
    /// Layout of the objects.
    pub layout: u128,
    /// Cache group.
    pub group_id: u32,
    /// Object size, bytes.
    pub object_bytes: u64,
    /// First slot.
    pub first_slot: u32,
    /// Number of slots.
    pub slots: u32,
    /// Offset of the first object in the pool, bytes.
    pub base_offset: u64,
}

/// Why a slab is not possible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SlabError {
    /// No slots, or objects of no bytes.
    #[error("a slab needs slots, and objects of at least one byte")]
    Empty,
    /// It reaches beyond the word table or the range of slot ids.
    #[error("slots {first_slot}+{slots} lie outside the word table of {word_slots}")]
    Slots {
        /// First slot.
        first_slot: u32,
        /// Number of slots.
        slots: u32,
        /// Words that exist.
        word_slots: u32,
    },
    /// It reaches beyond the pool.
    #[error("the slab at offset {base_offset} ends outside the pool of {pool_bytes} bytes")]
    Pool {
        /// Offset of the first object, bytes.
        base_offset: u64,
        /// Size of the pool, bytes.
        pool_bytes: u64,
    },
    /// Its slots or bytes belong to another slab.
    #[error("the slab overlaps the one that begins at slot {0}")]
    Overlap(u32),
    /// Too many slabs.
    #[error("more than {SLABS_MAX} slabs")]
    TooMany,
}

impl Slab {
    /// Distance of two objects, bytes; `None` where it overflows.
    #[must_use]
    pub fn stride_bytes(&self) -> Option<u64> {
        self.object_bytes.checked_next_multiple_of(OBJECT_ALIGN_BYTES)
    }

    /// End of the last object in the pool, bytes; `None` where it overflows.
    #[must_use]
    pub fn end_offset(&self) -> Option<u64> {
        let before_last = self.stride_bytes()?.checked_mul(u64::from(self.slots.checked_sub(1)?))?;
        self.base_offset.checked_add(before_last)?.checked_add(self.object_bytes)
    }

    /// One past the last slot; `None` where it overflows.
    #[must_use]
    pub fn end_slot(&self) -> Option<u32> {
        self.first_slot.checked_add(self.slots)
    }

    /// Offset of a slot's object in the pool; `None` for a slot of another slab.
    #[must_use]
    #[inline]
    pub fn offset_of(&self, slot: u32) -> Option<u64> {
        let index = slot.checked_sub(self.first_slot)?;
        if index >= self.slots {
            return None;
        }
        self.base_offset.checked_add(self.stride_bytes()?.checked_mul(u64::from(index))?)
    }

    /// Whether the slab lies inside a pool and a word table.
    ///
    /// # Errors
    /// [`SlabError`], everything but `Overlap` and `TooMany`.
    pub fn check(&self, pool_bytes: u64, word_slots: u32) -> Result<(), SlabError> {
        if self.slots == 0 || self.object_bytes == 0 {
            return Err(SlabError::Empty);
        }
        match self.end_slot() {
            Some(end) if end <= word_slots => {}
            _ => {
                return Err(SlabError::Slots { first_slot: self.first_slot, slots: self.slots, word_slots });
            }
        }
        match self.end_offset() {
            Some(end) if end <= pool_bytes => Ok(()),
            _ => Err(SlabError::Pool { base_offset: self.base_offset, pool_bytes }),
        }
    }
}

/// Checked slabs in the order of their slots, with no slot in two of them.
///
/// Invariant: every slab passed [`Slab::check`] against the pool and word table that the map was made for.
#[derive(Clone, Debug, Default)]
pub(crate) struct SlabMap {
    slabs: Vec<Slab>,
}

impl SlabMap {
    /// Builds a map from slabs in any order.
    pub(crate) fn new(mut slabs: Vec<Slab>, pool_bytes: u64, word_slots: u32) -> Result<Self, SlabError> {
        if slabs.len() > SLABS_MAX {
            return Err(SlabError::TooMany);
        }
        slabs.sort_unstable_by_key(|slab| slab.first_slot);
        for slab in &slabs {
            slab.check(pool_bytes, word_slots)?;
        }
        for (slab, next) in slabs.iter().zip(slabs.iter().skip(1)) {
            if slab.end_slot().is_none_or(|end| end > next.first_slot) {
                return Err(SlabError::Overlap(slab.first_slot));
            }
        }
        Ok(Self { slabs })
    }

    pub(crate) fn slabs(&self) -> &[Slab] {
        &self.slabs
    }

    /// The slab that holds a slot.
    #[inline]
    pub(crate) fn find(&self, slot: u32) -> Option<&Slab> {
        self.find_indexed(slot).map(|(_, slab)| slab)
    }

    /// The slab that holds a slot, and its place in [`SlabMap::slabs`].
    #[inline]
    pub(crate) fn find_indexed(&self, slot: u32) -> Option<(usize, &Slab)> {
        let index = self.slabs.partition_point(|slab| slab.first_slot <= slot).checked_sub(1)?;
        let slab = self.slabs.get(index)?;
        (slot - slab.first_slot < slab.slots).then_some((index, slab))
    }
}
