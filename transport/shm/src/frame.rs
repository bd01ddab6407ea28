//! The messages on the Unix socket: one frame a packet (the socket is SEQPACKET), little endian, fixed sizes.
//!
//! Nothing is allocated on a claim: the only counted part is the list of slabs, and its count must equal what the
//! packet holds.

use kvfabric_memory::Slab;
use thiserror::Error;

use crate::limits::SLABS_PER_FRAME_MAX;

const MAGIC: u32 = u32::from_le_bytes(*b"KVSM");
/// Version of these frames; a peer with another one is refused.
pub(crate) const VERSION: u16 = 1;
const HEADER_BYTES: usize = 8;
/// Header, version, total, start and count of a list of slabs.
pub(crate) const SLABS_HEADER_BYTES: usize = HEADER_BYTES + 8 + 4 + 4 + 4;
/// One slab.
pub(crate) const SLAB_BYTES: usize = 16 + 4 + 8 + 4 + 4 + 8;
/// Bytes of the nonce.
pub(crate) const NONCE_BYTES: usize = 16;
/// Longest request.
pub(crate) const REQUEST_BYTES_MAX: usize = HEADER_BYTES + NONCE_BYTES;

/// Why a frame was not understood. The connection it came on is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub(crate) enum FrameError {
    #[error("a frame without the protocol's mark")]
    Magic,
    #[error("the peer speaks version {0} of the shared-memory protocol")]
    Version(u16),
    #[error("an unknown kind of frame")]
    Kind,
    #[error("a frame of the wrong length")]
    Length,
    #[error("a slab list longer than its total")]
    Count,
}

/// What a reader asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Request {
    /// First frame of a connection.
    Hello { nonce: [u8; NONCE_BYTES] },
    /// The slabs from index `start` on, unless `since` is still their version.
    Slabs { since: u64, start: u32 },
}

/// Why a server closes a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// Another protocol version.
    Version,
    /// Another user.
    User,
    /// Too many connections.
    Busy,
}

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Comes with the pool's and the word table's descriptors, in this order.
    Hello { nonce: [u8; NONCE_BYTES], incarnation: u64, pool_bytes: u64, words_bytes: u64 },
    /// `total` slabs exist at `version`; these are the ones from `start` on. None of them if `version` was known.
    Slabs { version: u64, total: u32, start: u32, slabs: Vec<Slab> },
    /// The connection ends here.
    Refused(Refusal),
}

struct Writer(Vec<u8>);

impl Writer {
    fn new(kind: u16) -> Self {
        let mut writer = Self(Vec::with_capacity(64));
        writer.put(&MAGIC.to_le_bytes()).put(&VERSION.to_le_bytes()).put(&kind.to_le_bytes());
        writer
    }

    fn put(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }
}

struct Cursor<'a>(&'a [u8]);

impl Cursor<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], FrameError> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(FrameError::Length)?;
        self.0 = rest;
        Ok(*head)
    }

    fn u16(&mut self) -> Result<u16, FrameError> {
        Ok(u16::from_le_bytes(self.take()?))
    }

    fn u32(&mut self) -> Result<u32, FrameError> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    fn u64(&mut self) -> Result<u64, FrameError> {
        Ok(u64::from_le_bytes(self.take()?))
    }

    fn header(&mut self) -> Result<u16, FrameError> {
        if self.u32()? != MAGIC {
            return Err(FrameError::Magic);
        }
        match self.u16()? {
            VERSION => self.u16(),
            other => Err(FrameError::Version(other)),
        }
    }

    fn end(&self) -> Result<(), FrameError> {
        if self.0.is_empty() {
            Ok(())
        } else {
            Err(FrameError::Length)
        }
    }
}

impl Request {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello { nonce } => {
                let mut writer = Writer::new(1);
                writer.put(nonce);
                writer.0
            }
            Self::Slabs { since, start } => {
                let mut writer = Writer::new(3);
                writer.put(&since.to_le_bytes()).put(&start.to_le_bytes());
                writer.0
            }
        }
    }

    pub(crate) fn decode(frame: &[u8]) -> Result<Self, FrameError> {
        let mut cursor = Cursor(frame);
        let request = match cursor.header()? {
            1 => Self::Hello { nonce: cursor.take()? },
            3 => Self::Slabs { since: cursor.u64()?, start: cursor.u32()? },
            _ => return Err(FrameError::Kind),
        };
        cursor.end()?;
        Ok(request)
    }
}

