//! Liveness between threads of this process; a rank that is stopped is played by a socket that does not ping.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError};
use std::time::Duration;

use super::*;
use crate::limits::LIVENESS_UNPROVEN_MAX;
use crate::BindError;

/// Generous bound of everything that should happen soon.
const SOON: Duration = Duration::from_secs(20);
/// Peer timeout of these tests: long enough for a loaded machine, as pings come four times as often.
const PEER_TIMEOUT: Duration = Duration::from_millis(2000);

fn server(config: ServerConfig, address: &str) -> (LivenessServer, Receiver<LivenessEvent>) {
    let (sender, events) = channel();
    let sink = move |event| {
        // The test may have ended.
        let _ = sender.send(event);
    };
    (LivenessServer::bind(address.parse().unwrap(), config, sink).unwrap(), events)
}

fn usual() -> (LivenessServer, Receiver<LivenessEvent>) {
    server(ServerConfig { peer_timeout: PEER_TIMEOUT, ..ServerConfig::default() }, "127.0.0.1:0")
}

fn client(
    server: &LivenessServer,
    ticket: Ticket,
    timeout: Duration,
) -> (Result<LivenessClient, LivenessError>, Receiver<Lost>) {
    let (sender, lost) = channel();
    let on_lost = move |reason| {
        let _ = sender.send(reason);
    };
    let config = ClientConfig { connect_timeout: SOON, ..ClientConfig::for_peer_timeout(timeout) };
    (LivenessClient::connect(server.local_addr(), ticket, config, on_lost), lost)
}

/// A rank played by hand.
fn by_hand(address: SocketAddr, ticket: Ticket) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    stream.write_all(&ticket.to_bytes()).unwrap();
    let mut welcome = [0u8; 1];
    stream.read_exact(&mut welcome).unwrap();
    assert_eq!(welcome, [WELCOME]);
    stream
}

fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(SOON)).unwrap();
    let mut bytes = [0u8; 64];
    loop {
        match stream.read(&mut bytes) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == io::ErrorKind::ConnectionReset,
        }
    }
}

fn next(events: &Receiver<LivenessEvent>) -> LivenessEvent {
    events.recv_timeout(SOON).expect("an event in time")
}

#[test]
fn a_rank_lives_and_its_end_counts_at_once() {
    for address in ["127.0.0.1:0", "[::1]:0"] {
        // A peer timeout so long that only the close itself can be what is noticed.
        let config = ServerConfig { peer_timeout: Duration::from_secs(3600), ..ServerConfig::default() };
        let (server, events) = server(config, address);
        let (id, ticket) = server.issue().unwrap();
        let (rank, lost) = client(&server, ticket, PEER_TIMEOUT);
        let rank = rank.unwrap();
        assert_eq!(rank.address(), server.local_addr());
        assert_eq!(next(&events), LivenessEvent::Alive(id));
        drop(rank);
        assert_eq!(next(&events), LivenessEvent::Closed(id, Closed::Peer));
        assert_eq!(lost.try_recv(), Err(std::sync::mpsc::TryRecvError::Disconnected), "nothing was lost");
    }
}

#[test]
fn pings_keep_a_rank_alive_on_both_sides() {
    let (server, events) = usual();
    let (id, ticket) = server.issue().unwrap();
    let (rank, lost) = client(&server, ticket, PEER_TIMEOUT);
    let rank = rank.unwrap();
    assert_eq!(next(&events), LivenessEvent::Alive(id));
    assert_eq!(events.recv_timeout(PEER_TIMEOUT * 2), Err(RecvTimeoutError::Timeout));
    assert!(lost.try_recv().is_err());
    drop(rank);
}

#[test]
fn missed_pings_are_reported_once_and_so_is_the_return() {
    let config = ServerConfig { peer_timeout: Duration::from_millis(100), ..ServerConfig::default() };
    let (server, events) = server(config, "127.0.0.1:0");
    let (id, ticket) = server.issue().unwrap();
    let mut rank = by_hand(server.local_addr(), ticket);
    assert_eq!(next(&events), LivenessEvent::Alive(id));
    for _ in 0..3 {
        assert_eq!(next(&events), LivenessEvent::Missed(id));
        assert_eq!(events.recv_timeout(Duration::from_millis(300)), Err(RecvTimeoutError::Timeout));
        rank.write_all(&[PING]).unwrap();
        assert_eq!(next(&events), LivenessEvent::Answering(id));
        let mut answer = [0u8; 1];
        rank.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [PONG]);
    }
    assert_eq!(next(&events), LivenessEvent::Missed(id));
    drop(rank);
    assert_eq!(next(&events), LivenessEvent::Closed(id, Closed::Peer));
}

