//! Garbage on every listener of a rank and of a directory, while blocks travel: no wrong byte, no stop, no growth.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // A test file.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::time::Duration;

use common::{config, directory, loopback, Engine, DEADLINE};
use kvfabric_core::limits::FRAME_BYTES_MAX;
use kvfabric_core::wire::{decode_reply, encode_request, GetStats, Refusal, Reply, Request};
use kvfabric_core::TransportKind;
use kvfabric_node::{DirectoryServer, TransportChoice};
use kvfabric_transport_control::bytes::Bytes;
use kvfabric_transport_control::{Connection, Endpoint, EndpointConfig, Handler, Responder, Security, Tls};
use rustix::net::{
    connect, recv, send, socket_with, AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};

const BLOCKS: usize = 32;

/// A port of loopback that is free for TCP and UDP.
fn free_port() -> u16 {
    loop {
        let port = TcpListener::bind(loopback()).unwrap().local_addr().unwrap().port();
        if UdpSocket::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Panics on any thread, the node's own included: none may come of what a stranger sends (rule C3).
static PANICS: AtomicUsize = AtomicUsize::new(0);

fn count_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Ordering::SeqCst);
            usual(info);
        }));
    });
}

/// A fabric whose every listener is known.
struct Target {
    directory: DirectoryServer,
    a: Engine,
    b: Engine,
    /// Control (UDP) and data (TCP) of rank `a`.
    listen: SocketAddr,
    sockets: PathBuf,
    socket: PathBuf,
    round: u64,
}

impl Target {
    fn start(kind: TransportKind) -> Self {
        count_panics();
        let directory = directory();
        let listen = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let sockets =
            std::env::temp_dir().join(format!("kvf-hostile-{}-{}", std::process::id(), listen.port()));
        let mut owner = config("a", &directory);
        owner.listen = listen;
        owner.transport = TransportChoice::Only(kind);
        owner.socket_dir = Some(sockets.clone());
        let a = Engine::start(owner, BLOCKS);
        let mut reader = config("b", &directory);
        reader.transport = TransportChoice::Only(kind);
        let b = Engine::start(reader, BLOCKS);
        let socket = sockets.join(format!("kvfabric-{:016x}.sock", a.node.incarnation()));
        let mut target = Self { directory, a, b, listen, sockets, socket, round: 0 };
        target.works("before");
        target
    }

    /// Everything still works, for ranks that are connected and for one that comes new.
    fn works(&mut self, after: &str) {
        assert_eq!(PANICS.load(Ordering::SeqCst), 0, "a thread panicked {after}");
        self.round += 1;
        assert_eq!(
            self.a.node.evict(&self.a.ns, &(0..BLOCKS).map(common::key).collect::<Vec<_>>()) % BLOCKS,
            0
        );
        self.a.fill(0..BLOCKS, self.round);
        for (block, outcome) in self.b.load(0..BLOCKS, self.round).iter().enumerate() {
            assert!(outcome.is_ok(), "after {after}, block {block}: {outcome:?}");
        }
        let mut newcomer = config("newcomer", &self.directory);
        newcomer.transport = TransportChoice::Auto;
        let newcomer = Engine::start(newcomer, BLOCKS);
        newcomer.check_all(0..BLOCKS, self.round);
        assert!(self.a.node.directory_connected() && self.b.node.directory_connected(), "after {after}");
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.sockets);
    }
}

/// Frames that no peer sends: empty, cut, oversized, random, and such with plausible beginnings.
fn garbage() -> Vec<Vec<u8>> {
    let noise = |seed: u64, length: usize| common::content(seed as usize, seed, length);
    let mut frames = vec![
        Vec::new(),
        vec![0],
        vec![0xFF; 3],
        noise(1, 7),
        noise(2, 31),
        noise(3, 32),
        noise(4, 33),
        noise(5, 56),
        noise(6, 57),
        noise(7, 4096),
        noise(8, 1 << 20),
        vec![0; 1 << 16],
        vec![0xFF; 1 << 16],
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        [&[0x16, 0x03, 0x01, 0x40, 0x00][..], &noise(9, 300)].concat(),
    ];
    for version in [0u32, 1, 2, u32::MAX] {
        // A tcp hello with a made-up token.
        let hello = [
            &noise(10, 32)[..],
            b"kvf-tcp?",
            &version.to_le_bytes(),
            &0u32.to_le_bytes(),
            &1u64.to_le_bytes(),
        ]
        .concat();
        frames.push(hello[..40].to_vec());
        frames.push(hello);
    }
    for claim in [0u32, 1, FRAME_BYTES_MAX as u32, FRAME_BYTES_MAX as u32 + 1, u32::MAX] {
        frames.push([&claim.to_le_bytes()[..], &noise(11, 64)].concat());
        frames.push([&[1u8][..], &claim.to_be_bytes(), &noise(12, 64)].concat());
    }
    frames
}

