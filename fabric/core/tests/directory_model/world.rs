//! A directory and several ranks on a network that loses, doubles, delays and reorders, in virtual time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use kvfabric_core::directory::{
    Announcer, AnnouncerAction, AnnouncerConfig, ClearId, ClearRequest, ConnectionId, FlushId, LinkId,
    RequestTag, Service, ServiceAction, ServiceConfig, TableConfig,
};
use kvfabric_core::load::{MissReason, Replica};
use kvfabric_core::owner::Announcement;
use kvfabric_core::wire::{
    decode_reply, decode_request, encode_reply, encode_request, Advertised, Attach, ClearAck, ClearRank,
    EngineKey, Locate, Lookup, MissRecord, MissReports, Name, NsName, NsNumber, NsReply, OpenNs, Ping, Query,
    Reply, Request,
};
use kvfabric_core::{Fingerprint, Generation, Incarnation, NsEpoch, NsId, SlotId, Time};

use crate::random::Random;

pub const KEYS: u64 = 24;
pub const NAMES: usize = 3;
pub const NAMESPACES: usize = 2;

/// How unkind the network is.
#[derive(Clone, Copy)]
pub struct Network {
    pub lost_percent: u64,
    pub doubled_percent: u64,
    pub delay_us_max: u64,
}

pub const BAD: Network = Network { lost_percent: 10, doubled_percent: 15, delay_us_max: 300_000 };
pub const GOOD: Network = Network { lost_percent: 0, doubled_percent: 0, delay_us_max: 1000 };

/// What a rank holds for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    pub slot: SlotId,
    pub generation: Generation,
    pub ns_epoch: NsEpoch,
}

/// One process that is a rank, or was one.
pub struct Process {
    pub name: usize,
    pub incarnation: Incarnation,
    pub announcer: Announcer,
    pub ns: Vec<NsId>,
    pub held: BTreeMap<u64, Held>,
    generation: u64,
    link: LinkId,
    control: Option<ConnectionId>,
    liveness: Option<ConnectionId>,
    reconnect_at: Option<Time>,
    flushes: BTreeMap<FlushId, BTreeMap<u64, Held>>,
    /// Refused for good.
    pub is_over: bool,
}

enum Event {
    /// A frame reaches the directory over a connection.
    ToDirectory {
        process: usize,
        connection: ConnectionId,
        link: LinkId,
        tag: Option<RequestTag>,
        frame: Vec<u8>,
    },
    /// A reply reaches a process.
    ToProcess {
        process: usize,
        link: LinkId,
        tag: RequestTag,
        frame: Vec<u8>,
    },
    /// A request of the directory reaches a process.
    Clear {
        process: usize,
        connection: ConnectionId,
        clear: ClearRank,
    },
    ClearAck {
        rank: kvfabric_core::RankId,
        connection: ConnectionId,
        ack: ClearAck,
    },
    Ping {
        process: usize,
    },
}

/// All of it.
pub struct World {
    pub random: Random,
    pub now: Time,
    pub network: Network,
    pub service: Service,
    pub processes: Vec<Process>,
    /// The directory's life, from 1.
    life: u32,
    events: BTreeMap<(Time, u64), Event>,
    named: u64,
    /// Open connections, and whose they are.
    connections: BTreeMap<ConnectionId, usize>,
    /// Incarnations that the directory has closed, in this life.
    closed: BTreeSet<Incarnation>,
    /// Everything that was ever offered: (incarnation, key, generation).
    offered: BTreeMap<(Incarnation, u64, Generation), Held>,
    /// Pairs that must be hidden, and until when at least.
    hidden: BTreeMap<(EngineKey, Incarnation), Time>,
    /// Results of flushes and clears, for the test to count.
    pub flushed: u64,
    pub cleared: u64,
    pub checked: u64,
}

pub fn ns_name(ns: usize) -> NsName {
    NsName([u8::try_from(ns).unwrap() + 1; 16])
}

