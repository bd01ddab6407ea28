//! What an owner is told at its start, and its own limits.

use thiserror::Error;

use super::policy::PolicyKind;
use crate::{limits, Incarnation};

/// Most extents of a pool: their slab records fit one message (design 1.7).
pub const EXTENTS_MAX: usize = limits::SLABS_PER_MESSAGE_MAX;
/// Most slabs, that is (layout, group, object size) triples, of a rank: an engine has one per cache group; a slab costs
/// some hundred bytes and is kept for the owner's life, so that foreign layouts must not make them without end.
pub const SLABS_MAX: usize = 4096;
/// Most puts that wait for a slot: one whole job. A longer queue would only turn into expired deadlines.
pub const WAITING_PUTS_MAX: usize = limits::JOB_BLOCKS_MAX;
/// Most evicted keys kept for `take_evicted_keys`: with usual keys 10 MB; an engine drains them each step.
pub const EVICTED_KEYS_MAX: usize = 65_536;
/// Most namespaces whose clearing is remembered; the directory refuses late publications of older ones by itself.
pub(super) const CLEARED_NAMESPACES_MAX: usize = 65_536;
/// How long the pool does without more memory after the system refused some.
pub(super) const MEMORY_RETRY: core::time::Duration = core::time::Duration::from_secs(1);

const _: () = assert!(WAITING_PUTS_MAX <= limits::PUTS_MAX);

/// Configuration of an owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnerConfig {
    /// Most bytes that the pool ever uses, a hard limit.
    pub capacity_bytes: u64,
    /// Extent by which the pool grows and is shared out between slabs, bytes (design 1.9).
    pub extent_bytes: u64,
    /// Length of the word table, slots. Slot ids are never reused for another place, so a pool that often moves extents
    /// between slabs needs more slots than objects.
    pub slots_max: u32,
    /// This process's incarnation; part of every tag.
    pub incarnation: Incarnation,
    /// What to evict.
    pub policy: PolicyKind,
    /// Whether words carry the object's checksum.
    pub checksums: bool,
    /// Most puts in progress, at most [`limits::PUTS_MAX`].
    pub puts_max: usize,
    /// Most keys that wait for a slot, at most [`WAITING_PUTS_MAX`].
    pub waiting_max: usize,
    /// Most evicted keys kept, at most [`EVICTED_KEYS_MAX`].
    pub evicted_keys_max: usize,
}

impl OwnerConfig {
    /// The defaults for a pool of `capacity_bytes`.
    #[must_use]
    pub fn new(capacity_bytes: u64, incarnation: Incarnation) -> Self {
        Self {
            capacity_bytes,
            extent_bytes: limits::EXTENT_BYTES,
            slots_max: limits::SLOTS_MAX,
            incarnation,
            policy: PolicyKind::default(),
            checksums: true,
            puts_max: limits::PUTS_MAX,
            waiting_max: WAITING_PUTS_MAX,
            evicted_keys_max: EVICTED_KEYS_MAX,
        }
    }

    /// Checks the configuration.
    ///
    /// # Errors
    /// [`ConfigError`] says what cannot work.
    pub fn validate(&self) -> Result<(), ConfigError> {
        if self.capacity_bytes < limits::OBJECT_ALIGN_BYTES {
            return Err(ConfigError::CapacityTooSmall { capacity_bytes: self.capacity_bytes });
        }
        if self.extent_bytes < limits::OBJECT_ALIGN_BYTES {
            return Err(ConfigError::ExtentTooSmall { extent_bytes: self.extent_bytes });
        }
        if self.capacity_bytes.div_ceil(self.extent_bytes) > EXTENTS_MAX as u64 {
            return Err(ConfigError::TooManyExtents {
                capacity_bytes: self.capacity_bytes,
                extent_bytes: self.extent_bytes,
            });
        }
        if self.slots_max == 0 || self.slots_max > limits::SLOTS_MAX {
            return Err(ConfigError::Slots { slots_max: self.slots_max });
        }
        for (what, value, limit) in [
            ("puts_max", self.puts_max, limits::PUTS_MAX),
            ("waiting_max", self.waiting_max, WAITING_PUTS_MAX),
            ("evicted_keys_max", self.evicted_keys_max, EVICTED_KEYS_MAX),
        ] {
            if value > limit {
                return Err(ConfigError::AboveLimit { what, value, limit });
            }
        }
        Ok(())
    }
}

/// Why an owner cannot be configured so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// No object fits.
    #[error("a pool of {capacity_bytes} bytes holds no object; raise --pool-bytes")]
    CapacityTooSmall {
        /// Capacity, bytes.
        capacity_bytes: u64,
    },
    /// No object fits an extent.
    #[error("an extent of {extent_bytes} bytes holds no object")]
    ExtentTooSmall {
        /// Extent, bytes.
        extent_bytes: u64,
    },
    /// More extents than a peer accepts slab records.
    #[error(
        "a pool of {capacity_bytes} bytes has too many extents of {extent_bytes} bytes; raise the extent"
    )]
    TooManyExtents {
        /// Capacity, bytes.
        capacity_bytes: u64,
        /// Extent, bytes.
        extent_bytes: u64,
    },
    /// The word table is empty or too long.
    #[error("a word table of {slots_max} slots is not possible")]
    Slots {
        /// Slots.
        slots_max: u32,
    },
    /// A limit was set above what the core allows.
    #[error("{what} is {value}, above its limit of {limit}")]
    AboveLimit {
        /// Name of the field.
        what: &'static str,
        /// Value.
        value: usize,
        /// Limit.
        limit: usize,
    },
}
