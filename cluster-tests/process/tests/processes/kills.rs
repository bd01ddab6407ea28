//! SIGKILL of owners, readers and the directory at random moments under load.

use std::time::{Duration, Instant};

use kvfabric_process_tests::harness::{eventually, Fabric, Process, RELAXED_PEER_TIMEOUT_MS};
use kvfabric_process_tests::protocol::{ChurnLoop, Command, Keys, LoadLoop, RankSpec, Tally};
use kvfabric_process_tests::random::{run_time, seed, Random};

const KEYS: u64 = 300;
const DEADLINE_MS: u64 = 3_000;
const LOOKUP_BUDGET: Duration = Duration::from_secs(5);

/// Each owner has keys of its own, and every owner has the last third: replicas with different puts.
fn keys_of(owner: u64) -> [Keys; 2] {
    let third = KEYS / 3;
    [Keys { first: owner * third, count: third }, Keys { first: 2 * third, count: third }]
}

struct Owner {
    number: u64,
    life: u64,
    spec: RankSpec,
    process: Process,
}

impl Owner {
    fn start(fabric: &Fabric, number: u64, transport: &str, random: &mut Random) -> Self {
        let spec = fabric.spec(&format!("owner-{number}"), transport);
        let process = fabric.rank(&spec);
        let mut owner = Self { number, life: 0, spec, process };
        owner.fill(random);
        owner
    }

    /// Puts are numbered by owner, life and turn: no two have the same.
    fn put(&self) -> u64 {
        (self.number + 1) << 48 | self.life << 32
    }

    /// Stores the owner's keys and goes on evicting them and storing other bytes under them.
    fn fill(&mut self, random: &mut Random) {
        self.life += 1;
        let put = self.put();
        for keys in keys_of(self.number) {
            self.process.store(keys, put);
        }
        self.process.done(&Command::StartChurn(ChurnLoop {
            keys: Keys { first: self.number * KEYS / 3, count: KEYS - self.number * KEYS / 3 },
            first_put: put + 1,
            batch: 8,
            pause_ms: 3,
            seed: random.number(),
        }));
    }

    /// Dies and comes back under its name and port, with other content.
    fn die_and_return(&mut self, fabric: &Fabric, pause: Duration, random: &mut Random) {
        self.process.kill();
        std::thread::sleep(pause);
        self.process = fabric.rank(&self.spec);
        self.fill(random);
    }
}

fn load_loop(random: &mut Random) -> LoadLoop {
    LoadLoop {
        keys: Keys { first: 0, count: KEYS },
        deadline_ms: DEADLINE_MS,
        cancel_one_in: 7,
        seed: random.number(),
    }
}

fn reader(fabric: &Fabric, number: u64, transport: &str, random: &mut Random) -> (RankSpec, Process) {
    let spec = fabric.spec(&format!("reader-{number}"), transport);
    let mut process = fabric.rank(&spec);
    process.start_loads(load_loop(random));
    (spec, process)
}

/// After the last fault everything must be found and loaded again.
fn recovers(owners: &mut [Owner], readers: &mut [(RankSpec, Process)]) -> Tally {
    let mut total = Tally::default();
    for (_, reader) in readers.iter_mut() {
        let tally = reader.tally(&Command::StopLoads);
        println!("{}: {}", reader.name(), tally.summary());
        total.add(&tally);
    }
    for owner in owners {
        assert!(owner.process.count(&Command::StopChurn) > 0, "owner {} stored nothing", owner.number);
        assert_eq!(owner.process.rank().mismatches, 0);
    }
    for (_, reader) in readers {
        eventually("every key is found and loaded again", || {
            let keys = Keys { first: 0, count: KEYS };
            reader.lookup(keys, LOOKUP_BUDGET) == (KEYS, true)
                && reader.load(keys, Duration::from_secs(10)).right == KEYS
        });
        let figures = reader.rank();
        assert_eq!((figures.mismatches, figures.jobs_in_progress), (0, 0));
    }
    assert!(total.right > 0, "the load never loaded anything");
    total
}

#[derive(Clone, Copy)]
enum Victim {
    Owner,
    Reader,
    Directory,
    /// Stopped for a while instead of killed.
    Stopped,
}

fn killed_at_random_moments(test: &str, transport: &str, victims: &[Victim]) {
    let mut random = Random::new(seed(test));
    let mut fabric = Fabric::start(RELAXED_PEER_TIMEOUT_MS);
    let mut owners: Vec<Owner> =
        (0..2).map(|number| Owner::start(&fabric, number, transport, &mut random)).collect();
    let mut readers: Vec<(RankSpec, Process)> =
        (0..2).map(|number| reader(&fabric, number, transport, &mut random)).collect();
    let until = Instant::now() + run_time(Duration::from_secs(6));
    let mut kills = 0;
    while Instant::now() < until {
        std::thread::sleep(random.between(Duration::from_millis(50), Duration::from_millis(700)));
        let pause = random.between(Duration::ZERO, Duration::from_millis(300));
        let which = usize::try_from(random.below(2)).unwrap();
        kills += 1;
        match victims[usize::try_from(random.below(victims.len() as u64)).unwrap()] {
            Victim::Owner => owners[which].die_and_return(&fabric, pause, &mut random),
            Victim::Reader => {
                let (spec, process) = &mut readers[which];
                println!("killed {}: {}", spec.name, process.tally(&Command::PeekLoads).summary());
                process.kill();
                std::thread::sleep(pause);
                *process = fabric.rank(spec);
                process.start_loads(load_loop(&mut random));
            }
            Victim::Stopped => {
                owners[which].process.stop();
                std::thread::sleep(pause * 5);
                owners[which].process.cont();
            }
            Victim::Directory => {
                fabric.kill_directory();
                std::thread::sleep(pause);
                fabric.restart_directory();
                // The ranks come back by themselves.
                for owner in &mut owners {
                    eventually("the owner is a member again", || owner.process.rank().directory_connected);
                }
            }
        }
    }
    println!("{kills} kills");
    recovers(&mut owners, &mut readers);
}

#[test]
fn owners_killed_under_load_over_shm() {
    killed_at_random_moments("owners_killed_under_load_over_shm", "shm", &[Victim::Owner]);
}

#[test]
fn owners_killed_under_load_over_tcp() {
    killed_at_random_moments("owners_killed_under_load_over_tcp", "tcp", &[Victim::Owner]);
}

#[test]
fn readers_killed_under_load() {
    killed_at_random_moments("readers_killed_under_load", "auto", &[Victim::Reader]);
}

#[test]
fn directory_killed_under_load() {
    killed_at_random_moments("directory_killed_under_load", "tcp", &[Victim::Directory]);
}

#[test]
fn anybody_killed_under_load() {
    let victims = [Victim::Owner, Victim::Reader, Victim::Directory, Victim::Stopped];
    killed_at_random_moments("anybody_killed_under_load", "auto", &victims);
}
