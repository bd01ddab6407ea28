//! The reader side of a rank: events in, actions out.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::peer::{Peer, NO_BLOCK};
use super::plan::CandidateFailure;
use super::slab::{Key, Slab};
use super::state::{Block, Load, Locate, Phase, Read, Report, Timer};
use super::{
    DirectoryUnavailable, LoadAction, LoadError, LoadId, LoadRequest, LoadStats, LoaderConfig, LocateId,
    ReadFailure, ReadId, Replicas, ReportId, TransportUsed, READ_BLAME_MIN,
};
use crate::limits::{
    JOBS_MAX, JOB_BLOCKS_MAX, LOAD_BLOCKS_MAX, LOCATE_TIMEOUT, OBJECT_BYTES_MAX, REPLICAS_PER_ANSWER_MAX,
    TOUCH_ENTRIES_MAX, TOUCH_INTERVAL,
};
use crate::word::{accept, Expected, Rejection, Word};
use crate::{Fingerprint, Incarnation, Time};

/// The reader side of a rank: deterministic, without IO.
///
/// The driver passes events to `handle_*`, then takes actions from [`poll_action`](Self::poll_action) until there are
/// none, carries them out in order, and calls [`handle_timeout`](Self::handle_timeout) at
/// [`poll_timeout`](Self::poll_timeout). A late, repeated or unknown answer is ignored. `now` never goes back: an
/// earlier one counts as the latest.
///
/// Peers are told apart by incarnation alone, which names a process; a rank number is only where the directory lists it.
#[derive(Debug)]
pub struct Loader {
    pub(super) config: LoaderConfig,
    pub(super) now: Time,
    pub(super) jitter: u64,
    pub(super) loads: Slab<Load>,
    load_keys: BTreeMap<LoadId, Key>,
    pub(super) blocks_tracked: usize,
    locates: Slab<Locate>,
    /// Loads with blocks in `unlocated`.
    pub(super) unlocated: Vec<Key>,
    pub(super) peers: Slab<Peer>,
    pub(super) peer_keys: BTreeMap<Incarnation, Key>,
    /// The peer looked up last: neighbouring blocks tend to have one owner.
    pub(super) peer_last: Option<(Incarnation, Key)>,
    /// Peers with something to post and, as far as is known, room for it; served in turn.
    pub(super) ring: VecDeque<Key>,
    pub(super) inflight_bytes: u64,
    pub(super) reads: Slab<Read>,
    pub(super) reports: Slab<Report>,
    /// Ends of the reports' waits, in order because the wait is constant.
    pub(super) report_ends: VecDeque<(Time, Key)>,
    pub(super) timers: BTreeSet<(Time, Timer)>,
    pub(super) actions: VecDeque<LoadAction>,
    pub(super) stats: LoadStats,
}

impl Loader {
    /// A loader without work.
    #[must_use]
    pub fn new(config: LoaderConfig) -> Self {
        Self {
            now: Time::ZERO,
            jitter: config.seed,
            config,
            loads: Slab::new(),
            load_keys: BTreeMap::new(),
            blocks_tracked: 0,
            locates: Slab::new(),
            unlocated: Vec::new(),
            peers: Slab::new(),
            peer_keys: BTreeMap::new(),
            peer_last: None,
            ring: VecDeque::new(),
            inflight_bytes: 0,
            reads: Slab::new(),
            reports: Slab::new(),
            report_ends: VecDeque::new(),
            timers: BTreeSet::new(),
            actions: VecDeque::new(),
            stats: LoadStats::default(),
        }
    }

    /// Starts a load. Each of its blocks gets exactly one `BlockDone`, and then the load one `LoadDone`.
    ///
    /// `id` must not name a load in progress; such a call is ignored.
    pub fn handle_load(&mut self, now: Time, id: LoadId, request: LoadRequest) {
        self.advance(now);
        if self.load_keys.contains_key(&id) {
            debug_assert!(false, "load {id:?} is in progress");
            return;
        }
        let count = request.blocks.len();
        self.stats.blocks_requested += count as u64;
        let overloaded = count > JOB_BLOCKS_MAX
            || self.blocks_tracked + count > LOAD_BLOCKS_MAX
            || self.loads.len() >= JOBS_MAX;
        if overloaded {
            return self.refuse(id, count, LoadError::Overloaded);
        }
        if count == 0 || request.deadline <= self.now {
            return self.refuse(id, count, LoadError::DeadlineExceeded);
        }
        let load = self.insert_load(id, request);
        for index in 0..count_u32(count) {
            self.start_block(load, index);
        }
        self.pump();
    }

