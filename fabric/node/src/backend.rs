//! The two seams to whatever keeps membership and locations (design 3.3): one process over QUIC in this version; etcd and a
//! Redis cluster fit behind the same traits. Every message carries the incarnation.

use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use kvfabric_core::load::Replicas;
use kvfabric_core::wire::{
    decode_reply, encode_request, Bitmap, Locate, Lookup, Member, MissReports, Query, RankInfo, Reply,
    Request, Who, WhoReply,
};
use kvfabric_transport_control::liveness::{ClientConfig, LivenessClient, Ticket};
use kvfabric_transport_control::Connection;
use thiserror::Error;

/// Why there is no answer. For a hint table every reason is the same to the caller: a miss.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub(crate) enum Unanswered {
    /// Lost, late or refused by the carrier.
    #[error("{0}")]
    Carrier(String),
    /// Refused, or not an answer to what was asked.
    #[error("the directory answered {0}")]
    Unexpected(String),
    /// The directory knows no such rank.
    #[error("the directory does not know that incarnation")]
    UnknownRank,
}

/// An answer to come.
pub(crate) type Answer<T> = Pin<Box<dyn Future<Output = Result<T, Unanswered>> + Send>>;

/// Where blocks are. A hint table: nothing that it says is trusted (rule D3).
pub(crate) trait Directory: Send + Sync {
    /// One bit a key, no side effects.
    fn lookup(&self, query: Query<'_>, within: Duration) -> Answer<Bitmap<'static>>;

    /// The replicas of each key, best first.
    fn locate(&self, query: Query<'_>, within: Duration) -> Answer<Vec<Replicas>>;

    /// Replicas that did not serve (rule R7).
    fn report_misses(&self, reports: &MissReports<'_>, within: Duration) -> Answer<()>;

    /// What the rank's announcer says: namespaces, publications, clears. The answer is the reply's frame, for core.
    fn announce(&self, request: &Request<'_>, within: Duration) -> Answer<Bytes>;
}

/// Who is there. Orders the incarnations of a name and fences the closed ones (rules M1, M2).
pub(crate) trait Membership: Send + Sync {
    /// JOIN and LEAVE, as core words them. The answer is the reply's frame, for core.
    fn enter(&self, request: &Request<'_>, within: Duration) -> Answer<Bytes>;

    /// Shows that this process lives, until the handle is dropped; `lost` is called once when that fails. Blocks for a
    /// bounded time.
    fn attach(
        &self,
        token: u64,
        peer_timeout: Duration,
        lost: Box<dyn FnOnce(String) + Send>,
    ) -> Result<LivenessClient, String>;

    /// How to reach a rank.
    fn who(&self, member: Member, within: Duration) -> Answer<RankInfo<'static>>;

    /// Ends the membership's connection, so that it is made anew.
    fn disconnect(&self, reason: &str);
}

/// The directory process at the other end of a QUIC connection: both seams in one.
#[derive(Clone, Debug)]
pub(crate) struct QuicDirectory {
    connection: Connection,
}

impl QuicDirectory {
    pub(crate) fn new(connection: Connection) -> Self {
        Self { connection }
    }

    fn ask<T: Send + 'static>(
        &self,
        request: &Request<'_>,
        within: Duration,
        read: impl FnOnce(Bytes) -> Result<T, Unanswered> + Send + 'static,
    ) -> Answer<T> {
        let mut frame = Vec::with_capacity(64);
        let encoded = encode_request(request, &mut frame);
        let connection = self.connection.clone();
        Box::pin(async move {
            encoded.map_err(|error| Unanswered::Carrier(error.to_string()))?;
            let reply = connection
                .request(frame.into(), within)
                .await
                .map_err(|error| Unanswered::Carrier(error.to_string()))?;
            read(reply)
        })
    }
}

fn unexpected<T>(reply: Result<Reply<'_>, kvfabric_core::wire::DecodeError>) -> Result<T, Unanswered> {
    Err(Unanswered::Unexpected(match reply {
        Ok(Reply::Refused(refusal)) => refusal.to_string(),
        Ok(reply) => reply.name().to_owned(),
        Err(error) => error.to_string(),
    }))
}

impl Directory for QuicDirectory {
    fn lookup(&self, query: Query<'_>, within: Duration) -> Answer<Bitmap<'static>> {
        let keys = query.keys.len();
        self.ask(&Request::Lookup(Lookup(query)), within, move |reply| match decode_reply(&reply) {
            Ok(Reply::Lookup(answer)) if answer.hits.len() == keys => Ok(answer.hits.into_owned()),
            other => unexpected(other),
        })
    }

    fn locate(&self, query: Query<'_>, within: Duration) -> Answer<Vec<Replicas>> {
        let keys = query.keys.len();
        self.ask(&Request::Locate(Locate(query)), within, move |reply| match decode_reply(&reply) {
            Ok(Reply::Locate(answer)) if answer.len() == keys => Ok(answer.iter().collect()),
            other => unexpected(other),
        })
    }

    fn report_misses(&self, reports: &MissReports<'_>, within: Duration) -> Answer<()> {
        self.ask(&Request::MissReports(reports.clone()), within, |reply| match decode_reply(&reply) {
            Ok(Reply::Done(_)) => Ok(()),
            other => unexpected(other),
        })
    }

    fn announce(&self, request: &Request<'_>, within: Duration) -> Answer<Bytes> {
        self.ask(request, within, Ok)
    }
}

impl Membership for QuicDirectory {
    fn enter(&self, request: &Request<'_>, within: Duration) -> Answer<Bytes> {
        self.ask(request, within, Ok)
    }

    fn attach(
        &self,
        token: u64,
        peer_timeout: Duration,
        lost: Box<dyn FnOnce(String) + Send>,
    ) -> Result<LivenessClient, String> {
        // Liveness listens on TCP at the address that QUIC uses on UDP.
        let address: SocketAddr = self.connection.peer().address();
        let config = ClientConfig::for_peer_timeout(peer_timeout);
        LivenessClient::connect(address, Ticket::from_number(token), config, move |why| {
            lost(format!("liveness: {why:?}"));
        })
        .map_err(|error| error.to_string())
    }

    fn who(&self, member: Member, within: Duration) -> Answer<RankInfo<'static>> {
        self.ask(&Request::Who(Who { member }), within, |reply| match decode_reply(&reply) {
            Ok(Reply::Who(WhoReply::Known(info))) => Ok(RankInfo {
                name: info.name.into_owned(),
                engine: info.engine.into_owned(),
                advertised: info.advertised.into_owned(),
                live: info.live,
            }),
            Ok(Reply::Who(WhoReply::Unknown)) => Err(Unanswered::UnknownRank),
            other => unexpected(other),
        })
    }

    fn disconnect(&self, reason: &str) {
        self.connection.close(reason);
    }
}
