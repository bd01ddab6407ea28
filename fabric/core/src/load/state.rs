//! What a loader keeps of each load, block, read and report.

use super::slab::Key;
use super::{LoadBlock, LoadError, LoadId, Replica, Replicas};
use crate::{NsId, Time, TransportKind};

/// State of one block (design 1.8). `DATA_DONE` and `WORD_POSTED` lie within the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// PLANNED: waits for the directory.
    Locating,
    /// PLANNED: waits for its peer or for room.
    Queued,
    /// POSTED: a read is in flight into the destination.
    Posted,
    /// DRAINING: the read was ended by force and has not retired yet.
    Draining,
    /// FAILED, but its miss reports are not acknowledged yet. No read is in flight.
    Reporting,
    /// OK or FAILED, and `BlockDone` was sent.
    Done,
}

#[derive(Debug)]
pub(super) struct Block {
    pub(super) candidates: Replicas,
    /// The read in flight, in `Posted` and `Draining`. There is one place for it, so there is never a second (R8).
    pub(super) read: Key,
    /// Next block in the lane.
    pub(super) next: u32,
    /// Index of the candidate that is being tried.
    pub(super) cursor: u8,
    pub(super) phase: Phase,
    /// Miss reports not acknowledged yet.
    pub(super) reports: u8,
    pub(super) report_lost: bool,
    /// Whether the directory was asked.
    pub(super) located: bool,
    /// The gravest failure of a candidate so far.
    pub(super) worst: Option<LoadError>,
    /// How the block ends once drained or reported; `None` in `Draining` means: try the next candidate.
    pub(super) verdict: Option<LoadError>,
}

#[derive(Debug)]
pub(super) struct Load {
    pub(super) id: LoadId,
    pub(super) ns: NsId,
    pub(super) deadline: Time,
    pub(super) request: Vec<LoadBlock>,
    pub(super) blocks: Vec<Block>,
    /// Blocks that are not `Done`.
    pub(super) remaining: usize,
    /// Its lane at each peer, sorted by peer.
    pub(super) lanes: Vec<(Key, Key)>,
    /// Blocks that the directory must be asked for at the next poll.
    pub(super) unlocated: Vec<u32>,
}

#[derive(Debug)]
pub(super) struct Read {
    pub(super) load: Key,
    pub(super) block: u32,
    pub(super) peer: Key,
    pub(super) bytes: u64,
    pub(super) replica: Replica,
    pub(super) transport: TransportKind,
    pub(super) checksum: bool,
    pub(super) posted_at: Time,
}

#[derive(Debug)]
pub(super) struct Locate {
    pub(super) load: Key,
    pub(super) blocks: Vec<u32>,
    pub(super) until: Time,
}

#[derive(Debug)]
pub(super) struct Report {
    pub(super) load: Key,
    pub(super) block: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    Load(Key),
    Locate(Key),
    Connect(Key),
    Resume(Key),
    Stall(Key),
    Touch(Key),
}
