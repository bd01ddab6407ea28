//! The right bytes, the right words, and nothing else touched.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfabric_memory::{RawWord, Region, ScatterList};
use kvfabric_transport_api::{Event, PeerKey, PostError, Provider, ReadError};

use super::{object, publish, raw_reader, Arena, Owner, Random, Reader, CANARY, LIMIT};
use crate::wire::{encode_frame_header, Request};
use crate::ProviderOptions;

/// A random list of `total` bytes in an arena of its own, and where each byte of the object belongs in it.
fn scattered(random: &mut Random, total: usize) -> (Arena, ScatterList, Vec<usize>) {
    let most = [1, 3, 100, 5000, 70_000, total.max(1)][random.below(6)];
    let mut lengths = Vec::new();
    let mut left = total;
    // A few thousand pieces at most, so that the test stays short; that is several times IOV_MAX.
    while left > 0 {
        let length = if lengths.len() >= 3000 { left } else { (1 + random.below(most)).min(left) };
        lengths.push(length);
        left -= length;
    }
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    for index in (1..order.len()).rev() {
        order.swap(index, random.below(index + 1));
    }
    let mut offsets = vec![0; lengths.len()];
    let mut end = random.below(10);
    for &index in &order {
        offsets[index] = end;
        end += lengths[index] + random.below(3);
    }
    let arena = Arena::new(end + 10);
    let mut list = ScatterList::with_capacity(lengths.len());
    let mut places = Vec::with_capacity(total);
    for (&offset, &length) in offsets.iter().zip(&lengths) {
        list.push(&arena.region, offset, length).unwrap();
        places.extend(offset..offset + length);
    }
    (arena, list, places)
}

#[test]
fn random_scatter_lists_land_every_byte_in_its_place() {
    let mut random = Random::new("random_scatter_lists");
    let sizes = [1, 7, 100, 4096, 70_001, 1 << 20, 3_000_000];
    let owner = Owner::start(&sizes);
    let mut reader = Reader::new();
    reader.connect(1, owner.target(2)).unwrap();
    let mut expected = std::collections::HashMap::new();
    let mut retired = 0;
    for round in 0..300 {
        let slot = random.below(sizes.len());
        let size = sizes[slot];
        let offset = random.below(size);
        let length = 1 + random.below(size - offset);
        let (arena, list, places) = scattered(&mut random, length);
        let checksum = random.below(2) == 0;
        let token = reader.post(1, slot as u32, size, offset, list, checksum).unwrap();
        expected.insert(token, (slot, offset, length, arena, places, checksum));
        while expected.len() > random.below(12) || (round == 299 && !expected.is_empty()) {
            let done = reader.next_read();
            let (slot, offset, length, arena, places, checksum) = expected.remove(&done.token).unwrap();
            let landed = done.outcome.unwrap();
            assert_eq!((landed.word.generation, landed.word.tag), (1, 1001));
            let bytes = &object(slot as u32, 1, sizes[slot])[offset..offset + length];
            assert_eq!(landed.check, checksum.then(|| kvfabric_memory::checksum(bytes)));
            let mut image = vec![CANARY; arena.region.length_bytes()];
            for (&place, &byte) in places.iter().zip(bytes) {
                image[place] = byte;
            }
            assert!(arena.bytes() == image, "slot {slot} offset {offset} length {length}");
            retired += 1;
        }
    }
    assert_eq!(retired, 300);
    assert_eq!(reader.provider.in_flight(), 0);
    assert_eq!(owner.server.stats().objects_sent, 300);
}

#[test]
fn lists_of_more_pieces_than_one_call_takes_work() {
    let owner = Owner::start(&[5000]);
    let mut reader = Reader::new();
    reader.connect(1, owner.target(1)).unwrap();
    let arena = Arena::new(10_000);
    let mut list = ScatterList::with_capacity(5000);
    for index in 0..5000 {
        list.push(&arena.region, index * 2, 1).unwrap();
    }
    assert!(list.segments().len() > 4 * crate::limits::IO_VECTORS_MAX);
    reader.post(1, 0, 5000, 0, list, true).unwrap();
    let landed = reader.next_read().outcome.unwrap();
    assert_eq!(landed.check, Some(landed.word.check));
    let bytes = arena.bytes();
    for (index, &byte) in object(0, 1, 5000).iter().enumerate() {
        assert_eq!((bytes[2 * index], bytes[2 * index + 1]), (byte, CANARY));
    }
}

#[test]
fn the_word_shows_what_became_of_the_slot() {
    let owner = Owner::start(&[100, 100]);
    let mut reader = Reader::new();
    reader.connect(1, owner.target(1)).unwrap();
    reader.read_whole(1, 0, 100, 1);
    publish(&owner.memory, 0, 5);
    reader.read_whole(1, 0, 100, 5);
    owner.memory.invalidate(0, 6).unwrap();
    let arena = Arena::new(100);
    reader.post(1, 0, 100, 0, ScatterList::whole(&arena.region), false).unwrap();
    let word = reader.next_read().outcome.unwrap().word;
    assert_eq!((word.generation, word.tag, word.check), (6, 0, 0));
    reader.read_whole(1, 1, 100, 1);
}

