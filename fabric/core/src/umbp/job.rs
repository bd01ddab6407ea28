//! Transfer jobs: one status over many keys, where one failed key fails no other.

use core::fmt;
use std::collections::BTreeSet;
use std::sync::Arc;

use thiserror::Error;

use super::{BlockLoadBatch, BlockStoreBatch, BlockTransferPlan};
use crate::limits::JOB_BLOCKS_MAX;

/// Status of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TransferJobStatus {
    /// Not started.
    #[default]
    Pending,
    /// Under way.
    Running,
    /// Every key succeeded.
    Completed,
    /// Every key ended, at least one of them badly.
    Failed,
    /// Cancelled.
    Cancelled,
}

impl TransferJobStatus {
    /// The name that the reference gives it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Running => "running",
            Self::Completed => "completed",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    /// Whether the job has ended.
    #[must_use]
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }
}

impl fmt::Display for TransferJobStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Why a job or a change of it is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum JobError {
    /// Only a pending job can start.
    #[error("cannot start job in state {status}")]
    NotPending {
        /// Where it is.
        status: TransferJobStatus,
    },
    /// More than [`JOB_BLOCKS_MAX`] blocks.
    #[error("a job of {blocks} blocks exceeds {JOB_BLOCKS_MAX}")]
    TooManyBlocks {
        /// How many.
        blocks: usize,
    },
    /// Not one size for each key.
    #[error("{sizes} sizes for {keys} keys")]
    PlanBytesLength {
        /// Sizes given.
        sizes: usize,
        /// Keys of the job.
        keys: usize,
    },
    /// The sizes add up to more than 64 bits hold.
    #[error("the sizes of the job's blocks overflow 64 bits")]
    BytesOverflow,
}

/// The blocks of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobPlans {
    /// One plan for each.
    Plans(Vec<BlockTransferPlan>),
    /// Columns of loads.
    Load(BlockLoadBatch),
    /// Columns of stores.
    Store(BlockStoreBatch),
}

impl JobPlans {
    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Plans(plans) => plans.len(),
            Self::Load(batch) => batch.len(),
            Self::Store(batch) => batch.len(),
        }
    }

    /// Whether there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Keys and block ids in order.
    pub fn keys_and_blocks(&self) -> impl Iterator<Item = (&Arc<str>, u64)> {
        let (plans, keys, block_ids): (&[BlockTransferPlan], &[Arc<str>], &[u64]) = match self {
            Self::Plans(plans) => (plans, &[], &[]),
            Self::Load(batch) => (&[], batch.keys(), batch.block_ids()),
            Self::Store(batch) => (&[], batch.keys(), batch.block_ids()),
        };
        plans.iter().map(|plan| (&plan.key, plan.block_id)).chain(keys.iter().zip(block_ids.iter().copied()))
    }

    /// Keys in order.
    pub fn keys(&self) -> impl Iterator<Item = &Arc<str>> {
        self.keys_and_blocks().map(|(key, _)| key)
    }

    /// One block as a plan.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<BlockTransferPlan> {
        match self {
            Self::Plans(plans) => plans.get(index).cloned(),
            Self::Load(batch) => batch.get(index),
            Self::Store(batch) => batch.get(index),
        }
    }

    /// All blocks as plans.
    pub fn iter(&self) -> impl Iterator<Item = BlockTransferPlan> + '_ {
        (0..self.len()).filter_map(|index| self.get(index))
    }
}

/// State of a job, key by key. A job is final when each of its keys completed or failed, and failed if any did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TransferJobState {
    plans: JobPlans,
    status: TransferJobStatus,
    // The job's keys that neither completed nor failed; kept so that a report costs its own keys, not the job's.
    unfinished: BTreeSet<Arc<str>>,
    completed_keys: BTreeSet<Arc<str>>,
    failed_keys: BTreeSet<Arc<str>>,
    error: Option<String>,
    plan_bytes: Option<Vec<u64>>,
}

impl TransferJobState {
    /// A pending job.
    ///
    /// # Errors
    /// More than [`JOB_BLOCKS_MAX`] blocks, or ranges beyond 64 bits.
    pub fn new(plans: JobPlans) -> Result<Self, JobError> {
        if plans.len() > JOB_BLOCKS_MAX {
            return Err(JobError::TooManyBlocks { blocks: plans.len() });
        }
        if let JobPlans::Plans(plans) = &plans {
            // So that no sum over some of the ranges overflows later.
            sum(plans.iter().flat_map(|plan| &plan.ranges).map(|range| range.length))?;
        }
        Ok(Self {
            unfinished: plans.keys().cloned().collect(),
            plans,
            status: TransferJobStatus::Pending,
            completed_keys: BTreeSet::new(),
            failed_keys: BTreeSet::new(),
            error: None,
            plan_bytes: None,
        })
    }

    /// Names the size of each block, for batches that carry no ranges.
    ///
    /// # Errors
    /// Not one size for each key, or more than 64 bits in all.
    pub fn with_plan_bytes(mut self, plan_bytes: Vec<u64>) -> Result<Self, JobError> {
        if plan_bytes.len() != self.plans.len() {
            return Err(JobError::PlanBytesLength { sizes: plan_bytes.len(), keys: self.plans.len() });
        }
        sum(plan_bytes.iter().copied())?;
        self.plan_bytes = Some(plan_bytes);
        Ok(self)
    }

