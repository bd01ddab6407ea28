use std::collections::BTreeMap;

use serde_json::json;

use super::limits::*;
use super::*;
use crate::hash::{KeyCoordinates, NamespaceKey};
use crate::limits::{BLOCK_HASH_BYTES_MAX, JOB_BLOCKS_MAX, KEY_BYTES_MAX, OBJECT_BYTES_MAX};

const HASH: &str = "00ff";

fn refused(key: &str) -> KeyError {
    UmbpKey::parse(key).expect_err(key)
}

fn number(part: KeyPart, fault: NumberFault) -> KeyError {
    KeyError::Number { part, fault }
}

#[test]
fn errors_name_the_part_at_fault() {
    let key = |middle: &str| format!("umbp:vllm:v1:{middle}");
    for (text, error) in [
        (String::new(), KeyError::WrongPrefix),
        ("UMBP:vllm:v1:n:tp0:pcp0:dcp0:pp0:g0:00".into(), KeyError::WrongPrefix),
        ("umbp:vllm:v2:n:tp0:pcp0:dcp0:pp0:g0:00".into(), KeyError::WrongPrefix),
        (key(""), KeyError::Missing { part: KeyPart::Group }),
        (key("00"), KeyError::Missing { part: KeyPart::Group }),
        (key("g0:00"), KeyError::Missing { part: KeyPart::Namespace }),
        (key("tp0:pcp0:dcp0:pp0:g0:00"), KeyError::Missing { part: KeyPart::Namespace }),
        (key("n:pcp0:dcp0:pp0:g0:00"), KeyError::Missing { part: KeyPart::TpRank }),
        (key(":tp0:pcp0:dcp0:pp0:g0:00"), KeyError::NamespaceEmpty),
        (key("n:tp0:pcp0:dcp0:pp0:g0:"), KeyError::HashEmpty),
        (key("n:tp0:pcp0:dcp0:pp0:g0:0"), KeyError::HashOdd),
        (key("n:tp0:pcp0:dcp0:pp0:g0:0aG0"), KeyError::HashNotHex { digit: 2 }),
        (key("n:tp0:pcp0:dcp0:pp0:g0:A0"), KeyError::HashNotHex { digit: 0 }),
        (key("n:tp0:pcp0:dcp0:pp0:0:00"), KeyError::WrongLabel { part: KeyPart::Group }),
        (key("n:tp0:pcp0:dcp0:pcp0:g0:00"), KeyError::WrongLabel { part: KeyPart::PpRank }),
        (key("n:tp0:pcp0:pcp0:pp0:g0:00"), KeyError::WrongLabel { part: KeyPart::DcpRank }),
        (key("n:tp:pcp0:dcp0:pp0:g0:00"), number(KeyPart::TpRank, NumberFault::Empty)),
        (key("n:tp0:pcp00:dcp0:pp0:g0:00"), number(KeyPart::PcpRank, NumberFault::LeadingZero)),
        (key("n:tp0:pcp0:dcp01:pp0:g0:00"), number(KeyPart::DcpRank, NumberFault::LeadingZero)),
        (key("n:tp0:pcp0:dcp0:pp+1:g0:00"), number(KeyPart::PpRank, NumberFault::NotDecimal)),
        (key("n:tp0:pcp0:dcp0:pp0:g-1:00"), number(KeyPart::Group, NumberFault::NotDecimal)),
        (key("n:tp0:pcp0:dcp0:pp0:g4294967296:00"), number(KeyPart::Group, NumberFault::TooLarge)),
        (
            key("n:tp99999999999999999999999:pcp0:dcp0:pp0:g0:00"),
            number(KeyPart::TpRank, NumberFault::TooLarge),
        ),
    ] {
        assert_eq!(refused(&text), error, "{text}");
        assert!(!error.to_string().is_empty());
    }
    assert_eq!(refused(&key("n:tp0:pcp0:dcp0:pp0:gx:00")).part(), Some(KeyPart::Group));
    let not_utf8 = [KEY_PREFIX.as_bytes(), b"\xff:tp0:pcp0:dcp0:pp0:g0:00"].concat();
    assert_eq!(ParsedKey::parse(&not_utf8), Err(KeyError::NamespaceNotUtf8));
    assert_eq!(KeyHasher::new(b"", b"").hash(&not_utf8), Err(KeyError::NamespaceNotUtf8));
}

