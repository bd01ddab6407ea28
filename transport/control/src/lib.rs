//! The control plane: QUIC with mutual TLS, a stream for each request, and liveness beside it.
//!
//! This crate carries bytes and knows nothing of their meaning (design 1.7). An [`Endpoint`] owns one UDP socket and is
//! server and client at once; each side of a [`Connection`] may send requests and notifications, and each side's
//! [`Handler`] takes what comes in. [`Tls`] loads or makes certificates, for this crate and for the TCP data path;
//! [`liveness`] tells within moments when a peer's process died or stopped answering.
#![forbid(unsafe_code)]

mod admission;
mod connection;
mod endpoint;
mod error;
mod frame;
pub mod limits;
pub mod liveness;
mod names;
mod reconnect;
mod socket;
#[cfg(test)]
mod tests;
pub mod tls;

/// The buffers of this crate's API.
pub use bytes;
/// The runtime that this crate needs around it, for callers without another use of it.
pub use tokio;

pub use connection::{Connection, ConnectionId, Handler, PeerInfo, Responder};
pub use endpoint::{Endpoint, EndpointConfig};
pub use error::{BindError, CloseReason, ConnectError, Refusal, RequestError};
pub use names::san_allows;
pub use reconnect::{Backoff, LinkState, Reconnecting};
pub use tls::{certs, Security, Tls, TlsError};
