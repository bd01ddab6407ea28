//! Goal: every read comes back exactly once with the truth, whatever happens to it, to the slabs or to the peer.
//! Method: a server and a provider in one process, over a real socket and separate mappings.

use std::time::{Duration, Instant};

use super::common::*;
use crate::{ShmProvider, ShmServer};
use kvfabric_memory::{checksum, Region, ScatterList};
use kvfabric_transport_api::{
    ConnectError, Event, OpToken, PeerKey, PeerTarget, PostError, Provider, ReadError,
};

const PEER: PeerKey = PeerKey(7);

#[test]
fn blocks_are_read_with_their_word_and_checksum() {
    let (directory, memory) = (Directory::new(), owner(16 << 20, 4096));
    memory.allocate_extent(0, 8 << 20).expect("memory");
    memory.add_slab(slab(10, 4, 1_000_001, 0)).expect("a slab");
    let word = put(&memory, 11, 5, &pattern(11, 5, 1_000_001));
    let _server = ShmServer::start(&directory.socket(), memory, INCARNATION).expect("serving");
    let mut provider = ShmProvider::new().expect("a provider");
    connect(&mut provider, PEER, &directory.socket());

    let destination = Region::allocate(1_000_001).expect("a region");
    provider.post(PEER, read_op(1, 11, 1_000_001, &destination)).expect("posted");
    assert_eq!(provider.in_flight(), 1);
    assert_eq!(destination.handle_count(), 2, "the operation holds its destination");
    let done = next_read(&mut provider);
    let landed = done.outcome.expect("landed");
    assert_eq!((done.token, landed.word, landed.check), (OpToken(1), word, Some(word.check)));
    assert_eq!(provider.in_flight(), 0);
    assert!(contents(&destination) == pattern(11, 5, 1_000_001));
    drop(done.destination);
    assert_eq!(destination.handle_count(), 1);

    // A part, scattered, without a checksum.
    let mut list = ScatterList::default();
    for (offset, length) in [(500, 100), (0, 77), (700_000, 1)] {
        list.push(&destination, offset, length).expect("inside");
    }
    let mut op = read_op(2, 11, 1_000_001, &destination);
    (op.destination, op.object_offset, op.checksum) = (list, 999_000, false);
    provider.post(PEER, op).expect("posted");
    let done = next_read(&mut provider);
    assert_eq!(done.outcome.expect("landed").check, None);
    let mut part = vec![0; 178];
    done.destination.read_object(&mut part).expect("178 bytes");
    assert!(part == pattern(11, 5, 1_000_001)[999_000..999_178]);
}

#[test]
fn many_reads_of_several_peers_retire_exactly_once() {
    let directory = Directory::new();
    let mut servers = Vec::new();
    let mut provider = ShmProvider::new().expect("a provider");
    for peer in 0..3u32 {
        let memory = owner(4 << 20, 4096);
        memory.allocate_extent(0, 4 << 20).expect("memory");
        memory.add_slab(slab(0, 100, 10_000, 0)).expect("a slab");
        for slot in 0..100 {
            put(&memory, slot, u64::from(slot) + 1, &pattern(slot + 1000 * peer, 1, 10_000));
        }
        let path = directory.path().join(format!("{peer}"));
        servers.push(ShmServer::start(&path, memory, INCARNATION).expect("serving"));
        connect(&mut provider, PeerKey(u64::from(peer)), &path);
    }
    let region = Region::allocate(300 * 10_000).expect("a region");
    for index in 0..300u32 {
        let (peer, slot) = (index % 3, index / 3);
        let mut op = read_op(u64::from(index), slot, 10_000, &region);
        op.destination = ScatterList::default();
        op.destination.push(&region, index as usize * 10_000, 10_000).expect("inside");
        provider.post(PeerKey(u64::from(peer)), op).expect("posted");
    }
    let mut seen = vec![0; 300];
    for event in next_events(&mut provider, 300) {
        let Event::Read(done) = event else { panic!("unexpected {event:?}") };
        let index = u32::try_from(done.token.0).expect("small");
        let (peer, slot) = (index % 3, index / 3);
        seen[index as usize] += 1;
        let landed = done.outcome.expect("landed");
        assert_eq!(landed.word.generation, u64::from(slot) + 1);
        let mut bytes = vec![0; 10_000];
        done.destination.read_object(&mut bytes).expect("10,000 bytes");
        assert!(bytes == pattern(slot + 1000 * peer, 1, 10_000));
        assert_eq!(landed.check, Some(checksum(&bytes)));
    }
    assert_eq!(seen, vec![1; 300]);
    let mut events = Vec::new();
    assert!(!provider.poll(&mut events) && events.is_empty());
}

