//! The UMBP data model: keys, rank topologies, namespaces, layouts, transfer plans and jobs.
//!
//! vLLM's UMBP connector names a KV object with a key string, describes where its bytes lie with a layout, and follows
//! transfers with per-key job states. This module is that vocabulary for engines that are not vLLM and for the Python
//! connector: the same values and the same error conditions as vLLM 0.33.0 (namespaces also in the older derivation),
//! plus the bounds that hostile input needs. Lowering blocks to byte ranges ([`KVLayoutPlanner::plan_into`]) and
//! hashing keys ([`KeyHasher`]) are on the data path: they allocate nothing per item.

mod codec;
mod config;
mod hasher;
mod job;
mod json;
mod key;
mod layout;
pub mod limits;
mod lower;
mod metadata;
mod namespace;
mod plan;
mod planner;
mod request;
mod topology;

pub use codec::{BlockIdentityCodec, CodecError};
pub use config::{CacheConfig, CacheGroup, CacheTensor, GroupSpec, LayerSpec};
pub use hasher::KeyHasher;
pub use job::{JobError, JobPlans, TransferJobState, TransferJobStatus};
pub use json::{python_json, python_repr, JsonError};
pub use key::{fuzz_key, BlockHash, KeyError, KeyPart, NumberFault, ParsedKey, UmbpKey, KEY_PREFIX};
pub use layout::{KVLayoutDescriptor, KVRegion, LayoutError};
pub use lower::FlatRange;
pub use metadata::{ConnectorMetadata, StoreEventResult, WorkerMetadata};
pub use namespace::{LayoutVersion, NamespaceError, NamespaceInputs, SpeculativeInputs, UmbpNamespace};
pub use plan::{BatchError, BlockLoadBatch, BlockStoreBatch, BlockTransferPlan, KVRange};
pub use planner::{KVLayoutPlanner, RegisteredTensor};
pub use request::{LoadSpec, RequestTracker, TrackerError};
pub use topology::{ParallelSizes, RankNamespace, RankTopology, TopologyError, TopologyRanks};

#[cfg(test)]
mod tests;
