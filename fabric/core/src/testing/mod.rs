//! A cluster in one thread under virtual time: ranks, a directory, a network and one-sided reads, all from one seed.
//!
//! [`World`] drives the same [`Rank`](crate::rank::Rank) and directory code as production does. A rank's memory is
//! plain bytes; a read fetches its packets, fetches the word and lands at separate, randomly delayed instants; control
//! messages are lost, doubled, delayed and reordered. [`World`] checks after every event what design 7 promises: every
//! delivered byte is of one single put of the key, nothing changes in a destination after its block ended, and every
//! load ends in time. A failing run is replayed from its seed.

mod check;
mod control;
mod events;
mod fill;
mod memory;
mod options;
mod payload;
mod provider;
mod random;
mod reads;
mod world;

pub use check::checksum;
pub use control::NAMESPACE;
pub use events::EventQueue;
pub use memory::{Extent, SlotMemory};
pub use options::{Mutation, WorldOptions};
pub use payload::{identify, payload, Stamp, Torn, PAYLOAD_BYTES_MIN};
pub use random::Random;
pub use world::{LifeId, Outcome, World, LAYOUT};
