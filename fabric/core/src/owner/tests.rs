//! One test for each rule, by its name.

use super::*;
use crate::{Incarnation, Time};

const LAYOUT: LayoutId = LayoutId(7);
const OBJECT: u64 = 4096;

/// An owner whose driver allocates at once and whose fills the test answers.
struct Bench {
    owner: Owner,
    now: Time,
    next_put: u64,
    log: Vec<OwnerAction>,
}

fn key(number: u64) -> KeyHash {
    let mut bytes = [0; 32];
    for (chunk, salt) in bytes.chunks_exact_mut(8).zip(1u64..) {
        chunk.copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(salt).to_le_bytes());
    }
    KeyHash(bytes)
}

fn put(number: u64) -> Put {
    Put {
        key: key(number),
        ns: NsId(1),
        ns_epoch: NsEpoch(0),
        key_bytes: number.to_string().into_bytes().into(),
        layout: LAYOUT,
        group_id: 0,
        object_bytes: OBJECT,
        parent: None,
    }
}

fn config(objects: u64) -> OwnerConfig {
    OwnerConfig::new(objects * OBJECT, Incarnation::new(5).unwrap())
}

impl Bench {
    fn new(config: OwnerConfig) -> Self {
        Self { owner: Owner::new(config).unwrap(), now: Time::ZERO, next_put: 0, log: Vec::new() }
    }

    /// Takes all actions and answers allocations.
    fn actions(&mut self) -> Vec<OwnerAction> {
        let mut actions = Vec::new();
        while let Some(action) = self.owner.poll_action() {
            if let OwnerAction::AllocateExtent { extent, .. } = action {
                self.owner.handle_extent(self.now, extent, Ok(()));
            }
            actions.push(action);
        }
        self.owner.check_invariants();
        self.log.extend(actions.iter().cloned());
        actions
    }

    fn submit(&mut self, request: Put) -> (PutId, Vec<OwnerAction>) {
        self.next_put += 1;
        let id = PutId(self.next_put);
        self.owner.handle_put(self.now, id, request);
        (id, self.actions())
    }

    fn fill(&mut self, id: PutId, result: Result<u64, FillError>) -> Vec<OwnerAction> {
        self.owner.handle_filled(self.now, id, result);
        self.actions()
    }

    /// Stores and fills.
    fn store(&mut self, request: Put) -> Result<Stored, PutError> {
        let (id, mut actions) = self.submit(request);
        if actions.iter().any(|action| matches!(action, OwnerAction::Fill { .. })) {
            actions.extend(self.fill(id, Ok(9)));
        }
        outcome(&actions, id).unwrap()
    }
}

fn outcome(actions: &[OwnerAction], id: PutId) -> Option<Result<Stored, PutError>> {
    actions.iter().find_map(|action| match action {
        OwnerAction::PutDone { put, outcome } if *put == id => Some(*outcome),
        _ => None,
    })
}

#[test]
fn o1_precedes_fill_and_o2_follows_it() {
    let mut bench = Bench::new(config(4));
    let (id, actions) = bench.submit(put(1));
    let [OwnerAction::AllocateExtent { .. }, OwnerAction::AddSlab(record), OwnerAction::InvalidateWord { slot, generation }, OwnerAction::Fill { put: filler, slot: filled, generation: filling }] =
        actions[..]
    else {
        panic!("{actions:?}")
    };
    assert_eq!((record.slots, record.base_offset), (4, 0));
    assert_eq!((slot, generation, filler), (filled, filling, id));
    assert!(bench.owner.resident(key(1).fingerprint()).is_none());
    let actions = bench.fill(id, Ok(77));
    let OwnerAction::PublishWord { slot: published, word } = actions[0] else { panic!("{actions:?}") };
    let tag = key(1).tag(LAYOUT, OBJECT, Incarnation::new(5).unwrap());
    assert_eq!((published, word.generation, word.tag, word.check), (slot, generation, tag, 77));
    assert_eq!(outcome(&actions, id), Some(Ok(Stored::Filled)));
    assert_eq!(bench.owner.resident(key(1).fingerprint()).unwrap().generation, generation);
}