#[test]
fn lengths_are_bounded() {
    let key = |namespace: usize, hash: usize| {
        format!("{KEY_PREFIX}{}:tp0:pcp0:dcp0:pp0:g0:{}", "n".repeat(namespace), "ab".repeat(hash))
    };
    assert!(UmbpKey::parse(&key(NAMESPACE_BYTES_MAX, BLOCK_HASH_BYTES_MAX)).is_ok());
    assert_eq!(
        refused(&key(NAMESPACE_BYTES_MAX + 1, 1)),
        KeyError::NamespaceTooLong { length_bytes: NAMESPACE_BYTES_MAX + 1 }
    );
    assert_eq!(
        refused(&key(1, BLOCK_HASH_BYTES_MAX + 1)),
        KeyError::HashTooLong { length_bytes: BLOCK_HASH_BYTES_MAX + 1 }
    );
    let long = key(KEY_BYTES_MAX, 1);
    assert_eq!(refused(&long), KeyError::TooLong { length_bytes: long.len() });
    assert_eq!(
        BlockHash::new(&[0; BLOCK_HASH_BYTES_MAX + 1]),
        Err(KeyError::HashTooLong { length_bytes: BLOCK_HASH_BYTES_MAX + 1 })
    );
    assert!(BlockHash::new(&[0; BLOCK_HASH_BYTES_MAX]).is_ok());
}

#[test]
fn block_hashes_order_as_their_bytes_do() {
    let hash = |bytes: &[u8]| BlockHash::new(bytes).unwrap();
    assert!(hash(&[1]) < hash(&[1, 0]));
    assert!(hash(&[1, 255]) < hash(&[2]));
    assert_ne!(hash(&[0]), hash(&[0, 0]));
    assert_eq!(format!("{:?}", hash(&[0xab])), "BlockHash(ab)");
}

#[test]
fn the_hasher_agrees_with_the_definition_and_stays_bounded() {
    let mut hasher = KeyHasher::new(b"secret", b"salt");
    let at = KeyCoordinates { tp_rank: 1, pcp_rank: 2, dcp_rank: 3, pp_rank: 4, group_id: 5 };
    for round in 0..2 {
        for index in 0..3 * NAMESPACES_CACHED_MAX {
            let namespace = format!("n{index}");
            let key = format!("{KEY_PREFIX}{namespace}:tp1:pcp2:dcp3:pp4:g5:{HASH}");
            let expected = NamespaceKey::derive(b"secret", &namespace, b"salt").hash(at, &[0, 255]);
            assert_eq!(hasher.hash(key.as_bytes()), Ok(expected), "round {round}");
            assert_eq!(hasher.fingerprint(key.as_bytes()), Ok(expected.fingerprint()));
            assert!(hasher.namespaces_cached() <= NAMESPACES_CACHED_MAX);
        }
    }
    assert!(!format!("{hasher:?}").contains("secret"));

    let good = format!("{KEY_PREFIX}n:tp1:pcp2:dcp3:pp4:g5:{HASH}");
    let mut out = Vec::new();
    hasher.hash_into([good.as_bytes(), good.as_bytes()], &mut out).unwrap();
    assert_eq!(out.len(), 2);
    assert_eq!(
        hasher.hash_into([good.as_bytes(), b"bad"], &mut out),
        Err((1, KeyError::WrongPrefix)),
        "the index of the bad key is named"
    );
    assert_eq!(out.len(), 2, "and nothing of the batch stays");
}

#[test]
fn huge_topologies_are_refused_where_they_would_be_listed() {
    let million = TopologyRanks { tp_size: 1 << 20, pp_size: 2, ..TopologyRanks::default() };
    let topology = RankTopology::new(million).unwrap();
    assert_eq!(topology.rank_count(), Err(TopologyError::TooManyRanks));
    assert!(topology.all_namespaces().is_err());
    let widest = TopologyRanks {
        tp_size: u32::MAX.into(),
        pp_size: u32::MAX.into(),
        pcp_size: u32::MAX.into(),
        ..TopologyRanks::default()
    };
    assert_eq!(RankTopology::new(widest).unwrap().rank_count(), Err(TopologyError::TooManyRanks));
    let size = i64::from(u32::MAX) + 1;
    let wide = TopologyRanks { pp_size: size, ..TopologyRanks::default() };
    assert_eq!(RankTopology::new(wide), Err(TopologyError::SizeTooLarge { name: "pp_size", size }));
    for rank in [i64::MIN, i64::MAX] {
        let sizes = ParallelSizes { tensor: 8, pipeline: 3, prefill_context: 5, decode_context: 2, rank };
        assert!(RankTopology::from_parallel(sizes).is_ok());
    }

    let codec = BlockIdentityCodec::new(UmbpNamespace::new("n").unwrap(), topology.local_namespace());
    let topology = RankTopology::new(TopologyRanks { tp_size: 4096, ..million }).unwrap();
    let groups: Vec<u32> = (0..9).collect();
    let keys = 4096 * 2 * 9;
    assert_eq!(codec.keys_for_topology(&[1], &topology, &groups), Err(CodecError::TooManyKeys { keys }));
    assert_eq!(codec.keys_for_topology(&[1], &topology, &groups[..8]).unwrap().len(), TOPOLOGY_KEYS_MAX);
}

