//! What the facade and the node's threads say to the core thread.

use std::sync::mpsc::SyncSender;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kvfabric_core::directory::{LinkId, RequestTag};
use kvfabric_core::hash::KeyHash;
use kvfabric_core::load::{LocateId, PeerFailure, Replicas, ReportId};
use kvfabric_core::owner::{FillError, PutId};
use kvfabric_core::wire::{ClearRank, NsName};
use kvfabric_core::{Fingerprint, Generation, Incarnation, NsId, RankId, SlotId, TransportKind};
use kvfabric_memory::ScatterList;
use kvfabric_transport_api::Event;
use kvfabric_transport_control::liveness::LivenessClient;
use kvfabric_transport_control::{Connection, ConnectionId, Responder};

use crate::job::JobState;
use crate::peers::Greeted;
use crate::{GroupLayout, NodeStats, PeerRoute};

pub(crate) struct StoreBlockInput {
    pub(crate) index: usize,
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
    // From the facade.
    OpenNamespace {
        name: NsName,
        reply: SyncSender<NsId>,
    },
    Store {
        job: Arc<JobState>,
        ns: NsId,
        first_put: PutId,
        blocks: Vec<StoreBlockInput>,
        until: Instant,
    },
    Load {
        job: Arc<JobState>,
        ns: NsId,
        blocks: Vec<LoadBlockInput>,
        until: Instant,
    },
    Cancel {
        job: u64,
    },
    Evict {
        fingerprints: Vec<Fingerprint>,
        reply: SyncSender<usize>,
    },
    TakeEvicted {
        reply: SyncSender<Vec<Box<[u8]>>>,
    },
    Flush {
        within: Duration,
        reply: SyncSender<bool>,
    },
    Clear {
        ns: NsId,
        within: Duration,
        reply: SyncSender<bool>,
    },
    Uses {
        start: u64,
        length_bytes: u64,
        reply: SyncSender<bool>,
    },
    Routes {
        reply: SyncSender<Vec<PeerRoute>>,
    },
    Stats {
        reply: SyncSender<NodeStats>,
    },
    /// Ends every job by force and then the thread.
    Close {
        drain: Duration,
    },
    // From lanes and fill threads.
    Lane {
        kind: TransportKind,
        events: Vec<Event>,
    },
    Filled {
        put: PutId,
        result: Result<u64, FillError>,
    },
    Extent {
        extent: u32,
        ok: bool,
    },
    // From the control plane.
    LinkUp {
        connection: Connection,
    },
    LinkDown {
        connection: ConnectionId,
        why: String,
    },
    LinkFailed {
        reason: String,
    },
    Reply {
        link: LinkId,
        tag: RequestTag,
        frame: Bytes,
    },
    LivenessOpened {
        link: LinkId,
        result: Result<LivenessClient, String>,
    },
    LivenessLost {
        link: LinkId,
        why: String,
    },
    Greeted {
        rank: RankId,
        incarnation: Incarnation,
        result: Result<Greeted, (PeerFailure, String)>,
    },
    Located {
        locate: LocateId,
        result: Result<Vec<Replicas>, ()>,
    },
    MissReported {
        reports: Vec<ReportId>,
        keys: Vec<Fingerprint>,
    },
    ClearRank {
        clear: ClearRank,
        responder: Responder,
    },
    Touched {
        entries: Vec<(SlotId, Generation)>,
    },
}