fn fp(number: u64) -> Fingerprint {
    key(number).fingerprint()
}

fn child(number: u64, parent: u64) -> Put {
    Put { parent: Some(fp(parent)), ..put(number) }
}

fn invalidated(actions: &[OwnerAction]) -> Vec<SlotId> {
    let slot = |action: &OwnerAction| match action {
        OwnerAction::InvalidateWord { slot, .. } => Some(*slot),
        _ => None,
    };
    actions.iter().filter_map(slot).collect()
}

fn published(actions: &[OwnerAction]) -> bool {
    actions.iter().any(|action| matches!(action, OwnerAction::PublishWord { .. }))
}

fn filler(actions: &[OwnerAction]) -> Option<(PutId, SlotId)> {
    actions.iter().find_map(|action| match action {
        OwnerAction::Fill { put, slot, .. } => Some((*put, *slot)),
        _ => None,
    })
}

/// Two extents' worth of objects, four in each.
fn two_extents(policy: PolicyKind) -> OwnerConfig {
    OwnerConfig { extent_bytes: 8 * OBJECT, policy, ..config(16) }
}

#[test]
fn first_put_wins() {
    let mut bench = Bench::new(config(4));
    let (first, _) = bench.submit(put(1));
    let (second, actions) = bench.submit(put(1));
    assert_eq!(actions, [], "the second put of a key that is being filled waits for the first");
    let actions = bench.fill(first, Ok(1));
    assert_eq!(outcome(&actions, first), Some(Ok(Stored::Filled)));
    assert_eq!(outcome(&actions, second), Some(Ok(Stored::Resident)));
    let generation = bench.owner.resident(fp(1)).unwrap().generation;
    assert_eq!(bench.store(put(1)), Ok(Stored::Resident));
    assert_eq!(bench.owner.resident(fp(1)).unwrap().generation, generation);
}

#[test]
fn waiter_becomes_filler() {
    let mut bench = Bench::new(config(4));
    let (first, actions) = bench.submit(put(1));
    let (_, slot) = filler(&actions).unwrap();
    let (second, _) = bench.submit(put(1));
    let (third, _) = bench.submit(put(1));
    let actions = bench.fill(first, Err(FillError::Failed));
    assert_eq!(outcome(&actions, first), Some(Err(PutError::FillFailed)));
    assert_eq!(filler(&actions), Some((second, slot)), "the oldest waiter copies from its own source");
    assert_eq!(invalidated(&actions), [slot]);
    let actions = bench.fill(second, Ok(1));
    assert_eq!(outcome(&actions, second), Some(Ok(Stored::Filled)));
    assert_eq!(outcome(&actions, third), Some(Ok(Stored::Resident)));
}

#[test]
fn failed_fill_frees_its_slot_through_o1() {
    let mut bench = Bench::new(config(1));
    let (first, actions) = bench.submit(put(1));
    let (_, slot) = filler(&actions).unwrap();
    let actions = bench.fill(first, Err(FillError::DeadlineExceeded));
    assert_eq!(invalidated(&actions), [slot]);
    assert_eq!(outcome(&actions, first), Some(Err(PutError::DeadlineExceeded)));
    assert_eq!(bench.store(put(2)), Ok(Stored::Filled));
}

#[test]
fn cancel_waits_for_the_running_fill() {
    let mut bench = Bench::new(config(2));
    let (first, _) = bench.submit(put(1));
    let (waiter, _) = bench.submit(put(1));
    bench.owner.handle_cancel(bench.now, waiter, PutError::DeadlineExceeded);
    assert_eq!(outcome(&bench.actions(), waiter), Some(Err(PutError::DeadlineExceeded)));
    for _ in 0..2 {
        bench.owner.handle_cancel(bench.now, first, PutError::Cancelled);
    }
    assert_eq!(bench.actions(), [OwnerAction::AbortFill { put: first }]);
    let actions = bench.fill(first, Err(FillError::Failed));
    assert_eq!(outcome(&actions, first), Some(Err(PutError::Cancelled)));
    // A copy that was complete before it could be stopped is published.
    let (second, _) = bench.submit(put(2));
    bench.owner.handle_cancel(bench.now, second, PutError::Cancelled);
    bench.actions();
    let actions = bench.fill(second, Ok(1));
    assert_eq!(outcome(&actions, second), Some(Ok(Stored::Filled)));
    assert!(bench.owner.resident(fp(2)).is_some());
}

