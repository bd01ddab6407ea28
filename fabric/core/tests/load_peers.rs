//! Peers and flow control: the peer machine of design 1.8, windows, fairness, local shortages, stalls.

mod load_support;

use std::time::Duration;

use kvfabric_core::limits::{CONNECT_TIMEOUT, SUSPECT_MAX, SUSPECT_MIN};
use kvfabric_core::load::{
    LoadBlock, LoadError, LoadId, LoaderConfig, MissReason, PeerFailure, ReadFailure, SHORTAGE_PAUSE_MIN,
    STALL_MIN,
};
use kvfabric_core::RankId;
use load_support::*;

const SECOND: Duration = Duration::from_secs(1);
const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn a_peer_that_does_not_connect_is_suspected_and_left_alone_for_longer_each_time() {
    let mut rig = Rig::new();
    let mut pauses = Vec::new();
    for load in 0..8 {
        rig.load_located(load, vec![block(1)], &[&[replica(2, 5, 9)]], MINUTE);
        assert_eq!(connects_in(&rig.actions()), [RankId(2)]);
        let actions = rig.pass(CONNECT_TIMEOUT);
        assert_eq!(reports_in(&actions)[0].2, MissReason::Unreachable);
        rig.acknowledge(reports_in(&actions)[0].0);
        assert_eq!(done_in(&rig.actions()), [(0, Err(LoadError::Unreachable))]);
        // Until it is tried again, its replicas fail without a connection.
        let mut pause = Duration::ZERO;
        for probe in 0.. {
            rig.load_located(
                1_000 * (load + 1) + probe,
                vec![block(1)],
                &[&[replica(2, 5, 9)]],
                Duration::from_micros(1),
            );
            if !connects_in(&rig.actions()).is_empty() {
                rig.peer_failed(2, PeerFailure::LocalShortage);
                rig.pass(SECOND / 10);
                break;
            }
            pause += SECOND / 10;
            rig.pass(SECOND / 10);
        }
        pauses.push(pause);
        rig.actions();
    }
    assert!(pauses[0] >= SUSPECT_MIN - SECOND / 10 && pauses[0] <= 2 * SUSPECT_MIN, "{pauses:?}");
    assert!(pauses[2] > pauses[1] && pauses[1] > pauses[0], "{pauses:?}");
    assert!(pauses.iter().all(|pause| *pause <= SUSPECT_MAX + SECOND), "{pauses:?}");
    assert!(pauses[7] >= SUSPECT_MAX - SECOND, "{pauses:?}");
}

#[test]
fn blocks_queued_at_a_failing_peer_go_to_their_other_replicas() {
    let mut config = LoaderConfig::new(incarnation(1));
    config.reads_inflight = 1;
    let mut rig = Rig::with(config);
    let (first, second) = (replica(2, 5, 9), replica(3, 6, 4));
    rig.load_located(1, vec![block(1), block(2)], &[&[first, second], &[first, second]], MINUTE);
    rig.connected(2);
    rig.connected(3);
    let reads = reads_in(&rig.actions());
    assert_eq!(reads.len(), 1);
    rig.read_failed(reads[0].read, ReadFailure::PeerLost);
    rig.peer_failed(2, PeerFailure::Lost);
    let mut actions = rig.actions();
    assert_eq!(reports_in(&actions).len(), 2);
    for _ in 0..2 {
        let read = reads_in(&actions)[0];
        assert_eq!(read.rank, RankId(3));
        rig.read_ok(read.read, word(u64::from(read.block) + 1, second));
        actions = rig.actions();
    }
    assert_eq!(loads_done_in(&actions), [LoadId(1)]);
    assert_eq!((rig.loader.stats().blocks_ok, rig.loader.stats().peer_failures), (2, 1));
}

