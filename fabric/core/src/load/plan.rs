//! Which replica a block is read from, when its read is posted, and how a block ends.

use super::loader::Loader;
use super::peer::{PeerState, NO_BLOCK};
use super::slab::Key;
use super::state::{Phase, Read, Report, Timer};
use super::{
    LoadAction, LoadError, MissReason, ReadId, Replica, ReportId, TransportUsed, REPORTS_MAX,
    STALL_BYTES_PER_MICRO, STALL_MIN,
};
use crate::limits::{LOOKUP_KEYS_MAX, MISS_REPORT_WAIT};

/// Why a replica did not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CandidateFailure {
    /// Another generation, or the owner does not know the slot.
    Stale,
    /// Of an earlier life of its owner (rule R1).
    Incarnation,
    /// Another tag.
    Tag,
    /// Other bytes.
    Checksum,
    /// The owner could not be reached, or its read broke.
    Unreachable,
    /// The owner broke the protocol.
    Protocol,
}

impl CandidateFailure {
    fn error(self) -> LoadError {
        match self {
            Self::Stale | Self::Incarnation => LoadError::Stale,
            Self::Tag => LoadError::TagMismatch,
            Self::Checksum => LoadError::ChecksumMismatch,
            Self::Unreachable => LoadError::Unreachable,
            Self::Protocol => LoadError::Protocol,
        }
    }

    /// What the directory is told (design 1.9).
    pub(super) fn reason(self) -> MissReason {
        match self {
            Self::Stale | Self::Incarnation => MissReason::Stale,
            Self::Tag => MissReason::TagMismatch,
            Self::Checksum => MissReason::ChecksumMismatch,
            Self::Unreachable | Self::Protocol => MissReason::Unreachable,
        }
    }
}

/// Of several replicas' failures the block reports the gravest: alarms first, then what a later try may mend.
fn gravity(error: LoadError) -> u8 {
    match error {
        LoadError::ChecksumMismatch => 5,
        LoadError::TagMismatch => 4,
        LoadError::Protocol => 3,
        LoadError::Unreachable => 2,
        LoadError::Stale => 1,
        _ => 0,
    }
}

impl Loader {
    /// Queues a block at its current candidate's owner, or ends it when there are no more candidates.
    pub(super) fn plan_block(&mut self, load: Key, index: u32) {
        loop {
            let Some(block) = self.block(load, index) else { return };
            let Some(&replica) = block.candidates.get(usize::from(block.cursor)) else { break };
            let Some(peer_key) = self.peer_for(replica.incarnation, replica.rank) else {
                return self.fail_block(load, index, LoadError::Overloaded);
            };
            let Some(peer) = self.peers.get_mut(peer_key) else { return };
            match peer.state {
                PeerState::Dead => {
                    self.stats.incarnation_mismatches += 1;
                    self.fail_candidate(load, index, CandidateFailure::Incarnation);
                    continue;
                }
                PeerState::Suspect { until } if until > self.now => {
                    self.fail_candidate(load, index, CandidateFailure::Unreachable);
                    continue;
                }
                PeerState::Unknown | PeerState::Suspect { .. } => {
                    peer.rank = replica.rank;
                    self.connect(peer_key);
                }
                PeerState::Connecting { .. } | PeerState::ConnectLater { .. } | PeerState::Ready(_) => {}
            }
            self.stats.failovers += u64::from(self.block(load, index).is_some_and(|block| block.cursor > 0));
            return self.enqueue(load, index, peer_key, false);
        }
        let Some(block) = self.block(load, index) else { return };
        if block.located {
            let error = block.worst.unwrap_or(LoadError::NotFound);
            self.fail_block(load, index, error);
        } else {
            self.ask_directory(load, index);
        }
    }

    pub(super) fn ask_directory(&mut self, load_key: Key, index: u32) {
        let Some(load) = self.loads.get_mut(load_key) else { return };
        if let Some(block) = load.blocks.get_mut(index as usize) {
            block.phase = Phase::Locating;
        }
        if load.unlocated.is_empty() {
            self.unlocated.push(load_key);
        }
        load.unlocated.push(index);
    }

