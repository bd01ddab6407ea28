//! What is offered, and who asks for it: namespaces, PUBLISH, LOOKUP, LOCATE, misses, CLEAR (design 1.7, 1.9).

use serde::{Deserialize, Serialize};

use super::membership::{Member, RANKS_MAX};
use super::records::{Bitmap, Fields, FixedRecord, Records};
use super::text::{EngineKey, NsName, NsNumber};
use crate::limits::{FRAME_BYTES_MAX, LOOKUP_KEYS_MAX, PUBLISH_OPS_MAX, REPLICAS_PER_ANSWER_MAX};
use crate::load::{MissReason, Replica, Replicas};
use crate::owner::Announcement;
use crate::{Fingerprint, Generation, Incarnation, NsEpoch, RankId, SlotId};

/// Most replicas in one LOCATE answer: 2 MiB. Up to 32,768 keys get [`REPLICAS_PER_ANSWER_MAX`] each.
pub const REPLICAS_PER_MESSAGE_MAX: usize = 131_072;
/// Most reports in one MISS_REPORT: a whole LOCATE answer may have failed.
pub const MISS_REPORTS_MAX: usize = LOOKUP_KEYS_MAX;
/// Most namespaces that a directory numbers: one for each (tenant class, model) of a cell.
pub const NAMESPACES_MAX: usize = 65_536;

/// Asks for the directory's number of a namespace. Said by ranks before they publish, and by readers before they look up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenNs {
    /// The namespace.
    pub name: NsName,
    /// The latest epoch that the asker has seen, 0 for none. The directory's epoch is never lower than what its ranks
    /// have seen, even if the directory started anew.
    pub known_epoch: NsEpoch,
}

/// Answer to [`OpenNs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NsReply {
    /// The namespace has a number.
    Opened {
        /// Its number, in this life of the directory.
        number: NsNumber,
        /// Its epoch. If it is later than the one the asker knew, the asker's blocks of earlier epochs were cleared.
        epoch: NsEpoch,
    },
    /// The directory has no room for another namespace.
    Full,
}

/// Changes of what a rank offers.
///
/// `seq_no` counts the rank's messages from 1 for as long as the process lives, across connections and across lives of
/// the directory; so a late message can never be taken for a new one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Publish<'a> {
    /// Whose offers these are.
    pub member: Member,
    /// Position in the rank's messages.
    pub seq_no: u64,
    /// This message begins an announcement of everything; the sequence may continue at any later number.
    pub first: bool,
    /// This message ends it: what was not announced is no longer offered.
    pub last: bool,
    /// Load of the rank, 0..=255.
    pub load: u8,
    /// The changes, in order.
    #[serde(borrow)]
    pub ops: Records<'a, PublishOp>,
}

/// One change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublishOp {
    /// True for a new publication, false for its removal.
    pub present: bool,
    /// Storage tier; 0 = memory.
    pub tier: u8,
    /// Slot.
    pub slot: SlotId,
    /// Namespace.
    pub ns: NsNumber,
    /// Epoch under which the block was stored.
    pub ns_epoch: NsEpoch,
    /// Key.
    pub fingerprint: Fingerprint,
    /// Generation.
    pub generation: Generation,
}

impl PublishOp {
    /// The change that `announcement` describes; the rank's own number of the namespace becomes the directory's.
    #[must_use]
    pub fn new(announcement: &Announcement, ns: NsNumber) -> Self {
        Self {
            present: announcement.present,
            tier: 0,
            slot: announcement.slot,
            ns,
            ns_epoch: announcement.ns_epoch,
            fingerprint: announcement.fingerprint,
            generation: announcement.generation,
        }
    }
}

