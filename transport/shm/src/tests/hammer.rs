//! Goal: a reader never accepts bytes of another generation, under real concurrency (design 2, the same-host form).
//! Method: one thread overwrites 8 slots of 64 KiB without pause (O1, fill, O2); readers read them through separate
//! mappings, accept by equality of the word alone, and then compare every byte with what that generation must hold.
//! Three broken variants must deliver wrong bytes, which proves that the test can see them.
//! `KVFABRIC_HAMMER_SECONDS` lengthens the safe run.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::common::*;
use crate::{ShmProvider, ShmServer};
use kvfabric_memory::{OwnerMemory, PeerMemory, RawWord, Region, ScatterList};
use kvfabric_transport_api::{PeerKey, Provider};

const SLOTS: u32 = 8;
const OBJECT_BYTES: usize = 64 << 10;
/// A broken variant that has shown no wrong byte by then fails the test. It shows one within milliseconds as a rule.
const BITE_SECONDS: u64 = 60;

/// Which rule is broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Broken {
    Nothing,
    /// The reader accepts whatever landed.
    NoCheck,
    /// The reader looks at the word before the copy only (R2).
    CheckBefore,
    /// The owner invalidates after it has overwritten (O1).
    BumpAfterWrite,
}

/// What the directory says: for each slot the generation published last.
struct Hints([AtomicU64; SLOTS as usize]);

#[derive(Debug, Default)]
struct Counts {
    overwrites: u64,
    right: u64,
    missed: u64,
    wrong: u64,
}

/// A content that is cheap to make and to check: the same 8 bytes of slot and generation all over, so that any mix of
/// two generations shows.
fn line(slot: u32, generation: u64) -> [u8; 8] {
    ((generation << 16) | u64::from(slot)).to_le_bytes()
}

fn write_content(slot: u32, generation: u64, bytes: &mut [u8]) {
    bytes[..8].copy_from_slice(&line(slot, generation));
    let mut done = 8;
    while done < bytes.len() {
        let part = done.min(bytes.len() - done);
        bytes.copy_within(..part, done);
        done += part;
    }
}

fn is_content(slot: u32, generation: u64, bytes: &[u8]) -> bool {
    bytes[..8] == line(slot, generation) && bytes[8..] == bytes[..bytes.len() - 8]
}

fn tag(slot: u32, generation: u64) -> u64 {
    generation * 64 + u64::from(slot) + 1
}

fn overwrite(memory: &OwnerMemory, hints: &Hints, stop: &AtomicBool, broken: Broken) -> u64 {
    let source = Region::allocate(OBJECT_BYTES).expect("a region");
    let list = ScatterList::whole(&source);
    let mut bytes = vec![0; OBJECT_BYTES];
    let mut generation = 0u64;
    while !stop.load(Ordering::Relaxed) {
        for slot in 0..SLOTS {
            generation += 1;
            write_content(slot, generation, &mut bytes);
            source.write(0, &bytes).expect("in bounds");
            if broken == Broken::BumpAfterWrite && generation > u64::from(SLOTS) {
                overwrite_without_o1(memory, slot, &bytes);
                memory.invalidate(slot, generation).expect("too late");
            } else {
                memory.invalidate(slot, generation).expect("O1");
                memory.fill(slot, &list, false, stop).unwrap_or_default();
            }
            if stop.load(Ordering::Relaxed) {
                // The fill may have been cut short: nothing is published.
                return generation;
            }
            let word = RawWord { generation, tag: tag(slot, generation), check: 0, reserved: 0 };
            assert_eq!(memory.publish(slot, word), Ok(true));
            hints.0[slot as usize].store(generation, Ordering::Release);
        }
    }
    generation
}

/// What `fill` refuses to do: overwrite a published slot.
fn overwrite_without_o1(memory: &OwnerMemory, slot: u32, bytes: &[u8]) {
    let object = memory.object(slot).expect("known");
    assert_eq!(object.object_bytes(), bytes.len());
    // SAFETY: the object lies in the owner's writable mapping, and only this thread writes it. The bytes are raced by
    // readers on purpose.
    unsafe { std::ptr::copy(bytes.as_ptr(), object.as_ptr().cast_mut(), bytes.len()) };
}

fn own(fd: BorrowedFd<'_>) -> std::os::fd::OwnedFd {
    fd.try_clone_to_owned().expect("descriptors")
}

fn peer(memory: &OwnerMemory) -> PeerMemory {
    let (pool, words) = (own(memory.pool_fd()), own(memory.words_fd()));
    let mut peer = PeerMemory::map(pool, words, memory.pool_bytes(), memory.words_bytes()).expect("sealed");
    let (version, slabs) = memory.slabs();
    peer.update_slabs(version, slabs.to_vec()).expect("fitting");
    peer
}

