//! Regions: (kind, address, length, device) of memory that engines registered or that we allocated.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use thiserror::Error;

use crate::copy::OpaqueCopy;

/// What kind of memory a region is. Device kinds come with the GPU work; every provider must look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Ordinary host memory.
    Host,
}

/// Why a region could not be made.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RegionError {
    /// A null pointer with a non-zero length, or a zero length.
    #[error("a region needs a non-null address and a non-zero length")]
    Empty,
    /// The range wraps around the address space or exceeds `isize::MAX`.
    #[error("region at {address:#x} of {length_bytes} bytes does not fit the address space")]
    TooLong {
        /// Start.
        address: usize,
        /// Length asked for, bytes.
        length_bytes: usize,
    },
    /// The system refused the mapping.
    #[error("cannot map {length_bytes} bytes: {source}")]
    Map {
        /// Length asked for, bytes.
        length_bytes: usize,
        /// The system's reason.
        source: std::io::Error,
    },
}

struct RegionInner {
    base: NonNull<u8>,
    length_bytes: usize,
    kind: MemoryKind,
    device: i32,
    /// Keeps the allocation alive; dropped after the last operation that names the region.
    _owner: Option<Box<dyn Any + Send + Sync>>,
}

// SAFETY: a region is plain memory with no thread affinity; `Region::from_raw`'s caller (or our own mapping)
// guarantees that it stays valid until the last clone is dropped, on whichever thread that happens.
unsafe impl Send for RegionInner {}
// SAFETY: as for Send; shared access goes through copies on raw pointers only, never through references to the bytes.
unsafe impl Sync for RegionInner {}

/// A registered range of memory. Clones share it; the memory is released when the last clone is dropped, and in-flight
/// operations hold clones.
#[derive(Clone)]
pub struct Region(Arc<RegionInner>);

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:#x}+{:#x} {:?})", self.address(), self.length_bytes(), self.kind())
    }
}

impl Region {
    /// Registers memory that somebody else allocated.
    ///
    /// # Errors
    /// [`RegionError::Empty`], [`RegionError::TooLong`].
    ///
    /// # Safety
    /// `[base, base + length_bytes)` must be valid for reads and writes until every clone of the region, those inside
    /// in-flight operations included, is gone; `owner` may hold whatever guarantees that. The engine may read and write
    /// the bytes itself, but while an operation fills some of them they belong to it alone (design D5): until it retires
    /// nobody else writes them or holds Rust references to them, and no other operation has them as its destination.
    pub unsafe fn from_raw(
        base: *mut u8,
        length_bytes: usize,
        kind: MemoryKind,
        device: i32,
        owner: Option<Box<dyn Any + Send + Sync>>,
    ) -> Result<Self, RegionError> {
        let Some(base) = NonNull::new(base) else { return Err(RegionError::Empty) };
        if length_bytes == 0 {
            return Err(RegionError::Empty);
        }
        let address = base.as_ptr() as usize;
        if isize::try_from(length_bytes).is_err() || address.checked_add(length_bytes).is_none() {
            return Err(RegionError::TooLong { address, length_bytes });
        }
        Ok(Self(Arc::new(RegionInner { base, length_bytes, kind, device, _owner: owner })))
    }

    /// Allocates zeroed, page-aligned host memory.
    ///
    /// # Errors
    /// [`RegionError::Map`] when the system refuses, [`RegionError::Empty`] for zero bytes.
    pub fn allocate(length_bytes: usize) -> Result<Self, RegionError> {
        if length_bytes == 0 {
            return Err(RegionError::Empty);
        }
        let mapping = crate::mapping::Mapping::anonymous(length_bytes)
            .map_err(|source| RegionError::Map { length_bytes, source })?;
        let base = mapping.base();
        // SAFETY: the mapping is readable and writable, `length_bytes` long, and owned by the region itself.
        unsafe { Self::from_raw(base, length_bytes, MemoryKind::Host, 0, Some(Box::new(mapping))) }
    }

    /// Address of the first byte.
    #[must_use]
    pub fn address(&self) -> usize {
        self.0.base.as_ptr() as usize
    }

    /// Pointer to the first byte. Using it is the caller's responsibility.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.0.base.as_ptr()
    }

    /// Length, bytes.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.0.length_bytes
    }

    /// Kind of memory.
    #[must_use]
    pub fn kind(&self) -> MemoryKind {
        self.0.kind
    }

    /// Device ordinal; 0 for host memory.
    #[must_use]
    pub fn device(&self) -> i32 {
        self.0.device
    }

    /// Whether both handles name the same registration.
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// How many handles exist, in-flight operations' included. 1 means that nothing but the caller's handle names it.
    #[must_use]
    pub fn handle_count(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    /// Copies `bytes` into the region at `offset`.
    ///
    /// # Errors
    /// [`OutOfBounds`] when the range does not lie inside the region.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), OutOfBounds> {
        self.check(offset, bytes.len())?;
        // SAFETY: `check` bounds the destination within the region, which `from_raw` made valid; the source is a slice.
        unsafe { OpaqueCopy::get().copy(self.base().add(offset), bytes.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Copies bytes of the region from `offset` on into `out`.
    ///
    /// # Errors
    /// [`OutOfBounds`] when the range does not lie inside the region.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), OutOfBounds> {
        self.check(offset, out.len())?;
        // SAFETY: `check` bounds the source within the region, which `from_raw` made valid; the destination is a slice.
        unsafe { OpaqueCopy::get().copy(out.as_mut_ptr(), self.base().add(offset), out.len()) };
        Ok(())
    }

    /// Sets every byte of a range.
    ///
    /// # Errors
    /// [`OutOfBounds`] when the range does not lie inside the region.
    pub fn fill(&self, offset: usize, length_bytes: usize, value: u8) -> Result<(), OutOfBounds> {
        self.check(offset, length_bytes)?;
        // SAFETY: `check` bounds the range within the region, which `from_raw` made valid.
        unsafe { std::ptr::write_bytes(self.base().add(offset), value, length_bytes) };
        Ok(())
    }

    pub(crate) fn check(&self, offset: usize, length_bytes: usize) -> Result<(), OutOfBounds> {
        match offset.checked_add(length_bytes) {
            Some(end) if end <= self.length_bytes() => Ok(()),
            _ => Err(OutOfBounds { offset, length_bytes, region_bytes: self.length_bytes() }),
        }
    }
}

/// A range that does not lie inside its region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("range at offset {offset} of {length_bytes} bytes lies outside its region of {region_bytes} bytes")]
pub struct OutOfBounds {
    /// Offset asked for, bytes.
    pub offset: usize,
    /// Length asked for, bytes.
    pub length_bytes: usize,
    /// Length of the region, bytes.
    pub region_bytes: usize,
}
