//! What happens to peers: connecting, failing, stalling, pausing (design 1.8).

use core::time::Duration;

use super::loader::Loader;
use super::peer::{Peer, PeerState, NO_BLOCK};
use super::plan::CandidateFailure;
use super::slab::Key;
use super::state::{Phase, Read, Timer};
use super::{LoadAction, PeerFailure, ReadFailure, PEERS_MAX, SHORTAGE_PAUSE_MAX, SHORTAGE_PAUSE_MIN};
use crate::limits::{CONNECT_TIMEOUT, SUSPECT_MAX, SUSPECT_MIN};
use crate::word::Word;
use crate::{Incarnation, RankId, Time, TransportKind};

impl Loader {
    /// A peer is connected and showed this incarnation (rule R1). Also valid without a `Connect`.
    pub fn handle_peer_connected(
        &mut self,
        now: Time,
        rank: RankId,
        incarnation: Incarnation,
        transport: TransportKind,
    ) {
        self.advance(now);
        let Some(key) = self.peer_for(incarnation, rank) else { return };
        let Some(peer) = self.peers.get_mut(key) else { return };
        if peer.state == PeerState::Dead {
            return;
        }
        peer.rank = rank;
        self.disarm_connect(key);
        if let Some(peer) = self.peers.get_mut(key) {
            peer.state = PeerState::Ready(transport);
        }
        self.offer(key);
        self.pump();
    }

    /// A peer could not be connected, or its connection is gone. Its reads retire through `handle_read_done`.
    pub fn handle_peer_failed(
        &mut self,
        now: Time,
        rank: RankId,
        incarnation: Incarnation,
        failure: PeerFailure,
    ) {
        self.advance(now);
        let Some(&key) = self.peer_keys.get(&incarnation) else { return };
        let Some(peer) = self.peers.get_mut(key) else { return };
        peer.rank = rank;
        match (peer.state, failure) {
            // Only what was being used or tried can fail; the same end may be told twice, by a read and by the driver.
            (PeerState::Unknown | PeerState::Suspect { .. } | PeerState::Dead, _) => {}
            (PeerState::Connecting { .. }, PeerFailure::LocalShortage) => self.connect_later(key),
            (PeerState::ConnectLater { .. }, PeerFailure::LocalShortage) => {}
            (_, PeerFailure::WrongIncarnation) => {
                self.stats.incarnation_mismatches += 1;
                self.suspect(key, CandidateFailure::Incarnation);
            }
            (_, PeerFailure::Protocol) => self.suspect(key, CandidateFailure::Protocol),
            (PeerState::Ready(_), PeerFailure::LocalShortage) => {
                // The connection is gone but the peer is not to blame: connect anew.
                if let Some(peer) = self.peers.get_mut(key) {
                    peer.state = PeerState::Unknown;
                }
                self.connect_later(key);
            }
            (_, PeerFailure::Unreachable | PeerFailure::Lost) => {
                self.suspect(key, CandidateFailure::Unreachable)
            }
        }
        self.pump();
    }

    /// An incarnation is closed for ever: none of its entries is good any more, whatever the directory says.
    pub fn handle_incarnation_closed(&mut self, now: Time, rank: RankId, incarnation: Incarnation) {
        self.advance(now);
        let Some(key) = self.peer_for(incarnation, rank) else { return };
        self.disarm_connect(key);
        if let Some(peer) = self.peers.get_mut(key) {
            peer.state = PeerState::Dead;
            peer.touched = Vec::new();
        }
        self.abort_reads(key, CandidateFailure::Incarnation);
        self.evict_queue(key, CandidateFailure::Incarnation);
        self.pump();
    }

    /// The record of a peer, made if there is none. `None` when too many peers are in use.
    pub(super) fn peer_for(&mut self, incarnation: Incarnation, rank: RankId) -> Option<Key> {
        if let Some((last, key)) = self.peer_last {
            if last == incarnation {
                return Some(key);
            }
        }
        let key = match self.peer_keys.get(&incarnation) {
            Some(&key) => key,
            None => {
                if self.peers.len() >= PEERS_MAX {
                    self.forget_idle_peers();
                }
                if self.peers.len() >= PEERS_MAX {
                    return None;
                }
                let key = self.peers.insert(Peer::new(incarnation, rank));
                self.peer_keys.insert(incarnation, key);
                key
            }
        };
        self.peer_last = Some((incarnation, key));
        Some(key)
    }