    fn refuse(&mut self, load: LoadId, count: usize, error: LoadError) {
        for block in 0..count_u32(count) {
            self.stats.failed.count(error);
            self.actions.push_back(LoadAction::BlockDone { load, block, outcome: Err(error) });
        }
        self.actions.push_back(LoadAction::LoadDone { load });
    }

    fn insert_load(&mut self, id: LoadId, request: LoadRequest) -> Key {
        let count = request.blocks.len();
        let blocks = std::iter::repeat_with(|| Block {
            candidates: Replicas::new(),
            read: Key(0),
            next: NO_BLOCK,
            cursor: 0,
            phase: Phase::Locating,
            reports: 0,
            report_lost: false,
            located: false,
            worst: None,
            verdict: None,
        })
        .take(count)
        .collect();
        let deadline = request.deadline;
        let key = self.loads.insert(Load {
            id,
            ns: request.ns,
            deadline,
            request: request.blocks,
            blocks,
            remaining: count,
            lanes: Vec::new(),
            unlocated: Vec::new(),
        });
        self.load_keys.insert(id, key);
        self.blocks_tracked += count;
        self.timers.insert((deadline, Timer::Load(key)));
        key
    }

    fn start_block(&mut self, load_key: Key, index: u32) {
        let Some(load) = self.loads.get_mut(load_key) else { return };
        let (Some(wanted), Some(block)) =
            (load.request.get(index as usize), load.blocks.get_mut(index as usize))
        else {
            return;
        };
        if wanted.object_bytes == 0 || wanted.object_bytes > OBJECT_BYTES_MAX {
            // No rank can hold such an object.
            return self.finish_block(load_key, index, Err(LoadError::NotFound));
        }
        if let Some(local) = wanted.local {
            block.candidates.push(local);
            return self.plan_block(load_key, index);
        }
        self.ask_directory(load_key, index);
    }

    /// Answer to `Locate`: for each key of the request its replicas, best first.
    pub fn handle_located(
        &mut self,
        now: Time,
        locate: LocateId,
        result: Result<Vec<Replicas>, DirectoryUnavailable>,
    ) {
        self.advance(now);
        let key = Key(locate.0);
        let Some(locate) = self.locates.remove(key) else { return };
        self.timers.remove(&(locate.until, Timer::Locate(key)));
        match result {
            Ok(answers) if answers.len() == locate.blocks.len() => {
                for (index, replicas) in locate.blocks.into_iter().zip(answers) {
                    self.take_replicas(locate.load, index, replicas);
                }
            }
            _ => self.fail_locate(locate),
        }
        self.pump();
    }

    fn fail_locate(&mut self, locate: Locate) {
        for index in locate.blocks {
            if self.block(locate.load, index).is_some_and(|block| block.phase == Phase::Locating) {
                self.fail_block(locate.load, index, LoadError::DirectoryUnavailable);
            }
        }
    }

    /// Takes the directory's hints for one block. Nothing in them is trusted: what cannot be read is left out here,
    /// what is wrong is found by [`accept`].
    fn take_replicas(&mut self, load_key: Key, index: u32, mut replicas: Replicas) {
        let own = self.config.incarnation;
        let Some(load) = self.loads.get_mut(load_key) else { return };
        let (Some(wanted), Some(block)) =
            (load.request.get(index as usize), load.blocks.get_mut(index as usize))
        else {
            return;
        };
        if block.phase != Phase::Locating {
            return;
        }
        replicas.truncate(REPLICAS_PER_ANSWER_MAX);
        let tried = wanted.local.filter(|_| block.cursor > 0);
        let mut listed_again = None;
        replicas.retain(|replica| {
            let again = tried.is_some_and(|tried| {
                (tried.incarnation, tried.slot, tried.generation)
                    == (replica.incarnation, replica.slot, replica.generation)
            });
            if again {
                listed_again = Some(*replica);
            }
            // Tiers other than memory have no word to read yet.
            !again && replica.tier == 0
        });
        if let Some(position) = replicas.iter().position(|replica| replica.incarnation == own) {
            replicas[..=position].rotate_right(1);
        }
        block.candidates = replicas;
        block.cursor = 0;
        block.located = true;
        // The owner side's own hint was not reported when it failed; that the directory lists it too makes it a miss
        // that the scheduler would meet again.
        let reason = match block.worst {
            Some(LoadError::Stale) => Some(CandidateFailure::Stale.reason()),
            Some(LoadError::Unreachable | LoadError::Protocol) => {
                Some(CandidateFailure::Unreachable.reason())
            }
            _ => None,
        };
        if let (Some(replica), Some(reason)) = (listed_again, reason) {
            self.report_miss(load_key, index, replica, reason);
        }
        self.plan_block(load_key, index);
    }

