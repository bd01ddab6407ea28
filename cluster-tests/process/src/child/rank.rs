//! A rank that carries out commands.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvfabric_core::LayoutId;
use kvfabric_node::{
    parse_transport, BlockOk, GroupLayout, Namespace, NamespaceSpec, Node, NodeConfig, StoreItem,
};

use super::loads::{turn, Loader, Running};
use super::{kind_of, millis, reply, start_failed};
use crate::arena::Arena;
use crate::payload::{object, umbp_key};
use crate::protocol::{ChurnLoop, Command, Keys, LoadLoop, RankFigures, RankSpec, Reply, Tally};
use crate::random::Random;

/// Bound of what is not under test; generous, the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(30);
/// Areas of a loop: a canary rests for so many loads less one.
const AREAS: usize = 4;
/// Blocks stored in one job.
const STORE_BATCH: usize = 32;

/// A loop on a thread of its own.
struct Loop<T> {
    stop: Arc<AtomicBool>,
    state: Arc<Mutex<T>>,
    thread: JoinHandle<()>,
}

impl<T: Clone + Send + 'static> Loop<T> {
    fn start(state: T, mut turn: impl FnMut(&Mutex<T>) + Send + 'static) -> Self {
        let (stop, state) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(state)));
        let (stopping, shared) = (stop.clone(), state.clone());
        let thread = std::thread::spawn(move || {
            while !stopping.load(Ordering::Acquire) {
                turn(&shared);
            }
        });
        Self { stop, state, thread }
    }

    fn peek(&self) -> T {
        self.state.lock().expect("the loop did not panic").clone()
    }

    fn stop(self) -> T {
        self.stop.store(true, Ordering::Release);
        self.thread.join().expect("the loop did not panic");
        self.state.lock().expect("the loop did not panic").clone()
    }
}

struct RankProcess {
    node: Arc<Node>,
    ns: Namespace,
    spec: RankSpec,
    loader: Loader,
    arena: Arena,
    running: Option<Running>,
    loads: Option<(Loop<Tally>, Arc<Mutex<Arena>>)>,
    churn: Option<Loop<u64>>,
}

pub(super) fn run(spec: &RankSpec, commands: impl Iterator<Item = Command>) {
    let begun = Instant::now();
    let mut config = NodeConfig::new(&spec.name, &spec.directory, spec.pool_bytes);
    config.listen = spec.listen.parse::<SocketAddr>().expect("an address");
    config.transport = parse_transport(&spec.transport).expect("a transport");
    config.extent_bytes = spec.extent_bytes;
    config.peer_timeout = Duration::from_millis(spec.peer_timeout_ms);
    config.start_timeout = Duration::from_millis(spec.start_timeout_ms);
    let node = match Node::start(config) {
        Ok(node) => Arc::new(node),
        Err(error) => return start_failed(&error, begun),
    };
    let group =
        GroupLayout { group_id: 0, layout: LayoutId(7), object_bytes: spec.shape.object_bytes as u64 };
    let namespace = NamespaceSpec { name: "ns".into(), key_salt: b"weights".to_vec(), groups: vec![group] };
    let ns = node.open_namespace(namespace).expect("the namespace opens");
    let arena = Arena::new(spec.shape, AREAS, spec.load_blocks, node.incarnation());
    node.register_buffer(arena.region()).expect("the memory is registered");
    let loader = Loader { node: node.clone(), ns: ns.clone(), shape: spec.shape };
    let mut process =
        RankProcess { node, ns, spec: spec.clone(), loader, arena, running: None, loads: None, churn: None };
    reply(&Reply::Ready { address: String::new(), start_ms: millis(begun.elapsed()) });
    for command in commands {
        let answer = process.carry_out(command);
        reply(&answer);
    }
}

