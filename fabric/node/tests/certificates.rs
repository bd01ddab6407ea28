//! Ranks with certificates of a folder, data connections encrypted too; strangers and wrong names are refused.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test file.

mod common;

use std::path::PathBuf;

use common::{config, content, loopback, Engine, DEADLINE, PEER_TIMEOUT};
use kvfabric_core::TransportKind;
use kvfabric_node::{
    BlockOk, DirectoryConfig, DirectoryServer, Node, SecurityChoice, StartError, TransportChoice,
};
use kvfabric_transport_control::certs;

fn folder(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("kvf-certs-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&dir);
    dir
}

#[test]
fn ranks_with_certificates_exchange_blocks_over_encrypted_tcp() {
    let (ours, theirs) = (folder("ours"), folder("theirs"));
    certs::generate(&ours, &["rank".into()]).unwrap();
    certs::generate(&theirs, &["rank".into()]).unwrap();
    let mut directory = DirectoryConfig::new(loopback());
    directory.security = SecurityChoice::TlsDir(ours.clone());
    directory.peer_timeout = PEER_TIMEOUT;
    let directory = DirectoryServer::start(directory).unwrap();
    let with = |name: &str, dir: &PathBuf| {
        let mut config = config(name, &directory);
        config.security = SecurityChoice::TlsDir(dir.clone());
        config.transport = TransportChoice::Only(TransportKind::Tcp);
        config.data_tls = Some(true);
        config
    };
    let a = Engine::start(with("rank-a", &ours), 8);
    let b = Engine::start(with("rank-b", &ours), 8);
    a.fill(0..8, 1);
    for (block, outcome) in b.load(0..8, 1).into_iter().enumerate() {
        assert_eq!(outcome, Ok(BlockOk::Loaded { transport: TransportKind::Tcp, local: false }));
        let mut bytes = vec![0; b.object_bytes];
        b.place(block).read_object(&mut bytes).unwrap();
        assert!(bytes == content(block, 1, b.object_bytes), "block {block}");
    }
    // The certificate is for names that begin with "rank": another name is refused before anybody is asked.
    match Node::start(with("other", &ours)) {
        Err(StartError::Security(reason)) => assert!(reason.contains("kvfabric certs"), "{reason}"),
        other => panic!("{other:?}"),
    }
    // Another authority's certificates do not get in.
    let mut stranger = with("rank-c", &theirs);
    stranger.start_timeout = std::time::Duration::from_secs(2);
    match Node::start(stranger) {
        Err(StartError::DirectoryUnreachable { reason, .. }) => assert!(!reason.is_empty()),
        other => panic!("{other:?}"),
    }
    assert!(b.node.lookup(&b.ns, &[common::key(0)], DEADLINE).hits[0]);
    drop((a, b));
    directory.close();
    for dir in [ours, theirs] {
        let _ = std::fs::remove_dir_all(dir);
    }
}
