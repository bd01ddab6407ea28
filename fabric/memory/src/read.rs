//! Reading one object out of a pool, in steps: the way of shm for peers and for a rank's own pool alike (R2, R4).

use std::sync::atomic::{AtomicBool, Ordering};

use thiserror::Error;

use crate::limits::{COPY_CHUNK_BYTES, POOL_GRANULE_BYTES, WORD_GRANULE_BYTES};
use crate::mapping::{Granules, Mapping};
use crate::scatter::ScatterCursor;
use crate::slab::SlabMap;
use crate::{Checksum, RawWord, ScatterList, WordCell};

/// Why an object could not be read. No word was obtained, so nothing that landed counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PeerReadError {
    /// No slab that the reader knows holds the slot.
    #[error("slot {0} belongs to no known slab")]
    UnknownSlot(u32),
    /// The object has another size, the part lies outside it, or the destination has another length.
    #[error("the object has another size, or the part lies outside it")]
    SizeMismatch,
    /// The caller asked to stop; part of the bytes may have landed.
    #[error("stopped by the caller")]
    Stopped,
    /// The owner announced memory that it never got from the system.
    #[error("the peer's pool has no memory at offset {0}")]
    Unbacked(u64),
}

impl PeerReadError {
    /// Whether the cause lies on this side.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::Stopped)
    }

    /// Whether the same read may succeed later, once newer slabs are known or the caller wants it again.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Stopped | Self::UnknownSlot(_))
    }
}

/// A read in progress: what has been copied, and what the word said before.
#[derive(Debug)]
pub struct ObjectRead {
    slot: u32,
    /// Offset in the pool of the next byte to copy.
    source_offset: usize,
    remaining_bytes: usize,
    cursor: ScatterCursor,
    before: RawWord,
    checksum: Option<Checksum>,
}

/// Which parts of a peer's slab have been entered into this process's page table.
#[derive(Debug)]
pub(crate) struct SlabPages {
    base: usize,
    length_bytes: usize,
    touched: Granules,
}

impl SlabPages {
    /// Nothing yet, of a slab that has passed its check against the pool.
    pub(crate) fn new(base: usize, length_bytes: usize) -> Self {
        Self { base, length_bytes, touched: Granules::new(length_bytes, POOL_GRANULE_BYTES) }
    }
}

impl ObjectRead {
    /// Bytes still to copy.
    #[must_use]
    pub fn remaining_bytes(&self) -> usize {
        self.remaining_bytes
    }
}

/// A pool and its word table as mapped in this process, the owner's or a peer's.
#[derive(Clone, Copy, Debug)]
pub struct PoolView<'a> {
    pub(crate) pool: &'a Mapping,
    pub(crate) words: &'a Mapping,
    /// Which pages are known to be there; `None` in the owner's own pool.
    pub(crate) touched: Option<Touched<'a>>,
}

/// Which pages of a peer's memory are known to be there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Touched<'a> {
    pub(crate) words: &'a Granules,
    pub(crate) slabs: &'a SlabMap,
    /// In the order of `slabs`.
    pub(crate) pages: &'a [SlabPages],
}

impl<'a> Touched<'a> {
    /// Found anew for each step: a share of its own would cost an operation two locked instructions, and each of them
    /// waits for the copy's stores.
    fn pages_of(&self, slot: u32) -> Result<&'a SlabPages, PeerReadError> {
        let found = self.slabs.find_indexed(slot).and_then(|(index, _)| self.pages.get(index));
        found.ok_or(PeerReadError::UnknownSlot(slot))
    }
}

impl<'a> PoolView<'a> {
    #[inline]
    pub(crate) fn begin(
        self,
        slot: u32,
        offset: u64,
        length_bytes: u64,
        checksum: bool,
    ) -> Result<ObjectRead, PeerReadError> {
        let source_offset = usize::try_from(offset).map_err(|_| PeerReadError::SizeMismatch)?;
        let remaining_bytes = usize::try_from(length_bytes).map_err(|_| PeerReadError::SizeMismatch)?;
        let before = self.cell(slot)?.load_after_data();
        let checksum = checksum.then(Checksum::new);
        let cursor = ScatterCursor::default();
        Ok(ObjectRead { slot, source_offset, remaining_bytes, cursor, before, checksum })
    }

