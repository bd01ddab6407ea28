//! The owner side of a rank: puts, slots, pool, eviction (design 1.3, 1.5, 1.8, 1.9).
//!
//! Actions must be carried out strictly in the order in which they come out: [`OwnerAction::InvalidateWord`] (rule O1)
//! precedes the [`OwnerAction::Fill`] that overwrites the slot.
//!
//! [`Owner`] is the state machine. Its parts: `entry` (one record per key that is resident, being filled or waiting for
//! a slot), `put` (puts in progress), `space` (extents, slabs and slots), `policy` (what to evict), `room` (where a
//! put's slot comes from), `evict` (everything that takes a slot away from a key).

mod config;
mod entry;
mod evict;
#[cfg(any(test, debug_assertions))]
mod invariants;
mod list;
mod machine;
pub mod policy;
mod put;
mod room;
mod space;
#[cfg(test)]
mod tests;

pub use config::{ConfigError, OwnerConfig, EVICTED_KEYS_MAX, EXTENTS_MAX, SLABS_MAX, WAITING_PUTS_MAX};
pub use machine::{Owner, OwnerStats, Renumbering, Resident};
pub use policy::PolicyKind;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::hash::KeyHash;
use crate::{Fingerprint, Generation, LayoutId, NsEpoch, NsId, SlotId};

/// A put, named by the driver; unique within the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PutId(pub u64);

/// What to store. The source bytes stay with the driver, under the [`PutId`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Put {
    /// K of the key.
    pub key: KeyHash,
    /// Namespace, by this rank's own number.
    pub ns: NsId,
    /// Namespace epoch read when the store was submitted.
    pub ns_epoch: NsEpoch,
    /// The key as the engine spelled it, for `take_evicted_keys`.
    pub key_bytes: Box<[u8]>,
    /// Layout of the object's group.
    pub layout: LayoutId,
    /// Cache group.
    pub group_id: u32,
    /// Size of the object, bytes.
    pub object_bytes: u64,
    /// Key of the parent block, if any: it is not evicted before its resident children.
    pub parent: Option<Fingerprint>,
}

/// A slab: consecutive slots in one extent. Also what HELLO_ACK carries (design 1.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlabRecord {
    /// Layout of the slab's objects.
    pub layout: LayoutId,
    /// Cache group.
    pub group_id: u32,
    /// Object size, bytes.
    pub object_bytes: u64,
    /// First slot; slot `s` lies at `base_offset + (s - first_slot) * align_up(object_bytes, 64)`.
    pub first_slot: SlotId,
    /// Number of slots.
    pub slots: u32,
    /// Offset of the first object in the pool, bytes.
    pub base_offset: u64,
}

/// Why a put failed. Nothing of it is visible to anybody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PutError {
    /// No slot could be freed: every slot of the pool is being filled or read by a fill.
    #[error(
        "the pool is full and nothing in it can be evicted now; raise --pool-bytes or store less at once"
    )]
    PoolFull,
    /// The object is larger than the pool or than the largest object allowed.
    #[error("an object of {object_bytes} bytes does not fit the pool of {capacity_bytes} bytes; raise --pool-bytes")]
    ObjectTooLarge {
        /// Object size, bytes.
        object_bytes: u64,
        /// Pool capacity, bytes.
        capacity_bytes: u64,
    },
    /// A zero-sized object.
    #[error("an object must have at least one byte")]
    EmptyObject,
    /// The same key is resident or being filled with another layout or size.
    #[error("the key is resident with another layout or size; use another namespace for another layout")]
    LayoutConflict,
    /// The pool could not get memory from the system.
    #[error("the system refused memory for the pool (out of memory, cgroup limit or full tmpfs)")]
    NoMemory,
    /// Copying the source failed.
    #[error("copying the block into the pool failed")]
    FillFailed,
    /// The namespace was cleared while the put was under way.
    #[error("the namespace was cleared while the block was being stored")]
    Cleared,
    /// Cancelled by its owner.
    #[error("the store was cancelled")]
    Cancelled,
    /// The deadline passed.
    #[error("the store did not finish by its deadline")]
    DeadlineExceeded,
    /// Too many puts at once.
    #[error("too many stores in progress on this rank; wait for some to finish")]
    Overloaded,
}

impl PutError {
    /// Whether the same put may succeed later without any change.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::PoolFull | Self::NoMemory | Self::FillFailed | Self::DeadlineExceeded | Self::Overloaded
        )
    }

    /// Whether the cause is a shortage on this rank (all are: puts never leave it).
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }
}

/// How a put ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// Its bytes were copied and published.
    Filled,
    /// The key was resident already, or another put of the same key filled it: nothing was copied.
    Resident,
}

/// Copying into a slot failed; the slot is freed through O1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillError {
    /// The copy could not be done.
    Failed,
    /// The source was withdrawn before the copy began or finished.
    Cancelled,
    /// The driver ended it at its deadline.
    DeadlineExceeded,
}

/// A change of what this rank offers, for the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// True for a new publication, false for its removal.
    pub present: bool,
    /// Key.
    pub fingerprint: Fingerprint,
    /// Namespace.
    pub ns: NsId,
    /// Epoch under which the put was submitted.
    pub ns_epoch: NsEpoch,
    /// Slot.
    pub slot: SlotId,
    /// Generation.
    pub generation: Generation,
}

/// What the driver must do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnerAction {
    /// O1: `word.gen <- generation; word.tag <- 0; fence`, before any later action is begun.
    InvalidateWord {
        /// Slot.
        slot: SlotId,
        /// Its new generation.
        generation: Generation,
    },
    /// O2: publish, only while the word still carries `generation`.
    PublishWord {
        /// Slot.
        slot: SlotId,
        /// Generation, tag and checksum to publish.
        word: crate::word::Word,
    },
    /// Get memory for an extent from the system; answered by `handle_extent`.
    AllocateExtent {
        /// Number of the extent.
        extent: u32,
        /// Offset in the pool, bytes.
        offset: u64,
        /// Length, bytes.
        length_bytes: u64,
    },
    /// Slots exist from now on.
    AddSlab(SlabRecord),
    /// These slots never serve again (their extent went to another slab).
    RetireSlab(SlabRecord),
    /// Copy the put's source into the slot; answered by `handle_filled`. The source and the slot belong to the copy until then.
    Fill {
        /// Put whose source is copied.
        put: PutId,
        /// Destination.
        slot: SlotId,
        /// Generation being filled.
        generation: Generation,
    },
    /// Ask a running copy to stop early; it still ends with `handle_filled`.
    AbortFill {
        /// Put whose source is being copied.
        put: PutId,
    },
    /// The put is over and its source is free.
    PutDone {
        /// Put.
        put: PutId,
        /// Result.
        outcome: Result<Stored, PutError>,
    },
    /// Tell the directory.
    Announce(Announcement),
}
