//! Words as atomics in memory that peers map or read.

use std::sync::atomic::{fence, AtomicU64, Ordering};

/// A slot's word as it lies in memory and on the wire: four little-endian u64 (design 1.3).
///
/// `kvfabric-core` has the same type with meaning; this crate only moves it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct RawWord {
    /// Generation; 0 = never valid.
    pub generation: u64,
    /// Tag; 0 = invalid.
    pub tag: u64,
    /// xxh3-64 of the object; 0 = none.
    pub check: u64,
    /// Zero.
    pub reserved: u64,
}

impl RawWord {
    /// Size in memory and on the wire, bytes.
    pub const BYTES: usize = 32;

    /// As wire bytes.
    #[must_use]
    pub fn to_le_bytes(self) -> [u8; 32] {
        let mut out = [0; 32];
        for (chunk, value) in
            out.chunks_exact_mut(8).zip([self.generation, self.tag, self.check, self.reserved])
        {
            chunk.copy_from_slice(&value.to_le_bytes());
        }
        out
    }

    /// From wire bytes.
    #[must_use]
    pub fn from_le_bytes(bytes: &[u8; 32]) -> Self {
        let mut values = [0u64; 4];
        for (value, chunk) in values.iter_mut().zip(bytes.chunks_exact(8)) {
            let mut eight = [0; 8];
            eight.copy_from_slice(chunk);
            *value = u64::from_le_bytes(eight);
        }
        Self { generation: values[0], tag: values[1], check: values[2], reserved: values[3] }
    }
}

/// One word in shared memory.
#[repr(C, align(32))]
#[derive(Debug)]
pub struct WordCell {
    generation: AtomicU64,
    tag: AtomicU64,
    check: AtomicU64,
    reserved: AtomicU64,
}

impl WordCell {
    /// Rule O1: the slot's content may be overwritten after this returns, and not before.
    ///
    /// The generation is stored first: a reader that still sees the old tag with the new generation rejects, and one
    /// that sees the old generation read it before any overwriting write was enqueued.
    pub fn invalidate(&self, generation: u64) {
        self.generation.store(generation, Ordering::SeqCst);
        self.tag.store(0, Ordering::SeqCst);
        self.check.store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Rule O2: all bytes are in place. Publishes only while the word still carries `generation`; returns whether it did.
    #[must_use]
    pub fn publish(&self, generation: u64, tag: u64, check: u64) -> bool {
        if self.generation.load(Ordering::SeqCst) != generation {
            return false;
        }
        fence(Ordering::SeqCst);
        self.check.store(check, Ordering::SeqCst);
        self.tag.store(tag, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        true
    }

    /// Loads the word after a fence, for rule R2: the data copy that came before it is ordered before these loads.
    ///
    /// The tag is read before the generation, so that a word caught in mid-change is a mismatch and never a mix of an
    /// old tag with an even older generation.
    #[must_use]
    pub fn load_after_data(&self) -> RawWord {
        fence(Ordering::Acquire);
        let check = self.check.load(Ordering::Acquire);
        let tag = self.tag.load(Ordering::Acquire);
        let generation = self.generation.load(Ordering::Acquire);
        RawWord { generation, tag, check, reserved: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_round_trip() {
        let word = RawWord { generation: 1, tag: u64::MAX, check: 3, reserved: 0 };
        assert_eq!(RawWord::from_le_bytes(&word.to_le_bytes()), word);
    }
}
