//! The limits of this crate, each with its reason.

use std::time::Duration;

/// Slabs in one answer: with 52 bytes each an answer stays below a quarter of the smallest default socket buffer.
pub const SLABS_PER_FRAME_MAX: usize = 512;
/// Longest frame; a longer one is a broken peer.
pub const FRAME_BYTES_MAX: usize = 32 << 10;
/// Connections that one server keeps: one for each rank on the host, several lanes each.
pub const CONNECTIONS_MAX: usize = 1024;
/// Connections that wait to be accepted.
pub const BACKLOG: i32 = 256;
/// A client that has not said HELLO by then is closed. Afterwards a connection may be silent for ever: its end is how
/// each side learns of the other's death.
pub const HELLO_TIMEOUT: Duration = Duration::from_secs(2);
/// A client that does not take its answer for this long is closed.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// After running out of descriptors the server leaves its backlog alone for this long.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long starting a server may wait for another that starts on the same path.
pub const BIND_TIMEOUT: Duration = Duration::from_secs(2);
/// Sockets of other processes that starting in a directory looks at, to remove those of dead ones.
pub const SWEEP_MAX: usize = 1024;
/// How long connecting may take, mapping and the first list of slabs included (the fabric's connect timeout).
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// While the peer's backlog is full, connecting is tried again this often.
pub const CONNECT_RETRY: Duration = Duration::from_millis(5);
/// How long reads of an unknown slot wait for the peer's newer slabs.
pub const SLABS_TIMEOUT: Duration = Duration::from_secs(1);
/// The list of slabs may change this often while it is fetched; a peer that never holds still is broken.
pub const SLABS_RESTARTS_MAX: u32 = 16;
/// Reads already queued when a peer dies may still be copied for this long: its memory stays mapped, and its words
/// tell the truth. Half of the second within which the mapping must be gone (design 1.9).
pub const LOST_PEER_DRAIN: Duration = Duration::from_millis(500);
/// Reads taken and not reported, all peers together; more are refused as a full queue.
pub const READS_IN_FLIGHT_MAX: usize = 65_536;
/// Peers of one provider; each costs a socket and two mappings.
pub const PEERS_MAX: usize = 4096;
/// Bytes copied by one poll, so that an abort is looked at often enough (design 1.8).
pub const POLL_BYTES_MAX: usize = kvfabric_memory::limits::COPY_CHUNK_BYTES;
/// What a small read counts at least against [`POLL_BYTES_MAX`]: its cost outside the copy.
pub const READ_BYTES_CHARGED_MIN: usize = 1024;
/// While there is work, the sockets are looked at every so many polls: each look is a system call, and what it can find
/// is not urgent.
pub const POLLS_PER_SOCKET_CHECK: u32 = 32;
/// Larger mappings are unmapped by a thread of their own: giving back the page tables of 1 GiB takes milliseconds.
pub const UNMAP_INLINE_BYTES_MAX: u64 = 256 << 20;

const _: () = {
    assert!(
        crate::frame::SLABS_HEADER_BYTES + SLABS_PER_FRAME_MAX * crate::frame::SLAB_BYTES <= FRAME_BYTES_MAX
    );
    assert!(LOST_PEER_DRAIN.as_millis() < 1000);
    assert!(SLABS_TIMEOUT.as_millis() <= CONNECT_TIMEOUT.as_millis());
};
