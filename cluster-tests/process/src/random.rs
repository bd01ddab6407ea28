//! Seeded random choices, so that a failing run can be repeated.

use std::time::Duration;

/// Environment variable with the seed of a run.
pub const SEED_VARIABLE: &str = "KVFABRIC_TEST_SEED";

/// Mixes a number thoroughly (the finaliser of SplitMix64).
#[must_use]
pub const fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A small generator; good enough to choose moments and keys.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// From a seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number below `end`, which is not zero.
    pub fn below(&mut self, end: u64) -> u64 {
        self.number() % end
    }

    /// Whether something that happens once in `times` happens now.
    pub fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }

    /// A time between two bounds.
    pub fn between(&mut self, least: Duration, most: Duration) -> Duration {
        let span = u64::try_from(most.saturating_sub(least).as_micros()).unwrap_or(u64::MAX).max(1);
        least + Duration::from_micros(self.below(span))
    }
}

/// The seed of a run: from the environment, else a new one. Prints it with the command that repeats the run.
#[must_use]
pub fn seed(test: &str) -> u64 {
    let seed = std::env::var(SEED_VARIABLE)
        .ok()
        .map(|text| text.parse().expect("the seed is a number"))
        .unwrap_or_else(|| getrandom::u64().expect("the system has random numbers"));
    println!(
        "seed {seed}; to repeat: {SEED_VARIABLE}={seed} cargo test --release -p kvfabric-process-tests --test processes {test}"
    );
    seed
}

/// How long a randomised test goes on: `usual`, or a minute and more when `KVF_SOAK` is 1.
#[must_use]
pub fn run_time(usual: Duration) -> Duration {
    if std::env::var_os("KVF_SOAK").is_some_and(|value| value == "1") {
        usual * 6 + Duration::from_secs(30)
    } else {
        usual
    }
}
