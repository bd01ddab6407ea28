//! PUBLISH, LOOKUP, LOCATE, misses (design 1.6, 1.7, 1.9).

use super::*;
use crate::limits::REPLICAS_PER_ANSWER_MAX;

#[test]
fn a_put_wins_only_with_a_larger_generation_of_the_same_rank() {
    let mut d = Directory::new();
    let mut peer = d.announce(at_ms(0), "a", 1, &[(1, 5)]);
    let (ns, epoch) = d.open(&peer, NS, 0);
    for (gen, expected) in [(4, 5), (5, 5), (6, 6)] {
        d.send(&mut peer, false, false, &[put(ns, epoch, 1, gen)]);
        let replicas = d.locate(at_ms(0), 1);
        assert_eq!(replicas.len(), 1);
        assert_eq!(replicas[0].generation, Generation(expected));
    }
    assert_eq!(d.service.stats().puts_stale, 2);
}

#[test]
fn a_removal_needs_the_equal_generation() {
    let mut d = Directory::new();
    let mut peer = d.announce(at_ms(0), "a", 1, &[(1, 5)]);
    d.send(&mut peer, false, false, &[del(1, 4), del(1, 6)]);
    assert_eq!(d.hits(at_ms(0)), [1]);
    d.send(&mut peer, false, false, &[del(1, 5)]);
    assert!(d.hits(at_ms(0)).is_empty());
    assert_eq!((d.service.stats().removes, d.service.stats().removes_stale), (1, 2));
}

#[test]
fn ranks_make_independent_replicas() {
    let mut d = Directory::new();
    let mut a = d.announce(at_ms(0), "a", 1, &[(1, 5)]);
    let b = d.announce(at_ms(0), "b", 2, &[(1, 9)]);
    d.send(&mut a, false, false, &[del(1, 9)]);
    assert_eq!(d.locate(at_ms(0), 1).len(), 2, "a's removal is not b's");
    d.send(&mut a, false, false, &[del(1, 5)]);
    let left = d.locate(at_ms(0), 1);
    assert_eq!(left.len(), 1);
    assert_eq!((left[0].rank, left[0].incarnation), (b.member.rank, b.member.incarnation));
}

#[test]
fn a_duplicate_is_acknowledged_and_not_applied() {
    let mut d = Directory::new();
    let mut peer = d.announce(at_ms(0), "a", 1, &[(1, 5)]);
    let (ns, epoch) = d.open(&peer, NS, 0);
    let cleared = NsEpoch(0);
    d.service.handle_clear(at_ms(0), ClearRequest(1), Clear { ns: OTHER_NS }).unwrap();
    let (other, _) = d.open(&peer, OTHER_NS, 0);
    let ops = [put(ns, epoch, 2, 6), put(other, cleared, 3, 7)];
    let first = d.send(&mut peer, false, false, &ops);
    d.send(&mut peer, false, false, &[del(2, 6)]);
    // Late copies of both: the first would bring key 2 back.
    let late = d.send_as(&peer, peer.seq_no - 1, false, false, &ops).unwrap();
    assert!(matches!(late, PublishReply::Applied { refused: 0, .. }));
    d.send_as(&peer, peer.seq_no, false, false, &[del(2, 6)]).unwrap();
    assert_eq!(d.hits(at_ms(0)), [1]);
    assert!(matches!(first, PublishReply::Applied { ref raised, .. } if raised.len() == 1));
    assert_eq!(d.service.stats().publishes_duplicate, 2);
}

#[test]
fn the_answer_to_the_last_message_is_repeated_in_full() {
    let mut d = Directory::new();
    let mut peer = d.announce(at_ms(0), "a", 1, &[]);
    d.service.handle_clear(at_ms(0), ClearRequest(1), Clear { ns: NS }).unwrap();
    let (ns, _) = d.open(&peer, NS, 0);
    let ops = [put(ns, NsEpoch(0), 1, 1)];
    let first = d.send(&mut peer, false, false, &ops);
    assert_eq!(d.send_as(&peer, peer.seq_no, false, false, &ops).unwrap(), first);
}

