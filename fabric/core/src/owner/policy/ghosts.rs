//! Keys that were evicted lately, so that their return can be recognised.

use std::collections::VecDeque;

use hashbrown::HashTable;

use crate::owner::entry::table_hash;
use crate::Fingerprint;

/// What is remembered of an evicted object.
#[derive(Clone, Copy, Debug)]
struct Ghost {
    fingerprint: Fingerprint,
    class: u8,
    /// It came back, or its key was evicted again later.
    void: bool,
}

/// A FIFO of ghosts, found by fingerprint. About 30 bytes each.
#[derive(Debug, Default)]
pub(super) struct Ghosts {
    /// Oldest first.
    ring: VecDeque<Ghost>,
    /// Number of the oldest ghost, modulo 2^32.
    first: u32,
    /// Numbers of ghosts that are not void.
    table: HashTable<u32>,
}

impl Ghosts {
    fn at(ring: &VecDeque<Ghost>, first: u32, number: u32) -> Fingerprint {
        ring.get(number.wrapping_sub(first) as usize).map(|ghost| ghost.fingerprint).unwrap_or_default()
    }

    /// Forgets the ghost of a key that comes back; its class, if there was one.
    pub(super) fn take(&mut self, fingerprint: Fingerprint) -> Option<u8> {
        let (ring, first) = (&mut self.ring, self.first);
        let found = self
            .table
            .find_entry(table_hash(fingerprint), |&number| Self::at(ring, first, number) == fingerprint);
        let (number, _) = found.ok()?.remove();
        let ghost = ring.get_mut(number.wrapping_sub(first) as usize)?;
        ghost.void = true;
        Some(ghost.class)
    }

    /// Remembers an evicted key.
    pub(super) fn push(&mut self, fingerprint: Fingerprint, class: u8) {
        self.take(fingerprint);
        let number = self.first.wrapping_add(u32::try_from(self.ring.len()).unwrap_or(u32::MAX));
        self.ring.push_back(Ghost { fingerprint, class, void: false });
        let (ring, first) = (&self.ring, self.first);
        self.table.insert_unique(table_hash(fingerprint), number, |&number| {
            table_hash(Self::at(ring, first, number))
        });
    }

    /// Drops the oldest ghost while there are more than `room`; the class of one that never came back.
    pub(super) fn expire(&mut self, room: u32) -> Option<u8> {
        while self.ring.len() > room as usize {
            let number = self.first;
            let ghost = self.ring.front().copied()?;
            if !ghost.void {
                let found = self.table.find_entry(table_hash(ghost.fingerprint), |&other| other == number);
                if let Ok(found) = found {
                    found.remove();
                }
            }
            self.ring.pop_front();
            self.first = number.wrapping_add(1);
            if !ghost.void {
                return Some(ghost.class);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fp(number: u64) -> Fingerprint {
        Fingerprint([number, 0])
    }

    #[test]
    fn ghosts_are_found_once_and_expire_in_order() {
        let mut ghosts = Ghosts { first: u32::MAX - 2, ..Ghosts::default() };
        for number in 0..8 {
            ghosts.push(fp(number), u8::try_from(number).unwrap());
        }
        assert_eq!(ghosts.take(fp(3)), Some(3));
        assert_eq!(ghosts.take(fp(3)), None);
        assert_eq!(ghosts.expire(8), None);
        let mut expired = Vec::new();
        while let Some(class) = ghosts.expire(2) {
            expired.push(class);
        }
        assert_eq!(expired, [0, 1, 2, 4, 5]);
        assert_eq!(ghosts.take(fp(0)), None);
        assert_eq!(ghosts.take(fp(7)), Some(7));
        ghosts.push(fp(6), 9);
        assert_eq!(ghosts.take(fp(6)), Some(9));
    }
}
