//! The deterministic core of kvfabric: everything that decides, nothing that waits.
//!
//! This crate holds no clocks, threads, sockets, random sources or maps with random iteration order. Events go in
//! through `handle_*` methods together with the current [`Time`]; actions come out of `poll_*` methods; getters take
//! `&self`. The production node and the simulator drive the same code. See `docs/protocol.md` for the numbered rules
//! that the code cites (`[O1]`, `[R3]`, ...).
#![forbid(unsafe_code)]

pub mod directory;
pub mod hash;
pub mod limits;
pub mod load;
pub mod owner;
pub mod rank;
pub mod spans;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod types;
pub mod umbp;
pub mod wire;
pub mod word;

pub use types::*;
