//! One-sided reads emulated over TCP.
//!
//! The owner runs a [`TcpServer`] over its registered memory; a reader drives a [`TcpProvider`] from its data thread.
//! A read names a slot; the owner answers with the object's bytes, straight out of its memory by copying sends, and
//! then with the slot's word, loaded after the last of these sends has returned (design 1.7). The reader receives
//! straight into the destination's pieces. An operation that is ended by force retires at once: from then on the rest
//! of its reply goes to a scratch sink, so no receive can target the destination any more (rule R4, design 1.8).
//!
//! Connections start with a one-time token of the [`TokenStore`], judged before anything is allocated (design 1.9), and
//! may be wrapped in TLS. Frames are described in [`wire`], limits in [`limits`].

mod client;
pub mod limits;
mod served;
mod server;
mod socket;
mod stream;
mod tokens;
pub mod wire;

pub use client::{ProviderOptions, StartError, TcpProvider, TlsClient};
pub use served::{Served, ServedObject};
pub use server::{ServeError, ServerOptions, ServerStats, TcpServer};
pub use tokens::{TokenError, TokenRefused, TokenStore};
pub use wire::{fuzz_reply, fuzz_request};

#[cfg(test)]
mod tests;
