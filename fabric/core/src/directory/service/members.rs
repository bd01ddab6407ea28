//! Membership and liveness (design 1.9).

use super::{ConnectionId, RankChange, Service, ServiceAction, Source};
use crate::directory::limits::{ATTACH_TIMEOUT, LOST_ENTRIES_KEEP};
use crate::wire::{
    Advertised, Attach, Join, JoinReply, Joined, Leave, Member, Name, Ping, PublishReply, RankInfo, Refusal,
    RANKS_MAX,
};
use crate::{RankId, Time};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Admitted; the liveness connection is expected.
    Joined { attach_by: Time },
    /// Connected and answering.
    Live,
    /// Connected, but not heard in time.
    Silent,
    /// Not connected.
    Lost { since: Time },
}

#[derive(Debug)]
pub(super) struct Rank {
    pub(super) member: Member,
    pub(super) name: Name<'static>,
    pub(super) engine: Name<'static>,
    pub(super) advertised: Advertised<'static>,
    pub(super) control: Option<ConnectionId>,
    liveness: Option<ConnectionId>,
    liveness_token: u64,
    state: State,
    heard: Time,
    pub(super) load: u8,
    /// What is being announced.
    pub(super) source: Option<u32>,
    /// What it replaces when the announcement is complete.
    pub(super) previous: Option<u32>,
    /// Position of the last PUBLISH that was applied; never goes back within an incarnation.
    pub(super) applied: u64,
    /// Whether an announcement has begun since the rank joined.
    pub(super) has_begun: bool,
    /// Answer to the last PUBLISH, for a sender that did not get it.
    pub(super) last_reply: Option<PublishReply<'static>>,
}

impl Rank {
    /// Whether its entries are visible.
    pub(super) fn is_visible(&self) -> bool {
        matches!(self.state, State::Joined { .. } | State::Live)
    }

    /// Whether it can be sent something.
    pub(super) fn is_connected(&self) -> bool {
        !matches!(self.state, State::Lost { .. })
    }

    pub(super) fn info(&self) -> RankInfo<'static> {
        RankInfo {
            name: self.name.clone(),
            engine: self.engine.clone(),
            advertised: self.advertised.clone(),
            live: self.is_visible(),
        }
    }
}

impl Service {
    /// A process asks to be a rank. `token` is a fresh random number for its liveness connection.
    pub fn handle_join(
        &mut self,
        now: Time,
        connection: ConnectionId,
        token: u64,
        join: &Join<'_>,
    ) -> JoinReply {
        if join.cluster.as_str() != &*self.config.cluster {
            return JoinReply::ClusterMismatch;
        }
        if self.closed.contains(&join.incarnation) {
            return JoinReply::Closed;
        }
        let namesake = self.by_name.get(join.name.as_str()).and_then(|rank| self.ranks.get(rank));
        let namesake = namesake.map(|rank| (rank.member, rank.is_visible()));
        let again = match namesake {
            Some((member, _)) if member.incarnation == join.incarnation => Some(member),
            Some((_, true)) => return JoinReply::NameInUse,
            Some((older, false)) => {
                self.close(older);
                None
            }
            None => None,
        };
        let joined = again.and_then(|member| self.ranks.get(&member.rank));
        if let Some(rank) = joined.filter(|rank| rank.control == Some(connection)) {
            // The same request again: its answer was late or lost.
            return JoinReply::Joined(Joined {
                rank: rank.member.rank,
                session: self.config.session,
                liveness_token: rank.liveness_token,
            });
        }
        // One process, one connection: whoever used it before is not there any more.
        if let Some(before) = self.connections.get(&connection).copied() {
            if again.map(|member| member.rank) != Some(before) {
                self.lose(now, before);
            }
        }
        let member = match again {
            Some(member) => member,
            None => match self.admit(join) {
                Some(member) => member,
                None => return JoinReply::Full,
            },
        };
        self.rejoin(now, connection, token, member, join);
        JoinReply::Joined(Joined { rank: member.rank, session: self.config.session, liveness_token: token })
    }

