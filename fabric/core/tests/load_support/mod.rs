//! A hand-driven loader: events are given one by one, actions are looked at one by one.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test's checks.
#![allow(dead_code)] // Each test file uses its part.

use std::time::Duration;

use kvfabric_core::hash::{KeyCoordinates, KeyHash, NamespaceKey};
use kvfabric_core::load::{
    LoadAction, LoadBlock, LoadError, LoadId, LoadRequest, Loader, LoaderConfig, LocateId, MissReason,
    PeerFailure, ReadFailure, ReadId, Replica, Replicas, ReportId, TransportUsed,
};
use kvfabric_core::word::Word;
use kvfabric_core::{Generation, Incarnation, LayoutId, NsId, RankId, SlotId, Time, TransportKind};

pub const LAYOUT: LayoutId = LayoutId(7);
pub const OBJECT_BYTES: u64 = 4096;

pub fn incarnation(value: u64) -> Incarnation {
    Incarnation::new(value).unwrap()
}

pub fn key(number: u64) -> KeyHash {
    NamespaceKey::derive(b"", "test", b"").hash(KeyCoordinates::default(), &number.to_le_bytes())
}

pub fn block(number: u64) -> LoadBlock {
    LoadBlock { key: key(number), layout: LAYOUT, object_bytes: OBJECT_BYTES, local: None }
}

/// A replica at rank `rank`, whose incarnation is 100 + rank.
pub fn replica(rank: u32, slot: u32, generation: u64) -> Replica {
    Replica {
        rank: RankId(rank),
        incarnation: incarnation(100 + u64::from(rank)),
        slot: SlotId(slot),
        generation: Generation(generation),
        tier: 0,
        load: 0,
    }
}

/// The word that an honest owner publishes for the key under the replica.
pub fn word(number: u64, at: Replica) -> Word {
    Word { generation: at.generation, tag: key(number).tag(LAYOUT, OBJECT_BYTES, at.incarnation), check: 55 }
}

#[derive(Clone, Copy, Debug)]
pub struct PostedRead {
    pub read: ReadId,
    pub rank: RankId,
    pub slot: SlotId,
    pub load: LoadId,
    pub block: u32,
    pub checksum: bool,
}

pub struct Rig {
    pub loader: Loader,
    pub now: Time,
}

impl Rig {
    pub fn new() -> Self {
        Self::with(LoaderConfig::new(incarnation(1)))
    }

    pub fn with(config: LoaderConfig) -> Self {
        Self { loader: Loader::new(config), now: Time::from_micros(1_000) }
    }

    pub fn actions(&mut self) -> Vec<LoadAction> {
        std::iter::from_fn(|| self.loader.poll_action()).collect()
    }

    /// Lets time pass; timers fire when they are due, not later.
    pub fn pass(&mut self, delay: Duration) -> Vec<LoadAction> {
        let end = self.now.after(delay);
        let mut actions = self.actions();
        while let Some(at) = self.loader.poll_timeout().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            self.loader.handle_timeout(self.now);
            actions.extend(self.actions());
        }
        self.now = end;
        actions
    }

    pub fn load(&mut self, id: u64, blocks: Vec<LoadBlock>, within: Duration) {
        let deadline = self.now.after(within);
        self.loader.handle_load(self.now, LoadId(id), LoadRequest { ns: NsId(1), blocks, deadline });
    }

    /// Starts a load and answers its LOCATE.
    pub fn load_located(
        &mut self,
        id: u64,
        blocks: Vec<LoadBlock>,
        answers: &[&[Replica]],
        within: Duration,
    ) {
        self.load(id, blocks, within);
        let locate = locate_in(&self.actions());
        self.locate(locate, answers);
    }

    pub fn locate(&mut self, locate: LocateId, answers: &[&[Replica]]) {
        let answers = answers.iter().map(|replicas| Replicas::from_slice(replicas)).collect();
        self.loader.handle_located(self.now, locate, Ok(answers));
    }

    pub fn connected(&mut self, rank: u32) {
        self.connected_by(rank, TransportKind::Shm);
    }

    pub fn connected_by(&mut self, rank: u32, transport: TransportKind) {
        let at = replica(rank, 0, 0);
        self.loader.handle_peer_connected(self.now, at.rank, at.incarnation, transport);
    }

    pub fn peer_failed(&mut self, rank: u32, failure: PeerFailure) {
        let at = replica(rank, 0, 0);
        self.loader.handle_peer_failed(self.now, at.rank, at.incarnation, failure);
    }

    pub fn read_ok(&mut self, read: ReadId, word: Word) {
        self.loader.handle_read_done(self.now, read, Ok((word, Some(word.check))));
    }

    pub fn read_failed(&mut self, read: ReadId, failure: ReadFailure) {
        self.loader.handle_read_done(self.now, read, Err(failure));
    }

    pub fn acknowledge(&mut self, report: ReportId) {
        self.loader.handle_miss_reported(self.now, report);
    }
}

pub fn locate_in(actions: &[LoadAction]) -> LocateId {
    actions
        .iter()
        .find_map(|action| match action {
            LoadAction::Locate { locate, .. } => Some(*locate),
            _ => None,
        })
        .unwrap_or_else(|| panic!("no Locate in {actions:?}"))
}

pub fn reads_in(actions: &[LoadAction]) -> Vec<PostedRead> {
    actions
        .iter()
        .filter_map(|action| match *action {
            LoadAction::Read { read, rank, slot, load, block, checksum, .. } => {
                Some(PostedRead { read, rank, slot, load, block, checksum })
            }
            _ => None,
        })
        .collect()
}

pub fn connects_in(actions: &[LoadAction]) -> Vec<RankId> {
    actions
        .iter()
        .filter_map(|action| match action {
            LoadAction::Connect { rank, .. } => Some(*rank),
            _ => None,
        })
        .collect()
}

pub fn reports_in(actions: &[LoadAction]) -> Vec<(ReportId, RankId, MissReason)> {
    actions
        .iter()
        .filter_map(|action| match action {
            LoadAction::MissReport { report, rank, reason, .. } => Some((*report, *rank, *reason)),
            _ => None,
        })
        .collect()
}

pub fn aborts_in(actions: &[LoadAction]) -> Vec<ReadId> {
    actions
        .iter()
        .filter_map(|action| match action {
            LoadAction::Abort { read } => Some(*read),
            _ => None,
        })
        .collect()
}

pub type Outcome = Result<TransportUsed, LoadError>;

pub fn done_in(actions: &[LoadAction]) -> Vec<(u32, Outcome)> {
    actions
        .iter()
        .filter_map(|action| match action {
            LoadAction::BlockDone { block, outcome, .. } => Some((*block, *outcome)),
            _ => None,
        })
        .collect()
}

pub fn loads_done_in(actions: &[LoadAction]) -> Vec<LoadId> {
    actions
        .iter()
        .filter_map(|action| match action {
            LoadAction::LoadDone { load } => Some(*load),
            _ => None,
        })
        .collect()
}

pub fn used(rank: u32, transport: TransportKind) -> Outcome {
    Ok(TransportUsed { rank: RankId(rank), transport })
}
