//! What validation costs: loads of 64 MiB in objects of 256 KiB, with and without the word, the tag and the judgement.

use std::time::{Duration, Instant};

use anyhow::{bail, ensure, Context as _, Result};
use kvfabric_core::hash::{KeyCoordinates, KeyHash, NamespaceKey};
use kvfabric_core::word::{accept, Expected, Word};
use kvfabric_core::{Generation, Incarnation, LayoutId, Tag};
use kvfabric_memory::limits::COPY_CHUNK_BYTES;
use kvfabric_memory::{OwnerMemory, PoolConfig, Region, ScatterList, Slab};
use serde_json::json;

const OBJECT_BYTES: usize = 256 << 10;
const OBJECTS: u32 = 256;
const RANGE_BYTES: usize = 64 << 10;
const LAYOUT: LayoutId = LayoutId(7);

struct Bed {
    memory: std::sync::Arc<OwnerMemory>,
    keys: Vec<KeyHash>,
    incarnation: Incarnation,
    destinations: Vec<ScatterList>,
}

impl Bed {
    fn new() -> Result<Self> {
        let total = OBJECT_BYTES * OBJECTS as usize;
        let memory = OwnerMemory::create(&PoolConfig::new(total as u64, OBJECTS))?;
        memory.allocate_extent(0, total as u64)?;
        memory.add_slab(Slab {
            layout: LAYOUT.0,
            group_id: 0,
            object_bytes: OBJECT_BYTES as u64,
            first_slot: 0,
            slots: OBJECTS,
            base_offset: 0,
        })?;
        let incarnation = Incarnation::new(5).context("an incarnation")?;
        let ns = NamespaceKey::derive(b"", "bench", b"");
        let source = Region::allocate(OBJECT_BYTES)?;
        let target = Region::allocate(total)?;
        let stop = std::sync::atomic::AtomicBool::new(false);
        let mut keys = Vec::new();
        let mut destinations = Vec::new();
        for slot in 0..OBJECTS {
            let key = ns.hash(KeyCoordinates::default(), &slot.to_le_bytes());
            source.fill(0, OBJECT_BYTES, (slot % 251) as u8)?;
            let generation = u64::from(slot) + 1;
            memory.invalidate(slot, generation)?;
            memory.fill(slot, &ScatterList::whole(&source), false, &stop)?;
            let tag = key.tag(LAYOUT, OBJECT_BYTES as u64, incarnation).0;
            ensure!(
                memory.publish(slot, kvfabric_memory::RawWord { generation, tag, check: 0, reserved: 0 })?,
                "a word was not published"
            );
            keys.push(key);
            // The ranges of an object lie apart, as layers do.
            let mut list = ScatterList::with_capacity(OBJECT_BYTES / RANGE_BYTES);
            for range in 0..OBJECT_BYTES / RANGE_BYTES {
                list.push(&target, (range * OBJECTS as usize + slot as usize) * RANGE_BYTES, RANGE_BYTES)?;
            }
            destinations.push(list);
        }
        Ok(Self { memory, keys, incarnation, destinations })
    }

    /// One load of everything; returns its time.
    fn load(&self, validate: bool) -> Result<Duration> {
        let begun = Instant::now();
        for (slot, (key, destination)) in (0u32..).zip(self.keys.iter().zip(&self.destinations)) {
            let bytes = OBJECT_BYTES as u64;
            let mut read = self.memory.begin_read(slot, bytes, 0, bytes, false)?;
            while !self.memory.view().step(&mut read, destination, COPY_CHUNK_BYTES)? {}
            if validate {
                let (raw, _) = self.memory.view().finish(&read)?;
                let word =
                    Word { generation: Generation(raw.generation), tag: Tag(raw.tag), check: raw.check };
                let expected = Expected {
                    generation: Generation(u64::from(slot) + 1),
                    tag: key.tag(LAYOUT, bytes, self.incarnation),
                };
                accept(expected, word, None)?;
            }
        }
        Ok(begun.elapsed())
    }

    fn verify(&self) -> Result<()> {
        let mut bytes = vec![0; OBJECT_BYTES];
        for (slot, destination) in (0u32..).zip(&self.destinations) {
            destination.read_object(&mut bytes)?;
            if bytes.iter().any(|byte| u32::from(*byte) != slot % 251) {
                bail!("object {slot} has wrong bytes");
            }
        }
        Ok(())
    }
}

/// Interleaves loads with and without validation for `seconds` and prints the medians.
///
/// # Errors
/// If memory cannot be had or a byte is wrong.
pub fn run(seconds: f64, json: bool) -> Result<()> {
    ensure!(seconds > 0.0, "the duration must be positive");
    let bed = Bed::new()?;
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let (mut with, mut without) = (Vec::new(), Vec::new());
    while with.len() < 5 || Instant::now() < until {
        without.push(bed.load(false)?.as_secs_f64());
        with.push(bed.load(true)?.as_secs_f64());
        bed.verify()?;
    }
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let rounds = with.len();
    let (with, without) = (median(&mut with), median(&mut without));
    let per_object_ns = (with - without) / f64::from(OBJECTS) * 1e9;
    // The parts alone, without the noise of 64 MiB of copies: one word fetch, one tag, one judgement.
    let alone_ns = validation_alone(&bed)?;
    let share = alone_ns * f64::from(OBJECTS) / (without * 1e9);
    if json {
        println!(
            "{}",
            json!({"bench": "validation", "op": "load", "load_bytes": OBJECT_BYTES * OBJECTS as usize,
                "object_bytes": OBJECT_BYTES, "rounds": rounds, "ms": with * 1e3, "ms_unvalidated": without * 1e3,
                "ns_per_object": per_object_ns, "ns_per_object_alone": alone_ns, "share": share, "verified": true})
        );
    } else {
        println!(
            "64 MiB in objects of 256 KiB, {rounds} rounds: {:.3} ms with, {:.3} ms without validation",
            with * 1e3,
            without * 1e3
        );
        println!("validation alone: {alone_ns:.0} ns an object, {:.2} % of the load", share * 100.0);
    }
    Ok(())
}

/// Time of word, tag and judgement for one object, nanoseconds.
fn validation_alone(bed: &Bed) -> Result<f64> {
    let rounds = 200;
    let begun = Instant::now();
    for _ in 0..rounds {
        for (slot, key) in (0u32..).zip(&bed.keys) {
            let raw = bed.memory.load_word_after_data(slot).context("a word")?;
            let word = Word { generation: Generation(raw.generation), tag: Tag(raw.tag), check: raw.check };
            let expected = Expected {
                generation: Generation(u64::from(slot) + 1),
                tag: key.tag(LAYOUT, OBJECT_BYTES as u64, bed.incarnation),
            };
            accept(expected, word, None)?;
        }
    }
    Ok(begun.elapsed().as_secs_f64() / f64::from(rounds) / f64::from(OBJECTS) * 1e9)
}
