//! The planner: turns block ids into the byte ranges of their objects.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::layout::total_bytes;
use super::limits::REGIONS_MAX;
use super::lower::{split, Lowering, Placed};
use super::{
    BlockTransferPlan, CacheConfig, FlatRange, KVLayoutDescriptor, KVRange, KVRegion, LayoutError,
    RankTopology,
};
use crate::limits::OBJECT_BYTES_MAX;

/// The tensor that holds one layer's blocks, as the engine allocated it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegisteredTensor {
    /// Address of the first element of block 0.
    pub base_address: u64,
    /// Bytes from one physical block (index of the first dimension) to the next.
    pub block_stride: u64,
    /// Physical blocks: size of the first dimension. Ids beyond it are refused.
    pub blocks: u64,
    /// Number of dimensions; a tensor without any holds no blocks.
    pub dimensions: u32,
}

#[derive(Clone, Debug, Default)]
struct Lowerings {
    plain: Lowering,
    merged: Lowering,
}

impl Lowerings {
    fn new<'a>(regions: impl IntoIterator<Item = Placed<'a>>) -> Result<Self, LayoutError> {
        let plain = Lowering::new(regions)?;
        Ok(Self { merged: plain.merged(), plain })
    }
}

#[derive(Clone, Debug)]
struct Registered {
    tensors: BTreeMap<Arc<str>, RegisteredTensor>,
    all: Lowerings,
    // Sorted by group.
    groups: Vec<(u32, Lowerings)>,
}

/// A deterministic object layout over all layers of a rank, and the way from blocks to ranges.
///
/// Ranges of a group count their object offsets from zero in the order of the group's regions; ranges over all groups
/// use each region's own offset.
#[derive(Clone, Debug)]
pub struct KVLayoutPlanner {
    regions: Arc<[KVRegion]>,
    object_size: u64,
    registered: Option<Registered>,
}

impl KVLayoutPlanner {
    /// A planner of given regions.
    ///
    /// # Errors
    /// More regions or bytes than the limits.
    pub fn new(regions: impl Into<Arc<[KVRegion]>>) -> Result<Self, LayoutError> {
        let regions = regions.into();
        if regions.len() > REGIONS_MAX {
            return Err(LayoutError::TooManyRegions { regions: regions.len() });
        }
        let object_size = total_bytes(regions.iter())?;
        Ok(Self { regions, object_size, registered: None })
    }

    /// A planner of an engine's cache: regions in the order of its tensors and their layers, without the groups that
    /// are not transferred.
    ///
    /// # Errors
    /// A region's sizes, a layer without specification, or sizes beyond the limits.
    pub fn from_cache_config(config: &CacheConfig) -> Result<Self, LayoutError> {
        let mut specs = BTreeMap::new();
        for (group_id, group) in
            config.groups.iter().enumerate().filter(|(_, group)| group.enable_kv_transfer)
        {
            let group_id = u32::try_from(group_id)
                .map_err(|_| LayoutError::TooManyRegions { regions: config.groups.len() })?;
            for layer in &group.layers {
                let spec = group
                    .spec
                    .layer(layer)
                    .ok_or_else(|| LayoutError::MissingLayerSpec { layer: layer.clone() })?;
                specs.insert(layer.as_str(), (group_id, spec));
            }
        }
        let mut regions = Vec::new();
        let mut offset = 0u64;
        for tensor in &config.tensors {
            for layer in &tensor.layers {
                let Some((group_id, spec)) = specs.get(layer.as_str()) else { continue };
                regions.push(KVRegion::new(
                    layer,
                    *group_id,
                    tensor.block_stride,
                    spec.page_size_bytes,
                    offset,
                    spec.block_size,
                )?);
                offset = offset.checked_add(spec.page_size_bytes).ok_or(LayoutError::SizeOverflow)?;
            }
        }
        Self::new(regions)
    }

    /// Regions of all groups.
    #[must_use]
    pub fn regions(&self) -> &[KVRegion] {
        &self.regions
    }

    /// Bytes of one block of all groups together.
    #[must_use]
    pub const fn object_size(&self) -> u64 {
        self.object_size
    }

    /// The groups that have regions, ascending.
    #[must_use]
    pub fn group_ids(&self) -> Vec<u32> {
        let mut groups: Vec<_> = self.regions.iter().map(KVRegion::group_id).collect();
        groups.sort_unstable();
        groups.dedup();
        groups
    }

    /// The layout as runtimes see it.
    ///
    /// # Errors
    /// An empty format, or a layer that occurs twice.
    pub fn describe(
        &self,
        topology: RankTopology,
        layout_format: &str,
    ) -> Result<KVLayoutDescriptor, LayoutError> {
        KVLayoutDescriptor::new(self.regions.clone(), topology, layout_format)
    }

