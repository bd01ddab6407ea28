//! The core thread: takes commands and events, drives the core, carries out its actions strictly in order.

use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfabric_core::load::{
    LoadAction, LoadBlock, LoadError, LoadId, LoadRequest, PeerFailure, ReadFailure, ReadId,
};
use kvfabric_core::owner::{OwnerAction, Put, PutId};
use kvfabric_core::rank::{Action, Rank, StoreId, StoreJob};
use kvfabric_core::word::Word;
use kvfabric_core::{Generation, NsEpoch, NsId, Tag, Time, TransportKind};
use kvfabric_memory::{OwnerMemory, RawWord, Slab};
use kvfabric_transport_api::{Event, OpToken, ReadDone, ReadError};

use crate::command::{Command, LoadBlockInput, StoreBlockInput};
use crate::control::Control;
use crate::filler::{FillTask, Filler};
use crate::job::JobState;
use crate::jobs::{JobKind, Jobs};
use crate::membership::Membership;
use crate::reads::Reads;
use crate::routes::{Begin, Routes};
use crate::shared::Shared;
use crate::{BlockError, BlockOk, NodeStats};

/// Commands taken before actions are carried out: enough to batch, few enough that O1 and completions are not kept waiting.
const COMMANDS_PER_TURN: usize = 256;
/// How long closing waits for the directory to hear the farewell; it sees the liveness connection close in any case.
const FAREWELL_MAX: Duration = Duration::from_millis(300);
/// Longest sleep of the core thread.
const SLEEP_MAX: Duration = Duration::from_millis(500);

pub(crate) struct Driver {
    pub(crate) shared: Arc<Shared>,
    pub(crate) inbox: Receiver<Command>,
    pub(crate) started: Instant,
    pub(crate) rank: Rank,
    pub(crate) memory: Arc<OwnerMemory>,
    pub(crate) filler: Filler,
    pub(crate) routes: Routes,
    pub(crate) control: Control,
    pub(crate) jobs: Jobs,
    pub(crate) reads: Reads,
    pub(crate) closing: Option<Time>,
    pub(crate) checksums: bool,
    pub(crate) membership: Membership,
    pub(crate) pool_bytes: u64,
}

