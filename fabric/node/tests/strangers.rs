//! Ranks that do not fit together: other layouts, other weights, other secrets; IPv6; full pools.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // A test file.

mod common;

use std::net::SocketAddr;
use std::time::Duration;

use common::{
    config, content, directory, directory_at, eventually, key, spec, Engine, DEADLINE, OBJECT_BYTES,
};
use kvfabric_core::load::LoadError;
use kvfabric_core::owner::PutError;
use kvfabric_core::{LayoutId, TransportKind};
use kvfabric_node::{BlockError, BlockOk, GroupLayout, LoadItem, NamespaceSpec, StoreItem, TransportChoice};

const BOTH: [TransportKind; 2] = [TransportKind::Shm, TransportKind::Tcp];

/// The same key and size with another layout: the tag differs, so the bytes are refused however they look.
#[test]
fn blocks_of_another_layout_are_never_accepted() {
    for kind in BOTH {
        let directory = directory();
        let only = |name: &str| {
            let mut config = config(name, &directory);
            config.transport = TransportChoice::Only(kind);
            config
        };
        let a = Engine::start(only("a"), 8);
        let other = NamespaceSpec {
            groups: vec![GroupLayout { group_id: 0, layout: LayoutId(8), object_bytes: OBJECT_BYTES as u64 }],
            ..spec(0)
        };
        let b = Engine::with(only("b"), 8, other);
        a.fill(0..4, 1);
        for outcome in b.load(0..4, 1) {
            let error = outcome.unwrap_err();
            assert_eq!(error, BlockError::Load(LoadError::TagMismatch), "{kind}");
            assert!(!error.is_retryable() && !error.is_local());
        }
        // An alarm, rule X2.
        assert_eq!(b.node.stats().tag_mismatches, 4);
        assert_eq!(a.node.stats().pool_objects, 4);
        a.check_all(0..4, 1);
    }
}

/// The same key with another size: the owner refuses, or the reader does.
#[test]
fn blocks_of_another_size_are_never_accepted() {
    for kind in BOTH {
        for object_bytes in [OBJECT_BYTES as u64 / 2, OBJECT_BYTES as u64 * 2, 64, 8 << 20] {
            let directory = directory();
            let only = |name: &str| {
                let mut config = config(name, &directory);
                config.transport = TransportChoice::Only(kind);
                config
            };
            let a = Engine::start(only("a"), 4);
            let b = Engine::with(only("b"), 4, spec(object_bytes));
            a.fill(0..4, 1);
            for outcome in b.load(0..4, 1) {
                let error = outcome.unwrap_err();
                assert!(matches!(error, BlockError::Load(_)), "{kind}, {object_bytes}: {error}");
            }
            assert_eq!(b.node.stats().loads_ok, 0);
            a.check_all(0..4, 1);
        }
    }
}

/// Other weights or another operator's secret: nothing is found, nothing can be asked for.
#[test]
fn other_salt_or_secret_never_hits() {
    let directory = directory();
    let a = Engine::start(config("a", &directory), 4);
    a.fill(0..4, 1);
    let salted = NamespaceSpec { key_salt: b"other weights".to_vec(), ..spec(OBJECT_BYTES as u64) };
    let b = Engine::with(config("b", &directory), 4, salted);
    let mut secret = config("c", &directory);
    secret.ns_secret = b"secret".to_vec().into();
    let c = Engine::start(secret, 4);
    for stranger in [&b, &c] {
        assert_eq!(stranger.hits(0..4), 0);
        for outcome in stranger.load(0..4, 1) {
            assert_eq!(outcome, Err(BlockError::Load(LoadError::NotFound)));
        }
        // Its own blocks under the same keys are apart.
        stranger.fill(0..2, 2);
        stranger.check_all(0..2, 2);
        assert_eq!(stranger.node.stats().tag_mismatches, 0);
    }
    a.check_all(0..4, 1);
    assert_eq!(directory.stats().core.keys, 8);
    // Clearing one does not touch the others.
    assert!(b.node.clear(&b.ns, DEADLINE));
    assert_eq!((a.hits(0..4), b.hits(0..4), c.hits(0..4)), (4, 0, 2));
}

