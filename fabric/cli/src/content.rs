//! Content of blocks that says where it belongs, so that every byte that arrives can be checked and a wrong one traced.
//!
//! Each 64-byte line of an object carries the key's seed, the number of the put, its own offset, and five words mixed
//! from the three. A block is right only when all of its bytes are those of one single put of its key (design 7.4).

use std::fmt;
use std::ops::RangeInclusive;

/// Bytes of one line.
pub const LINE_BYTES: usize = 64;
/// Byte that destinations are filled with before a load: no line of any content consists of it.
pub const POISON: u8 = 0xA5;

/// What a block must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    /// Derived from the key.
    pub key_seed: u64,
    /// Number of the put that wrote it.
    pub put: u64,
}

/// Where bytes that do not belong come from, as far as they say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The destination was never written.
    Poison,
    /// Zeros: memory that nobody filled.
    Zeros,
    /// A line of another put, key or place.
    Line {
        /// Content of that line.
        content: Content,
        /// Offset that the line belongs at, bytes.
        offset: u64,
    },
    /// None of these: torn or foreign.
    Unknown,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Poison => f.write_str("the destination's poison"),
            Self::Zeros => f.write_str("zeros"),
            Self::Line { content, offset } => {
                write!(f, "put {} of key {:016x}, offset {offset}", content.put, content.key_seed)
            }
            Self::Unknown => f.write_str("bytes of no known put"),
        }
    }
}

/// Bytes that differ from what the key must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WrongBytes {
    /// How many.
    pub count: u64,
    /// Offset of the first line with one, bytes.
    pub first_offset: u64,
    /// Where that line comes from.
    pub origin: Origin,
}

impl fmt::Display for WrongBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} wrong bytes, first in the line at offset {}: {}",
            self.count, self.first_offset, self.origin
        )
    }
}

fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

impl Content {
    /// The line at `offset`, which is a multiple of [`LINE_BYTES`].
    fn line(self, offset: u64) -> [u8; LINE_BYTES] {
        let base = mix(self.key_seed ^ mix(self.put ^ mix(offset ^ 0x9e37_79b9_7f4a_7c15)));
        let words = [
            self.key_seed,
            self.put,
            offset,
            base,
            mix(base.wrapping_add(1)),
            mix(base.wrapping_add(2)),
            mix(base.wrapping_add(3)),
            mix(base.wrapping_add(4)),
        ];
        let mut line = [0; LINE_BYTES];
        for (chunk, word) in line.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        line
    }

    /// Writes the object's bytes into `out`, which is the whole object.
    pub fn fill(self, out: &mut [u8]) {
        for (index, chunk) in out.chunks_mut(LINE_BYTES).enumerate() {
            let line = self.line((index * LINE_BYTES) as u64);
            chunk.copy_from_slice(&line[..chunk.len()]);
        }
    }

    fn differences(self, found: &[u8]) -> Option<WrongBytes> {
        let mut wrong: Option<WrongBytes> = None;
        for (index, chunk) in found.chunks(LINE_BYTES).enumerate() {
            let offset = (index * LINE_BYTES) as u64;
            let line = self.line(offset);
            if chunk == &line[..chunk.len()] {
                continue;
            }
            let count = chunk.iter().zip(&line).filter(|(a, b)| a != b).count() as u64;
            match &mut wrong {
                Some(wrong) => wrong.count += count,
                None => wrong = Some(WrongBytes { count, first_offset: offset, origin: origin_of(chunk) }),
            }
        }
        wrong
    }
}

