//! Goal: every message survives the wire, and no bytes whatsoever do harm. Method: one value of each body, round trips,
//! targeted damage, then arbitrary and mutated frames through the fuzz bodies.

use proptest::prelude::*;

use super::*;
use crate::limits::{
    ADDRESSES_MAX, ADDRESS_BYTES_MAX, LOOKUP_KEYS_MAX, NAME_BYTES_MAX, PUBLISH_OPS_MAX, TOUCH_ENTRIES_MAX,
};
use crate::load::{MissReason, Replica};
use crate::owner::SlabRecord;
use crate::{Fingerprint, Generation, Incarnation, LayoutId, NsEpoch, RankId, SlotId};

fn incarnation(value: u64) -> Incarnation {
    Incarnation::new(value).unwrap()
}

fn name(text: &str) -> Name<'_> {
    Name::new(text).unwrap()
}

fn address(text: &str) -> Address<'_> {
    Address::new(text).unwrap()
}

fn member() -> Member {
    Member { rank: RankId(7), incarnation: incarnation(u64::MAX) }
}

fn advertised() -> Advertised<'static> {
    Advertised {
        control: AddressList::new(vec![address("10.0.0.1:7700"), address("[::1]:7700")]).unwrap(),
        tcp: AddressList::new(vec![address("10.0.0.1:7701")]).unwrap(),
        unix: AddressList::new(vec![address("/run/kvfabric/r0.sock")]).unwrap(),
        nics: AddressList::default(),
    }
}

fn query(keys: u64) -> Query<'static> {
    Query {
        ns: NsNumber(3),
        asker: EngineKey::of("engine-0"),
        deadline_us: 1000,
        keys: (0..keys).map(|key| Fingerprint([key, key + 1])).collect(),
    }
}

fn op(index: u32) -> PublishOp {
    PublishOp {
        present: index % 3 != 0,
        tier: 1,
        slot: SlotId(index),
        ns: NsNumber(9),
        ns_epoch: NsEpoch(2),
        fingerprint: Fingerprint([u64::from(index), 5]),
        generation: Generation(u64::from(index) + 1),
    }
}

fn slab(index: u32) -> SlabRecord {
    SlabRecord {
        layout: LayoutId(1 << 100 | u128::from(index)),
        group_id: 2,
        object_bytes: 1 << 20,
        first_slot: SlotId(index * 64),
        slots: 64,
        base_offset: u64::from(index) << 26,
    }
}

fn requests() -> Vec<Request<'static>> {
    vec![
        Request::Join(Join {
            cluster: name("c"),
            name: name("rank-0"),
            engine: name("engine-0"),
            incarnation: incarnation(5),
            advertised: advertised(),
        }),
        Request::Leave(Leave { member: member() }),
        Request::Attach(Attach { member: member(), liveness_token: 99 }),
        Request::Ping(Ping { load: 200 }),
        Request::OpenNs(OpenNs { name: NsName([7; 16]), known_epoch: NsEpoch(4) }),
        Request::Publish(Publish {
            member: member(),
            seq_no: 12,
            first: true,
            last: false,
            load: 3,
            ops: (0..100).map(op).collect(),
        }),
        Request::Lookup(Lookup(query(77))),
        Request::Locate(Locate(query(3))),
        Request::MissReports(MissReports {
            asker: EngineKey(1),
            reports: [
                MissReason::Stale,
                MissReason::TagMismatch,
                MissReason::ChecksumMismatch,
                MissReason::Unreachable,
            ]
            .into_iter()
            .map(|reason| MissRecord {
                fingerprint: Fingerprint([1, 2]),
                generation: Generation(3),
                member: member(),
                reason,
            })
            .collect(),
        }),
        Request::Clear(Clear { ns: NsName([1; 16]) }),
        Request::ClearRank(ClearRank { clear: 3, ns: NsName([1; 16]), epoch: NsEpoch(9) }),
        Request::Who(Who { member: member() }),
        Request::GetStats(GetStats),
        Request::Hello(Hello {
            cluster: name("c"),
            name: name("rank-1"),
            incarnation: incarnation(8),
            wanted: incarnation(9),
            tcp_tokens_wanted: 4,
        }),
        Request::Slabs(Slabs {
            incarnation: incarnation(8),
            added: (0..3).map(slab).collect(),
            retired: (5..6).map(slab).collect(),
        }),
        Request::Touch(Touch {
            incarnation: incarnation(8),
            entries: (0..9).map(|slot| (SlotId(slot), Generation(4))).collect(),
        }),
    ]
}