#[test]
fn clear_aborts_filling() {
    let mut bench = Bench::new(config(4));
    assert_eq!(bench.store(put(1)), Ok(Stored::Filled));
    assert_eq!(bench.store(Put { ns: NsId(2), ..put(2) }), Ok(Stored::Filled));
    let (filling, _) = bench.submit(put(3));
    let (waiter, _) = bench.submit(put(3));
    let slot = bench.owner.resident(fp(1)).unwrap().slot;
    bench.owner.handle_clear(bench.now, NsId(1), NsEpoch(1));
    let actions = bench.actions();
    assert!(invalidated(&actions).contains(&slot), "O1 on every slot of the namespace");
    assert!(actions.contains(&OwnerAction::AbortFill { put: filling }));
    assert_eq!(outcome(&actions, waiter), Some(Err(PutError::Cleared)));
    assert!(
        !actions.iter().any(|action| matches!(action, OwnerAction::Announce(_))),
        "the directory hid them"
    );
    assert!(bench.owner.resident(fp(1)).is_none());
    assert!(bench.owner.resident(fp(2)).is_some(), "other namespaces stay");
    // The copy ends well all the same: rule O2 publishes nothing.
    let actions = bench.fill(filling, Ok(1));
    assert!(!published(&actions));
    assert_eq!(outcome(&actions, filling), Some(Err(PutError::Cleared)));
    // Late puts of the old epoch are refused, new ones are not.
    assert_eq!(bench.store(put(4)), Err(PutError::Cleared));
    assert_eq!(bench.store(Put { ns_epoch: NsEpoch(1), ..put(4) }), Ok(Stored::Filled));
    bench.owner.handle_clear(bench.now, NsId(1), NsEpoch(1));
    assert!(bench.owner.resident(fp(4)).is_some(), "a repeated CLEAR spares what was stored after it");
}

#[test]
fn put_of_a_newer_epoch_replaces_what_the_directory_hides() {
    let mut bench = Bench::new(config(4));
    assert_eq!(bench.store(put(1)), Ok(Stored::Filled));
    assert_eq!(bench.store(Put { ns_epoch: NsEpoch(1), ..put(1) }), Ok(Stored::Filled));
    assert_eq!(bench.owner.resident(fp(1)).unwrap().ns_epoch, NsEpoch(1));
    let (old, _) = bench.submit(put(2));
    let (new, actions) = bench.submit(Put { ns_epoch: NsEpoch(1), ..put(2) });
    assert!(actions.contains(&OwnerAction::AbortFill { put: old }));
    let (late, actions) = bench.submit(put(2));
    assert_eq!(outcome(&actions, late), Some(Err(PutError::Cleared)));
    let actions = bench.fill(old, Ok(1));
    assert_eq!(outcome(&actions, old), Some(Err(PutError::Cleared)));
    assert_eq!(filler(&actions).map(|filler| filler.0), Some(new));
    let actions = bench.fill(new, Ok(1));
    assert_eq!(outcome(&actions, new), Some(Ok(Stored::Filled)));
}

#[test]
fn late_fill_of_an_invalidated_slot_publishes_nothing() {
    let mut bench = Bench::new(config(2));
    assert_eq!(bench.store(put(1)), Ok(Stored::Filled));
    let (filling, actions) = bench.submit(put(2));
    let (_, slot) = filler(&actions).unwrap();
    bench.owner.handle_invalidate_all(bench.now);
    let actions = bench.actions();
    assert_eq!(invalidated(&actions).len(), 2, "O5: every word");
    assert!(invalidated(&actions).contains(&slot));
    let gone = |action: &OwnerAction| matches!(action, OwnerAction::Announce(change) if !change.present);
    assert_eq!(actions.iter().filter(|action| gone(action)).count(), 1);
    assert_eq!(bench.owner.published().count(), 0);
    let actions = bench.fill(filling, Ok(1));
    assert!(!published(&actions));
    assert_eq!(bench.owner.stats().fills_discarded, 1);
    assert_eq!(bench.store(put(2)), Ok(Stored::Filled));
}

