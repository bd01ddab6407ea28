//! What a stored block holds: bytes derived from key, put and range, so that any mixture of two puts is seen.
//!
//! The first word names the put. Every other word is derived from the key, that put, the range (piece) it lies in and its
//! place, so a block is right only if all of it comes from one single put of one single key.

use crate::random::mix;

/// How an object is laid out in an engine's memory: so many pieces of equal size, apart from each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Shape {
    /// Size of the object, bytes: a multiple of 8 times the pieces.
    pub object_bytes: usize,
    /// Number of pieces.
    pub pieces: usize,
}

impl Shape {
    /// Size of one piece, bytes.
    #[must_use]
    pub const fn piece_bytes(&self) -> usize {
        self.object_bytes / self.pieces
    }
}

/// What is wrong with a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// Put that the first word names.
    pub put: u64,
    /// Words that do not belong to it.
    pub words: u64,
    /// Offset of the first of them, bytes.
    pub first_offset: usize,
}

fn word_seed(key: u64, put: u64, range: usize) -> u64 {
    mix(mix(key) ^ mix(put).rotate_left(21) ^ mix(range as u64).rotate_left(42))
}

fn words_of(shape: Shape, key: u64, put: u64) -> impl Iterator<Item = u64> {
    let words = shape.piece_bytes() / 8;
    let first = std::iter::once(put ^ mix(!key));
    let rest = (0..shape.pieces).flat_map(move |range| {
        let seed = word_seed(key, put, range);
        (0..words as u64).map(move |at| mix(seed.wrapping_add(at)))
    });
    first.chain(rest.skip(1))
}

/// The bytes of put `put` of key `key`.
#[must_use]
pub fn object(shape: Shape, key: u64, put: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(shape.object_bytes);
    words_of(shape, key, put).for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
    assert_eq!(bytes.len(), shape.object_bytes, "the shape's pieces are whole words");
    bytes
}

/// Whether `bytes` are those of one single put of `key`; returns the put.
///
/// # Errors
/// [`Wrong`] says how they are not.
pub fn check(shape: Shape, key: u64, bytes: &[u8]) -> Result<u64, Wrong> {
    let word_at = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("eight bytes"));
    let put = word_at(&bytes[..8]) ^ mix(!key);
    let mut wrong = Wrong { put, words: 0, first_offset: 0 };
    for (at, (expected, found)) in words_of(shape, key, put).zip(bytes.chunks_exact(8)).enumerate() {
        if word_at(found) != expected {
            if wrong.words == 0 {
                wrong.first_offset = at * 8;
            }
            wrong.words += 1;
        }
    }
    if wrong.words == 0 && bytes.len() == shape.object_bytes {
        Ok(put)
    } else {
        Err(wrong)
    }
}

/// The UMBP key of a key number.
#[must_use]
pub fn umbp_key(key: u64) -> String {
    format!("umbp:vllm:v1:ns:tp0:pcp0:dcp0:pp0:g0:{:016x}{:016x}", mix(key), key)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { object_bytes: 4096, pieces: 16 };

    #[test]
    fn a_block_is_right_only_as_a_whole() {
        let (one, two) = (object(SHAPE, 7, 1), object(SHAPE, 7, 2));
        assert_eq!(check(SHAPE, 7, &one), Ok(1));
        assert_eq!(check(SHAPE, 7, &two), Ok(2));
        assert!(check(SHAPE, 8, &one).is_err());
        for cut in [8, 256, 2048, 4088] {
            let mut mixed = one.clone();
            mixed[cut..].copy_from_slice(&two[cut..]);
            assert!(check(SHAPE, 7, &mixed).is_err(), "cut at {cut}");
        }
        let mut swapped = one.clone();
        swapped[256..512].copy_from_slice(&one[512..768]);
        assert_eq!(check(SHAPE, 7, &swapped), Err(Wrong { put: 1, words: 32, first_offset: 256 }));
    }
}
