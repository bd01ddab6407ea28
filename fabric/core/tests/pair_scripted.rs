//! Two or three ranks and a directory under virtual time: each hazard of design 1.6 once, on purpose.
//!
//! The world itself checks every delivered byte, every destination after its block ended, and every load's end.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test's checks.

use std::collections::BTreeSet;
use std::time::Duration;

use kvfabric_core::load::{LoadError, VerifyPolicy};
use kvfabric_core::owner::{PutError, Stored};
use kvfabric_core::testing::{Mutation, Outcome, World, WorldOptions};
use kvfabric_core::{TransportKind, Verify};

const MILLI: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

fn options() -> WorldOptions {
    WorldOptions::default()
}

/// Stores keys and waits until the directory knows them.
fn publish(world: &mut World, node: usize, keys: &[u64]) {
    let store = world.store(node, keys, SECOND).unwrap();
    assert!(world.finish_store(store).iter().all(Result::is_ok));
    world.run_for(20 * MILLI);
}

fn load(world: &mut World, node: usize, keys: &[u64], within: Duration) -> Vec<Outcome> {
    let load = world.load(node, keys, within).unwrap();
    world.finish(load)
}

fn errors(outcomes: &[Outcome]) -> BTreeSet<&'static str> {
    outcomes.iter().map(|outcome| outcome.map_or_else(name, |_| "ok")).collect()
}

fn name(error: LoadError) -> &'static str {
    match error {
        LoadError::NotFound => "not found",
        LoadError::Stale => "stale",
        LoadError::TagMismatch => "tag",
        LoadError::ChecksumMismatch => "checksum",
        LoadError::Unreachable => "unreachable",
        LoadError::DirectoryUnavailable => "directory",
        LoadError::DeadlineExceeded => "deadline",
        LoadError::Cancelled => "cancelled",
        _ => "other",
    }
}

#[test]
fn what_one_rank_stores_another_loads() {
    let mut world = World::new(1, 2, options());
    let keys: Vec<u64> = (0..24).collect();
    publish(&mut world, 0, &keys);
    let remote = load(&mut world, 1, &keys, SECOND);
    assert!(remote.iter().all(|outcome| outcome.is_ok_and(|used| used.transport == TransportKind::Rdma)));
    let local = load(&mut world, 0, &keys, SECOND);
    assert!(local.iter().all(Result::is_ok), "its own pool is a peer like any other");
    assert_eq!(errors(&load(&mut world, 1, &[99], SECOND)), BTreeSet::from(["not found"]));
    let stats = world.rank(1).unwrap().load_stats();
    assert_eq!((stats.blocks_ok, stats.bytes_ok, stats.failed.not_found), (24, 24 * 2048, 1));
    // The owner hears what was read.
    world.run_for(SECOND);
    assert_eq!(world.rank(0).unwrap().owner_stats().touched, 48);
    world.check();
}

#[test]
fn a_key_stored_twice_is_filled_once_and_again_after_its_eviction() {
    let mut world = World::new(2, 2, options());
    let store = world.store(0, &[1, 1], SECOND).unwrap();
    assert_eq!(world.finish_store(store), [Ok(Stored::Filled), Ok(Stored::Resident)]);
    let first = world.load(0, &[1], SECOND).unwrap();
    world.finish(first);
    assert!(world.evict(0, 1));
    publish(&mut world, 0, &[1]);
    let second = world.load(1, &[1], SECOND).unwrap();
    world.finish(second);
    let (first, second) = (world.delivered(first)[0].unwrap(), world.delivered(second)[0].unwrap());
    assert_ne!(first, second, "another put's bytes");
    world.check();
}

#[test]
fn a_block_evicted_between_locate_and_read_is_a_miss() {
    let mut world = World::new(3, 2, options());
    publish(&mut world, 0, &[1, 2]);
    // The directory does not hear of the eviction.
    world.cut_directory(0);
    assert!(world.evict(0, 1));
    assert_eq!(load(&mut world, 1, &[1], SECOND), [Err(LoadError::Stale)]);
    // The report removed the entry.
    assert_eq!(load(&mut world, 1, &[1], SECOND), [Err(LoadError::NotFound)]);
    assert!(load(&mut world, 1, &[2], SECOND)[0].is_ok());
    world.check();
}

