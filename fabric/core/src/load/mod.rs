//! The reader side of a rank: loads, replicas, peers, deadlines (design 1.3 R1-R8, 1.8, 4).

mod config;
mod loader;
mod peer;
mod peers;
mod plan;
mod slab;
mod state;
mod stats;

pub use config::{LoaderConfig, VerifyPolicy};
pub use loader::Loader;
pub use stats::{FailureStats, LoadStats, TransportStats};

use core::time::Duration;

use smallvec::SmallVec;
use thiserror::Error;

use crate::hash::KeyHash;
use crate::{Fingerprint, Generation, Incarnation, LayoutId, NsId, RankId, SlotId, Time};

/// Most reads in flight: with small objects the byte limits alone would allow more than a transport's queues hold.
pub const READS_INFLIGHT_MAX: usize = 4096;
/// Most peers that are remembered, the closed ones included. Idle ones are forgotten first.
pub const PEERS_MAX: usize = 65_536;
/// Most miss reports waiting for their acknowledgement; beyond it they count as lost at once.
pub const REPORTS_MAX: usize = 1 << 20;
/// One read in this many goes to the load that waited longest instead of the one with the earliest deadline, so that
/// a stream of urgent loads cannot starve another.
pub const FAIR_TURN_INTERVAL: u32 = 8;
/// First pause after a shortage on this rank; doubled for each shortage in a row.
pub const SHORTAGE_PAUSE_MIN: Duration = Duration::from_millis(1);
/// Longest pause after a shortage on this rank.
pub const SHORTAGE_PAUSE_MAX: Duration = Duration::from_millis(64);
/// A peer with reads in flight that retires none for this long, plus the time that its bytes take at
/// [`STALL_BYTES_PER_MICRO`], is stalled: its reads are ended by force and go to other replicas.
pub const STALL_MIN: Duration = Duration::from_secs(1);
/// The slowest peer that does not count as stalled: 10 MB/s.
pub const STALL_BYTES_PER_MICRO: u64 = 10;
/// A read that is ended at its load's deadline counts against its replica only if it was in flight for this long
/// (the fixed part of design 4's application deadline): a younger one says nothing about the owner.
pub const READ_BLAME_MIN: Duration = Duration::from_millis(20);

const _: () = {
    use crate::limits::{JOB_BLOCKS_MAX, LOAD_BLOCKS_MAX, LOOKUP_KEYS_MAX, REPLICAS_PER_ANSWER_MAX};
    // One LOCATE holds a whole load; and the keys that one timeout announces stay within a few messages.
    assert!(JOB_BLOCKS_MAX <= LOOKUP_KEYS_MAX);
    assert!(REPORTS_MAX >= LOAD_BLOCKS_MAX);
    // A block's cursor over its replicas is a byte.
    assert!(REPLICAS_PER_ANSWER_MAX < 255);
    assert!(FAIR_TURN_INTERVAL > 1);
};

/// A load job, named by the driver; unique within the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LoadId(pub u64);

/// One read operation of one block, named by core; unique within the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReadId(pub u64);

/// A LOCATE request, named by core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LocateId(pub u64);

/// A MISS_REPORT, named by core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReportId(pub u64);

/// One place where a key may be (design 1.7). A hint: nothing in it is trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    /// Owner.
    pub rank: RankId,
    /// The owner's incarnation when it published.
    pub incarnation: Incarnation,
    /// Slot.
    pub slot: SlotId,
    /// Generation.
    pub generation: Generation,
    /// Storage tier; 0 = memory.
    pub tier: u8,
    /// Load of the owner, 0..=255.
    pub load: u8,
}

/// The replicas of one key, best first.
pub type Replicas = SmallVec<[Replica; 1]>;

/// One block to load. Its destination stays with the driver, under (load, index).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadBlock {
    /// K of the key.
    pub key: KeyHash,
    /// Layout of the object's group.
    pub layout: LayoutId,
    /// Size of the object, bytes.
    pub object_bytes: u64,
    /// A replica in this rank's own pool, if the owner side knows one; tried first.
    pub local: Option<Replica>,
}

/// A load job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadRequest {
    /// Namespace of all blocks.
    pub ns: NsId,
    /// The blocks, at most [`crate::limits::JOB_BLOCKS_MAX`].
    pub blocks: Vec<LoadBlock>,
    /// When in-flight work is ended by force.
    pub deadline: Time,
}

/// How a read ended without a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ReadFailure {
    /// Ended by force (deadline, cancel); the destination is free.
    #[error("the read was ended by force")]
    Aborted,
    /// The connection to the owner broke.
    #[error("the connection to the owner broke")]
    PeerLost,
    /// The owner does not know the slot, or its size differs: a stale hint.
    #[error("the owner does not know this slot or its size differs")]
    Refused,
    /// A shortage on this side (queue full, no memory): the peer is not to blame.
    #[error("a shortage on this rank")]
    LocalShortage,
    /// The peer broke the protocol; its connection was closed.
    #[error("the owner broke the protocol")]
    Protocol,
}

impl ReadFailure {
    /// Whether the cause lies on this side; such a failure never counts against the peer.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::LocalShortage | Self::Aborted)
    }
}

/// The directory did not answer a LOCATE, or not in a way that can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the directory did not answer")]
pub struct DirectoryUnavailable;

impl DirectoryUnavailable {
    /// Whether asking again later may succeed: always.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        true
    }

    /// Whether the cause lies on this rank: never known.
    #[must_use]
    pub fn is_local(&self) -> bool {
        false
    }
}