#[test]
fn eviction_is_o1_at_once_and_reports_the_key() {
    for policy in PolicyKind::ALL.iter().copied() {
        let mut bench = Bench::new(OwnerConfig { policy, ..config(2) });
        for number in 1..=2 {
            assert_eq!(bench.store(put(number)), Ok(Stored::Filled));
        }
        let old = bench.owner.resident(fp(1)).unwrap();
        let touched = bench.owner.resident(fp(2)).unwrap();
        bench.owner.handle_touch(bench.now, touched.slot, touched.generation);
        let (_, actions) = bench.submit(put(3));
        assert_eq!(invalidated(&actions), [old.slot, old.slot], "at eviction and before the fill");
        let removed = actions.iter().any(|action| {
            matches!(action, OwnerAction::Announce(change)
                if !change.present && change.generation == old.generation && change.fingerprint == fp(1))
        });
        assert!(removed, "the removal names the published generation");
        assert_eq!(bench.owner.take_evicted_keys(), [Box::from(*b"1")]);
        assert!(bench.owner.take_evicted_keys().is_empty());
        bench.owner.handle_touch(bench.now, old.slot, old.generation);
        assert_eq!(bench.owner.stats().touched_stale, 1);
    }
}

#[test]
fn evicted_keys_are_bounded_and_the_newest_stay() {
    let mut bench = Bench::new(OwnerConfig { evicted_keys_max: 2, ..config(1) });
    for number in 1..=5 {
        assert_eq!(bench.store(put(number)), Ok(Stored::Filled));
    }
    assert_eq!(bench.owner.take_evicted_keys(), [Box::from(*b"3"), Box::from(*b"4")]);
    assert_eq!(bench.owner.stats().evicted_keys_lost, 2);
}

#[test]
fn forced_eviction() {
    let mut bench = Bench::new(config(2));
    let (filling, _) = bench.submit(put(1));
    assert!(!bench.owner.handle_evict(bench.now, fp(1)), "what is being filled is not resident");
    bench.fill(filling, Ok(1));
    assert!(bench.owner.handle_evict(bench.now, fp(1)));
    assert!(!bench.owner.handle_evict(bench.now, fp(1)));
    assert_eq!(invalidated(&bench.actions()).len(), 1);
    assert_eq!(bench.store(put(1)), Ok(Stored::Filled));
}

#[test]
fn capacity_is_hard() {
    // Not a multiple of the object, objects not a multiple of the alignment.
    let mut bench = Bench::new(OwnerConfig {
        extent_bytes: 3000,
        ..OwnerConfig::new(10_000, Incarnation::new(5).unwrap())
    });
    for number in 0..100 {
        assert_eq!(bench.store(Put { object_bytes: 100, ..put(number) }), Ok(Stored::Filled));
    }
    let bytes: u64 = bench
        .log
        .iter()
        .map(|action| match action {
            OwnerAction::AllocateExtent { length_bytes, .. } => *length_bytes,
            _ => 0,
        })
        .sum();
    assert!(bytes <= 10_000);
    assert_eq!(bench.owner.published().count(), 10_000 / 128);
    assert_eq!(bench.owner.stats().backed_bytes, bytes);
}

#[test]
fn pool_of_n_objects_holds_n_objects() {
    // Extents are cut without slack: 64 MiB is no multiple of this object.
    let object_bytes = 64 * 12_345;
    let mut bench = Bench::new(OwnerConfig::new(99 * object_bytes, Incarnation::new(5).unwrap()));
    for number in 0..99 {
        assert_eq!(bench.store(Put { object_bytes, ..put(number) }), Ok(Stored::Filled));
    }
    assert_eq!((bench.owner.published().count(), bench.owner.stats().evicted), (99, 0));
}

