//! What an engine may get wrong: each mistake is a typed error that says what to do, and hurts nothing else.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)] // A test file.

mod common;

use std::time::Duration;

use common::{content, directory, key, key_in, spec, Engine, DEADLINE, OBJECT_BYTES};
use kvfabric_core::limits::{JOB_BLOCKS_MAX, OBJECT_BYTES_MAX};
use kvfabric_core::load::LoadError;
use kvfabric_core::spans::SpanConflict;
use kvfabric_core::LayoutId;
use kvfabric_memory::{Region, ScatterList};
use kvfabric_node::{
    BlockError, BlockOk, BufferError, GroupLayout, LoadItem, NamespaceError, NamespaceSpec, StoreItem,
    SubmitError,
};

/// Sizes around which narrow integers break.
const EDGES: [u64; 6] = [(1 << 31) - 1, 1 << 31, (1 << 31) + 1, (1 << 32) - 1, 1 << 32, (1 << 32) + 1];

#[test]
fn malformed_keys_fail_alone() {
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), 24);
    let long_namespace = "n".repeat(5000);
    let bad = [
        String::new(),
        "x".into(),
        "umbp:vllm:v1:".into(),
        "umbp:vllm:v2:ns:tp0:pcp0:dcp0:pp0:g0:00".into(),
        "umbp:vllm:v1:ns:tp0:pcp0:dcp0:pp0:g0:".into(),
        "umbp:vllm:v1:ns:tp0:pcp0:dcp0:pp0:g0:0".into(),
        "umbp:vllm:v1:ns:tp0:pcp0:dcp0:pp0:g0:0G".into(),
        "umbp:vllm:v1:ns:tp0:pcp0:dcp0:pp0:g0:AB".into(),
        "umbp:vllm:v1:ns:tp-1:pcp0:dcp0:pp0:g0:00".into(),
        "umbp:vllm:v1:ns:tp01:pcp0:dcp0:pp0:g0:00".into(),
        "umbp:vllm:v1:ns:tp4294967296:pcp0:dcp0:pp0:g0:00".into(),
        "umbp:vllm:v1:ns:tp0:dcp0:pcp0:pp0:g0:00".into(),
        format!("umbp:vllm:v1:ns:tp0:pcp0:dcp0:pp0:g0:{}", "00".repeat(65)),
        key_in(&long_namespace, 0, 0),
        "umbp:vllm:v1:ns:tp0:pcp0:dcp0:pp0:g0:00\0".into(),
        "\u{1F980}".repeat(300),
    ];
    let mut items: Vec<StoreItem> = (0..bad.len()).map(|block| a.store_item(block, 1)).collect();
    let mut loads: Vec<LoadItem> =
        (0..bad.len()).map(|block| LoadItem { key: key(block), destination: a.place(block) }).collect();
    for ((item, load), bad) in items.iter_mut().zip(&mut loads).zip(&bad) {
        item.key.clone_from(bad);
        load.key.clone_from(bad);
    }
    items.push(a.store_item(20, 1));
    let outcomes = a.store_items(items);
    loads.push(LoadItem { key: key(20), destination: a.place(21) });
    let loaded = a.load_items(loads);
    for (bad, outcome) in bad.iter().zip(outcomes.iter().chain(&loaded)) {
        match outcome {
            Err(error @ BlockError::BadKey { key, reason }) => {
                assert!(!reason.is_empty() && key.len() < 1000, "{error}");
                assert!(error.is_local() && !error.is_retryable() && !error.is_miss());
            }
            other => panic!("{bad:?} gave {other:?}"),
        }
    }
    // The sound block beside them is unharmed.
    assert_eq!(outcomes.last(), Some(&Ok(BlockOk::Stored)));
    assert!(matches!(loaded.last(), Some(Ok(BlockOk::Loaded { .. }))));
    a.check(21, 20, 1);
    // In lookups and evictions they are misses.
    let answer = a.node.lookup(&a.ns, &bad, DEADLINE);
    assert!(answer.complete && answer.hits.iter().all(|hit| !hit));
    assert_eq!(a.node.evict(&a.ns, &bad), 0);
}

