//! The hash index: open addressing over 8-byte slots, in segments that grow one at a time.
//!
//! A key's hash chooses a segment (10 bits) and a home in it (the next 32 bits, scaled to the segment's size, so sizes
//! need not be powers of two). A slot holds those 32 bits and the number of a record. Within a segment the slots are
//! sorted by these bits (linear probing with ordered insertion), which has three uses: a search for an absent key stops
//! early even at high load, growing is one sequential copy, and removal needs no tombstones.
//!
//! A segment grows by an eighth when it is seven eighths full. So the load stays between 0.77 and 0.875, and no growth
//! ever takes more than a thousandth of the index at once.

/// Bits of the hash that choose the segment.
const SEGMENT_BITS: u32 = 10;
/// Number of segments. Each is small enough to be rebuilt in well under a millisecond at 100 M keys.
const SEGMENTS: usize = 1 << SEGMENT_BITS;
/// Slots beyond the last home, so that probing never wraps around.
const TAIL: usize = 32;
/// Homes of a segment's first allocation.
const HOMES_MIN: usize = 16;
/// Longest way from home. At the highest load the longest ways are near 200; keys beyond this limit share their hash
/// bits with many others, which happens to nobody who does not know the seed.
const DISPLACEMENT_MAX: usize = 4096;

/// Number of a record, as stored in a slot.
pub(super) type RecordIndex = u32;
/// "No record" where a record's number is expected; also the reason why a slot of zero is empty: numbers are stored
/// plus one.
pub(super) const NONE: RecordIndex = u32::MAX;

/// Where a key's hash points: computed once per key.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Home {
    segment: u16,
    bits: u32,
}

impl Home {
    #[allow(clippy::cast_possible_truncation)] // Each part is cut out of the hash on purpose.
    pub(super) const fn of(hash: u64) -> Self {
        Self { segment: (hash >> (64 - SEGMENT_BITS)) as u16, bits: (hash >> 16) as u32 }
    }
}

/// A position in the index, valid until the index changes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Cursor {
    slot: usize,
}

/// Why a key could not be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IndexFull {
    /// The segment must grow, and that would exceed the limit.
    Memory,
    /// Too many keys share their hash bits.
    Collisions,
}

#[derive(Debug, Default)]
struct Segment {
    /// `homes + TAIL` slots; none before the first key.
    slots: Vec<u64>,
    homes: usize,
    used: usize,
}

#[allow(clippy::cast_possible_truncation)] // The upper half of a u64.
const fn bits_of(slot: u64) -> u32 {
    (slot >> 32) as u32
}

#[allow(clippy::cast_possible_truncation)] // The lower half of a u64, which is not zero in a used slot.
const fn record_of(slot: u64) -> RecordIndex {
    (slot as u32).wrapping_sub(1)
}

fn slot_of(bits: u32, record: RecordIndex) -> u64 {
    u64::from(bits) << 32 | u64::from(record.wrapping_add(1))
}

fn home_of(bits: u32, homes: usize) -> usize {
    // Scales 32 bits to 0..homes; the product fits, because a segment has far fewer than 2^32 homes.
    ((u64::from(bits) * homes as u64) >> 32) as usize
}

impl Segment {
    fn at(&self, slot: usize) -> u64 {
        self.slots.get(slot).copied().unwrap_or(0)
    }

    fn grown(homes: usize) -> usize {
        (homes + homes / 8 + 1).max(HOMES_MIN)
    }

    fn is_full(&self) -> bool {
        (self.used + 1) * 8 > self.homes * 7
    }

    /// Whether a key fits at all: beyond this load, ways from home grow out of bounds.
    fn has_room(&self) -> bool {
        (self.used + 1) * 32 <= self.homes * 31
    }

    /// Rebuilds the segment with `homes` homes; false, and unchanged, if its end overflows.
    fn rebuild(&mut self, homes: usize) -> bool {
        let mut slots = vec![0; homes + TAIL];
        let mut free = 0;
        for &slot in self.slots.iter().filter(|slot| **slot != 0) {
            let at = home_of(bits_of(slot), homes).max(free);
            match slots.get_mut(at) {
                Some(place) => *place = slot,
                None => return false,
            }
            free = at + 1;
        }
        self.slots = slots;
        self.homes = homes;
        true
    }

    /// Where a key with these bits belongs: after its equals. `None` if it would lie too far from home.
    fn place_of(&self, bits: u32) -> Option<usize> {
        let home = home_of(bits, self.homes);
        let mut at = home;
        while self.at(at) != 0 && bits_of(self.at(at)) <= bits {
            at += 1;
        }
        (at - home <= DISPLACEMENT_MAX).then_some(at)
    }

    /// Adds a slot; false if the segment must grow first.
    fn insert(&mut self, at: usize, slot: u64) -> bool {
        let mut end = at;
        while self.at(end) != 0 {
            end += 1;
        }
        if end >= self.slots.len() {
            return false;
        }
        self.slots.copy_within(at..end, at + 1);
        if let Some(place) = self.slots.get_mut(at) {
            *place = slot;
        }
        self.used += 1;
        true
    }

    fn remove(&mut self, at: usize) {
        let mut end = at + 1;
        while self.at(end) != 0 && home_of(bits_of(self.at(end)), self.homes) < end {
            end += 1;
        }
        self.slots.copy_within(at + 1..end, at);
        if let Some(place) = self.slots.get_mut(end - 1) {
            *place = 0;
        }
        self.used -= 1;
    }
}

/// The index. It knows hashes and record numbers, not keys.
#[derive(Debug)]
pub(super) struct Index {
    segments: Vec<Segment>,
    slots: usize,
    homes: usize,
    keys: usize,
}

