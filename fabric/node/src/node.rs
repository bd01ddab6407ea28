//! A rank: starts the parts, and gives the engine its calls.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::mpsc::sync_channel;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kvfabric_core::Incarnation;
use kvfabric_memory::{OwnerMemory, Region, ScatterList};
use kvfabric_transport_control::Endpoint;
use kvfabric_transport_shm::ShmServer;
use kvfabric_transport_tcp::TcpServer;
use tokio::sync::watch;

use crate::command::Command;
use crate::shared::{LookupAnswer, Namespace, Shared};
use crate::system::end_runtime;
use crate::{
    BlockError, BufferError, DirectoryServer, Job, LoadItem, NamespaceError, NamespaceSpec, NodeConfig,
    NodeStats, PeerRoute, StartError, StoreItem, SubmitError,
};

/// Time that closing gives to jobs in progress: more than any transport's drain bound.
const CLOSE_DRAIN: Duration = Duration::from_secs(2);
/// The core thread answers from memory; the bound only guards against a node that is being closed.
pub(crate) const CORE_ANSWER_MAX: Duration = Duration::from_secs(10);

/// A rank of the fabric.
///
/// Dropping it closes it: jobs in progress are ended by force, and each is final before its memory is let go.
pub struct Node {
    pub(crate) name: String,
    pub(crate) incarnation: Incarnation,
    pub(crate) shared: Arc<Shared>,
    pub(crate) core: Option<JoinHandle<()>>,
    pub(crate) stop: watch::Sender<bool>,
    pub(crate) endpoint: Endpoint,
    pub(crate) metrics: Option<crate::metrics::MetricsServer>,
    pub(crate) runtime: Option<tokio::runtime::Runtime>,
    // The serving sides outlive the core thread: peers may read until this process is gone.
    pub(crate) _tcp: Option<TcpServer>,
    pub(crate) _shm: Option<ShmServer>,
    pub(crate) _memory: Arc<OwnerMemory>,
    pub(crate) directory: Option<DirectoryServer>,
    /// Whether anybody out there knows of this node and should be told of its end.
    pub(crate) reached_directory: bool,
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({}, incarnation {})", self.name, self.incarnation)
    }
}

impl Node {
    /// Starts a rank and joins the directory. Blocks, at most `start_timeout` plus the time that memory and certificates take.
    ///
    /// # Errors
    /// [`StartError`] names what is wrong and the remedy. Nothing is left behind then.
    pub fn start(config: NodeConfig) -> Result<Self, StartError> {
        crate::start::Starter::new(config)?.start()
    }

