//! Fixed-size records in one bytes field: decoding them costs one length check, however many there are.

use core::fmt;
use core::marker::PhantomData;
use std::borrow::Cow;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A value of fixed size on the wire.
pub trait FixedRecord: Copy {
    /// Size of one record, bytes.
    const BYTES: usize;
    /// Most records in one field; checked before anything is done with them.
    const COUNT_MAX: usize;
    /// Whether [`FixedRecord::is_valid`] must be asked for each record on decode.
    const VALIDATED: bool = false;

    /// Appends the record: exactly [`FixedRecord::BYTES`] bytes.
    fn write(&self, out: &mut Vec<u8>);

    /// The record in `bytes`, which holds at least [`FixedRecord::BYTES`] bytes. Total: any bytes give a record.
    fn read(bytes: &[u8]) -> Self;

    /// Whether `bytes` hold a record that a correct peer may send.
    fn is_valid(bytes: &[u8]) -> bool {
        let _ = bytes;
        true
    }
}

/// Reads little-endian integers from a record of known size; bytes that are not there read as zero.
pub(crate) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn take<const N: usize>(&mut self) -> [u8; N] {
        match self.0.split_first_chunk::<N>() {
            Some((head, rest)) => {
                self.0 = rest;
                *head
            }
            None => {
                self.0 = &[];
                [0; N]
            }
        }
    }

    pub(crate) fn u8(&mut self) -> u8 {
        u8::from_le_bytes(self.take())
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.take())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
}

/// Records back to back. Borrows the frame when decoded, owns its bytes when built.
pub struct Records<'a, R> {
    bytes: Cow<'a, [u8]>,
    record: PhantomData<fn() -> R>,
}

impl<'a, R: FixedRecord> Records<'a, R> {
    /// No records.
    #[must_use]
    pub fn new() -> Self {
        Self { bytes: Cow::Owned(Vec::new()), record: PhantomData }
    }

    /// No records, with room for `count` of them (at most [`FixedRecord::COUNT_MAX`]).
    #[must_use]
    pub fn with_capacity(count: usize) -> Self {
        let bytes = Vec::with_capacity(count.min(R::COUNT_MAX) * R::BYTES);
        Self { bytes: Cow::Owned(bytes), record: PhantomData }
    }

    /// The records that lie in `bytes`.
    ///
    /// # Errors
    /// [`RecordsError`] when the length is not a multiple of the record's size, or there are too many.
    pub fn from_bytes(bytes: impl Into<Cow<'a, [u8]>>) -> Result<Self, RecordsError> {
        let bytes = bytes.into();
        if bytes.len() % R::BYTES != 0 {
            return Err(RecordsError::Length);
        }
        if bytes.len() / R::BYTES > R::COUNT_MAX {
            return Err(RecordsError::Count);
        }
        if R::VALIDATED && !bytes.chunks_exact(R::BYTES).all(R::is_valid) {
            return Err(RecordsError::Invalid);
        }
        Ok(Self { bytes, record: PhantomData })
    }

    /// Number of records.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() / R::BYTES
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The records as bytes.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The record at `index`.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<R> {
        let start = index.checked_mul(R::BYTES)?;
        self.bytes.get(start..start.checked_add(R::BYTES)?).map(R::read)
    }

    /// The records in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = R> + '_ {
        self.bytes.chunks_exact(R::BYTES).map(R::read)
    }

    /// Appends a record. A field with more than [`FixedRecord::COUNT_MAX`] of them is refused when it is encoded.
    pub fn push(&mut self, record: R) {
        record.write(self.bytes.to_mut());
    }

    /// The same records, borrowing from this value.
    #[must_use]
    pub fn borrowed(&self) -> Records<'_, R> {
        Records { bytes: Cow::Borrowed(&self.bytes), record: PhantomData }
    }

    /// The same records, owning their bytes.
    #[must_use]
    pub fn into_owned(self) -> Records<'static, R> {
        Records { bytes: Cow::Owned(self.bytes.into_owned()), record: PhantomData }
    }
}

/// Why bytes are not a field of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordsError {
    /// The length is not a multiple of the record's size.
    #[error("the field's length is not a multiple of its record's size")]
    Length,
    /// More records than allowed.
    #[error("the field has more records than allowed")]
    Count,
    /// A record holds a value that no correct peer sends.
    #[error("a record of the field is not valid")]
    Invalid,
}

impl<R> Clone for Records<'_, R> {
    fn clone(&self) -> Self {
        Self { bytes: self.bytes.clone(), record: PhantomData }
    }
}

impl<R: FixedRecord> Default for Records<'_, R> {
    fn default() -> Self {
        Self::new()
    }
}

impl<R> PartialEq for Records<'_, R> {
    fn eq(&self, other: &Self) -> bool {
        self.bytes == other.bytes
    }
}

