//! What the facade and the node's threads say to the core thread.

use std::sync::mpsc::SyncSender;
use std::sync::Arc;
use std::time::Instant;

use kvfabric_core::hash::KeyHash;
use kvfabric_core::owner::PutId;
use kvfabric_core::{Fingerprint, NsId};
use kvfabric_memory::ScatterList;

use crate::job::JobState;
use crate::GroupLayout;

pub(crate) struct StoreBlockInput {
    pub(crate) index: usize,
    pub(crate) put: PutId,
    pub(crate) key: KeyHash,
    pub(crate) parent: Option<Fingerprint>,
    pub(crate) key_bytes: Box<[u8]>,
    pub(crate) group: GroupLayout,
    pub(crate) source: ScatterList,
}

pub(crate) struct LoadBlockInput {
    pub(crate) index: usize,
    pub(crate) key: KeyHash,
    pub(crate) group: GroupLayout,
    pub(crate) destination: ScatterList,
}

pub(crate) enum Command {
    OpenNamespace { public_name: [u8; 16], reply: SyncSender<NsId> },
    Store { job: Arc<JobState>, ns: NsId, blocks: Vec<StoreBlockInput>, until: Instant },
    Load { job: Arc<JobState>, ns: NsId, blocks: Vec<LoadBlockInput>, until: Instant },
    Cancel { job: u64 },
}
