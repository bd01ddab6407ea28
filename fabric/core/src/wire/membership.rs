//! Who is who: JOIN, LEAVE, liveness, WHO (design 1.7, 1.9).

use serde::{Deserialize, Serialize};

use super::text::{Advertised, Name};
use crate::{Incarnation, RankId};

/// Most ranks that a directory admits: a cell of 4k GPUs (design 3.3) has as many ranks, twice over for two processes a
/// GPU, twice over for spares.
pub const RANKS_MAX: usize = 16_384;

/// A rank as the directory knows it. Every message of a rank carries both numbers: the first finds it, the second proves
/// that no other life of the rank is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Member {
    /// Number given by JOIN.
    pub rank: RankId,
    /// The process.
    pub incarnation: Incarnation,
}

/// Asks for membership.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Join<'a> {
    /// Cluster.
    #[serde(borrow)]
    pub cluster: Name<'a>,
    /// Name of the rank.
    #[serde(borrow)]
    pub name: Name<'a>,
    /// Name of its engine.
    #[serde(borrow)]
    pub engine: Name<'a>,
    /// The process.
    pub incarnation: Incarnation,
    /// Where it can be reached.
    #[serde(borrow)]
    pub advertised: Advertised<'a>,
}

/// Answer to JOIN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JoinReply {
    /// Admitted. Its entries become visible as it announces them.
    Joined(Joined),
    /// Another process of that name is connected.
    NameInUse,
    /// This incarnation was closed: a newer one was admitted, or it left. It never comes back.
    Closed,
    /// The directory serves another cluster.
    ClusterMismatch,
    /// The directory has no room for another rank.
    Full,
}

/// What an admitted rank needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Joined {
    /// The rank's number, unique over all lives of the directory.
    pub rank: RankId,
    /// The directory's life.
    pub session: u64,
    /// Opens the liveness connection ([`Attach`]); known to this rank only.
    pub liveness_token: u64,
}

/// Ends a membership: the incarnation is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leave {
    /// Who leaves.
    pub member: Member,
}

/// First message on a liveness connection: its end is the end of the rank's visibility (design 1.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// Whose connection this is.
    pub member: Member,
    /// From [`Joined`].
    pub liveness_token: u64,
}

/// Sign of life on a liveness connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ping {
    /// Load of the rank, 0..=255: lookups prefer the least loaded owners (design 4).
    pub load: u8,
}

/// Asks how to reach a rank. Readers ask once, before they connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Who {
    /// The rank.
    pub member: Member,
}

/// Answer to [`Who`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WhoReply<'a> {
    /// The rank is, or was a moment ago, there.
    #[serde(borrow)]
    Known(RankInfo<'a>),
    /// No such rank: its incarnation was closed, or the directory started anew.
    Unknown,
}

/// How to reach a rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankInfo<'a> {
    /// Name.
    #[serde(borrow)]
    pub name: Name<'a>,
    /// Name of its engine.
    #[serde(borrow)]
    pub engine: Name<'a>,
    /// Addresses.
    #[serde(borrow)]
    pub advertised: Advertised<'a>,
    /// Whether it is connected to the directory and answers.
    pub live: bool,
}
