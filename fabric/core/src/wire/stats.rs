//! Figures of a directory.

use serde::{Deserialize, Serialize};

/// Figures of a directory. Counters count from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// The directory's life.
    pub session: u64,
    /// Keys in the table, those of hidden ranks included.
    pub keys: u64,
    /// Replicas in the table.
    pub replicas: u64,
    /// Memory of the table, bytes.
    pub table_bytes: u64,
    /// Most memory that the table may take, bytes.
    pub table_bytes_max: u64,
    /// Ranks connected and answering.
    pub ranks_live: u32,
    /// Ranks that are hidden until they answer or come back.
    pub ranks_hidden: u32,
    /// Incarnations that are closed for ever.
    pub incarnations_closed: u64,
    /// Namespaces numbered.
    pub namespaces: u32,
    /// Pairs (engine, owner) that are hidden from each other.
    pub hides: u32,
    /// PUBLISH messages applied.
    pub publishes: u64,
    /// PUBLISH messages that had been applied before.
    pub publishes_duplicate: u64,
    /// PUBLISH messages that came too early.
    pub publishes_gap: u64,
    /// PUBLISH messages of unknown ranks, dead incarnations or foreign connections.
    pub publishes_foreign: u64,
    /// Publications taken.
    pub puts: u64,
    /// Publications that lost against a later generation of the same rank.
    pub puts_stale: u64,
    /// Publications refused for a cleared epoch.
    pub puts_cleared: u64,
    /// Publications refused for lack of memory.
    pub puts_full: u64,
    /// Publications refused because enough ranks offer the key.
    pub puts_crowded: u64,
    /// Removals that found their entry.
    pub removes: u64,
    /// Removals that found nothing, or another generation.
    pub removes_stale: u64,
    /// Entries removed after a stale read.
    pub misses_stale: u64,
    /// Reports of a tag mismatch: an alarm.
    pub misses_tag: u64,
    /// Reports of a checksum mismatch: an alarm.
    pub misses_checksum: u64,
    /// Reports of an unreachable owner.
    pub misses_unreachable: u64,
    /// Entries of closed ranks and cleared namespaces removed in passing.
    pub swept: u64,
    /// CLEAR requests.
    pub clears: u64,
    /// CLEAR requests that not every rank acknowledged in time.
    pub clears_incomplete: u64,
}
