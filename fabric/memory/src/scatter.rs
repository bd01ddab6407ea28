//! Scatter lists: ordered pieces of registered regions that together hold one object.

use std::fmt;

use crate::{OutOfBounds, Region};

/// One contiguous piece. Laid out like `struct iovec`, so that a list can go to vectored system calls as it is.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Segment {
    base: *mut u8,
    length_bytes: usize,
}

// SAFETY: a segment is an address and a length; it is only ever used through the list that holds its region.
unsafe impl Send for Segment {}
// SAFETY: as for Send.
unsafe impl Sync for Segment {}

impl Segment {
    /// Pointer to the first byte. Using it is the caller's responsibility.
    #[must_use]
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Length, bytes.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.length_bytes
    }
}

/// The pieces of one object, in object-offset order, with a share of every region they lie in.
///
/// Whoever holds the list holds the memory: an in-flight operation owns its list and gives it back only when its last
/// work item retired (rule R4). Invariant: every segment lies inside one of `regions`.
#[derive(Clone, Default)]
pub struct ScatterList {
    regions: Vec<Region>,
    segments: Vec<Segment>,
    total_bytes: u64,
}

impl fmt::Debug for ScatterList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ScatterList({} segments, {} bytes)", self.segments.len(), self.total_bytes)
    }
}

impl ScatterList {
    /// An empty list with room for `segments` pieces.
    #[must_use]
    pub fn with_capacity(segments: usize) -> Self {
        Self { regions: Vec::new(), segments: Vec::with_capacity(segments), total_bytes: 0 }
    }

    /// The whole of one region as a single piece.
    #[must_use]
    pub fn whole(region: &Region) -> Self {
        let mut list = Self::with_capacity(1);
        let pushed = list.push(region, 0, region.length_bytes());
        debug_assert!(pushed.is_ok());
        list
    }

    /// Appends a piece; merges it with the last one where both are adjacent in the same region. Empty pieces vanish.
    ///
    /// # Errors
    /// [`OutOfBounds`] when the piece does not lie inside the region; the list is unchanged then.
    pub fn push(&mut self, region: &Region, offset: usize, length_bytes: usize) -> Result<(), OutOfBounds> {
        region.check(offset, length_bytes)?;
        if length_bytes == 0 {
            return Ok(());
        }
        let base = region.base().wrapping_add(offset);
        self.total_bytes += length_bytes as u64;
        let known = self.regions.last().is_some_and(|last| last.same(region));
        if known {
            if let Some(last) = self.segments.last_mut() {
                if last.base.wrapping_add(last.length_bytes) == base {
                    last.length_bytes += length_bytes;
                    return Ok(());
                }
            }
        } else if !self.regions.iter().any(|held| held.same(region)) {
            self.regions.push(region.clone());
        }
        self.segments.push(Segment { base, length_bytes });
        Ok(())
    }

    /// The pieces in object order.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The regions that the pieces lie in.
    #[must_use]
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Sum of the pieces' lengths, bytes.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// Whether two pieces of the list overlap in memory: as a destination such a list has no defined content.
    #[must_use]
    pub fn overlaps_itself(&self) -> bool {
        let mut spans: Vec<(usize, usize)> =
            self.segments.iter().map(|s| (s.base as usize, s.length_bytes)).collect();
        spans.sort_unstable();
        spans.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0)
    }

    /// Copies the object out into `out`, which must be exactly as long.
    ///
    /// # Errors
    /// [`OutOfBounds`] when the lengths differ.
    pub fn read_object(&self, out: &mut [u8]) -> Result<(), OutOfBounds> {
        self.check_length(out.len())?;
        let mut at = 0;
        for segment in &self.segments {
            // SAFETY: the segment lies inside a region this list holds (invariant of `push`), and `check_length` bounds
            // the destination.
            unsafe {
                std::ptr::copy_nonoverlapping(segment.base, out.as_mut_ptr().add(at), segment.length_bytes);
            }
            at += segment.length_bytes;
        }
        Ok(())
    }

    /// Copies `object` into the pieces; it must be exactly as long.
    ///
    /// # Errors
    /// [`OutOfBounds`] when the lengths differ.
    pub fn write_object(&self, object: &[u8]) -> Result<(), OutOfBounds> {
        self.check_length(object.len())?;
        let mut at = 0;
        for segment in &self.segments {
            // SAFETY: as in `read_object`, with source and destination exchanged.
            unsafe {
                std::ptr::copy_nonoverlapping(object.as_ptr().add(at), segment.base, segment.length_bytes);
            }
            at += segment.length_bytes;
        }
        Ok(())
    }

    fn check_length(&self, length_bytes: usize) -> Result<(), OutOfBounds> {
        match usize::try_from(self.total_bytes) {
            Ok(total) if total == length_bytes => Ok(()),
            Ok(region_bytes) => Err(OutOfBounds { offset: 0, length_bytes, region_bytes }),
            Err(_) => Err(OutOfBounds { offset: 0, length_bytes, region_bytes: usize::MAX }),
        }
    }
}