fn tcp_garbage(address: SocketAddr, frame: &[u8]) {
    let mut stream = TcpStream::connect_timeout(&address, DEADLINE).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    // The listener may hang up at any byte.
    let _ = stream.write_all(frame);
    let mut answer = [0; 256];
    let _ = stream.read(&mut answer);
}

#[test]
fn garbage_on_the_data_port() {
    let mut target = Target::start(TransportKind::Tcp);
    for frame in garbage() {
        tcp_garbage(target.listen, &frame);
    }
    target.works("garbage on the data port");
    // Strangers that connect and say nothing, more than may wait for a greeting.
    let silent: Vec<_> =
        (0..400).filter_map(|_| TcpStream::connect_timeout(&target.listen, DEADLINE).ok()).collect();
    assert!(!silent.is_empty());
    common::eventually("the silent strangers are sent away", || {
        silent.iter().all(|stream| {
            stream.set_nonblocking(true).unwrap();
            !matches!((&*stream).read(&mut [0]), Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
        })
    });
    target.works("silent strangers on the data port");
}

#[test]
fn garbage_on_the_liveness_port() {
    let mut target = Target::start(TransportKind::Shm);
    let address = target.directory.local_addr();
    for frame in garbage() {
        tcp_garbage(address, &frame);
    }
    target.works("garbage on the liveness port");
    let silent: Vec<_> =
        (0..400).filter_map(|_| TcpStream::connect_timeout(&address, DEADLINE).ok()).collect();
    target.works("silent strangers on the liveness port");
    drop(silent);
    let stats = target.directory.stats().core;
    assert_eq!((stats.ranks_live, stats.ranks_hidden), (2, 0));
}

fn unix_connect(path: &Path) -> std::io::Result<std::os::fd::OwnedFd> {
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    rustix::net::sockopt::set_socket_timeout(
        &socket,
        rustix::net::sockopt::Timeout::Recv,
        Some(Duration::from_millis(20)),
    )?;
    connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

#[test]
fn garbage_on_the_unix_socket() {
    let mut target = Target::start(TransportKind::Shm);
    let mut frames = garbage();
    let frame = |version: u16, kind: u16, body: &[u8]| {
        [&b"KVSM"[..], &version.to_le_bytes(), &kind.to_le_bytes(), body].concat()
    };
    for version in [0, 1, 2, u16::MAX] {
        for kind in [0, 1, 2, 3, 4, 5, u16::MAX] {
            frames.push(frame(version, kind, &[]));
            frames.push(frame(version, kind, &[7; 16]));
            frames.push(frame(version, kind, &[0xFF; 400]));
        }
    }
    for bytes in &frames {
        let socket = unix_connect(&target.socket).unwrap();
        let _ = send(&socket, bytes, SendFlags::NOSIGNAL);
        let _ = recv(&socket, &mut [0u8; 4096][..], RecvFlags::empty());
    }
    // Another version is told so, in the words of this one: magic, version, Refused, Version.
    let socket = unix_connect(&target.socket).unwrap();
    send(&socket, &frame(2, 1, &[7; 16]), SendFlags::NOSIGNAL).unwrap();
    let mut answer = [0; 64];
    common::eventually("the refusal comes", || {
        recv(&socket, &mut answer[..], RecvFlags::empty()).is_ok_and(|(length, _)| length == 10)
    });
    assert_eq!(answer[..10], frame(1, 5, &1u16.to_le_bytes())[..]);
    // A sound greeting followed by requests out of order and out of bounds.
    let socket = unix_connect(&target.socket).unwrap();
    send(&socket, &frame(1, 1, &[9; 16]), SendFlags::NOSIGNAL).unwrap();
    for start in [0u32, 1, u32::MAX] {
        let body = [&u64::MAX.to_le_bytes()[..], &start.to_le_bytes()].concat();
        let _ = send(&socket, &frame(1, 3, &body), SendFlags::NOSIGNAL);
    }
    target.works("garbage on the Unix socket");
    let silent: Vec<_> = (0..400).filter_map(|_| unix_connect(&target.socket).ok()).collect();
    target.works("silent strangers on the Unix socket");
    drop(silent);
}

#[test]
fn garbage_on_the_control_ports() {
    let mut target = Target::start(TransportKind::Tcp);
    let socket = UdpSocket::bind(loopback()).unwrap();
    for address in [target.listen, target.directory.local_addr()] {
        for frame in garbage() {
            let _ = socket.send_to(&frame[..frame.len().min(1400)], address);
        }
        // Long-header packets of an unknown version, and of QUIC v1 with noise.
        for first in [0xC0u8, 0xD3, 0xFF] {
            for version in [0u32, 1, 2, u32::MAX] {
                let mut packet = vec![first];
                packet.extend_from_slice(&version.to_be_bytes());
                packet.extend_from_slice(&common::content(3, u64::from(first), 1200));
                let _ = socket.send_to(&packet, address);
            }
        }
    }
    target.works("garbage on the control ports");
}

/// Answers nothing: the tests only ask.
struct Silent;

impl Handler for Silent {
    fn handle_request(&self, _connection: &Connection, _request: Bytes, responder: Responder) {
        drop(responder);
    }
}

/// A peer with valid certificates that speaks nonsense, or another version, on the control connection.
#[test]
fn nonsense_and_other_versions_from_an_authenticated_peer() {
    let mut target = Target::start(TransportKind::Tcp);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut sound = Vec::new();
    encode_request(&Request::GetStats(GetStats), &mut sound).unwrap();
    let endpoint = runtime.block_on(async {
        let tls = Tls::load(&Security::Dev).unwrap();
        Endpoint::bind(EndpointConfig::new(tls), loopback(), Arc::new(Silent)).unwrap()
    });
    for address in [target.directory.local_addr(), target.listen] {
        let is_directory = address == target.directory.local_addr();
        runtime.block_on(async {
            let connection = endpoint.connect(&address.to_string()).await.unwrap();
            let ask = |frame: Vec<u8>| connection.request(frame.into(), DEADLINE);
            for version in [0u16, 2, u16::MAX] {
                let mut frame = sound.clone();
                frame[..2].copy_from_slice(&version.to_le_bytes());
                let reply = ask(frame).await.unwrap();
                assert_eq!(decode_reply(&reply), Ok(Reply::Refused(Refusal::Version { ours: 1 })));
            }
            for frame in garbage() {
                // Refused, or not taken; never an answer of substance.
                if let Ok(reply) = ask(frame).await {
                    assert!(
                        matches!(decode_reply(&reply), Ok(Reply::Refused(_))),
                        "{:?}",
                        decode_reply(&reply)
                    );
                }
            }
            // Every kind of message with a body of noise, and with none.
            for kind in 0..=255u8 {
                for body in [&[][..], &[0; 4], &[0xFF; 40], &common::content(1, u64::from(kind), 200)] {
                    let frame = [&sound[..2], &[kind], body].concat();
                    if let Ok(reply) = ask(frame).await {
                        assert!(decode_reply(&reply).is_ok(), "kind {kind}");
                    }
                }
            }
            let reply = ask(sound.clone()).await.unwrap();
            let substance = matches!(decode_reply(&reply), Ok(Reply::Stats(_)));
            assert_eq!(substance, is_directory, "the connection still serves");
        });
    }
    target.works("nonsense on the control connection");
    runtime.block_on(endpoint.shutdown("the test is over"));
}

/// Text on the metrics port.
#[test]
fn garbage_on_the_metrics_port() {
    let directory = directory();
    let mut config = config("a", &directory);
    config.metrics_listen = Some(loopback());
    let a = Engine::start(config, 4);
    let address = a.node.metrics_address().unwrap();
    for frame in garbage() {
        tcp_garbage(address, &frame);
    }
    a.fill(0..4, 1);
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200") && text.contains("kvfabric"), "{text}");
    a.check_all(0..4, 1);
}
