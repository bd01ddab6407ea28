//! The kvfabric node: drives the core on threads and sockets, and gives engines stores, loads and lookups.
//!
//! A [`Node`] is one rank. It holds no protocol decision of its own: the core decides, the node's threads carry out
//! (see `docs/protocol.md`). [`DirectoryServer`] is the directory service, stand-alone or embedded in a rank.
#![forbid(unsafe_code)]

mod backend;
mod command;
mod config;
mod control;
mod directory;
mod driver;
mod error;
mod filler;
mod handler;
mod job;
mod jobs;
mod lane;
mod membership;
mod metrics;
mod node;
mod peers;
mod reads;
mod routes;
mod session;
mod shared;
mod start;
mod stats;
mod system;
mod types;

pub use config::*;
pub use directory::{DirectoryServer, DirectoryStats};
pub use error::*;
pub use job::*;
pub use node::Node;
pub use shared::{LookupAnswer, Namespace};
pub use stats::NodeStats;
pub use types::*;
