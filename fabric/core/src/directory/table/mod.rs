//! The directory's table: fingerprint -> replicas (design 1.9, 3.1).
//!
//! Two parts. The index is open addressing over 8-byte slots and grows segment by segment; the entries lie in chunks
//! that never move. An entry is 40 bytes (fingerprint, source, namespace, tier, slot, next, generation), its index slot
//! 8 bytes at a load of 0.77 or more: about 50 bytes per key with its first replica, whatever the number of keys.
//! Further replicas of a key are chained, 40 bytes each.
//!
//! The table knows no ranks: an entry names a *source* and a *namespace instance*, numbers that the service retires to
//! drop everything that was announced under them. Such entries are left out of answers at once and swept later.

mod index;
mod records;

#[cfg(test)]
mod tests;

use smallvec::SmallVec;
use thiserror::Error;

use self::index::{Cursor, Home, Index, IndexFull, RecordIndex, NONE};
use self::records::{Owner, Record, CHUNK_BYTES};
use crate::limits::REPLICAS_PER_KEY_MAX;
use crate::{Fingerprint, Generation, SlotId};

/// Sources and namespace instances are numbered below this: an entry has 24 bits for each.
pub const NUMBER_MAX: u32 = 1 << 24;
/// Largest tier that an entry can hold.
pub const TIER_MAX: u8 = 0x7f;

/// Keys that are probed together: enough to overlap their cache misses, few enough to stay in the first-level cache.
const GROUP: usize = 32;

/// Where a replica is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Source: one announcement of one rank; below [`NUMBER_MAX`].
    pub source: u32,
    /// Namespace instance: one epoch of one namespace; below [`NUMBER_MAX`].
    pub ns: u32,
    /// Slot at the owner.
    pub slot: SlotId,
    /// Generation.
    pub generation: Generation,
    /// Storage tier, at most [`TIER_MAX`].
    pub tier: u8,
}

/// The replicas of one key.
pub type Places = SmallVec<[Place; 4]>;

/// What a put did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutOutcome {
    /// A new replica.
    Inserted,
    /// The rank's replica was replaced by a later generation, or announced again.
    Updated,
    /// The rank offers the same or a later generation already.
    Stale,
}

/// Why a put was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PutRefused {
    /// The table may not grow any further.
    #[error("the directory's memory is full")]
    Memory,
    /// Enough ranks offer the key.
    #[error("the key has as many replicas as a directory keeps")]
    Crowded,
    /// Too many keys share their hash bits.
    #[error("too many keys share their hash")]
    Collisions,
}

impl PutRefused {
    /// Whether the same put may succeed later without any change.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        !matches!(self, Self::Collisions)
    }

    /// Whether the cause is a shortage of this table.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::Memory)
    }
}

/// How to build a table.
#[derive(Clone, Copy, Debug)]
pub struct TableConfig {
    /// Random numbers that nobody outside knows: peers choose fingerprints, but must not choose where they land.
    pub seed: [u64; 2],
    /// Most memory, bytes.
    pub bytes_max: u64,
}

/// The table.
#[derive(Debug)]
pub struct Table {
    index: Index,
    records: records::Records,
    seed: [u64; 2],
    bytes_max: u64,
    sweep_at: RecordIndex,
}

fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    #[allow(clippy::cast_possible_truncation)] // Both halves are used.
    {
        (product >> 64) as u64 ^ product as u64
    }
}

impl Table {
    /// An empty table.
    #[must_use]
    pub fn new(config: TableConfig) -> Self {
        Self {
            index: Index::new(),
            records: records::Records::new(),
            seed: config.seed,
            bytes_max: config.bytes_max,
            sweep_at: 0,
        }
    }

