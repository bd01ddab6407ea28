//! From key text to key hash in one pass, with the namespace's key kept.

use core::fmt;

use super::key::RawKey;
use super::limits::NAMESPACES_CACHED_MAX;
use super::KeyError;
use crate::hash::{KeyHash, NamespaceKey};
use crate::Fingerprint;

/// Turns key text into hashes (design 1.9) without allocating, and remembers the keys of the namespaces it met.
///
/// A process sees one namespace for each model it serves, so nearly every key finds its namespace in the entry that the
/// previous key used. The cache is bounded: keys of invented namespaces push each other out and cost time only.
#[derive(Clone)]
pub struct KeyHasher {
    secret: Box<[u8]>,
    key_salt: Box<[u8]>,
    entries: Vec<(Box<[u8]>, NamespaceKey)>,
    latest: usize,
    victim: usize,
}

impl fmt::Debug for KeyHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The secret and the derived keys stay out of logs.
        f.debug_struct("KeyHasher").field("namespaces", &self.entries.len()).finish_non_exhaustive()
    }
}

impl KeyHasher {
    /// A hasher for the operator's secret (empty by default) and the identity of the model's weights.
    #[must_use]
    pub fn new(secret: &[u8], key_salt: &[u8]) -> Self {
        Self { secret: secret.into(), key_salt: key_salt.into(), entries: Vec::new(), latest: 0, victim: 0 }
    }

    /// K of a key (design 1.9).
    ///
    /// # Errors
    /// Names the part of the key at fault.
    pub fn hash(&mut self, key: &[u8]) -> Result<KeyHash, KeyError> {
        let RawKey { namespace, at, block_hash } = RawKey::parse(key)?;
        Ok(self.key_of(namespace)?.hash(at, block_hash.as_bytes()))
    }

    /// The fingerprint of a key: what the directory knows of it.
    ///
    /// # Errors
    /// Names the part of the key at fault.
    pub fn fingerprint(&mut self, key: &[u8]) -> Result<Fingerprint, KeyError> {
        Ok(self.hash(key)?.fingerprint())
    }

    /// Hashes a batch into `out`, in order. On an error `out` is as before the call.
    ///
    /// # Errors
    /// The index of the first malformed key and what is wrong with it.
    pub fn hash_into<'a>(
        &mut self,
        keys: impl IntoIterator<Item = &'a [u8]>,
        out: &mut Vec<KeyHash>,
    ) -> Result<(), (usize, KeyError)> {
        let before = out.len();
        for (index, key) in keys.into_iter().enumerate() {
            match self.hash(key) {
                Ok(hash) => out.push(hash),
                Err(error) => {
                    out.truncate(before);
                    return Err((index, error));
                }
            }
        }
        Ok(())
    }

    /// The key of a namespace, derived at its first use.
    ///
    /// # Errors
    /// [`KeyError::NamespaceNotUtf8`].
    fn key_of(&mut self, namespace: &[u8]) -> Result<&NamespaceKey, KeyError> {
        let hit = |entry: &(Box<[u8]>, NamespaceKey)| *entry.0 == *namespace;
        if !self.entries.get(self.latest).is_some_and(hit) {
            self.latest = match self.entries.iter().position(hit) {
                Some(index) => index,
                None => self.insert(namespace)?,
            };
        }
        // `latest` was just found or set; a missing entry would be a bug here, and is still an error, not a panic.
        self.entries.get(self.latest).map(|entry| &entry.1).ok_or(KeyError::NamespaceEmpty)
    }

    #[cold]
    fn insert(&mut self, namespace: &[u8]) -> Result<usize, KeyError> {
        let text = core::str::from_utf8(namespace).map_err(|_| KeyError::NamespaceNotUtf8)?;
        let entry = (Box::from(namespace), NamespaceKey::derive(&self.secret, text, &self.key_salt));
        if self.entries.len() < NAMESPACES_CACHED_MAX {
            self.entries.push(entry);
            return Ok(self.entries.len() - 1);
        }
        let index = self.victim;
        self.victim = (self.victim + 1) % NAMESPACES_CACHED_MAX;
        if let Some(slot) = self.entries.get_mut(index) {
            *slot = entry;
        }
        Ok(index)
    }

    /// How many namespaces are cached.
    #[must_use]
    pub fn namespaces_cached(&self) -> usize {
        self.entries.len()
    }
}
