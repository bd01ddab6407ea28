//! Doubly linked lists whose links live in arenas: O(1) insertion and removal, no allocation per operation.

/// "No element": the arenas never grow this far.
pub(crate) const NIL: u32 = u32::MAX;

/// Neighbours of an element in the one list it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    /// Towards the head.
    pub(crate) prev: u32,
    /// Towards the tail.
    pub(crate) next: u32,
}

impl Link {
    pub(crate) const NONE: Self = Self { prev: NIL, next: NIL };
}

/// An arena whose elements carry a [`Link`].
pub(crate) trait Links {
    fn link(&self, index: u32) -> Link;
    fn link_mut(&mut self, index: u32) -> &mut Link;
}

/// A list of arena elements; the head is the hottest or newest end of eviction lists and the oldest end of queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct List {
    head: u32,
    tail: u32,
    len: u32,
}

impl Default for List {
    fn default() -> Self {
        Self { head: NIL, tail: NIL, len: 0 }
    }
}

impl List {
    pub(crate) fn head(&self) -> Option<u32> {
        (self.head != NIL).then_some(self.head)
    }

    pub(crate) fn tail(&self) -> Option<u32> {
        (self.tail != NIL).then_some(self.tail)
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(crate) fn push_head(&mut self, links: &mut impl Links, index: u32) {
        *links.link_mut(index) = Link { prev: NIL, next: self.head };
        match self.head() {
            Some(head) => links.link_mut(head).prev = index,
            None => self.tail = index,
        }
        self.head = index;
        self.len += 1;
    }

    pub(crate) fn push_tail(&mut self, links: &mut impl Links, index: u32) {
        *links.link_mut(index) = Link { prev: self.tail, next: NIL };
        match self.tail() {
            Some(tail) => links.link_mut(tail).next = index,
            None => self.head = index,
        }
        self.tail = index;
        self.len += 1;
    }

    /// Inserts `index` on the tail side of `anchor`, which must be in this list.
    pub(crate) fn insert_after(&mut self, links: &mut impl Links, anchor: u32, index: u32) {
        let next = links.link(anchor).next;
        *links.link_mut(index) = Link { prev: anchor, next };
        links.link_mut(anchor).next = index;
        if next == NIL {
            self.tail = index;
        } else {
            links.link_mut(next).prev = index;
        }
        self.len += 1;
    }

    /// Takes `index`, which must be in this list, out of it.
    pub(crate) fn remove(&mut self, links: &mut impl Links, index: u32) {
        let Link { prev, next } = links.link(index);
        if prev == NIL {
            self.head = next;
        } else {
            links.link_mut(prev).next = next;
        }
        if next == NIL {
            self.tail = prev;
        } else {
            links.link_mut(next).prev = prev;
        }
        *links.link_mut(index) = Link::NONE;
        self.len -= 1;
    }

    /// Elements from head to tail.
    pub(crate) fn iter<'a, L: Links>(&self, links: &'a L) -> impl Iterator<Item = u32> + 'a {
        let mut at = self.head;
        core::iter::from_fn(move || {
            let index = (at != NIL).then_some(at)?;
            at = links.link(index).next;
            Some(index)
        })
    }
}
