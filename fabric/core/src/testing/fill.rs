//! A copy into the pool, piece by piece.

use super::check::checksum;
use super::memory::SlotMemory;
use crate::owner::FillError;

/// A fill that runs.
#[derive(Clone, Debug)]
pub(super) struct Fill {
    offset: usize,
    source: Vec<u8>,
    copied: usize,
    pub(super) aborted: bool,
}

impl Fill {
    pub(super) fn new(offset: usize, source: Vec<u8>) -> Self {
        Self { offset, source, copied: 0, aborted: false }
    }

    /// Copies the next piece. The checksum once all is in place.
    pub(super) fn copy(&mut self, memory: &mut SlotMemory, bytes: usize) -> Option<Result<u64, FillError>> {
        let end = (self.copied + bytes.max(1)).min(self.source.len());
        memory.write(self.offset + self.copied, &self.source[self.copied..end]);
        self.copied = end;
        (end == self.source.len()).then(|| Ok(checksum(&self.source)))
    }
}
