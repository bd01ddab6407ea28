//! Which engine memory is in use by which job (rules R4 and R8).
//!
//! A load claims its destinations exclusively, a store claims its sources together with other stores. A claim ends only
//! when the job is final, so two jobs can never move bytes through the same memory at once, whatever the engine asks.

use std::collections::BTreeMap;

use thiserror::Error;

/// Half-open address range `[start, end)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Span {
    /// First address.
    pub start: u64,
    /// One past the last address.
    pub end: u64,
}

/// A claim that cannot be granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SpanConflict {
    /// Two ranges of the same job overlap.
    #[error("two destination ranges of the job overlap at address {address:#x}; give each block memory of its own")]
    WithinJob {
        /// First doubly used address.
        address: u64,
    },
    /// A range overlaps one of a job that is not final yet.
    #[error("address {address:#x} still belongs to job {job}, which is not final; wait for it before reusing its memory")]
    WithJob {
        /// First doubly used address.
        address: u64,
        /// The other job.
        job: u64,
    },
}

#[derive(Debug)]
struct Claim {
    exclusive: bool,
    spans: Box<[Span]>,
}

/// Memory in use, by job.
#[derive(Debug, Default)]
pub struct SpanSet {
    claims: BTreeMap<u64, Claim>,
}

impl SpanSet {
    /// An empty set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Claims `spans` for `job`: exclusively for a load, shared with other shared claims for a store.
    ///
    /// # Errors
    /// [`SpanConflict`]; nothing is claimed then.
    pub fn claim(&mut self, job: u64, exclusive: bool, mut spans: Vec<Span>) -> Result<(), SpanConflict> {
        spans.retain(|span| span.start < span.end);
        spans.sort_unstable();
        if exclusive {
            if let Some(pair) = spans.windows(2).find(|pair| pair[0].end > pair[1].start) {
                return Err(SpanConflict::WithinJob { address: pair[1].start });
            }
        }
        let merged = merge(&spans);
        for (&other, claim) in &self.claims {
            if exclusive || claim.exclusive {
                if let Some(address) = first_overlap(&merged, &claim.spans) {
                    return Err(SpanConflict::WithJob { address, job: other });
                }
            }
        }
        self.claims.insert(job, Claim { exclusive, spans: merged.into_boxed_slice() });
        Ok(())
    }

    /// Claims the memory of a job block by block: a block whose spans are in use, or overlap those of an earlier block of
    /// the job, is refused and its siblings go on. One result per block, in order.
    pub fn claim_blocks(
        &mut self,
        job: u64,
        exclusive: bool,
        blocks: &[Vec<Span>],
    ) -> Vec<Result<(), SpanConflict>> {
        // Nearly every job is granted as a whole; only a refusal is worth looking for its blocks.
        if self.claim(job, exclusive, blocks.concat()).is_ok() {
            return vec![Ok(()); blocks.len()];
        }
        let mut granted: Vec<Span> = Vec::new();
        let results = blocks
            .iter()
            .map(|block| {
                let mut alone = Self { claims: core::mem::take(&mut self.claims) };
                let result = alone.claim(job, exclusive, block.clone());
                let merged = alone.claims.remove(&job).map(|claim| claim.spans).unwrap_or_default();
                self.claims = alone.claims;
                result?;
                if exclusive {
                    if let Some(address) = first_overlap(&merged, &granted) {
                        return Err(SpanConflict::WithinJob { address });
                    }
                }
                granted.extend_from_slice(&merged);
                granted.sort_unstable();
                granted = merge(&granted);
                Ok(())
            })
            .collect();
        self.claims.insert(job, Claim { exclusive, spans: granted.into_boxed_slice() });
        results
    }

    /// Ends the claim of a job that is final. Unknown jobs are ignored.
    pub fn release(&mut self, job: u64) {
        self.claims.remove(&job);
    }

    /// Jobs with a claim.
    #[must_use]
    pub fn jobs(&self) -> usize {
        self.claims.len()
    }

    /// Whether any job uses an address of the range.
    #[must_use]
    pub fn uses(&self, span: Span) -> bool {
        self.claims.values().any(|claim| first_overlap(&[span], &claim.spans).is_some())
    }
}

