//! Goal: whatever list is built, bytes go where the list says and nowhere else, and no range outside a region gets in.
//! Method: random regions, pieces and cuts against a plain model in vectors.

use proptest::prelude::*;

use super::*;

const CANARY: u8 = 0xc7;

fn bytes(length: usize, seed: u64) -> Vec<u8> {
    (0..length as u64)
        .map(|i| (i.wrapping_add(seed)).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0])
        .collect()
}

fn whole_of(region: &Region) -> Vec<u8> {
    let mut out = vec![0; region.length_bytes()];
    region.read(0, &mut out).expect("in bounds");
    out
}

/// Disjoint pieces in two regions, in random order: (region, offset, length).
fn pieces() -> impl Strategy<Value = Vec<(usize, usize, usize)>> {
    proptest::collection::vec((0usize..2, 0usize..64, 0usize..9000), 1..40).prop_shuffle().prop_map(|raw| {
        let mut next = [0usize; 2];
        raw.into_iter()
            .map(|(region, gap, length)| {
                let offset = next[region] + gap;
                next[region] = offset + length;
                (region, offset, length)
            })
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn objects_come_back_as_they_went_in(pieces in pieces(), rotate in 0usize..40, seed: u64) {
        let mut pieces = pieces;
        let rotate = rotate % pieces.len();
        pieces.rotate_left(rotate);
        let length = |which| pieces.iter().filter(|p| p.0 == which).map(|p| p.1 + p.2).max().unwrap_or(0);
        let regions =
            [Region::allocate(length(0) + 64).expect("region"), Region::allocate(length(1) + 64).expect("region")];
        let mut list = ScatterList::with_capacity(pieces.len());
        for region in &regions {
            region.fill(0, region.length_bytes(), CANARY).expect("in bounds");
        }
        for &(region, offset, length) in &pieces {
            list.push(&regions[region], offset, length).expect("inside");
        }
        let total: usize = pieces.iter().map(|p| p.2).sum();
        prop_assert_eq!(list.total_bytes(), total as u64);
        prop_assert!(!list.overlaps_itself());

        let object = bytes(total, seed);
        list.write_object(&object).expect("same length");
        let mut model = [vec![CANARY; regions[0].length_bytes()], vec![CANARY; regions[1].length_bytes()]];
        let mut at = 0;
        for &(region, offset, length) in &pieces {
            model[region][offset..offset + length].copy_from_slice(&object[at..at + length]);
            at += length;
        }
        prop_assert_eq!(whole_of(&regions[0]), &model[0][..]);
        prop_assert_eq!(whole_of(&regions[1]), &model[1][..]);

        let mut back = vec![0; total];
        list.read_object(&mut back).expect("same length");
        prop_assert_eq!(&back, &object);
        prop_assert_eq!(list.checksum(), crate::checksum(&object));
    }

    #[test]
    fn cursors_split_anywhere(pieces in pieces(), cuts in proptest::collection::vec(1usize..5000, 1..30), hash: bool) {
        let region = Region::allocate(pieces.iter().map(|p| p.1 + p.2).sum::<usize>() + 1).expect("region");
        let mut list = ScatterList::default();
        let mut at = 0;
        for &(_, gap, length) in &pieces {
            // Another use of the numbers: one region, increasing places.
            let gap = gap % 3;
            list.push(&region, at + gap, length).expect("inside");
            at += gap + length;
        }
        let total = usize::try_from(list.total_bytes()).expect("small");
        let object = bytes(total, 5);
        let mut cursor = ScatterCursor::default();
        let mut checksum = hash.then(Checksum::new);
        let (mut done, mut cut) = (0, cuts.iter().cycle());
        while done < total {
            let part = (*cut.next().expect("endless")).min(total - done);
            // SAFETY: `part` bytes of a live vector.
            let copied = unsafe { cursor.scatter(&list, object[done..].as_ptr(), part, checksum.as_mut()) };
            prop_assert_eq!(copied, part);
            done += part;
        }
        if let Some(checksum) = checksum {
            prop_assert_eq!(checksum.finish(), crate::checksum(&object));
        }
        let (mut back, mut cursor, mut done) = (vec![0; total], ScatterCursor::default(), 0);
        while done < total {
            let part = (*cut.next().expect("endless")).min(total - done);
            // SAFETY: `part` bytes of a live vector.
            done += unsafe { cursor.gather(&list, back[done..].as_mut_ptr(), part, None) };
        }
        prop_assert_eq!(&back, &object);
        // SAFETY: a list that has ended touches nothing, so any pointer does.
        prop_assert_eq!(unsafe { cursor.gather(&list, back.as_mut_ptr(), 1, None) }, 0);
    }

    #[test]
    fn parts_are_the_object_cut(pieces in pieces(), from in 0.0f64..1.0, until in 0.0f64..1.0) {
        let region = Region::allocate(pieces.iter().map(|p| p.1 + p.2).sum::<usize>() + 1).expect("region");
        let mut list = ScatterList::default();
        let mut at = 0;
        for &(_, gap, length) in &pieces {
            list.push(&region, at + gap, length).expect("inside");
            at += gap + length;
        }
        let total = usize::try_from(list.total_bytes()).expect("small");
        let object = bytes(total, 9);
        list.write_object(&object).expect("same length");
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
        let place = |share: f64| (total as f64 * share) as usize;
        let (start, end) = (place(from.min(until)), place(from.max(until)));
        let part = list.part(start as u64, (end - start) as u64).expect("inside");
        let mut back = vec![0; end - start];
        part.read_object(&mut back).expect("same length");
        prop_assert_eq!(&back, &object[start..end]);
        prop_assert!(list.part(start as u64, (total - start) as u64 + 1).is_err());
    }

    #[test]
    fn no_range_outside_a_region_gets_in(length in 1usize..10_000, offset: usize, size: usize) {
        let region = Region::allocate(length).expect("region");
        let mut list = ScatterList::default();
        let inside = offset.checked_add(size).is_some_and(|end| end <= length);
        prop_assert_eq!(list.push(&region, offset, size).is_ok(), inside);
        if !inside {
            prop_assert_eq!(list.total_bytes(), 0);
            prop_assert!(list.segments().is_empty());
        }
    }
}

/// Around 2^31 and 2^32, where narrower integers break. The memory is reserved and mostly never touched.
#[test]
fn bounds_hold_around_two_and_four_gib() {
    for limit in [1usize << 31, 1 << 32] {
        for length in [limit - 1, limit, limit + 1] {
            let region = Region::allocate(length).expect("address space");
            let mut list = ScatterList::default();
            assert!(list.push(&region, 0, length + 1).is_err());
            assert!(list.push(&region, length, 1).is_err());
            assert!(list.push(&region, length - 1, 2).is_err());
            assert!(list.push(&region, usize::MAX, 2).is_err());
            assert!(list.push(&region, 1, usize::MAX).is_err());
            list.push(&region, length - 1, 1).expect("the last byte");
            list.push(&region, 0, length - 1).expect("all before it");
            assert_eq!(list.total_bytes(), length as u64);
            assert!(!list.overlaps_itself());
            let tail = list.part(length as u64 - 3, 3).expect("inside");
            tail.write_object(b"abc").expect("three bytes");
            let mut three = [0; 3];
            region.read(length - 4, &mut three).expect("inside");
            assert_eq!(&three, b"abc");
            list.push(&region, 0, 1).expect("inside");
            assert!(list.overlaps_itself());
        }
    }
}

#[test]
fn a_large_region_is_written_past_the_caches_and_gets_the_same_bytes() {
    let region = Region::allocate(STREAMING_REGION_BYTES_MIN).expect("region");
    let mut list = ScatterList::default();
    // Odd places and lengths: heads and tails of the streaming loop.
    for (offset, length) in
        [(4_000_001, 70_003), (1, 4096), (20_000, STREAMING_RANGE_BYTES_MIN - 1), (9_000_000, 64)]
    {
        list.push(&region, offset + 10_000, length).expect("inside");
    }
    assert!(list.streams && !list.overlaps_itself());
    let object = bytes(usize::try_from(list.total_bytes()).expect("small"), 3);
    list.write_object(&object).expect("same length");
    let mut back = vec![0; object.len()];
    list.read_object(&mut back).expect("same length");
    assert!(back == object);
    assert_eq!(list.checksum(), crate::checksum(&object));
}

#[test]
fn adjacent_pieces_merge_and_empty_ones_vanish() {
    let region = Region::allocate(100).expect("region");
    let mut list = ScatterList::default();
    list.push(&region, 10, 5).expect("inside");
    list.push(&region, 15, 0).expect("inside");
    list.push(&region, 15, 5).expect("inside");
    list.push(&region, 30, 1).expect("inside");
    assert_eq!(list.segments().len(), 2);
    assert_eq!((list.total_bytes(), list.regions().len()), (11, 1));
    assert!(list.read_object(&mut [0; 10]).is_err());
    assert!(list.write_object(&[0; 12]).is_err());
    assert!(!ScatterList::whole(&region).overlaps_itself());
}

#[test]
fn a_list_keeps_its_regions() {
    let region = Region::allocate(4096).expect("region");
    let list = ScatterList::whole(&region);
    assert_eq!(region.handle_count(), 2);
    let part = list.part(100, 10).expect("inside");
    assert_eq!(region.handle_count(), 3);
    drop((list, part));
    assert_eq!(region.handle_count(), 1);
}
