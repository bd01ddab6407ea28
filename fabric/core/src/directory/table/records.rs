//! Where the table's entries lie: fixed-size chunks that are never moved, with a list of free places.

use super::index::{RecordIndex, NONE};

/// Records of one chunk: 640 KiB are taken at a time, and no copy is ever made to grow.
pub(super) const CHUNK_RECORDS: usize = 1 << 14;
/// Memory of one chunk, bytes.
pub(super) const CHUNK_BYTES: u64 = (CHUNK_RECORDS * (size_of::<Record>() + size_of::<u64>())) as u64;

const FIELD_BITS: u32 = 24;
const FIELD_MAX: u64 = (1 << FIELD_BITS) - 1;

/// Source, namespace and tier of an entry in one word; zero for a free place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Owner(u64);

impl Owner {
    const FREE: Self = Self(0);
    const USED: u64 = 1 << 63;

    pub(super) fn new(source: u32, ns: u32, tier: u8) -> Self {
        Self(
            Self::USED
                | (u64::from(tier) & 0x7f) << 48
                | (u64::from(ns) & FIELD_MAX) << FIELD_BITS
                | u64::from(source) & FIELD_MAX,
        )
    }

    pub(super) fn is_used(self) -> bool {
        self.0 & Self::USED != 0
    }

    #[allow(clippy::cast_possible_truncation)] // Fields of 24 and 7 bits.
    pub(super) fn source(self) -> u32 {
        (self.0 & FIELD_MAX) as u32
    }

    #[allow(clippy::cast_possible_truncation)]
    pub(super) fn ns(self) -> u32 {
        (self.0 >> FIELD_BITS & FIELD_MAX) as u32
    }

    #[allow(clippy::cast_possible_truncation)]
    pub(super) fn tier(self) -> u8 {
        (self.0 >> 48) as u8 & 0x7f
    }
}

/// What a LOOKUP needs of an entry: half a cache line, and never across two.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct Record {
    pub(super) fingerprint: [u64; 2],
    pub(super) owner: Owner,
    pub(super) slot: u32,
    /// Next replica of the key, or next free place.
    pub(super) next: RecordIndex,
}

const _: () = assert!(size_of::<Record>() == 32);

#[derive(Debug)]
struct Chunk {
    records: Vec<Record>,
    generations: Vec<u64>,
}

/// All entries. Places are reused, chunks are not given back: a directory that was full once will be again.
#[derive(Debug)]
pub(super) struct Records {
    chunks: Vec<Chunk>,
    free: RecordIndex,
    used: usize,
}

impl Records {
    pub(super) fn new() -> Self {
        Self { chunks: Vec::new(), free: NONE, used: 0 }
    }

    /// Entries.
    pub(super) fn used(&self) -> usize {
        self.used
    }

    /// Memory, bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.chunks.len() as u64 * CHUNK_BYTES
    }

    /// Numbers below this one have been used.
    pub(super) fn end(&self) -> RecordIndex {
        let last = self.chunks.last().map_or(0, |chunk| chunk.records.len());
        let count = self.chunks.len().saturating_sub(1) * CHUNK_RECORDS + last;
        RecordIndex::try_from(count).unwrap_or(NONE)
    }

    /// Whether the next entry needs another chunk.
    pub(super) fn needs_chunk(&self) -> bool {
        self.free == NONE && self.chunks.last().is_none_or(|chunk| chunk.records.len() == CHUNK_RECORDS)
    }

    /// Puts an entry into a free place; `None` when the numbers are used up. May allocate a chunk.
    pub(super) fn insert(&mut self, record: Record, generation: u64) -> Option<RecordIndex> {
        if self.free != NONE {
            let at = self.free;
            self.free = self.get(at)?.next;
            *self.get_mut(at)? = record;
            self.set_generation(at, generation);
            self.used += 1;
            return Some(at);
        }
        let at = self.end();
        if at == NONE {
            return None;
        }
        if self.needs_chunk() {
            self.chunks.push(Chunk {
                records: Vec::with_capacity(CHUNK_RECORDS),
                generations: Vec::with_capacity(CHUNK_RECORDS),
            });
        }
        let chunk = self.chunks.last_mut()?;
        chunk.records.push(record);
        chunk.generations.push(generation);
        self.used += 1;
        Some(at)
    }

    /// Frees a place.
    pub(super) fn remove(&mut self, at: RecordIndex) {
        let free = self.free;
        if let Some(record) = self.get_mut(at) {
            record.owner = Owner::FREE;
            record.next = free;
            self.free = at;
            self.used -= 1;
        }
    }

    #[inline]
    pub(super) fn get(&self, at: RecordIndex) -> Option<&Record> {
        self.chunks.get(at as usize / CHUNK_RECORDS)?.records.get(at as usize % CHUNK_RECORDS)
    }

    pub(super) fn get_mut(&mut self, at: RecordIndex) -> Option<&mut Record> {
        self.chunks.get_mut(at as usize / CHUNK_RECORDS)?.records.get_mut(at as usize % CHUNK_RECORDS)
    }

    #[inline]
    pub(super) fn generation(&self, at: RecordIndex) -> u64 {
        let chunk = self.chunks.get(at as usize / CHUNK_RECORDS);
        chunk.and_then(|chunk| chunk.generations.get(at as usize % CHUNK_RECORDS)).copied().unwrap_or(0)
    }

    pub(super) fn set_generation(&mut self, at: RecordIndex, generation: u64) {
        let chunk = self.chunks.get_mut(at as usize / CHUNK_RECORDS);
        if let Some(place) = chunk.and_then(|chunk| chunk.generations.get_mut(at as usize % CHUNK_RECORDS)) {
            *place = generation;
        }
    }
}
