//! What goes into a rank and comes out of it.

use thiserror::Error;

use super::StoreId;
use crate::directory::{AnnouncerAction, AnnouncerConfig};
use crate::load::{LoadAction, LoaderConfig, LocateId, ReportId};
use crate::owner::{ConfigError, OwnerAction, OwnerConfig, Put, PutError, PutId, Stored};
use crate::wire::{ClearAck, MissRecord, NsNumber};
use crate::{Fingerprint, Incarnation, RankId, Time};

/// The number that stands for this rank in its own hints while it is not a member of the directory. Peers are told
/// apart by incarnation, so nothing depends on it.
pub const RANK_NOT_JOINED: RankId = RankId(u32::MAX);

/// Configuration of a [`Rank`](super::Rank).
#[derive(Clone, Debug)]
pub struct RankConfig {
    /// Owner side.
    pub owner: OwnerConfig,
    /// Reader side.
    pub load: LoaderConfig,
    /// Side of the directory. All three must have the same incarnation.
    pub announcer: AnnouncerConfig,
}

impl RankConfig {
    /// The defaults for the process that `announcer` names, with a pool of `pool_bytes`.
    #[must_use]
    pub fn new(announcer: AnnouncerConfig, pool_bytes: u64) -> Self {
        let incarnation = announcer.incarnation;
        Self {
            owner: OwnerConfig::new(pool_bytes, incarnation),
            load: LoaderConfig::new(incarnation),
            announcer,
        }
    }
}

/// Puts that share a deadline and an end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreJob {
    /// Name of the first put; the others follow by one. The driver keeps their sources under these names.
    pub first_put: PutId,
    /// The puts, at most [`JOB_BLOCKS_MAX`](crate::limits::JOB_BLOCKS_MAX). The rank sets their `ns_epoch`: the epoch
    /// at submission counts.
    pub puts: Vec<Put>,
    /// When puts that are not over are given up.
    pub deadline: Time,
}

/// What the driver must do, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Of the owner side. Never [`OwnerAction::PutDone`] nor [`OwnerAction::Announce`].
    Owner(OwnerAction),
    /// A put of a job is over and its source is free.
    PutDone {
        /// Put.
        put: PutId,
        /// Result.
        outcome: Result<Stored, PutError>,
    },
    /// Every put of the job is over.
    StoreDone {
        /// Job.
        store: StoreId,
    },
    /// Of the reader side. Never [`LoadAction::Locate`] nor [`LoadAction::MissReport`], and [`LoadAction::Touch`] names
    /// other ranks only.
    Load(LoadAction),
    /// Ask the directory with a LOCATE; answered by [`Rank::handle_located`](super::Rank::handle_located).
    Locate {
        /// Request.
        locate: LocateId,
        /// The directory's number of the namespace.
        ns: NsNumber,
        /// Keys, at most [`LOOKUP_KEYS_MAX`](crate::limits::LOOKUP_KEYS_MAX).
        keys: Vec<Fingerprint>,
        /// When the answer is no longer of use.
        deadline: Time,
    },
    /// Tell the directory with one MISS_REPORT; answered by [`Rank::handle_misses_reported`](super::Rank::handle_misses_reported).
    ReportMisses {
        /// The reports' names, in the order of the records.
        reports: Vec<ReportId>,
        /// The replicas, at most [`MISS_REPORTS_MAX`](crate::wire::MISS_REPORTS_MAX).
        records: Vec<MissRecord>,
    },
    /// Of the directory side. Never [`AnnouncerAction::NeedSnapshot`] nor [`AnnouncerAction::EpochChanged`].
    Directory(Box<AnnouncerAction>),
    /// Answer the directory's CLEAR: every slot of the namespace is invalid.
    AcknowledgeClear(ClearAck),
}

/// Why a rank cannot be configured so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RankError {
    /// The owner side cannot work.
    #[error(transparent)]
    Owner(#[from] ConfigError),
    /// All parts belong to one process.
    #[error("the owner side is incarnation {owner}, the reader side {load}, the directory side {announcer}")]
    Incarnations {
        /// Of the owner side.
        owner: Incarnation,
        /// Of the reader side.
        load: Incarnation,
        /// Of the directory side.
        announcer: Incarnation,
    },
}

impl RankError {
    /// Whether the same configuration may work later: never.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        false
    }

    /// Whether the cause lies on this rank: always.
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }
}
