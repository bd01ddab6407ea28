//! Properties of keys and of lowering over random input. A failure prints its seed and how to replay it.
// The lints' exception for tests does not reach helpers outside of test functions.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::hash::{BuildHasher, Hasher};

use kvfabric_core::hash::KeyCoordinates;
use kvfabric_core::umbp::*;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestCaseResult, TestRunner};

const CASES: u32 = 400;

fn check<S>(strategy: S, test: impl Fn(S::Value) -> TestCaseResult)
where
    S: Strategy,
    S::Value: Debug,
{
    let seed = std::env::var("KVFABRIC_TEST_SEED").map_or_else(
        |_| std::hash::RandomState::new().build_hasher().finish(),
        |seed| seed.parse().expect("KVFABRIC_TEST_SEED is a number"),
    );
    eprintln!("replay: KVFABRIC_TEST_SEED={seed} cargo test -p kvfabric-core --test umbp_properties");
    let config = Config {
        cases: CASES,
        rng_seed: RngSeed::Fixed(seed),
        failure_persistence: None,
        ..Config::default()
    };
    if let Err(failure) = TestRunner::new(config).run(&strategy, test) {
        panic!("seed {seed}: {failure}");
    }
}

fn coordinates() -> impl Strategy<Value = KeyCoordinates> {
    let number = || prop_oneof![0u32..100, any::<u32>(), Just(u32::MAX)];
    (number(), number(), number(), number(), number()).prop_map(
        |(tp_rank, pcp_rank, dcp_rank, pp_rank, group_id)| KeyCoordinates {
            tp_rank,
            pcp_rank,
            dcp_rank,
            pp_rank,
            group_id,
        },
    )
}

/// Namespaces of any text, often with pieces that look like the rest of a key.
fn namespace() -> impl Strategy<Value = UmbpNamespace> {
    prop_oneof![
        "[0-9a-f]{32}",
        "\\PC{1,40}",
        "(:|tp0|:tp1:pcp0|umbp:vllm:v1:|g0|[a-z]){1,8}",
        prop::collection::vec(any::<char>(), 1..20).prop_map(String::from_iter),
    ]
    .prop_map(|text| UmbpNamespace::new(&text).unwrap())
}

fn key() -> impl Strategy<Value = UmbpKey> {
    let hash = prop_oneof![
        prop::collection::vec(any::<u8>(), 32),
        prop::collection::vec(any::<u8>(), 1..=kvfabric_core::limits::BLOCK_HASH_BYTES_MAX),
    ];
    (namespace(), coordinates(), hash)
        .prop_map(|(namespace, at, hash)| UmbpKey::new(namespace, at, BlockHash::new(&hash).unwrap()))
}

#[test]
fn keys_survive_writing_and_reading() {
    check(key(), |key| {
        let text = key.to_string();
        prop_assert!(text.len() <= kvfabric_core::limits::KEY_BYTES_MAX);
        prop_assert_eq!(UmbpKey::parse(&text), Ok(key.clone()));
        let parsed = ParsedKey::parse(text.as_bytes()).unwrap();
        prop_assert_eq!(parsed.namespace, key.namespace().as_str());
        prop_assert_eq!(parsed.at, key.at());
        prop_assert_eq!(&parsed.block_hash, key.block_hash());
        fuzz_key(text.as_bytes());
        Ok(())
    });
}

#[test]
fn any_bytes_are_read_without_panic() {
    check(prop::collection::vec(any::<u8>(), 0..300), |bytes| {
        fuzz_key(&bytes);
        let mut prefixed = KEY_PREFIX.as_bytes().to_vec();
        prefixed.extend(bytes);
        fuzz_key(&prefixed);
        Ok(())
    });
    // Pieces of keys in any order reach deeper than bytes do.
    let piece = prop_oneof![
        Just(":"),
        Just("umbp:vllm:v1:"),
        Just("tp"),
        Just("pcp"),
        Just("dcp"),
        Just("pp"),
        Just("g"),
        Just("0"),
        Just("00"),
        Just("4294967295"),
        Just("4294967296"),
        Just("18446744073709551616"),
        Just("+1"),
        Just("-1"),
        Just("ab"),
        Just("AB"),
        Just("abc"),
        Just("n"),
        Just("ü"),
    ];
    check(prop::collection::vec(piece, 0..40), |pieces| {
        let text = pieces.concat();
        fuzz_key(text.as_bytes());
        fuzz_key(format!("{KEY_PREFIX}{text}").as_bytes());
        fuzz_key(format!("{KEY_PREFIX}n:tp0:pcp0:dcp0:pp0{text}").as_bytes());
        Ok(())
    });
}

