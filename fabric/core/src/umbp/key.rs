//! UMBP keys: `umbp:vllm:v1:{namespace}:tp{t}:pcp{p}:dcp{d}:pp{q}:g{group}:{block hash in hex}`.
//!
//! The namespace is any non-empty text and may itself contain colons, so keys are read from the right: the last six
//! parts never contain a colon, and what is left between the prefix and them is the namespace. Reading is strict (lower
//! case hex, no signs, no leading zeros): exactly one spelling exists for a key, so equal keys are equal bytes.

use core::cmp::Ordering;
use core::fmt;

use thiserror::Error;

use super::limits::NAMESPACE_BYTES_MAX;
use super::UmbpNamespace;
use crate::hash::KeyCoordinates;
use crate::limits::{BLOCK_HASH_BYTES_MAX, KEY_BYTES_MAX};

/// What every key begins with.
pub const KEY_PREFIX: &str = "umbp:vllm:v1:";

/// A part of a key, for errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyPart {
    /// `umbp:vllm:v1:`.
    Prefix,
    /// The namespace.
    Namespace,
    /// `tp{rank}`.
    TpRank,
    /// `pcp{rank}`.
    PcpRank,
    /// `dcp{rank}`.
    DcpRank,
    /// `pp{rank}`.
    PpRank,
    /// `g{group}`.
    Group,
    /// The block hash in hex.
    BlockHash,
}

impl KeyPart {
    /// What the part begins with.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Prefix => KEY_PREFIX,
            Self::Namespace | Self::BlockHash => "",
            Self::TpRank => "tp",
            Self::PcpRank => "pcp",
            Self::DcpRank => "dcp",
            Self::PpRank => "pp",
            Self::Group => "g",
        }
    }
}

impl fmt::Display for KeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefix => "prefix",
            Self::Namespace => "namespace",
            Self::TpRank => "tp rank",
            Self::PcpRank => "pcp rank",
            Self::DcpRank => "dcp rank",
            Self::PpRank => "pp rank",
            Self::Group => "cache group",
            Self::BlockHash => "block hash",
        })
    }
}

/// What is wrong with a number in a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum NumberFault {
    /// No digits.
    #[error("has no digits")]
    Empty,
    /// Something else than the digits 0 to 9.
    #[error("is not a decimal number")]
    NotDecimal,
    /// A leading zero: a second spelling of the same number.
    #[error("has a leading zero")]
    LeadingZero,
    /// Above 4,294,967,295.
    #[error("does not fit 32 bits")]
    TooLarge,
}

/// Why a key is refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum KeyError {
    /// Longer than [`KEY_BYTES_MAX`].
    #[error("a key of {length_bytes} bytes exceeds {KEY_BYTES_MAX}")]
    TooLong {
        /// Length found, bytes.
        length_bytes: usize,
    },
    /// Does not begin with [`KEY_PREFIX`].
    #[error("the key does not begin with {KEY_PREFIX:?}")]
    WrongPrefix,
    /// A part is not there.
    #[error("the key has no {part}")]
    Missing {
        /// The part.
        part: KeyPart,
    },
    /// A part does not begin with its label, as `tp`.
    #[error("the key's {part} does not begin with {:?}", part.label())]
    WrongLabel {
        /// The part.
        part: KeyPart,
    },
    /// A part's number is malformed.
    #[error("the key's {part} {fault}")]
    Number {
        /// The part.
        part: KeyPart,
        /// What is wrong.
        fault: NumberFault,
    },
    /// The namespace is empty.
    #[error("the namespace is empty")]
    NamespaceEmpty,
    /// The namespace is not UTF-8.
    #[error("the key's namespace is not UTF-8")]
    NamespaceNotUtf8,
    /// The namespace is longer than [`NAMESPACE_BYTES_MAX`].
    #[error("a namespace of {length_bytes} bytes exceeds {NAMESPACE_BYTES_MAX}")]
    NamespaceTooLong {
        /// Length found, bytes.
        length_bytes: usize,
    },
    /// The block hash has no bytes.
    #[error("block_hash must be non-empty bytes")]
    HashEmpty,
    /// The block hash has an odd number of hex digits.
    #[error("the key's block hash has an odd number of hex digits")]
    HashOdd,
    /// The block hash holds something else than lower-case hex digits.
    #[error("the key's block hash is not lower-case hex at digit {digit}")]
    HashNotHex {
        /// Index of the first wrong digit.
        digit: usize,
    },
    /// The block hash is longer than [`BLOCK_HASH_BYTES_MAX`].
    #[error("a block hash of {length_bytes} bytes exceeds {BLOCK_HASH_BYTES_MAX}")]
    HashTooLong {
        /// Length found, bytes.
        length_bytes: usize,
    },
}

