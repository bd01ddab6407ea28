//! Goal: each rule of design 1.6 and 1.9 that concerns the directory, by name. Method: one directory, requests by hand,
//! time by hand.

mod clear;
mod members;
mod publish;

use super::*;
use crate::load::{MissReason, Replica};
use crate::wire::{
    Attach, Clear, ClearAck, EngineKey, Join, JoinReply, Leave, Locate, Lookup, MissRecord, MissReports,
    Name, NsName, NsNumber, Ping, Publish, PublishOp, PublishReply, Query, Records, Who, WhoReply,
};
use crate::{Fingerprint, Generation, SlotId};

const TIMEOUT: Duration = Duration::from_secs(1);
const NS: NsName = NsName([1; 16]);
const OTHER_NS: NsName = NsName([2; 16]);

pub(super) fn at_ms(ms: u64) -> Time {
    Time::from_micros(ms * 1000)
}

fn config() -> ServiceConfig {
    ServiceConfig {
        cluster: "c".into(),
        session: 0xdead_beef_0000_0100,
        epoch_base: NsEpoch(1000),
        table: TableConfig { seed: [3, 4], bytes_max: 1 << 30 },
        peer_timeout: TIMEOUT,
    }
}

/// A directory and what it is told by ranks that make no mistakes unless a test wants them to.
struct Directory {
    service: Service,
    next_connection: u64,
    actions: Vec<ServiceAction>,
}

/// A joined rank: what it would know.
#[derive(Clone, Debug)]
struct Peer {
    member: Member,
    control: ConnectionId,
    liveness: ConnectionId,
    seq_no: u64,
}

fn key(index: u64) -> Fingerprint {
    Fingerprint([index, index ^ 0xffff])
}

fn incarnation(value: u64) -> Incarnation {
    Incarnation::new(value).unwrap()
}

impl Directory {
    fn new() -> Self {
        Self::with(config())
    }

    fn with(config: ServiceConfig) -> Self {
        Self { service: Service::new(config), next_connection: 1, actions: Vec::new() }
    }

    fn connection(&mut self) -> ConnectionId {
        self.next_connection += 1;
        ConnectionId(self.next_connection)
    }

    fn join_reply(&mut self, now: Time, control: ConnectionId, name: &str, process: u64) -> JoinReply {
        let join = Join {
            cluster: Name::new("c").unwrap(),
            name: Name::new(name).unwrap(),
            engine: Name::new("engine").unwrap(),
            incarnation: incarnation(process),
            advertised: crate::wire::Advertised::default(),
        };
        let reply = self.service.handle_join(now, control, process * 7, &join);
        self.drain();
        reply
    }

    /// Joins, attaches and announces nothing.
    fn join(&mut self, now: Time, name: &str, process: u64) -> Peer {
        let (control, liveness) = (self.connection(), self.connection());
        let JoinReply::Joined(joined) = self.join_reply(now, control, name, process) else {
            panic!("{name} was not admitted")
        };
        let member = Member { rank: joined.rank, incarnation: incarnation(process) };
        let attach = Attach { member, liveness_token: joined.liveness_token };
        self.service.handle_attach(now, liveness, &attach).unwrap();
        self.drain();
        Peer { member, control, liveness, seq_no: 0 }
    }

    fn drain(&mut self) {
        while let Some(action) = self.service.poll_action() {
            self.actions.push(action);
        }
    }

    fn take_actions(&mut self) -> Vec<ServiceAction> {
        self.drain();
        std::mem::take(&mut self.actions)
    }

    fn open(&mut self, peer: &Peer, name: NsName, known: u32) -> (NsNumber, NsEpoch) {
        let open = OpenNs { name, known_epoch: NsEpoch(known) };
        match self.service.handle_open_ns(at_ms(0), peer.control, &open) {
            NsReply::Opened { number, epoch } => (number, epoch),
            NsReply::Full => panic!("no room for a namespace"),
        }
    }

