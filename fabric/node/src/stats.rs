//! Figures of a node.

/// Counters and gauges of a node. Counters count from its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeStats {
    /// Blocks stored by copying.
    pub stores_ok: u64,
    /// Blocks whose key was resident already.
    pub stores_resident: u64,
    /// Blocks that could not be stored.
    pub stores_failed: u64,
    /// Bytes copied into the pool.
    pub bytes_stored: u64,
    /// Blocks loaded and validated.
    pub loads_ok: u64,
    /// Blocks that no rank had.
    pub loads_missed: u64,
    /// Blocks that turned out evicted, overwritten or of an earlier life of their owner.
    pub loads_stale: u64,
    /// Blocks that failed for another reason.
    pub loads_failed: u64,
    /// Bytes loaded and validated.
    pub bytes_loaded: u64,
    /// Of these over shm.
    pub bytes_loaded_shm: u64,
    /// Of these over tcp.
    pub bytes_loaded_tcp: u64,
    /// Of these over rdma.
    pub bytes_loaded_rdma: u64,
    /// Reads whose word had another generation: stale hints turned into misses or retries.
    pub stale_reads: u64,
    /// Reads whose word carried another tag. An alarm.
    pub tag_mismatches: u64,
    /// Reads whose bytes did not match their checksum. An alarm.
    pub checksum_mismatches: u64,
    /// Hints of another life of their owner.
    pub incarnation_mismatches: u64,
    /// Miss reports sent.
    pub miss_reports: u64,
    /// Capacity of the pool, bytes.
    pub pool_capacity_bytes: u64,
    /// Memory that the pool has from the system, bytes.
    pub pool_backed_bytes: u64,
    /// Bytes of resident objects.
    pub pool_used_bytes: u64,
    /// Resident objects.
    pub pool_objects: u64,
    /// Objects evicted to make room.
    pub evictions: u64,
    /// Loads and stores in progress.
    pub jobs_in_progress: u64,
    /// Connected peers.
    pub peers_connected: u64,
    /// Whether the rank is a member of the directory now.
    pub directory_connected: bool,
}