/// Directory and ranks on [::1], by both transports.
#[test]
fn everything_works_over_ipv6() {
    let v6: SocketAddr = "[::1]:0".parse().unwrap();
    let directory = directory_at(v6);
    assert!(directory.local_addr().is_ipv6());
    let start = |name: &str, kind: TransportKind| {
        let mut config = config(name, &directory);
        config.listen = v6;
        config.transport = TransportChoice::Only(kind);
        Engine::start(config, 8)
    };
    for kind in BOTH {
        let (a, b) = (start("a", kind), start("b", kind));
        a.fill(0..8, 1);
        assert_eq!(b.hits(0..8), 8);
        for outcome in b.load(0..8, 1) {
            assert_eq!(outcome, Ok(BlockOk::Loaded { transport: kind, local: false }));
        }
    }
    // A host name of the address family.
    let mut config = config("named", &directory);
    config.directory =
        kvfabric_node::DirectoryChoice::Remote(format!("localhost:{}", directory.local_addr().port()));
    config.listen = v6;
    if std::net::ToSocketAddrs::to_socket_addrs(&("localhost", 1)).unwrap().any(|found| found.is_ipv6()) {
        assert!(Engine::start(config, 1).node.directory_connected());
    }
}

/// A rank of one family and a directory of the other.
#[test]
fn address_families_mix_or_say_so() {
    let directory = directory();
    let start = |name: &str, listen: &str| {
        let mut config = config(name, &directory);
        config.listen = listen.parse().unwrap();
        config.start_timeout = Duration::from_secs(3);
        config.transport = TransportChoice::Only(TransportKind::Tcp);
        kvfabric_node::Node::start(config)
    };
    // A rank on [::1] cannot reach a directory on 127.0.0.1 from its only socket: an error that names it, or it works.
    match start("six", "[::1]:0") {
        Ok(node) => assert!(node.directory_connected()),
        Err(error) => {
            println!("{error}");
            assert!(error.to_string().contains(&directory.local_addr().to_string()), "{error}");
        }
    }
}

/// A full pool goes on by evicting; its capacity is never exceeded, and what is found is right.
#[test]
fn full_pool_goes_on_by_evicting() {
    let directory = directory();
    let mut small = config("a", &directory);
    small.pool_bytes = 16 * OBJECT_BYTES as u64;
    small.extent_bytes = 8 * OBJECT_BYTES as u64;
    let a = Engine::start(small, 64);
    let b = Engine::start(config("b", &directory), 64);
    for put in 0..8 {
        for start in (0..64).step_by(8) {
            for outcome in a.store(start..start + 8, 1) {
                assert!(outcome.is_ok(), "put {put}: {outcome:?}");
            }
        }
        let stats = a.node.stats();
        assert!(stats.pool_used_bytes <= stats.pool_capacity_bytes, "{stats:?}");
        assert!(stats.pool_objects <= 16, "{stats:?}");
        let found = b.load(0..64, 1).iter().filter(|outcome| outcome.is_ok()).count();
        assert!(found > 0 && found <= 16, "{found} found");
    }
    let stats = a.node.stats();
    assert!(stats.evictions > 0 && !a.node.take_evicted_keys().is_empty());
    assert_eq!(b.node.stats().tag_mismatches + b.node.stats().checksum_mismatches, 0);
    // What was evicted is a miss for lookups soon.
    eventually("evicted keys are misses", || b.hits(0..64) <= 16);
}

