//! Which ranks of an engine take part in one object.

use thiserror::Error;

use super::limits::RANKS_MAX;
use crate::hash::KeyCoordinates;

/// Why a topology is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// A parallel size below one.
    #[error("{name} must be positive")]
    SizeNotPositive {
        /// As `tp_size`.
        name: &'static str,
    },
    /// A rank outside its size.
    #[error("{name}={rank} is outside [0, {size})")]
    RankOutside {
        /// As `tp_rank`.
        name: &'static str,
        /// The rank given.
        rank: i64,
        /// The size given.
        size: i64,
    },
    /// Decode-context parallelism divides the tensor-parallel ranks, so its size must divide theirs.
    #[error("dcp_size must divide tp_size")]
    DcpDoesNotDivide,
    /// A size above 32 bits: ranks in keys are 32 bits wide.
    #[error("{name}={size} does not fit 32 bits")]
    SizeTooLarge {
        /// As `tp_size`.
        name: &'static str,
        /// The size given.
        size: i64,
    },
    /// More than [`RANKS_MAX`] ranks.
    #[error("the engine would have more than {RANKS_MAX} ranks")]
    TooManyRanks,
}

/// Ranks and sizes as an engine states them, not yet checked. Ranks default to 0 and sizes to 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The fields are their names.
pub struct TopologyRanks {
    pub tp_rank: i64,
    pub tp_size: i64,
    pub pp_rank: i64,
    pub pp_size: i64,
    pub pcp_rank: i64,
    pub pcp_size: i64,
    pub dcp_rank: i64,
    pub dcp_size: i64,
}

impl Default for TopologyRanks {
    fn default() -> Self {
        Self {
            tp_rank: 0,
            tp_size: 1,
            pp_rank: 0,
            pp_size: 1,
            pcp_rank: 0,
            pcp_size: 1,
            dcp_rank: 0,
            dcp_size: 1,
        }
    }
}

/// Parallel sizes of an engine and the global rank of one of its workers, not yet checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParallelSizes {
    /// Tensor-parallel size.
    pub tensor: i64,
    /// Pipeline-parallel size.
    pub pipeline: i64,
    /// Prefill-context-parallel size.
    pub prefill_context: i64,
    /// Decode-context-parallel size.
    pub decode_context: i64,
    /// Rank of the worker; workers are laid out as (pipeline, prefill-context, tensor), tensor innermost.
    pub rank: i64,
}

impl Default for ParallelSizes {
    fn default() -> Self {
        Self { tensor: 1, pipeline: 1, prefill_context: 1, decode_context: 1, rank: 0 }
    }
}

/// The coordinates of one rank's objects, in the order in which keys spell them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RankNamespace {
    /// Tensor-parallel rank.
    pub tp_rank: u32,
    /// Prefill-context-parallel rank.
    pub pcp_rank: u32,
    /// Decode-context-parallel rank.
    pub dcp_rank: u32,
    /// Pipeline-parallel rank.
    pub pp_rank: u32,
}

impl RankNamespace {
    /// The coordinates together with a cache group.
    #[must_use]
    pub const fn with_group(self, group_id: u32) -> KeyCoordinates {
        KeyCoordinates {
            tp_rank: self.tp_rank,
            pcp_rank: self.pcp_rank,
            dcp_rank: self.dcp_rank,
            pp_rank: self.pp_rank,
            group_id,
        }
    }
}

/// The model-parallel ranks of an engine and this rank's place among them. Every value was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankTopology {
    local: RankNamespace,
    tp_size: u32,
    pp_size: u32,
    pcp_size: u32,
    dcp_size: u32,
}

impl Default for RankTopology {
    fn default() -> Self {
        Self { local: RankNamespace::default(), tp_size: 1, pp_size: 1, pcp_size: 1, dcp_size: 1 }
    }
}

impl RankTopology {
    /// A checked topology.
    ///
    /// # Errors
    /// A size below one (in the order tp, pp, pcp, dcp), then a rank outside its size (same order).
    pub fn new(ranks: TopologyRanks) -> Result<Self, TopologyError> {
        let dimensions = [
            ("tp_size", ranks.tp_size, "tp_rank", ranks.tp_rank),
            ("pp_size", ranks.pp_size, "pp_rank", ranks.pp_rank),
            ("pcp_size", ranks.pcp_size, "pcp_rank", ranks.pcp_rank),
            ("dcp_size", ranks.dcp_size, "dcp_rank", ranks.dcp_rank),
        ];
        if let Some((name, ..)) = dimensions.iter().find(|(_, size, ..)| *size <= 0) {
            return Err(TopologyError::SizeNotPositive { name });
        }
        for (name, size, ..) in dimensions {
            narrow(name, size)?;
        }
        for (_, size, name, rank) in dimensions {
            if !(0..size).contains(&rank) {
                return Err(TopologyError::RankOutside { name, rank, size });
            }
        }
        // A rank lies below its size, so it fits wherever the size does.
        Ok(Self {
            local: RankNamespace {
                tp_rank: narrow("tp_rank", ranks.tp_rank)?,
                pcp_rank: narrow("pcp_rank", ranks.pcp_rank)?,
                dcp_rank: narrow("dcp_rank", ranks.dcp_rank)?,
                pp_rank: narrow("pp_rank", ranks.pp_rank)?,
            },
            tp_size: narrow("tp_size", ranks.tp_size)?,
            pp_size: narrow("pp_size", ranks.pp_size)?,
            pcp_size: narrow("pcp_size", ranks.pcp_size)?,
            dcp_size: narrow("dcp_size", ranks.dcp_size)?,
        })
    }