impl Driver {
    /// Runs until closed. Every job is final when this returns.
    pub(crate) fn run(mut self) {
        loop {
            let wait = self.next_wait();
            match self.inbox.recv_timeout(wait) {
                Ok(command) => {
                    self.handle(command);
                    for _ in 1..COMMANDS_PER_TURN {
                        match self.inbox.try_recv() {
                            Ok(command) => self.handle(command),
                            Err(_) => break,
                        }
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                // The facade keeps a sender until the node is dropped, which closes first.
                Err(RecvTimeoutError::Disconnected) => self.begin_close(Duration::ZERO),
            }
            let now = self.now();
            if self.rank.poll_timeout().is_some_and(|due| due <= now) {
                self.rank.handle_timeout(now);
            }
            self.carry_out_all();
            self.settle_openings();
            if let Some(until) = self.closing {
                if (self.jobs.len() == 0 && self.membership.has_left(now)) || now >= until {
                    break;
                }
            }
        }
        self.finish();
    }

    pub(crate) fn now(&self) -> Time {
        Time::from_micros(u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX))
    }

    fn time_of(&self, instant: Instant) -> Time {
        let since = instant.saturating_duration_since(self.started);
        Time::ZERO.after(since)
    }

    fn next_wait(&self) -> Duration {
        let now = self.now();
        let membership = self.membership.poll_timeout(now);
        [self.rank.poll_timeout(), membership, self.closing]
            .into_iter()
            .flatten()
            .map(|due| due.since(now))
            .min()
            .unwrap_or(SLEEP_MAX)
            .min(SLEEP_MAX)
    }

    fn handle(&mut self, command: Command) {
        let now = self.now();
        match command {
            Command::Store { job, ns, first_put, blocks, until } => {
                self.store(&job, ns, first_put, blocks, until);
            }
            Command::Load { job, ns, blocks, until } => self.load(&job, ns, blocks, until),
            Command::Cancel { job } => self.cancel(job),
            Command::Lane { kind, events } => {
                for event in events {
                    self.handle_lane(kind, event);
                }
            }
            Command::Filled { put, result } => self.rank.handle_filled(now, put, result),
            Command::Extent { extent, ok } => {
                self.rank.handle_extent(now, extent, if ok { Ok(()) } else { Err(()) })
            }
            Command::Touched { entries } => {
                self.shared.touches.fetch_sub(1, Ordering::AcqRel);
                self.rank.handle_touch(now, &entries);
                // A large message must not hold up what the others want done.
                self.carry_out_all();
            }
            Command::Located { locate, result } => {
                let result = result.map_err(|()| kvfabric_core::load::DirectoryUnavailable);
                self.rank.handle_located(now, locate, result);
            }
            Command::MissReported { reports, keys } => {
                // The directory knows now, which is better than not knowing: a late acknowledgement ends the veto.
                self.shared.forget_failed(&keys);
                self.rank.handle_misses_reported(now, &reports);
            }
            Command::Greeted { rank, incarnation, result } => {
                if let Err(failure) = self.routes.handle_greeted(rank, incarnation, result) {
                    self.rank.handle_peer_failed(now, rank, incarnation, failure);
                }
            }
            Command::Evict { fingerprints, reply } => {
                let evicted =
                    fingerprints.into_iter().filter(|key| self.rank.handle_evict(now, *key)).count();
                // O1 is done before the caller hears of it.
                self.carry_out_all();
                let _ = reply.try_send(evicted);
            }
            Command::TakeEvicted { reply } => {
                let _ = reply.try_send(self.rank.take_evicted_keys());
            }
            Command::Uses { start, length_bytes, reply } => {
                let _ = reply.try_send(self.jobs.uses(start, length_bytes));
            }
            Command::Routes { reply } => {
                let _ = reply.try_send(self.routes.ready());
            }
            Command::Stats { reply } => {
                let _ = reply.try_send(self.stats());
            }
            Command::Close { drain } => self.begin_close(drain),
            other => self.handle_directory(other),
        }
    }

    fn store(
        &mut self,
        job: &Arc<JobState>,
        ns: NsId,
        first_put: PutId,
        blocks: Vec<StoreBlockInput>,
        until: Instant,
    ) {
        let claims = self.jobs.claim(job.id, false, blocks.iter().map(|block| &block.source));
        self.jobs.begin_store(job);
        let mut puts = Vec::with_capacity(blocks.len());
        for (block, claim) in blocks.into_iter().zip(claims) {
            if let Err(conflict) = claim {
                job.set(block.index, Err(BlockError::Memory(conflict)));
                continue;
            }
            self.jobs.begin_put(PutId(first_put.0 + puts.len() as u64), job, block.index, block.source);
            puts.push(Put {
                key: block.key,
                ns,
                // Set by the rank: the epoch at submission counts.
                ns_epoch: NsEpoch::default(),
                key_bytes: block.key_bytes,
                layout: block.group.layout,
                group_id: block.group.group_id,
                object_bytes: block.group.object_bytes,
                parent: block.parent,
            });
        }
        if puts.is_empty() {
            self.finish_job(job.id);
            return;
        }
        let deadline = self.deadline(until);
        self.rank.handle_store(self.now(), StoreId(job.id), StoreJob { first_put, puts, deadline });
    }

    fn load(&mut self, job: &Arc<JobState>, ns: NsId, blocks: Vec<LoadBlockInput>, until: Instant) {
        let claims = self.jobs.claim(job.id, true, blocks.iter().map(|block| &block.destination));
        let mut accepted = Vec::with_capacity(blocks.len());
        let mut requests = Vec::with_capacity(blocks.len());
        for (block, claim) in blocks.into_iter().zip(claims) {
            if let Err(conflict) = claim {
                job.set(block.index, Err(BlockError::Memory(conflict)));
                continue;
            }
            accepted.push((block.index, block.destination));
            requests.push(LoadBlock {
                key: block.key,
                layout: block.group.layout,
                object_bytes: block.group.object_bytes,
                local: None,
            });
        }
        self.jobs.begin_load(job.clone(), accepted);
        if requests.is_empty() {
            self.finish_job(job.id);
            return;
        }
        let request = LoadRequest { ns, blocks: requests, deadline: self.deadline(until) };
        self.rank.handle_load(self.now(), LoadId(job.id), request);
    }

    /// A node that is closing gives new work no time at all.
    fn deadline(&self, until: Instant) -> Time {
        if self.closing.is_some() {
            self.now()
        } else {
            self.time_of(until)
        }
    }

    fn cancel(&mut self, job: u64) {
        if self.jobs.is_load(job) {
            self.rank.handle_load_cancel(self.now(), LoadId(job));
        } else {
            self.rank.handle_store_cancel(self.now(), StoreId(job));
        }
    }

    fn handle_lane(&mut self, kind: TransportKind, event: Event) {
        let now = self.now();
        match event {
            Event::Read(done) => self.read_done(done),
            Event::Connected { peer } => {
                if let Some((rank, incarnation, transport)) = self.routes.handle_connected(peer) {
                    self.rank.handle_peer_connected(now, rank, incarnation, transport);
                }
            }
            Event::ConnectFailed { peer, error } => {
                if let Some((rank, incarnation, failure)) =
                    self.routes.handle_connect_failed(peer, kind, &error)
                {
                    self.rank.handle_peer_failed(now, rank, incarnation, failure);
                }
            }
            Event::Disconnected { peer, reason } => {
                if let Some((rank, incarnation)) = self.routes.handle_disconnected(peer, &reason) {
                    self.rank.handle_peer_failed(now, rank, incarnation, PeerFailure::Lost);
                }
            }
        }
    }

    fn read_done(&mut self, done: ReadDone) {
        let ReadDone { token, destination, outcome } = done;
        self.routes.retired(token);
        let Some((load, block)) = self.reads.remove(token.0) else {
            tracing::error!(token = token.0, "a read that nobody knows retired");
            return;
        };
        self.jobs.return_destination(load, block, destination);
        let outcome = match outcome {
            Ok(landed) => Ok((word_of(landed.word), landed.check)),
            Err(error) => {
                tracing::debug!(load, block, %error, "a read failed");
                Err(failure_of(&error))
            }
        };
        self.rank.handle_read_done(self.now(), ReadId(token.0), outcome);
    }

    pub(crate) fn carry_out_all(&mut self) {
        while let Some(action) = self.rank.poll_action() {
            self.carry_out(action);
        }
        self.routes.flush();
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::Owner(action) => self.carry_out_owner(action),
            Action::Load(action) => self.carry_out_load(action),
            Action::PutDone { put, outcome } => {
                if let Err(error) = &outcome {
                    tracing::debug!(put = put.0, %error, "a block was not stored");
                }
                self.jobs.put_done(put, outcome);
            }
            Action::StoreDone { store } => self.finish_job(store.0),
            Action::Locate { locate, ns, keys, deadline } => {
                let within = deadline.since(self.now());
                self.control.locate(locate, ns, &keys, within);
            }
            Action::ReportMisses { reports, records } => self.control.report_misses(reports, &records),
            Action::Directory(action) => self.carry_out_directory(*action),
            Action::AcknowledgeClear(ack) => self.control.acknowledge_clear(ack),
        }
    }

