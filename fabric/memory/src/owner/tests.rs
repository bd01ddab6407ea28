use std::sync::atomic::AtomicBool;

use super::*;
use crate::{checksum, Region};

static RUN: AtomicBool = AtomicBool::new(false);

fn small() -> Arc<OwnerMemory> {
    let config =
        PoolConfig { capacity_bytes: 8 << 20, word_slots: 4096, huge_pages: HugePages::Off, prefault: true };
    OwnerMemory::create(&config).expect("a small pool")
}

fn slab(first_slot: u32, slots: u32, object_bytes: u64, base_offset: u64) -> Slab {
    Slab { layout: 1, group_id: 0, object_bytes, first_slot, slots, base_offset }
}

fn source(bytes: &[u8]) -> ScatterList {
    let region = Region::allocate(bytes.len()).expect("a region");
    region.write(0, bytes).expect("in bounds");
    ScatterList::whole(&region)
}

fn pattern(length: usize, seed: u8) -> Vec<u8> {
    (0..length).map(|i| (i * 31 + (i >> 8)).to_le_bytes()[0] ^ seed).collect()
}

#[test]
fn a_block_goes_in_and_comes_out() {
    let memory = small();
    memory.allocate_extent(0, 2 << 20).expect("memory");
    memory.add_slab(slab(10, 3, 300_001, 64)).expect("a slab");
    let bytes = pattern(300_001, 7);
    memory.invalidate(11, 5).expect("O1");
    let check = memory.fill(11, &source(&bytes), true, &RUN).expect("filled");
    assert_eq!(check, checksum(&bytes));
    assert_eq!(memory.publish(11, RawWord { generation: 5, tag: 9, check, reserved: 0 }), Ok(true));

    let object = memory.object(11).expect("known");
    let mut out = vec![0; 300_001];
    object.copy_out(0, &mut out).expect("in bounds");
    assert_eq!(out, bytes);
    assert!(object.copy_out(1, &mut out).is_err());

    let destination = Region::allocate(300_001).expect("a region");
    let list = ScatterList::whole(&destination);
    let (word, landed) = memory.read(11, 300_001, 0, &list, true, &RUN).expect("read");
    assert_eq!((word.generation, word.tag, word.check), (5, 9, check));
    assert_eq!(landed, Some(check));
    destination.read(0, &mut out).expect("in bounds");
    assert_eq!(out, bytes);
}
