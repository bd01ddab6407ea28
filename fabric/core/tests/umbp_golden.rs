//! Every vector of `golden/umbp_v033.json`, which `scripts/golden/umbp_vectors.py` wrote from vLLM 0.33.0's own code.
// The lints' exception for tests does not reach helpers outside of test functions.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvfabric_core::umbp::*;
use serde_json::{json, Value};
use sha2::{Digest, Sha256};

fn section(name: &str, at_least: usize) -> Vec<Value> {
    let text = include_str!("golden/umbp_v033.json");
    let mut all: Value = serde_json::from_str(text).unwrap();
    assert_eq!(all["vllm"], "0.33.0");
    let vectors: Vec<Value> = serde_json::from_value(all[name].take()).unwrap();
    assert!(vectors.len() >= at_least, "{name} has only {} vectors", vectors.len());
    vectors
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn items(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn u64s(value: &Value) -> Vec<u64> {
    items(value).iter().map(|item| item.as_u64().unwrap()).collect()
}

fn u32s(value: &Value) -> Vec<u32> {
    u64s(value).into_iter().map(|item| item.try_into().unwrap()).collect()
}

fn i64s(value: &Value) -> Vec<i64> {
    items(value).iter().map(|item| item.as_i64().unwrap()).collect()
}

fn names(value: &Value) -> Vec<Arc<str>> {
    items(value).iter().map(|item| text(item).into()).collect()
}

fn unhex(value: &Value) -> Vec<u8> {
    let hex = text(value);
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// The outcome equals the reference's: the same value, or an error of the same text.
fn same<T, E: std::fmt::Display>(outcome: Result<T, E>, vector: &Value, as_json: impl Fn(T) -> Value) {
    match (outcome, vector.get("error")) {
        (Ok(value), None) => assert_eq!(as_json(value), vector["ok"], "{vector}"),
        (Err(error), Some(expected)) => assert_eq!(error.to_string(), text(&expected[1]), "{vector}"),
        (Ok(_), Some(expected)) => panic!("succeeds where the reference fails with {expected}: {vector}"),
        (Err(error), None) => panic!("fails with {error}: {vector}"),
    }
}

fn is_division_by_zero(vector: &Value) -> bool {
    vector["error"][0] == "ZeroDivisionError"
}

fn rank(values: &Value) -> RankNamespace {
    let [tp_rank, pcp_rank, dcp_rank, pp_rank] = u32s(values).try_into().unwrap();
    RankNamespace { tp_rank, pcp_rank, dcp_rank, pp_rank }
}

fn rank_json(rank: RankNamespace) -> Value {
    json!([rank.tp_rank, rank.pcp_rank, rank.dcp_rank, rank.pp_rank])
}

fn topology(args: &Value) -> Result<RankTopology, TopologyError> {
    let [tp_rank, tp_size, pp_rank, pp_size, pcp_rank, pcp_size, dcp_rank, dcp_size] =
        i64s(args).try_into().unwrap();
    RankTopology::new(TopologyRanks {
        tp_rank,
        tp_size,
        pp_rank,
        pp_size,
        pcp_rank,
        pcp_size,
        dcp_rank,
        dcp_size,
    })
}

#[test]
fn keys() {
    for vector in section("keys", 90) {
        let namespace = UmbpNamespace::new(text(&vector[0])).unwrap();
        let group: u32 = vector[2].as_u64().unwrap().try_into().unwrap();
        let codec = BlockIdentityCodec::new(namespace.clone(), rank(&vector[1]));
        let key = codec.key(&unhex(&vector[3]), group).unwrap();
        assert_eq!(key.to_string(), text(&vector[4]));
        let parsed = UmbpKey::parse(text(&vector[4])).unwrap();
        assert_eq!(parsed, key);
        assert_eq!((parsed.namespace(), parsed.at().group_id), (&namespace, group));
        assert_eq!(codec.localize(&parsed), parsed);
    }
    for vector in section("key_errors", 3) {
        let codec = BlockIdentityCodec::new(UmbpNamespace::new("n").unwrap(), RankNamespace::default());
        match u32::try_from(vector["group"].as_i64().unwrap()) {
            Ok(group) => {
                same(codec.key(&unhex(&vector["hash"]), group), &vector, |key| json!(key.to_string()));
            }
            Err(_) => assert_eq!(vector["error"][1], "group_id must be non-negative"),
        }
    }
}

#[test]
fn topologies() {
    for vector in section("topologies", 100) {
        let topology = topology(&vector["args"]);
        let Ok(valid) = topology else {
            same(topology, &vector, |_| Value::Null);
            continue;
        };
        let expected = &vector["ok"];
        assert_eq!(rank_json(valid.local_namespace()), expected["local"]);
        same(valid.rank_count(), &expected["count"], |count| json!(count));
        let all = valid.all_namespaces().map(|all| all.map(rank_json).collect::<Vec<_>>());
        match expected["all"].get("ok_sha256") {
            Some(digest) => {
                let listing = python_json(&json!(all.unwrap())).unwrap();
                assert_eq!(BlockHash::new(&Sha256::digest(listing)).unwrap().to_string(), text(digest));
            }
            None => same(all, &expected["all"], |all| json!(all)),
        }
    }
}

#[test]
fn topologies_of_parallel_sizes() {
    for vector in section("parallel", 80) {
        let [tensor, pipeline, prefill_context, decode_context, rank] =
            i64s(&vector["args"]).try_into().unwrap();
        let sizes = ParallelSizes { tensor, pipeline, prefill_context, decode_context, rank };
        let topology = RankTopology::from_parallel(sizes);
        if is_division_by_zero(&vector) {
            assert!(matches!(topology, Err(TopologyError::SizeNotPositive { .. })), "{vector}");
            continue;
        }
        same(topology, &vector, |topology| {
            let local = topology.local_namespace();
            json!([
                local.tp_rank,
                topology.tp_size(),
                local.pp_rank,
                topology.pp_size(),
                local.pcp_rank,
                topology.pcp_size(),
                local.dcp_rank,
                topology.dcp_size()
            ])
        });
    }
}

#[test]
fn keys_of_all_ranks() {
    for vector in section("topology_keys", 14) {
        let codec = BlockIdentityCodec::new(
            UmbpNamespace::new(text(&vector["namespace"])).unwrap(),
            RankNamespace::default(),
        );
        let topology = topology(&vector["args"]).unwrap();
        let keys = codec.keys_for_topology(&unhex(&vector["hash"]), &topology, &u32s(&vector["groups"]));
        same(keys, &vector, |keys| json!(keys.iter().map(ToString::to_string).collect::<Vec<_>>()));
    }
}

fn spec(value: &Value) -> LayerSpec {
    LayerSpec {
        kind: text(&value["kind"]).to_owned(),
        fields: serde_json::from_value(value["fields"].clone()).unwrap(),
        page_size_bytes: value["page"].as_u64().unwrap(),
        block_size: serde_json::from_value(value["block_size"].clone()).unwrap(),
    }
}

fn cache_config(vector: &Value) -> CacheConfig {
    let groups = items(&vector["groups"])
        .iter()
        .map(|group| CacheGroup {
            layers: serde_json::from_value(group["layers"].clone()).unwrap(),
            spec: match group.get("shared") {
                Some(shared) => GroupSpec::Shared(spec(shared)),
                None => GroupSpec::PerLayer {
                    kind: text(&group["kind"]).to_owned(),
                    block_size: serde_json::from_value(group["block_size"].clone()).unwrap(),
                    layers: group["per_layer"]
                        .as_object()
                        .unwrap()
                        .iter()
                        .map(|(name, value)| (name.clone(), spec(value)))
                        .collect(),
                },
            },
            enable_kv_transfer: group["transfer"].as_bool().unwrap(),
        })
        .collect();
    let tensors = items(&vector["tensors"])
        .iter()
        .map(|tensor| CacheTensor {
            layers: serde_json::from_value(tensor[0].clone()).unwrap(),
            block_stride: tensor[1].as_u64().unwrap(),
        })
        .collect();
    CacheConfig { groups, tensors }
}

fn region_json(region: &KVRegion) -> Value {
    json!([
        region.layer_name().as_ref(),
        region.group_id(),
        region.block_stride(),
        region.block_bytes(),
        region.object_offset(),
        region.block_size()
    ])
}

fn region(args: &Value) -> Result<KVRegion, LayoutError> {
    let [group, stride, bytes, offset, size] = u64s(&json!(items(args)[1..])).try_into().unwrap();
    let narrow = |value: u64| u32::try_from(value).unwrap();
    KVRegion::new(text(&args[0]), narrow(group), stride, bytes, offset, narrow(size))
}

fn layout(regions: &Value) -> Vec<KVRegion> {
    items(regions).iter().map(|args| region(args).unwrap()).collect()
}

#[test]
fn namespaces_and_layouts_of_configurations() {
    for vector in section("configs", 44) {
        let config = cache_config(&vector);
        let inputs = &vector["inputs"];
        let size = |name: &str| u32::try_from(inputs[name].as_u64().unwrap()).unwrap();
        let draft = |name: &str| inputs["speculative"][name].as_str().map(str::to_owned);
        let namespace_inputs = NamespaceInputs {
            model: text(&inputs["model"]),
            revision: inputs["revision"].as_str(),
            block_size: inputs["block_size"].as_u64().unwrap(),
            cache_layout: vector["cache_layout"].as_str(),
            groups: &config.groups,
            tp_size: size("tp"),
            pp_size: size("pp"),
            pcp_size: size("pcp"),
            dcp_size: size("dcp"),
            speculative: (!inputs["speculative"].is_null()).then(|| SpeculativeInputs {
                method: draft("method"),
                model: draft("model"),
                revision: draft("revision"),
            }),
        };
        for (version, expected) in [(LayoutVersion::V1, "v1"), (LayoutVersion::V2, "v2")] {
            let namespace = UmbpNamespace::derive(&namespace_inputs, version).unwrap();
            assert_eq!(
                namespace.as_str(),
                text(&vector[expected]),
                "{:?} over {}",
                version,
                namespace_inputs.payload(version).unwrap()
            );
        }
        same(KVLayoutPlanner::from_cache_config(&config), &vector["regions"], |planner| {
            json!(planner.regions().iter().map(region_json).collect::<Vec<_>>())
        });
    }
}

#[test]
fn configured_namespaces() {
    for vector in section("configured", 9) {
        same(UmbpNamespace::configured(vector["extra"].get("key_namespace")), &vector, |namespace| {
            json!(namespace.as_ref().map(UmbpNamespace::as_str))
        });
    }
}

#[test]
fn regions_and_descriptors() {
    for vector in section("regions", 13) {
        if i64s(&json!(items(&vector["args"])[1..])).iter().any(|&value| value < 0) {
            // A negative size cannot be expressed; the reference refuses it too.
            assert!(vector.get("error").is_some());
            continue;
        }
        same(region(&vector["args"]), &vector, |region| region_json(&region));
    }
    for vector in section("descriptors", 6) {
        let descriptor = KVLayoutDescriptor::new(
            layout(&vector["regions"]).into(),
            RankTopology::default(),
            text(&vector["format"]),
        );
        same(descriptor, &vector, |descriptor| json!(descriptor.object_size()));
    }
}

fn plan_json(plan: &BlockTransferPlan) -> Value {
    assert!(plan.block_hash.is_none() && plan.parent_block_hash.is_none() && plan.token_ids.is_empty());
    let ranges: Vec<_> = plan
        .ranges
        .iter()
        .map(|range| {
            json!([
                range.layer_name.as_ref(),
                range.group_id,
                range.block_id,
                range.base_address,
                range.stride,
                range.length,
                range.object_offset
            ])
        })
        .collect();
    json!({
        "key": plan.key.as_ref(),
        "block": plan.block_id,
        "group": plan.group_id,
        "request": plan.request_id.as_deref(),
        "ranges": ranges,
    })
}

fn tensors(value: &Value) -> BTreeMap<String, RegisteredTensor> {
    value
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, values)| {
            let [base_address, stride, element, dimensions, blocks] = u64s(values).try_into().unwrap();
            let tensor = RegisteredTensor {
                base_address,
                block_stride: stride * element,
                blocks,
                dimensions: dimensions.try_into().unwrap(),
            };
            (name.clone(), tensor)
        })
        .collect()
}

/// The flat ranges of a block are the named ones without their names, and merging keeps the bytes.
fn same_flat(planner: &KVLayoutPlanner, block: u64, group: Option<u32>, plan: &BlockTransferPlan) {
    let mut flat = Vec::new();
    planner.plan_into(&[block], group, &mut flat).unwrap();
    assert_eq!(flat.len(), plan.ranges.len());
    for (flat, named) in flat.iter().zip(&plan.ranges) {
        assert_eq!(planner.regions()[flat.layer as usize].layer_name(), &named.layer_name);
        assert_eq!(
            (flat.address, u64::from(flat.length), flat.object_offset),
            (named.base_address, named.length, named.object_offset)
        );
    }
    let mut merged = Vec::new();
    planner.plan_merged_into(&[block], group, &mut merged).unwrap();
    assert_eq!(planner.ranges_per_block(group).unwrap(), (flat.len(), merged.len()));
    let bytes = |ranges: &[FlatRange]| -> BTreeMap<u64, u64> {
        let each = |range: &FlatRange| {
            let (offset, address) = (range.object_offset, range.address);
            (0..u64::from(range.length)).map(move |byte| (offset + byte, address + byte))
        };
        ranges.iter().flat_map(each).collect()
    };
    assert_eq!(bytes(&flat), bytes(&merged));
}

#[test]
fn planners() {
    let (mut split, mut plans) = (0, 0);
    for vector in section("planners", 75) {
        let mut planner = KVLayoutPlanner::new(layout(&vector["regions"])).unwrap();
        assert_eq!(json!(planner.object_size()), vector["object_size"]);
        if let Some(caches) = vector.get("tensors") {
            let outcome = planner.register_kv_caches(&tensors(caches));
            if is_division_by_zero(&vector["register"]) {
                assert!(matches!(outcome, Err(LayoutError::StrideMismatch { tensor: 0, .. })));
            } else {
                same(outcome, &vector["register"], |()| Value::Null);
            }
        }
        for step in items(&vector["steps"]) {
            let Some(block) = step["block"].as_u64() else {
                // A negative block id cannot be expressed; the reference refuses it, or finds nothing registered.
                assert!(step.get("error").is_some());
                continue;
            };
            let group = step["group"].as_u64().map(|group| group.try_into().unwrap());
            let request: Option<Arc<str>> = step["request"].as_str().map(Arc::from);
            let plan = match text(&step["op"]) {
                "registered" => planner.plan_registered_block("k", block, group, request.as_ref()),
                "at" => {
                    let addresses = serde_json::from_value(step["addresses"].clone()).unwrap();
                    planner.plan_for_block("k", block, &addresses, group, request.as_ref())
                }
                "materialize" => {
                    let plan = BlockTransferPlan {
                        group_id: group,
                        request_id: request,
                        ..BlockTransferPlan::new("k", block)
                    };
                    planner.materialize(&plan)
                }
                other => panic!("{other}"),
            };
            if let Ok(plan) = &plan {
                plans += 1;
                let layers: BTreeSet<_> = plan.ranges.iter().map(|range| &range.layer_name).collect();
                split += usize::from(layers.len() < plan.ranges.len());
                if step["op"] != "at" {
                    same_flat(&planner, block, group, plan);
                }
            }
            same(plan, step, |plan| plan_json(&plan));
        }
    }
    assert!(plans > 100 && split > 20, "{plans} plans, {split} of them with split blocks");
}

#[test]
fn trackers_and_load_specs() {
    for steps in section("trackers", 50) {
        let mut tracker = RequestTracker::default();
        for vector in items(&steps) {
            let step = &vector["step"];
            let tables = || -> Vec<Vec<u64>> { serde_json::from_value(step[1].clone()).unwrap() };
            match text(&step[0]) {
                "update" => same(tracker.update_blocks(&tables()), vector, |()| Value::Null),
                "replace" => tracker.replace_blocks(&tables()),
                "mark" => {
                    let saved = tracker.mark_saved(step[1].as_u64().unwrap(), step[2].as_u64().unwrap());
                    if is_division_by_zero(vector) {
                        assert_eq!(saved, Err(TrackerError::BlockSizeNotPositive));
                    } else {
                        same(saved, vector, |saved| json!(saved));
                    }
                }
                "reset" => {
                    tracker.load_spec = Some(LoadSpec::default());
                    tracker.reset();
                    assert_eq!(tracker.load_spec, None);
                }
                other => panic!("{other}"),
            }
            assert_eq!(json!([tracker.saved_tokens, tracker.block_ids]), vector["state"]);
        }
    }
    for vector in section("load_specs", 5) {
        let [local_tokens, external_tokens, expected] = u64s(&vector).try_into().unwrap();
        let spec = LoadSpec { local_tokens, external_tokens, ..LoadSpec::default() };
        assert_eq!(spec.num_tokens_to_load(), expected);
    }
}

fn job_plans(vector: &Value) -> JobPlans {
    let (keys, blocks, groups) = (names(&vector["keys"]), u64s(&vector["blocks"]), u32s(&vector["groups"]));
    let count = keys.len();
    match text(&vector["kind"]) {
        "load" => JobPlans::Load(BlockLoadBatch::new(keys, blocks, groups, "r".into()).unwrap()),
        "store" => {
            let hashes = (0..count).map(|_| BlockHash::new(&[1]).unwrap()).collect();
            let (tokens, sizes) = (vec![vec![]; count], vec![16; count]);
            let batch = BlockStoreBatch::new(
                keys,
                blocks,
                groups,
                hashes,
                vec![None; count],
                tokens,
                sizes,
                "r".into(),
            );
            JobPlans::Store(batch.unwrap())
        }
        _ => JobPlans::Plans(
            (0..count)
                .map(|index| BlockTransferPlan {
                    group_id: Some(groups[index]),
                    ranges: u64s(&vector["lengths"][index])
                        .into_iter()
                        .map(|length| KVRange {
                            layer_name: "l".into(),
                            group_id: 0,
                            block_id: blocks[index],
                            base_address: 0,
                            stride: 1,
                            length,
                            object_offset: 0,
                        })
                        .collect(),
                    ..BlockTransferPlan::new(&keys[index], blocks[index])
                })
                .collect(),
        ),
    }
}

#[test]
fn jobs() {
    let mut refused = 0;
    for vector in section("jobs", 80) {
        let mut job = TransferJobState::new(job_plans(&vector)).unwrap();
        if !vector["plan_bytes"].is_null() {
            let sizes = u64s(&vector["plan_bytes"]);
            if sizes.len() != items(&vector["keys"]).len() {
                // The reference fails when the bytes are read; here the job is not made.
                assert_eq!(vector["steps"][0]["state"]["bytes"]["error"][0], "ValueError");
                assert!(matches!(job.with_plan_bytes(sizes), Err(JobError::PlanBytesLength { .. })));
                refused += 1;
                continue;
            }
            job = job.with_plan_bytes(sizes).unwrap();
        }
        assert_eq!(json!(job.plans().keys().map(AsRef::as_ref).collect::<Vec<&str>>()), vector["keys"]);
        for step in items(&vector["steps"]) {
            let order = &step["step"];
            match text(&order[0]) {
                "start" => match (job.start(), step.get("error")) {
                    (Err(error), Some(expected)) => {
                        let expected = text(&expected[1]).replace("TransferJobStatus.", "").to_lowercase();
                        assert_eq!(error.to_string(), expected);
                    }
                    (outcome, expected) => assert!(outcome.is_ok() && expected.is_none(), "{step}"),
                },
                "complete" => job.complete(&names(&order[1])),
                "fail" => job.fail(&names(&order[1]), order[2].as_str()),
                "cancel" => job.cancel(text(&order[1])),
                other => panic!("{other}"),
            }
            let set = |keys: &BTreeSet<Arc<str>>| keys.iter().map(|key| key.to_string()).collect::<Vec<_>>();
            let state = json!({
                "status": job.status().name(),
                "completed": set(job.completed_keys()),
                "failed": set(job.failed_keys()),
                "error": job.error(),
                "bytes": {"ok": job.completed_bytes()},
                "failed_blocks": job.failed_block_ids(),
            });
            assert_eq!(state, step["state"], "{step}");
        }
    }
    assert!(refused > 0);
}

#[test]
fn batches() {
    let text_of = include_str!("golden/umbp_v033.json");
    let all: Value = serde_json::from_str(text_of).unwrap();
    let (loads, stores) = (items(&all["batches"]["load"]), items(&all["batches"]["store"]));
    assert!(loads.len() >= 5 && stores.len() >= 8);
    let row = |plan: &BlockTransferPlan| {
        vec![
            json!(plan.key.as_ref()),
            json!(plan.block_id),
            json!(plan.group_id),
            json!(plan.request_id.as_deref()),
            json!(plan.medium.as_ref()),
            json!(plan.block_size),
        ]
    };
    for vector in loads {
        let columns = &vector["columns"];
        let batch = BlockLoadBatch::new(names(&columns[0]), u64s(&columns[1]), u32s(&columns[2]), "r".into());
        same(batch, vector, |batch| json!(batch.iter().map(|plan| row(&plan)).collect::<Vec<_>>()));
    }
    for vector in stores {
        let columns = &vector["columns"];
        let hash = |value: &Value| BlockHash::new(&unhex(value)).unwrap();
        let batch = BlockStoreBatch::new(
            names(&columns[0]),
            u64s(&columns[1]),
            u32s(&columns[2]),
            items(&columns[3]).iter().map(hash).collect(),
            items(&columns[4]).iter().map(|value| (!value.is_null()).then(|| hash(value))).collect(),
            serde_json::from_value(columns[5].clone()).unwrap(),
            u32s(&columns[6]),
            "r".into(),
        );
        same(batch, vector, |batch| {
            let rows = batch.iter().map(|plan| {
                let mut row = row(&plan);
                row.push(json!(plan.block_hash.map(|hash| hash.to_string())));
                row.push(json!(plan.parent_block_hash.map(|hash| hash.to_string())));
                row.push(json!(plan.token_ids));
                row
            });
            json!(rows.collect::<Vec<_>>())
        });
    }
}

fn events(value: &Value) -> WorkerMetadata {
    let result = |item: &Value| StoreEventResult {
        completed_workers: item[1].as_u64().unwrap(),
        failed_objects: items(&item[2])
            .iter()
            .map(|object| {
                let group = object[0].as_u64().unwrap().try_into().unwrap();
                (group, BlockHash::new(&unhex(&object[1])).unwrap())
            })
            .collect(),
    };
    let store_events = items(value).iter().map(|item| (item[0].as_u64().unwrap(), result(item))).collect();
    WorkerMetadata { store_events }
}

#[test]
fn worker_reports_add_up() {
    for vector in section("aggregation", 12) {
        let mut total = WorkerMetadata::default();
        for report in items(&vector["reports"]) {
            total.aggregate(events(report));
        }
        assert_eq!(total, events(&vector["total"]));
    }
}
