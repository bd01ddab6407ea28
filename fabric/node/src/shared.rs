//! The facade's shared part: validates on the caller's thread, hands over to the core thread, returns jobs.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfabric_core::hash::{KeyHash, NamespaceKey};
use kvfabric_core::limits;
use kvfabric_core::owner::PutId;
use kvfabric_core::umbp::ParsedKey;
use kvfabric_core::wire::{EngineKey, NsName, NsNumber, Query, Records};
use kvfabric_core::{Fingerprint, NsId};
use kvfabric_memory::{Region, ScatterList};
use parking_lot::{Mutex, RwLock};

use crate::backend::Directory;
use crate::command::{Command, LoadBlockInput, StoreBlockInput};
use crate::job::{Cancel, JobState};
use crate::metrics::Latencies;
use crate::{
    BlockError, BufferError, GroupLayout, Job, LoadItem, NamespaceError, NamespaceSpec, StoreItem,
    SubmitError,
};

/// A namespace that this rank has opened. Clones share it.
#[derive(Clone)]
pub struct Namespace(pub(crate) Arc<NamespaceInner>);

impl std::fmt::Debug for Namespace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Namespace({:?})", self.0.name)
    }
}

pub(crate) struct NamespaceInner {
    pub(crate) name: String,
    pub(crate) key: NamespaceKey,
    pub(crate) local: NsId,
    pub(crate) groups: Vec<GroupLayout>,
    /// Cleared when the node closes.
    pub(crate) node_id: u64,
}

impl Namespace {
    /// Its name, as in the keys.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Layout of a cache group.
    #[must_use]
    pub fn group(&self, group_id: u32) -> Option<GroupLayout> {
        self.0.groups.iter().find(|group| group.group_id == group_id).copied()
    }

    /// Parses a key and hashes it.
    fn hash(&self, key: &str) -> Result<(KeyHash, u32), BlockError> {
        let parsed = ParsedKey::parse(key.as_bytes())
            .map_err(|error| BlockError::BadKey { key: shorten(key), reason: error.to_string() })?;
        if parsed.namespace != self.0.name {
            return Err(BlockError::OtherNamespace {
                expected: self.0.name.clone(),
                found: shorten(parsed.namespace),
            });
        }
        Ok((self.0.key.hash(parsed.at, parsed.block_hash.as_bytes()), parsed.at.group_id))
    }

    fn hash_for(&self, key: &str, found_bytes: u64) -> Result<(KeyHash, GroupLayout), BlockError> {
        let (hash, group_id) = self.hash(key)?;
        let group = self.group(group_id).ok_or(BlockError::UnknownGroup { group_id })?;
        if group.object_bytes != found_bytes {
            return Err(BlockError::WrongSize { expected_bytes: group.object_bytes, found_bytes });
        }
        Ok((hash, group))
    }
}

/// Keys in messages are cut to a length that fits a log line.
fn shorten(text: &str) -> String {
    const CHARACTERS_MAX: usize = 160;
    if text.chars().count() <= CHARACTERS_MAX {
        return text.to_owned();
    }
    let head: String = text.chars().take(CHARACTERS_MAX).collect();
    format!("{head}...")
}

/// Answer of a lookup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LookupAnswer {
    /// One bit a key, in order; any doubt is false.
    pub hits: Vec<bool>,
    /// Whether the directory answered for every key. If not, false may also mean "not known".
    pub complete: bool,
}

impl LookupAnswer {
    /// Length of the leading run of hits.
    #[must_use]
    pub fn prefix_hits(&self) -> usize {
        self.hits.iter().take_while(|hit| **hit).count()
    }
}

/// Registered buffers by address.
type Buffers = BTreeMap<usize, Region>;

/// State that the facade shares with the node's threads.
pub(crate) struct Shared {
    pub(crate) node_id: u64,
    pub(crate) commands: Sender<Command>,
    pub(crate) closed: AtomicBool,
    pub(crate) jobs_in_progress: AtomicUsize,
    next_job: AtomicU64,
    next_put: AtomicU64,
    buffers: RwLock<Buffers>,
    namespaces: Mutex<BTreeMap<String, Namespace>>,
    ns_secret: Vec<u8>,
    pool_bytes: u64,
    /// How to ask the directory, while this rank is a member.
    pub(crate) view: RwLock<Option<DirectoryView>>,
    failed: Mutex<FailedKeys>,
    pub(crate) latencies: Latencies,
    /// TOUCH messages that wait for the core thread.
    pub(crate) touches: Arc<AtomicUsize>,
}

