//! An engine's memory for the tests: areas of blocks whose pieces lie apart, with canaries between uses.

use kvfabric_memory::{Region, ScatterList};

use crate::payload::Shape;
use crate::random::mix;

/// Some areas, each with room for some blocks.
///
/// An area at rest holds a canary: a pattern that no block and no other canary has. The next load lands on it, so a load
/// that fails leaves no trace of earlier blocks that could be taken for right, and bytes that land in an area at rest
/// are seen.
#[derive(Debug)]
pub struct Arena {
    region: Region,
    shape: Shape,
    blocks: usize,
    canaries: Vec<Option<u64>>,
    nonce: u64,
    next: usize,
}

impl Arena {
    /// Allocates.
    #[must_use]
    pub fn new(shape: Shape, areas: usize, blocks: usize, seed: u64) -> Self {
        assert!(shape.object_bytes % (8 * shape.pieces) == 0, "the shape's pieces are whole words");
        let region = Region::allocate(areas * blocks * shape.object_bytes).expect("memory for the test");
        Self { region, shape, blocks, canaries: vec![None; areas], nonce: mix(seed), next: 0 }
    }

    /// The whole memory.
    #[must_use]
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Blocks in an area.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    fn area_bytes(&self) -> usize {
        self.blocks * self.shape.object_bytes
    }

    /// The pieces of a block: those of all blocks of an area alternate, as the layers of a model do.
    #[must_use]
    pub fn list(&self, area: usize, block: usize) -> ScatterList {
        assert!(block < self.blocks, "an area has {} blocks", self.blocks);
        let piece = self.shape.piece_bytes();
        let mut list = ScatterList::with_capacity(self.shape.pieces);
        for index in 0..self.shape.pieces {
            let offset = area * self.area_bytes() + (index * self.blocks + block) * piece;
            list.push(&self.region, offset, piece).expect("a piece lies in the region");
        }
        list
    }

    /// Takes an area for a load: checks that nobody touched it while it rested, and lays a new canary. Returns the area
    /// and the number of bytes that changed.
    pub fn take(&mut self) -> (usize, u64) {
        let area = self.next;
        self.next = (area + 1) % self.canaries.len();
        let broken = self.broken(area);
        self.lay(area);
        self.canaries[area] = None;
        (area, broken)
    }

    /// The load is final: the area rests from now on.
    pub fn rest(&mut self, area: usize) {
        self.lay(area);
    }

    fn lay(&mut self, area: usize) {
        self.nonce = mix(self.nonce);
        let bytes: Vec<u8> = self.pattern(self.nonce).flat_map(u64::to_le_bytes).collect();
        self.region.write(area * self.area_bytes(), &bytes).expect("an area lies in the region");
        self.canaries[area] = Some(self.nonce);
    }

    fn pattern(&self, nonce: u64) -> impl Iterator<Item = u64> {
        (0..self.area_bytes() as u64 / 8).map(move |at| mix(nonce ^ at.rotate_left(32)))
    }

    fn broken(&self, area: usize) -> u64 {
        let Some(nonce) = self.canaries[area] else { return 0 };
        let mut bytes = vec![0; self.area_bytes()];
        self.region.read(area * self.area_bytes(), &mut bytes).expect("an area lies in the region");
        let words = self.pattern(nonce).zip(bytes.chunks_exact(8));
        8 * words.filter(|(expected, found)| expected.to_le_bytes() != **found).count() as u64
    }

    /// Bytes that changed in areas at rest.
    #[must_use]
    pub fn broken_bytes(&self) -> u64 {
        (0..self.canaries.len()).map(|area| self.broken(area)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_touched_canary_is_seen() {
        let shape = Shape { object_bytes: 256, pieces: 4 };
        let mut arena = Arena::new(shape, 2, 3, 1);
        assert_eq!(arena.take(), (0, 0));
        arena.list(0, 1).write_object(&[7; 256]).unwrap();
        arena.rest(0);
        assert_eq!(arena.broken_bytes(), 0);
        arena.list(0, 2).part(64, 1).unwrap().write_object(&[7]).unwrap();
        assert_eq!(arena.broken_bytes(), 8);
        assert_eq!(arena.take(), (1, 0));
        assert_eq!(arena.take(), (0, 8));
        assert_eq!(arena.broken_bytes(), 0);
    }
}
