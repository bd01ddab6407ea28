//! CLEAR, and telling ranks of epochs that they have missed (design 1.9).

use std::collections::BTreeSet;

use super::{ClearRequest, Service, ServiceAction};
use crate::directory::limits::{CLEARS_MAX, CLEAR_RESEND};
use crate::limits::CLEAR_TIMEOUT;
use crate::wire::{Clear, ClearAck, ClearRank, NsNumber, Refusal};
use crate::{NsEpoch, RankId, Time};

/// A clear that some ranks have not acknowledged.
#[derive(Debug)]
pub(super) struct PendingClear {
    /// Who waits for an answer, until the deadline.
    request: Option<(ClearRequest, Time)>,
    ns: NsNumber,
    message: ClearRank,
    waiting: BTreeSet<RankId>,
    resend_at: Time,
}

impl Service {
    /// Takes over an epoch of an earlier life of the directory, and tells the other ranks.
    pub(super) fn raise_epoch(
        &mut self,
        now: Time,
        number: NsNumber,
        epoch: NsEpoch,
        teller: Option<RankId>,
    ) {
        let lower = self.namespaces.get(number).is_some_and(|namespace| namespace.epoch < epoch);
        if lower && self.raise(number, epoch) {
            let mut waiting = self.connected();
            if let Some(teller) = teller {
                waiting.remove(&teller);
            }
            self.begin_clear(now, None, number, waiting);
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
    /// comes as [`ServiceAction::ClearDone`], at most [`CLEAR_TIMEOUT`] later. A rank that has not acknowledged by then
    /// is told again for as long as it is connected; one that comes back is told when it opens the namespace.
    ///
    /// # Errors
    /// [`Refusal::Overloaded`]: nothing was done.
    pub fn handle_clear(&mut self, now: Time, request: ClearRequest, clear: Clear) -> Result<(), Refusal> {
        let waiting = self.clears.values().filter(|clear| clear.request.is_some()).count();
        if waiting >= CLEARS_MAX {
            return Err(Refusal::Overloaded);
        }
        let number = self.namespaces.open(clear.ns).ok_or(Refusal::Overloaded)?;
        let epoch = self.namespaces.cleared_epoch(number).ok_or(Refusal::Overloaded)?;
        if !self.raise(number, epoch) {
            return Err(Refusal::Overloaded);
        }
        self.stats.clears += 1;
        let ranks = self.connected();
        self.begin_clear(now, Some(request), number, ranks);
        Ok(())
    }

    fn connected(&self) -> BTreeSet<RankId> {
        self.ranks.iter().filter(|(_, rank)| rank.is_connected()).map(|(id, _)| *id).collect()
    }

    fn begin_clear(
        &mut self,
        now: Time,
        request: Option<ClearRequest>,
        number: NsNumber,
        waiting: BTreeSet<RankId>,
    ) {
        let Some(namespace) = self.namespaces.get(number).copied() else { return };
        // A later epoch of the namespace says all that an earlier one says.
        self.clears.retain(|_, earlier| earlier.request.is_some() || earlier.ns != number);
        self.clears_named += 1;
        let message = ClearRank { clear: self.clears_named, ns: namespace.name, epoch: namespace.epoch };
        for rank in &waiting {
            self.send_clear(*rank, message);
        }
        let pending = PendingClear {
            request: request.map(|request| (request, now.after(CLEAR_TIMEOUT))),
            ns: number,
            message,
            waiting,
            resend_at: now.after(CLEAR_RESEND),
        };
        self.clears.insert(message.clear, pending);
        self.finish_if_complete(message.clear);
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
            self.answer_clear(ack.clear, false);
        }
    }

    fn finish_if_complete(&mut self, clear: u64) {
        if self.clears.get(&clear).is_some_and(|clear| clear.waiting.is_empty()) {
            self.answer_clear(clear, true);
            self.clears.remove(&clear);
        }
    }

    /// Answers the request, if somebody still waits. Ranks that are not connected will be told when they come back.
    fn answer_clear(&mut self, clear: u64, complete: bool) {
        let connected = self.connected();
        let Some(pending) = self.clears.get_mut(&clear) else { return };
        pending.waiting.retain(|rank| connected.contains(rank));
        if let Some((request, _)) = pending.request.take() {
            self.stats.clears_incomplete += u64::from(!complete);
            self.actions.push_back(ServiceAction::ClearDone { request, complete });
        }
    }

    pub(super) fn next_clear_work(&self) -> Option<Time> {
        let due = self.clears.values().map(|clear| match clear.request {
            Some((_, deadline)) => deadline.min(clear.resend_at),
            None => clear.resend_at,
        });
        due.min()
    }

    pub(super) fn work_clears(&mut self, now: Time) {
        let late = |clear: &PendingClear| clear.request.is_some_and(|(_, deadline)| now >= deadline);
        let late: Vec<u64> = self.clears.iter().filter(|(_, clear)| late(clear)).map(|(id, _)| *id).collect();
        for clear in late {
            self.answer_clear(clear, false);
        }
        self.clears.retain(|_, clear| clear.request.is_some() || !clear.waiting.is_empty());
        let mut again = Vec::new();
        for clear in self.clears.values_mut().filter(|clear| now >= clear.resend_at) {
            clear.resend_at = now.after(CLEAR_RESEND);
            again.extend(clear.waiting.iter().map(|rank| (*rank, clear.message)));
        }
        for (rank, message) in again {
            self.send_clear(rank, message);
        }
    }

    /// A fenced rank cannot publish or be found any more: clears need not wait for it.
    pub(super) fn fence_from_clears(&mut self, rank: RankId) {
        let clears: Vec<u64> = self.clears.keys().copied().collect();
        for id in clears {
            if self.clears.get_mut(&id).is_some_and(|clear| clear.waiting.remove(&rank)) {
                self.finish_if_complete(id);
            }
        }
    }

    /// A rank lost its connection. Requests wait for it, because its process may go on serving; but it need not be told
    /// again before it comes back.
    pub(super) fn lose_from_clears(&mut self, rank: RankId) {
        for clear in self.clears.values_mut().filter(|clear| clear.request.is_none()) {
            clear.waiting.remove(&rank);
        }
        self.clears.retain(|_, clear| clear.request.is_some() || !clear.waiting.is_empty());
    }

    /// A rank came back while clears wait for it: its connection may have swallowed the request.
    pub(super) fn resend_clears(&mut self, rank: RankId) {
        let waiting = self.clears.values().filter(|clear| clear.waiting.contains(&rank));
        let messages: Vec<ClearRank> = waiting.map(|clear| clear.message).collect();
        for message in messages {
            self.send_clear(rank, message);
        }
    }
}
