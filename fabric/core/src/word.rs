//! The 32-byte word of a slot, and the one function that accepts a block (design 1.3).

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::{Generation, Tag};

/// What a slot's word says. In memory and on the wire: four little-endian u64 in this order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Word {
    /// Generation of the slot's content; never repeats within an incarnation; 0 = never valid.
    pub generation: Generation,
    /// Binds key, layout, size and incarnation; 0 = invalid.
    pub tag: Tag,
    /// xxh3-64 of the object in `object_offset` order; 0 = none.
    pub check: u64,
}

impl Word {
    /// Size in memory and on the wire, bytes.
    pub const BYTES: usize = 32;

    /// The word of a slot whose content may be overwritten from now on (rule O1).
    #[must_use]
    pub const fn invalid(generation: Generation) -> Self {
        Self { generation, tag: Tag(0), check: 0 }
    }
}

/// What a directory entry promises about a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The generation that the entry names.
    pub generation: Generation,
    /// The tag computed by the reader from the key, the layout and the owner's incarnation.
    pub tag: Tag,
}

/// Why a read block was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Rejection {
    /// The slot was reused, or is being filled: an ordinary miss.
    #[error("the slot holds another generation (stale directory entry)")]
    Stale,
    /// Same generation under another tag: a cross-wired entry, a fingerprint collision or another layout. An alarm.
    #[error("the slot's tag belongs to another key, layout or incarnation")]
    TagMismatch,
    /// The landed bytes do not hash to the word's checksum. An alarm.
    #[error("the landed bytes do not match the object's checksum")]
    ChecksumMismatch,
}

/// Rule R3, and the only place where a block is found right: accept iff the observed word equals the expectation.
///
/// `observed` must have been fetched after every data byte of the block had landed (rule R2, the provider's duty).
/// `landed_check` is the xxh3-64 of the landed bytes where the caller asked for verification; it is compared only when
/// the word carries a checksum.
///
/// # Errors
/// [`Rejection`] says what differs. The caller reports the block as failed; its siblings are unaffected.
pub fn accept(expected: Expected, observed: Word, landed_check: Option<u64>) -> Result<(), Rejection> {
    if observed.generation != expected.generation || observed.tag.0 == 0 || expected.generation.0 == 0 {
        return Err(Rejection::Stale);
    }
    if observed.tag != expected.tag {
        return Err(Rejection::TagMismatch);
    }
    match landed_check {
        Some(landed) if observed.check != 0 && landed != observed.check => Err(Rejection::ChecksumMismatch),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: Expected = Expected { generation: Generation(7), tag: Tag(9) };

    #[test]
    fn only_an_exact_match_is_accepted() {
        let word = Word { generation: Generation(7), tag: Tag(9), check: 3 };
        assert_eq!(accept(EXPECTED, word, None), Ok(()));
        assert_eq!(accept(EXPECTED, word, Some(3)), Ok(()));
        assert_eq!(accept(EXPECTED, word, Some(4)), Err(Rejection::ChecksumMismatch));
        assert_eq!(accept(EXPECTED, Word { check: 0, ..word }, Some(4)), Ok(()));
        assert_eq!(accept(EXPECTED, Word { generation: Generation(8), ..word }, None), Err(Rejection::Stale));
        assert_eq!(accept(EXPECTED, Word { tag: Tag(0), ..word }, None), Err(Rejection::Stale));
        assert_eq!(accept(EXPECTED, Word { tag: Tag(8), ..word }, None), Err(Rejection::TagMismatch));
    }

    #[test]
    fn generation_zero_is_never_valid() {
        let expected = Expected { generation: Generation(0), tag: Tag(9) };
        let word = Word { generation: Generation(0), tag: Tag(9), check: 0 };
        assert_eq!(accept(expected, word, None), Err(Rejection::Stale));
    }
}
