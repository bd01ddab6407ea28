//! What an engine says about its KV cache: groups of layers, their specifications, and where tensors put blocks.

use std::collections::BTreeMap;

use serde_json::Value;

/// The specification of one layer's pages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerSpec {
    /// Name of the kind, as `FullAttentionSpec`.
    pub kind: String,
    /// Every field that shapes the stored bytes, by name. vLLM 0.33.0 writes each value as text (`str(value)`), so a
    /// namespace that must equal vLLM's holds strings here: `"16"`, `"None"`, `"torch.bfloat16"`.
    pub fields: BTreeMap<String, Value>,
    /// Bytes of one block of this layer.
    pub page_size_bytes: u64,
    /// Tokens of one block.
    pub block_size: u32,
}

/// The specification of a cache group.
#[derive(Clone, Debug, PartialEq)]
pub enum GroupSpec {
    /// One for all layers.
    Shared(LayerSpec),
    /// One for each layer, all of the same type (vLLM's `UniformTypeKVCacheSpecs`).
    PerLayer {
        /// Name of the kind that the group as a whole has; part of namespaces of version 1.
        kind: String,
        /// Tokens of one block.
        block_size: u32,
        /// By layer name.
        layers: BTreeMap<String, LayerSpec>,
    },
}

impl GroupSpec {
    /// The specification of a layer.
    #[must_use]
    pub fn layer(&self, name: &str) -> Option<&LayerSpec> {
        match self {
            Self::Shared(spec) => Some(spec),
            Self::PerLayer { layers, .. } => layers.get(name),
        }
    }

    /// Name of the group's kind.
    #[must_use]
    pub fn kind(&self) -> &str {
        match self {
            Self::Shared(spec) => &spec.kind,
            Self::PerLayer { kind, .. } => kind,
        }
    }

    /// Tokens of one block.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        match self {
            Self::Shared(spec) => spec.block_size,
            Self::PerLayer { block_size, .. } => *block_size,
        }
    }

    /// The group's field `dtype`; a group with a specification for each layer has none of its own.
    #[must_use]
    pub fn dtype(&self) -> Option<&Value> {
        match self {
            Self::Shared(spec) => spec.fields.get("dtype"),
            Self::PerLayer { .. } => None,
        }
    }
}

/// Layers that share one block table.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheGroup {
    /// Names in the engine's order.
    pub layers: Vec<String>,
    /// Specification.
    pub spec: GroupSpec,
    /// Whether the group's blocks are transferred; groups that are rebuilt from others are not.
    pub enable_kv_transfer: bool,
}

/// A tensor that holds the pages of some layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheTensor {
    /// Names in memory order.
    pub layers: Vec<String>,
    /// Bytes from one block of a layer to its next.
    pub block_stride: u64,
}

/// An engine's KV cache; a group's id is its index.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CacheConfig {
    /// Groups.
    pub groups: Vec<CacheGroup>,
    /// Tensors; their order is the order of an object's bytes.
    pub tensors: Vec<CacheTensor>,
}