/// Joins adjacent and overlapping spans of a sorted list.
fn merge(sorted: &[Span]) -> Vec<Span> {
    let mut merged: Vec<Span> = Vec::with_capacity(sorted.len().min(1024));
    for &span in sorted {
        match merged.last_mut() {
            Some(last) if span.start <= last.end => last.end = last.end.max(span.end),
            _ => merged.push(span),
        }
    }
    merged
}

/// First address in both sorted, merged lists. Walks the shorter list and searches the longer one, so that a small load
/// next to a huge one stays cheap.
fn first_overlap(a: &[Span], b: &[Span]) -> Option<u64> {
    let (short, long) = if a.len() <= b.len() { (a, b) } else { (b, a) };
    if let (Some(first), Some(last), Some(other_first), Some(other_last)) =
        (short.first(), short.last(), long.first(), long.last())
    {
        if last.end <= other_first.start || other_last.end <= first.start {
            return None;
        }
    }
    short.iter().find_map(|span| {
        let at = long.partition_point(|other| other.end <= span.start);
        long.get(at).filter(|other| other.start < span.end).map(|other| other.start.max(span.start))
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn span(start: u64, end: u64) -> Span {
        Span { start, end }
    }

    #[test]
    fn loads_are_exclusive_and_stores_share() {
        let mut set = SpanSet::new();
        set.claim(1, true, vec![span(0, 10), span(20, 30)]).unwrap();
        assert_eq!(
            set.claim(2, true, vec![span(25, 26)]),
            Err(SpanConflict::WithJob { address: 25, job: 1 })
        );
        assert_eq!(set.claim(2, false, vec![span(9, 12)]), Err(SpanConflict::WithJob { address: 9, job: 1 }));
        set.claim(3, false, vec![span(10, 20)]).unwrap();
        set.claim(4, false, vec![span(12, 18), span(12, 14)]).unwrap();
        assert_eq!(
            set.claim(5, true, vec![span(13, 14)]),
            Err(SpanConflict::WithJob { address: 13, job: 3 })
        );
        set.release(3);
        set.release(4);
        set.claim(5, true, vec![span(13, 14)]).unwrap();
        assert_eq!(set.jobs(), 2);
    }

    #[test]
    fn a_load_must_not_overlap_itself() {
        let mut set = SpanSet::new();
        assert_eq!(
            set.claim(1, true, vec![span(10, 20), span(0, 11)]),
            Err(SpanConflict::WithinJob { address: 10 })
        );
        assert_eq!(set.jobs(), 0);
        set.claim(1, true, vec![span(10, 20), span(0, 10), span(5, 5)]).unwrap();
    }

    #[test]
    fn only_the_blocks_in_conflict_are_refused() {
        let mut set = SpanSet::new();
        set.claim(1, true, vec![span(100, 110)]).unwrap();
        let blocks = [
            vec![span(0, 10), span(20, 30)],
            vec![span(25, 26)],
            vec![span(105, 106)],
            vec![span(40, 50)],
            vec![span(60, 65), span(64, 70)],
        ];
        assert_eq!(
            set.claim_blocks(2, true, &blocks),
            [
                Ok(()),
                Err(SpanConflict::WithinJob { address: 25 }),
                Err(SpanConflict::WithJob { address: 105, job: 1 }),
                Ok(()),
                Err(SpanConflict::WithinJob { address: 64 }),
            ]
        );
        assert_eq!(
            set.claim(3, true, vec![span(45, 46)]),
            Err(SpanConflict::WithJob { address: 45, job: 2 })
        );
        set.claim(3, true, vec![span(60, 70)]).unwrap();
        set.release(2);
        set.claim(4, true, vec![span(0, 50)]).unwrap();
    }

    proptest! {
        #[test]
        fn overlaps_are_found_exactly(
            a in proptest::collection::vec((0u64..200, 1u64..20), 0..20),
            b in proptest::collection::vec((0u64..200, 1u64..20), 0..20),
        ) {
            let build = |spans: &[(u64, u64)]| {
                let mut sorted: Vec<Span> = spans.iter().map(|&(s, l)| span(s, s + l)).collect();
                sorted.sort_unstable();
                merge(&sorted)
            };
            let covers = |spans: &[(u64, u64)], at: u64| spans.iter().any(|&(s, l)| (s..s + l).contains(&at));
            let expected = (0..220).find(|&at| covers(&a, at) && covers(&b, at));
            prop_assert_eq!(first_overlap(&build(&a), &build(&b)).is_some(), expected.is_some());
        }
    }
}