#[test]
fn a_changed_byte_is_another_key_or_none() {
    check((key(), any::<prop::sample::Index>(), any::<u8>()), |(key, index, byte)| {
        let text = key.to_string();
        let mut changed = text.clone().into_bytes();
        let at = index.index(changed.len());
        let differs = changed[at] != byte;
        changed[at] = byte;
        fuzz_key(&changed);
        let Ok(parsed) = ParsedKey::parse(&changed) else { return Ok(()) };
        let equal = parsed.namespace == key.namespace().as_str()
            && parsed.at == key.at()
            && &parsed.block_hash == key.block_hash();
        prop_assert_eq!(equal, !differs);
        Ok(())
    });
}

/// A layer: bytes of a physical part, parts of a block, padding between physical blocks, group.
type Layer = (u64, u64, u64, u32);

#[derive(Clone, Debug)]
struct Cache {
    layers: Vec<Layer>,
    /// All layers of a block side by side, instead of a tensor for each layer.
    block_outermost: bool,
    base: u64,
    blocks: u64,
}

fn cache() -> impl Strategy<Value = Cache> {
    let layer = (1u64..5000, prop_oneof![Just(1u64), 2u64..5], prop_oneof![Just(0u64), 1u64..300], 0u32..3);
    let base = prop_oneof![Just(0u64), 0u64..1 << 47, Just(1u64 << 60)];
    (prop::collection::vec(layer, 1..12), any::<bool>(), base, 1u64..300)
        .prop_map(|(layers, block_outermost, base, blocks)| Cache { layers, block_outermost, base, blocks })
}

impl Cache {
    /// A registered planner whose tensors do not overlap.
    fn planner(&self) -> KVLayoutPlanner {
        let outer: u64 = self.layers.iter().map(|(part, ..)| part).sum();
        let (mut regions, mut tensors) = (Vec::new(), BTreeMap::new());
        let (mut offset, mut base) = (0, self.base);
        for (index, &(part, parts, padding, group)) in self.layers.iter().enumerate() {
            // A block that lies in several parts has no padding between them, and no other layers.
            let parts = if self.block_outermost { 1 } else { parts };
            let stride = match (self.block_outermost, parts) {
                (true, _) => outer,
                (false, 1) => part + padding,
                (false, _) => part,
            };
            let name = format!("layer{index}");
            let (block_stride, block_bytes) = (stride * parts, part * parts);
            regions.push(KVRegion::new(&name, group, block_stride, block_bytes, offset, 16).unwrap());
            let blocks = self.blocks * parts;
            let tensor = RegisteredTensor { base_address: base, block_stride: stride, blocks, dimensions: 4 };
            tensors.insert(name, tensor);
            offset += block_bytes;
            base += if self.block_outermost { part } else { blocks * stride };
        }
        let mut planner = KVLayoutPlanner::new(regions).unwrap();
        planner.register_kv_caches(&tensors).unwrap();
        planner
    }

    fn object_bytes(&self, group: Option<u32>) -> u64 {
        let parts = |parts: u64| if self.block_outermost { 1 } else { parts };
        let of_group = self.layers.iter().filter(|layer| group.is_none_or(|group| layer.3 == group));
        of_group.map(|&(part, count, ..)| part * parts(count)).sum()
    }
}