#[test]
fn keys_of_other_namespaces_and_groups_are_refused() {
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), 4);
    let item = |key: String, block| StoreItem { key, ..a.store_item(block, 1) };
    let outcomes = a.store_items(vec![
        item(key_in("other", 0, 0), 0),
        item(key_in("ns", 1, 1), 1),
        item(key_in("ns", u32::MAX, 2), 2),
    ]);
    let expected = BlockError::OtherNamespace { expected: "ns".into(), found: "other".into() };
    assert_eq!(outcomes[0], Err(expected));
    assert_eq!(outcomes[1], Err(BlockError::UnknownGroup { group_id: 1 }));
    assert_eq!(outcomes[2], Err(BlockError::UnknownGroup { group_id: u32::MAX }));
    assert!(!outcomes.iter().flatten().any(|_| true));
}

#[test]
fn unknown_keys_are_misses() {
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), 4);
    assert_eq!(a.hits(0..4), 0);
    for outcome in a.load(0..4, 1) {
        let error = outcome.unwrap_err();
        assert_eq!(error, BlockError::Load(LoadError::NotFound));
        assert!(error.is_miss());
    }
    // Nothing was written.
    let mut bytes = vec![0; OBJECT_BYTES];
    a.place(0).read_object(&mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0xEE));
    assert_eq!(a.node.evict(&a.ns, &[key(0)]), 0);
}

#[test]
fn wrong_sizes_are_refused_for_that_block_alone() {
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), 4);
    a.fill(3..4, 1);
    let sizes = [0, 1, OBJECT_BYTES - 1, OBJECT_BYTES + 1, 2 * OBJECT_BYTES];
    let part = |bytes: usize| {
        let mut list = ScatterList::default();
        if bytes > 0 {
            list.push(&a.memory, 0, bytes).unwrap();
        }
        list
    };
    for bytes in sizes {
        let error = BlockError::WrongSize { expected_bytes: OBJECT_BYTES as u64, found_bytes: bytes as u64 };
        assert!(error.to_string().contains(&bytes.to_string()));
        let store = StoreItem { key: key(0), source: part(bytes), parent_block_hash: None };
        assert_eq!(a.store_items(vec![store]), [Err(error.clone())]);
        let outcomes = a.load_items(vec![
            LoadItem { key: key(3), destination: part(bytes) },
            LoadItem { key: key(3), destination: a.place(2) },
        ]);
        assert_eq!(outcomes[0], Err(error));
        assert!(outcomes[1].is_ok());
        a.check(2, 3, 1);
    }
}

