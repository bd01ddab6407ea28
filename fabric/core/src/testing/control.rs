//! The control plane: the directory's process, the connections of the lives to it, and what the network does to their
//! messages. Messages travel as the frames that production sends.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};

use super::world::{Event, LifeId, World};
use crate::directory::{
    AnnouncerAction, AnnouncerConfig, ClearRequest, ConnectionId, FlushId, LinkId, RequestTag, Service,
    ServiceAction, ServiceConfig, TableConfig,
};
use crate::limits::{LOCATE_TIMEOUT, REANNOUNCE_JITTER};
use crate::load::{DirectoryUnavailable, LocateId, ReportId};
use crate::wire::{
    decode_reply, decode_request, encode_reply, encode_request, Advertised, ClearAck, EngineKey, Locate,
    MissRecord, MissReports, Name, NsName, NsNumber, Ping, Query, Records, Reply, Request,
};
use crate::{Fingerprint, Incarnation, NsEpoch, NsId, Time};

/// The one namespace of a world.
pub const NAMESPACE: NsName = NsName([7; 16]);
/// A life that has no connection to the directory tries again after this long.
const RECONNECT: Duration = Duration::from_millis(100);
/// Signs of life on the liveness connection.
const PING: Duration = Duration::from_millis(200);
/// A connection over a cut network breaks after this long.
const IDLE_TIMEOUT: Duration = Duration::from_millis(1_500);
/// A rank that was not heard for this long is hidden.
const PEER_TIMEOUT: Duration = Duration::from_secs(1);
const CLUSTER: &str = "world";

/// Where the reply to a request goes.
#[derive(Clone, Debug)]
pub(super) enum Waiter {
    Announcer(LinkId, RequestTag),
    Locate(LocateId),
    Misses(Vec<ReportId>),
    /// The reply to a message on the liveness connection says nothing that is needed.
    Nobody,
}

#[derive(Debug)]
pub(super) enum ControlEvent {
    /// A life tries to connect to the directory.
    Connect(LifeId),
    /// A life gives a sign of life.
    Ping(LifeId, ConnectionId),
    /// A request arrives at the directory.
    Request(LifeId, ConnectionId, Waiter, Vec<u8>),
    /// A reply arrives at a life.
    Reply(LifeId, ConnectionId, Waiter, Vec<u8>),
    /// A request of the directory arrives at a life.
    ClearRank(LifeId, ConnectionId, Vec<u8>),
    /// Its answer arrives at the directory.
    ClearAck(LifeId, ConnectionId, ClearAck),
    /// The directory notices that a connection is gone.
    Closed(ConnectionId),
    /// A life notices that its connection is gone.
    Disconnected(LifeId, ConnectionId),
    /// A connection that carried nothing for long is given up by both ends.
    IdleTimeout(LifeId, ConnectionId),
}

/// The connections of one life.
#[derive(Clone, Copy, Debug)]
struct Connections {
    control: ConnectionId,
    liveness: Option<ConnectionId>,
}

/// State of the control plane.
#[derive(Debug, Default)]
pub(super) struct Control {
    /// The directory, while it runs. Its life, so that messages to a former one are not delivered.
    service: Option<Service>,
    nodes: BTreeMap<LifeId, usize>,
    connections: BTreeMap<LifeId, Connections>,
    owners: BTreeMap<ConnectionId, LifeId>,
    connections_named: u64,
    clears_named: u64,
    clears: BTreeMap<ClearRequest, Option<bool>>,
    flushes: BTreeMap<FlushId, Option<bool>>,
    cut: BTreeSet<usize>,
    reports_lost: bool,
    miswired: BTreeMap<Fingerprint, Fingerprint>,
}

impl Control {
    pub(super) fn node_of(&self, life: LifeId) -> Option<usize> {
        self.nodes.get(&life).copied()
    }
}

/// What a node's process is called.
pub(super) fn announcer_config(node: usize, incarnation: Incarnation) -> AnnouncerConfig {
    let name = |text: String| Name::new(text).unwrap_or_else(|| unreachable!("short names are names"));
    AnnouncerConfig {
        cluster: name(CLUSTER.to_owned()),
        name: name(format!("rank-{node}")),
        engine: name(engine(node)),
        incarnation,
        advertised: Advertised::default(),
    }
}

fn engine(node: usize) -> String {
    format!("engine-{node}")
}

