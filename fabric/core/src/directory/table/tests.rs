//! Goal: the table is a map from fingerprint to replicas, whatever its size and history. Method: random operations
//! against a plain map, growth and shrinking included, and targeted tests of the limits.

use std::collections::BTreeMap;

use super::index::{Home, Index, IndexFull};
use super::*;

fn table(bytes_max: u64) -> Table {
    Table::new(TableConfig { seed: [0x1234_5678_9abc_def0, 0x0fed_cba9_8765_4321], bytes_max })
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// A small random source with a fixed seed.
struct Random(u64);

impl Random {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0) % below
    }
}

fn key(index: u64) -> Fingerprint {
    Fingerprint([mix(index * 2), mix(index * 2 + 1)])
}

fn place(source: u32, generation: u64) -> Place {
    Place { source, ns: source + 1, slot: SlotId(source * 2), generation: Generation(generation), tier: 3 }
}

fn put(table: &mut Table, index: u64, place: Place) -> Result<PutOutcome, PutRefused> {
    table.put(key(index), place, |source| source == place.source, |_| false)
}

fn bytes(keys: impl IntoIterator<Item = u64>) -> Vec<u8> {
    keys.into_iter().flat_map(|index| key(index).to_bytes()).collect()
}

fn bits(table: &Table, keys: &[u8], is_visible: impl Fn(u32, u32) -> bool) -> Vec<bool> {
    let count = keys.len() / 16;
    let mut bits = vec![0; count.div_ceil(8)];
    table.lookup(keys, &mut bits, is_visible);
    (0..count).map(|i| bits[i / 8] >> (i % 8) & 1 == 1).collect()
}

#[test]
fn random_histories_agree_with_a_map() {
    for (seed, keys) in (0..8u64).zip([50, 3000, 40_000].into_iter().cycle()) {
        let mut random = Random(seed << 32);
        let mut table = table(1 << 30);
        let mut model: BTreeMap<(u64, u32), u64> = BTreeMap::new();
        for round in 0..60_000 {
            let (index, source) = (random.next(keys), u32::try_from(random.next(3)).unwrap());
            // The middle third mostly removes, so that segments shrink too.
            let removes = if (20_000..40_000).contains(&round) { 8 } else { 3 };
            if random.next(10) < removes {
                let generation = match model.get(&(index, source)) {
                    Some(generation) if random.next(8) > 0 => *generation,
                    _ => random.next(100),
                };
                let found = model.get(&(index, source)) == Some(&generation);
                let removed =
                    table.remove(key(index), Generation(generation), |candidate| candidate == source);
                assert_eq!(removed, found, "seed {seed} round {round}");
                if found {
                    model.remove(&(index, source));
                }
            } else {
                let generation = random.next(1000) + 1;
                let outcome = put(&mut table, index, place(source, generation)).unwrap();
                let old = model.get(&(index, source)).copied();
                let expected = match old {
                    None => PutOutcome::Inserted,
                    Some(old) if generation > old => PutOutcome::Updated,
                    Some(_) => PutOutcome::Stale,
                };
                assert_eq!(outcome, expected, "seed {seed} round {round}");
                if outcome != PutOutcome::Stale {
                    model.insert((index, source), generation);
                }
            }
        }
        assert_eq!(table.replicas(), model.len());
        let all = bytes(0..keys);
        let found = bits(&table, &all, |_, _| true);
        let mut located = Vec::new();
        table.locate(&all, |fingerprint, places| {
            let mut places: Vec<Place> = places.to_vec();
            places.sort_by_key(|place| place.source);
            located.push((fingerprint, places));
        });
        for index in 0..keys {
            let expected: Vec<Place> = model
                .range((index, 0)..=(index, u32::MAX))
                .map(|((_, source), generation)| place(*source, *generation))
                .collect();
            let at = usize::try_from(index).unwrap();
            assert_eq!(found[at], !expected.is_empty());
            assert_eq!(located[at], (key(index), expected));
        }
        let distinct = model.keys().map(|(index, _)| index).collect::<std::collections::BTreeSet<_>>().len();
        assert_eq!(table.keys(), distinct);
    }
}

#[test]
fn memory_per_key_and_load_hold_at_every_size() {
    let mut table = table(1 << 30);
    for index in 0..600_000 {
        put(&mut table, index, place(1, index + 1)).unwrap();
        if index > 200_000 && index % 10_000 == 0 {
            let per_key = table.bytes() / index;
            assert!(per_key <= 64, "{per_key} bytes per key at {index} keys");
            assert!(table.load() >= 0.75, "load {} at {index} keys", table.load());
        }
    }
}

#[test]
fn lookup_takes_any_number_of_keys() {
    let mut table = table(1 << 30);
    for index in (0..400).step_by(2) {
        put(&mut table, index, place(1, 1)).unwrap();
    }
    for count in [0, 1, 7, 8, 9, 31, 32, 33, 63, 64, 65, 399] {
        let found = bits(&table, &bytes(0..count), |_, _| true);
        assert!((0..count).zip(found).all(|(index, hit)| hit == (index % 2 == 0)));
    }
}

#[test]
fn a_key_is_a_hit_if_any_replica_is_visible() {
    let mut table = table(1 << 30);
    for source in 0..3 {
        put(&mut table, 7, place(source, 1)).unwrap();
    }
    for wanted in 0..3 {
        assert_eq!(bits(&table, &bytes([7]), |source, ns| source == wanted && ns == source + 1), [true]);
    }
    assert_eq!(bits(&table, &bytes([7]), |source, _| source == 3), [false]);
}

