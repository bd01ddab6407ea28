//! What parent and child processes of `demo` and `replay` say to each other: one JSON object a line, commands on the
//! child's standard input, events on its standard output. The first line tells a child what it is.

use kvfabric_node::Settings;
use serde::{Deserialize, Serialize};

use crate::summary::{Counts, TrafficByTransport};

/// What a child is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "role", rename_all = "snake_case", deny_unknown_fields)]
pub enum Role {
    /// A directory; ends when its standard input closes.
    Directory {
        /// Resolved settings.
        settings: Box<Settings>,
    },
    /// A rank of the demo: answers [`DemoCommand`]s.
    DemoRank {
        /// Resolved settings.
        settings: Box<Settings>,
        /// Blocks that its tensors hold.
        blocks: u32,
        /// Until when a start that the directory refuses is tried again, milliseconds: the rank's earlier process may
        /// not be gone yet.
        start_within_ms: u64,
    },
    /// A rank of a replay: takes [`ReplayRequest`]s.
    ReplayRank(ReplayRole),
}

/// How a replay's rank works.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplayRole {
    /// Resolved settings.
    pub settings: Box<Settings>,
    /// Size of one block's object, bytes.
    pub object_bytes: usize,
    /// Blocks of the trace's longest request.
    pub request_blocks_max: usize,
    /// Requests worked on at once.
    pub workers: usize,
    /// Whether each request's blocks must be found by every later lookup: the next request waits for that.
    pub in_order: bool,
    /// Whether the pool may not evict: an eviction is an error then.
    pub unlimited: bool,
}

/// A command to a rank of the demo. Answered by one [`ChildEvent::Report`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case", deny_unknown_fields)]
pub enum DemoCommand {
    /// Fill blocks and store them, then wait for the directory.
    Store {
        /// Keys.
        keys: KeyRange,
        /// Number of the put.
        put: u64,
    },
    /// Ask the directory.
    Lookup {
        /// Keys.
        keys: KeyRange,
    },
    /// Load blocks into poisoned destinations and check every byte.
    Load {
        /// Keys.
        keys: KeyRange,
        /// First and last put whose content is right.
        puts: (u64, u64),
    },
    /// Evict own blocks.
    Evict {
        /// Keys.
        keys: KeyRange,
    },
    /// Evict and store again with other content, over and over.
    Churn {
        /// Keys.
        keys: KeyRange,
        /// Number of the first put.
        first_put: u64,
        /// For how long.
        duration_ms: u64,
    },
    /// Load over and over; says [`ChildEvent::LoopStarted`] when the first load is under way.
    LoadLoop {
        /// Keys.
        keys: KeyRange,
        /// First and last put whose content is right.
        puts: (u64, u64),
        /// Whether to end at the first block that is not loaded.
        until_failure: bool,
        /// For how long at most.
        duration_ms: u64,
    },
    /// End.
    Stop,
}

/// Numbers of consecutive keys. Key `first + i` lies in block `i` of the rank's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyRange {
    /// First number.
    pub first: u64,
    /// How many.
    pub count: u32,
}

/// A request to a replay's rank. Answered by [`ChildEvent::Stored`] and [`ChildEvent::Done`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplayRequest {
    /// Number of the request in the trace, from 0.
    pub request: usize,
    /// Its blocks.
    pub hash_ids: Vec<u64>,
}

/// An event from a child.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ChildEvent {
    /// The child works.
    Ready {
        /// Where a directory listens.
        address: Option<String>,
        /// A rank's incarnation.
        incarnation: Option<u64>,
    },
    /// The child cannot go on; it ends.
    Failed {
        /// Error with causes.
        message: String,
        /// Whether the cause is that the transport asked for does not work on this machine.
        transport_unavailable: bool,
    },
    /// Loads of a [`DemoCommand::LoadLoop`] are under way.
    LoopStarted,
    /// Result of a [`DemoCommand`].
    Report(Box<DemoReport>),
    /// A request's blocks are stored, and, in order, found by later lookups.
    Stored {
        /// Number of the request.
        request: usize,
    },
    /// A request is over, its bytes checked.
    Done(Box<ReplayDone>),
    /// The child ends as asked.
    Stopped(RankCounters),
}