/// The directory as lookups see it.
#[derive(Clone)]
pub(crate) struct DirectoryView {
    pub(crate) directory: Arc<dyn Directory>,
    pub(crate) asker: EngineKey,
    /// Directory's numbers of the namespaces, by this rank's own.
    pub(crate) numbers: BTreeMap<NsId, NsNumber>,
}

/// Keys whose load failed a moment ago and whose miss report was not acknowledged: lookups answer no, so that an engine
/// does not ask for them in a loop.
#[derive(Default)]
struct FailedKeys {
    until: BTreeMap<Fingerprint, Instant>,
    order: VecDeque<Fingerprint>,
}

/// What scheduling may add to a lookup's budget.
const LOOKUP_GRACE: Duration = Duration::from_millis(2);
/// How long a failed key stays negative; as long as the directory hides a replica at first.
const FAILED_KEY_TTL: Duration = limits::HIDE_MIN;
/// Most failed keys remembered; the oldest make room.
const FAILED_KEYS_MAX: usize = 65_536;

impl Shared {
    pub(crate) fn new(node_id: u64, commands: Sender<Command>, ns_secret: Vec<u8>, pool_bytes: u64) -> Self {
        Self {
            node_id,
            commands,
            closed: AtomicBool::new(false),
            jobs_in_progress: AtomicUsize::new(0),
            next_job: AtomicU64::new(1),
            next_put: AtomicU64::new(1),
            buffers: RwLock::new(BTreeMap::new()),
            namespaces: Mutex::new(BTreeMap::new()),
            ns_secret,
            pool_bytes,
            view: RwLock::new(None),
            failed: Mutex::default(),
            latencies: Latencies::default(),
            touches: Arc::default(),
        }
    }

    /// Makes keys negative for lookups of this node for a while.
    pub(crate) fn remember_failed(&self, keys: &[Fingerprint]) {
        let until = Instant::now() + FAILED_KEY_TTL;
        let mut failed = self.failed.lock();
        for key in keys {
            if failed.until.insert(*key, until).is_none() {
                failed.order.push_back(*key);
            }
        }
        let now = Instant::now();
        while let Some(oldest) = failed.order.front().copied() {
            let expired = failed.until.get(&oldest).is_none_or(|until| *until <= now);
            if !expired && failed.order.len() <= FAILED_KEYS_MAX {
                break;
            }
            failed.order.pop_front();
            failed.until.remove(&oldest);
        }
    }

    /// The directory acknowledged what is wrong with these keys: its answers count again.
    pub(crate) fn forget_failed(&self, keys: &[Fingerprint]) {
        let mut failed = self.failed.lock();
        if !failed.until.is_empty() {
            for key in keys {
                failed.until.remove(key);
            }
        }
    }

    /// Takes the hits of keys that failed a moment ago away.
    fn veto_failed(&self, keys: &[Option<Fingerprint>], hits: &mut [bool]) {
        let failed = self.failed.lock();
        if failed.until.is_empty() {
            return;
        }
        let now = Instant::now();
        for (key, hit) in keys.iter().zip(hits) {
            if key.is_some_and(|key| failed.until.get(&key).is_some_and(|until| *until > now)) {
                *hit = false;
            }
        }
    }

    /// Asks the directory which keys exist, in batches, within `budget`.
    pub(crate) fn lookup<K: AsRef<str>>(
        &self,
        runtime: &tokio::runtime::Handle,
        ns: &Namespace,
        keys: &[K],
        budget: Duration,
    ) -> LookupAnswer {
        let fingerprints = Self::fingerprints(ns, keys);
        let mut hits = vec![false; keys.len()];
        let view = self.view.read().clone().filter(|_| self.owns(ns));
        let number = view.as_ref().and_then(|view| view.numbers.get(&ns.0.local).copied());
        let (Some(view), Some(number)) = (view, number) else {
            return LookupAnswer { complete: keys.is_empty(), hits };
        };
        let begun = Instant::now();
        let keys_asked: Arc<[Option<Fingerprint>]> = fingerprints.into();
        let (reply, answer) = std::sync::mpsc::sync_channel(1);
        let task_keys = keys_asked.clone();
        // A task and a channel rather than `block_on`: the caller may itself be on a runtime's thread, and the wait here is
        // bounded whatever happens to the task.
        runtime.spawn(async move {
            let mut hits = vec![false; task_keys.len()];
            let complete = ask(&view, number, &task_keys, budget, &mut hits).await;
            let _ = reply.try_send((hits, complete));
        });
        let mut complete = false;
        if let Ok((found, all)) = answer.recv_timeout(budget.saturating_add(LOOKUP_GRACE)) {
            hits = found;
            complete = all;
        }
        self.latencies.lookup.observe(begun.elapsed().as_secs_f64());
        self.veto_failed(&keys_asked, &mut hits);
        LookupAnswer { hits, complete }
    }