    /// Notes that the current candidate did not serve, and moves the cursor on. The former read has retired, or there
    /// was none, or it is draining: the next one is planned only after that (rule R8).
    pub(super) fn fail_candidate(&mut self, load_key: Key, index: u32, failure: CandidateFailure) {
        let Some(load) = self.loads.get_mut(load_key) else { return };
        let (Some(wanted), Some(block)) =
            (load.request.get(index as usize), load.blocks.get_mut(index as usize))
        else {
            return;
        };
        let Some(&replica) = block.candidates.get(usize::from(block.cursor)) else { return };
        block.cursor = block.cursor.saturating_add(1);
        let error = failure.error();
        if block.worst.is_none_or(|worst| gravity(error) > gravity(worst)) {
            block.worst = Some(error);
        }
        // The owner side of this very rank announces what it evicts by itself, and the directory need not list what
        // the owner side named: only a contradiction is worth a report.
        let own_hint = !block.located && wanted.local == Some(replica);
        if !(own_hint && matches!(failure.reason(), MissReason::Stale | MissReason::Unreachable)) {
            self.report_miss(load_key, index, replica, failure.reason());
        }
    }

    /// The current candidate's read has retired without success.
    pub(super) fn try_next(&mut self, load: Key, index: u32, failure: CandidateFailure) {
        self.fail_candidate(load, index, failure);
        self.plan_block(load, index);
    }

    pub(super) fn enqueue(&mut self, load_key: Key, index: u32, peer_key: Key, first: bool) {
        let Some(load) = self.loads.get_mut(load_key) else { return };
        let Some(peer) = self.peers.get_mut(peer_key) else { return };
        let lane_key = match load.lanes.binary_search_by_key(&peer_key, |&(peer, _)| peer) {
            Ok(position) => load.lanes[position].1,
            Err(position) => {
                let lane = peer.add_lane(load_key, load.deadline);
                load.lanes.insert(position, (peer_key, lane));
                lane
            }
        };
        let (Some(lane), Some(block)) = (peer.lanes.get_mut(lane_key), load.blocks.get_mut(index as usize))
        else {
            return;
        };
        block.phase = Phase::Queued;
        block.next = NO_BLOCK;
        if lane.head == NO_BLOCK {
            (lane.head, lane.tail) = (index, index);
        } else if first {
            block.next = lane.head;
            lane.head = index;
        } else {
            let last = std::mem::replace(&mut lane.tail, index);
            if let Some(last) = load.blocks.get_mut(last as usize) {
                last.next = index;
            }
        }
        self.offer(peer_key);
    }

    /// Puts a peer into the ring if it has something to post.
    pub(super) fn offer(&mut self, peer_key: Key) {
        let Some(peer) = self.peers.get_mut(peer_key) else { return };
        if !peer.in_ring && peer.may_post().is_some() {
            peer.in_ring = true;
            self.ring.push_back(peer_key);
        }
    }

    /// Posts reads while there is room, one block a peer in turn (design 4: receiver-driven flow control).
    pub(super) fn pump(&mut self) {
        while let Some(&peer_key) = self.ring.front() {
            if self.reads.len() >= self.config.reads_inflight {
                return;
            }
            match self.post_one(peer_key) {
                Posted::More => self.ring.rotate_left(1),
                Posted::NoRoomAtAll => return,
                Posted::Nothing => {
                    self.ring.pop_front();
                    if let Some(peer) = self.peers.get_mut(peer_key) {
                        peer.in_ring = false;
                    }
                }
            }
        }
    }

