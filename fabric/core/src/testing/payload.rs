//! Bytes that say where they come from: each 64-byte line names key, put and its own position, so that a wrong byte
//! names its origin (design 7).

use thiserror::Error;

const LINE_BYTES: usize = 64;
/// Smallest object that can be identified: the stamp, the line's number and one word that follows from them.
pub const PAYLOAD_BYTES_MIN: usize = 32;

/// The origin of an object's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Key, as numbered by the test.
    pub key: u64,
    /// Put, unique within the test.
    pub put: u64,
}

/// The bytes are not those of one single put.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("offset {offset}: the first line is of {first:?}, this byte is not (its line claims {here:?})")]
pub struct Torn {
    /// Origin of the first line.
    pub first: Stamp,
    /// Offset of the first byte that differs.
    pub offset: usize,
    /// What the differing byte's line claims to be.
    pub here: Stamp,
}

fn mix(stamp: Stamp, line: u64, word: u64) -> u64 {
    let mut value =
        stamp.key.rotate_left(32) ^ stamp.put ^ line.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ word << 56;
    for shift in [33, 29, 32] {
        value = (value ^ (value >> shift)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    }
    value
}

fn line(stamp: Stamp, number: u64) -> [u8; LINE_BYTES] {
    let mut bytes = [0; LINE_BYTES];
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(0u64..) {
        let value = match word {
            0 => stamp.key,
            1 => stamp.put,
            2 => number,
            _ => mix(stamp, number, word),
        };
        chunk.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// The bytes of a put.
#[must_use]
pub fn payload(stamp: Stamp, length_bytes: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length_bytes);
    for number in 0.. {
        let rest = length_bytes - bytes.len();
        if rest == 0 {
            break;
        }
        bytes.extend_from_slice(&line(stamp, number)[..rest.min(LINE_BYTES)]);
    }
    bytes
}

fn claim(line: &[u8]) -> Stamp {
    let field = |at: usize| {
        let mut eight = [0; 8];
        if let Some(bytes) = line.get(at..at + 8) {
            eight.copy_from_slice(bytes);
        }
        u64::from_le_bytes(eight)
    };
    Stamp { key: field(0), put: field(8) }
}

/// Finds the one put that all bytes come from.
///
/// # Errors
/// [`Torn`] names the first byte that does not.
pub fn identify(object: &[u8]) -> Result<Stamp, Torn> {
    let first = claim(object);
    let whole = payload(first, object.len());
    match object.iter().zip(&whole).position(|(found, wanted)| found != wanted) {
        None => Ok(first),
        Some(offset) => {
            let here = claim(&object[offset - offset % LINE_BYTES..]);
            Err(Torn { first, offset, here })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_names_its_put() {
        let stamp = Stamp { key: 3, put: 9 };
        for length in [PAYLOAD_BYTES_MIN, 63, 64, 65, 1000] {
            let bytes = payload(stamp, length);
            assert_eq!((bytes.len(), identify(&bytes)), (length, Ok(stamp)));
            for at in 0..length {
                let mut wrong = bytes.clone();
                wrong[at] ^= 1;
                assert!(identify(&wrong).is_err(), "byte {at} of {length}");
            }
        }
        let mut torn = payload(stamp, 256);
        let other = Stamp { key: 3, put: 10 };
        torn[128..].copy_from_slice(&payload(other, 256)[128..]);
        let error = identify(&torn).unwrap_err();
        assert_eq!((error.first, error.here), (stamp, other));
        assert!((128..144).contains(&error.offset));
    }
}
