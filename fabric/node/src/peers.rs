//! Connecting to a peer: ask the directory who it is, say HELLO, choose the transport.

use std::sync::mpsc::Sender;
use std::sync::Arc;

use kvfabric_core::limits::CONNECT_TIMEOUT;
use kvfabric_core::load::PeerFailure;
use kvfabric_core::wire::{decode_reply, Hello, HelloReply, Member, Name, Reply, Request};
use kvfabric_core::{Incarnation, RankId, TransportKind};
use kvfabric_transport_api::PeerTarget;
use kvfabric_transport_control::{Connection, Endpoint};

use crate::backend::{Membership, Unanswered};
use crate::command::Command;
use crate::session::request;
use crate::TransportChoice;

/// A control connection to a peer. It stays open until it is closed, so whoever lets go of it closes it.
pub(crate) struct PeerConnection(Connection);

impl PeerConnection {
    pub(crate) fn get(&self) -> &Connection {
        &self.0
    }
}

impl Drop for PeerConnection {
    fn drop(&mut self) {
        self.0.close("not needed any more");
    }
}

/// What HELLO found out about a peer.
pub(crate) struct Greeted {
    pub(crate) name: String,
    pub(crate) connection: PeerConnection,
    pub(crate) target: PeerTarget,
    /// Transports that both sides offer, best first, with the reason for trying them in this order.
    pub(crate) candidates: Vec<(TransportKind, &'static str)>,
}

/// Who asks.
#[derive(Clone)]
pub(crate) struct Asker {
    pub(crate) endpoint: Endpoint,
    pub(crate) cluster: Name<'static>,
    pub(crate) name: Name<'static>,
    pub(crate) incarnation: Incarnation,
    pub(crate) choice: TransportChoice,
    pub(crate) tcp_connections: u8,
    pub(crate) core: Sender<Command>,
}

impl Asker {
    /// Finds and greets the peer; the result goes to the core thread, at most [`CONNECT_TIMEOUT`] later.
    pub(crate) async fn greet(
        self,
        membership: Option<Arc<dyn Membership>>,
        rank: RankId,
        incarnation: Incarnation,
    ) {
        let core = self.core.clone();
        let greeting = self.try_greet(membership, rank, incarnation);
        let result = match tokio::time::timeout(CONNECT_TIMEOUT, greeting).await {
            Ok(result) => result,
            Err(_) => Err((PeerFailure::Unreachable, "no answer in time".to_owned())),
        };
        let _ = core.send(Command::Greeted { rank, incarnation, result });
    }

    async fn try_greet(
        self,
        membership: Option<Arc<dyn Membership>>,
        rank: RankId,
        incarnation: Incarnation,
    ) -> Result<Greeted, (PeerFailure, String)> {
        let unreachable = |reason: String| (PeerFailure::Unreachable, reason);
        let membership = membership.ok_or_else(|| unreachable("not connected to the directory".into()))?;
        let info = membership.who(Member { rank, incarnation }, CONNECT_TIMEOUT).await.map_err(|error| {
            let failure = match error {
                Unanswered::UnknownRank => PeerFailure::WrongIncarnation,
                _ => PeerFailure::Unreachable,
            };
            (failure, error.to_string())
        })?;
        let name = info.name.as_str();
        let mut last = "it advertises no control address".to_owned();
        for address in info.advertised.control.as_slice() {
            match self.endpoint.connect_rank(address.as_str(), name).await {
                Ok(connection) => return self.hello(PeerConnection(connection), name, incarnation).await,
                Err(error) => last = error.to_string(),
            }
        }
        Err(unreachable(last))
    }

