//! Limits of the directory and of a rank's side of it, with their reasons. Those shared with others are in
//! [`crate::limits`]; those that messages imply are beside the messages, in [`crate::wire`].

use core::time::Duration;

/// Incarnations that are remembered as closed: 16 bytes each. A cell that restarts all its 4,096 ranks daily needs eight
/// months to fill it; then the oldest are forgotten, whose processes are long gone.
pub const CLOSED_INCARNATIONS_MAX: usize = 1 << 20;
/// Pairs (engine, owner) that are hidden from each other: 256 engines that each miss 256 owners.
pub const HIDES_MAX: usize = 65_536;
/// CLEARs that wait for ranks at the same time; each costs one message to each rank.
pub const CLEARS_MAX: usize = 64;
/// A rank that has not acknowledged a clear is told again after this long, for as long as it is connected: a rank that
/// was not told would go on serving cleared blocks to itself.
pub const CLEAR_RESEND: Duration = Duration::from_millis(500);
/// A joined rank opens its liveness connection within this time.
pub const ATTACH_TIMEOUT: Duration = Duration::from_secs(5);
/// Entries of a rank that lost its connection are kept hidden for this long: when it comes back soon, announcing them
/// again moves nothing in memory. Afterwards they are swept, and announcing fills them in anew.
pub const LOST_ENTRIES_KEEP: Duration = Duration::from_secs(60);
/// Entries looked at in one step of the sweep: under a millisecond.
pub const SWEEP_STEP: usize = 8192;
/// Time between two steps: sweeping takes less than half of one core.
pub const SWEEP_INTERVAL: Duration = Duration::from_millis(2);
/// Entries looked at, once in a PUBLISH, when the memory is full.
pub const SWEEP_PRESSURE_STEP: usize = 1 << 17;
/// The ranks' signs of life are looked at this often within the peer timeout.
pub const LIVENESS_CHECKS: u32 = 8;

/// An unanswered JOIN or OPEN is sent again after this long; so is a JOIN that found its name in use, because the
/// predecessor's connection may be about to close.
pub const MEMBERSHIP_RETRY: Duration = Duration::from_millis(500);
/// Operations that a rank puts into one PUBLISH: the directory applies them in one go, in one or two milliseconds, and
/// lookups wait meanwhile.
pub const PUBLISH_BATCH_OPS: usize = 4096;
/// Namespaces that a rank opens. Each engine uses a handful.
pub const RANK_NAMESPACES_MAX: usize = 4096;
/// Flushes that wait at the same time on one rank: one for each job that may be in progress.
pub const FLUSHES_MAX: usize = crate::limits::JOBS_MAX;
/// CLEAR requests of one rank that wait at the same time.
pub const RANK_CLEARS_MAX: usize = 1024;

const _: () = {
    assert!(2 * crate::wire::RANKS_MAX < super::table::NUMBER_MAX as usize / 2);
    assert!(crate::wire::NAMESPACES_MAX < super::table::NUMBER_MAX as usize / 2);
    assert!(PUBLISH_BATCH_OPS <= crate::limits::PUBLISH_OPS_MAX);
    assert!(RANK_NAMESPACES_MAX <= crate::wire::NAMESPACES_MAX);
};
