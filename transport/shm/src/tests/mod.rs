//! Tests over real sockets and separate mappings, all in one process.

mod common;
mod hammer;
mod provider;
mod server;
