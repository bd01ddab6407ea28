//! How blocks end: rules R1, R3, R4, R7, R8, deadlines and cancellation, one scripted case each.

mod load_support;

use std::time::Duration;

use kvfabric_core::limits::{JOB_BLOCKS_MAX, LOCATE_TIMEOUT, MISS_REPORT_WAIT};
use kvfabric_core::load::{
    DirectoryUnavailable, LoadAction, LoadBlock, LoadError, LoadId, LoaderConfig, MissReason, ReadFailure,
    Replica, VerifyPolicy,
};
use kvfabric_core::word::Word;
use kvfabric_core::{Generation, RankId, Tag, TransportKind, Verify};
use load_support::*;

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_block_is_located_connected_read_and_accepted() {
    let mut rig = Rig::new();
    let at = replica(2, 5, 9);
    rig.load(1, vec![block(1)], SECOND);
    let locate = locate_in(&rig.actions());
    rig.locate(locate, &[&[at]]);
    assert_eq!(connects_in(&rig.actions()), [RankId(2)]);
    rig.connected(2);
    let reads = reads_in(&rig.actions());
    assert_eq!((reads.len(), reads[0].rank, reads[0].slot.0, reads[0].block), (1, RankId(2), 5, 0));
    rig.read_ok(reads[0].read, word(1, at));
    let actions = rig.actions();
    assert_eq!(done_in(&actions), [(0, used(2, TransportKind::Shm))]);
    assert_eq!(loads_done_in(&actions), [LoadId(1)]);
    assert_eq!((rig.loader.stats().blocks_ok, rig.loader.stats().bytes_ok), (1, OBJECT_BYTES));
    assert_eq!((rig.loader.loads_in_progress(), rig.loader.reads_in_flight()), (0, 0));
    // The owner hears of it once, a while later, and nothing else is left to do.
    let actions = rig.pass(SECOND);
    let touch = LoadAction::Touch {
        rank: RankId(2),
        incarnation: at.incarnation,
        entries: vec![(at.slot, at.generation)],
    };
    assert_eq!(actions.iter().filter(|action| **action == touch).count(), 1, "{actions:?}");
    rig.pass(10 * SECOND);
    assert_eq!(rig.loader.poll_timeout(), None);
}

/// One located block whose only replica is read and judged; returns what happens then.
fn judged(
    config: LoaderConfig,
    transport: TransportKind,
    observed: Word,
    check: Option<u64>,
) -> Vec<LoadAction> {
    let mut rig = Rig::with(config);
    rig.load_located(1, vec![block(1)], &[&[replica(2, 5, 9)]], SECOND);
    rig.connected_by(2, transport);
    let read = reads_in(&rig.actions())[0].read;
    rig.loader.handle_read_done(rig.now, read, Ok((observed, check)));
    let mut actions = rig.actions();
    if let Some(&(report, _, _)) = reports_in(&actions).first() {
        assert_eq!(done_in(&actions), [], "a failed block waits for its report");
        rig.acknowledge(report);
        actions.extend(rig.actions());
    }
    actions
}

#[test]
fn every_difference_of_the_word_is_a_miss_that_is_reported() {
    let right = word(1, replica(2, 5, 9));
    let always = || {
        let mut config = LoaderConfig::new(incarnation(1));
        config.verify = VerifyPolicy::all(Verify::Always);
        config
    };
    let cases = [
        (Word { generation: Generation(10), ..right }, LoadError::Stale, MissReason::Stale),
        (Word { tag: Tag(0), ..right }, LoadError::Stale, MissReason::Stale),
        (Word::default(), LoadError::Stale, MissReason::Stale),
        (word(2, replica(2, 5, 9)), LoadError::TagMismatch, MissReason::TagMismatch),
        (word(1, replica(3, 5, 9)), LoadError::TagMismatch, MissReason::TagMismatch),
        (Word { check: 56, ..right }, LoadError::ChecksumMismatch, MissReason::ChecksumMismatch),
    ];
    for (observed, error, reason) in cases {
        let actions = judged(always(), TransportKind::Shm, observed, Some(55));
        assert_eq!(done_in(&actions), [(0, Err(error))], "{observed:?}");
        assert_eq!(reports_in(&actions).iter().map(|report| report.2).collect::<Vec<_>>(), [reason]);
    }
}

