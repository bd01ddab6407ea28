//! Process tests: real ranks and directories on loopback, killed, stopped and restarted under load.
//!
//! The binary `kvfabric-test-rank` is one rank or one directory, driven by JSON lines on its standard input. It checks
//! every loaded byte itself, next to the load. [`harness`] starts, stops and kills such processes for the tests in
//! `tests/`. Nothing here is part of the product.
#![forbid(unsafe_code)]
// A test tool fails loudly: a panic here is a failed test, with the place in its message.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

pub mod arena;
pub mod child;
pub mod harness;
pub mod payload;
pub mod protocol;
pub mod random;