/// A stale read must never pass for a good one: the owner overwrites at random while the reader reads, and whatever
/// the word accepts, against an entry that was known before the read, holds the bytes of exactly that generation. The
/// object is large against the socket buffers, so that most overwrites meet a read in its middle: an owner that loads
/// the word before the bytes fails this test within its first dozens of reads.
#[test]
fn an_owner_that_overwrites_meanwhile_is_always_noticed() {
    const BYTES: usize = 6 << 20;
    const CONTENTS: u64 = 3;
    let mut random = Random::new("an_owner_that_overwrites");
    let owner = Owner::start(&[BYTES]);
    let mut reader = Reader::new();
    reader.connect(1, owner.target(1)).unwrap();
    let contents: Vec<Vec<u8>> = (0..CONTENTS).map(|content| object(0, content, BYTES)).collect();
    let published = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let writer = {
        let (memory, published, stop) =
            (Arc::clone(&owner.memory), Arc::clone(&published), Arc::clone(&stop));
        let mut random = Random(random.next());
        let sources: Vec<Region> = contents
            .iter()
            .map(|content| {
                let source = Region::allocate(BYTES).unwrap();
                source.write(0, content).unwrap();
                source
            })
            .collect();
        std::thread::spawn(move || {
            for generation in 2.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                memory.invalidate(0, generation).unwrap();
                let source = ScatterList::whole(&sources[(generation % CONTENTS) as usize]);
                memory.fill(0, &source, false, &stop).ok();
                let word = RawWord { generation, tag: generation + 1000, check: 0, reserved: 0 };
                assert!(memory.publish(0, word).unwrap());
                published.store(generation, Ordering::SeqCst);
                std::thread::sleep(Duration::from_micros(random.next() % 12_000));
            }
        })
    };
    let arena = Arena::new(BYTES);
    let (mut accepted, mut stale) = (0, 0);
    let started = Instant::now();
    while (accepted < 150 || stale < 150) && started.elapsed() < LIMIT / 4 {
        let expected = published.load(Ordering::SeqCst);
        reader.post(1, 0, BYTES, 0, ScatterList::whole(&arena.region), false).unwrap();
        let word = reader.next_read().outcome.unwrap().word;
        if word.generation == expected && word.tag == expected + 1000 {
            assert!(arena.bytes() == contents[(expected % CONTENTS) as usize], "a wrong block was accepted");
            accepted += 1;
        } else {
            stale += 1;
        }
    }
    stop.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    println!("{accepted} accepted, {stale} stale");
    assert!(accepted > 0 && stale > 0, "{accepted} accepted, {stale} stale: nothing was tested");
}

#[test]
fn refused_requests_do_not_disturb_their_neighbours() {
    let owner = Owner::start(&[5000, 5000]);
    let mut reader = Reader::new();
    reader.connect(1, owner.target(1)).unwrap();
    let arenas: Vec<Arena> = (0..9).map(|_| Arena::new(5000)).collect();
    for (index, arena) in arenas.iter().enumerate() {
        let (slot, size) = [(0, 5000), (99, 5000), (1, 5001)][index % 3];
        reader.post(1, slot, size, 0, ScatterList::whole(&arena.region), true).unwrap();
    }
    for (index, arena) in arenas.iter().enumerate() {
        let done = reader.next_read();
        match index % 3 {
            0 => {
                assert!(done.outcome.is_ok());
                assert!(arena.bytes() == object(0, 1, 5000));
            }
            1 => assert_eq!(done.outcome, Err(ReadError::UnknownSlot(99))),
            _ => assert_eq!(done.outcome, Err(ReadError::SizeMismatch)),
        }
        assert!(index % 3 == 0 || arena.is_untouched());
    }
    // Alone on the connection, where the body is received together with the header.
    for _ in 0..3 {
        let arena = Arena::new(5000);
        reader.post(1, 99, 5000, 0, ScatterList::whole(&arena.region), true).unwrap();
        assert_eq!(reader.next_read().outcome, Err(ReadError::UnknownSlot(99)));
        assert!(arena.is_untouched());
        reader.read_whole(1, 1, 5000, 1);
    }
    assert_eq!(owner.server.stats().requests_refused, 9);
}

#[test]
fn bad_ranges_and_full_queues_are_refused_with_the_operation_inside() {
    let owner = Owner::start(&[100]);
    let options = ProviderOptions { requests_in_flight: 3, ..Default::default() };
    let mut reader = Reader::with(options);
    reader.connect(1, owner.target(2)).unwrap();
    let arena = Arena::new(100);
    let whole = || ScatterList::whole(&arena.region);
    for (size, offset, list) in
        [(100, 1, whole()), (99, 0, whole()), (100, 0, ScatterList::default()), (100, usize::MAX, whole())]
    {
        let refused = reader.post(1, 0, size, offset, list, false).unwrap_err();
        assert!(matches!(refused, PostError::BadRange(_)));
    }
    let refused = reader.post(2, 0, 100, 0, whole(), false).unwrap_err();
    assert!(matches!(refused, PostError::NotConnected(_)));
    for _ in 0..6 {
        reader.post(1, 0, 100, 0, whole(), false).unwrap();
    }
    let Err(PostError::QueueFull(op)) = reader.post(1, 0, 100, 0, whole(), false) else {
        panic!("a seventh request on two connections of three");
    };
    assert_eq!(op.destination.total_bytes(), 100);
    assert_eq!(reader.provider.in_flight(), 6);
    for _ in 0..6 {
        assert!(reader.next_read().outcome.is_ok());
    }
    assert_eq!(reader.provider.in_flight(), 0);
    reader.provider.post(PeerKey(1), *op).unwrap();
    assert!(reader.next_read().outcome.is_ok());
}

