//! What to evict. One policy serves one slab; all see the same nodes, whose indices are the entries'.
//!
//! The owner decides *when* something is evicted and knows parents and children; a policy only orders. The prefix rule
//! (design 1.5) reaches it as a veto: an entry with resident children is refused, and after
//! [`limits::PARENT_REFUSALS_MAX`] refusals, or when every candidate was refused (a cycle), the coldest is evicted anyway.

mod ghosts;
mod lru;
mod reuse_rate;

use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

pub use super::entry::Nodes;
use super::list::{Links, List, NIL};
use crate::{limits, Fingerprint};

/// Why an entry leaves its policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Departure {
    /// To make room: the policy may remember it.
    Evicted,
    /// Its content is void (cleared, invalidated).
    Dropped,
}

/// An object that was just published.
#[derive(Clone, Copy, Debug)]
pub struct Newcomer {
    /// Its node.
    pub entry: u32,
    /// Its key.
    pub fingerprint: Fingerprint,
    /// The node of its parent, if that is published in the same slab.
    pub parent: Option<u32>,
    /// Whether a child of it holds a slot already.
    pub has_child: bool,
}

/// An eviction policy. `entry` and `parent` are node indices of published objects of the slab.
pub trait Policy: fmt::Debug + Send {
    /// Room of the slab, in objects; called before the first insertion and whenever it changes.
    fn set_room(&mut self, objects: u32);
    /// An object was published.
    fn insert(&mut self, nodes: &mut Nodes, newcomer: Newcomer);
    /// A child of an object got a slot. `grandparent` is the object's own parent.
    fn adopt(&mut self, nodes: &mut Nodes, parent: u32, grandparent: Option<u32>);
    /// An object was read.
    fn touch(&mut self, nodes: &mut Nodes, entry: u32, parent: Option<u32>);
    /// An object leaves.
    fn remove(&mut self, nodes: &mut Nodes, entry: u32, fingerprint: Fingerprint, departure: Departure);
    /// The object to evict next, if any; it stays until `remove`. `refused` says which objects have resident children.
    fn victim(&mut self, nodes: &Nodes, refused: &dyn Fn(u32) -> bool) -> Option<u32>;
    /// Number of objects.
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
    /// Least recently used.
    Lru,
    /// Age weighed by how rarely objects of its class are asked for again, learnt while running.
    #[default]
    ReuseRate,
}

impl PolicyKind {
    /// Every policy.
    pub const ALL: &'static [Self] = &[Self::Lru, Self::ReuseRate];

    /// The name used by configuration and benchmarks.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::ReuseRate => "reuse-rate",
        }
    }

    /// A new policy of this kind.
    #[must_use]
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::Lru => Box::new(lru::Lru::default()),
            Self::ReuseRate => Box::new(reuse_rate::ReuseRate::default()),
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

/// A parent used at most this many clock ticks before its child counts as used together with it: a prefix run is touched
/// or stored block by block, and other requests may come between.
const TOGETHER_TICKS_MAX: u64 = 1024;
/// ... and at most this share of the room, as a divisor, so that in a small slab "together" is not "ever".
const TOGETHER_DIVISOR: u64 = 16;

/// Where the hot end is for an object used now: the head, or just behind its parent where that was used in the same
/// run. So the leaf of a run is colder than its parents in whichever order a driver reports the run, and is evicted first.
fn push_hot(list: &mut List, nodes: &mut Nodes, entry: u32, parent: Option<u32>, room: u32) {
    let together = TOGETHER_TICKS_MAX.min(u64::from(room) / TOGETHER_DIVISOR);
    match parent {
        Some(parent) if nodes.age(parent) <= together => list.insert_after(nodes, parent, entry),
        _ => list.push_head(nodes, entry),
    }
}

/// The coldest element of `list` that is not refused; after [`limits::PARENT_REFUSALS_MAX`] refusals the coldest of all.
/// `None` if all elements were refused.
fn coldest(list: &List, nodes: &Nodes, refused: &dyn Fn(u32) -> bool) -> Option<u32> {
    let tail = list.tail()?;
    let mut at = tail;
    for _ in 0..limits::PARENT_REFUSALS_MAX {
        if !refused(at) {
            return Some(at);
        }
        at = nodes.link(at).prev;
        if at == NIL {
            return None;
        }
    }
    Some(tail)
}
