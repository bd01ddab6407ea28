//! The cluster: nodes and their lives, time, and the driver that carries out what a rank asks for.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use super::check::Checker;
use super::control::{announcer_config, Control, ControlEvent};
use super::events::EventQueue;
use super::fill::Fill;
use super::memory::SlotMemory;
use super::options::{Mutation, WorldOptions};
use super::payload::{payload, Stamp};
use super::provider::{Flight, FlightId, FlightStep, Target};
use super::random::Random;
use crate::hash::{KeyCoordinates, KeyHash, NamespaceKey};
use crate::load::{
    LoadAction, LoadBlock, LoadError, LoadId, LoadRequest, PeerFailure, ReadFailure, TransportUsed,
};
use crate::owner::{FillError, OwnerAction, Put, PutError, PutId, Stored};
use crate::rank::{Action, Rank, RankConfig, StoreId, StoreJob, RANK_NOT_JOINED};
use crate::{Incarnation, LayoutId, RankId, SlotId, Time};

/// A node's life: one process. Numbers are never used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LifeId(pub u32);

/// The one layout of a world's objects.
pub const LAYOUT: LayoutId = LayoutId(7);

/// Result of a loaded block.
pub type Outcome = Result<TransportUsed, LoadError>;

#[derive(Debug)]
pub(super) enum Event {
    Flight(FlightId, FlightStep),
    Fill(LifeId, PutId),
    Extent(LifeId, u32),
    Connected(LifeId, RankId, Incarnation),
    PeerGone(LifeId, RankId, Incarnation),
    Control(ControlEvent),
}

/// One process of a node.
#[derive(Debug)]
pub(super) struct Life {
    pub(super) node: usize,
    pub(super) rank: Rank,
    pub(super) memory: SlotMemory,
    sources: BTreeMap<PutId, Vec<u8>>,
    fills: BTreeMap<PutId, Fill>,
    /// Connections by the incarnation that the reader believes to be at the other end.
    pub(super) connections: BTreeMap<Incarnation, LifeId>,
    /// Words whose invalidation a mutation holds back.
    held_back: BTreeMap<SlotId, crate::Generation>,
}

/// A cluster under virtual time.
#[derive(Debug)]
pub struct World {
    pub(super) options: WorldOptions,
    pub(super) now: Time,
    pub(super) random: Random,
    pub(super) events: EventQueue<Event>,
    pub(super) lives: BTreeMap<LifeId, Life>,
    /// The present life of each node.
    nodes: Vec<Option<LifeId>>,
    pub(super) flights: BTreeMap<FlightId, Flight>,
    /// Reads that a mutation reported as retired although packets are under way.
    pub(super) ghosts: BTreeSet<FlightId>,
    pub(super) control: Control,
    pub(super) checker: Checker,
    /// Pairs of nodes between which no data passes, (reader, owner).
    pub(super) cut: BTreeSet<(usize, usize)>,
    lives_named: u32,
    pub(super) flights_named: u64,
    jobs_named: u64,
    puts_named: u64,
    stores: BTreeMap<StoreId, BTreeMap<PutId, Option<Result<Stored, PutError>>>>,
    store_of: BTreeMap<PutId, StoreId>,
    notified: Vec<crate::Fingerprint>,
}

impl World {
    /// Nodes that have joined the directory, with empty pools.
    #[must_use]
    pub fn new(seed: u64, nodes: usize, options: WorldOptions) -> Self {
        let mut world = Self {
            options,
            now: Time::from_micros(1),
            random: Random::new(seed),
            events: EventQueue::default(),
            lives: BTreeMap::new(),
            nodes: vec![None; nodes],
            flights: BTreeMap::new(),
            ghosts: BTreeSet::new(),
            control: Control::default(),
            checker: Checker::default(),
            cut: BTreeSet::new(),
            lives_named: 0,
            flights_named: 0,
            jobs_named: 0,
            puts_named: 0,
            stores: BTreeMap::new(),
            store_of: BTreeMap::new(),
            notified: Vec::new(),
        };
        world.start_directory();
        for node in 0..nodes {
            world.start(node);
        }
        // All have joined and announced that they have nothing, unless the options forbid it.
        world.run_until(Duration::from_secs(10), |world| {
            world.lives.values().all(|life| life.rank.is_settled())
        });
        world
    }

    /// K of a numbered key.
    #[must_use]
    pub fn key(number: u64) -> KeyHash {
        NamespaceKey::derive(b"", "world", b"").hash(KeyCoordinates::default(), &number.to_le_bytes())
    }

