//! Processes of a replay: they end with their parent, their end is noticed, and an unlimited pool has a limit.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // A test file.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use common::{kvfabric, Scratch};
use rustix::process::{kill_process, Pid, Signal};
use serde_json::{json, Value};

const EXCERPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/conversation_excerpt.jsonl");

/// How long an expected change may take before the test fails. Far above what it needs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Kills the process when the test ends, however it ends.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(i32::try_from(number).unwrap()).unwrap()
}

/// State and parent of a process, `None` when there is none of that number.
fn process(number: u32) -> Option<(char, u32)> {
    let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
    let rest = stat.rsplit_once(')')?.1;
    let mut fields = rest.split_whitespace();
    Some((fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}

/// Living children of a process with their command lines.
fn children(parent: u32) -> Vec<(u32, String)> {
    let entries = std::fs::read_dir("/proc").unwrap();
    let numbers = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    numbers
        .filter(|number| process(*number).is_some_and(|(state, its)| its == parent && state != 'Z'))
        .filter_map(|number| {
            Some((
                number,
                std::fs::read_to_string(format!("/proc/{number}/cmdline")).ok()?.replace('\0', " "),
            ))
        })
        .collect()
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Starts a replay that takes much longer than the test, and waits until its ranks work.
fn slow_replay(scratch: &Scratch) -> (Guard, Vec<(u32, String)>) {
    let args = ["replay", EXCERPT, "--ranks", "2", "--speed", "0.001", "--bytes-per-token", "1", "--json"];
    let mut parent = Guard(kvfabric(scratch, &args).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(parent.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains("\"start\""), "{line}");
    let number = parent.0.id();
    wait_until("start of a directory and two ranks", || children(number).len() == 3);
    (parent, children(number))
}

#[test]
fn no_process_outlives_its_parent() {
    let scratch = Scratch::new("orphans");
    let (mut parent, started) = slow_replay(&scratch);
    parent.0.kill().unwrap();
    parent.0.wait().unwrap();
    for (number, command) in started {
        wait_until(&command, || process(number).is_none_or(|(state, _)| state == 'Z'));
    }
}

#[test]
fn a_rank_that_dies_ends_the_replay_with_its_name() {
    let scratch = Scratch::new("dead-rank");
    let (mut parent, started) = slow_replay(&scratch);
    let (number, _) = started.iter().find(|(_, command)| command.contains("replay-1")).unwrap();
    // The rank may still be starting: its end is noticed then, too.
    kill_process(pid(*number), Signal::KILL).unwrap();
    wait_until("end of the replay", || parent.0.try_wait().unwrap().is_some());
    assert!(!parent.0.wait().unwrap().success());
    let mut text = String::new();
    std::io::Read::read_to_string(parent.0.stderr.as_mut().unwrap(), &mut text).unwrap();
    assert!(text.starts_with("error: ") && text.contains("replay-1") && text.contains("signal"), "{text}");
    for (number, command) in started {
        wait_until(&command, || process(number).is_none_or(|(state, _)| state == 'Z'));
    }
}

#[test]
fn an_unlimited_pool_that_is_full_is_a_clear_error() {
    let scratch = Scratch::new("full");
    let listen = ["directory", "--listen", "127.0.0.1:0", "--json"];
    let mut directory = Guard(kvfabric(&scratch, &listen).spawn().unwrap());
    let lines = BufReader::new(directory.0.stdout.take().unwrap()).lines();
    let ready = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
    let ready = ready.take(2).find(|event| event["event"] == "ready").unwrap();
    let parent = std::process::id().to_string();
    let mut command = kvfabric(&scratch, &["child", "--parent-pid", &parent, "--name", "full"]);
    command.stdin(Stdio::piped());
    // The kernel ends the child with the thread that started it, which is this one.
    let mut rank = Guard(command.spawn().unwrap());
    let settings = json!({
        "name": "full", "directory": ready["listen"], "pool_bytes": "1048576", "extent_bytes": "65536",
    });
    let role = json!({
        "role": "replay_rank", "settings": settings, "object_bytes": 8192, "request_blocks_max": 16, "workers": 1,
        "in_order": true, "unlimited": true,
    });
    let mut stdin = rank.0.stdin.take().unwrap();
    writeln!(stdin, "{role}").unwrap();
    for request in 0..16_u64 {
        let ids: Vec<u64> = (request * 16..request * 16 + 16).collect();
        writeln!(stdin, "{}", json!({ "request": request, "hash_ids": ids })).unwrap();
    }
    let events = BufReader::new(rank.0.stdout.take().unwrap()).lines();
    let mut stored = 0;
    for event in events.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap()) {
        match event["event"].as_str().unwrap() {
            "stored" => stored += 1,
            "failed" => {
                let message = event["message"].as_str().unwrap();
                assert!(
                    message.contains("unlimited pool is full") && message.contains("--pool-bytes"),
                    "{message}"
                );
                assert!((4..=8).contains(&stored), "1 MiB hold at most 8 requests of 128 KiB, not {stored}");
                return;
            }
            _ => {}
        }
    }
    panic!("the pool never filled");
}