/// Ranges with lengths and offsets around 2^31 and 2^32: sums are exact, and bounds hold.
#[test]
fn lengths_around_the_edges_of_integers_are_exact() {
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), 2);
    // Never touched, so it costs address space only.
    let huge = Region::allocate((1 << 32) + 4096).unwrap();
    a.node.register_buffer(&huge).unwrap();
    for bytes in EDGES {
        let mut list = ScatterList::default();
        list.push(&huge, 0, bytes as usize).unwrap();
        assert_eq!(list.total_bytes(), bytes);
        let resolved = a.node.resolve([(huge.address() as u64, bytes)].into_iter()).unwrap();
        assert_eq!(resolved.total_bytes(), bytes);
        let expected = BlockError::WrongSize { expected_bytes: OBJECT_BYTES as u64, found_bytes: bytes };
        let store = StoreItem { key: key(0), source: list.clone(), parent_block_hash: None };
        assert_eq!(a.store_items(vec![store]), [Err(expected.clone())]);
        assert_eq!(a.load_items(vec![LoadItem { key: key(0), destination: list }]), [Err(expected)]);
        // Out of bounds by the offset, and by offset and length together.
        let mut list = ScatterList::default();
        assert!(list.push(&huge, bytes as usize + 4096, (1 << 32) + 1).is_err());
        assert!(list.push(&huge, usize::MAX - 1, bytes as usize).is_err());
        assert!(list.push(&a.memory, 0, bytes as usize).is_err());
        let beyond = huge.address() as u64 + huge.length_bytes() as u64 - bytes + 1;
        let outside = a.node.resolve([(beyond, bytes)].into_iter());
        assert_eq!(outside.unwrap_err(), BlockError::NotRegistered);
    }
    // A block at the far end of a large region works.
    let mut far = ScatterList::default();
    far.push(&huge, (1 << 32) + 4096 - OBJECT_BYTES, OBJECT_BYTES).unwrap();
    far.write_object(&content(1, 5, OBJECT_BYTES)).unwrap();
    let store = StoreItem { key: key(1), source: far, parent_block_hash: None };
    assert_eq!(a.store_items(vec![store]), [Ok(BlockOk::Stored)]);
    a.check_all(1..2, 5);
    for range in [(0, 1), (u64::MAX, 1), (u64::MAX - 1, u64::MAX), (huge.address() as u64, u64::MAX)] {
        assert_eq!(a.node.resolve([range].into_iter()).unwrap_err(), BlockError::NotRegistered);
    }
}

#[test]
fn object_sizes_around_the_edges_of_integers() {
    let directory = directory();
    let mut config = common::config("a", &directory);
    // Capacity is a limit, not memory: the pool grows as it is filled.
    config.pool_bytes = 8 << 30;
    let a = Engine::start(config, 1);
    for (index, object_bytes) in EDGES.into_iter().enumerate() {
        let opened = a.node.open_namespace(NamespaceSpec {
            name: format!("edge-{index}"),
            key_salt: Vec::new(),
            groups: vec![GroupLayout { group_id: 0, layout: LayoutId(1), object_bytes }],
        });
        if object_bytes <= OBJECT_BYTES_MAX {
            assert_eq!(opened.unwrap().group(0).unwrap().object_bytes, object_bytes);
        } else {
            match opened.unwrap_err() {
                NamespaceError::BadObjectSize { object_bytes: found, reason, .. } => {
                    assert_eq!(found, object_bytes);
                    assert!(reason.contains("largest object"), "{reason}");
                }
                other => panic!("{other}"),
            }
        }
    }
    for (object_bytes, words) in [(0, "at least one byte"), ((8 << 30) + 1, "largest"), (u64::MAX, "largest")]
    {
        let error =
            a.node.open_namespace(NamespaceSpec { name: "bad".into(), ..spec(object_bytes) }).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn objects_as_large_as_the_pool_fit_and_larger_ones_are_refused() {
    let directory = directory();
    let mut config = common::config("a", &directory);
    config.pool_bytes = 1 << 20;
    config.extent_bytes = 64 << 10;
    let error = {
        let node = kvfabric_node::Node::start(config.clone()).unwrap();
        node.open_namespace(spec((1 << 20) + 1)).unwrap_err()
    };
    assert!(error.to_string().contains("--pool-bytes"), "{error}");
    let a = Engine::with(config, 2, spec(1 << 20));
    a.fill(0..1, 1);
    a.check_all(0..1, 1);
    // The next one takes the only place there is.
    a.fill(1..2, 2);
    a.check_all(1..2, 2);
    assert_eq!(a.hits(0..2), 1);
    assert_eq!(a.node.stats().pool_used_bytes, 1 << 20);
}

#[test]
fn namespaces_that_no_key_can_carry_are_refused() {
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), 1);
    for name in [String::new(), "n".repeat(5000)] {
        let error = a.node.open_namespace(NamespaceSpec { name, ..spec(64) }).unwrap_err();
        assert!(matches!(error, NamespaceError::BadName { .. }), "{error}");
    }
    let twice = GroupLayout { group_id: 3, layout: LayoutId(1), object_bytes: 64 };
    let error = a
        .node
        .open_namespace(NamespaceSpec {
            name: "twice".into(),
            key_salt: Vec::new(),
            groups: vec![twice, twice],
        })
        .unwrap_err();
    assert_eq!(error, NamespaceError::LayoutConflict { name: "twice".into(), group_id: 3 });
    // The open namespace with another layout under the same group.
    let error = a.node.open_namespace(spec(OBJECT_BYTES as u64 * 2)).unwrap_err();
    assert_eq!(error, NamespaceError::LayoutConflict { name: "ns".into(), group_id: 0 });
    // The same again is the same namespace.
    a.node.open_namespace(spec(OBJECT_BYTES as u64)).unwrap();
}