/// Why a peer cannot be read from now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PeerFailure {
    /// No transport reached it.
    #[error("the peer cannot be reached")]
    Unreachable,
    /// Another incarnation answered: the entries are of an earlier life (rule R1).
    #[error("another incarnation of the peer answered")]
    WrongIncarnation,
    /// The connection was lost.
    #[error("the connection to the peer was lost")]
    Lost,
    /// The peer broke the protocol.
    #[error("the peer broke the protocol")]
    Protocol,
    /// A shortage on this side kept the connection from being made.
    #[error("a shortage on this rank kept the connection from being made")]
    LocalShortage,
}

impl PeerFailure {
    /// Whether the cause lies on this side; such a failure never counts against the peer.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::LocalShortage)
    }

    /// Whether the same connection may be made later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        !matches!(self, Self::WrongIncarnation)
    }
}

/// Why a block was not loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// No replica is known.
    #[error("no rank holds the block")]
    NotFound,
    /// Every replica was stale: evicted, overwritten or of an earlier life of its owner.
    #[error("the block was evicted or overwritten at its owner")]
    Stale,
    /// A word carried the tag of another key, layout or incarnation.
    #[error("the slot belongs to another key, layout or incarnation")]
    TagMismatch,
    /// The landed bytes do not match the object's checksum.
    #[error("the bytes do not match the object's checksum")]
    ChecksumMismatch,
    /// No owner could be reached.
    #[error("no owner of the block could be reached")]
    Unreachable,
    /// The directory did not answer.
    #[error("the directory did not answer")]
    DirectoryUnavailable,
    /// The deadline passed.
    #[error("the load did not finish by its deadline")]
    DeadlineExceeded,
    /// Cancelled.
    #[error("the load was cancelled")]
    Cancelled,
    /// A limit of this rank.
    #[error("too many loads in progress on this rank; wait for some to finish")]
    Overloaded,
    /// The owner, or this rank, broke the protocol.
    #[error("the owner broke the protocol")]
    Protocol,
}

impl LoadError {
    /// Whether the same load may succeed later without any change.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Unreachable | Self::DirectoryUnavailable | Self::DeadlineExceeded | Self::Overloaded
        )
    }

    /// Whether the cause lies on this rank alone.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::Cancelled | Self::Overloaded)
    }

    /// Whether the block counts as an ordinary miss that was caught by validation.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        matches!(self, Self::Stale)
    }
}

/// Why a replica is reported to the directory (design 1.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum MissReason {
    /// Word mismatch: the replica is removed (equal generation only).
    Stale,
    /// Tag mismatch: removed, and an alarm.
    TagMismatch,
    /// Checksum mismatch: removed, and an alarm.
    ChecksumMismatch,
    /// Timeout or error: hidden from the reporter only.
    Unreachable,
}

/// What the driver must do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LoadAction {
    /// Ask the directory; answered by `handle_located`.
    Locate {
        /// Request.
        locate: LocateId,
        /// Namespace.
        ns: NsId,
        /// Keys, at most [`crate::limits::LOOKUP_KEYS_MAX`].
        keys: Vec<Fingerprint>,
        /// When the answer is no longer of use.
        deadline: Time,
    },
    /// Connect to a peer; answered by `handle_peer_connected` (at once if it is connected) or `handle_peer_failed`.
    Connect {
        /// Peer.
        rank: RankId,
        /// The incarnation that the entries name.
        incarnation: Incarnation,
    },
    /// Post a read; answered by `handle_read_done`. The destination belongs to the read until then (R4).
    Read {
        /// Operation.
        read: ReadId,
        /// Peer, connected.
        rank: RankId,
        /// Its incarnation: names the connection, since a directory that restarted numbers its ranks anew (rule R1).
        incarnation: Incarnation,
        /// Slot at the peer.
        slot: SlotId,
        /// Object size, bytes.
        object_bytes: u64,
        /// Load whose destination receives the bytes.
        load: LoadId,
        /// Index of the block in the load.
        block: u32,
        /// Whether to hash the landed bytes.
        checksum: bool,
    },
    /// End a read by force; it still ends with `handle_read_done`, within the transport's drain bound.
    Abort {
        /// Operation.
        read: ReadId,
    },
    /// Tell the directory that a replica did not serve; answered by `handle_miss_reported`.
    MissReport {
        /// Report.
        report: ReportId,
        /// Key.
        fingerprint: Fingerprint,
        /// Owner.
        rank: RankId,
        /// Owner's incarnation in the entry.
        incarnation: Incarnation,
        /// Generation in the entry.
        generation: Generation,
        /// Why.
        reason: MissReason,
    },
    /// The report was not acknowledged in time: tell this engine's own scheduler handle about the failed keys.
    NotifyScheduler {
        /// Keys.
        keys: Vec<Fingerprint>,
    },
    /// Tell an owner which slots were read (lossy, advisory).
    Touch {
        /// Owner.
        rank: RankId,
        /// Its incarnation.
        incarnation: Incarnation,
        /// Slots and generations.
        entries: Vec<(SlotId, Generation)>,
    },
    /// A block is final: its destination belongs to the engine again.
    BlockDone {
        /// Load.
        load: LoadId,
        /// Index of the block.
        block: u32,
        /// Result; bytes are right if and only if this is `Ok`.
        outcome: Result<TransportUsed, LoadError>,
    },
    /// Every block of the load is final.
    LoadDone {
        /// Load.
        load: LoadId,
    },
}

/// How a block travelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransportUsed {
    /// Owner.
    pub rank: RankId,
    /// Transport.
    pub transport: crate::TransportKind,
}
