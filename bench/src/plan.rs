//! `plan`: what it costs to turn block ids into ranges, and keys into fingerprints. Nothing is transferred.
//!
//! Every output is verified, outside of the measured time: ranges must tile their objects and lie where plain
//! arithmetic puts them; key hashes must equal those of the hash's definition.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::io::Write as _;
use std::time::{Duration, Instant};

use anyhow::{ensure, Context as _, Result};
use hdrhistogram::Histogram;
use kvfabric_core::hash::{KeyHash, NamespaceKey};
use kvfabric_core::umbp::{
    BlockIdentityCodec, FlatRange, KVLayoutPlanner, KVRegion, KeyHasher, ParsedKey, RankNamespace,
    RegisteredTensor, UmbpNamespace,
};

/// Blocks that the tensors hold; plans pick from them in no order, as an engine's block tables do.
const POOL_BLOCKS: u64 = 65_536;
/// Bytes of a layer's block.
const LAYER_BYTES: u64 = 16 << 10;
/// Address of the first layer's block 0.
const BASE: u64 = 0x7f00_0000_0000;
/// Keys in one batch.
const KEYS: usize = 8192;
/// As long as a derived namespace.
const NAMESPACE: &str = "0123456789abcdef0123456789abcdef";

/// How the layers of a case lie in memory.
#[derive(Clone, Copy)]
enum Memory {
    /// A tensor for each layer, in which a block lies in this many physical parts.
    LayerOutermost { parts: u64 },
    /// All layers of a block side by side.
    BlockOutermost,
}

struct Case {
    op: &'static str,
    memory: Memory,
    blocks: usize,
    layers: usize,
    merged: bool,
}

const PLAIN: Memory = Memory::LayerOutermost { parts: 1 };
const SPLIT: Memory = Memory::LayerOutermost { parts: 4 };

const CASES: [Case; 5] = [
    Case { op: "lower", memory: PLAIN, blocks: 1000, layers: 160, merged: false },
    Case { op: "lower", memory: PLAIN, blocks: 6250, layers: 80, merged: false },
    Case { op: "lower_split", memory: SPLIT, blocks: 1000, layers: 40, merged: false },
    Case { op: "lower_split_merged", memory: SPLIT, blocks: 1000, layers: 40, merged: true },
    Case {
        op: "lower_packed_merged",
        memory: Memory::BlockOutermost,
        blocks: 1000,
        layers: 160,
        merged: true,
    },
];

/// What is done to a key.
#[derive(Clone, Copy)]
enum KeyOp {
    /// Text to parts.
    Parse,
    /// Text to K, of which the fingerprint is the first half.
    Hash,
}

/// Measures for about `seconds` in all and prints a table, or a JSON object a line.
///
/// # Errors
/// A result that does not verify, or an impossible duration.
pub fn run(seconds: f64, json: bool) -> Result<()> {
    ensure!(seconds > 0.0, "the duration must be positive");
    let rows = CASES.len() + 2;
    let share = Duration::try_from_secs_f64(seconds).context("duration")? / u32::try_from(rows)?;
    if !json {
        writeln!(
            std::io::stdout(),
            "{:<20} {:>7} {:>9} {:>9} {:>9} {:>10} {:>10} {:>13}",
            "op",
            "items",
            "per item",
            "ranges",
            "ns/range",
            "p50 us",
            "p99 us",
            "items/s"
        )?;
    }
    for case in &CASES {
        lowering(case, share)?.print(json)?;
    }
    keys("key_parse", KeyOp::Parse, share)?.print(json)?;
    keys("key_fingerprint", KeyOp::Hash, share)?.print(json)?;
    Ok(())
}

struct Row {
    op: &'static str,
    /// Blocks, or keys; a key counts as one range.
    items: usize,
    ranges_per_item: usize,
    range_bytes: u64,
    /// Nanoseconds of each round.
    rounds: Histogram<u64>,
}