fn located() -> LocateReply<'static> {
    let mut reply = LocateReply::with_capacity(3);
    let first = reply.push_rank(RankRecord { member: member(), load: 9 });
    let second = reply
        .push_rank(RankRecord { member: Member { rank: RankId(8), incarnation: incarnation(2) }, load: 0 });
    let record = |rank_index| ReplicaRecord {
        rank_index,
        tier: 0,
        slot: SlotId(u32::from(rank_index)),
        generation: Generation(6),
    };
    reply.push_key(&[record(first), record(second)]);
    reply.push_key(&[]);
    reply.push_key(&[record(second)]);
    reply
}

fn replies() -> Vec<Reply<'static>> {
    let mut hits = Bitmap::zeros(13);
    hits.set(0);
    hits.set(12);
    vec![
        Reply::Refused(Refusal::Overloaded),
        Reply::Joined(JoinReply::Joined(Joined { rank: RankId(3), session: 4, liveness_token: 5 })),
        Reply::Joined(JoinReply::NameInUse),
        Reply::Joined(JoinReply::Closed),
        Reply::Joined(JoinReply::ClusterMismatch),
        Reply::Joined(JoinReply::Full),
        Reply::Done(Done),
        Reply::Ns(NsReply::Opened { number: NsNumber(4), epoch: NsEpoch(5) }),
        Reply::Ns(NsReply::Full),
        Reply::Publish(PublishReply::Applied {
            seq_no: 6,
            refused: 1,
            raised: [RaisedEpoch { ns: NsNumber(1), epoch: NsEpoch(2) }].into_iter().collect(),
        }),
        Reply::Publish(PublishReply::Gap { expected: 9 }),
        Reply::Lookup(LookupReply { hits }),
        Reply::Locate(located()),
        Reply::Clear(ClearReply { complete: true }),
        Reply::ClearAck(ClearAck { clear: 7, done: false }),
        Reply::Who(WhoReply::Known(RankInfo {
            name: name("rank-0"),
            engine: name("engine-0"),
            advertised: advertised(),
            live: true,
        })),
        Reply::Who(WhoReply::Unknown),
        Reply::Stats(Stats { keys: 5, ..Stats::default() }),
        Reply::Hello(HelloReply::Ack(HelloAck {
            name: name("rank-1"),
            incarnation: incarnation(9),
            unix: Some(UnixOffer { path: address("/tmp/x") }),
            tcp: Some(address("h:1")),
            tcp_tokens: [Token([1; 32]), Token([2; 32])].into_iter().collect(),
            slabs: (0..4).map(slab).collect(),
        })),
        Reply::Hello(HelloReply::WrongIncarnation { found: incarnation(1) }),
        Reply::Hello(HelloReply::ClusterMismatch),
        Reply::Hello(HelloReply::Busy),
    ]
}

fn frame_of_request(request: &Request<'_>) -> Vec<u8> {
    let mut frame = Vec::new();
    encode_request(request, &mut frame).unwrap();
    frame
}

fn frame_of_reply(reply: &Reply<'_>) -> Vec<u8> {
    let mut frame = Vec::new();
    encode_reply(reply, &mut frame).unwrap();
    frame
}

#[test]
fn every_request_survives_the_wire() {
    for request in requests() {
        let frame = frame_of_request(&request);
        assert_eq!(decode_request(&frame).as_ref(), Ok(&request), "{}", request.name());
        assert_eq!(decode_reply(&frame), Err(DecodeError::Kind { kind: request.kind() }));
        fuzz_request(&frame);
    }
}

