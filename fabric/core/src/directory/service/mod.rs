//! The directory's state machine (design 1.6, 1.9).
//!
//! Events and requests come in through `handle_*` with the current time, answers that need nobody else are returned at
//! once, everything else comes out of [`Service::poll_action`]. Questions take `&self`, so that many threads may ask at
//! the same time. The driver calls [`Service::handle_timeout`] at [`Service::poll_timeout`].
//!
//! What makes a replica visible: its rank is connected and answers, it was announced since the rank last joined, its
//! namespace was not cleared since, and the engine that asks has not failed to reach the rank lately.

mod clears;
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

use self::clears::PendingClear;
use self::hides::Hides;
use self::members::Rank;
use self::namespaces::Namespaces;
use self::numbers::Numbers;
use super::limits::{CLOSED_INCARNATIONS_MAX, LIVENESS_CHECKS, SWEEP_INTERVAL, SWEEP_STEP};
use super::table::{Table, TableConfig};
use crate::wire::{ClearRank, Done, Member, NsReply, OpenNs, Refusal, Reply, Request, Stats};
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

/// One announcement of one rank.
#[derive(Clone, Copy, Debug)]
struct Source {
    member: Member,
    load: u8,
    /// False if what was announced is never visible again: the rank was lost since, or announced anew.
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
        [liveness, sweep, self.next_clear_work()].into_iter().flatten().min()
    }

    /// Looks at what time brings: silent ranks, late clears, the next step of the sweep.
    pub fn handle_timeout(&mut self, now: Time) {
        if now >= self.next_liveness_check {
            self.check_liveness(now);
            self.next_liveness_check = now.after(self.config.peer_timeout / LIVENESS_CHECKS);
        }
        self.work_clears(now);
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
            Request::OpenNs(open) => Reply::Ns(self.handle_open_ns(now, connection, open)),
            Request::Publish(publish) => match self.handle_publish(now, connection, publish) {
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
    pub fn handle_open_ns(&mut self, now: Time, connection: ConnectionId, open: &OpenNs) -> NsReply {
        let mut number = self.namespaces.open(open.name);
        if number.is_none() && self.namespaces.len() < crate::wire::NAMESPACES_MAX {
            self.sweep_all();
            number = self.namespaces.open(open.name);
        }
        let Some(number) = number else { return NsReply::Full };
        if let Some(teller) = self.connections.get(&connection).copied() {
            self.raise_epoch(now, number, open.known_epoch, Some(teller));
        }
        let epoch = self.namespaces.get(number).map_or(NsEpoch(0), |namespace| namespace.epoch);
        NsReply::Opened { number, epoch }
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
