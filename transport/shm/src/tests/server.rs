//! Goal: no client, whatever it sends, does more than close its own connection; and no server, whatever it answers, does
//! more than fail its own peer.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use super::common::*;
use crate::{limits, ServeError, ShmProvider, ShmServer, UNIX_PATH_BYTES_MAX};
use kvfabric_memory::Region;
use kvfabric_transport_api::{ConnectError, Event, PeerKey, Provider, ReadError};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketType,
};

const PEER: PeerKey = PeerKey(1);

fn raw_client(path: &Path) -> OwnedFd {
    let fd = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    rustix::net::connect(&fd, &SocketAddrUnix::new(path).expect("short")).expect("connected");
    let timeout = Some(PATIENCE);
    rustix::net::sockopt::set_socket_timeout(&fd, rustix::net::sockopt::Timeout::Recv, timeout).expect("set");
    fd
}

fn send(fd: &OwnedFd, frame: &[u8]) {
    rustix::net::send(fd, frame, SendFlags::NOSIGNAL).expect("sent");
}

/// The next packet's length; 0 once the server has closed.
fn receive(fd: &OwnedFd, buffer: &mut [u8]) -> usize {
    let mut control = RecvAncillaryBuffer::default();
    match rustix::net::recvmsg(fd, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::empty()) {
        Ok(message) => message.bytes,
        Err(rustix::io::Errno::CONNRESET) => 0,
        Err(error) => panic!("the server neither answered nor closed: {error}"),
    }
}

fn hello() -> Vec<u8> {
    let mut frame = b"KVSM\x01\x00\x01\x00".to_vec();
    frame.extend([7; 16]);
    frame
}

fn slabs_request(since: u64, start: u32) -> Vec<u8> {
    let mut frame = b"KVSM\x01\x00\x03\x00".to_vec();
    frame.extend(since.to_le_bytes());
    frame.extend(start.to_le_bytes());
    frame
}

#[test]
fn garbage_closes_its_own_connection_only() {
    let (directory, memory) = (Directory::new(), owner(1 << 20, 64));
    memory.allocate_extent(0, 1 << 20).expect("memory");
    memory.add_slab(slab(0, 1, 4096, 0)).expect("a slab");
    put(&memory, 0, 1, &pattern(0, 1, 4096));
    let _server = ShmServer::start(&directory.socket(), memory, INCARNATION).expect("serving");
    let mut provider = ShmProvider::new().expect("a provider");
    connect(&mut provider, PEER, &directory.socket());

    let mut with_tail = hello();
    with_tail.push(0);
    let mut bad_kind = hello();
    bad_kind[6] = 99;
    let mut frames: Vec<Vec<u8>> = vec![
        vec![0],
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        hello()[..10].to_vec(),
        with_tail,
        bad_kind,
        vec![0xff; 60_000],
        // A list before HELLO.
        slabs_request(0, 0),
    ];
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for _ in 0..200 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let length = usize::try_from(state >> 58).expect("6 bits") + 1;
        frames.push(state.to_be_bytes().iter().copied().cycle().take(length).collect());
    }
    for frame in &frames {
        let client = raw_client(&directory.socket());
        send(&client, frame);
        assert_eq!(receive(&client, &mut [0; 64]), 0, "closed after {:?}", &frame[..frame.len().min(20)]);
    }
    // After a proper HELLO: a second one, and a request cut short.
    for frame in [hello(), slabs_request(0, 0)[..19].to_vec()] {
        let client = raw_client(&directory.socket());
        send(&client, &hello());
        assert_eq!(receive(&client, &mut [0; 64]), 48);
        send(&client, &frame);
        assert_eq!(receive(&client, &mut [0; 64]), 0);
    }
    // Another version is told so.
    let client = raw_client(&directory.socket());
    let mut other = hello();
    other[4] = 2;
    send(&client, &other);
    let mut answer = [0; 64];
    assert_eq!(receive(&client, &mut answer), 10);
    assert_eq!(answer[6..10], [5, 0, 1, 0]);
    assert_eq!(receive(&client, &mut answer), 0);
    // Descriptors that nobody asked for.
    let client = raw_client(&directory.socket());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [client.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    rustix::net::sendmsg(&client, &[IoSlice::new(&hello())], &mut control, SendFlags::NOSIGNAL)
        .expect("sent");
    assert_eq!(receive(&client, &mut [0; 64]), 0);

    let destination = Region::allocate(4096).expect("a region");
    provider.post(PEER, read_op(1, 0, 4096, &destination)).expect("posted");
    assert!(next_read(&mut provider).outcome.is_ok(), "the orderly client goes on");
}