impl FixedRecord for PublishOp {
    const BYTES: usize = 40;
    const COUNT_MAX: usize = PUBLISH_OPS_MAX;
    const VALIDATED: bool = true;

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.fingerprint.to_bytes());
        out.extend_from_slice(&self.generation.0.to_le_bytes());
        out.extend_from_slice(&self.slot.0.to_le_bytes());
        out.extend_from_slice(&self.ns.0.to_le_bytes());
        out.extend_from_slice(&self.ns_epoch.0.to_le_bytes());
        out.extend_from_slice(&[u8::from(self.present), self.tier, 0, 0]);
    }

    fn read(bytes: &[u8]) -> Self {
        let mut fields = Fields::new(bytes);
        let fingerprint = Fingerprint::from_bytes(fields.take());
        let generation = Generation(fields.u64());
        let slot = SlotId(fields.u32());
        let ns = NsNumber(fields.u32());
        let ns_epoch = NsEpoch(fields.u32());
        let present = fields.u8() != 0;
        Self { present, tier: fields.u8(), slot, ns, ns_epoch, fingerprint, generation }
    }

    fn is_valid(bytes: &[u8]) -> bool {
        matches!(bytes.get(36..40), Some([0 | 1, _, 0, 0]))
    }
}

/// Answer to PUBLISH.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PublishReply<'a> {
    /// The message was applied, now or before.
    Applied {
        /// Its position.
        seq_no: u64,
        /// Publications refused because the directory's memory is full, or because enough ranks offer the key.
        refused: u32,
        /// Namespaces of publications refused for their low epoch: these were cleared.
        #[serde(borrow)]
        raised: Records<'a, RaisedEpoch>,
    },
    /// Messages are missing before this one: the rank announces everything again.
    Gap {
        /// The position that was expected; 0 if the directory waits for the first announcement.
        expected: u64,
    },
}

/// A namespace's current epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RaisedEpoch {
    /// Namespace.
    pub ns: NsNumber,
    /// Its epoch.
    pub epoch: NsEpoch,
}

impl FixedRecord for RaisedEpoch {
    const BYTES: usize = 8;
    const COUNT_MAX: usize = PUBLISH_OPS_MAX;

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.ns.0.to_le_bytes());
        out.extend_from_slice(&self.epoch.0.to_le_bytes());
    }

    fn read(bytes: &[u8]) -> Self {
        let mut fields = Fields::new(bytes);
        Self { ns: NsNumber(fields.u32()), epoch: NsEpoch(fields.u32()) }
    }
}

/// LOOKUP and LOCATE: which of these keys are offered, and by whom.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Query<'a> {
    /// Namespace of all keys.
    pub ns: NsNumber,
    /// Who asks: replicas that this engine could not reach are left out.
    pub asker: EngineKey,
    /// Time until the answer is of no use, microseconds; a directory that is late does not answer at all.
    pub deadline_us: u32,
    /// Keys.
    #[serde(borrow)]
    pub keys: Records<'a, Fingerprint>,
}

impl FixedRecord for Fingerprint {
    const BYTES: usize = Self::BYTES;
    const COUNT_MAX: usize = LOOKUP_KEYS_MAX;

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.to_bytes());
    }

    fn read(bytes: &[u8]) -> Self {
        Self::from_bytes(Fields::new(bytes).take())
    }
}

/// Answer to LOOKUP: one bit per key, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LookupReply<'a> {
    /// Which keys some rank offers.
    #[serde(borrow)]
    pub hits: Bitmap<'a>,
}

/// Answer to LOCATE: the replicas of each key, best first.
///
/// Ranks are named once and replicas refer to them by index. How to reach a rank is asked with [`Who`](super::Who) when it is
/// connected to for the first time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct LocateReply<'a> {
    counts: Records<'a, u8>,
    ranks: Records<'a, RankRecord>,
    replicas: Records<'a, ReplicaRecord>,
}

/// A rank in a LOCATE answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankRecord {
    /// The rank.
    pub member: Member,
    /// Its load.
    pub load: u8,
}

/// A replica in a LOCATE answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaRecord {
    /// Index of the owner in the answer's ranks.
    pub rank_index: u16,
    /// Storage tier; 0 = memory.
    pub tier: u8,
    /// Slot.
    pub slot: SlotId,
    /// Generation.
    pub generation: Generation,
}