    pub(crate) fn send(&self, command: Command) -> bool {
        !self.closed.load(Ordering::Acquire) && self.commands.send(command).is_ok()
    }

    /// Registers a buffer: each allocation once, overlaps refused.
    pub(crate) fn register(&self, region: &Region) -> Result<(), BufferError> {
        let (address, length_bytes) = (region.address(), region.length_bytes());
        let mut buffers = self.buffers.write();
        let before = buffers.range(..=address).next_back().map(|(start, other)| (*start, other.clone()));
        let after = buffers.range(address..).next().map(|(start, _)| *start);
        if let Some((start, other)) = before {
            if start == address && other.same(region) {
                return Ok(());
            }
            if start + other.length_bytes() > address {
                return Err(BufferError::Overlaps { address, length_bytes });
            }
        }
        if after.is_some_and(|start| start < address + length_bytes) {
            return Err(BufferError::Overlaps { address, length_bytes });
        }
        buffers.insert(address, region.clone());
        Ok(())
    }

    /// Takes a buffer out, so that no new job can name it.
    pub(crate) fn deregister(&self, region: &Region) -> Result<(), BufferError> {
        let mut buffers = self.buffers.write();
        match buffers.get(&region.address()) {
            Some(known) if known.same(region) => {
                buffers.remove(&region.address());
                Ok(())
            }
            _ => Err(BufferError::NotRegistered),
        }
    }

    /// A scatter list over registered memory from absolute addresses, as planners give them.
    pub(crate) fn resolve(
        &self,
        ranges: impl Iterator<Item = (u64, u64)>,
    ) -> Result<ScatterList, BlockError> {
        let buffers = self.buffers.read();
        let mut list = ScatterList::with_capacity(ranges.size_hint().0);
        for (address, length_bytes) in ranges {
            let address = usize::try_from(address).map_err(|_| BlockError::NotRegistered)?;
            let length_bytes = usize::try_from(length_bytes).map_err(|_| BlockError::NotRegistered)?;
            let (start, region) = buffers.range(..=address).next_back().ok_or(BlockError::NotRegistered)?;
            list.push(region, address - start, length_bytes).map_err(|_| BlockError::NotRegistered)?;
        }
        Ok(list)
    }

    fn all_registered(buffers: &Buffers, list: &ScatterList) -> bool {
        list.regions()
            .iter()
            .all(|region| buffers.get(&region.address()).is_some_and(|known| known.same(region)))
    }

    pub(crate) fn open_namespace(&self, spec: NamespaceSpec) -> Result<Namespace, NamespaceError> {
        check_spec(&spec, self.pool_bytes)?;
        let mut namespaces = self.namespaces.lock();
        let key = NamespaceKey::derive(&self.ns_secret, &spec.name, &spec.key_salt);
        if let Some(known) = namespaces.get(&spec.name) {
            if known.0.key == key {
                let conflict = spec
                    .groups
                    .iter()
                    .find(|group| known.group(group.group_id).is_some_and(|old| old != **group));
                if let Some(group) = conflict {
                    return Err(NamespaceError::LayoutConflict { name: spec.name, group_id: group.group_id });
                }
                if spec.groups.iter().all(|group| known.group(group.group_id).is_some()) {
                    return Ok(known.clone());
                }
            }
        }
        let (reply, answer) = std::sync::mpsc::sync_channel(1);
        if !self.send(Command::OpenNamespace { name: NsName(key.public_name()), reply }) {
            return Err(NamespaceError::NodeStopped);
        }
        // The core thread answers from memory; the bound only guards against a node that is being closed.
        let local = answer.recv_timeout(Duration::from_secs(10)).map_err(|_| NamespaceError::NodeStopped)?;
        let namespace = Namespace(Arc::new(NamespaceInner {
            name: spec.name.clone(),
            key,
            local,
            groups: spec.groups,
            node_id: self.node_id,
        }));
        namespaces.insert(spec.name, namespace.clone());
        Ok(namespace)
    }

