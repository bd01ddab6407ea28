//! Sealed memfds: made by the owner, checked by the reader (design 1.9, "Shared memory").

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;

use crate::mapping::{page_bytes, Mapping};
use crate::system::free_huge_pages;

/// Whether the pool lies in huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Ordinary pages.
    Off,
    /// Reserved huge pages where enough of them are free for the whole pool; otherwise ordinary pages with a hint that
    /// lets the kernel join them where it is allowed to.
    #[default]
    Auto,
    /// Reserved huge pages, or an error.
    Require,
}

/// What every pool and word table must carry before a reader maps it: it can neither shrink (which would make reads
/// fault) nor grow, and nobody but the owner can get a writable mapping.
pub(crate) const REQUIRED_SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// Why a memfd could not be made.
#[derive(Debug)]
pub(crate) enum MemfdError {
    /// The system call failed.
    Os(&'static str, io::Error),
    /// Huge pages were required and there are too few.
    HugePages { needed: u64, free: u64 },
}

/// A memfd, its owner's writable mapping, and its size.
#[derive(Debug)]
pub(crate) struct OwnedMemfd {
    pub(crate) mapping: Mapping,
    pub(crate) fd: OwnedFd,
    pub(crate) size_bytes: u64,
    /// Allocation unit, bytes.
    pub(crate) page_bytes: u64,
}

impl OwnedMemfd {
    /// Makes, sizes, maps and seals, in this order: the seal against writable mappings counts for mappings to come, so
    /// the owner maps first. The file is sparse; memory comes with [`OwnedMemfd::allocate`].
    pub(crate) fn create(name: &str, size_bytes: u64, huge: HugePages) -> Result<Self, MemfdError> {
        if huge != HugePages::Off {
            match Self::create_huge(name, size_bytes) {
                Ok(memfd) => return Ok(memfd),
                Err(error) if huge == HugePages::Require => return Err(error),
                Err(_) => {}
            }
        }
        let page = page_bytes() as u64;
        let memfd = Self::create_with(name, size_bytes, MemfdFlags::empty(), page)?;
        if huge == HugePages::Auto {
            // A hint: kernels without huge pages for shared memory refuse it, and ordinary pages serve as well.
            let _ = memfd.mapping.advise(0, memfd.mapping.length_bytes(), rustix::mm::Advice::LinuxHugepage);
        }
        Ok(memfd)
    }

    fn create_huge(name: &str, size_bytes: u64) -> Result<Self, MemfdError> {
        let huge = free_huge_pages().map_err(|error| MemfdError::Os("read the huge page counts", error))?;
        let needed = if huge.page_bytes == 0 { u64::MAX } else { size_bytes.div_ceil(huge.page_bytes) };
        if needed > huge.free {
            return Err(MemfdError::HugePages { needed, free: huge.free });
        }
        Self::create_with(name, size_bytes, MemfdFlags::HUGETLB, huge.page_bytes)
    }

    fn create_with(
        name: &str,
        size_bytes: u64,
        extra: MemfdFlags,
        page_bytes: u64,
    ) -> Result<Self, MemfdError> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | extra;
        let fd = match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
            // Kernels before 6.3 do not know the flag.
            Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
            made => made,
        }
        .map_err(|error| MemfdError::Os("memfd_create", error.into()))?;
        let size_bytes = size_bytes.next_multiple_of(page_bytes);
        let length = usize::try_from(size_bytes)
            .map_err(|_| MemfdError::Os("map", io::ErrorKind::OutOfMemory.into()))?;
        rustix::fs::ftruncate(&fd, size_bytes).map_err(|error| MemfdError::Os("ftruncate", error.into()))?;
        let mapping =
            Mapping::shared(fd.as_fd(), length, true).map_err(|error| MemfdError::Os("mmap", error))?;
        rustix::fs::fcntl_add_seals(&fd, REQUIRED_SEALS)
            .map_err(|error| MemfdError::Os("seal (needs Linux 5.1 or later)", error.into()))?;
        Ok(Self { mapping, fd, size_bytes, page_bytes })
    }

    /// Gets memory from the system for a range, so that touching it later cannot fail.
    pub(crate) fn allocate(&self, offset: u64, length_bytes: u64) -> io::Result<()> {
        loop {
            match rustix::fs::fallocate(&self.fd, FallocateFlags::KEEP_SIZE, offset, length_bytes) {
                Err(Errno::INTR) => {}
                result => return Ok(result?),
            }
        }
    }
}

/// What a reader finds wrong with a file that a peer passed to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemfdProblem {
    NotAMemfd,
    Seals,
    Size { expected: u64, found: u64 },
}

/// Checks that a file is a memfd with every required seal and exactly the expected size.
pub(crate) fn check_memfd(fd: BorrowedFd<'_>, expected_bytes: u64) -> Result<(), MemfdProblem> {
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|_| MemfdProblem::NotAMemfd)?;
    if !seals.contains(REQUIRED_SEALS) {
        return Err(MemfdProblem::Seals);
    }
    let stat = rustix::fs::fstat(fd).map_err(|_| MemfdProblem::NotAMemfd)?;
    let found = u64::try_from(stat.st_size).unwrap_or(0);
    if found != expected_bytes {
        return Err(MemfdProblem::Size { expected: expected_bytes, found });
    }
    Ok(())
}