#[test]
fn an_equal_generation_wins_only_when_announced_anew() {
    let mut table = table(1 << 30);
    let same_rank = |source: u32| source == 1 || source == 2;
    put(&mut table, 7, place(1, 5)).unwrap();
    assert_eq!(table.put(key(7), place(1, 5), same_rank, |_| false), Ok(PutOutcome::Stale));
    assert_eq!(table.put(key(7), place(2, 4), same_rank, |_| false), Ok(PutOutcome::Stale));
    assert_eq!(table.put(key(7), place(2, 5), same_rank, |_| false), Ok(PutOutcome::Updated));
    assert_eq!(table.get(key(7)).as_slice(), [place(2, 5)]);
}

#[test]
fn a_crowded_key_takes_another_replica_only_in_place_of_an_invisible_one() {
    let mut table = table(1 << 30);
    for source in 0..u32::try_from(REPLICAS_PER_KEY_MAX).unwrap() {
        put(&mut table, 7, place(source, 1)).unwrap();
    }
    assert_eq!(put(&mut table, 7, place(99, 1)), Err(PutRefused::Crowded));
    let outcome = table.put(key(7), place(99, 1), |source| source == 99, |old| old.source == 3);
    assert_eq!(outcome, Ok(PutOutcome::Inserted));
    let places = table.get(key(7));
    assert_eq!(places.len(), REPLICAS_PER_KEY_MAX);
    assert!(places.contains(&place(99, 1)) && !places.iter().any(|place| place.source == 3));
}

#[test]
fn full_memory_refuses_and_removal_makes_room() {
    let mut table = table(8 << 20);
    let mut index = 0;
    let refused = loop {
        match put(&mut table, index, place(1, 1)) {
            Ok(_) => index += 1,
            Err(refused) => break refused,
        }
    };
    assert_eq!(refused, PutRefused::Memory);
    assert!(table.bytes() <= table.bytes_max());
    assert!(index * 64 > 6 << 20, "only {index} keys fitted");
    assert_eq!(table.get(key(index)).len(), 0, "a refused put must leave nothing behind");
    assert_eq!(table.replicas() as u64, index);
    assert!((0..index).all(|index| table.get(key(index)).len() == 1));
    // Updates need no memory.
    assert_eq!(put(&mut table, 0, place(1, 2)), Ok(PutOutcome::Updated));
    for gone in 0..1000 {
        assert!(table.remove(key(gone), table.get(key(gone))[0].generation, |_| true));
    }
    for index in index..index + 500 {
        put(&mut table, index, place(1, 1)).unwrap();
    }
    assert!(table.bytes() <= table.bytes_max());
}

#[test]
fn the_sweep_removes_what_is_dead_in_bounded_steps() {
    let mut table = table(1 << 30);
    for index in 0..1000 {
        for source in 0..3 {
            put(&mut table, index, place(source, 1)).unwrap();
        }
    }
    let (mut removed, mut steps) = (0, 0);
    loop {
        let (count, done) = table.sweep(100, |place| place.source == 1 || place.source == 2);
        assert!(count <= 100);
        removed += count;
        steps += 1;
        if done {
            break;
        }
    }
    assert_eq!((removed, steps), (2000, 30));
    assert_eq!((table.keys(), table.replicas()), (1000, 1000));
    assert!((0..1000).all(|index| table.get(key(index)).as_slice() == [place(0, 1)]));
    // Everything goes, and the index gives memory back.
    for index in 1000..60_000 {
        put(&mut table, index, place(0, 1)).unwrap();
    }
    let before = table.bytes();
    table.sweep(usize::MAX, |_| true);
    assert_eq!((table.keys(), table.replicas()), (0, 0));
    assert!(table.bytes() < before);
    put(&mut table, 5, place(1, 1)).unwrap();
    assert_eq!(table.get(key(5)).len(), 1);
}

#[test]
fn keys_that_share_all_hash_bits_are_refused_without_harm() {
    let mut index = Index::new();
    let neighbours: Vec<Home> = (1..2000).map(|i| Home::of(mix(i))).collect();
    for (record, home) in (0..).zip(&neighbours) {
        index.insert(*home, record, u64::MAX).unwrap();
    }
    // The first, the last and a middle home of a segment.
    for hash in [0, u64::MAX, u64::MAX / 2] {
        let home = Home::of(hash);
        let mut taken = 0;
        let refused = loop {
            match index.insert(home, 1_000_000 + taken, u64::MAX) {
                Ok(()) => taken += 1,
                Err(refused) => break refused,
            }
            assert!(taken < 100_000, "nothing stopped the flood");
        };
        assert_eq!(refused, IndexFull::Collisions);
        let (mut cursor, mut found) = index.find(home);
        for record in 0..taken {
            assert_eq!(found, 1_000_000 + record, "equal bits keep their order");
            (cursor, found) = index.find_next(home, cursor);
        }
        for _ in 0..taken {
            let (cursor, _) = index.find(home);
            index.remove(home, cursor);
        }
        assert_eq!(index.find(home).1, NONE);
    }
    assert_eq!(index.keys(), neighbours.len());
    for (record, home) in (0..).zip(&neighbours) {
        assert_eq!(index.find(*home).1, record);
    }
}

#[test]
fn another_seed_places_keys_elsewhere() {
    let (one, two) = (table(1 << 20), Table::new(TableConfig { seed: [1, 2], bytes_max: 1 << 20 }));
    let same = (0..1000)
        .filter(|index| format!("{:?}", one.home(key(*index).0)) == format!("{:?}", two.home(key(*index).0)))
        .count();
    assert!(same < 5, "{same} of 1000 keys have the same home under both seeds");
}