/// Result of one [`DemoCommand`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DemoReport {
    /// Outcomes.
    pub counts: Counts,
    /// Hits of a lookup, or evicted blocks.
    pub found: u64,
    /// Whether the directory answered in full, or acknowledged everything stored.
    pub complete: bool,
    /// Time of the operations themselves, without filling and checking, seconds.
    pub seconds: f64,
    /// Median latency of one job, microseconds.
    pub p50_us: u64,
    /// 99th percentile of one job, microseconds.
    pub p99_us: u64,
    /// Longest job, microseconds.
    pub max_us: u64,
    /// Traffic.
    pub traffic: TrafficByTransport,
    /// Smallest and largest put whose content was loaded.
    pub puts_seen: Option<(u64, u64)>,
    /// Largest put stored.
    pub last_put: u64,
    /// Rounds over all keys.
    pub rounds: u64,
    /// First thing that was wrong.
    pub wrong: Option<String>,
}

/// Result of one [`ReplayRequest`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ReplayDone {
    /// Number of the request.
    pub request: usize,
    /// Leading blocks that were found and arrived.
    pub prefix_hits: u64,
    /// Outcomes.
    pub counts: Counts,
    /// Whether the directory answered in full.
    pub complete: bool,
    /// Latency of the lookup, microseconds.
    pub lookup_us: u64,
    /// Latency of the load, microseconds; 0 without a load.
    pub load_us: u64,
    /// Latency of the store with its flush, microseconds; 0 without a store.
    pub store_us: u64,
    /// Traffic.
    pub traffic: TrafficByTransport,
    /// First thing that was wrong.
    pub wrong: Option<String>,
}

/// Counters of a rank at its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankCounters {
    /// Words that carried another key's tag.
    pub tag_mismatches: u64,
    /// Blocks whose checksum did not match.
    pub checksum_mismatches: u64,
    /// Blocks evicted.
    pub evictions: u64,
    /// Bytes of the pool in use.
    pub pool_used_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip<T: Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug>(value: &T) {
        let text = serde_json::to_string(value).unwrap();
        assert!(!text.contains('\n'));
        assert_eq!(&serde_json::from_str::<T>(&text).unwrap(), value);
    }

    #[test]
    fn messages_round_trip_on_one_line() {
        let settings = Box::new(Settings { name: Some("a\nb".into()), ..Settings::default() });
        round_trip(&Role::Directory { settings: settings.clone() });
        round_trip(&Role::DemoRank { settings: settings.clone(), blocks: 7, start_within_ms: 5 });
        round_trip(&Role::ReplayRank(ReplayRole {
            settings,
            object_bytes: 8192,
            request_blocks_max: 3,
            workers: 2,
            in_order: true,
            unlimited: false,
        }));
        round_trip(&DemoCommand::Load { keys: KeyRange { first: 1, count: 2 }, puts: (1, u64::MAX) });
        round_trip(&DemoCommand::Stop);
        round_trip(&ReplayRequest { request: 3, hash_ids: vec![0, u64::MAX] });
        let mut counts = Counts::default();
        counts.fail("why\n");
        round_trip(&ChildEvent::Report(Box::new(DemoReport {
            counts: counts.clone(),
            puts_seen: Some((1, 2)),
            seconds: 0.25,
            ..DemoReport::default()
        })));
        round_trip(&ChildEvent::Done(Box::new(ReplayDone { counts, ..ReplayDone::default() })));
        round_trip(&ChildEvent::Stopped(RankCounters { evictions: 4, ..RankCounters::default() }));
        round_trip(&ChildEvent::LoopStarted);
    }

    #[test]
    fn unknown_roles_and_commands_are_refused() {
        assert!(serde_json::from_str::<Role>("{\"role\":\"witness\"}").is_err());
        assert!(serde_json::from_str::<DemoCommand>("{\"command\":\"start\"}").is_err());
        assert!(serde_json::from_str::<ReplayRequest>("{\"request\":1}").is_err());
    }
}
