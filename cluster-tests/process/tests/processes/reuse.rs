//! Memory and slots that are used again: readers get the stored bytes or a miss, never the new ones.

use std::time::{Duration, Instant};

use kvfabric_process_tests::harness::{eventually, Fabric, RELAXED_PEER_TIMEOUT_MS, SHAPE};
use kvfabric_process_tests::protocol::{ChurnLoop, Command, Keys, LoadLoop};
use kvfabric_process_tests::random::{run_time, seed, Random};

const KEYS: Keys = Keys { first: 0, count: 64 };
const BUDGET: Duration = Duration::from_secs(5);
const DEADLINE: Duration = Duration::from_secs(20);

/// The engine takes its memory back as soon as the store is final, and writes other things into it.
#[test]
fn owner_reuses_the_memory_it_stored_from() {
    for transport in ["shm", "tcp"] {
        let fabric = Fabric::start(RELAXED_PEER_TIMEOUT_MS);
        let mut owner = fabric.rank(&fabric.spec("owner", transport));
        let mut reader = fabric.rank(&fabric.spec("reader", transport));
        for put in 1..=5 {
            assert_eq!(owner.count(&Command::StoreAndReuse { keys: KEYS, put }), KEYS.count);
            let tally = reader.load(KEYS, DEADLINE);
            assert_eq!(tally.puts.into_iter().collect::<Vec<_>>(), [(put, KEYS.count)], "{:?}", tally.failed);
            assert_eq!(owner.count(&Command::Evict { keys: KEYS }), KEYS.count);
        }
    }
}

/// A pool with room for a fifth of the keys, its slots in constant reuse, under readers with hints that are out of date.
fn slots_in_constant_reuse(test: &str, transport: &str) {
    let mut random = Random::new(seed(test));
    let fabric = Fabric::start(RELAXED_PEER_TIMEOUT_MS);
    let mut spec = fabric.spec("owner", transport);
    spec.pool_bytes = 64 * SHAPE.object_bytes as u64;
    spec.extent_bytes = 8 * SHAPE.object_bytes as u64;
    let mut owner = fabric.rank(&spec);
    let keys = Keys { first: 0, count: 320 };
    owner.done(&Command::StartChurn(ChurnLoop {
        keys,
        first_put: 1,
        batch: 16,
        pause_ms: 0,
        seed: random.number(),
    }));
    let mut readers: Vec<_> = (0..2)
        .map(|number| {
            let mut reader = fabric.rank(&fabric.spec(&format!("reader-{number}"), transport));
            let spec = LoadLoop { keys, deadline_ms: 3_000, cancel_one_in: 9, seed: random.number() };
            reader.start_loads(spec);
            reader
        })
        .collect();
    std::thread::sleep(run_time(Duration::from_secs(8)));
    let (mut right, mut stale) = (0, 0);
    for reader in &mut readers {
        let tally = reader.tally(&Command::StopLoads);
        println!("{}: {}", reader.name(), tally.summary());
        right += tally.right;
        stale += tally.stale + reader.rank().stale_reads;
        assert_eq!(reader.rank().mismatches, 0);
    }
    let stored = owner.count(&Command::StopChurn);
    println!("{stored} blocks stored, {right} loaded, {stale} found stale");
    assert!(stored > 320 && right > 0, "no load to speak of");
    let figures = owner.rank();
    assert!(figures.pool_used_bytes <= figures.pool_capacity_bytes, "{figures:?}");
}

#[test]
fn slots_in_constant_reuse_over_shm() {
    slots_in_constant_reuse("slots_in_constant_reuse_over_shm", "shm");
}

#[test]
fn slots_in_constant_reuse_over_tcp() {
    slots_in_constant_reuse("slots_in_constant_reuse_over_tcp", "tcp");
}

/// Loads given up at random moments; their memory is used again as soon as they are final, not before.
#[test]
fn loads_given_up_at_random_moments() {
    for transport in ["shm", "tcp"] {
        let mut random = Random::new(seed("loads_given_up_at_random_moments"));
        let fabric = Fabric::start(RELAXED_PEER_TIMEOUT_MS);
        let mut owner = fabric.rank(&fabric.spec("owner", transport));
        let mut reader = fabric.rank(&fabric.spec("reader", transport));
        owner.store(KEYS, 1);
        let spec = LoadLoop { keys: KEYS, deadline_ms: 10_000, cancel_one_in: 2, seed: random.number() };
        reader.start_loads(spec);
        std::thread::sleep(run_time(Duration::from_secs(3)));
        let tally = reader.tally(&Command::StopLoads);
        println!("{transport}: {}", tally.summary());
        assert!(tally.failed.contains_key("Cancelled") && tally.right > 0, "{}", tally.summary());
        // Given up by their own engine: nothing of it counts against the owner.
        assert_eq!(reader.load(KEYS, DEADLINE).right, KEYS.count);
    }
}

/// A namespace is cleared in the whole cluster under load; what was stored before is never loaded after it.
#[test]
fn cleared_blocks_are_never_loaded() {
    let fabric = Fabric::start(RELAXED_PEER_TIMEOUT_MS);
    let mut owners: Vec<_> =
        (0..2).map(|number| fabric.rank(&fabric.spec(&format!("owner-{number}"), "auto"))).collect();
    let mut reader = fabric.rank(&fabric.spec("reader", "auto"));
    for round in 1..=5 {
        for (number, owner) in owners.iter_mut().enumerate() {
            owner.store(KEYS, round * 10 + number as u64);
        }
        reader.start_loads(LoadLoop { keys: KEYS, deadline_ms: 5_000, cancel_one_in: 0, seed: round });
        eventually("the load runs", || reader.tally(&Command::PeekLoads).right > 0);
        let begun = Instant::now();
        assert_eq!(owners[0].count(&Command::Clear), 1, "the clear was not confirmed by all");
        println!("cleared in {:?}", begun.elapsed());
        let tally = reader.tally(&Command::StopLoads);
        assert!(tally.puts.keys().all(|put| put / 10 == round), "{:?}", tally.puts);
        assert_eq!(reader.lookup(KEYS, BUDGET), (0, true));
        assert_eq!(reader.load(KEYS, DEADLINE).missed, KEYS.count);
        for owner in &mut owners {
            assert_eq!(owner.rank().pool_objects, 0);
        }
    }
}
