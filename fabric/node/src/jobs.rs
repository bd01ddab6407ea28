//! The core thread's books: which job owns which memory (rule R4).

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use kvfabric_core::load::LoadError;
use kvfabric_core::owner::{PutError, PutId, Stored};
use kvfabric_core::spans::{Span, SpanConflict, SpanSet};
use kvfabric_memory::ScatterList;

use crate::job::JobState;
use crate::{BlockError, BlockOk};

/// A load in progress. Destinations are here, or inside a read, or with the engine again: never in two places.
struct LoadEntry {
    job: Arc<JobState>,
    indexes: Vec<usize>,
    destinations: Vec<Option<ScatterList>>,
}

struct StoreEntry {
    job: Arc<JobState>,
}

/// A put in progress.
struct PutEntry {
    job: Arc<JobState>,
    index: usize,
    bytes: u64,
    source: Option<ScatterList>,
    stop: Arc<AtomicBool>,
}

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum JobKind {
    Load,
    Store,
}

/// All jobs in progress.
#[derive(Default)]
pub(crate) struct Jobs {
    spans: SpanSet,
    loads: HashMap<u64, LoadEntry>,
    stores: HashMap<u64, StoreEntry>,
    puts: HashMap<PutId, PutEntry>,
    bytes_stored: u64,
}

fn spans_of(list: &ScatterList) -> Vec<Span> {
    list.segments()
        .iter()
        .map(|segment| {
            let start = segment.base() as u64;
            Span { start, end: start + segment.length_bytes() as u64 }
        })
        .collect()
}

impl Jobs {
    /// Claims memory for the blocks of a job; one result a block.
    pub(crate) fn claim<'a>(
        &mut self,
        job: u64,
        exclusive: bool,
        lists: impl Iterator<Item = &'a ScatterList>,
    ) -> Vec<Result<(), SpanConflict>> {
        let blocks: Vec<Vec<Span>> = lists.map(spans_of).collect();
        self.spans.claim_blocks(job, exclusive, &blocks)
    }

    pub(crate) fn begin_load(&mut self, job: Arc<JobState>, blocks: Vec<(usize, ScatterList)>) {
        let (indexes, destinations) = blocks.into_iter().map(|(index, list)| (index, Some(list))).unzip();
        self.loads.insert(job.id, LoadEntry { job, indexes, destinations });
    }

    /// Moves a block's destination into a read.
    pub(crate) fn take_destination(&mut self, load: u64, block: u32) -> Option<ScatterList> {
        self.loads.get_mut(&load)?.destinations.get_mut(block as usize)?.take()
    }

    /// A read gave its destination back.
    pub(crate) fn return_destination(&mut self, load: u64, block: u32, list: ScatterList) {
        if let Some(place) =
            self.loads.get_mut(&load).and_then(|entry| entry.destinations.get_mut(block as usize))
        {
            *place = Some(list);
        }
    }

    /// A block is final: its memory belongs to the engine again.
    pub(crate) fn block_done(&mut self, load: u64, block: u32, outcome: Result<BlockOk, LoadError>) {
        let Some(entry) = self.loads.get_mut(&load) else { return };
        if let Some(place) = entry.destinations.get_mut(block as usize) {
            *place = None;
        }
        if let Some(index) = entry.indexes.get(block as usize) {
            entry.job.set(*index, outcome.map_err(BlockError::from));
        }
    }

    pub(crate) fn begin_store(&mut self, job: &Arc<JobState>) {
        self.stores.insert(job.id, StoreEntry { job: job.clone() });
    }

    pub(crate) fn begin_put(&mut self, put: PutId, job: &Arc<JobState>, index: usize, source: ScatterList) {
        let entry = PutEntry {
            job: job.clone(),
            index,
            bytes: source.total_bytes(),
            source: Some(source),
            stop: Arc::new(AtomicBool::new(false)),
        };
        self.puts.insert(put, entry);
    }

    /// Moves a put's source into its copy.
    pub(crate) fn take_source(&mut self, put: PutId) -> Option<(ScatterList, Arc<AtomicBool>)> {
        let entry = self.puts.get_mut(&put)?;
        Some((entry.source.take()?, entry.stop.clone()))
    }

    /// Asks a running copy to stop.
    pub(crate) fn abort_fill(&self, put: PutId) {
        if let Some(entry) = self.puts.get(&put) {
            entry.stop.store(true, Ordering::Release);
        }
    }

    pub(crate) fn put_done(&mut self, put: PutId, outcome: Result<Stored, PutError>) {
        if let Some(entry) = self.puts.remove(&put) {
            if outcome == Ok(Stored::Filled) {
                self.bytes_stored += entry.bytes;
            }
            entry.job.set(
                entry.index,
                match outcome {
                    Ok(Stored::Filled) => Ok(BlockOk::Stored),
                    Ok(Stored::Resident) => Ok(BlockOk::AlreadyResident),
                    Err(error) => Err(BlockError::from(error)),
                },
            );
        }
    }

    /// The job is final. Returns what it was and how long it took, if it was in progress.
    pub(crate) fn finish(&mut self, job: u64) -> Option<(JobKind, Duration)> {
        self.spans.release(job);
        let (kind, state) = match (self.loads.remove(&job), self.stores.remove(&job)) {
            (Some(load), _) => (JobKind::Load, load.job),
            (None, Some(store)) => (JobKind::Store, store.job),
            (None, None) => return None,
        };
        state.finish();
        Some((kind, state.age()))
    }

    pub(crate) fn is_load(&self, job: u64) -> bool {
        self.loads.contains_key(&job)
    }

    pub(crate) fn ids(&self) -> Vec<u64> {
        self.loads.keys().chain(self.stores.keys()).copied().collect()
    }

    /// Bytes copied into the pool so far.
    pub(crate) fn bytes_stored(&self) -> u64 {
        self.bytes_stored
    }

    pub(crate) fn len(&self) -> usize {
        self.loads.len() + self.stores.len()
    }

    /// Jobs that use a range of addresses.
    pub(crate) fn uses(&self, start: u64, length_bytes: u64) -> bool {
        self.spans.uses(Span { start, end: start.saturating_add(length_bytes) })
    }
}