#[test]
fn ranges_tile_objects_and_blocks_never_overlap() {
    let ids = prop::collection::vec(any::<prop::sample::Index>(), 1..20);
    check((cache(), ids), |(cache, ids)| {
        let planner = cache.planner();
        let blocks = usize::try_from(cache.blocks).unwrap();
        let mut ids: Vec<u64> = ids.iter().map(|id| id.index(blocks) as u64).collect();
        ids.sort_unstable();
        ids.dedup();
        let groups = planner.group_ids().into_iter().map(Some).chain([None]);
        for group in groups {
            let (mut plain, mut merged) = (Vec::new(), Vec::new());
            planner.plan_into(&ids, group, &mut plain).unwrap();
            planner.plan_merged_into(&ids, group, &mut merged).unwrap();
            let (per_block, per_merged) = planner.ranges_per_block(group).unwrap();
            prop_assert!(per_merged <= per_block);
            for (ranges, per_block) in [(&plain, per_block), (&merged, per_merged)] {
                prop_assert_eq!(ranges.len(), ids.len() * per_block);
                for object in ranges.chunks(per_block) {
                    let mut end = 0;
                    for range in object {
                        prop_assert_eq!(range.object_offset, end);
                        prop_assert!(range.length > 0);
                        end += u64::from(range.length);
                    }
                    prop_assert_eq!(end, cache.object_bytes(group));
                }
                // All blocks of all layers together: no two ranges share a byte of memory.
                let mut spans: Vec<_> =
                    ranges.iter().map(|range| (range.address, u64::from(range.length))).collect();
                spans.sort_unstable();
                for pair in spans.windows(2) {
                    prop_assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{:?} overlaps {:?}", pair[0], pair[1]);
                }
            }
            for (index, &id) in ids.iter().enumerate() {
                let named = planner.plan_registered_block("k", id, group, None).unwrap();
                let flat = &plain[index * per_block..][..per_block];
                let named = named.ranges.iter().map(|range| (range.base_address, range.length));
                prop_assert!(named.eq(flat.iter().map(|range| (range.address, u64::from(range.length)))));
            }
        }
        if cache.block_outermost {
            prop_assert_eq!(planner.ranges_per_block(None).unwrap().1, 1);
        }
        Ok(())
    });
}

fn hostile() -> impl Strategy<Value = u64> {
    let near = |center: u64| (0u64..4).prop_map(move |away| center.wrapping_sub(2).wrapping_add(away));
    prop_oneof![near(0), near(300), near(1 << 31), near(1 << 32), near(1 << 63), any::<u64>()]
}

#[test]
fn hostile_block_ids_are_refused_and_leave_nothing_behind() {
    check((cache(), prop::collection::vec(hostile(), 1..6)), |(cache, ids)| {
        let planner = cache.planner();
        let mut out = vec![FlatRange { address: 1, object_offset: 2, length: 3, layer: 4 }];
        let before = out.clone();
        let outcome = planner.plan_into(&ids, None, &mut out);
        match ids.iter().find(|&&id| id >= cache.blocks) {
            Some(&block_id) => {
                prop_assert_eq!(outcome, Err(LayoutError::BlockOutside { block_id, blocks: cache.blocks }));
                prop_assert_eq!(out, before);
            }
            None => prop_assert!(outcome.is_ok()),
        }
        Ok(())
    });
}

#[test]
fn addresses_are_exact_or_refused() {
    let sizes = (1u64..1 << 40, 1u64..1 << 40, hostile(), hostile());
    check(sizes, |(stride, bytes, base, id)| {
        let (stride, bytes) = (stride.max(bytes), stride.min(bytes));
        let region = KVRegion::new("l", 7, stride, bytes, 0, 1).unwrap();
        let planner = KVLayoutPlanner::new(vec![region]).unwrap();
        let bases = BTreeMap::from([("l".to_owned(), base)]);
        let exact = u128::from(base) + u128::from(id) * u128::from(stride);
        let fits = exact + u128::from(bytes) <= u128::from(u64::MAX);
        match planner.plan_for_block("k", id, &bases, Some(7), None) {
            Ok(plan) => {
                prop_assert!(fits);
                prop_assert_eq!(u128::from(plan.ranges[0].base_address), exact);
            }
            Err(error) => {
                prop_assert!(!fits);
                let overflow = LayoutError::AddressOverflow { layer: "l".into(), block_id: id };
                prop_assert_eq!(error, overflow);
            }
        }
        // The same numbers as a tensor: registration decides about the last block, lowering about the id.
        let tensor = RegisteredTensor { base_address: base, block_stride: stride, blocks: id, dimensions: 1 };
        let mut planner = planner;
        let registered = planner.register_kv_caches(&BTreeMap::from([("l".to_owned(), tensor)]));
        let end = exact - u128::from(stride) * u128::from(id.min(1)) + u128::from(bytes);
        let object_fits = bytes <= kvfabric_core::limits::OBJECT_BYTES_MAX;
        let tensor_fits = id == 0 || end <= u128::from(u64::MAX);
        prop_assert_eq!(registered.is_ok(), object_fits && tensor_fits);
        if registered.is_ok() {
            let mut out = Vec::new();
            prop_assert!(planner.plan_into(&[id], Some(7), &mut out).is_err());
            if let Some(last) = id.checked_sub(1) {
                planner.plan_into(&[last], Some(7), &mut out).unwrap();
                prop_assert_eq!(u128::from(out[0].address), exact - u128::from(stride));
            }
        }
        Ok(())
    });
}