#[test]
fn lists_are_paged_and_unchanged_ones_are_short() {
    let (directory, memory) = (Directory::new(), owner(64 << 20, 1 << 16));
    memory.allocate_extent(0, 64 << 20).expect("memory");
    for index in 0..600u32 {
        memory.add_slab(slab(index, 1, 64, u64::from(index) * 64)).expect("a slab");
    }
    let _server = ShmServer::start(&directory.socket(), memory, INCARNATION).expect("serving");
    let client = raw_client(&directory.socket());
    send(&client, &hello());
    let mut buffer = vec![0; limits::FRAME_BYTES_MAX];
    assert_eq!(receive(&client, &mut buffer), 48);
    let number = |buffer: &[u8], at: usize| u32::from_le_bytes(buffer[at..at + 4].try_into().expect("four"));
    for (since, start, count) in [(0, 0, 512), (0, 512, 88), (0, 600, 0), (0, u32::MAX, 0), (600, 0, 0)] {
        send(&client, &slabs_request(since, start));
        let length = receive(&client, &mut buffer);
        assert_eq!(length, 28 + count * 44, "since {since} start {start}");
        assert_eq!(number(&buffer, 16), 600);
        assert_eq!(number(&buffer, 24) as usize, count);
    }
}

#[test]
fn silent_clients_are_closed() {
    let (directory, memory) = (Directory::new(), owner(1 << 20, 64));
    let _server = ShmServer::start(&directory.socket(), memory, INCARNATION).expect("serving");
    let client = raw_client(&directory.socket());
    let start = Instant::now();
    assert_eq!(receive(&client, &mut [0; 64]), 0);
    assert!(start.elapsed() >= limits::HELLO_TIMEOUT - Duration::from_millis(200));
}

#[test]
fn paths_are_checked_and_cleaned() {
    let directory = Directory::new();
    let long = directory.path().join("x".repeat(UNIX_PATH_BYTES_MAX));
    match ShmServer::start(&long, owner(1 << 20, 64), INCARNATION) {
        Err(ServeError::PathTooLong { path, bytes }) => {
            assert_eq!(path, long);
            assert_eq!(bytes, long.as_os_str().len());
        }
        other => panic!("unexpected {other:?}"),
    }
    let longest =
        directory.path().join("y".repeat(UNIX_PATH_BYTES_MAX - 1 - directory.path().as_os_str().len()));
    let server = ShmServer::start(&longest, owner(1 << 20, 64), INCARNATION).expect("just fits");
    connect(&mut ShmProvider::new().expect("a provider"), PEER, server.path());
    drop(server);

    let file = directory.path().join("file");
    std::fs::write(&file, "precious").expect("written");
    let refused = ShmServer::start(&file, owner(1 << 20, 64), INCARNATION);
    assert!(matches!(refused, Err(ServeError::NotASocket(_))));
    assert_eq!(std::fs::read(&file).expect("still there"), b"precious");

    let missing = ShmServer::start(Path::new("/nonexistent/directory/s"), owner(1 << 20, 64), INCARNATION);
    assert!(matches!(missing, Err(ServeError::Os { .. })));

    let server = ShmServer::start_in(directory.path(), owner(1 << 20, 64), INCARNATION).expect("serving");
    let path = server.path().to_path_buf();
    assert!(path.exists());
    let mode =
        std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).expect("there").permissions());
    assert_eq!(mode & 0o777, 0o600);
    drop(server);
    assert!(!path.exists(), "removed on stop");
}

