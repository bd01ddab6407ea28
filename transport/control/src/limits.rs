//! Every limit of the control plane by name, with its reason.

use core::time::Duration;

/// Longest body of a request, reply or notification; the length is checked before anything is read or allocated
/// (design 1.7).
pub const FRAME_BYTES_MAX: usize = 4 << 20;
/// Kind byte and length in front of each body.
pub const FRAME_HEADER_BYTES: usize = 5;
/// Open requests, and apart from them open notifications, of one peer on one connection (design 5).
pub const STREAMS_MAX: u32 = 1024;
/// Bytes of requests of one connection that are being read or wait for their handler. 1,024 lookups of 4,096 keys, or
/// 16 frames of the largest size; more are refused as busy, so a peer cannot make us hold 1,024 frames of 4 MiB.
pub const REQUEST_BYTES_PENDING_MAX: usize = 64 << 20;
/// A body's buffer starts no larger than this, whatever length is claimed, and grows with what really arrives.
pub const FRAME_BYTES_AHEAD: usize = 256 << 10;
/// Received bytes of one stream that wait for their reader: half a frame, so a large frame never stalls for long.
pub const STREAM_WINDOW_BYTES: u32 = 2 << 20;
/// Received bytes of one connection that wait for their readers. Enough for 256 lookups of 64 KiB at once.
pub const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// Bytes of one connection that wait to be sent or acknowledged.
pub const SEND_WINDOW_BYTES: u64 = 16 << 20;
/// Socket buffers asked for: with the usual 208 KiB a burst of 64 KiB requests loses packets on loopback.
pub const SOCKET_BUFFER_BYTES: usize = 4 << 20;

/// Connections of one endpoint: four ranks for each GPU of a cell (design D8).
pub const CONNECTIONS_MAX: usize = 16_384;
/// Handshakes a second admitted from one source address (design 5); as many may come in one burst.
pub const HANDSHAKES_PER_SOURCE_PER_S: u32 = 64;
/// Source addresses whose handshake rate is remembered; beyond it the stalest quarter is forgotten.
pub const HANDSHAKE_SOURCES_MAX: usize = 4096;
/// Handshakes under way at once; more are refused.
pub const HANDSHAKES_PENDING_MAX: usize = 1024;
/// From this many handshakes under way a source must first prove its address (Retry, design 5).
pub const HANDSHAKES_PENDING_RETRY: usize = 64;
/// A handshake that takes longer is given up.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Resolving, connecting and greeting together; below 5 s, so that a wrong address is reported within 5 s.
pub const CONNECT_TIMEOUT: Duration = Duration::from_millis(4500);
/// A second address of a name is tried beside the first after this long (RFC 8305).
pub const CONNECT_STAGGER: Duration = Duration::from_millis(250);
/// Addresses of one name that are tried.
pub const CONNECT_ADDRESSES_MAX: usize = 8;
/// First wait after a refused handshake; doubled for each refusal.
pub const REFUSED_WAIT_MIN: Duration = Duration::from_millis(50);
/// Longest wait after a refused handshake.
pub const REFUSED_WAIT_MAX: Duration = Duration::from_secs(1);
/// A silent connection is probed this often.
pub const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// A connection without any sign of the peer for this long is lost. Process death is noticed sooner, by liveness.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for all of a request or notification to arrive once its stream is open.
pub const REQUEST_READ_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for the handler to answer: above the longest wait of any request (a CLEAR waits 2 s).
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// Time for the peer to take a reply.
pub const REPLY_WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a notification to be handed to the connection.
pub const NOTIFY_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for connections to take leave when an endpoint closes.
pub const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);
/// Ports tried when UDP and TCP must share one that the kernel chooses.
pub const SHARED_PORT_TRIES: usize = 32;

/// Longest name in a certificate, the limit of a rank's name.
pub const NAME_BYTES_MAX: usize = 255;
/// Names in one certificate.
pub const NAMES_MAX: usize = 1024;
/// Largest PEM file that is read.
pub const PEM_BYTES_MAX: u64 = 1 << 20;
/// Wait for another process that is making certificates in the same directory.
pub const CERTS_LOCK_TIMEOUT: Duration = Duration::from_secs(20);
/// Life of a certification authority.
pub const CA_VALIDITY: Duration = Duration::from_secs(3650 * 86_400);
/// Life of a host's certificate.
pub const CERTIFICATE_VALIDITY: Duration = Duration::from_secs(825 * 86_400);
/// Certificates start this long ago, for hosts whose clocks disagree.
pub const CERTIFICATE_BACKDATE: Duration = Duration::from_secs(86_400);
/// The development certificate is made anew when it has less than this left.
pub const DEV_RENEW_BEFORE: Duration = Duration::from_secs(7 * 86_400);

/// Bytes of a liveness ticket.
pub const TICKET_BYTES: usize = 32;
/// Tickets given out and not yet used.
pub const TICKETS_MAX: usize = 16_384;
/// A ticket that is not used within this time expires.
pub const TICKET_LIFETIME: Duration = Duration::from_secs(30);
/// Liveness connections of one server: one for each connection of the endpoint.
pub const LIVENESS_CONNECTIONS_MAX: usize = CONNECTIONS_MAX;
/// Liveness connections that have not shown a ticket yet; more are closed at once.
pub const LIVENESS_UNPROVEN_MAX: usize = 512;
/// Time to show the ticket.
pub const LIVENESS_PROVE_TIMEOUT: Duration = Duration::from_secs(2);
/// Default time without ping before a peer counts as missing (`KVFABRIC_PEER_TIMEOUT_MS`).
pub const PEER_TIMEOUT: Duration = Duration::from_millis(1000);
/// Default interval of pings: a quarter of the timeout, so three may be late.
pub const PING_INTERVAL: Duration = Duration::from_millis(250);
/// Bytes a peer may send between two looks at its connection; a well-behaved one sends a few.
pub const LIVENESS_READ_BYTES_MAX: usize = 4096;
/// A connection silent for this long is closed for good: its host is gone, not slow.
pub const LIVENESS_SILENT_MAX: Duration = Duration::from_secs(600);
/// Time to connect and show the ticket, on the client's side.
pub const LIVENESS_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

const _: () = {
    assert!(FRAME_BYTES_MAX <= u32::MAX as usize);
    assert!(REQUEST_BYTES_PENDING_MAX >= FRAME_BYTES_MAX);
    assert!(FRAME_BYTES_AHEAD <= FRAME_BYTES_MAX);
    assert!(STREAM_WINDOW_BYTES <= CONNECTION_WINDOW_BYTES);
    assert!(HANDSHAKES_PENDING_RETRY < HANDSHAKES_PENDING_MAX);
    assert!(KEEP_ALIVE.as_millis() * 3 <= IDLE_TIMEOUT.as_millis());
    assert!(CONNECT_TIMEOUT.as_millis() < 5000);
    assert!(PING_INTERVAL.as_millis() * 3 < PEER_TIMEOUT.as_millis());
    assert!(LIVENESS_UNPROVEN_MAX <= LIVENESS_CONNECTIONS_MAX);
};
