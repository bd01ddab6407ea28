//! KV tensors of the demo: the layout of a Llama-like model, where the keys and the values of one block lie apart.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use kvfabric_core::umbp::{
    FlatRange, KVLayoutDescriptor, KVLayoutPlanner, KVRegion, RankTopology, RegisteredTensor,
};
use kvfabric_core::LayoutId;
use kvfabric_memory::{Region, ScatterList};
use kvfabric_node::Node;

use crate::content::{count_not_poison, POISON};

/// Layers of the model.
const LAYERS: usize = 32;
/// Tokens of a block.
const BLOCK_TOKENS: u32 = 16;
/// Keys, or values, of one block in one layer: 16 tokens, one head of 64 numbers of two bytes.
const PLANE_BLOCK_BYTES: usize = BLOCK_TOKENS as usize * 64 * 2;
/// Keys and values.
const PLANES: [&str; 2] = ["key", "value"];
/// Cache group of all layers.
pub const GROUP_ID: u32 = 0;
/// One block's object: 64 ranges of 2 KiB.
pub const OBJECT_BYTES: usize = LAYERS * PLANES.len() * PLANE_BLOCK_BYTES;
/// Block 0 (the null block of real engines) and one behind the last are in no plan: nothing may ever write there.
const GUARD_BLOCKS: usize = 2;

/// The tensors of one rank: a region for each layer, in it all keys and then all values.
pub struct KvTensors {
    layers: Vec<Region>,
    planner: KVLayoutPlanner,
    layout: LayoutId,
    blocks: u32,
    ranges: Vec<FlatRange>,
}

impl KvTensors {
    /// Allocates tensors for so many blocks and fills them with poison.
    ///
    /// # Errors
    /// No memory, or sizes beyond the limits.
    pub fn allocate(blocks: u32) -> Result<Self> {
        let plane_blocks = blocks as usize + GUARD_BLOCKS;
        let plane_bytes = plane_blocks * PLANE_BLOCK_BYTES;
        let mut layers = Vec::with_capacity(LAYERS);
        let mut regions = Vec::new();
        let mut caches = BTreeMap::new();
        for layer in 0..LAYERS {
            let region =
                Region::allocate(PLANES.len() * plane_bytes).context("cannot allocate the KV tensors")?;
            region.fill(0, region.length_bytes(), POISON)?;
            for (plane, plane_name) in PLANES.iter().enumerate() {
                let name = format!("model.layers.{layer}.self_attn.attn.{plane_name}");
                let offset = (regions.len() * PLANE_BLOCK_BYTES) as u64;
                let stride = PLANE_BLOCK_BYTES as u64;
                regions.push(KVRegion::new(&name, GROUP_ID, stride, stride, offset, BLOCK_TOKENS)?);
                let base_address = (region.address() + plane * plane_bytes) as u64;
                let tensor = RegisteredTensor {
                    base_address,
                    block_stride: stride,
                    blocks: plane_blocks as u64,
                    dimensions: 4,
                };
                caches.insert(name, tensor);
            }
            layers.push(region);
        }
        let mut planner = KVLayoutPlanner::new(regions)?;
        planner.register_kv_caches(&caches)?;
        let layout = planner
            .describe(RankTopology::default(), KVLayoutDescriptor::RANK_LOCAL)?
            .layout_id(GROUP_ID, "bfloat16")?;
        Ok(Self { layers, planner, layout, blocks, ranges: Vec::new() })
    }

    /// Identity of the layout.
    pub fn layout(&self) -> LayoutId {
        self.layout
    }

    /// Blocks, without the guards.
    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    /// The memory to register.
    pub fn regions(&self) -> &[Region] {
        &self.layers
    }

    /// Where the object of one block lies: the planner's ranges, as registered memory of `node`.
    ///
    /// # Errors
    /// A block outside the tensors, or memory that is not registered.
    pub fn scatter(&mut self, node: &Node, block: u32) -> Result<ScatterList> {
        // Ids in the tensors start behind the null block.
        self.ranges.clear();
        self.planner.plan_into(&[u64::from(block) + 1], Some(GROUP_ID), &mut self.ranges)?;
        Ok(node.resolve(self.ranges.iter().map(|range| (range.address, u64::from(range.length))))?)
    }

    /// Bytes in the guards that something has written to.
    ///
    /// # Errors
    /// None that correct code meets: the ranges lie inside the tensors.
    pub fn guard_bytes_written(&self) -> Result<u64> {
        let plane_blocks = self.blocks as usize + GUARD_BLOCKS;
        let mut block = vec![0; PLANE_BLOCK_BYTES];
        let mut written = 0;
        for region in &self.layers {
            for plane in 0..PLANES.len() {
                for guard in [0, plane_blocks - 1] {
                    region.read((plane * plane_blocks + guard) * PLANE_BLOCK_BYTES, &mut block)?;
                    written += count_not_poison(&block);
                }
            }
        }
        Ok(written)
    }
}
