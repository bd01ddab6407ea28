//! Flushes that wait for the directory.

use std::collections::{BTreeMap, BTreeSet};

use super::FlushId;
use crate::Time;

#[derive(Clone, Copy, Debug)]
struct Flush {
    deadline: Time,
    ok: bool,
}

/// Waiting flushes, by what they wait for and by deadline.
#[derive(Debug, Default)]
pub(super) struct Flushes {
    by_position: BTreeMap<(u64, FlushId), Flush>,
    by_deadline: BTreeSet<(Time, u64, FlushId)>,
}

impl Flushes {
    pub(super) fn len(&self) -> usize {
        self.by_position.len()
    }

    pub(super) fn insert(&mut self, flush: FlushId, after: u64, deadline: Time) {
        self.by_position.insert((after, flush), Flush { deadline, ok: true });
        self.by_deadline.insert((deadline, after, flush));
    }

    /// Something that these flushes wait for was refused.
    pub(super) fn spoil(&mut self, after: u64) {
        for flush in self.by_position.range_mut((after, FlushId(0))..).map(|(_, flush)| flush) {
            flush.ok = false;
        }
    }

    /// The first flush whose position is reached.
    pub(super) fn pop_reached(&mut self, position: u64) -> Option<(FlushId, bool)> {
        let (&(after, id), flush) = self.by_position.first_key_value()?;
        if after > position {
            return None;
        }
        let (deadline, ok) = (flush.deadline, flush.ok);
        self.by_position.remove(&(after, id));
        self.by_deadline.remove(&(deadline, after, id));
        Some((id, ok))
    }

    /// The first flush whose deadline has passed.
    pub(super) fn pop_late(&mut self, now: Time) -> Option<FlushId> {
        let &(deadline, after, id) = self.by_deadline.first()?;
        if now < deadline {
            return None;
        }
        self.by_deadline.remove(&(deadline, after, id));
        self.by_position.remove(&(after, id));
        Some(id)
    }

    pub(super) fn next_deadline(&self) -> Option<Time> {
        self.by_deadline.first().map(|(deadline, ..)| *deadline)
    }
}