    /// Copies at most `bytes_max` more bytes into `destination`; returns whether the last one has been copied.
    ///
    /// The same destination must be passed to each step of a read; another one cannot harm memory, but receives
    /// nonsense.
    ///
    /// # Errors
    /// [`PeerReadError::SizeMismatch`] when the destination is shorter than the read, [`PeerReadError::Unbacked`],
    /// [`PeerReadError::UnknownSlot`] when the slab was retired meanwhile.
    #[inline]
    pub fn step(
        self,
        read: &mut ObjectRead,
        destination: &ScatterList,
        bytes_max: usize,
    ) -> Result<bool, PeerReadError> {
        let pages = self.touched.map(|touched| touched.pages_of(read.slot)).transpose()?;
        let mut budget = bytes_max.min(read.remaining_bytes);
        while budget > 0 {
            let part = budget.min(COPY_CHUNK_BYTES);
            if !self.pool.contains(read.source_offset, part) {
                return Err(PeerReadError::SizeMismatch);
            }
            if let Some(pages) = pages {
                make_readable(self.pool, pages, read.source_offset, part)?;
            }
            // SAFETY: the source lies inside the mapping (checked above), which outlives this call, and its pages are
            // there (`make_readable`, or the owner's own allocation).
            let copied = unsafe {
                let source = self.pool.base().add(read.source_offset);
                read.cursor.scatter(destination, source, part, read.checksum.as_mut())
            };
            read.source_offset += copied;
            read.remaining_bytes -= copied;
            if copied < part {
                return Err(PeerReadError::SizeMismatch);
            }
            budget -= part;
        }
        Ok(read.remaining_bytes == 0)
    }

    /// Fetches the word after the last byte (rule R2), and gives the checksum of what landed.
    ///
    /// A word that changed while the bytes were copied vouches for nothing, not even for its new content: it comes back
    /// with tag 0, which no reader accepts.
    ///
    /// # Errors
    /// [`PeerReadError::Stopped`] while bytes are missing, [`PeerReadError::Unbacked`].
    #[inline]
    pub fn finish(self, read: &ObjectRead) -> Result<(RawWord, Option<u64>), PeerReadError> {
        if read.remaining_bytes != 0 {
            return Err(PeerReadError::Stopped);
        }
        let mut word = self.cell(read.slot)?.load_after_data();
        if word != read.before {
            word.tag = 0;
        }
        Ok((word, read.checksum.as_ref().map(Checksum::finish)))
    }

    pub(crate) fn read_all(
        self,
        mut read: ObjectRead,
        destination: &ScatterList,
        stop: &AtomicBool,
    ) -> Result<(RawWord, Option<u64>), PeerReadError> {
        loop {
            if stop.load(Ordering::Relaxed) {
                return Err(PeerReadError::Stopped);
            }
            if self.step(&mut read, destination, COPY_CHUNK_BYTES)? {
                return self.finish(&read);
            }
        }
    }

    /// The word of a slot. Its page is there, so that the loads cannot fault.
    #[inline]
    pub(crate) fn cell(self, slot: u32) -> Result<&'a WordCell, PeerReadError> {
        let offset = slot as usize * RawWord::BYTES;
        if !self.words.contains(offset, RawWord::BYTES) {
            return Err(PeerReadError::UnknownSlot(slot));
        }
        if let Some(Touched { words: touched, .. }) = self.touched {
            if !touched.is_set(offset) {
                let start = offset & !(WORD_GRANULE_BYTES - 1);
                let length_bytes = WORD_GRANULE_BYTES.min(self.words.length_bytes() - start);
                populate(self.words, start, length_bytes)?;
                touched.set(offset);
            }
        }
        // SAFETY: in bounds (checked above), aligned (the mapping is page-aligned and `offset` a multiple of 32), backed
        // (`make_readable`, or the owner's allocation), and only ever accessed as atomics by every process.
        Ok(unsafe { &*self.words.base().add(offset).cast::<WordCell>() })
    }
}

/// Enters the range's pages into this process's page table, a granule of the slab at a time and each once. Where the
/// owner lied about having memory there, this is an error and not a fault; it also moves page faults out of the copy.
#[inline]
fn make_readable(
    pool: &Mapping,
    pages: &SlabPages,
    offset: usize,
    length_bytes: usize,
) -> Result<(), PeerReadError> {
    let first = offset.wrapping_sub(pages.base);
    let last = first.wrapping_add(length_bytes.saturating_sub(1));
    // A part is at most a granule long, so its ends lie in the same granule or in neighbours.
    if pages.touched.is_set(first) && pages.touched.is_set(last) {
        return Ok(());
    }
    for start in pages.touched.starts(first, length_bytes) {
        if !pages.touched.is_set(start) {
            let granule = POOL_GRANULE_BYTES.min(pages.length_bytes.saturating_sub(start));
            populate(pool, pages.base + start, granule)?;
            pages.touched.set(start);
        }
    }
    Ok(())
}

#[cold]
fn populate(mapping: &Mapping, offset: usize, length_bytes: usize) -> Result<(), PeerReadError> {
    match mapping.advise(offset, length_bytes, rustix::mm::Advice::LinuxPopulateRead) {
        Ok(()) => Ok(()),
        // Kernels before 5.14 cannot; there the owner's fallocate alone keeps the reads from faulting.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        Err(_) => Err(PeerReadError::Unbacked(offset as u64)),
    }
}
