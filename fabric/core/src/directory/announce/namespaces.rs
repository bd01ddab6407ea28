//! The rank's own numbers of namespaces, and what the directory calls them now.

use std::collections::BTreeMap;

use crate::directory::limits::RANK_NAMESPACES_MAX;
use crate::wire::{NsName, NsNumber};
use crate::{NsEpoch, NsId, Time};

/// What is known of a namespace.
#[derive(Clone, Copy, Debug)]
pub(super) struct Namespace {
    pub(super) name: NsName,
    pub(super) epoch: NsEpoch,
    pub(super) standing: Standing,
}

/// How a namespace stands with the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Not asked for yet, or asked before the connection was lost.
    Unasked,
    /// Asked for.
    Asked { again_at: Time },
    /// Numbered.
    Open(NsNumber),
    /// The directory has no room for it: what is stored in it is not announced.
    Full { again_at: Time },
}

/// All namespaces of a rank. Numbers are given from 1 and never change.
#[derive(Debug, Default)]
pub(super) struct Namespaces {
    all: Vec<Namespace>,
    by_name: BTreeMap<NsName, NsId>,
    by_number: BTreeMap<NsNumber, NsId>,
}

impl Namespaces {
    pub(super) fn id(&self, name: &NsName) -> Option<NsId> {
        self.by_name.get(name).copied()
    }

    pub(super) fn get(&self, ns: NsId) -> Option<&Namespace> {
        self.all.get((ns.0 as usize).checked_sub(1)?)
    }

    pub(super) fn get_mut(&mut self, ns: NsId) -> Option<&mut Namespace> {
        self.all.get_mut((ns.0 as usize).checked_sub(1)?)
    }

    /// The namespace of that name; `None` if there are too many.
    pub(super) fn open(&mut self, name: NsName) -> Option<NsId> {
        if let Some(ns) = self.id(&name) {
            return Some(ns);
        }
        if self.all.len() >= RANK_NAMESPACES_MAX {
            return None;
        }
        self.all.push(Namespace { name, epoch: NsEpoch(0), standing: Standing::Unasked });
        let ns = NsId(u32::try_from(self.all.len()).ok()?);
        self.by_name.insert(name, ns);
        Some(ns)
    }

    /// The directory that gave the numbers is gone.
    pub(super) fn forget_numbers(&mut self) {
        self.by_number.clear();
        for namespace in &mut self.all {
            namespace.standing = Standing::Unasked;
        }
    }

    pub(super) fn set_number(&mut self, ns: NsId, number: NsNumber) {
        if let Some(namespace) = self.get_mut(ns) {
            namespace.standing = Standing::Open(number);
            self.by_number.insert(number, ns);
        }
    }

    pub(super) fn by_number(&self, number: NsNumber) -> Option<NsId> {
        self.by_number.get(&number).copied()
    }

    /// Raises the epoch; false if it is not lower.
    pub(super) fn raise(&mut self, ns: NsId, epoch: NsEpoch) -> bool {
        match self.get_mut(ns) {
            Some(namespace) if epoch > namespace.epoch => {
                namespace.epoch = epoch;
                true
            }
            _ => false,
        }
    }

    /// Namespaces that must be asked for now.
    pub(super) fn to_ask(&self, now: Time) -> Vec<NsId> {
        let due = |namespace: &Namespace| match namespace.standing {
            Standing::Unasked => true,
            Standing::Asked { again_at } | Standing::Full { again_at } => now >= again_at,
            Standing::Open(_) => false,
        };
        (1..).zip(&self.all).filter(|(_, namespace)| due(namespace)).map(|(ns, _)| NsId(ns)).collect()
    }

    /// When the next one must be asked for.
    pub(super) fn next_ask(&self) -> Option<Time> {
        let due = self.all.iter().filter_map(|namespace| match namespace.standing {
            Standing::Unasked => Some(Time::ZERO),
            Standing::Asked { again_at } | Standing::Full { again_at } => Some(again_at),
            Standing::Open(_) => None,
        });
        due.min()
    }
}
