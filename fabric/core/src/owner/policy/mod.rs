//! What to evict. One policy serves one slab; all see the same nodes, whose indices are the entries'.
//!
//! The owner decides *when* something is evicted and knows parents and children; a policy only orders. The prefix rule
//! (design 1.5) reaches it as a veto: an entry with resident children is refused, and after
//! [`limits::PARENT_REFUSALS_MAX`] refusals, or when every candidate was refused (a cycle), the coldest is evicted anyway.

mod lru;

use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use super::entry::Nodes;
use super::list::{Links, List};
use crate::{limits, Fingerprint};

/// Why an entry leaves its policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// To make room: the policy may remember it.
    Evicted,
    /// Its content is void (cleared, invalidated).
    Dropped,
}

/// An eviction policy. `entry` arguments are node indices of resident objects.
pub trait Policy: fmt::Debug + Send {
    /// Room of the slab, in objects; called before the first insertion and whenever it changes.
    fn set_room(&mut self, objects: u32);
    /// An object was published. `parent` is its parent, if resident in the same slab.
    fn insert(&mut self, nodes: &mut Nodes, entry: u32, fingerprint: Fingerprint, parent: Option<u32>);
    /// An object was read.
    fn touch(&mut self, nodes: &mut Nodes, entry: u32, parent: Option<u32>);
    /// An object leaves.
    fn remove(&mut self, nodes: &mut Nodes, entry: u32, fingerprint: Fingerprint, departure: Departure);
    /// The object to evict next, if any; it stays until `remove`. `refused` says which objects have resident children.
    fn victim(&mut self, nodes: &Nodes, refused: &dyn Fn(u32) -> bool) -> Option<u32>;
    /// Number of objects, for invariant checks.
    fn len(&self) -> u32;
    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The policies there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyKind {
    /// Least recently used, leaves of a prefix chain before their parents.
    #[default]
    Lru,
}

impl PolicyKind {
    /// Every policy.
    pub const ALL: &'static [Self] = &[Self::Lru];

    /// The name used by configuration and benchmarks.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
        }
    }

    /// A new policy of this kind.
    #[must_use]
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(lru::Lru::default()),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No policy has this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("there is no such eviction policy; see the documentation of --policy")]
pub struct UnknownPolicy;

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name).ok_or(UnknownPolicy)
    }
}

/// A parent touched at most this many clock ticks ago counts as touched together with its child.
const TOGETHER_TICKS: u64 = 4 * limits::JOB_BLOCKS_MAX as u64;

/// The coldest element of `list` that is not refused; after [`limits::PARENT_REFUSALS_MAX`] refusals, or when all are
/// refused, the coldest.
fn coldest(list: &List, nodes: &Nodes, refused: &dyn Fn(u32) -> bool) -> Option<u32> {
    let tail = list.tail()?;
    let mut at = Some(tail);
    for _ in 0..limits::PARENT_REFUSALS_MAX {
        match at {
            Some(entry) if refused(entry) => {
                let prev = nodes.link(entry).prev;
                at = (prev != super::list::NIL).then_some(prev);
            }
            Some(entry) => return Some(entry),
            None => break,
        }
    }
    Some(tail)
}