#[test]
fn two_servers_never_share_a_path_and_a_dead_ones_is_replaced() {
    let directory = Directory::new();
    let path = directory.socket();
    let first = ShmServer::start(&path, owner(1 << 20, 64), 1).expect("serving");
    let second = ShmServer::start(&path, owner(1 << 20, 64), 2);
    assert!(matches!(second, Err(ServeError::InUse(_))), "{second:?}");
    drop(first);

    // What a killed process leaves behind: a socket file that nobody listens on.
    let dead = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    rustix::net::bind(&dead, &SocketAddrUnix::new(&path).expect("short")).expect("bound");
    drop(dead);
    assert!(path.exists());
    let third = ShmServer::start(&path, owner(1 << 20, 64), INCARNATION).expect("replaces the dead one's");
    connect(&mut ShmProvider::new().expect("a provider"), PEER, &path);

    // Somebody took the name away and another server has it now: stopping must not remove that one's file.
    std::fs::remove_file(&path).expect("removed");
    let fourth = ShmServer::start(&path, owner(1 << 20, 64), INCARNATION).expect("serving");
    drop(third);
    assert!(path.exists());
    connect(&mut ShmProvider::new().expect("a provider"), PEER, fourth.path());
}

#[test]
fn starting_in_a_directory_sweeps_the_dead_ones_sockets_only() {
    let directory = Directory::new();
    let leave = |name: &str| {
        let path = directory.path().join(name);
        let dead = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
        rustix::net::bind(&dead, &SocketAddrUnix::new(&path).expect("short")).expect("bound");
        path
    };
    let (dead, foreign) = (leave("kvfabric-0000000000000001.sock"), leave("other.sock"));
    let file = directory.path().join("kvfabric-notes.sock");
    std::fs::write(&file, "precious").expect("written");
    let alive = ShmServer::start_in(directory.path(), owner(1 << 20, 64), 2).expect("serving");
    assert!(!dead.exists());
    let _second = ShmServer::start_in(directory.path(), owner(1 << 20, 64), 3).expect("serving");
    assert!(alive.path().exists() && foreign.exists() && file.exists());
}

#[test]
fn racing_starters_leave_exactly_one_server() {
    let directory = Directory::new();
    for _ in 0..10 {
        let path = directory.socket();
        let starters: Vec<_> = (0..4)
            .map(|_| {
                let path = path.clone();
                std::thread::spawn(move || ShmServer::start(&path, owner(1 << 20, 64), INCARNATION))
            })
            .collect();
        let started: Vec<_> = starters.into_iter().map(|thread| thread.join().expect("no panic")).collect();
        assert_eq!(started.iter().filter(|server| server.is_ok()).count(), 1, "{started:?}");
        assert!(started.iter().all(|server| matches!(server, Ok(_) | Err(ServeError::InUse(_)))));
        connect(&mut ShmProvider::new().expect("a provider"), PEER, &path);
    }
}

/// A server that answers the first frame with `answer` and the second, if any, with `then`.
fn false_server(
    path: &Path,
    answer: Vec<u8>,
    fds: Vec<OwnedFd>,
    then: Vec<u8>,
) -> std::thread::JoinHandle<()> {
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    rustix::net::bind(&listener, &SocketAddrUnix::new(path).expect("short")).expect("bound");
    rustix::net::listen(&listener, 1).expect("listening");
    std::thread::spawn(move || {
        let client = rustix::net::accept(&listener).expect("a client");
        let mut buffer = [0; 64];
        let length = receive(&client, &mut buffer);
        assert_eq!(length, 24);
        let mut answer = answer;
        if answer.len() >= 24 && answer[8..24] == [0xee; 16] {
            answer[8..24].copy_from_slice(&buffer[8..24]);
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        if !fds.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        }
        let iov = [IoSlice::new(&answer)];
        rustix::net::sendmsg(&client, &iov, &mut control, SendFlags::NOSIGNAL).expect("sent");
        if !then.is_empty() && receive(&client, &mut buffer) > 0 {
            let _ = rustix::net::send(&client, &then, SendFlags::NOSIGNAL);
        }
        // Held open until the reader has made up its mind.
        let _ = receive(&client, &mut buffer);
    })
}