#[test]
fn workers_must_agree_on_the_namespace() {
    assert_eq!(UmbpNamespace::agreed(["a", "a"]).unwrap().as_str(), "a");
    let error = UmbpNamespace::agreed(["b", "a", "b"]).unwrap_err();
    assert_eq!(error.to_string(), "UMBP workers must report exactly one namespace, got ['a', 'b']");
    assert!(UmbpNamespace::agreed([]).is_err());
}

#[test]
fn layers_without_specification_are_named() {
    let spec = LayerSpec { kind: "k".into(), page_size_bytes: 8, block_size: 1, ..LayerSpec::default() };
    let group = CacheGroup {
        layers: vec!["a".into(), "b".into()],
        spec: GroupSpec::PerLayer {
            kind: "u".into(),
            block_size: 1,
            layers: BTreeMap::from([("a".into(), spec)]),
        },
        enable_kv_transfer: true,
    };
    let config = CacheConfig { groups: vec![group], tensors: vec![] };
    let inputs = NamespaceInputs {
        model: "m",
        revision: None,
        block_size: 1,
        cache_layout: None,
        groups: &config.groups,
        tp_size: 1,
        pp_size: 1,
        pcp_size: 1,
        dcp_size: 1,
        speculative: None,
    };
    assert_eq!(
        UmbpNamespace::derive(&inputs, LayoutVersion::V2),
        Err(NamespaceError::MissingLayerSpec { group_id: 0, layer: "b".into() })
    );
    assert!(UmbpNamespace::derive(&inputs, LayoutVersion::V1).is_ok());
    assert_eq!(
        KVLayoutPlanner::from_cache_config(&config).unwrap_err(),
        LayoutError::MissingLayerSpec { layer: "b".into() }
    );
}

fn region(name: &str, group: u32, stride: u64, bytes: u64) -> KVRegion {
    KVRegion::new(name, group, stride, bytes, 0, 16).unwrap()
}

fn tensor(base_address: u64, block_stride: u64, blocks: u64) -> RegisteredTensor {
    RegisteredTensor { base_address, block_stride, blocks, dimensions: 3 }
}

fn registered(
    regions: Vec<KVRegion>,
    tensors: &[(&str, RegisteredTensor)],
) -> Result<KVLayoutPlanner, LayoutError> {
    let mut planner = KVLayoutPlanner::new(regions)?;
    let tensors = tensors.iter().map(|(name, tensor)| ((*name).to_owned(), *tensor)).collect();
    planner.register_kv_caches(&tensors)?;
    Ok(planner)
}

#[test]
fn layouts_beyond_the_limits_are_refused() {
    let large = OBJECT_BYTES_MAX / 2 + 1;
    let regions = || vec![region("a", 3, large, large), region("b", 3, large, large)];
    let caches = [("a", tensor(0, large, 2)), ("b", tensor(1 << 40, large, 2))];
    assert_eq!(
        registered(regions(), &caches).unwrap_err(),
        LayoutError::ObjectTooLarge { group_id: 3, object_bytes: 2 * large }
    );
    let descriptor = KVLayoutDescriptor::new(regions().into(), RankTopology::default(), "x").unwrap();
    assert_eq!(
        descriptor.group_object_bytes(3),
        Err(LayoutError::ObjectTooLarge { group_id: 3, object_bytes: 2 * large })
    );
    assert_eq!(descriptor.group_object_bytes(4), Err(LayoutError::UnknownGroup { group_id: 4 }));

    let whole = region("a", 0, u64::MAX, u64::MAX);
    assert_eq!(
        KVLayoutPlanner::new(vec![whole, region("b", 0, 1, 1)]).unwrap_err(),
        LayoutError::SizeOverflow
    );
    let parts = RANGES_PER_BLOCK_MAX as u64 + 1;
    assert_eq!(
        registered(vec![region("a", 0, parts, parts)], &[("a", tensor(0, 1, parts))]).unwrap_err(),
        LayoutError::TooManyParts
    );
    let many = vec![region("a", 0, 1, 1); REGIONS_MAX + 1];
    assert_eq!(
        KVLayoutPlanner::new(many).unwrap_err(),
        LayoutError::TooManyRegions { regions: REGIONS_MAX + 1 }
    );
    let planner = registered(vec![region("a", 0, 4096, 4096)], &[("a", tensor(0, 1, 40960))]).unwrap();
    let blocks = RANGES_PER_CALL_MAX / 4096 + 1;
    assert_eq!(
        planner.plan_into(&vec![0; blocks], None, &mut Vec::new()),
        Err(LayoutError::TooManyRanges { blocks, ranges_per_block: 4096 })
    );
}

