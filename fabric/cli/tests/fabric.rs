//! Commands end to end: real processes, real bytes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test file.

mod common;

use std::collections::HashSet;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, UdpSocket};

use common::{kvfabric, kvfabric_run, Scratch};
use serde_json::Value;

const EXCERPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/conversation_excerpt.jsonl");

/// Counts prefix hits of the excerpt without any code of the fabric: requests in file order, each stored before the
/// next, a hit being a block in the leading run of ids that were seen.
fn reference_hits(requests_max: usize) -> (u64, u64) {
    let text = std::fs::read_to_string(EXCERPT).unwrap();
    let mut seen = HashSet::new();
    let (mut hits, mut blocks) = (0, 0);
    for line in text.lines().take(requests_max) {
        let request: Value = serde_json::from_str(line).unwrap();
        let ids: Vec<u64> =
            request["hash_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
        hits += ids.iter().take_while(|id| seen.contains(*id)).count() as u64;
        blocks += ids.len() as u64;
        seen.extend(ids);
    }
    (hits, blocks)
}

#[test]
fn the_demo_shows_its_claims_on_every_transport() {
    let scratch = Scratch::new("demo");
    let outcome = kvfabric_run(&scratch, &["demo", "--blocks", "64", "--json"]);
    assert!(outcome.success, "{outcome:?}");
    let summary = outcome.summary();
    assert_eq!(summary["wrong_bytes"], 0, "{summary}");
    assert_eq!(summary["problems"], serde_json::json!([]));
    let events = outcome.events();
    for transport in ["shm", "tcp"] {
        assert!(summary["transports"][transport]["bytes"].as_u64() >= Some(64 << 17), "{summary}");
        let step = |name: &str| {
            let found = events
                .iter()
                .find(|e| e["event"] == "step" && e["transport"] == transport && e["step"] == name);
            found.unwrap_or_else(|| panic!("no step {name} on {transport}: {outcome:?}")).clone()
        };
        assert_eq!(step("store")["blocks_stored"], 64);
        assert_eq!(step("load")["blocks_loaded"], 64);
        let evict = step("evict");
        let misses = evict["blocks_missed"].as_u64().unwrap() + evict["blocks_stale"].as_u64().unwrap();
        assert_eq!((evict["blocks_loaded"].as_u64(), misses), (Some(32), 32), "{evict}");
        let kill = step("kill");
        let not_loaded =
            ["blocks_missed", "blocks_stale", "blocks_failed"].map(|name| kill[name].as_u64().unwrap());
        assert!(not_loaded.iter().sum::<u64>() > 0, "{kill}");
        assert_eq!(step("restart")["blocks_loaded"], 64);
    }
}

#[test]
fn a_transport_asked_for_is_the_only_one_used() {
    let scratch = Scratch::new("demo-tcp");
    let outcome = kvfabric_run(&scratch, &["demo", "--transport", "tcp", "--blocks", "8"]);
    assert!(outcome.success, "{outcome:?}");
    assert!(outcome.stdout.contains("every byte right"), "{outcome:?}");
    assert!(!outcome.stdout.contains("shm "), "{outcome:?}");
}

#[test]
fn the_replay_finds_exactly_the_hits_of_the_trace() {
    let scratch = Scratch::new("replay");
    let (hits, blocks) = reference_hits(usize::MAX);
    assert_eq!((hits, blocks), (322, 5537), "the excerpt changed");
    let outcome =
        kvfabric_run(&scratch, &["replay", EXCERPT, "--ranks", "3", "--bytes-per-token", "1", "--json"]);
    assert!(outcome.success, "{outcome:?}");
    let summary = outcome.summary();
    for (field, value) in [
        ("requests", 200),
        ("blocks_total", blocks),
        ("prefix_hit_blocks", hits),
        ("blocks_loaded", hits),
        ("blocks_stored", blocks - hits),
        ("blocks_missed", blocks - hits),
        ("blocks_stale", 0),
        ("blocks_failed", 0),
        ("wrong_bytes", 0),
        ("bytes_loaded", hits * 512),
        ("evictions", 0),
    ] {
        assert_eq!(summary[field].as_u64(), Some(value), "{field}: {summary}");
    }
    for field in ["lookup_p50_us", "lookup_p99_us", "load_p50_us", "load_p99_us"] {
        assert!(summary[field].as_u64() > Some(0), "{field}: {summary}");
    }
}

#[test]
fn hits_do_not_depend_on_ranks_or_transport() {
    let scratch = Scratch::new("replay-tcp");
    let (hits, blocks) = reference_hits(60);
    for (ranks, transport) in [("1", "auto"), ("2", "tcp"), ("4", "shm")] {
        let args =
            ["replay", EXCERPT, "--ranks", ranks, "--transport", transport, "--requests", "60", "--json"];
        let outcome = kvfabric_run(&scratch, &args);
        assert!(outcome.success, "{outcome:?}");
        let summary = outcome.summary();
        assert_eq!(summary["prefix_hit_blocks"].as_u64(), Some(hits), "{ranks} {transport}: {summary}");
        assert_eq!(summary["blocks_total"].as_u64(), Some(blocks));
        assert_eq!(summary["wrong_bytes"], 0);
    }
}

#[test]
fn many_requests_in_flight_and_small_pools_cost_hits_and_no_bytes() {
    let scratch = Scratch::new("replay-small");
    let (hits, blocks) = reference_hits(usize::MAX);
    for extra in [&["--concurrency", "8"][..], &["--speed", "100", "--verify", "always"]] {
        let mut args = vec!["replay", EXCERPT, "--ranks", "2", "--pool-bytes", "8M", "--json"];
        args.extend(extra);
        let outcome = kvfabric_run(&scratch, &args);
        assert!(outcome.success, "{outcome:?}");
        let summary = outcome.summary();
        assert_eq!((summary["wrong_bytes"].as_u64(), summary["requests"].as_u64()), (Some(0), Some(200)));
        assert!(summary["prefix_hit_blocks"].as_u64().unwrap() <= hits, "{summary}");
        assert_eq!(summary["blocks_total"].as_u64(), Some(blocks));
        assert!(summary["evictions"].as_u64().unwrap() > 0, "8 MiB hold a part of 45 MB: {summary}");
    }
}

#[test]
fn a_directory_says_when_it_is_ready_and_ends_on_sigterm() {
    let scratch = Scratch::new("directory");
    let mut child = kvfabric(&scratch, &["directory", "--listen", "127.0.0.1:0", "--json"]).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    let config = next();
    assert_eq!((&config["event"], &config["listen"]), (&"config".into(), &"127.0.0.1:0".into()), "{config}");
    let ready = next();
    assert_eq!(ready["event"], "ready");
    let address = ready["listen"].as_str().unwrap().to_owned();
    assert!(!address.ends_with(":0"), "{address}");
    let doctor = kvfabric_run(&scratch, &["doctor", "--directory", &address]);
    assert!(doctor.success, "{doctor:?}");
    // The same port again is refused.
    let second = kvfabric_run(&scratch, &["directory", "--listen", &address]);
    assert!(!second.success && second.stderr.contains(&address), "{second:?}");
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(next()["event"], "stopped");
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_port_in_use_is_an_error_that_names_it() {
    let scratch = Scratch::new("port");
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    for address in [tcp.local_addr().unwrap(), udp.local_addr().unwrap()] {
        let outcome = kvfabric_run(&scratch, &["directory", "--listen", &address.to_string()]);
        assert!(!outcome.success, "{outcome:?}");
        assert!(
            outcome.stderr.contains("error: ") && outcome.stderr.contains(&address.to_string()),
            "{outcome:?}"
        );
        assert!(!outcome.stdout.contains("ready"), "{outcome:?}");
    }
}

#[test]
fn listening_beyond_loopback_needs_certificates_or_an_explicit_word() {
    let scratch = Scratch::new("beyond");
    let outcome = kvfabric_run(&scratch, &["directory", "--listen", "0.0.0.0:0"]);
    assert!(!outcome.success, "{outcome:?}");
    assert!(
        outcome.stderr.contains("--tls-dir") && outcome.stderr.contains("--insecure-no-auth"),
        "{outcome:?}"
    );
    let outcome =
        kvfabric_run(&scratch, &["directory", "--listen", "127.0.0.1:0", "--tls-dir", "/nonexistent/tls"]);
    assert!(!outcome.success && outcome.stderr.contains("/nonexistent/tls"), "{outcome:?}");
}
