//! Counters of the reader side.

use super::LoadError;
use crate::TransportKind;

/// What travelled over one transport and was accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TransportStats {
    /// Blocks accepted.
    pub blocks: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// Failed blocks by the reason given in `BlockDone`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // One counter per `LoadError`, named like it.
pub struct FailureStats {
    pub not_found: u64,
    pub stale: u64,
    pub tag_mismatch: u64,
    pub checksum_mismatch: u64,
    pub unreachable: u64,
    pub directory_unavailable: u64,
    pub deadline_exceeded: u64,
    pub cancelled: u64,
    pub overloaded: u64,
    pub protocol: u64,
}

impl FailureStats {
    pub(super) fn count(&mut self, error: LoadError) {
        *match error {
            LoadError::NotFound => &mut self.not_found,
            LoadError::Stale => &mut self.stale,
            LoadError::TagMismatch => &mut self.tag_mismatch,
            LoadError::ChecksumMismatch => &mut self.checksum_mismatch,
            LoadError::Unreachable => &mut self.unreachable,
            LoadError::DirectoryUnavailable => &mut self.directory_unavailable,
            LoadError::DeadlineExceeded => &mut self.deadline_exceeded,
            LoadError::Cancelled => &mut self.cancelled,
            LoadError::Overloaded => &mut self.overloaded,
            LoadError::Protocol => &mut self.protocol,
        } += 1;
    }

    /// Failed blocks in all.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.not_found
            + self.stale
            + self.tag_mismatch
            + self.checksum_mismatch
            + self.unreachable
            + self.directory_unavailable
            + self.deadline_exceeded
            + self.cancelled
            + self.overloaded
            + self.protocol
    }
}

/// Counters of a [`Loader`](super::Loader), since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadStats {
    /// Blocks asked for.
    pub blocks_requested: u64,
    /// Blocks accepted.
    pub blocks_ok: u64,
    /// Bytes of the accepted blocks.
    pub bytes_ok: u64,
    /// Accepted blocks by transport: shm, tcp, rdma.
    pub transports: [TransportStats; 3],
    /// Failed blocks by reason.
    pub failed: FailureStats,
    /// Reads whose word showed another generation. One block may count once per replica.
    pub stale_words: u64,
    /// Reads whose word showed another tag. An alarm.
    pub tag_mismatches: u64,
    /// Reads whose bytes did not hash to the word's checksum. An alarm.
    pub checksum_mismatches: u64,
    /// Replicas not read because their incarnation is closed or not the peer's (rule R1).
    pub incarnation_mismatches: u64,
    /// Reads that ended without a word.
    pub reads_failed: u64,
    /// Reads ended by force.
    pub reads_aborted: u64,
    /// Blocks that went on to another replica.
    pub failovers: u64,
    /// Reads or connections put off because of a shortage on this rank.
    pub local_shortages: u64,
    /// Connections asked for.
    pub connects: u64,
    /// Peers that failed: connection lost, not made in time, stalled or against the protocol.
    pub peer_failures: u64,
    /// Miss reports sent.
    pub miss_reports: u64,
    /// Miss reports not acknowledged in time.
    pub miss_reports_lost: u64,
    /// Touched slots that were not reported to their owner.
    pub touches_dropped: u64,
}

impl LoadStats {
    /// What was accepted over one transport.
    #[must_use]
    pub fn transport(&self, kind: TransportKind) -> TransportStats {
        self.transports[kind_index(kind)]
    }

    pub(super) fn count_ok(&mut self, kind: TransportKind, bytes: u64) {
        self.blocks_ok += 1;
        self.bytes_ok += bytes;
        let transport = &mut self.transports[kind_index(kind)];
        transport.blocks += 1;
        transport.bytes += bytes;
    }
}

const fn kind_index(kind: TransportKind) -> usize {
    match kind {
        TransportKind::Shm => 0,
        TransportKind::Tcp => 1,
        TransportKind::Rdma => 2,
    }
}
