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

#[test]
fn nothing_is_touched_outside_allocated_memory() {
    let memory = small();
    assert!(matches!(memory.add_slab(slab(0, 1, 64, 0)), Err(PoolError::NotAllocated { .. })));
    memory.allocate_extent(1 << 20, 1 << 20).expect("memory");
    assert_eq!(memory.allocated_bytes(), 1 << 20);
    assert!(matches!(memory.add_slab(slab(0, 1, 128, (1 << 20) - 64)), Err(PoolError::NotAllocated { .. })));
    assert!(matches!(memory.add_slab(slab(0, 2, 1 << 20, 1 << 20)), Err(PoolError::NotAllocated { .. })));
    memory.add_slab(slab(0, 1, 1 << 20, 1 << 20)).expect("exactly the extent");
    for (offset, length) in [(8 << 20, 1), (0, (8 << 20) + 1), (u64::MAX, 2), (1, u64::MAX), (0, 0)] {
        assert!(matches!(memory.allocate_extent(offset, length), Err(PoolError::OutsidePool { .. })));
    }
    memory.allocate_extent(0, 1 << 20).expect("its neighbour");
    memory.allocate_extent(0, 2 << 20).expect("known already");
    assert_eq!(memory.allocated_bytes(), 2 << 20);
    assert!(memory.object(1).is_none());
    assert!(memory.load_word_after_data(u32::MAX).is_none());
    assert_eq!(memory.invalidate(4095, 1), Err(WordError::UnknownSlot(4095)));
    assert_eq!(memory.invalidate(u32::MAX, 1), Err(WordError::UnknownSlot(u32::MAX)));
}

#[test]
fn slabs_must_be_possible() {
    let memory = small();
    memory.allocate_extent(0, 8 << 20).expect("memory");
    let refused = |slab| matches!(memory.add_slab(slab), Err(PoolError::Slab(_)));
    assert!(refused(slab(0, 0, 64, 0)));
    assert!(refused(slab(0, 1, 0, 0)));
    assert!(refused(slab(4096, 1, 64, 0)));
    assert!(refused(slab(u32::MAX, 2, 64, 0)));
    assert!(refused(slab(0, 1, (8 << 20) + 1, 0)));
    assert!(refused(slab(0, 1, u64::MAX, 64)));
    assert!(refused(slab(0, 1, 64, u64::MAX)));
    assert!(refused(slab(0, 4096, u64::MAX / 2, 0)));
    memory.add_slab(slab(10, 10, 1000, 4096)).expect("possible");
    assert!(refused(slab(19, 1, 64, 1 << 20)));
    assert!(refused(slab(9, 2, 64, 1 << 20)));
    assert!(refused(slab(30, 1, 64, 4096 + 9 * 1024)));
    assert!(refused(slab(30, 1, 65, 4096 - 64)));
    memory.add_slab(slab(30, 1, 64, 4096 - 64)).expect("right before");
    let (version, slabs) = memory.slabs();
    assert_eq!((version, slabs.len()), (2, 2));
    assert_eq!(slabs[0].first_slot, 10);
}

#[test]
fn a_retired_slab_makes_room_and_its_words_stay() {
    let memory = small();
    memory.allocate_extent(0, 1 << 20).expect("memory");
    memory.add_slab(slab(0, 4, 4096, 0)).expect("a slab");
    memory.invalidate(2, 7).expect("O1");
    assert!(!memory.retire_slab(1));
    assert!(memory.retire_slab(0));
    assert!(memory.object(2).is_none());
    assert_eq!(memory.load_word_after_data(2).map(|word| word.generation), Some(7));
    assert_eq!(memory.fill(2, &source(&[1; 4096]), true, &RUN), Err(CopyError::UnknownSlot(2)));
    memory.add_slab(slab(100, 1, 16384, 0)).expect("the same bytes under a new slot");
    assert_eq!(memory.slabs().0, 3);
}

#[test]
fn words_obey_o1_and_o2() {
    let memory = small();
    memory.allocate_extent(0, 1 << 20).expect("memory");
    memory.add_slab(slab(0, 4, 4096, 0)).expect("a slab");
    let word = |generation, tag| RawWord { generation, tag, check: 3, reserved: 0 };
    assert_eq!(memory.load_word_after_data(0), Some(RawWord::default()));
    memory.invalidate(0, 5).expect("new");
    assert_eq!(
        memory.invalidate(0, 5),
        Err(WordError::NotNewer { slot: 0, current: 5, offered: 5 }),
        "generations never repeat"
    );
    assert_eq!(memory.publish(0, word(4, 1)), Ok(false), "another generation was filled");
    assert_eq!(memory.load_word_after_data(0), Some(RawWord { generation: 5, ..RawWord::default() }));
    assert_eq!(memory.publish(0, word(5, 0)), Err(WordError::Invalid));
    assert_eq!(memory.publish(0, word(0, 1)), Err(WordError::Invalid));
    assert_eq!(memory.publish(0, word(5, 9)), Ok(true));
    assert_eq!(memory.load_word_after_data(0), Some(word(5, 9)));
    assert_eq!(memory.fill(0, &source(&[1; 4096]), false, &RUN), Err(CopyError::Published(0)));
    memory.invalidate(0, 6).expect("new");
    assert_eq!(memory.load_word_after_data(0), Some(RawWord { generation: 6, ..RawWord::default() }));
    assert_eq!(memory.fill(0, &source(&[1; 4096]), false, &RUN), Ok(0));
    let short = CopyError::SizeMismatch { source_bytes: 4095, object_bytes: 4096 };
    assert_eq!(memory.fill(0, &source(&[1; 4095]), false, &RUN), Err(short));
    assert_eq!(memory.fill(0, &source(&[1; 4096]), false, &AtomicBool::new(true)), Err(CopyError::Stopped));
}

