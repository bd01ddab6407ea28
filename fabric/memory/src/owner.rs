//! The owner's pool and word table.

use std::collections::BTreeMap;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use rustix::mm::Advice;
use thiserror::Error;

use crate::copy::OpaqueCopy;
use crate::limits::{COPY_CHUNK_BYTES, POOL_BYTES_MAX, WORD_GRANULE_BYTES, WORD_SLOTS_MAX};
use crate::mapping::Granules;
use crate::memfd::{HugePages, MemfdError, OwnedMemfd};
use crate::scatter::ScatterCursor;
use crate::slab::SlabMap;
use crate::system::{available_memory, MemoryBound};
use crate::{
    Checksum, ObjectRead, OutOfBounds, PeerReadError, PoolView, RawWord, ScatterList, Slab, SlabError,
    WordCell,
};

/// How large the pool may become and what it is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolConfig {
    /// Size of the pool, bytes; memory is taken extent by extent.
    pub capacity_bytes: u64,
    /// Number of words; memory is taken slab by slab.
    pub word_slots: u32,
    /// Whether the pool lies in huge pages.
    pub huge_pages: HugePages,
    /// Whether an extent's pages are entered into the page table when it is allocated. Without it the first copy into
    /// each page pays for that.
    pub prefault: bool,
}

impl PoolConfig {
    /// A pool of `capacity_bytes` with `word_slots` words, huge pages where they are free, prefaulted.
    #[must_use]
    pub fn new(capacity_bytes: u64, word_slots: u32) -> Self {
        Self { capacity_bytes, word_slots, huge_pages: HugePages::Auto, prefault: true }
    }
}

/// Why the pool could not be made, or could not grow.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PoolError {
    /// Zero or too large.
    #[error(
        "a pool of {capacity_bytes} bytes with {word_slots} words is not possible; choose one between a page and the \
         machine's memory"
    )]
    Size {
        /// Capacity asked for, bytes.
        capacity_bytes: u64,
        /// Words asked for.
        word_slots: u32,
    },
    /// Huge pages were required and too few are free.
    #[error(
        "{needed} huge pages are needed and {free} are free; raise vm.nr_hugepages or do not require them"
    )]
    HugePages {
        /// Pages needed.
        needed: u64,
        /// Pages free.
        free: u64,
    },
    /// The system has not got that much memory. Nothing was touched.
    #[error("{length_bytes} bytes of memory are not to be had: {available_bytes} are available ({bound})")]
    NoMemory {
        /// Asked for, bytes.
        length_bytes: u64,
        /// Available, bytes, as far as known.
        available_bytes: u64,
        /// What bounds it.
        bound: MemoryBound,
    },
    /// The range lies outside the pool, or is empty.
    #[error("extent at {offset} of {length_bytes} bytes lies outside the pool of {capacity_bytes} bytes")]
    OutsidePool {
        /// Offset, bytes.
        offset: u64,
        /// Length, bytes.
        length_bytes: u64,
        /// Size of the pool, bytes.
        capacity_bytes: u64,
    },
    /// A slab in memory that was never allocated.
    #[error("the slab at offset {base_offset} lies in memory that no extent allocated")]
    NotAllocated {
        /// Offset of the slab, bytes.
        base_offset: u64,
    },
    /// The slab itself is wrong.
    #[error(transparent)]
    Slab(#[from] SlabError),
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}

impl PoolError {
    /// Whether the same call may succeed later without any change.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::NoMemory { .. })
    }

    /// Whether the cause lies on this rank (it always does).
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }

    fn from_memfd(error: MemfdError) -> Self {
        match error {
            MemfdError::Os(what, source) => Self::Os { what, source },
            MemfdError::HugePages { needed, free } => Self::HugePages { needed, free },
        }
    }
}