/// HELLO_ACK with the nonce to be filled in.
fn hello_ack(incarnation: u64, pool_bytes: u64, words_bytes: u64) -> Vec<u8> {
    let mut frame = b"KVSM\x01\x00\x02\x00".to_vec();
    frame.extend([0xee; 16]);
    for value in [incarnation, pool_bytes, words_bytes] {
        frame.extend(value.to_le_bytes());
    }
    frame
}

fn slabs_answer(version: u64, total: u32, start: u32, records: &[u8]) -> Vec<u8> {
    let mut frame = b"KVSM\x01\x00\x04\x00".to_vec();
    frame.extend(version.to_le_bytes());
    for value in [total, start, u32::try_from(records.len() / 44).expect("few")] {
        frame.extend(value.to_le_bytes());
    }
    frame.extend(records);
    frame
}

#[test]
fn false_servers_fail_their_own_connection() {
    let memory = owner(1 << 20, 64);
    let (pool, words) = (memory.pool_bytes(), memory.words_bytes());
    let fds = || {
        let own = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().expect("descriptors");
        vec![own(memory.pool_fd()), own(memory.words_fd())]
    };
    let unsealed = || {
        let fd = rustix::fs::memfd_create("x", rustix::fs::MemfdFlags::CLOEXEC).expect("memfd");
        rustix::fs::ftruncate(&fd, pool).expect("sized");
        vec![fd, fds().remove(1)]
    };
    let three = || fds().into_iter().chain(fds().into_iter().take(1)).collect::<Vec<_>>();
    let ack = || hello_ack(INCARNATION, pool, words);
    let mut wrong_nonce = ack();
    wrong_nonce[8..24].copy_from_slice(&[1; 16]);
    let far = slabs_answer(5, 1, 0, &[0xff; 44]);
    let cases = [
        ("garbage", b"hello there".to_vec(), vec![], vec![]),
        ("wrong nonce", wrong_nonce, fds(), vec![]),
        ("no descriptors", ack(), vec![], vec![]),
        ("one descriptor", ack(), fds().into_iter().take(1).collect(), vec![]),
        ("three descriptors", ack(), three(), vec![]),
        ("exchanged descriptors", ack(), fds().into_iter().rev().collect(), vec![]),
        ("no seals", ack(), unsealed(), vec![]),
        ("pool too short", hello_ack(INCARNATION, pool * 2, words), fds(), vec![]),
        ("impossible size", hello_ack(INCARNATION, u64::MAX, words), fds(), vec![]),
        ("oversized frame", vec![0; limits::FRAME_BYTES_MAX + 1], vec![], vec![]),
        ("list before hello", slabs_answer(1, 0, 0, &[]), vec![], vec![]),
        ("slab outside the pool", ack(), fds(), far),
        ("part out of order", ack(), fds(), slabs_answer(5, 2, 1, &[0; 44])),
        ("empty part", ack(), fds(), slabs_answer(5, 2, 0, &[])),
        ("too many slabs", ack(), fds(), slabs_answer(5, u32::MAX, 0, &[0; 44])),
    ];
    for (name, answer, fds, then) in cases {
        let directory = Directory::new();
        let server = false_server(&directory.socket(), answer, fds, then);
        let mut provider = ShmProvider::new().expect("a provider");
        provider.connect(PEER, target(&directory.socket()));
        match next_event(&mut provider) {
            Event::ConnectFailed { error: ConnectError::Protocol(_), .. } => {}
            other => panic!("{name}: unexpected {other:?}"),
        }
        drop(provider);
        server.join().expect("no panic");
    }
}

