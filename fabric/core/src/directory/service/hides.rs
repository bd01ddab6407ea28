//! Which owners are hidden from which engines (design 1.9: two seconds, doubling to sixty).

use std::collections::BTreeMap;

use crate::directory::limits::HIDES_MAX;
use crate::limits::{HIDE_MAX, HIDE_MIN};
use crate::wire::EngineKey;
use crate::{RankId, Time};

#[derive(Clone, Copy, Debug)]
struct Hide {
    until: Time,
    span: core::time::Duration,
}

impl Hide {
    /// A pair that got on well for as long as it was hidden starts again from the shortest time.
    fn is_forgotten(&self, now: Time) -> bool {
        now >= self.until.after(self.span)
    }
}

/// The bounded table of hidden pairs. A full table hides nothing more: the cost is a failed read.
#[derive(Debug, Default)]
pub(super) struct Hides {
    pairs: BTreeMap<(EngineKey, RankId), Hide>,
    cleaned: Time,
}

impl Hides {
    pub(super) fn len(&self) -> usize {
        self.pairs.len()
    }

    /// The engine could not reach the rank. Reports while the rank is hidden change nothing: they were under way.
    pub(super) fn report(&mut self, now: Time, engine: EngineKey, rank: RankId) {
        if engine == EngineKey::ANONYMOUS {
            return;
        }
        if let Some(hide) = self.pairs.get_mut(&(engine, rank)) {
            if hide.is_forgotten(now) {
                *hide = Hide { until: now.after(HIDE_MIN), span: HIDE_MIN };
            } else if now >= hide.until {
                let span = hide.span.saturating_mul(2).min(HIDE_MAX);
                *hide = Hide { until: now.after(span), span };
            }
            return;
        }
        if self.pairs.len() >= HIDES_MAX {
            // At most once in the shortest time, so that a full table costs little.
            if now.since(self.cleaned) >= HIDE_MIN || self.cleaned == Time::ZERO {
                self.cleaned = now;
                self.pairs.retain(|_, hide| !hide.is_forgotten(now));
            }
            if self.pairs.len() >= HIDES_MAX {
                return;
            }
        }
        self.pairs.insert((engine, rank), Hide { until: now.after(HIDE_MIN), span: HIDE_MIN });
    }

    /// The ranks that are hidden from the engine now.
    pub(super) fn hidden_from(&self, now: Time, engine: EngineKey) -> impl Iterator<Item = RankId> + '_ {
        self.pairs
            .range((engine, RankId(0))..=(engine, RankId(u32::MAX)))
            .filter(move |(_, hide)| now < hide.until)
            .map(|((_, rank), _)| *rank)
    }

    /// The rank is gone for ever.
    pub(super) fn forget(&mut self, rank: RankId) {
        self.pairs.retain(|(_, hidden), _| *hidden != rank);
    }
}