#[test]
fn objects_that_fit_nowhere_are_refused() {
    let mut bench = Bench::new(two_extents(PolicyKind::Lru));
    assert_eq!(bench.store(Put { object_bytes: 0, ..put(1) }), Err(PutError::EmptyObject));
    let large = 16 * OBJECT + 1;
    let refused = bench.store(Put { object_bytes: large, ..put(1) });
    assert_eq!(refused, Err(PutError::ObjectTooLarge { object_bytes: large, capacity_bytes: 16 * OBJECT }));
    for number in 0..16 {
        assert_eq!(bench.store(put(number)), Ok(Stored::Filled));
    }
    // Smaller than the pool, but both extents are cut already and each is too small.
    let wide = Put { object_bytes: 12 * OBJECT, layout: LayoutId(8), ..put(20) };
    assert_eq!(bench.store(wide), Err(PutError::PoolFull));
}

#[test]
fn puts_wait_while_every_slot_is_being_filled() {
    let mut bench = Bench::new(OwnerConfig { waiting_max: 1, ..config(1) });
    let (first, _) = bench.submit(put(1));
    let (second, actions) = bench.submit(put(2));
    assert_eq!(actions, []);
    let (third, actions) = bench.submit(put(3));
    assert_eq!(outcome(&actions, third), Some(Err(PutError::PoolFull)), "the queue is full");
    let (joined, actions) = bench.submit(put(2));
    assert_eq!(actions, [], "a waiting key takes more puts");
    let actions = bench.fill(first, Ok(1));
    assert_eq!(outcome(&actions, first), Some(Ok(Stored::Filled)));
    assert_eq!(filler(&actions).map(|filler| filler.0), Some(second), "the first was evicted for it");
    let actions = bench.fill(second, Ok(1));
    assert_eq!(outcome(&actions, joined), Some(Ok(Stored::Resident)));
}

#[test]
fn too_many_puts_are_refused() {
    let mut bench = Bench::new(OwnerConfig { puts_max: 1, ..config(4) });
    let (first, _) = bench.submit(put(1));
    let (second, actions) = bench.submit(put(1));
    assert_eq!(outcome(&actions, second), Some(Err(PutError::Overloaded)));
    bench.fill(first, Ok(1));
    assert_eq!(bench.store(put(1)), Ok(Stored::Resident));
}

#[test]
fn layout_conflict() {
    let mut bench = Bench::new(config(8));
    assert_eq!(bench.store(put(1)), Ok(Stored::Filled));
    let (filling, _) = bench.submit(put(2));
    for number in [1, 2] {
        for request in [
            Put { layout: LayoutId(8), ..put(number) },
            Put { object_bytes: OBJECT - 1, ..put(number) },
            Put { group_id: 1, ..put(number) },
        ] {
            assert_eq!(bench.store(request), Err(PutError::LayoutConflict));
        }
    }
    // Same fingerprint, other key: the tag must never vouch for another key's bytes.
    let mut other = key(1);
    other.0[31] ^= 1;
    assert_eq!(bench.store(Put { key: other, ..put(1) }), Err(PutError::LayoutConflict));
    bench.fill(filling, Ok(1));
}

#[test]
fn ids_never_renumbered_and_starved_slab_takes_extent() {
    let mut bench = Bench::new(two_extents(PolicyKind::Lru));
    for number in 0..16 {
        assert_eq!(bench.store(put(number)), Ok(Stored::Filled));
    }
    // The first extent is used again, so the second is the coldest.
    for number in 0..8 {
        assert_eq!(bench.store(put(number)), Ok(Stored::Resident));
        let resident = bench.owner.resident(fp(number)).unwrap();
        bench.owner.handle_touch(bench.now, resident.slot, resident.generation);
    }
    bench.log.clear();
    let other = Put { layout: LayoutId(8), object_bytes: 2 * OBJECT, ..put(100) };
    assert_eq!(bench.store(other.clone()), Ok(Stored::Filled));
    let log = core::mem::take(&mut bench.log);
    let retired = log.iter().position(|action| matches!(action, OwnerAction::RetireSlab(_))).unwrap();
    let OwnerAction::RetireSlab(record) = log[retired] else { unreachable!() };
    let OwnerAction::AddSlab(added) = log[retired + 1] else { panic!("{log:?}") };
    assert_eq!((record.first_slot, record.slots), (SlotId(8), 8));
    assert_eq!((added.first_slot, added.slots), (SlotId(16), 4), "a place under another layout has new ids");
    assert_eq!(added.base_offset, record.base_offset);
    let before = invalidated(&log[..retired]);
    assert_eq!(before, (8..16).map(SlotId).collect::<Vec<_>>(), "O1 on its slots first");
    assert!((0..8).all(|number| bench.owner.resident(fp(number)).is_some()));
    assert_eq!(bench.owner.slabs().collect::<Vec<_>>().len(), 2);
    assert_eq!(bench.owner.slab_of(SlotId(8)), None);
    assert_eq!(bench.owner.slab_of(SlotId(17)), Some(added));
    assert_eq!(bench.owner.resident(other.key.fingerprint()).unwrap().offset, added.base_offset);
}

