//! SIGSTOP: processes that live but do not answer.

use std::time::{Duration, Instant};

use kvfabric_process_tests::harness::{eventually, Fabric, Process, PATIENCE, RELAXED_PEER_TIMEOUT_MS};
use kvfabric_process_tests::payload::Shape;
use kvfabric_process_tests::protocol::{Command, Keys, LoadLoop, Reply};

const KEYS: Keys = Keys { first: 0, count: 64 };
const BUDGET: Duration = Duration::from_secs(5);
const DEADLINE: Duration = Duration::from_secs(20);
/// How long the owner stands still.
const STOP: Duration = Duration::from_secs(10);
/// Long enough that the directory does not hide the stopped owner.
const NEVER_HIDDEN_MS: u64 = 120_000;
/// Room for a busy machine where a bound is under test.
const SLACK: Duration = Duration::from_secs(2);

fn pair(transport: &str, peer_timeout_ms: u64) -> (Fabric, Process, Process) {
    let fabric = Fabric::start(peer_timeout_ms);
    let mut owner = fabric.rank(&fabric.spec("owner", transport));
    let mut reader = fabric.rank(&fabric.spec("reader", transport));
    owner.store(KEYS, 1);
    assert_eq!(reader.load(KEYS, DEADLINE).right, KEYS.count);
    (fabric, owner, reader)
}

/// tcp: a load from a stopped owner is final by its deadline and the drain bound, its memory is the engine's again, and
/// what the owner sends when it runs again reaches no destination.
#[test]
fn stopped_owner_over_tcp_delays_a_load_to_its_deadline_and_no_byte_comes_late() {
    let (fabric, mut owner, mut reader) = pair("tcp", NEVER_HIDDEN_MS);
    // Connected already, and asks only when the owner is about to go on: its answers do come, too late.
    let mut late = fabric.rank(&fabric.spec("late", "tcp"));
    assert_eq!(late.load(KEYS, DEADLINE).right, KEYS.count);
    let deadline = Duration::from_millis(500);
    let stopped = Instant::now();
    owner.stop();
    // The memory is used again and again while answers to earlier requests are still owed.
    while stopped.elapsed() < STOP - Duration::from_secs(1) {
        expect_deadline(&mut reader, deadline);
        std::thread::sleep(Duration::from_millis(300));
    }
    expect_deadline(&mut late, deadline);
    std::thread::sleep(STOP.saturating_sub(stopped.elapsed()));
    let mut readers = [reader, late];
    for reader in &mut readers {
        assert_eq!(reader.count(&Command::CheckCanaries), 0);
    }
    owner.cont();
    // Everything that is still owed has time to arrive.
    std::thread::sleep(Duration::from_secs(1));
    for reader in &mut readers {
        assert_eq!(reader.count(&Command::CheckCanaries), 0, "late bytes reached memory at rest");
        let back = eventually("loads work again", || reader.load(KEYS, DEADLINE).right == KEYS.count);
        println!("{}: loads work again {back:?} after the check", reader.name());
        assert_eq!(reader.count(&Command::CheckCanaries), 0);
    }
}

/// A load from an owner that stands still ends by its deadline, or before it where the directory knows better.
fn expect_deadline(reader: &mut Process, deadline: Duration) {
    let tally = reader.load(KEYS, deadline);
    println!("{}: final after {} ms, {:?}", reader.name(), tally.final_ms, tally.failed);
    assert_eq!(tally.right, 0, "a stopped owner sent bytes");
    assert!(Duration::from_millis(tally.final_ms) < deadline + SLACK, "final after {} ms", tally.final_ms);
}

/// The same in the middle of a load: some blocks have arrived, the rest is on its way.
#[test]
fn owner_stopped_in_the_middle_of_a_load_over_tcp() {
    const LARGE: Keys = Keys { first: 1_000, count: 64 };
    let fabric = Fabric::start(NEVER_HIDDEN_MS);
    let large = |name: &str| {
        let mut spec = fabric.spec(name, "tcp");
        spec.shape = Shape { object_bytes: 1 << 20, pieces: 16 };
        spec.extent_bytes = 16 << 20;
        spec.pool_bytes = 128 << 20;
        spec
    };
    let mut owner = fabric.rank(&large("owner"));
    owner.store(LARGE, 1);
    let mut partly = 0;
    for round in 0..5 {
        // A reader of its own each round: the directory hides a replica from one that reported it, ever longer.
        let mut reader = fabric.rank(&large(&format!("reader-{round}")));
        assert_eq!(reader.load(Keys { first: 1_000, count: 1 }, DEADLINE).right, 1);
        reader.done(&Command::BeginLoad { keys: LARGE, deadline_ms: 400 });
        std::thread::sleep(Duration::from_millis(4 * (round + 1)));
        owner.stop();
        let tally = reader.tally(&Command::EndLoad { cancel: false, wait_ms: 20_000 });
        println!("{}", tally.summary());
        assert!(Duration::from_millis(tally.final_ms) < Duration::from_millis(400) + SLACK);
        assert_eq!(tally.right + tally.failed.get("DeadlineExceeded").unwrap_or(&0), LARGE.count);
        partly += u64::from(tally.right > 0 && tally.right < LARGE.count);
        owner.cont();
        std::thread::sleep(Duration::from_millis(300));
        assert_eq!(reader.count(&Command::CheckCanaries), 0, "late bytes reached memory at rest");
    }
    println!("{partly} loads were stopped in the middle");
}