    /// A read retired: nothing can touch its destination any more. The word decides, and it alone (rule R3).
    pub fn handle_read_done(
        &mut self,
        now: Time,
        read: ReadId,
        result: Result<(Word, Option<u64>), ReadFailure>,
    ) {
        self.advance(now);
        let Some(read) = self.reads.remove(Key(read.0)) else { return };
        self.retire(&read, result);
        let phase = self.block(read.load, read.block).map(|block| (block.phase, block.verdict));
        match phase {
            Some((Phase::Draining, Some(error))) => self.fail_block(read.load, read.block, error),
            Some((Phase::Draining, None)) => self.plan_block(read.load, read.block),
            Some((Phase::Posted, _)) => match result {
                Ok((word, check)) => self.judge(&read, word, check),
                Err(failure) => self.read_failed(&read, failure),
            },
            _ => debug_assert!(false, "a read retired whose block does not wait for it"),
        }
        self.pump();
    }

    /// The single place where a block succeeds.
    fn judge(&mut self, read: &Read, word: Word, check: Option<u64>) {
        let wanted = self.loads.get(read.load).and_then(|load| load.request.get(read.block as usize));
        let Some(wanted) = wanted else { return };
        if read.checksum && check.is_none() && word.check != 0 {
            // The driver owed a checksum. Without it the bytes are in doubt, and doubt is a miss.
            return self.try_next(read.load, read.block, CandidateFailure::Protocol);
        }
        let landed_check = check.filter(|_| read.checksum);
        let tag = wanted.key.tag(wanted.layout, wanted.object_bytes, read.replica.incarnation);
        let expected = Expected { generation: read.replica.generation, tag };
        match accept(expected, word, landed_check) {
            Ok(()) => {
                self.stats.count_ok(read.transport, read.bytes);
                self.touch(read);
                let used = TransportUsed { rank: read.replica.rank, transport: read.transport };
                self.finish_block(read.load, read.block, Ok(used));
            }
            Err(rejection) => {
                let (failure, counter) = match rejection {
                    Rejection::Stale => (CandidateFailure::Stale, &mut self.stats.stale_words),
                    Rejection::TagMismatch => (CandidateFailure::Tag, &mut self.stats.tag_mismatches),
                    Rejection::ChecksumMismatch => {
                        (CandidateFailure::Checksum, &mut self.stats.checksum_mismatches)
                    }
                };
                *counter += 1;
                self.try_next(read.load, read.block, failure);
            }
        }
    }

    fn read_failed(&mut self, read: &Read, failure: ReadFailure) {
        let failure = match failure {
            ReadFailure::LocalShortage => return self.requeue(read),
            ReadFailure::Refused => CandidateFailure::Stale,
            ReadFailure::Protocol => CandidateFailure::Protocol,
            ReadFailure::Aborted | ReadFailure::PeerLost => CandidateFailure::Unreachable,
        };
        self.try_next(read.load, read.block, failure);
    }

    fn touch(&mut self, read: &Read) {
        let now = self.now;
        let Some(peer) = self.peers.get_mut(read.peer) else { return };
        if peer.touched.len() >= TOUCH_ENTRIES_MAX {
            self.stats.touches_dropped += 1;
            return;
        }
        peer.touched.push((read.replica.slot, read.replica.generation));
        if peer.touch_timer.is_none() {
            let at = now.after(TOUCH_INTERVAL);
            peer.touch_timer = Some(at);
            self.timers.insert((at, Timer::Touch(read.peer)));
        }
    }

    /// The directory acknowledged a miss report.
    pub fn handle_miss_reported(&mut self, now: Time, report: ReportId) {
        self.advance(now);
        let Some(report) = self.reports.remove(Key(report.0)) else { return };
        while self.report_ends.front().is_some_and(|(_, key)| self.reports.get(*key).is_none()) {
            self.report_ends.pop_front();
        }
        self.report_settled(&report, false);
    }

    /// Ends a load now, as its deadline would.
    pub fn handle_cancel(&mut self, now: Time, load: LoadId) {
        self.advance(now);
        if let Some(&key) = self.load_keys.get(&load) {
            self.end_load(key, LoadError::Cancelled);
        }
        self.pump();
    }

    /// Blocks not posted fail at once; reads in flight are ended by force, and their blocks fail when they retired.
    fn end_load(&mut self, load_key: Key, error: LoadError) {
        let Some(load) = self.loads.get_mut(load_key) else { return };
        for (peer, lane) in std::mem::take(&mut load.lanes) {
            if let Some(peer) = self.peers.get_mut(peer) {
                peer.remove_lane(lane);
            }
        }
        for index in 0..count_u32(load.blocks.len()) {
            let Some(block) = self.block_mut(load_key, index) else { return };
            match block.phase {
                Phase::Locating | Phase::Queued => self.finish_block(load_key, index, Err(error)),
                Phase::Posted => {
                    block.verdict = Some(error);
                    let read = block.read;
                    self.abort(read);
                    self.blame(load_key, index, read, error);
                }
                Phase::Draining => block.verdict = block.verdict.or(Some(error)),
                Phase::Reporting | Phase::Done => {}
            }
        }
    }

