//! Every limit by name, with its reason. Relations between limits are asserted at compile time.

use core::time::Duration;

/// Version of every message and of the layout id; peers with another version are refused.
pub const PROTOCOL_VERSION: u32 = 1;

/// Most keys in one LOOKUP or LOCATE: 65,536 fingerprints are 1 MiB, a quarter of a frame.
pub const LOOKUP_KEYS_MAX: usize = 65_536;
/// Most replicas of one key in a LOCATE answer: copies double a round, so four are enough to spread load (design 4).
pub const REPLICAS_PER_ANSWER_MAX: usize = 4;
/// Most replicas of one key that the directory keeps (design 4).
pub const REPLICAS_PER_KEY_MAX: usize = 8;
/// Longest frame, checked before anything is read or allocated.
pub const FRAME_BYTES_MAX: usize = 4 << 20;
/// Longest name of a rank, an engine or a cluster.
pub const NAME_BYTES_MAX: usize = 255;
/// Longest advertised address or path.
pub const ADDRESS_BYTES_MAX: usize = 512;
/// Most advertised addresses of one kind.
pub const ADDRESSES_MAX: usize = 64;
/// Longest UMBP key that is parsed: 131 bytes is usual, explicit namespaces may be longer.
pub const KEY_BYTES_MAX: usize = 4096;
/// Longest block hash inside a key (SHA-512).
pub const BLOCK_HASH_BYTES_MAX: usize = 64;
/// Most operations in one PUBLISH: with at most 64 B each it fits a frame.
pub const PUBLISH_OPS_MAX: usize = 32_768;
/// Most entries in one TOUCH.
pub const TOUCH_ENTRIES_MAX: usize = 65_536;
/// Most layout ids, slabs or regions in a HELLO_ACK or a slab update.
pub const SLABS_PER_MESSAGE_MAX: usize = 16_384;

/// Default extent of the pool.
pub const EXTENT_BYTES: u64 = 64 << 20;
/// An extent holds at least this many objects, so that a slab of large objects is not all slack.
pub const EXTENT_OBJECTS_MIN: u64 = 8;
/// Objects start at multiples of a cache line within an extent.
pub const OBJECT_ALIGN_BYTES: u64 = 64;
/// Largest object: one block of one group on one rank; a length field is 32 bits on some transports.
pub const OBJECT_BYTES_MAX: u64 = 1 << 31;
/// Most slots that a rank ever names; ids are never reused for another place (design 1.9).
pub const SLOTS_MAX: u32 = 1 << 26;
/// Share of slots that wait in quarantine after eviction, as a divisor: 1/100 (design 1.5).
pub const QUARANTINE_DIVISOR: u32 = 100;
/// An eviction candidate that still has resident children is refused this often, then evicted anyway (design 1.5).
pub const PARENT_REFUSALS_MAX: u32 = 64;
/// One block in this many is verified when verification is sampled (design 1.5).
pub const VERIFY_SAMPLE_INTERVAL: u64 = 256;

/// Bytes in flight from one source (design 4). One object may exceed it; then it travels alone.
pub const SOURCE_INFLIGHT_BYTES: u64 = 4 << 20;
/// Bytes in flight into one rank (design 4).
pub const DESTINATION_INFLIGHT_BYTES: u64 = 8 << 20;
/// Most blocks of all loads that a rank tracks; more are refused as a local shortage.
pub const LOAD_BLOCKS_MAX: usize = 1 << 20;
/// Most puts that a rank tracks; more are refused as a local shortage.
pub const PUTS_MAX: usize = 1 << 20;
/// Most loads or stores (jobs) that a rank tracks.
pub const JOBS_MAX: usize = 65_536;
/// Most blocks in one job.
pub const JOB_BLOCKS_MAX: usize = 65_536;

/// How long a peer that failed is left alone first; doubled for each failure in a row.
pub const SUSPECT_MIN: Duration = Duration::from_secs(1);
/// Longest time that a failed peer is left alone.
pub const SUSPECT_MAX: Duration = Duration::from_secs(30);
/// How long an unfinished miss report may delay the end of a failed load (design 1.9).
pub const MISS_REPORT_WAIT: Duration = Duration::from_millis(50);
/// How long the directory hides a replica from the rank that reported an error, at first (design 1.9).
pub const HIDE_MIN: Duration = Duration::from_secs(2);
/// Longest time that a replica is hidden from a rank.
pub const HIDE_MAX: Duration = Duration::from_secs(60);
/// Bound of in-flight work on shm after a forced end (design 1.8).
pub const DRAIN_SHM: Duration = Duration::from_millis(10);
/// Bound of in-flight work on tcp after a forced end (design 1.8).
pub const DRAIN_TCP: Duration = Duration::from_millis(50);
/// Bound of in-flight work on rdma after a forced end (design 1.8).
pub const DRAIN_RDMA: Duration = Duration::from_millis(500);
/// How long a locate request may take before its keys count as missing.
pub const LOCATE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long connecting to a peer may take, all transports together.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Publications wait at most this long for company in a batch.
pub const PUBLISH_DELAY: Duration = Duration::from_millis(1);
/// An unanswered PUBLISH is sent again after this long.
pub const PUBLISH_RETRY: Duration = Duration::from_millis(500);
/// At most one TOUCH per owner in this interval (design 1.7).
pub const TOUCH_INTERVAL: Duration = Duration::from_millis(100);
/// A CLEAR waits this long for the live ranks (design 1.9).
pub const CLEAR_TIMEOUT: Duration = Duration::from_secs(2);
/// Most operations waiting for the directory; beyond it the rank drops its queue and re-announces everything.
pub const PUBLISH_QUEUE_MAX: usize = 1 << 20;
/// Re-announcing starts at a random point within this time, so that ranks do not all come at once.
pub const REANNOUNCE_JITTER: Duration = Duration::from_millis(200);
/// Copies are cut into pieces of this size and the forced end is looked for between them (design 1.8).
pub const COPY_CHUNK_BYTES: usize = 256 << 10;

const _: () = {
    assert!(LOOKUP_KEYS_MAX * 16 <= FRAME_BYTES_MAX / 4);
    assert!(PUBLISH_OPS_MAX * 64 <= FRAME_BYTES_MAX);
    assert!(REPLICAS_PER_ANSWER_MAX <= REPLICAS_PER_KEY_MAX);
    assert!(SOURCE_INFLIGHT_BYTES <= DESTINATION_INFLIGHT_BYTES);
    assert!(JOB_BLOCKS_MAX <= LOAD_BLOCKS_MAX && JOB_BLOCKS_MAX <= PUTS_MAX);
    assert!(EXTENT_BYTES % OBJECT_ALIGN_BYTES == 0);
    assert!(KEY_BYTES_MAX > NAME_BYTES_MAX + 2 * BLOCK_HASH_BYTES_MAX);
};
