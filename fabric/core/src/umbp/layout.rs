//! The layout of one rank's objects.

use std::collections::BTreeSet;
use std::sync::Arc;

use thiserror::Error;

use super::json::{python_repr, python_repr_list};
use super::limits::{RANGES_PER_BLOCK_MAX, RANGES_PER_CALL_MAX, REGIONS_MAX};
use super::RankTopology;
use crate::limits::OBJECT_BYTES_MAX;
use crate::LayoutId;

/// Why a layout, a registration or a plan is refused. All causes are local: the engine's configuration or the block ids
/// that it gave.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields repeat the message.
pub enum LayoutError {
    /// A region's stride or bytes are zero.
    #[error("KV region sizes must be positive")]
    SizesNotPositive,
    /// A region's tokens per block are zero.
    #[error("KV region block_size must be positive")]
    BlockSizeNotPositive,
    /// A region's block does not fit its stride.
    #[error("KV region bytes ({block_bytes}) exceed its stride ({block_stride}) for {}", python_repr(layer))]
    BytesExceedStride { layer: Arc<str>, block_bytes: u64, block_stride: u64 },
    /// The layout's format has no name.
    #[error("layout_format must not be empty")]
    FormatEmpty,
    /// A layer occurs twice.
    #[error("KV layout contains duplicate layer regions")]
    DuplicateLayers,
    /// A transferred layer has no specification.
    #[error("layer {} has no specification", python_repr(layer))]
    MissingLayerSpec { layer: String },
    /// More than [`REGIONS_MAX`] regions or groups.
    #[error("a layout of {regions} regions exceeds {REGIONS_MAX}")]
    TooManyRegions { regions: usize },
    /// The sizes of the regions add up to more than 64 bits hold.
    #[error("the sizes of the regions overflow 64 bits")]
    SizeOverflow,
    /// Tensors of some layers were not given; all of them, sorted.
    #[error("missing KV cache layers: {}", list(layers))]
    MissingTensors { layers: Vec<Arc<str>> },
    /// A layer's cache has no dimension.
    #[error("KV cache {} must be a tensor", python_repr(layer))]
    NotATensor { layer: Arc<str> },
    /// A tensor's stride contradicts the region's.
    #[error("KV block stride mismatch for {}: config={config}, tensor={tensor}", python_repr(layer))]
    StrideMismatch { layer: Arc<str>, config: u64, tensor: u64 },
    /// An object of a group would exceed [`OBJECT_BYTES_MAX`].
    #[error("an object of cache group {group_id} has {object_bytes} bytes, more than {OBJECT_BYTES_MAX}")]
    ObjectTooLarge { group_id: u32, object_bytes: u64 },
    /// A block would consist of too many physical parts.
    #[error("a block would be split into more than {RANGES_PER_BLOCK_MAX} ranges")]
    TooManyParts,
    /// No tensors are registered.
    #[error("KV caches must be registered before planning")]
    NotRegistered,
    /// No region belongs to the group.
    #[error("KV layout does not contain cache group {group_id}")]
    UnknownGroup { group_id: u32 },
    /// A layer's address was not given.
    #[error("missing base address for layer {}", python_repr(layer))]
    MissingBaseAddress { layer: Arc<str> },
    /// A block id beyond the registered tensors.
    #[error("block {block_id} is outside the registered tensors, which hold {blocks} blocks")]
    BlockOutside { block_id: u64, blocks: u64 },
    /// A block's address would exceed 64 bits.
    #[error("the address of block {block_id} of layer {} overflows 64 bits", python_repr(layer))]
    AddressOverflow { layer: Arc<str>, block_id: u64 },
    /// A call would make more than [`RANGES_PER_CALL_MAX`] ranges.
    #[error("{blocks} blocks of {ranges_per_block} ranges exceed {RANGES_PER_CALL_MAX} ranges")]
    TooManyRanges { blocks: usize, ranges_per_block: usize },
}

fn list(layers: &[Arc<str>]) -> String {
    python_repr_list(layers.iter().map(AsRef::as_ref))
}

impl LayoutError {
    /// Whether the same call may succeed later without any change of its arguments.
    #[must_use]
    pub const fn is_retryable(&self) -> bool {
        matches!(self, Self::NotRegistered)
    }

    /// Always: no peer is involved.
    #[must_use]
    pub const fn is_local(&self) -> bool {
        true
    }
}

/// The blocks of one layer: their place in an object and their spacing in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KVRegion {
    layer_name: Arc<str>,
    group_id: u32,
    block_stride: u64,
    block_bytes: u64,
    object_offset: u64,
    block_size: u32,
}