/// Why a word could not be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WordError {
    /// The slot never was part of a slab.
    #[error("slot {0} never belonged to a slab")]
    UnknownSlot(u32),
    /// O1 with a generation that is not newer than the slot's: generations never repeat (design 1.3).
    #[error("slot {slot} is at generation {current}, so {offered} is not a new one")]
    NotNewer {
        /// Slot.
        slot: u32,
        /// The word's generation.
        current: u64,
        /// Generation offered.
        offered: u64,
    },
    /// O2 with generation 0 or tag 0, which mean "never valid" and "invalid".
    #[error("a published word needs a generation and a tag that are not 0")]
    Invalid,
}

/// Why a slot could not be filled. Its content is undefined then, and its word invalid as before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CopyError {
    /// No slab holds the slot.
    #[error("slot {0} belongs to no slab")]
    UnknownSlot(u32),
    /// The source is not as long as the object.
    #[error("the source has {source_bytes} bytes and the object {object_bytes}")]
    SizeMismatch {
        /// Length of the source, bytes.
        source_bytes: u64,
        /// Length of the object, bytes.
        object_bytes: u64,
    },
    /// Another copy into the same bytes is running.
    #[error("slot {0} is being filled by another copy")]
    Busy(u32),
    /// The slot's word is published: filling it now would break O1.
    #[error("slot {0} is published; it must be invalidated before it is overwritten")]
    Published(u32),
    /// The caller asked to stop.
    #[error("stopped by the caller")]
    Stopped,
}

impl CopyError {
    /// Whether the same copy may succeed later without any change.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Busy(_) | Self::Stopped)
    }

    /// Whether the cause lies on this rank (it always does).
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }
}

/// One slot's object: an address that stays mapped as long as the memory is borrowed. Its bytes may change at any time.
#[derive(Clone, Copy, Debug)]
pub struct ObjectRef<'a> {
    base: *mut u8,
    object_bytes: usize,
    memory: PhantomData<&'a OwnerMemory>,
}

// SAFETY: an address and a length of memory that `OwnerMemory`, itself Sync, keeps mapped.
unsafe impl Send for ObjectRef<'_> {}
// SAFETY: as for Send.
unsafe impl Sync for ObjectRef<'_> {}

impl ObjectRef<'_> {
    /// Address of the first byte, valid for reads of [`ObjectRef::object_bytes`] while the memory is borrowed. The bytes
    /// may be overwritten meanwhile: move them by system calls or by [`ObjectRef::copy_out`], never through references.
    #[must_use]
    pub fn as_ptr(&self) -> *const u8 {
        self.base
    }

    /// Object size, bytes.
    #[must_use]
    pub fn object_bytes(&self) -> usize {
        self.object_bytes
    }

    /// Copies bytes from `offset` on into `out`. The object may change meanwhile; the word read afterwards tells.
    ///
    /// # Errors
    /// [`OutOfBounds`] when the range does not lie inside the object.
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) -> Result<(), OutOfBounds> {
        match offset.checked_add(out.len()) {
            Some(end) if end <= self.object_bytes => {}
            _ => {
                return Err(OutOfBounds { offset, length_bytes: out.len(), region_bytes: self.object_bytes });
            }
        }
        // SAFETY: bounds checked above; `OwnerMemory::object` made sure that the object lies in the mapping.
        unsafe { OpaqueCopy::get().copy(out.as_mut_ptr(), self.base.add(offset), out.len()) };
        Ok(())
    }
}

#[derive(Debug, Default)]
struct SlabState {
    version: u64,
    map: SlabMap,
    list: Arc<[Slab]>,
}

/// A rank's pool and word table, shared by its threads and by the serving sides of all transports.
#[derive(Debug)]
pub struct OwnerMemory {
    pool: OwnedMemfd,
    words: OwnedMemfd,
    word_slots: u32,
    prefault: bool,
    slabs: ArcSwap<SlabState>,
    /// Word granules that have memory. A word outside them is never touched.
    word_granules: Granules,
    /// Held while an extent is being obtained.
    growing: Mutex<()>,
    /// Allocated parts of the pool, start to end, merged. Also serialises slab changes.
    growth: Mutex<BTreeMap<u64, u64>>,
    /// Serialises O1 and O2, so that a late publish can never undo an invalidation that came between its look at the
    /// generation and its stores.
    word_writes: Mutex<()>,
    /// Byte ranges that copies are writing now; a handful at most.
    fills: Mutex<Vec<(usize, usize)>>,
}