/// More blocks at once than the pool has slots: each is stored, or fails as a full pool, and may be stored again later.
#[test]
fn more_blocks_at_once_than_the_pool_has_slots() {
    const BLOCKS: usize = 200;
    let directory = directory();
    let mut small = config("a", &directory);
    small.pool_bytes = 16 * OBJECT_BYTES as u64;
    small.extent_bytes = 8 * OBJECT_BYTES as u64;
    let a = Engine::start(small, BLOCKS);
    let outcomes = a.store(0..BLOCKS, 1);
    let mut full = 0;
    for outcome in &outcomes {
        match outcome {
            Ok(BlockOk::Stored) => {}
            Err(error @ BlockError::Put(PutError::PoolFull)) => {
                assert!(error.is_retryable() && error.is_local());
                assert!(error.to_string().contains("--pool-bytes"), "{error}");
                full += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    println!("{full} of {BLOCKS} found the pool full");
    assert!(full < BLOCKS);
    let stats = a.node.stats();
    assert!(stats.pool_objects <= 16 && stats.pool_objects > 0, "{stats:?}");
    for block in 0..BLOCKS {
        assert!(a.store(block..block + 1, 1)[0].is_ok(), "one at a time there is always room");
        a.check_all(block..block + 1, 1);
    }
}

/// The pool's extents are cut for small objects, and a larger one fits into none of them: that alone is a full pool.
#[test]
fn pool_is_full_only_when_nothing_can_make_room() {
    let directory = directory();
    let mut small = config("a", &directory);
    small.pool_bytes = 16 * OBJECT_BYTES as u64;
    small.extent_bytes = 8 * OBJECT_BYTES as u64;
    let wide_bytes = 12 * OBJECT_BYTES as u64;
    let wide = GroupLayout { group_id: 1, layout: LayoutId(8), object_bytes: wide_bytes };
    let mut namespace = spec(OBJECT_BYTES as u64);
    namespace.groups.push(wide);
    let a = Engine::with(small, 32, namespace);
    a.fill(0..16, 1);
    let mut source = kvfabric_memory::ScatterList::default();
    source.push(&a.memory, 0, wide_bytes as usize).unwrap();
    let item = StoreItem { key: common::key_in("ns", 1, 0), source, parent_block_hash: None };
    let error = a.store_items(vec![item])[0].clone().unwrap_err();
    assert_eq!(error, BlockError::Put(PutError::PoolFull));
    assert!(error.is_local() && error.to_string().contains("--pool-bytes"), "{error}");
    // The blocks that are there stay, and others of their size still replace them.
    a.check_all(0..16, 1);
    a.fill(16..32, 1);
    a.check_all(16..32, 1);
}

/// Two groups of very different sizes share one pool: each starves the other only through eviction.
#[test]
fn groups_of_different_sizes_share_a_pool() {
    let directory = directory();
    let mut small = config("a", &directory);
    small.pool_bytes = 4 << 20;
    small.extent_bytes = 256 << 10;
    let groups = vec![
        GroupLayout { group_id: 0, layout: LayoutId(7), object_bytes: OBJECT_BYTES as u64 },
        GroupLayout { group_id: 1, layout: LayoutId(9), object_bytes: 1000 },
        GroupLayout { group_id: 2, layout: LayoutId(10), object_bytes: 1 << 20 },
    ];
    let a = Engine::with(small, 64, NamespaceSpec { groups: groups.clone(), ..spec(0) });
    for round in 0..3 {
        for group in &groups {
            let bytes = group.object_bytes as usize;
            let count = if bytes > OBJECT_BYTES { 3 } else { 64 };
            for block in 0..count {
                let key = common::key_in("ns", group.group_id, block);
                let mut place = kvfabric_memory::ScatterList::default();
                // The last place, or several of them for a large block.
                place.push(&a.memory, 0, bytes.min(a.memory.length_bytes())).unwrap();
                place.write_object(&content(block, u64::from(group.group_id), bytes)).unwrap();
                let item = StoreItem { key: key.clone(), source: place.clone(), parent_block_hash: None };
                assert!(a.store_items(vec![item])[0].is_ok(), "round {round}, {group:?}, block {block}");
                place.write_object(&vec![0xEE; bytes]).unwrap();
                assert!(a.load_items(vec![LoadItem { key, destination: place.clone() }])[0].is_ok());
                let mut found = vec![0; bytes];
                place.read_object(&mut found).unwrap();
                assert!(found == content(block, u64::from(group.group_id), bytes), "wrong bytes");
            }
            let stats = a.node.stats();
            assert!(stats.pool_backed_bytes <= stats.pool_capacity_bytes, "{stats:?}");
        }
    }
    assert_eq!(a.node.lookup(&a.ns, &[key(63)], DEADLINE).hits.len(), 1);
}