    /// Whether this node opened the namespace: the numbers in a handle mean nothing to another node.
    pub(crate) fn owns(&self, ns: &Namespace) -> bool {
        ns.0.node_id == self.node_id
    }

    /// Everything about a block that can be wrong before its job begins.
    fn check_block(
        &self,
        buffers: &Buffers,
        ns: &Namespace,
        key: &str,
        memory: &ScatterList,
    ) -> Result<(KeyHash, GroupLayout), BlockError> {
        if !self.owns(ns) {
            return Err(BlockError::ForeignNamespace);
        }
        let found = ns.hash_for(key, memory.total_bytes())?;
        if Self::all_registered(buffers, memory) {
            Ok(found)
        } else {
            Err(BlockError::NotRegistered)
        }
    }

    fn begin_job(self: &Arc<Self>, blocks: usize) -> Result<Arc<JobState>, SubmitError> {
        if blocks > limits::JOB_BLOCKS_MAX {
            return Err(SubmitError::TooManyBlocks { blocks, limit: limits::JOB_BLOCKS_MAX });
        }
        if self.closed.load(Ordering::Acquire) {
            return Err(SubmitError::NodeStopped);
        }
        let jobs = self.jobs_in_progress.fetch_add(1, Ordering::AcqRel);
        if jobs >= limits::JOBS_MAX {
            self.jobs_in_progress.fetch_sub(1, Ordering::AcqRel);
            return Err(SubmitError::TooManyJobs { jobs });
        }
        Ok(JobState::new(self.next_job.fetch_add(1, Ordering::Relaxed), blocks))
    }

    fn job(self: &Arc<Self>, state: Arc<JobState>) -> Job {
        Job { state, cancel: self.clone() as Arc<dyn Cancel> }
    }

    pub(crate) fn store(
        self: &Arc<Self>,
        ns: &Namespace,
        items: Vec<StoreItem>,
        deadline: Duration,
    ) -> Result<Job, SubmitError> {
        let state = self.begin_job(items.len())?;
        // Held until the job is submitted, so that no buffer goes between the check and the claim of its memory.
        let buffers = self.buffers.read();
        let first_put = PutId(self.next_put.fetch_add(items.len() as u64, Ordering::Relaxed));
        let mut blocks = Vec::with_capacity(items.len());
        for (index, item) in items.into_iter().enumerate() {
            let checked = self.check_block(&buffers, ns, &item.key, &item.source);
            match checked {
                Ok((key, group)) => blocks.push(StoreBlockInput {
                    index,
                    key,
                    parent: item.parent_block_hash.and_then(|hash| parent_of(ns, &item.key, &hash)),
                    key_bytes: item.key.into_bytes().into_boxed_slice(),
                    group,
                    source: item.source,
                }),
                Err(error) => state.set(index, Err(error)),
            }
        }
        self.submit(
            &state,
            Command::Store {
                job: state.clone(),
                ns: ns.0.local,
                first_put,
                blocks,
                until: crate::system::after(deadline),
            },
        )?;
        Ok(self.job(state))
    }

    pub(crate) fn load(
        self: &Arc<Self>,
        ns: &Namespace,
        items: Vec<LoadItem>,
        deadline: Duration,
    ) -> Result<Job, SubmitError> {
        let state = self.begin_job(items.len())?;
        // As in `store`.
        let buffers = self.buffers.read();
        let mut blocks = Vec::with_capacity(items.len());
        for (index, item) in items.into_iter().enumerate() {
            let checked = self.check_block(&buffers, ns, &item.key, &item.destination);
            match checked {
                Ok((key, group)) => {
                    blocks.push(LoadBlockInput { index, key, group, destination: item.destination });
                }
                Err(error) => state.set(index, Err(error)),
            }
        }
        self.submit(
            &state,
            Command::Load {
                job: state.clone(),
                ns: ns.0.local,
                blocks,
                until: crate::system::after(deadline),
            },
        )?;
        Ok(self.job(state))
    }

    fn submit(&self, state: &Arc<JobState>, command: Command) -> Result<(), SubmitError> {
        if self.send(command) {
            return Ok(());
        }
        self.jobs_in_progress.fetch_sub(1, Ordering::AcqRel);
        state.finish();
        Err(SubmitError::NodeStopped)
    }