    fn post_one(&mut self, peer_key: Key) -> Posted {
        let Some(peer) = self.peers.get_mut(peer_key) else { return Posted::Nothing };
        let Some(transport) = peer.may_post() else { return Posted::Nothing };
        let Some(lane_key) = peer.next_lane() else { return Posted::Nothing };
        let Some(lane) = peer.lanes.get(lane_key).copied() else { return Posted::Nothing };
        let Some(load) = self.loads.get_mut(lane.load) else { return Posted::Nothing };
        let index = lane.head;
        let (Some(wanted), Some(block)) =
            (load.request.get(index as usize), load.blocks.get_mut(index as usize))
        else {
            return Posted::Nothing;
        };
        let Some(&replica) = block.candidates.get(usize::from(block.cursor)) else { return Posted::Nothing };
        let bytes = wanted.object_bytes;
        // A block that does not fit waits at the head, so that smaller ones cannot starve it.
        if self.inflight_bytes != 0
            && self.inflight_bytes.saturating_add(bytes) > self.config.destination_inflight_bytes
        {
            return Posted::NoRoomAtAll;
        }
        if !peer.has_room(bytes, self.config.source_inflight_bytes) {
            return Posted::Nothing;
        }
        debug_assert_eq!(replica.incarnation, peer.incarnation, "rule R1");
        let checksum = self.config.verify.of(transport).applies_to(replica.generation);
        let read = Read {
            load: lane.load,
            block: index,
            peer: peer_key,
            bytes,
            replica,
            transport,
            checksum,
            posted_at: self.now,
        };
        let read_key = self.reads.insert(read);
        block.phase = Phase::Posted;
        block.read = read_key;
        peer.served(lane_key);
        if block.next == NO_BLOCK {
            peer.remove_lane(lane_key);
            load.lanes.retain(|&(peer, _)| peer != peer_key);
        } else if let Some(lane) = peer.lanes.get_mut(lane_key) {
            lane.head = block.next;
        }
        if peer.inflight_reads == 0 {
            peer.last_progress = self.now;
        }
        peer.inflight_reads += 1;
        peer.inflight_bytes += bytes;
        self.inflight_bytes += bytes;
        self.actions.push_back(LoadAction::Read {
            read: ReadId(read_key.0),
            rank: replica.rank,
            incarnation: replica.incarnation,
            slot: replica.slot,
            object_bytes: bytes,
            load: load.id,
            block: index,
            checksum,
        });
        if peer.stall_timer.is_none() {
            let at = self.now.after(STALL_MIN);
            peer.stall_timer = Some(at);
            self.timers.insert((at, Timer::Stall(peer_key)));
        }
        Posted::More
    }

    /// Ends a read by force; its block drains until it retired.
    pub(super) fn abort(&mut self, read_key: Key) {
        let Some(read) = self.reads.get(read_key) else { return };
        let (load, index) = (read.load, read.block);
        if let Some(block) = self.block_mut(load, index) {
            block.phase = Phase::Draining;
        }
        self.stats.reads_aborted += 1;
        self.actions.push_back(LoadAction::Abort { read: ReadId(read_key.0) });
    }

    /// Rule R7. Fire and forget for a block that another replica serves; one that fails waits for the acknowledgement.
    pub(super) fn report_miss(&mut self, load_key: Key, index: u32, replica: Replica, reason: MissReason) {
        let Some(load) = self.loads.get_mut(load_key) else { return };
        let (Some(wanted), Some(block)) =
            (load.request.get(index as usize), load.blocks.get_mut(index as usize))
        else {
            return;
        };
        if self.reports.len() >= REPORTS_MAX {
            block.report_lost = true;
            self.stats.miss_reports_lost += 1;
            return;
        }
        block.reports = block.reports.saturating_add(1);
        let report = self.reports.insert(Report { load: load_key, block: index });
        self.report_ends.push_back((self.now.after(MISS_REPORT_WAIT), report));
        self.stats.miss_reports += 1;
        self.actions.push_back(LoadAction::MissReport {
            report: ReportId(report.0),
            fingerprint: wanted.key.fingerprint(),
            rank: replica.rank,
            incarnation: replica.incarnation,
            generation: replica.generation,
            reason,
        });
    }

