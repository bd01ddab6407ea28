//! A rank as a whole: its owner side and its reader side behind one pair of `handle_*` and `poll_*`.
//!
//! The node is a thin driver of [`Rank`]: what is decided, is decided here.

mod stores;

use std::collections::VecDeque;

use thiserror::Error;

use crate::limits::{JOBS_MAX, JOB_BLOCKS_MAX, TOUCH_ENTRIES_MAX};
use crate::load::{
    DirectoryUnavailable, LoadAction, LoadId, LoadRequest, LoadStats, Loader, LoaderConfig, LocateId,
    MissReason, PeerFailure, ReadFailure, ReadId, Replica, Replicas, ReportId,
};
use crate::owner::{
    ConfigError, FillError, Owner, OwnerAction, OwnerConfig, OwnerStats, Put, PutError, PutId, Renumbering,
    Resident, SlabRecord, Stored,
};
use crate::word::Word;
use crate::{Fingerprint, Generation, Incarnation, NsEpoch, NsId, RankId, SlotId, Time, TransportKind};

pub use stores::StoreId;
use stores::Stores;

/// The number that stands for this rank in its own hints while it is not a member of the directory. Peers are told
/// apart by incarnation, so nothing depends on it.
pub const RANK_NOT_JOINED: RankId = RankId(u32::MAX);

/// Configuration of a [`Rank`].
#[derive(Clone, Debug)]
pub struct RankConfig {
    /// Owner side.
    pub owner: OwnerConfig,
    /// Reader side. Both sides must have the same incarnation.
    pub load: LoaderConfig,
}

impl RankConfig {
    /// The defaults for a pool of `pool_bytes`.
    #[must_use]
    pub fn new(incarnation: Incarnation, pool_bytes: u64) -> Self {
        Self { owner: OwnerConfig::new(pool_bytes, incarnation), load: LoaderConfig::new(incarnation) }
    }
}

/// Puts that share a deadline and an end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreJob {
    /// Name of the first put; the others follow by one. The driver keeps their sources under these names.
    pub first_put: PutId,
    /// The puts, at most [`JOB_BLOCKS_MAX`].
    pub puts: Vec<Put>,
    /// When puts that are not over are given up.
    pub deadline: Time,
}

/// What the driver must do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Of the owner side. Never [`OwnerAction::PutDone`].
    Owner(OwnerAction),
    /// A put of a job is over and its source is free.
    PutDone {
        /// Put.
        put: PutId,
        /// Result.
        outcome: Result<Stored, PutError>,
    },
    /// Every put of the job is over.
    StoreDone {
        /// Job.
        store: StoreId,
    },
    /// Of the reader side. [`LoadAction::Touch`] names other ranks only.
    Load(LoadAction),
    /// Every slot of the cleared namespace is invalid: acknowledge the CLEAR.
    ClearDone {
        /// Name of the CLEAR, from [`Rank::handle_clear`].
        clear: u64,
    },
}

/// A rank: deterministic, without IO.
///
/// The driver passes events to `handle_*`, then takes actions from [`poll_action`](Self::poll_action) until there are
/// none and carries them out strictly in order, and calls [`handle_timeout`](Self::handle_timeout) at
/// [`poll_timeout`](Self::poll_timeout).
#[derive(Debug)]
pub struct Rank {
    incarnation: Incarnation,
    number: RankId,
    now: Time,
    owner: Owner,
    loader: Loader,
    stores: Stores,
    /// Actions taken from the parts, and those of the rank itself.
    actions: VecDeque<Action>,
    /// CLEARs to acknowledge once the owner's actions so far are given out.
    cleared: VecDeque<u64>,
}

impl Rank {
    /// A rank with an empty pool that is not a member of a directory yet.
    ///
    /// # Errors
    /// [`RankError`] if the configuration cannot work.
    pub fn new(config: RankConfig) -> Result<Self, RankError> {
        let incarnation = config.owner.incarnation;
        if config.load.incarnation != incarnation {
            return Err(RankError::TwoIncarnations { owner: incarnation, load: config.load.incarnation });
        }
        Ok(Self {
            incarnation,
            number: RANK_NOT_JOINED,
            now: Time::ZERO,
            owner: Owner::new(config.owner)?,
            loader: Loader::new(config.load),
            stores: Stores::default(),
            actions: VecDeque::new(),
            cleared: VecDeque::new(),
        })
    }

    /// The directory admitted this process under a number, again or for the first time; `None`: it is no member now.
    /// Slots and words stay valid: they belong to the incarnation (design 1.9).
    pub fn handle_number(&mut self, number: Option<RankId>) {
        self.number = number.unwrap_or(RANK_NOT_JOINED);
    }

