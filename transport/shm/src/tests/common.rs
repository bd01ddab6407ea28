//! What the tests of this crate share: an owner with a pattern in it, its server, and a provider driven by hand.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::ShmProvider;
use kvfabric_memory::{HugePages, OwnerMemory, PoolConfig, RawWord, Region, ScatterList, Slab};
use kvfabric_transport_api::{Event, OpToken, PeerKey, PeerTarget, Provider, ReadDone, ReadOp};

pub const INCARNATION: u64 = 0x1234_5678_9abc_def0;
/// Generous: a machine that runs everything at once.
pub const PATIENCE: Duration = Duration::from_secs(30);
pub static NEVER: AtomicBool = AtomicBool::new(false);

/// A directory of the test's own, removed at its end.
pub struct Directory(PathBuf);

impl Directory {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("kvfabric-shm-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a temporary directory");
        Self(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    pub fn socket(&self) -> PathBuf {
        self.0.join("s.sock")
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub fn owner(capacity_bytes: u64, word_slots: u32) -> Arc<OwnerMemory> {
    let config = PoolConfig { capacity_bytes, word_slots, huge_pages: HugePages::Off, prefault: true };
    OwnerMemory::create(&config).expect("a pool")
}

pub fn slab(first_slot: u32, slots: u32, object_bytes: u64, base_offset: u64) -> Slab {
    Slab { layout: 1, group_id: 0, object_bytes, first_slot, slots, base_offset }
}

/// The bytes of a slot's content under a generation.
pub fn pattern(slot: u32, generation: u64, length: usize) -> Vec<u8> {
    let mut out = vec![0; length];
    let mut state = (u64::from(slot) << 40) ^ generation.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for chunk in out.chunks_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        chunk.copy_from_slice(&state.to_be_bytes()[..chunk.len()]);
    }
    out
}

/// O1, fill, O2; the tag is the generation plus 1000.
pub fn put(memory: &OwnerMemory, slot: u32, generation: u64, bytes: &[u8]) -> RawWord {
    let region = Region::allocate(bytes.len()).expect("a region");
    region.write(0, bytes).expect("in bounds");
    memory.invalidate(slot, generation).expect("O1");
    let check = memory.fill(slot, &ScatterList::whole(&region), true, &NEVER).expect("filled");
    let word = RawWord { generation, tag: generation + 1000, check, reserved: 0 };
    assert_eq!(memory.publish(slot, word), Ok(true));
    word
}

pub fn target(path: &Path) -> PeerTarget {
    let unix_path = Some(path.to_str().expect("UTF-8").to_owned());
    PeerTarget { incarnation: INCARNATION, unix_path, ..PeerTarget::default() }
}

pub fn read_op(token: u64, slot: u32, object_bytes: u64, destination: &Region) -> ReadOp {
    ReadOp {
        token: OpToken(token),
        slot,
        object_bytes,
        object_offset: 0,
        destination: ScatterList::whole(destination),
        checksum: true,
    }
}

/// Polls until an event comes.
pub fn next_event(provider: &mut ShmProvider) -> Event {
    next_events(provider, 1).remove(0)
}

/// Polls until `count` events have come.
pub fn next_events(provider: &mut ShmProvider, count: usize) -> Vec<Event> {
    let start = Instant::now();
    let mut events = Vec::new();
    while events.len() < count {
        assert!(start.elapsed() < PATIENCE, "only {} of {count} events came: {events:?}", events.len());
        if !provider.poll(&mut events) {
            provider.wait(Duration::from_millis(100));
        }
    }
    events
}

pub fn next_read(provider: &mut ShmProvider) -> ReadDone {
    match next_event(provider) {
        Event::Read(done) => done,
        other => panic!("expected a read, not {other:?}"),
    }
}

pub fn connect(provider: &mut ShmProvider, peer: PeerKey, path: &Path) {
    provider.connect(peer, target(path));
    match next_event(provider) {
        Event::Connected { peer: connected } => assert_eq!(connected, peer),
        other => panic!("expected a connection, not {other:?}"),
    }
}

pub fn contents(region: &Region) -> Vec<u8> {
    let mut out = vec![0; region.length_bytes()];
    region.read(0, &mut out).expect("in bounds");
    out
}
