//! Eviction policies on request traces: hits of a pool of limited room, replayed through the owner's own code.
//!
//! Requests come in file order. Each is looked up first: its hits are the leading run of blocks that some pool
//! holds, and they are touched at their owners. Then the rest, which the rank computes, is stored into the pool of the
//! rank that the request went to (round robin), before the next request is looked up; what was read from another rank is
//! not stored again. No bytes move; the pool code is the node's.

use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{bail, Context, Result};
use kvfabric_core::hash::{KeyCoordinates, KeyHash, NamespaceKey};
use kvfabric_core::owner::{Owner, OwnerAction, OwnerConfig, PolicyKind, Put, PutId};
use kvfabric_core::{Fingerprint, Generation, Incarnation, LayoutId, NsEpoch, NsId, SlotId, Time};
use serde::{Deserialize, Serialize};

/// Size of a block in the replay: 512 tokens of 16 bytes. Only the number of blocks matters.
const BLOCK_BYTES: u64 = 8192;
/// Numbers of ranks that share the room.
const POOLS: [usize; 2] = [1, 4];
/// Longest line of a trace: a request of a million tokens has 2,000 block ids.
const LINE_BYTES_MAX: usize = 1 << 20;

#[derive(Deserialize)]
struct Request {
    hash_ids: Vec<u64>,
}

/// A trace: for each request its blocks, as indices into `keys`.
struct Trace {
    name: String,
    requests: Vec<Vec<u32>>,
    keys: Vec<KeyHash>,
}

/// One row of the result.
#[derive(Serialize)]
struct Row<'a> {
    bench: &'static str,
    trace: &'a str,
    policy: &'static str,
    pools: usize,
    room_blocks: u64,
    blocks: u64,
    hits: u64,
    evictions: u64,
    seconds: f64,
}

/// Replays each trace for each policy, room and number of pools, and prints a table or one JSON object a line.
///
/// # Errors
/// If a trace cannot be read, a room does not suffice for one block in each pool, or a put fails.
pub fn run(traces: &[PathBuf], room_blocks: &[u64], json: bool) -> Result<()> {
    let mut out = std::io::stdout().lock();
    if !json {
        writeln!(
            out,
            "{:<24} {:<12} {:>5} {:>10} {:>10} {:>10} {:>10} {:>8}",
            "trace", "policy", "pools", "room", "blocks", "hits", "evictions", "seconds"
        )?;
    }
    for path in traces {
        let trace = Trace::read(path).with_context(|| format!("reading the trace {}", path.display()))?;
        for &room in room_blocks {
            for pools in POOLS {
                for &policy in PolicyKind::ALL {
                    let row = replay(&trace, policy, pools, room)?;
                    if json {
                        writeln!(out, "{}", serde_json::to_string(&row)?)?;
                    } else {
                        writeln!(
                            out,
                            "{:<24} {:<12} {:>5} {:>10} {:>10} {:>10} {:>10} {:>8.2}",
                            row.trace,
                            row.policy,
                            row.pools,
                            row.room_blocks,
                            row.blocks,
                            row.hits,
                            row.evictions,
                            row.seconds
                        )?;
                    }
                }
            }
        }
    }
    Ok(())
}

impl Trace {
    fn read(path: &Path) -> Result<Self> {
        let name = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        let namespace = NamespaceKey::derive(b"", "policy bench", b"");
        let mut indices = HashMap::new();
        let (mut requests, mut keys) = (Vec::new(), Vec::new());
        for (number, line) in (1..).zip(BufReader::new(File::open(path)?).lines()) {
            let line = line?;
            if line.len() > LINE_BYTES_MAX {
                bail!("line {number} is longer than {LINE_BYTES_MAX} bytes");
            }
            if line.trim().is_empty() {
                continue;
            }
            let request: Request = serde_json::from_str(&line).with_context(|| format!("line {number}"))?;
            let mut blocks = Vec::with_capacity(request.hash_ids.len());
            for id in request.hash_ids {
                let next = u32::try_from(keys.len()).context("too many distinct blocks")?;
                blocks.push(*indices.entry(id).or_insert_with(|| {
                    keys.push(namespace.hash(KeyCoordinates::default(), &id.to_le_bytes()));
                    next
                }));
            }
            requests.push(blocks);
        }
        Ok(Self { name, requests, keys })
    }
}

