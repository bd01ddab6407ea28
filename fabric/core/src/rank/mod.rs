//! A rank as a whole: its owner side, its reader side and its side of the directory behind one pair of `handle_*` and
//! `poll_*`.
//!
//! The node is a thin driver of [`Rank`]: what is decided, is decided here.

mod stores;
#[cfg(test)]
mod tests;
mod types;

use core::time::Duration;
use std::collections::VecDeque;

use crate::directory::{
    Announcer, AnnouncerAction, AnnouncerStats, ClearId, FlushId, LinkId, OpenError, RequestTag,
};
use crate::limits::{JOBS_MAX, JOB_BLOCKS_MAX, TOUCH_ENTRIES_MAX};
use crate::load::{
    DirectoryUnavailable, LoadAction, LoadId, LoadRequest, LoadStats, Loader, LocateId, MissReason,
    PeerFailure, ReadFailure, ReadId, Replica, Replicas, ReportId,
};
use crate::owner::{FillError, Owner, OwnerAction, OwnerStats, PutError, PutId, Resident, SlabRecord};
use crate::wire::{ClearAck, ClearRank, Member, MissRecord, NsName, NsNumber, Reply, MISS_REPORTS_MAX};
use crate::word::Word;
use crate::{Fingerprint, Generation, Incarnation, NsEpoch, NsId, RankId, SlotId, Time, TransportKind};

pub use stores::StoreId;
use stores::Stores;
pub use types::{Action, RankConfig, RankError, StoreJob, RANK_NOT_JOINED};

/// A rank: deterministic, without IO.
///
/// The driver passes events to `handle_*`, then takes actions from [`poll_action`](Self::poll_action) until there are
/// none and carries them out strictly in order, and calls [`handle_timeout`](Self::handle_timeout) at
/// [`poll_timeout`](Self::poll_timeout).
#[derive(Debug)]
pub struct Rank {
    incarnation: Incarnation,
    now: Time,
    owner: Owner,
    loader: Loader,
    announcer: Announcer,
    stores: Stores,
    /// Actions taken from the parts, and those of the rank itself.
    actions: VecDeque<Action>,
    /// CLEARs to acknowledge once the owner's actions so far are given out.
    cleared: VecDeque<u64>,
    /// Miss reports that go out together.
    reports: Vec<ReportId>,
    records: Vec<MissRecord>,
}

impl Rank {
    /// A rank with an empty pool that is not a member of a directory yet.
    ///
    /// # Errors
    /// [`RankError`] if the configuration cannot work.
    pub fn new(config: RankConfig) -> Result<Self, RankError> {
        let incarnation = config.owner.incarnation;
        if config.load.incarnation != incarnation || config.announcer.incarnation != incarnation {
            return Err(RankError::Incarnations {
                owner: incarnation,
                load: config.load.incarnation,
                announcer: config.announcer.incarnation,
            });
        }
        Ok(Self {
            incarnation,
            now: Time::ZERO,
            owner: Owner::new(config.owner)?,
            loader: Loader::new(config.load),
            announcer: Announcer::new(config.announcer),
            stores: Stores::default(),
            actions: VecDeque::new(),
            cleared: VecDeque::new(),
            reports: Vec::new(),
            records: Vec::new(),
        })
    }

    // ---- the directory ----

    /// See [`Announcer::open`]. Stores and loads name namespaces by the number returned.
    ///
    /// # Errors
    /// [`OpenError`]: too many namespaces.
    pub fn open_namespace(&mut self, now: Time, name: NsName) -> Result<NsId, OpenError> {
        self.advance(now);
        self.announcer.open(self.now, name)
    }

    /// See [`Announcer::handle_connected`].
    pub fn handle_directory_connected(&mut self, now: Time, jitter: Duration) -> LinkId {
        self.advance(now);
        self.announcer.handle_connected(self.now, jitter)
    }

    /// See [`Announcer::handle_disconnected`].
    pub fn handle_directory_disconnected(&mut self, now: Time) {
        self.advance(now);
        self.announcer.handle_disconnected(self.now);
    }

