//! Connections between the lives, and the reads that travel over them.

use core::time::Duration;
use std::collections::BTreeSet;

use super::options::Mutation;
use super::provider::{Flight, FlightId, FlightStep, Progress, Target};
use super::world::{Event, LifeId, World};
use crate::load::{PeerFailure, ReadFailure, ReadId};
use crate::{Incarnation, RankId};

impl World {
    pub(super) fn connected(&mut self, id: LifeId, rank: RankId, incarnation: Incarnation) {
        let now = self.now;
        let Some(reader) = self.lives.get(&id).map(|life| life.node) else { return };
        let target = self.lives.iter().find(|(_, life)| life.rank.incarnation() == incarnation);
        let target = target.map(|(target, life)| (*target, life.node));
        let failed = self.random.one_in(self.options.connect_failure_odds);
        let transport = self.options.transport;
        let Some(life) = self.lives.get_mut(&id) else { return };
        match target {
            Some((target, node)) if !failed && !self.cut.contains(&(reader, node)) => {
                life.connections.insert(incarnation, target);
                life.rank.handle_peer_connected(now, rank, incarnation, transport);
            }
            // A connection that the transport moved to the peer's next life goes on without anybody's notice.
            None if self.options.silent_reconnect && life.connections.contains_key(&incarnation) => {
                life.rank.handle_peer_connected(now, rank, incarnation, transport);
            }
            _ => {
                let failure =
                    if target.is_some() { PeerFailure::Unreachable } else { PeerFailure::WrongIncarnation };
                life.rank.handle_peer_failed(now, rank, incarnation, failure);
            }
        }
        self.drain(id);
    }

    /// The hazard of design 1.6: old connections, addresses and keys reach the new life.
    pub(super) fn redirect_connections(&mut self, node: usize, new: LifeId) {
        let alive: BTreeSet<LifeId> = self.lives.keys().copied().collect();
        for life in self.lives.values_mut() {
            for target in life.connections.values_mut() {
                if !alive.contains(target) && self.control.node_of(*target) == Some(node) {
                    *target = new;
                }
            }
        }
    }

    pub(super) fn post(&mut self, target: &Target) {
        self.flights_named += 1;
        let id = FlightId(self.flights_named);
        let reader = self.lives.get(&target.reader).map(|life| life.node);
        let owner = self.lives.get(&target.owner);
        let cut = reader.zip(owner.map(|life| life.node)).is_some_and(|pair| self.cut.contains(&pair));
        let memory = owner.map(|life| &life.memory);
        let (flight, mut progress) = Flight::post(target, memory, &self.options, &mut self.random);
        if cut {
            // Nothing comes back until the read is ended by force.
            progress.next.retain(|(_, step)| *step == FlightStep::Retire);
        }
        self.flights.insert(id, flight);
        self.take_progress(id, progress);
    }

    pub(super) fn step_flight(&mut self, id: FlightId, step: FlightStep) {
        let Some(flight) = self.flights.get_mut(&id) else { return };
        let memory = self.lives.get(&flight.owner).map(|life| &life.memory);
        let progress = flight.step(step, memory, &self.options, &mut self.random);
        self.take_progress(id, progress);
    }

    fn take_progress(&mut self, id: FlightId, progress: Progress) {
        let now = self.now;
        for (delay, step) in progress.next {
            self.events.push(now.after(delay), Event::Flight(id, step));
        }
        let Some(flight) = self.flights.get(&id) else { return };
        let (reader, read, load, block) = (flight.reader, flight.read, flight.load, flight.block);
        if let Some((offset, bytes)) = progress.landed {
            self.checker.land(load, block, offset, &bytes);
        }
        let Some(result) = progress.retired else { return };
        if self.ghosts.contains(&id) {
            return;
        }
        let checksum = flight.checksum;
        let result = result.map(|word| (word, checksum.then(|| self.checker.checksum(load, block))));
        self.flights.remove(&id);
        self.retire(reader, read, result);
    }

    fn retire(
        &mut self,
        reader: LifeId,
        read: ReadId,
        result: Result<(crate::word::Word, Option<u64>), ReadFailure>,
    ) {
        let now = self.now;
        if let Some(life) = self.lives.get_mut(&reader) {
            life.rank.handle_read_done(now, read, result);
        }
        self.drain(reader);
    }

    pub(super) fn abort(&mut self, reader: LifeId, read: ReadId) {
        let found = self
            .flights
            .iter()
            .find(|(id, flight)| flight.reader == reader && flight.read == read && !self.ghosts.contains(id));
        let Some((&id, _)) = found else { return };
        if self.options.mutation == Some(Mutation::RetireBeforeDrained) {
            self.ghosts.insert(id);
            self.retire(reader, read, Err(ReadFailure::Aborted));
            return;
        }
        self.fail_flight(id, ReadFailure::Aborted, self.options.drain_max);
    }

    pub(super) fn fail_flight(&mut self, id: FlightId, failure: ReadFailure, within: Duration) {
        let Some(flight) = self.flights.get_mut(&id) else { return };
        flight.fail(failure);
        let delay = self.random.delay(Duration::ZERO, within);
        self.events.push(self.now.after(delay), Event::Flight(id, FlightStep::Retire));
    }
}
