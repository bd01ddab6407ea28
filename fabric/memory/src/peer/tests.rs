//! Goal: a reader maps nothing that could fault or be written by it, and believes no slab that does not fit.

use std::os::fd::BorrowedFd;
use std::sync::atomic::AtomicBool;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};

use super::*;
use crate::{checksum, HugePages, OwnerMemory, PoolConfig, Region};

static RUN: AtomicBool = AtomicBool::new(false);

fn own(fd: BorrowedFd<'_>) -> OwnedFd {
    fd.try_clone_to_owned().expect("descriptors")
}

fn owner() -> Arc<OwnerMemory> {
    let config =
        PoolConfig { capacity_bytes: 8 << 20, word_slots: 4096, huge_pages: HugePages::Off, prefault: false };
    OwnerMemory::create(&config).expect("a small pool")
}

fn peer_of(owner: &OwnerMemory) -> PeerMemory {
    PeerMemory::map(own(owner.pool_fd()), own(owner.words_fd()), owner.pool_bytes(), owner.words_bytes())
        .expect("sealed")
}

fn slab(first_slot: u32, slots: u32, object_bytes: u64, base_offset: u64) -> Slab {
    Slab { layout: 1, group_id: 0, object_bytes, first_slot, slots, base_offset }
}

#[test]
fn a_peer_reads_what_the_owner_published() {
    let owner = owner();
    owner.allocate_extent(0, 4 << 20).expect("memory");
    owner.add_slab(slab(3, 2, 700_001, 64)).expect("a slab");
    let bytes: Vec<u8> = (0..700_001u32).map(|i| i.wrapping_mul(2_654_435_761).to_be_bytes()[0]).collect();
    let region = Region::allocate(bytes.len()).expect("region");
    region.write(0, &bytes).expect("in bounds");
    owner.invalidate(4, 11).expect("O1");
    let check = owner.fill(4, &ScatterList::whole(&region), true, &RUN).expect("filled");
    owner.publish(4, RawWord { generation: 11, tag: 5, check, reserved: 0 }).expect("O2");

    let mut peer = peer_of(&owner);
    assert!(!peer.knows(4));
    let destination = Region::allocate(700_001).expect("region");
    let list = ScatterList::whole(&destination);
    assert_eq!(peer.read(4, 700_001, 0, &list, false, &RUN), Err(PeerReadError::UnknownSlot(4)));
    let (version, slabs) = owner.slabs();
    peer.update_slabs(version, slabs.to_vec()).expect("fitting");
    assert_eq!((peer.slab_version(), peer.knows(4), peer.knows(5)), (version, true, false));
    let (word, landed) = peer.read(4, 700_001, 0, &list, true, &RUN).expect("read");
    assert_eq!((word.generation, word.tag, word.check, landed), (11, 5, check, Some(check)));
    let mut out = vec![0; 700_001];
    destination.read(0, &mut out).expect("in bounds");
    assert!(out == bytes);

    // A part of it, hashed as a part.
    let part = list.part(0, 1000).expect("inside");
    let (_, landed) = peer.read(4, 700_001, 699_001, &part, true, &RUN).expect("read");
    assert_eq!(landed, Some(checksum(&bytes[699_001..])));

    for (size, offset, length) in [(700_000, 0, 10), (700_001, 700_000, 2), (700_001, u64::MAX, 1)] {
        let part = list.part(0, length).expect("inside");
        assert_eq!(peer.read(4, size, offset, &part, false, &RUN), Err(PeerReadError::SizeMismatch));
    }
    assert_eq!(peer.read(4, 700_001, 0, &list, false, &AtomicBool::new(true)), Err(PeerReadError::Stopped));

    // The mapping outlives its owner.
    drop(owner);
    let (word, landed) = peer.read(4, 700_001, 0, &list, true, &RUN).expect("read");
    assert_eq!((word.generation, landed), (11, Some(check)));
}

#[test]
fn files_without_the_seals_are_refused() {
    let owner = owner();
    let (pool_bytes, words_bytes) = (owner.pool_bytes(), owner.words_bytes());
    let all = [SealFlags::SHRINK, SealFlags::GROW, SealFlags::FUTURE_WRITE, SealFlags::SEAL];
    for missing in all {
        let fd =
            rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("memfd");
        rustix::fs::ftruncate(&fd, pool_bytes).expect("sized");
        let seals =
            all.into_iter().filter(|seal| *seal != missing).fold(SealFlags::empty(), SealFlags::union);
        rustix::fs::fcntl_add_seals(&fd, seals).expect("sealed");
        let mapped = PeerMemory::map(fd, own(owner.words_fd()), pool_bytes, words_bytes);
        assert!(matches!(mapped, Err(MapError::Seals(PeerFile::Pool))), "without {missing:?}");
    }
    let not_memfd = || OwnedFd::from(std::fs::File::open("/dev/zero").expect("exists"));
    let mapped = PeerMemory::map(not_memfd(), own(owner.words_fd()), pool_bytes, words_bytes);
    assert!(matches!(mapped, Err(MapError::NotAMemfd(PeerFile::Pool))));
    let mapped = PeerMemory::map(own(owner.pool_fd()), not_memfd(), pool_bytes, words_bytes);
    assert!(matches!(mapped, Err(MapError::NotAMemfd(PeerFile::Words))));
}