#[test]
fn tickets_are_for_one_use() {
    let (server, events) = usual();
    let (first, ticket) = server.issue().unwrap();
    let rank = client(&server, ticket, PEER_TIMEOUT).0.unwrap();
    assert_eq!(next(&events), LivenessEvent::Alive(first));
    let (void, void_ticket) = server.issue().unwrap();
    assert_ne!(void, first);
    server.disconnect(void);
    let address = server.local_addr();
    for wrong in [ticket, void_ticket, Ticket::from_bytes([0; 32]), Ticket::from_bytes([0xff; 32])] {
        let error = client(&server, wrong, PEER_TIMEOUT).0.unwrap_err();
        assert_eq!(error, LivenessError::Refused { address });
    }
    assert!(events.try_recv().is_err(), "a void ticket reports nothing");
    drop(rank);
}

#[test]
fn tickets_expire() {
    let config = ServerConfig { ticket_lifetime: Duration::from_millis(50), peer_timeout: PEER_TIMEOUT };
    let (server, events) = server(config, "127.0.0.1:0");
    let (id, ticket) = server.issue().unwrap();
    assert_eq!(next(&events), LivenessEvent::Unclaimed(id));
    let error = client(&server, ticket, PEER_TIMEOUT).0.unwrap_err();
    assert_eq!(error, LivenessError::Refused { address: server.local_addr() });
}

#[test]
fn tickets_that_wait_are_bounded() {
    let (server, _events) = usual();
    for _ in 0..crate::limits::TICKETS_MAX {
        server.issue().unwrap();
    }
    let error = server.issue().unwrap_err();
    assert!(
        matches!(error, LivenessError::TooManyTickets { .. }) && error.is_retryable() && error.is_local()
    );
}

#[test]
fn a_fenced_rank_is_disconnected_and_knows_it() {
    let (server, events) = usual();
    let (id, ticket) = server.issue().unwrap();
    let (rank, lost) = client(&server, ticket, PEER_TIMEOUT);
    let rank = rank.unwrap();
    assert_eq!(next(&events), LivenessEvent::Alive(id));
    server.disconnect(id);
    assert_eq!(next(&events), LivenessEvent::Closed(id, Closed::Local));
    assert_eq!(lost.recv_timeout(SOON), Ok(Lost::Closed));
    drop(rank);
}

#[test]
fn a_directory_that_dies_or_falls_silent_is_lost() {
    let (server, events) = usual();
    let (_, ticket) = server.issue().unwrap();
    let (rank, lost) = client(&server, ticket, PEER_TIMEOUT);
    let rank = rank.unwrap();
    next(&events);
    drop(server);
    assert_eq!(lost.recv_timeout(SOON), Ok(Lost::Closed));
    drop(rank);

    // A server that welcomes and then says nothing, or the wrong thing.
    for (says, expected) in [(None, Lost::Silent), (Some(0x77), Lost::Garbage), (Some(PONG), Lost::Garbage)] {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let accepting = std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            let mut ticket = [0u8; 32];
            stream.read_exact(&mut ticket).unwrap();
            stream.write_all(&[WELCOME]).unwrap();
            if let Some(byte) = says {
                // More answers than there were pings.
                stream.write_all(&[byte; 200]).unwrap();
            }
            stream
        });
        let (sender, lost) = channel();
        let config = ClientConfig::for_peer_timeout(Duration::from_millis(200));
        let on_lost = move |reason| sender.send(reason).unwrap();
        let rank = LivenessClient::connect(address, Ticket::from_bytes([1; 32]), config, on_lost).unwrap();
        let stream = accepting.join().unwrap();
        assert_eq!(lost.recv_timeout(SOON), Ok(expected));
        drop((rank, stream));
    }
}

#[test]
fn nobody_there_is_an_error_that_names_the_address() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let config = ClientConfig { connect_timeout: Duration::from_millis(200), ..ClientConfig::default() };
    let error = LivenessClient::connect(address, Ticket::from_bytes([1; 32]), config, |_| {}).unwrap_err();
    let expected = LivenessError::Timeout { address, timeout: Duration::from_millis(200) };
    assert_eq!(error, expected, "accepted by the kernel, answered by nobody");
    drop(listener);
    let error = LivenessClient::connect(address, Ticket::from_bytes([1; 32]), config, |_| {}).unwrap_err();
    assert_eq!(error, LivenessError::Connect { address, kind: io::ErrorKind::ConnectionRefused });
    assert!(error.to_string().contains(&address.to_string()) && error.is_retryable());
}