fn origin_of(chunk: &[u8]) -> Origin {
    if chunk.iter().all(|byte| *byte == POISON) {
        return Origin::Poison;
    }
    if chunk.iter().all(|byte| *byte == 0) {
        return Origin::Zeros;
    }
    let (Some(key_seed), Some(put), Some(offset)) = (word(chunk, 0), word(chunk, 8), word(chunk, 16)) else {
        return Origin::Unknown;
    };
    let content = Content { key_seed, put };
    if chunk == &content.line(offset)[..chunk.len()] {
        Origin::Line { content, offset }
    } else {
        Origin::Unknown
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    let eight = bytes.get(at..at + 8)?;
    Some(u64::from_le_bytes(eight.try_into().ok()?))
}

/// Checks a whole object: all its bytes must be those of one single put of the key, among the puts allowed. Returns
/// that put.
///
/// # Errors
/// [`WrongBytes`].
pub fn check(found: &[u8], key_seed: u64, puts: &RangeInclusive<u64>) -> Result<u64, WrongBytes> {
    // The first line says which put it is of. If that put is not allowed, the block is compared with one that is.
    let put = word(found, 8).filter(|put| puts.contains(put)).unwrap_or(*puts.end());
    match (Content { key_seed, put }).differences(found) {
        None => Ok(put),
        Some(wrong) => Err(wrong),
    }
}

/// How many bytes are not poison: bytes that arrived where none may arrive.
pub fn count_not_poison(found: &[u8]) -> u64 {
    found.iter().filter(|byte| **byte != POISON).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: u64 = 0x1234_5678_9abc_def0;

    fn object(content: Content, length_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0; length_bytes];
        content.fill(&mut bytes);
        bytes
    }

    #[test]
    fn right_content_is_accepted_whatever_its_length() {
        for length in [1, 7, 63, 64, 65, 8192, 8200] {
            let bytes = object(Content { key_seed: KEY, put: 3 }, length);
            assert_eq!(check(&bytes, KEY, &(3..=3)), Ok(3), "{length}");
        }
        let bytes = object(Content { key_seed: KEY, put: 3 }, 8192);
        assert_eq!(check(&bytes, KEY, &(1..=u64::MAX)), Ok(3));
    }

    #[test]
    fn every_single_changed_byte_is_found() {
        let good = object(Content { key_seed: KEY, put: 1 }, 256);
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x40;
            let wrong = check(&bad, KEY, &(1..=1)).unwrap_err();
            assert_eq!(wrong.first_offset, (at / 64 * 64) as u64);
            assert!(wrong.count >= 1);
        }
    }

    #[test]
    fn eight_bytes_at_a_time_differ_between_lines_keys_and_puts() {
        let words = |content: Content, offset| {
            content.line(offset)[24..].chunks(8).map(<[u8]>::to_vec).collect::<Vec<_>>()
        };
        let base = words(Content { key_seed: KEY, put: 1 }, 0);
        for other in [
            words(Content { key_seed: KEY, put: 2 }, 0),
            words(Content { key_seed: KEY + 1, put: 1 }, 0),
            words(Content { key_seed: KEY, put: 1 }, 64),
        ] {
            assert!(base.iter().zip(&other).all(|(a, b)| a != b));
        }
    }

    #[test]
    fn a_mix_of_two_puts_is_wrong_and_names_the_other_put() {
        let mut torn = object(Content { key_seed: KEY, put: 1 }, 512);
        let newer = object(Content { key_seed: KEY, put: 2 }, 512);
        torn[256..].copy_from_slice(&newer[256..]);
        let wrong = check(&torn, KEY, &(1..=2)).unwrap_err();
        assert_eq!(wrong.first_offset, 256);
        assert_eq!(wrong.origin, Origin::Line { content: Content { key_seed: KEY, put: 2 }, offset: 256 });
        assert!(wrong.to_string().contains("put 2"), "{wrong}");
    }

    #[test]
    fn content_of_another_key_place_or_put_is_wrong() {
        let other_key = object(Content { key_seed: KEY + 1, put: 1 }, 128);
        assert!(check(&other_key, KEY, &(1..=1)).is_err());
        let old_put = object(Content { key_seed: KEY, put: 1 }, 128);
        assert!(check(&old_put, KEY, &(2..=2)).is_err());
        let longer = object(Content { key_seed: KEY, put: 1 }, 256);
        let wrong = check(&longer[64..], KEY, &(1..=1)).unwrap_err();
        assert_eq!(wrong.origin, Origin::Line { content: Content { key_seed: KEY, put: 1 }, offset: 64 });
    }

    #[test]
    fn untouched_destinations_are_named() {
        let poison = vec![POISON; 128];
        let wrong = check(&poison, KEY, &(1..=1)).unwrap_err();
        assert_eq!((wrong.origin, wrong.count > 100), (Origin::Poison, true));
        assert_eq!(check(&[0; 64], KEY, &(1..=1)).unwrap_err().origin, Origin::Zeros);
        assert_eq!(count_not_poison(&poison), 0);
        assert_eq!(count_not_poison(&[POISON, 0, POISON]), 1);
    }
}
