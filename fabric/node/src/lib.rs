//! The kvfabric node: drives the core on threads and sockets, and gives engines stores, loads and lookups.
//!
//! A [`Node`] is one rank. It holds no protocol decision of its own: the core decides, the node's threads carry out
//! (see `docs/protocol.md`). [`DirectoryServer`] is the directory service, stand-alone or embedded in a rank.
#![forbid(unsafe_code)]

mod config;
mod error;
mod job;
mod types;

pub use config::*;
pub use error::*;
pub use job::*;
pub use types::*;
