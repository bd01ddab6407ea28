//! The directory: which rank offers which key (design 1.6, 1.9, 3).
//!
//! Everything here is a hint (D3): a directory that forgets, lies or lags costs hits, never bytes.

pub mod announce;
pub mod limits;
pub mod service;
pub mod table;

pub use announce::{
    Announcer, AnnouncerAction, AnnouncerConfig, AnnouncerStats, ClearId, FlushId, JoinError, LinkId,
    OpenError, RequestTag,
};
pub use service::{ClearRequest, ConnectionId, RankChange, Service, ServiceAction, ServiceConfig};
pub use table::{Table, TableConfig};
