//! What the scheduler side tells workers in a step, and what workers report back.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{BlockHash, BlockTransferPlan, JobPlans};

/// The scheduler's orders for one engine step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectorMetadata {
    /// Whether loads run beside the step.
    pub async_load: bool,
    /// Stores that belong to no request.
    pub store_plans: Vec<BlockTransferPlan>,
    /// Loads by request.
    pub load_requests: BTreeMap<Arc<str>, JobPlans>,
    /// Stores by request.
    pub store_requests: BTreeMap<Arc<str>, JobPlans>,
    /// Requests whose blocks are about to be reused.
    pub preempted_request_ids: BTreeSet<Arc<str>>,
    /// The event that reports this step's stores, if it has any.
    pub store_event: Option<u64>,
}

impl ConnectorMetadata {
    /// Every store of the step: those without request, then those of each request.
    pub fn iter_store_plans(&self) -> impl Iterator<Item = BlockTransferPlan> + '_ {
        let requests = self.store_requests.values().flat_map(JobPlans::iter);
        self.store_plans.iter().cloned().chain(requests)
    }
}

/// How the stores of one event ended, over the workers heard so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreEventResult {
    /// Workers that finished, with or without failures.
    pub completed_workers: u64,
    /// Objects that some worker did not store: group and block hash.
    pub failed_objects: BTreeSet<(u32, BlockHash)>,
}

impl StoreEventResult {
    /// Adds what another worker reported. An object that failed on one rank is not usable on any.
    pub fn merge(&mut self, other: Self) {
        self.completed_workers = self.completed_workers.saturating_add(other.completed_workers);
        self.failed_objects.extend(other.failed_objects);
    }
}

/// Store events that workers report, by event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkerMetadata {
    /// Results.
    pub store_events: BTreeMap<u64, StoreEventResult>,
}

impl WorkerMetadata {
    /// Adds what another worker reported.
    pub fn aggregate(&mut self, other: Self) {
        for (event, result) in other.store_events {
            self.store_events.entry(event).or_default().merge(result);
        }
    }
}
