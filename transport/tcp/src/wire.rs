//! Frames: fixed-size, little-endian, parsed with bounds checks. Nothing a peer sends can panic or allocate here.
//!
//! ```text
//! hello    reader -> owner   token [32] | magic u64 | version u32 | zero u32 | incarnation wanted u64        56 bytes
//! welcome  owner -> reader   magic u64 | version u32 | status u32 | incarnation u64 | zero u64               32 bytes
//! frame    reader -> owner   magic u32 | count u16 | zero u16, then count requests                            8 bytes
//! request                    sequence u64 | slot u32 | zero u32 | object_bytes u64 | object_offset u64
//!                            | length_bytes u64                                                             40 bytes
//! reply    owner -> reader   magic u32 | status u32 | sequence u64 | length_bytes u64 | zero u64             32 bytes
//!                            then, where status is Ok, length_bytes of the object and its word              32 bytes
//! ```
//!
//! Replies come in the order of their requests. The word was loaded after the last byte of its own object had been
//! copied into the socket (design 1.7).

use thiserror::Error;

use crate::limits::{OBJECT_BYTES_MAX, PROTOCOL_VERSION, REQUESTS_PER_FRAME_MAX};

/// Size of a hello, bytes.
pub const HELLO_BYTES: usize = 56;
/// Size of a welcome, bytes.
pub const WELCOME_BYTES: usize = 32;
/// Size of a request frame's header, bytes.
pub const FRAME_HEADER_BYTES: usize = 8;
/// Size of one request, bytes.
pub const REQUEST_BYTES: usize = 40;
/// Size of a reply's header, bytes.
pub const REPLY_BYTES: usize = 32;

const HELLO_MAGIC: u64 = u64::from_le_bytes(*b"kvf-tcp?");
const WELCOME_MAGIC: u64 = u64::from_le_bytes(*b"kvf-tcp!");
const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"kvRQ");
const REPLY_MAGIC: u32 = u32::from_le_bytes(*b"kvRP");

/// What is wrong with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// The first bytes are not those of this protocol.
    #[error("not a frame of this protocol")]
    Magic,
    /// Another version.
    #[error("another protocol version")]
    Version,
    /// A field that must be zero is not.
    #[error("a reserved field is not zero")]
    Reserved,
    /// A request frame names no object, or too many.
    #[error("a request frame with a bad count")]
    Count,
    /// A range that is empty, lies outside its object, or an object beyond the limit.
    #[error("a request with a bad range")]
    Range,
    /// A status that this version does not know.
    #[error("an unknown status")]
    Status,
    /// A reply with another sequence number than the next one due.
    #[error("a reply out of order")]
    Sequence,
    /// A reply of another length than was asked for.
    #[error("a reply of another length than asked for")]
    Length,
    /// An incarnation of zero.
    #[error("an incarnation of zero")]
    Incarnation,
}

impl WireError {
    /// The error's words, for errors that carry a static text.
    #[must_use]
    pub const fn text(self) -> &'static str {
        match self {
            Self::Magic => "not a frame of this protocol",
            Self::Version => "another protocol version",
            Self::Reserved => "a reserved field is not zero",
            Self::Count => "a request frame with a bad count",
            Self::Range => "a request with a bad range",
            Self::Status => "an unknown status",
            Self::Sequence => "a reply out of order",
            Self::Length => "a reply of another length than asked for",
            Self::Incarnation => "an incarnation of zero",
        }
    }
}

/// Reads little-endian fields off the front of a frame. Reading past the end gives zeros; every caller's input has a
/// fixed size, so this cannot happen, and if it did no field check would pass on magic numbers.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        if let Some((front, rest)) = self.0.split_first_chunk::<N>() {
            out = *front;
            self.0 = rest;
        } else {
            self.0 = &[];
        }
        out
    }

    fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

/// Writes fields one after the other into a fixed-size frame.
struct Writer<'a, const N: usize> {
    out: &'a mut [u8; N],
    at: usize,
}