    /// Forgets peers that nothing depends on; the closed ones only if that is not enough. Forgetting costs a
    /// connection or a wasted read, never safety.
    fn forget_idle_peers(&mut self) {
        self.peer_last = None;
        for dead_too in [false, true] {
            let idle: Vec<Key> = self
                .peers
                .iter()
                .filter(|(_, peer)| {
                    peer.is_idle() && !peer.in_ring && (dead_too || peer.state != PeerState::Dead)
                })
                .map(|(key, _)| key)
                .collect();
            for key in idle {
                self.disarm_connect(key);
                if let Some(peer) = self.peers.remove(key) {
                    self.peer_keys.remove(&peer.incarnation);
                }
            }
            if self.peers.len() < PEERS_MAX {
                return;
            }
        }
    }

    pub(super) fn connect(&mut self, key: Key) {
        let until = self.now.after(CONNECT_TIMEOUT);
        let Some(peer) = self.peers.get_mut(key) else { return };
        peer.state = PeerState::Connecting { until };
        self.timers.insert((until, Timer::Connect(key)));
        self.stats.connects += 1;
        self.actions.push_back(LoadAction::Connect { rank: peer.rank, incarnation: peer.incarnation });
    }

    fn connect_later(&mut self, key: Key) {
        self.disarm_connect(key);
        let Some(peer) = self.peers.get_mut(key) else { return };
        self.stats.local_shortages += 1;
        let at = self.now.after(shortage_pause(peer.shortages));
        peer.shortages = peer.shortages.saturating_add(1);
        peer.state = PeerState::ConnectLater { at };
        self.timers.insert((at, Timer::Connect(key)));
    }

    /// Takes back the timer of a connection attempt.
    fn disarm_connect(&mut self, key: Key) {
        if let Some(PeerState::Connecting { until: at } | PeerState::ConnectLater { at }) =
            self.peers.get(key).map(|peer| peer.state)
        {
            self.timers.remove(&(at, Timer::Connect(key)));
        }
    }

    pub(super) fn connect_due(&mut self, key: Key) {
        let Some(peer) = self.peers.get_mut(key) else { return };
        match peer.state {
            PeerState::Connecting { until } if until <= self.now => {
                self.suspect(key, CandidateFailure::Unreachable);
            }
            PeerState::ConnectLater { at } if at <= self.now => {
                if peer.lanes.len() == 0 {
                    peer.state = PeerState::Unknown;
                } else {
                    self.connect(key);
                }
            }
            _ => {}
        }
    }

    /// Leaves a peer alone for a while: `SUSPECT_MIN`, doubled for each failure in a row, up to a quarter more by
    /// jitter, at most `SUSPECT_MAX`.
    fn suspect(&mut self, key: Key, failure: CandidateFailure) {
        self.disarm_connect(key);
        let jitter = self.next_jitter();
        let now = self.now;
        let Some(peer) = self.peers.get_mut(key) else { return };
        let pause = SUSPECT_MIN.saturating_mul(1 << peer.failures.min(16)).min(SUSPECT_MAX);
        let quarter_micros = u64::try_from(pause.as_micros() / 4).unwrap_or(0).max(1);
        let pause = (pause + Duration::from_micros(jitter % quarter_micros)).min(SUSPECT_MAX);
        peer.failures = peer.failures.saturating_add(1);
        peer.state = PeerState::Suspect { until: now.after(pause) };
        peer.paused_until = None;
        self.stats.peer_failures += 1;
        self.evict_queue(key, failure);
    }