    /// The topology of the worker with a global rank.
    ///
    /// The decode-context rank follows from the tensor-parallel rank: it partitions those workers and is no dimension
    /// of its own. A negative rank counts from the end, as the modulo of the reference does.
    ///
    /// # Errors
    /// A size below one or above 32 bits.
    pub fn from_parallel(sizes: ParallelSizes) -> Result<Self, TopologyError> {
        let ParallelSizes { tensor, pipeline, prefill_context, decode_context, rank } = sizes;
        for (name, size) in [
            ("tp_size", tensor),
            ("pp_size", pipeline),
            ("pcp_size", prefill_context),
            ("dcp_size", decode_context),
        ] {
            if size <= 0 {
                return Err(TopologyError::SizeNotPositive { name });
            }
            narrow(name, size)?;
        }
        let tp_rank = rank.rem_euclid(tensor);
        Self::new(TopologyRanks {
            tp_rank,
            tp_size: tensor,
            // Two divisions in place of one by the product, which could overflow; floors compose.
            pp_rank: rank.div_euclid(tensor).div_euclid(prefill_context).rem_euclid(pipeline),
            pp_size: pipeline,
            pcp_rank: rank.div_euclid(tensor).rem_euclid(prefill_context),
            pcp_size: prefill_context,
            dcp_rank: tp_rank.rem_euclid(decode_context),
            dcp_size: decode_context,
        })
    }

    /// Tensor-parallel size.
    #[must_use]
    pub const fn tp_size(&self) -> u32 {
        self.tp_size
    }

    /// Pipeline-parallel size.
    #[must_use]
    pub const fn pp_size(&self) -> u32 {
        self.pp_size
    }

    /// Prefill-context-parallel size.
    #[must_use]
    pub const fn pcp_size(&self) -> u32 {
        self.pcp_size
    }

    /// Decode-context-parallel size.
    #[must_use]
    pub const fn dcp_size(&self) -> u32 {
        self.dcp_size
    }

    /// This rank's coordinates.
    #[must_use]
    pub const fn local_namespace(&self) -> RankNamespace {
        self.local
    }

    /// How many ranks hold a part of one block.
    ///
    /// # Errors
    /// The decode-context size does not divide the tensor-parallel size, or there are more than [`RANKS_MAX`] ranks.
    pub fn rank_count(&self) -> Result<u64, TopologyError> {
        // Where it is above one, decode-context parallelism partitions tensor-parallel ranks and adds none.
        if self.dcp_size > 1 && self.tp_size % self.dcp_size != 0 {
            return Err(TopologyError::DcpDoesNotDivide);
        }
        [self.pp_size, self.pcp_size, self.tp_size]
            .iter()
            .try_fold(1u64, |count, &size| count.checked_mul(u64::from(size)))
            .filter(|&count| count <= RANKS_MAX)
            .ok_or(TopologyError::TooManyRanks)
    }

    /// The coordinates of all ranks: pipeline outermost, then prefill context, then tensor.
    ///
    /// # Errors
    /// As [`RankTopology::rank_count`].
    pub fn all_namespaces(&self) -> Result<impl Iterator<Item = RankNamespace>, TopologyError> {
        self.rank_count()?;
        let Self { tp_size, pp_size, pcp_size, dcp_size, .. } = *self;
        Ok((0..pp_size).flat_map(move |pp_rank| {
            (0..pcp_size).flat_map(move |pcp_rank| {
                (0..tp_size).map(move |tp_rank| RankNamespace {
                    tp_rank,
                    pcp_rank,
                    dcp_rank: tp_rank % dcp_size,
                    pp_rank,
                })
            })
        }))
    }
}

fn narrow(name: &'static str, size: i64) -> Result<u32, TopologyError> {
    u32::try_from(size).map_err(|_| TopologyError::SizeTooLarge { name, size })
}
