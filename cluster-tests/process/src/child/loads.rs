//! Loads that check themselves: every block that is reported as loaded is compared with its key's payload, and memory
//! must not change after its load is final.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfabric_node::{BlockError, BlockOk, Job, JobReport, LoadItem, Namespace, Node};

use super::kind_of;
use crate::arena::Arena;
use crate::payload::{check, umbp_key, Shape};
use crate::protocol::{LoadLoop, Tally};
use crate::random::Random;

/// A load that is not final this long after its deadline is stuck. Generous: the machine may be busy.
const STUCK_AFTER: Duration = Duration::from_secs(15);

/// A rank's means to load.
#[derive(Clone)]
pub(super) struct Loader {
    pub(super) node: Arc<Node>,
    pub(super) ns: Namespace,
    pub(super) shape: Shape,
}

/// A load in progress.
pub(super) struct Running {
    pub(super) job: Job,
    area: usize,
    keys: Vec<u64>,
    begun: Instant,
    pub(super) deadline: Duration,
}

impl Loader {
    /// Submits a load into an area that rested; `tally` gets what its canary says.
    pub(super) fn begin(
        &self,
        arena: &mut Arena,
        keys: Vec<u64>,
        deadline: Duration,
        tally: &mut Tally,
    ) -> Running {
        let (area, broken) = arena.take();
        tally.canary_bytes += broken;
        let items = keys
            .iter()
            .enumerate()
            .map(|(block, key)| LoadItem { key: umbp_key(*key), destination: arena.list(area, block) })
            .collect();
        let begun = Instant::now();
        let job = self.node.load(&self.ns, items, deadline).expect("the load is taken");
        Running { job, area, keys, begun, deadline }
    }

    /// Waits for the end and checks every block. False while it is not final.
    pub(super) fn end(
        &self,
        arena: &mut Arena,
        running: &Running,
        wait: Duration,
        tally: &mut Tally,
    ) -> bool {
        let Some(report) = running.job.wait(wait) else { return false };
        let took = running.begun.elapsed();
        tally.final_ms = super::millis(took);
        let late = took.saturating_sub(running.deadline).as_micros();
        tally.late_us_max = tally.late_us_max.max(u64::try_from(late).unwrap_or(u64::MAX));
        tally.loads += 1;
        self.judge(arena, running, &report, tally);
        arena.rest(running.area);
        true
    }

    fn judge(&self, arena: &Arena, running: &Running, report: &JobReport, tally: &mut Tally) {
        assert_eq!(report.outcomes.len(), running.keys.len(), "one result a block");
        let mut bytes = vec![0; self.shape.object_bytes];
        for (block, (key, outcome)) in running.keys.iter().zip(&report.outcomes).enumerate() {
            match outcome {
                Ok(BlockOk::Loaded { transport, local }) => {
                    arena.list(running.area, block).read_object(&mut bytes).expect("the block's own size");
                    match check(self.shape, *key, &bytes) {
                        Ok(put) => {
                            tally.right += 1;
                            *tally.puts.entry(put).or_default() += 1;
                            let by = if *local { "own pool".to_owned() } else { transport.to_string() };
                            *tally.transports.entry(by).or_default() += 1;
                        }
                        Err(wrong) => {
                            tally.wrong += 1;
                            let words = format!("key {key} over {transport}: {wrong:?}");
                            tally.first_wrong.get_or_insert(words);
                        }
                    }
                }
                Ok(other) => panic!("a load reports {other:?}"),
                Err(error) if error.is_miss() => match kind(error).as_str() {
                    "NotFound" => tally.missed += 1,
                    _ => tally.stale += 1,
                },
                Err(error) => *tally.failed.entry(kind(error)).or_default() += 1,
            }
        }
    }
}

/// Name of the innermost error.
fn kind(error: &BlockError) -> String {
    match error {
        BlockError::Load(error) => kind_of(error),
        BlockError::Put(error) => kind_of(error),
        BlockError::Memory(error) => kind_of(error),
        other => kind_of(other),
    }
}

/// One turn of a load loop: a run of keys, now and then one that is cancelled.
pub(super) fn turn(loader: &Loader, arena: &mut Arena, spec: &LoadLoop, random: &mut Random) -> Tally {
    let mut tally = Tally::default();
    let count = 1 + random.below(arena.blocks() as u64);
    let start = random.below(spec.keys.count);
    let keys =
        (0..count.min(spec.keys.count)).map(|at| spec.keys.first + (start + at) % spec.keys.count).collect();
    let deadline = Duration::from_millis(spec.deadline_ms);
    let running = loader.begin(arena, keys, deadline, &mut tally);
    if spec.cancel_one_in > 0 && random.once_in(spec.cancel_one_in) {
        std::thread::sleep(random.between(Duration::ZERO, Duration::from_millis(4)));
        running.job.cancel();
    }
    if !loader.end(arena, &running, deadline + STUCK_AFTER, &mut tally) {
        tally.stuck += 1;
    }
    tally
}
