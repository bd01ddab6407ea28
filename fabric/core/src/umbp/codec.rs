//! Builds the keys of one rank, or of all ranks of an engine.

use thiserror::Error;

use super::limits::TOPOLOGY_KEYS_MAX;
use super::{BlockHash, KeyError, RankNamespace, RankTopology, TopologyError, UmbpKey, UmbpNamespace};

/// Why keys could not be made.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CodecError {
    /// A part of the key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The topology.
    #[error(transparent)]
    Topology(#[from] TopologyError),
    /// More keys than one lookup may carry.
    #[error("{keys} keys for one block exceed {TOPOLOGY_KEYS_MAX}")]
    TooManyKeys {
        /// How many it would be.
        keys: u64,
    },
}

/// Makes rank-local keys from block hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockIdentityCodec {
    /// Namespace of all keys.
    pub namespace: UmbpNamespace,
    /// This rank.
    pub rank: RankNamespace,
}

impl BlockIdentityCodec {
    /// A codec for one rank.
    #[must_use]
    pub const fn new(namespace: UmbpNamespace, rank: RankNamespace) -> Self {
        Self { namespace, rank }
    }

    /// This rank's key of a block in a cache group.
    ///
    /// # Errors
    /// The block hash is empty or too long.
    pub fn key(&self, block_hash: &[u8], group_id: u32) -> Result<UmbpKey, KeyError> {
        self.key_for_namespace(block_hash, group_id, self.rank)
    }

    /// Another rank's key of a block.
    ///
    /// # Errors
    /// The block hash is empty or too long.
    pub fn key_for_namespace(
        &self,
        block_hash: &[u8],
        group_id: u32,
        rank: RankNamespace,
    ) -> Result<UmbpKey, KeyError> {
        Ok(UmbpKey::new(self.namespace.clone(), rank.with_group(group_id), BlockHash::new(block_hash)?))
    }

    /// The keys of a block on all ranks, groups innermost: what must exist for the block to be a hit.
    ///
    /// # Errors
    /// The hash, the topology, or the number of keys.
    pub fn keys_for_topology(
        &self,
        block_hash: &[u8],
        topology: &RankTopology,
        group_ids: &[u32],
    ) -> Result<Vec<UmbpKey>, CodecError> {
        let block_hash = BlockHash::new(block_hash)?;
        let groups = u64::try_from(group_ids.len()).unwrap_or(u64::MAX);
        let keys = topology.rank_count()?.saturating_mul(groups);
        if !usize::try_from(keys).is_ok_and(|keys| keys <= TOPOLOGY_KEYS_MAX) {
            return Err(CodecError::TooManyKeys { keys });
        }
        Ok(topology
            .all_namespaces()?
            .flat_map(|rank| group_ids.iter().map(move |&group| rank.with_group(group)))
            .map(|at| UmbpKey::new(self.namespace.clone(), at, block_hash))
            .collect())
    }

    /// This rank's spelling of a key that a scheduler made for another rank: same hash and group, own ranks.
    #[must_use]
    pub fn localize(&self, key: &UmbpKey) -> UmbpKey {
        UmbpKey::new(self.namespace.clone(), self.rank.with_group(key.at().group_id), *key.block_hash())
    }
}
