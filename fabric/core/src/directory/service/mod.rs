//! The directory's state machine (design 1.6, 1.9).
//!
//! Events and requests come in through `handle_*` with the current time, answers that need nobody else are returned at
//! once, everything else comes out of [`Service::poll_action`]. Questions take `&self`, so that many threads may ask at
//! the same time. The driver calls [`Service::handle_timeout`] at [`Service::poll_timeout`].
//!
//! What makes a replica visible: its rank is connected and answers, it was announced since the rank last joined, its
//! namespace was not cleared since, and the engine that asks has not failed to reach the rank lately.

mod hides;
mod members;
mod namespaces;
mod numbers;
mod publish;
mod query;

#[cfg(test)]
mod tests;

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

use self::hides::Hides;
use self::members::Rank;
use self::namespaces::Namespaces;
use self::numbers::Numbers;
use super::limits::{CLEARS_MAX, CLOSED_INCARNATIONS_MAX, LIVENESS_CHECKS, SWEEP_INTERVAL, SWEEP_STEP};
use super::table::{Table, TableConfig};
use crate::limits::CLEAR_TIMEOUT;
use crate::wire::{
    Clear, ClearAck, ClearRank, Done, Member, NsNumber, NsReply, OpenNs, Refusal, Reply, Request, Stats,
};
use crate::{Incarnation, NsEpoch, RankId, Time};

/// A connection to the directory, named by the driver; never used again for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub u64);

/// A CLEAR request, named by the driver; unique while it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClearRequest(pub u64);

/// How to run a directory.
#[derive(Clone, Debug)]
pub struct ServiceConfig {
    /// Cluster that is served.
    pub cluster: Box<str>,
    /// Random number drawn at start. Ranks and namespaces are numbered from it, so that numbers of an earlier life are
    /// not taken for numbers of this one.
    pub session: u64,
    /// Seconds since 1970 at start. A CLEAR in this life outranks every CLEAR of an earlier one, even if no rank has
    /// told yet which epochs there were. No clock is part of any safety argument: a wrong one can only make an
    /// earlier CLEAR count as done.
    pub epoch_base: NsEpoch,
    /// Table.
    pub table: TableConfig,
    /// A rank that was not heard for this long is hidden until it is heard again.
    pub peer_timeout: Duration,
}

/// What the driver must do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServiceAction {
    /// Send a request to a rank over its control connection; its answer goes to [`Service::handle_clear_ack`].
    SendToRank {
        /// Rank.
        rank: RankId,
        /// Its control connection.
        connection: ConnectionId,
        /// The request.
        message: ClearRank,
    },
    /// Close a connection: it was replaced, or its rank was fenced.
    CloseConnection {
        /// Connection.
        connection: ConnectionId,
    },
    /// Answer a CLEAR request.
    ClearDone {
        /// Request.
        request: ClearRequest,
        /// Whether every live rank has cleared or was fenced.
        complete: bool,
    },
    /// For the log: a rank changed.
    RankChanged {
        /// Rank.
        member: Member,
        /// How.
        change: RankChange,
    },
}

/// How a rank changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankChange {
    /// Admitted, for the first time or again.
    Joined,
    /// Its liveness connection is open.
    Attached,
    /// Not heard in time: hidden until it is heard.
    Silent,
    /// Heard again.
    Heard,
    /// Its connection is gone: hidden until it joins again and announces.
    Lost,
    /// Its incarnation is closed for ever.
    Closed,
}

#[derive(Debug)]
struct PendingClear {
    request: ClearRequest,
    message: ClearRank,
    waiting: BTreeSet<RankId>,
    deadline: Time,
}

/// One announcement of one rank.
#[derive(Clone, Copy, Debug)]
struct Source {
    member: Member,
    load: u8,
    /// False if what was announced is not to be believed until it is announced again.
    shown: bool,
}