#[test]
fn unregistered_memory_is_refused() {
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), 2);
    a.fill(0..1, 1);
    let foreign = Region::allocate(OBJECT_BYTES).unwrap();
    let refused = [Err(BlockError::NotRegistered)];
    let store = |list| StoreItem { key: key(1), source: list, parent_block_hash: None };
    assert_eq!(a.store_items(vec![store(ScatterList::whole(&foreign))]), refused);
    let load = |list| LoadItem { key: key(0), destination: list };
    assert_eq!(a.load_items(vec![load(ScatterList::whole(&foreign))]), refused);
    // Partly registered is not registered.
    let mut mixed = ScatterList::default();
    mixed.push(&a.memory, 0, OBJECT_BYTES / 2).unwrap();
    mixed.push(&foreign, 0, OBJECT_BYTES / 2).unwrap();
    assert_eq!(a.load_items(vec![load(mixed)]), refused);
    assert_eq!(
        a.node.resolve([(foreign.address() as u64, 8)].into_iter()).unwrap_err(),
        BlockError::NotRegistered
    );
    // Registered, then no longer.
    a.node.register_buffer(&foreign).unwrap();
    assert!(a.load_items(vec![load(ScatterList::whole(&foreign))])[0].is_ok());
    a.node.deregister_buffer(&foreign).unwrap();
    assert_eq!(a.load_items(vec![load(ScatterList::whole(&foreign))]), refused);
    assert_eq!(a.node.deregister_buffer(&foreign), Err(BufferError::NotRegistered));
    assert!(BlockError::NotRegistered.to_string().contains("register_buffer"));
    // A range that begins in one buffer and ends in none.
    let end = a.memory.address() as u64 + a.memory.length_bytes() as u64;
    assert_eq!(a.node.resolve([(end - 8, 16)].into_iter()).unwrap_err(), BlockError::NotRegistered);
}

#[test]
fn buffers_are_registered_once() {
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), 2);
    a.node.register_buffer(&a.memory).unwrap();
    a.node.register_buffer(&a.memory.clone()).unwrap();
    assert!(a.node.deregister_buffer(&a.memory).is_ok());
    assert_eq!(a.node.deregister_buffer(&a.memory), Err(BufferError::NotRegistered));
    a.node.register_buffer(&a.memory).unwrap();
    a.fill(0..1, 1);
}

#[test]
fn overlapping_destinations_within_a_job_are_refused() {
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), 4);
    a.fill(0..3, 1);
    // Two blocks into one place, and a block that overlaps itself.
    let mut half = ScatterList::default();
    half.push(&a.memory, 3 * OBJECT_BYTES, OBJECT_BYTES / 2).unwrap();
    half.push(&a.memory, 3 * OBJECT_BYTES, OBJECT_BYTES / 2).unwrap();
    let outcomes = a.load_items(vec![
        LoadItem { key: key(0), destination: a.place(0) },
        LoadItem { key: key(1), destination: a.place(0) },
        LoadItem { key: key(2), destination: half },
        LoadItem { key: key(2), destination: a.place(2) },
    ]);
    assert!(outcomes[0].is_ok());
    for outcome in &outcomes[1..3] {
        let Err(error @ BlockError::Memory(SpanConflict::WithinJob { address })) = outcome else {
            panic!("{outcome:?}");
        };
        assert!(*address >= a.memory.address() as u64);
        assert!(error.to_string().contains("memory of its own") && !error.is_retryable());
    }
    assert!(outcomes[3].is_ok());
    a.check(0, 0, 1);
    a.check(2, 2, 1);
}