impl World {
    // ---- what a test does ----

    /// Starts the directory's process, empty. A running one ends first.
    pub fn start_directory(&mut self) {
        self.crash_directory();
        let session = self.random.bits();
        let epoch_base = NsEpoch(u32::try_from(self.now.as_micros() / 1_000_000).unwrap_or(u32::MAX));
        let table = TableConfig { seed: [self.random.bits(), self.random.bits()], bytes_max: 64 << 20 };
        self.control.service = Some(Service::new(ServiceConfig {
            cluster: CLUSTER.into(),
            session,
            epoch_base,
            table,
            peer_timeout: PEER_TIMEOUT,
        }));
    }

    /// Ends the directory's process; all connections to it break.
    pub fn crash_directory(&mut self) {
        if self.control.service.take().is_none() {
            return;
        }
        for (life, connections) in self.control.connections.clone() {
            let delay = self.random.delay(Duration::ZERO, self.options.delay_max);
            let event = ControlEvent::Disconnected(life, connections.control);
            self.events.push(self.now.after(delay), Event::Control(event));
        }
        for outcome in self.control.clears.values_mut() {
            outcome.get_or_insert(false);
        }
    }

    /// No control message passes between a node and the directory until healed.
    pub fn cut_directory(&mut self, node: usize) {
        self.control.cut.insert(node);
        for (life, connections) in self.control.connections.clone() {
            if self.control.node_of(life) == Some(node) {
                let event = ControlEvent::IdleTimeout(life, connections.control);
                self.events.push(self.now.after(IDLE_TIMEOUT), Event::Control(event));
            }
        }
    }

    /// Undoes [`World::cut_directory`].
    pub fn heal_directory(&mut self, node: usize) {
        self.control.cut.remove(&node);
    }

    /// Loses every miss report, or none.
    pub fn lose_reports(&mut self, lost: bool) {
        self.control.reports_lost = lost;
    }

    /// Makes the directory answer a LOCATE of `asked` with what it knows of `answered`.
    pub fn miswire(&mut self, asked: u64, answered: u64) {
        self.control.miswired.insert(Self::key(asked).fingerprint(), Self::key(answered).fingerprint());
    }

    /// Undoes every [`World::miswire`].
    pub fn rewire(&mut self) {
        self.control.miswired.clear();
    }

    /// Clears the namespace everywhere. Watch [`World::cleared`] for the answer.
    pub fn clear(&mut self) -> ClearRequest {
        self.control.clears_named += 1;
        let request = ClearRequest(self.control.clears_named);
        let now = self.now;
        let clear = crate::wire::Clear { ns: NAMESPACE };
        let accepted = self
            .control
            .service
            .as_mut()
            .is_some_and(|service| service.handle_clear(now, request, clear).is_ok());
        self.control.clears.insert(request, (!accepted).then_some(false));
        self.drain_directory();
        request
    }

    /// How a clear ended.
    #[must_use]
    pub fn cleared(&self, request: ClearRequest) -> Option<bool> {
        self.control.clears.get(&request).copied().flatten()
    }

    /// Waits until the directory has acknowledged all that a node stored. Returns whether it has within `bound`.
    pub fn flush(&mut self, node: usize, bound: Duration) -> bool {
        self.control.clears_named += 1;
        let flush = FlushId(self.control.clears_named);
        self.control.flushes.insert(flush, None);
        let deadline = self.now.after(bound);
        self.with_rank(node, |rank, now| rank.handle_flush(now, flush, deadline));
        let over = |world: &Self| world.control.flushes.get(&flush).copied().flatten().is_some();
        self.run_until(2 * bound, over) && self.control.flushes.get(&flush) == Some(&Some(true))
    }

    /// The directory, while it runs.
    #[must_use]
    pub fn directory(&self) -> Option<&Service> {
        self.control.service.as_ref()
    }

    // ---- lives ----

    pub(super) fn life_started(&mut self, id: LifeId) {
        let now = self.now;
        let Some(life) = self.lives.get_mut(&id) else { return };
        self.control.nodes.insert(id, life.node);
        let opened = life.rank.open_namespace(now, NAMESPACE);
        assert!(opened.is_ok(), "one namespace fits");
        self.events.push(now, Event::Control(ControlEvent::Connect(id)));
    }