    /// Makes room for another rank and names it.
    fn admit(&mut self, join: &Join<'_>) -> Option<Member> {
        if self.ranks.len() >= RANKS_MAX {
            let lost = self.ranks.values().filter_map(|rank| match rank.state {
                State::Lost { since } => Some((since, rank.member)),
                _ => None,
            });
            let (_, oldest) = lost.min()?;
            self.forget(oldest);
        }
        let mut rank = RankId(self.ranks_named.wrapping_add(1).max(1));
        while self.ranks.contains_key(&rank) {
            rank = RankId(rank.0.wrapping_add(1).max(1));
        }
        self.ranks_named = rank.0;
        Some(Member { rank, incarnation: join.incarnation })
    }

    fn rejoin(&mut self, now: Time, connection: ConnectionId, token: u64, member: Member, join: &Join<'_>) {
        let old = self.ranks.remove(&member.rank);
        let (mut source, mut previous, applied) = match &old {
            Some(rank) => (rank.source, rank.previous, rank.applied),
            None => (None, None, 0),
        };
        if let Some(rank) = &old {
            for before in [rank.control, rank.liveness].into_iter().flatten() {
                self.disconnect(before, Some(connection));
            }
        }
        // What was announced before this connection counts again only when it is announced again.
        for number in [source, previous].into_iter().flatten() {
            self.disbelieve(number);
        }
        if source.is_some() {
            if let Some(number) = previous {
                self.retire_source(number);
            }
            (source, previous) = (None, source);
        }
        let rank = Rank {
            member,
            name: join.name.clone().into_owned(),
            engine: join.engine.clone().into_owned(),
            advertised: join.advertised.clone().into_owned(),
            control: Some(connection),
            liveness: None,
            liveness_token: token,
            state: State::Joined { attach_by: now.after(ATTACH_TIMEOUT) },
            heard: now,
            load: 0,
            source,
            previous,
            applied,
            has_begun: false,
            last_reply: None,
        };
        self.by_name.insert(join.name.as_str().into(), member.rank);
        self.connections.insert(connection, member.rank);
        if self.ranks.is_empty() {
            self.next_liveness_check = now;
        }
        self.ranks.insert(member.rank, rank);
        self.refresh(member.rank);
        self.changed(member, RankChange::Joined);
        self.resend_clears(member.rank);
    }

    /// A rank opens its liveness connection.
    ///
    /// # Errors
    /// [`Refusal::UnknownRank`] if the rank must join again, [`Refusal::ForeignConnection`] if the token is wrong.
    pub fn handle_attach(
        &mut self,
        now: Time,
        connection: ConnectionId,
        attach: &Attach,
    ) -> Result<(), Refusal> {
        let rank = self.ranks.get_mut(&attach.member.rank).filter(|rank| rank.member == attach.member);
        let rank = rank.filter(|rank| rank.is_connected()).ok_or(Refusal::UnknownRank)?;
        if rank.liveness_token != attach.liveness_token || self.connections.contains_key(&connection) {
            return Err(Refusal::ForeignConnection);
        }
        let before = rank.liveness.replace(connection);
        rank.state = State::Live;
        rank.heard = now;
        if let Some(before) = before {
            self.disconnect(before, None);
        }
        self.connections.insert(connection, attach.member.rank);
        self.refresh(attach.member.rank);
        self.changed(attach.member, RankChange::Attached);
        Ok(())
    }

    /// A sign of life on a liveness connection that tells the rank's load.
    ///
    /// # Errors
    /// [`Refusal::UnknownRank`] if no rank is attached to the connection.
    pub fn handle_ping(&mut self, now: Time, connection: ConnectionId, ping: Ping) -> Result<(), Refusal> {
        let id = self.handle_heard(now, connection)?;
        self.set_load(id, ping.load);
        Ok(())
    }