#[test]
fn every_reply_survives_the_wire() {
    for reply in replies() {
        let frame = frame_of_reply(&reply);
        assert_eq!(decode_reply(&frame).as_ref(), Ok(&reply), "{}", reply.name());
        assert_eq!(decode_request(&frame), Err(DecodeError::Kind { kind: reply.kind() }));
        fuzz_reply(&frame);
    }
}

#[test]
fn records_read_back_what_was_written() {
    let Request::Publish(publish) = &requests()[5] else { panic!("the sixth request is a PUBLISH") };
    assert!(publish.ops.iter().eq((0..100).map(op)));
    assert_eq!(publish.ops.get(99), Some(op(99)));
    assert_eq!(publish.ops.get(100), None);
    let slabs: Records<'_, SlabRecord> = (0..4).map(slab).collect();
    assert!(slabs.iter().eq((0..4).map(slab)));
}

#[test]
fn locate_answers_list_the_replicas_of_each_key() {
    let frame = frame_of_reply(&Reply::Locate(located()));
    let Ok(Reply::Locate(reply)) = decode_reply(&frame) else { panic!("not a LOCATE answer") };
    let keys: Vec<Vec<Replica>> = reply.iter().map(|replicas| replicas.to_vec()).collect();
    assert_eq!(keys.iter().map(Vec::len).collect::<Vec<_>>(), [2, 0, 1]);
    assert_eq!(keys[0][0].rank, RankId(7));
    assert_eq!(keys[0][0].load, 9);
    assert_eq!(keys[2][0], keys[0][1]);
    assert_eq!(keys[2][0].incarnation, incarnation(2));
}

#[test]
fn a_lookup_borrows_its_frame() {
    let frame = frame_of_request(&Request::Lookup(Lookup(query(1000))));
    let Ok(Request::Lookup(lookup)) = decode_request(&frame) else { panic!("not a LOOKUP") };
    assert!(frame.as_ptr_range().contains(&lookup.0.keys.bytes().as_ptr()), "the keys were copied");
    let frame = frame_of_reply(&Reply::Lookup(LookupReply { hits: Bitmap::zeros(1000) }));
    let Ok(Reply::Lookup(reply)) = decode_reply(&frame) else { panic!("not a LOOKUP answer") };
    assert!(frame.as_ptr_range().contains(&reply.hits.bytes().as_ptr()), "the bits were copied");
}

#[test]
fn the_largest_messages_fit_a_frame() {
    let keys = u64::try_from(LOOKUP_KEYS_MAX).unwrap();
    frame_of_request(&Request::Lookup(Lookup(query(keys))));
    let ops = (0..u32::try_from(PUBLISH_OPS_MAX).unwrap()).map(op).collect();
    let publish = Publish { member: member(), seq_no: 1, first: true, last: true, load: 0, ops };
    frame_of_request(&Request::Publish(publish));
    let mut reply = LocateReply::with_capacity(LOOKUP_KEYS_MAX);
    for rank in 0..u32::try_from(2 * RANKS_MAX).unwrap() {
        let member = Member { rank: RankId(rank), incarnation: incarnation(u64::MAX) };
        reply.push_rank(RankRecord { member, load: 255 });
    }
    let record = ReplicaRecord { rank_index: 5, tier: 0, slot: SlotId(1), generation: Generation(u64::MAX) };
    for _ in 0..LOOKUP_KEYS_MAX {
        reply.push_key(&[record; REPLICAS_PER_MESSAGE_MAX / LOOKUP_KEYS_MAX]);
    }
    let frame = frame_of_reply(&Reply::Locate(reply));
    assert!(decode_reply(&frame).is_ok());
}