impl<const N: usize> Writer<'_, N> {
    fn put(&mut self, bytes: &[u8]) -> &mut Self {
        if let Some(room) = self.out.get_mut(self.at..self.at + bytes.len()) {
            room.copy_from_slice(bytes);
        }
        self.at += bytes.len();
        self
    }
}

fn encode<const N: usize>(fill: impl FnOnce(&mut Writer<'_, N>)) -> [u8; N] {
    let mut out = [0; N];
    let mut writer = Writer { out: &mut out, at: 0 };
    fill(&mut writer);
    debug_assert!(writer.at <= N);
    out
}

/// First message of a connection. The token comes first, so that it can be judged before anything else is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Hello {
    /// One-time token from the control HELLO.
    pub token: [u8; 32],
    /// The incarnation that the reader wants to talk to (rule R1).
    pub incarnation: u64,
}

impl std::fmt::Debug for Hello {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hello {{ incarnation: {:016x}, .. }}", self.incarnation)
    }
}

impl Hello {
    /// As wire bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; HELLO_BYTES] {
        encode(|w| {
            w.put(&self.token)
                .put(&HELLO_MAGIC.to_le_bytes())
                .put(&PROTOCOL_VERSION.to_le_bytes())
                .put(&0u32.to_le_bytes())
                .put(&self.incarnation.to_le_bytes());
        })
    }

    /// From wire bytes.
    ///
    /// # Errors
    /// [`WireError`] says what is wrong.
    pub fn decode(bytes: &[u8; HELLO_BYTES]) -> Result<Self, WireError> {
        let mut fields = Fields(bytes);
        let token = fields.take();
        if fields.u64() != HELLO_MAGIC {
            return Err(WireError::Magic);
        }
        if fields.u32() != PROTOCOL_VERSION {
            return Err(WireError::Version);
        }
        if fields.u32() != 0 {
            return Err(WireError::Reserved);
        }
        match fields.u64() {
            0 => Err(WireError::Incarnation),
            incarnation => Ok(Self { token, incarnation }),
        }
    }
}

/// What the owner thinks of a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Requests are welcome.
    Ready,
    /// The token is unknown, used or expired. The owner's incarnation is not shown.
    TokenRefused,
    /// The reader wants another incarnation; the owner's own one is in the message.
    WrongIncarnation,
    /// The owner speaks another version.
    WrongVersion,
}

/// The owner's answer to a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Judgement.
    pub verdict: Verdict,
    /// The owner's incarnation; 0 where the token was refused.
    pub incarnation: u64,
}

impl Welcome {
    /// As wire bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; WELCOME_BYTES] {
        let status: u32 = match self.verdict {
            Verdict::Ready => 0,
            Verdict::TokenRefused => 1,
            Verdict::WrongIncarnation => 2,
            Verdict::WrongVersion => 3,
        };
        encode(|w| {
            w.put(&WELCOME_MAGIC.to_le_bytes())
                .put(&PROTOCOL_VERSION.to_le_bytes())
                .put(&status.to_le_bytes())
                .put(&self.incarnation.to_le_bytes());
        })
    }

    /// From wire bytes.
    ///
    /// # Errors
    /// [`WireError`] says what is wrong.
    pub fn decode(bytes: &[u8; WELCOME_BYTES]) -> Result<Self, WireError> {
        let mut fields = Fields(bytes);
        if fields.u64() != WELCOME_MAGIC {
            return Err(WireError::Magic);
        }
        let version = fields.u32();
        let verdict = match fields.u32() {
            0 => Verdict::Ready,
            1 => Verdict::TokenRefused,
            2 => Verdict::WrongIncarnation,
            3 => Verdict::WrongVersion,
            _ => return Err(WireError::Status),
        };
        // A refusal for the version's sake comes from an owner of another version, of course.
        if version != PROTOCOL_VERSION && verdict != Verdict::WrongVersion {
            return Err(WireError::Version);
        }
        let incarnation = fields.u64();
        if fields.u64() != 0 {
            return Err(WireError::Reserved);
        }
        if verdict == Verdict::Ready && incarnation == 0 {
            return Err(WireError::Incarnation);
        }
        Ok(Self { verdict, incarnation })
    }
}