/// Even keys belong to the first namespace, odd ones to the second, as keyed fingerprints would.
pub fn ns_of(key: u64) -> usize {
    usize::try_from(key).unwrap() % NAMESPACES
}

pub fn fingerprint(key: u64) -> Fingerprint {
    Fingerprint([key.wrapping_mul(0x9e37_79b9_7f4a_7c15), key])
}

fn service(life: u32) -> Service {
    Service::new(ServiceConfig {
        cluster: "c".into(),
        session: u64::from(life) << 52 | u64::from(life) << 20,
        epoch_base: NsEpoch(life * 10_000),
        table: TableConfig { seed: [u64::from(life), 2], bytes_max: 1 << 30 },
        peer_timeout: Duration::from_secs(1),
    })
}

impl World {
    pub fn new(seed: u64) -> Self {
        let mut world = Self {
            random: Random::new(seed),
            now: Time::from_micros(1_000_000),
            network: BAD,
            service: service(1),
            processes: Vec::new(),
            life: 1,
            events: BTreeMap::new(),
            named: 0,
            connections: BTreeMap::new(),
            closed: BTreeSet::new(),
            offered: BTreeMap::new(),
            hidden: BTreeMap::new(),
            flushed: 0,
            cleared: 0,
            checked: 0,
        };
        for name in 0..NAMES {
            world.start(name);
        }
        world
    }

    fn name(&mut self) -> u64 {
        self.named += 1;
        self.named
    }

    /// Starts a process of this name. An older one may be alive still.
    pub fn start(&mut self, name: usize) {
        let incarnation = Incarnation::new(self.random.bits() | 1).unwrap();
        let mut announcer = Announcer::new(AnnouncerConfig {
            cluster: Name::new("c").unwrap(),
            name: Name::new(format!("rank-{name}")).unwrap(),
            engine: Name::new(format!("engine-{name}")).unwrap(),
            incarnation,
            advertised: Advertised::default(),
        });
        let ns = (0..NAMESPACES).map(|ns| announcer.open(self.now, ns_name(ns)).unwrap()).collect();
        self.processes.push(Process {
            name,
            incarnation,
            announcer,
            ns,
            held: BTreeMap::new(),
            generation: 0,
            link: LinkId(0),
            control: None,
            liveness: None,
            reconnect_at: Some(self.now),
            flushes: BTreeMap::new(),
            is_over: false,
        });
    }

    /// The processes that a name's latest life is: the last one started.
    pub fn latest(&self, name: usize) -> usize {
        (0..self.processes.len()).rev().find(|process| self.processes[*process].name == name).unwrap()
    }

    /// Ends a process as a crash does: the kernel closes its connections.
    pub fn kill(&mut self, process: usize) {
        self.processes[process].is_over = true;
        self.processes[process].held.clear();
        self.disconnect(process);
        self.processes[process].reconnect_at = None;
    }

    pub fn restart_directory(&mut self) {
        self.life += 1;
        self.service = service(self.life);
        self.closed.clear();
        self.hidden.clear();
        for process in 0..self.processes.len() {
            self.disconnect(process);
        }
        self.connections.clear();
    }

    /// Both of a process's connections end; the directory hears of it at once, as the kernel tells it.
    pub fn disconnect(&mut self, process: usize) {
        let now = self.now;
        let delay = self.random.below(400_000);
        let it = &mut self.processes[process];
        let connections = [it.control.take(), it.liveness.take()];
        if connections.iter().any(Option::is_some) {
            it.announcer.handle_disconnected(now);
            it.reconnect_at = Some(now.after(Duration::from_micros(delay)));
        }
        for connection in connections.into_iter().flatten() {
            if self.connections.remove(&connection).is_some() {
                self.service.handle_connection_closed(now, connection);
            }
        }
        self.drain();
    }

    fn schedule(&mut self, event: Event) {
        let delay = self.random.below(self.network.delay_us_max + 1);
        let at = (self.now.after(Duration::from_micros(delay)), self.name());
        self.events.insert(at, event);
    }