#[test]
fn slabs_added_later_are_found_by_asking_once() {
    let (directory, memory) = (Directory::new(), owner(64 << 20, 1 << 16));
    memory.allocate_extent(0, 64 << 20).expect("memory");
    let _server = ShmServer::start(&directory.socket(), memory.clone(), INCARNATION).expect("serving");
    let mut provider = ShmProvider::new().expect("a provider");
    connect(&mut provider, PEER, &directory.socket());
    let destination = Region::allocate(4096).expect("a region");

    // More slabs than one frame holds.
    for index in 0..1300u32 {
        memory.add_slab(slab(index * 2, 2, 4096, u64::from(index) * 8192)).expect("a slab");
    }
    put(&memory, 2599, 9, &pattern(2599, 9, 4096));
    provider.post(PEER, read_op(1, 2599, 4096, &destination)).expect("posted");
    provider.post(PEER, read_op(2, 2600, 4096, &destination)).expect("posted");
    provider.post(PEER, read_op(3, u32::MAX, 4096, &destination)).expect("posted");
    provider.post(PEER, read_op(4, 2599, 4095, &Region::allocate(4095).expect("a region"))).expect("posted");
    let mut outcomes = std::collections::BTreeMap::new();
    for event in next_events(&mut provider, 4) {
        let Event::Read(done) = event else { panic!("unexpected {event:?}") };
        outcomes.insert(done.token.0, done.outcome.map(|landed| landed.word.generation));
    }
    assert_eq!(outcomes[&1], Ok(9));
    assert_eq!(outcomes[&2], Err(ReadError::UnknownSlot(2600)));
    assert_eq!(outcomes[&3], Err(ReadError::UnknownSlot(u32::MAX)));
    assert_eq!(outcomes[&4], Err(ReadError::SizeMismatch));
    assert!(contents(&destination) == pattern(2599, 9, 4096));

    memory.add_slab(slab(2600, 1, 4096, 1300 * 8192)).expect("a slab");
    put(&memory, 2600, 10, &pattern(2600, 10, 4096));
    provider.post(PEER, read_op(5, 2600, 4096, &destination)).expect("posted");
    assert_eq!(next_read(&mut provider).outcome.expect("landed").word.generation, 10);
    assert_eq!(provider.in_flight(), 0);
}

#[test]
fn posts_that_cannot_be_come_back() {
    let (directory, memory) = (Directory::new(), owner(1 << 20, 64));
    let _server = ShmServer::start(&directory.socket(), memory, INCARNATION).expect("serving");
    let mut provider = ShmProvider::new().expect("a provider");
    let destination = Region::allocate(100).expect("a region");
    match provider.post(PEER, read_op(1, 0, 100, &destination)) {
        Err(error @ PostError::NotConnected(_)) => assert_eq!(error.into_op().token, OpToken(1)),
        other => panic!("unexpected {other:?}"),
    }
    connect(&mut provider, PEER, &directory.socket());
    for (size, offset) in [(99, 0), (100, 1), (u64::MAX, u64::MAX)] {
        let mut op = read_op(1, 0, size, &destination);
        op.object_offset = offset;
        assert!(matches!(provider.post(PEER, op), Err(PostError::BadRange(_))));
    }
    let mut op = read_op(1, 0, 100, &destination);
    op.destination = ScatterList::default();
    assert!(matches!(provider.post(PEER, op), Err(PostError::BadRange(_))));
    for token in 0..in_flight_max() {
        provider.post(PEER, read_op(token, 0, 100, &destination)).expect("room");
    }
    assert!(matches!(provider.post(PEER, read_op(0, 0, 100, &destination)), Err(PostError::QueueFull(_))));
    provider.disconnect(PEER);
    let events = next_events(&mut provider, usize::try_from(in_flight_max()).expect("small"));
    for event in events {
        assert!(matches!(event, Event::Read(done) if done.outcome == Err(ReadError::Aborted)));
    }
    assert_eq!(destination.handle_count(), 1);
}

fn in_flight_max() -> u64 {
    crate::limits::READS_IN_FLIGHT_MAX as u64
}