impl KeyError {
    /// The part of the key that is at fault; `None` when it is the whole.
    #[must_use]
    pub const fn part(&self) -> Option<KeyPart> {
        match self {
            Self::TooLong { .. } => None,
            Self::WrongPrefix => Some(KeyPart::Prefix),
            Self::Missing { part } | Self::WrongLabel { part } | Self::Number { part, .. } => Some(*part),
            Self::NamespaceEmpty | Self::NamespaceNotUtf8 | Self::NamespaceTooLong { .. } => {
                Some(KeyPart::Namespace)
            }
            Self::HashEmpty | Self::HashOdd | Self::HashNotHex { .. } | Self::HashTooLong { .. } => {
                Some(KeyPart::BlockHash)
            }
        }
    }
}

/// A block hash of 1 to [`BLOCK_HASH_BYTES_MAX`] bytes, held inline.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockHash {
    // Bytes past `length` are zero, so the derived equality is that of the hash.
    bytes: [u8; BLOCK_HASH_BYTES_MAX],
    length: u8,
}

const _: () = assert!(BLOCK_HASH_BYTES_MAX <= u8::MAX as usize);

impl BlockHash {
    /// A hash from its bytes.
    ///
    /// # Errors
    /// [`KeyError::HashEmpty`] or [`KeyError::HashTooLong`].
    pub fn new(hash: &[u8]) -> Result<Self, KeyError> {
        if hash.is_empty() {
            return Err(KeyError::HashEmpty);
        }
        let mut bytes = [0; BLOCK_HASH_BYTES_MAX];
        match (bytes.get_mut(..hash.len()), u8::try_from(hash.len())) {
            (Some(room), Ok(length)) => {
                room.copy_from_slice(hash);
                Ok(Self { bytes, length })
            }
            _ => Err(KeyError::HashTooLong { length_bytes: hash.len() }),
        }
    }

    /// A hash from lower-case hex digits.
    ///
    /// # Errors
    /// One of the `Hash` errors.
    pub fn from_hex(hex: &[u8]) -> Result<Self, KeyError> {
        if hex.is_empty() {
            return Err(KeyError::HashEmpty);
        }
        if let Some(digit) = hex.iter().position(|byte| !matches!(byte, b'0'..=b'9' | b'a'..=b'f')) {
            return Err(KeyError::HashNotHex { digit });
        }
        if hex.len() % 2 != 0 {
            return Err(KeyError::HashOdd);
        }
        let length_bytes = hex.len() / 2;
        if length_bytes > BLOCK_HASH_BYTES_MAX {
            return Err(KeyError::HashTooLong { length_bytes });
        }
        Self::decode(hex).ok_or(KeyError::HashTooLong { length_bytes })
    }