    /// Sends over the network: perhaps not at all, perhaps twice.
    fn send(&mut self, event: impl Fn() -> Event) {
        if !self.random.percent(self.network.lost_percent) {
            self.schedule(event());
        }
        if self.random.percent(self.network.doubled_percent) {
            self.schedule(event());
        }
    }

    /// Stores a key at a process, in place of what it holds.
    pub fn store(&mut self, process: usize, key: u64) {
        self.evict(process, key);
        let now = self.now;
        let it = &mut self.processes[process];
        let ns = it.ns[ns_of(key)];
        it.generation += 1;
        let held = Held {
            slot: SlotId(u32::try_from(it.generation).unwrap()),
            generation: Generation(it.generation),
            ns_epoch: it.announcer.epoch(ns).unwrap(),
        };
        it.held.insert(key, held);
        it.announcer.handle_announcement(now, announcement(true, ns, key, held));
        self.offered.insert((it.incarnation, key, held.generation), held);
        self.drain();
    }

    pub fn evict(&mut self, process: usize, key: u64) {
        let now = self.now;
        let it = &mut self.processes[process];
        if let Some(held) = it.held.remove(&key) {
            it.announcer.handle_announcement(now, announcement(false, it.ns[ns_of(key)], key, held));
        }
        self.drain();
    }

    /// What the owner does when a namespace is cleared: all that is older goes.
    fn clear_owner(&mut self, process: usize, ns: NsId, epoch: NsEpoch) {
        let it = &self.processes[process];
        let gone: Vec<u64> = it
            .held
            .iter()
            .filter(|(key, held)| it.ns[ns_of(**key)] == ns && held.ns_epoch < epoch)
            .map(|(key, _)| *key)
            .collect();
        for key in gone {
            self.evict(process, key);
        }
    }

    pub fn flush(&mut self, process: usize) {
        let flush = FlushId(self.name());
        let deadline = self.now.after(Duration::from_secs(5));
        let held = self.processes[process].held.clone();
        self.processes[process].flushes.insert(flush, held);
        self.processes[process].announcer.handle_flush(self.now, flush, deadline);
        self.drain();
    }

    pub fn clear(&mut self, process: usize, ns: usize) {
        let clear = ClearId(self.name());
        let deadline = self.now.after(Duration::from_secs(5));
        let it = &mut self.processes[process];
        it.announcer.handle_clear(self.now, clear, it.ns[ns], deadline);
        self.drain();
    }

    /// A reader of `engine` locates a key, looks at the owner's word, and reports what a read would have found.
    pub fn read(&mut self, engine: EngineKey, key: u64) {
        for replica in self.locate(engine, key) {
            let owner = self.processes.iter().find(|owner| owner.incarnation == replica.incarnation);
            let held = owner.and_then(|owner| owner.held.get(&key));
            let matches = held.is_some_and(|held| held.generation == replica.generation);
            let reason = match owner {
                Some(owner) if !owner.is_over && matches && !self.random.percent(10) => continue,
                Some(owner) if !owner.is_over && !matches => MissReason::Stale,
                _ => MissReason::Unreachable,
            };
            let member = kvfabric_core::wire::Member { rank: replica.rank, incarnation: replica.incarnation };
            let record =
                MissRecord { fingerprint: fingerprint(key), generation: replica.generation, member, reason };
            let reports = MissReports { asker: engine, reports: [record].into_iter().collect() };
            self.ask(Request::MissReports(reports));
            if reason == MissReason::Unreachable {
                let until = self.now.after(kvfabric_core::limits::HIDE_MIN);
                self.hidden.insert((engine, replica.incarnation), until);
            }
        }
    }