/// Asks for a part of one object, and its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Chosen by the reader; comes back in the reply.
    pub sequence: u64,
    /// Slot.
    pub slot: u32,
    /// Size of the whole object as the reader knows it, bytes.
    pub object_bytes: u64,
    /// First byte wanted.
    pub object_offset: u64,
    /// Bytes wanted.
    pub length_bytes: u64,
}

impl Request {
    /// Whether the range is not empty and lies within the object, and the object within the limit.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.length_bytes > 0
            && self.object_bytes <= OBJECT_BYTES_MAX
            && self.object_offset.checked_add(self.length_bytes).is_some_and(|end| end <= self.object_bytes)
    }

    /// As wire bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        encode(|w| {
            w.put(&self.sequence.to_le_bytes())
                .put(&self.slot.to_le_bytes())
                .put(&0u32.to_le_bytes())
                .put(&self.object_bytes.to_le_bytes())
                .put(&self.object_offset.to_le_bytes())
                .put(&self.length_bytes.to_le_bytes());
        })
    }

    /// From wire bytes; a sound request or an error.
    ///
    /// # Errors
    /// [`WireError`] says what is wrong.
    pub fn decode(bytes: &[u8; REQUEST_BYTES]) -> Result<Self, WireError> {
        let mut fields = Fields(bytes);
        let sequence = fields.u64();
        let slot = fields.u32();
        if fields.u32() != 0 {
            return Err(WireError::Reserved);
        }
        let request = Self {
            sequence,
            slot,
            object_bytes: fields.u64(),
            object_offset: fields.u64(),
            length_bytes: fields.u64(),
        };
        if request.is_sound() {
            Ok(request)
        } else {
            Err(WireError::Range)
        }
    }
}

/// The header of a request frame that names `count` objects.
#[must_use]
pub fn encode_frame_header(count: u16) -> [u8; FRAME_HEADER_BYTES] {
    encode(|w| {
        w.put(&FRAME_MAGIC.to_le_bytes()).put(&count.to_le_bytes());
    })
}

fn decode_frame_header(bytes: &[u8; FRAME_HEADER_BYTES]) -> Result<u16, WireError> {
    let mut fields = Fields(bytes);
    if fields.u32() != FRAME_MAGIC {
        return Err(WireError::Magic);
    }
    let count = fields.u16();
    if fields.u16() != 0 {
        return Err(WireError::Reserved);
    }
    if count == 0 || usize::from(count) > REQUESTS_PER_FRAME_MAX {
        return Err(WireError::Count);
    }
    Ok(count)
}

/// Takes requests off a byte stream, whatever pieces it comes in.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestParser {
    left_in_frame: u16,
}

impl RequestParser {
    /// Takes the next request off the front of `bytes` and shortens it; `None` when more bytes are needed first.
    ///
    /// # Errors
    /// [`WireError`] says what is wrong; the stream is unusable then.
    pub fn next_request(&mut self, bytes: &mut &[u8]) -> Result<Option<Request>, WireError> {
        if self.left_in_frame == 0 {
            let Some((header, rest)) = bytes.split_first_chunk::<FRAME_HEADER_BYTES>() else {
                return Ok(None);
            };
            self.left_in_frame = decode_frame_header(header)?;
            *bytes = rest;
        }
        let Some((request, rest)) = bytes.split_first_chunk::<REQUEST_BYTES>() else { return Ok(None) };
        let request = Request::decode(request)?;
        *bytes = rest;
        self.left_in_frame -= 1;
        Ok(Some(request))
    }
}

/// How a request was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The bytes and the word follow.
    Ok,
    /// No such slot; nothing follows.
    UnknownSlot,
    /// The object has another size; nothing follows.
    SizeMismatch,
}

/// The header of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The request's.
    pub sequence: u64,
    /// What follows.
    pub status: Status,
    /// Bytes of the object that follow; 0 unless the status is Ok.
    pub length_bytes: u64,
}

