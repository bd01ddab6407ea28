//! Same-host transport: a reader maps its peer's memfd pool and word table read-only and copies (design 1.9).
//!
//! [`ShmServer`] is the serving side: a Unix socket that passes the two file descriptors and the list of slabs. Reads
//! never pass it. [`ShmProvider`] is the reading side, a [`Provider`](kvfabric_transport_api::Provider): a copy, an
//! acquire fence, then the word from the owner's memfd (rule R2).

mod frame;
pub mod limits;
mod link;
mod provider;
mod server;
mod socket;

pub use frame::{fuzz_answer, fuzz_request};
pub use provider::ShmProvider;
pub use server::{ServeError, ShmServer};
pub use socket::UNIX_PATH_BYTES_MAX;

#[cfg(test)]
mod tests;
