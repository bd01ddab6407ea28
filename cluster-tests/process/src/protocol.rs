//! Lines between the harness and its processes: one JSON object each.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::payload::Shape;

/// What a process is; the first line it gets.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// A directory.
    Directory(DirectorySpec),
    /// A rank.
    Rank(RankSpec),
}

/// A directory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct DirectorySpec {
    /// Where it listens.
    pub listen: String,
    /// Silence after which a rank is hidden.
    pub peer_timeout_ms: u64,
}

/// A rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RankSpec {
    /// Its name.
    pub name: String,
    /// Address of the directory.
    pub directory: String,
    /// auto, shm or tcp.
    pub transport: String,
    /// Where it listens.
    pub listen: String,
    /// Capacity of its pool, bytes.
    pub pool_bytes: u64,
    /// Extent size, bytes.
    pub extent_bytes: u64,
    /// Silence after which it takes the directory for gone.
    pub peer_timeout_ms: u64,
    /// Patience at start.
    pub start_timeout_ms: u64,
    /// Layout of its blocks.
    pub shape: Shape,
    /// Blocks in one load at most.
    pub load_blocks: usize,
}

/// A run of keys.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Keys {
    /// First key number.
    pub first: u64,
    /// How many.
    pub count: u64,
}

impl Keys {
    /// The key numbers.
    pub fn iter(self) -> impl Iterator<Item = u64> {
        self.first..self.first + self.count
    }
}

/// A loop that loads until told to stop.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct LoadLoop {
    /// Keys to choose from.
    pub keys: Keys,
    /// Deadline of each load.
    pub deadline_ms: u64,
    /// One load in so many is cancelled at a random moment; 0: none.
    pub cancel_one_in: u64,
    /// Seed of its choices.
    pub seed: u64,
}

/// A loop that evicts and stores until told to stop.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct ChurnLoop {
    /// Keys to choose from.
    pub keys: Keys,
    /// The first put's number; counts up from there.
    pub first_put: u64,
    /// Keys evicted and stored at a time.
    pub batch: u64,
    /// Pause between turns.
    pub pause_ms: u64,
    /// Seed of its choices.
    pub seed: u64,
}

/// What a process is told to do. Each command has one reply.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Command {
    /// Stores keys with the bytes of a put, then waits until the directory knows. Replies [`Reply::Count`].
    Store {
        /// Which.
        keys: Keys,
        /// Number of the put.
        put: u64,
    },
    /// Stores keys, deregisters the sources, overwrites them with other bytes and replies [`Reply::Count`].
    StoreAndReuse {
        /// Which.
        keys: Keys,
        /// Number of the put.
        put: u64,
    },
    /// Asks the directory. Replies [`Reply::Lookup`].
    Lookup {
        /// Which.
        keys: Keys,
        /// Time budget.
        budget_ms: u64,
    },
    /// Loads and checks keys. Replies [`Reply::Tally`].
    Load {
        /// Which.
        keys: Keys,
        /// Deadline.
        deadline_ms: u64,
    },
    /// Begins a load and replies [`Reply::Done`].
    BeginLoad {
        /// Which.
        keys: Keys,
        /// Deadline.
        deadline_ms: u64,
    },
    /// Waits for the load that was begun. Replies [`Reply::Tally`] with `final_ms`, or [`Reply::Pending`].
    EndLoad {
        /// Whether to cancel it first.
        cancel: bool,
        /// Longest wait.
        wait_ms: u64,
    },
    /// Tries to deregister the memory of the load that was begun. Replies [`Reply::Error`] or [`Reply::Done`].
    DeregisterLoadMemory,
    /// Bytes of rested memory that changed although nobody may touch them. Replies [`Reply::Count`].
    CheckCanaries,
    /// Starts a load loop.
    StartLoads(LoadLoop),
    /// What the load loop counted so far. Replies [`Reply::Tally`].
    PeekLoads,
    /// Stops the load loop. Replies [`Reply::Tally`], canaries checked once more.
    StopLoads,
    /// Starts an evict and store loop.
    StartChurn(ChurnLoop),
    /// Stops it. Replies [`Reply::Count`]: blocks stored.
    StopChurn,
    /// Evicts keys. Replies [`Reply::Count`].
    Evict {
        /// Which.
        keys: Keys,
    },
    /// Clears the namespace. Replies [`Reply::Count`]: 1 if complete.
    Clear,
    /// Figures. Replies [`Reply::Rank`] or [`Reply::Directory`].
    Stats,
}