#[test]
fn bytes_overwritten_during_the_read_are_a_miss() {
    let mut stale = 0;
    for seed in 0..60 {
        let mut world = World::new(seed, 2, WorldOptions { pool_bytes: 16 << 10, ..options() });
        publish(&mut world, 0, &[1, 2, 3, 4, 5, 6, 7, 8]);
        let load = world.load(1, &[1, 2, 3, 4, 5, 6, 7, 8], SECOND).unwrap();
        assert!(world.run_until(SECOND, |world| world.reads_in_flight() > 0));
        world.run_for(Duration::from_micros(5 * seed));
        // The pool is full: these evict what is being read, and overwrite it.
        let store = world.store(0, &[11, 12, 13, 14], SECOND).unwrap();
        let outcomes = world.finish(load);
        world.finish_store(store);
        stale += outcomes.iter().filter(|outcome| **outcome == Err(LoadError::Stale)).count();
        world.check();
    }
    assert!(stale > 60, "{stale}");
}

#[test]
fn an_owner_that_restarts_with_the_same_slots_and_generations_is_a_miss() {
    for silent_reconnect in [false, true] {
        let mut world = World::new(4, 3, WorldOptions { silent_reconnect, ..options() });
        publish(&mut world, 0, &[1, 2, 3]);
        assert!(load(&mut world, 1, &[1], SECOND)[0].is_ok());
        let before = world.rank(0).unwrap().resident(World::key(2).fingerprint()).unwrap();
        // For a while the directory lists the former life.
        world.cut_directory(0);
        world.start(0);
        let store = world.store(0, &[1, 2, 3], SECOND).unwrap();
        world.finish_store(store);
        let after = world.rank(0).unwrap().resident(World::key(2).fingerprint()).unwrap();
        assert_eq!((before.slot, before.generation), (after.slot, after.generation));
        // R1 refuses where the handshake shows the new life; where nothing shows it, the word's tag does (R3).
        let (reader, wanted) =
            if silent_reconnect { (1, LoadError::TagMismatch) } else { (2, LoadError::Stale) };
        assert_eq!(load(&mut world, reader, &[2, 3], SECOND), [Err(wanted); 2], "silent: {silent_reconnect}");
        world.check();
    }
}

#[test]
fn an_owner_that_dies_during_the_read_fails_the_block_and_nothing_lands_later() {
    for seed in 0..40 {
        let mut world = World::new(seed, 2, options());
        let keys: Vec<u64> = (0..16).collect();
        publish(&mut world, 0, &keys);
        let load = world.load(1, &keys, SECOND / 4).unwrap();
        assert!(world.run_until(SECOND, |world| world.reads_in_flight() > 8));
        world.crash(0);
        let outcomes = world.finish(load);
        assert!(errors(&outcomes).is_subset(&BTreeSet::from(["ok", "unreachable", "stale", "deadline"])));
        assert!(outcomes.iter().any(Result::is_err));
        world.run_for(2 * SECOND);
        world.check();
    }
}

#[test]
fn a_stuck_read_is_ended_at_the_deadline_and_final_when_it_retired() {
    let mut world = World::new(5, 2, WorldOptions { drain_max: 40 * MILLI, ..options() });
    publish(&mut world, 0, &[1, 2, 3]);
    world.options_mut().stuck_odds = 1;
    let started = world.now();
    let load = world.load(1, &[1, 2, 3], SECOND / 5).unwrap();
    assert_eq!(world.finish(load), [Err(LoadError::DeadlineExceeded); 3]);
    assert!(world.now().since(started) >= SECOND / 5);
    assert_eq!(world.reads_in_flight(), 0);
    assert_eq!(world.rank(1).unwrap().load_stats().reads_aborted, 3);
    world.check();
}

#[test]
fn a_stalled_owner_costs_a_second_and_not_the_load() {
    let mut world = World::new(6, 3, options());
    publish(&mut world, 0, &[1]);
    publish(&mut world, 1, &[1]);
    world.cut(2, 0);
    world.cut(2, 1);
    world.run_for(MILLI);
    world.heal(2, 0);
    world.heal(2, 1);
    assert!(load(&mut world, 2, &[1], SECOND)[0].is_ok());
    // Whichever is asked first hangs; the other serves.
    world.cut(2, 0);
    assert!(load(&mut world, 2, &[1], 10 * SECOND)[0].is_ok());
    world.heal(2, 0);
    world.run_for(60 * SECOND);
    world.cut(2, 1);
    assert!(load(&mut world, 2, &[1], 10 * SECOND)[0].is_ok());
    world.check();
}

