//! What the death of one process means for the others: detection, replicas, loads in flight, membership.
#![allow(clippy::unwrap_used, clippy::panic)] // A test file.

use std::time::{Duration, Instant};

use kvfabric_process_tests::harness::{eventually, Fabric, Process, PATIENCE, RELAXED_PEER_TIMEOUT_MS};
use kvfabric_process_tests::payload::Shape;
use kvfabric_process_tests::protocol::{Command, Keys, RankSpec, Reply, Tally};

const KEYS: Keys = Keys { first: 0, count: 64 };
const BUDGET: Duration = Duration::from_secs(5);
const DEADLINE: Duration = Duration::from_secs(20);

/// Blocks of 1 MiB: a load of 64 of them takes long enough to be met in flight.
fn large(fabric: &Fabric, name: &str, transport: &str) -> RankSpec {
    let mut spec = fabric.spec(name, transport);
    spec.shape = Shape { object_bytes: 1 << 20, pieces: 16 };
    spec.extent_bytes = 16 << 20;
    spec.pool_bytes = 128 << 20;
    spec
}

fn in_flight(reader: &mut Process) -> bool {
    matches!(reader.ask(&Command::EndLoad { cancel: false, wait_ms: 0 }), Reply::Pending)
}

fn end_load(reader: &mut Process) -> Tally {
    reader.tally(&Command::EndLoad { cancel: false, wait_ms: 40_000 })
}

/// The directory sees the end of a process through its liveness connection, which the kernel closes.
fn death_is_noticed(peer_timeout_ms: u64) {
    let fabric = Fabric::start(peer_timeout_ms);
    let mut owner = fabric.rank(&fabric.spec("owner", "auto"));
    let mut reader = fabric.rank(&fabric.spec("reader", "auto"));
    owner.store(KEYS, 1);
    assert_eq!(reader.lookup(KEYS, BUDGET), (KEYS.count, true));
    let killed = Instant::now();
    owner.kill();
    eventually("the dead owner's keys are misses", || reader.lookup(KEYS, BUDGET) == (0, true));
    println!("owner's death seen by lookups after {:?}", killed.elapsed());
    assert_eq!(reader.load(KEYS, DEADLINE).missed, KEYS.count);
}

#[test]
fn death_of_an_owner_is_seen_by_lookups() {
    death_is_noticed(1_000);
}

#[test]
fn death_is_seen_at_once_however_long_the_peer_timeout_is() {
    death_is_noticed(60_000);
}

#[test]
fn owner_comes_back_under_its_name_and_port_with_other_content() {
    for transport in ["shm", "tcp"] {
        let fabric = Fabric::start(RELAXED_PEER_TIMEOUT_MS);
        let spec = fabric.spec("owner", transport);
        let mut owner = fabric.rank(&spec);
        let mut reader = fabric.rank(&fabric.spec("reader", transport));
        for life in 1..=4 {
            owner.store(KEYS, life);
            let tally = reader.load(KEYS, DEADLINE);
            // One put for all: nothing of an earlier life.
            assert_eq!(
                tally.puts.into_iter().collect::<Vec<_>>(),
                [(life, KEYS.count)],
                "{:?}",
                tally.failed
            );
            let before = owner.rank().incarnation;
            owner.kill();
            let killed = Instant::now();
            owner = fabric.rank(&spec);
            println!("{transport}: owner is a member again {:?} after its death", killed.elapsed());
            assert_ne!(owner.rank().incarnation, before);
            // Empty until it stores again: the earlier life's entries are gone for good.
            assert_eq!(reader.lookup(KEYS, BUDGET), (0, true));
            assert_eq!(reader.load(KEYS, DEADLINE).missed, KEYS.count);
        }
        assert_eq!(reader.rank().mismatches, 0);
    }
}