    /// A request without a rank, through the wire and back.
    fn ask(&mut self, request: Request<'_>) -> Reply<'static> {
        let mut frame = Vec::new();
        encode_request(&request, &mut frame).unwrap();
        let request = decode_request(&frame).unwrap();
        let reply = self.service.handle_request(self.now, ConnectionId(0), 0, ClearRequest(0), &request);
        self.drain();
        reply.unwrap()
    }

    pub fn number(&mut self, ns: usize) -> (NsNumber, NsEpoch) {
        let open = OpenNs { name: ns_name(ns), known_epoch: NsEpoch(0) };
        match self.ask(Request::OpenNs(open)) {
            Reply::Ns(NsReply::Opened { number, epoch }) => (number, epoch),
            other => panic!("{other:?}"),
        }
    }

    fn query(&mut self, asker: EngineKey, key: u64) -> Query<'static> {
        let (ns, _) = self.number(ns_of(key));
        Query { ns, asker, deadline_us: 0, keys: [fingerprint(key)].into_iter().collect() }
    }

    pub fn lookup(&mut self, asker: EngineKey, key: u64) -> bool {
        let query = self.query(asker, key);
        match self.ask(Request::Lookup(Lookup(query))) {
            Reply::Lookup(reply) => reply.hits.get(0),
            other => panic!("{other:?}"),
        }
    }

    pub fn locate(&mut self, asker: EngineKey, key: u64) -> Vec<Replica> {
        let query = self.query(asker, key);
        match self.ask(Request::Locate(Locate(query))) {
            Reply::Locate(reply) => reply.iter().next().unwrap().to_vec(),
            other => panic!("{other:?}"),
        }
    }

    /// The rules that hold at every moment, for one key and one asker.
    pub fn check(&mut self, asker: EngineKey, key: u64) {
        self.checked += 1;
        let replicas = self.locate(asker, key);
        assert_eq!(self.lookup(asker, key), !replicas.is_empty(), "LOOKUP and LOCATE disagree on key {key}");
        let (_, epoch) = self.number(ns_of(key));
        let mut owners = BTreeSet::new();
        for replica in &replicas {
            let offered = self.offered.get(&(replica.incarnation, key, replica.generation));
            let offered = offered.unwrap_or_else(|| panic!("key {key}: {replica:?} was never offered"));
            assert_eq!(offered.slot, replica.slot);
            assert_eq!(offered.ns_epoch, epoch, "key {key}: {replica:?} was cleared");
            assert!(!self.closed.contains(&replica.incarnation), "{replica:?} is of a closed incarnation");
            assert!(owners.insert(replica.incarnation), "{replica:?} is listed twice");
            let owner = self.processes.iter().find(|owner| owner.incarnation == replica.incarnation).unwrap();
            assert!(owner.control.is_some(), "{replica:?} is of a rank that lost its connection");
            let hidden = self.hidden.get(&(asker, replica.incarnation));
            assert!(hidden.is_none_or(|until| self.now >= *until), "{replica:?} is hidden from the asker");
        }
    }

    /// Carries out all actions of everybody.
    fn drain(&mut self) {
        while let Some(action) = self.service.poll_action() {
            self.act_for_service(action);
        }
        for process in 0..self.processes.len() {
            while let Some(action) = self.processes[process].announcer.poll_action() {
                self.act_for_process(process, action);
            }
        }
    }

    fn act_for_service(&mut self, action: ServiceAction) {
        match action {
            ServiceAction::SendToRank { connection, message, .. } => {
                if let Some(process) = self.connections.get(&connection).copied() {
                    self.send(|| Event::Clear { process, connection, clear: message });
                }
            }
            ServiceAction::CloseConnection { connection } => {
                if let Some(process) = self.connections.remove(&connection) {
                    let it = &self.processes[process];
                    if it.control == Some(connection) || it.liveness == Some(connection) {
                        self.disconnect(process);
                    }
                }
            }
            ServiceAction::ClearDone { request, complete } => {
                self.cleared += u64::from(complete);
                // The request was named after its sender, see `receive`.
                let (process, clear) = ((request.0 >> 32) as usize, request.0 & 0xffff_ffff);
                if process > 0 {
                    let process = process - 1;
                    let mut frame = Vec::new();
                    let reply = Reply::Clear(kvfabric_core::wire::ClearReply { complete });
                    encode_reply(&reply, &mut frame).unwrap();
                    let link = self.processes[process].link;
                    let tag = RequestTag::Clear(ClearId(clear));
                    self.send(|| Event::ToProcess { process, link, tag, frame: frame.clone() });
                }
            }
            ServiceAction::RankChanged { member, change } => {
                if change == kvfabric_core::directory::RankChange::Closed {
                    self.closed.insert(member.incarnation);
                }
            }
        }
    }

