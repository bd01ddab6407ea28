//! What the scheduler side remembers of a request.

use thiserror::Error;

use super::BlockHash;

/// The scheduler's decision to load a prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadSpec {
    /// Tokens that the engine's own cache holds.
    pub local_tokens: u64,
    /// Tokens that the fabric holds, counted from the start too.
    pub external_tokens: u64,
    /// By group, the hash of each block from the start of the request; `None` where nothing is loaded.
    pub block_hashes_by_group: Vec<Vec<Option<BlockHash>>>,
}

impl LoadSpec {
    /// Tokens to load beyond the local ones.
    #[must_use]
    pub const fn num_tokens_to_load(&self) -> u64 {
        self.external_tokens.saturating_sub(self.local_tokens)
    }
}

/// Why an update of a tracker is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TrackerError {
    /// The number of groups differs from the request's.
    #[error("KV cache group count changed for a request")]
    GroupCountChanged,
    /// A block of zero tokens has no boundaries.
    #[error("block_size must be positive")]
    BlockSizeNotPositive,
}

/// Blocks and progress of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestTracker {
    /// Tokens saved so far: whole blocks.
    pub saved_tokens: u64,
    /// Block table of each group.
    pub block_ids: Vec<Vec<u64>>,
    /// The load under way.
    pub load_spec: Option<LoadSpec>,
}

impl RequestTracker {
    /// Forgets everything.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// Takes the blocks of a step: the first tables as they are, later ones as whole tables that begin with the known
    /// one, as a tail that is known already, or as new blocks to append.
    ///
    /// # Errors
    /// The number of groups changed; nothing was taken then.
    pub fn update_blocks(&mut self, block_ids: &[Vec<u64>]) -> Result<(), TrackerError> {
        if self.block_ids.is_empty() {
            self.block_ids = block_ids.to_vec();
            return Ok(());
        }
        if self.block_ids.len() != block_ids.len() {
            return Err(TrackerError::GroupCountChanged);
        }
        for (current, new) in self.block_ids.iter_mut().zip(block_ids) {
            match new.strip_prefix(current.as_slice()) {
                Some(tail) => current.extend_from_slice(tail),
                None if new.is_empty() || current.ends_with(new) => {}
                None => current.extend_from_slice(new),
            }
        }
        Ok(())
    }

    /// Replaces the tables of before a preemption by those of the resumed request, which saves from the start again.
    pub fn replace_blocks(&mut self, block_ids: &[Vec<u64>]) {
        self.block_ids = block_ids.to_vec();
        self.saved_tokens = 0;
    }

    /// Advances the saved tokens to the last whole block of `token_count`; never moves back. Returns where they are.
    ///
    /// # Errors
    /// A block size of zero.
    pub fn mark_saved(&mut self, token_count: u64, block_size: u64) -> Result<u64, TrackerError> {
        let blocks = token_count.checked_div(block_size).ok_or(TrackerError::BlockSizeNotPositive)?;
        // At most `token_count`, so the product fits.
        self.saved_tokens = self.saved_tokens.max(blocks * block_size);
        Ok(self.saved_tokens)
    }
}
