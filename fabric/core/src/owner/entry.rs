//! One record for each key that is resident, being filled or waiting for a slot, found by fingerprint.

use hashbrown::HashTable;

use super::list::{Link, Links, List, NIL};
use crate::hash::KeyHash;
use crate::{Fingerprint, Generation, NsEpoch, NsId, SlotId};

/// State of a key on this rank. The slot's state follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EntryState {
    /// The record is free.
    Vacant,
    /// Its puts wait for a slot.
    Waiting,
    /// Its first put is copied into the slot.
    Filling,
    /// Readers may read the slot.
    Published,
}

/// A key's record.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) key: KeyHash,
    pub(super) key_bytes: Box<[u8]>,
    /// Parent as the put named it.
    pub(super) parent: Option<Fingerprint>,
    /// The slot's current generation (valid while FILLING or PUBLISHED).
    pub(super) generation: Generation,
    /// The generation that the running fill writes; O2 publishes only while it is still `generation`.
    pub(super) filling: Generation,
    /// Puts of the key while it is not published: the filler first, then waiters, oldest first.
    pub(super) puts: List,
    pub(super) ns: NsId,
    pub(super) ns_epoch: NsEpoch,
    pub(super) slab: u32,
    pub(super) slot: SlotId,
    /// Record and serial of the parent that counts this entry among its children.
    pub(super) counted_by: (u32, u32),
    /// Entries that hold a slot and name this one as their parent.
    pub(super) children: u32,
    /// Tells this use of the record from earlier ones.
    pub(super) serial: u32,
    pub(super) state: EntryState,
}

/// What eviction policies keep for an entry; same index as the entry.
#[derive(Clone, Copy, Debug)]
pub(super) struct Node {
    pub(super) link: Link,
    /// The clock at the last insertion or touch.
    pub(super) tick: u64,
    /// The policy's class.
    pub(super) class: u8,
    /// The policy's class once the object has a child.
    pub(super) class_with_child: u8,
    /// Children it ever had while resident, saturating.
    pub(super) children_ever: u8,
}

impl Node {
    pub(super) const NEW: Self =
        Self { link: Link::NONE, tick: 0, class: 0, class_with_child: 0, children_ever: 0 };
}

/// The policy nodes of all entries, and the clock of insertions and touches by which policies measure age.
#[derive(Debug, Default)]
pub struct Nodes {
    nodes: Vec<Node>,
    pub(super) clock: u64,
}

impl Nodes {
    pub(super) fn get(&self, index: u32) -> &Node {
        &self.nodes[index as usize]
    }

    pub(super) fn get_mut(&mut self, index: u32) -> &mut Node {
        &mut self.nodes[index as usize]
    }

    /// Makes the node of an entry that was just inserted; indices grow by one at most.
    pub(super) fn reset(&mut self, index: u32) {
        match self.nodes.get_mut(index as usize) {
            Some(node) => *node = Node::NEW,
            None => self.nodes.push(Node::NEW),
        }
    }

    /// Insertions and touches since the node's last.
    pub(super) fn age(&self, index: u32) -> u64 {
        self.clock - self.get(index).tick
    }
}

impl Links for Nodes {
    fn link(&self, index: u32) -> Link {
        self.get(index).link
    }

    fn link_mut(&mut self, index: u32) -> &mut Link {
        &mut self.get_mut(index).link
    }
}

/// All entries.
#[derive(Debug, Default)]
pub(super) struct Entries {
    records: Vec<Entry>,
    vacant: Vec<u32>,
    by_fingerprint: HashTable<u32>,
}

/// Where a fingerprint lies in the table. Fingerprints are keyed hashes already; one multiplication spreads those of a
/// caller that numbers them by hand.
#[must_use]
pub(super) fn table_hash(fingerprint: Fingerprint) -> u64 {
    let mixed = fingerprint.0[0] ^ fingerprint.0[1].rotate_left(32);
    let product = mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}

impl Entries {
    pub(super) fn find(&self, fingerprint: Fingerprint) -> Option<u32> {
        self.by_fingerprint
            .find(table_hash(fingerprint), |&index| self.get(index).fingerprint() == fingerprint)
            .copied()
    }

    /// Number of records in use.
    #[cfg(any(test, debug_assertions))]
    pub(super) fn len(&self) -> usize {
        self.by_fingerprint.len()
    }

    /// Records ever used; indices are below it.
    pub(super) fn capacity(&self) -> u32 {
        u32::try_from(self.records.len()).unwrap_or(NIL)
    }

    pub(super) fn get(&self, index: u32) -> &Entry {
        &self.records[index as usize]
    }

    pub(super) fn get_mut(&mut self, index: u32) -> &mut Entry {
        &mut self.records[index as usize]
    }

    /// Adds an entry whose fingerprint is not present yet.
    pub(super) fn insert(&mut self, mut entry: Entry) -> u32 {
        let hash = table_hash(entry.fingerprint());
        let index = match self.vacant.pop() {
            Some(index) => {
                let record = &mut self.records[index as usize];
                entry.serial = record.serial.wrapping_add(1);
                *record = entry;
                index
            }
            None => {
                let index = self.capacity();
                self.records.push(entry);
                index
            }
        };
        let records = &self.records;
        self.by_fingerprint
            .insert_unique(hash, index, |&other| table_hash(records[other as usize].fingerprint()));
        index
    }

    /// Frees the record and gives its key bytes back.
    pub(super) fn remove(&mut self, index: u32) -> Box<[u8]> {
        let hash = table_hash(self.get(index).fingerprint());
        if let Ok(found) = self.by_fingerprint.find_entry(hash, |&other| other == index) {
            found.remove();
        }
        self.vacant.push(index);
        let record = self.get_mut(index);
        record.state = EntryState::Vacant;
        core::mem::take(&mut record.key_bytes)
    }

    /// Indices of records in use, in the order of their indices.
    pub(super) fn indices(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.capacity()).filter(|&index| self.get(index).state != EntryState::Vacant)
    }
}

impl Entry {
    pub(super) fn fingerprint(&self) -> Fingerprint {
        self.key.fingerprint()
    }
}