#[test]
fn cancelling_ends_a_load_after_its_reads() {
    for seed in 0..20 {
        let mut world = World::new(seed, 2, WorldOptions { stuck_odds: 2, ..options() });
        publish(&mut world, 0, &[1, 2, 3, 4]);
        let load = world.load(1, &[1, 2, 3, 4], 60 * SECOND).unwrap();
        world.run_until(SECOND, |world| world.reads_in_flight() == 4);
        world.cancel(1, load);
        let outcomes = world.finish(load);
        assert!(errors(&outcomes).is_subset(&BTreeSet::from(["ok", "cancelled"])));
        assert_eq!(world.reads_in_flight(), 0);
        world.check();
    }
}

#[test]
fn a_directory_that_is_lost_costs_hits_and_comes_back_by_announcements() {
    let mut world = World::new(7, 2, options());
    publish(&mut world, 0, &[1, 2]);
    world.crash_directory();
    let store = world.store(0, &[3], SECOND).unwrap();
    assert_eq!(world.finish_store(store), [Ok(Stored::Filled)], "storing does not need the directory");
    assert_eq!(load(&mut world, 1, &[1], 5 * SECOND), [Err(LoadError::DirectoryUnavailable)]);
    assert!(load(&mut world, 0, &[1, 3], SECOND).iter().all(Result::is_ok), "nor does the own pool");
    world.start_directory();
    world.run_for(5 * SECOND);
    assert!(load(&mut world, 1, &[1, 2, 3], SECOND).iter().all(Result::is_ok));
    world.check();
}

#[test]
fn a_lost_miss_report_delays_the_end_and_tells_the_scheduler() {
    let mut world = World::new(8, 2, options());
    publish(&mut world, 0, &[1]);
    world.cut_directory(0);
    world.evict(0, 1);
    world.lose_reports(true);
    let started = world.now();
    assert_eq!(load(&mut world, 1, &[1], SECOND), [Err(LoadError::Stale)]);
    assert!(world.now().since(started) >= 50 * MILLI);
    assert_eq!(world.notified(), [World::key(1).fingerprint()]);
    world.check();
}

#[test]
fn another_replica_serves_when_the_first_does_not() {
    let mut world = World::new(9, 4, options());
    for node in 0..3 {
        publish(&mut world, node, &[1, 2, 3]);
    }
    world.cut_directory(0);
    world.evict(0, 1);
    world.crash(1);
    let outcomes = load(&mut world, 3, &[1, 2, 3], 5 * SECOND);
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    world.check();
}

#[test]
fn loads_of_the_same_keys_at_once_do_not_mind_each_other() {
    let mut world = World::new(10, 2, options());
    let keys: Vec<u64> = (0..12).chain(0..12).collect();
    publish(&mut world, 0, &keys);
    let loads: Vec<_> = (0..6).map(|_| world.load(1, &keys, SECOND).unwrap()).collect();
    for load in loads {
        assert!(world.finish(load).iter().all(Result::is_ok));
    }
    world.check();
}

#[test]
fn a_cross_wired_entry_is_a_tag_mismatch() {
    let mut world = World::new(11, 2, options());
    publish(&mut world, 0, &[1, 2]);
    world.miswire(1, 2);
    assert_eq!(load(&mut world, 1, &[1], SECOND), [Err(LoadError::TagMismatch)]);
    assert_eq!(world.rank(1).unwrap().load_stats().tag_mismatches, 1);
    world.check();
}

#[test]
fn corrupted_bytes_are_a_checksum_mismatch() {
    let mut world =
        World::new(12, 2, WorldOptions { verify: VerifyPolicy::all(Verify::Always), ..options() });
    publish(&mut world, 0, &[1, 2]);
    world.options_mut().corrupt_odds = 1;
    assert_eq!(load(&mut world, 1, &[1], SECOND), [Err(LoadError::ChecksumMismatch)]);
    // The own pool is found out as well, and does not offer the block any longer.
    assert_eq!(load(&mut world, 0, &[2], SECOND), [Err(LoadError::ChecksumMismatch)]);
    assert!(world.rank(0).unwrap().resident(World::key(2).fingerprint()).is_none());
    world.check();
}

