//! Scatter lists: ordered pieces of registered regions that together hold one object.

use std::fmt;

use smallvec::SmallVec;

use crate::copy::{copy_past_caches, settle, OpaqueCopy};
use crate::limits::{
    CHECKSUM_PIECE_BYTES, STREAMING_OBJECT_BYTES_MIN, STREAMING_RANGE_BYTES_MIN, STREAMING_REGION_BYTES_MIN,
};
use crate::{Checksum, OutOfBounds, Region};

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
    /// Both without an allocation for one piece in one region: an object that is contiguous at the reader.
    regions: SmallVec<[Region; 1]>,
    segments: SmallVec<[Segment; 1]>,
    total_bytes: u64,
    /// Whether one of the regions is so large that ranges are written past the caches.
    streams: bool,
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
        Self {
            regions: SmallVec::new(),
            segments: SmallVec::with_capacity(segments),
            total_bytes: 0,
            streams: false,
        }
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
            self.streams |= region.length_bytes() >= STREAMING_REGION_BYTES_MIN;
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
        spans.iter().zip(spans.iter().skip(1)).any(|(span, next)| span.0.saturating_add(span.1) > next.0)
    }

    /// Copies the object out into `out`, which must be exactly as long.
    ///
    /// # Errors
    /// [`OutOfBounds`] when the lengths differ.
    pub fn read_object(&self, out: &mut [u8]) -> Result<(), OutOfBounds> {
        self.check_length(out.len())?;
        // SAFETY: `out` is a slice of the length given.
        unsafe { ScatterCursor::default().gather(self, out.as_mut_ptr(), out.len(), None) };
        Ok(())
    }

    /// Copies `object` into the pieces; it must be exactly as long.
    ///
    /// # Errors
    /// [`OutOfBounds`] when the lengths differ.
    pub fn write_object(&self, object: &[u8]) -> Result<(), OutOfBounds> {
        self.check_length(object.len())?;
        // SAFETY: `object` is a slice of the length given.
        unsafe { ScatterCursor::default().scatter(self, object.as_ptr(), object.len(), None) };
        Ok(())
    }

    /// xxh3-64 of the object, 0 replaced by 1.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        let mut checksum = Checksum::new();
        for segment in &self.segments {
            // SAFETY: the segment lies inside a region this list holds (invariant of `push`).
            unsafe { checksum.update_raw(segment.base, segment.length_bytes) };
        }
        checksum.finish()
    }

    /// A list of the object's bytes `[offset, offset + length_bytes)` alone, for reads that are split.
    ///
    /// # Errors
    /// [`OutOfBounds`] when the range does not lie inside the object.
    pub fn part(&self, offset: u64, length_bytes: u64) -> Result<Self, OutOfBounds> {
        match offset.checked_add(length_bytes) {
            Some(end) if end <= self.total_bytes => {}
            _ => {
                let clamp = |value: u64| usize::try_from(value).unwrap_or(usize::MAX);
                return Err(OutOfBounds {
                    offset: clamp(offset),
                    length_bytes: clamp(length_bytes),
                    region_bytes: clamp(self.total_bytes),
                });
            }
        }
        let mut part = Self {
            regions: self.regions.clone(),
            segments: SmallVec::new(),
            total_bytes: length_bytes,
            streams: self.streams,
        };
        let (mut skip, mut wanted) = (offset, length_bytes);
        for segment in &self.segments {
            let length = segment.length_bytes as u64;
            if wanted == 0 {
                break;
            }
            if skip >= length {
                skip -= length;
                continue;
            }
            let taken = wanted.min(length - skip);
            #[allow(clippy::cast_possible_truncation)] // Both are at most `segment.length_bytes`, a usize.
            part.segments.push(Segment {
                base: segment.base.wrapping_add(skip as usize),
                length_bytes: taken as usize,
            });
            skip = 0;
            wanted -= taken;
        }
        Ok(part)
    }

    fn check_length(&self, length_bytes: usize) -> Result<(), OutOfBounds> {
        match usize::try_from(self.total_bytes) {
            Ok(total) if total == length_bytes => Ok(()),
            Ok(region_bytes) => Err(OutOfBounds { offset: 0, length_bytes, region_bytes }),
            Err(_) => Err(OutOfBounds { offset: 0, length_bytes, region_bytes: usize::MAX }),
        }
    }
}