impl Reply {
    /// As wire bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; REPLY_BYTES] {
        let status: u32 = match self.status {
            Status::Ok => 0,
            Status::UnknownSlot => 1,
            Status::SizeMismatch => 2,
        };
        encode(|w| {
            w.put(&REPLY_MAGIC.to_le_bytes())
                .put(&status.to_le_bytes())
                .put(&self.sequence.to_le_bytes())
                .put(&self.length_bytes.to_le_bytes());
        })
    }

    /// From wire bytes.
    ///
    /// # Errors
    /// [`WireError`] says what is wrong.
    pub fn decode(bytes: &[u8; REPLY_BYTES]) -> Result<Self, WireError> {
        let mut fields = Fields(bytes);
        if fields.u32() != REPLY_MAGIC {
            return Err(WireError::Magic);
        }
        let status = match fields.u32() {
            0 => Status::Ok,
            1 => Status::UnknownSlot,
            2 => Status::SizeMismatch,
            _ => return Err(WireError::Status),
        };
        let sequence = fields.u64();
        let length_bytes = fields.u64();
        if fields.u64() != 0 {
            return Err(WireError::Reserved);
        }
        if (status == Status::Ok) != (length_bytes > 0) || length_bytes > OBJECT_BYTES_MAX {
            return Err(WireError::Length);
        }
        Ok(Self { sequence, status, length_bytes })
    }

    /// Checks that this is the reply that is due.
    ///
    /// # Errors
    /// [`WireError::Sequence`] or [`WireError::Length`].
    pub fn check(&self, sequence: u64, length_bytes: u64) -> Result<(), WireError> {
        if self.sequence != sequence {
            return Err(WireError::Sequence);
        }
        if self.status == Status::Ok && self.length_bytes != length_bytes {
            return Err(WireError::Length);
        }
        Ok(())
    }
}

/// Fuzz body: a hello and a stream of request frames, cut at places that the input chooses. What is accepted must
/// encode to the bytes it came from, and must not depend on the cuts.
pub fn fuzz_request(data: &[u8]) {
    if let Some(hello) = data.first_chunk::<HELLO_BYTES>() {
        if let Ok(decoded) = Hello::decode(hello) {
            assert_eq!(decoded.encode(), *hello);
        }
    }
    let Some((&cut, data)) = data.split_first() else { return };
    let whole = parse_all(&mut RequestParser::default(), data);
    let mut parser = RequestParser::default();
    let (mut pieces, mut pending) = (Vec::new(), Vec::new());
    let mut failed = None;
    for piece in data.chunks(usize::from(cut).max(1)) {
        pending.extend_from_slice(piece);
        let (requests, used, error) = parse_all(&mut parser, &pending);
        pieces.extend(requests);
        pending.drain(..used);
        failed = error;
        if failed.is_some() {
            break;
        }
    }
    assert_eq!((whole.0, whole.2), (pieces, failed));
}

fn parse_all(parser: &mut RequestParser, data: &[u8]) -> (Vec<Request>, usize, Option<WireError>) {
    let mut rest = data;
    let mut requests = Vec::new();
    loop {
        match parser.next_request(&mut rest) {
            Ok(Some(request)) => {
                assert!(request.is_sound());
                requests.push(request);
            }
            Ok(None) => return (requests, data.len() - rest.len(), None),
            Err(error) => return (requests, data.len() - rest.len(), Some(error)),
        }
    }
}

/// Fuzz body: a welcome and reply headers. What is accepted must encode to the bytes it came from.
pub fn fuzz_reply(data: &[u8]) {
    if let Some(welcome) = data.first_chunk::<WELCOME_BYTES>() {
        if let Ok(decoded) = Welcome::decode(welcome) {
            // The version of a refusal for the version's sake is the other side's.
            assert!(decoded.verdict == Verdict::WrongVersion || decoded.encode() == *welcome);
        }
    }
    for bytes in data.chunks_exact(REPLY_BYTES) {
        let Some(bytes) = bytes.first_chunk::<REPLY_BYTES>() else { return };
        if let Ok(reply) = Reply::decode(bytes) {
            assert_eq!(reply.encode(), *bytes);
            assert!(reply.length_bytes <= OBJECT_BYTES_MAX);
        }
    }
}