#[test]
fn memory_of_a_job_in_progress_is_refused_until_it_is_final() {
    const BLOCKS: usize = 512;
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), BLOCKS);
    a.fill(0..BLOCKS, 1);
    let all = || (0..BLOCKS).map(|block| LoadItem { key: key(block), destination: a.place(block) }).collect();
    // A load of 8 MiB is in progress for a while, mostly long enough for a second one and a store.
    let (mut loads, mut stores) = (0, 0);
    for _ in 0..200 {
        let first = a.node.load(&a.ns, all(), DEADLINE).unwrap();
        let load = vec![LoadItem { key: key(0), destination: a.place(BLOCKS - 1) }];
        let load = a.node.load(&a.ns, load, DEADLINE).unwrap();
        let store = StoreItem { key: key(BLOCKS), source: a.place(BLOCKS - 1), parent_block_hash: None };
        let store = a.node.store(&a.ns, vec![store], DEADLINE).unwrap();
        for (job, count) in [(load, &mut loads), (store, &mut stores)] {
            match &job.wait(DEADLINE).unwrap().outcomes[0] {
                Err(error @ BlockError::Memory(SpanConflict::WithJob { job: holder, address })) => {
                    assert_eq!(*holder, first.id());
                    assert!(*address >= a.memory.address() as u64);
                    assert!(error.is_retryable() && error.to_string().contains("wait for it"), "{error}");
                    *count += 1;
                }
                Ok(_) => {}
                Err(other) => panic!("{other}"),
            }
        }
        assert!(first.wait(DEADLINE).unwrap().is_complete());
        if loads > 0 && stores > 0 {
            break;
        }
    }
    assert!(loads > 0 && stores > 0, "no job met another: {loads} loads, {stores} stores");
    // Free again.
    assert_eq!(a.node.deregister_buffer(&a.memory), Ok(()));
}

#[test]
fn a_block_twice_in_one_store_is_stored_once() {
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), 4);
    let twice = |place: usize| {
        a.place(place).write_object(&content(0, 1, OBJECT_BYTES)).unwrap();
        StoreItem { key: key(0), source: a.place(place), parent_block_hash: None }
    };
    let mut outcomes = a.store_items(vec![twice(0), twice(1), twice(1)]);
    outcomes.sort_by_key(|outcome| *outcome != Ok(BlockOk::Stored));
    assert_eq!(outcomes, [Ok(BlockOk::Stored), Ok(BlockOk::AlreadyResident), Ok(BlockOk::AlreadyResident)]);
    assert_eq!(a.node.stats().pool_objects, 1);
    // The first put wins, rule P1: other bytes under the key change nothing.
    assert_eq!(a.store(0..1, 2), [Ok(BlockOk::AlreadyResident)]);
    a.check_all(0..1, 1);
    // A block twice in one load, into two places.
    let outcomes = a.load_items(vec![
        LoadItem { key: key(0), destination: a.place(2) },
        LoadItem { key: key(0), destination: a.place(3) },
    ]);
    assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
    a.check(2, 0, 1);
    a.check(3, 0, 1);
}