    fn act_for_process(&mut self, process: usize, action: AnnouncerAction) {
        match action {
            AnnouncerAction::Send { link, tag, request } => {
                let Some(connection) = self.processes[process].control else { return };
                if link == self.processes[process].link {
                    let mut frame = Vec::new();
                    encode_request(&request, &mut frame).unwrap();
                    let tag = Some(tag);
                    self.send(|| Event::ToDirectory { process, connection, link, tag, frame: frame.clone() });
                }
            }
            AnnouncerAction::OpenLiveness { link, attach } => self.open_liveness(process, link, attach),
            AnnouncerAction::NeedSnapshot => {
                let it = &mut self.processes[process];
                let all: Vec<Announcement> = it
                    .held
                    .iter()
                    .map(|(key, held)| announcement(true, it.ns[ns_of(*key)], *key, *held))
                    .collect();
                it.announcer.handle_snapshot(self.now, all.into_iter());
            }
            AnnouncerAction::EpochChanged { ns, epoch } => self.clear_owner(process, ns, epoch),
            AnnouncerAction::FlushDone { flush, ok } => self.flush_done(process, flush, ok),
            AnnouncerAction::ClearDone { .. } => {}
            AnnouncerAction::JoinRefused { error } => {
                if !error.is_retryable() {
                    self.processes[process].is_over = true;
                    self.processes[process].reconnect_at = None;
                }
            }
        }
    }

    /// What was acknowledged is visible, as long as it is still held and its rank connected.
    fn flush_done(&mut self, process: usize, flush: FlushId, ok: bool) {
        let Some(held) = self.processes[process].flushes.remove(&flush) else { return };
        if !ok {
            return;
        }
        self.flushed += 1;
        for (key, was) in held {
            let (_, epoch) = self.number(ns_of(key));
            let it = &self.processes[process];
            if it.held.get(&key) == Some(&was) && was.ns_epoch == epoch && it.control.is_some() {
                let incarnation = it.incarnation;
                let silent = self.service.stats().ranks_hidden > 0;
                let replicas = self.locate(EngineKey::ANONYMOUS, key);
                let found = replicas.iter().any(|replica| replica.incarnation == incarnation);
                assert!(found || silent, "key {key} was flushed and is not found");
            }
        }
    }

    fn open_liveness(&mut self, process: usize, link: LinkId, attach: Attach) {
        if self.processes[process].link != link || self.processes[process].control.is_none() {
            return;
        }
        let connection = ConnectionId(self.name());
        if let Some(before) = self.processes[process].liveness.replace(connection) {
            self.connections.remove(&before);
        }
        self.connections.insert(connection, process);
        // A TCP connection loses nothing.
        let mut frame = Vec::new();
        encode_request(&Request::Attach(attach), &mut frame).unwrap();
        self.schedule(Event::ToDirectory { process, connection, link, tag: None, frame });
        self.schedule(Event::Ping { process });
    }