    /// See [`Announcer::handle_reply`].
    pub fn handle_directory_reply(&mut self, now: Time, link: LinkId, tag: RequestTag, reply: &Reply<'_>) {
        self.advance(now);
        self.announcer.handle_reply(self.now, link, tag, reply);
    }

    /// See [`Announcer::handle_leave`].
    pub fn handle_leave(&mut self, now: Time) {
        self.advance(now);
        self.announcer.handle_leave();
    }

    /// The directory asks this rank to clear a namespace; ends with [`Action::AcknowledgeClear`], after the last word's
    /// invalidation.
    pub fn handle_clear_rank(&mut self, now: Time, clear: &ClearRank) {
        self.advance(now);
        if let Some((ns, epoch)) = self.announcer.handle_clear_rank(self.now, clear) {
            self.owner.handle_clear(self.now, ns, epoch);
        }
        self.cleared.push_back(clear.clear);
    }

    /// See [`Announcer::handle_clear`].
    pub fn handle_clear(&mut self, now: Time, clear: ClearId, ns: NsId, deadline: Time) {
        self.advance(now);
        self.announcer.handle_clear(self.now, clear, ns, deadline);
    }

    /// See [`Announcer::handle_flush`]. What was stored before is queued before.
    pub fn handle_flush(&mut self, now: Time, flush: FlushId, deadline: Time) {
        self.advance(now);
        self.move_owner_actions();
        self.announcer.handle_flush(self.now, flush, deadline);
    }

    /// See [`Announcer::set_load`].
    pub fn set_load(&mut self, load: u8) {
        self.announcer.set_load(load);
    }

    // ---- the owner side ----

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
        for (mut put, name) in job.puts.into_iter().zip(job.first_put.0..) {
            put.ns_epoch = self.announcer.epoch(put.ns).unwrap_or(put.ns_epoch);
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

    /// A peer's TOUCH: blocks of this rank that it read. Advisory; what is too much is left out.
    pub fn handle_touch(&mut self, now: Time, entries: &[(SlotId, Generation)]) {
        self.advance(now);
        for &(slot, generation) in entries.iter().take(TOUCH_ENTRIES_MAX) {
            self.owner.handle_touch(self.now, slot, generation);
        }
    }

    // ---- the reader side ----

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
            rank: self.announcer.member().map_or(RANK_NOT_JOINED, |member| member.rank),
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

    /// The directory acknowledged these reports; see [`Loader::handle_miss_reported`].
    pub fn handle_misses_reported(&mut self, now: Time, reports: &[ReportId]) {
        self.advance(now);
        for report in reports {
            self.loader.handle_miss_reported(self.now, *report);
        }
    }

    // ---- time and actions ----

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Time) {
        self.advance(now);
        while let Some(store) = self.stores.expired(self.now) {
            self.end_store(store, PutError::DeadlineExceeded);
        }
        self.loader.handle_timeout(self.now);
        if self.announcer.poll_timeout().is_some_and(|at| at <= self.now) {
            self.announcer.handle_timeout(self.now);
        }
    }