    /// Name of the rank.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Incarnation of this process.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.incarnation.get()
    }

    /// Registers memory that loads and stores may name: each allocation once.
    ///
    /// # Errors
    /// [`BufferError::Overlaps`].
    pub fn register_buffer(&self, region: &Region) -> Result<(), BufferError> {
        self.shared.register(region)
    }

    /// Takes memory back. No job may name it any more.
    ///
    /// # Errors
    /// [`BufferError::InUse`] while a job that is not final uses it; [`BufferError::NotRegistered`].
    pub fn deregister_buffer(&self, region: &Region) -> Result<(), BufferError> {
        // Taken out first, so that no new job can slip in between the question and its answer.
        self.shared.deregister(region)?;
        let (start, length_bytes) = (region.address() as u64, region.length_bytes() as u64);
        let used = self.ask_core(|reply| Command::Uses { start, length_bytes, reply });
        // No answer from a core thread that lives is no permission.
        let closed = self.shared.closed.load(Ordering::Acquire);
        if used == Some(true) || (used.is_none() && !closed) {
            self.shared.register(region)?;
            return Err(BufferError::InUse);
        }
        Ok(())
    }

    /// A scatter list over registered memory from absolute addresses and lengths, as layout planners give them.
    ///
    /// # Errors
    /// [`BlockError::NotRegistered`].
    pub fn resolve(&self, ranges: impl Iterator<Item = (u64, u64)>) -> Result<ScatterList, BlockError> {
        self.shared.resolve(ranges)
    }

    /// Opens a namespace: its keys can be stored, loaded and looked up through the handle.
    ///
    /// # Errors
    /// [`NamespaceError`].
    pub fn open_namespace(&self, spec: NamespaceSpec) -> Result<Namespace, NamespaceError> {
        self.shared.open_namespace(spec)
    }

    /// Stores blocks. Each becomes visible by itself once its bytes are complete; the sources belong to the job until it
    /// is final.
    ///
    /// # Errors
    /// [`SubmitError`]: nothing was begun. What is wrong with single blocks is in the job's report.
    pub fn store(
        &self,
        ns: &Namespace,
        items: Vec<StoreItem>,
        deadline: Duration,
    ) -> Result<Job, SubmitError> {
        self.shared.store(ns, items, deadline)
    }

    /// Loads blocks. The destinations belong to the job until it is final; a block's bytes are right if and only if its
    /// result is `Ok`.
    ///
    /// # Errors
    /// [`SubmitError`]: nothing was begun. What is wrong with single blocks is in the job's report.
    pub fn load(&self, ns: &Namespace, items: Vec<LoadItem>, deadline: Duration) -> Result<Job, SubmitError> {
        self.shared.load(ns, items, deadline)
    }

    /// Which keys some rank holds. No side effects; bounded by `budget`; any doubt is a miss.
    #[must_use]
    pub fn lookup<K: AsRef<str>>(&self, ns: &Namespace, keys: &[K], budget: Duration) -> LookupAnswer {
        match &self.runtime {
            Some(runtime) => self.shared.lookup(runtime.handle(), ns, keys, budget),
            None => LookupAnswer { hits: vec![false; keys.len()], complete: false },
        }
    }

    /// Waits until everything stored so far is known to the directory. False when that took longer than `deadline`.
    #[must_use]
    pub fn flush(&self, deadline: Duration) -> bool {
        let (reply, answer) = sync_channel(1);
        self.shared.send(Command::Flush { within: deadline, reply })
            && answer.recv_timeout(deadline.saturating_add(CORE_ANSWER_MAX)).unwrap_or(false)
    }

    /// Clears a namespace in the whole cluster. True only if every live rank confirmed.
    #[must_use]
    pub fn clear(&self, ns: &Namespace, deadline: Duration) -> bool {
        let (reply, answer) = sync_channel(1);
        self.shared.owns(ns)
            && self.shared.send(Command::Clear { ns: ns.0.local, within: deadline, reply })
            && answer.recv_timeout(deadline.saturating_add(CORE_ANSWER_MAX)).unwrap_or(false)
    }

    /// Evicts own blocks, whatever the policy says. Returns how many were resident.
    #[must_use]
    pub fn evict<K: AsRef<str>>(&self, ns: &Namespace, keys: &[K]) -> usize {
        if !self.shared.owns(ns) {
            return 0;
        }
        let fingerprints = Shared::fingerprints(ns, keys).into_iter().flatten().collect();
        self.ask_core(|reply| Command::Evict { fingerprints, reply }).unwrap_or(0)
    }

    /// Keys that this rank published and evicted since the last call.
    #[must_use]
    pub fn take_evicted_keys(&self) -> Vec<String> {
        self.ask_core(|reply| Command::TakeEvicted { reply })
            .unwrap_or_default()
            .into_iter()
            .map(|key| String::from_utf8_lossy(&key).into_owned())
            .collect()
    }

    /// Figures.
    #[must_use]
    pub fn stats(&self) -> NodeStats {
        self.ask_core(|reply| Command::Stats { reply }).unwrap_or_default()
    }

    /// Connected peers and the transport chosen for each.
    #[must_use]
    pub fn routes(&self) -> Vec<PeerRoute> {
        self.ask_core(|reply| Command::Routes { reply }).unwrap_or_default()
    }

    /// Whether the rank is a member of the directory now.
    #[must_use]
    pub fn directory_connected(&self) -> bool {
        self.shared.view.read().is_some()
    }

    /// Address of the Prometheus endpoint, if there is one.
    #[must_use]
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.metrics.as_ref().map(crate::metrics::MetricsServer::local_addr)
    }

    /// Address of the embedded directory, if there is one.
    #[must_use]
    pub fn directory_address(&self) -> Option<SocketAddr> {
        self.directory.as_ref().map(DirectoryServer::local_addr)
    }

    /// Leaves the directory and ends everything. Bounded.
    pub fn close(self) {
        drop(self);
    }

    fn ask_core<T>(&self, command: impl FnOnce(std::sync::mpsc::SyncSender<T>) -> Command) -> Option<T> {
        let (reply, answer) = sync_channel(1);
        if !self.shared.send(command(reply)) {
            return None;
        }
        answer.recv_timeout(CORE_ANSWER_MAX).ok()
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        // The session says farewell first, so that lookups stop finding what is about to go.
        let _ = self.stop.send(true);
        let _ = self.shared.commands.send(Command::Close { drain: CLOSE_DRAIN });
        self.shared.closed.store(true, Ordering::Release);
        if let Some(core) = self.core.take() {
            if core.join().is_err() {
                tracing::error!("the core thread panicked");
            }
        }
        if let Some(runtime) = self.runtime.take() {
            let farewell = self.reached_directory.then_some("the rank stops");
            end_runtime(runtime, self.endpoint.clone(), farewell);
        }
    }
}
