//! Jobs: what a store or a load is to its engine.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::{BlockError, BlockOk};

/// Result of every block of a final job, in the order of submission.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobReport {
    /// One result a block.
    pub outcomes: Vec<Result<BlockOk, BlockError>>,
}

impl JobReport {
    /// Number of blocks that ended well.
    #[must_use]
    pub fn completed(&self) -> usize {
        self.outcomes.iter().filter(|outcome| outcome.is_ok()).count()
    }

    /// Whether every block ended well.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.outcomes.iter().all(Result::is_ok)
    }
}

/// Ends a job's work by force; implemented by the node.
pub(crate) trait Cancel: Send + Sync {
    fn cancel(&self, job: u64);
}

pub(crate) struct JobState {
    pub(crate) id: u64,
    begun: Instant,
    is_final: AtomicBool,
    inner: Mutex<Inner>,
    changed: Condvar,
}

struct Inner {
    outcomes: Vec<Option<Result<BlockOk, BlockError>>>,
    report: Option<Arc<JobReport>>,
}

impl JobState {
    pub(crate) fn new(id: u64, blocks: usize) -> Arc<Self> {
        Arc::new(Self {
            id,
            begun: Instant::now(),
            is_final: AtomicBool::new(false),
            inner: Mutex::new(Inner { outcomes: vec![None; blocks], report: None }),
            changed: Condvar::new(),
        })
    }

    /// Time since submission.
    pub(crate) fn age(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Records the end of one block; the first result of a block stands.
    pub(crate) fn set(&self, block: usize, outcome: Result<BlockOk, BlockError>) {
        let mut inner = self.inner.lock();
        if let Some(slot @ None) = inner.outcomes.get_mut(block) {
            *slot = Some(outcome);
        }
    }

    /// Makes the job final. Blocks without a result are failures: success is never assumed.
    pub(crate) fn finish(&self) {
        let mut inner = self.inner.lock();
        if inner.report.is_none() {
            let outcomes = std::mem::take(&mut inner.outcomes)
                .into_iter()
                .map(|outcome| outcome.unwrap_or(Err(BlockError::NodeStopped)))
                .collect();
            inner.report = Some(Arc::new(JobReport { outcomes }));
            self.is_final.store(true, Ordering::Release);
            self.changed.notify_all();
        }
    }
}

/// A store or load in progress. Dropping the handle neither cancels nor waits: the memory stays with the job.
#[derive(Clone)]
pub struct Job {
    pub(crate) state: Arc<JobState>,
    pub(crate) cancel: Arc<dyn Cancel>,
}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Job({}, final: {})", self.state.id, self.is_final())
    }
}

impl Job {
    /// Number of the job, unique within the node.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.state.id
    }

    /// Whether the job is final: its memory belongs to the engine again. One atomic read.
    #[must_use]
    pub fn is_final(&self) -> bool {
        self.state.is_final.load(Ordering::Acquire)
    }

    /// The results, once the job is final.
    #[must_use]
    pub fn poll(&self) -> Option<Arc<JobReport>> {
        if !self.is_final() {
            return None;
        }
        self.state.inner.lock().report.clone()
    }

    /// Waits for the end, at most `timeout`. `None` means pending: the memory still belongs to the job.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> Option<Arc<JobReport>> {
        let until = Instant::now() + timeout;
        let mut inner = self.state.inner.lock();
        while inner.report.is_none() {
            if self.state.changed.wait_until(&mut inner, until).timed_out() {
                break;
            }
        }
        inner.report.clone()
    }

    /// Asks for an early end. The job becomes final within the transport's drain bound (design 1.8); keep waiting.
    pub fn cancel(&self) {
        if !self.is_final() {
            self.cancel.cancel(self.state.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct NoCancel;
    impl Cancel for NoCancel {
        fn cancel(&self, _job: u64) {}
    }

    #[test]
    fn blocks_without_a_result_fail() {
        let state = JobState::new(1, 2);
        let job = Job { state: state.clone(), cancel: Arc::new(NoCancel) };
        state.set(0, Ok(BlockOk::Stored));
        state.set(0, Err(BlockError::NodeStopped));
        assert!(job.poll().is_none());
        assert!(job.wait(Duration::from_millis(1)).is_none());
        state.finish();
        let report = job.poll().unwrap();
        assert_eq!(report.outcomes, vec![Ok(BlockOk::Stored), Err(BlockError::NodeStopped)]);
        assert_eq!(report.completed(), 1);
    }
}