    fn carry_out_owner(&mut self, action: OwnerAction) {
        match action {
            OwnerAction::InvalidateWord { slot, generation } => {
                if let Err(error) = self.memory.invalidate(slot.0, generation.0) {
                    tracing::error!(slot = slot.0, %error, "cannot invalidate a word");
                }
            }
            OwnerAction::PublishWord { slot, word } => {
                let raw = RawWord {
                    generation: word.generation.0,
                    tag: word.tag.0,
                    check: word.check,
                    reserved: 0,
                };
                match self.memory.publish(slot.0, raw) {
                    Ok(true) => {}
                    Ok(false) => {
                        tracing::error!(slot = slot.0, "the word of a filled slot has another generation")
                    }
                    Err(error) => tracing::error!(slot = slot.0, %error, "cannot publish a word"),
                }
            }
            OwnerAction::AllocateExtent { extent, offset, length_bytes } => {
                self.filler.send(FillTask::Extent { extent, offset, length_bytes });
            }
            OwnerAction::AddSlab(slab) => {
                let slab = Slab {
                    layout: slab.layout.0,
                    group_id: slab.group_id,
                    object_bytes: slab.object_bytes,
                    first_slot: slab.first_slot.0,
                    slots: slab.slots,
                    base_offset: slab.base_offset,
                };
                if let Err(error) = self.memory.add_slab(slab) {
                    tracing::error!(%error, "cannot add a slab");
                }
            }
            OwnerAction::RetireSlab(slab) => {
                self.memory.retire_slab(slab.first_slot.0);
            }
            OwnerAction::Fill { put, slot, .. } => match self.jobs.take_source(put) {
                Some((source, stop)) => {
                    let checksum = self.checksums;
                    self.filler.send(FillTask::Fill { put, slot: slot.0, source, checksum, stop });
                }
                None => {
                    tracing::error!(put = put.0, "a put has no source");
                    self.rank.handle_filled(self.now(), put, Err(kvfabric_core::owner::FillError::Failed));
                }
            },
            OwnerAction::AbortFill { put } => self.jobs.abort_fill(put),
            // The rank keeps these to itself.
            OwnerAction::PutDone { .. } | OwnerAction::Announce(_) => {}
        }
    }