#[test]
fn entries_of_another_incarnation_are_never_read() {
    let mut rig = Rig::new();
    // The peer answers under another incarnation than the entry's (rule R1).
    rig.load_located(1, vec![block(1)], &[&[replica(2, 5, 9)]], MINUTE);
    assert_eq!(connects_in(&rig.actions()), [RankId(2)]);
    rig.peer_failed(2, PeerFailure::WrongIncarnation);
    let actions = rig.actions();
    assert_eq!(reads_in(&actions).len(), 0);
    assert_eq!(reports_in(&actions)[0].2, MissReason::Stale);
    rig.acknowledge(reports_in(&actions)[0].0);
    assert_eq!(done_in(&rig.actions()), [(0, Err(LoadError::Stale))]);
    // A closed incarnation never comes back, even if it connects.
    let at = replica(4, 1, 1);
    rig.connected(4);
    rig.loader.handle_incarnation_closed(rig.now, at.rank, at.incarnation);
    rig.connected(4);
    rig.load_located(2, vec![block(1)], &[&[at]], MINUTE);
    let actions = rig.actions();
    assert_eq!((reads_in(&actions).len(), connects_in(&actions).len()), (0, 0));
    rig.acknowledge(reports_in(&actions)[0].0);
    assert_eq!(done_in(&rig.actions()), [(0, Err(LoadError::Stale))]);
    assert_eq!(rig.loader.stats().incarnation_mismatches, 2);
}

#[test]
fn closing_an_incarnation_ends_its_reads_and_queues() {
    let mut config = LoaderConfig::new(incarnation(1));
    config.reads_inflight = 1;
    let mut rig = Rig::with(config);
    let (first, second) = (replica(2, 5, 9), replica(3, 6, 4));
    rig.load_located(1, vec![block(1), block(2)], &[&[first, second], &[first]], MINUTE);
    rig.connected(2);
    rig.connected(3);
    let read = reads_in(&rig.actions())[0].read;
    rig.loader.handle_incarnation_closed(rig.now, first.rank, first.incarnation);
    let actions = rig.actions();
    assert_eq!((aborts_in(&actions), reads_in(&actions).len()), (vec![read], 0));
    for (report, _, _) in reports_in(&actions) {
        rig.acknowledge(report);
    }
    assert_eq!(done_in(&rig.actions()), [(1, Err(LoadError::Stale))]);
    rig.read_failed(read, ReadFailure::Aborted);
    let read = reads_in(&rig.actions())[0];
    assert_eq!(read.rank, RankId(3));
    rig.read_ok(read.read, word(1, second));
    assert!(done_in(&rig.actions())[0].1.is_ok());
}

#[test]
fn a_stalled_peer_loses_its_reads_to_another_replica() {
    let mut rig = Rig::new();
    let (first, second) = (replica(2, 5, 9), replica(3, 6, 4));
    rig.load_located(1, vec![block(1)], &[&[first, second]], MINUTE);
    rig.connected(2);
    rig.connected(3);
    let stuck = reads_in(&rig.actions())[0].read;
    let actions = rig.pass(STALL_MIN + SECOND);
    assert_eq!(aborts_in(&actions), [stuck]);
    assert_eq!(reads_in(&actions).len(), 0, "rule R8");
    rig.read_failed(stuck, ReadFailure::Aborted);
    let read = reads_in(&rig.actions())[0];
    assert_eq!(read.rank, RankId(3));
    rig.read_ok(read.read, word(1, second));
    assert!(done_in(&rig.actions())[0].1.is_ok());
    assert_eq!(rig.loader.stats().peer_failures, 1);
}

#[test]
fn a_local_shortage_is_waited_out_and_blames_nobody() {
    let mut rig = Rig::new();
    let at = replica(2, 5, 9);
    rig.load_located(1, vec![block(1), block(2)], &[&[at], &[at]], MINUTE);
    rig.peer_failed(2, PeerFailure::LocalShortage);
    let mut actions = rig.actions();
    actions.extend(rig.pass(2 * SHORTAGE_PAUSE_MIN));
    assert_eq!(connects_in(&actions).len(), 2, "connecting is tried again");
    rig.connected(2);
    let reads = reads_in(&rig.actions());
    for read in reads {
        rig.read_failed(read.read, ReadFailure::LocalShortage);
    }
    let actions = rig.pass(4 * SHORTAGE_PAUSE_MIN);
    assert_eq!(reports_in(&actions), []);
    let reads = reads_in(&actions);
    assert_eq!(reads.len(), 2);
    for read in reads {
        rig.read_ok(read.read, word(u64::from(read.block) + 1, at));
    }
    assert_eq!(done_in(&rig.actions()).len(), 2);
    let stats = rig.loader.stats();
    assert_eq!((stats.blocks_ok, stats.peer_failures, stats.miss_reports), (2, 0, 0));
    assert_eq!(stats.local_shortages, 3);
}