#[test]
fn a_cleared_namespace_is_gone_everywhere_and_can_be_filled_again() {
    let mut world = World::new(14, 3, options());
    publish(&mut world, 0, &[1, 2]);
    publish(&mut world, 1, &[2, 3]);
    let clear = world.clear();
    assert!(world.run_until(5 * SECOND, |world| world.cleared(clear).is_some()));
    assert_eq!(world.cleared(clear), Some(true));
    for node in 0..3 {
        let gone = load(&mut world, node, &[1, 2, 3], SECOND);
        assert_eq!(gone, [Err(LoadError::NotFound); 3], "node {node}");
        assert_eq!(world.rank(node).unwrap().owner_stats().resident, 0);
    }
    publish(&mut world, 1, &[1, 2]);
    assert!(load(&mut world, 2, &[1, 2], SECOND).iter().all(Result::is_ok));
    // A rank that cannot be reached makes the answer false, and its entries stay hidden.
    world.cut_directory(1);
    let clear = world.clear();
    assert!(world.run_until(5 * SECOND, |world| world.cleared(clear).is_some()));
    assert_eq!(world.cleared(clear), Some(false));
    assert_eq!(errors(&load(&mut world, 2, &[1], SECOND)), BTreeSet::from(["not found"]));
    // When it is back, it hears of what it missed.
    world.heal_directory(1);
    world.run_for(10 * SECOND);
    assert_eq!(world.rank(1).unwrap().owner_stats().resident, 0);
    world.check();
}

#[test]
fn stores_end_by_their_deadline_and_when_cancelled() {
    let mut world =
        World::new(13, 1, WorldOptions { fill_delay_max: 400 * MILLI, pool_bytes: 16 << 10, ..options() });
    let keys: Vec<u64> = (0..8).collect();
    let late = world.store(0, &keys, 50 * MILLI).unwrap();
    let outcomes = world.finish_store(late);
    assert!(outcomes.contains(&Err(PutError::DeadlineExceeded)), "{outcomes:?}");
    let given_up = world.store(0, &[20, 21], 60 * SECOND).unwrap();
    world.run_for(MILLI);
    world.cancel_store(0, given_up);
    assert_eq!(world.finish_store(given_up), [Err(PutError::Cancelled); 2]);
    world.options_mut().fill_delay_max = MILLI;
    let again = world.store(0, &[20, 21], SECOND).unwrap();
    assert_eq!(world.finish_store(again), [Ok(Stored::Filled); 2]);
    assert!(load(&mut world, 0, &[20, 21], SECOND).iter().all(Result::is_ok));
    world.check();
}

/// Proves that the checks bite: with a rule broken, some seed must be caught.
fn caught(mutation: Mutation) -> bool {
    (0..200).any(|seed| {
        std::panic::catch_unwind(|| {
            let mut world = World::new(
                seed,
                2,
                WorldOptions { pool_bytes: 16 << 10, mutation: Some(mutation), ..options() },
            );
            publish(&mut world, 0, &[1, 2, 3, 4, 5, 6, 7, 8]);
            let load = world.load(1, &[1, 2, 3, 4, 5, 6, 7, 8], MILLI).unwrap();
            world.run_until(SECOND, |world| world.reads_in_flight() > 0);
            world.run_for(Duration::from_micros(4 * seed));
            world.store(0, &[11, 12, 13, 14], SECOND);
            world.finish(load);
            world.run_for(SECOND);
            world.check();
        })
        .is_err()
    })
}

#[test]
fn broken_rules_are_caught() {
    std::panic::set_hook(Box::new(|_| {}));
    let escaped: Vec<Mutation> =
        [Mutation::WordBeforeData, Mutation::RetireBeforeDrained, Mutation::InvalidateAfterFill]
            .into_iter()
            .filter(|mutation| !caught(*mutation))
            .collect();
    let _ = std::panic::take_hook();
    assert_eq!(escaped, []);
}
