//! xxh3-64 of objects, never 0 (a word's 0 means "none").

use std::hash::Hasher as _;
use std::mem::MaybeUninit;

use twox_hash::XxHash3_64;

use crate::copy::OpaqueCopy;
use crate::limits::CHECKSUM_PIECE_BYTES;

/// xxh3-64 of `bytes`, 0 replaced by 1 (design 1.3).
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    never_zero(XxHash3_64::oneshot(bytes))
}

fn never_zero(hash: u64) -> u64 {
    if hash == 0 {
        1
    } else {
        hash
    }
}

/// A checksum over bytes that come in pieces.
pub struct Checksum {
    hasher: XxHash3_64,
}

impl std::fmt::Debug for Checksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Checksum")
    }
}

impl Default for Checksum {
    fn default() -> Self {
        Self::new()
    }
}

impl Checksum {
    /// Of no bytes yet.
    #[must_use]
    pub fn new() -> Self {
        Self { hasher: XxHash3_64::new() }
    }

    /// Appends bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.hasher.write(bytes);
    }

    /// Appends bytes behind a raw pointer, which others may write at the same time: they are copied to a small private
    /// buffer first, so that no reference to them exists.
    ///
    /// # Safety
    /// `[base, base + length_bytes)` must be mapped for reading.
    pub(crate) unsafe fn update_raw(&mut self, base: *const u8, length_bytes: usize) {
        let copy = OpaqueCopy::get();
        let mut piece = MaybeUninit::<[u8; CHECKSUM_PIECE_BYTES]>::uninit();
        let buffer: *mut u8 = piece.as_mut_ptr().cast();
        let mut at = 0;
        while at < length_bytes {
            let part = (length_bytes - at).min(CHECKSUM_PIECE_BYTES);
            // SAFETY: the caller promises the source; `part` is at most the buffer's size, and the first `part` bytes of
            // the buffer are initialised when they are hashed.
            unsafe {
                copy.copy(buffer, base.add(at), part);
                self.hasher.write(std::slice::from_raw_parts(buffer, part));
            }
            at += part;
        }
    }

    /// Appends bytes that just landed and are still in the first-level cache.
    ///
    /// # Safety
    /// `[base, base + length_bytes)` must be mapped for reading, and nobody else may write it meanwhile: it is the
    /// destination of the caller's operation (rules R4 and R8). Should that be broken, the hash is of no value; its
    /// control flow does not depend on the bytes.
    #[inline]
    pub(crate) unsafe fn update_landed(&mut self, base: *const u8, length_bytes: usize) {
        // SAFETY: the caller's promise.
        self.hasher.write(unsafe { std::slice::from_raw_parts(base, length_bytes) });
    }

    /// The checksum of everything so far; never 0.
    #[must_use]
    pub fn finish(&self) -> u64 {
        never_zero(self.hasher.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_hash_like_the_whole() {
        let bytes: Vec<u8> =
            (0..100_003u32).map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()[3]).collect();
        let whole = checksum(&bytes);
        for cut in [0, 1, 63, 64, 255, 256, 257, 8192, 99_999, 100_003] {
            let mut pieces = Checksum::new();
            pieces.update(&bytes[..cut]);
            // SAFETY: the tail of a live vector.
            unsafe { pieces.update_raw(bytes[cut..].as_ptr(), bytes.len() - cut) };
            assert_eq!(pieces.finish(), whole, "cut at {cut}");
        }
    }

    #[test]
    fn known_values_and_never_zero() {
        // xxh3-64 of the empty input with seed 0, from the reference implementation.
        assert_eq!(checksum(b""), 0x2d06_8005_38d3_94c2);
        assert_eq!(never_zero(0), 1);
        assert_eq!(never_zero(5), 5);
    }
}