    /// Lets time pass until `until`, and everything happen that is due.
    pub fn run_until(&mut self, until: Time) {
        loop {
            let event = self.events.keys().next().map(|(at, _)| *at);
            let service = self.service.poll_timeout();
            let ranks = self.processes.iter().filter_map(|it| it.announcer.poll_timeout()).min();
            let reconnect = self.processes.iter().filter_map(|it| it.reconnect_at).min();
            let due = [event, service, ranks, reconnect].into_iter().flatten().min();
            let Some(due) = due.filter(|due| *due <= until) else { break };
            self.now = self.now.max(due);
            if event == Some(due) {
                if let Some((_, event)) = self.events.pop_first() {
                    self.receive(event);
                }
            } else if service == Some(due) {
                self.service.handle_timeout(self.now);
            } else {
                self.wake_processes();
            }
            self.drain();
        }
        self.now = self.now.max(until);
    }

    fn wake_processes(&mut self) {
        let now = self.now;
        for process in 0..self.processes.len() {
            let it = &mut self.processes[process];
            if it.announcer.poll_timeout().is_some_and(|due| due <= now) {
                it.announcer.handle_timeout(now);
            }
            if it.reconnect_at.is_some_and(|due| due <= now) {
                it.reconnect_at = None;
                let connection = ConnectionId(self.name());
                self.connections.insert(connection, process);
                let jitter = Duration::from_micros(self.random.below(400_000));
                let it = &mut self.processes[process];
                it.control = Some(connection);
                it.link = it.announcer.handle_connected(now, jitter);
            }
        }
    }

    fn receive(&mut self, event: Event) {
        match event {
            Event::ToDirectory { process, connection, link, tag, frame } => {
                let request = decode_request(&frame).unwrap();
                let clear = match tag {
                    Some(RequestTag::Clear(ClearId(clear))) => (process as u64 + 1) << 32 | clear,
                    _ => 0,
                };
                let token = self.random.bits();
                // A frame of a closed connection may still come: the directory must see through it.
                let reply =
                    self.service.handle_request(self.now, connection, token, ClearRequest(clear), &request);
                if !self.connections.contains_key(&connection) {
                    // What the directory now believes of this connection ends as the connection did.
                    self.service.handle_connection_closed(self.now, connection);
                    return;
                }
                if let (Some(reply), Some(tag)) = (reply, tag) {
                    let mut frame = Vec::new();
                    encode_reply(&reply, &mut frame).unwrap();
                    self.send(|| Event::ToProcess { process, link, tag, frame: frame.clone() });
                }
            }
            Event::ToProcess { process, link, tag, frame } => {
                let reply = decode_reply(&frame).unwrap();
                self.processes[process].announcer.handle_reply(self.now, link, tag, &reply);
            }
            Event::Clear { process, connection, clear } => {
                if self.processes[process].control != Some(connection) {
                    return;
                }
                let todo = self.processes[process].announcer.handle_clear_rank(self.now, &clear);
                if let Some((ns, epoch)) = todo {
                    self.clear_owner(process, ns, epoch);
                }
                if let Some(member) = self.processes[process].announcer.member() {
                    let ack = ClearAck { clear: clear.clear, done: true };
                    self.send(|| Event::ClearAck { rank: member.rank, connection, ack });
                }
            }
            Event::ClearAck { rank, connection, ack } => {
                if self.connections.contains_key(&connection) {
                    self.service.handle_clear_ack(rank, ack);
                }
            }
            Event::Ping { process } => {
                if let Some(connection) = self.processes[process].liveness {
                    if !self.random.percent(self.network.lost_percent) {
                        let load = u8::try_from(self.random.below(256)).unwrap();
                        // Unknown while ATTACH is under way; the next one will be known.
                        let _ = self.service.handle_ping(self.now, connection, Ping { load });
                    }
                    let at = (self.now.after(Duration::from_millis(400)), self.name());
                    self.events.insert(at, Event::Ping { process });
                }
            }
        }
    }
}

fn announcement(present: bool, ns: NsId, key: u64, held: Held) -> Announcement {
    Announcement {
        present,
        fingerprint: fingerprint(key),
        ns,
        ns_epoch: held.ns_epoch,
        slot: held.slot,
        generation: held.generation,
    }
}