    /// Keys.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.index.keys()
    }

    /// Replicas of all keys.
    #[must_use]
    pub fn replicas(&self) -> usize {
        self.records.used()
    }

    /// Memory, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.index.bytes() + self.records.bytes()
    }

    /// Most memory, bytes.
    #[must_use]
    pub fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Keys for each home of the index.
    #[must_use]
    pub fn load(&self) -> f64 {
        self.index.load()
    }

    #[inline]
    fn home(&self, fingerprint: [u64; 2]) -> Home {
        let first = fold(fingerprint[0] ^ self.seed[0], fingerprint[1] ^ self.seed[1]);
        Home::of(fold(first ^ self.seed[1].rotate_left(32), 0x9e37_79b9_7f4a_7c15))
    }

    /// Loads what [`Table::put`] and [`Table::remove`] will need for these keys, so that their cache misses overlap.
    /// Returns a number that depends on all that was loaded; nobody needs it.
    #[must_use]
    pub fn warm(&self, fingerprints: impl Iterator<Item = Fingerprint>) -> u64 {
        let mut homes = SmallVec::<[(Home, Cursor, u64); GROUP]>::new();
        for fingerprint in fingerprints.take(GROUP) {
            let home = self.home(fingerprint.0);
            let (cursor, slot) = self.index.first(home);
            homes.push((home, cursor, slot));
        }
        homes.iter().fold(0, |all, &(home, cursor, slot)| {
            let (_, record) = self.index.find_from(home, cursor, slot);
            all ^ self.records.get(record).map_or(0, |record| record.fingerprint[0])
        })
    }

    /// The head of a key's chain.
    fn head(&self, home: Home, fingerprint: [u64; 2]) -> Option<(Cursor, RecordIndex)> {
        let (mut cursor, mut at) = self.index.find(home);
        while at != NONE {
            if self.records.get(at)?.fingerprint == fingerprint {
                return Some((cursor, at));
            }
            (cursor, at) = self.index.find_next(home, cursor);
        }
        None
    }

    fn place(&self, at: RecordIndex, record: &Record) -> Place {
        Place {
            source: record.owner.source(),
            ns: record.owner.ns(),
            slot: SlotId(record.slot),
            generation: Generation(self.records.generation(at)),
            tier: record.owner.tier(),
        }
    }

    /// The replicas of a key, in no particular order.
    #[must_use]
    pub fn get(&self, fingerprint: Fingerprint) -> Places {
        let mut places = Places::new();
        if let Some((_, head)) = self.head(self.home(fingerprint.0), fingerprint.0) {
            self.each_replica(head, |_, place| {
                places.push(place);
                true
            });
        }
        places
    }

    /// Calls `f` for the replicas in a chain until it returns false.
    fn each_replica(&self, head: RecordIndex, mut f: impl FnMut(RecordIndex, Place) -> bool) {
        let mut at = head;
        while let Some(record) = self.records.get(at) {
            if !f(at, self.place(at, record)) {
                return;
            }
            at = record.next;
        }
    }

    /// Takes a publication. `is_same_rank` says of a source whether it belongs to the rank that publishes (it has one
    /// replica of a key at most); `is_replaceable` says of a replica
    /// whether it is invisible to everybody and for ever.
    ///
    /// A replica of the same source gives way to a larger generation only; one of an earlier source of the same rank
    /// also to an equal one, which is the same publication announced again.
    ///
    /// # Errors
    /// [`PutRefused`]; the table is unchanged.
    pub fn put(
        &mut self,
        fingerprint: Fingerprint,
        place: Place,
        is_same_rank: impl Fn(u32) -> bool,
        is_replaceable: impl Fn(&Place) -> bool,
    ) -> Result<PutOutcome, PutRefused> {
        let home = self.home(fingerprint.0);
        let Some((_, head)) = self.head(home, fingerprint.0) else {
            return self.insert_key(home, fingerprint, place);
        };
        let (mut count, mut own, mut replaceable) = (0, None, None);
        self.each_replica(head, |at, old| {
            count += 1;
            if is_same_rank(old.source) {
                own = Some((at, old));
            } else if is_replaceable(&old) {
                replaceable = Some(at);
            }
            own.is_none()
        });
        if let Some((at, old)) = own {
            let again = old.source != place.source && old.generation == place.generation;
            if place.generation > old.generation || again {
                self.overwrite(at, place);
                return Ok(PutOutcome::Updated);
            }
            return Ok(PutOutcome::Stale);
        }
        if let Some(at) = replaceable {
            self.overwrite(at, place);
            return Ok(PutOutcome::Inserted);
        }
        if count >= REPLICAS_PER_KEY_MAX {
            return Err(PutRefused::Crowded);
        }
        self.insert_replica(head, fingerprint, place)
    }

    fn overwrite(&mut self, at: RecordIndex, place: Place) {
        if let Some(record) = self.records.get_mut(at) {
            record.owner = Owner::new(place.source, place.ns, place.tier);
            record.slot = place.slot.0;
        }
        self.records.set_generation(at, place.generation.0);
    }

    fn insert_record(
        &mut self,
        fingerprint: Fingerprint,
        place: Place,
        next: RecordIndex,
    ) -> Result<RecordIndex, PutRefused> {
        if self.records.needs_chunk() && self.bytes() + CHUNK_BYTES > self.bytes_max {
            return Err(PutRefused::Memory);
        }
        let owner = Owner::new(place.source, place.ns, place.tier);
        let record = Record { fingerprint: fingerprint.0, owner, slot: place.slot.0, next };
        self.records.insert(record, place.generation.0).ok_or(PutRefused::Memory)
    }

    fn insert_key(
        &mut self,
        home: Home,
        fingerprint: Fingerprint,
        place: Place,
    ) -> Result<PutOutcome, PutRefused> {
        let at = self.insert_record(fingerprint, place, NONE)?;
        let bytes_left = self.bytes_max.saturating_sub(self.bytes());
        match self.index.insert(home, at, bytes_left) {
            Ok(()) => Ok(PutOutcome::Inserted),
            Err(full) => {
                self.records.remove(at);
                Err(match full {
                    IndexFull::Memory => PutRefused::Memory,
                    IndexFull::Collisions => PutRefused::Collisions,
                })
            }
        }
    }

    /// Chains a replica behind the head, so that the index need not change.
    fn insert_replica(
        &mut self,
        head: RecordIndex,
        fingerprint: Fingerprint,
        place: Place,
    ) -> Result<PutOutcome, PutRefused> {
        let next = self.records.get(head).map_or(NONE, |record| record.next);
        let at = self.insert_record(fingerprint, place, next)?;
        if let Some(record) = self.records.get_mut(head) {
            record.next = at;
        }
        Ok(PutOutcome::Inserted)
    }

    /// Removes the replica of the rank whose sources `is_same_rank` knows, if it has this very generation.
    pub fn remove(
        &mut self,
        fingerprint: Fingerprint,
        generation: Generation,
        is_same_rank: impl Fn(u32) -> bool,
    ) -> bool {
        let home = self.home(fingerprint.0);
        let Some((cursor, head)) = self.head(home, fingerprint.0) else { return false };
        let mut found = None;
        self.each_replica(head, |at, place| {
            if is_same_rank(place.source) && place.generation == generation {
                found = Some(at);
            }
            found.is_none()
        });
        match found {
            Some(at) => {
                self.unlink(home, cursor, head, at);
                true
            }
            None => false,
        }
    }

    fn unlink(&mut self, home: Home, cursor: Cursor, head: RecordIndex, at: RecordIndex) {
        let next = self.records.get(at).map_or(NONE, |record| record.next);
        if at == head {
            if next == NONE {
                self.index.remove(home, cursor);
            } else {
                self.index.replace(home, cursor, next);
            }
        } else {
            let mut before = head;
            while let Some(record) = self.records.get_mut(before) {
                if record.next == at {
                    record.next = next;
                    break;
                }
                before = record.next;
            }
        }
        self.records.remove(at);
    }

    /// Probes a group of keys: first all homes, then all records, so that cache misses overlap.
    #[inline]
    fn probe_group(
        &self,
        keys: &[u8],
        heads: &mut [RecordIndex; GROUP],
        homes: &mut [(Home, Cursor); GROUP],
    ) -> usize {
        let mut slots = [0u64; GROUP];
        let mut count = 0;
        for (key, (home, slot)) in keys.chunks_exact(16).zip(homes.iter_mut().zip(&mut slots)) {
            home.0 = self.home(fingerprint_of(key));
            (home.1, *slot) = self.index.first(home.0);
            count += 1;
        }
        for ((home, slot), head) in homes.iter_mut().zip(&slots).zip(heads.iter_mut()).take(count) {
            (home.1, *head) = self.index.find_from(home.0, home.1, *slot);
        }
        let mut firsts = 0;
        for head in heads.iter().take(count) {
            firsts ^= self.records.get(*head).map_or(0, |record| record.fingerprint[0]);
        }
        std::hint::black_box(firsts);
        for ((key, home), head) in keys.chunks_exact(16).zip(homes.iter()).zip(heads.iter_mut()) {
            let wanted = fingerprint_of(key);
            let mut cursor = home.1;
            while self.records.get(*head).is_some_and(|record| record.fingerprint != wanted) {
                (cursor, *head) = self.index.find_next(home.0, cursor);
            }
        }
        count
    }

    /// Sets bit `i` of `bits` for each key `i` of which some replica is visible. `keys` are fingerprints of 16 bytes,
    /// `is_visible` is asked with source and namespace instance. No side effects.
    pub fn lookup(&self, keys: &[u8], bits: &mut [u8], is_visible: impl Fn(u32, u32) -> bool) {
        let mut heads = [NONE; GROUP];
        let mut homes = [(Home::default(), Cursor::default()); GROUP];
        for (group, bytes) in keys.chunks(16 * GROUP).zip(bits.chunks_mut(GROUP / 8)) {
            let count = self.probe_group(group, &mut heads, &mut homes);
            let mut found = 0u32;
            for (i, head) in heads.iter().enumerate().take(count) {
                let mut at = *head;
                while let Some(record) = self.records.get(at) {
                    if is_visible(record.owner.source(), record.owner.ns()) {
                        found |= 1 << i;
                        break;
                    }
                    at = record.next;
                }
            }
            for (byte, value) in bytes.iter_mut().zip(found.to_le_bytes()) {
                *byte |= value;
            }
        }
    }

    /// Calls `f` with all replicas of each key, in the order of the keys. No side effects.
    pub fn locate(&self, keys: &[u8], mut f: impl FnMut(Fingerprint, &[Place])) {
        let mut heads = [NONE; GROUP];
        let mut homes = [(Home::default(), Cursor::default()); GROUP];
        let mut places = Places::new();
        for group in keys.chunks(16 * GROUP) {
            let count = self.probe_group(group, &mut heads, &mut homes);
            // They lie apart from what was probed: their misses overlap too.
            let generations =
                heads.iter().take(count).fold(0, |all, head| all ^ self.records.generation(*head));
            std::hint::black_box(generations);
            for (key, head) in group.chunks_exact(16).zip(heads).take(count) {
                places.clear();
                self.each_replica(head, |_, place| {
                    places.push(place);
                    true
                });
                f(Fingerprint(fingerprint_of(key)), &places);
            }
        }
    }

    /// Looks at the next `limit` entries and removes those that `is_dead` names. Returns how many were removed, and
    /// whether the end was reached: then the next call begins anew.
    pub fn sweep(&mut self, limit: usize, is_dead: impl Fn(&Place) -> bool) -> (usize, bool) {
        let mut removed = 0;
        let end = self.records.end();
        let stop = self.sweep_at.saturating_add(RecordIndex::try_from(limit).unwrap_or(NONE)).min(end);
        for at in self.sweep_at..stop {
            let Some(record) = self.records.get(at) else { break };
            if !record.owner.is_used() || !is_dead(&self.place(at, record)) {
                continue;
            }
            let fingerprint = record.fingerprint;
            let home = self.home(fingerprint);
            if let Some((cursor, head)) = self.head(home, fingerprint) {
                self.unlink(home, cursor, head, at);
                removed += 1;
            }
        }
        let done = stop >= end;
        self.sweep_at = if done { 0 } else { stop };
        (removed, done)
    }
}

#[inline]
fn fingerprint_of(key: &[u8]) -> [u64; 2] {
    match key.first_chunk::<16>() {
        Some(bytes) => Fingerprint::from_bytes(*bytes).0,
        None => [0; 2],
    }
}