    fn carry_out_load(&mut self, action: LoadAction) {
        match action {
            LoadAction::Connect { rank, incarnation } => {
                let now = self.now();
                if incarnation == self.rank.incarnation() {
                    self.rank.handle_peer_connected(now, rank, incarnation, TransportKind::Shm);
                    return;
                }
                match self.routes.begin(rank, incarnation) {
                    Begin::Greet => self.control.greet(rank, incarnation),
                    Begin::Wait => {}
                    Begin::Connected(kind) => self.rank.handle_peer_connected(now, rank, incarnation, kind),
                }
            }
            LoadAction::Read { read, incarnation, slot, object_bytes, load, block, checksum, .. } => {
                let Some(destination) = self.jobs.take_destination(load.0, block) else {
                    tracing::error!(load = load.0, block, "a block has no destination");
                    self.rank.handle_read_done(self.now(), read, Err(ReadFailure::Protocol));
                    return;
                };
                self.reads.insert(read.0, load.0, block);
                let op = kvfabric_transport_api::ReadOp {
                    token: OpToken(read.0),
                    slot: slot.0,
                    object_bytes,
                    object_offset: 0,
                    destination,
                    checksum,
                };
                let own = incarnation == self.rank.incarnation();
                if let Err(op) = self.routes.post(incarnation, own, op) {
                    self.read_done(ReadDone {
                        token: op.token,
                        destination: op.destination,
                        outcome: Err(ReadError::PeerLost("the peer is not connected".into())),
                    });
                }
            }
            LoadAction::Abort { read } => self.routes.abort(OpToken(read.0)),
            // The rank keeps these to itself.
            LoadAction::Locate { .. } | LoadAction::MissReport { .. } => {}
            LoadAction::NotifyScheduler { keys } => self.shared.remember_failed(&keys),
            LoadAction::Touch { incarnation, entries, .. } => {
                if let Some(connection) = self.routes.control_of(incarnation) {
                    self.control.touch(connection, incarnation, &entries);
                }
            }
            LoadAction::BlockDone { load, block, outcome } => {
                let own = self.rank.member().map(|member| member.rank);
                let outcome = outcome
                    .map(|used| BlockOk::Loaded { transport: used.transport, local: Some(used.rank) == own });
                if let Err(error) = &outcome {
                    self.log_failed_block(load, block, *error);
                }
                self.jobs.block_done(load.0, block, outcome);
            }
            LoadAction::LoadDone { load } => self.finish_job(load.0),
        }
    }

