//! Parsers against anything, and against their own encoders.

use proptest::prelude::*;

use crate::wire::*;

proptest! {
    #[test]
    fn anything_is_parsed_without_panic(data in proptest::collection::vec(any::<u8>(), 0..600)) {
        fuzz_request(&data);
        fuzz_reply(&data);
    }

    #[test]
    fn almost_valid_requests_are_parsed_the_same_in_any_pieces(
        cut in 1u8..100,
        counts in proptest::collection::vec(0u16..5, 1..4),
        fields in proptest::collection::vec((any::<u64>(), any::<u32>(), 0u64..1 << 32, 0u64..1 << 32, 0u64..1 << 20), 12),
        flip in proptest::option::of((any::<proptest::sample::Index>(), 0u8..8)),
    ) {
        let mut data = vec![cut];
        let mut fields = fields.into_iter();
        for count in counts {
            data.extend_from_slice(&encode_frame_header(count));
            for (sequence, slot, object_bytes, object_offset, length_bytes) in fields.by_ref().take(count.into()) {
                data.extend_from_slice(
                    &Request { sequence, slot, object_bytes, object_offset, length_bytes }.encode(),
                );
            }
        }
        if let Some((at, bit)) = flip {
            let at = at.index(data.len());
            data[at] ^= 1 << bit;
        }
        fuzz_request(&data);
    }

    #[test]
    fn messages_round_trip(token in any::<[u8; 32]>(), number in 1u64.., slot in any::<u32>(), length in 1u64..1 << 20, offset in 0u64..1 << 20) {
        let hello = Hello { token, incarnation: number };
        prop_assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        for verdict in [Verdict::Ready, Verdict::TokenRefused, Verdict::WrongIncarnation, Verdict::WrongVersion] {
            let welcome = Welcome { verdict, incarnation: number };
            prop_assert_eq!(Welcome::decode(&welcome.encode()), Ok(welcome));
        }
        let request = Request { sequence: number, slot, object_bytes: offset + length, object_offset: offset, length_bytes: length };
        prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
        for (status, length_bytes) in [(Status::Ok, length), (Status::UnknownSlot, 0), (Status::SizeMismatch, 0)] {
            let reply = Reply { sequence: number, status, length_bytes };
            prop_assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
            prop_assert_eq!(reply.check(number, length), Ok(()));
            prop_assert_eq!(reply.check(number - 1, length), Err(WireError::Sequence));
        }
        prop_assert_eq!(Reply { sequence: 0, status: Status::Ok, length_bytes: length }.check(0, length + 1), Err(WireError::Length));
    }

    #[test]
    fn each_flipped_bit_of_a_reserved_field_is_refused(bit in 0usize..32) {
        let request = Request { sequence: 1, slot: 2, object_bytes: 3, object_offset: 0, length_bytes: 3 };
        let mut bytes = request.encode();
        bytes[12 + bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(Request::decode(&bytes), Err(WireError::Reserved));
        let mut bytes = Reply { sequence: 1, status: Status::Ok, length_bytes: 3 }.encode();
        bytes[24 + bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(Reply::decode(&bytes), Err(WireError::Reserved));
    }
}

#[test]
fn ranges_outside_their_object_are_refused() {
    let base = Request { sequence: 0, slot: 0, object_bytes: 10, object_offset: 0, length_bytes: 10 };
    assert!(Request::decode(&base.encode()).is_ok());
    for bad in [
        Request { length_bytes: 0, ..base },
        Request { length_bytes: 11, ..base },
        Request { object_offset: 1, ..base },
        Request { object_offset: u64::MAX, ..base },
        Request { length_bytes: u64::MAX, object_offset: 1, ..base },
        Request { object_bytes: u64::MAX, ..base },
    ] {
        assert_eq!(Request::decode(&bad.encode()), Err(WireError::Range), "{bad:?}");
    }
    for count in [0, 257, u16::MAX] {
        let header = encode_frame_header(count);
        assert_eq!(RequestParser::default().next_request(&mut header.as_slice()), Err(WireError::Count));
    }
}
