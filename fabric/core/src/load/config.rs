//! How a loader is configured.

use crate::limits::{DESTINATION_INFLIGHT_BYTES, SOURCE_INFLIGHT_BYTES};
use crate::{Incarnation, TransportKind, Verify};

/// When landed bytes are compared with their checksum, by transport (design 1.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifyPolicy {
    /// Same host.
    pub shm: Verify,
    /// TCP.
    pub tcp: Verify,
    /// RDMA.
    pub rdma: Verify,
}

impl Default for VerifyPolicy {
    fn default() -> Self {
        Self { shm: Verify::Sampled, tcp: Verify::Always, rdma: Verify::Sampled }
    }
}

impl VerifyPolicy {
    /// The same choice for every transport.
    #[must_use]
    pub const fn all(verify: Verify) -> Self {
        Self { shm: verify, tcp: verify, rdma: verify }
    }

    /// The choice for one transport.
    #[must_use]
    pub const fn of(&self, transport: TransportKind) -> Verify {
        match transport {
            TransportKind::Shm => self.shm,
            TransportKind::Tcp => self.tcp,
            TransportKind::Rdma => self.rdma,
        }
    }
}

/// Configuration of a [`Loader`](super::Loader).
#[derive(Clone, Debug)]
pub struct LoaderConfig {
    /// This process's own incarnation: its replicas are tried first.
    pub incarnation: Incarnation,
    /// When checksums are compared.
    pub verify: VerifyPolicy,
    /// Most bytes in flight from one source; one object may always travel.
    pub source_inflight_bytes: u64,
    /// Most bytes in flight in all; one object may always travel.
    pub destination_inflight_bytes: u64,
    /// Most reads in flight in all.
    pub reads_inflight: usize,
    /// Seed of the jitter that keeps ranks from reconnecting in step. Decides nothing else.
    pub seed: u64,
}

impl LoaderConfig {
    /// The defaults of design 1.5 and 4. The seed is the incarnation, which differs from process to process.
    #[must_use]
    pub fn new(incarnation: Incarnation) -> Self {
        Self {
            incarnation,
            verify: VerifyPolicy::default(),
            source_inflight_bytes: SOURCE_INFLIGHT_BYTES,
            destination_inflight_bytes: DESTINATION_INFLIGHT_BYTES,
            reads_inflight: super::READS_INFLIGHT_MAX,
            seed: incarnation.get(),
        }
    }
}
