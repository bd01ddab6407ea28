//! Which block each read in flight belongs to.

use std::collections::HashMap;

#[derive(Default)]
pub(crate) struct Reads(HashMap<u64, (u64, u32)>);

impl Reads {
    pub(crate) fn insert(&mut self, read: u64, load: u64, block: u32) {
        self.0.insert(read, (load, block));
    }

    pub(crate) fn remove(&mut self, read: u64) -> Option<(u64, u32)> {
        self.0.remove(&read)
    }
}
