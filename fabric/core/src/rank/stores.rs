//! Store jobs: puts that share a deadline and an end.

use std::collections::{BTreeMap, BTreeSet};

use crate::owner::PutId;
use crate::Time;

/// A store job, named by the driver; unique within the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreId(pub u64);

#[derive(Debug)]
struct Store {
    id: StoreId,
    deadline: Time,
    /// For each put, whether it is over.
    over: Vec<bool>,
    remaining: usize,
}

/// The jobs in progress, by the first of their consecutive put ids.
#[derive(Debug, Default)]
pub(super) struct Stores {
    jobs: BTreeMap<PutId, Store>,
    firsts: BTreeMap<StoreId, PutId>,
    deadlines: BTreeSet<(Time, PutId)>,
}

impl Stores {
    pub(super) fn len(&self) -> usize {
        self.jobs.len()
    }

    /// Whether the job's name or one of its puts' is in use.
    pub(super) fn collides(&self, id: StoreId, first: PutId, count: usize) -> bool {
        let end = first.0.saturating_add(count as u64);
        let before = self.jobs.range(..PutId(end)).next_back();
        self.firsts.contains_key(&id)
            || before.is_some_and(|(at, store)| at.0.saturating_add(store.over.len() as u64) > first.0)
    }

    /// Notes a job of at least one put.
    pub(super) fn insert(&mut self, id: StoreId, first: PutId, count: usize, deadline: Time) {
        self.firsts.insert(id, first);
        self.deadlines.insert((deadline, first));
        self.jobs.insert(first, Store { id, deadline, over: vec![false; count], remaining: count });
    }

    fn find(&mut self, put: PutId) -> Option<(PutId, &mut Store, usize)> {
        let (&first, store) = self.jobs.range_mut(..=put).next_back()?;
        let index = usize::try_from(put.0 - first.0).ok()?;
        (index < store.over.len()).then_some((first, store, index))
    }

    /// Notes the end of a put. Returns its job, once all the job's puts are over.
    pub(super) fn put_over(&mut self, put: PutId) -> Option<StoreId> {
        let (first, store, index) = self.find(put)?;
        if !std::mem::replace(&mut store.over[index], true) {
            store.remaining -= 1;
        }
        if store.remaining > 0 {
            return None;
        }
        let store = self.jobs.remove(&first)?;
        self.firsts.remove(&store.id);
        self.deadlines.remove(&(store.deadline, first));
        Some(store.id)
    }

    /// The puts of a job that are not over.
    pub(super) fn open_puts(&self, id: StoreId) -> Vec<PutId> {
        let Some((first, store)) =
            self.firsts.get(&id).and_then(|first| Some((first, self.jobs.get(first)?)))
        else {
            return Vec::new();
        };
        let open = store.over.iter().zip(0u64..).filter(|(over, _)| !**over);
        open.map(|(_, index)| PutId(first.0 + index)).collect()
    }

    /// The next job whose deadline has passed; each is named once.
    pub(super) fn expired(&mut self, now: Time) -> Option<StoreId> {
        let &(deadline, first) = self.deadlines.first().filter(|(deadline, _)| *deadline <= now)?;
        self.deadlines.remove(&(deadline, first));
        self.jobs.get(&first).map(|store| store.id)
    }

    pub(super) fn next_deadline(&self) -> Option<Time> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_ends_with_its_last_put_and_expires_once() {
        let mut stores = Stores::default();
        stores.insert(StoreId(1), PutId(10), 3, Time::from_micros(5));
        stores.insert(StoreId(2), PutId(13), 1, Time::from_micros(9));
        assert!(stores.collides(StoreId(1), PutId(50), 1));
        assert!(stores.collides(StoreId(3), PutId(9), 2));
        assert!(stores.collides(StoreId(3), PutId(12), 1));
        assert!(!stores.collides(StoreId(3), PutId(14), 5) && !stores.collides(StoreId(3), PutId(8), 2));
        assert_eq!(stores.put_over(PutId(11)), None);
        assert_eq!(stores.put_over(PutId(11)), None, "a put ends once");
        assert_eq!(stores.open_puts(StoreId(1)), [PutId(10), PutId(12)]);
        assert_eq!(stores.expired(Time::from_micros(4)), None);
        assert_eq!(stores.expired(Time::from_micros(5)), Some(StoreId(1)));
        assert_eq!(stores.expired(Time::from_micros(5)), None);
        assert_eq!(stores.next_deadline(), Some(Time::from_micros(9)));
        assert_eq!(stores.put_over(PutId(10)), None);
        assert_eq!(stores.put_over(PutId(12)), Some(StoreId(1)));
        assert_eq!(stores.put_over(PutId(13)), Some(StoreId(2)));
        assert_eq!((stores.len(), stores.next_deadline(), stores.put_over(PutId(13))), (0, None, None));
    }
}