    /// The blocks.
    #[must_use]
    pub const fn plans(&self) -> &JobPlans {
        &self.plans
    }

    /// Status.
    #[must_use]
    pub const fn status(&self) -> TransferJobStatus {
        self.status
    }

    /// Keys that completed.
    #[must_use]
    pub const fn completed_keys(&self) -> &BTreeSet<Arc<str>> {
        &self.completed_keys
    }

    /// Keys that failed.
    #[must_use]
    pub const fn failed_keys(&self) -> &BTreeSet<Arc<str>> {
        &self.failed_keys
    }

    /// The latest error.
    #[must_use]
    pub fn error(&self) -> Option<&str> {
        self.error.as_deref()
    }

    /// Size of each block, if it was named.
    #[must_use]
    pub fn plan_bytes(&self) -> Option<&[u64]> {
        self.plan_bytes.as_deref()
    }

    /// Bytes of the completed blocks: by the sizes named, else by the plans' ranges.
    #[must_use]
    pub fn completed_bytes(&self) -> u64 {
        // Constructors bounded the total, so no partial sum overflows.
        if let Some(plan_bytes) = &self.plan_bytes {
            let sizes = self.plans.keys().zip(plan_bytes);
            return sizes.filter(|(key, _)| self.completed_keys.contains(*key)).map(|(_, size)| size).sum();
        }
        match &self.plans {
            JobPlans::Plans(plans) => plans
                .iter()
                .filter(|plan| self.completed_keys.contains(&plan.key))
                .flat_map(|plan| &plan.ranges)
                .map(|range| range.length)
                .sum(),
            JobPlans::Load(_) | JobPlans::Store(_) => 0,
        }
    }

    /// Block ids of the failed keys.
    #[must_use]
    pub fn failed_block_ids(&self) -> BTreeSet<u64> {
        self.plans
            .keys_and_blocks()
            .filter(|(key, _)| self.failed_keys.contains(*key))
            .map(|(_, block_id)| block_id)
            .collect()
    }

    /// Starts a pending job.
    ///
    /// # Errors
    /// [`JobError::NotPending`].
    pub fn start(&mut self) -> Result<(), JobError> {
        if self.status != TransferJobStatus::Pending {
            return Err(JobError::NotPending { status: self.status });
        }
        self.status = TransferJobStatus::Running;
        Ok(())
    }

    /// Marks keys as completed. As in the reference, **no keys mean all keys**: callers with a list that may be empty
    /// use [`TransferJobState::complete_key`] for each.
    pub fn complete<K: AsRef<str>>(&mut self, keys: &[K]) {
        if keys.is_empty() {
            self.complete_all();
            return;
        }
        for key in keys {
            mark(&mut self.unfinished, &mut self.completed_keys, key.as_ref());
        }
        self.finish_if_done();
    }

    /// Marks one key as completed.
    pub fn complete_key(&mut self, key: &str) {
        self.complete(&[key]);
    }

    /// Marks all keys of the job as completed.
    pub fn complete_all(&mut self) {
        self.unfinished.clear();
        self.completed_keys.extend(self.plans.keys().cloned());
        self.finish_if_done();
    }

    /// Marks keys as failed; the error replaces an earlier one, also when it is none.
    pub fn fail<K: AsRef<str>>(&mut self, keys: &[K], error: Option<&str>) {
        for key in keys {
            mark(&mut self.unfinished, &mut self.failed_keys, key.as_ref());
        }
        self.error = error.map(str::to_owned);
        self.finish_if_done();
    }

    /// Marks every key that did not complete as failed: what a load must do before it ends cancelled, or the engine
    /// would use blocks that were never filled.
    pub fn fail_unfinished(&mut self, error: &str) {
        self.failed_keys.append(&mut self.unfinished);
        self.error = Some(error.to_owned());
        self.finish_if_done();
    }

    /// Cancels the job, whatever its state.
    pub fn cancel(&mut self, error: &str) {
        self.error = Some(error.to_owned());
        self.status = TransferJobStatus::Cancelled;
    }

    fn finish_if_done(&mut self) {
        if self.unfinished.is_empty() {
            self.status = if self.failed_keys.is_empty() {
                TransferJobStatus::Completed
            } else {
                TransferJobStatus::Failed
            };
        }
    }
}

/// Moves a key into a set of ended ones. Keys that are not the job's are kept too, as in the reference.
fn mark(unfinished: &mut BTreeSet<Arc<str>>, ended: &mut BTreeSet<Arc<str>>, key: &str) {
    if let Some(key) = unfinished.take(key) {
        ended.insert(key);
    } else if !ended.contains(key) {
        ended.insert(key.into());
    }
}

fn sum(sizes: impl IntoIterator<Item = u64>) -> Result<u64, JobError> {
    sizes.into_iter().try_fold(0u64, u64::checked_add).ok_or(JobError::BytesOverflow)
}
