//! Errors of the node, one enum an operation.

use kvfabric_core::directory::JoinError;
use kvfabric_core::load::LoadError;
use kvfabric_core::owner::PutError;
use kvfabric_core::spans::SpanConflict;
use thiserror::Error;

/// Why one block of a job failed. Its siblings are unaffected.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BlockError {
    /// The key is not a UMBP key.
    #[error("bad key {key:?}: {reason}")]
    BadKey {
        /// The key, shortened.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The key names another namespace than the one given.
    #[error("the key belongs to namespace {found:?}, not {expected:?}")]
    OtherNamespace {
        /// The namespace given.
        expected: String,
        /// The namespace in the key.
        found: String,
    },
    /// The key names a cache group that the namespace was opened without.
    #[error("cache group {group_id} is not part of the namespace; open it with this group's layout")]
    UnknownGroup {
        /// The group in the key.
        group_id: u32,
    },
    /// The ranges do not add up to the group's object.
    #[error("the block's ranges hold {found_bytes} bytes, the group's object has {expected_bytes}")]
    WrongSize {
        /// Size by layout, bytes.
        expected_bytes: u64,
        /// Sum of the ranges, bytes.
        found_bytes: u64,
    },
    /// The handle of a namespace that another node opened.
    #[error("the namespace was opened by another node; open it with this one")]
    ForeignNamespace,
    /// A range lies in memory that is not registered here (any more).
    #[error("the block's memory is not registered; call register_buffer first")]
    NotRegistered,
    /// The memory is in use.
    #[error(transparent)]
    Memory(#[from] SpanConflict),
    /// The store failed.
    #[error(transparent)]
    Put(#[from] PutError),
    /// The load failed.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The node was closed or its core thread ended.
    #[error("the node was closed")]
    NodeStopped,
}

impl BlockError {
    /// Whether the same request may succeed later without any change.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Put(error) => error.is_retryable(),
            Self::Load(error) => error.is_retryable(),
            Self::Memory(SpanConflict::WithJob { .. }) => true,
            _ => false,
        }
    }

    /// Whether the cause lies on this rank alone.
    #[must_use]
    pub fn is_local(&self) -> bool {
        match self {
            Self::Load(error) => error.is_local(),
            _ => true,
        }
    }

    /// Whether the block was a miss: nothing wrong, just not to be had.
    #[must_use]
    pub fn is_miss(&self) -> bool {
        matches!(self, Self::Load(LoadError::NotFound | LoadError::Stale))
    }
}

/// Why a job was not taken at all.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SubmitError {
    /// More blocks than a job may have.
    #[error("a job of {blocks} blocks exceeds the limit of {limit}; split it")]
    TooManyBlocks {
        /// Blocks asked for.
        blocks: usize,
        /// [`kvfabric_core::limits::JOB_BLOCKS_MAX`].
        limit: usize,
    },
    /// More jobs than the node tracks.
    #[error("{jobs} jobs are in progress, the limit; wait for some to finish")]
    TooManyJobs {
        /// Jobs in progress.
        jobs: usize,
    },
    /// The node was closed.
    #[error("the node was closed")]
    NodeStopped,
}

impl SubmitError {
    /// Whether the same job may be taken later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::TooManyJobs { .. })
    }

    /// All causes are local.
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }
}

/// Why a node or a directory could not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum StartError {
    /// A configuration value is wrong.
    #[error("{0}")]
    Config(#[from] crate::ConfigError),
    /// The pool could not be made.
    #[error("cannot create the pool: {0}")]
    Pool(String),
    /// A listener could not be opened.
    #[error("cannot listen on {address}: {reason}")]
    Listen {
        /// Address asked for.
        address: String,
        /// Reason and remedy.
        reason: String,
    },
    /// The directory could not be reached in time.
    #[error("cannot reach the directory at {address}: {reason}; is it running there (kvfabric directory --listen {address})?")]
    DirectoryUnreachable {
        /// Address asked for.
        address: String,
        /// What happened.
        reason: String,
    },
    /// The directory refused this rank.
    #[error("the directory refused rank {name:?}: {reason}")]
    JoinRefused {
        /// Name of the rank.
        name: String,
        /// Its reason, for programs.
        kind: JoinError,
        /// Its reason, and what to do.
        reason: String,
    },
    /// Certificates or keys.
    #[error("{0}")]
    Security(String),
    /// The transport asked for does not work here.
    #[error("transport {transport} does not work here: {reason}")]
    TransportUnavailable {
        /// Transport asked for.
        transport: &'static str,
        /// Why, and what to do.
        reason: String,
    },
    /// The system refused a thread, a socket or a file.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: String,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// Why a namespace could not be opened.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NamespaceError {
    /// An empty name, or one that no key can carry.
    #[error("bad namespace {name:?}: {reason}")]
    BadName {
        /// Name.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// The namespace is open with another layout under the same group.
    #[error("namespace {name:?} is open with another layout of group {group_id}; one namespace has one layout a group")]
    LayoutConflict {
        /// Name.
        name: String,
        /// Group.
        group_id: u32,
    },
    /// An object size of zero, or above [`kvfabric_core::limits::OBJECT_BYTES_MAX`], or above the pool.
    #[error("an object of {object_bytes} bytes (group {group_id}) cannot be stored here: {reason}")]
    BadObjectSize {
        /// Group.
        group_id: u32,
        /// Size, bytes.
        object_bytes: u64,
        /// Why.
        reason: String,
    },
    /// The node was closed.
    #[error("the node was closed")]
    NodeStopped,
}

/// Why a buffer could not be registered or released.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum BufferError {
    /// It overlaps a registered buffer without being the same.
    #[error("the buffer at {address:#x} of {length_bytes} bytes overlaps a registered one; register each allocation once")]
    Overlaps {
        /// Start.
        address: usize,
        /// Length, bytes.
        length_bytes: usize,
    },
    /// Jobs still use it.
    #[error("a job that is not final uses the buffer; wait for it or cancel it first")]
    InUse,
    /// It is not registered.
    #[error("the buffer is not registered")]
    NotRegistered,
    /// The node was closed.
    #[error("the node was closed")]
    NodeStopped,
}

impl StartError {
    /// Whether the same start may succeed later without any change here.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::DirectoryUnreachable { .. } | Self::Listen { .. } => true,
            Self::JoinRefused { kind, .. } => kind.is_retryable(),
            _ => false,
        }
    }

    /// Whether the cause lies on this machine.
    #[must_use]
    pub fn is_local(&self) -> bool {
        !matches!(self, Self::DirectoryUnreachable { .. } | Self::JoinRefused { .. })
    }
}

impl NamespaceError {
    /// Never: the same call fails again.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        false
    }

    /// Always.
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }
}

impl BufferError {
    /// Whether the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::InUse)
    }

    /// Always.
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }
}