#[test]
fn more_records_than_allowed_are_refused_on_both_sides() {
    let entries: Records<'_, (SlotId, Generation)> =
        (0..=TOUCH_ENTRIES_MAX).map(|_| (SlotId(0), Generation(1))).collect();
    let touch = Request::Touch(Touch { incarnation: incarnation(1), entries: entries.clone() });
    let mut frame = vec![42];
    assert_eq!(encode_request(&touch, &mut frame), Err(EncodeError));
    assert_eq!(frame, [42], "a refused message must leave the buffer as it was");
    assert_eq!(
        Records::<(SlotId, Generation)>::from_bytes(entries.bytes()).unwrap_err(),
        RecordsError::Count
    );
    let mut body = postcard::to_stdvec(&1u64).unwrap();
    body.extend(postcard::to_stdvec(&(entries.bytes().len() as u64)).unwrap());
    body.extend_from_slice(entries.bytes());
    let mut frame = vec![1, 0, 16];
    frame.extend(body);
    assert_eq!(decode_request(&frame), Err(DecodeError::Body));
}

#[test]
fn keys_must_be_a_multiple_of_sixteen_bytes() {
    let mut frame = frame_of_request(&Request::Lookup(Lookup(query(1))));
    let length = frame.len() - 17;
    assert_eq!(frame[length], 16);
    frame[length] = 15;
    frame.pop();
    assert_eq!(decode_request(&frame), Err(DecodeError::Body));
}