impl Answer {
    pub(crate) fn encode(&self) -> Vec<u8> {
        match self {
            Self::Hello { nonce, incarnation, pool_bytes, words_bytes } => {
                let mut writer = Writer::new(2);
                writer.put(nonce).put(&incarnation.to_le_bytes());
                writer.put(&pool_bytes.to_le_bytes()).put(&words_bytes.to_le_bytes());
                writer.0
            }
            Self::Slabs { version, total, start, slabs } => {
                let mut writer = Writer::new(4);
                writer.put(&version.to_le_bytes()).put(&total.to_le_bytes()).put(&start.to_le_bytes());
                let count = u32::try_from(slabs.len()).unwrap_or(u32::MAX);
                writer.put(&count.to_le_bytes());
                for slab in slabs {
                    writer.put(&slab.layout.to_le_bytes()).put(&slab.group_id.to_le_bytes());
                    writer.put(&slab.object_bytes.to_le_bytes()).put(&slab.first_slot.to_le_bytes());
                    writer.put(&slab.slots.to_le_bytes()).put(&slab.base_offset.to_le_bytes());
                }
                writer.0
            }
            Self::Refused(why) => {
                let code: u16 = match why {
                    Refusal::Version => 1,
                    Refusal::User => 2,
                    Refusal::Busy => 3,
                };
                let mut writer = Writer::new(5);
                writer.put(&code.to_le_bytes());
                writer.0
            }
        }
    }

    pub(crate) fn decode(frame: &[u8]) -> Result<Self, FrameError> {
        let mut cursor = Cursor(frame);
        let answer = match cursor.header()? {
            2 => Self::Hello {
                nonce: cursor.take()?,
                incarnation: cursor.u64()?,
                pool_bytes: cursor.u64()?,
                words_bytes: cursor.u64()?,
            },
            4 => {
                let (version, total, start) = (cursor.u64()?, cursor.u32()?, cursor.u32()?);
                let count = cursor.u32()? as usize;
                if count > SLABS_PER_FRAME_MAX || cursor.0.len() != count * SLAB_BYTES {
                    return Err(FrameError::Length);
                }
                if (start as usize).saturating_add(count) > total as usize {
                    return Err(FrameError::Count);
                }
                let mut slabs = Vec::with_capacity(count);
                for _ in 0..count {
                    slabs.push(Slab {
                        layout: u128::from_le_bytes(cursor.take()?),
                        group_id: cursor.u32()?,
                        object_bytes: cursor.u64()?,
                        first_slot: cursor.u32()?,
                        slots: cursor.u32()?,
                        base_offset: cursor.u64()?,
                    });
                }
                Self::Slabs { version, total, start, slabs }
            }
            5 => Self::Refused(match cursor.u16()? {
                1 => Refusal::Version,
                2 => Refusal::User,
                3 => Refusal::Busy,
                _ => return Err(FrameError::Kind),
            }),
            _ => return Err(FrameError::Kind),
        };
        cursor.end()?;
        Ok(answer)
    }
}

/// Body of a fuzz target: whatever the bytes are, reading them as a request does not panic, and what is accepted is written
/// back as the very same bytes.
///
/// # Panics
/// If the reader breaks that contract.
pub fn fuzz_request(data: &[u8]) {
    if let Ok(request) = Request::decode(data) {
        assert_eq!(request.encode(), data, "a request has two spellings");
    }
}

/// As [`fuzz_request`], for answers.
///
/// # Panics
/// If the reader breaks that contract.
pub fn fuzz_answer(data: &[u8]) {
    if let Ok(answer) = Answer::decode(data) {
        assert_eq!(answer.encode(), data, "an answer has two spellings");
    }
}

#[cfg(test)]
mod tests;