impl FixedRecord for RankRecord {
    const BYTES: usize = 16;
    // A rank may be named twice, while it announces anew.
    const COUNT_MAX: usize = 2 * RANKS_MAX;
    const VALIDATED: bool = true;

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.member.incarnation.get().to_le_bytes());
        out.extend_from_slice(&self.member.rank.0.to_le_bytes());
        out.extend_from_slice(&[self.load, 0, 0, 0]);
    }

    fn read(bytes: &[u8]) -> Self {
        let mut fields = Fields::new(bytes);
        // Zero was refused on decode; a record that somehow holds it names an incarnation that nobody has.
        let incarnation = Incarnation::new(fields.u64()).unwrap_or(Incarnation(core::num::NonZeroU64::MAX));
        Self { member: Member { rank: RankId(fields.u32()), incarnation }, load: fields.u8() }
    }

    fn is_valid(bytes: &[u8]) -> bool {
        Fields::new(bytes).u64() != 0
    }
}

impl FixedRecord for ReplicaRecord {
    const BYTES: usize = 16;
    const COUNT_MAX: usize = REPLICAS_PER_MESSAGE_MAX;

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.generation.0.to_le_bytes());
        out.extend_from_slice(&self.slot.0.to_le_bytes());
        out.extend_from_slice(&self.rank_index.to_le_bytes());
        out.extend_from_slice(&[self.tier, 0]);
    }

    fn read(bytes: &[u8]) -> Self {
        let mut fields = Fields::new(bytes);
        let generation = Generation(fields.u64());
        let slot = SlotId(fields.u32());
        let rank_index = fields.u16();
        Self { rank_index, tier: fields.u8(), slot, generation }
    }
}

impl<'a> LocateReply<'a> {
    /// An answer without keys, with room for `keys` keys of one replica each.
    #[must_use]
    pub fn with_capacity(keys: usize) -> Self {
        Self {
            counts: Records::with_capacity(keys),
            ranks: Records::new(),
            replicas: Records::with_capacity(keys),
        }
    }

    /// Adds a rank and returns its index. Called at most twice for each of [`RANKS_MAX`].
    pub fn push_rank(&mut self, rank: RankRecord) -> u16 {
        self.ranks.push(rank);
        u16::try_from(self.ranks.len() - 1).unwrap_or(u16::MAX)
    }

    /// Adds the next key and its replicas, whose ranks were added before.
    pub fn push_key(&mut self, replicas: &[ReplicaRecord]) {
        let replicas = &replicas[..replicas.len().min(REPLICAS_PER_ANSWER_MAX)];
        self.counts.push(u8::try_from(replicas.len()).unwrap_or(0));
        for replica in replicas {
            self.replicas.push(*replica);
        }
    }

    /// Number of keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.counts.len()
    }

    /// Whether no key was asked for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.counts.is_empty()
    }

    /// The ranks that the replicas refer to.
    #[must_use]
    pub fn ranks(&self) -> &Records<'a, RankRecord> {
        &self.ranks
    }

    /// The replicas of each key, in the order of the request.
    pub fn iter(&self) -> impl Iterator<Item = Replicas> + '_ {
        let mut replicas = self.replicas.iter();
        self.counts.iter().map(move |count| {
            replicas.by_ref().take(usize::from(count)).filter_map(|record| self.replica(record)).collect()
        })
    }

    fn replica(&self, record: ReplicaRecord) -> Option<Replica> {
        let rank = self.ranks.get(usize::from(record.rank_index))?;
        Some(Replica {
            rank: rank.member.rank,
            incarnation: rank.member.incarnation,
            slot: record.slot,
            generation: record.generation,
            tier: record.tier,
            load: rank.load,
        })
    }

    fn is_valid(&self) -> bool {
        let counted: usize = self.counts.iter().map(usize::from).sum();
        counted == self.replicas.len()
            && self.counts.iter().all(|count| usize::from(count) <= REPLICAS_PER_ANSWER_MAX)
            && self.replicas.iter().all(|replica| usize::from(replica.rank_index) < self.ranks.len())
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for LocateReply<'a> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        type Fields<'f> = (Records<'f, u8>, Records<'f, RankRecord>, Records<'f, ReplicaRecord>);
        let (counts, ranks, replicas) = Fields::<'de>::deserialize(deserializer)?;
        let reply = Self { counts, ranks, replicas };
        if reply.is_valid() {
            Ok(reply)
        } else {
            Err(serde::de::Error::custom("counts, ranks and replicas do not agree"))
        }
    }
}

