//! Every limit of this transport by name, with its reason.

use std::time::Duration;

/// Version of the frames; a peer with another version is refused.
pub const PROTOCOL_VERSION: u32 = 1;

/// Most objects named by one request frame: its entries fit the receive buffer of a connection with room to spare.
pub const REQUESTS_PER_FRAME_MAX: usize = 256;
/// Requests that the owner keeps for one connection; beyond it the owner stops reading from that connection.
pub const REQUESTS_QUEUED_MAX: usize = 256;
/// Default of requests that a reader keeps in flight on one connection; more are refused as a full queue.
pub const REQUESTS_IN_FLIGHT: usize = 128;
/// Receive buffer for requests of one connection at the owner, allocated only after the token was accepted.
pub const REQUEST_BUFFER_BYTES: usize = 12 << 10;

/// Largest object; the same bound as everywhere in the fabric.
pub const OBJECT_BYTES_MAX: u64 = 1 << 31;
/// Entries of one vectored system call; the kernel refuses more.
pub const IO_VECTORS_MAX: usize = 1024;

/// One connection sends at most about this much before the next ready one has its turn.
pub const TURN_BYTES: usize = 1 << 20;
/// One poll receives at most about this much from one connection before it looks at the others.
pub const RECEIVE_TURN_BYTES: usize = 4 << 20;
/// Where the rest of a reply lands whose operation was ended by force.
pub const SINK_BYTES: usize = 64 << 10;
/// Landed bytes are hashed in pieces of at most this size, so that they are still in the cache when hashed.
pub const HASH_CHUNK_BYTES: usize = 256 << 10;
/// A sleeping reader is woken when this much of a large reply has arrived, or all of it: fewer, larger receives.
pub const WAKE_BYTES: usize = 256 << 10;
/// Replies shorter than this wake the reader with their first byte.
pub const WAKE_BYTES_MIN: usize = 32 << 10;

/// Unredeemed tokens that a store keeps: a few per peer and connection in a cell of 4096 ranks.
pub const TOKENS_MAX: usize = 65_536;
/// Most tokens issued by one call.
pub const TOKENS_PER_ISSUE_MAX: usize = 64;
/// Connections that a server keeps by default: one or two for each rank of a cell.
pub const CONNECTIONS_MAX: usize = 8192;
/// Connections that have not shown a valid token yet; more are closed at once.
pub const GREETINGS_MAX: usize = 256;
/// Connections that a reader opens to one peer at most.
pub const CONNECTIONS_PER_PEER_MAX: usize = 8;
/// Peers that a reader keeps.
pub const PEERS_MAX: usize = 8192;
/// Host names that are being resolved at the same time; each takes a thread.
pub const RESOLVERS_MAX: usize = 8;
/// I/O threads of a server at most.
pub const THREADS_MAX: usize = 16;

/// How long a connection may take from accept to a valid token, or from connect to the owner's welcome.
pub const GREETING_TIMEOUT: Duration = Duration::from_secs(2);
/// A reply that makes no progress for this long ends the connection, on either side: the peer is stopped or hostile.
pub const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// A connection without requests for this long is closed by the owner. Dead hosts are found much earlier by
/// keepalive; this only reclaims what nobody uses.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(3600);
/// Silence after which keepalive probes start.
pub const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
/// Time between keepalive probes.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(1);
/// Unanswered probes, or unacknowledged bytes for this long, end the connection.
pub const USER_TIMEOUT: Duration = Duration::from_secs(10);
/// How often an owner's I/O thread looks at its timers.
pub const TICK: Duration = Duration::from_millis(500);
/// How long an owner's I/O thread looks for more work before it sleeps, while work keeps coming that fast: about twice
/// what a sleep and a wake take.
pub const BUSY_POLL: Duration = Duration::from_micros(20);
/// How long accepting pauses after the system refused a file descriptor.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Plaintext that TLS takes before it must have gone out, and the unit in which memory is copied for it.
pub const TLS_CHUNK_BYTES: usize = 16 << 10;
/// Ciphertext that may wait for the socket.
pub const TLS_BUFFER_BYTES: usize = 256 << 10;

const _: () = {
    assert!(REQUESTS_PER_FRAME_MAX <= u16::MAX as usize);
    assert!(REQUESTS_IN_FLIGHT <= REQUESTS_QUEUED_MAX);
    assert!(
        crate::wire::REQUEST_BYTES * REQUESTS_PER_FRAME_MAX + crate::wire::FRAME_HEADER_BYTES
            <= REQUEST_BUFFER_BYTES
    );
    assert!(WAKE_BYTES_MIN <= WAKE_BYTES);
    assert!(HASH_CHUNK_BYTES <= RECEIVE_TURN_BYTES);
    assert!(TLS_CHUNK_BYTES < TLS_BUFFER_BYTES);
    assert!(TOKENS_PER_ISSUE_MAX <= TOKENS_MAX);
};