#[test]
fn extent_with_running_fills_moves_when_they_end() {
    let mut bench = Bench::new(config(2));
    let (first, _) = bench.submit(put(1));
    let other = Put { layout: LayoutId(8), ..put(2) };
    let (second, actions) = bench.submit(other);
    assert_eq!(actions, [], "the copy into the only extent still runs");
    let actions = bench.fill(first, Ok(1));
    assert_eq!(
        outcome(&actions, first),
        Some(Ok(Stored::Filled)),
        "the put keeps its promise, and is evicted at once"
    );
    assert_eq!(filler(&actions).map(|filler| filler.0), Some(second));
    assert!(bench.owner.resident(fp(1)).is_none());
    bench.fill(second, Ok(1));
    assert!(bench.owner.resident(fp(2)).is_some());
    // And back: two layouts share a pool of one extent in turns.
    assert_eq!(bench.store(put(3)), Ok(Stored::Filled));
}

#[test]
fn cold_extents_move_to_a_busy_slab() {
    let objects = 64 * 8;
    let mut bench = Bench::new(OwnerConfig { extent_bytes: 8 * OBJECT, ..config(objects) });
    for number in 0..objects - 8 {
        assert_eq!(bench.store(put(number)), Ok(Stored::Filled));
    }
    // Another group gets the last extent and turns it over, while nobody asks for the first group's blocks.
    for number in 0..1500 {
        assert_eq!(bench.store(Put { group_id: 1, ..put(10_000 + number) }), Ok(Stored::Filled));
    }
    let busy: u32 = bench.owner.slabs().filter(|slab| slab.group_id == 1).map(|slab| slab.slots).sum();
    assert!(busy >= 64, "the busy group has {busy} slots only");
    assert!(u64::from(busy) <= objects / 2 + 8, "the richer slab gives, the poorer takes");
}

#[test]
fn memory_refused_by_the_system() {
    let mut bench = Bench::new(two_extents(PolicyKind::Lru));
    let refuse = |bench: &mut Bench, request: Put| {
        bench.next_put += 1;
        let id = PutId(bench.next_put);
        bench.owner.handle_put(bench.now, id, request);
        let Some(OwnerAction::AllocateExtent { extent, .. }) = bench.owner.poll_action() else { panic!() };
        bench.owner.handle_extent(bench.now, extent, Err(()));
        (id, bench.actions())
    };
    let (id, actions) = refuse(&mut bench, put(1));
    assert_eq!(outcome(&actions, id), Some(Err(PutError::NoMemory)));
    assert_eq!(bench.store(put(1)), Err(PutError::NoMemory), "the system is left alone for a while");
    bench.now = bench.now.after(core::time::Duration::from_secs(2));
    for number in 0..8 {
        assert_eq!(bench.store(put(number)), Ok(Stored::Filled));
    }
    // With something to evict, a refusal costs room and not puts.
    let (id, actions) = refuse(&mut bench, put(8));
    assert_eq!(outcome(&actions, id), None);
    let actions = bench.fill(id, Ok(1));
    assert_eq!(outcome(&actions, id), Some(Ok(Stored::Filled)));
    assert_eq!(bench.owner.published().count(), 8);
}

