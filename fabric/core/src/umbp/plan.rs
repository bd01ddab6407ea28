//! Transfers of whole blocks, one by one or in columns.

use std::sync::Arc;

use thiserror::Error;

use super::BlockHash;

/// One contiguous piece of one block, with everything the reference names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KVRange {
    /// Layer.
    pub layer_name: Arc<str>,
    /// Cache group.
    pub group_id: u32,
    /// The engine's block id.
    pub block_id: u64,
    /// Address of the range's first byte (not of the layer).
    pub base_address: u64,
    /// Bytes between physical blocks.
    pub stride: u64,
    /// Length, bytes.
    pub length: u64,
    /// Offset in the object, bytes.
    pub object_offset: u64,
}

/// The transfer of one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockTransferPlan {
    /// Key of the object.
    pub key: Arc<str>,
    /// The engine's block id.
    pub block_id: u64,
    /// Where the block's bytes lie; empty until the plan is materialized.
    pub ranges: Vec<KVRange>,
    /// The request that asked for it.
    pub request_id: Option<Arc<str>>,
    /// Cache group.
    pub group_id: Option<u32>,
    /// Block hash.
    pub block_hash: Option<BlockHash>,
    /// Hash of the block before it.
    pub parent_block_hash: Option<BlockHash>,
    /// The block's tokens, for events.
    pub token_ids: Vec<u32>,
    /// Tokens of one block, for events.
    pub block_size: u32,
    /// Medium named in events.
    pub medium: Arc<str>,
}

impl BlockTransferPlan {
    /// The medium named unless told otherwise.
    pub const MEDIUM: &'static str = "CPU";

    /// A plan that knows its key and block only.
    #[must_use]
    pub fn new(key: &str, block_id: u64) -> Self {
        Self::of(key.into(), block_id)
    }

    fn of(key: Arc<str>, block_id: u64) -> Self {
        Self {
            key,
            block_id,
            ranges: Vec::new(),
            request_id: None,
            group_id: None,
            block_hash: None,
            parent_block_hash: None,
            token_ids: Vec::new(),
            block_size: 0,
            medium: Self::MEDIUM.into(),
        }
    }
}

/// Why a batch is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BatchError {
    /// Columns of a load batch differ in length.
    #[error("load batch columns must have equal lengths")]
    LoadColumns,
    /// Columns of a store batch differ in length.
    #[error("store batch columns must have equal lengths")]
    StoreColumns,
}

/// Loads of whole blocks for one request, in columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockLoadBatch {
    keys: Vec<Arc<str>>,
    block_ids: Vec<u64>,
    group_ids: Vec<u32>,
    request_id: Arc<str>,
}

impl BlockLoadBatch {
    /// A batch of equally long columns.
    ///
    /// # Errors
    /// [`BatchError::LoadColumns`].
    pub fn new(
        keys: Vec<Arc<str>>,
        block_ids: Vec<u64>,
        group_ids: Vec<u32>,
        request_id: Arc<str>,
    ) -> Result<Self, BatchError> {
        if block_ids.len() != keys.len() || group_ids.len() != keys.len() {
            return Err(BatchError::LoadColumns);
        }
        Ok(Self { keys, block_ids, group_ids, request_id })
    }

    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Keys.
    #[must_use]
    pub fn keys(&self) -> &[Arc<str>] {
        &self.keys
    }

    /// Block ids.
    #[must_use]
    pub fn block_ids(&self) -> &[u64] {
        &self.block_ids
    }

    /// Cache groups.
    #[must_use]
    pub fn group_ids(&self) -> &[u32] {
        &self.group_ids
    }

    /// The request.
    #[must_use]
    pub const fn request_id(&self) -> &Arc<str> {
        &self.request_id
    }

