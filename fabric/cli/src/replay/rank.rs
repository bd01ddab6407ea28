//! A rank process of a replay: an engine without a model. For each request it looks its blocks up, loads the leading
//! run of hits, stores the rest, and compares every byte that arrived.

use std::collections::BTreeMap;
use std::sync::mpsc::{sync_channel, Receiver};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use kvfabric_core::hash::layout_id;
use kvfabric_core::limits::DRAIN_RDMA;
use kvfabric_core::load::LoadError;
use kvfabric_core::owner::PutError;
use kvfabric_memory::{Region, ScatterList};
use kvfabric_node::{
    BlockError, BlockOk, GroupLayout, Job, JobReport, LoadItem, Namespace, NamespaceSpec, Node, StoreItem,
};

use crate::content::{check, Content, POISON};
use crate::keys::{block_hash, content_seed, umbp_key, BlockHash};
use crate::limits;
use crate::process::{send_event, Commands};
use crate::protocol::{ChildEvent, ReplayDone, ReplayRequest, ReplayRole};
use crate::rank::{counters, error_text, start_failed};
use crate::summary::{micros, Counts};

/// Namespace of the trace's keys.
const NAMESPACE: &str = "kvfabric-replay";
/// Every block is put once, with one content.
const PUT: u64 = 1;
/// After deadline and drain bound a job must be final; a job that is not then never will be.
const FINAL_WAIT: Duration = Duration::from_secs(5);

/// Runs the rank until the parent closes the pipe.
///
/// # Errors
/// Whatever keeps the rank from going on; the parent has been told.
pub fn run(role: &ReplayRole, commands: &mut Commands) -> Result<()> {
    let node = match role.settings.node().map_err(Into::into).and_then(Node::start) {
        Ok(node) => node,
        Err(error) => return start_failed(error),
    };
    let object_bytes = role.object_bytes as u64;
    let namespace = node.open_namespace(NamespaceSpec {
        name: NAMESPACE.into(),
        key_salt: Vec::new(),
        groups: vec![GroupLayout {
            group_id: 0,
            layout: layout_id([("all layers", object_bytes)], "bytes", "replay"),
            object_bytes,
        }],
    })?;
    let mut workers = Vec::with_capacity(role.workers);
    for _ in 0..role.workers {
        let bytes = role.request_blocks_max.max(1) * role.object_bytes;
        let buffer = Region::allocate(bytes).context("cannot allocate a request's buffer")?;
        node.register_buffer(&buffer)?;
        let scratch = vec![0; role.object_bytes];
        workers.push(Worker { node: &node, namespace: namespace.clone(), role, buffer, scratch });
    }
    send_event(&ChildEvent::Ready { address: None, incarnation: Some(node.incarnation()) })?;
    let (queue, requests) = sync_channel(limits::CHILD_QUEUE_MAX);
    let requests = Mutex::new(requests);
    let read = std::thread::scope(|scope| {
        for mut worker in workers {
            let requests = &requests;
            scope.spawn(move || worker.run(requests));
        }
        // Dropping the queue at the end lets the workers end.
        let queue = queue;
        while let Some(request) = commands.next::<ReplayRequest>()? {
            if queue.send(request).is_err() {
                break;
            }
        }
        Ok(())
    });
    send_event(&ChildEvent::Stopped(counters(&node)))?;
    node.close();
    read
}

struct Worker<'a> {
    node: &'a Node,
    namespace: Namespace,
    role: &'a ReplayRole,
    /// Memory of one request's blocks: block `i` of the request lies at `i * object_bytes`.
    buffer: Region,
    scratch: Vec<u8>,
}

/// One block of a request.
struct Block {
    hash: BlockHash,
    key: String,
}