    /// When [`handle_timeout`](Self::handle_timeout) must be called. Valid once there are no more actions.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        [self.stores.next_deadline(), self.loader.poll_timeout(), self.announcer.poll_timeout()]
            .into_iter()
            .flatten()
            .min()
    }

    /// The next action. The owner's come first: what invalidates a word must not wait (rule O1), and what the directory
    /// is told or acknowledged must be true by then.
    pub fn poll_action(&mut self) -> Option<Action> {
        loop {
            self.move_owner_actions();
            if let Some(action) = self.actions.pop_front() {
                return Some(action);
            }
            if let Some(clear) = self.cleared.pop_front() {
                return Some(Action::AcknowledgeClear(ClearAck { clear, done: true }));
            }
            if let Some(action) = self.announcer.poll_action() {
                self.announcer_action(action);
            } else if self.records.len() >= MISS_REPORTS_MAX {
                self.send_reports();
            } else if let Some(action) = self.loader.poll_action() {
                if let Some(action) = self.load_action(action) {
                    return Some(action);
                }
            } else if self.records.is_empty() {
                return None;
            } else {
                self.send_reports();
            }
        }
    }

    /// Takes what the owner asks for. Its announcements go to the directory side, so that a snapshot and the
    /// announcements around it tell the same story.
    fn move_owner_actions(&mut self) {
        while let Some(action) = self.owner.poll_action() {
            match action {
                OwnerAction::Announce(announcement) => {
                    self.announcer.handle_announcement(self.now, announcement);
                }
                OwnerAction::PutDone { put, outcome } => {
                    self.actions.push_back(Action::PutDone { put, outcome });
                    if let Some(store) = self.stores.put_over(put) {
                        self.actions.push_back(Action::StoreDone { store });
                    }
                }
                action => self.actions.push_back(Action::Owner(action)),
            }
        }
    }

    fn announcer_action(&mut self, action: AnnouncerAction) {
        match action {
            AnnouncerAction::NeedSnapshot => self.announcer.handle_snapshot(self.now, self.owner.published()),
            AnnouncerAction::EpochChanged { ns, epoch } => self.owner.handle_clear(self.now, ns, epoch),
            action => self.actions.push_back(Action::Directory(Box::new(action))),
        }
    }

    fn load_action(&mut self, action: LoadAction) -> Option<Action> {
        match action {
            LoadAction::Locate { locate, ns, keys, deadline } => match self.announcer.directory_ns(ns) {
                Some(ns) => return Some(Action::Locate { locate, ns, keys, deadline }),
                None => self.loader.handle_located(self.now, locate, Err(DirectoryUnavailable)),
            },
            LoadAction::Touch { incarnation, entries, .. } if incarnation == self.incarnation => {
                for (slot, generation) in entries {
                    self.owner.handle_touch(self.now, slot, generation);
                }
            }
            LoadAction::MissReport { report, fingerprint, rank, incarnation, generation, reason } => {
                if incarnation == self.incarnation && reason == MissReason::ChecksumMismatch {
                    self.drop_corrupted(fingerprint, generation);
                }
                let member = Member { rank, incarnation };
                self.reports.push(report);
                self.records.push(MissRecord { fingerprint, generation, member, reason });
            }
            action => return Some(Action::Load(action)),
        }
        None
    }

    /// Bytes of the own pool that do not match their own checksum are of no use to anybody.
    fn drop_corrupted(&mut self, fingerprint: Fingerprint, generation: Generation) {
        let resident = self.owner.resident(fingerprint);
        if resident.is_some_and(|resident| resident.generation == generation) {
            self.owner.handle_evict(self.now, fingerprint);
        }
    }

    fn send_reports(&mut self) {
        let reports = std::mem::take(&mut self.reports);
        let records = std::mem::take(&mut self.records);
        self.actions.push_back(Action::ReportMisses { reports, records });
    }

    fn advance(&mut self, now: Time) {
        self.now = self.now.max(now);
    }

    /// This process.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.incarnation
    }

    /// The number given by the directory, while this process is a member.
    #[must_use]
    pub fn member(&self) -> Option<Member> {
        self.announcer.member()
    }

    /// See [`Announcer::ns`].
    #[must_use]
    pub fn namespace(&self, name: &NsName) -> Option<(NsId, NsEpoch)> {
        self.announcer.ns(name)
    }

    /// See [`Announcer::directory_ns`].
    #[must_use]
    pub fn directory_ns(&self, ns: NsId) -> Option<NsNumber> {
        self.announcer.directory_ns(ns)
    }

    /// See [`Announcer::is_settled`].
    #[must_use]
    pub fn is_settled(&self) -> bool {
        self.announcer.is_settled()
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

    /// Counters of the directory side.
    #[must_use]
    pub fn announcer_stats(&self) -> AnnouncerStats {
        self.announcer.stats()
    }

    /// Whether nothing is in progress: no store, no load, no read.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.stores.len() == 0 && self.loader.loads_in_progress() == 0 && self.loader.reads_in_flight() == 0
    }
}