#[test]
fn checksums_are_asked_for_as_configured_and_a_missing_one_is_a_miss() {
    let right = word(1, replica(2, 5, 9));
    let config = || LoaderConfig::new(incarnation(1));
    // By default tcp verifies every block, shm one generation in 256.
    assert!(done_in(&judged(config(), TransportKind::Tcp, right, Some(55)))[0].1.is_ok());
    assert_eq!(
        done_in(&judged(config(), TransportKind::Tcp, right, Some(54))),
        [(0, Err(LoadError::ChecksumMismatch))]
    );
    assert_eq!(done_in(&judged(config(), TransportKind::Tcp, right, None)), [(0, Err(LoadError::Protocol))]);
    assert!(done_in(&judged(config(), TransportKind::Shm, right, None))[0].1.is_ok());
}

#[test]
fn the_next_replica_is_read_only_after_the_former_read_retired() {
    let mut rig = Rig::new();
    let (first, second) = (replica(2, 5, 9), replica(3, 6, 4));
    rig.load_located(1, vec![block(1)], &[&[first, second]], SECOND);
    rig.connected(2);
    rig.connected(3);
    let reads = reads_in(&rig.actions());
    assert_eq!(reads.len(), 1, "rule R8");
    rig.read_ok(reads[0].read, Word { generation: Generation(10), ..word(1, first) });
    let actions = rig.actions();
    assert_eq!(reports_in(&actions).len(), 1);
    let reads = reads_in(&actions);
    assert_eq!((reads.len(), reads[0].rank), (1, RankId(3)));
    rig.read_ok(reads[0].read, word(1, second));
    // The report about the first replica is still open; success does not wait for it.
    assert_eq!(done_in(&rig.actions()), [(0, used(3, TransportKind::Shm))]);
    assert_eq!(rig.loader.stats().failovers, 1);
}

#[test]
fn a_lost_report_ends_the_block_late_and_tells_the_scheduler_first() {
    let mut rig = Rig::new();
    rig.load_located(1, vec![block(1)], &[&[replica(2, 5, 9)]], SECOND);
    rig.connected(2);
    let read = reads_in(&rig.actions())[0].read;
    rig.read_failed(read, ReadFailure::Refused);
    assert_eq!(done_in(&rig.pass(MISS_REPORT_WAIT - Duration::from_micros(1))), []);
    let actions = rig.pass(Duration::from_micros(1));
    let notice = LoadAction::NotifyScheduler { keys: vec![key(1).fingerprint()] };
    assert_eq!(actions[0], notice);
    assert_eq!(done_in(&actions), [(0, Err(LoadError::Stale))]);
    assert_eq!(loads_done_in(&actions), [LoadId(1)]);
    assert_eq!(rig.loader.stats().miss_reports_lost, 1);
}

#[test]
fn the_deadline_ends_reads_by_force_and_the_block_ends_when_they_retired() {
    let mut rig = Rig::new();
    let at = replica(2, 5, 9);
    rig.load_located(1, vec![block(1), block(2)], &[&[at], &[replica(4, 1, 1)]], SECOND / 2);
    rig.connected(2);
    let read = reads_in(&rig.actions())[0].read;
    let actions = rig.pass(SECOND / 2);
    assert_eq!(done_in(&actions), [(1, Err(LoadError::DeadlineExceeded))], "not posted: fails at once");
    assert_eq!(aborts_in(&actions), [read]);
    let reports = reports_in(&actions);
    assert_eq!((reports.len(), reports[0].2), (1, MissReason::Unreachable));
    rig.acknowledge(reports[0].0);
    assert_eq!(done_in(&rig.pass(SECOND / 4)), [], "rule R4: the read has not retired");
    // It retires with a word that matches. It was ended all the same: a drained block has failed.
    rig.read_ok(read, word(1, at));
    let actions = rig.actions();
    assert_eq!(done_in(&actions), [(0, Err(LoadError::DeadlineExceeded))]);
    assert_eq!(loads_done_in(&actions), [LoadId(1)]);
}