impl<R> Eq for Records<'_, R> {}

impl<R: FixedRecord> fmt::Debug for Records<'_, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} records", self.len())
    }
}

impl<R: FixedRecord> FromIterator<R> for Records<'_, R> {
    fn from_iter<I: IntoIterator<Item = R>>(records: I) -> Self {
        let records = records.into_iter();
        let mut all = Self::with_capacity(records.size_hint().0);
        for record in records {
            all.push(record);
        }
        all
    }
}

impl<R: FixedRecord> Serialize for Records<'_, R> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.len() > R::COUNT_MAX {
            return Err(serde::ser::Error::custom("too many records"));
        }
        serializer.serialize_bytes(&self.bytes)
    }
}

impl<'de: 'a, 'a, R: FixedRecord> Deserialize<'de> for Records<'a, R> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = deserializer.deserialize_bytes(BytesVisitor)?;
        Self::from_bytes(bytes).map_err(de::Error::custom)
    }
}

struct BytesVisitor;

impl<'de> Visitor<'de> for BytesVisitor {
    type Value = &'de [u8];

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes of the frame")
    }

    fn visit_borrowed_bytes<E: de::Error>(self, bytes: &'de [u8]) -> Result<Self::Value, E> {
        Ok(bytes)
    }
}

/// A byte of a [`Bitmap`] or of a list of small counts.
impl FixedRecord for u8 {
    const BYTES: usize = 1;
    const COUNT_MAX: usize = crate::limits::LOOKUP_KEYS_MAX;

    fn write(&self, out: &mut Vec<u8>) {
        out.push(*self);
    }

    fn read(bytes: &[u8]) -> Self {
        Fields::new(bytes).u8()
    }
}

/// One bit per key of a LOOKUP, in order: bit `i` is bit `i % 8` of byte `i / 8`.
#[derive(Clone, PartialEq, Eq)]
pub struct Bitmap<'a> {
    bits: u32,
    bytes: Cow<'a, [u8]>,
}

impl<'a> Bitmap<'a> {
    /// `bits` bits, all zero; at most [`crate::limits::LOOKUP_KEYS_MAX`].
    #[must_use]
    pub fn zeros(bits: usize) -> Bitmap<'static> {
        let bits = bits.min(crate::limits::LOOKUP_KEYS_MAX);
        #[allow(clippy::cast_possible_truncation)] // Bounded by the line above.
        Bitmap { bits: bits as u32, bytes: Cow::Owned(vec![0; bits.div_ceil(8)]) }
    }

    /// Number of bits.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bits as usize
    }

    /// Whether there are no bits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bits == 0
    }

    /// Bit `index`; false beyond the end.
    #[must_use]
    pub fn get(&self, index: usize) -> bool {
        index < self.len() && self.bytes.get(index / 8).is_some_and(|byte| byte >> (index % 8) & 1 == 1)
    }

    /// Sets bit `index`; nothing beyond the end.
    pub fn set(&mut self, index: usize) {
        if index < self.len() {
            if let Some(byte) = self.bytes.to_mut().get_mut(index / 8) {
                *byte |= 1 << (index % 8);
            }
        }
    }

    /// The bytes, as they travel.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes to write to; bits beyond [`Bitmap::len`] must stay zero.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.bytes.to_mut()
    }

    /// Number of ones.
    #[must_use]
    pub fn ones(&self) -> usize {
        self.bytes.iter().map(|byte| byte.count_ones() as usize).sum()
    }

    /// The bits in order.
    pub fn iter(&self) -> impl Iterator<Item = bool> + '_ {
        (0..self.len()).map(|index| self.get(index))
    }

    /// The same bits, owning their bytes.
    #[must_use]
    pub fn into_owned(self) -> Bitmap<'static> {
        Bitmap { bits: self.bits, bytes: Cow::Owned(self.bytes.into_owned()) }
    }
}

impl fmt::Debug for Bitmap<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bits", self.ones(), self.bits)
    }
}

impl Serialize for Bitmap<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let bytes = Records::<u8> { bytes: Cow::Borrowed(&self.bytes), record: PhantomData };
        (self.bits, bytes).serialize(serializer)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Bitmap<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let (bits, bytes) = <(u32, Records<'de, u8>)>::deserialize(deserializer)?;
        let count = bits as usize;
        if count > crate::limits::LOOKUP_KEYS_MAX || bytes.len() != count.div_ceil(8) {
            return Err(de::Error::custom("bitmap length"));
        }
        if count % 8 != 0 && bytes.bytes().last().is_some_and(|last| last >> (count % 8) != 0) {
            return Err(de::Error::custom("bits beyond the bitmap's end"));
        }
        Ok(Self { bits, bytes: bytes.bytes })
    }
}