#[test]
fn empty_and_oversized_jobs() {
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), 1);
    assert!(a.store_items(Vec::new()).is_empty());
    assert!(a.load_items(Vec::new()).is_empty());
    let answer = a.node.lookup(&a.ns, &[] as &[String], DEADLINE);
    assert!(answer.complete && answer.hits.is_empty());
    let many: Vec<LoadItem> = (0..=JOB_BLOCKS_MAX)
        .map(|block| LoadItem { key: key(block), destination: ScatterList::default() })
        .collect();
    let error = a.node.load(&a.ns, many, DEADLINE).unwrap_err();
    assert_eq!(error, SubmitError::TooManyBlocks { blocks: JOB_BLOCKS_MAX + 1, limit: JOB_BLOCKS_MAX });
    assert!(error.to_string().contains("split it"));
}

#[test]
fn deadlines_of_nothing_and_of_ages() {
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), 2);
    a.fill(0..1, 1);
    let load = || vec![LoadItem { key: key(0), destination: a.place(1) }];
    let job = a.node.load(&a.ns, load(), Duration::ZERO).unwrap();
    let report = job.wait(DEADLINE).expect("final at once");
    assert!(matches!(report.outcomes[0], Err(BlockError::Load(LoadError::DeadlineExceeded)) | Ok(_)));
    for ages in [Duration::from_secs(u64::from(u32::MAX)), Duration::MAX] {
        let job = a.node.load(&a.ns, load(), ages).unwrap();
        assert!(job.wait(DEADLINE).expect("the load ends").is_complete());
        a.check(1, 0, 1);
        let job = a.node.store(&a.ns, vec![a.store_item(0, 1)], ages).unwrap();
        assert!(job.wait(DEADLINE).expect("the store ends").is_complete());
    }
    let answer = a.node.lookup(&a.ns, &[key(0)], Duration::ZERO);
    assert!(!answer.complete || answer.hits == [true]);
    assert_eq!(a.node.lookup(&a.ns, &[key(0)], Duration::MAX).hits, [true]);
    assert!(a.node.flush(Duration::MAX));
    assert!(a.node.clear(&a.ns, Duration::MAX));
}

#[test]
fn handles_of_another_node_are_refused() {
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), 1);
    let b = Engine::start(common::config("b", &directory), 1);
    a.fill(0..1, 1);
    let job = a.node.load(&b.ns, vec![LoadItem { key: key(0), destination: a.place(0) }], DEADLINE).unwrap();
    assert_eq!(job.wait(DEADLINE).unwrap().outcomes[0], Err(BlockError::ForeignNamespace));
    let job = a.node.store(&b.ns, vec![a.store_item(0, 2)], DEADLINE).unwrap();
    assert_eq!(job.wait(DEADLINE).unwrap().outcomes[0], Err(BlockError::ForeignNamespace));
    assert!(!a.node.lookup(&b.ns, &[key(0)], DEADLINE).complete);
    assert_eq!(a.node.evict(&b.ns, &[key(0)]), 0);
    // Numbers of namespaces are a node's own: another node's handle must not clear what happens to have its number.
    assert!(!a.node.clear(&b.ns, DEADLINE));
    a.check_all(0..1, 1);
    let job = a.node.load(&a.ns, vec![LoadItem { key: key(0), destination: b.place(0) }], DEADLINE).unwrap();
    assert_eq!(job.wait(DEADLINE).unwrap().outcomes[0], Err(BlockError::NotRegistered));
}

/// What a closed node is asked is an error, not a wait.
#[test]
fn jobs_of_a_closed_node_are_final() {
    let directory = directory();
    let a = Engine::start(common::config("a", &directory), 8);
    a.fill(0..4, 1);
    let jobs: Vec<_> = (0..4)
        .map(|block| {
            let item = LoadItem { key: key(block), destination: a.place(4 + block) };
            a.node.load(&a.ns, vec![item], DEADLINE).unwrap()
        })
        .collect();
    a.node.close();
    for job in jobs {
        let report = job.poll().expect("a closed node leaves no job open");
        assert!(matches!(report.outcomes[0], Ok(_) | Err(BlockError::Load(_) | BlockError::NodeStopped)));
    }
}
