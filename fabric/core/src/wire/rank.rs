//! Messages between ranks: HELLO, slabs, TOUCH (design 1.7).

use serde::{Deserialize, Serialize};

use super::records::{Fields, FixedRecord, Records};
use super::text::{Address, Name};
use crate::limits::{SLABS_PER_MESSAGE_MAX, TOUCH_ENTRIES_MAX};
use crate::owner::SlabRecord;
use crate::{Generation, Incarnation, LayoutId, SlotId};

/// Most one-time tokens in a HELLO_ACK: as many tcp data connections to one peer in one go.
pub const TCP_TOKENS_MAX: usize = 64;

/// First message to a peer. Its cluster and version (in the envelope) must be the peer's own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello<'a> {
    /// Cluster.
    #[serde(borrow)]
    pub cluster: Name<'a>,
    /// Name of the rank that says hello.
    #[serde(borrow)]
    pub name: Name<'a>,
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// The incarnation that it wants to talk to (rule R1).
    pub wanted: Incarnation,
    /// How many tcp data connections it wants to open: one token each, at most [`TCP_TOKENS_MAX`] are given.
    pub tcp_tokens_wanted: u8,
}

/// Answer to HELLO.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HelloReply<'a> {
    /// Welcome.
    #[serde(borrow)]
    Ack(HelloAck<'a>),
    /// The peer lives on as another incarnation, or always was one (rule R1).
    WrongIncarnation {
        /// The peer's incarnation.
        found: Incarnation,
    },
    /// The peer belongs to another cluster.
    ClusterMismatch,
    /// The peer has no room for another connection now.
    Busy,
}

/// What a peer offers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HelloAck<'a> {
    /// The peer's name.
    #[serde(borrow)]
    pub name: Name<'a>,
    /// The peer's incarnation.
    pub incarnation: Incarnation,
    /// Its Unix socket, if it serves shm.
    #[serde(borrow)]
    pub unix: Option<UnixOffer<'a>>,
    /// `HOST:PORT` of its data listener, if it serves tcp.
    #[serde(borrow)]
    pub tcp: Option<Address<'a>>,
    /// One-time tokens for tcp data connections.
    #[serde(borrow)]
    pub tcp_tokens: Records<'a, Token>,
    /// Its slabs, at most [`SLABS_PER_MESSAGE_MAX`]; the rest follows in [`Slabs`].
    #[serde(borrow)]
    pub slabs: Records<'a, SlabRecord>,
}

/// A Unix socket. "Same host" is found by connecting it: the shm handshake echoes a nonce and shows the incarnation
/// (design 1.9).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnixOffer<'a> {
    /// Path.
    #[serde(borrow)]
    pub path: Address<'a>,
}

/// One-time token that opens one tcp data connection (design 1.9).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Token(pub [u8; 32]);

impl core::fmt::Debug for Token {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Token(..)")
    }
}

impl FixedRecord for Token {
    const BYTES: usize = 32;
    const COUNT_MAX: usize = TCP_TOKENS_MAX;

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0);
    }

    fn read(bytes: &[u8]) -> Self {
        Self(Fields::new(bytes).take())
    }
}

/// Slabs that came or went since HELLO_ACK. Pushed; no answer is waited for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Slabs<'a> {
    /// Incarnation of the owner.
    pub incarnation: Incarnation,
    /// Slabs that exist from now on.
    #[serde(borrow)]
    pub added: Records<'a, SlabRecord>,
    /// Slabs that never serve again.
    #[serde(borrow)]
    pub retired: Records<'a, SlabRecord>,
}

impl FixedRecord for SlabRecord {
    const BYTES: usize = 44;
    const COUNT_MAX: usize = SLABS_PER_MESSAGE_MAX;

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.layout.0.to_le_bytes());
        out.extend_from_slice(&self.object_bytes.to_le_bytes());
        out.extend_from_slice(&self.base_offset.to_le_bytes());
        out.extend_from_slice(&self.group_id.to_le_bytes());
        out.extend_from_slice(&self.first_slot.0.to_le_bytes());
        out.extend_from_slice(&self.slots.to_le_bytes());
    }

    fn read(bytes: &[u8]) -> Self {
        let mut fields = Fields::new(bytes);
        Self {
            layout: LayoutId(u128::from_le_bytes(fields.take())),
            object_bytes: fields.u64(),
            base_offset: fields.u64(),
            group_id: fields.u32(),
            first_slot: SlotId(fields.u32()),
            slots: fields.u32(),
        }
    }
}

/// Accepted blocks, reader to owner: lossy and advisory, feeds eviction. No answer is waited for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Touch<'a> {
    /// Incarnation of the owner.
    pub incarnation: Incarnation,
    /// Slots and generations that were accepted.
    #[serde(borrow)]
    pub entries: Records<'a, (SlotId, Generation)>,
}

impl FixedRecord for (SlotId, Generation) {
    const BYTES: usize = 12;
    const COUNT_MAX: usize = TOUCH_ENTRIES_MAX;

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.0 .0.to_le_bytes());
        out.extend_from_slice(&self.1 .0.to_le_bytes());
    }

    fn read(bytes: &[u8]) -> Self {
        let mut fields = Fields::new(bytes);
        (SlotId(fields.u32()), Generation(fields.u64()))
    }
}

const _: () = {
    assert!(
        2 * SLABS_PER_MESSAGE_MAX * <SlabRecord as FixedRecord>::BYTES < crate::limits::FRAME_BYTES_MAX / 2
    );
    assert!(
        TOUCH_ENTRIES_MAX * <(SlotId, Generation) as FixedRecord>::BYTES < crate::limits::FRAME_BYTES_MAX / 2
    );
};