    pub(super) fn life_ended(&mut self, id: LifeId) {
        let Some(connections) = self.control.connections.remove(&id) else { return };
        // The kernel closes a dead process's connections at once, unless the network is cut.
        if self.control.node_of(id).is_some_and(|node| self.control.cut.contains(&node)) {
            return;
        }
        for connection in [Some(connections.control), connections.liveness].into_iter().flatten() {
            let delay = self.random.delay(self.options.delay_min, self.options.delay_max);
            self.events.push(self.now.after(delay), Event::Control(ControlEvent::Closed(connection)));
        }
    }

    pub(super) fn namespace_of(&self, id: LifeId) -> Option<(NsId, NsEpoch)> {
        self.lives.get(&id)?.rank.namespace(&NAMESPACE)
    }

    fn is_cut(&self, id: LifeId) -> bool {
        self.control.node_of(id).is_none_or(|node| self.control.cut.contains(&node))
    }

    fn try_connect(&mut self, id: LifeId) {
        let now = self.now;
        if !self.lives.contains_key(&id) || self.control.connections.contains_key(&id) {
            return;
        }
        if self.control.service.is_none() || self.is_cut(id) {
            self.events.push(now.after(RECONNECT), Event::Control(ControlEvent::Connect(id)));
            return;
        }
        let control = self.name_connection(id);
        self.control.connections.insert(id, Connections { control, liveness: None });
        let jitter = self.random.delay(Duration::ZERO, REANNOUNCE_JITTER);
        if let Some(life) = self.lives.get_mut(&id) {
            life.rank.handle_directory_connected(now, jitter);
        }
        self.drain(id);
    }

    /// Both ends of a life's connections learn that they are gone.
    fn break_connection(&mut self, id: LifeId, connection: ConnectionId) {
        let Some(known) = self.control.connections.get(&id).copied() else { return };
        if known.control != connection {
            return;
        }
        let mut events = vec![ControlEvent::Disconnected(id, connection), ControlEvent::Closed(connection)];
        events.extend(known.liveness.map(ControlEvent::Closed));
        for event in events {
            let delay = self.random.delay(self.options.delay_min, self.options.delay_max);
            self.events.push(self.now.after(delay), Event::Control(event));
        }
    }

    fn name_connection(&mut self, id: LifeId) -> ConnectionId {
        self.control.connections_named += 1;
        let connection = ConnectionId(self.control.connections_named);
        self.control.owners.insert(connection, id);
        connection
    }

    /// A life's connection is gone: it connects anew.
    fn disconnected(&mut self, id: LifeId, connection: ConnectionId) {
        if self.control.connections.get(&id).is_none_or(|known| known.control != connection) {
            return;
        }
        self.control.connections.remove(&id);
        let now = self.now;
        if let Some(life) = self.lives.get_mut(&id) {
            life.rank.handle_directory_disconnected(now);
        }
        self.drain(id);
        self.events.push(now.after(RECONNECT), Event::Control(ControlEvent::Connect(id)));
    }

    // ---- messages ----

    /// Sends over the control connection; the network may lose, double, delay or reorder.
    fn send(&mut self, id: LifeId, waiter: Waiter, request: &Request<'_>) {
        if let Some(connection) = self.control.connections.get(&id).map(|known| known.control) {
            self.send_over(id, connection, waiter, request);
        }
    }

    fn send_over(&mut self, id: LifeId, connection: ConnectionId, waiter: Waiter, request: &Request<'_>) {
        let mut frame = Vec::new();
        let encoded = encode_request(request, &mut frame);
        assert!(encoded.is_ok(), "a request that does not fit a frame: {}", request.name());
        self.deliver(id, ControlEvent::Request(id, connection, waiter, frame));
    }

    /// A request or reply that is lost stands for one that came too late. What the directory says by itself it says
    /// once over a reliable stream: losing it breaks the connection.
    fn deliver(&mut self, id: LifeId, event: ControlEvent) {
        if self.is_cut(id) {
            return;
        }
        if self.random.one_in(self.options.loss_odds) {
            if let ControlEvent::ClearRank(_, connection, _) | ControlEvent::ClearAck(_, connection, _) =
                event
            {
                self.break_connection(id, connection);
            }
            return;
        }
        let twice = match &event {
            ControlEvent::Request(life, connection, waiter, frame)
                if self.random.one_in(self.options.duplicate_odds) =>
            {
                Some(ControlEvent::Request(*life, *connection, waiter.clone(), frame.clone()))
            }
            ControlEvent::Reply(life, connection, waiter, frame)
                if self.random.one_in(self.options.duplicate_odds) =>
            {
                Some(ControlEvent::Reply(*life, *connection, waiter.clone(), frame.clone()))
            }
            _ => None,
        };
        for event in [Some(event), twice].into_iter().flatten() {
            let delay = self.random.delay(self.options.delay_min, self.options.delay_max);
            self.events.push(self.now.after(delay), Event::Control(event));
        }
    }