    /// Takes the addresses and strides of the layers' tensors and prepares lowering. Tensors of other layers are
    /// ignored. On an error an earlier registration stays.
    ///
    /// # Errors
    /// A layer without tensor, a tensor without dimensions, a stride that contradicts its region, an object above
    /// [`OBJECT_BYTES_MAX`], or blocks beyond the address space.
    pub fn register_kv_caches(
        &mut self,
        caches: &BTreeMap<String, RegisteredTensor>,
    ) -> Result<(), LayoutError> {
        let mut missing: Vec<_> = self
            .regions
            .iter()
            .map(|region| region.layer_name().clone())
            .filter(|layer| !caches.contains_key(layer.as_ref()))
            .collect();
        if !missing.is_empty() {
            missing.sort_unstable();
            missing.dedup();
            return Err(LayoutError::MissingTensors { layers: missing });
        }
        let mut tensors = BTreeMap::new();
        for region in self.regions.iter() {
            if let Some(tensor) = caches.get(region.layer_name().as_ref()) {
                check_tensor(region, tensor)?;
                tensors.insert(region.layer_name().clone(), *tensor);
            }
        }
        let mut groups = Vec::new();
        for group_id in self.group_ids() {
            let object_bytes = total_bytes(self.group(Some(group_id)).map(|(_, region)| region))?;
            if object_bytes > OBJECT_BYTES_MAX {
                return Err(LayoutError::ObjectTooLarge { group_id, object_bytes });
            }
            groups.push((group_id, Lowerings::new(self.placed(Some(group_id), &tensors)?)?));
        }
        let all = Lowerings::new(self.placed(None, &tensors)?)?;
        self.registered = Some(Registered { tensors, all, groups });
        Ok(())
    }

    /// The regions of a group, or of all, with their indices.
    fn group(&self, group_id: Option<u32>) -> impl Iterator<Item = (usize, &KVRegion)> {
        self.regions
            .iter()
            .enumerate()
            .filter(move |(_, region)| group_id.is_none_or(|group_id| region.group_id() == group_id))
    }

