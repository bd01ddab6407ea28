//! What a server serves: objects by slot, and their words.

use std::ptr::NonNull;

use kvfabric_memory::{OwnerMemory, RawWord};

/// Where an object lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServedObject {
    /// First byte.
    pub base: NonNull<u8>,
    /// Length, bytes.
    pub length_bytes: u64,
}

/// The owner's memory as the server needs it.
///
/// # Safety
/// The memory of every [`ServedObject`] that was ever answered must stay readable for as long as the value lives. Its
/// content may change at any time: the word tells the reader.
pub unsafe trait Served: Send + Sync {
    /// The object of a slot; `None` when there is no such slot.
    fn object(&self, slot: u32) -> Option<ServedObject>;

    /// The slot's word, loaded after an acquire fence, for rule R2. `None` when there is no such slot.
    fn load_word_after_data(&self, slot: u32) -> Option<RawWord>;
}

// SAFETY: the pool's mapping lives as long as the value, and objects are located within it with bounds checks.
unsafe impl Served for OwnerMemory {
    fn object(&self, slot: u32) -> Option<ServedObject> {
        let object = OwnerMemory::object(self, slot)?;
        let base = NonNull::new(object.as_ptr().cast_mut())?;
        Some(ServedObject { base, length_bytes: object.object_bytes() as u64 })
    }

    fn load_word_after_data(&self, slot: u32) -> Option<RawWord> {
        OwnerMemory::load_word_after_data(self, slot)
    }
}