impl KVRegion {
    /// A checked region.
    ///
    /// `block_stride` is the distance between blocks and `block_bytes` the size of one, in bytes; `object_offset` is the
    /// place in an object of all groups, in bytes; `block_size` is in tokens.
    ///
    /// # Errors
    /// A size of zero, or a block larger than its stride.
    pub fn new(
        layer_name: &str,
        group_id: u32,
        block_stride: u64,
        block_bytes: u64,
        object_offset: u64,
        block_size: u32,
    ) -> Result<Self, LayoutError> {
        let layer_name = Arc::from(layer_name);
        if block_stride == 0 || block_bytes == 0 {
            return Err(LayoutError::SizesNotPositive);
        }
        if block_size == 0 {
            return Err(LayoutError::BlockSizeNotPositive);
        }
        if block_bytes > block_stride {
            return Err(LayoutError::BytesExceedStride { layer: layer_name, block_bytes, block_stride });
        }
        Ok(Self { layer_name, group_id, block_stride, block_bytes, object_offset, block_size })
    }

    /// Name of the layer.
    #[must_use]
    pub const fn layer_name(&self) -> &Arc<str> {
        &self.layer_name
    }

    /// Cache group.
    #[must_use]
    pub const fn group_id(&self) -> u32 {
        self.group_id
    }

    /// Bytes from one block to the next, as configured.
    #[must_use]
    pub const fn block_stride(&self) -> u64 {
        self.block_stride
    }

    /// Bytes of one block.
    #[must_use]
    pub const fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    /// Offset in an object that holds all groups, bytes. Objects of one group count from zero instead.
    #[must_use]
    pub const fn object_offset(&self) -> u64 {
        self.object_offset
    }

    /// Tokens of one block.
    #[must_use]
    pub const fn block_size(&self) -> u32 {
        self.block_size
    }
}

/// Total bytes of some regions.
pub(super) fn total_bytes<'a>(regions: impl IntoIterator<Item = &'a KVRegion>) -> Result<u64, LayoutError> {
    regions
        .into_iter()
        .try_fold(0u64, |sum, region| sum.checked_add(region.block_bytes))
        .ok_or(LayoutError::SizeOverflow)
}

/// One rank's object layout, as runtimes see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KVLayoutDescriptor {
    regions: Arc<[KVRegion]>,
    topology: RankTopology,
    layout_format: Arc<str>,
    object_size: u64,
}

impl KVLayoutDescriptor {
    /// The format that vLLM names when nothing else is asked for.
    pub const RANK_LOCAL: &'static str = "rank_local";

    /// A checked descriptor. No regions at all are allowed: a scheduler's layout has none.
    ///
    /// # Errors
    /// An empty format, a layer that occurs twice, or sizes beyond the limits.
    pub fn new(
        regions: Arc<[KVRegion]>,
        topology: RankTopology,
        layout_format: &str,
    ) -> Result<Self, LayoutError> {
        if layout_format.is_empty() {
            return Err(LayoutError::FormatEmpty);
        }
        if regions.len() > REGIONS_MAX {
            return Err(LayoutError::TooManyRegions { regions: regions.len() });
        }
        let names: BTreeSet<_> = regions.iter().map(KVRegion::layer_name).collect();
        if names.len() != regions.len() {
            return Err(LayoutError::DuplicateLayers);
        }
        let object_size = total_bytes(regions.iter())?;
        Ok(Self { regions, topology, layout_format: layout_format.into(), object_size })
    }

    /// Regions of all groups.
    #[must_use]
    pub fn regions(&self) -> &[KVRegion] {
        &self.regions
    }

    /// Ranks of the engine.
    #[must_use]
    pub const fn topology(&self) -> &RankTopology {
        &self.topology
    }

    /// Name of the format.
    #[must_use]
    pub fn layout_format(&self) -> &str {
        &self.layout_format
    }

    /// Bytes of one block of all groups together. Stored objects are per group: see
    /// [`KVLayoutDescriptor::group_object_bytes`].
    #[must_use]
    pub const fn object_size(&self) -> u64 {
        self.object_size
    }

    fn group(&self, group_id: u32) -> impl Iterator<Item = &KVRegion> + Clone {
        self.regions.iter().filter(move |region| region.group_id == group_id)
    }

    /// Bytes of a group's objects.
    ///
    /// # Errors
    /// No region belongs to the group, or the object exceeds [`OBJECT_BYTES_MAX`].
    pub fn group_object_bytes(&self, group_id: u32) -> Result<u64, LayoutError> {
        let object_bytes = total_bytes(self.group(group_id))?;
        match object_bytes {
            0 => Err(LayoutError::UnknownGroup { group_id }),
            1..=OBJECT_BYTES_MAX => Ok(object_bytes),
            _ => Err(LayoutError::ObjectTooLarge { group_id, object_bytes }),
        }
    }

    /// The layout id of a group's objects (design 1.9): layer order, bytes per block, dtype, format and protocol
    /// version. Strides and addresses are no part of it: ranks that lay blocks out differently in memory still store
    /// the same object bytes.
    ///
    /// # Errors
    /// No region belongs to the group.
    pub fn layout_id(&self, group_id: u32, dtype: &str) -> Result<LayoutId, LayoutError> {
        let mut layers =
            self.group(group_id).map(|region| (region.layer_name.as_ref(), region.block_bytes)).peekable();
        if layers.peek().is_none() {
            return Err(LayoutError::UnknownGroup { group_id });
        }
        Ok(crate::hash::layout_id(layers, dtype, &self.layout_format))
    }
}
