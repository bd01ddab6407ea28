//! Host names: resolved on threads of their own, because the system's resolver blocks.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::Arc;

use kvfabric_transport_api::{ConnectError, PeerKey, Wake};

use crate::limits::RESOLVERS_MAX;

type Answer = (PeerKey, u64, io::Result<Vec<SocketAddr>>);

pub(super) struct Resolver {
    waker: Arc<dyn Wake>,
    sender: Sender<Answer>,
    receiver: Receiver<Answer>,
    running: usize,
    generation: u64,
    current: HashMap<PeerKey, u64>,
}

impl Resolver {
    pub(super) fn new(waker: Arc<dyn Wake>) -> Self {
        let (sender, receiver) = channel();
        Self { waker, sender, receiver, running: 0, generation: 0, current: HashMap::new() }
    }

    /// Begins to resolve; the answer comes through [`Resolver::take`].
    pub(super) fn start(&mut self, peer: PeerKey, address: String) -> Result<(), ConnectError> {
        if self.running >= RESOLVERS_MAX {
            return Err(ConnectError::LocalShortage("too many host names are being resolved".to_owned()));
        }
        self.generation += 1;
        let (generation, sender, waker) = (self.generation, self.sender.clone(), Arc::clone(&self.waker));
        let resolve = move || {
            let result = address.to_socket_addrs().map(Iterator::collect);
            // Nobody listens any more when the provider is gone.
            let _ = sender.send((peer, generation, result));
            waker.wake();
        };
        std::thread::Builder::new()
            .name("kvfabric-resolve".to_owned())
            .spawn(resolve)
            .map_err(|error| ConnectError::LocalShortage(error.to_string()))?;
        self.running += 1;
        self.current.insert(peer, generation);
        Ok(())
    }

    /// The next answer, with the number of its question.
    pub(super) fn take(&mut self) -> Option<Answer> {
        if self.running == 0 {
            return None;
        }
        let answer = self.receiver.try_recv().ok()?;
        self.running -= 1;
        Some(answer)
    }

    /// Whether the answer belongs to the peer's latest question; the question is forgotten then.
    pub(super) fn is_current(&mut self, peer: PeerKey, generation: u64) -> bool {
        if self.current.get(&peer) != Some(&generation) {
            return false;
        }
        self.current.remove(&peer);
        true
    }
}