/// The directory.
#[derive(Debug)]
pub struct Service {
    config: ServiceConfig,
    table: Table,
    ranks: BTreeMap<RankId, Rank>,
    by_name: BTreeMap<Box<str>, RankId>,
    connections: BTreeMap<ConnectionId, RankId>,
    closed: BTreeSet<Incarnation>,
    closed_order: VecDeque<Incarnation>,
    ranks_named: u32,
    namespaces: Namespaces,
    source_numbers: Numbers,
    sources: Vec<Source>,
    /// For each source, whether its entries are visible (1) or not (0): all that a LOOKUP needs to know of a rank.
    visible: Vec<u8>,
    hides: Hides,
    clears: BTreeMap<u64, PendingClear>,
    clears_named: u64,
    actions: VecDeque<ServiceAction>,
    next_liveness_check: Time,
    sweeping: bool,
    next_sweep: Time,
    stats: Stats,
}

impl Service {
    /// An empty directory: ranks join and announce.
    #[must_use]
    #[allow(clippy::cast_possible_truncation)] // Both halves of a random number are used.
    pub fn new(config: ServiceConfig) -> Self {
        Self {
            table: Table::new(config.table),
            ranks: BTreeMap::new(),
            by_name: BTreeMap::new(),
            connections: BTreeMap::new(),
            closed: BTreeSet::new(),
            closed_order: VecDeque::new(),
            ranks_named: config.session as u32,
            namespaces: Namespaces::new((config.session >> 32) as u32, config.epoch_base),
            source_numbers: Numbers::default(),
            sources: Vec::new(),
            visible: Vec::new(),
            hides: Hides::default(),
            clears: BTreeMap::new(),
            clears_named: 0,
            actions: VecDeque::new(),
            next_liveness_check: Time::ZERO,
            sweeping: false,
            next_sweep: Time::ZERO,
            stats: Stats { session: config.session, ..Stats::default() },
            config,
        }
    }

    /// The next thing to do.
    pub fn poll_action(&mut self) -> Option<ServiceAction> {
        self.actions.pop_front()
    }