    /// The hash's bytes.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.length)).unwrap_or(&self.bytes)
    }

    /// Decodes without saying what is wrong: eight digits at a time and no branch per digit.
    fn decode(hex: &[u8]) -> Option<Self> {
        let length = u8::try_from(hex.len() / 2).ok()?;
        if hex.is_empty() || hex.len() % 2 != 0 || usize::from(length) > BLOCK_HASH_BYTES_MAX {
            return None;
        }
        let mut bytes = [0; BLOCK_HASH_BYTES_MAX];
        let mut faults = 0;
        let (mut words, mut rooms) = (hex.chunks_exact(8), bytes.chunks_exact_mut(4));
        for (word, room) in words.by_ref().zip(rooms.by_ref()) {
            let mut digits = [0; 8];
            digits.copy_from_slice(word);
            let (decoded, fault) = decode_word(digits);
            faults |= fault;
            room.copy_from_slice(&decoded);
        }
        let rest = words.remainder();
        if !rest.is_empty() {
            let mut digits = [b'0'; 8];
            for (digit, byte) in digits.iter_mut().zip(rest) {
                *digit = *byte;
            }
            let (decoded, fault) = decode_word(digits);
            faults |= fault;
            rooms.next()?.copy_from_slice(&decoded);
        }
        (faults == 0).then_some(Self { bytes, length })
    }
}

/// Eight hex digits to four bytes; the second value is zero exactly if all digits are lower-case hex.
#[inline]
fn decode_word(digits: [u8; 8]) -> ([u8; 4], u64) {
    const fn each(byte: u8) -> u64 {
        u64::from_le_bytes([byte; 8])
    }
    let text = u64::from_le_bytes(digits);
    // Bit 6 tells letters from digits, and the low four bits of 'a' are 1: ten less nine.
    let values = (text & each(0x0f)) + 9 * ((text >> 6) & each(1));
    // Written back, only the right spelling of a value below 16 gives the same text. No byte carries into the next one.
    let letters = ((values + each(6)) >> 4) & each(1);
    let again = values + each(b'0') + 39 * letters;
    let faults = (text ^ again) | (values & each(0xf0));
    let pairs = ((values << 4) | (values >> 8)) & 0x00ff_00ff_00ff_00ff;
    let pairs = (pairs | (pairs >> 8)) & 0x0000_ffff_0000_ffff;
    let [a, b, _, _, c, d, _, _] = pairs.to_le_bytes();
    ([a, b, c, d], faults)
}

impl TryFrom<&[u8]> for BlockHash {
    type Error = KeyError;

    fn try_from(hash: &[u8]) -> Result<Self, KeyError> {
        Self::new(hash)
    }
}

impl Ord for BlockHash {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl PartialOrd for BlockHash {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut hex = [0; 2 * BLOCK_HASH_BYTES_MAX];
        for (pair, byte) in hex.chunks_exact_mut(2).zip(self.as_bytes()) {
            pair.copy_from_slice(&[digit(byte >> 4), digit(byte & 15)]);
        }
        let hex = hex.get(..2 * self.as_bytes().len()).ok_or(fmt::Error)?;
        f.write_str(core::str::from_utf8(hex).map_err(|_| fmt::Error)?)
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockHash({self})")
    }
}

const fn digit(nibble: u8) -> u8 {
    if nibble < 10 {
        b'0' + nibble
    } else {
        b'a' + (nibble - 10)
    }
}

/// A key that borrows the text it was read from, namespace not yet checked to be UTF-8.
#[derive(Clone, Copy)]
pub(super) struct RawKey<'a> {
    pub(super) namespace: &'a [u8],
    pub(super) at: KeyCoordinates,
    pub(super) block_hash: BlockHash,
}

/// Hex digits of a SHA-256 block hash, what vLLM uses unless told otherwise.
const SHA256_HEX_BYTES: usize = 64;