    /// A report was acknowledged, or is not waited for any longer. Returns whether its block may end now.
    fn settle(&mut self, report: &Report, lost: bool) -> Option<LoadError> {
        let block = self.block_mut(report.load, report.block)?;
        block.reports = block.reports.saturating_sub(1);
        block.report_lost |= lost;
        (block.phase == Phase::Reporting && block.reports == 0).then_some(block.verdict).flatten()
    }

    pub(super) fn report_settled(&mut self, report: &Report, lost: bool) {
        if let Some(error) = self.settle(report, lost) {
            self.finish_block(report.load, report.block, Err(error));
        }
    }

    /// Reports that were not acknowledged in time. The scheduler hears of all their keys before any of the blocks is
    /// final, since it may ask for them again as soon as they are.
    pub(super) fn expire_reports(&mut self) {
        let mut failed = Vec::new();
        let mut keys = Vec::new();
        while let Some(&(at, key)) = self.report_ends.front() {
            if at > self.now {
                break;
            }
            self.report_ends.pop_front();
            let Some(report) = self.reports.remove(key) else { continue };
            self.stats.miss_reports_lost += 1;
            let Some(error) = self.settle(&report, true) else { continue };
            if let Some(load) = self.loads.get_mut(report.load) {
                if let Some(block) = load.blocks.get_mut(report.block as usize) {
                    block.report_lost = false;
                }
                keys.extend(load.request.get(report.block as usize).map(|wanted| wanted.key.fingerprint()));
            }
            failed.push((report, error));
        }
        for keys in keys.chunks(LOOKUP_KEYS_MAX) {
            self.actions.push_back(LoadAction::NotifyScheduler { keys: keys.to_vec() });
        }
        for (report, error) in failed {
            self.finish_block(report.load, report.block, Err(error));
        }
    }

    /// The block failed and no read of it is in flight; it ends once its miss reports are settled (design 1.9).
    pub(super) fn fail_block(&mut self, load: Key, index: u32, error: LoadError) {
        let Some(block) = self.block_mut(load, index) else { return };
        if block.reports > 0 {
            block.phase = Phase::Reporting;
            block.verdict = Some(error);
        } else {
            self.finish_block(load, index, Err(error));
        }
    }

    /// Makes a block final: its destination belongs to the engine from here on (rule R4).
    pub(super) fn finish_block(
        &mut self,
        load_key: Key,
        index: u32,
        outcome: Result<TransportUsed, LoadError>,
    ) {
        let Some(load) = self.loads.get_mut(load_key) else { return };
        let Some(block) = load.blocks.get_mut(index as usize) else { return };
        debug_assert!(self.reads.get(block.read).is_none(), "rule R4: a read of the block is in flight");
        if block.phase == Phase::Done {
            debug_assert!(false, "a block ends once");
            return;
        }
        block.phase = Phase::Done;
        block.candidates = super::Replicas::new();
        if let Err(error) = outcome {
            self.stats.failed.count(error);
            if block.report_lost {
                let keys = load
                    .request
                    .get(index as usize)
                    .map(|wanted| wanted.key.fingerprint())
                    .into_iter()
                    .collect();
                self.actions.push_back(LoadAction::NotifyScheduler { keys });
            }
        }
        load.remaining -= 1;
        self.actions.push_back(LoadAction::BlockDone { load: load.id, block: index, outcome });
        if load.remaining == 0 {
            self.remove_load(load_key);
        }
    }

    /// How long a peer with this much in flight may retire nothing.
    pub(super) fn stall_after(inflight_bytes: u64) -> core::time::Duration {
        STALL_MIN + core::time::Duration::from_micros(inflight_bytes / STALL_BYTES_PER_MICRO)
    }
}

/// What came of one turn of a peer.
enum Posted {
    /// One read was posted.
    More,
    /// The peer has nothing to post, or its window is full.
    Nothing,
    /// This rank's window is full.
    NoRoomAtAll,
}
