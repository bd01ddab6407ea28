//! Keyed hashes of design 1.9: namespace key, key hash, fingerprint, tag, layout id.

use core::fmt;

use crate::{Fingerprint, Generation, Incarnation, LayoutId, Tag};

const NAMESPACE_CONTEXT: &str = "kvfabric 2026-12 namespace key v1";
const LAYOUT_CONTEXT: &str = "kvfabric 2026-12 layout id v1";

/// The five rank coordinates that a key names, in the order they are hashed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyCoordinates {
    /// Tensor-parallel rank.
    pub tp_rank: u32,
    /// Prefill-context-parallel rank.
    pub pcp_rank: u32,
    /// Decode-context-parallel rank.
    pub dcp_rank: u32,
    /// Pipeline-parallel rank.
    pub pp_rank: u32,
    /// Cache group.
    pub group_id: u32,
}

/// Key of a namespace's hashes: derived from the operator's secret, the namespace and the key salt.
///
/// Whoever lacks the secret can neither look a key up nor compute its tag.
#[derive(Clone, PartialEq, Eq)]
pub struct NamespaceKey([u8; 32]);

impl fmt::Debug for NamespaceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NamespaceKey(..)")
    }
}

impl NamespaceKey {
    /// Derives the key. `key_salt` holds the identity of the model's weights. Each part is length-prefixed, so that
    /// no two different triples hash alike.
    #[must_use]
    pub fn derive(secret: &[u8], namespace: &str, key_salt: &[u8]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key(NAMESPACE_CONTEXT);
        for part in [secret, namespace.as_bytes(), key_salt] {
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        Self(*hasher.finalize().as_bytes())
    }

    /// A name for the namespace that the directory may see: 16 bytes that reveal neither namespace nor secret.
    #[must_use]
    pub fn public_name(&self) -> [u8; 16] {
        let mut name = [0; 16];
        name.copy_from_slice(&blake3::keyed_hash(&self.0, b"namespace name").as_bytes()[..16]);
        name
    }

    /// K: the 32-byte hash of one key.
    #[must_use]
    pub fn hash(&self, at: KeyCoordinates, block_hash: &[u8]) -> KeyHash {
        let mut input = [0u8; 20 + 64];
        for (chunk, value) in
            input.chunks_exact_mut(4).zip([at.tp_rank, at.pcp_rank, at.dcp_rank, at.pp_rank, at.group_id])
        {
            chunk.copy_from_slice(&value.to_le_bytes());
        }
        // One call over one buffer: a fresh Hasher costs twice as much for inputs this short.
        let digest = match input.get_mut(20..20 + block_hash.len()) {
            Some(room) => {
                room.copy_from_slice(block_hash);
                blake3::keyed_hash(&self.0, &input[..20 + block_hash.len()])
            }
            None => {
                let mut hasher = blake3::Hasher::new_keyed(&self.0);
                hasher.update(&input[..20]);
                hasher.update(block_hash);
                hasher.finalize()
            }
        };
        KeyHash(*digest.as_bytes())
    }
}

/// K of design 1.9: fingerprint and tag both come from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeyHash(pub [u8; 32]);

impl KeyHash {
    /// The first 16 bytes: what the directory knows.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&self.0[..16]);
        Fingerprint::from_bytes(bytes)
    }

    /// The word's tag under an owner's incarnation. It uses the half of K that the directory never sees, so a
    /// fingerprint collision or a cross-wired entry fails validation.
    #[must_use]
    pub fn tag(&self, layout_id: LayoutId, object_bytes: u64, owner: Incarnation) -> Tag {
        let mut key = [0; 32];
        key[..16].copy_from_slice(&self.0[16..]);
        let mut input = [0; 32];
        input[..16].copy_from_slice(&layout_id.0.to_le_bytes());
        input[16..24].copy_from_slice(&object_bytes.to_le_bytes());
        input[24..].copy_from_slice(&owner.get().to_le_bytes());
        let digest = blake3::keyed_hash(&key, &input);
        let mut first = [0; 8];
        first.copy_from_slice(&digest.as_bytes()[..8]);
        Tag(u64::from_le_bytes(first).max(1))
    }
}

/// Builds a [`LayoutId`] over a group's canonical layout: layer order, bytes per block, dtype, format and protocol
/// version.
#[must_use]
pub fn layout_id<'a>(
    layers: impl IntoIterator<Item = (&'a str, u64)>,
    dtype: &str,
    format: &str,
) -> LayoutId {
    let mut hasher = blake3::Hasher::new_derive_key(LAYOUT_CONTEXT);
    hasher.update(&crate::limits::PROTOCOL_VERSION.to_le_bytes());
    for text in [dtype, format] {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    }
    for (name, block_bytes) in layers {
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        hasher.update(&block_bytes.to_le_bytes());
    }
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    LayoutId(u128::from_le_bytes(bytes))
}

/// The next generation; saturates, so that a counter at its end can never repeat a value (it would take centuries).
#[must_use]
pub const fn next_generation(current: Generation) -> Generation {
    Generation(current.0.saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> KeyHash {
        NamespaceKey::derive(b"secret", "ns", b"weights").hash(KeyCoordinates::default(), &[1; 32])
    }

    #[test]
    fn every_input_changes_the_hash() {
        let base = NamespaceKey::derive(b"", "ns", b"");
        assert_ne!(base, NamespaceKey::derive(b"n", "s", b""));
        assert_ne!(base, NamespaceKey::derive(b"", "n", b"s"));
        let at = KeyCoordinates::default();
        assert_ne!(base.hash(at, &[1; 32]), base.hash(at, &[2; 32]));
        assert_ne!(base.hash(at, &[1; 32]), base.hash(KeyCoordinates { group_id: 1, ..at }, &[1; 32]));
        assert_ne!(base.hash(at, &[1; 64]), base.hash(at, &[1; 65]));
    }

    #[test]
    fn tags_bind_layout_size_and_incarnation() {
        let inc = Incarnation::new(5).unwrap();
        let tag = key().tag(LayoutId(1), 4096, inc);
        assert_ne!(tag, Tag(0));
        assert_ne!(tag, key().tag(LayoutId(2), 4096, inc));
        assert_ne!(tag, key().tag(LayoutId(1), 4097, inc));
        assert_ne!(tag, key().tag(LayoutId(1), 4096, Incarnation::new(6).unwrap()));
    }

    #[test]
    fn fingerprints_round_trip() {
        let fp = key().fingerprint();
        assert_eq!(Fingerprint::from_bytes(fp.to_bytes()), fp);
        assert_eq!(&fp.to_bytes()[..], &key().0[..16]);
    }
}