#[test]
fn sizes_that_differ_or_cannot_be_are_refused() {
    let owner = owner();
    let map = |pool_bytes, words_bytes| {
        PeerMemory::map(own(owner.pool_fd()), own(owner.words_fd()), pool_bytes, words_bytes)
    };
    let (pool, words) = (owner.pool_bytes(), owner.words_bytes());
    assert!(map(pool, words).is_ok());
    assert!(matches!(map(pool + 4096, words), Err(MapError::Size { file: PeerFile::Pool, .. })));
    assert!(matches!(map(pool - 4096, words), Err(MapError::Size { file: PeerFile::Pool, .. })));
    assert!(matches!(map(pool, words + 65536), Err(MapError::Size { file: PeerFile::Words, .. })));
    for (pool, words) in
        [(0, words), (POOL_BYTES_MAX + 1, words), (pool, 0), (pool, words - 32), (pool, 1 << 40)]
    {
        assert!(matches!(map(pool, words), Err(MapError::Impossible { .. })), "{pool} {words}");
    }
}

#[test]
fn nobody_but_the_owner_can_write_or_shrink() {
    use rustix::mm::{mmap, MapFlags, ProtFlags};
    let owner = owner();
    for fd in [owner.pool_fd(), owner.words_fd()] {
        // SAFETY: a fresh mapping that must be refused.
        let writable = unsafe {
            mmap(std::ptr::null_mut(), 4096, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, fd, 0)
        };
        assert!(writable.is_err());
        assert!(rustix::io::pwrite(fd, b"x", 0).is_err());
        assert!(rustix::fs::ftruncate(fd, 0).is_err());
        assert!(rustix::fs::ftruncate(fd, 1 << 30).is_err());
        let punch = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        assert!(rustix::fs::fallocate(fd, punch, 0, 4096).is_err());
        assert!(rustix::fs::fcntl_add_seals(fd, SealFlags::WRITE).is_err());
    }
}

#[test]
fn slab_lists_that_do_not_fit_leave_the_old_one() {
    let owner = owner();
    let mut peer = peer_of(&owner);
    peer.update_slabs(1, vec![slab(0, 4, 4096, 0)]).expect("fitting");
    let bad = [
        vec![slab(0, 1, 4096, (8 << 20) - 4095)],
        vec![slab(4095, 2, 4096, 0)],
        vec![slab(0, 1, u64::MAX, 1)],
        vec![slab(0, 2, 64, 0), slab(1, 1, 64, 4096)],
        vec![slab(0, 0, 64, 0)],
        vec![slab(0, 1, 64, 0); crate::limits::SLABS_MAX + 1],
    ];
    for slabs in bad {
        assert!(peer.update_slabs(2, slabs).is_err());
        assert_eq!((peer.slab_version(), peer.knows(3)), (1, true));
    }
    // Order does not matter.
    peer.update_slabs(2, vec![slab(10, 1, 64, 4096), slab(0, 2, 64, 0)]).expect("fitting");
    assert_eq!((peer.knows(3), peer.knows(10)), (false, true));
}

/// A read of a slab that was retired between two steps ends; it never reads under the wrong slab.
#[test]
fn slabs_may_change_between_steps() {
    let owner = owner();
    owner.allocate_extent(0, 4 << 20).expect("memory");
    owner.add_slab(slab(0, 1, 1 << 20, 0)).expect("a slab");
    let mut peer = peer_of(&owner);
    peer.update_slabs(1, owner.slabs().1.to_vec()).expect("fitting");
    let list = ScatterList::whole(&Region::allocate(1 << 20).expect("region"));
    let mut read = peer.begin_read(0, 1 << 20, 0, 1 << 20, false).expect("begun");
    assert_eq!(peer.view().step(&mut read, &list, 1000), Ok(false));
    peer.update_slabs(2, vec![slab(7, 1, 1 << 20, 0)]).expect("fitting");
    assert_eq!(peer.view().step(&mut read, &list, 1000), Err(PeerReadError::UnknownSlot(0)));
    assert_eq!(peer.view().finish(&read), Err(PeerReadError::Stopped));
}
