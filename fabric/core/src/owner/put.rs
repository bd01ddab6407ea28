//! Puts in progress, found by their number.

use hashbrown::HashTable;

use super::list::{Link, Links, List, NIL};
use super::{PutError, PutId};
use crate::NsEpoch;

/// A put in progress. It is in its entry's list of puts.
#[derive(Debug)]
pub(super) struct PutRecord {
    pub(super) id: PutId,
    pub(super) entry: u32,
    pub(super) ns_epoch: NsEpoch,
    /// Why its running fill was asked to stop.
    pub(super) abort: Option<PutError>,
    link: Link,
}

/// All puts in progress.
#[derive(Debug, Default)]
pub(super) struct Puts {
    records: Vec<PutRecord>,
    vacant: Vec<u32>,
    by_id: HashTable<u32>,
}

impl Links for Puts {
    fn link(&self, index: u32) -> Link {
        self.records[index as usize].link
    }

    fn link_mut(&mut self, index: u32) -> &mut Link {
        &mut self.records[index as usize].link
    }
}

fn table_hash(id: PutId) -> u64 {
    let product = id.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    product ^ (product >> 32)
}

impl Puts {
    pub(super) fn find(&self, id: PutId) -> Option<u32> {
        self.by_id.find(table_hash(id), |&index| self.get(index).id == id).copied()
    }

    pub(super) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(super) fn get(&self, index: u32) -> &PutRecord {
        &self.records[index as usize]
    }

    pub(super) fn get_mut(&mut self, index: u32) -> &mut PutRecord {
        &mut self.records[index as usize]
    }

    /// Adds a put of `entry` at the end of the entry's list.
    pub(super) fn attach(&mut self, list: &mut List, id: PutId, entry: u32, ns_epoch: NsEpoch) {
        let record = PutRecord { id, entry, ns_epoch, abort: None, link: Link::NONE };
        let index = match self.vacant.pop() {
            Some(index) => {
                self.records[index as usize] = record;
                index
            }
            None => {
                let index = u32::try_from(self.records.len()).unwrap_or(NIL);
                self.records.push(record);
                index
            }
        };
        list.push_tail(self, index);
        let records = &self.records;
        self.by_id.insert_unique(table_hash(id), index, |&other| table_hash(records[other as usize].id));
    }

    /// Takes a put out of its entry's list and forgets it.
    pub(super) fn detach(&mut self, list: &mut List, index: u32) -> PutId {
        list.remove(self, index);
        let id = self.get(index).id;
        if let Ok(found) = self.by_id.find_entry(table_hash(id), |&other| other == index) {
            found.remove();
        }
        self.vacant.push(index);
        id
    }
}