    fn send(&mut self, peer: &mut Peer, first: bool, last: bool, ops: &[PublishOp]) -> PublishReply<'static> {
        peer.seq_no += 1;
        self.send_as(peer, peer.seq_no, first, last, ops).unwrap()
    }

    fn send_as(
        &mut self,
        peer: &Peer,
        seq_no: u64,
        first: bool,
        last: bool,
        ops: &[PublishOp],
    ) -> Result<PublishReply<'static>, Refusal> {
        let ops: Records<'_, PublishOp> = ops.iter().copied().collect();
        let publish = Publish { member: peer.member, seq_no, first, last, load: 0, ops };
        self.service.handle_publish(at_ms(0), peer.control, &publish)
    }

    /// Joins, opens [`NS`] and announces these (key, generation) pairs.
    fn announce(&mut self, now: Time, name: &str, process: u64, keys: &[(u64, u64)]) -> Peer {
        let mut peer = self.join(now, name, process);
        let (ns, epoch) = self.open(&peer, NS, 0);
        let ops: Vec<_> = keys.iter().map(|(index, gen)| put(ns, epoch, *index, *gen)).collect();
        let reply = self.send(&mut peer, true, true, &ops);
        assert!(matches!(reply, PublishReply::Applied { refused: 0, .. }));
        peer
    }

    fn query(&mut self, asker: EngineKey, keys: &[u64]) -> Query<'static> {
        let open = OpenNs { name: NS, known_epoch: NsEpoch(0) };
        let NsReply::Opened { number, .. } = self.service.handle_open_ns(at_ms(0), ConnectionId(0), &open)
        else {
            panic!("no room for a namespace")
        };
        let keys = keys.iter().map(|index| key(*index)).collect();
        Query { ns: number, asker, deadline_us: 0, keys }
    }

    fn hits_for(&mut self, now: Time, asker: EngineKey, keys: &[u64]) -> Vec<u64> {
        let query = self.query(asker, keys);
        let reply = self.service.lookup(now, &query).unwrap();
        keys.iter().zip(reply.hits.iter()).filter(|(_, hit)| *hit).map(|(index, _)| *index).collect()
    }

    /// Which of the keys 0..10 are hits, for nobody in particular.
    fn hits(&mut self, now: Time) -> Vec<u64> {
        self.hits_for(now, EngineKey::ANONYMOUS, &(0..10).collect::<Vec<_>>())
    }

    fn locate_for(&mut self, now: Time, asker: EngineKey, index: u64) -> Vec<Replica> {
        let query = self.query(asker, &[index]);
        let reply = self.service.locate(now, &query).unwrap();
        let replicas = reply.iter().next().unwrap();
        replicas.to_vec()
    }

    fn locate(&mut self, now: Time, index: u64) -> Vec<Replica> {
        self.locate_for(now, EngineKey::ANONYMOUS, index)
    }

    fn report(&mut self, now: Time, asker: EngineKey, peer: &Peer, index: u64, gen: u64, reason: MissReason) {
        let record =
            MissRecord { fingerprint: key(index), generation: Generation(gen), member: peer.member, reason };
        let reports = MissReports { asker, reports: [record].into_iter().collect() };
        self.service.handle_miss_reports(now, &reports);
    }

    /// Runs timeouts as a driver would, up to `until`.
    fn run_until(&mut self, until: Time) {
        while let Some(due) = self.service.poll_timeout().filter(|due| *due <= until) {
            self.service.handle_timeout(due);
            self.drain();
        }
    }
}

fn put(ns: NsNumber, ns_epoch: NsEpoch, index: u64, gen: u64) -> PublishOp {
    PublishOp {
        present: true,
        tier: 0,
        slot: SlotId(u32::try_from(index).unwrap()),
        ns,
        ns_epoch,
        fingerprint: key(index),
        generation: Generation(gen),
    }
}

fn del(index: u64, gen: u64) -> PublishOp {
    PublishOp { present: false, ..put(NsNumber(0), NsEpoch(0), index, gen) }
}