#[test]
fn a_refused_registration_keeps_the_earlier_one() {
    let mut planner = registered(vec![region("a", 0, 16, 8)], &[("a", tensor(64, 8, 10))]).unwrap();
    let plan = planner.plan_registered_block("k", 2, None, None).unwrap();
    for bad in [tensor(0, 32, 10), tensor(u64::MAX - 7, 8, 10)] {
        assert!(planner.register_kv_caches(&BTreeMap::from([("a".into(), bad)])).is_err());
        assert_eq!(planner.plan_registered_block("k", 2, None, None).unwrap(), plan);
    }
    assert_eq!(plan.ranges[0].base_address, 64 + 2 * 8);
}

#[test]
fn blocks_of_a_group_end_with_its_shortest_tensor() {
    let planner = registered(
        vec![region("a", 0, 8, 8), region("b", 1, 8, 8), region("c", 1, 8, 8)],
        &[("a", tensor(0, 8, 100)), ("b", tensor(800, 4, 101)), ("c", tensor(1600, 8, 70))],
    )
    .unwrap();
    let mut out = Vec::new();
    assert!(planner.plan_into(&[99], Some(0), &mut out).is_ok());
    assert_eq!(
        planner.plan_into(&[50], Some(1), &mut out),
        Err(LayoutError::BlockOutside { block_id: 50, blocks: 50 })
    );
    assert!(planner.plan_into(&[49], Some(1), &mut out).is_ok());
    assert_eq!(
        planner.plan_registered_block("k", 50, None, None),
        Err(LayoutError::BlockOutside { block_id: 50, blocks: 50 })
    );
    let empty = registered(vec![region("a", 0, 8, 8)], &[("a", tensor(0, 8, 0))]).unwrap();
    assert_eq!(
        empty.plan_into(&[0], None, &mut out),
        Err(LayoutError::BlockOutside { block_id: 0, blocks: 0 })
    );
}

#[test]
fn ranges_that_touch_in_block_zero_only_are_not_merged() {
    // Two layers whose tensors interleave with different strides: side by side in block 0, apart in block 1.
    let planner = registered(
        vec![region("a", 0, 16, 8), region("b", 0, 32, 8)],
        &[("a", tensor(0, 16, 4)), ("b", tensor(8, 32, 4))],
    )
    .unwrap();
    let mut out = Vec::new();
    planner.plan_merged_into(&[0, 1], Some(0), &mut out).unwrap();
    let places: Vec<_> = out.iter().map(|range| (range.address, range.length)).collect();
    assert_eq!(places, [(0, 8), (8, 8), (16, 8), (40, 8)]);
}

#[test]
fn layout_ids_depend_on_what_objects_hold_and_not_on_where_they_lie() {
    let id = |regions: Vec<KVRegion>, group, dtype, format| {
        KVLayoutPlanner::new(regions)
            .unwrap()
            .describe(RankTopology::default(), format)
            .unwrap()
            .layout_id(group, dtype)
    };
    let two = || vec![region("a", 0, 8, 8), region("b", 0, 8, 8)];
    let base = id(two(), 0, "bf16", "f").unwrap();
    assert_eq!(base, crate::hash::layout_id([("a", 8), ("b", 8)], "bf16", "f"));
    let elsewhere = vec![region("z", 1, 4, 4), region("a", 0, 64, 8), region("b", 0, 32, 8)];
    assert_eq!(id(elsewhere, 0, "bf16", "f").unwrap(), base);
    let mut swapped = two();
    swapped.reverse();
    for other in [
        id(swapped, 0, "bf16", "f"),
        id(two(), 0, "fp8", "f"),
        id(two(), 0, "bf16", "g"),
        id(vec![region("a", 0, 8, 8), region("b", 0, 8, 4)], 0, "bf16", "f"),
        id(vec![region("a", 0, 8, 8)], 0, "bf16", "f"),
    ] {
        assert_ne!(other.unwrap(), base);
    }
    assert_eq!(id(two(), 9, "bf16", "f"), Err(LayoutError::UnknownGroup { group_id: 9 }));
}