#[test]
fn a_server_that_never_answers_is_given_up() {
    let directory = Directory::new();
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    rustix::net::bind(&listener, &SocketAddrUnix::new(directory.socket()).expect("short")).expect("bound");
    rustix::net::listen(&listener, 0).expect("listening");
    let mut provider = ShmProvider::new().expect("a provider");
    // The second one does not even fit the backlog and waits outside.
    for peer in [1, 2, 3] {
        provider.connect(PeerKey(peer), target(&directory.socket()));
    }
    for event in next_events(&mut provider, 3) {
        assert!(
            matches!(event, Event::ConnectFailed { error: ConnectError::Unreachable(_), .. }),
            "unexpected {event:?}"
        );
    }
}

#[test]
fn a_server_that_falls_silent_later_costs_the_unknown_slot_only() {
    let memory = owner(1 << 20, 64);
    memory.allocate_extent(0, 1 << 20).expect("memory");
    memory.add_slab(slab(0, 1, 4096, 0)).expect("a slab");
    put(&memory, 0, 4, &pattern(0, 4, 4096));
    let own = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().expect("descriptors");
    let fds = vec![own(memory.pool_fd()), own(memory.words_fd())];
    let mut record = Vec::new();
    record.extend(1u128.to_le_bytes());
    record.extend(0u32.to_le_bytes());
    record.extend(4096u64.to_le_bytes());
    record.extend(0u32.to_le_bytes());
    record.extend(1u32.to_le_bytes());
    record.extend(0u64.to_le_bytes());
    let directory = Directory::new();
    let ack = hello_ack(INCARNATION, memory.pool_bytes(), memory.words_bytes());
    let listener_thread =
        false_server_that_stays(&directory.socket(), ack, fds, slabs_answer(1, 1, 0, &record));
    let mut provider = ShmProvider::new().expect("a provider");
    connect(&mut provider, PEER, &directory.socket());
    let destination = Region::allocate(4096).expect("a region");
    provider.post(PEER, read_op(1, 5, 4096, &destination)).expect("posted");
    provider.post(PEER, read_op(2, 0, 4096, &destination)).expect("posted");
    provider.post(PEER, read_op(3, 6, 4096, &destination)).expect("posted");
    assert_eq!(next_read(&mut provider).outcome.expect("known").word.generation, 4);
    provider.abort(kvfabric_transport_api::OpToken(3));
    assert_eq!(next_read(&mut provider).outcome, Err(ReadError::Aborted));
    assert_eq!(next_read(&mut provider).outcome, Err(ReadError::PeerLost("no list of slabs in time".into())));
    provider.post(PEER, read_op(4, 0, 4096, &destination)).expect("still connected");
    assert_eq!(next_read(&mut provider).outcome.expect("known").word.generation, 4);
    drop(provider);
    listener_thread.join().expect("no panic");
}

/// Answers HELLO and the first list, then nothing until the reader leaves.
fn false_server_that_stays(
    path: &Path,
    ack: Vec<u8>,
    fds: Vec<OwnedFd>,
    list: Vec<u8>,
) -> std::thread::JoinHandle<()> {
    let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    rustix::net::bind(&listener, &SocketAddrUnix::new(path).expect("short")).expect("bound");
    rustix::net::listen(&listener, 1).expect("listening");
    std::thread::spawn(move || {
        let client = rustix::net::accept(&listener).expect("a client");
        let mut buffer = [0; 64];
        receive(&client, &mut buffer);
        let mut ack = ack;
        ack[8..24].copy_from_slice(&buffer[8..24]);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        rustix::net::sendmsg(&client, &[IoSlice::new(&ack)], &mut control, SendFlags::NOSIGNAL)
            .expect("sent");
        receive(&client, &mut buffer);
        send(&client, &list);
        while receive(&client, &mut buffer) > 0 {}
    })
}