impl<'a> RawKey<'a> {
    pub(super) fn parse(key: &'a [u8]) -> Result<Self, KeyError> {
        if key.len() > KEY_BYTES_MAX {
            return Err(KeyError::TooLong { length_bytes: key.len() });
        }
        let rest = key.strip_prefix(KEY_PREFIX.as_bytes()).ok_or(KeyError::WrongPrefix)?;
        let (rest, block_hash) = split_hash(rest)?;
        let (rest, group_id) = split_number(rest, b":g", KeyPart::Group)?;
        let (rest, pp_rank) = split_number(rest, b":pp", KeyPart::PpRank)?;
        let (rest, dcp_rank) = split_number(rest, b":dcp", KeyPart::DcpRank)?;
        let (rest, pcp_rank) = split_number(rest, b":pcp", KeyPart::PcpRank)?;
        let (namespace, tp_rank) = split_number(rest, b":tp", KeyPart::TpRank)?;
        if namespace.is_empty() {
            return Err(KeyError::NamespaceEmpty);
        }
        if namespace.len() > NAMESPACE_BYTES_MAX {
            return Err(KeyError::NamespaceTooLong { length_bytes: namespace.len() });
        }
        let at = KeyCoordinates { tp_rank, pcp_rank, dcp_rank, pp_rank, group_id };
        Ok(Self { namespace, at, block_hash })
    }
}

fn split_hash(rest: &[u8]) -> Result<(&[u8], BlockHash), KeyError> {
    // The usual length first: 64 valid digits hold no colon, so the colon before them is the last one.
    if let Some((head, [b':', hex @ ..])) =
        rest.len().checked_sub(SHA256_HEX_BYTES + 1).and_then(|at| rest.split_at_checked(at))
    {
        if let Some(hash) = BlockHash::decode(hex) {
            return Ok((head, hash));
        }
    }
    let (head, hex) = split_last(rest).ok_or(KeyError::Missing { part: KeyPart::Group })?;
    Ok((head, BlockHash::from_hex(hex)?))
}

/// Splits `{tag}{number}` off the end; `tag` is the part's label after a colon, an array so that comparing it is a few
/// instructions and no call.
#[inline]
fn split_number<'a, const TAG: usize>(
    rest: &'a [u8],
    tag: &[u8; TAG],
    part: KeyPart,
) -> Result<(&'a [u8], u32), KeyError> {
    // From the right: nearly every rank and group has one digit, some have more. Whatever is not right at once is
    // looked at again, to say what is wrong.
    let mut head = rest;
    let (mut value, mut scale) = (0u64, 1u64);
    let mut top = 0;
    while let [front @ .., byte @ b'0'..=b'9'] = head {
        top = byte - b'0';
        value += u64::from(top) * scale;
        scale *= 10;
        head = front;
        // Ten digits hold every 32-bit number and cannot overflow here.
        if scale == 10_000_000_000 {
            break;
        }
    }
    // A leading zero is right only if it is the only digit, and no digit at all is not right.
    if scale == 10 || (scale > 10 && top != 0) {
        if let (Some((head, found)), Ok(number)) = (head.split_last_chunk(), u32::try_from(value)) {
            if found == tag {
                return Ok((head, number));
            }
        }
    }
    split_number_slow(rest, part)
}

#[cold]
fn split_number_slow(rest: &[u8], part: KeyPart) -> Result<(&[u8], u32), KeyError> {
    let (head, field) = split_last(rest).ok_or(KeyError::Missing {
        // Without a colon the field itself takes the namespace's place.
        part: if rest.starts_with(part.label().as_bytes()) { KeyPart::Namespace } else { part },
    })?;
    let digits = field.strip_prefix(part.label().as_bytes()).ok_or(KeyError::WrongLabel { part })?;
    let number = number(digits).map_err(|fault| KeyError::Number { part, fault })?;
    Ok((head, number))
}

fn split_last(rest: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = rest.iter().rposition(|&byte| byte == b':')?;
    match rest.split_at_checked(at) {
        Some((head, [_, tail @ ..])) => Some((head, tail)),
        _ => None,
    }
}

fn number(digits: &[u8]) -> Result<u32, NumberFault> {
    if digits.is_empty() {
        return Err(NumberFault::Empty);
    }
    let mut value = 0u64;
    for &byte in digits {
        if !byte.is_ascii_digit() {
            return Err(NumberFault::NotDecimal);
        }
        value = value.saturating_mul(10).saturating_add(u64::from(byte - b'0'));
    }
    if digits.len() > 1 && digits.first() == Some(&b'0') {
        return Err(NumberFault::LeadingZero);
    }
    u32::try_from(value).map_err(|_| NumberFault::TooLarge)
}