    /// Virtual time.
    #[must_use]
    pub fn now(&self) -> Time {
        self.now
    }

    /// The seeded source of decisions, for the test's own.
    pub fn random(&mut self) -> &mut Random {
        &mut self.random
    }

    /// The options; changes hold from now on.
    pub fn options_mut(&mut self) -> &mut WorldOptions {
        &mut self.options
    }

    // ---- what a test does ----

    /// Starts a new life of a node, with a new incarnation and an empty pool. A running one ends first.
    pub fn start(&mut self, node: usize) -> LifeId {
        self.crash(node);
        self.lives_named += 1;
        let id = LifeId(self.lives_named);
        let incarnation =
            Incarnation::new(self.random.bits()).unwrap_or(Incarnation(core::num::NonZeroU64::MIN));
        let mut config = RankConfig::new(announcer_config(node, incarnation), self.options.pool_bytes);
        config.owner.extent_bytes = self.options.extent_bytes;
        config.owner.checksums = self.options.checksums;
        config.load.verify = self.options.verify;
        #[allow(clippy::expect_used)] // The options of a test are the test's own.
        let rank = Rank::new(config).expect("the world's options make a valid rank");
        let life = Life {
            node,
            rank,
            memory: SlotMemory::default(),
            sources: BTreeMap::new(),
            fills: BTreeMap::new(),
            connections: BTreeMap::new(),
            held_back: BTreeMap::new(),
        };
        self.lives.insert(id, life);
        if let Some(place) = self.nodes.get_mut(node) {
            *place = Some(id);
        }
        if self.options.silent_reconnect {
            self.redirect_connections(node, id);
        }
        self.life_started(id);
        self.drain(id);
        id
    }

    /// Ends a node's process: its memory is gone, reads from it break, its own loads and stores are forgotten.
    pub fn crash(&mut self, node: usize) {
        let Some(id) = self.nodes.get_mut(node).and_then(Option::take) else { return };
        let Some(life) = self.lives.remove(&id) else { return };
        self.checker.life_ended(id);
        self.flights.retain(|_, flight| flight.reader != id);
        let incarnation = life.rank.incarnation();
        let number = life.rank.member().map_or(RANK_NOT_JOINED, |member| member.rank);
        let broken: Vec<FlightId> =
            self.flights.iter().filter(|(_, flight)| flight.owner == id).map(|(flight, _)| *flight).collect();
        for flight in broken {
            self.fail_flight(flight, ReadFailure::PeerLost, self.options.error_delay_max);
        }
        if !self.options.silent_reconnect {
            for peer in self.lives.keys().copied().collect::<Vec<_>>() {
                let delay = self.random.delay(Duration::ZERO, self.options.error_delay_max);
                self.events.push(self.now.after(delay), Event::PeerGone(peer, number, incarnation));
            }
        }
        self.life_ended(id);
    }

    /// No data passes from `owner` to `reader` until healed: reads hang.
    pub fn cut(&mut self, reader: usize, owner: usize) {
        self.cut.insert((reader, owner));
    }

    /// Undoes [`World::cut`].
    pub fn heal(&mut self, reader: usize, owner: usize) {
        self.cut.remove(&(reader, owner));
    }

    /// Stores keys at a node. The bytes of each put are its own.
    pub fn store(&mut self, node: usize, keys: &[u64], within: Duration) -> Option<StoreId> {
        let id = self.nodes.get(node).copied().flatten()?;
        self.jobs_named += 1;
        let store = StoreId(self.jobs_named);
        let first_put = PutId(self.puts_named + 1);
        let mut puts = Vec::new();
        let mut open = BTreeMap::new();
        let object_bytes = self.options.object_bytes;
        let length_bytes = usize::try_from(object_bytes).unwrap_or(usize::MAX);
        let (ns, ns_epoch) = self.namespace_of(id)?;
        for &number in keys {
            self.puts_named += 1;
            let put = PutId(self.puts_named);
            let life = self.lives.get_mut(&id)?;
            life.sources.insert(put, payload(Stamp { key: number, put: put.0 }, length_bytes));
            self.checker.put_submitted(put, number);
            self.store_of.insert(put, store);
            open.insert(put, None);
            puts.push(Put {
                key: Self::key(number),
                ns,
                ns_epoch,
                key_bytes: number.to_le_bytes().into(),
                layout: LAYOUT,
                group_id: 0,
                object_bytes,
                parent: None,
            });
        }
        self.stores.insert(store, open);
        let job = StoreJob { first_put, puts, deadline: self.now.after(within) };
        let now = self.now;
        self.lives.get_mut(&id)?.rank.handle_store(now, store, job);
        self.drain(id);
        Some(store)
    }

