//! One peer as the reader sees it: its state (design 1.8), its window and its queues.

use std::collections::{BTreeSet, VecDeque};

use super::slab::{Key, Slab};
use super::FAIR_TURN_INTERVAL;
use crate::{Generation, Incarnation, RankId, SlotId, Time, TransportKind};

/// End of a queue of blocks.
pub(super) const NO_BLOCK: u32 = u32::MAX;

/// Peer machine of design 1.8. A peer whose suspicion has run out is as good as unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerState {
    /// Nothing is known.
    Unknown,
    /// `Connect` was sent.
    Connecting { until: Time },
    /// A shortage on this side put the connection off.
    ConnectLater { at: Time },
    /// Reads may be posted.
    Ready(TransportKind),
    /// It failed and is left alone.
    Suspect { until: Time },
    /// Its incarnation is closed for ever.
    Dead,
}

/// The blocks of one load that wait for one peer, in order: a list through `Block::next`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    pub(super) load: Key,
    pub(super) deadline: Time,
    pub(super) head: u32,
    pub(super) tail: u32,
    /// Breaks ties between equal deadlines in favour of the lane served longest ago.
    turn: u64,
}

/// A peer.
#[derive(Debug)]
pub(super) struct Peer {
    pub(super) incarnation: Incarnation,
    /// The number under which the directory knew it last.
    pub(super) rank: RankId,
    pub(super) state: PeerState,
    /// Failures in a row; only a read that brought a word ends the row.
    pub(super) failures: u32,
    /// Local shortages in a row.
    pub(super) shortages: u32,
    pub(super) paused_until: Option<Time>,
    pub(super) inflight_bytes: u64,
    pub(super) inflight_reads: u32,
    /// When a read of it retired last, or the first of those in flight was posted.
    pub(super) last_progress: Time,
    pub(super) stall_timer: Option<Time>,
    /// Whether it is in the loader's ring of peers with something to post.
    pub(super) in_ring: bool,
    pub(super) lanes: Slab<Lane>,
    /// Lanes by deadline, then by turn.
    order: BTreeSet<(Time, u64, Key)>,
    /// Lanes for the fair turns, longest waiting first. May hold lanes that are gone.
    rotation: VecDeque<Key>,
    turns: u64,
    posts: u32,
    pub(super) touched: Vec<(SlotId, Generation)>,
    pub(super) touch_timer: Option<Time>,
}

impl Peer {
    pub(super) fn new(incarnation: Incarnation, rank: RankId) -> Self {
        Self {
            incarnation,
            rank,
            state: PeerState::Unknown,
            failures: 0,
            shortages: 0,
            paused_until: None,
            inflight_bytes: 0,
            inflight_reads: 0,
            last_progress: Time::ZERO,
            stall_timer: None,
            in_ring: false,
            lanes: Slab::new(),
            order: BTreeSet::new(),
            rotation: VecDeque::new(),
            turns: 0,
            posts: 0,
            touched: Vec::new(),
            touch_timer: None,
        }
    }

    /// Whether nothing depends on the record.
    pub(super) fn is_idle(&self) -> bool {
        self.lanes.len() == 0 && self.inflight_reads == 0 && self.touched.is_empty()
    }

    /// Whether a read could be posted as far as the peer's state goes.
    pub(super) fn may_post(&self) -> Option<TransportKind> {
        match self.state {
            PeerState::Ready(transport) if self.paused_until.is_none() && self.lanes.len() > 0 => {
                Some(transport)
            }
            _ => None,
        }
    }

    pub(super) fn add_lane(&mut self, load: Key, deadline: Time) -> Key {
        self.turns += 1;
        let turn = self.turns;
        let key = self.lanes.insert(Lane { load, deadline, head: NO_BLOCK, tail: NO_BLOCK, turn });
        self.order.insert((deadline, turn, key));
        self.rotation.push_back(key);
        key
    }

    pub(super) fn remove_lane(&mut self, key: Key) -> Option<Lane> {
        let lane = self.lanes.remove(key)?;
        self.order.remove(&(lane.deadline, lane.turn, key));
        if self.lanes.len() == 0 {
            self.rotation.clear();
        } else if self.rotation.len() > 2 * self.lanes.len() + 16 {
            let lanes = &self.lanes;
            self.rotation.retain(|key| lanes.get(*key).is_some());
        }
        Some(lane)
    }

    /// The lane whose block is posted next: earliest deadline first, but for every
    /// [`FAIR_TURN_INTERVAL`]-th turn, which is the longest waiting lane's.
    pub(super) fn next_lane(&mut self) -> Option<Key> {
        if self.lanes.len() > 1 && self.posts % FAIR_TURN_INTERVAL == FAIR_TURN_INTERVAL - 1 {
            while let Some(&key) = self.rotation.front() {
                if self.lanes.get(key).is_some() {
                    return Some(key);
                }
                self.rotation.pop_front();
            }
        }
        self.order.first().map(|&(_, _, key)| key)
    }

    /// Notes that a block of the lane was posted.
    pub(super) fn served(&mut self, key: Key) {
        self.posts = self.posts.wrapping_add(1);
        if self.lanes.len() < 2 {
            return;
        }
        if self.rotation.front() == Some(&key) {
            self.rotation.rotate_left(1);
        }
        let Some(lane) = self.lanes.get_mut(key) else { return };
        self.order.remove(&(lane.deadline, lane.turn, key));
        self.turns += 1;
        lane.turn = self.turns;
        self.order.insert((lane.deadline, lane.turn, key));
    }

    /// Whether `bytes` more fit the window; one object may always travel (design 4).
    pub(super) fn has_room(&self, bytes: u64, window_bytes: u64) -> bool {
        self.inflight_bytes == 0 || self.inflight_bytes.saturating_add(bytes) <= window_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer() -> Peer {
        Peer::new(Incarnation::new(1).unwrap(), RankId(0))
    }

    #[test]
    fn earliest_deadline_first_and_equal_deadlines_in_turn() {
        let mut peer = peer();
        let late = peer.add_lane(Key(1), Time::from_micros(9));
        let first = peer.add_lane(Key(2), Time::from_micros(5));
        let second = peer.add_lane(Key(3), Time::from_micros(5));
        let mut picked = Vec::new();
        for _ in 0..6 {
            let key = peer.next_lane().unwrap();
            peer.served(key);
            picked.push(key);
        }
        assert_eq!(picked, [first, second, first, second, first, second]);
        peer.remove_lane(first).unwrap();
        peer.remove_lane(second).unwrap();
        assert_eq!(peer.next_lane(), Some(late));
        peer.remove_lane(late).unwrap();
        assert_eq!(peer.next_lane(), None);
        assert!(peer.is_idle());
    }

    #[test]
    fn fair_turns_reach_every_lane() {
        let mut peer = peer();
        let urgent = peer.add_lane(Key(1), Time::from_micros(1));
        let others: Vec<Key> = (2..6).map(|load| peer.add_lane(Key(load), Time::from_micros(100))).collect();
        let mut counts = std::collections::BTreeMap::new();
        for _ in 0..FAIR_TURN_INTERVAL * 10 {
            let key = peer.next_lane().unwrap();
            peer.served(key);
            *counts.entry(key).or_insert(0) += 1;
        }
        assert!(counts[&urgent] > 60);
        for lane in others {
            assert!(counts[&lane] >= 2, "{counts:?}");
        }
    }
}
