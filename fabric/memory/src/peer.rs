//! A peer's pool and word table, mapped read-only (design 1.9, "Shared memory").

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicBool;

use thiserror::Error;

use crate::limits::{POOL_BYTES_MAX, WORD_GRANULE_BYTES, WORD_SLOTS_MAX};
use crate::mapping::{Granules, Mapping};
use crate::memfd::{check_memfd, MemfdProblem};
use crate::read::{SlabPages, Touched};
use crate::slab::SlabMap;
use crate::{ObjectRead, PeerReadError, PoolView, RawWord, ScatterList, Slab, SlabError};

/// Which of the two files is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerFile {
    /// The pool.
    Pool,
    /// The word table.
    Words,
}

impl std::fmt::Display for PeerFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Pool => "pool",
            Self::Words => "word table",
        })
    }
}

/// Why a peer's memory was not mapped.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MapError {
    /// Not a memfd.
    #[error("the peer's {0} is not a memfd")]
    NotAMemfd(PeerFile),
    /// Without the seals, reading it could fault, or others could write it.
    #[error("the peer's {0} lacks the seals against shrinking, growing and writing")]
    Seals(PeerFile),
    /// The file has another size than the peer said.
    #[error("the peer's {file} has {found} bytes instead of {expected}")]
    Size {
        /// Which file.
        file: PeerFile,
        /// Said, bytes.
        expected: u64,
        /// Found, bytes.
        found: u64,
    },
    /// The peer said a size that no owner has.
    #[error("a {file} of {bytes} bytes is not possible")]
    Impossible {
        /// Which file.
        file: PeerFile,
        /// Said, bytes.
        bytes: u64,
    },
    /// The system refused the mapping.
    #[error("cannot map the peer's {file}: {source}")]
    Map {
        /// Which file.
        file: PeerFile,
        /// The system's reason.
        source: io::Error,
    },
}

impl MapError {
    /// Whether the cause lies on this side.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::Map { .. })
    }

    /// Whether the same mapping may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Map { .. })
    }
}

/// A peer's memory. Everything in it may change at any time; only [`PeerMemory::read`] and the steps behind it look.
#[derive(Debug)]
pub struct PeerMemory {
    pool: Mapping,
    words: Mapping,
    word_slots: u32,
    touched_words: Granules,
    version: u64,
    slabs: SlabMap,
    /// In the order of `slabs`.
    pages: Vec<SlabPages>,
}

impl PeerMemory {
    /// Checks and maps the two files. Their sizes are what the peer said, and are compared with what they are.
    ///
    /// # Errors
    /// [`MapError`].
    pub fn map(pool: OwnedFd, words: OwnedFd, pool_bytes: u64, words_bytes: u64) -> Result<Self, MapError> {
        let words_max = u64::from(WORD_SLOTS_MAX) * RawWord::BYTES as u64;
        let pool = map_file(&pool, PeerFile::Pool, pool_bytes, POOL_BYTES_MAX)?;
        let words = map_file(&words, PeerFile::Words, words_bytes, words_max)?;
        let word_slots = u32::try_from(words.length_bytes() / RawWord::BYTES).unwrap_or(WORD_SLOTS_MAX);
        let touched_words = Granules::new(words.length_bytes(), WORD_GRANULE_BYTES);
        let slabs = SlabMap::default();
        Ok(Self { pool, words, word_slots, touched_words, version: 0, slabs, pages: Vec::new() })
    }