/// Two owners have the same keys with bytes of their own. One dies in the middle of a load: each block then comes from
/// the other, whole, or fails.
fn replica_takes_over(transport: &str) {
    let fabric = Fabric::start(RELAXED_PEER_TIMEOUT_MS);
    let spec = large(&fabric, "owner-1", transport);
    let mut first = fabric.rank(&spec);
    let mut second = fabric.rank(&large(&fabric, "owner-2", transport));
    let mut reader = fabric.rank(&large(&fabric, "reader", transport));
    second.store(KEYS, 2);
    let (mut right, mut both, mut met) = (0, 0, 0);
    for life in 0..6 {
        first.store(KEYS, 100 + life);
        // Both owners are connected: what follows is about the death alone.
        reader.load(KEYS, DEADLINE);
        reader.done(&Command::BeginLoad { keys: KEYS, deadline_ms: 20_000 });
        std::thread::sleep(Duration::from_millis(2 * life));
        met += u64::from(in_flight_then(&mut reader, || first.kill()));
        let tally = end_load(&mut reader);
        println!("life {life}: {}", tally.summary());
        assert_eq!(tally.right + tally.missed + tally.stale + tally.failed_blocks(), KEYS.count);
        right += tally.right;
        both += u64::from(tally.puts.len() > 1);
        first = fabric.rank(&spec);
    }
    println!("{transport}: {met} loads met the death in flight, {both} had blocks of both owners, {right} blocks right");
    // The survivor has every block, so a death costs nothing but time.
    assert_eq!(right, 6 * KEYS.count);
    let canaries = reader.count(&Command::CheckCanaries);
    assert_eq!(canaries, 0);
}

/// Does something while a load is in flight. Returns whether the load was still in flight just before.
fn in_flight_then(reader: &mut Process, act: impl FnOnce()) -> bool {
    reader.tell(&Command::EndLoad { cancel: false, wait_ms: 0 });
    act();
    match reader.reply(PATIENCE) {
        Reply::Pending => true,
        // The load was faster; its figures are those of a load without a death, and are asked for again below.
        Reply::Tally(tally) => {
            tally.assert_safe("reader");
            assert_eq!(tally.right, KEYS.count);
            reader.done(&Command::BeginLoad { keys: KEYS, deadline_ms: 20_000 });
            false
        }
        other => panic!("unexpected {other:?}"),
    }
}

#[test]
fn replica_takes_over_when_an_owner_dies_over_shm() {
    replica_takes_over("shm");
}

#[test]
fn replica_takes_over_when_an_owner_dies_over_tcp() {
    replica_takes_over("tcp");
}

/// The only owner dies in the middle of a load: each block is right or failed, and the load ends long before its
/// deadline.
#[test]
fn load_ends_soon_when_the_only_owner_dies() {
    let fabric = Fabric::start(RELAXED_PEER_TIMEOUT_MS);
    let spec = large(&fabric, "owner", "tcp");
    let mut owner = fabric.rank(&spec);
    let mut reader = fabric.rank(&large(&fabric, "reader", "tcp"));
    owner.store(KEYS, 1);
    // Stopped first, so that the death meets the load in flight.
    reader.load(Keys { first: 0, count: 1 }, DEADLINE);
    owner.stop();
    reader.done(&Command::BeginLoad { keys: KEYS, deadline_ms: 60_000 });
    std::thread::sleep(Duration::from_millis(50));
    assert!(in_flight(&mut reader), "a stopped owner cannot serve");
    let killed = Instant::now();
    owner.kill();
    let tally = end_load(&mut reader);
    println!("load final {:?} after its owner's death: {}", killed.elapsed(), tally.summary());
    assert_eq!(tally.right, 0);
    assert_eq!(tally.missed + tally.stale + tally.failed_blocks(), KEYS.count);
    assert!(killed.elapsed() < Duration::from_secs(30), "the load waited for its deadline");
}