#[test]
fn garbage_ends_that_connection_and_no_other() {
    let (server, events) = usual();
    let (good, ticket) = server.issue().unwrap();
    let (rank, lost) = client(&server, ticket, PEER_TIMEOUT);
    let rank = rank.unwrap();
    assert_eq!(next(&events), LivenessEvent::Alive(good));
    // Before a ticket: too little and then the end, something else, and very much of it.
    drop(TcpStream::connect(server.local_addr()).unwrap());
    for length in [31usize, 32, 33, 100_000] {
        let mut stream = TcpStream::connect(server.local_addr()).unwrap();
        // The server may close before it has all.
        let _ = stream.write_all(&vec![0x5a; length]);
        if length >= 32 {
            assert!(is_closed(&mut stream), "{length} bytes are tolerated");
        }
    }
    // After a ticket: a byte that is no ping, and pings without measure.
    for bytes in [vec![0x5a], vec![PING; 1 << 20]] {
        let (id, ticket) = server.issue().unwrap();
        let mut stream = by_hand(server.local_addr(), ticket);
        assert_eq!(next(&events), LivenessEvent::Alive(id));
        let _ = stream.write_all(&bytes);
        assert!(matches!(next(&events), LivenessEvent::Closed(closed, _) if closed == id));
        assert!(is_closed(&mut stream));
    }
    assert_eq!(events.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty));
    assert!(lost.try_recv().is_err());
    drop(rank);
    assert_eq!(next(&events), LivenessEvent::Closed(good, Closed::Peer));
}

#[test]
fn connections_without_ticket_are_bounded_and_timed() {
    let (server, events) = usual();
    let mut idle: Vec<TcpStream> =
        (0..LIVENESS_UNPROVEN_MAX + 50).map(|_| TcpStream::connect(server.local_addr()).unwrap()).collect();
    // Those above the limit are closed at once, the others when their time is over; then there is room for a rank.
    for stream in &mut idle {
        assert!(is_closed(stream));
    }
    let (id, ticket) = server.issue().unwrap();
    let rank = client(&server, ticket, PEER_TIMEOUT).0.unwrap();
    assert_eq!(next(&events), LivenessEvent::Alive(id));
    drop(rank);
}

#[test]
fn two_hundred_ranks_on_one_thread() {
    let (server, events) = usual();
    let mut ranks = Vec::new();
    let mut ids = std::collections::BTreeSet::new();
    for _ in 0..200 {
        let (id, ticket) = server.issue().unwrap();
        ids.insert(id);
        ranks.push(by_hand(server.local_addr(), ticket));
    }
    let mut alive = std::collections::BTreeSet::new();
    while alive.len() < 200 {
        match next(&events) {
            LivenessEvent::Alive(id) => assert!(alive.insert(id)),
            // A loaded machine may take longer than the peer timeout to come here.
            LivenessEvent::Missed(_) => {}
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(alive, ids);
    drop(ranks);
    while !ids.is_empty() {
        match next(&events) {
            LivenessEvent::Closed(id, Closed::Peer) => assert!(ids.remove(&id)),
            LivenessEvent::Missed(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_port_in_use_is_named() {
    let (first, _events) = usual();
    let address = first.local_addr();
    let error = LivenessServer::bind(address, ServerConfig::default(), |_| {}).unwrap_err();
    assert_eq!(error, BindError::AddressInUse { protocol: "TCP", address });
}

#[test]
fn the_server_may_be_dropped_by_its_own_sink() {
    let slot = std::sync::Arc::new(std::sync::Mutex::new(None::<LivenessServer>));
    let (sender, done) = channel();
    let sink = {
        let slot = std::sync::Arc::clone(&slot);
        move |event| {
            drop(slot.lock().unwrap().take());
            sender.send(event).unwrap();
        }
    };
    let server = LivenessServer::bind("127.0.0.1:0".parse().unwrap(), ServerConfig::default(), sink).unwrap();
    let (id, ticket) = server.issue().unwrap();
    let address = server.local_addr();
    *slot.lock().unwrap() = Some(server);
    let mut rank = TcpStream::connect(address).unwrap();
    rank.write_all(&ticket.to_bytes()).unwrap();
    assert_eq!(done.recv_timeout(SOON), Ok(LivenessEvent::Alive(id)));
    assert!(is_closed(&mut rank));
}
