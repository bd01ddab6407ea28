//! The reader side of a rank: loads, replicas, peers, deadlines (design 1.3 R1-R8, 1.8, 4).

use smallvec::SmallVec;
use thiserror::Error;

use crate::hash::KeyHash;
use crate::{Fingerprint, Generation, Incarnation, LayoutId, NsId, RankId, SlotId, Time};

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
    /// Connect to a peer; answered by `handle_peer_connected` or `handle_peer_failed`.
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