    async fn hello(
        &self,
        connection: PeerConnection,
        name: &str,
        incarnation: Incarnation,
    ) -> Result<Greeted, (PeerFailure, String)> {
        let hello = Hello {
            cluster: self.cluster.borrowed(),
            name: self.name.borrowed(),
            incarnation: self.incarnation,
            wanted: incarnation,
            tcp_tokens_wanted: self.tcp_connections,
        };
        let reply = request(connection.get(), &Request::Hello(hello), CONNECT_TIMEOUT)
            .await
            .map_err(|reason| (PeerFailure::Unreachable, reason))?;
        let ack = match decode_reply(&reply) {
            Ok(Reply::Hello(HelloReply::Ack(ack))) => ack,
            Ok(Reply::Hello(HelloReply::WrongIncarnation { found })) => {
                return Err((
                    PeerFailure::WrongIncarnation,
                    format!("the peer lives on as incarnation {found}"),
                ));
            }
            Ok(Reply::Hello(HelloReply::ClusterMismatch)) => {
                return Err((PeerFailure::Protocol, "the peer belongs to another cluster".into()));
            }
            Ok(Reply::Hello(HelloReply::Busy)) => {
                return Err((PeerFailure::Unreachable, "the peer is busy".into()));
            }
            Ok(other) => return Err((PeerFailure::Protocol, format!("unexpected answer {}", other.name()))),
            Err(error) => return Err((PeerFailure::Protocol, error.to_string())),
        };
        // Rule R1, on the authenticated channel; each transport checks the incarnation once more in its own handshake.
        if ack.incarnation != incarnation || ack.name.as_str() != name {
            return Err((PeerFailure::WrongIncarnation, "the peer is not who the directory says".into()));
        }
        let target = PeerTarget {
            incarnation: incarnation.get(),
            unix_path: ack.unix.as_ref().map(|offer| offer.path.as_str().to_owned()),
            tcp_address: ack.tcp.as_ref().map(|address| address.as_str().to_owned()),
            tcp_tokens: ack.tcp_tokens.iter().map(|token| token.0).collect(),
        };
        let candidates = candidates(self.choice, &target);
        if candidates.is_empty() {
            return Err((
                PeerFailure::Unreachable,
                "the peer offers none of the transports chosen here".into(),
            ));
        }
        Ok(Greeted { name: name.to_owned(), connection, target, candidates })
    }
}

/// Transports to try, best first.
fn candidates(choice: TransportChoice, target: &PeerTarget) -> Vec<(TransportKind, &'static str)> {
    let mut list = Vec::with_capacity(2);
    let wants = |kind| choice == TransportChoice::Auto || choice == TransportChoice::Only(kind);
    if wants(TransportKind::Shm) && target.unix_path.is_some() {
        list.push((TransportKind::Shm, "its Unix socket answers on this host"));
    }
    if wants(TransportKind::Tcp) && target.tcp_address.is_some() {
        let reason = match choice {
            TransportChoice::Only(_) => "asked for by --transport",
            TransportChoice::Auto if list.is_empty() => "the peer offers no shm",
            TransportChoice::Auto => "the peer is not on this host",
        };
        list.push((TransportKind::Tcp, reason));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transports_are_tried_best_first() {
        let target = PeerTarget {
            unix_path: Some("/x".into()),
            tcp_address: Some("127.0.0.1:1".into()),
            ..PeerTarget::default()
        };
        let kinds = |choice, target: &PeerTarget| -> Vec<TransportKind> {
            candidates(choice, target).into_iter().map(|(kind, _)| kind).collect()
        };
        assert_eq!(kinds(TransportChoice::Auto, &target), [TransportKind::Shm, TransportKind::Tcp]);
        assert_eq!(kinds(TransportChoice::Only(TransportKind::Tcp), &target), [TransportKind::Tcp]);
        assert!(kinds(TransportChoice::Only(TransportKind::Rdma), &target).is_empty());
        let remote = PeerTarget { unix_path: None, ..target };
        assert_eq!(kinds(TransportChoice::Auto, &remote), [TransportKind::Tcp]);
        assert!(kinds(TransportChoice::Only(TransportKind::Shm), &remote).is_empty());
    }
}
