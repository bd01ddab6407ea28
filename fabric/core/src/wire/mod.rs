//! Control messages (design 1.7): postcard bodies in an envelope of version and kind.
//!
//! ```text
//! frame = version u16 (little-endian) | kind u8 | body (postcard)
//! ```
//!
//! The carrier puts a length in front and checks it against [`FRAME_BYTES_MAX`] before it reads. Decoding borrows the
//! frame: long lists are fixed-size records in one bytes field, so a LOOKUP of 65,536 keys is decoded with one length
//! check and no allocation. Every claim of a length is checked against a named limit and against the bytes that are
//! there before anything is done with it, and a body must end where its frame ends.
//!
//! A request has a kind below 0x80, a reply one above, so that neither is ever taken for the other. The first three
//! bytes and the body of [`Refusal`] are the same in every version: a peer of another version can always say so.

mod directory;
mod fuzz;
mod membership;
mod rank;
mod records;
mod stats;
mod text;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use directory::*;
pub use fuzz::{fuzz_reply, fuzz_request};
pub use membership::*;
pub use rank::*;
pub use records::{Bitmap, FixedRecord, Records, RecordsError};
pub use stats::*;
pub use text::*;

use crate::limits::{FRAME_BYTES_MAX, PROTOCOL_VERSION};

/// Bytes before the body: version and kind.
pub const ENVELOPE_BYTES: usize = 3;

#[allow(clippy::cast_possible_truncation)] // Asserted below.
const VERSION: u16 = PROTOCOL_VERSION as u16;
const _: () = assert!(PROTOCOL_VERSION <= u16::MAX as u32);

const REPLY: u8 = 0x80;