#[test]
fn slot_ids_run_out() {
    let mut bench = Bench::new(OwnerConfig { slots_max: 10, ..two_extents(PolicyKind::Lru) });
    for number in 0..16 {
        assert_eq!(bench.store(put(number)), Ok(Stored::Filled));
    }
    assert_eq!(bench.owner.published().count(), 10);
    assert_eq!(bench.store(Put { group_id: 1, ..put(100) }), Err(PutError::PoolFull));
}

#[test]
fn parent_not_before_children() {
    for policy in PolicyKind::ALL.iter().copied() {
        let mut bench = Bench::new(OwnerConfig { policy, ..config(4) });
        assert_eq!(bench.store(put(1)), Ok(Stored::Filled));
        assert_eq!(bench.store(child(2, 1)), Ok(Stored::Filled));
        for number in 3..=4 {
            assert_eq!(bench.store(put(number)), Ok(Stored::Filled));
        }
        // Everything but the parent was used since.
        for _ in 0..3 {
            for number in 2..=4 {
                let resident = bench.owner.resident(fp(number)).unwrap();
                bench.owner.handle_touch(bench.now, resident.slot, resident.generation);
            }
        }
        for number in 5..=6 {
            assert_eq!(bench.store(put(number)), Ok(Stored::Filled));
            let family = (bench.owner.resident(fp(1)).is_some(), bench.owner.resident(fp(2)).is_some());
            assert_ne!(family, (false, true), "{policy}: the parent went before its child");
        }
    }
}

#[test]
fn prefix_rule_gives_way() {
    for policy in PolicyKind::ALL.iter().copied() {
        // A cycle, and a key that names itself.
        let mut bench = Bench::new(OwnerConfig { policy, ..config(2) });
        for request in [child(1, 2), child(2, 1), child(1, 2), child(3, 3), child(4, 3)] {
            let outcome = bench.store(request);
            assert!(outcome.is_ok(), "{outcome:?}");
        }
        // A parent with children without end, and a chain longer than all refusals.
        let many = u64::from(crate::limits::PARENT_REFUSALS_MAX) * 3;
        let mut bench = Bench::new(OwnerConfig { policy, ..config(many) });
        for number in 0..3 * many {
            assert_eq!(bench.store(child(number + 1, number)), Ok(Stored::Filled));
        }
        assert!(bench.owner.published().count() as u64 >= many - many / 100 - 1);
    }
}

#[test]
fn leaf_of_a_run_is_evicted_first_in_any_order_of_touches() {
    for policy in PolicyKind::ALL.iter().copied() {
        for backwards in [false, true] {
            let mut bench = Bench::new(OwnerConfig { policy, ..config(80) });
            for number in 0..80 {
                let request = if number % 8 == 0 { put(number) } else { child(number, number - 1) };
                assert_eq!(bench.store(request), Ok(Stored::Filled));
            }
            for run in 0..10 {
                let mut numbers: Vec<u64> = (run * 8..run * 8 + 8).collect();
                if backwards {
                    numbers.reverse();
                }
                for number in numbers {
                    let resident = bench.owner.resident(fp(number)).unwrap();
                    bench.owner.handle_touch(bench.now, resident.slot, resident.generation);
                }
            }
            for number in 100..108 {
                assert_eq!(bench.store(put(number)), Ok(Stored::Filled));
            }
            for run in 0..10 {
                let kept: Vec<bool> =
                    (run * 8..run * 8 + 8).map(|number| bench.owner.resident(fp(number)).is_some()).collect();
                assert!(kept.windows(2).all(|pair| pair[0] || !pair[1]), "{policy}: a hole in {kept:?}");
            }
        }
    }
}