/// Figures of loads.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tally {
    /// Loads.
    pub loads: u64,
    /// Blocks that are right.
    pub right: u64,
    /// Blocks that no rank had.
    pub missed: u64,
    /// Blocks evicted or overwritten at their owner.
    pub stale: u64,
    /// Blocks that failed otherwise, by error.
    pub failed: BTreeMap<String, u64>,
    /// Blocks reported as loaded whose bytes are not those of one put of their key. Must be 0.
    pub wrong: u64,
    /// The first of them.
    pub first_wrong: Option<String>,
    /// Bytes that changed after their load was final. Must be 0.
    pub canary_bytes: u64,
    /// Loads that were not final long after their deadline. Must be 0.
    pub stuck: u64,
    /// Longest time from deadline to final, microseconds.
    pub late_us_max: u64,
    /// When the last load was final, milliseconds after its submission.
    pub final_ms: u64,
    /// Right blocks by number of put.
    pub puts: BTreeMap<u64, u64>,
    /// Right blocks by transport.
    pub transports: BTreeMap<String, u64>,
}

impl Tally {
    /// Adds another.
    pub fn add(&mut self, other: &Self) {
        self.loads += other.loads;
        self.right += other.right;
        self.missed += other.missed;
        self.stale += other.stale;
        self.wrong += other.wrong;
        self.first_wrong = self.first_wrong.take().or_else(|| other.first_wrong.clone());
        self.canary_bytes += other.canary_bytes;
        self.stuck += other.stuck;
        self.late_us_max = self.late_us_max.max(other.late_us_max);
        self.final_ms = other.final_ms;
        add_counts(&mut self.failed, &other.failed);
        add_counts(&mut self.puts, &other.puts);
        add_counts(&mut self.transports, &other.transports);
    }

    /// Blocks that failed otherwise than by a miss.
    #[must_use]
    pub fn failed_blocks(&self) -> u64 {
        self.failed.values().sum()
    }

    /// Panics if a byte was wrong, a byte changed after the end of its load, or a load did not end.
    pub fn assert_safe(&self, who: &str) {
        assert_eq!(self.wrong, 0, "{who}: wrong bytes: {:?}", self.first_wrong);
        assert_eq!(self.canary_bytes, 0, "{who}: bytes changed after their load was final");
        assert_eq!(self.stuck, 0, "{who}: loads did not end");
    }

    /// One line for the test's output, without the list of puts.
    #[must_use]
    pub fn summary(&self) -> String {
        format!(
            "{} loads: {} right of {} puts, {} missed, {} stale, failed {:?}, latest {} us after the deadline, by {:?}",
            self.loads,
            self.right,
            self.puts.len(),
            self.missed,
            self.stale,
            self.failed,
            self.late_us_max,
            self.transports
        )
    }
}

fn add_counts<K: Ord + Clone>(to: &mut BTreeMap<K, u64>, from: &BTreeMap<K, u64>) {
    for (key, count) in from {
        *to.entry(key.clone()).or_default() += count;
    }
}

/// Figures of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFigures {
    /// Whether it is a member of the directory.
    pub directory_connected: bool,
    /// Incarnation.
    pub incarnation: u64,
    /// Loads and stores in progress.
    pub jobs_in_progress: u64,
    /// Resident objects.
    pub pool_objects: u64,
    /// Bytes of resident objects.
    pub pool_used_bytes: u64,
    /// Capacity of the pool.
    pub pool_capacity_bytes: u64,
    /// Stale reads.
    pub stale_reads: u64,
    /// Alarms: tags and checksums that did not match.
    pub mismatches: u64,
    /// Connected peers and their transport.
    pub routes: BTreeMap<String, String>,
}

/// Figures of a directory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectoryFigures {
    /// Keys.
    pub keys: u64,
    /// Live ranks.
    pub ranks_live: u64,
    /// Hidden ranks.
    pub ranks_hidden: u64,
}

/// What a process answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// The role runs.
    Ready {
        /// Address of a directory; empty for a rank.
        address: String,
        /// How long its start took.
        start_ms: u64,
    },
    /// The role could not start, or a command failed.
    Error {
        /// Name of the error.
        kind: String,
        /// Its words.
        message: String,
        /// How long it took.
        after_ms: u64,
    },
    /// Done.
    Done,
    /// A number.
    Count(u64),
    /// Not final yet.
    Pending,
    /// Answer of a lookup.
    Lookup {
        /// Hits.
        hits: u64,
        /// Whether the directory answered in full.
        complete: bool,
        /// How long it took.
        micros: u64,
    },
    /// Figures of loads.
    Tally(Tally),
    /// Figures of a rank.
    Rank(RankFigures),
    /// Figures of a directory.
    Directory(DirectoryFigures),
}