    /// When [`Service::handle_timeout`] has something to do; `None` for never.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let liveness = (!self.ranks.is_empty()).then_some(self.next_liveness_check);
        let sweep = self.needs_sweep().then_some(self.next_sweep);
        let clears = self.clears.values().map(|clear| clear.deadline).min();
        [liveness, sweep, clears].into_iter().flatten().min()
    }

    /// Looks at what time brings: silent ranks, late clears, the next step of the sweep.
    pub fn handle_timeout(&mut self, now: Time) {
        if now >= self.next_liveness_check {
            self.check_liveness(now);
            self.next_liveness_check = now.after(self.config.peer_timeout / LIVENESS_CHECKS);
        }
        let late: Vec<u64> =
            self.clears.iter().filter(|(_, clear)| now >= clear.deadline).map(|(id, _)| *id).collect();
        for clear in late {
            self.finish_clear(clear, false);
        }
        if self.needs_sweep() && now >= self.next_sweep {
            self.sweep(SWEEP_STEP);
            self.next_sweep = now.after(SWEEP_INTERVAL);
        }
    }

    fn needs_sweep(&self) -> bool {
        self.source_numbers.needs_sweep() || self.namespaces.instances.needs_sweep()
    }

    /// Removes entries of retired sources and cleared namespaces among the next `limit` entries.
    fn sweep(&mut self, limit: usize) {
        if !self.needs_sweep() {
            return;
        }
        if !self.sweeping {
            self.sweeping = true;
            self.source_numbers.begin_sweep();
            self.namespaces.instances.begin_sweep();
        }
        let (sources, instances) = (&self.source_numbers, &self.namespaces.instances);
        let (swept, done) =
            self.table.sweep(limit, |place| sources.is_dead(place.source) || instances.is_dead(place.ns));
        self.stats.swept += swept as u64;
        if done {
            self.sweeping = false;
            self.source_numbers.end_sweep();
            self.namespaces.instances.end_sweep();
        }
    }

    /// Sweeps to the end twice: whatever was retired before is free afterwards. Only for when numbers run out, which
    /// takes millions of announcements or clears within one sweep.
    fn sweep_all(&mut self) {
        for _ in 0..2 {
            self.sweep(usize::MAX);
        }
    }

    /// Carries out any request of a rank, an engine or a user. `token` is a fresh random number, used by JOIN;
    /// `clear` names the request if it is a CLEAR. `None`: the answer comes as [`ServiceAction::ClearDone`].
    pub fn handle_request(
        &mut self,
        now: Time,
        connection: ConnectionId,
        token: u64,
        clear: ClearRequest,
        request: &Request<'_>,
    ) -> Option<Reply<'static>> {
        let done = |result: Result<(), Refusal>| match result {
            Ok(()) => Reply::Done(Done),
            Err(refusal) => Reply::Refused(refusal),
        };
        Some(match request {
            Request::Join(join) => Reply::Joined(self.handle_join(now, connection, token, join)),
            Request::Leave(leave) => done(self.handle_leave(now, connection, leave)),
            Request::Attach(attach) => done(self.handle_attach(now, connection, attach)),
            Request::Ping(ping) => done(self.handle_ping(now, connection, *ping)),
            Request::OpenNs(open) => Reply::Ns(self.handle_open_ns(connection, open)),
            Request::Publish(publish) => match self.handle_publish(connection, publish) {
                Ok(reply) => Reply::Publish(reply),
                Err(refusal) => Reply::Refused(refusal),
            },
            Request::MissReports(reports) => {
                self.handle_miss_reports(now, reports);
                Reply::Done(Done)
            }
            Request::Clear(body) => match self.handle_clear(now, clear, *body) {
                Ok(()) => return None,
                Err(refusal) => Reply::Refused(refusal),
            },
            other => self.answer(now, other),
        })
    }

    /// Numbers a namespace. A rank's knowledge of its epoch counts; that of others does not.
    pub fn handle_open_ns(&mut self, connection: ConnectionId, open: &OpenNs) -> NsReply {
        let mut number = self.namespaces.open(open.name);
        if number.is_none() && self.namespaces.len() < crate::wire::NAMESPACES_MAX {
            self.sweep_all();
            number = self.namespaces.open(open.name);
        }
        let Some(number) = number else { return NsReply::Full };
        if let Some(teller) = self.connections.get(&connection).copied() {
            self.raise_epoch(number, open.known_epoch, Some(teller));
        }
        let epoch = self.namespaces.get(number).map_or(NsEpoch(0), |namespace| namespace.epoch);
        NsReply::Opened { number, epoch }
    }

    /// Takes over an epoch of an earlier life of the directory, and tells the other ranks.
    fn raise_epoch(&mut self, number: NsNumber, epoch: NsEpoch, teller: Option<RankId>) {
        let Some(before) = self.namespaces.get(number).copied() else { return };
        if epoch <= before.epoch || !self.raise(number, epoch) {
            return;
        }
        self.clears_named += 1;
        let message = ClearRank { clear: self.clears_named, ns: before.name, epoch };
        let others: Vec<RankId> = self.ranks.keys().filter(|rank| Some(**rank) != teller).copied().collect();
        for rank in others {
            self.send_clear(rank, message);
        }
    }

    fn raise(&mut self, number: NsNumber, epoch: NsEpoch) -> bool {
        if self.namespaces.raise(number, epoch) {
            return true;
        }
        self.sweep_all();
        self.namespaces.raise(number, epoch)
    }

    /// Bumps the namespace's epoch, which hides its entries at once, and asks all connected ranks to clear. The answer
    /// comes as [`ServiceAction::ClearDone`], at most [`CLEAR_TIMEOUT`] later.
    ///
    /// # Errors
    /// [`Refusal::Overloaded`]: nothing was done.
    pub fn handle_clear(&mut self, now: Time, request: ClearRequest, clear: Clear) -> Result<(), Refusal> {
        if self.clears.len() >= CLEARS_MAX {
            return Err(Refusal::Overloaded);
        }
        let number = self.namespaces.open(clear.ns).ok_or(Refusal::Overloaded)?;
        let epoch = self.namespaces.cleared_epoch(number).ok_or(Refusal::Overloaded)?;
        if !self.raise(number, epoch) {
            return Err(Refusal::Overloaded);
        }
        self.stats.clears += 1;
        self.clears_named += 1;
        let message = ClearRank { clear: self.clears_named, ns: clear.ns, epoch };
        let waiting: BTreeSet<RankId> =
            self.ranks.iter().filter(|(_, rank)| rank.is_connected()).map(|(id, _)| *id).collect();
        for rank in &waiting {
            self.send_clear(*rank, message);
        }
        let pending = PendingClear { request, message, waiting, deadline: now.after(CLEAR_TIMEOUT) };
        self.clears.insert(message.clear, pending);
        self.finish_if_complete(message.clear);
        Ok(())
    }

    fn send_clear(&mut self, rank: RankId, message: ClearRank) {
        if let Some(connection) = self.ranks.get(&rank).and_then(|rank| rank.control) {
            self.actions.push_back(ServiceAction::SendToRank { rank, connection, message });
        }
    }

    /// A rank answered a [`ClearRank`].
    pub fn handle_clear_ack(&mut self, rank: RankId, ack: ClearAck) {
        let Some(clear) = self.clears.get_mut(&ack.clear) else { return };
        if !clear.waiting.contains(&rank) {
            return;
        }
        if ack.done {
            clear.waiting.remove(&rank);
            self.finish_if_complete(ack.clear);
        } else {
            self.finish_clear(ack.clear, false);
        }
    }

    fn finish_if_complete(&mut self, clear: u64) {
        if self.clears.get(&clear).is_some_and(|clear| clear.waiting.is_empty()) {
            self.finish_clear(clear, true);
        }
    }

    fn finish_clear(&mut self, clear: u64, complete: bool) {
        if let Some(clear) = self.clears.remove(&clear) {
            self.stats.clears_incomplete += u64::from(!complete);
            self.actions.push_back(ServiceAction::ClearDone { request: clear.request, complete });
        }
    }

    /// A fenced rank cannot publish or be found any more: clears need not wait for it.
    fn fence_from_clears(&mut self, rank: RankId) {
        let clears: Vec<u64> = self.clears.keys().copied().collect();
        for id in clears {
            if self.clears.get_mut(&id).is_some_and(|clear| clear.waiting.remove(&rank)) {
                self.finish_if_complete(id);
            }
        }
    }

    /// A rank came back while clears wait for it: its connection may have swallowed the request.
    fn resend_clears(&mut self, rank: RankId) {
        let messages: Vec<ClearRank> = self
            .clears
            .values()
            .filter(|clear| clear.waiting.contains(&rank))
            .map(|clear| clear.message)
            .collect();
        for message in messages {
            self.send_clear(rank, message);
        }
    }

    fn close_incarnation(&mut self, incarnation: Incarnation) {
        if !self.closed.insert(incarnation) {
            return;
        }
        self.closed_order.push_back(incarnation);
        if self.closed_order.len() > CLOSED_INCARNATIONS_MAX {
            if let Some(oldest) = self.closed_order.pop_front() {
                self.closed.remove(&oldest);
            }
        }
    }

    /// Figures.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let count = |wanted: bool| {
            let count = self.ranks.values().filter(|rank| rank.is_visible() == wanted).count();
            u32::try_from(count).unwrap_or(u32::MAX)
        };
        Stats {
            keys: self.table.keys() as u64,
            replicas: self.table.replicas() as u64,
            table_bytes: self.table.bytes(),
            table_bytes_max: self.table.bytes_max(),
            ranks_live: count(true),
            ranks_hidden: count(false),
            incarnations_closed: self.closed.len() as u64,
            namespaces: u32::try_from(self.namespaces.len()).unwrap_or(u32::MAX),
            hides: u32::try_from(self.hides.len()).unwrap_or(u32::MAX),
            ..self.stats
        }
    }
}
