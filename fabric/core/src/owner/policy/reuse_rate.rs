//! Age weighed by how rarely objects of a class are asked for again.
//!
//! The hazard of being asked for again falls about as one over the age, for every kind of block; kinds differ in their
//! *share* of blocks that are ever asked for again: hardly any of the leaves (the partial last block of a prompt), a
//! quarter of the blocks of a conversation's first turn, half of those of a conversation that has gone on before. So the object to evict is
//! the one with the greatest age divided by the share of its class. The shares are learnt from what happens: a reuse of
//! a resident or of a ghost counts for its class, a ghost that expires counts against it. With equal shares this is LRU.
//! `kvfabric-bench policy` compares it on public traces.

use super::ghosts::Ghosts;
use super::{coldest, push_hot, Departure, List, Newcomer, Nodes, Policy};
use crate::Fingerprint;

const CLASSES: usize = 5;
/// Never asked for again, no child yet.
const LEAF: u8 = 0;
/// Never asked for again, has a child.
const FIRST: u8 = 1;
/// As FIRST, but extends a chain that was asked for again.
const EXTENSION: u8 = 2;
/// Asked for again once.
const SECOND: u8 = 3;
/// Asked for again more often.
const REPEATED: u8 = 4;

/// Shares assumed before anything is known, in per mille.
const PRIOR_PER_MILLE: [u64; CLASSES] = [30, 250, 500, 500, 500];
/// The prior weighs as much as observations on this share of the room, as a divisor, ...
const PRIOR_DIVISOR: u32 = 10;
/// ... and at least this many.
const PRIOR_MIN: u32 = 16;
/// Shares are computed anew each time this share of the room was inserted, as a divisor, ...
const PERIOD_DIVISOR: u32 = 8;
/// ... and at least this many, and then observations lose one part in FADE of their weight, so that a change of
/// workload is followed within some turnovers of the pool.
const PERIOD_MIN: u32 = 16;
const FADE: u64 = 50;
/// A child of a reused parent extends its chain if the parent has had at most this many children; more mean that the
/// parent is a common prefix (a system prompt) where unrelated chains begin. Two, because the partial last block of the turn before
/// is a child too.
const EXTENDED_CHILDREN_MAX: u8 = 2;
/// One observation, so that fading keeps fractions.
const ONE: u64 = 1 << 10;

#[derive(Clone, Copy, Debug, Default)]
struct Class {
    list: List,
    reused: u64,
    ended: u64,
    /// Ages count times this, 16.16 fixed point: one over the share.
    weight: u64,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct ReuseRate {
    classes: [Class; CLASSES],
    ghosts: Ghosts,
    room: u32,
    inserted: u32,
}

impl ReuseRate {
    fn class(&mut self, class: u8) -> &mut Class {
        &mut self.classes[usize::from(class).min(CLASSES - 1)]
    }

    fn observe(&mut self, class: u8, reused: bool) {
        let class = self.class(class);
        class.ended += ONE;
        class.reused += if reused { ONE } else { 0 };
    }

    /// Shares from observations and prior.
    fn learn(&mut self) {
        let prior = u64::from((self.room / PRIOR_DIVISOR).max(PRIOR_MIN)) * ONE;
        for (class, per_mille) in self.classes.iter_mut().zip(PRIOR_PER_MILLE) {
            let reused = class.reused + prior * per_mille / 1000;
            class.weight = ((class.ended + prior) << 16) / reused.max(1);
        }
    }

    fn fade(&mut self) {
        for class in &mut self.classes {
            class.reused -= class.reused / FADE;
            class.ended -= class.ended / FADE;
        }
    }

    fn place(&mut self, nodes: &mut Nodes, entry: u32, class: u8, parent: Option<u32>) {
        nodes.get_mut(entry).class = class;
        let parent = parent.filter(|&parent| nodes.get(parent).class == class);
        let room = self.room;
        push_hot(&mut self.class(class).list, nodes, entry, parent, room);
    }

    /// Class after one more reuse.
    fn after_reuse(class: u8) -> u8 {
        if class >= SECOND {
            REPEATED
        } else {
            SECOND
        }
    }

    fn extends(nodes: &Nodes, parent: u32) -> bool {
        let parent = nodes.get(parent);
        parent.class == EXTENSION || (parent.class >= SECOND && parent.children_ever <= EXTENDED_CHILDREN_MAX)
    }
}

impl Policy for ReuseRate {
    fn set_room(&mut self, objects: u32) {
        self.room = objects;
        self.learn();
    }

    fn insert(&mut self, nodes: &mut Nodes, newcomer: Newcomer) {
        let Newcomer { entry, fingerprint, parent, has_child } = newcomer;
        self.inserted += 1;
        if self.inserted >= (self.room / PERIOD_DIVISOR).max(PERIOD_MIN) {
            self.inserted = 0;
            self.learn();
            self.fade();
        }
        let extends = parent.is_some_and(|parent| Self::extends(nodes, parent));
        let grown = if extends { EXTENSION } else { FIRST };
        nodes.get_mut(entry).class_with_child = grown;
        let class = match self.ghosts.take(fingerprint) {
            Some(class) => {
                self.observe(class, true);
                Self::after_reuse(class)
            }
            None if has_child => grown,
            None => LEAF,
        };
        self.place(nodes, entry, class, parent);
    }

    fn adopt(&mut self, nodes: &mut Nodes, parent: u32, grandparent: Option<u32>) {
        let node = nodes.get_mut(parent);
        node.children_ever = node.children_ever.saturating_add(1);
        if node.class == LEAF {
            let class = node.class_with_child;
            self.class(LEAF).list.remove(nodes, parent);
            self.place(nodes, parent, class, grandparent);
        }
    }

    fn touch(&mut self, nodes: &mut Nodes, entry: u32, parent: Option<u32>) {
        let class = nodes.get(entry).class;
        self.class(class).list.remove(nodes, entry);
        self.observe(class, true);
        self.place(nodes, entry, Self::after_reuse(class), parent);
    }

    fn remove(&mut self, nodes: &mut Nodes, entry: u32, fingerprint: Fingerprint, departure: Departure) {
        let class = nodes.get(entry).class;
        self.class(class).list.remove(nodes, entry);
        if departure == Departure::Evicted {
            self.ghosts.push(fingerprint, class);
            while let Some(class) = self.ghosts.expire(self.room) {
                self.observe(class, false);
            }
        }
    }

    fn victim(&mut self, nodes: &Nodes, refused: &dyn Fn(u32) -> bool) -> Option<u32> {
        let mut allowed: Option<(u128, u32)> = None;
        let mut any: Option<(u128, u32)> = None;
        for class in &self.classes {
            let score = |entry: u32| (u128::from(nodes.age(entry) + 1) * u128::from(class.weight), entry);
            // Classes compete by what they would really give: a refused tail may be very old, and what comes after it young.
            any = any.max(class.list.tail().map(score));
            allowed = allowed.max(coldest(&class.list, nodes, refused).map(score));
        }
        allowed.or(any).map(|(_, entry)| entry)
    }

    fn len(&self) -> u32 {
        self.classes.iter().map(|class| class.list.len()).sum()
    }
}