/// Replicas that did not serve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissReports<'a> {
    /// Who reports: an unreachable owner is hidden from this engine only.
    pub asker: EngineKey,
    /// The replicas.
    #[serde(borrow)]
    pub reports: Records<'a, MissRecord>,
}

/// One replica that did not serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MissRecord {
    /// Key.
    pub fingerprint: Fingerprint,
    /// Generation in the entry.
    pub generation: Generation,
    /// Owner in the entry.
    pub member: Member,
    /// Why.
    pub reason: MissReason,
}

impl FixedRecord for MissRecord {
    const BYTES: usize = 40;
    const COUNT_MAX: usize = MISS_REPORTS_MAX;
    const VALIDATED: bool = true;

    fn write(&self, out: &mut Vec<u8>) {
        let reason = match self.reason {
            MissReason::Stale => 0,
            MissReason::TagMismatch => 1,
            MissReason::ChecksumMismatch => 2,
            MissReason::Unreachable => 3,
        };
        out.extend_from_slice(&self.fingerprint.to_bytes());
        out.extend_from_slice(&self.generation.0.to_le_bytes());
        out.extend_from_slice(&self.member.incarnation.get().to_le_bytes());
        out.extend_from_slice(&self.member.rank.0.to_le_bytes());
        out.extend_from_slice(&[reason, 0, 0, 0]);
    }

    fn read(bytes: &[u8]) -> Self {
        let mut fields = Fields::new(bytes);
        let fingerprint = Fingerprint::from_bytes(fields.take());
        let generation = Generation(fields.u64());
        let incarnation = Incarnation::new(fields.u64()).unwrap_or(Incarnation(core::num::NonZeroU64::MAX));
        let member = Member { rank: RankId(fields.u32()), incarnation };
        let reason = match fields.u8() {
            0 => MissReason::Stale,
            1 => MissReason::TagMismatch,
            2 => MissReason::ChecksumMismatch,
            _ => MissReason::Unreachable,
        };
        Self { fingerprint, generation, member, reason }
    }

    fn is_valid(bytes: &[u8]) -> bool {
        bytes.get(24..32).is_some_and(|incarnation| incarnation != [0; 8])
            && matches!(bytes.get(36..40), Some([0..=3, 0, 0, 0]))
    }
}

/// Clears a namespace everywhere. Names it in full, so that no life of the directory can take it for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Clear {
    /// The namespace.
    pub ns: NsName,
}

/// Answer to CLEAR, at most [`CLEAR_TIMEOUT`](crate::limits::CLEAR_TIMEOUT) later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearReply {
    /// Whether every live rank has cleared the namespace or was fenced. The entries stay hidden in any case.
    pub complete: bool,
}

/// Directory to rank: run O1 on every slot of the namespace that was stored under an earlier epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearRank {
    /// Names the clear in the rank's answer.
    pub clear: u64,
    /// The namespace.
    pub ns: NsName,
    /// Its new epoch.
    pub epoch: NsEpoch,
}

/// Rank to directory: the slots are invalid and the fillings aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClearAck {
    /// From [`ClearRank`].
    pub clear: u64,
    /// Whether it was done; false if the rank could not.
    pub done: bool,
}

const _: () = {
    assert!(LOOKUP_KEYS_MAX * 2 <= REPLICAS_PER_MESSAGE_MAX);
    assert!(
        REPLICAS_PER_MESSAGE_MAX * ReplicaRecord::BYTES + 2 * RANKS_MAX * RankRecord::BYTES + LOOKUP_KEYS_MAX
            < FRAME_BYTES_MAX - 1024
    );
    assert!(MISS_REPORTS_MAX * MissRecord::BYTES < FRAME_BYTES_MAX - 1024);
    assert!(PUBLISH_OPS_MAX * PublishOp::BYTES < FRAME_BYTES_MAX - 1024);
    assert!(2 * RANKS_MAX < u16::MAX as usize);
};
