//! What a run may do to its ranks. Odds are "one in N"; 0 means never.

use core::time::Duration;

use crate::load::VerifyPolicy;
use crate::{TransportKind, Verify};

/// A rule that the simulated transport or driver breaks, to prove that the checks find it (design 7: mutation gate).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// R2: the word is fetched without waiting for the data.
    WordBeforeData,
    /// R4: an abort frees the destination at once, although packets are still under way.
    RetireBeforeDrained,
    /// O1: words are invalidated only after the overwriting copy.
    InvalidateAfterFill,
}

/// Options of a [`World`](super::World).
#[derive(Clone, Debug)]
pub struct WorldOptions {
    /// Bytes of each rank's pool.
    pub pool_bytes: u64,
    /// Extent of the pool, bytes.
    pub extent_bytes: u64,
    /// Object size, bytes.
    pub object_bytes: u64,
    /// What reads travel over.
    pub transport: TransportKind,
    /// When landed bytes are verified.
    pub verify: VerifyPolicy,
    /// Whether owners compute checksums.
    pub checksums: bool,
    /// Bytes per packet: each is fetched and lands at an instant of its own.
    pub packet_bytes: usize,
    /// Bytes that a fill copies at a time.
    pub fill_bytes: usize,
    /// Shortest one-way delay of a packet or message.
    pub delay_min: Duration,
    /// Longest one-way delay of a packet or message.
    pub delay_max: Duration,
    /// Time between two steps of a fill, at most.
    pub fill_delay_max: Duration,
    /// Longest time from an abort to the read's retirement.
    pub drain_max: Duration,
    /// Longest time until a reader notices that its peer died.
    pub error_delay_max: Duration,
    /// Odds that a packet is fetched a second time (a retransmitted READ executes again).
    pub refetch_odds: u64,
    /// Odds that a read never proceeds until it is ended by force.
    pub stuck_odds: u64,
    /// Odds that a landing packet is corrupted.
    pub corrupt_odds: u64,
    /// Odds that a read meets a shortage on its own side.
    pub shortage_odds: u64,
    /// Odds that a connection attempt fails.
    pub connect_failure_odds: u64,
    /// Odds that a control message, or its answer, is lost.
    pub loss_odds: u64,
    /// Odds that a control message arrives twice.
    pub duplicate_odds: u64,
    /// Whether connections survive the restart of their peer unnoticed, so that old addresses reach the new life.
    pub silent_reconnect: bool,
    /// A rule to break.
    pub mutation: Option<Mutation>,
}

impl Default for WorldOptions {
    /// Small pools, small objects, delays of a rack, no faults.
    fn default() -> Self {
        Self {
            pool_bytes: 64 << 10,
            extent_bytes: 16 << 10,
            object_bytes: 2048,
            transport: TransportKind::Rdma,
            verify: VerifyPolicy::all(Verify::Off),
            checksums: true,
            packet_bytes: 256,
            fill_bytes: 256,
            delay_min: Duration::from_micros(5),
            delay_max: Duration::from_micros(200),
            fill_delay_max: Duration::from_micros(100),
            drain_max: Duration::from_millis(10),
            error_delay_max: Duration::from_millis(500),
            refetch_odds: 0,
            stuck_odds: 0,
            corrupt_odds: 0,
            shortage_odds: 0,
            connect_failure_odds: 0,
            loss_odds: 0,
            duplicate_odds: 0,
            silent_reconnect: false,
            mutation: None,
        }
    }
}
