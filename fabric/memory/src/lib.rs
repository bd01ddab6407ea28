//! Memory that peers and devices touch.
//!
//! Regions from raw pointers are the unsafe entry of the whole workspace ([`Region::from_raw`]); what follows is safe:
//! a [`ScatterList`] can only be built from registered regions with bounds checks, owns a share of every region it
//! names, and is what an in-flight operation holds until its last work item retired (rule R4).
//!
//! An owner's pool and word table are two sealed memfds ([`OwnerMemory`]); peers on the same host map them read-only
//! ([`PeerMemory`]). Bytes that another process may write are only ever moved by one function behind an opaque boundary
//! (`copy.rs`), never through a Rust reference (design 1.9).

mod checksum;
mod copy;
pub mod limits;
mod mapping;
mod memfd;
mod owner;
mod peer;
mod read;
mod region;
mod scatter;
mod slab;
mod system;
mod word;

pub use checksum::*;
pub use memfd::HugePages;
pub use owner::*;
pub use peer::*;
pub use read::*;
pub use region::*;
pub use scatter::*;
pub use slab::*;
pub use system::*;
pub use word::*;
