//! A seeded source of decisions: the same seed gives the same run, on every machine.

use core::time::Duration;

/// splitmix64: tiny, seedable, and good enough to choose delays and faults.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A source for one run.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`; 0 for a bound of 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.bits().checked_rem(bound).unwrap_or(0)
    }

    /// An index of a list of this length.
    pub fn index(&mut self, length: usize) -> usize {
        usize::try_from(self.below(length as u64)).unwrap_or(0)
    }

    /// True once in `odds` on average; never for odds of 0.
    pub fn one_in(&mut self, odds: u64) -> bool {
        odds != 0 && self.below(odds) == 0
    }

    /// A delay between the bounds, both included.
    pub fn delay(&mut self, from: Duration, to: Duration) -> Duration {
        let span = to.saturating_sub(from).as_micros();
        from + Duration::from_micros(self.below(u64::try_from(span).unwrap_or(u64::MAX).saturating_add(1)))
    }
}
