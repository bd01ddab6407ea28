//! What will happen when: a queue ordered by time and, within an instant, by the order of scheduling.

use std::collections::BTreeMap;

use crate::Time;

/// Scheduled events.
#[derive(Clone, Debug)]
pub struct EventQueue<E> {
    events: BTreeMap<(Time, u64), E>,
    scheduled: u64,
}

impl<E> Default for EventQueue<E> {
    fn default() -> Self {
        Self { events: BTreeMap::new(), scheduled: 0 }
    }
}

impl<E> EventQueue<E> {
    /// Schedules an event.
    pub fn push(&mut self, at: Time, event: E) {
        self.scheduled += 1;
        self.events.insert((at, self.scheduled), event);
    }

    /// When the next event is due.
    #[must_use]
    pub fn next_time(&self) -> Option<Time> {
        self.events.first_key_value().map(|((at, _), _)| *at)
    }

    /// Takes the next event if it is due.
    pub fn pop_due(&mut self, now: Time) -> Option<E> {
        if self.next_time()? > now {
            return None;
        }
        self.events.pop_first().map(|(_, event)| event)
    }

    /// Number of events to come.
    #[must_use]
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether nothing is to come.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }
}