/// Ranks and what all of them have published.
struct Cluster {
    owners: Vec<Owner>,
    published: HashMap<Fingerprint, Vec<(usize, SlotId, Generation)>>,
    next_put: u64,
}

impl Cluster {
    fn new(policy: PolicyKind, pools: usize, room_blocks: u64) -> Result<Self> {
        let incarnation = Incarnation::new(1).context("an incarnation is not zero")?;
        let config =
            OwnerConfig { policy, ..OwnerConfig::new(room_blocks / pools as u64 * BLOCK_BYTES, incarnation) };
        let owners = (0..pools).map(|_| Owner::new(config.clone())).collect::<Result<_, _>>()?;
        Ok(Self { owners, published: HashMap::new(), next_put: 0 })
    }

    /// Length of the leading run of blocks that are published somewhere; the run is touched where it is read, which is
    /// in the rank's own pool if it is there.
    fn look_up(&mut self, rank: usize, blocks: &[u32], keys: &[KeyHash]) -> usize {
        let place = |&block: &u32| {
            let replicas = self.published.get(&keys[block as usize].fingerprint())?;
            replicas.iter().find(|replica| replica.0 == rank).or(replicas.first()).copied()
        };
        let run: Vec<_> = blocks.iter().map_while(place).collect();
        for &(owner, slot, generation) in &run {
            self.owners[owner].handle_touch(Time::ZERO, slot, generation);
        }
        run.len()
    }

    fn store(&mut self, rank: usize, key: KeyHash, parent: Option<Fingerprint>) -> Result<()> {
        let put = PutId(self.next_put);
        self.next_put += 1;
        let request = Put {
            key,
            ns: NsId(1),
            ns_epoch: NsEpoch(0),
            key_bytes: Box::default(),
            layout: LayoutId(1),
            group_id: 0,
            object_bytes: BLOCK_BYTES,
            parent,
        };
        let owner = &mut self.owners[rank];
        owner.handle_put(Time::ZERO, put, request);
        while let Some(action) = owner.poll_action() {
            match action {
                OwnerAction::AllocateExtent { extent, .. } => owner.handle_extent(Time::ZERO, extent, Ok(())),
                OwnerAction::Fill { put, .. } => owner.handle_filled(Time::ZERO, put, Ok(0)),
                OwnerAction::Announce(change) if change.present => {
                    let replica = (rank, change.slot, change.generation);
                    self.published.entry(change.fingerprint).or_default().push(replica);
                }
                OwnerAction::Announce(change) => {
                    if let Entry::Occupied(mut replicas) = self.published.entry(change.fingerprint) {
                        replicas.get_mut().retain(|replica| replica.0 != rank);
                        if replicas.get().is_empty() {
                            replicas.remove();
                        }
                    }
                }
                OwnerAction::PutDone { outcome, .. } => {
                    outcome.context("storing a block")?;
                }
                OwnerAction::InvalidateWord { .. }
                | OwnerAction::PublishWord { .. }
                | OwnerAction::AddSlab(_)
                | OwnerAction::RetireSlab(_)
                | OwnerAction::AbortFill { .. } => {}
            }
        }
        Ok(())
    }
}

fn replay<'a>(trace: &'a Trace, policy: PolicyKind, pools: usize, room_blocks: u64) -> Result<Row<'a>> {
    let start = Instant::now();
    let mut cluster = Cluster::new(policy, pools, room_blocks)?;
    let (mut blocks, mut hits) = (0, 0);
    for (number, request) in trace.requests.iter().enumerate() {
        let run = cluster.look_up(number % pools, request, &trace.keys);
        blocks += request.len() as u64;
        hits += run as u64;
        for (at, &block) in request.iter().enumerate().skip(run) {
            let key = trace.keys[block as usize];
            let parent = at.checked_sub(1).map(|parent| trace.keys[request[parent] as usize].fingerprint());
            cluster.store(number % pools, key, parent)?;
        }
    }
    let evictions = cluster.owners.iter().map(|owner| owner.stats().evicted).sum();
    let seconds = start.elapsed().as_secs_f64();
    let (trace, policy) = (trace.name.as_str(), policy.name());
    Ok(Row { bench: "policy", trace, policy, pools, room_blocks, blocks, hits, evictions, seconds })
}
