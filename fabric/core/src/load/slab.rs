//! Storage with stable keys: a vector with a free list, so that each lookup is one indexed access.

/// Names an entry of a [`Slab`]. The upper half counts the uses of the index, so an old key never finds a new entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(pub(crate) u64);

impl Key {
    #[allow(clippy::cast_possible_truncation)] // The lower half is the index by construction.
    fn index(self) -> usize {
        self.0 as u32 as usize
    }
}

#[derive(Debug)]
struct Entry<T> {
    uses: u32,
    value: Option<T>,
}

/// Values under [`Key`]s. Indices are reused, keys are not.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
}

impl<T> Slab<T> {
    pub(crate) const fn new() -> Self {
        Self { entries: Vec::new(), free: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    /// Adds a value. The callers' limits keep the number of entries far below 2^32.
    pub(crate) fn insert(&mut self, value: T) -> Key {
        if let Some(index) = self.free.pop() {
            if let Some(entry) = self.entries.get_mut(index as usize) {
                entry.value = Some(value);
                return Key(u64::from(entry.uses) << 32 | u64::from(index));
            }
        }
        let index = self.entries.len() as u64;
        // Uses start at 1, so that no key is 0.
        self.entries.push(Entry { uses: 1, value: Some(value) });
        Key(1 << 32 | index)
    }

    fn entry(&self, key: Key) -> Option<&Entry<T>> {
        self.entries.get(key.index()).filter(|entry| u64::from(entry.uses) == key.0 >> 32)
    }

    pub(crate) fn get(&self, key: Key) -> Option<&T> {
        self.entry(key)?.value.as_ref()
    }

    pub(crate) fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        let entry = self.entries.get_mut(key.index())?;
        if u64::from(entry.uses) != key.0 >> 32 {
            return None;
        }
        entry.value.as_mut()
    }

    pub(crate) fn remove(&mut self, key: Key) -> Option<T> {
        let entry = self.entries.get_mut(key.index())?;
        if u64::from(entry.uses) != key.0 >> 32 {
            return None;
        }
        let value = entry.value.take()?;
        entry.uses = entry.uses.wrapping_add(1).max(1);
        #[allow(clippy::cast_possible_truncation)] // As in `Key::index`.
        self.free.push(key.0 as u32);
        Some(value)
    }

    /// All entries in index order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Key, &T)> {
        self.entries.iter().enumerate().filter_map(|(index, entry)| {
            let value = entry.value.as_ref()?;
            Some((Key(u64::from(entry.uses) << 32 | index as u64), value))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_key_never_finds_a_new_entry() {
        let mut slab = Slab::new();
        let first = slab.insert('a');
        assert_eq!(slab.get(first), Some(&'a'));
        assert_eq!(slab.remove(first), Some('a'));
        let second = slab.insert('b');
        assert_ne!(first, second);
        assert_eq!(slab.get(first), None);
        assert_eq!(slab.get_mut(first), None);
        assert_eq!(slab.remove(first), None);
        assert_eq!(slab.get(second), Some(&'b'));
        assert_eq!((slab.len(), slab.iter().count()), (1, 1));
        assert_eq!(slab.get(Key(u64::MAX)), None);
    }
}