fn read_some(
    memory: &OwnerMemory,
    hints: &Hints,
    stop: &AtomicBool,
    wrong: &AtomicU64,
    broken: Broken,
) -> Counts {
    let peer = peer(memory);
    let region = Region::allocate(OBJECT_BYTES).expect("a region");
    let list = ScatterList::whole(&region);
    let mut bytes = vec![0; OBJECT_BYTES];
    let mut counts = Counts::default();
    let mut slot = 0;
    while !stop.load(Ordering::Relaxed) {
        slot = (slot + 1) % SLOTS;
        let generation = hints.0[slot as usize].load(Ordering::Acquire);
        if generation == 0 {
            std::thread::yield_now();
            continue;
        }
        let matches = |word: RawWord| word.generation == generation && word.tag == tag(slot, generation);
        let before = memory.load_word_after_data(slot).is_some_and(matches);
        let (word, _) = peer.read(slot, OBJECT_BYTES as u64, 0, &list, false, &NEVER).expect("a known slot");
        let accepted = match broken {
            Broken::NoCheck => true,
            Broken::CheckBefore => before,
            Broken::Nothing | Broken::BumpAfterWrite => matches(word),
        };
        if !accepted {
            counts.missed += 1;
            continue;
        }
        region.read(0, &mut bytes).expect("in bounds");
        if is_content(slot, generation, &bytes) {
            counts.right += 1;
        } else {
            counts.wrong += 1;
            wrong.fetch_add(1, Ordering::Relaxed);
        }
    }
    counts
}

fn hammer(broken: Broken, seconds: u64) -> Counts {
    let memory = owner(1 << 20, 64);
    memory.allocate_extent(0, 1 << 20).expect("memory");
    memory.add_slab(slab(0, SLOTS, OBJECT_BYTES as u64, 0)).expect("a slab");
    let hints = Hints(std::array::from_fn(|_| AtomicU64::new(0)));
    let (stop, wrong) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| overwrite(&memory, &hints, &stop, broken));
        let readers: Vec<_> =
            (0..2).map(|_| scope.spawn(|| read_some(&memory, &hints, &stop, &wrong, broken))).collect();
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(seconds) {
            std::thread::sleep(Duration::from_millis(5));
            if broken != Broken::Nothing && wrong.load(Ordering::Relaxed) > 0 {
                break;
            }
        }
        stop.store(true, Ordering::Relaxed);
        let mut total = Counts { overwrites: writer.join().expect("no panic"), ..Counts::default() };
        for reader in readers {
            let counts = reader.join().expect("no panic");
            total.right += counts.right;
            total.missed += counts.missed;
            total.wrong += counts.wrong;
        }
        total
    })
}

#[test]
fn validated_reads_are_never_wrong() {
    let seconds =
        std::env::var("KVFABRIC_HAMMER_SECONDS").ok().and_then(|value| value.parse().ok()).unwrap_or(3);
    let counts = hammer(Broken::Nothing, seconds);
    println!("{counts:?}");
    assert_eq!(counts.wrong, 0, "{counts:?}");
    assert!(counts.right > 0 && counts.overwrites > u64::from(SLOTS), "nothing was tested: {counts:?}");
}

#[test]
fn without_a_check_wrong_bytes_are_accepted() {
    assert_bites(Broken::NoCheck);
}

#[test]
fn with_the_check_before_the_copy_wrong_bytes_are_accepted() {
    assert_bites(Broken::CheckBefore);
}

#[test]
fn with_the_bump_after_the_write_wrong_bytes_are_accepted() {
    assert_bites(Broken::BumpAfterWrite);
}

fn assert_bites(broken: Broken) {
    let counts = hammer(broken, BITE_SECONDS);
    println!("{broken:?}: {counts:?}");
    assert!(counts.wrong > 0, "{broken:?} went unnoticed for {BITE_SECONDS} s: {counts:?}");
}

/// The same through server, socket and provider, with checksums.
#[test]
fn reads_through_the_provider_are_never_wrong() {
    let directory = Directory::new();
    let memory = owner(1 << 20, 64);
    memory.allocate_extent(0, 1 << 20).expect("memory");
    memory.add_slab(slab(0, SLOTS, OBJECT_BYTES as u64, 0)).expect("a slab");
    let _server = ShmServer::start(&directory.socket(), Arc::clone(&memory), INCARNATION).expect("serving");
    let hints = Hints(std::array::from_fn(|_| AtomicU64::new(0)));
    let stop = AtomicBool::new(false);
    let mut provider = ShmProvider::new().expect("a provider");
    connect(&mut provider, PeerKey(1), &directory.socket());
    std::thread::scope(|scope| {
        scope.spawn(|| overwrite(&memory, &hints, &stop, Broken::Nothing));
        let region = Region::allocate(OBJECT_BYTES).expect("a region");
        let mut bytes = vec![0; OBJECT_BYTES];
        let (mut right, mut token) = (0u64, 0u64);
        let start = Instant::now();
        while start.elapsed() < Duration::from_secs(2) || (right == 0 && start.elapsed() < PATIENCE) {
            token += 1;
            let slot = u32::try_from(token % u64::from(SLOTS)).expect("small");
            let generation = hints.0[slot as usize].load(Ordering::Acquire);
            let op = read_op(token, slot, OBJECT_BYTES as u64, &region);
            provider.post(PeerKey(1), op).expect("posted");
            let done = next_read(&mut provider);
            assert_eq!(done.token.0, token);
            let landed = done.outcome.expect("a known slot");
            if generation == 0
                || landed.word.generation != generation
                || landed.word.tag != tag(slot, generation)
            {
                continue;
            }
            region.read(0, &mut bytes).expect("in bounds");
            if !is_content(slot, generation, &bytes) {
                stop.store(true, Ordering::Relaxed);
                panic!("wrong bytes in slot {slot} under generation {generation}");
            }
            assert_eq!(landed.check, Some(kvfabric_memory::checksum(&bytes)));
            right += 1;
        }
        stop.store(true, Ordering::Relaxed);
        assert!(right > 0, "nothing was tested");
    });
}
