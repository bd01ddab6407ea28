//! The full public trace through four rank processes with real bytes. `./test process` runs it when `KVFABRIC_TRACES`
//! names the traces' folder:
//!
//! ```text
//! cargo build --release --bin kvfabric
//! KVFABRIC_TRACES=DIR cargo test --release -p kvfabric-process-tests --test full_trace -- --ignored
//! ```
//!
//! It is ignored otherwise, because the traces are not part of the project and the replay moves 1.5 GB.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test file.

use std::path::PathBuf;
use std::process::Command;

use kvfabric_process_tests::harness::binary;
use serde_json::Value;

/// Ranks of the replay.
const RANKS: u64 = 4;
/// A block of 512 tokens at 16 bytes a token.
const BLOCK_BYTES: u64 = 8 << 10;
/// Blocks of the conversation trace.
const BLOCKS_TOTAL: u64 = 288_500;
/// Blocks of it that lie in a prefix that an earlier request left behind: what a pool without limits finds.
const PREFIX_HITS: u64 = 105_710;
/// Room in all pools together, in blocks, and the hits that must be found with it.
const ROOMS: [(u64, u64); 2] = [(30_000, 93_967), (10_000, 59_370)];

fn replay(pool_bytes: &str) -> Value {
    let folder = std::env::var_os("KVFABRIC_TRACES").expect("KVFABRIC_TRACES names the folder of the traces");
    let trace = PathBuf::from(folder).join("conversation_trace.jsonl");
    assert!(trace.is_file(), "{} is not there", trace.display());
    let program = binary("kvfabric");
    assert!(program.is_file(), "{} is not built; cargo build --release --bin kvfabric", program.display());
    let output = Command::new(program)
        .arg("replay")
        .arg(&trace)
        .args(["--ranks", &RANKS.to_string(), "--pool-bytes", pool_bytes, "--speed", "max", "--json"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{errors}", output.status);
    let last = text.lines().last().expect("the replay writes a summary");
    println!("{last}");
    let summary: Value = serde_json::from_str(last).unwrap();
    assert_eq!(summary["event"], "summary");
    summary
}

fn number(summary: &Value, name: &str) -> u64 {
    summary[name].as_u64().unwrap_or_else(|| panic!("the summary has no {name}: {summary}"))
}

fn check_bytes(summary: &Value) {
    assert_eq!(number(summary, "wrong_bytes"), 0);
    assert_eq!(number(summary, "blocks_total"), BLOCKS_TOTAL);
    assert!(number(summary, "bytes_loaded") > 0);
}

/// With room for everything, every prefix that was there before is found, and nothing else.
#[test]
#[ignore = "needs the public traces; ./test runs it when KVFABRIC_TRACES names their folder"]
fn every_prefix_is_found_with_unlimited_pools() {
    let summary = replay("unlimited");
    check_bytes(&summary);
    assert_eq!(number(&summary, "prefix_hit_blocks"), PREFIX_HITS);
}

/// With little room the eviction policy decides what is found.
#[test]
#[ignore = "needs the public traces; ./test runs it when KVFABRIC_TRACES names their folder"]
fn eviction_keeps_what_comes_again() {
    for (room_blocks, hits_least) in ROOMS {
        // The capacity is each rank's.
        let summary = replay(&(room_blocks / RANKS * BLOCK_BYTES).to_string());
        check_bytes(&summary);
        let hits = number(&summary, "prefix_hit_blocks");
        println!("room for {room_blocks} blocks: {hits} hits, {hits_least} wanted");
        assert!(hits >= hits_least, "room for {room_blocks} blocks: {hits} hits, {hits_least} wanted");
    }
}