    /// Fingerprints of keys, `None` where a key is malformed or of another namespace: such a key is a miss.
    pub(crate) fn fingerprints<K: AsRef<str>>(ns: &Namespace, keys: &[K]) -> Vec<Option<Fingerprint>> {
        keys.iter().map(|key| ns.hash(key.as_ref()).ok().map(|(hash, _)| hash.fingerprint())).collect()
    }
}

impl Cancel for Shared {
    fn cancel(&self, job: u64) {
        self.send(Command::Cancel { job });
    }
}

/// Sends the batches side by side; returns whether each was answered.
async fn ask(
    view: &DirectoryView,
    ns: NsNumber,
    keys: &[Option<Fingerprint>],
    budget: Duration,
    hits: &mut [bool],
) -> bool {
    let deadline_us = u32::try_from(budget.as_micros()).unwrap_or(u32::MAX);
    let mut complete = true;
    let mut asked = Vec::new();
    for batch in keys.chunks(LOOKUP_BATCH) {
        let mut records = Records::with_capacity(batch.len());
        batch.iter().flatten().for_each(|key| records.push(*key));
        let query = Query { ns, asker: view.asker, deadline_us, keys: records };
        asked.push(tokio::spawn(view.directory.lookup(query, budget)));
    }
    for ((batch, hits), task) in keys.chunks(LOOKUP_BATCH).zip(hits.chunks_mut(LOOKUP_BATCH)).zip(asked) {
        match task.await {
            Ok(Ok(bitmap)) => {
                let mut bits = bitmap.iter();
                for (key, hit) in batch.iter().zip(hits) {
                    if key.is_some() {
                        *hit = bits.next().unwrap_or(false);
                    }
                }
            }
            Ok(Err(error)) => {
                tracing::debug!(%error, "a lookup was not answered");
                complete = false;
            }
            Err(_) => complete = false,
        }
    }
    complete
}

/// Keys in one LOOKUP: 256 KiB of fingerprints, so that a large lookup is answered in parallel and none waits long.
const LOOKUP_BATCH: usize = 16_384;
const _: () = assert!(LOOKUP_BATCH <= limits::LOOKUP_KEYS_MAX);

/// Fingerprint of the parent block: same coordinates, its own hash.
fn parent_of(ns: &Namespace, key: &str, parent_hash: &[u8]) -> Option<Fingerprint> {
    let parsed = ParsedKey::parse(key.as_bytes()).ok()?;
    Some(ns.0.key.hash(parsed.at, parent_hash).fingerprint())
}

fn check_spec(spec: &NamespaceSpec, pool_bytes: u64) -> Result<(), NamespaceError> {
    let limit = limits::KEY_BYTES_MAX / 2;
    if spec.name.is_empty() || spec.name.len() > limit {
        return Err(NamespaceError::BadName {
            name: shorten(&spec.name),
            reason: format!("must have 1 to {limit} bytes"),
        });
    }
    for group in &spec.groups {
        let reason = match group.object_bytes {
            0 => "it must have at least one byte".to_owned(),
            bytes if bytes > limits::OBJECT_BYTES_MAX => {
                format!("the largest object is {} bytes", limits::OBJECT_BYTES_MAX)
            }
            bytes if bytes > pool_bytes => {
                format!("the pool has only {pool_bytes} bytes; raise --pool-bytes")
            }
            _ => continue,
        };
        return Err(NamespaceError::BadObjectSize {
            group_id: group.group_id,
            object_bytes: group.object_bytes,
            reason,
        });
    }
    let mut ids: Vec<u32> = spec.groups.iter().map(|group| group.group_id).collect();
    ids.sort_unstable();
    match ids.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(NamespaceError::LayoutConflict { name: spec.name.clone(), group_id: pair[0] }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A report that was acknowledged late kept its key negative for the whole time, although the key had been stored
    /// anew meanwhile.
    #[test]
    fn a_late_acknowledgement_ends_the_veto() {
        let (commands, _inbox) = std::sync::mpsc::channel();
        let shared = Shared::new(1, commands, Vec::new(), 1 << 20);
        let (a, b) = (Fingerprint([1, 2]), Fingerprint([3, 4]));
        shared.remember_failed(&[a, b]);
        let asked = [Some(a), Some(b), None];
        let mut hits = [true, true, true];
        shared.veto_failed(&asked, &mut hits);
        assert_eq!(hits, [false, false, true]);
        shared.forget_failed(&[a]);
        let mut hits = [true, true, true];
        shared.veto_failed(&asked, &mut hits);
        assert_eq!(hits, [true, false, true]);
    }
}