#[test]
fn a_gap_asks_for_everything_and_hides_nothing_meanwhile() {
    let mut d = Directory::new();
    let mut peer = d.announce(at_ms(0), "a", 1, &[(1, 1), (2, 2)]);
    let (ns, epoch) = d.open(&peer, NS, 0);
    let gap = d.send_as(&peer, 3, false, false, &[del(2, 2)]).unwrap();
    assert_eq!(gap, PublishReply::Gap { expected: 2 });
    assert_eq!(d.hits(at_ms(0)), [1, 2], "a reordered message is not applied");
    // Everything, in two messages. Until the second has come the old entries are shown.
    peer.seq_no = 5;
    d.send(&mut peer, true, false, &[put(ns, epoch, 3, 3)]);
    assert_eq!(d.hits(at_ms(0)), [1, 2, 3]);
    d.send(&mut peer, false, true, &[put(ns, epoch, 1, 1)]);
    assert_eq!(d.hits(at_ms(0)), [1, 3]);
    assert_eq!(d.locate(at_ms(0), 1).len(), 1, "announced again, not twice");
}

#[test]
fn a_removal_during_an_announcement_reaches_what_was_announced_before() {
    let mut d = Directory::new();
    let mut peer = d.announce(at_ms(0), "a", 1, &[(1, 1), (2, 2)]);
    let (ns, epoch) = d.open(&peer, NS, 0);
    d.send(&mut peer, true, false, &[put(ns, epoch, 1, 1)]);
    d.send(&mut peer, false, false, &[del(1, 1), del(2, 2)]);
    assert!(d.hits(at_ms(0)).is_empty());
}

#[test]
fn an_interrupted_announcement_may_begin_anew() {
    let mut d = Directory::new();
    let mut peer = d.announce(at_ms(0), "a", 1, &[(1, 1), (2, 2), (3, 3)]);
    let (ns, epoch) = d.open(&peer, NS, 0);
    d.send(&mut peer, true, false, &[put(ns, epoch, 1, 1)]);
    d.send(&mut peer, true, false, &[put(ns, epoch, 2, 2)]);
    assert_eq!(d.hits(at_ms(0)), [1, 2], "what the latest two announcements said");
    d.send(&mut peer, false, true, &[put(ns, epoch, 4, 4)]);
    assert_eq!(d.hits(at_ms(0)), [2, 4]);
    d.run_until(at_ms(100));
    assert_eq!(d.service.stats().replicas, 2);
}

#[test]
fn the_first_message_after_a_join_must_begin_an_announcement() {
    let mut d = Directory::new();
    let peer = d.join(at_ms(0), "a", 1);
    let reply = d.send_as(&peer, 1, false, false, &[]).unwrap();
    assert_eq!(reply, PublishReply::Gap { expected: 0 });
}

#[test]
fn a_late_message_of_an_earlier_connection_is_not_taken_for_a_new_one() {
    let mut d = Directory::new();
    let mut peer = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let (ns, epoch) = d.open(&peer, NS, 0);
    d.send(&mut peer, false, false, &[put(ns, epoch, 2, 2)]);
    d.service.handle_connection_closed(at_ms(1), peer.control);
    let mut again = d.join(at_ms(2), "a", 1);
    again.seq_no = peer.seq_no;
    d.send(&mut again, true, true, &[put(ns, epoch, 1, 1)]);
    // Message 2 of the first connection again: key 2 is not offered any more.
    d.send_as(&again, 2, false, false, &[put(ns, epoch, 2, 2)]).unwrap();
    assert_eq!(d.hits(at_ms(2)), [1]);
}

#[test]
fn a_silent_rank_is_not_displaced_but_a_lost_one_is() {
    let mut d = Directory::new();
    let a = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let b = d.announce(at_ms(0), "b", 2, &[(1, 1)]);
    d.run_until(at_ms(2500));
    d.announce(at_ms(2500), "c", 3, &[(1, 1)]);
    d.service.handle_ping(at_ms(2500), a.liveness, Ping { load: 0 }).unwrap();
    assert_eq!(d.locate(at_ms(2500), 1).len(), 2, "a is heard again and needs not announce");
    d.service.handle_connection_closed(at_ms(2500), b.liveness);
    d.announce(at_ms(2500), "d", 4, &[(1, 1)]);
    assert_eq!(d.locate(at_ms(2500), 1).len(), 3);
    assert_eq!(d.service.stats().replicas, 3, "d's took the place of b's");
}

#[test]
fn generation_zero_is_never_offered() {
    let mut d = Directory::new();
    d.announce(at_ms(0), "a", 1, &[(1, 0)]);
    assert!(d.hits(at_ms(0)).is_empty());
}