    /// Starts a store job. Each of its puts gets exactly one `PutDone`, and then the job one `StoreDone`.
    ///
    /// Neither the job's name nor its puts' may be in use; such a call is ignored.
    pub fn handle_store(&mut self, now: Time, id: StoreId, job: StoreJob) {
        self.advance(now);
        let count = job.puts.len();
        if self.stores.collides(id, job.first_put, count) {
            debug_assert!(false, "store {id:?} or its puts are in progress");
            return;
        }
        let refused = if count > JOB_BLOCKS_MAX || self.stores.len() >= JOBS_MAX {
            Some(PutError::Overloaded)
        } else {
            (job.deadline <= self.now).then_some(PutError::DeadlineExceeded)
        };
        if refused.is_some() || count == 0 {
            let outcome = Err(refused.unwrap_or(PutError::Overloaded));
            let names = (job.first_put.0..).map(PutId).take(count);
            self.actions.extend(names.map(|put| Action::PutDone { put, outcome }));
            self.actions.push_back(Action::StoreDone { store: id });
            return;
        }
        self.stores.insert(id, job.first_put, count, job.deadline);
        for (put, name) in job.puts.into_iter().zip(job.first_put.0..) {
            self.owner.handle_put(self.now, PutId(name), put);
        }
    }

    /// Gives a store job up. Puts whose copy runs end when it was stopped.
    pub fn handle_store_cancel(&mut self, now: Time, store: StoreId) {
        self.advance(now);
        self.end_store(store, PutError::Cancelled);
    }

    fn end_store(&mut self, store: StoreId, reason: PutError) {
        for put in self.stores.open_puts(store) {
            self.owner.handle_cancel(self.now, put, reason);
        }
    }

    /// See [`Owner::handle_extent`].
    pub fn handle_extent(&mut self, now: Time, extent: u32, result: Result<(), ()>) {
        self.advance(now);
        self.owner.handle_extent(self.now, extent, result);
    }

    /// See [`Owner::handle_filled`].
    pub fn handle_filled(&mut self, now: Time, put: PutId, result: Result<u64, FillError>) {
        self.advance(now);
        self.owner.handle_filled(self.now, put, result);
    }

    /// See [`Owner::handle_evict`].
    pub fn handle_evict(&mut self, now: Time, fingerprint: Fingerprint) -> bool {
        self.advance(now);
        self.owner.handle_evict(self.now, fingerprint)
    }

    /// See [`Owner::handle_invalidate_all`].
    pub fn handle_invalidate_all(&mut self, now: Time) {
        self.advance(now);
        self.owner.handle_invalidate_all(self.now);
    }

    /// The directory cleared a namespace. `ClearDone` follows the last word's invalidation.
    pub fn handle_clear(&mut self, now: Time, clear: u64, ns: NsId, epoch: NsEpoch) {
        self.advance(now);
        self.owner.handle_clear(self.now, ns, epoch);
        self.cleared.push_back(clear);
    }

    /// See [`Owner::handle_renumbered`].
    pub fn handle_renumbered(&mut self, changes: &[Renumbering]) {
        self.owner.handle_renumbered(changes);
    }

    /// A peer's TOUCH: blocks of this rank that it read. Advisory; what is too much is left out.
    pub fn handle_touch(&mut self, now: Time, entries: &[(SlotId, Generation)]) {
        self.advance(now);
        for &(slot, generation) in entries.iter().take(TOUCH_ENTRIES_MAX) {
            self.owner.handle_touch(self.now, slot, generation);
        }
    }

    /// Starts a load; see [`Loader::handle_load`]. Where a block names no local replica, this rank's own pool is
    /// looked at.
    pub fn handle_load(&mut self, now: Time, load: LoadId, mut request: LoadRequest) {
        self.advance(now);
        for block in &mut request.blocks {
            if block.local.is_none() {
                block.local = self.own_replica(&block.key, block.layout, block.object_bytes);
            }
        }
        self.loader.handle_load(self.now, load, request);
    }

    fn own_replica(
        &self,
        key: &crate::hash::KeyHash,
        layout: crate::LayoutId,
        object_bytes: u64,
    ) -> Option<Replica> {
        let resident = self.owner.resident(key.fingerprint())?;
        let same = resident.key == *key && (resident.layout, resident.object_bytes) == (layout, object_bytes);
        same.then_some(Replica {
            rank: self.number,
            incarnation: self.incarnation,
            slot: resident.slot,
            generation: resident.generation,
            tier: 0,
            load: 0,
        })
    }

    /// See [`Loader::handle_cancel`].
    pub fn handle_load_cancel(&mut self, now: Time, load: LoadId) {
        self.advance(now);
        self.loader.handle_cancel(self.now, load);
    }

    /// See [`Loader::handle_located`].
    pub fn handle_located(
        &mut self,
        now: Time,
        locate: LocateId,
        result: Result<Vec<Replicas>, DirectoryUnavailable>,
    ) {
        self.advance(now);
        self.loader.handle_located(self.now, locate, result);
    }

    /// See [`Loader::handle_peer_connected`].
    pub fn handle_peer_connected(
        &mut self,
        now: Time,
        rank: RankId,
        incarnation: Incarnation,
        transport: TransportKind,
    ) {
        self.advance(now);
        self.loader.handle_peer_connected(self.now, rank, incarnation, transport);
    }