/// shm: the reader copies by itself, so loads from a stopped owner go on and are valid. Stopped for longer than the idle
/// timeout of its control connection (10 s): only the peer timeout may hide it.
#[test]
fn stopped_owner_over_shm_does_not_hold_up_loads() {
    let (_fabric, mut owner, mut reader) = pair("shm", NEVER_HIDDEN_MS);
    owner.stop();
    let stopped = Instant::now();
    let mut loads = 0;
    while stopped.elapsed() < STOP + Duration::from_secs(2) {
        let tally = reader.load(KEYS, DEADLINE);
        assert_eq!(tally.right, KEYS.count, "{:?}", tally.failed);
        loads += 1;
        std::thread::sleep(Duration::from_millis(50));
    }
    println!("{loads} loads while the owner was stopped");
    owner.cont();
    assert_eq!(owner.count(&Command::Evict { keys: KEYS }), KEYS.count);
    eventually("evicted keys are misses", || reader.lookup(KEYS, BUDGET) == (0, true));
    assert_eq!(reader.load(KEYS, DEADLINE).right, 0);
}

/// Rule M2: a rank that does not answer pings is hidden, not closed; when it runs again its blocks are found again.
#[test]
fn stopped_owner_is_hidden_and_comes_back_under_its_incarnation() {
    let (_fabric, mut owner, mut reader) = pair("auto", 1_000);
    let incarnation = owner.rank().incarnation;
    owner.stop();
    let hidden = eventually("its keys are hidden", || reader.lookup(KEYS, BUDGET) == (0, true));
    println!("hidden {hidden:?} after it stopped (peer timeout 1 s)");
    std::thread::sleep(Duration::from_secs(2));
    owner.cont();
    let back = eventually("its keys are found again", || reader.lookup(KEYS, BUDGET) == (KEYS.count, true));
    println!("found again {back:?} after it went on");
    assert_eq!(reader.load(KEYS, DEADLINE).right, KEYS.count);
    eventually("it is a member", || owner.rank().directory_connected);
    assert_eq!(owner.rank().incarnation, incarnation);
}

/// A stopped directory costs hits and nothing else: lookups keep to their budget, loads end, and all comes back.
#[test]
fn stopped_directory_costs_hits_only() {
    let (fabric, mut owner, mut reader) = pair("auto", RELAXED_PEER_TIMEOUT_MS);
    let mut directory = fabric.directory;
    reader.start_loads(LoadLoop { keys: KEYS, deadline_ms: 3_000, cancel_one_in: 5, seed: 1 });
    directory.stop();
    let stopped = Instant::now();
    while stopped.elapsed() < Duration::from_secs(3) {
        match reader.ask(&Command::Lookup { keys: KEYS, budget_ms: 50 }) {
            Reply::Lookup { hits, complete, micros } => {
                assert_eq!((hits, complete), (0, false), "a stopped directory answered");
                assert!(
                    Duration::from_micros(micros) < Duration::from_millis(50) + SLACK,
                    "took {micros} us"
                );
            }
            other => panic!("unexpected {other:?}"),
        }
    }
    directory.cont();
    eventually("lookups hit again", || reader.lookup(KEYS, BUDGET) == (KEYS.count, true));
    let tally = reader.tally(&Command::StopLoads);
    println!("{}", tally.summary());
    eventually("loads work again", || reader.load(KEYS, DEADLINE).right == KEYS.count);
    owner.store(Keys { first: 900, count: 4 }, 2);
    assert_eq!(reader.load(Keys { first: 900, count: 4 }, DEADLINE).right, 4);
}

/// A load that is given up is final within the drain bound although its owner stands still; only then is its memory free.
#[test]
fn load_given_up_in_flight_keeps_its_memory_until_it_is_final() {
    let (_fabric, mut owner, mut reader) = pair("tcp", NEVER_HIDDEN_MS);
    for _ in 0..3 {
        owner.stop();
        reader.done(&Command::BeginLoad { keys: KEYS, deadline_ms: 60_000 });
        std::thread::sleep(Duration::from_millis(100));
        assert!(matches!(reader.ask(&Command::EndLoad { cancel: false, wait_ms: 0 }), Reply::Pending));
        match reader.ask(&Command::DeregisterLoadMemory) {
            Reply::Error { kind, message, .. } => {
                assert_eq!(kind, "InUse");
                assert!(message.contains("wait for it or cancel it"), "{message}");
            }
            other => panic!("memory in use was taken back: {other:?}"),
        }
        let cancelled = Instant::now();
        let tally = reader.tally(&Command::EndLoad { cancel: true, wait_ms: 20_000 });
        println!("final {:?} after the cancel: {}", cancelled.elapsed(), tally.summary());
        assert_eq!(tally.failed.get("Cancelled"), Some(&KEYS.count));
        assert!(cancelled.elapsed() < SLACK);
        // The memory rests with a canary in it while the owner runs again and sends what it owes.
        owner.cont();
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(reader.count(&Command::CheckCanaries), 0, "late bytes reached memory at rest");
        eventually("loads work again", || reader.load(KEYS, DEADLINE).right == KEYS.count);
    }
    let reply = {
        reader.tell(&Command::DeregisterLoadMemory);
        reader.reply(PATIENCE)
    };
    assert!(matches!(reply, Reply::Done), "{reply:?}");
}