/// A key read in place: the namespace borrows from the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParsedKey<'a> {
    /// Namespace; not empty.
    pub namespace: &'a str,
    /// Ranks and cache group.
    pub at: KeyCoordinates,
    /// Block hash.
    pub block_hash: BlockHash,
}

impl<'a> ParsedKey<'a> {
    /// Reads a key; allocates nothing.
    ///
    /// # Errors
    /// Names the part at fault; the first from the right, after length and prefix.
    pub fn parse(key: &'a [u8]) -> Result<Self, KeyError> {
        let raw = RawKey::parse(key)?;
        let namespace = core::str::from_utf8(raw.namespace).map_err(|_| KeyError::NamespaceNotUtf8)?;
        Ok(Self { namespace, at: raw.at, block_hash: raw.block_hash })
    }
}

impl fmt::Display for ParsedKey<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_key(f, self.namespace, self.at, &self.block_hash)
    }
}

fn write_key(
    f: &mut fmt::Formatter<'_>,
    namespace: &str,
    at: KeyCoordinates,
    hash: &BlockHash,
) -> fmt::Result {
    let KeyCoordinates { tp_rank, pcp_rank, dcp_rank, pp_rank, group_id } = at;
    f.write_str(KEY_PREFIX)?;
    f.write_str(namespace)?;
    write!(f, ":tp{tp_rank}:pcp{pcp_rank}:dcp{dcp_rank}:pp{pp_rank}:g{group_id}:{hash}")
}

/// The name of one rank's object: namespace, ranks, cache group and block hash.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UmbpKey {
    namespace: UmbpNamespace,
    at: KeyCoordinates,
    block_hash: BlockHash,
}

impl UmbpKey {
    /// A key from its parts. Each part is bounded by its type, so every key fits [`KEY_BYTES_MAX`].
    #[must_use]
    pub const fn new(namespace: UmbpNamespace, at: KeyCoordinates, block_hash: BlockHash) -> Self {
        Self { namespace, at, block_hash }
    }

    /// Reads a key.
    ///
    /// # Errors
    /// Names the part at fault.
    pub fn parse(key: &str) -> Result<Self, KeyError> {
        let parsed = ParsedKey::parse(key.as_bytes())?;
        Ok(Self::new(UmbpNamespace::new(parsed.namespace)?, parsed.at, parsed.block_hash))
    }

    /// Namespace.
    #[must_use]
    pub const fn namespace(&self) -> &UmbpNamespace {
        &self.namespace
    }

    /// Ranks and cache group.
    #[must_use]
    pub const fn at(&self) -> KeyCoordinates {
        self.at
    }

    /// Block hash.
    #[must_use]
    pub const fn block_hash(&self) -> &BlockHash {
        &self.block_hash
    }
}

impl fmt::Display for UmbpKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_key(f, self.namespace.as_str(), self.at, &self.block_hash)
    }
}

impl core::str::FromStr for UmbpKey {
    type Err = KeyError;

    fn from_str(key: &str) -> Result<Self, KeyError> {
        Self::parse(key)
    }
}

/// Body of a fuzz target: whatever the bytes are, reading them does not panic, and what is accepted is written back as
/// the very same bytes and hashes alike by every path.
///
/// # Panics
/// If the reader breaks that contract.
pub fn fuzz_key(data: &[u8]) {
    let mut hasher = super::KeyHasher::new(b"", b"");
    let hashed = hasher.hash(data);
    match ParsedKey::parse(data) {
        Ok(parsed) => {
            assert_eq!(parsed.to_string().as_bytes(), data, "a key has two spellings");
            let namespace_key = crate::hash::NamespaceKey::derive(b"", parsed.namespace, b"");
            assert_eq!(hashed, Ok(namespace_key.hash(parsed.at, parsed.block_hash.as_bytes())));
        }
        Err(error) => assert_eq!(hashed, Err(error)),
    }
}