    pub(super) fn directory_action(&mut self, id: LifeId, action: AnnouncerAction) {
        match action {
            AnnouncerAction::Send { link, tag, request } => {
                self.send(id, Waiter::Announcer(link, tag), &request);
            }
            AnnouncerAction::OpenLiveness { attach, .. } => {
                let connection = self.name_connection(id);
                if let Some(known) = self.control.connections.get_mut(&id) {
                    known.liveness = Some(connection);
                    self.send_over(id, connection, Waiter::Nobody, &Request::Attach(attach));
                    self.events
                        .push(self.now.after(PING), Event::Control(ControlEvent::Ping(id, connection)));
                }
            }
            AnnouncerAction::FlushDone { flush, ok } => {
                self.control.flushes.insert(flush, Some(ok));
            }
            AnnouncerAction::ClearDone { .. }
            | AnnouncerAction::JoinRefused { .. }
            | AnnouncerAction::NeedSnapshot
            | AnnouncerAction::EpochChanged { .. } => {}
        }
    }

    pub(super) fn locate(&mut self, id: LifeId, locate: LocateId, ns: NsNumber, keys: &[Fingerprint]) {
        let Some(node) = self.control.node_of(id) else { return };
        let mut records = Records::with_capacity(keys.len());
        for key in keys {
            records.push(self.control.miswired.get(key).copied().unwrap_or(*key));
        }
        let query = Query {
            ns,
            asker: EngineKey::of(&engine(node)),
            deadline_us: u32::try_from(LOCATE_TIMEOUT.as_micros()).unwrap_or(u32::MAX),
            keys: records,
        };
        self.send(id, Waiter::Locate(locate), &Request::Locate(Locate(query)));
    }

    pub(super) fn report_misses(&mut self, id: LifeId, reports: Vec<ReportId>, records: &[MissRecord]) {
        let Some(node) = self.control.node_of(id) else { return };
        if self.control.reports_lost {
            return;
        }
        let mut body = Records::with_capacity(records.len());
        for record in records {
            body.push(*record);
        }
        let request = MissReports { asker: EngineKey::of(&engine(node)), reports: body };
        self.send(id, Waiter::Misses(reports), &Request::MissReports(request));
    }

    pub(super) fn acknowledge_clear(&mut self, id: LifeId, ack: ClearAck) {
        if let Some(connection) = self.control.connections.get(&id).map(|known| known.control) {
            self.deliver(id, ControlEvent::ClearAck(id, connection, ack));
        }
    }

    // ---- events ----

    pub(super) fn control_timeout(&self) -> Option<Time> {
        self.control.service.as_ref().and_then(Service::poll_timeout)
    }

    pub(super) fn fire_control_timers(&mut self) {
        let now = self.now;
        if let Some(service) = &mut self.control.service {
            if service.poll_timeout().is_some_and(|at| at <= now) {
                service.handle_timeout(now);
            }
        }
        self.drain_directory();
    }

    pub(super) fn handle_control(&mut self, event: ControlEvent) {
        match event {
            ControlEvent::Connect(id) => self.try_connect(id),
            ControlEvent::Disconnected(id, connection) => self.disconnected(id, connection),
            ControlEvent::IdleTimeout(id, connection) => {
                if self.is_cut(id) {
                    self.break_connection(id, connection);
                }
            }
            ControlEvent::Ping(id, connection) => self.ping(id, connection),
            ControlEvent::Request(id, connection, waiter, frame) => {
                self.request(id, connection, waiter, &frame)
            }
            ControlEvent::Reply(id, connection, waiter, frame) => self.reply(id, connection, waiter, &frame),
            ControlEvent::ClearRank(id, connection, frame) => {
                let current =
                    self.control.connections.get(&id).is_some_and(|known| known.control == connection);
                let now = self.now;
                if let (true, Ok(Request::ClearRank(clear))) = (current, decode_request(&frame)) {
                    if let Some(life) = self.lives.get_mut(&id) {
                        life.rank.handle_clear_rank(now, &clear);
                    }
                    self.drain(id);
                }
            }
            ControlEvent::ClearAck(id, connection, ack) => {
                let member = self.lives.get(&id).and_then(|life| life.rank.member());
                let current =
                    self.control.connections.get(&id).is_some_and(|known| known.control == connection);
                if let (Some(member), Some(service), true) = (member, &mut self.control.service, current) {
                    service.handle_clear_ack(member.rank, ack);
                }
                self.drain_directory();
            }
            ControlEvent::Closed(connection) => {
                let now = self.now;
                if let Some(service) = &mut self.control.service {
                    service.handle_connection_closed(now, connection);
                }
                self.drain_directory();
            }
        }
    }