/// Rule M3: ranks join a new directory by themselves and announce what they have; lookups hit again.
#[test]
fn ranks_rejoin_a_restarted_directory() {
    let mut fabric = Fabric::start(RELAXED_PEER_TIMEOUT_MS);
    let mut owner = fabric.rank(&fabric.spec("owner", "auto"));
    let mut reader = fabric.rank(&fabric.spec("reader", "auto"));
    owner.store(KEYS, 1);
    let incarnation = owner.rank().incarnation;
    for pause_ms in [0, 1_500] {
        fabric.kill_directory();
        // Bounded and without a hit while it is gone.
        let (hits, complete) = reader.lookup(KEYS, Duration::from_millis(200));
        assert_eq!((hits, complete), (0, false));
        std::thread::sleep(Duration::from_millis(pause_ms));
        // What is stored meanwhile is announced later.
        let more = Keys { first: 1_000 + pause_ms, count: 8 };
        owner.tell(&Command::Store { keys: more, put: 2 });
        fabric.restart_directory();
        let restarted = Instant::now();
        eventually("lookups hit again", || reader.lookup(KEYS, BUDGET) == (KEYS.count, true));
        println!("lookups hit again {:?} after the directory's restart", restarted.elapsed());
        assert!(matches!(owner.reply(PATIENCE), Reply::Count(8)));
        assert_eq!(owner.rank().incarnation, incarnation);
        assert_eq!(reader.load(KEYS, DEADLINE).right, KEYS.count);
        assert_eq!(reader.load(more, DEADLINE).right, 8);
        let figures = fabric.directory.directory();
        assert_eq!((figures.ranks_live, figures.ranks_hidden), (2, 0));
    }
}

/// Rule M3: a load that has its entries needs no directory.
fn load_outlives_the_directory(transport: &str) {
    let mut fabric = Fabric::start(RELAXED_PEER_TIMEOUT_MS);
    let mut owner = fabric.rank(&large(&fabric, "owner", transport));
    let mut reader = fabric.rank(&large(&fabric, "reader", transport));
    owner.store(KEYS, 1);
    let mut met = false;
    for _ in 0..20 {
        assert_eq!(reader.load(Keys { first: 0, count: 1 }, DEADLINE).right, 1);
        reader.done(&Command::BeginLoad { keys: KEYS, deadline_ms: 20_000 });
        // Reads begin after LOCATE: a byte that has arrived says that the entries are known.
        std::thread::sleep(Duration::from_millis(8));
        let was_in_flight = in_flight_then(&mut reader, || fabric.kill_directory());
        let tally = end_load(&mut reader);
        println!("{transport}: in flight {was_in_flight}: {}", tally.summary());
        // A load that had not been located yet fails for the directory's sake, and for nothing else.
        assert_eq!(tally.right + tally.failed.get("DirectoryUnavailable").unwrap_or(&0), KEYS.count);
        fabric.restart_directory();
        eventually("lookups hit again", || reader.lookup(KEYS, BUDGET) == (KEYS.count, true));
        if was_in_flight && tally.right == KEYS.count {
            met = true;
            break;
        }
    }
    assert!(met, "no load was met in flight after its LOCATE");
}

#[test]
fn load_in_flight_outlives_the_directory_over_shm() {
    load_outlives_the_directory("shm");
}

#[test]
fn load_in_flight_outlives_the_directory_over_tcp() {
    load_outlives_the_directory("tcp");
}

/// Names are unique: a second live process of a name is refused within seconds, and the first one goes on.
#[test]
fn second_rank_of_a_name_is_refused_and_the_first_goes_on() {
    let fabric = Fabric::start(RELAXED_PEER_TIMEOUT_MS);
    let spec = fabric.spec("twin", "auto");
    let mut first = fabric.rank(&spec);
    let mut reader = fabric.rank(&fabric.spec("reader", "auto"));
    first.store(KEYS, 1);
    let mut second = fabric.spawn(&RankSpec { listen: "127.0.0.1:0".into(), ..spec });
    match second.reply(PATIENCE) {
        Reply::Error { kind, message, after_ms } => {
            println!("refused after {after_ms} ms: {message}");
            assert_eq!(kind, "JoinRefused");
            assert!(message.contains("twin") && message.contains("--name"), "{message}");
        }
        other => panic!("the second was not refused: {other:?}"),
    }
    assert_eq!(reader.lookup(KEYS, BUDGET), (KEYS.count, true));
    assert_eq!(reader.load(KEYS, DEADLINE).right, KEYS.count);
    first.store(Keys { first: 500, count: 4 }, 2);
    assert_eq!(reader.load(Keys { first: 500, count: 4 }, DEADLINE).right, 4);
}
