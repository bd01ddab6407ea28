//! The directory: which rank offers which key (design 1.6, 1.9, 3).
//!
//! Everything here is a hint (D3): a directory that forgets, lies or lags costs hits, never bytes.

pub mod table;
