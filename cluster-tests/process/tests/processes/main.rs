//! Real ranks and directories on loopback, killed, stopped and restarted under load. One binary, because each would be
//! linked and optimised anew.
#![allow(clippy::unwrap_used)] // A test file.

mod deaths;
mod kills;
mod reuse;
mod smoke;
mod starts;
mod stops;
