//! A rank process of the demo: an engine without a model. It stores and loads blocks of its own tensors as it is told.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use kvfabric_core::limits::{DRAIN_RDMA, DRAIN_TCP};
use kvfabric_core::load::LoadError;
use kvfabric_memory::ScatterList;
use kvfabric_node::{
    BlockError, BlockOk, GroupLayout, Job, LoadItem, Namespace, NamespaceSpec, Node, Settings, StartError,
    StoreItem,
};

use crate::content::{check, count_not_poison, Content, POISON};
use crate::keys::{block_hash, content_seed, umbp_key, BlockHash};
use crate::limits;
use crate::process::{send_event, Commands};
use crate::protocol::{ChildEvent, DemoCommand, DemoReport, KeyRange};
use crate::rank::{counters, start_failed};
use crate::summary::{micros, Latencies};
use crate::tensors::{KvTensors, GROUP_ID, OBJECT_BYTES};

/// Namespace of the demo's keys.
const NAMESPACE: &str = "kvfabric-demo";
/// Blocks of one job: 4 MiB, as a request of 512 tokens has.
const JOB_BLOCKS: u32 = 32;
/// Jobs in flight.
const JOBS_IN_FLIGHT: usize = 4;
/// After deadline and drain bound a job must be final; a job that is not then never will be.
const FINAL_WAIT: Duration = Duration::from_secs(10);

/// Runs the rank until it is told to stop or the parent closes the pipe.
///
/// # Errors
/// Whatever keeps the rank from going on; the parent has been told.
pub fn run(settings: &Settings, blocks: u32, start_within: Duration, commands: &mut Commands) -> Result<()> {
    let node = match start(settings, start_within) {
        Ok(node) => node,
        Err(error) => return start_failed(error),
    };
    let mut tensors = KvTensors::allocate(blocks)?;
    for region in tensors.regions() {
        node.register_buffer(region)?;
    }
    let namespace = node.open_namespace(NamespaceSpec {
        name: NAMESPACE.into(),
        key_salt: Vec::new(),
        groups: vec![GroupLayout {
            group_id: GROUP_ID,
            layout: tensors.layout(),
            object_bytes: OBJECT_BYTES as u64,
        }],
    })?;
    send_event(&ChildEvent::Ready { address: None, incarnation: Some(node.incarnation()) })?;
    let scratch = vec![0; OBJECT_BYTES];
    let poison = vec![POISON; OBJECT_BYTES];
    let mut rank = DemoRank { node: &node, namespace, tensors: &mut tensors, scratch, poison };
    while let Some(command) = commands.next()? {
        let report = match command {
            DemoCommand::Store { keys, put } => rank.store(keys, put)?,
            DemoCommand::Lookup { keys } => rank.lookup(keys),
            DemoCommand::Load { keys, puts } => rank.load(keys, &(puts.0..=puts.1), Until::AllOnce)?,
            DemoCommand::Evict { keys } => rank.evict(keys),
            DemoCommand::Churn { keys, first_put, duration_ms } => {
                rank.churn(keys, first_put, Duration::from_millis(duration_ms))?
            }
            DemoCommand::LoadLoop { keys, puts, until_failure, duration_ms } => {
                let limit = Duration::from_millis(duration_ms);
                let until = if until_failure { Until::Failure(limit) } else { Until::Elapsed(limit) };
                rank.load(keys, &(puts.0..=puts.1), until)?
            }
            DemoCommand::Stop => break,
        };
        send_event(&ChildEvent::Report(Box::new(report)))?;
    }
    send_event(&ChildEvent::Stopped(counters(&node)))?;
    node.close();
    Ok(())
}

/// Starts the node. The directory refuses a name while an earlier process of that name still counts as alive; that
/// passes, so it is tried again for a while.
fn start(settings: &Settings, start_within: Duration) -> Result<Node, StartError> {
    let until = Instant::now() + start_within;
    loop {
        match Node::start(settings.node()?) {
            Err(StartError::JoinRefused { .. }) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(50));
            }
            other => return other,
        }
    }
}

/// When a load ends.
#[derive(Clone, Copy, Debug)]
enum Until {
    /// Each key was loaded once.
    AllOnce,
    /// A block was not loaded, or so much time passed.
    Failure(Duration),
    /// So much time passed.
    Elapsed(Duration),
}

struct DemoRank<'a> {
    node: &'a Node,
    namespace: Namespace,
    tensors: &'a mut KvTensors,
    scratch: Vec<u8>,
    poison: Vec<u8>,
}

