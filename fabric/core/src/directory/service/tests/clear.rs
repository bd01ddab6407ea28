//! CLEAR and epochs (design 1.9), across restarts of the directory too.

use super::*;
use crate::directory::limits::{CLEARS_MAX, CLEAR_RESEND};
use crate::limits::CLEAR_TIMEOUT;

fn sent_to(actions: &[ServiceAction]) -> Vec<(RankId, ClearRank)> {
    let sent = actions.iter().filter_map(|action| match action {
        ServiceAction::SendToRank { rank, message, .. } => Some((*rank, *message)),
        _ => None,
    });
    sent.collect()
}

fn done(actions: &[ServiceAction]) -> Vec<bool> {
    let done = actions.iter().filter_map(|action| match action {
        ServiceAction::ClearDone { complete, .. } => Some(*complete),
        _ => None,
    });
    done.collect()
}

fn clear(d: &mut Directory, now: Time) -> Vec<(RankId, ClearRank)> {
    d.take_actions();
    d.service.handle_clear(now, ClearRequest(1), Clear { ns: NS }).unwrap();
    d.drain();
    sent_to(&d.actions)
}

fn ack(d: &mut Directory, rank: RankId, clear: u64) {
    d.service.handle_clear_ack(rank, ClearAck { clear, done: true });
    d.drain();
}

#[test]
fn a_clear_hides_at_once_and_is_true_when_every_rank_has_acknowledged() {
    let mut d = Directory::new();
    let a = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let b = d.announce(at_ms(0), "b", 2, &[(1, 1), (2, 1)]);
    let sent = clear(&mut d, at_ms(1));
    assert_eq!(sent.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [a.member.rank, b.member.rank]);
    assert!(d.hits(at_ms(1)).is_empty(), "before any acknowledgement");
    ack(&mut d, a.member.rank, sent[0].1.clear);
    ack(&mut d, a.member.rank, sent[0].1.clear);
    assert!(done(&d.actions).is_empty());
    ack(&mut d, b.member.rank, sent[0].1.clear);
    assert_eq!(done(&d.take_actions()), [true]);
    d.run_until(at_ms(100));
    assert_eq!(d.service.stats().replicas, 0);
}

#[test]
fn a_clear_without_all_acknowledgements_is_false_after_its_timeout() {
    let mut d = Directory::new();
    let a = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let b = d.announce(at_ms(0), "b", 2, &[(2, 1)]);
    let sent = clear(&mut d, at_ms(0));
    ack(&mut d, a.member.rank, sent[0].1.clear);
    for ms in (0..2000).step_by(500) {
        d.service.handle_ping(at_ms(ms), b.liveness, Ping { load: 0 }).unwrap();
        d.run_until(at_ms(ms));
    }
    assert!(done(&d.actions).is_empty());
    d.run_until(Time::ZERO.after(CLEAR_TIMEOUT));
    assert_eq!(done(&d.take_actions()), [false]);
    assert!(d.hits(at_ms(2000)).is_empty(), "the entries stay hidden");
    ack(&mut d, b.member.rank, sent[0].1.clear);
    assert!(done(&d.take_actions()).is_empty(), "a late acknowledgement changes nothing");
    assert_eq!(d.service.stats().clears_incomplete, 1);
}

#[test]
fn a_rank_that_cannot_clear_makes_it_false() {
    let mut d = Directory::new();
    let a = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let sent = clear(&mut d, at_ms(0));
    let refusal = ClearAck { clear: sent[0].1.clear, done: false };
    d.service.handle_clear_ack(a.member.rank, refusal);
    assert_eq!(done(&d.take_actions()), [false]);
}

#[test]
fn a_fenced_rank_need_not_acknowledge() {
    let mut d = Directory::new();
    let a = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let b = d.announce(at_ms(0), "b", 2, &[(2, 1)]);
    let sent = clear(&mut d, at_ms(0));
    ack(&mut d, b.member.rank, sent[0].1.clear);
    d.service.handle_connection_closed(at_ms(1), a.liveness);
    d.drain();
    assert!(done(&d.actions).is_empty(), "lost is not fenced: the process may still serve");
    d.join(at_ms(2), "a", 3);
    assert_eq!(done(&d.take_actions()), [true]);
}

#[test]
fn a_rank_that_comes_back_in_time_is_asked_again() {
    let mut d = Directory::new();
    let a = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let sent = clear(&mut d, at_ms(0));
    d.service.handle_connection_closed(at_ms(1), a.control);
    d.take_actions();
    let again = d.join(at_ms(2), "a", 1);
    assert_eq!(sent_to(&d.take_actions()), [(again.member.rank, sent[0].1)]);
    ack(&mut d, again.member.rank, sent[0].1.clear);
    assert_eq!(done(&d.take_actions()), [true]);
}

#[test]
fn a_rank_that_does_not_acknowledge_is_told_again_as_long_as_it_is_connected() {
    let mut d = Directory::new();
    let a = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let sent = clear(&mut d, at_ms(0));
    d.run_until(Time::ZERO.after(2 * CLEAR_TIMEOUT));
    let actions = d.take_actions();
    assert_eq!(done(&actions), [false]);
    assert!(sent_to(&actions).len() >= 7 && sent_to(&actions).iter().all(|again| *again == sent[0]));
    ack(&mut d, a.member.rank, sent[0].1.clear);
    d.take_actions();
    d.run_until(Time::ZERO.after(3 * CLEAR_TIMEOUT));
    assert!(sent_to(&d.take_actions()).is_empty());
    // The same with a rank that goes away instead.
    clear(&mut d, at_ms(7000));
    d.run_until(at_ms(7000).after(CLEAR_TIMEOUT));
    d.service.handle_connection_closed(at_ms(9000), a.control);
    d.take_actions();
    d.run_until(at_ms(9000).after(4 * CLEAR_RESEND));
    assert!(sent_to(&d.take_actions()).is_empty());
}