    /// Loads keys into fresh destinations of a node.
    pub fn load(&mut self, node: usize, keys: &[u64], within: Duration) -> Option<LoadId> {
        let id = self.nodes.get(node).copied().flatten()?;
        self.jobs_named += 1;
        let load = LoadId(self.jobs_named);
        let deadline = self.now.after(within);
        let object_bytes = self.options.object_bytes;
        let length_bytes = usize::try_from(object_bytes).unwrap_or(usize::MAX);
        let (ns, _) = self.namespace_of(id)?;
        self.checker.load_started(id, load, keys, length_bytes, deadline);
        let blocks = keys
            .iter()
            .map(|number| LoadBlock { key: Self::key(*number), layout: LAYOUT, object_bytes, local: None })
            .collect();
        let now = self.now;
        self.lives.get_mut(&id)?.rank.handle_load(now, load, LoadRequest { ns, blocks, deadline });
        self.drain(id);
        Some(load)
    }

    /// Cancels a load.
    pub fn cancel(&mut self, node: usize, load: LoadId) {
        self.with_rank(node, |rank, now| rank.handle_load_cancel(now, load));
    }

    /// Cancels a store.
    pub fn cancel_store(&mut self, node: usize, store: StoreId) {
        self.with_rank(node, |rank, now| rank.handle_store_cancel(now, store));
    }

    /// Evicts a key at a node. Returns whether it was there.
    pub fn evict(&mut self, node: usize, key: u64) -> bool {
        let mut found = false;
        self.with_rank(node, |rank, now| found = rank.handle_evict(now, Self::key(key).fingerprint()));
        found
    }

    /// Calls into a node's rank and carries out what it asks for then.
    pub fn with_rank(&mut self, node: usize, call: impl FnOnce(&mut Rank, Time)) {
        let Some(id) = self.nodes.get(node).copied().flatten() else { return };
        let now = self.now;
        if let Some(life) = self.lives.get_mut(&id) {
            call(&mut life.rank, now);
        }
        self.drain(id);
    }

    // ---- what a test sees ----

    /// The rank of a node, while it lives.
    #[must_use]
    pub fn rank(&self, node: usize) -> Option<&Rank> {
        self.lives.get(&self.nodes.get(node).copied().flatten()?).map(|life| &life.rank)
    }

    /// How each block of a load ended; `None` for those that have not.
    #[must_use]
    pub fn outcomes(&self, load: LoadId) -> Vec<Option<Outcome>> {
        self.checker.outcomes(load)
    }

    /// Whether a load is over.
    #[must_use]
    pub fn is_over(&self, load: LoadId) -> bool {
        self.checker.is_over(load)
    }

    /// The puts whose bytes the accepted blocks of a load carry.
    #[must_use]
    pub fn delivered(&self, load: LoadId) -> Vec<Option<PutId>> {
        self.checker.delivered(load)
    }

    /// How the puts of a store ended; `None` for those that have not.
    #[must_use]
    pub fn stored(&self, store: StoreId) -> Vec<Option<Result<Stored, PutError>>> {
        self.stores.get(&store).map(|puts| puts.values().copied().collect()).unwrap_or_default()
    }

    /// Keys that schedulers were told of because a report was not acknowledged in time.
    #[must_use]
    pub fn notified(&self) -> &[crate::Fingerprint] {
        &self.notified
    }

    /// Reads in flight, everywhere.
    #[must_use]
    pub fn reads_in_flight(&self) -> usize {
        self.flights.len()
    }

    /// Checks what can be checked at any time beyond what every event checks.
    pub fn check(&self) {
        self.checker.check_destinations();
    }

    // ---- time ----

    /// Lets time pass.
    pub fn run_for(&mut self, time: Duration) {
        let end = self.now.after(time);
        while self.step(end) {}
        self.now = end;
        self.checker.check_time(self.now, self.options.drain_max);
    }

    /// Lets time pass until the condition holds, at most for `bound`. Returns whether it does.
    pub fn run_until(&mut self, bound: Duration, condition: impl Fn(&Self) -> bool) -> bool {
        let end = self.now.after(bound);
        while !condition(self) {
            if !self.step(end) {
                return condition(self);
            }
        }
        true
    }

