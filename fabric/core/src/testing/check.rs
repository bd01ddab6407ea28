//! What must hold in every run (design 7), apart from what the run does.
//!
//! Checks panic: they are a test's assertions.

use core::time::Duration;
use std::collections::BTreeMap;

use super::payload::identify;
use super::world::{LifeId, Outcome};
use crate::limits::MISS_REPORT_WAIT;
use crate::load::LoadId;
use crate::owner::PutId;
use crate::Time;

/// A 64-bit checksum for words, never 0. The world's own; production uses xxh3-64.
#[must_use]
pub fn checksum(bytes: &[u8]) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&blake3::hash(bytes).as_bytes()[..8]);
    u64::from_le_bytes(first).max(1)
}

#[derive(Debug)]
struct Destination {
    key: u64,
    bytes: Vec<u8>,
    ended: Option<(Outcome, u64)>,
    delivered: Option<PutId>,
}

#[derive(Debug)]
struct CheckedLoad {
    life: LifeId,
    deadline: Time,
    blocks: Vec<Destination>,
    over: bool,
    forgotten: bool,
}

/// The checker.
#[derive(Debug, Default)]
pub(super) struct Checker {
    puts: BTreeMap<PutId, u64>,
    loads: BTreeMap<LoadId, CheckedLoad>,
    /// Loads that are not over, by deadline.
    open: BTreeMap<(Time, LoadId), ()>,
}

impl Checker {
    pub(super) fn put_submitted(&mut self, put: PutId, key: u64) {
        self.puts.insert(put, key);
    }

    pub(super) fn load_started(
        &mut self,
        life: LifeId,
        load: LoadId,
        keys: &[u64],
        length_bytes: usize,
        deadline: Time,
    ) {
        let blocks = keys
            .iter()
            .map(|key| Destination {
                key: *key,
                bytes: vec![0xdd; length_bytes],
                ended: None,
                delivered: None,
            })
            .collect();
        self.loads.insert(load, CheckedLoad { life, deadline, blocks, over: false, forgotten: false });
        self.open.insert((deadline, load), ());
    }

    /// The loads of a process end with it; nobody looks at their destinations any more.
    pub(super) fn life_ended(&mut self, life: LifeId) {
        for (id, load) in self.loads.iter_mut().filter(|(_, load)| load.life == life && !load.over) {
            load.forgotten = true;
            self.open.remove(&(load.deadline, *id));
        }
    }

    fn destination(&mut self, load: LoadId, block: u32) -> &mut Destination {
        let found = self.loads.get_mut(&load).and_then(|load| load.blocks.get_mut(block as usize));
        #[allow(clippy::expect_used)] // A check.
        found.expect("a block that nobody asked for")
    }

    pub(super) fn land(&mut self, load: LoadId, block: u32, offset: usize, bytes: &[u8]) {
        let destination = self.destination(load, block);
        assert!(
            destination.ended.is_none(),
            "R4: bytes landed in block {block} of {load:?} after it had ended as {:?}",
            destination.ended
        );
        destination.bytes[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    pub(super) fn checksum(&mut self, load: LoadId, block: u32) -> u64 {
        checksum(&self.destination(load, block).bytes)
    }

    pub(super) fn block_done(&mut self, load: LoadId, block: u32, outcome: Outcome) {
        let puts = std::mem::take(&mut self.puts);
        let destination = self.destination(load, block);
        assert!(destination.ended.is_none(), "block {block} of {load:?} ended twice");
        destination.ended = Some((outcome, checksum(&destination.bytes)));
        if outcome.is_ok() {
            let key = destination.key;
            match identify(&destination.bytes) {
                Ok(stamp) => {
                    let put = PutId(stamp.put);
                    assert_eq!(stamp.key, key, "wrong bytes: block {block} of {load:?} holds another key's");
                    assert_eq!(puts.get(&put), Some(&key), "wrong bytes: no such put of key {key}");
                    destination.delivered = Some(put);
                }
                Err(torn) => unreachable!("wrong bytes in block {block} of {load:?}, key {key}: {torn}"),
            }
        }
        self.puts = puts;
    }

    pub(super) fn load_done(&mut self, id: LoadId) {
        #[allow(clippy::expect_used)] // A check.
        let load = self.loads.get_mut(&id).expect("a load that nobody started");
        assert!(!load.over, "{id:?} ended twice");
        assert!(load.blocks.iter().all(|block| block.ended.is_some()), "{id:?} ended before its blocks");
        load.over = true;
        self.open.remove(&(load.deadline, id));
    }

    /// Every load is over by its deadline, plus the drain, plus the wait for a report that the drain gave rise to.
    pub(super) fn check_time(&self, now: Time, drain_max: Duration) {
        if let Some(((deadline, load), ())) = self.open.first_key_value() {
            let bound = deadline.after(drain_max + 2 * MISS_REPORT_WAIT);
            assert!(
                now <= bound,
                "{load:?} is not over although its deadline was {deadline:?} and it is {now:?}"
            );
        }
    }

    /// No destination changed after its block ended. `land` finds every change; this finds a hole in `land`.
    pub(super) fn check_destinations(&self) {
        for (id, load) in &self.loads {
            for block in &load.blocks {
                if let Some((outcome, sum)) = block.ended {
                    assert_eq!(sum, checksum(&block.bytes), "{id:?} changed after it ended as {outcome:?}");
                }
            }
        }
    }

    pub(super) fn outcomes(&self, load: LoadId) -> Vec<Option<Outcome>> {
        self.loads
            .get(&load)
            .map(|load| load.blocks.iter().map(|block| block.ended.map(|(outcome, _)| outcome)).collect())
            .unwrap_or_default()
    }

    pub(super) fn delivered(&self, load: LoadId) -> Vec<Option<PutId>> {
        self.loads
            .get(&load)
            .map(|load| load.blocks.iter().map(|block| block.delivered).collect())
            .unwrap_or_default()
    }

    pub(super) fn is_over(&self, load: LoadId) -> bool {
        self.loads.get(&load).is_none_or(|load| load.over || load.forgotten)
    }
}