    /// A sign of life on a liveness connection that tells nothing else; the rank's load stays what it last told.
    /// Returns the rank.
    ///
    /// # Errors
    /// [`Refusal::UnknownRank`] if no rank is attached to the connection.
    pub fn handle_heard(&mut self, now: Time, connection: ConnectionId) -> Result<RankId, Refusal> {
        let id = self.connections.get(&connection).copied().ok_or(Refusal::UnknownRank)?;
        let rank = self.ranks.get_mut(&id).ok_or(Refusal::UnknownRank)?;
        if rank.liveness != Some(connection) {
            return Err(Refusal::UnknownRank);
        }
        rank.heard = now;
        if rank.state == State::Silent {
            rank.state = State::Live;
            let member = rank.member;
            self.refresh(id);
            self.changed(member, RankChange::Heard);
        }
        Ok(id)
    }

    /// The driver's own liveness check found that a rank does not answer: hidden until it is heard again.
    pub fn handle_silent(&mut self, connection: ConnectionId) {
        let Some(id) = self.connections.get(&connection).copied() else { return };
        let Some(rank) = self.ranks.get_mut(&id) else { return };
        if rank.liveness == Some(connection) && rank.state == State::Live {
            rank.state = State::Silent;
            let member = rank.member;
            self.refresh(id);
            self.changed(member, RankChange::Silent);
        }
    }

    /// A rank leaves for good.
    ///
    /// # Errors
    /// [`Refusal`] if the connection is not that rank's.
    pub fn handle_leave(
        &mut self,
        _now: Time,
        connection: ConnectionId,
        leave: &Leave,
    ) -> Result<(), Refusal> {
        let rank = self.ranks.get(&leave.member.rank).filter(|rank| rank.member == leave.member);
        if rank.ok_or(Refusal::UnknownRank)?.control != Some(connection) {
            return Err(Refusal::ForeignConnection);
        }
        self.close(leave.member);
        Ok(())
    }

    /// A connection ended. If it was a rank's, the rank is hidden at once, until it joins again and announces.
    pub fn handle_connection_closed(&mut self, now: Time, connection: ConnectionId) {
        if let Some(rank) = self.connections.get(&connection).copied() {
            self.lose(now, rank);
        }
        self.connections.remove(&connection);
    }

    pub(super) fn check_liveness(&mut self, now: Time) {
        let (mut silent, mut lost, mut old) = (Vec::new(), Vec::new(), Vec::new());
        for (id, rank) in &self.ranks {
            match rank.state {
                State::Joined { attach_by } if now >= attach_by => lost.push(*id),
                State::Live if now.since(rank.heard) >= self.config.peer_timeout => silent.push(*id),
                State::Lost { since } if now.since(since) >= LOST_ENTRIES_KEEP => old.push(*id),
                _ => {}
            }
        }
        for id in silent {
            if let Some(rank) = self.ranks.get_mut(&id) {
                rank.state = State::Silent;
                let member = rank.member;
                self.refresh(id);
                self.changed(member, RankChange::Silent);
            }
        }
        for id in lost {
            self.lose(now, id);
        }
        for id in old {
            self.drop_entries(id);
        }
    }

    fn changed(&mut self, member: Member, change: RankChange) {
        self.actions.push_back(ServiceAction::RankChanged { member, change });
    }

    /// Forgets a connection and has it closed, unless it is `kept`.
    fn disconnect(&mut self, connection: ConnectionId, kept: Option<ConnectionId>) {
        if Some(connection) != kept && self.connections.remove(&connection).is_some() {
            self.actions.push_back(ServiceAction::CloseConnection { connection });
        }
    }