#[test]
fn cancelling_blames_nobody_and_ends_when_the_reads_retired() {
    let mut rig = Rig::new();
    rig.load_located(1, vec![block(1)], &[&[replica(2, 5, 9)]], 10 * SECOND);
    rig.connected(2);
    let read = reads_in(&rig.actions())[0].read;
    rig.pass(SECOND / 10);
    rig.loader.handle_cancel(rig.now, LoadId(1));
    let actions = rig.actions();
    assert_eq!((aborts_in(&actions), reports_in(&actions), done_in(&actions)), (vec![read], vec![], vec![]));
    rig.read_failed(read, ReadFailure::Aborted);
    assert_eq!(done_in(&rig.actions()), [(0, Err(LoadError::Cancelled))]);
    // A second cancel, or one of an unknown load, does nothing.
    rig.loader.handle_cancel(rig.now, LoadId(1));
    assert_eq!(rig.actions(), []);
}

#[test]
fn a_local_replica_is_tried_first_and_the_directory_asked_only_when_it_fails() {
    let mut rig = Rig::new();
    let own = Replica { incarnation: incarnation(1), ..replica(0, 3, 2) };
    let blocks: Vec<LoadBlock> =
        (1..=3).map(|number| LoadBlock { local: Some(own), ..block(number) }).collect();
    rig.load(1, blocks, SECOND);
    let actions = rig.actions();
    assert_eq!(connects_in(&actions), [RankId(0)]);
    rig.loader.handle_peer_connected(rig.now, RankId(0), own.incarnation, TransportKind::Shm);
    let reads = reads_in(&rig.actions());
    assert_eq!(reads.len(), 3);
    let served = Word { tag: key(1).tag(LAYOUT, OBJECT_BYTES, own.incarnation), ..word(1, own) };
    rig.read_ok(reads[0].read, served);
    assert_eq!(done_in(&rig.actions()), [(0, used(0, TransportKind::Shm))]);
    // Two are evicted meanwhile: one request asks for both, and nothing is reported since the owner side announces it.
    rig.read_ok(reads[1].read, Word { generation: Generation(8), ..served });
    rig.read_ok(reads[2].read, Word { generation: Generation(8), ..served });
    let actions = rig.actions();
    assert_eq!(reports_in(&actions), []);
    assert!(
        matches!(&actions[..], [LoadAction::Locate { keys, .. }] if keys.len() == 2),
        "one request for both: {actions:?}"
    );
    // The directory still lists the stale one, and another for the second block.
    let elsewhere = replica(5, 1, 1);
    rig.locate(locate_in(&actions), &[&[own], &[own, elsewhere]]);
    let actions = rig.actions();
    assert_eq!(reports_in(&actions).iter().map(|r| r.2).collect::<Vec<_>>(), [MissReason::Stale; 2]);
    for (report, _, _) in reports_in(&actions) {
        rig.acknowledge(report);
    }
    assert_eq!(done_in(&rig.actions()), [(1, Err(LoadError::Stale))]);
    rig.connected(5);
    let reads = reads_in(&rig.actions());
    rig.read_ok(reads[0].read, word(3, elsewhere));
    assert_eq!(done_in(&rig.actions()), [(2, used(5, TransportKind::Shm))]);
}

