//! What the tests of whole nodes share: a directory and ranks in one process, and blocks whose bytes are derived from key
//! and put.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    dead_code,
    unreachable_pub,
    clippy::expect_used
)] // Test helpers; not every test uses all.

use std::net::SocketAddr;
use std::time::Duration;

use kvfabric_core::LayoutId;
use kvfabric_memory::{Region, ScatterList};
use kvfabric_node::{
    BlockError, BlockOk, DirectoryConfig, DirectoryServer, GroupLayout, LoadItem, Namespace, NamespaceSpec,
    Node, NodeConfig, StoreItem,
};

pub const OBJECT_BYTES: usize = 16 << 10;
pub const DEADLINE: Duration = Duration::from_secs(20);
/// A busy machine must not look like a dead peer.
pub const PEER_TIMEOUT: Duration = Duration::from_secs(10);

pub type Outcome = Result<BlockOk, BlockError>;

pub fn loopback() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

pub fn directory_at(listen: SocketAddr) -> DirectoryServer {
    let mut config = DirectoryConfig::new(listen);
    config.peer_timeout = PEER_TIMEOUT;
    DirectoryServer::start(config).unwrap()
}

pub fn directory() -> DirectoryServer {
    directory_at(loopback())
}

pub fn config(name: &str, directory: &DirectoryServer) -> NodeConfig {
    let mut config = NodeConfig::new(name, directory.local_addr().to_string(), 16 << 20);
    config.peer_timeout = PEER_TIMEOUT;
    config.start_timeout = Duration::from_secs(20);
    config.extent_bytes = 1 << 20;
    config
}

pub fn spec(object_bytes: u64) -> NamespaceSpec {
    NamespaceSpec {
        name: "ns".into(),
        key_salt: b"weights".to_vec(),
        groups: vec![GroupLayout { group_id: 0, layout: LayoutId(7), object_bytes }],
    }
}

pub fn key(block: usize) -> String {
    key_in("ns", 0, block)
}

pub fn key_in(namespace: &str, group: u32, block: usize) -> String {
    format!("umbp:vllm:v1:{namespace}:tp0:pcp0:dcp0:pp0:g{group}:{block:016x}")
}

/// Bytes of a put of a block: every eight of them depend on block, put and place.
pub fn content(block: usize, put: u64, bytes: usize) -> Vec<u8> {
    let word = |at: usize| {
        let mixed = (block as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
            ^ put.wrapping_mul(0xC2B2_AE3D_27D4_EB4F)
            ^ (at as u64).wrapping_mul(0x1656_67B1_9E37_79F9);
        (mixed ^ (mixed >> 29)).to_le_bytes()
    };
    (0..bytes.div_ceil(8)).flat_map(word).take(bytes).collect()
}

/// A rank with a namespace and registered memory for some blocks.
pub struct Engine {
    pub node: Node,
    pub ns: Namespace,
    pub memory: Region,
    pub object_bytes: usize,
}

impl Engine {
    pub fn start(config: NodeConfig, blocks: usize) -> Self {
        Self::with(config, blocks, spec(OBJECT_BYTES as u64))
    }

    pub fn with(config: NodeConfig, blocks: usize, spec: NamespaceSpec) -> Self {
        let object_bytes = spec.groups[0].object_bytes as usize;
        let node = Node::start(config).unwrap();
        let ns = node.open_namespace(spec).unwrap();
        let memory = Region::allocate(blocks * object_bytes).unwrap();
        node.register_buffer(&memory).unwrap();
        Self { node, ns, memory, object_bytes }
    }

    pub fn place(&self, block: usize) -> ScatterList {
        let mut list = ScatterList::with_capacity(2);
        let half = self.object_bytes / 2;
        list.push(&self.memory, block * self.object_bytes, half).unwrap();
        list.push(&self.memory, block * self.object_bytes + half, self.object_bytes - half).unwrap();
        list
    }

    pub fn store_item(&self, block: usize, put: u64) -> StoreItem {
        self.place(block).write_object(&content(block, put, self.object_bytes)).unwrap();
        StoreItem { key: key(block), source: self.place(block), parent_block_hash: None }
    }

    pub fn store_items(&self, items: Vec<StoreItem>) -> Vec<Outcome> {
        let job = self.node.store(&self.ns, items, DEADLINE).unwrap();
        let outcomes = job.wait(DEADLINE * 2).expect("the store ends").outcomes.clone();
        assert!(self.node.flush(DEADLINE), "the directory takes the publications");
        outcomes
    }

    pub fn store(&self, blocks: std::ops::Range<usize>, put: u64) -> Vec<Outcome> {
        self.store_items(blocks.map(|block| self.store_item(block, put)).collect())
    }

    /// Stores blocks, all of which must be stored.
    pub fn fill(&self, blocks: std::ops::Range<usize>, put: u64) {
        for (block, outcome) in blocks.clone().zip(self.store(blocks, put)) {
            assert_eq!(outcome, Ok(BlockOk::Stored), "block {block}");
        }
    }

    pub fn load_items(&self, items: Vec<LoadItem>) -> Vec<Outcome> {
        let job = self.node.load(&self.ns, items, DEADLINE).unwrap();
        job.wait(DEADLINE * 2).expect("the load ends").outcomes.clone()
    }

    /// Loads blocks into their places, over poison; whatever is reported as loaded must be a put's bytes.
    pub fn load(&self, blocks: std::ops::Range<usize>, put: u64) -> Vec<Outcome> {
        for block in blocks.clone() {
            self.place(block).write_object(&vec![0xEE; self.object_bytes]).unwrap();
        }
        let items = blocks
            .clone()
            .map(|block| LoadItem { key: key(block), destination: self.place(block) })
            .collect();
        let outcomes = self.load_items(items);
        for (block, outcome) in blocks.zip(&outcomes) {
            if outcome.is_ok() {
                self.check(block, block, put);
            }
        }
        outcomes
    }

    /// Loads blocks, all of which must be there.
    pub fn check_all(&self, blocks: std::ops::Range<usize>, put: u64) {
        for (block, outcome) in blocks.clone().zip(self.load(blocks, put)) {
            assert!(outcome.is_ok(), "block {block}: {outcome:?}");
        }
    }

    /// The bytes at a place must be those of a block.
    pub fn check(&self, place: usize, block: usize, put: u64) {
        let mut bytes = vec![0; self.object_bytes];
        self.place(place).read_object(&mut bytes).unwrap();
        assert!(bytes == content(block, put, self.object_bytes), "block {block} has wrong bytes");
    }

    pub fn hits(&self, blocks: std::ops::Range<usize>) -> usize {
        let keys: Vec<String> = blocks.map(key).collect();
        let answer = self.node.lookup(&self.ns, &keys, DEADLINE);
        assert!(answer.complete, "the directory answers");
        answer.hits.iter().filter(|hit| **hit).count()
    }
}

/// Polls until something holds.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = std::time::Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(std::time::Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
