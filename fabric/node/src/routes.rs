//! Peers by incarnation, the transport chosen for each, and the lanes that carry their reads.

use std::collections::HashMap;

use kvfabric_core::load::PeerFailure;
use kvfabric_core::{Incarnation, RankId, TransportKind};
use kvfabric_transport_api::{ConnectError, OpToken, PeerKey, PeerTarget, ReadOp};
use kvfabric_transport_control::Connection;

use crate::lane::{Lane, LaneCommand};
use crate::peers::{Greeted, PeerConnection};
use crate::PeerRoute;

/// The key under which every shm lane knows this rank's own pool.
pub(crate) const OWN_POOL: PeerKey = PeerKey(0);

/// Transports still to be tried, best first, each with the reason for trying it.
type Candidates = Vec<(TransportKind, &'static str)>;

enum State {
    /// The control plane is saying HELLO.
    Greeting,
    /// A provider is connecting.
    Connecting { key: PeerKey, kind: TransportKind, reason: &'static str, rest: Candidates },
    /// Reads may be posted.
    Ready { key: PeerKey, kind: TransportKind, reason: &'static str },
}

struct Peer {
    /// The number under which the directory knew it last.
    rank: RankId,
    name: String,
    state: State,
    target: PeerTarget,
    connection: Option<PeerConnection>,
}

/// What follows from a wish to connect.
pub(crate) enum Begin {
    /// The control plane should greet the peer.
    Greet,
    /// It is being done already.
    Wait,
    /// It is connected already.
    Connected(TransportKind),
}

/// All peers and lanes of a node.
pub(crate) struct Routes {
    lanes: Vec<Lane>,
    /// Reads that go to each lane at the end of this turn.
    outbox: Vec<Vec<(PeerKey, ReadOp)>>,
    /// Lane of each read in flight, for aborts.
    reads: HashMap<u64, usize>,
    peers: HashMap<Incarnation, Peer>,
    by_key: HashMap<PeerKey, (Incarnation, usize)>,
    next_key: u64,
    next_own: usize,
}

impl Routes {
    /// Lanes in any order; every transport in use has at least one.
    pub(crate) fn new(lanes: Vec<Lane>) -> Self {
        Self {
            outbox: lanes.iter().map(|_| Vec::new()).collect(),
            lanes,
            reads: HashMap::new(),
            peers: HashMap::new(),
            by_key: HashMap::new(),
            next_key: OWN_POOL.0 + 1,
            next_own: 0,
        }
    }

    /// Core wants a peer connected.
    pub(crate) fn begin(&mut self, rank: RankId, incarnation: Incarnation) -> Begin {
        if let Some(peer) = self.peers.get_mut(&incarnation) {
            peer.rank = rank;
            return match peer.state {
                State::Ready { kind, .. } => Begin::Connected(kind),
                State::Greeting | State::Connecting { .. } => Begin::Wait,
            };
        }
        self.peers.insert(
            incarnation,
            Peer {
                rank,
                name: String::new(),
                state: State::Greeting,
                target: PeerTarget::default(),
                connection: None,
            },
        );
        Begin::Greet
    }

    /// HELLO is over.
    ///
    /// # Errors
    /// The failure to tell core.
    pub(crate) fn handle_greeted(
        &mut self,
        rank: RankId,
        incarnation: Incarnation,
        result: Result<Greeted, (PeerFailure, String)>,
    ) -> Result<(), PeerFailure> {
        let Some(peer) = self.peers.get_mut(&incarnation) else { return Ok(()) };
        if !matches!(peer.state, State::Greeting) {
            return Ok(());
        }
        match result {
            Err((failure, reason)) => {
                tracing::info!(rank = rank.0, %incarnation, %failure, %reason, "cannot reach a peer");
                self.peers.remove(&incarnation);
                Err(failure)
            }
            Ok(greeted) => {
                peer.name = greeted.name;
                peer.target = greeted.target;
                peer.connection = Some(greeted.connection);
                if self.connect_next(incarnation, greeted.candidates) {
                    Ok(())
                } else {
                    self.peers.remove(&incarnation);
                    Err(PeerFailure::Unreachable)
                }
            }
        }
    }

    /// Tries the first of `candidates` that has a lane. Returns whether there was one.
    fn connect_next(&mut self, incarnation: Incarnation, mut candidates: Candidates) -> bool {
        while !candidates.is_empty() {
            let (kind, reason) = candidates.remove(0);
            let key = PeerKey(self.next_key);
            let Some(lane) = self.lane_for(kind, key) else { continue };
            let Some(peer) = self.peers.get_mut(&incarnation) else { return false };
            self.next_key += 1;
            self.by_key.insert(key, (incarnation, lane));
            peer.state = State::Connecting { key, kind, reason, rest: candidates };
            let target = peer.target.clone();
            self.lanes[lane].send(LaneCommand::Connect { peer: key, target });
            return true;
        }
        false
    }

    fn lane_for(&self, kind: TransportKind, key: PeerKey) -> Option<usize> {
        let fitting: Vec<usize> = self
            .lanes
            .iter()
            .enumerate()
            .filter(|(_, lane)| lane.kind == kind)
            .map(|(index, _)| index)
            .collect();
        let count = u64::try_from(fitting.len()).ok().filter(|count| *count > 0)?;
        usize::try_from(key.0 % count).ok().and_then(|index| fitting.get(index).copied())
    }

    /// A provider connected a peer.
    pub(crate) fn handle_connected(&mut self, key: PeerKey) -> Option<(RankId, Incarnation, TransportKind)> {
        let (incarnation, _) = *self.by_key.get(&key)?;
        let peer = self.peers.get_mut(&incarnation)?;
        match peer.state {
            State::Connecting { key: expected, kind, reason, .. } if expected == key => {
                peer.state = State::Ready { key, kind, reason };
                tracing::info!(peer = %peer.name, transport = %kind, reason, "connected");
                Some((peer.rank, incarnation, kind))
            }
            _ => None,
        }
    }

    /// A provider could not connect a peer: the next transport, or a failure to tell core.
    pub(crate) fn handle_connect_failed(
        &mut self,
        key: PeerKey,
        kind: TransportKind,
        error: &ConnectError,
    ) -> Option<(RankId, Incarnation, PeerFailure)> {
        let (incarnation, _) = self.by_key.remove(&key)?;
        let peer = self.peers.get_mut(&incarnation)?;
        let State::Connecting { key: expected, rest, .. } = &mut peer.state else { return None };
        if *expected != key {
            return None;
        }
        let rest = std::mem::take(rest);
        tracing::debug!(peer = %peer.name, transport = %kind, %error, "a transport does not reach the peer");
        let failure = match error {
            ConnectError::WrongIncarnation { .. } => PeerFailure::WrongIncarnation,
            ConnectError::LocalShortage(_) => PeerFailure::LocalShortage,
            ConnectError::Protocol(_) => PeerFailure::Protocol,
            _ => PeerFailure::Unreachable,
        };
        let rank = peer.rank;
        if failure != PeerFailure::WrongIncarnation && self.connect_next(incarnation, rest) {
            return None;
        }
        tracing::info!(rank = rank.0, %incarnation, transport = %kind, %error, "cannot reach a peer");
        self.peers.remove(&incarnation);
        Some((rank, incarnation, failure))
    }

    /// A peer's connection is gone; its reads retired before.
    pub(crate) fn handle_disconnected(
        &mut self,
        key: PeerKey,
        reason: &str,
    ) -> Option<(RankId, Incarnation)> {
        let (incarnation, _) = self.by_key.remove(&key)?;
        let current = self.peers.get(&incarnation).is_some_and(|peer| match peer.state {
            State::Connecting { key: at, .. } | State::Ready { key: at, .. } => at == key,
            State::Greeting => false,
        });
        if !current {
            return None;
        }
        let peer = self.peers.remove(&incarnation)?;
        tracing::info!(peer = %peer.name, reason, "connection to a peer lost");
        Some((peer.rank, incarnation))
    }

    fn forget(&mut self, incarnation: Incarnation) {
        let Some(peer) = self.peers.remove(&incarnation) else { return };
        if let State::Connecting { key, .. } | State::Ready { key, .. } = peer.state {
            if let Some((_, lane)) = self.by_key.remove(&key) {
                self.lanes[lane].send(LaneCommand::Disconnect { peer: key });
            }
        }
    }

    /// Queues a read for its peer's lane; it leaves with [`Routes::flush`].
    ///
    /// # Errors
    /// The read, if the peer is not connected.
    pub(crate) fn post(&mut self, incarnation: Incarnation, own: bool, op: ReadOp) -> Result<(), ReadOp> {
        let (key, lane) = if own {
            let shm: Vec<usize> =
                (0..self.lanes.len()).filter(|index| self.lanes[*index].kind == TransportKind::Shm).collect();
            self.next_own = self.next_own.wrapping_add(1);
            match shm.get(self.next_own % shm.len().max(1)) {
                Some(lane) => (OWN_POOL, *lane),
                None => return Err(op),
            }
        } else {
            match self.peers.get(&incarnation).map(|peer| &peer.state) {
                Some(State::Ready { key, .. }) => match self.by_key.get(key) {
                    Some((_, lane)) => (*key, *lane),
                    None => return Err(op),
                },
                _ => return Err(op),
            }
        };
        self.reads.insert(op.token.0, lane);
        self.outbox[lane].push((key, op));
        Ok(())
    }

    /// A read retired.
    pub(crate) fn retired(&mut self, token: OpToken) {
        self.reads.remove(&token.0);
    }

    /// Ends a read by force.
    pub(crate) fn abort(&mut self, token: OpToken) {
        if let Some(lane) = self.reads.get(&token.0).copied() {
            // A read that has not left yet must be there before its abort.
            self.flush_lane(lane);
            self.lanes[lane].send(LaneCommand::Abort(token));
        }
    }

    /// Sends what was queued in this turn.
    pub(crate) fn flush(&mut self) {
        for lane in 0..self.lanes.len() {
            self.flush_lane(lane);
        }
    }

    fn flush_lane(&mut self, lane: usize) {
        if !self.outbox[lane].is_empty() {
            let ops = std::mem::take(&mut self.outbox[lane]);
            self.lanes[lane].send(LaneCommand::Post(ops));
        }
    }

    /// Control connection of a connected peer.
    pub(crate) fn control_of(&self, incarnation: Incarnation) -> Option<&Connection> {
        self.peers.get(&incarnation)?.connection.as_ref().map(PeerConnection::get)
    }

    /// Connected peers.
    pub(crate) fn ready(&self) -> Vec<PeerRoute> {
        let mut routes: Vec<PeerRoute> = self
            .peers
            .values()
            .filter_map(|peer| match peer.state {
                State::Ready { kind, reason, .. } => {
                    Some(PeerRoute { name: peer.name.clone(), transport: kind, reason: reason.to_owned() })
                }
                _ => None,
            })
            .collect();
        routes.sort_by(|a, b| a.name.cmp(&b.name));
        routes
    }

    /// Ends every connection by force; reads retire through their events.
    pub(crate) fn stop(&mut self) {
        let known: Vec<Incarnation> = self.peers.keys().copied().collect();
        for incarnation in known {
            self.forget(incarnation);
        }
        for lane in &self.lanes {
            lane.send(LaneCommand::Disconnect { peer: OWN_POOL });
            lane.request_stop();
        }
    }
}
