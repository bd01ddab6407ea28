//! What must hold between any two events; the property tests call it after each.

use super::entry::EntryState;
use super::machine::Owner;
use super::space::{ExtentState, SlotState};

impl Owner {
    /// Panics if the state contradicts itself. O(everything); not part of the release build.
    pub fn check_invariants(&self) {
        self.check_entries();
        self.check_extents();
        self.check_slabs();
    }

    fn check_entries(&self) {
        let (mut published, mut filling, mut waiting, mut puts) = (0u64, 0u64, 0u64, 0usize);
        let mut children = std::collections::BTreeMap::<u32, u32>::new();
        for at in self.entries.indices() {
            let entry = self.entries.get(at);
            assert_eq!(
                self.entries.find(entry.fingerprint()),
                Some(at),
                "an entry is found by its fingerprint"
            );
            let cell = self.space.slots.get(entry.slot.0 as usize);
            match entry.state {
                EntryState::Vacant => {}
                EntryState::Waiting => waiting += 1,
                EntryState::Filling => {
                    filling += 1;
                    assert_eq!(cell.map(|cell| (cell.state, cell.link)), Some((SlotState::Filling, at)));
                }
                EntryState::Published => {
                    published += 1;
                    assert_eq!(cell.map(|cell| (cell.state, cell.link)), Some((SlotState::Published, at)));
                }
            }
            assert_eq!(
                entry.puts.is_empty(),
                entry.state == EntryState::Published,
                "puts end at publication"
            );
            for put in entry.puts.iter(&self.puts) {
                assert_eq!(self.puts.get(put).entry, at);
                puts += 1;
            }
            let (parent, serial) = entry.counted_by;
            if parent != super::list::NIL && self.entries.get(parent).serial == serial {
                *children.entry(parent).or_default() += 1;
            }
        }
        for at in self.entries.indices() {
            let counted = children.get(&at).copied().unwrap_or(0);
            assert_eq!(self.entries.get(at).children, counted, "children are counted");
        }
        assert_eq!(puts, self.puts.len());
        let stats = self.stats();
        assert_eq!((published, filling, waiting), (stats.resident, stats.filling, stats.waiting));
        assert_eq!(published + filling + waiting, self.entries.len() as u64);
    }

    fn check_extents(&self) {
        let mut end = 0;
        for (index, place) in (0u32..).zip(&self.space.extents) {
            assert_eq!(place.offset, end, "extents follow each other");
            end += place.length_bytes;
            let record = place.record;
            let stride = super::space::stride_bytes(record.object_bytes.max(1));
            assert!(u64::from(record.slots) * stride <= place.length_bytes, "slots lie within their extent");
            let moving = matches!(place.state, ExtentState::Moving { .. });
            if !moving && !matches!(place.state, ExtentState::Assigned { .. }) {
                continue;
            }
            let (mut filling, mut ticks) = (0, 0);
            for slot in record.first_slot.0..record.first_slot.0 + record.slots {
                let cell = self.space.slots[slot as usize];
                assert_eq!(cell.extent, index);
                match cell.state {
                    SlotState::Filling => filling += 1,
                    SlotState::Published => ticks += self.nodes.get(cell.link).tick,
                    SlotState::Retired => assert!(moving),
                    SlotState::Free | SlotState::Quarantine => {}
                }
                assert!(!moving || matches!(cell.state, SlotState::Filling | SlotState::Retired));
            }
            assert_eq!((place.filling, place.ticks), (filling, ticks));
        }
        assert_eq!(end, self.space.cut_bytes);
        assert!(end <= self.config.capacity_bytes, "capacity is a hard limit");
        assert!(self.space.slots.len() <= self.config.slots_max as usize);
    }

    fn check_slabs(&self) {
        for (index, slab) in (0u32..).zip(&self.space.slabs) {
            let (mut slots, mut free, mut quarantine, mut published) = (0, 0, 0, 0);
            for &extent in &slab.extents {
                let place = &self.space.extents[extent as usize];
                assert_eq!(place.state, ExtentState::Assigned { slab: index });
                slots += place.record.slots;
                let first = place.record.first_slot.0 as usize;
                for cell in &self.space.slots[first..first + place.record.slots as usize] {
                    match cell.state {
                        SlotState::Free => free += 1,
                        SlotState::Quarantine => quarantine += 1,
                        SlotState::Published => published += 1,
                        SlotState::Filling | SlotState::Retired => {}
                    }
                }
            }
            assert_eq!((slab.slots, slab.free.len, slab.quarantine.len), (slots, free, quarantine));
            assert_eq!(slab.policy.len(), published, "the policy knows every resident object");
            assert_eq!(self.starved.contains(&index), !slab.waiting.is_empty());
            for at in slab.waiting.iter(&self.nodes) {
                assert_eq!(
                    (self.entries.get(at).state, self.entries.get(at).slab),
                    (EntryState::Waiting, index)
                );
            }
        }
    }
}