impl OwnerMemory {
    /// Makes both memfds. The pool is sparse: memory comes with [`OwnerMemory::allocate_extent`].
    ///
    /// # Errors
    /// [`PoolError`].
    pub fn create(config: &PoolConfig) -> Result<Arc<Self>, PoolError> {
        let size = PoolError::Size { capacity_bytes: config.capacity_bytes, word_slots: config.word_slots };
        let capacity_possible = (1..=POOL_BYTES_MAX).contains(&config.capacity_bytes);
        if !capacity_possible || !(1..=WORD_SLOTS_MAX).contains(&config.word_slots) {
            return Err(size);
        }
        let word_bytes = (u64::from(config.word_slots) * RawWord::BYTES as u64)
            .next_multiple_of(WORD_GRANULE_BYTES as u64);
        let pool = OwnedMemfd::create("kvfabric-pool", config.capacity_bytes, config.huge_pages)
            .map_err(PoolError::from_memfd)?;
        let words = OwnedMemfd::create("kvfabric-words", word_bytes, HugePages::Off)
            .map_err(PoolError::from_memfd)?;
        let word_granules = Granules::new(words.mapping.length_bytes(), WORD_GRANULE_BYTES);
        Ok(Arc::new(Self {
            pool,
            words,
            word_slots: config.word_slots,
            prefault: config.prefault,
            slabs: ArcSwap::from_pointee(SlabState::default()),
            word_granules,
            growing: Mutex::new(()),
            growth: Mutex::new(BTreeMap::new()),
            word_writes: Mutex::new(()),
            fills: Mutex::new(Vec::new()),
        }))
    }

    /// Gets memory for an extent from the system, before anything touches its pages. An extent that is there already is
    /// a success.
    ///
    /// # Errors
    /// [`PoolError::NoMemory`] when the system, a cgroup limit or the file system has not got it,
    /// [`PoolError::OutsidePool`], [`PoolError::Os`].
    pub fn allocate_extent(&self, offset: u64, length_bytes: u64) -> Result<(), PoolError> {
        let end = match offset.checked_add(length_bytes) {
            Some(end) if length_bytes > 0 && end <= self.pool.size_bytes => end,
            _ => {
                let capacity_bytes = self.pool.size_bytes;
                return Err(PoolError::OutsidePool { offset, length_bytes, capacity_bytes });
            }
        };
        // Growing takes long, and a lock of its own: whoever adds a slab meanwhile must not wait for it.
        let _growing = self.growing.lock();
        if covers(&self.growth.lock(), offset, end) {
            return Ok(());
        }
        allocate(&self.pool, offset, length_bytes)?;
        if self.prefault {
            prefault(&self.pool, offset, length_bytes)?;
        }
        insert(&mut self.growth.lock(), offset, end);
        Ok(())
    }

    /// Makes a slab's slots exist, with their words (invalid until published).
    ///
    /// # Errors
    /// [`PoolError::Slab`], [`PoolError::NotAllocated`], [`PoolError::NoMemory`] for the words.
    pub fn add_slab(&self, slab: Slab) -> Result<(), PoolError> {
        slab.check(self.pool.size_bytes, self.word_slots)?;
        let end = slab.end_offset().ok_or(SlabError::Empty)?;
        let growth = self.growth.lock();
        if !covers(&growth, slab.base_offset, end) {
            return Err(PoolError::NotAllocated { base_offset: slab.base_offset });
        }
        let state = self.slabs.load_full();
        for other in state.map.slabs() {
            if other.base_offset < end && other.end_offset().is_none_or(|other| slab.base_offset < other) {
                return Err(SlabError::Overlap(other.first_slot).into());
            }
        }
        let mut slabs = state.map.slabs().to_vec();
        slabs.push(slab);
        let map = SlabMap::new(slabs, self.pool.size_bytes, self.word_slots)?;
        self.allocate_words(slab.first_slot, slab.slots)?;
        self.replace_slabs(state.version, map);
        drop(growth);
        Ok(())
    }