#[test]
fn unknown_namespaces_are_refused() {
    let mut d = Directory::new();
    let mut peer = d.join(at_ms(0), "a", 1);
    let reply = d.send(&mut peer, true, true, &[put(NsNumber(5), NsEpoch(0), 1, 1)]);
    assert!(matches!(reply, PublishReply::Applied { refused: 1, .. }));
}

#[test]
fn lookups_have_no_side_effects() {
    let mut d = Directory::new();
    d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let before = d.service.stats();
    for _ in 0..3 {
        assert_eq!(d.hits(at_ms(0)), [1]);
        assert_eq!(d.locate(at_ms(0), 1).len(), 1);
    }
    assert_eq!(d.service.stats(), before);
    assert!(d.service.poll_action().is_none());
}

#[test]
fn keys_of_another_namespace_are_misses() {
    let mut d = Directory::new();
    let peer = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let (other, _) = d.open(&peer, OTHER_NS, 0);
    let query = Query { ns: other, ..d.query(EngineKey::ANONYMOUS, &[1]) };
    assert_eq!(d.service.lookup(at_ms(0), &query).unwrap().hits.ones(), 0);
    assert_eq!(d.service.locate(at_ms(0), &query).unwrap().iter().next().unwrap().len(), 0);
}

#[test]
fn locate_gives_at_most_four_replicas_least_loaded_first() {
    let mut d = Directory::new();
    for (process, load) in [(1, 90), (2, 10), (3, 50), (4, 70), (5, 30), (6, 200)] {
        let peer = d.announce(at_ms(0), &format!("r{process}"), process, &[(1, 1)]);
        d.service.handle_ping(at_ms(0), peer.liveness, Ping { load }).unwrap();
    }
    let loads: Vec<u8> = d.locate(at_ms(0), 1).iter().map(|replica| replica.load).collect();
    assert_eq!(loads, [10, 30, 50, 70]);
    assert_eq!(loads.len(), REPLICAS_PER_ANSWER_MAX);
}

#[test]
fn equally_loaded_owners_are_spread_over_askers() {
    let mut d = Directory::new();
    for process in 1..=4 {
        d.announce(at_ms(0), &format!("r{process}"), process, &[(1, 1)]);
    }
    let firsts: BTreeSet<RankId> =
        (1..50).map(|engine| d.locate_for(at_ms(0), EngineKey(engine), 1)[0].rank).collect();
    assert_eq!(firsts.len(), 4, "every owner is first for some asker");
}

#[test]
fn hidden_owners_are_left_out_of_answers() {
    let mut d = Directory::new();
    let a = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let b = d.announce(at_ms(0), "b", 2, &[(1, 1)]);
    d.service.handle_connection_closed(at_ms(1), a.liveness);
    let replicas = d.locate(at_ms(1), 1);
    assert_eq!(replicas.len(), 1);
    assert_eq!(replicas[0].rank, b.member.rank);
}

#[test]
fn very_long_locates_get_fewer_replicas_each() {
    let mut d = Directory::new();
    for process in 1..=4 {
        d.announce(at_ms(0), &format!("r{process}"), process, &[(1, 1)]);
    }
    let keys = vec![1; crate::limits::LOOKUP_KEYS_MAX];
    let query = d.query(EngineKey::ANONYMOUS, &keys);
    let reply = d.service.locate(at_ms(0), &query).unwrap();
    assert_eq!(reply.iter().map(|replicas| replicas.len()).max(), Some(2));
    let mut frame = Vec::new();
    crate::wire::encode_reply(&Reply::Locate(reply), &mut frame).unwrap();
    assert!(crate::wire::decode_reply(&frame).is_ok());
}

#[test]
fn reported_words_remove_the_replica_of_that_generation_only() {
    for reason in [MissReason::Stale, MissReason::TagMismatch, MissReason::ChecksumMismatch] {
        let mut d = Directory::new();
        let a = d.announce(at_ms(0), "a", 1, &[(1, 5)]);
        d.announce(at_ms(0), "b", 2, &[(1, 5)]);
        d.report(at_ms(0), EngineKey(1), &a, 1, 4, reason);
        assert_eq!(d.locate(at_ms(0), 1).len(), 2, "an older report must not remove a newer entry");
        d.report(at_ms(0), EngineKey(1), &a, 1, 5, reason);
        let left = d.locate(at_ms(0), 1);
        assert_eq!(left.len(), 1);
        assert_ne!(left[0].rank, a.member.rank);
        // Another life of the rank is not meant.
        let stranger = Peer { member: Member { incarnation: incarnation(9), ..a.member }, ..a };
        d.report(at_ms(0), EngineKey(1), &stranger, 1, 5, reason);
        assert_eq!(d.locate(at_ms(0), 1).len(), 1);
    }
}

