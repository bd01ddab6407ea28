//! One-sided reads: each packet is fetched at the owner and lands at the reader at instants of its own, and the word is
//! fetched when all of them have landed (rule R2).

use super::memory::SlotMemory;
use super::options::{Mutation, WorldOptions};
use super::random::Random;
use super::world::LifeId;
use crate::load::{LoadId, ReadFailure, ReadId};
use crate::word::Word;
use crate::SlotId;
use core::time::Duration;

/// Names a read of the whole world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FlightId(pub(super) u64);

/// A step of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FlightStep {
    /// The owner's memory is read for a packet.
    Fetch(usize),
    /// A packet arrives in the destination.
    Land(usize),
    /// The owner's word is read.
    Word,
    /// Nothing can touch the destination any more.
    Retire,
}

#[derive(Clone, Debug)]
struct Packet {
    offset: usize,
    length_bytes: usize,
    bytes: Option<Vec<u8>>,
    landed: bool,
}

/// A read in flight.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    pub(super) reader: LifeId,
    pub(super) owner: LifeId,
    pub(super) read: ReadId,
    pub(super) load: LoadId,
    pub(super) block: u32,
    slot: SlotId,
    base: usize,
    packets: Vec<Packet>,
    word: Option<Word>,
    /// Set once the read can only fail; packets under way still land until it retires.
    pub(super) failure: Option<ReadFailure>,
    pub(super) checksum: bool,
}

/// What a step asks the world to do.
#[derive(Clone, Debug, Default)]
pub(super) struct Progress {
    /// Steps to schedule, with their delays.
    pub(super) next: Vec<(Duration, FlightStep)>,
    /// Bytes to put into the destination, at this offset of the object.
    pub(super) landed: Option<(usize, Vec<u8>)>,
    /// The read is over.
    pub(super) retired: Option<Result<Word, ReadFailure>>,
}

/// Where a read goes.
pub(super) struct Target {
    pub(super) reader: LifeId,
    pub(super) owner: LifeId,
    pub(super) read: ReadId,
    pub(super) load: LoadId,
    pub(super) block: u32,
    pub(super) slot: SlotId,
    pub(super) object_bytes: u64,
    pub(super) checksum: bool,
}

impl Flight {
    /// Posts a read against the owner's memory, if the owner is there.
    pub(super) fn post(
        target: &Target,
        memory: Option<&SlotMemory>,
        options: &WorldOptions,
        random: &mut Random,
    ) -> (Self, Progress) {
        let mut flight = Self {
            reader: target.reader,
            owner: target.owner,
            read: target.read,
            load: target.load,
            block: target.block,
            slot: target.slot,
            base: 0,
            packets: Vec::new(),
            word: None,
            failure: None,
            checksum: target.checksum,
        };
        let mut progress = Progress::default();
        let delay = |random: &mut Random| random.delay(options.delay_min, options.delay_max);
        if random.one_in(options.shortage_odds) {
            flight.failure = Some(ReadFailure::LocalShortage);
            progress.next.push((Duration::ZERO, FlightStep::Retire));
            return (flight, progress);
        }
        let Some(memory) = memory else {
            flight.failure = Some(ReadFailure::PeerLost);
            progress.next.push((random.delay(Duration::ZERO, options.error_delay_max), FlightStep::Retire));
            return (flight, progress);
        };
        let extent =
            memory.extent(target.slot).filter(|extent| extent.length_bytes as u64 == target.object_bytes);
        let Some(extent) = extent else {
            flight.failure = Some(ReadFailure::Refused);
            progress.next.push((delay(random), FlightStep::Retire));
            return (flight, progress);
        };
        flight.base = extent.offset;
        let packet_bytes = options.packet_bytes.max(1);
        for offset in (0..extent.length_bytes).step_by(packet_bytes) {
            let length_bytes = packet_bytes.min(extent.length_bytes - offset);
            flight.packets.push(Packet { offset, length_bytes, bytes: None, landed: false });
        }
        if random.one_in(options.stuck_odds) {
            return (flight, progress);
        }
        for index in 0..flight.packets.len() {
            progress.next.push((delay(random), FlightStep::Fetch(index)));
        }
        if options.mutation == Some(Mutation::WordBeforeData) {
            progress.next.push((delay(random), FlightStep::Word));
        }
        (flight, progress)
    }

    /// Carries out a step. `memory` is the owner's, if it lives.
    pub(super) fn step(
        &mut self,
        step: FlightStep,
        memory: Option<&SlotMemory>,
        options: &WorldOptions,
        random: &mut Random,
    ) -> Progress {
        let mut progress = Progress::default();
        let delay = |random: &mut Random| random.delay(options.delay_min, options.delay_max);
        match step {
            FlightStep::Fetch(index) => {
                let Some(packet) = self.packets.get_mut(index) else { return progress };
                let Some(memory) = memory else { return progress };
                let bytes = memory.fetch(self.base + packet.offset, packet.length_bytes);
                packet.bytes = Some(bytes.map_or_else(|| vec![0; packet.length_bytes], <[u8]>::to_vec));
                let again = random.one_in(options.refetch_odds);
                let next = if again { FlightStep::Fetch(index) } else { FlightStep::Land(index) };
                progress.next.push((delay(random), next));
            }
            FlightStep::Land(index) => {
                let Some(packet) = self.packets.get_mut(index) else { return progress };
                let Some(mut bytes) = packet.bytes.take() else { return progress };
                if random.one_in(options.corrupt_odds) {
                    let at = random.index(bytes.len());
                    bytes[at] ^= 1 << random.below(8);
                }
                packet.landed = true;
                progress.landed = Some((packet.offset, bytes));
                if self.failure.is_none() && self.packets.iter().all(|packet| packet.landed) {
                    let early = options.mutation == Some(Mutation::WordBeforeData);
                    match (early, self.word) {
                        (true, Some(_)) => progress.next.push((delay(random), FlightStep::Retire)),
                        (true, None) => {}
                        (false, _) => progress.next.push((delay(random), FlightStep::Word)),
                    }
                }
            }
            FlightStep::Word => {
                let Some(memory) = memory else { return progress };
                if self.failure.is_some() {
                    return progress;
                }
                self.word = Some(memory.word(self.slot));
                if self.packets.iter().all(|packet| packet.landed) {
                    progress.next.push((delay(random), FlightStep::Retire));
                }
            }
            FlightStep::Retire => {
                progress.retired = match (self.failure, self.word) {
                    (Some(failure), _) => Some(Err(failure)),
                    (None, Some(word)) => Some(Ok(word)),
                    (None, None) => None,
                };
            }
        }
        progress
    }

    /// The read can only fail from now on. Packets land until it retires, `within` this time at the latest.
    pub(super) fn fail(&mut self, failure: ReadFailure) {
        self.failure.get_or_insert(failure);
    }
}