#[test]
fn an_abort_ends_a_copy_in_its_middle_and_nothing_lands_after() {
    const OBJECT: usize = 64 << 20;
    let (directory, memory) = (Directory::new(), owner(OBJECT as u64, 64));
    memory.allocate_extent(0, OBJECT as u64).expect("memory");
    memory.add_slab(slab(0, 1, OBJECT as u64, 0)).expect("a slab");
    put(&memory, 0, 1, &vec![0x55; OBJECT]);
    let _server = ShmServer::start(&directory.socket(), memory, INCARNATION).expect("serving");
    let mut provider = ShmProvider::new().expect("a provider");
    connect(&mut provider, PEER, &directory.socket());

    let destination = Region::allocate(OBJECT).expect("a region");
    destination.fill(0, OBJECT, 0xc7).expect("in bounds");
    provider.post(PEER, read_op(1, 0, OBJECT as u64, &destination)).expect("posted");
    provider.post(PEER, read_op(2, 0, OBJECT as u64, &destination)).expect("posted");
    let mut events = Vec::new();
    for _ in 0..5 {
        assert!(provider.poll(&mut events));
        assert!(events.is_empty(), "64 MiB take more than five polls of 256 KiB");
    }
    provider.abort(OpToken(2));
    provider.abort(OpToken(1));
    provider.abort(OpToken(99));
    assert_eq!(provider.in_flight(), 2, "taken until reported");
    provider.poll(&mut events);
    let tokens: Vec<u64> = events
        .drain(..)
        .map(|event| match event {
            Event::Read(done) => {
                assert_eq!(done.outcome, Err(ReadError::Aborted));
                done.token.0
            }
            other => panic!("unexpected {other:?}"),
        })
        .collect();
    assert_eq!(tokens, [2, 1]);
    assert_eq!((provider.in_flight(), destination.handle_count()), (0, 1));

    let landed = contents(&destination).iter().filter(|byte| **byte == 0x55).count();
    assert!(landed > 0 && landed < OBJECT, "{landed} bytes landed before the abort");
    // The destination is free: what its owner writes now stays.
    destination.fill(0, OBJECT, 0xc7).expect("in bounds");
    for _ in 0..100 {
        provider.poll(&mut events);
    }
    provider.wait(Duration::from_millis(20));
    assert!(events.is_empty());
    assert!(contents(&destination).iter().all(|byte| *byte == 0xc7));

    // The peer is as usable as before.
    provider.post(PEER, read_op(3, 0, OBJECT as u64, &destination)).expect("posted");
    assert!(next_read(&mut provider).outcome.is_ok());
}

#[test]
fn a_disconnect_ends_everything_of_that_peer_only() {
    let (directory, memory) = (Directory::new(), owner(4 << 20, 64));
    memory.allocate_extent(0, 4 << 20).expect("memory");
    memory.add_slab(slab(0, 2, 1 << 20, 0)).expect("a slab");
    put(&memory, 0, 1, &pattern(0, 1, 1 << 20));
    let _server = ShmServer::start(&directory.socket(), memory, INCARNATION).expect("serving");
    let mut provider = ShmProvider::new().expect("a provider");
    let other = PeerKey(8);
    connect(&mut provider, PEER, &directory.socket());
    connect(&mut provider, other, &directory.socket());
    let destination = Region::allocate(1 << 20).expect("a region");
    for (token, peer) in [(1, PEER), (2, other), (3, PEER), (4, other)] {
        provider.post(peer, read_op(token, 0, 1 << 20, &destination)).expect("posted");
    }
    let mut events = Vec::new();
    provider.poll(&mut events);
    assert!(events.is_empty());
    provider.disconnect(PEER);
    provider.disconnect(PEER);
    assert!(matches!(
        provider.post(PEER, read_op(5, 0, 1 << 20, &destination)),
        Err(PostError::NotConnected(_))
    ));
    let mut outcomes = std::collections::BTreeMap::new();
    for event in next_events(&mut provider, 4) {
        let Event::Read(done) = event else { panic!("unexpected {event:?}") };
        outcomes.insert(done.token.0, done.outcome.map(|landed| landed.word.generation));
    }
    assert_eq!(outcomes[&1], Err(ReadError::Aborted));
    assert_eq!(outcomes[&3], Err(ReadError::Aborted));
    assert_eq!((outcomes[&2].clone(), outcomes[&4].clone()), (Ok(1), Ok(1)));
    connect(&mut provider, PEER, &directory.socket());
}

#[test]
fn a_reader_outlives_its_owner_and_queued_reads_finish() {
    let (directory, memory) = (Directory::new(), owner(4 << 20, 64));
    memory.allocate_extent(0, 4 << 20).expect("memory");
    memory.add_slab(slab(0, 4, 1 << 20, 0)).expect("a slab");
    for slot in 0..4 {
        put(&memory, slot, u64::from(slot) + 1, &pattern(slot, 1, 1 << 20));
    }
    let server = ShmServer::start(&directory.socket(), memory.clone(), INCARNATION).expect("serving");
    let mut provider = ShmProvider::new().expect("a provider");
    connect(&mut provider, PEER, &directory.socket());
    let regions: Vec<Region> = (0..4).map(|_| Region::allocate(1 << 20).expect("a region")).collect();
    for (slot, region) in (0..4).zip(&regions) {
        provider.post(PEER, read_op(u64::from(slot), slot, 1 << 20, region)).expect("posted");
    }
    let mut events = Vec::new();
    provider.poll(&mut events);
    drop((server, memory));
    let mut events = next_events(&mut provider, 5);
    let last = events.pop();
    assert!(matches!(last, Some(Event::Disconnected { peer: PEER, .. })), "reads retire first: {last:?}");
    for event in events {
        let Event::Read(done) = event else { panic!("unexpected {event:?}") };
        let slot = u32::try_from(done.token.0).expect("small");
        assert_eq!(done.outcome.expect("its memory is still mapped").word.generation, u64::from(slot) + 1);
        assert!(contents(&regions[slot as usize]) == pattern(slot, 1, 1 << 20));
    }
    let refused = provider.post(PEER, read_op(9, 0, 1 << 20, &regions[0]));
    assert!(matches!(refused, Err(PostError::NotConnected(_))));
}