    fn ping(&mut self, id: LifeId, connection: ConnectionId) {
        if self.control.connections.get(&id).is_some_and(|known| known.liveness == Some(connection)) {
            self.send_over(id, connection, Waiter::Nobody, &Request::Ping(Ping { load: 0 }));
            self.events.push(self.now.after(PING), Event::Control(ControlEvent::Ping(id, connection)));
        }
    }

    fn request(&mut self, id: LifeId, connection: ConnectionId, waiter: Waiter, frame: &[u8]) {
        let now = self.now;
        let token = self.random.bits();
        let Some(service) = &mut self.control.service else { return };
        self.control.clears_named += 1;
        let clear = ClearRequest(self.control.clears_named);
        let reply = match decode_request(frame) {
            Ok(request) => service.handle_request(now, connection, token, clear, &request),
            Err(error) => Some(Reply::Refused(error.refusal())),
        };
        self.drain_directory();
        let Some(reply) = reply else { return };
        let mut frame = Vec::new();
        let encoded = encode_reply(&reply, &mut frame);
        assert!(encoded.is_ok(), "a reply that does not fit a frame: {}", reply.name());
        self.deliver(id, ControlEvent::Reply(id, connection, waiter, frame));
    }

    fn reply(&mut self, id: LifeId, connection: ConnectionId, waiter: Waiter, frame: &[u8]) {
        let now = self.now;
        // What a connection still carries when it is replaced does not arrive.
        let current = self.control.connections.get(&id).is_some_and(|known| known.control == connection);
        let Some(life) = self.lives.get_mut(&id).filter(|_| current) else { return };
        let Ok(reply) = decode_reply(frame) else { return };
        match waiter {
            Waiter::Announcer(link, tag) => life.rank.handle_directory_reply(now, link, tag, &reply),
            Waiter::Locate(locate) => {
                let answer = match reply {
                    Reply::Locate(answer) => Ok(answer.iter().collect()),
                    _ => Err(DirectoryUnavailable),
                };
                life.rank.handle_located(now, locate, answer);
            }
            Waiter::Misses(reports) => {
                if matches!(reply, Reply::Done(_)) {
                    life.rank.handle_misses_reported(now, &reports);
                }
            }
            Waiter::Nobody => {}
        }
        self.drain(id);
    }

    /// Carries out what the directory asks for.
    fn drain_directory(&mut self) {
        while let Some(action) = self.control.service.as_mut().and_then(Service::poll_action) {
            match action {
                ServiceAction::SendToRank { connection, message, .. } => {
                    let Some(id) = self.control.owners.get(&connection).copied() else { continue };
                    let mut frame = Vec::new();
                    let encoded = encode_request(&Request::ClearRank(message), &mut frame);
                    assert!(encoded.is_ok(), "a CLEAR that does not fit a frame");
                    self.deliver(id, ControlEvent::ClearRank(id, connection, frame));
                }
                ServiceAction::CloseConnection { connection } => {
                    let Some(id) = self.control.owners.get(&connection).copied() else { continue };
                    let Some(known) = self.control.connections.get(&id) else { continue };
                    if known.control == connection || known.liveness == Some(connection) {
                        let event = ControlEvent::Disconnected(id, known.control);
                        self.events.push(self.now, Event::Control(event));
                    }
                }
                ServiceAction::ClearDone { request, complete } => {
                    self.control.clears.insert(request, Some(complete));
                }
                ServiceAction::RankChanged { .. } => {}
            }
        }
    }
}