#[test]
fn names_and_addresses_are_bounded() {
    assert!(Name::new("").is_none());
    assert!(Name::new("x".repeat(NAME_BYTES_MAX)).is_some());
    assert!(Name::new("x".repeat(NAME_BYTES_MAX + 1)).is_none());
    assert!(Address::new("x".repeat(ADDRESS_BYTES_MAX + 1)).is_none());
    assert!(AddressList::new(vec![address("a"); ADDRESSES_MAX + 1]).is_none());
    // The same on decode: a name of 256 bytes, a list of 65 addresses.
    let long = postcard::to_stdvec(&"x".repeat(NAME_BYTES_MAX + 1)).unwrap();
    assert!(postcard::from_bytes::<Name<'_>>(&long).is_err());
    let many = postcard::to_stdvec(&vec!["a"; ADDRESSES_MAX + 1]).unwrap();
    assert!(postcard::from_bytes::<AddressList<'_>>(&many).is_err());
    let some = postcard::to_stdvec(&vec!["a"; ADDRESSES_MAX]).unwrap();
    assert!(postcard::from_bytes::<AddressList<'_>>(&some).is_ok());
}

#[test]
fn a_body_ends_where_its_frame_ends() {
    for request in requests() {
        let mut frame = frame_of_request(&request);
        frame.push(0);
        assert_eq!(
            decode_request(&frame),
            Err(DecodeError::Trailing { rest_bytes: 1 }),
            "{}",
            request.name()
        );
    }
}

#[test]
fn every_truncation_is_refused() {
    for request in requests() {
        let frame = frame_of_request(&request);
        for length in 0..frame.len() {
            assert!(decode_request(&frame[..length]).is_err(), "{} cut to {length}", request.name());
        }
    }
}

#[test]
fn claims_of_more_than_there_is_are_refused() {
    // Element counts of 2^20 and 2^60 without payload, in each place that holds a length.
    for claim in [1u64 << 20, 1 << 60] {
        let claim = postcard::to_stdvec(&claim).unwrap();
        for prefix in [&[][..], &[1, 1], &[1, 1, 1, 1], &[7, 1, 1, 0, 0, 0]] {
            for kind in 0..=255 {
                let mut frame = vec![1, 0, kind];
                frame.extend_from_slice(prefix);
                frame.extend_from_slice(&claim);
                fuzz_request(&frame);
                fuzz_reply(&frame);
                let long = matches!(decode_request(&frame), Ok(request) if !matches!(
                    request, Request::Ping(_) | Request::Leave(_) | Request::Attach(_) | Request::Who(_)
                ));
                assert!(!long, "kind {kind} believed a claim");
            }
        }
    }
}

#[test]
fn another_version_is_refused_and_its_refusal_understood() {
    let mut frame = frame_of_request(&Request::GetStats(GetStats));
    frame[..2].copy_from_slice(&2u16.to_le_bytes());
    let error = decode_request(&frame).unwrap_err();
    assert_eq!(error, DecodeError::Version { theirs: 2 });
    assert_eq!(error.refusal(), Refusal::Version { ours: 1 });
    let mut frame = frame_of_reply(&Reply::Refused(Refusal::Version { ours: 2 }));
    frame[..2].copy_from_slice(&2u16.to_le_bytes());
    assert_eq!(decode_reply(&frame), Ok(Reply::Refused(Refusal::Version { ours: 2 })));
    let mut frame = frame_of_reply(&Reply::Done(Done));
    frame[..2].copy_from_slice(&2u16.to_le_bytes());
    assert_eq!(decode_reply(&frame), Err(DecodeError::Version { theirs: 2 }));
}

#[test]
fn a_frame_that_is_too_long_or_too_short_is_not_looked_at() {
    assert_eq!(decode_request(&[1, 0]), Err(DecodeError::TooShort { length_bytes: 2 }));
    let length_bytes = FRAME_BYTES_MAX + 1;
    assert_eq!(decode_request(&vec![0; length_bytes]), Err(DecodeError::TooLong { length_bytes }));
}

#[test]
fn bitmaps_hold_one_bit_a_key_and_nothing_else() {
    let mut bits = Bitmap::zeros(10);
    bits.set(3);
    bits.set(9);
    bits.set(10);
    assert_eq!(bits.ones(), 2);
    assert_eq!(bits.iter().collect::<Vec<_>>()[3..], [true, false, false, false, false, false, true]);
    // A set bit beyond the end, a byte too few.
    for body in [&[10u8, 2, 0, 4][..], &[10, 1, 0]] {
        assert!(postcard::from_bytes::<Bitmap<'_>>(body).is_err());
    }
}

#[test]
fn counts_and_replicas_of_a_locate_answer_must_agree() {
    // Counts say two, one replica is there; a replica of a rank that is not there; five replicas of one key.
    let replica = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let body = |counts: &[u8], replicas: usize| {
        let mut body = vec![u8::try_from(counts.len()).unwrap()];
        body.extend_from_slice(counts);
        body.push(0);
        body.extend(postcard::to_stdvec(&(replicas * 16)).unwrap());
        body.extend(replica.repeat(replicas));
        body
    };
    for body in [body(&[2], 1), body(&[1], 1), body(&[5], 5)] {
        assert!(postcard::from_bytes::<LocateReply<'_>>(&body).is_err());
    }
    assert!(postcard::from_bytes::<LocateReply<'_>>(&body(&[0, 0], 0)).is_ok());
}

#[test]
fn the_same_engine_has_the_same_key() {
    assert_eq!(EngineKey::of("a"), EngineKey::of("a"));
    assert_ne!(EngineKey::of("a"), EngineKey::of("b"));
    assert_ne!(EngineKey::of(""), EngineKey::ANONYMOUS);
}

/// Frames of all kinds, as the base of mutations.
fn frames() -> Vec<Vec<u8>> {
    requests().iter().map(frame_of_request).chain(replies().iter().map(frame_of_reply)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_do_no_harm(kind in any::<u8>(), body in prop::collection::vec(any::<u8>(), 0..600)) {
        let mut frame = vec![1, 0, kind & 0x8f];
        frame.extend(body);
        fuzz_request(&frame);
        fuzz_reply(&frame);
        fuzz_request(&frame[2..]);
    }

    #[test]
    fn mutated_messages_do_no_harm(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let frames = frames();
        let mut frame = which.get(&frames).clone();
        for (at, value) in changes {
            let at = at.index(frame.len());
            frame[at] = value;
        }
        if let Some(cut) = cut {
            frame.truncate(cut.index(frame.len()));
        }
        fuzz_request(&frame);
        fuzz_reply(&frame);
    }
}

#[test]
fn every_single_byte_change_does_no_harm() {
    for frame in frames() {
        for at in 0..frame.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff, frame[at].wrapping_add(1)] {
                let mut changed = frame.clone();
                changed[at] = value;
                fuzz_request(&changed);
                fuzz_reply(&changed);
            }
        }
    }
}
