//! Tests over real sockets and separate mappings, all in one process.

mod common;
mod hammer;
mod provider;
mod server;

use kvfabric_transport_api::Provider;

use crate::ShmProvider;

/// A wake that `poll` took back was forgotten: its sender's command waited for the longest sleep.
#[test]
fn a_wake_taken_back_by_poll_is_reported() {
    let mut provider = ShmProvider::new().unwrap();
    let mut events = Vec::new();
    assert!(!provider.poll(&mut events));
    provider.waker().wake();
    assert!(provider.poll(&mut events), "somebody has something to say");
    assert!(!provider.poll(&mut events), "and has said it");
}
