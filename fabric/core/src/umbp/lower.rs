//! Lowering of registered layouts: from block ids to byte ranges, with everything constant computed once.

use super::limits::{RANGES_PER_BLOCK_MAX, RANGES_PER_CALL_MAX};
use super::{KVRegion, LayoutError, RegisteredTensor};

/// One contiguous piece of one block, without names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlatRange {
    /// First byte's address.
    pub address: u64,
    /// Offset in the object, bytes.
    pub object_offset: u64,
    /// Length, bytes.
    pub length: u32,
    /// Index of the (first) layer in the planner's regions.
    pub layer: u32,
}

/// One range of every block: its place in block 0 and the distance to the next block's.
#[derive(Clone, Copy, Debug)]
struct Part {
    base: u64,
    step: u64,
    object_offset: u64,
    length: u32,
    layer: u32,
}

/// The ranges of one kind of object.
///
/// Invariant: for each `block_id < blocks` and each part, `base + block_id * step + length` fits 64 bits. The
/// constructor establishes it, so lowering needs one comparison for each block and none for each range.
#[derive(Clone, Debug, Default)]
pub(super) struct Lowering {
    parts: Box<[Part]>,
    blocks: u64,
}

/// A region with its tensor and its place in an object.
pub(super) struct Placed<'a> {
    pub(super) region: &'a KVRegion,
    pub(super) tensor: RegisteredTensor,
    pub(super) layer: u32,
    pub(super) object_offset: u64,
}

impl Lowering {
    /// Prepares the regions of one kind of object.
    pub(super) fn new<'a>(regions: impl IntoIterator<Item = Placed<'a>>) -> Result<Self, LayoutError> {
        let mut parts = Vec::new();
        let mut blocks = u64::MAX;
        for Placed { region, tensor, layer, object_offset } in regions {
            let stride = tensor.block_stride;
            let overflow =
                |block_id| LayoutError::AddressOverflow { layer: region.layer_name().clone(), block_id };
            let (count, length) = split(region, stride);
            if count > RANGES_PER_BLOCK_MAX as u64 - parts.len() as u64 {
                return Err(LayoutError::TooManyParts);
            }
            let length_32 = u32::try_from(length).map_err(|_| LayoutError::ObjectTooLarge {
                group_id: region.group_id(),
                object_bytes: region.block_bytes(),
            })?;
            let step = stride.checked_mul(count).ok_or_else(|| overflow(1))?;
            let region_blocks = tensor.blocks / count;
            blocks = blocks.min(region_blocks);
            if let Some(last) = region_blocks.checked_sub(1) {
                // The last byte of the last block bounds every other one.
                last.checked_mul(step)
                    .and_then(|offset| offset.checked_add(stride * (count - 1)))
                    .and_then(|offset| offset.checked_add(tensor.base_address))
                    .and_then(|address| address.checked_add(length))
                    .ok_or_else(|| overflow(last))?;
                for part in 0..count {
                    parts.push(Part {
                        base: tensor.base_address + part * stride,
                        step,
                        object_offset: object_offset
                            .checked_add(part * length)
                            .ok_or(LayoutError::SizeOverflow)?,
                        length: length_32,
                        layer,
                    });
                }
            }
        }
        Ok(Self { blocks: if parts.is_empty() { 0 } else { blocks }, parts: parts.into() })
    }

    /// The same bytes in as few ranges as possible: neighbours that touch both in the object and, for every block, in
    /// memory become one. Physical parts of a block always do, and so do the layers of a block-outermost layout.
    pub(super) fn merged(&self) -> Self {
        let mut parts: Vec<Part> = Vec::with_capacity(self.parts.len());
        for part in &self.parts {
            if let Some(last) = parts.last_mut() {
                let length = u64::from(last.length);
                let touches = last.step == part.step
                    && last.base.checked_add(length) == Some(part.base)
                    && last.object_offset.checked_add(length) == Some(part.object_offset);
                if let (true, Some(length)) = (touches, last.length.checked_add(part.length)) {
                    last.length = length;
                    continue;
                }
            }
            parts.push(*part);
        }
        Self { parts: parts.into(), blocks: self.blocks }
    }

    /// Ranges of one block.
    pub(super) fn ranges_per_block(&self) -> usize {
        self.parts.len()
    }

    /// Refuses a block id outside the registered tensors.
    pub(super) fn check(&self, block_id: u64) -> Result<(), LayoutError> {
        if block_id < self.blocks {
            Ok(())
        } else {
            Err(LayoutError::BlockOutside { block_id, blocks: self.blocks })
        }
    }

    /// Appends the ranges of the blocks, block by block in object order. On an error `out` is as before the call.
    pub(super) fn lower_into(&self, block_ids: &[u64], out: &mut Vec<FlatRange>) -> Result<(), LayoutError> {
        let ranges =
            block_ids.len().checked_mul(self.parts.len()).filter(|&n| n <= RANGES_PER_CALL_MAX).ok_or(
                LayoutError::TooManyRanges { blocks: block_ids.len(), ranges_per_block: self.parts.len() },
            )?;
        for &block_id in block_ids {
            self.check(block_id)?;
        }
        out.reserve(ranges);
        for &block_id in block_ids {
            // No overflow: every id was checked, and the type's invariant covers the rest.
            out.extend(self.parts.iter().map(|part| FlatRange {
                address: part.base + block_id * part.step,
                object_offset: part.object_offset,
                length: part.length,
                layer: part.layer,
            }));
        }
        Ok(())
    }
}

/// Into how many physical parts, of which length, a tensor's stride splits a region's block.
pub(super) fn split(region: &KVRegion, stride: u64) -> (u64, u64) {
    if region.block_bytes() <= stride {
        (1, region.block_bytes())
    } else {
        // Registration made sure that the stride divides the block.
        (region.block_bytes() / stride, stride)
    }
}