    /// One row as a plan.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<BlockTransferPlan> {
        Some(BlockTransferPlan {
            group_id: Some(*self.group_ids.get(index)?),
            request_id: Some(self.request_id.clone()),
            ..BlockTransferPlan::of(self.keys.get(index)?.clone(), *self.block_ids.get(index)?)
        })
    }

    /// All rows as plans.
    pub fn iter(&self) -> impl Iterator<Item = BlockTransferPlan> + '_ {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    /// The batch under other keys, as when a worker puts in its own rank.
    ///
    /// # Errors
    /// [`BatchError::LoadColumns`].
    pub fn localized(&self, keys: Vec<Arc<str>>) -> Result<Self, BatchError> {
        Self::new(keys, self.block_ids.clone(), self.group_ids.clone(), self.request_id.clone())
    }
}

/// Stores of whole blocks for one request, in columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockStoreBatch {
    keys: Vec<Arc<str>>,
    block_ids: Vec<u64>,
    group_ids: Vec<u32>,
    block_hashes: Vec<BlockHash>,
    parent_block_hashes: Vec<Option<BlockHash>>,
    token_ids: Vec<Vec<u32>>,
    block_sizes: Vec<u32>,
    request_id: Arc<str>,
}

impl BlockStoreBatch {
    /// A batch of equally long columns.
    ///
    /// # Errors
    /// [`BatchError::StoreColumns`].
    #[allow(clippy::too_many_arguments)] // One for each column.
    pub fn new(
        keys: Vec<Arc<str>>,
        block_ids: Vec<u64>,
        group_ids: Vec<u32>,
        block_hashes: Vec<BlockHash>,
        parent_block_hashes: Vec<Option<BlockHash>>,
        token_ids: Vec<Vec<u32>>,
        block_sizes: Vec<u32>,
        request_id: Arc<str>,
    ) -> Result<Self, BatchError> {
        let lengths = [
            block_ids.len(),
            group_ids.len(),
            block_hashes.len(),
            parent_block_hashes.len(),
            token_ids.len(),
            block_sizes.len(),
        ];
        if lengths.iter().any(|&length| length != keys.len()) {
            return Err(BatchError::StoreColumns);
        }
        Ok(Self {
            keys,
            block_ids,
            group_ids,
            block_hashes,
            parent_block_hashes,
            token_ids,
            block_sizes,
            request_id,
        })
    }

    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether there are no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Keys.
    #[must_use]
    pub fn keys(&self) -> &[Arc<str>] {
        &self.keys
    }

    /// Block ids.
    #[must_use]
    pub fn block_ids(&self) -> &[u64] {
        &self.block_ids
    }

    /// Cache groups.
    #[must_use]
    pub fn group_ids(&self) -> &[u32] {
        &self.group_ids
    }

    /// Block hashes.
    #[must_use]
    pub fn block_hashes(&self) -> &[BlockHash] {
        &self.block_hashes
    }

    /// Hashes of the blocks before.
    #[must_use]
    pub fn parent_block_hashes(&self) -> &[Option<BlockHash>] {
        &self.parent_block_hashes
    }

    /// The request.
    #[must_use]
    pub const fn request_id(&self) -> &Arc<str> {
        &self.request_id
    }

    /// One row as a plan.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<BlockTransferPlan> {
        Some(BlockTransferPlan {
            request_id: Some(self.request_id.clone()),
            group_id: Some(*self.group_ids.get(index)?),
            block_hash: Some(*self.block_hashes.get(index)?),
            parent_block_hash: *self.parent_block_hashes.get(index)?,
            token_ids: self.token_ids.get(index)?.clone(),
            block_size: *self.block_sizes.get(index)?,
            ..BlockTransferPlan::of(self.keys.get(index)?.clone(), *self.block_ids.get(index)?)
        })
    }

    /// All rows as plans.
    pub fn iter(&self) -> impl Iterator<Item = BlockTransferPlan> + '_ {
        (0..self.len()).filter_map(|index| self.get(index))
    }

    /// The batch under other keys, as when a worker puts in its own rank.
    ///
    /// # Errors
    /// [`BatchError::StoreColumns`].
    pub fn localized(&self, keys: Vec<Arc<str>>) -> Result<Self, BatchError> {
        if keys.len() != self.len() {
            return Err(BatchError::StoreColumns);
        }
        Ok(Self { keys, ..self.clone() })
    }
}