    fn log_failed_block(&self, load: LoadId, block: u32, error: LoadError) {
        match error {
            LoadError::TagMismatch | LoadError::ChecksumMismatch => {
                tracing::error!(load = load.0, block, %error, "a block was refused");
            }
            _ => tracing::debug!(load = load.0, block, %error, "a block was not loaded"),
        }
    }

    fn stats(&self) -> NodeStats {
        let (owner, load) = (self.rank.owner_stats(), self.rank.load_stats());
        let missed = load.failed.not_found;
        let stale = load.failed.stale;
        NodeStats {
            stores_ok: owner.stored,
            stores_resident: owner.already_resident,
            stores_failed: owner.failed,
            bytes_stored: self.jobs.bytes_stored(),
            loads_ok: load.blocks_ok,
            loads_missed: missed,
            loads_stale: stale,
            loads_failed: load.failed.total().saturating_sub(missed + stale),
            bytes_loaded: load.bytes_ok,
            bytes_loaded_shm: load.transport(TransportKind::Shm).bytes,
            bytes_loaded_tcp: load.transport(TransportKind::Tcp).bytes,
            bytes_loaded_rdma: load.transport(TransportKind::Rdma).bytes,
            stale_reads: load.stale_words,
            tag_mismatches: load.tag_mismatches,
            checksum_mismatches: load.checksum_mismatches,
            incarnation_mismatches: load.incarnation_mismatches,
            miss_reports: load.miss_reports,
            pool_capacity_bytes: self.pool_bytes,
            pool_backed_bytes: owner.backed_bytes,
            pool_used_bytes: owner.resident_bytes,
            pool_objects: owner.resident,
            evictions: owner.evicted,
            jobs_in_progress: self.jobs.len() as u64,
            peers_connected: self.routes.ready().len() as u64,
            directory_connected: self.rank.member().is_some(),
        }
    }

    pub(crate) fn finish_job(&mut self, job: u64) {
        if let Some((kind, took)) = self.jobs.finish(job) {
            self.shared.jobs_in_progress.fetch_sub(1, Ordering::AcqRel);
            let latencies = &self.shared.latencies;
            match kind {
                JobKind::Load => latencies.load.observe(took.as_secs_f64()),
                JobKind::Store => latencies.store.observe(took.as_secs_f64()),
            }
        }
    }

    fn begin_close(&mut self, drain: Duration) {
        let now = self.now();
        if self.closing.is_none() {
            self.closing = Some(now.after(drain));
            for job in self.jobs.ids() {
                self.cancel(job);
            }
            self.membership.leave_until = Some(now.after(drain.min(FAREWELL_MAX)));
            self.rank.handle_leave(now);
        }
    }

    /// Ends what the drain time left. Dropping lanes and fill threads waits until their operations retired, so after it
    /// nothing can touch the memory of a job that is still open.
    fn finish(mut self) {
        self.routes.stop();
        drop(self.routes);
        drop(self.filler);
        for job in self.jobs.ids() {
            tracing::warn!(job, "a job did not end within the drain time of closing");
            if self.jobs.finish(job).is_some() {
                self.shared.jobs_in_progress.fetch_sub(1, Ordering::AcqRel);
            }
        }
        *self.shared.view.write() = None;
        // Late submissions still get their answer.
        while let Ok(command) = self.inbox.try_recv() {
            if let Command::Store { job, .. } | Command::Load { job, .. } = command {
                job.finish();
            }
        }
    }
}

fn word_of(raw: RawWord) -> Word {
    Word { generation: Generation(raw.generation), tag: Tag(raw.tag), check: raw.check }
}

fn failure_of(error: &ReadError) -> ReadFailure {
    match error {
        ReadError::Aborted => ReadFailure::Aborted,
        ReadError::PeerLost(_) => ReadFailure::PeerLost,
        ReadError::UnknownSlot(_) | ReadError::SizeMismatch => ReadFailure::Refused,
        ReadError::LocalShortage(_) => ReadFailure::LocalShortage,
        _ => ReadFailure::Protocol,
    }
}