#[test]
fn only_the_latest_clear_of_a_namespace_is_told_again() {
    let mut d = Directory::new();
    d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    for round in 0..5 {
        clear(&mut d, at_ms(3000 * round));
        d.run_until(at_ms(3000 * round).after(CLEAR_TIMEOUT));
    }
    assert_eq!(d.service.clears.len(), 1);
}

#[test]
fn a_clear_without_ranks_is_true_at_once() {
    let mut d = Directory::new();
    assert!(clear(&mut d, at_ms(0)).is_empty());
    assert_eq!(done(&d.take_actions()), [true]);
}

#[test]
fn publications_of_a_lower_epoch_are_refused_and_the_rank_is_told() {
    let mut d = Directory::new();
    let mut peer = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let (ns, before) = d.open(&peer, NS, 0);
    clear(&mut d, at_ms(0));
    let (_, after) = d.open(&peer, NS, 0);
    assert!(after > before);
    let reply = d.send(&mut peer, false, false, &[put(ns, before, 2, 2), put(ns, after, 3, 3)]);
    let PublishReply::Applied { refused: 0, raised, .. } = reply else { panic!("{reply:?}") };
    assert_eq!(raised.iter().collect::<Vec<_>>(), [crate::wire::RaisedEpoch { ns, epoch: after }]);
    assert_eq!(d.hits(at_ms(0)), [3]);
    assert_eq!(d.service.stats().puts_cleared, 1);
}

#[test]
fn other_namespaces_are_not_cleared() {
    let mut d = Directory::new();
    let mut peer = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let (other, epoch) = d.open(&peer, OTHER_NS, 0);
    d.send(&mut peer, false, false, &[put(other, epoch, 2, 2)]);
    clear(&mut d, at_ms(0));
    let query = Query { ns: other, ..d.query(EngineKey::ANONYMOUS, &[1, 2]) };
    assert_eq!(d.service.lookup(at_ms(0), &query).unwrap().hits.iter().collect::<Vec<_>>(), [false, true]);
}

#[test]
fn epochs_known_to_ranks_survive_the_directory() {
    let mut d = Directory::new();
    let a = d.join(at_ms(0), "a", 1);
    let mut b = d.join(at_ms(0), "b", 2);
    // B missed a clear in the directory's earlier life, and comes first.
    let (ns, epoch) = d.open(&b, NS, 4);
    d.send(&mut b, true, true, &[put(ns, epoch, 1, 1)]);
    assert_eq!(d.hits(at_ms(0)), [1]);
    d.take_actions();
    assert_eq!(d.open(&a, NS, 5).1, NsEpoch(5));
    assert!(d.hits(at_ms(0)).is_empty(), "cleared in the earlier life");
    let sent = sent_to(&d.take_actions());
    assert_eq!(sent.len(), 1);
    assert_eq!((sent[0].0, sent[0].1.ns, sent[0].1.epoch), (b.member.rank, NS, NsEpoch(5)));
    assert_eq!(d.open(&b, NS, 4).1, NsEpoch(5), "an epoch never goes back");
}

#[test]
fn readers_cannot_raise_epochs() {
    let mut d = Directory::new();
    d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let open = OpenNs { name: NS, known_epoch: NsEpoch(77) };
    let reply = d.service.handle_open_ns(at_ms(0), ConnectionId(12345), &open);
    assert!(matches!(reply, NsReply::Opened { epoch: NsEpoch(0), .. }));
    assert_eq!(d.hits(at_ms(0)), [1]);
}

#[test]
fn a_clear_before_any_rank_is_back_outranks_earlier_lives() {
    let mut d = Directory::new();
    assert!(clear(&mut d, at_ms(0)).is_empty());
    assert_eq!(done(&d.take_actions()), [true]);
    // The rank knows epoch 5 of the earlier life, whose base was below this one's.
    let mut peer = d.join(at_ms(1), "a", 1);
    let (ns, epoch) = d.open(&peer, NS, 5);
    assert!(epoch > NsEpoch(5), "the rank learns that it must clear");
    d.send(&mut peer, true, true, &[put(ns, NsEpoch(5), 1, 1)]);
    assert!(d.hits(at_ms(1)).is_empty());
}

#[test]
fn too_many_clears_at_once_are_refused_and_do_nothing() {
    let mut d = Directory::new();
    let peer = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    for request in 0..CLEARS_MAX as u64 {
        d.service.handle_clear(at_ms(0), ClearRequest(request), Clear { ns: OTHER_NS }).unwrap();
    }
    let refused = d.service.handle_clear(at_ms(0), ClearRequest(99), Clear { ns: NS });
    assert_eq!(refused, Err(Refusal::Overloaded));
    assert_eq!(d.hits(at_ms(0)), [1]);
    let _ = peer;
}

#[test]
fn many_clears_use_no_numbers_up() {
    let mut d = Directory::new();
    for round in 0..5000u64 {
        d.service.handle_clear(at_ms(round * 10), ClearRequest(round), Clear { ns: NS }).unwrap();
        d.run_until(at_ms(round * 10 + 9));
    }
    assert!(d.service.namespaces.instances.count() < 10, "numbers are used again after a sweep");
}