impl RankProcess {
    fn carry_out(&mut self, command: Command) -> Reply {
        match command {
            Command::Store { keys, put } => self.store(keys, put, false),
            Command::StoreAndReuse { keys, put } => self.store(keys, put, true),
            Command::Lookup { keys, budget_ms } => self.lookup(keys, Duration::from_millis(budget_ms)),
            Command::Load { keys, deadline_ms } => self.load(keys, Duration::from_millis(deadline_ms)),
            Command::BeginLoad { keys, deadline_ms } => {
                assert!(self.running.is_none(), "one load at a time");
                let deadline = Duration::from_millis(deadline_ms);
                let mut tally = Tally::default();
                let running = self.loader.begin(&mut self.arena, keys.iter().collect(), deadline, &mut tally);
                tally.assert_safe("memory at rest");
                self.running = Some(running);
                Reply::Done
            }
            Command::EndLoad { cancel, wait_ms } => self.end_load(cancel, Duration::from_millis(wait_ms)),
            Command::DeregisterLoadMemory => match self.node.deregister_buffer(self.arena.region()) {
                Ok(()) => Reply::Done,
                Err(error) => Reply::Error { kind: kind_of(&error), message: error.to_string(), after_ms: 0 },
            },
            Command::CheckCanaries => Reply::Count(self.arena.broken_bytes()),
            Command::StartLoads(spec) => self.start_loads(spec),
            Command::PeekLoads => match &self.loads {
                Some((running, _)) => Reply::Tally(running.peek()),
                None => panic!("no load loop runs"),
            },
            Command::StopLoads => self.stop_loads(),
            Command::StartChurn(spec) => self.start_churn(spec),
            Command::StopChurn => Reply::Count(self.churn.take().expect("a churn loop runs").stop()),
            Command::Evict { keys } => {
                let names: Vec<String> = keys.iter().map(umbp_key).collect();
                Reply::Count(self.node.evict(&self.ns, &names) as u64)
            }
            Command::Clear => Reply::Count(u64::from(self.node.clear(&self.ns, PATIENCE))),
            Command::Stats => Reply::Rank(self.figures()),
        }
    }

    fn store(&self, keys: Keys, put: u64, reuse: bool) -> Reply {
        let begun = Instant::now();
        let stored = store(&self.loader, keys, put, reuse);
        if self.node.flush(PATIENCE) {
            return Reply::Count(stored);
        }
        Reply::Error {
            kind: "NotFlushed".into(),
            message: "the directory did not acknowledge the stores".into(),
            after_ms: millis(begun.elapsed()),
        }
    }

