//! Identifiers and units that every module shares.

use core::fmt;
use core::num::NonZeroU64;
use core::time::Duration;

use serde::{Deserialize, Serialize};

/// A point on the driver's monotonic clock, in microseconds since an origin that the driver chooses.
///
/// Only differences carry meaning. Core never reads a clock; the driver passes `now` to each `handle_*` call. No
/// `Time` is ever part of a safety argument (design D1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// The origin of the driver's clock.
    pub const ZERO: Self = Self(0);
    /// Later than every real point in time; used for "never".
    pub const FAR_FUTURE: Self = Self(u64::MAX);

    /// The point `micros` microseconds after the origin.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Microseconds since the origin.
    #[must_use]
    pub const fn as_micros(self) -> u64 {
        self.0
    }

    /// This point plus `delay`, saturating at [`Time::FAR_FUTURE`].
    #[must_use]
    pub fn after(self, delay: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(delay.as_micros()).unwrap_or(u64::MAX)))
    }

    /// Time passed since `earlier`, zero if `earlier` is later than this point.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0))
    }
}

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

id! {
    /// Dense number that the directory gives to each joined (name, incarnation); never reused within a directory's life.
    RankId(u32)
}
id! {
    /// Slot of a rank's word table. Slot ids are per rank and never renumbered (design 1.9).
    SlotId(u32)
}
id! {
    /// Value of a rank's single generation counter, from 1; 0 is never valid (design 1.3).
    Generation(u64)
}
id! {
    /// Keyed hash that a word carries while its slot is published; 0 means invalid (design 1.9).
    Tag(u64)
}
id! {
    /// Number that a rank gives to a namespace, for as long as the rank lives; the directory's own number is
    /// [`NsNumber`](crate::wire::NsNumber) and changes when the directory starts anew.
    NsId(u32)
}
id! {
    /// Epoch of a namespace at the directory; CLEAR bumps it.
    NsEpoch(u32)
}
id! {
    /// 128 bits of BLAKE3 over a group's canonical layout (design 1.9).
    LayoutId(u128)
}

/// A process's life as owner of a word table: a non-zero random number drawn at start (design 1.9).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Incarnation(pub NonZeroU64);

impl Incarnation {
    /// An incarnation from its number; `None` for zero.
    #[must_use]
    pub const fn new(value: u64) -> Option<Self> {
        match NonZeroU64::new(value) {
            Some(value) => Some(Self(value)),
            None => None,
        }
    }

    /// The number.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// 16-byte keyed fingerprint of a key: the directory's only notion of a key (design 1.9).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fingerprint(pub [u64; 2]);

impl Fingerprint {
    /// Size on the wire, bytes.
    pub const BYTES: usize = 16;

    /// From its little-endian bytes.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        let value = u128::from_le_bytes(bytes);
        #[allow(clippy::cast_possible_truncation)] // Splitting a u128 into its halves.
        Self([value as u64, (value >> 64) as u64])
    }

    /// As little-endian bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 16] {
        (u128::from(self.0[0]) | (u128::from(self.0[1]) << 64)).to_le_bytes()
    }
}

/// Which transport carries a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum TransportKind {
    /// Same host: memfd pool mapped by the reader.
    Shm,
    /// One-sided semantics emulated over TCP.
    Tcp,
    /// RDMA verbs.
    Rdma,
}

impl TransportKind {
    /// The name used by flags, metrics and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Rdma => "rdma",
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// When a landed block's checksum is compared with its word's (design 1.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verify {
    /// Never.
    Off,
    /// One block in [`limits::VERIFY_SAMPLE_INTERVAL`](crate::limits::VERIFY_SAMPLE_INTERVAL), chosen by generation.
    Sampled,
    /// Every block whose word carries a checksum.
    Always,
}

impl Verify {
    /// Whether a block published under `generation` is verified.
    #[must_use]
    pub fn applies_to(self, generation: Generation) -> bool {
        match self {
            Self::Off => false,
            Self::Sampled => generation.0 % crate::limits::VERIFY_SAMPLE_INTERVAL == 0,
            Self::Always => true,
        }
    }
}