    /// Lets time pass until a load is over.
    ///
    /// # Panics
    /// If it is not over long after its deadline.
    #[allow(clippy::panic)] // A test's check.
    pub fn finish(&mut self, load: LoadId) -> Vec<Outcome> {
        assert!(
            self.run_until(Duration::from_secs(3600), |world| world.is_over(load)),
            "{load:?} does not end"
        );
        self.outcomes(load).into_iter().flatten().collect()
    }

    /// Lets time pass until a store is over.
    ///
    /// # Panics
    /// If it is not over after an hour.
    #[allow(clippy::panic)] // A test's check.
    pub fn finish_store(&mut self, store: StoreId) -> Vec<Result<Stored, PutError>> {
        let over = |world: &Self| world.stored(store).iter().all(Option::is_some);
        assert!(self.run_until(Duration::from_secs(3600), over), "{store:?} does not end");
        self.stored(store).into_iter().flatten().collect()
    }

    /// Carries out the next event that is due by `end`. Returns whether there was one.
    fn step(&mut self, end: Time) -> bool {
        let timers = self.lives.values().filter_map(|life| life.rank.poll_timeout());
        let next = timers.chain(self.events.next_time()).chain(self.control_timeout()).min();
        let Some(at) = next.filter(|at| *at <= end) else { return false };
        self.now = self.now.max(at);
        if let Some(event) = self.events.pop_due(self.now) {
            self.handle(event);
        } else {
            self.fire_timers();
        }
        self.checker.check_time(self.now, self.options.drain_max);
        true
    }

    fn fire_timers(&mut self) {
        let now = self.now;
        for id in self.lives.keys().copied().collect::<Vec<_>>() {
            let Some(life) = self.lives.get_mut(&id) else { continue };
            if life.rank.poll_timeout().is_some_and(|at| at <= now) {
                life.rank.handle_timeout(now);
                self.drain(id);
            }
        }
        self.fire_control_timers();
    }

    fn handle(&mut self, event: Event) {
        let now = self.now;
        match event {
            Event::Flight(flight, step) => self.step_flight(flight, step),
            Event::Fill(life, put) => self.step_fill(life, put),
            Event::Extent(id, extent) => {
                if let Some(life) = self.lives.get_mut(&id) {
                    life.rank.handle_extent(now, extent, Ok(()));
                    self.drain(id);
                }
            }
            Event::Connected(id, rank, incarnation) => self.connected(id, rank, incarnation),
            Event::PeerGone(id, number, incarnation) => {
                let Some(life) = self.lives.get_mut(&id) else { return };
                life.connections.remove(&incarnation);
                life.rank.handle_peer_failed(now, number, incarnation, PeerFailure::Lost);
                self.drain(id);
            }
            Event::Control(event) => self.handle_control(event),
        }
    }

    // ---- the driver of a rank ----

    /// Carries out everything a rank asks for.
    pub(super) fn drain(&mut self, id: LifeId) {
        while let Some(action) = self.lives.get_mut(&id).and_then(|life| life.rank.poll_action()) {
            match action {
                Action::Owner(action) => self.owner_action(id, action),
                Action::Load(action) => self.load_action(id, action),
                Action::PutDone { put, outcome } => {
                    if let Some(life) = self.lives.get_mut(&id) {
                        life.sources.remove(&put);
                    }
                    let store = self.store_of.get(&put).copied();
                    if let Some(place) = store.and_then(|store| self.stores.get_mut(&store)?.get_mut(&put)) {
                        assert!(place.replace(outcome).is_none(), "{put:?} ended twice");
                    }
                }
                Action::StoreDone { store } => {
                    let all = self.stored(store).iter().all(Option::is_some);
                    assert!(all, "{store:?} ended before its puts");
                }
                Action::Locate { locate, ns, keys, .. } => self.locate(id, locate, ns, &keys),
                Action::ReportMisses { reports, records } => self.report_misses(id, reports, &records),
                Action::Directory(action) => self.directory_action(id, *action),
                Action::AcknowledgeClear(ack) => self.acknowledge_clear(id, ack),
            }
        }
    }