#[test]
fn an_idle_peers_death_is_noticed() {
    let (directory, memory) = (Directory::new(), owner(1 << 20, 64));
    let server = ShmServer::start(&directory.socket(), memory, INCARNATION).expect("serving");
    let mut provider = ShmProvider::new().expect("a provider");
    connect(&mut provider, PEER, &directory.socket());
    drop(server);
    assert!(matches!(next_event(&mut provider), Event::Disconnected { peer: PEER, .. }));
}

#[test]
fn connecting_tells_what_is_wrong() {
    let (directory, memory) = (Directory::new(), owner(1 << 20, 64));
    let _server = ShmServer::start(&directory.socket(), memory, INCARNATION).expect("serving");
    let mut provider = ShmProvider::new().expect("a provider");
    let mut fail = |target: PeerTarget| {
        provider.connect(PEER, target);
        match next_event(&mut provider) {
            Event::ConnectFailed { peer: PEER, error } => error,
            other => panic!("unexpected {other:?}"),
        }
    };
    assert_eq!(fail(PeerTarget::default()), ConnectError::NoAddress);
    let missing = target(&directory.path().join("missing"));
    assert!(matches!(fail(missing), ConnectError::NotSameHost(_)));
    let other = PeerTarget { incarnation: 5, ..target(&directory.socket()) };
    assert_eq!(fail(other), ConnectError::WrongIncarnation { wanted: 5, found: INCARNATION });
    let long = directory.path().join("x".repeat(200));
    assert!(matches!(fail(target(&long)), ConnectError::Unreachable(_)));
    let empty = PeerTarget { unix_path: Some(String::new()), ..PeerTarget::default() };
    assert!(matches!(fail(empty), ConnectError::Unreachable(_)));
    let file = directory.path().join("file");
    std::fs::write(&file, "not a socket").expect("written");
    assert!(matches!(fail(target(&file)), ConnectError::NotSameHost(_)));
    connect(&mut provider, PEER, &directory.socket());
    provider.connect(PEER, target(&directory.socket()));
    assert!(matches!(next_event(&mut provider), Event::Connected { peer: PEER }), "connected already");
}

#[test]
fn the_own_pool_is_a_peer_with_its_word_check() {
    let memory = owner(4 << 20, 64);
    memory.allocate_extent(0, 4 << 20).expect("memory");
    memory.add_slab(slab(0, 4, 500_000, 0)).expect("a slab");
    put(&memory, 1, 3, &pattern(1, 3, 500_000));
    let mut provider = ShmProvider::new().expect("a provider");
    provider.add_local(PEER, memory.clone());
    assert!(matches!(next_event(&mut provider), Event::Connected { peer: PEER }));
    let destination = Region::allocate(500_000).expect("a region");
    provider.post(PEER, read_op(1, 1, 500_000, &destination)).expect("posted");
    let landed = next_read(&mut provider).outcome.expect("landed");
    assert_eq!((landed.word.generation, landed.word.tag), (3, 1003));
    assert!(contents(&destination) == pattern(1, 3, 500_000));
    memory.invalidate(1, 4).expect("O1");
    provider.post(PEER, read_op(2, 1, 500_000, &destination)).expect("posted");
    let landed = next_read(&mut provider).outcome.expect("landed");
    assert_eq!((landed.word.generation, landed.word.tag), (4, 0));
    provider.post(PEER, read_op(3, 63, 500_000, &destination)).expect("posted");
    assert_eq!(next_read(&mut provider).outcome, Err(ReadError::UnknownSlot(63)));
}

#[test]
fn a_wake_ends_a_wait() {
    let mut provider = ShmProvider::new().expect("a provider");
    let waker = provider.waker();
    waker.wake();
    waker.wake();
    let start = Instant::now();
    provider.wait(PATIENCE);
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(20));
        waker.wake();
    });
    provider.wait(PATIENCE);
    assert!(start.elapsed() < PATIENCE, "both waits were ended by a wake");
    thread.join().expect("woken");
    // Taken back: the next wait sleeps.
    let start = Instant::now();
    provider.wait(Duration::from_millis(30));
    assert!(start.elapsed() >= Duration::from_millis(30));
}