impl Index {
    pub(super) fn new() -> Self {
        let mut segments = Vec::new();
        segments.resize_with(SEGMENTS, Segment::default);
        Self { segments, slots: 0, homes: 0, keys: 0 }
    }

    /// Memory, bytes.
    pub(super) fn bytes(&self) -> u64 {
        (self.slots * size_of::<u64>() + SEGMENTS * size_of::<Segment>()) as u64
    }

    /// Keys in the index.
    pub(super) fn keys(&self) -> usize {
        self.keys
    }

    /// Keys for each home.
    #[allow(clippy::cast_precision_loss)] // A ratio for people.
    pub(super) fn load(&self) -> f64 {
        if self.homes == 0 {
            0.0
        } else {
            self.keys as f64 / self.homes as f64
        }
    }

    fn segment(&self, home: Home) -> Option<&Segment> {
        self.segments.get(usize::from(home.segment))
    }

    /// The slot that the key's search begins with. Loading it early lets the misses of many keys overlap.
    #[inline]
    pub(super) fn first(&self, home: Home) -> (Cursor, u64) {
        match self.segment(home) {
            Some(segment) => {
                let slot = home_of(home.bits, segment.homes);
                (Cursor { slot }, segment.at(slot))
            }
            None => (Cursor::default(), 0),
        }
    }

    /// The first record whose hash bits equal the key's, from the slot that [`Index::first`] gave.
    #[inline]
    pub(super) fn find_from(&self, home: Home, mut cursor: Cursor, mut slot: u64) -> (Cursor, RecordIndex) {
        let Some(segment) = self.segment(home) else { return (cursor, NONE) };
        while slot != 0 && bits_of(slot) < home.bits {
            cursor.slot += 1;
            slot = segment.at(cursor.slot);
        }
        if slot != 0 && bits_of(slot) == home.bits {
            (cursor, record_of(slot))
        } else {
            (cursor, NONE)
        }
    }

    /// The first record whose hash bits equal the key's.
    pub(super) fn find(&self, home: Home) -> (Cursor, RecordIndex) {
        let (cursor, slot) = self.first(home);
        self.find_from(home, cursor, slot)
    }

    /// The next such record after the one at `cursor`.
    pub(super) fn find_next(&self, home: Home, mut cursor: Cursor) -> (Cursor, RecordIndex) {
        cursor.slot += 1;
        let slot = self.segment(home).map_or(0, |segment| segment.at(cursor.slot));
        if slot != 0 && bits_of(slot) == home.bits {
            (cursor, record_of(slot))
        } else {
            (cursor, NONE)
        }
    }

    /// Adds a record. `bytes_left` is how much the index may grow.
    pub(super) fn insert(
        &mut self,
        home: Home,
        record: RecordIndex,
        bytes_left: u64,
    ) -> Result<(), IndexFull> {
        let Some(segment) = self.segments.get_mut(usize::from(home.segment)) else {
            return Err(IndexFull::Collisions);
        };
        let (slots_before, homes_before) = (segment.slots.len(), segment.homes);
        let slots_max = slots_before.saturating_add(usize::try_from(bytes_left / 8).unwrap_or(usize::MAX));
        let mut homes = segment.homes;
        if segment.is_full() {
            homes = Segment::grown(homes);
            // Without memory to grow, probing gets slower before keys are refused.
            if homes + TAIL > slots_max && segment.has_room() {
                homes = segment.homes;
            }
        }
        let added = loop {
            if homes != segment.homes {
                if homes + TAIL > slots_max {
                    break Err(IndexFull::Memory);
                }
                if !segment.rebuild(homes) {
                    // The end overflows even so. A sparse segment overflows only if its keys collide.
                    if segment.used * 2 < homes {
                        break Err(IndexFull::Collisions);
                    }
                    homes = Segment::grown(homes);
                    continue;
                }
            }
            let Some(at) = segment.place_of(home.bits) else { break Err(IndexFull::Collisions) };
            if segment.insert(at, slot_of(home.bits, record)) {
                break Ok(());
            }
            if segment.used * 2 < segment.homes {
                break Err(IndexFull::Collisions);
            }
            homes = Segment::grown(homes);
        };
        self.slots += segment.slots.len() - slots_before;
        self.homes += segment.homes - homes_before;
        self.keys += usize::from(added.is_ok());
        added
    }

    /// Makes the slot at `cursor` name another record.
    pub(super) fn replace(&mut self, home: Home, cursor: Cursor, record: RecordIndex) {
        let segment = self.segments.get_mut(usize::from(home.segment));
        if let Some(slot) = segment.and_then(|segment| segment.slots.get_mut(cursor.slot)) {
            *slot = slot_of(home.bits, record);
        }
    }

    /// Removes the slot at `cursor`. A segment that is less than three eighths full gives memory back.
    pub(super) fn remove(&mut self, home: Home, cursor: Cursor) {
        let Some(segment) = self.segments.get_mut(usize::from(home.segment)) else { return };
        segment.remove(cursor.slot);
        self.keys -= 1;
        if segment.homes > HOMES_MIN && segment.used * 8 < segment.homes * 3 {
            let (slots, homes) = (segment.slots.len(), segment.homes);
            // Twice the keys: far from both limits, so that neither growing nor shrinking follows soon.
            if segment.rebuild((segment.used * 3 / 2).max(HOMES_MIN)) {
                self.slots = self.slots - slots + segment.slots.len();
                self.homes = self.homes - homes + segment.homes;
            }
        }
    }
}