impl Row {
    #[allow(clippy::cast_precision_loss)] // Far below 2^52.
    fn print(&self, json: bool) -> Result<()> {
        let Self { op, items, ranges_per_item, range_bytes, rounds } = self;
        let ranges = items * ranges_per_item;
        let (p50_ns, p99_ns) = (rounds.value_at_quantile(0.5) as f64, rounds.value_at_quantile(0.99) as f64);
        let ns_per_range = p50_ns / ranges as f64;
        let ops_per_s = *items as f64 * 1e9 / p50_ns;
        if json {
            let row = serde_json::json!({
                "bench": "plan",
                "op": op,
                "items": items,
                "ranges": ranges,
                "range_bytes": range_bytes,
                "ns_per_range": ns_per_range,
                "ops_per_s": ops_per_s,
                "p50_us": p50_ns / 1e3,
                "p99_us": p99_ns / 1e3,
                "rounds": rounds.len(),
                // A round that does not verify ends the run with an error.
                "verified": true,
            });
            writeln!(std::io::stdout(), "{row}")?;
        } else {
            writeln!(
                std::io::stdout(),
                "{op:<20} {items:>7} {ranges_per_item:>9} {ranges:>9} {ns_per_range:>9.2} {:>10.1} {:>10.1} {ops_per_s:>13.0}",
                p50_ns / 1e3,
                p99_ns / 1e3,
            )?;
        }
        Ok(())
    }
}

/// Repeats a round, which returns its measured time, until the share of time is used; the first one only warms up.
fn repeat(share: Duration, mut round: impl FnMut() -> Result<Duration>) -> Result<Histogram<u64>> {
    let mut rounds = Histogram::new(3)?;
    round()?;
    let begin = Instant::now();
    while rounds.is_empty() || begin.elapsed() < share {
        rounds.record(u64::try_from(round()?.as_nanos())?.max(1))?;
    }
    Ok(rounds)
}

/// A fixed sequence of well-mixed numbers.
fn mixed(index: u64) -> u64 {
    let mut value = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value ^ (value >> 27)
}

fn planner(case: &Case) -> Result<KVLayoutPlanner> {
    let layers = u64::try_from(case.layers)?;
    let (parts, stride, distance) = match case.memory {
        Memory::LayerOutermost { parts } => (parts, LAYER_BYTES, POOL_BLOCKS * LAYER_BYTES),
        Memory::BlockOutermost => (1, layers * LAYER_BYTES, LAYER_BYTES),
    };
    let (mut regions, mut tensors) = (Vec::new(), BTreeMap::new());
    for layer in 0..layers {
        let name = format!("model.layers.{layer}.self_attn.attn");
        regions.push(KVRegion::new(&name, 0, stride, LAYER_BYTES, layer * LAYER_BYTES, 16)?);
        let tensor = RegisteredTensor {
            base_address: BASE + layer * distance,
            block_stride: stride / parts,
            blocks: POOL_BLOCKS * parts,
            dimensions: 4,
        };
        tensors.insert(name, tensor);
    }
    let mut planner = KVLayoutPlanner::new(regions)?;
    planner.register_kv_caches(&tensors)?;
    Ok(planner)
}

fn lowering(case: &Case, share: Duration) -> Result<Row> {
    let planner = planner(case)?;
    let (plain, merged) = planner.ranges_per_block(Some(0))?;
    let ranges_per_item = if case.merged { merged } else { plain };
    let object_bytes = planner.object_size();
    let mut ranges = Vec::new();
    let mut number = 0u64;
    let rounds = repeat(share, || {
        number += 1;
        let ids: Vec<u64> =
            (0..case.blocks as u64).map(|index| mixed(number ^ (index << 20)) % POOL_BLOCKS).collect();
        ranges.clear();
        let start = Instant::now();
        if case.merged {
            planner.plan_merged_into(black_box(&ids), Some(0), &mut ranges)?;
        } else {
            planner.plan_into(black_box(&ids), Some(0), &mut ranges)?;
        }
        black_box(&ranges);
        let elapsed = start.elapsed();
        ensure!(ranges.len() == ids.len() * ranges_per_item, "wrong number of ranges");
        for (block, id) in ranges.chunks_exact(ranges_per_item).zip(&ids) {
            verify_block(case, *id, object_bytes, block)?;
        }
        Ok(elapsed)
    })?;
    let range_bytes = object_bytes / u64::try_from(ranges_per_item)?;
    Ok(Row { op: case.op, items: case.blocks, ranges_per_item, range_bytes, rounds })
}

