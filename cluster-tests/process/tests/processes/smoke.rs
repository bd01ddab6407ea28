//! The harness itself: two ranks exchange blocks over each transport.

use std::time::Duration;

use kvfabric_process_tests::harness::{Fabric, RELAXED_PEER_TIMEOUT_MS};
use kvfabric_process_tests::protocol::{Command, Keys};

const DEADLINE: Duration = Duration::from_secs(20);

fn exchange(transport: &str) {
    let fabric = Fabric::start(RELAXED_PEER_TIMEOUT_MS);
    let mut owner = fabric.rank(&fabric.spec("owner", transport));
    let mut reader = fabric.rank(&fabric.spec("reader", transport));
    let keys = Keys { first: 0, count: 200 };
    owner.store(keys, 1);
    assert_eq!(reader.lookup(Keys { first: 0, count: 300 }, DEADLINE), (200, true));
    let tally = reader.load(Keys { first: 0, count: 300 }, DEADLINE);
    println!("{}", tally.summary());
    assert_eq!((tally.right, tally.missed), (200, 100));
    assert_eq!(tally.transports.get(transport), Some(&200));
    assert_eq!(reader.rank().routes.get("owner").map(String::as_str), Some(transport));
    assert_eq!(reader.count(&Command::CheckCanaries), 0);
    owner.close();
    reader.close();
}

#[test]
fn blocks_travel_between_processes_over_shm() {
    exchange("shm");
}

#[test]
fn blocks_travel_between_processes_over_tcp() {
    exchange("tcp");
}