    fn lookup(&self, keys: Keys, budget: Duration) -> Reply {
        let names: Vec<String> = keys.iter().map(umbp_key).collect();
        let begun = Instant::now();
        let answer = self.node.lookup(&self.ns, &names, budget);
        Reply::Lookup {
            hits: answer.hits.iter().filter(|hit| **hit).count() as u64,
            complete: answer.complete,
            micros: u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX),
        }
    }

    /// Loads in as many jobs as the memory needs.
    fn load(&mut self, keys: Keys, deadline: Duration) -> Reply {
        let mut tally = Tally::default();
        let all: Vec<u64> = keys.iter().collect();
        for part in all.chunks(self.arena.blocks()) {
            let running = self.loader.begin(&mut self.arena, part.to_vec(), deadline, &mut tally);
            if !self.loader.end(&mut self.arena, &running, deadline + PATIENCE, &mut tally) {
                tally.stuck += 1;
                break;
            }
        }
        Reply::Tally(tally)
    }

    fn end_load(&mut self, cancel: bool, wait: Duration) -> Reply {
        let running = self.running.take().expect("a load was begun");
        if cancel {
            running.job.cancel();
        }
        let mut tally = Tally::default();
        if self.loader.end(&mut self.arena, &running, wait, &mut tally) {
            return Reply::Tally(tally);
        }
        self.running = Some(running);
        Reply::Pending
    }

    fn start_loads(&mut self, spec: LoadLoop) -> Reply {
        assert!(self.loads.is_none(), "one load loop at a time");
        let arena = Arena::new(self.spec.shape, AREAS, self.spec.load_blocks, spec.seed);
        self.node.register_buffer(arena.region()).expect("the memory is registered");
        let arena = Arc::new(Mutex::new(arena));
        let (loader, memory, mut random) = (self.loader.clone(), arena.clone(), Random::new(spec.seed));
        let running = Loop::start(Tally::default(), move |total| {
            let mut arena = memory.lock().expect("only this loop uses it");
            let tally = turn(&loader, &mut arena, &spec, &mut random);
            total.lock().expect("nothing panics under this lock").add(&tally);
            // Nothing found: spare the directory a hot loop.
            if tally.right == 0 {
                drop(arena);
                std::thread::sleep(Duration::from_millis(2));
            }
        });
        self.loads = Some((running, arena));
        Reply::Done
    }

    fn stop_loads(&mut self) -> Reply {
        let (running, arena) = self.loads.take().expect("a load loop runs");
        let mut tally = running.stop();
        let arena = arena.lock().expect("the loop has ended");
        // Whatever is still on its way has time to arrive where it must not.
        std::thread::sleep(Duration::from_millis(200));
        tally.canary_bytes += arena.broken_bytes();
        self.node.deregister_buffer(arena.region()).expect("no job uses the memory any more");
        Reply::Tally(tally)
    }

    fn start_churn(&mut self, spec: ChurnLoop) -> Reply {
        assert!(self.churn.is_none(), "one churn loop at a time");
        let loader = self.loader.clone();
        let (mut random, mut put) = (Random::new(spec.seed), spec.first_put);
        self.churn = Some(Loop::start(0, move |stored| {
            let first = spec.keys.first + random.below(spec.keys.count - spec.batch + 1);
            let keys = Keys { first, count: spec.batch };
            let names: Vec<String> = keys.iter().map(umbp_key).collect();
            let evicted = loader.node.evict(&loader.ns, &names);
            assert!(evicted <= names.len());
            let count = store(&loader, keys, put, false);
            put += 1;
            *stored.lock().expect("nothing panics under this lock") += count;
            std::thread::sleep(Duration::from_millis(spec.pause_ms));
        }));
        Reply::Done
    }

    fn figures(&self) -> RankFigures {
        let stats = self.node.stats();
        RankFigures {
            directory_connected: self.node.directory_connected(),
            incarnation: self.node.incarnation(),
            jobs_in_progress: stats.jobs_in_progress,
            pool_objects: stats.pool_objects,
            pool_used_bytes: stats.pool_used_bytes,
            pool_capacity_bytes: stats.pool_capacity_bytes,
            stale_reads: stats.stale_reads,
            mismatches: stats.tag_mismatches + stats.checksum_mismatches,
            routes: self
                .node
                .routes()
                .into_iter()
                .map(|route| (route.name, route.transport.to_string()))
                .collect(),
        }
    }
}

/// Stores keys in batches from memory of its own; returns how many are stored or were resident. Each batch's sources are
/// released after it; with `reuse` they are also overwritten before they go.
fn store(loader: &Loader, keys: Keys, put: u64, reuse: bool) -> u64 {
    let all: Vec<u64> = keys.iter().collect();
    let mut stored = 0;
    for batch in all.chunks(STORE_BATCH) {
        let arena = Arena::new(loader.shape, 1, batch.len(), put);
        loader.node.register_buffer(arena.region()).expect("the memory is registered");
        let items = batch
            .iter()
            .enumerate()
            .map(|(block, key)| {
                let source = arena.list(0, block);
                source.write_object(&object(loader.shape, *key, put)).expect("the block's own size");
                StoreItem { key: umbp_key(*key), source, parent_block_hash: None }
            })
            .collect();
        let job = loader.node.store(&loader.ns, items, PATIENCE).expect("the store is taken");
        let report = job.wait(PATIENCE * 2).expect("the store ends");
        loader.node.deregister_buffer(arena.region()).expect("no job uses the memory any more");
        if reuse {
            let region = arena.region();
            region.fill(0, region.length_bytes(), 0x5A).expect("the whole region");
        }
        stored += report
            .outcomes
            .iter()
            .filter(|outcome| matches!(outcome, Ok(BlockOk::Stored | BlockOk::AlreadyResident)))
            .count() as u64;
    }
    stored
}
