//! Two ranks and a directory in one process: the main path, over each transport.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // A test file.

use std::net::SocketAddr;
use std::time::Duration;

use kvfabric_core::load::LoadError;
use kvfabric_core::{LayoutId, TransportKind};
use kvfabric_memory::{Region, ScatterList};
use kvfabric_node::{
    BlockError, BlockOk, DirectoryConfig, DirectoryServer, GroupLayout, LoadItem, Namespace, NamespaceSpec,
    Node, NodeConfig, StoreItem, TransportChoice,
};

const OBJECT_BYTES: usize = 64 << 10;
const PIECES: usize = 16;
const BLOCKS: usize = 100;
const DEADLINE: Duration = Duration::from_secs(10);

fn directory() -> DirectoryServer {
    let mut config = DirectoryConfig::new(SocketAddr::from(([127, 0, 0, 1], 0)));
    config.peer_timeout = Duration::from_secs(5);
    DirectoryServer::start(config).unwrap()
}

fn node(name: &str, directory: &DirectoryServer, transport: TransportChoice) -> Node {
    let mut config = NodeConfig::new(name, directory.local_addr().to_string(), 64 << 20);
    config.transport = transport;
    config.peer_timeout = Duration::from_secs(5);
    Node::start(config).unwrap()
}

fn open(node: &Node) -> Namespace {
    node.open_namespace(NamespaceSpec {
        name: "ns".into(),
        key_salt: b"weights".to_vec(),
        groups: vec![GroupLayout { group_id: 0, layout: LayoutId(7), object_bytes: OBJECT_BYTES as u64 }],
    })
    .unwrap()
}

fn key(block: usize) -> String {
    format!("umbp:vllm:v1:ns:tp0:pcp0:dcp0:pp0:g0:{block:064x}")
}

/// The pieces of a block lie apart, as the layers of a model do.
fn pieces(region: &Region, block: usize) -> ScatterList {
    let piece = OBJECT_BYTES / PIECES;
    let mut list = ScatterList::with_capacity(PIECES);
    for index in 0..PIECES {
        list.push(region, (index * BLOCKS + block) * piece, piece).unwrap();
    }
    list
}

fn content(block: usize, version: u8) -> Vec<u8> {
    (0..OBJECT_BYTES)
        .map(|at| (block as u8).wrapping_mul(31) ^ (at as u8) ^ ((at >> 8) as u8) ^ version)
        .collect()
}

fn store(node: &Node, ns: &Namespace, region: &Region, version: u8) -> Vec<Result<BlockOk, BlockError>> {
    for block in 0..BLOCKS {
        pieces(region, block).write_object(&content(block, version)).unwrap();
    }
    let items = (0..BLOCKS)
        .map(|block| StoreItem { key: key(block), source: pieces(region, block), parent_block_hash: None })
        .collect();
    let job = node.store(ns, items, DEADLINE).unwrap();
    job.wait(DEADLINE * 2).unwrap().outcomes.clone()
}

fn load(node: &Node, ns: &Namespace, region: &Region) -> Vec<Result<BlockOk, BlockError>> {
    region.fill(0, region.length_bytes(), 0xEE).unwrap();
    let items =
        (0..BLOCKS).map(|block| LoadItem { key: key(block), destination: pieces(region, block) }).collect();
    let job = node.load(ns, items, DEADLINE).unwrap();
    job.wait(DEADLINE * 2).unwrap().outcomes.clone()
}

fn check(region: &Region, block: usize, version: u8) {
    let mut bytes = vec![0; OBJECT_BYTES];
    pieces(region, block).read_object(&mut bytes).unwrap();
    assert!(bytes == content(block, version), "block {block} has wrong bytes");
}

fn round_trip(kind: TransportKind) {
    let directory = directory();
    let a = node("a", &directory, TransportChoice::Only(kind));
    let b = node("b", &directory, TransportChoice::Only(kind));
    let (ns_a, ns_b) = (open(&a), open(&b));
    let memory = Region::allocate(BLOCKS * OBJECT_BYTES).unwrap();
    let target = Region::allocate(BLOCKS * OBJECT_BYTES).unwrap();
    a.register_buffer(&memory).unwrap();
    b.register_buffer(&target).unwrap();
    assert!(store(&a, &ns_a, &memory, 0).iter().all(|outcome| *outcome == Ok(BlockOk::Stored)));
    assert!(a.flush(DEADLINE));
    let keys: Vec<String> = (0..BLOCKS + 3).map(key).collect();
    let answer = b.lookup(&ns_b, &keys, DEADLINE);
    assert!(answer.complete);
    assert_eq!(answer.prefix_hits(), BLOCKS);
    for (block, outcome) in load(&b, &ns_b, &target).iter().enumerate() {
        assert_eq!(*outcome, Ok(BlockOk::Loaded { transport: kind, local: false }), "block {block}");
        check(&target, block, 0);
    }
    // Stored again: cheap, and nothing changes.
    assert!(store(&a, &ns_a, &memory, 0).iter().all(|outcome| *outcome == Ok(BlockOk::AlreadyResident)));
    // Evicted under the reader's feet: what is loaded is right, the rest is a miss.
    assert_eq!(a.evict(&ns_a, &keys[..BLOCKS / 2]), BLOCKS / 2);
    for (block, outcome) in load(&b, &ns_b, &target).iter().enumerate() {
        match outcome {
            Ok(_) => check(&target, block, 0),
            Err(error) => {
                assert!(block < BLOCKS / 2, "block {block}: {error}");
                assert!(error.is_miss(), "block {block}: {error}");
            }
        }
    }
    assert_eq!(a.take_evicted_keys().len(), BLOCKS / 2);
    // A rank's own blocks come from its own pool.
    for outcome in &load(&a, &ns_a, &memory)[BLOCKS / 2..] {
        assert_eq!(*outcome, Ok(BlockOk::Loaded { transport: TransportKind::Shm, local: true }));
    }
    // Cleared: nobody finds anything.
    assert!(b.clear(&ns_b, DEADLINE));
    assert_eq!(b.lookup(&ns_b, &keys, DEADLINE).prefix_hits(), 0);
    for outcome in load(&b, &ns_b, &target) {
        assert_eq!(outcome, Err(BlockError::Load(LoadError::NotFound)));
    }
    assert_eq!(a.stats().pool_objects, 0);
    // And stored anew with other bytes.
    assert!(store(&a, &ns_a, &memory, 1).iter().all(|outcome| *outcome == Ok(BlockOk::Stored)));
    assert!(a.flush(DEADLINE));
    assert!(load(&b, &ns_b, &target).iter().all(Result::is_ok));
    (0..BLOCKS).for_each(|block| check(&target, block, 1));
    let stats = b.stats();
    assert_eq!((stats.tag_mismatches, stats.checksum_mismatches), (0, 0));
    assert_eq!(b.routes().len(), 1);
}

#[test]
fn blocks_travel_over_shm() {
    round_trip(TransportKind::Shm);
}

#[test]
fn blocks_travel_over_tcp() {
    round_trip(TransportKind::Tcp);
}