    /// A step of splitmix64.
    fn next_jitter(&mut self) -> u64 {
        self.jitter = self.jitter.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.jitter ^ (self.jitter >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Sends every block queued at a peer to its next candidate.
    fn evict_queue(&mut self, key: Key, failure: CandidateFailure) {
        let Some(peer) = self.peers.get(key) else { return };
        let lanes: Vec<Key> = peer.lanes.iter().map(|(lane, _)| lane).collect();
        for lane_key in lanes {
            let lane = self.peers.get_mut(key).and_then(|peer| peer.remove_lane(lane_key));
            let Some(lane) = lane else { continue };
            if let Some(load) = self.loads.get_mut(lane.load) {
                load.lanes.retain(|&(peer, _)| peer != key);
            }
            let mut index = lane.head;
            while index != NO_BLOCK {
                // Planning relinks the block, so its successor is read first.
                let Some(next) = self.block(lane.load, index).map(|block| block.next) else { break };
                self.try_next(lane.load, index, failure);
                index = next;
            }
        }
    }

    /// Ends every read of a peer by force; their blocks go on to their next candidates when they retired.
    fn abort_reads(&mut self, peer_key: Key, failure: CandidateFailure) {
        let reads: Vec<(Key, Key, u32)> = self
            .reads
            .iter()
            .filter(|(_, read)| read.peer == peer_key)
            .map(|(key, read)| (key, read.load, read.block))
            .collect();
        for (read, load, index) in reads {
            if self.block(load, index).is_some_and(|block| block.phase == Phase::Posted) {
                self.abort(read);
                self.fail_candidate(load, index, failure);
            }
        }
    }

    pub(super) fn stall_due(&mut self, key: Key) {
        let now = self.now;
        let Some(peer) = self.peers.get_mut(key) else { return };
        peer.stall_timer = None;
        if peer.inflight_reads == 0 {
            return;
        }
        let at = peer.last_progress.after(Self::stall_after(peer.inflight_bytes));
        if at > now {
            peer.stall_timer = Some(at);
            self.timers.insert((at, Timer::Stall(key)));
            return;
        }
        let was_ready = matches!(peer.state, PeerState::Ready(_));
        self.abort_reads(key, CandidateFailure::Unreachable);
        if was_ready {
            self.suspect(key, CandidateFailure::Unreachable);
        }
    }

    pub(super) fn touch_due(&mut self, key: Key) {
        let Some(peer) = self.peers.get_mut(key) else { return };
        peer.touch_timer = None;
        let entries = std::mem::take(&mut peer.touched);
        if matches!(peer.state, PeerState::Ready(_)) {
            let (rank, incarnation) = (peer.rank, peer.incarnation);
            self.actions.push_back(LoadAction::Touch { rank, incarnation, entries });
        } else {
            self.stats.touches_dropped += entries.len() as u64;
        }
    }

    /// What a retired read means for its peer's window and standing.
    pub(super) fn retire(&mut self, read: &Read, result: Result<(Word, Option<u64>), ReadFailure>) {
        self.inflight_bytes -= read.bytes;
        let now = self.now;
        let Some(peer) = self.peers.get_mut(read.peer) else { return };
        peer.inflight_bytes -= read.bytes;
        peer.inflight_reads -= 1;
        // A read that we ended ourselves is no sign of life.
        if result != Err(ReadFailure::Aborted) {
            peer.last_progress = now;
        }
        match result {
            Ok(_) => (peer.failures, peer.shortages) = (0, 0),
            Err(failure) => {
                self.stats.reads_failed += 1;
                let ready = matches!(peer.state, PeerState::Ready(_));
                match failure {
                    ReadFailure::PeerLost if ready => self.suspect(read.peer, CandidateFailure::Unreachable),
                    ReadFailure::Protocol if ready => self.suspect(read.peer, CandidateFailure::Protocol),
                    ReadFailure::LocalShortage => self.pause(read.peer),
                    _ => {}
                }
            }
        }
        self.offer(read.peer);
    }

    /// A local shortage: nothing is posted to the peer for a moment, and nothing counts against it.
    fn pause(&mut self, key: Key) {
        self.stats.local_shortages += 1;
        let Some(peer) = self.peers.get_mut(key) else { return };
        // Several reads of one batch may meet the same shortage.
        if peer.paused_until.is_none() {
            let at = self.now.after(shortage_pause(peer.shortages));
            peer.shortages = peer.shortages.saturating_add(1);
            peer.paused_until = Some(at);
            self.timers.insert((at, Timer::Resume(key)));
        }
    }

    pub(super) fn resume(&mut self, key: Key) {
        let Some(peer) = self.peers.get_mut(key) else { return };
        if peer.paused_until.is_some_and(|until| until <= self.now) {
            peer.paused_until = None;
            self.offer(key);
        }
    }

    /// Puts a block back at the head of its queue after a local shortage.
    pub(super) fn requeue(&mut self, read: &Read) {
        let Some(peer) = self.peers.get(read.peer) else { return };
        match peer.state {
            PeerState::Ready(_) | PeerState::Connecting { .. } | PeerState::ConnectLater { .. } => {
                self.enqueue(read.load, read.block, read.peer, true);
            }
            // The peer went away meanwhile: plan as if the candidate had just been chosen.
            PeerState::Unknown | PeerState::Suspect { .. } | PeerState::Dead => {
                self.plan_block(read.load, read.block);
            }
        }
    }
}

fn shortage_pause(in_a_row: u32) -> Duration {
    SHORTAGE_PAUSE_MIN.saturating_mul(1 << in_a_row.min(16)).min(SHORTAGE_PAUSE_MAX)
}