    /// Replaces the slabs by the peer's newer list.
    ///
    /// # Errors
    /// [`SlabError`] when the list is not possible for this pool; the old one stays.
    pub fn update_slabs(&mut self, version: u64, slabs: Vec<Slab>) -> Result<(), SlabError> {
        let map = SlabMap::new(slabs, self.pool.length_bytes() as u64, self.word_slots)?;
        let mut old: BTreeMap<u32, (Slab, SlabPages)> = BTreeMap::new();
        for (slab, pages) in self.slabs.slabs().iter().zip(std::mem::take(&mut self.pages)) {
            old.insert(slab.first_slot, (*slab, pages));
        }
        self.pages = map
            .slabs()
            .iter()
            .map(|slab| match old.remove(&slab.first_slot) {
                Some((known, pages)) if known == *slab => pages,
                _ => {
                    let clamp = |value: u64| usize::try_from(value).unwrap_or(0);
                    let end = slab.end_offset().unwrap_or(slab.base_offset);
                    SlabPages::new(clamp(slab.base_offset), clamp(end - slab.base_offset))
                }
            })
            .collect();
        self.version = version;
        self.slabs = map;
        Ok(())
    }

    /// Version of the slabs known; 0 before the first list.
    #[must_use]
    pub fn slab_version(&self) -> u64 {
        self.version
    }

    /// Whether a known slab holds the slot.
    #[must_use]
    pub fn knows(&self, slot: u32) -> bool {
        self.slabs.find(slot).is_some()
    }

    /// Size of the pool, bytes.
    #[must_use]
    pub fn pool_bytes(&self) -> u64 {
        self.pool.length_bytes() as u64
    }

    /// Begins to read `[object_offset, object_offset + length_bytes)` of a slot's object; [`PoolView::step`] copies.
    ///
    /// # Errors
    /// [`PeerReadError`].
    #[inline]
    pub fn begin_read(
        &self,
        slot: u32,
        object_bytes: u64,
        object_offset: u64,
        length_bytes: u64,
        checksum: bool,
    ) -> Result<ObjectRead, PeerReadError> {
        let slab = self.slabs.find(slot).ok_or(PeerReadError::UnknownSlot(slot))?;
        let end = object_offset.checked_add(length_bytes);
        if slab.object_bytes != object_bytes || end.is_none_or(|end| end > object_bytes) {
            return Err(PeerReadError::SizeMismatch);
        }
        let offset = slab.offset_of(slot).ok_or(PeerReadError::UnknownSlot(slot))?;
        self.view().begin(slot, offset + object_offset, length_bytes, checksum)
    }

    /// Reads a part of a slot's object and then its word (rule R2); `stop` is looked at between pieces of 256 KiB.
    ///
    /// # Errors
    /// [`PeerReadError`].
    pub fn read(
        &self,
        slot: u32,
        object_bytes: u64,
        object_offset: u64,
        destination: &ScatterList,
        checksum: bool,
        stop: &AtomicBool,
    ) -> Result<(RawWord, Option<u64>), PeerReadError> {
        let read = self.begin_read(slot, object_bytes, object_offset, destination.total_bytes(), checksum)?;
        self.view().read_all(read, destination, stop)
    }

    /// The mapped pool and words, for stepwise reads.
    #[must_use]
    pub fn view(&self) -> PoolView<'_> {
        let touched = Touched { words: &self.touched_words, slabs: &self.slabs, pages: &self.pages };
        PoolView { pool: &self.pool, words: &self.words, touched: Some(touched) }
    }
}

fn map_file(fd: &OwnedFd, file: PeerFile, bytes: u64, bytes_max: u64) -> Result<Mapping, MapError> {
    if bytes == 0 || bytes > bytes_max || (file == PeerFile::Words && bytes % WORD_GRANULE_BYTES as u64 != 0)
    {
        return Err(MapError::Impossible { file, bytes });
    }
    check_memfd(fd.as_fd(), bytes).map_err(|problem| match problem {
        MemfdProblem::NotAMemfd => MapError::NotAMemfd(file),
        MemfdProblem::Seals => MapError::Seals(file),
        MemfdProblem::Size { expected, found } => MapError::Size { file, expected, found },
    })?;
    let length = usize::try_from(bytes).map_err(|_| MapError::Impossible { file, bytes })?;
    Mapping::shared(fd.as_fd(), length, false).map_err(|source| MapError::Map { file, source })
}

#[cfg(test)]
mod tests;