    /// Makes a slab's slots vanish; their words stay readable (and must be invalid by then, rule O1). Returns whether a
    /// slab began there.
    pub fn retire_slab(&self, first_slot: u32) -> bool {
        let _growth = self.growth.lock();
        let state = self.slabs.load_full();
        let mut slabs = state.map.slabs().to_vec();
        let before = slabs.len();
        slabs.retain(|slab| slab.first_slot != first_slot);
        if slabs.len() == before {
            return false;
        }
        match SlabMap::new(slabs, self.pool.size_bytes, self.word_slots) {
            Ok(map) => {
                self.replace_slabs(state.version, map);
                true
            }
            // A subset of a valid map is valid.
            Err(_) => false,
        }
    }

    fn replace_slabs(&self, version: u64, map: SlabMap) {
        let list = Arc::from(map.slabs());
        self.slabs.store(Arc::new(SlabState { version: version + 1, map, list }));
    }

    fn allocate_words(&self, first_slot: u32, slots: u32) -> Result<(), PoolError> {
        let offset = first_slot as usize * RawWord::BYTES;
        for start in self.word_granules.starts(offset, slots as usize * RawWord::BYTES) {
            if !self.word_granules.is_set(start) {
                allocate(&self.words, start as u64, WORD_GRANULE_BYTES as u64)?;
                prefault(&self.words, start as u64, WORD_GRANULE_BYTES as u64)?;
                self.word_granules.set(start);
            }
        }
        Ok(())
    }

    /// The slabs and their version, which grows with each change.
    #[must_use]
    pub fn slabs(&self) -> (u64, Arc<[Slab]>) {
        let state = self.slabs.load();
        (state.version, Arc::clone(&state.list))
    }