#[test]
fn only_one_copy_fills_the_same_bytes() {
    let memory = small();
    memory.allocate_extent(0, 1 << 20).expect("memory");
    memory.add_slab(slab(0, 4, 4096, 0)).expect("a slab");
    let running = FillGuard::begin(&memory, 4096, 4096).expect("nothing runs");
    assert_eq!(memory.fill(1, &source(&[1; 4096]), false, &RUN), Err(CopyError::Busy(1)));
    assert_eq!(memory.fill(0, &source(&[1; 4096]), false, &RUN), Ok(0));
    assert_eq!(memory.fill(2, &source(&[1; 4096]), false, &RUN), Ok(0));
    drop(running);
    assert_eq!(memory.fill(1, &source(&[1; 4096]), false, &RUN), Ok(0));
    assert!(memory.fills.lock().is_empty());
}

#[test]
fn a_word_that_changed_during_the_copy_vouches_for_nothing() {
    let memory = small();
    memory.allocate_extent(0, 1 << 20).expect("memory");
    memory.add_slab(slab(0, 1, 4096, 0)).expect("a slab");
    memory.invalidate(0, 5).expect("O1");
    let destination = ScatterList::whole(&Region::allocate(4096).expect("region"));
    let mut read = memory.begin_read(0, 4096, 0, 4096, false).expect("begun");
    assert_eq!(memory.view().finish(&read), Err(PeerReadError::Stopped), "no byte has been copied");
    assert_eq!(memory.view().step(&mut read, &destination, 1 << 20), Ok(true));
    // Published only after the copy: the bytes may be from before the fill.
    assert_eq!(memory.publish(0, RawWord { generation: 5, tag: 9, check: 1, reserved: 0 }), Ok(true));
    let (word, _) = memory.view().finish(&read).expect("complete");
    assert_eq!((word.generation, word.tag), (5, 0));
    let (word, _) = memory.read(0, 4096, 0, &destination, false, &RUN).expect("read");
    assert_eq!((word.generation, word.tag), (5, 9));
}

#[test]
fn impossible_pools_are_errors() {
    for (capacity_bytes, word_slots) in [(0, 1), (1, 0), (POOL_BYTES_MAX + 1, 1), (1, WORD_SLOTS_MAX + 1)] {
        let made = OwnerMemory::create(&PoolConfig::new(capacity_bytes, word_slots));
        assert!(matches!(made, Err(PoolError::Size { .. })), "{capacity_bytes} {word_slots}");
    }
}

/// More than the machine has is refused before a page is touched.
#[test]
fn memory_that_is_not_there_is_a_typed_error() {
    let available = available_memory();
    assert_ne!(available.bound, MemoryBound::Unknown, "this test needs /proc/meminfo");
    let capacity_bytes = available.bytes.saturating_mul(4).clamp(1 << 30, POOL_BYTES_MAX);
    let config = PoolConfig { huge_pages: HugePages::Off, ..PoolConfig::new(capacity_bytes, 16) };
    let memory = OwnerMemory::create(&config).expect("a sparse pool costs nothing");
    match memory.allocate_extent(0, capacity_bytes) {
        Err(error @ PoolError::NoMemory { length_bytes, .. }) => {
            assert_eq!(length_bytes, capacity_bytes);
            assert!(error.is_retryable() && error.is_local());
        }
        other => panic!("expected NoMemory, not {other:?}"),
    }
    assert_eq!(memory.allocated_bytes(), 0);
    memory.allocate_extent(capacity_bytes - (1 << 20), 1 << 20).expect("a small part is fine");
}

#[test]
fn huge_pages_are_used_or_refused_but_never_faked() {
    let counts = crate::free_huge_pages().expect("/proc/meminfo");
    let config = PoolConfig { huge_pages: HugePages::Require, ..PoolConfig::new(4 << 20, 16) };
    match OwnerMemory::create(&config) {
        Ok(memory) => {
            assert_eq!(memory.pool_page_bytes(), counts.page_bytes);
            memory.allocate_extent(0, 4 << 20).expect("reserved");
            memory.add_slab(slab(0, 1, 4096, 0)).expect("a slab");
            assert_eq!(memory.fill(0, &source(&[1; 4096]), false, &RUN), Ok(0));
        }
        Err(PoolError::HugePages { needed, free }) => {
            assert_eq!(free, counts.free);
            assert!(needed > free);
        }
        Err(other) => panic!("unexpected {other:?}"),
    }
    let config = PoolConfig { huge_pages: HugePages::Auto, ..PoolConfig::new(4 << 20, 16) };
    OwnerMemory::create(&config).expect("auto always works");
}

#[test]
fn ranges_merge() {
    let mut ranges = BTreeMap::new();
    for (start, end) in [(10, 20), (30, 40), (20, 25), (0, 5), (24, 31), (100, 110), (90, 120)] {
        insert(&mut ranges, start, end);
    }
    assert_eq!(ranges.into_iter().collect::<Vec<_>>(), [(0, 5), (10, 40), (90, 120)]);
    let ranges = BTreeMap::from([(10, 20)]);
    assert!(covers(&ranges, 10, 20) && covers(&ranges, 12, 15));
    assert!(!covers(&ranges, 9, 12) && !covers(&ranges, 15, 21) && !covers(&ranges, 30, 31));
}