#[test]
fn the_directory_may_fail_be_late_or_answer_nonsense() {
    let mut rig = Rig::new();
    rig.load(1, vec![block(1)], SECOND);
    let locate = locate_in(&rig.actions());
    rig.loader.handle_located(rig.now, locate, Err(DirectoryUnavailable));
    assert_eq!(done_in(&rig.actions()), [(0, Err(LoadError::DirectoryUnavailable))]);

    rig.load(2, vec![block(1), block(2)], SECOND);
    let locate = locate_in(&rig.actions());
    rig.locate(locate, &[&[]]);
    assert_eq!(done_in(&rig.actions()), [0, 1].map(|index| (index, Err(LoadError::DirectoryUnavailable))));

    rig.load(3, vec![block(1)], 10 * SECOND);
    let locate = locate_in(&rig.actions());
    assert_eq!(done_in(&rig.pass(LOCATE_TIMEOUT)), [(0, Err(LoadError::DirectoryUnavailable))]);
    rig.locate(locate, &[&[replica(2, 5, 9)]]);
    assert_eq!(rig.actions(), [], "a late answer is ignored");

    rig.load_located(4, vec![block(1), block(2)], &[&[], &[Replica { tier: 1, ..replica(2, 1, 1) }]], SECOND);
    assert_eq!(done_in(&rig.actions()), [0, 1].map(|index| (index, Err(LoadError::NotFound))));
}

#[test]
fn limits_refuse_a_load_as_a_local_shortage() {
    let mut rig = Rig::new();
    rig.load(1, vec![block(1); JOB_BLOCKS_MAX + 1], SECOND);
    let actions = rig.actions();
    let done = done_in(&actions);
    assert_eq!(done.len(), JOB_BLOCKS_MAX + 1);
    assert!(done.iter().all(|(_, outcome)| *outcome == Err(LoadError::Overloaded)));
    assert_eq!(loads_done_in(&actions), [LoadId(1)]);
    rig.load(2, vec![], SECOND);
    assert_eq!(rig.actions(), [LoadAction::LoadDone { load: LoadId(2) }]);
    rig.load(3, vec![block(1)], Duration::ZERO);
    assert_eq!(done_in(&rig.actions()), [(0, Err(LoadError::DeadlineExceeded))]);
    rig.load(
        4,
        vec![LoadBlock { object_bytes: 0, ..block(1) }, LoadBlock { object_bytes: u64::MAX, ..block(1) }],
        SECOND,
    );
    assert_eq!(done_in(&rig.actions()), [0, 1].map(|index| (index, Err(LoadError::NotFound))));
    assert_eq!(rig.loader.loads_in_progress(), 0);
}

#[test]
fn the_same_key_twice_in_one_load_is_read_twice() {
    let mut rig = Rig::new();
    let at = replica(2, 5, 9);
    rig.load_located(1, vec![block(1), block(1)], &[&[at], &[at]], SECOND);
    rig.connected(2);
    let reads = reads_in(&rig.actions());
    assert_eq!(reads.len(), 2);
    for read in reads {
        rig.read_ok(read.read, word(1, at));
    }
    assert!(done_in(&rig.actions()).iter().all(|(_, outcome)| outcome.is_ok()));
}

#[test]
fn late_repeated_and_unknown_answers_are_ignored() {
    let mut rig = Rig::new();
    let at = replica(2, 5, 9);
    rig.load_located(1, vec![block(1)], &[&[at]], SECOND);
    rig.connected(2);
    let read = reads_in(&rig.actions())[0].read;
    rig.read_ok(read, Word::default());
    let report = reports_in(&rig.actions())[0].0;
    rig.acknowledge(report);
    assert_eq!(done_in(&rig.actions()), [(0, Err(LoadError::Stale))]);
    rig.read_ok(read, word(1, at));
    rig.acknowledge(report);
    rig.read_failed(kvfabric_core::load::ReadId(12345), ReadFailure::PeerLost);
    assert_eq!(rig.actions(), []);
    assert_eq!(rig.loader.stats().blocks_ok, 0);
}
