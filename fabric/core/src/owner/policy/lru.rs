//! Least recently used.

use super::{coldest, push_hot, Departure, List, Newcomer, Nodes, Policy};
use crate::Fingerprint;

/// One list, hottest first.
#[derive(Debug, Default)]
pub(super) struct Lru {
    list: List,
    room: u32,
}

impl Policy for Lru {
    fn set_room(&mut self, objects: u32) {
        self.room = objects;
    }

    fn insert(&mut self, nodes: &mut Nodes, newcomer: Newcomer) {
        push_hot(&mut self.list, nodes, newcomer.entry, newcomer.parent, self.room);
    }

    fn adopt(&mut self, _nodes: &mut Nodes, _parent: u32, _grandparent: Option<u32>) {}

    fn touch(&mut self, nodes: &mut Nodes, entry: u32, parent: Option<u32>) {
        self.list.remove(nodes, entry);
        push_hot(&mut self.list, nodes, entry, parent, self.room);
    }

    fn remove(&mut self, nodes: &mut Nodes, entry: u32, _fingerprint: Fingerprint, _departure: Departure) {
        self.list.remove(nodes, entry);
    }

    fn victim(&mut self, nodes: &Nodes, refused: &dyn Fn(u32) -> bool) -> Option<u32> {
        coldest(&self.list, nodes, refused).or(self.list.tail())
    }

    fn len(&self) -> u32 {
        self.list.len()
    }
}