impl Worker<'_> {
    fn run(&mut self, requests: &Mutex<Receiver<ReplayRequest>>) {
        loop {
            // Workers take turns at the queue; a worker that fails tells the parent and panics nowhere.
            let next = requests.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(request) = next else { return };
            let number = request.request;
            let served = self.serve(&request).and_then(|done| send_event(&ChildEvent::Done(Box::new(done))));
            if let Err(error) = served {
                let message = format!("request {number}: {}", error_text(&error));
                // If this cannot be written either, the parent is gone.
                let _ = send_event(&ChildEvent::Failed { message, transport_unavailable: false });
                return;
            }
        }
    }

    fn serve(&mut self, request: &ReplayRequest) -> Result<ReplayDone> {
        if request.hash_ids.len() > self.role.request_blocks_max {
            bail!("{} blocks, more than announced", request.hash_ids.len());
        }
        let blocks: Vec<Block> = request
            .hash_ids
            .iter()
            .map(|id| {
                let hash = block_hash("kvfabric replay", *id);
                Block { hash, key: umbp_key(NAMESPACE, &hash) }
            })
            .collect();
        let mut done = ReplayDone { request: request.request, complete: true, ..ReplayDone::default() };
        let mut landed = Vec::new();
        let mut found = 0;
        if !blocks.is_empty() {
            let keys: Vec<&str> = blocks.iter().map(|block| block.key.as_str()).collect();
            let started = Instant::now();
            let answer = self.node.lookup(&self.namespace, &keys, limits::LOOKUP_BUDGET);
            done.lookup_us = micros(started.elapsed());
            done.complete = answer.complete;
            found = answer.prefix_hits().min(blocks.len());
            landed = self.load(&blocks, found, &mut done)?;
        }
        // A request uses the leading run only: what follows the first block that did not arrive is computed again.
        let usable = landed.iter().take_while(|arrived| **arrived).count();
        done.prefix_hits = usable as u64;
        done.counts.missed += (blocks.len() - found) as u64;
        if usable < found {
            // The rest is stored from the same memory, so it must be checked before it is filled.
            self.check_landed(&blocks, &landed, &mut done)?;
            landed.clear();
        }
        self.store(&blocks, usable, &mut done)?;
        send_event(&ChildEvent::Stored { request: request.request })?;
        self.check_landed(&blocks, &landed, &mut done)?;
        Ok(done)
    }

    fn piece(&self, index: usize) -> Result<ScatterList> {
        let mut list = ScatterList::with_capacity(1);
        list.push(&self.buffer, index * self.role.object_bytes, self.role.object_bytes)?;
        Ok(list)
    }

    /// Loads the first `count` blocks; says of each whether it arrived.
    fn load(&mut self, blocks: &[Block], count: usize, done: &mut ReplayDone) -> Result<Vec<bool>> {
        if count == 0 {
            return Ok(Vec::new());
        }
        // The memory may hold the very same block from an earlier request: nothing may pass that was not written now.
        self.buffer.fill(0, count * self.role.object_bytes, POISON)?;
        let mut items = Vec::with_capacity(count);
        for (index, block) in blocks.iter().enumerate().take(count) {
            items.push(LoadItem { key: block.key.clone(), destination: self.piece(index)? });
        }
        let started = Instant::now();
        let report = wait(&self.node.load(&self.namespace, items, limits::REPLAY_DEADLINE)?)?;
        let elapsed = started.elapsed();
        done.load_us = micros(elapsed);
        let mut bytes_by_transport = BTreeMap::new();
        let mut landed = Vec::with_capacity(count);
        for outcome in &report.outcomes {
            landed.push(outcome.is_ok());
            match outcome {
                Ok(BlockOk::Loaded { transport, local }) => {
                    let name = if *local { "local" } else { transport.name() };
                    *bytes_by_transport.entry(name).or_default() += self.role.object_bytes as u64;
                }
                Ok(other) => bail!("a load ended as {other:?}"),
                Err(BlockError::Load(LoadError::NotFound)) => done.counts.missed += 1,
                Err(BlockError::Load(LoadError::Stale)) => done.counts.stale += 1,
                Err(error) => done.counts.fail(&error.to_string()),
            }
        }
        done.traffic.add_load(&bytes_by_transport, elapsed);
        Ok(landed)
    }

    /// Fills the blocks from `first` on with what their keys demand, and stores them.
    fn store(&mut self, blocks: &[Block], first: usize, done: &mut ReplayDone) -> Result<()> {
        let mut items = Vec::with_capacity(blocks.len() - first);
        for (index, block) in blocks.iter().enumerate().skip(first) {
            Content { key_seed: content_seed(&block.hash), put: PUT }.fill(&mut self.scratch);
            self.buffer.write(index * self.role.object_bytes, &self.scratch)?;
            let parent = index.checked_sub(1).and_then(|before| blocks.get(before));
            items.push(StoreItem {
                key: block.key.clone(),
                source: self.piece(index)?,
                parent_block_hash: parent.map(|parent| parent.hash.to_vec()),
            });
        }
        if items.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        let report = wait(&self.node.store(&self.namespace, items, limits::REPLAY_DEADLINE)?)?;
        self.count_stored(&report, &mut done.counts)?;
        if self.role.in_order && !self.node.flush(limits::REPLAY_DEADLINE) {
            bail!("the directory did not acknowledge stored blocks within {:?}", limits::REPLAY_DEADLINE);
        }
        done.store_us = micros(started.elapsed());
        Ok(())
    }

    fn count_stored(&self, report: &JobReport, counts: &mut Counts) -> Result<()> {
        let mut is_full = self.role.unlimited && self.node.stats().evictions > 0;
        for outcome in &report.outcomes {
            match outcome {
                Ok(BlockOk::AlreadyResident) => counts.resident += 1,
                Ok(_) => {
                    counts.stored += 1;
                    counts.bytes_stored += self.role.object_bytes as u64;
                }
                Err(error) => {
                    is_full |= self.role.unlimited
                        && matches!(error, BlockError::Put(PutError::PoolFull | PutError::NoMemory));
                    counts.fail(&error.to_string());
                }
            }
        }
        if is_full {
            bail!(
                "the unlimited pool is full: all ranks together may use 80 % of the available memory, {} bytes each; \
                 free memory, replay fewer --requests, use fewer --bytes-per-token, or give --pool-bytes N to let \
                 blocks be evicted",
                self.role.settings.pool_bytes.as_deref().unwrap_or("unknown")
            );
        }
        Ok(())
    }

    fn check_landed(&mut self, blocks: &[Block], landed: &[bool], done: &mut ReplayDone) -> Result<()> {
        for (index, (block, arrived)) in blocks.iter().zip(landed).enumerate() {
            if !arrived {
                continue;
            }
            self.buffer.read(index * self.role.object_bytes, &mut self.scratch)?;
            match check(&self.scratch, content_seed(&block.hash), &(PUT..=PUT)) {
                Ok(_) => {
                    done.counts.loaded += 1;
                    done.counts.bytes_loaded += self.role.object_bytes as u64;
                }
                Err(wrong) => {
                    done.counts.wrong += 1;
                    done.counts.wrong_bytes += wrong.count;
                    done.wrong
                        .get_or_insert_with(|| format!("request {}, block {index}: {wrong}", done.request));
                }
            }
        }
        Ok(())
    }
}

fn wait(job: &Job) -> Result<std::sync::Arc<JobReport>> {
    let bound = limits::REPLAY_DEADLINE + DRAIN_RDMA + FINAL_WAIT;
    job.wait(bound).with_context(|| format!("a job was not final {bound:?} after it was submitted"))
}
