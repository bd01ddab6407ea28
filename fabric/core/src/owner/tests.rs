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
