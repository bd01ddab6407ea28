//! Numbers that entries carry, and that are used again only after no entry carries them any more.

use crate::directory::table::NUMBER_MAX;

/// Gives out small numbers. A retired number is dead at once, and free after one whole sweep that began later.
#[derive(Debug, Default)]
pub(super) struct Numbers {
    dead: Vec<bool>,
    free: Vec<u32>,
    /// Retired since the running sweep began.
    retired: Vec<u32>,
    /// Retired before the running sweep began.
    sweeping: Vec<u32>,
}

impl Numbers {
    /// A number that no entry carries; `None` if all are in use or wait for a sweep.
    pub(super) fn take(&mut self) -> Option<u32> {
        if let Some(number) = self.free.pop() {
            return Some(number);
        }
        let number = u32::try_from(self.dead.len()).ok().filter(|number| *number < NUMBER_MAX)?;
        self.dead.push(false);
        Some(number)
    }

    /// How many numbers were ever given out.
    pub(super) fn count(&self) -> usize {
        self.dead.len()
    }

    pub(super) fn retire(&mut self, number: u32) {
        if let Some(dead) = self.dead.get_mut(number as usize) {
            if !*dead {
                *dead = true;
                self.retired.push(number);
            }
        }
    }

    #[inline]
    pub(super) fn is_dead(&self, number: u32) -> bool {
        self.dead.get(number as usize).copied().unwrap_or(true)
    }

    /// Whether a sweep would free numbers.
    pub(super) fn needs_sweep(&self) -> bool {
        !self.retired.is_empty() || !self.sweeping.is_empty()
    }

    pub(super) fn begin_sweep(&mut self) {
        self.sweeping.append(&mut self.retired);
    }

    pub(super) fn end_sweep(&mut self) {
        for number in self.sweeping.drain(..) {
            if let Some(dead) = self.dead.get_mut(number as usize) {
                *dead = false;
            }
            self.free.push(number);
        }
    }
}