/// Few connections at work are asked directly and may ask to be woken late; many are found through epoll. Going back
/// and forth between the two loses no byte.
#[test]
fn many_peers_and_few_in_turn() {
    const BYTES: usize = 300_000;
    let owners: Vec<Owner> = (0..20).map(|_| Owner::start(&[BYTES])).collect();
    let mut reader = Reader::new();
    for (peer, owner) in owners.iter().enumerate() {
        reader.provider.connect(PeerKey(peer as u64), owner.target(2));
    }
    for _ in &owners {
        assert!(matches!(reader.next(), Event::Connected { .. }));
    }
    let arenas: Vec<Arena> = owners.iter().map(|_| Arena::new(BYTES)).collect();
    for round in 0..12 {
        let mut posted = 0;
        for (peer, arena) in arenas.iter().enumerate() {
            arena.region.fill(0, BYTES, CANARY).unwrap();
            if round % 3 > 0 || peer < 2 {
                reader.post(peer as u64, 0, BYTES, 0, ScatterList::whole(&arena.region), true).unwrap();
                posted += 1;
            }
            if round % 3 == 2 && peer % 4 == 0 {
                // Some are on their way, and asked to be woken late, when the others join in.
                reader.poll(1);
                reader.provider.wait(Duration::from_micros(50));
            }
        }
        for _ in 0..posted {
            let landed = reader.next_read().outcome.unwrap();
            assert_eq!(landed.check, Some(landed.word.check));
        }
    }
    assert!(arenas.iter().all(|arena| arena.bytes() == object(0, 1, BYTES)));
}

#[test]
fn a_reader_that_does_not_receive_holds_nobody_up() {
    let owner = Owner::start(&[1 << 20]);
    let mut slow = raw_reader(&owner);
    // Far more requests than the owner queues, and far more bytes than any socket buffer holds.
    let request =
        Request { sequence: 0, slot: 0, object_bytes: 1 << 20, object_offset: 0, length_bytes: 1 << 20 };
    let mut frames = Vec::new();
    for _ in 0..600 {
        frames.extend_from_slice(&encode_frame_header(1));
        frames.extend_from_slice(&request.encode());
    }
    std::io::Write::write_all(&mut slow, &frames).unwrap();
    let mut reader = Reader::new();
    reader.connect(1, owner.target(1)).unwrap();
    for _ in 0..50 {
        reader.read_whole(1, 0, 1 << 20, 1);
    }
    // The slow one is served when it wakes up.
    let mut total = 0;
    let mut buffer = vec![0; 1 << 20];
    while total < 600 * ((1 << 20) + 64) {
        let count = std::io::Read::read(&mut slow, &mut buffer).unwrap();
        assert!(count > 0);
        total += count;
    }
    assert_eq!(owner.server.stats().objects_sent, 650);
}

#[test]
fn an_owner_that_goes_away_ends_its_reads() {
    let owner = Owner::start(&[64 << 20]);
    let mut reader = Reader::new();
    reader.connect(1, owner.target(1)).unwrap();
    let arena = Arena::new(64 << 20);
    reader.post(1, 0, 64 << 20, 0, ScatterList::whole(&arena.region), false).unwrap();
    reader.poll(3);
    drop(owner);
    assert!(matches!(reader.next_read().outcome, Err(ReadError::PeerLost(_))));
    assert!(matches!(reader.next(), Event::Disconnected { peer: PeerKey(1), .. }));
    let refused = reader.post(1, 0, 64 << 20, 0, ScatterList::whole(&arena.region), false);
    assert!(matches!(refused, Err(PostError::NotConnected(_))));
}

#[test]
fn a_wake_from_another_thread_ends_the_wait() {
    let mut reader = Reader::new();
    let waker = reader.provider.waker();
    let started = Instant::now();
    let other = std::thread::spawn(move || waker.wake());
    reader.provider.wait(LIMIT * 10);
    assert!(started.elapsed() < LIMIT * 10);
    other.join().unwrap();
    // Moved to another thread, as the node does with it.
    std::thread::spawn(move || drop(reader.provider)).join().unwrap();
}

#[test]
fn the_owners_memory_outlives_its_server() {
    let owner = Owner::start(&[100]);
    let Owner { memory, server, .. } = owner;
    drop(server);
    assert_eq!(Arc::strong_count(&memory), 1);
    let region = Region::allocate(1).unwrap();
    assert_eq!(region.handle_count(), 1);
}
