//! Mappings that are unmapped on drop, and the record of which of their pages are known to be there.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{mmap, mmap_anonymous, Advice, MapFlags, ProtFlags};

/// Smallest page of every system we run on; used for rounding where a larger page does no harm.
pub(crate) fn page_bytes() -> usize {
    rustix::param::page_size()
}

/// An anonymous or file mapping that is unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: *mut u8,
    length_bytes: usize,
}

// SAFETY: a mapping is an address range with no thread affinity.
unsafe impl Send for Mapping {}
// SAFETY: as for Send; access goes through raw pointers.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Fresh zeroed memory of this process, readable and writable.
    pub(crate) fn anonymous(length_bytes: usize) -> io::Result<Self> {
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choosing touches no existing memory.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                length_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        Ok(Self { base: base.cast(), length_bytes })
    }

    /// The first `length_bytes` of a file, shared with everybody who maps it.
    pub(crate) fn shared(fd: BorrowedFd<'_>, length_bytes: usize, writable: bool) -> io::Result<Self> {
        let protection = if writable { ProtFlags::READ | ProtFlags::WRITE } else { ProtFlags::READ };
        // SAFETY: a fresh mapping at an address of the kernel's choosing touches no existing memory.
        let base = unsafe {
            mmap(
                std::ptr::null_mut(),
                length_bytes,
                protection,
                MapFlags::SHARED | MapFlags::NORESERVE,
                fd,
                0,
            )
        }?;
        Ok(Self { base: base.cast(), length_bytes })
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    pub(crate) fn length_bytes(&self) -> usize {
        self.length_bytes
    }

    /// Whether `[offset, offset + length_bytes)` lies inside.
    pub(crate) fn contains(&self, offset: usize, length_bytes: usize) -> bool {
        offset.checked_add(length_bytes).is_some_and(|end| end <= self.length_bytes)
    }

    /// Gives advice about the pages that the range touches. Ranges outside the mapping are an error.
    pub(crate) fn advise(&self, offset: usize, length_bytes: usize, advice: Advice) -> io::Result<()> {
        if !self.contains(offset, length_bytes) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let page = page_bytes();
        let start = offset & !(page - 1);
        let end = (offset + length_bytes).next_multiple_of(page);
        // SAFETY: the rounded range lies in this mapping, whose last page is always mapped whole; the callers use only
        // advice that keeps the content (populate and huge page hints).
        unsafe { rustix::mm::madvise(self.base.add(start).cast(), end - start, advice) }?;
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `length_bytes` are what mmap returned for this mapping, and nobody can name it any more.
        let unmapped = unsafe { rustix::mm::munmap(self.base.cast(), self.length_bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

/// One bit for each granule of a mapping: set once its pages are known to be there.
#[derive(Debug)]
pub(crate) struct Granules {
    granule_bytes: usize,
    bits: Box<[AtomicU64]>,
}

impl Granules {
    /// All clear, for a mapping of `length_bytes`.
    pub(crate) fn new(length_bytes: usize, granule_bytes: usize) -> Self {
        let count = length_bytes.div_ceil(granule_bytes).div_ceil(64);
        Self { granule_bytes, bits: (0..count).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Whether the granule that holds `offset` is set. Offsets outside are never set.
    #[inline]
    pub(crate) fn is_set(&self, offset: usize) -> bool {
        let index = offset / self.granule_bytes;
        self.bits.get(index / 64).is_some_and(|bits| bits.load(Ordering::Acquire) & (1 << (index % 64)) != 0)
    }

    /// Sets the granule that holds `offset`.
    pub(crate) fn set(&self, offset: usize) {
        let index = offset / self.granule_bytes;
        if let Some(bits) = self.bits.get(index / 64) {
            bits.fetch_or(1 << (index % 64), Ordering::AcqRel);
        }
    }

    /// Starts of the granules that overlap `[offset, offset + length_bytes)`.
    pub(crate) fn starts(&self, offset: usize, length_bytes: usize) -> impl Iterator<Item = usize> {
        let granule = self.granule_bytes;
        let first = offset / granule;
        let last = offset.saturating_add(length_bytes).div_ceil(granule);
        (first..last).map(move |index| index * granule)
    }
}