    /// The object of a slot, if a slab holds it.
    #[must_use]
    pub fn object(&self, slot: u32) -> Option<ObjectRef<'_>> {
        let (offset, object_bytes) = self.locate(slot)?;
        Some(ObjectRef {
            base: self.pool.mapping.base().wrapping_add(offset),
            object_bytes,
            memory: PhantomData,
        })
    }

    /// Offset and size of a slot's object. Inside the pool: `add_slab` checked its slab.
    fn locate(&self, slot: u32) -> Option<(usize, usize)> {
        let state = self.slabs.load();
        let slab = state.map.find(slot)?;
        let offset = usize::try_from(slab.offset_of(slot)?).ok()?;
        let object_bytes = usize::try_from(slab.object_bytes).ok()?;
        self.pool.mapping.contains(offset, object_bytes).then_some((offset, object_bytes))
    }

    fn cell(&self, slot: u32) -> Option<&WordCell> {
        if slot >= self.word_slots || !self.word_granules.is_set(slot as usize * RawWord::BYTES) {
            return None;
        }
        self.view().cell(slot).ok()
    }

    /// Rule O1: the slot's content may be overwritten after this returns, and not before.
    ///
    /// # Errors
    /// [`WordError::UnknownSlot`], [`WordError::NotNewer`].
    pub fn invalidate(&self, slot: u32, generation: u64) -> Result<(), WordError> {
        let cell = self.cell(slot).ok_or(WordError::UnknownSlot(slot))?;
        let _writes = self.word_writes.lock();
        let current = cell.load_after_data().generation;
        if generation <= current {
            return Err(WordError::NotNewer { slot, current, offered: generation });
        }
        cell.invalidate(generation);
        Ok(())
    }

    /// Rule O2: all bytes are in place. Publishes only while the word still carries `word.generation`; returns whether
    /// it did.
    ///
    /// # Errors
    /// [`WordError::UnknownSlot`], [`WordError::Invalid`].
    pub fn publish(&self, slot: u32, word: RawWord) -> Result<bool, WordError> {
        if word.generation == 0 || word.tag == 0 {
            return Err(WordError::Invalid);
        }
        let cell = self.cell(slot).ok_or(WordError::UnknownSlot(slot))?;
        let _writes = self.word_writes.lock();
        Ok(cell.publish(word.generation, word.tag, word.check))
    }

    /// The word of a slot, fetched after everything that this thread read before (rule R2). `None` for a slot that never
    /// belonged to a slab.
    #[must_use]
    pub fn load_word_after_data(&self, slot: u32) -> Option<RawWord> {
        Some(self.cell(slot)?.load_after_data())
    }

    /// Copies `source` into the slot, in pieces of 256 KiB between which `stop` is looked at. Returns xxh3-64 of the
    /// bytes that landed in the slot (never 0), or 0 if no checksum was asked for.
    ///
    /// The slot must have been invalidated (O1) and not published since.
    ///
    /// # Errors
    /// [`CopyError`].
    pub fn fill(
        &self,
        slot: u32,
        source: &ScatterList,
        checksum: bool,
        stop: &AtomicBool,
    ) -> Result<u64, CopyError> {
        let (offset, object_bytes) = self.locate(slot).ok_or(CopyError::UnknownSlot(slot))?;
        if source.total_bytes() != object_bytes as u64 {
            return Err(CopyError::SizeMismatch {
                source_bytes: source.total_bytes(),
                object_bytes: object_bytes as u64,
            });
        }
        let word = self.cell(slot).ok_or(CopyError::UnknownSlot(slot))?.load_after_data();
        if word.tag != 0 {
            return Err(CopyError::Published(slot));
        }
        let _guard = FillGuard::begin(self, offset, object_bytes).ok_or(CopyError::Busy(slot))?;
        let mut hash = checksum.then(Checksum::new);
        let mut cursor = ScatterCursor::default();
        let mut done = 0;
        while done < object_bytes {
            if stop.load(Ordering::Relaxed) {
                return Err(CopyError::Stopped);
            }
            let part = (object_bytes - done).min(COPY_CHUNK_BYTES);
            // SAFETY: `locate` bounds the object within the mapping, which is writable and backed (`add_slab`); the
            // guard keeps other copies out of it, and other processes cannot write it (the seals). The source is the
            // list's own memory.
            let copied = unsafe {
                let target = self.pool.mapping.base().add(offset + done);
                cursor.gather(source, target, part, hash.as_mut())
            };
            debug_assert_eq!(copied, part, "total_bytes is the sum of the segments");
            done += part;
        }
        Ok(hash.map_or(0, |hash| hash.finish()))
    }

    /// Begins to read a slot's object out of this process's own pool: a rank is a peer of itself, word check included.
    ///
    /// # Errors
    /// [`PeerReadError`].
    pub fn begin_read(
        &self,
        slot: u32,
        object_bytes: u64,
        object_offset: u64,
        length_bytes: u64,
        checksum: bool,
    ) -> Result<ObjectRead, PeerReadError> {
        let (offset, found_bytes) = self.locate(slot).ok_or(PeerReadError::UnknownSlot(slot))?;
        let end = object_offset.checked_add(length_bytes);
        if found_bytes as u64 != object_bytes || end.is_none_or(|end| end > object_bytes) {
            return Err(PeerReadError::SizeMismatch);
        }
        self.view().begin(slot, offset as u64 + object_offset, length_bytes, checksum)
    }

    /// Reads a part of a slot's object and then its word.
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
        PoolView { pool: &self.pool.mapping, words: &self.words.mapping, touched: None }
    }

    /// The pool's memfd, for peers on this host.
    #[must_use]
    pub fn pool_fd(&self) -> BorrowedFd<'_> {
        self.pool.fd.as_fd()
    }

    /// The word table's memfd, for peers on this host.
    #[must_use]
    pub fn words_fd(&self) -> BorrowedFd<'_> {
        self.words.fd.as_fd()
    }

    /// Size of the pool's file, bytes: the capacity rounded up to whole pages.
    #[must_use]
    pub fn pool_bytes(&self) -> u64 {
        self.pool.size_bytes
    }

    /// Size of the word table's file, bytes.
    #[must_use]
    pub fn words_bytes(&self) -> u64 {
        self.words.size_bytes
    }

    /// Number of words.
    #[must_use]
    pub fn word_slots(&self) -> u32 {
        self.word_slots
    }

    /// Bytes of the pool that have memory.
    #[must_use]
    pub fn allocated_bytes(&self) -> u64 {
        self.growth.lock().iter().map(|(start, end)| end - start).sum()
    }

    /// Page size of the pool, bytes: that of reserved huge pages where they are used.
    #[must_use]
    pub fn pool_page_bytes(&self) -> u64 {
        self.pool.page_bytes
    }
}