    /// See [`Loader::handle_peer_failed`].
    pub fn handle_peer_failed(
        &mut self,
        now: Time,
        rank: RankId,
        incarnation: Incarnation,
        failure: PeerFailure,
    ) {
        self.advance(now);
        self.loader.handle_peer_failed(self.now, rank, incarnation, failure);
    }

    /// See [`Loader::handle_incarnation_closed`].
    pub fn handle_incarnation_closed(&mut self, now: Time, rank: RankId, incarnation: Incarnation) {
        self.advance(now);
        self.loader.handle_incarnation_closed(self.now, rank, incarnation);
    }

    /// See [`Loader::handle_read_done`].
    pub fn handle_read_done(
        &mut self,
        now: Time,
        read: ReadId,
        result: Result<(Word, Option<u64>), ReadFailure>,
    ) {
        self.advance(now);
        self.loader.handle_read_done(self.now, read, result);
    }

    /// See [`Loader::handle_miss_reported`].
    pub fn handle_miss_reported(&mut self, now: Time, report: ReportId) {
        self.advance(now);
        self.loader.handle_miss_reported(self.now, report);
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Time) {
        self.advance(now);
        while let Some(store) = self.stores.expired(self.now) {
            self.end_store(store, PutError::DeadlineExceeded);
        }
        self.loader.handle_timeout(self.now);
    }

    /// When [`handle_timeout`](Self::handle_timeout) must be called. Valid once there are no more actions.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        [self.stores.next_deadline(), self.loader.poll_timeout()].into_iter().flatten().min()
    }

    /// The next action. The owner's come first: what invalidates a word must not wait (rule O1).
    pub fn poll_action(&mut self) -> Option<Action> {
        loop {
            if let Some(action) = self.actions.pop_front() {
                return Some(action);
            }
            if let Some(action) = self.owner.poll_action() {
                return Some(self.owner_action(action));
            }
            if let Some(clear) = self.cleared.pop_front() {
                return Some(Action::ClearDone { clear });
            }
            // Some of the loader's actions end here, or give the owner something to do first.
            let action = self.loader.poll_action()?;
            if let Some(action) = self.load_action(action) {
                return Some(action);
            }
        }
    }

    fn owner_action(&mut self, action: OwnerAction) -> Action {
        let OwnerAction::PutDone { put, outcome } = action else { return Action::Owner(action) };
        if let Some(store) = self.stores.put_over(put) {
            self.actions.push_back(Action::StoreDone { store });
        }
        Action::PutDone { put, outcome }
    }

    fn load_action(&mut self, action: LoadAction) -> Option<Action> {
        match &action {
            LoadAction::Touch { incarnation, entries, .. } if *incarnation == self.incarnation => {
                for &(slot, generation) in entries {
                    self.owner.handle_touch(self.now, slot, generation);
                }
                return None;
            }
            // Bytes of the own pool that do not match their own checksum are of no use to anybody.
            LoadAction::MissReport { fingerprint, incarnation, generation, reason, .. }
                if *incarnation == self.incarnation && *reason == MissReason::ChecksumMismatch =>
            {
                let resident = self.owner.resident(*fingerprint);
                if resident.is_some_and(|resident| resident.generation == *generation) {
                    self.owner.handle_evict(self.now, *fingerprint);
                }
            }
            _ => {}
        }
        Some(Action::Load(action))
    }

    fn advance(&mut self, now: Time) {
        self.now = self.now.max(now);
    }

    /// This process.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The number given by the directory, or [`RANK_NOT_JOINED`].
    #[must_use]
    pub fn number(&self) -> RankId {
        self.number
    }

    /// See [`Owner::resident`].
    #[must_use]
    pub fn resident(&self, fingerprint: Fingerprint) -> Option<Resident> {
        self.owner.resident(fingerprint)
    }

    /// See [`Owner::published`].
    pub fn published(&self) -> impl Iterator<Item = crate::owner::Announcement> + '_ {
        self.owner.published()
    }

    /// See [`Owner::slabs`].
    pub fn slabs(&self) -> impl Iterator<Item = SlabRecord> + '_ {
        self.owner.slabs()
    }

    /// See [`Owner::take_evicted_keys`].
    pub fn take_evicted_keys(&mut self) -> Vec<Box<[u8]>> {
        self.owner.take_evicted_keys()
    }

    /// Counters and gauges of the owner side.
    #[must_use]
    pub fn owner_stats(&self) -> OwnerStats {
        self.owner.stats()
    }

    /// Counters of the reader side.
    #[must_use]
    pub fn load_stats(&self) -> &LoadStats {
        self.loader.stats()
    }

    /// Whether nothing is in progress: no store, no load, no read.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.stores.len() == 0 && self.loader.loads_in_progress() == 0 && self.loader.reads_in_flight() == 0
    }
}

/// Why a rank cannot be configured so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RankError {
    /// The owner side cannot work.
    #[error(transparent)]
    Owner(#[from] ConfigError),
    /// Both sides belong to one process.
    #[error("the owner side is incarnation {owner}, the reader side {load}")]
    TwoIncarnations {
        /// Of the owner side.
        owner: Incarnation,
        /// Of the reader side.
        load: Incarnation,
    },
}