    fn lose(&mut self, now: Time, id: RankId) {
        let Some(rank) = self.ranks.get_mut(&id).filter(|rank| rank.is_connected()) else { return };
        rank.state = State::Lost { since: now };
        rank.has_begun = false;
        let connections = [rank.control.take(), rank.liveness.take()];
        let (member, sources) = (rank.member, [rank.source, rank.previous]);
        for number in sources.into_iter().flatten() {
            self.disbelieve(number);
        }
        for connection in connections.into_iter().flatten() {
            self.disconnect(connection, None);
        }
        self.lose_from_clears(id);
        self.changed(member, RankChange::Lost);
    }

    /// Closes an incarnation for ever.
    fn close(&mut self, member: Member) {
        self.close_incarnation(member.incarnation);
        self.forget(member);
        self.fence_from_clears(member.rank);
        self.changed(member, RankChange::Closed);
    }

    /// Drops all that is known of a rank except, if it was closed, that it was.
    fn forget(&mut self, member: Member) {
        self.drop_entries(member.rank);
        let Some(rank) = self.ranks.remove(&member.rank) else { return };
        if self.by_name.get(rank.name.as_str()) == Some(&member.rank) {
            self.by_name.remove(rank.name.as_str());
        }
        for connection in [rank.control, rank.liveness].into_iter().flatten() {
            self.disconnect(connection, None);
        }
        self.hides.forget(member.rank);
    }

    fn drop_entries(&mut self, id: RankId) {
        let Some(rank) = self.ranks.get_mut(&id) else { return };
        for number in [rank.source.take(), rank.previous.take()].into_iter().flatten() {
            self.retire_source(number);
        }
    }

    /// What was announced under this number is not visible again before it is announced again.
    fn disbelieve(&mut self, number: u32) {
        if let Some(source) = self.sources.get_mut(number as usize) {
            source.shown = false;
        }
        if let Some(visible) = self.visible.get_mut(number as usize) {
            *visible = 0;
        }
    }

    fn retire_source(&mut self, number: u32) {
        self.source_numbers.retire(number);
        self.disbelieve(number);
    }

    /// A new announcement of the rank begins: a new source, and the one that it replaces. False if numbers ran out.
    pub(super) fn begin_source(&mut self, id: RankId) -> bool {
        let mut number = self.source_numbers.take();
        if number.is_none() {
            self.sweep_all();
            number = self.source_numbers.take();
        }
        let (Some(number), Some(rank)) = (number, self.ranks.get_mut(&id)) else { return false };
        let replaced = rank.source.replace(number);
        let older = if replaced.is_some() { core::mem::replace(&mut rank.previous, replaced) } else { None };
        rank.has_begun = true;
        let source = Source { member: rank.member, load: rank.load, shown: true };
        if let Some(older) = older {
            self.retire_source(older);
        }
        let count = self.source_numbers.count();
        self.sources.resize(count, source);
        self.visible.resize(count, 0);
        if let Some(place) = self.sources.get_mut(number as usize) {
            *place = source;
        }
        self.refresh(id);
        true
    }

    /// The announcement is complete: what was not announced again is gone.
    pub(super) fn end_source(&mut self, id: RankId) {
        let Some(rank) = self.ranks.get_mut(&id) else { return };
        if let Some(number) = rank.previous.take() {
            self.retire_source(number);
        }
    }

    pub(super) fn set_load(&mut self, id: RankId, load: u8) {
        let Some(rank) = self.ranks.get_mut(&id) else { return };
        rank.load = load;
        for number in [rank.source, rank.previous].into_iter().flatten() {
            if let Some(source) = self.sources.get_mut(number as usize) {
                source.load = load;
            }
        }
    }

    /// Brings the visibility of the rank's sources up to date.
    fn refresh(&mut self, id: RankId) {
        let Some(rank) = self.ranks.get(&id) else { return };
        for number in [rank.source, rank.previous].into_iter().flatten() {
            let shown = self.sources.get(number as usize).is_some_and(|source| source.shown);
            if let Some(visible) = self.visible.get_mut(number as usize) {
                *visible = u8::from(shown && rank.is_visible());
            }
        }
    }
}