#[test]
fn a_removed_replica_may_be_published_anew() {
    let mut d = Directory::new();
    let mut peer = d.announce(at_ms(0), "a", 1, &[(1, 5)]);
    let (ns, epoch) = d.open(&peer, NS, 0);
    d.report(at_ms(0), EngineKey(1), &peer, 1, 5, MissReason::Stale);
    assert!(d.hits(at_ms(0)).is_empty());
    d.send(&mut peer, false, false, &[put(ns, epoch, 1, 6)]);
    assert_eq!(d.hits(at_ms(0)), [1]);
}

#[test]
fn full_memory_is_said_and_counted() {
    let mut small = config();
    small.table.bytes_max = 2 << 20;
    let mut d = Directory::with(small);
    let mut peer = d.announce(at_ms(0), "a", 1, &[]);
    let (ns, epoch) = d.open(&peer, NS, 0);
    let ops: Vec<_> = (0..30_000).map(|index| put(ns, epoch, index, 1)).collect();
    let mut refused_all = 0;
    for _ in 0..4 {
        let base = peer.seq_no * 100_000;
        let ops: Vec<_> =
            ops.iter().map(|op| PublishOp { fingerprint: key(op.fingerprint.0[0] + base), ..*op }).collect();
        let PublishReply::Applied { refused, .. } = d.send(&mut peer, false, false, &ops) else {
            panic!("not applied")
        };
        refused_all += u64::from(refused);
    }
    let stats = d.service.stats();
    assert!(refused_all > 0 && stats.puts_full == refused_all);
    assert!(stats.table_bytes <= stats.table_bytes_max);
    assert_eq!(stats.puts + refused_all, 120_000);
}

#[test]
fn full_memory_makes_room_from_what_is_dead() {
    let mut small = config();
    small.table.bytes_max = 2 << 20;
    let mut d = Directory::with(small);
    let mut peer = d.announce(at_ms(0), "a", 1, &[]);
    let (ns, epoch) = d.open(&peer, NS, 0);
    let ops: Vec<_> = (0..32_768).map(|index| put(ns, epoch, index, 1)).collect();
    d.send(&mut peer, false, false, &ops);
    assert!(d.service.stats().replicas > 20_000);
    // The rank dies and another one takes over: its entries find room although nothing was swept yet.
    d.service.handle_leave(at_ms(1), peer.control, &Leave { member: peer.member }).unwrap();
    let mut next = d.announce(at_ms(1), "b", 2, &[]);
    let ops: Vec<_> = (0..20_000).map(|index| put(ns, epoch, 1_000_000 + index, 1)).collect();
    let reply = d.send(&mut next, false, false, &ops);
    assert!(matches!(reply, PublishReply::Applied { refused: 0, .. }), "{reply:?}");
}

#[test]
fn requests_are_routed_to_their_rules() {
    let mut d = Directory::new();
    let peer = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let query = d.query(EngineKey::ANONYMOUS, &[1]);
    let mut ask =
        |request: Request<'_>| d.service.handle_request(at_ms(0), peer.control, 1, ClearRequest(1), &request);
    assert!(matches!(ask(Request::Lookup(Lookup(query.clone()))), Some(Reply::Lookup(_))));
    assert!(matches!(ask(Request::Locate(Locate(query))), Some(Reply::Locate(_))));
    assert!(matches!(ask(Request::GetStats(crate::wire::GetStats)), Some(Reply::Stats(_))));
    let hello = crate::wire::Hello {
        cluster: Name::new("c").unwrap(),
        name: Name::new("x").unwrap(),
        incarnation: incarnation(1),
        wanted: incarnation(2),
        tcp_tokens_wanted: 0,
    };
    assert_eq!(ask(Request::Hello(hello)), Some(Reply::Refused(Refusal::Unsupported)));
    assert_eq!(ask(Request::Clear(Clear { ns: NS })), None);
    assert_eq!(ask(Request::Leave(Leave { member: peer.member })), Some(Reply::Done(Done)));
}
