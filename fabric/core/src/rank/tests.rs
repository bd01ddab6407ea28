//! What the rank decides between its parts.

use super::*;
use crate::directory::{AnnouncerConfig, FlushId};
use crate::hash::{KeyCoordinates, KeyHash, NamespaceKey};
use crate::limits::JOBS_MAX;
use crate::load::{LoadBlock, LoadError};
use crate::owner::{Put, Stored};
use crate::testing::NAMESPACE;
use crate::wire::{Advertised, Name};
use crate::LayoutId;

const LAYOUT: LayoutId = LayoutId(7);

fn incarnation(value: u64) -> Incarnation {
    Incarnation::new(value).unwrap()
}

fn announcer(incarnation: Incarnation) -> AnnouncerConfig {
    let name = |text: &'static str| Name::new(text).unwrap();
    AnnouncerConfig {
        cluster: name("cluster"),
        name: name("rank"),
        engine: name("engine"),
        incarnation,
        advertised: Advertised::default(),
    }
}

fn rank() -> Rank {
    Rank::new(RankConfig::new(announcer(incarnation(5)), 1 << 20)).unwrap()
}

fn key(number: u64) -> KeyHash {
    NamespaceKey::derive(b"", "test", b"").hash(KeyCoordinates::default(), &number.to_le_bytes())
}

fn put(number: u64, ns: NsId) -> Put {
    Put {
        key: key(number),
        ns,
        ns_epoch: NsEpoch(0),
        key_bytes: number.to_le_bytes().into(),
        layout: LAYOUT,
        group_id: 0,
        object_bytes: 4096,
        parent: None,
    }
}

fn at(micros: u64) -> Time {
    Time::from_micros(micros)
}

/// Takes all actions; memory is granted and fills end well at once.
fn drive(rank: &mut Rank, now: Time) -> Vec<Action> {
    let mut actions = Vec::new();
    while let Some(action) = rank.poll_action() {
        match &action {
            Action::Owner(OwnerAction::AllocateExtent { extent, .. }) => {
                rank.handle_extent(now, *extent, Ok(()))
            }
            Action::Owner(OwnerAction::Fill { put, .. }) => rank.handle_filled(now, *put, Ok(9)),
            _ => {}
        }
        actions.push(action);
    }
    actions
}

fn job(first: u64, puts: Vec<Put>, deadline: Time) -> StoreJob {
    StoreJob { first_put: PutId(first), puts, deadline }
}

#[test]
fn parts_of_two_processes_make_no_rank() {
    let mut config = RankConfig::new(announcer(incarnation(5)), 1 << 20);
    config.load.incarnation = incarnation(6);
    assert!(matches!(Rank::new(config), Err(RankError::Incarnations { .. })));
    let empty = RankConfig::new(announcer(incarnation(5)), 0);
    assert!(matches!(Rank::new(empty), Err(RankError::Owner(_))));
}

#[test]
fn a_job_ends_after_its_puts_and_needs_no_directory() {
    let mut rank = rank();
    let ns = rank.open_namespace(at(1), NAMESPACE).unwrap();
    rank.handle_store(at(1), StoreId(1), job(10, vec![put(1, ns), put(1, ns)], at(1_000)));
    let actions = drive(&mut rank, at(2));
    let ends: Vec<&Action> =
        actions.iter().filter(|a| matches!(a, Action::PutDone { .. } | Action::StoreDone { .. })).collect();
    assert_eq!(
        ends,
        [
            &Action::PutDone { put: PutId(10), outcome: Ok(Stored::Filled) },
            &Action::PutDone { put: PutId(11), outcome: Ok(Stored::Resident) },
            &Action::StoreDone { store: StoreId(1) },
        ]
    );
    assert!(rank.resident(key(1).fingerprint()).is_some());
    // Nothing is announced while the directory is away, and a flush says so at its deadline.
    rank.handle_flush(at(3), FlushId(1), at(500));
    assert_eq!(drive(&mut rank, at(3)), []);
    rank.handle_timeout(at(500));
    let over = AnnouncerAction::FlushDone { flush: FlushId(1), ok: false };
    assert_eq!(drive(&mut rank, at(500)), [Action::Directory(Box::new(over))]);
}