    fn owner_action(&mut self, id: LifeId, action: OwnerAction) {
        let now = self.now;
        let held_back = self.options.mutation == Some(Mutation::InvalidateAfterFill);
        let Some(life) = self.lives.get_mut(&id) else { return };
        match action {
            OwnerAction::InvalidateWord { slot, generation } if held_back => {
                life.held_back.insert(slot, generation);
            }
            OwnerAction::InvalidateWord { slot, generation } => life.memory.invalidate(slot, generation),
            OwnerAction::PublishWord { slot, word } => {
                if let Some(generation) = life.held_back.remove(&slot) {
                    life.memory.invalidate(slot, generation);
                }
                let published = life.memory.publish(slot, word);
                assert!(published, "O2: {slot:?} does not carry the generation that was filled");
            }
            OwnerAction::AllocateExtent { extent, offset, length_bytes } => {
                life.memory.grow(usize::try_from(offset + length_bytes).unwrap_or(usize::MAX));
                let delay = self.random.delay(self.options.delay_min, self.options.delay_max);
                self.events.push(now.after(delay), Event::Extent(id, extent));
            }
            OwnerAction::AddSlab(slab) => life.memory.add_slab(slab),
            OwnerAction::RetireSlab(slab) => life.memory.retire_slab(slab),
            OwnerAction::Fill { put, slot, .. } => {
                let source = life.sources.get(&put).cloned().unwrap_or_default();
                let extent = life.memory.extent(slot);
                assert!(
                    extent.is_some_and(|extent| extent.length_bytes == source.len()),
                    "{slot:?} does not fit {put:?}"
                );
                let offset = extent.map_or(0, |extent| extent.offset);
                life.fills.insert(put, Fill::new(offset, source));
                self.schedule_fill(id, put);
            }
            OwnerAction::AbortFill { put } => {
                if let Some(fill) = life.fills.get_mut(&put) {
                    fill.aborted = true;
                }
            }
            OwnerAction::PutDone { .. } | OwnerAction::Announce(_) => {
                unreachable!("a rank deals with these itself")
            }
        }
    }

    fn schedule_fill(&mut self, id: LifeId, put: PutId) {
        let delay = self.random.delay(Duration::ZERO, self.options.fill_delay_max);
        self.events.push(self.now.after(delay), Event::Fill(id, put));
    }

    /// One step of a copy into the pool. A fill that overwrites a slot is seen half done by reads in between.
    fn step_fill(&mut self, id: LifeId, put: PutId) {
        let (now, fill_bytes) = (self.now, self.options.fill_bytes);
        let Some(life) = self.lives.get_mut(&id) else { return };
        let Some(fill) = life.fills.get_mut(&put) else { return };
        let result = if fill.aborted {
            Some(Err(FillError::Cancelled))
        } else {
            fill.copy(&mut life.memory, fill_bytes)
        };
        match result {
            None => self.schedule_fill(id, put),
            Some(result) => {
                life.fills.remove(&put);
                life.rank.handle_filled(now, put, result);
                self.drain(id);
            }
        }
    }

    fn load_action(&mut self, id: LifeId, action: LoadAction) {
        match action {
            LoadAction::Connect { rank, incarnation } => {
                let delay = self.random.delay(self.options.delay_min, 4 * self.options.delay_max);
                self.events.push(self.now.after(delay), Event::Connected(id, rank, incarnation));
            }
            LoadAction::Read { read, incarnation, slot, object_bytes, load, block, checksum, .. } => {
                let owner = self.lives.get(&id).and_then(|life| life.connections.get(&incarnation)).copied();
                self.post(&Target {
                    reader: id,
                    owner: owner.unwrap_or(LifeId(0)),
                    read,
                    load,
                    block,
                    slot,
                    object_bytes,
                    checksum,
                });
            }
            LoadAction::Abort { read } => self.abort(id, read),
            LoadAction::Locate { .. } | LoadAction::MissReport { .. } => {
                unreachable!("a rank deals with these itself")
            }
            LoadAction::NotifyScheduler { keys } => self.notified.extend(keys),
            LoadAction::Touch { incarnation, entries, .. } => self.touch(incarnation, &entries),
            LoadAction::BlockDone { load, block, outcome } => {
                let busy = self.flights.iter().any(|(flight_id, flight)| {
                    (flight.reader, flight.load, flight.block) == (id, load, block)
                        && !self.ghosts.contains(flight_id)
                });
                assert!(!busy, "R4: block {block} of {load:?} ended with a read in flight");
                self.checker.block_done(load, block, outcome);
            }
            LoadAction::LoadDone { load } => self.checker.load_done(load),
        }
    }

    /// TOUCH is lossy and advisory.
    fn touch(&mut self, incarnation: Incarnation, entries: &[(SlotId, crate::Generation)]) {
        let now = self.now;
        let owner =
            self.lives.iter().find(|(_, life)| life.rank.incarnation() == incarnation).map(|(id, _)| *id);
        if self.random.one_in(self.options.loss_odds) {
            return;
        }
        if let Some(id) = owner {
            if let Some(life) = self.lives.get_mut(&id) {
                life.rank.handle_touch(now, entries);
            }
            self.drain(id);
        }
    }
}