/// One block of a load in flight.
struct Block {
    number: u32,
    seed: u64,
    destination: ScatterList,
}

/// One job in flight.
struct LoadJob {
    job: Job,
    blocks: Vec<Block>,
    submitted: Instant,
}

/// What a load keeps while it runs.
struct Loading {
    report: DemoReport,
    latencies: Latencies,
    puts: RangeInclusive<u64>,
    is_timed: bool,
    bytes_by_transport: BTreeMap<&'static str, u64>,
    /// Blocks that were loaded by a timed load and are not checked yet.
    unchecked: Vec<Block>,
    /// Blocks that were reported as not loaded, poisoned since: nothing may arrive there any more (rule R4).
    quiet: BTreeMap<u32, ScatterList>,
}

impl DemoRank<'_> {
    fn hash(number: u64) -> BlockHash {
        block_hash("kvfabric demo", number)
    }

    fn keys(keys: KeyRange) -> Vec<String> {
        (0..u64::from(keys.count)).map(|i| umbp_key(NAMESPACE, &Self::hash(keys.first + i))).collect()
    }

    fn chunks(keys: KeyRange) -> Vec<(u32, KeyRange)> {
        (0..keys.count)
            .step_by(JOB_BLOCKS as usize)
            .map(|at| {
                let count = JOB_BLOCKS.min(keys.count - at);
                (at, KeyRange { first: keys.first + u64::from(at), count })
            })
            .collect()
    }

    fn store(&mut self, keys: KeyRange, put: u64) -> Result<DemoReport> {
        let mut report = DemoReport { last_put: put, rounds: 1, ..DemoReport::default() };
        let mut latencies = Latencies::default();
        for (at, chunk) in Self::chunks(keys) {
            let items = self.fill(at, chunk, put)?;
            self.store_items(items, &mut report, &mut latencies)?;
        }
        let started = Instant::now();
        report.complete = self.node.flush(limits::DEMO_DEADLINE);
        report.seconds += started.elapsed().as_secs_f64();
        note_latencies(&mut report, &latencies);
        Ok(report)
    }

    /// Writes the content of one put into a chunk's blocks.
    fn fill(&mut self, at: u32, chunk: KeyRange, put: u64) -> Result<Vec<StoreItem>> {
        let mut items = Vec::with_capacity(chunk.count as usize);
        for i in 0..chunk.count {
            let hash = Self::hash(chunk.first + u64::from(i));
            let source = self.tensors.scatter(self.node, at + i)?;
            Content { key_seed: content_seed(&hash), put }.fill(&mut self.scratch);
            source.write_object(&self.scratch)?;
            items.push(StoreItem { key: umbp_key(NAMESPACE, &hash), source, parent_block_hash: None });
        }
        Ok(items)
    }

    fn store_items(
        &self,
        items: Vec<StoreItem>,
        report: &mut DemoReport,
        latencies: &mut Latencies,
    ) -> Result<()> {
        let submitted = Instant::now();
        let job = self.node.store(&self.namespace, items, limits::DEMO_DEADLINE)?;
        let ended = wait(&job)?;
        latencies.record(submitted.elapsed());
        report.seconds += submitted.elapsed().as_secs_f64();
        for outcome in &ended.outcomes {
            match outcome {
                Ok(BlockOk::AlreadyResident) => report.counts.resident += 1,
                Ok(_) => {
                    report.counts.stored += 1;
                    report.counts.bytes_stored += OBJECT_BYTES as u64;
                }
                Err(error) => report.counts.fail(&error.to_string()),
            }
        }
        Ok(())
    }

    fn lookup(&self, keys: KeyRange) -> DemoReport {
        let keys = Self::keys(keys);
        let started = Instant::now();
        let answer = self.node.lookup(&self.namespace, &keys, limits::LOOKUP_BUDGET);
        let elapsed = started.elapsed();
        DemoReport {
            found: answer.hits.iter().filter(|hit| **hit).count() as u64,
            complete: answer.complete,
            seconds: elapsed.as_secs_f64(),
            p50_us: micros(elapsed),
            p99_us: micros(elapsed),
            max_us: micros(elapsed),
            ..DemoReport::default()
        }
    }

    fn evict(&self, keys: KeyRange) -> DemoReport {
        let found = self.node.evict(&self.namespace, &Self::keys(keys)) as u64;
        DemoReport { found, complete: true, ..DemoReport::default() }
    }

    /// Takes blocks away and stores other content under the same keys, over and over, while others read them.
    fn churn(&mut self, keys: KeyRange, first_put: u64, duration: Duration) -> Result<DemoReport> {
        let mut report = DemoReport { last_put: first_put, complete: true, ..DemoReport::default() };
        let mut latencies = Latencies::default();
        let until = Instant::now() + duration;
        let mut put = first_put;
        while Instant::now() < until {
            for (at, chunk) in Self::chunks(keys) {
                // Filled first, so that the keys are away only for a moment and the reader meets both states.
                let items = self.fill(at, chunk, put)?;
                report.found += self.node.evict(&self.namespace, &Self::keys(chunk)) as u64;
                self.store_items(items, &mut report, &mut latencies)?;
                report.last_put = put;
                if Instant::now() >= until {
                    break;
                }
            }
            report.rounds += 1;
            put += 1;
        }
        note_latencies(&mut report, &latencies);
        Ok(report)
    }

    fn load(&mut self, keys: KeyRange, puts: &RangeInclusive<u64>, until: Until) -> Result<DemoReport> {
        let chunks = Self::chunks(keys);
        let is_timed = matches!(until, Until::AllOnce);
        let mut loading = Loading {
            report: DemoReport { complete: true, ..DemoReport::default() },
            latencies: Latencies::default(),
            puts: puts.clone(),
            is_timed,
            bytes_by_transport: BTreeMap::new(),
            unchecked: Vec::new(),
            quiet: BTreeMap::new(),
        };
        // A timed load prepares everything first, so that its time is the loads' alone.
        let mut prepared = VecDeque::new();
        if is_timed {
            for (at, chunk) in &chunks {
                prepared.push_back(self.prepare(*at, *chunk)?);
            }
        }
        // Chunks come round and round, so with no more jobs than chunks no chunk's memory is in flight twice.
        let jobs_max = JOBS_IN_FLIGHT.min(chunks.len());
        let started = Instant::now();
        let mut in_flight = VecDeque::new();
        for round in 0.. {
            for (at, chunk) in &chunks {
                if in_flight.len() == jobs_max {
                    self.end_oldest(&mut in_flight, &mut loading)?;
                }
                let failure_seen = loading.report.counts.load_outcomes() > loading.report.counts.loaded;
                let ends = match until {
                    Until::AllOnce => round > 0,
                    Until::Failure(limit) => failure_seen || started.elapsed() >= limit,
                    Until::Elapsed(limit) => started.elapsed() >= limit,
                };
                if ends {
                    return self.finish(in_flight, loading, started);
                }
                let next = match prepared.pop_front() {
                    Some(next) => next,
                    None => self.prepare(*at, *chunk)?,
                };
                in_flight.push_back(self.submit(next, &mut loading)?);
                if !is_timed && round == 0 && *at == 0 {
                    send_event(&ChildEvent::LoopStarted)?;
                }
            }
            loading.report.rounds = round + 1;
            if chunks.is_empty() {
                break;
            }
        }
        self.finish(in_flight, loading, started)
    }

    /// Poisons the destinations of a chunk. Blocks land in reverse order, so that no place of the owner's is theirs.
    fn prepare(&mut self, at: u32, chunk: KeyRange) -> Result<Vec<(LoadItem, Block)>> {
        let mut blocks = Vec::with_capacity(chunk.count as usize);
        for i in 0..chunk.count {
            let hash = Self::hash(chunk.first + u64::from(i));
            let number = self.tensors.blocks() - 1 - (at + i);
            let destination = self.tensors.scatter(self.node, number)?;
            destination.write_object(&self.poison)?;
            let item = LoadItem { key: umbp_key(NAMESPACE, &hash), destination: destination.clone() };
            blocks.push((item, Block { number, seed: content_seed(&hash), destination }));
        }
        Ok(blocks)
    }

    fn submit(&self, prepared: Vec<(LoadItem, Block)>, loading: &mut Loading) -> Result<LoadJob> {
        let (items, blocks): (Vec<_>, Vec<_>) = prepared.into_iter().unzip();
        for block in &blocks {
            loading.quiet.remove(&block.number);
        }
        let submitted = Instant::now();
        let job = self.node.load(&self.namespace, items, limits::DEMO_DEADLINE)?;
        Ok(LoadJob { job, blocks, submitted })
    }

    /// Waits for the oldest job and takes its blocks' outcomes.
    fn end_oldest(&mut self, in_flight: &mut VecDeque<LoadJob>, loading: &mut Loading) -> Result<()> {
        let Some(LoadJob { job, blocks, submitted }) = in_flight.pop_front() else { return Ok(()) };
        let ended = wait(&job)?;
        loading.latencies.record(submitted.elapsed());
        for (block, outcome) in blocks.into_iter().zip(&ended.outcomes) {
            match outcome {
                Ok(BlockOk::Loaded { transport, local }) => {
                    let name = if *local { "local" } else { transport.name() };
                    *loading.bytes_by_transport.entry(name).or_default() += OBJECT_BYTES as u64;
                    if loading.is_timed {
                        loading.unchecked.push(block);
                    } else {
                        self.check(&block, loading)?;
                    }
                }
                Ok(other) => bail!("a load ended as {other:?}"),
                Err(error) => {
                    count_error(error, loading);
                    block.destination.write_object(&self.poison)?;
                    loading.quiet.insert(block.number, block.destination);
                }
            }
        }
        Ok(())
    }

    fn check(&mut self, block: &Block, loading: &mut Loading) -> Result<()> {
        block.destination.read_object(&mut self.scratch)?;
        let report = &mut loading.report;
        match check(&self.scratch, block.seed, &loading.puts) {
            Ok(put) => {
                report.counts.loaded += 1;
                report.counts.bytes_loaded += OBJECT_BYTES as u64;
                let (least, most) = report.puts_seen.unwrap_or((put, put));
                report.puts_seen = Some((least.min(put), most.max(put)));
            }
            Err(wrong) => {
                report.counts.wrong += 1;
                report.counts.wrong_bytes += wrong.count;
                report.wrong.get_or_insert_with(|| format!("block {}: {wrong}", block.number));
            }
        }
        Ok(())
    }

    fn finish(
        &mut self,
        mut in_flight: VecDeque<LoadJob>,
        mut loading: Loading,
        started: Instant,
    ) -> Result<DemoReport> {
        while !in_flight.is_empty() {
            self.end_oldest(&mut in_flight, &mut loading)?;
        }
        let elapsed = started.elapsed();
        loading.report.seconds = elapsed.as_secs_f64();
        let bytes = std::mem::take(&mut loading.bytes_by_transport);
        if loading.is_timed {
            loading.report.traffic.add_load(&bytes, elapsed);
        } else {
            loading.report.traffic.add_untimed(&bytes);
        }
        for block in std::mem::take(&mut loading.unchecked) {
            self.check(&block, &mut loading)?;
        }
        self.check_quiet(&mut loading)?;
        note_latencies(&mut loading.report, &loading.latencies);
        Ok(loading.report)
    }

    /// Nothing may have arrived where no load was under way: behind failed blocks, and in the guards.
    fn check_quiet(&mut self, loading: &mut Loading) -> Result<()> {
        if !loading.quiet.is_empty() {
            // A transport that still wrote would do it now.
            std::thread::sleep(DRAIN_TCP);
        }
        let mut late = BTreeSet::new();
        for (number, destination) in &loading.quiet {
            destination.read_object(&mut self.scratch)?;
            let written = count_not_poison(&self.scratch);
            if written > 0 {
                loading.report.counts.wrong_bytes += written;
                late.insert(*number);
            }
        }
        if let Some(number) = late.first() {
            let text =
                format!("block {number} was written after it was reported as failed ({} blocks)", late.len());
            loading.report.wrong.get_or_insert(text);
        }
        let written = self.tensors.guard_bytes_written()?;
        if written > 0 {
            loading.report.counts.wrong_bytes += written;
            let text = format!("{written} bytes were written outside every destination");
            loading.report.wrong.get_or_insert(text);
        }
        Ok(())
    }
}

fn count_error(error: &BlockError, loading: &mut Loading) {
    let counts = &mut loading.report.counts;
    match error {
        BlockError::Load(LoadError::NotFound) => counts.missed += 1,
        BlockError::Load(LoadError::Stale) => counts.stale += 1,
        other => counts.fail(&other.to_string()),
    }
}

fn note_latencies(report: &mut DemoReport, latencies: &Latencies) {
    (report.p50_us, report.p99_us) = latencies.p50_p99();
    report.max_us = latencies.max();
}

fn wait(job: &Job) -> Result<std::sync::Arc<kvfabric_node::JobReport>> {
    let bound = limits::DEMO_DEADLINE + DRAIN_RDMA + FINAL_WAIT;
    job.wait(bound).with_context(|| format!("a job was not final {bound:?} after it was submitted"))
}