    fn placed<'a>(
        &'a self,
        group_id: Option<u32>,
        tensors: &BTreeMap<Arc<str>, RegisteredTensor>,
    ) -> Result<Vec<Placed<'a>>, LayoutError> {
        let mut placed = Vec::new();
        let mut offset = 0u64;
        for (index, region) in self.group(group_id) {
            let tensor = *tensors
                .get(region.layer_name())
                .ok_or_else(|| LayoutError::MissingBaseAddress { layer: region.layer_name().clone() })?;
            let layer = u32::try_from(index)
                .map_err(|_| LayoutError::TooManyRegions { regions: self.regions.len() })?;
            let object_offset = if group_id.is_some() { offset } else { region.object_offset() };
            placed.push(Placed { region, tensor, layer, object_offset });
            offset = offset.checked_add(region.block_bytes()).ok_or(LayoutError::SizeOverflow)?;
        }
        Ok(placed)
    }

    /// The registration; a layout without regions never has one, as in the reference.
    fn registered(&self) -> Result<&Registered, LayoutError> {
        self.registered
            .as_ref()
            .filter(|registered| !registered.tensors.is_empty())
            .ok_or(LayoutError::NotRegistered)
    }

    fn lowerings(&self, group_id: Option<u32>) -> Result<&Lowerings, LayoutError> {
        let registered = self.registered()?;
        let Some(group_id) = group_id else { return Ok(&registered.all) };
        registered
            .groups
            .binary_search_by_key(&group_id, |(group, _)| *group)
            .ok()
            .and_then(|index| registered.groups.get(index))
            .map(|(_, lowerings)| lowerings)
            .ok_or(LayoutError::UnknownGroup { group_id })
    }

    /// Appends the ranges of many registered blocks, block by block, one range for each region or physical part. Costs
    /// nanoseconds a range and allocates only to grow `out`. On an error `out` is as before the call.
    ///
    /// # Errors
    /// Nothing registered, an unknown group, a block id outside the tensors, or more ranges than the limit.
    pub fn plan_into(
        &self,
        block_ids: &[u64],
        group_id: Option<u32>,
        out: &mut Vec<FlatRange>,
    ) -> Result<(), LayoutError> {
        self.lowerings(group_id)?.plain.lower_into(block_ids, out)
    }

    /// As [`KVLayoutPlanner::plan_into`], with ranges that touch both in memory and in the object merged: one range for
    /// a block whose layers lie side by side.
    ///
    /// # Errors
    /// As [`KVLayoutPlanner::plan_into`].
    pub fn plan_merged_into(
        &self,
        block_ids: &[u64],
        group_id: Option<u32>,
        out: &mut Vec<FlatRange>,
    ) -> Result<(), LayoutError> {
        self.lowerings(group_id)?.merged.lower_into(block_ids, out)
    }

    /// Ranges of one registered block, plain and merged.
    ///
    /// # Errors
    /// Nothing registered, or an unknown group.
    pub fn ranges_per_block(&self, group_id: Option<u32>) -> Result<(usize, usize), LayoutError> {
        let lowerings = self.lowerings(group_id)?;
        Ok((lowerings.plain.ranges_per_block(), lowerings.merged.ranges_per_block()))
    }

    /// Plans one block of the registered tensors.
    ///
    /// # Errors
    /// Nothing registered, an unknown group, or a block id outside the tensors.
    pub fn plan_registered_block(
        &self,
        key: &str,
        block_id: u64,
        group_id: Option<u32>,
        request_id: Option<&Arc<str>>,
    ) -> Result<BlockTransferPlan, LayoutError> {
        Ok(BlockTransferPlan {
            ranges: self.registered_ranges(block_id, group_id)?,
            request_id: request_id.cloned(),
            ..BlockTransferPlan::new(key, block_id)
        })
    }

    /// Plans one block at given base addresses of the layers. Strides are those of the registered tensors, or the
    /// configured ones where none is registered. The plan does not carry the group, as in the reference.
    ///
    /// # Errors
    /// An unknown group, a layer without address, or an address beyond 64 bits.
    pub fn plan_for_block(
        &self,
        key: &str,
        block_id: u64,
        base_addresses: &BTreeMap<String, u64>,
        group_id: Option<u32>,
        request_id: Option<&Arc<str>>,
    ) -> Result<BlockTransferPlan, LayoutError> {
        let address_of = |layer: &str| base_addresses.get(layer).copied();
        Ok(BlockTransferPlan {
            ranges: self.ranges_for_block(block_id, address_of, group_id)?,
            request_id: request_id.cloned(),
            ..BlockTransferPlan::new(key, block_id)
        })
    }

    /// The plan with its ranges in the registered tensors, whatever ranges it had.
    ///
    /// # Errors
    /// Nothing registered, an unknown group, or a block id outside the tensors.
    pub fn materialize(&self, plan: &BlockTransferPlan) -> Result<BlockTransferPlan, LayoutError> {
        let ranges = self.registered_ranges(plan.block_id, plan.group_id)?;
        Ok(BlockTransferPlan { ranges, ..plan.clone() })
    }

    fn registered_ranges(&self, block_id: u64, group_id: Option<u32>) -> Result<Vec<KVRange>, LayoutError> {
        self.lowerings(group_id)?.plain.check(block_id)?;
        let tensors = &self.registered()?.tensors;
        let address_of = |layer: &str| tensors.get(layer).map(|tensor| tensor.base_address);
        self.ranges_for_block(block_id, address_of, group_id)
    }

    fn ranges_for_block(
        &self,
        block_id: u64,
        address_of: impl Fn(&str) -> Option<u64>,
        group_id: Option<u32>,
    ) -> Result<Vec<KVRange>, LayoutError> {
        let mut ranges = Vec::new();
        let mut offset = 0u64;
        for (_, region) in self.group(group_id) {
            let layer = region.layer_name();
            let base =
                address_of(layer).ok_or_else(|| LayoutError::MissingBaseAddress { layer: layer.clone() })?;
            let stride = self
                .registered
                .as_ref()
                .and_then(|registered| registered.tensors.get(layer))
                .map_or(region.block_stride(), |tensor| tensor.block_stride);
            let (count, length) = split(region, stride);
            let first_offset = if group_id.is_some() { offset } else { region.object_offset() };
            for part in 0..count {
                let place = || {
                    let address = block_id
                        .checked_mul(count)?
                        .checked_add(part)?
                        .checked_mul(stride)?
                        .checked_add(base)?;
                    // The end must be an address too, not only the start.
                    address.checked_add(length)?;
                    Some((address, first_offset.checked_add(part.checked_mul(length)?)?))
                };
                let (base_address, object_offset) =
                    place().ok_or_else(|| LayoutError::AddressOverflow { layer: layer.clone(), block_id })?;
                ranges.push(KVRange {
                    layer_name: layer.clone(),
                    group_id: region.group_id(),
                    block_id,
                    base_address,
                    stride,
                    length,
                    object_offset,
                });
            }
            offset = offset.checked_add(region.block_bytes()).ok_or(LayoutError::SizeOverflow)?;
        }
        match group_id {
            // Each region gives at least one range.
            Some(group_id) if ranges.is_empty() => Err(LayoutError::UnknownGroup { group_id }),
            _ => Ok(ranges),
        }
    }
}

/// A tensor's stride must fit the region's: equal to it or a divisor of it, and a divisor of the block where the block
/// is larger than the stride and so lies in several physical parts.
fn check_tensor(region: &KVRegion, tensor: &RegisteredTensor) -> Result<(), LayoutError> {
    if tensor.dimensions == 0 {
        return Err(LayoutError::NotATensor { layer: region.layer_name().clone() });
    }
    let stride = tensor.block_stride;
    let fits = stride != 0
        && stride <= region.block_stride()
        && region.block_stride() % stride == 0
        && (region.block_bytes() <= stride || region.block_bytes() % stride == 0);
    if fits {
        Ok(())
    } else {
        Err(LayoutError::StrideMismatch {
            layer: region.layer_name().clone(),
            config: region.block_stride(),
            tensor: stride,
        })
    }
}
