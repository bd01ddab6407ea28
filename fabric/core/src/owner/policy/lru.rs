//! Least recently used.

use super::{coldest, Departure, List, Nodes, Policy};
use crate::Fingerprint;

/// One list, hottest first.
#[derive(Debug, Default)]
pub(super) struct Lru {
    list: List,
}

impl Policy for Lru {
    fn set_room(&mut self, _objects: u32) {}

    fn insert(&mut self, nodes: &mut Nodes, entry: u32, _fingerprint: Fingerprint, _parent: Option<u32>) {
        self.list.push_head(nodes, entry);
    }

    fn touch(&mut self, nodes: &mut Nodes, entry: u32, _parent: Option<u32>) {
        self.list.remove(nodes, entry);
        self.list.push_head(nodes, entry);
    }

    fn remove(&mut self, nodes: &mut Nodes, entry: u32, _fingerprint: Fingerprint, _departure: Departure) {
        self.list.remove(nodes, entry);
    }

    fn victim(&mut self, nodes: &Nodes, refused: &dyn Fn(u32) -> bool) -> Option<u32> {
        coldest(&self.list, nodes, refused)
    }

    fn len(&self) -> u32 {
        self.list.len()
    }
}