#[test]
fn one_failed_key_fails_no_other() {
    let plans = (0..5).map(|id| BlockTransferPlan::new(&format!("k{id}"), 10 + id)).collect();
    let mut job = TransferJobState::new(JobPlans::Plans(plans))
        .and_then(|job| job.with_plan_bytes(vec![1, 2, 4, 8, 16]))
        .unwrap();
    job.start().unwrap();
    job.complete_key("k0");
    job.fail(&["k3"], Some("stale"));
    assert_eq!((job.status(), job.completed_bytes()), (TransferJobStatus::Running, 1));
    job.complete(&["k1", "k2"]);
    assert!(!job.status().is_final());
    job.fail_unfinished("deadline");
    assert_eq!(job.status(), TransferJobStatus::Failed);
    assert_eq!(job.completed_bytes(), 1 + 2 + 4);
    assert_eq!(Vec::from_iter(job.failed_block_ids()), [13, 14]);
    assert_eq!(job.error(), Some("deadline"));
}

#[test]
fn jobs_beyond_the_limits_are_refused() {
    let plan = BlockTransferPlan::new("k", 0);
    let blocks = JOB_BLOCKS_MAX + 1;
    assert_eq!(
        TransferJobState::new(JobPlans::Plans(vec![plan.clone(); blocks])),
        Err(JobError::TooManyBlocks { blocks })
    );
    let job = TransferJobState::new(JobPlans::Plans(vec![plan.clone(), plan])).unwrap();
    assert_eq!(job.with_plan_bytes(vec![u64::MAX, 1]), Err(JobError::BytesOverflow));
}

#[test]
fn stores_of_a_step_are_listed_with_and_without_request() {
    let batch = BlockLoadBatch::new(vec!["b".into()], vec![1], vec![0], "r".into()).unwrap();
    let metadata = ConnectorMetadata {
        store_plans: vec![BlockTransferPlan::new("a", 0)],
        store_requests: BTreeMap::from([("r".into(), JobPlans::Load(batch))]),
        ..ConnectorMetadata::default()
    };
    let keys: Vec<_> = metadata.iter_store_plans().map(|plan| plan.key).collect();
    assert_eq!(keys, ["a".into(), "b".into()]);
}

#[test]
fn specifications_may_hold_any_value() {
    let mut fields = BTreeMap::from([("window".to_owned(), json!([1, {"b": 2.5, "a": null}]))]);
    let payload = |fields: &BTreeMap<_, _>| {
        let spec = LayerSpec { kind: "K".into(), fields: fields.clone(), page_size_bytes: 1, block_size: 4 };
        let group =
            CacheGroup { layers: vec!["l".into()], spec: GroupSpec::Shared(spec), enable_kv_transfer: false };
        let inputs = NamespaceInputs {
            model: "m",
            revision: Some("r"),
            block_size: 4,
            cache_layout: None,
            groups: &[group],
            tp_size: 1,
            pp_size: 2,
            pcp_size: 3,
            dcp_size: 4,
            speculative: None,
        };
        inputs.payload(LayoutVersion::V2)
    };
    assert_eq!(
        payload(&fields).unwrap(),
        r#"{"block_size":4,"cache_layout":null,"dcp":4,"groups":[{"block_size":4,"layer_specs":{"l":{"kind":"K","window":[1,{"a":null,"b":2.5}]}},"layers":["l"]}],"layout_version":2,"model":"m","pcp":3,"pp":2,"revision":"r","tp":1}"#
    );
    let deep = (0..JSON_DEPTH_MAX).fold(json!(1), |value, _| json!([value]));
    fields.insert("deep".into(), deep);
    assert_eq!(payload(&fields), Err(NamespaceError::Json(JsonError::TooDeep)));
}