macro_rules! messages {
    (
        $(#[$doc:meta])*
        $name:ident in $base:literal { $($(#[$variant_doc:meta])* $kind:literal $variant:ident($body:ty)),* $(,)? }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum $name<'a> {
            $($(#[$variant_doc])* $variant($body)),*
        }

        impl<'a> $name<'a> {
            /// The kind byte of the envelope.
            #[must_use]
            pub const fn kind(&self) -> u8 {
                match self {
                    $(Self::$variant(_) => $base | $kind),*
                }
            }

            /// The message's name, for logs and metrics.
            #[must_use]
            pub const fn name(&self) -> &'static str {
                match self {
                    $(Self::$variant(_) => stringify!($variant)),*
                }
            }

            fn encode_body(&self, frame: FrameFlavor<'_>) -> postcard::Result<()> {
                match self {
                    $(Self::$variant(body) => postcard::serialize_with_flavor(body, frame)),*
                }
            }

            fn decode_body(kind: u8, body: &'a [u8]) -> Result<Self, DecodeError> {
                $(
                    if kind == ($base | $kind) {
                        return whole::<$body>(body).map(Self::$variant);
                    }
                )*
                Err(DecodeError::Kind { kind })
            }
        }

        $(
            impl<'a> From<$body> for $name<'a> {
                fn from(body: $body) -> Self {
                    Self::$variant(body)
                }
            }
        )*
    };
}

messages! {
    /// A message that asks for something. See the bodies for who says it to whom.
    Request in 0x00 {
        /// Rank to directory.
        1 Join(Join<'a>),
        /// Rank to directory; answered by [`Reply::Done`].
        2 Leave(Leave),
        /// Rank to directory, first on the liveness connection; answered by [`Reply::Done`].
        3 Attach(Attach),
        /// Rank to directory, on the liveness connection; answered by [`Reply::Done`].
        4 Ping(Ping),
        /// Rank or reader to directory.
        5 OpenNs(OpenNs),
        /// Rank to directory.
        6 Publish(Publish<'a>),
        /// Reader to directory: one bit per key.
        7 Lookup(Lookup<'a>),
        /// Reader to directory: the replicas of each key.
        8 Locate(Locate<'a>),
        /// Reader to directory; answered by [`Reply::Done`].
        9 MissReports(MissReports<'a>),
        /// Anybody to directory.
        10 Clear(Clear),
        /// Directory to rank.
        11 ClearRank(ClearRank),
        /// Reader to directory.
        12 Who(Who),
        /// Anybody to directory.
        13 GetStats(GetStats),
        /// Rank to rank.
        14 Hello(Hello<'a>),
        /// Rank to rank; answered by [`Reply::Done`] where the carrier wants an answer.
        15 Slabs(Slabs<'a>),
        /// Rank to rank; answered by [`Reply::Done`] where the carrier wants an answer.
        16 Touch(Touch<'a>),
    }
}

messages! {
    /// A message that answers a [`Request`].
    Reply in 0x80 {
        /// The request was not carried out.
        0 Refused(Refusal),
        /// To [`Request::Join`].
        1 Joined(JoinReply),
        /// The request was carried out and there is nothing to say about it.
        2 Done(Done),
        /// To [`Request::OpenNs`].
        5 Ns(NsReply),
        /// To [`Request::Publish`].
        6 Publish(PublishReply<'a>),
        /// To [`Request::Lookup`].
        7 Lookup(LookupReply<'a>),
        /// To [`Request::Locate`].
        8 Locate(LocateReply<'a>),
        /// To [`Request::Clear`].
        10 Clear(ClearReply),
        /// To [`Request::ClearRank`].
        11 ClearAck(ClearAck),
        /// To [`Request::Who`].
        12 Who(WhoReply<'a>),
        /// To [`Request::GetStats`].
        13 Stats(Stats),
        /// To [`Request::Hello`].
        14 Hello(HelloReply<'a>),
    }
}

/// LOOKUP.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lookup<'a>(#[serde(borrow)] pub Query<'a>);

/// LOCATE.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Locate<'a>(#[serde(borrow)] pub Query<'a>);

/// Asks for a directory's [`Stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetStats;

/// Nothing to say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Done;

/// Why a request was not carried out. The same in every version of the protocol; new reasons are added at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Another version of the protocol.
    #[error("the peer speaks version {ours} of the protocol")]
    Version {
        /// The version of the one that refuses.
        ours: u16,
    },
    /// The request could not be decoded.
    #[error("the peer could not read the request")]
    Malformed,
    /// The directory does not know this rank and incarnation: join again.
    #[error("the directory does not know this rank; it must join again")]
    UnknownRank,
    /// The request came over a connection that does not belong to the rank it names.
    #[error("the request came over a connection that belongs to another rank")]
    ForeignConnection,
    /// The directory has not numbered this namespace: open it again.
    #[error("the directory does not know this namespace number; it must be opened again")]
    UnknownNamespace,
    /// A queue or table of the peer is full.
    #[error("the peer is overloaded")]
    Overloaded,
    /// The peer does not serve this kind of request.
    #[error("the peer does not serve this kind of request")]
    Unsupported,
}

impl Refusal {
    /// Whether the same request may succeed later without any change.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Overloaded)
    }

    /// Whether the cause lies on the side that asked.
    #[must_use]
    pub fn is_local(&self) -> bool {
        !matches!(self, Self::Overloaded)
    }
}

/// Why a frame is not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// Longer than [`FRAME_BYTES_MAX`].
    #[error("the frame has {length_bytes} bytes, more than the {FRAME_BYTES_MAX} that are allowed")]
    TooLong {
        /// Its length, bytes.
        length_bytes: usize,
    },
    /// Shorter than its envelope.
    #[error("the frame has {length_bytes} bytes, less than its envelope")]
    TooShort {
        /// Its length, bytes.
        length_bytes: usize,
    },
    /// Another version of the protocol.
    #[error("the peer speaks version {theirs} of the protocol, this is version {VERSION}")]
    Version {
        /// The frame's version.
        theirs: u16,
    },
    /// Not a kind that is known here.
    #[error("kind {kind} of message is not known")]
    Kind {
        /// The kind.
        kind: u8,
    },
    /// The body is not what its kind says, or breaks a limit.
    #[error("the body of the message is not valid")]
    Body,
    /// Bytes follow the body.
    #[error("{rest_bytes} bytes follow the body of the message")]
    Trailing {
        /// How many.
        rest_bytes: usize,
    },
}

impl DecodeError {
    /// Never: the same bytes fail again.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        false
    }

    /// Never: the bytes came from the peer.
    #[must_use]
    pub fn is_local(&self) -> bool {
        false
    }

    /// How to refuse a request that failed so.
    #[must_use]
    pub fn refusal(&self) -> Refusal {
        match self {
            Self::Version { .. } => Refusal::Version { ours: VERSION },
            Self::Kind { .. } => Refusal::Unsupported,
            _ => Refusal::Malformed,
        }
    }
}

/// Why a message could not be encoded: it breaks a limit of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the message breaks a limit of the protocol (frame length or number of records)")]
pub struct EncodeError;

impl EncodeError {
    /// Never: the same message fails again.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        false
    }

    /// Always.
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }
}

/// Appends to a buffer, but no more than a frame.
struct FrameFlavor<'b> {
    out: &'b mut Vec<u8>,
    end: usize,
}

impl postcard::ser_flavors::Flavor for FrameFlavor<'_> {
    type Output = ();

    fn try_extend(&mut self, data: &[u8]) -> postcard::Result<()> {
        if data.len() > self.end.saturating_sub(self.out.len()) {
            return Err(postcard::Error::SerializeBufferFull);
        }
        self.out.extend_from_slice(data);
        Ok(())
    }

    fn try_push(&mut self, data: u8) -> postcard::Result<()> {
        self.try_extend(&[data])
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

fn encode(
    out: &mut Vec<u8>,
    kind: u8,
    body: impl FnOnce(FrameFlavor<'_>) -> postcard::Result<()>,
) -> Result<(), EncodeError> {
    let start = out.len();
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.push(kind);
    let end = start.saturating_add(FRAME_BYTES_MAX);
    let written = body(FrameFlavor { out, end });
    written.map_err(|_| {
        out.truncate(start);
        EncodeError
    })
}

/// Appends the frame of a request to `out`.
///
/// # Errors
/// [`EncodeError`], and `out` is as before.
pub fn encode_request(request: &Request<'_>, out: &mut Vec<u8>) -> Result<(), EncodeError> {
    encode(out, request.kind(), |frame| request.encode_body(frame))
}

/// Appends the frame of a reply to `out`.
///
/// # Errors
/// [`EncodeError`], and `out` is as before.
pub fn encode_reply(reply: &Reply<'_>, out: &mut Vec<u8>) -> Result<(), EncodeError> {
    encode(out, reply.kind(), |frame| reply.encode_body(frame))
}

fn envelope(frame: &[u8]) -> Result<(u16, u8, &[u8]), DecodeError> {
    if frame.len() > FRAME_BYTES_MAX {
        return Err(DecodeError::TooLong { length_bytes: frame.len() });
    }
    match frame {
        [low, high, kind, body @ ..] => Ok((u16::from_le_bytes([*low, *high]), *kind, body)),
        _ => Err(DecodeError::TooShort { length_bytes: frame.len() }),
    }
}

fn whole<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, DecodeError> {
    match postcard::take_from_bytes(body) {
        Ok((value, [])) => Ok(value),
        Ok((_, rest)) => Err(DecodeError::Trailing { rest_bytes: rest.len() }),
        Err(_) => Err(DecodeError::Body),
    }
}

/// The request in a frame. It borrows the frame.
///
/// # Errors
/// [`DecodeError`]; answer with its [`DecodeError::refusal`].
pub fn decode_request(frame: &[u8]) -> Result<Request<'_>, DecodeError> {
    match envelope(frame)? {
        (VERSION, kind, body) => Request::decode_body(kind, body),
        (theirs, ..) => Err(DecodeError::Version { theirs }),
    }
}

/// The reply in a frame. It borrows the frame. A refusal is understood in any version.
///
/// # Errors
/// [`DecodeError`].
pub fn decode_reply(frame: &[u8]) -> Result<Reply<'_>, DecodeError> {
    match envelope(frame)? {
        (VERSION, kind, body) => Reply::decode_body(kind, body),
        (_, REPLY, body) => whole(body).map(Reply::Refused),
        (theirs, ..) => Err(DecodeError::Version { theirs }),
    }
}