#[test]
fn jobs_are_refused_beyond_the_limits_and_after_their_deadline() {
    let mut rank = rank();
    let ns = rank.open_namespace(at(1), NAMESPACE).unwrap();
    rank.handle_store(at(9), StoreId(1), job(1, vec![put(1, ns)], at(9)));
    let late = Err(PutError::DeadlineExceeded);
    let ends =
        |outcome| vec![Action::PutDone { put: PutId(1), outcome }, Action::StoreDone { store: StoreId(1) }];
    assert_eq!(drive(&mut rank, at(9)), ends(late));
    rank.handle_store(at(9), StoreId(2), job(1, vec![], at(99)));
    assert_eq!(drive(&mut rank, at(9)), [Action::StoreDone { store: StoreId(2) }]);
    for number in 0..JOBS_MAX as u64 {
        rank.handle_store(at(10), StoreId(100 + number), job(100 + number, vec![put(1, ns)], at(99_999)));
    }
    rank.handle_store(at(10), StoreId(1), job(1, vec![put(1, ns)], at(99_999)));
    let mut first = Vec::new();
    while first.len() < 2 {
        match rank.poll_action().unwrap() {
            Action::Owner(_) => {}
            action => first.push(action),
        }
    }
    assert_eq!(first, ends(Err(PutError::Overloaded)));
}

#[test]
fn a_deadline_ends_the_puts_that_are_not_over() {
    let mut rank = rank();
    let ns = rank.open_namespace(at(1), NAMESPACE).unwrap();
    rank.handle_store(at(1), StoreId(1), job(1, vec![put(1, ns)], at(50)));
    let Some(Action::Owner(OwnerAction::AllocateExtent { extent, .. })) = rank.poll_action() else {
        panic!("the pool needs memory first")
    };
    rank.handle_extent(at(2), extent, Ok(()));
    while rank.poll_action().is_some() {}
    assert_eq!(rank.poll_timeout(), Some(at(50)));
    rank.handle_timeout(at(50));
    let abort = Action::Owner(OwnerAction::AbortFill { put: PutId(1) });
    assert_eq!(rank.poll_action(), Some(abort), "the copy owns its source until it stopped");
    assert_eq!(rank.poll_action(), None);
    rank.handle_filled(at(60), PutId(1), Err(FillError::Cancelled));
    let actions = drive(&mut rank, at(60));
    assert!(actions.contains(&Action::PutDone { put: PutId(1), outcome: Err(PutError::DeadlineExceeded) }));
    assert!(actions.contains(&Action::StoreDone { store: StoreId(1) }), "{actions:?}");
    assert!(rank.is_quiet());
}

#[test]
fn own_blocks_are_read_without_the_directory_and_others_are_misses_at_once() {
    let mut rank = rank();
    let ns = rank.open_namespace(at(1), NAMESPACE).unwrap();
    rank.handle_store(at(1), StoreId(1), job(1, vec![put(1, ns)], at(1_000)));
    drive(&mut rank, at(2));
    let block = |number| LoadBlock { key: key(number), layout: LAYOUT, object_bytes: 4096, local: None };
    let other_layout = LoadBlock { layout: LayoutId(8), ..block(1) };
    let blocks = vec![block(1), block(2), other_layout];
    rank.handle_load(at(3), LoadId(1), LoadRequest { ns, blocks, deadline: at(9_000) });
    let actions = drive(&mut rank, at(3));
    let own = LoadAction::Connect { rank: RANK_NOT_JOINED, incarnation: incarnation(5) };
    assert_eq!(actions[0], Action::Load(own));
    for block in [1, 2] {
        let outcome = Err(LoadError::DirectoryUnavailable);
        let missed = LoadAction::BlockDone { load: LoadId(1), block, outcome };
        assert!(actions.contains(&Action::Load(missed)), "{actions:?}");
    }
    rank.handle_peer_connected(at(4), RANK_NOT_JOINED, incarnation(5), TransportKind::Shm);
    let actions = drive(&mut rank, at(4));
    let [Action::Load(LoadAction::Read { read, slot, .. })] = actions[..] else { panic!("{actions:?}") };
    let resident = rank.resident(key(1).fingerprint()).unwrap();
    assert_eq!(slot, resident.slot);
    let tag = key(1).tag(LAYOUT, 4096, incarnation(5));
    rank.handle_read_done(at(5), read, Ok((Word { generation: resident.generation, tag, check: 9 }, None)));
    let actions = drive(&mut rank, at(5));
    assert_eq!(actions.last(), Some(&Action::Load(LoadAction::LoadDone { load: LoadId(1) })));
    // The own owner side hears of it like any other.
    rank.handle_timeout(at(500_000));
    drive(&mut rank, at(500_000));
    assert_eq!(rank.owner_stats().touched, 1);
}

#[test]
fn actions_stay_small_because_every_block_makes_two() {
    assert!(std::mem::size_of::<Action>() <= 96, "{}", std::mem::size_of::<Action>());
}