#[test]
fn quarantine() {
    // One slot in a hundred rests after eviction.
    let mut bench = Bench::new(config(300));
    for number in 0..300 {
        assert_eq!(bench.store(put(number)), Ok(Stored::Filled));
    }
    let mut evicted = std::collections::VecDeque::new();
    for number in 300..400 {
        let before: Vec<Fingerprint> =
            (0..number).map(fp).filter(|&fp| bench.owner.resident(fp).is_some()).collect();
        let slots: Vec<SlotId> = before.iter().map(|&fp| bench.owner.resident(fp).unwrap().slot).collect();
        assert_eq!(bench.store(put(number)), Ok(Stored::Filled));
        for (fp, slot) in before.into_iter().zip(slots) {
            if bench.owner.resident(fp).is_none() {
                evicted.push_back(slot);
            }
        }
        let used = bench.owner.resident(fp(number)).unwrap().slot;
        assert_eq!(evicted.pop_front(), Some(used), "first in, first out");
        assert_eq!(evicted.len() as u64, bench.owner.stats().quarantined);
    }
    assert_eq!(bench.owner.stats().quarantined, 3);
    // It never fails a put: with every other slot being filled, the last ones are used too.
    let puts: Vec<PutId> = (1000..1300).map(|number| bench.submit(put(number)).0).collect();
    assert_eq!(bench.owner.stats().filling, 300);
    for id in puts {
        assert_eq!(outcome(&bench.fill(id, Ok(1)), id), Some(Ok(Stored::Filled)));
    }
    // Small pools have none.
    let mut bench = Bench::new(config(3));
    for number in 0..9 {
        assert_eq!(bench.store(put(number)), Ok(Stored::Filled));
    }
    assert_eq!((bench.owner.stats().quarantined, bench.owner.published().count()), (0, 3));
}

#[test]
fn published_is_in_the_order_of_slots() {
    let mut bench = Bench::new(config(8));
    for number in [5, 3, 8, 1] {
        assert_eq!(bench.store(put(number)), Ok(Stored::Filled));
    }
    let slots: Vec<u32> = bench.owner.published().map(|entry| entry.slot.0).collect();
    assert_eq!(slots, [0, 1, 2, 3], "owners use consecutive slots");
    assert!(bench.owner.published().all(|entry| entry.present && entry.generation.0 > 0));
}

#[test]
fn renumbered_namespaces() {
    let mut bench = Bench::new(config(8));
    assert_eq!(bench.store(Put { ns_epoch: NsEpoch(4), ..put(1) }), Ok(Stored::Filled));
    bench.owner.handle_clear(bench.now, NsId(2), NsEpoch(9));
    let change = Renumbering { old: NsId(1), new: NsId(2), ns_epoch: NsEpoch(0) };
    bench.owner.handle_renumbered(&[change]);
    let entry = bench.owner.published().next().unwrap();
    assert_eq!((entry.ns, entry.ns_epoch), (NsId(2), NsEpoch(0)));
    assert_eq!(bench.store(Put { ns: NsId(2), ..put(2) }), Ok(Stored::Filled));
}

#[test]
fn checksums_can_be_off() {
    let mut bench = Bench::new(OwnerConfig { checksums: false, ..config(1) });
    assert_eq!(bench.store(put(1)), Ok(Stored::Filled));
    let checks: Vec<u64> = bench
        .log
        .iter()
        .filter_map(|action| match action {
            OwnerAction::PublishWord { word, .. } => Some(word.check),
            _ => None,
        })
        .collect();
    assert_eq!(checks, [0]);
}

#[test]
fn configurations_that_cannot_work_are_refused() {
    let bad = |change: fn(&mut OwnerConfig)| {
        let mut config = config(16);
        change(&mut config);
        Owner::new(config).unwrap_err()
    };
    assert!(matches!(bad(|c| c.capacity_bytes = 63), ConfigError::CapacityTooSmall { .. }));
    assert!(matches!(bad(|c| c.extent_bytes = 0), ConfigError::ExtentTooSmall { .. }));
    assert!(matches!(bad(|c| c.slots_max = 0), ConfigError::Slots { .. }));
    assert!(matches!(bad(|c| c.slots_max = u32::MAX), ConfigError::Slots { .. }));
    assert!(matches!(bad(|c| c.capacity_bytes = u64::MAX), ConfigError::TooManyExtents { .. }));
    assert!(matches!(bad(|c| c.puts_max = usize::MAX), ConfigError::AboveLimit { .. }));
    assert_eq!("reuse-rate".parse(), Ok(PolicyKind::ReuseRate));
    assert_eq!("fifo".parse::<PolicyKind>(), Err(policy::UnknownPolicy));
}