/// The ranges tile the object, and each byte lies where the layer's tensor has it.
fn verify_block(case: &Case, id: u64, object_bytes: u64, ranges: &[FlatRange]) -> Result<()> {
    let mut offset = 0;
    for range in ranges {
        ensure!(range.object_offset == offset, "block {id}: a hole or an overlap at {offset}");
        let (layer, within) = (offset / LAYER_BYTES, offset % LAYER_BYTES);
        let expected = match case.memory {
            Memory::LayerOutermost { .. } => BASE + (layer * POOL_BLOCKS + id) * LAYER_BYTES + within,
            Memory::BlockOutermost => BASE + id * object_bytes + offset,
        };
        ensure!(range.address == expected, "block {id}: {:#x} in place of {expected:#x}", range.address);
        ensure!(u64::from(range.layer) == layer, "block {id}: wrong layer at {offset}");
        offset += u64::from(range.length);
    }
    ensure!(offset == object_bytes, "block {id}: {offset} of {object_bytes} bytes");
    Ok(())
}

fn keys(op: &'static str, kind: KeyOp, share: Duration) -> Result<Row> {
    let codec = BlockIdentityCodec::new(UmbpNamespace::new(NAMESPACE)?, RankNamespace::default());
    let definition = NamespaceKey::derive(b"", NAMESPACE, b"");
    let (mut texts, mut expected) = (Vec::new(), Vec::new());
    for index in 0..KEYS as u64 {
        let mut hash = [0; 32];
        for (word, chunk) in (0..).zip(hash.chunks_exact_mut(8)) {
            chunk.copy_from_slice(&mixed(4 * index + word).to_le_bytes());
        }
        let rank = RankNamespace { tp_rank: u32::try_from(index % 8)?, ..RankNamespace::default() };
        let key = codec.key_for_namespace(&hash, u32::try_from(index % 3)?, rank)?;
        expected.push(definition.hash(key.at(), &hash));
        texts.push(key.to_string());
    }
    let mut hasher = KeyHasher::new(b"", b"");
    let mut hashes: Vec<KeyHash> = Vec::new();
    let rounds = repeat(share, || {
        hashes.clear();
        let start = Instant::now();
        match kind {
            KeyOp::Parse => {
                for text in &texts {
                    black_box(ParsedKey::parse(black_box(text.as_bytes()))?);
                }
            }
            KeyOp::Hash => hasher
                .hash_into(texts.iter().map(String::as_bytes), &mut hashes)
                .map_err(|(index, error)| anyhow::Error::new(error).context(format!("key {index}")))?,
        }
        black_box(&hashes);
        let elapsed = start.elapsed();
        match kind {
            KeyOp::Parse => {
                for (text, expected) in texts.iter().zip(&expected) {
                    let parsed = ParsedKey::parse(text.as_bytes())?;
                    ensure!(definition.hash(parsed.at, parsed.block_hash.as_bytes()) == *expected, "{text}");
                }
            }
            KeyOp::Hash => ensure!(hashes == expected, "key hashes differ from their definition"),
        }
        Ok(elapsed)
    })?;
    Ok(Row { op, items: KEYS, ranges_per_item: 1, range_bytes: 0, rounds })
}
