//! Keys of the blocks that demo and replay store: block hashes from numbers, and their spelling for the fabric.

use std::fmt::Write as _;

/// Hash of a block, as an engine would compute it over its tokens.
pub type BlockHash = [u8; 32];

/// Hash of the block with this number. `domain` keeps the numbers of different commands apart.
pub fn block_hash(domain: &str, number: u64) -> BlockHash {
    let mut input = Vec::with_capacity(domain.len() + 9);
    input.extend_from_slice(domain.as_bytes());
    input.push(0);
    input.extend_from_slice(&number.to_le_bytes());
    *blake3::hash(&input).as_bytes()
}

/// The key as vLLM's UMBP connector spells it: one rank, cache group 0.
pub fn umbp_key(namespace: &str, hash: &BlockHash) -> String {
    let mut key = String::with_capacity(48 + namespace.len() + 2 * hash.len());
    key.push_str("umbp:vllm:v1:");
    key.push_str(namespace);
    key.push_str(":tp0:pcp0:dcp0:pp0:g0:");
    for byte in hash {
        // Writing to a String cannot fail.
        let _ = write!(key, "{byte:02x}");
    }
    key
}

/// Seed of the block's content: the content is derived from the key alone.
pub fn content_seed(hash: &BlockHash) -> u64 {
    hash.iter().take(8).rev().fold(0, |seed, byte| (seed << 8) | u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hashes_are_unique_and_stable() {
        let hashes: std::collections::BTreeSet<BlockHash> = (0..10_000).map(|n| block_hash("a", n)).collect();
        assert_eq!(hashes.len(), 10_000);
        assert_eq!(block_hash("a", 7), block_hash("a", 7));
        assert_ne!(block_hash("a", 7), block_hash("b", 7));
    }

    #[test]
    fn keys_have_the_connectors_form() {
        let mut hash = [0; 32];
        hash[0] = 0xab;
        hash[31] = 1;
        let key = umbp_key("ns", &hash);
        assert!(key.starts_with("umbp:vllm:v1:ns:tp0:pcp0:dcp0:pp0:g0:ab00"), "{key}");
        assert!(key.ends_with("0001"), "{key}");
        assert_eq!(content_seed(&hash), 0xab);
    }
}