/// A place in a scatter list up to which bytes have been moved.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ScatterCursor {
    segment: usize,
    /// Bytes of that segment already moved.
    offset: usize,
}

impl ScatterCursor {
    /// The next piece of at most `bytes_max` bytes; the cursor moves past it.
    #[inline]
    fn take(&mut self, list: &ScatterList, bytes_max: usize) -> Option<(*mut u8, usize)> {
        let segment = list.segments.get(self.segment)?;
        let left = segment.length_bytes.saturating_sub(self.offset);
        let base = segment.base.wrapping_add(self.offset);
        if left <= bytes_max {
            self.segment += 1;
            self.offset = 0;
            Some((base, left))
        } else {
            self.offset += bytes_max;
            Some((base, bytes_max))
        }
    }

    /// Copies `length_bytes` from `source` into the list from the cursor on, hashing each piece after it landed. Returns
    /// how much was copied: less only where the list ends early.
    ///
    /// # Safety
    /// `[source, source + length_bytes)` must be mapped for reading and lie outside the list's pieces. Others may write
    /// it meanwhile.
    pub(crate) unsafe fn scatter(
        &mut self,
        list: &ScatterList,
        source: *const u8,
        length_bytes: usize,
        mut checksum: Option<&mut Checksum>,
    ) -> usize {
        let copy = OpaqueCopy::get();
        // Hashed pieces are small, so that they are still in the first-level cache: then the hash hides in the copy's
        // cache misses instead of having its own.
        let part_max = if checksum.is_some() { CHECKSUM_PIECE_BYTES } else { usize::MAX };
        let streams = list.streams && checksum.is_none() && list.total_bytes >= STREAMING_OBJECT_BYTES_MIN;
        let mut done = 0;
        while done < length_bytes {
            let Some((base, part)) = self.take(list, part_max.min(length_bytes - done)) else { break };
            // SAFETY: the piece lies inside a region that the list holds (invariant of `push`); the caller promises the
            // source. The piece belongs to this operation until it retires (R4), and to no other (R8).
            unsafe {
                let source = source.add(done);
                if streams && part >= STREAMING_RANGE_BYTES_MIN {
                    copy_past_caches(copy, base, source, part);
                } else {
                    copy.copy(base, source, part);
                }
                if let Some(checksum) = checksum.as_deref_mut() {
                    checksum.update_landed(base, part);
                }
            }
            done += part;
        }
        if streams {
            settle();
        }
        done
    }

    /// Copies `length_bytes` out of the list from the cursor on to `destination`, hashing each piece after it landed.
    /// Returns how much was copied: less only where the list ends early.
    ///
    /// # Safety
    /// `[destination, destination + length_bytes)` must be mapped for writing, lie outside the list's pieces, and be
    /// written by nobody else meanwhile.
    pub(crate) unsafe fn gather(
        &mut self,
        list: &ScatterList,
        destination: *mut u8,
        length_bytes: usize,
        mut checksum: Option<&mut Checksum>,
    ) -> usize {
        let copy = OpaqueCopy::get();
        let part_max = if checksum.is_some() { CHECKSUM_PIECE_BYTES } else { usize::MAX };
        let mut done = 0;
        while done < length_bytes {
            let Some((base, part)) = self.take(list, part_max.min(length_bytes - done)) else { break };
            // SAFETY: as in `scatter`, with source and destination exchanged.
            unsafe {
                let target = destination.add(done);
                copy.copy(target, base, part);
                if let Some(checksum) = checksum.as_deref_mut() {
                    checksum.update_landed(target, part);
                }
            }
            done += part;
        }
        done
    }
}

#[cfg(test)]
mod tests;