/// Keeps two copies from writing the same bytes at once.
struct FillGuard<'a> {
    memory: &'a OwnerMemory,
    start: usize,
}

impl<'a> FillGuard<'a> {
    fn begin(memory: &'a OwnerMemory, start: usize, length_bytes: usize) -> Option<Self> {
        let end = start + length_bytes;
        let mut fills = memory.fills.lock();
        if fills.iter().any(|&(from, until)| from < end && start < until) {
            return None;
        }
        fills.push((start, end));
        Some(Self { memory, start })
    }
}

impl Drop for FillGuard<'_> {
    fn drop(&mut self) {
        self.memory.fills.lock().retain(|&(start, _)| start != self.start);
    }
}

fn allocate(memfd: &OwnedMemfd, offset: u64, length_bytes: u64) -> Result<(), PoolError> {
    // Reserved huge pages were counted when the pool was made; they are no part of the memory asked for here.
    let reserved = memfd.page_bytes > crate::mapping::page_bytes() as u64;
    let available = available_memory();
    if !reserved && available.bytes < length_bytes {
        return Err(no_memory(length_bytes, available.bytes, available.bound));
    }
    memfd.allocate(offset, length_bytes).map_err(|source| match source.raw_os_error() {
        Some(libc::ENOSPC | libc::ENOMEM) => no_memory(length_bytes, available.bytes, MemoryBound::Refused),
        _ => PoolError::Os { what: "allocate memory for the pool", source },
    })
}

fn no_memory(length_bytes: u64, available_bytes: u64, bound: MemoryBound) -> PoolError {
    PoolError::NoMemory { length_bytes, available_bytes, bound }
}

/// Enters pages into the page table, in pieces so that other threads' page faults are not kept out for long.
fn prefault(memfd: &OwnedMemfd, offset: u64, length_bytes: u64) -> Result<(), PoolError> {
    const PIECE_BYTES: u64 = 16 << 20;
    let mut at = offset;
    while at < offset + length_bytes {
        let part = PIECE_BYTES.min(offset + length_bytes - at);
        let (start, length) = (at, part);
        let (Ok(start), Ok(length)) = (usize::try_from(start), usize::try_from(length)) else {
            return Ok(());
        };
        match memfd.mapping.advise(start, length, Advice::LinuxPopulateWrite) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN)) => continue,
            // Kernels before 5.14 cannot; the first write to each page enters it instead, and cannot fail after
            // fallocate.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(()),
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EFAULT)) => {
                let available = available_memory();
                return Err(no_memory(length_bytes, available.bytes, MemoryBound::Refused));
            }
            Err(source) => return Err(PoolError::Os { what: "enter the pool's pages", source }),
            Ok(()) => at += part,
        }
    }
    Ok(())
}

fn covers(ranges: &BTreeMap<u64, u64>, start: u64, end: u64) -> bool {
    ranges.range(..=start).next_back().is_some_and(|(_, &until)| until >= end)
}

fn insert(ranges: &mut BTreeMap<u64, u64>, mut start: u64, mut end: u64) {
    while let Some((&from, &until)) = ranges.range(..=end).next_back() {
        if until < start {
            break;
        }
        start = start.min(from);
        end = end.max(until);
        ranges.remove(&from);
    }
    ranges.insert(start, end);
}

#[cfg(test)]
mod tests;