#[test]
fn bytes_in_flight_stay_within_the_windows() {
    let mut config = LoaderConfig::new(incarnation(1));
    config.source_inflight_bytes = 3 * OBJECT_BYTES;
    config.destination_inflight_bytes = 5 * OBJECT_BYTES;
    let mut rig = Rig::with(config);
    let ranks = [2, 3];
    let blocks: Vec<LoadBlock> = (0..20).map(block).collect();
    let answers: Vec<Vec<_>> = (0..20).map(|number| vec![replica(ranks[number % 2], 1, 1)]).collect();
    let answers: Vec<&[_]> = answers.iter().map(Vec::as_slice).collect();
    rig.load_located(1, blocks, &answers, MINUTE);
    rig.connected(2);
    assert_eq!(reads_in(&rig.actions()).len(), 3);
    rig.connected(3);
    assert_eq!(reads_in(&rig.actions()).len(), 2);
    // An object larger than both windows travels, but alone.
    rig.load_located(
        2,
        vec![LoadBlock { object_bytes: 1 << 20, ..block(90) }],
        &[&[replica(4, 1, 1)]],
        MINUTE,
    );
    rig.connected(4);
    assert_eq!(reads_in(&rig.actions()).len(), 0);
}

#[test]
fn an_object_larger_than_the_windows_travels_alone_and_is_not_starved() {
    let mut config = LoaderConfig::new(incarnation(1));
    config.source_inflight_bytes = 3 * OBJECT_BYTES;
    config.destination_inflight_bytes = 3 * OBJECT_BYTES;
    let mut rig = Rig::with(config);
    let small = replica(2, 1, 1);
    let answers = vec![std::slice::from_ref(&small); 12];
    rig.load_located(1, (0..12).map(block).collect(), &answers, MINUTE);
    rig.connected(2);
    let mut flying = reads_in(&rig.actions());
    let large = replica(3, 1, 1);
    rig.load_located(2, vec![LoadBlock { object_bytes: 1 << 20, ..block(90) }], &[&[large]], MINUTE);
    rig.connected(3);
    let mut small_before_large = 0;
    loop {
        let posted = reads_in(&rig.actions());
        if let Some(read) = posted.iter().find(|read| read.rank == RankId(3)) {
            assert_eq!((posted.len(), flying.len()), (1, 0), "alone");
            rig.read_failed(read.read, ReadFailure::Refused);
            break;
        }
        small_before_large += posted.len();
        flying.extend(posted);
        let read = flying.remove(0);
        rig.read_ok(read.read, word(u64::from(read.block), small));
    }
    assert!(small_before_large <= 3, "{small_before_large}");
}

#[test]
fn urgent_loads_go_first_but_starve_nobody() {
    let mut config = LoaderConfig::new(incarnation(1));
    config.reads_inflight = 1;
    let mut rig = Rig::with(config);
    let at = replica(2, 1, 1);
    let answers = vec![std::slice::from_ref(&at); 64];
    rig.load_located(1, (0..64).map(block).collect(), &answers, 2 * MINUTE);
    rig.load_located(2, (0..64).map(block).collect(), &answers, MINUTE);
    rig.connected(2);
    let mut order = Vec::new();
    loop {
        let posted = reads_in(&rig.actions());
        let Some(read) = posted.first() else { break };
        order.push(read.load);
        rig.read_ok(read.read, word(u64::from(read.block), at));
    }
    assert_eq!(order.len(), 128);
    let patient = order[..64].iter().filter(|load| **load == LoadId(1)).count();
    assert!((4..=9).contains(&patient), "{patient} of the first 64 went to the patient load");
}

#[test]
fn peers_take_turns() {
    let mut config = LoaderConfig::new(incarnation(1));
    config.reads_inflight = 1;
    let mut rig = Rig::with(config);
    let (one, other) = (replica(2, 1, 1), replica(3, 1, 1));
    let answers: Vec<&[_]> = (0..8)
        .map(|number| if number < 6 { std::slice::from_ref(&one) } else { std::slice::from_ref(&other) })
        .collect();
    rig.load_located(1, (0..8).map(block).collect(), &answers, MINUTE);
    rig.connected(2);
    rig.connected(3);
    let mut order = Vec::new();
    loop {
        let posted = reads_in(&rig.actions());
        let Some(read) = posted.first() else { break };
        order.push(read.rank.0);
        let at = if read.rank == one.rank { one } else { other };
        rig.read_ok(read.read, word(u64::from(read.block), at));
    }
    // The first was posted while only one peer was connected.
    assert_eq!(order, [2, 2, 3, 2, 3, 2, 2, 2]);
}
