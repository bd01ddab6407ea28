//! Limits of the UMBP data model, each with its reason.

use crate::limits::{JOB_BLOCKS_MAX, LOOKUP_KEYS_MAX};

/// Most namespaces whose derived keys a [`KeyHasher`](super::KeyHasher) keeps: a process serves one namespace per
/// loaded model, and a peer that invents namespaces must not grow the cache.
pub const NAMESPACES_CACHED_MAX: usize = 64;
/// Longest namespace: what is left of the longest key when every rank has ten digits and the hash is the longest.
pub const NAMESPACE_BYTES_MAX: usize = 3840;
/// Most ranks of one engine; more is a wrong configuration, and listing them would exhaust memory.
pub const RANKS_MAX: u64 = 1 << 20;
/// Most keys made by one call for a topology: what one lookup may carry.
pub const TOPOLOGY_KEYS_MAX: usize = LOOKUP_KEYS_MAX;
/// Most regions of a layout: thousands of layers are the largest models known, ranges name them with 32 bits.
pub const REGIONS_MAX: usize = 65_536;
/// Most ranges of one block, physical parts included: a tiny physical stride must not explode a plan.
pub const RANGES_PER_BLOCK_MAX: usize = 65_536;
/// Most ranges that one call lowers: 65,536 blocks of 256 ranges, 400 MB.
pub const RANGES_PER_CALL_MAX: usize = 1 << 24;
/// Deepest nesting of a value in a layer's specification; the JSON writer recurses.
pub const JSON_DEPTH_MAX: usize = 64;

const _: () = {
    assert!(RANGES_PER_CALL_MAX >= JOB_BLOCKS_MAX * 256);
    assert!(RANGES_PER_BLOCK_MAX <= RANGES_PER_CALL_MAX);
    // Prefix, ":tp:pcp:dcp:pp:g:" with five numbers of ten digits, and the hash.
    assert!(
        super::KEY_PREFIX.len() + NAMESPACE_BYTES_MAX + 17 + 5 * 10 + 2 * crate::limits::BLOCK_HASH_BYTES_MAX
            <= crate::limits::KEY_BYTES_MAX
    );
};