    /// Rule R7 for a read cut off by its deadline. A cancelled one says nothing about its owner.
    fn blame(&mut self, load: Key, index: u32, read: Key, error: LoadError) {
        let Some(read) = self.reads.get(read) else { return };
        if error == LoadError::DeadlineExceeded && self.now.since(read.posted_at) >= READ_BLAME_MIN {
            let replica = read.replica;
            self.report_miss(load, index, replica, CandidateFailure::Unreachable.reason());
        }
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Time) {
        self.advance(now);
        while let Some(&(at, timer)) = self.timers.first() {
            if at > self.now {
                break;
            }
            self.timers.pop_first();
            match timer {
                Timer::Load(load) => self.end_load(load, LoadError::DeadlineExceeded),
                Timer::Locate(locate) => {
                    if let Some(locate) = self.locates.remove(locate) {
                        self.fail_locate(locate);
                    }
                }
                Timer::Connect(peer) => self.connect_due(peer),
                Timer::Resume(peer) => self.resume(peer),
                Timer::Stall(peer) => self.stall_due(peer),
                Timer::Touch(peer) => self.touch_due(peer),
            }
        }
        self.expire_reports();
        self.pump();
    }

    /// When [`handle_timeout`](Self::handle_timeout) must be called. Valid once there are no more actions.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let timer = self.timers.first().map(|&(at, _)| at);
        let report = self.report_ends.front().map(|&(at, _)| at);
        match (timer, report) {
            (Some(timer), Some(report)) => Some(timer.min(report)),
            (one, other) => one.or(other),
        }
    }

    /// The next action.
    pub fn poll_action(&mut self) -> Option<LoadAction> {
        if self.actions.is_empty() && !self.unlocated.is_empty() {
            self.send_locates();
        }
        self.actions.pop_front()
    }

    /// Keys are gathered until the driver polls, so that blocks that fell back to the directory in one go share one
    /// request.
    fn send_locates(&mut self) {
        for load_key in std::mem::take(&mut self.unlocated) {
            let Some(load) = self.loads.get_mut(load_key) else { continue };
            let mut indices = std::mem::take(&mut load.unlocated);
            indices.retain(|&index| {
                load.blocks.get(index as usize).is_some_and(|block| block.phase == Phase::Locating)
            });
            if indices.is_empty() {
                continue;
            }
            let keys: Vec<Fingerprint> = indices
                .iter()
                .filter_map(|&index| Some(load.request.get(index as usize)?.key.fingerprint()))
                .collect();
            let until = self.now.after(LOCATE_TIMEOUT).min(load.deadline);
            let ns = load.ns;
            let locate = self.locates.insert(Locate { load: load_key, blocks: indices, until });
            self.timers.insert((until, Timer::Locate(locate)));
            self.actions.push_back(LoadAction::Locate {
                locate: LocateId(locate.0),
                ns,
                keys,
                deadline: until,
            });
        }
    }

    /// Counters since the start.
    #[must_use]
    pub fn stats(&self) -> &LoadStats {
        &self.stats
    }

    /// Loads that are not final.
    #[must_use]
    pub fn loads_in_progress(&self) -> usize {
        self.loads.len()
    }

    /// Reads that have not retired.
    #[must_use]
    pub fn reads_in_flight(&self) -> usize {
        self.reads.len()
    }

    pub(super) fn advance(&mut self, now: Time) {
        self.now = self.now.max(now);
    }

    pub(super) fn block(&self, load: Key, index: u32) -> Option<&Block> {
        self.loads.get(load)?.blocks.get(index as usize)
    }

    pub(super) fn block_mut(&mut self, load: Key, index: u32) -> Option<&mut Block> {
        self.loads.get_mut(load)?.blocks.get_mut(index as usize)
    }

    /// Forgets a load whose last block is final.
    pub(super) fn remove_load(&mut self, key: Key) {
        let Some(load) = self.loads.remove(key) else { return };
        for (peer, lane) in load.lanes {
            if let Some(peer) = self.peers.get_mut(peer) {
                peer.remove_lane(lane);
            }
        }
        self.load_keys.remove(&load.id);
        self.blocks_tracked -= load.blocks.len();
        self.timers.remove(&(load.deadline, Timer::Load(key)));
        self.actions.push_back(LoadAction::LoadDone { load: load.id });
    }
}

/// Blocks are counted in 32 bits: `JOB_BLOCKS_MAX` holds for every load that is kept, and a longer request is refused
/// one block at a time.
fn count_u32(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
