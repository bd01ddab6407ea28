//! The owner's pool and word table (memfds), the slot map, and a peer's read-only view of both.

use std::io;

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
    pub(crate) fn anonymous(length_bytes: usize) -> io::Result<Self> {
        use rustix::mm::{mmap_anonymous, MapFlags, ProtFlags};
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

    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `length_bytes` are what mmap returned for this mapping, and nobody can name it any more.
        let unmapped = unsafe { rustix::mm::munmap(self.base.cast(), self.length_bytes) };
        debug_assert!(unmapped.is_ok());
    }
}
