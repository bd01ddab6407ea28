//! Limits of the command line, each with its reason.

use std::time::Duration;

/// Longest line of a trace or of the protocol between parent and child: 65,536 ids of 20 digits are 1.4 MB.
pub const LINE_BYTES_MAX: usize = 4 << 20;
/// Most blocks of one request: a request is one lookup, one load and one store job.
pub const REQUEST_BLOCKS_MAX: usize = kvfabric_core::limits::JOB_BLOCKS_MAX;
/// Most rank processes: each needs threads, sockets and a pool of its own.
pub const RANKS_MAX: usize = 256;
/// Most requests of a replay in flight over all ranks; each holds buffers for the trace's longest request.
pub const CONCURRENCY_MAX: usize = 4096;
/// Most worker threads of one rank process; more requests than that wait in its queue.
pub const WORKERS_PER_RANK_MAX: usize = 32;
/// Most messages that wait to be written to a child: the requests in flight and a few commands.
pub const CHILD_QUEUE_MAX: usize = CONCURRENCY_MAX + 16;
/// Most messages from children that wait to be handled; children stop writing beyond it.
pub const EVENT_QUEUE_MAX: usize = 1024;
/// Most blocks of a demo: 65,536 blocks of 128 KiB are 8 GiB on each side.
pub const DEMO_BLOCKS_MAX: u32 = 65_536;
/// Fewest blocks of a demo: half of them are evicted, and both halves must have some.
pub const DEMO_BLOCKS_MIN: u32 = 4;
/// Most different failure texts that a report keeps; further ones are counted together.
pub const FAILURE_KINDS_MAX: usize = 16;

/// How long a child may take to be ready: start of a rank waits 5 s for its directory, plus pool and certificates.
pub const CHILD_READY: Duration = Duration::from_secs(20);
/// How long a child may take for one command beyond the deadlines that the command itself carries.
pub const CHILD_COMMAND_SLACK: Duration = Duration::from_secs(30);
/// How long a child may take to end by itself before it is killed.
pub const CHILD_STOP: Duration = Duration::from_secs(5);
/// How long the end of a killed process may take to be seen.
pub const CHILD_REAP: Duration = Duration::from_secs(5);
/// A replay in which nothing finished for this long is stopped: load, store and flush deadlines are shorter together.
pub const REPLAY_STALL: Duration = Duration::from_secs(60);

/// Deadline of a load or store job in the demo: 4 MiB on a busy machine, built without optimisation. A dead owner shows
/// much earlier.
pub const DEMO_DEADLINE: Duration = Duration::from_secs(5);
/// Beyond deadline and drain bound a job may still wait for the processor before it is seen to be final.
pub const DEMO_FINAL_SLACK: Duration = Duration::from_millis(1500);
/// How long the demo loads while blocks are evicted and overwritten.
pub const DEMO_CHURN: Duration = Duration::from_millis(400);
/// How long the demo waits for the first failed block after the owner was killed.
pub const DEMO_KILL_NOTICE: Duration = Duration::from_secs(5);
/// How long the loads run before the owner is killed, so that the kill lands among them.
pub const DEMO_KILL_AFTER: Duration = Duration::from_millis(30);
/// How long a restarted rank may take until its name is free and its blocks are found.
pub const DEMO_RESTART: Duration = Duration::from_secs(8);

/// Deadline of a load or store job in a replay.
pub const REPLAY_DEADLINE: Duration = Duration::from_secs(10);
/// Time budget of one lookup: a budget that a busy machine keeps, since an unanswered lookup would change hit counts.
pub const LOOKUP_BUDGET: Duration = Duration::from_secs(5);

const _: () = assert!(
    REPLAY_STALL.as_secs()
        > 2 * REPLAY_DEADLINE.as_secs() + REPLAY_DEADLINE.as_secs() + LOOKUP_BUDGET.as_secs(),
    "load, second store, flush and lookup of one request must end before the replay is declared stalled"
);
const _: () = assert!(REQUEST_BLOCKS_MAX <= kvfabric_core::limits::LOOKUP_KEYS_MAX);
