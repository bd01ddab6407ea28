//! Namespaces: numbers, epochs and the instances that entries carry (design 1.9, clear).

use std::collections::BTreeMap;

use super::numbers::Numbers;
use crate::wire::{NsName, NsNumber, NAMESPACES_MAX};
use crate::NsEpoch;

#[derive(Clone, Copy, Debug)]
pub(super) struct Namespace {
    pub(super) name: NsName,
    pub(super) epoch: NsEpoch,
    /// What entries of this epoch carry.
    pub(super) instance: u32,
}

/// All namespaces. They are never forgotten: their epochs must not go back.
#[derive(Debug)]
pub(super) struct Namespaces {
    all: Vec<Namespace>,
    by_name: BTreeMap<NsName, u32>,
    pub(super) instances: Numbers,
    /// Numbers start here, so that a number of another life of the directory is not taken for one of this life.
    first: u32,
    /// A CLEAR of this life ends up above it: CLEARs of this life outrank those of earlier lives.
    epoch_base: NsEpoch,
}

impl Namespaces {
    pub(super) fn new(first: u32, epoch_base: NsEpoch) -> Self {
        Self { all: Vec::new(), by_name: BTreeMap::new(), instances: Numbers::default(), first, epoch_base }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    #[allow(clippy::cast_possible_truncation)] // At most NAMESPACES_MAX.
    fn number(&self, index: u32) -> NsNumber {
        NsNumber(self.first.wrapping_add(index))
    }

    pub(super) fn get(&self, number: NsNumber) -> Option<&Namespace> {
        self.all.get(number.0.wrapping_sub(self.first) as usize)
    }

    /// The namespace of that name, numbered now if it was not before; `None` if there is no room.
    pub(super) fn open(&mut self, name: NsName) -> Option<NsNumber> {
        if let Some(index) = self.by_name.get(&name) {
            return Some(self.number(*index));
        }
        let index = u32::try_from(self.all.len()).ok().filter(|_| self.all.len() < NAMESPACES_MAX)?;
        let instance = self.instances.take()?;
        self.all.push(Namespace { name, epoch: NsEpoch(0), instance });
        self.by_name.insert(name, index);
        Some(self.number(index))
    }

    /// Raises the epoch; everything announced under a lower one is dead from now on. False if it is not lower, or if
    /// there is no instance left (then a whole sweep gives some back).
    pub(super) fn raise(&mut self, number: NsNumber, epoch: NsEpoch) -> bool {
        let Some(namespace) = self.all.get_mut(number.0.wrapping_sub(self.first) as usize) else {
            return false;
        };
        if epoch <= namespace.epoch {
            return false;
        }
        let Some(instance) = self.instances.take() else { return false };
        self.instances.retire(namespace.instance);
        namespace.instance = instance;
        namespace.epoch = epoch;
        true
    }

    /// The epoch after a CLEAR; `None` if the numbers are used up.
    pub(super) fn cleared_epoch(&self, number: NsNumber) -> Option<NsEpoch> {
        let next = self.get(number)?.epoch.0.checked_add(1)?;
        Some(NsEpoch(next.max(self.epoch_base.0.saturating_add(1))))
    }
}
