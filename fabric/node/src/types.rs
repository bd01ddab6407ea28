//! What engines pass in and get back.

use kvfabric_core::LayoutId;
use kvfabric_memory::ScatterList;

/// Layout of one cache group: what a stored object of the group is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupLayout {
    /// Cache group, as in the key's `g` part.
    pub group_id: u32,
    /// Identity of the canonical layout (design 1.9).
    pub layout: LayoutId,
    /// Size of one object, bytes.
    pub object_bytes: u64,
}

/// A namespace to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceSpec {
    /// The namespace part of the keys.
    pub name: String,
    /// Identity of the model's weights; part of every hash, so that other weights never hit.
    pub key_salt: Vec<u8>,
    /// Layouts of its cache groups.
    pub groups: Vec<GroupLayout>,
}

/// One block to store.
#[derive(Clone, Debug)]
pub struct StoreItem {
    /// UMBP key.
    pub key: String,
    /// Where its bytes are, in object order, in registered memory. They must not change until the job is final.
    pub source: ScatterList,
    /// Block hash of the parent block, if any: a parent is not evicted before its children.
    pub parent_block_hash: Option<Vec<u8>>,
}

/// One block to load.
#[derive(Clone, Debug)]
pub struct LoadItem {
    /// UMBP key.
    pub key: String,
    /// Where its bytes go, in object order, in registered memory. Belongs to the job until it is final.
    pub destination: ScatterList,
}

/// How a block ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockOk {
    /// Stored: the bytes were copied and are visible.
    Stored,
    /// Stored: the key was resident already.
    AlreadyResident,
    /// Loaded and validated.
    Loaded {
        /// How it travelled.
        transport: kvfabric_core::TransportKind,
        /// Whether it came from this rank's own pool.
        local: bool,
    },
}

/// A peer as this rank reaches it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerRoute {
    /// Name of the rank.
    pub name: String,
    /// Chosen transport.
    pub transport: kvfabric_core::TransportKind,
    /// Why this one.
    pub reason: String,
}
