//! Starts that cannot work: a typed error within seconds that names what is wrong and what to do, and nothing left behind.
#![allow(clippy::unwrap_used)] // A test file.

mod common;

use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::time::{Duration, Instant};

use common::{config, directory, loopback, Engine};
use kvfabric_core::directory::JoinError;
use kvfabric_core::TransportKind;
use kvfabric_node::{
    DirectoryChoice, DirectoryConfig, DirectoryServer, Node, NodeConfig, SecurityChoice, StartError,
    TransportChoice,
};

/// Room for a busy machine above the default start timeout of 5 s.
const SECONDS: Duration = Duration::from_secs(30);

fn fails(config: NodeConfig) -> StartError {
    let begun = Instant::now();
    let error = Node::start(config).unwrap_err();
    println!("after {:?}: {error}", begun.elapsed());
    assert!(begun.elapsed() < SECONDS, "the error came after {:?}", begun.elapsed());
    error
}

/// A port of loopback that is taken for TCP, for UDP, or not at all.
fn free_port() -> u16 {
    loop {
        let port = TcpListener::bind(loopback()).unwrap().local_addr().unwrap().port();
        if UdpSocket::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

#[test]
fn directory_that_is_not_there() {
    for address in
        [format!("127.0.0.1:{}", free_port()), "no-such-host.invalid:7400".into(), "nonsense".into()]
    {
        let begun = Instant::now();
        let config = NodeConfig::new("a", address.clone(), 1 << 20);
        assert!(config.start_timeout < Duration::from_secs(5), "a typo is told within five seconds");
        match fails(config) {
            StartError::DirectoryUnreachable { address: found, reason } => {
                assert_eq!(found, address);
                assert!(!reason.is_empty());
            }
            other => panic!("{other:?}"),
        }
        assert!(
            begun.elapsed() >= Duration::from_secs(1),
            "one refusal is not the end: the directory may be starting"
        );
    }
}

/// Something listens there, but it is no directory.
#[test]
fn directory_address_of_something_else() {
    let silent = UdpSocket::bind(loopback()).unwrap();
    let mut config = NodeConfig::new("a", silent.local_addr().unwrap().to_string(), 1 << 20);
    config.start_timeout = Duration::from_secs(2);
    assert!(matches!(fails(config), StartError::DirectoryUnreachable { .. }));
    // A rank is no directory.
    let directory = directory();
    let port = free_port();
    let mut first = common::config("first", &directory);
    first.listen = SocketAddr::from(([127, 0, 0, 1], port));
    let _first = Node::start(first).unwrap();
    match fails(NodeConfig::new("a", format!("127.0.0.1:{port}"), 1 << 20)) {
        StartError::JoinRefused { reason, .. } => assert!(reason.contains("no directory"), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn ports_in_use() {
    let directory = directory();
    let tcp = TcpListener::bind(loopback()).unwrap();
    let udp = UdpSocket::bind(loopback()).unwrap();
    for taken in [tcp.local_addr().unwrap(), udp.local_addr().unwrap()] {
        let mut config = config("a", &directory);
        config.listen = taken;
        match fails(config) {
            StartError::Listen { address, reason } => {
                assert_eq!(address, taken.to_string());
                assert!(reason.contains("in use"), "{reason}");
            }
            other => panic!("{other:?}"),
        }
        let error = DirectoryServer::start(DirectoryConfig::new(taken)).err().expect("the port is taken");
        println!("{error}");
        assert!(matches!(&error, StartError::Listen { .. }), "{error:?}");
        assert!(
            error.to_string().contains(&taken.port().to_string()) && error.to_string().contains("in use")
        );
        // An embedded directory says the same.
        let mut config = common::config("a", &directory);
        config.directory = DirectoryChoice::Embedded(taken);
        assert!(matches!(fails(config), StartError::Listen { .. }));
    }
    // Nothing was left behind: the name is free and a rank of it starts.
    Engine::start(config("a", &directory), 1).fill(0..1, 1);
}

#[test]
fn other_cluster() {
    let directory = directory();
    let mut config = config("a", &directory);
    config.cluster = "other".into();
    match fails(config) {
        StartError::JoinRefused { name, kind, reason } => {
            assert_eq!((name.as_str(), kind), ("a", JoinError::ClusterMismatch));
            assert!(reason.contains("cluster"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn second_rank_of_a_name() {
    let directory = directory();
    let first = Engine::start(config("twin", &directory), 4);
    first.fill(0..2, 1);
    match fails(config("twin", &directory)) {
        StartError::JoinRefused { name, kind, reason } => {
            assert_eq!((name.as_str(), kind), ("twin", JoinError::NameInUse));
            assert!(reason.contains("--name"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    // The first goes on.
    first.fill(2..4, 1);
    first.check_all(0..4, 1);
    assert_eq!(first.hits(0..4), 4);
    // Once it is gone, the name is free at once.
    drop(first);
    let second = Engine::start(config("twin", &directory), 1);
    assert_eq!(second.hits(0..4), 0);
}

#[test]
fn transport_that_is_not_there() {
    let directory = directory();
    let mut config = config("a", &directory);
    config.transport = TransportChoice::Only(TransportKind::Rdma);
    match fails(config) {
        StartError::TransportUnavailable { transport, reason } => {
            assert_eq!(transport, "rdma");
            assert!(reason.contains("shm or tcp"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn pools_that_cannot_be() {
    let directory = directory();
    for pool_bytes in [0, u64::MAX, 1 << 62] {
        let mut config = config("a", &directory);
        config.pool_bytes = pool_bytes;
        let error = fails(config);
        assert!(matches!(error, StartError::Pool(_)), "{pool_bytes}: {error:?}");
    }
    for extent_bytes in [0, 1, u64::MAX] {
        let mut config = config("a", &directory);
        config.extent_bytes = extent_bytes;
        match Node::start(config) {
            Err(error) => assert!(matches!(error, StartError::Pool(_)), "{extent_bytes}: {error:?}"),
            // An extent beyond the pool is cut to it.
            Ok(node) => drop(node),
        }
    }
}

#[test]
fn names_that_are_too_long_or_empty() {
    let directory = directory();
    for name in [String::new(), "n".repeat(256)] {
        assert!(matches!(fails(config(&name, &directory)), StartError::Config(_) | StartError::Security(_)));
        let mut other = config("a", &directory);
        other.cluster.clone_from(&name);
        assert!(matches!(fails(other), StartError::Config(_)));
        let mut other = config("a", &directory);
        other.engine = name;
        assert!(matches!(fails(other), StartError::Config(_)));
    }
}

#[test]
fn listening_beyond_loopback_needs_certificates() {
    let directory = directory();
    for address in ["0.0.0.0:0", "[::]:0"] {
        let mut config = config("a", &directory);
        config.listen = address.parse().unwrap();
        assert!(matches!(fails(config.clone()), StartError::Config(_)), "it cannot tell peers its address");
        config.advertise = Some("127.0.0.1".into());
        let error = fails(config);
        assert!(error.to_string().contains("--tls-dir"), "{error}");
        let server = DirectoryServer::start(DirectoryConfig::new(address.parse().unwrap()));
        let error = server.err().expect("development certificates are for loopback");
        assert!(error.to_string().contains("--tls-dir"), "{error}");
    }
}

#[test]
fn certificates_that_are_not_there() {
    let directory = directory();
    let mut config = config("a", &directory);
    config.security = SecurityChoice::TlsDir("/nonexistent/certificates".into());
    match fails(config) {
        StartError::Security(reason) => assert!(reason.contains("/nonexistent/certificates"), "{reason}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn socket_folders_that_cannot_be_used() {
    let directory = directory();
    let file = std::env::temp_dir().join(format!("kvf-not-a-folder-{}", std::process::id()));
    std::fs::write(&file, b"a file").unwrap();
    let long = std::env::temp_dir().join("d".repeat(120));
    for dir in [file.clone(), long.clone()] {
        let mut config = config("a", &directory);
        config.socket_dir = Some(dir);
        let error = fails(config);
        assert!(matches!(error, StartError::System { .. }), "{error:?}");
    }
    std::fs::remove_file(file).unwrap();
    let _ = std::fs::remove_dir(long);
}

/// A start that failed on a runtime's thread dropped a runtime there, which panics.
#[test]
fn a_failed_start_on_a_runtimes_thread_is_an_error() {
    let directory = directory();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut config = config("async", &directory);
    config.listen = taken.local_addr().unwrap();
    let other = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let started = other.block_on(async { Node::start(config) });
    assert!(matches!(started, Err(StartError::Listen { .. })), "{started:?}");
}
