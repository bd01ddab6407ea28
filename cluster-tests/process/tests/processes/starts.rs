//! Many processes at once.

use std::time::{Duration, Instant};

use kvfabric_process_tests::harness::{eventually, Fabric, Process, RELAXED_PEER_TIMEOUT_MS};
use kvfabric_process_tests::payload::Shape;
use kvfabric_process_tests::protocol::{Command, Keys};

const RANKS: u64 = 64;
const BLOCKS: u64 = 8;
const DEADLINE: Duration = Duration::from_secs(30);

/// 64 ranks start in the same moment, with no certificates made before: all become members, store, and load from others.
#[test]
fn sixty_four_ranks_start_at_once() {
    let mut fabric = Fabric::start(RELAXED_PEER_TIMEOUT_MS);
    // The ranks race for the development certificates too.
    std::fs::remove_dir_all(fabric.home().path().join("state")).unwrap();
    fabric.kill_directory();
    let begun = Instant::now();
    let mut ranks: Vec<Process> = (0..RANKS)
        .map(|number| {
            let mut spec = fabric.spec(&format!("rank-{number}"), "auto");
            spec.listen = "127.0.0.1:0".into();
            spec.shape = Shape { object_bytes: 4 << 10, pieces: 4 };
            spec.pool_bytes = 1 << 20;
            spec.extent_bytes = 64 << 10;
            spec.load_blocks = 16;
            fabric.spawn(&spec)
        })
        .collect();
    // The directory starts among them.
    fabric.restart_directory();
    let slowest = ranks.iter_mut().map(|rank| rank.ready().1).max().unwrap();
    println!("{RANKS} ranks are members after {:?}, the slowest start took {slowest:?}", begun.elapsed());
    assert_eq!(fabric.directory.directory().ranks_live, RANKS);
    for (number, rank) in (0..).zip(&mut ranks) {
        rank.tell(&Command::Store { keys: Keys { first: number * BLOCKS, count: BLOCKS }, put: number + 1 });
    }
    for rank in &mut ranks {
        let reply = rank.reply(DEADLINE * 2);
        assert!(matches!(reply, kvfabric_process_tests::protocol::Reply::Count(BLOCKS)), "{reply:?}");
    }
    assert_eq!(fabric.directory.directory().keys, RANKS * BLOCKS);
    // Every rank loads what two others stored, all at once.
    let from = |number: u64| Keys { first: (number + 1) % (RANKS - 1) * BLOCKS, count: 2 * BLOCKS };
    for (number, rank) in (0..).zip(&mut ranks) {
        rank.tell(&Command::Load { keys: from(number), deadline_ms: 30_000 });
    }
    for (number, rank) in (0..).zip(&mut ranks) {
        match rank.reply(DEADLINE * 2) {
            kvfabric_process_tests::protocol::Reply::Tally(tally) => {
                tally.assert_safe(rank.name());
                let summary = tally.summary();
                assert_eq!(tally.right, 2 * BLOCKS, "{}: {summary}", rank.name());
                let first = from(number).first / BLOCKS + 1;
                let expected = [(first, BLOCKS), (first + 1, BLOCKS)];
                assert_eq!(tally.puts.into_iter().collect::<Vec<_>>(), expected);
            }
            other => panic!("unexpected {other:?}"),
        }
    }
    println!("all of it took {:?}", begun.elapsed());
    // Half of them die in the same moment.
    for rank in &mut ranks[..32] {
        rank.kill();
    }
    let died = Instant::now();
    let everything = Keys { first: 0, count: RANKS * BLOCKS };
    let survivor = &mut ranks[40];
    eventually("the dead ranks' keys are misses", || {
        survivor.lookup(everything, Duration::from_secs(5)) == (RANKS * BLOCKS / 2, true)
    });
    println!("32 deaths seen by lookups after {:?}", died.elapsed());
    assert_eq!(survivor.load(everything, DEADLINE).right, RANKS * BLOCKS / 2);
}
