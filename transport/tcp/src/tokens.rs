//! One-time tokens of data connections: issued with the control HELLO, redeemed by a connection's first 32 bytes.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use thiserror::Error;

use crate::limits::{TOKENS_MAX, TOKENS_PER_ISSUE_MAX};

/// Why no tokens were issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TokenError {
    /// More at once than [`TOKENS_PER_ISSUE_MAX`].
    #[error("more than {TOKENS_PER_ISSUE_MAX} tokens asked for at once")]
    TooMany,
    /// The store is full of tokens that are neither used nor expired.
    #[error("too many data tokens wait to be used")]
    Full,
    /// The operating system gave no randomness.
    #[error("no randomness from the operating system")]
    Randomness,
}

impl TokenError {
    /// All causes lie on this side.
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }

    /// Whether the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        !matches!(self, Self::TooMany)
    }
}

/// Why a token was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TokenRefused {
    /// Never issued, or used before.
    #[error("the token is unknown or was used before")]
    Unknown,
    /// Too old.
    #[error("the token has expired")]
    Expired,
}

#[derive(Debug)]
struct Waiting {
    secret: [u8; 16],
    expires: Instant,
}

/// Tokens that were issued and wait to be redeemed, once each. Bounded by [`TOKENS_MAX`].
///
/// The first half of a token finds its entry and the second half is compared in constant time, so that the time of a
/// refusal tells nothing about the half that matters; both halves are random, 128 bits each.
#[derive(Debug, Default)]
pub struct TokenStore {
    waiting: Mutex<BTreeMap<[u8; 16], Waiting>>,
}

fn halves(token: &[u8; 32]) -> ([u8; 16], [u8; 16]) {
    let (mut name, mut secret) = ([0; 16], [0; 16]);
    name.copy_from_slice(&token[..16]);
    secret.copy_from_slice(&token[16..]);
    (name, secret)
}

fn equal_in_constant_time(a: &[u8; 16], b: &[u8; 16]) -> bool {
    let difference = a.iter().zip(b).fold(0u8, |sum, (x, y)| sum | (x ^ y));
    std::hint::black_box(difference) == 0
}

impl TokenStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Issues `count` fresh tokens that expire at `now + ttl`.
    ///
    /// # Errors
    /// [`TokenError`]; nothing is issued then.
    pub fn issue(&self, count: usize, now: Instant, ttl: Duration) -> Result<Vec<[u8; 32]>, TokenError> {
        if count > TOKENS_PER_ISSUE_MAX {
            return Err(TokenError::TooMany);
        }
        let mut tokens = vec![[0; 32]; count];
        for token in &mut tokens {
            getrandom::fill(token).map_err(|_| TokenError::Randomness)?;
        }
        let mut waiting = self.waiting.lock();
        if waiting.len() + count > TOKENS_MAX {
            waiting.retain(|_, entry| entry.expires > now);
            if waiting.len() + count > TOKENS_MAX {
                return Err(TokenError::Full);
            }
        }
        for token in &tokens {
            let (name, secret) = halves(token);
            waiting.insert(name, Waiting { secret, expires: now + ttl });
        }
        Ok(tokens)
    }

    /// Accepts a token once.
    ///
    /// # Errors
    /// [`TokenRefused`]. A wrong second half leaves the token in place: whoever guesses cannot void it.
    pub fn redeem(&self, token: &[u8; 32], now: Instant) -> Result<(), TokenRefused> {
        let (name, secret) = halves(token);
        let mut waiting = self.waiting.lock();
        let (known, expires) = match waiting.get(&name) {
            Some(entry) => (equal_in_constant_time(&entry.secret, &secret), entry.expires),
            None => (false, now),
        };
        if !known {
            return Err(TokenRefused::Unknown);
        }
        waiting.remove(&name);
        if expires > now {
            Ok(())
        } else {
            Err(TokenRefused::Expired)
        }
    }

    /// Tokens that wait, expired ones included until they are swept.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting.lock().len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TTL: Duration = Duration::from_secs(30);

    #[test]
    fn a_token_is_good_once_and_for_its_time() {
        let store = TokenStore::new();
        let now = Instant::now();
        let tokens = store.issue(3, now, TTL).unwrap();
        assert_eq!(store.waiting(), 3);
        assert_eq!(store.redeem(&tokens[0], now), Ok(()));
        assert_eq!(store.redeem(&tokens[0], now), Err(TokenRefused::Unknown));
        assert_eq!(store.redeem(&tokens[1], now + TTL), Err(TokenRefused::Expired));
        assert_eq!(store.redeem(&[0; 32], now), Err(TokenRefused::Unknown));
        let mut forged = tokens[2];
        forged[31] ^= 1;
        assert_eq!(store.redeem(&forged, now), Err(TokenRefused::Unknown));
        assert_eq!(store.redeem(&tokens[2], now + TTL / 2), Ok(()));
        assert_eq!(store.waiting(), 0);
    }

    #[test]
    fn the_store_is_bounded_and_sweeps_expired_tokens() {
        let store = TokenStore::new();
        let now = Instant::now();
        assert_eq!(store.issue(TOKENS_PER_ISSUE_MAX + 1, now, TTL), Err(TokenError::TooMany));
        for _ in 0..TOKENS_MAX / TOKENS_PER_ISSUE_MAX {
            store.issue(TOKENS_PER_ISSUE_MAX, now, TTL).unwrap();
        }
        assert_eq!(store.issue(1, now, TTL), Err(TokenError::Full));
        assert_eq!(store.issue(1, now + TTL, TTL).unwrap().len(), 1);
        assert_eq!(store.waiting(), 1);
    }
}
