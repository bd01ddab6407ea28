//! Goal: what is written is read back, and nothing else is accepted, panics or allocates on a claim.

use super::*;

fn slab(i: u32) -> Slab {
    Slab {
        layout: u128::from(i) << 64 | 7,
        group_id: i,
        object_bytes: u64::from(i) + 1,
        first_slot: i * 10,
        slots: 10,
        base_offset: u64::from(i) * 4096,
    }
}

fn answers() -> Vec<Answer> {
    vec![
        Answer::Hello { nonce: [9; 16], incarnation: u64::MAX, pool_bytes: 1, words_bytes: 2 },
        Answer::Slabs { version: 3, total: 0, start: 0, slabs: vec![] },
        Answer::Slabs { version: 3, total: 5, start: 3, slabs: vec![slab(3), slab(4)] },
        Answer::Refused(Refusal::Version),
        Answer::Refused(Refusal::User),
        Answer::Refused(Refusal::Busy),
    ]
}

#[test]
fn frames_round_trip() {
    for request in [Request::Hello { nonce: [3; 16] }, Request::Slabs { since: 1 << 40, start: 77 }] {
        let frame = request.encode();
        assert!(frame.len() <= REQUEST_BYTES_MAX);
        assert_eq!(Request::decode(&frame), Ok(request));
    }
    for answer in answers() {
        assert_eq!(Answer::decode(&answer.encode()), Ok(answer));
    }
    let slabs: Vec<Slab> = (0..u32::try_from(SLABS_PER_FRAME_MAX).expect("small")).map(slab).collect();
    let most = Answer::Slabs { version: 1, total: 10_000, start: 5, slabs };
    assert!(most.encode().len() <= crate::limits::FRAME_BYTES_MAX);
    assert_eq!(Answer::decode(&most.encode()), Ok(most));
}

#[test]
fn truncated_and_extended_frames_are_refused() {
    for answer in answers() {
        let mut frame = answer.encode();
        for cut in 0..frame.len() {
            assert!(Answer::decode(&frame[..cut]).is_err(), "{answer:?} cut at {cut}");
        }
        frame.push(0);
        assert!(Answer::decode(&frame).is_err());
    }
    let mut frame = Request::Hello { nonce: [0; 16] }.encode();
    for cut in 0..frame.len() {
        assert!(Request::decode(&frame[..cut]).is_err());
    }
    frame.push(0);
    assert_eq!(Request::decode(&frame), Err(FrameError::Length));
}

#[test]
fn claims_must_hold() {
    let count_at = SLABS_HEADER_BYTES - 4;
    let mut frame = Answer::Slabs { version: 3, total: u32::MAX, start: 0, slabs: vec![slab(0)] }.encode();
    frame[count_at..count_at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(Answer::decode(&frame), Err(FrameError::Length));
    frame[count_at..count_at + 4].copy_from_slice(&2u32.to_le_bytes());
    assert_eq!(Answer::decode(&frame), Err(FrameError::Length));
    let over = Answer::Slabs { version: 3, total: 1, start: 1, slabs: vec![slab(0)] }.encode();
    assert_eq!(Answer::decode(&over), Err(FrameError::Count));
    let wrap = Answer::Slabs { version: 3, total: u32::MAX, start: u32::MAX, slabs: vec![slab(0)] }.encode();
    assert_eq!(Answer::decode(&wrap), Err(FrameError::Count));
}

#[test]
fn every_changed_byte_is_an_error_or_another_frame() {
    for answer in answers() {
        let frame = answer.encode();
        for at in 0..frame.len() {
            for bit in 0..8 {
                let mut changed = frame.clone();
                changed[at] ^= 1 << bit;
                if let Ok(other) = Answer::decode(&changed) {
                    assert_ne!(other, answer, "byte {at} of {answer:?} is not read");
                }
            }
        }
    }
    let mut old = Request::Hello { nonce: [0; 16] }.encode();
    old[4] = 9;
    assert_eq!(Request::decode(&old), Err(FrameError::Version(9)));
    assert_eq!(Request::decode(b"GET / HTTP/1.1\r\n\r\n"), Err(FrameError::Magic));
}

proptest::proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(data in proptest::collection::vec(proptest::num::u8::ANY, 0..600)) {
        fuzz_request(&data);
        fuzz_answer(&data);
    }

    #[test]
    fn mutated_frames_never_panic(
        which in 0usize..16,
        at in 0usize..4096,
        value in proptest::num::u8::ANY,
        cut in 0usize..64,
    ) {
        let answers = answers();
        let mut frame = answers[which % answers.len()].encode();
        let length = frame.len();
        frame[at % length] = value;
        frame.truncate(length - cut.min(length - 1));
        fuzz_answer(&frame);
        fuzz_request(&frame);
    }
}
