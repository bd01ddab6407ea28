//! Goal: a rank's announcements reach the directory in order, completely, whatever happens to messages and connections.
//! Method: one announcer, the directory's replies by hand, time by hand.

use super::*;
use crate::directory::limits::{MEMBERSHIP_RETRY, PUBLISH_BATCH_OPS, RANK_NAMESPACES_MAX};
use crate::limits::{PUBLISH_DELAY, PUBLISH_QUEUE_MAX, PUBLISH_RETRY};
use crate::wire::{
    ClearReply, Done, Joined, NsReply, Publish, PublishOp, PublishReply, RaisedEpoch, Records,
};
use crate::{Fingerprint, Generation, RankId, SlotId};

const NAME: NsName = NsName([9; 16]);
const NUMBER: NsNumber = NsNumber(500);

fn at_ms(ms: u64) -> Time {
    Time::from_micros(ms * 1000)
}

fn far() -> Time {
    at_ms(1_000_000)
}

fn announcer() -> Announcer {
    Announcer::new(AnnouncerConfig {
        cluster: Name::new("c").unwrap(),
        name: Name::new("rank-0").unwrap(),
        engine: Name::new("engine").unwrap(),
        incarnation: Incarnation::new(77).unwrap(),
        advertised: Advertised::default(),
    })
}

fn actions(announcer: &mut Announcer) -> Vec<AnnouncerAction> {
    std::iter::from_fn(|| announcer.poll_action()).collect()
}

fn requests(announcer: &mut Announcer) -> Vec<(LinkId, RequestTag, Request<'static>)> {
    let sent = actions(announcer).into_iter().filter_map(|action| match action {
        AnnouncerAction::Send { link, tag, request } => Some((link, tag, request)),
        _ => None,
    });
    sent.collect()
}

/// The one PUBLISH that was sent.
fn publish(announcer: &mut Announcer) -> Publish<'static> {
    let sent: Vec<_> = requests(announcer)
        .into_iter()
        .filter_map(|(_, _, request)| match request {
            Request::Publish(publish) => Some(publish),
            _ => None,
        })
        .collect();
    assert_eq!(sent.len(), 1, "one message at a time");
    sent.into_iter().next().unwrap()
}

fn joined(rank: u32) -> Reply<'static> {
    Reply::Joined(JoinReply::Joined(Joined { rank: RankId(rank), session: 1, liveness_token: 5 }))
}

fn opened(number: NsNumber, epoch: u32) -> Reply<'static> {
    Reply::Ns(NsReply::Opened { number, epoch: NsEpoch(epoch) })
}

fn applied(seq_no: u64) -> Reply<'static> {
    Reply::Publish(PublishReply::Applied { seq_no, refused: 0, raised: Records::new() })
}

fn reply(announcer: &mut Announcer, now: Time, tag: RequestTag, reply: &Reply<'_>) {
    let link = announcer.link_id;
    announcer.handle_reply(now, link, tag, reply);
}

fn change(present: bool, index: u64, ns: NsId, epoch: u32) -> Announcement {
    Announcement {
        present,
        fingerprint: Fingerprint([index, 1]),
        ns,
        ns_epoch: NsEpoch(epoch),
        slot: SlotId(1),
        generation: Generation(index + 1),
    }
}

/// Joined, one namespace open, nothing to announce, settled.
fn settled() -> (Announcer, NsId) {
    let mut a = announcer();
    let ns = a.open(at_ms(0), NAME).unwrap();
    a.handle_connected(at_ms(0), Duration::ZERO);
    reply(&mut a, at_ms(0), RequestTag::Join, &joined(1));
    reply(&mut a, at_ms(0), RequestTag::OpenNs(ns), &opened(NUMBER, 0));
    assert!(a.needs_snapshot());
    a.handle_snapshot(at_ms(0), std::iter::empty());
    let sent = publish(&mut a);
    assert!(sent.first && sent.last && sent.ops.is_empty());
    reply(&mut a, at_ms(0), RequestTag::Publish(sent.seq_no), &applied(sent.seq_no));
    assert!(a.is_settled());
    (a, ns)
}

#[test]
fn joining_opens_namespaces_and_announces_everything() {
    let mut a = announcer();
    let ns = a.open(at_ms(0), NAME).unwrap();
    assert!(actions(&mut a).is_empty(), "nobody to talk to yet");
    let link = a.handle_connected(at_ms(0), Duration::from_millis(50));
    let sent = requests(&mut a);
    assert_eq!(sent.len(), 1);
    assert!(matches!(&sent[0], (l, RequestTag::Join, Request::Join(join))
        if *l == link && join.name.as_str() == "rank-0" && join.incarnation.get() == 77));
    reply(&mut a, at_ms(1), RequestTag::Join, &joined(4));
    let member = a.member().unwrap();
    assert_eq!(member.rank, RankId(4));
    let all = actions(&mut a);
    assert!(matches!(all[0], AnnouncerAction::OpenLiveness { attach, .. }
        if attach.member == member && attach.liveness_token == 5));
    assert!(matches!(&all[1], AnnouncerAction::Send { tag: RequestTag::OpenNs(n), .. } if *n == ns));
    assert!(!a.needs_snapshot(), "not before the jitter has passed");
    a.handle_timeout(at_ms(50));
    assert!(a.needs_snapshot());
    assert_eq!(actions(&mut a), [AnnouncerAction::NeedSnapshot]);
    // More than fits one message, and the namespace's number is not known yet.
    let count = PUBLISH_BATCH_OPS as u64 + 3;
    a.handle_snapshot(at_ms(50), (0..count).map(|index| change(true, index, ns, 0)));
    assert!(actions(&mut a).is_empty());
    reply(&mut a, at_ms(51), RequestTag::OpenNs(ns), &opened(NUMBER, 0));
    assert_eq!(a.directory_ns(ns), Some(NUMBER));
    let first = publish(&mut a);
    assert_eq!((first.first, first.last, first.ops.len()), (true, false, PUBLISH_BATCH_OPS));
    assert_eq!(first.ops.get(0).unwrap().ns, NUMBER);
    reply(&mut a, at_ms(52), RequestTag::Publish(1), &applied(1));
    let second = publish(&mut a);
    assert_eq!((second.first, second.last, second.ops.len()), (false, true, 3));
    assert_eq!(second.seq_no, first.seq_no + 1);
    assert!(!a.is_settled());
    reply(&mut a, at_ms(53), RequestTag::Publish(2), &applied(2));
    assert!(a.is_settled());
}

#[test]
fn changes_wait_for_company_and_go_in_order() {
    let (mut a, ns) = settled();
    for index in 0..3 {
        a.handle_announcement(at_ms(10), change(true, index, ns, 0));
    }
    a.handle_announcement(at_ms(10), change(false, 1, ns, 0));
    assert!(actions(&mut a).is_empty());
    assert_eq!(a.poll_timeout(), Some(at_ms(10).after(PUBLISH_DELAY)));
    a.handle_timeout(at_ms(10).after(PUBLISH_DELAY));
    let sent = publish(&mut a);
    let ops: Vec<(bool, u64)> = sent.ops.iter().map(|op| (op.present, op.fingerprint.0[0])).collect();
    assert_eq!(ops, [(true, 0), (true, 1), (true, 2), (false, 1)]);
    assert_eq!((sent.first, sent.last), (false, false));
}

#[test]
fn a_full_batch_does_not_wait() {
    let (mut a, ns) = settled();
    for index in 0..PUBLISH_BATCH_OPS as u64 {
        a.handle_announcement(at_ms(10), change(true, index, ns, 0));
    }
    assert_eq!(publish(&mut a).ops.len(), PUBLISH_BATCH_OPS);
}

#[test]
fn one_message_at_a_time_until_it_is_acknowledged() {
    let (mut a, ns) = settled();
    a.handle_announcement(at_ms(10), change(true, 1, ns, 0));
    a.handle_timeout(at_ms(11));
    let sent = publish(&mut a);
    a.handle_announcement(at_ms(12), change(true, 2, ns, 0));
    a.handle_timeout(at_ms(20));
    assert!(actions(&mut a).is_empty());
    // Lost: the very same message again.
    let again_at = at_ms(11).after(PUBLISH_RETRY);
    assert_eq!(a.poll_timeout(), Some(again_at));
    a.handle_timeout(again_at);
    assert_eq!(publish(&mut a), sent);
    reply(&mut a, again_at, RequestTag::Publish(sent.seq_no), &applied(sent.seq_no));
    let next = publish(&mut a);
    assert_eq!(next.seq_no, sent.seq_no + 1);
    // Both copies of the answer arrive: the second is not taken for the next message's.
    reply(&mut a, again_at, RequestTag::Publish(sent.seq_no), &applied(sent.seq_no));
    assert!(!a.is_settled());
    assert_eq!(a.stats().retries, 1);
}

#[test]
fn a_flush_ends_when_all_queued_before_is_acknowledged() {
    let (mut a, ns) = settled();
    a.handle_announcement(at_ms(10), change(true, 1, ns, 0));
    a.handle_flush(at_ms(10), FlushId(1), far());
    let first = publish(&mut a);
    a.handle_announcement(at_ms(10), change(true, 2, ns, 0));
    a.handle_flush(at_ms(10), FlushId(2), far());
    assert!(actions(&mut a).is_empty());
    reply(&mut a, at_ms(12), RequestTag::Publish(first.seq_no), &applied(first.seq_no));
    let all = actions(&mut a);
    assert!(all.contains(&AnnouncerAction::FlushDone { flush: FlushId(1), ok: true }));
    assert!(!all.contains(&AnnouncerAction::FlushDone { flush: FlushId(2), ok: true }));
    let seq_no = first.seq_no + 1;
    reply(&mut a, at_ms(13), RequestTag::Publish(seq_no), &applied(seq_no));
    assert_eq!(actions(&mut a), [AnnouncerAction::FlushDone { flush: FlushId(2), ok: true }]);
    a.handle_flush(at_ms(14), FlushId(3), far());
    assert_eq!(actions(&mut a), [AnnouncerAction::FlushDone { flush: FlushId(3), ok: true }]);
}

#[test]
fn a_flush_ends_at_its_deadline_when_the_directory_is_away() {
    let mut a = announcer();
    a.handle_announcement(at_ms(0), change(true, 1, NsId(1), 0));
    a.handle_flush(at_ms(0), FlushId(1), at_ms(100));
    assert_eq!(a.poll_timeout(), Some(at_ms(100)));
    a.handle_timeout(at_ms(99));
    assert!(actions(&mut a).is_empty());
    a.handle_timeout(at_ms(100));
    assert_eq!(actions(&mut a), [AnnouncerAction::FlushDone { flush: FlushId(1), ok: false }]);
}

#[test]
fn a_flush_spans_a_reconnection() {
    let (mut a, ns) = settled();
    a.handle_announcement(at_ms(10), change(true, 1, ns, 0));
    a.handle_flush(at_ms(10), FlushId(1), far());
    let lost = publish(&mut a);
    a.handle_disconnected(at_ms(11));
    a.handle_connected(at_ms(20), Duration::ZERO);
    // The answer comes over the old connection: ignored.
    a.handle_reply(at_ms(20), LinkId(1), RequestTag::Publish(lost.seq_no), &applied(lost.seq_no));
    reply(&mut a, at_ms(20), RequestTag::Join, &joined(1));
    reply(&mut a, at_ms(20), RequestTag::OpenNs(ns), &opened(NUMBER, 0));
    actions(&mut a);
    a.handle_snapshot(at_ms(20), std::iter::once(change(true, 1, ns, 0)));
    let sent = publish(&mut a);
    assert!(sent.first && sent.last && sent.seq_no > lost.seq_no, "positions never repeat");
    reply(&mut a, at_ms(21), RequestTag::Publish(sent.seq_no), &applied(sent.seq_no));
    assert_eq!(actions(&mut a), [AnnouncerAction::FlushDone { flush: FlushId(1), ok: true }]);
}

#[test]
fn a_flush_says_so_when_the_directory_had_no_room() {
    let (mut a, ns) = settled();
    a.handle_announcement(at_ms(10), change(true, 1, ns, 0));
    a.handle_flush(at_ms(10), FlushId(1), far());
    let sent = publish(&mut a);
    let refused = PublishReply::Applied { seq_no: sent.seq_no, refused: 1, raised: Records::new() };
    reply(&mut a, at_ms(10), RequestTag::Publish(sent.seq_no), &Reply::Publish(refused));
    assert_eq!(actions(&mut a), [AnnouncerAction::FlushDone { flush: FlushId(1), ok: false }]);
    a.handle_flush(at_ms(11), FlushId(2), far());
    assert_eq!(actions(&mut a), [AnnouncerAction::FlushDone { flush: FlushId(2), ok: true }]);
}

#[test]
fn while_the_directory_is_away_nothing_is_queued() {
    let (mut a, ns) = settled();
    a.handle_disconnected(at_ms(1));
    for index in 0..100_000 {
        a.handle_announcement(at_ms(2), change(true, index, ns, 0));
    }
    assert!(a.queue.is_empty());
    assert_eq!(a.poll_timeout(), None);
    assert_eq!(a.directory_ns(ns), None);
    assert_eq!(a.ns(&NAME), Some((ns, NsEpoch(0))), "the rank's own number stays");
}

#[test]
fn a_gap_is_answered_with_everything() {
    let (mut a, ns) = settled();
    a.handle_announcement(at_ms(10), change(true, 1, ns, 0));
    a.handle_timeout(at_ms(11));
    let sent = publish(&mut a);
    let gap = Reply::Publish(PublishReply::Gap { expected: 1 });
    reply(&mut a, at_ms(12), RequestTag::Publish(sent.seq_no), &gap);
    assert_eq!(actions(&mut a), [AnnouncerAction::NeedSnapshot]);
    a.handle_snapshot(at_ms(12), std::iter::once(change(true, 1, ns, 0)));
    let again = publish(&mut a);
    assert!(again.first && again.last && again.seq_no > sent.seq_no);
}

#[test]
fn an_overflowing_queue_is_dropped_and_everything_announced() {
    let (mut a, ns) = settled();
    a.handle_announcement(at_ms(10), change(true, 0, ns, 0));
    a.handle_timeout(at_ms(11));
    let sent = publish(&mut a);
    a.handle_flush(at_ms(11), FlushId(1), far());
    for index in 0..=PUBLISH_QUEUE_MAX as u64 {
        a.handle_announcement(at_ms(12), change(true, index + 1, ns, 0));
    }
    assert_eq!(actions(&mut a), [AnnouncerAction::NeedSnapshot]);
    assert!(a.queue.is_empty());
    assert_eq!(a.stats().overflows, 1);
    // The message under way may still arrive; its answer means nothing any more.
    reply(&mut a, at_ms(13), RequestTag::Publish(sent.seq_no), &applied(sent.seq_no));
    assert!(actions(&mut a).is_empty());
    a.handle_snapshot(at_ms(13), (0..5).map(|index| change(true, index, ns, 0)));
    let all = publish(&mut a);
    reply(&mut a, at_ms(14), RequestTag::Publish(all.seq_no), &applied(all.seq_no));
    assert_eq!(actions(&mut a), [AnnouncerAction::FlushDone { flush: FlushId(1), ok: true }]);
    assert!(a.is_settled());
}

#[test]
fn changes_after_the_snapshot_follow_it() {
    let (mut a, ns) = settled();
    a.need_snapshot(at_ms(1));
    a.handle_timeout(at_ms(1));
    a.handle_announcement(at_ms(1), change(true, 1, ns, 0));
    a.handle_snapshot(at_ms(1), std::iter::once(change(true, 1, ns, 0)));
    a.handle_announcement(at_ms(1), change(false, 1, ns, 0));
    a.handle_flush(at_ms(1), FlushId(1), far());
    let all = publish(&mut a);
    assert_eq!((all.ops.len(), all.last), (1, true));
    reply(&mut a, at_ms(2), RequestTag::Publish(all.seq_no), &applied(all.seq_no));
    let next = publish(&mut a);
    assert_eq!(next.ops.iter().map(|op| op.present).collect::<Vec<_>>(), [false]);
    reply(&mut a, at_ms(3), RequestTag::Publish(next.seq_no), &applied(next.seq_no));
    assert_eq!(actions(&mut a), [AnnouncerAction::FlushDone { flush: FlushId(1), ok: true }]);
}

#[test]
fn namespace_numbers_are_the_ranks_own_and_mapped_when_sent() {
    let (mut a, ns) = settled();
    let other = a.open(at_ms(1), NsName([8; 16])).unwrap();
    assert_eq!((ns, other), (NsId(1), NsId(2)));
    assert_eq!(a.open(at_ms(1), NAME), Ok(ns));
    reply(&mut a, at_ms(1), RequestTag::OpenNs(other), &opened(NsNumber(501), 0));
    // The directory starts anew and numbers them the other way round.
    a.handle_connected(at_ms(2), Duration::ZERO);
    reply(&mut a, at_ms(2), RequestTag::Join, &joined(9));
    reply(&mut a, at_ms(2), RequestTag::OpenNs(ns), &opened(NsNumber(71), 0));
    reply(&mut a, at_ms(2), RequestTag::OpenNs(other), &opened(NsNumber(70), 0));
    actions(&mut a);
    let all = [change(true, 1, ns, 0), change(true, 2, other, 0)];
    a.handle_snapshot(at_ms(2), all.into_iter());
    let sent: Vec<PublishOp> = publish(&mut a).ops.iter().collect();
    assert_eq!(sent.iter().map(|op| op.ns.0).collect::<Vec<_>>(), [71, 70]);
}

#[test]
fn epochs_are_reported_and_never_go_back() {
    let (mut a, ns) = settled();
    let clear = ClearRank { clear: 1, ns: NAME, epoch: NsEpoch(6) };
    assert_eq!(a.handle_clear_rank(at_ms(1), &clear), Some((ns, NsEpoch(6))));
    let late = ClearRank { epoch: NsEpoch(5), ..clear };
    assert_eq!(a.handle_clear_rank(at_ms(1), &late), Some((ns, NsEpoch(6))));
    assert_eq!(a.handle_clear_rank(at_ms(1), &ClearRank { ns: NsName([4; 16]), ..clear }), None);
    a.handle_connected(at_ms(2), Duration::ZERO);
    reply(&mut a, at_ms(2), RequestTag::Join, &joined(9));
    let known = requests(&mut a).into_iter().find_map(|(_, _, request)| match request {
        Request::OpenNs(open) => Some(open.known_epoch),
        _ => None,
    });
    assert_eq!(known, Some(NsEpoch(6)));
    reply(&mut a, at_ms(2), RequestTag::OpenNs(ns), &opened(NUMBER, 3));
    assert_eq!(a.epoch(ns), Some(NsEpoch(6)));
}

#[test]
fn a_clear_that_was_missed_is_told_by_the_next_answer() {
    let (mut a, ns) = settled();
    a.handle_announcement(at_ms(1), change(true, 1, ns, 0));
    a.handle_timeout(at_ms(2));
    let sent = publish(&mut a);
    a.handle_announcement(at_ms(2), change(true, 2, ns, 0));
    a.handle_announcement(at_ms(2), change(false, 3, ns, 0));
    let raised = [RaisedEpoch { ns: NUMBER, epoch: NsEpoch(4) }].into_iter().collect();
    let answer = PublishReply::Applied { seq_no: sent.seq_no, refused: 0, raised };
    reply(&mut a, at_ms(3), RequestTag::Publish(sent.seq_no), &Reply::Publish(answer));
    let all = actions(&mut a);
    assert_eq!(all[0], AnnouncerAction::EpochChanged { ns, epoch: NsEpoch(4) });
    // What was stored under the old epoch is not sent any more; removals are.
    let AnnouncerAction::Send { request: Request::Publish(next), .. } = &all[1] else { panic!("{all:?}") };
    assert_eq!(next.ops.iter().map(|op| op.present).collect::<Vec<_>>(), [false]);
    assert_eq!(a.stats().cleared, 1);
}

#[test]
fn what_is_stored_before_the_first_answer_counts_as_epoch_zero() {
    let mut a = announcer();
    let ns = a.open(at_ms(0), NAME).unwrap();
    assert_eq!(a.epoch(ns), Some(NsEpoch(0)));
    a.handle_connected(at_ms(0), Duration::ZERO);
    reply(&mut a, at_ms(0), RequestTag::Join, &joined(1));
    actions(&mut a);
    reply(&mut a, at_ms(0), RequestTag::OpenNs(ns), &opened(NUMBER, 3));
    assert_eq!(actions(&mut a), [AnnouncerAction::EpochChanged { ns, epoch: NsEpoch(3) }]);
}

#[test]
fn requests_without_an_answer_are_sent_again() {
    let mut a = announcer();
    let ns = a.open(at_ms(0), NAME).unwrap();
    a.handle_connected(at_ms(0), Duration::ZERO);
    assert_eq!(requests(&mut a).len(), 1);
    let again = Time::ZERO.after(MEMBERSHIP_RETRY);
    assert_eq!(a.poll_timeout(), Some(again));
    a.handle_timeout(again);
    assert!(matches!(requests(&mut a)[0], (_, RequestTag::Join, _)));
    reply(&mut a, again, RequestTag::Join, &joined(1));
    assert_eq!(requests(&mut a).len(), 1);
    a.handle_timeout(again.after(MEMBERSHIP_RETRY));
    assert!(matches!(requests(&mut a)[0], (_, RequestTag::OpenNs(n), _) if n == ns));
}

#[test]
fn a_name_in_use_is_tried_again_and_a_closed_incarnation_is_not() {
    let mut a = announcer();
    a.handle_connected(at_ms(0), Duration::ZERO);
    actions(&mut a);
    reply(&mut a, at_ms(0), RequestTag::Join, &Reply::Joined(JoinReply::NameInUse));
    assert_eq!(actions(&mut a), [AnnouncerAction::JoinRefused { error: JoinError::NameInUse }]);
    a.handle_timeout(Time::ZERO.after(MEMBERSHIP_RETRY));
    assert_eq!(requests(&mut a).len(), 1);
    a.handle_flush(at_ms(600), FlushId(1), far());
    reply(&mut a, at_ms(600), RequestTag::Join, &Reply::Joined(JoinReply::Closed));
    let all = actions(&mut a);
    assert!(all.contains(&AnnouncerAction::JoinRefused { error: JoinError::Closed }));
    assert!(all.contains(&AnnouncerAction::FlushDone { flush: FlushId(1), ok: false }));
    assert_eq!(a.poll_timeout(), None);
    a.handle_connected(at_ms(700), Duration::ZERO);
    a.handle_flush(at_ms(700), FlushId(2), far());
    assert_eq!(actions(&mut a), [AnnouncerAction::FlushDone { flush: FlushId(2), ok: false }]);
}

#[test]
fn a_directory_that_forgot_the_rank_is_joined_again() {
    let (mut a, ns) = settled();
    a.handle_announcement(at_ms(1), change(true, 1, ns, 0));
    a.handle_timeout(at_ms(2));
    let sent = publish(&mut a);
    reply(&mut a, at_ms(3), RequestTag::Publish(sent.seq_no), &Reply::Refused(Refusal::UnknownRank));
    assert!(matches!(requests(&mut a)[..], [(_, RequestTag::Join, _)]));
    reply(&mut a, at_ms(4), RequestTag::Join, &joined(2));
    assert_eq!(a.member().map(|member| member.rank), Some(RankId(2)));
}

#[test]
fn an_overloaded_directory_is_asked_again_later() {
    let (mut a, ns) = settled();
    a.handle_announcement(at_ms(1), change(true, 1, ns, 0));
    a.handle_timeout(at_ms(2));
    let sent = publish(&mut a);
    reply(&mut a, at_ms(3), RequestTag::Publish(sent.seq_no), &Reply::Refused(Refusal::Overloaded));
    assert!(actions(&mut a).is_empty());
    a.handle_timeout(at_ms(2).after(PUBLISH_RETRY));
    assert_eq!(publish(&mut a), sent);
}

#[test]
fn a_namespace_without_room_does_not_hold_up_the_others() {
    let (mut a, ns) = settled();
    let full = a.open(at_ms(1), NsName([8; 16])).unwrap();
    a.handle_announcement(at_ms(1), change(true, 1, full, 0));
    a.handle_announcement(at_ms(1), change(true, 2, ns, 0));
    a.handle_flush(at_ms(1), FlushId(1), far());
    actions(&mut a);
    reply(&mut a, at_ms(2), RequestTag::OpenNs(full), &Reply::Ns(NsReply::Full));
    let sent = publish(&mut a);
    assert_eq!(sent.ops.iter().map(|op| op.fingerprint.0[0]).collect::<Vec<_>>(), [2]);
    reply(&mut a, at_ms(3), RequestTag::Publish(sent.seq_no), &applied(sent.seq_no));
    assert_eq!(actions(&mut a), [AnnouncerAction::FlushDone { flush: FlushId(1), ok: false }]);
    a.handle_timeout(at_ms(2).after(MEMBERSHIP_RETRY));
    assert!(matches!(requests(&mut a)[..], [(_, RequestTag::OpenNs(n), _)] if n == full));
}

#[test]
fn clears_of_this_rank_end_with_the_answer_the_deadline_or_the_connection() {
    let (mut a, ns) = settled();
    for clear in 1..=3 {
        a.handle_clear(at_ms(1), ClearId(clear), ns, at_ms(100 * clear));
    }
    let sent = requests(&mut a);
    assert!(sent.iter().all(|(_, _, request)| *request == Request::Clear(Clear { ns: NAME })));
    let complete = Reply::Clear(ClearReply { complete: true });
    reply(&mut a, at_ms(2), RequestTag::Clear(ClearId(1)), &complete);
    reply(&mut a, at_ms(2), RequestTag::Clear(ClearId(1)), &complete);
    let done = |clear, complete| AnnouncerAction::ClearDone { clear: ClearId(clear), complete };
    assert_eq!(actions(&mut a), [done(1, true)]);
    a.handle_timeout(at_ms(200));
    assert_eq!(actions(&mut a), [done(2, false)]);
    a.handle_disconnected(at_ms(201));
    assert_eq!(actions(&mut a), [done(3, false)]);
    a.handle_clear(at_ms(202), ClearId(4), ns, far());
    assert_eq!(actions(&mut a), [done(4, false)], "the directory is away");
}

#[test]
fn leaving_ends_everything() {
    let (mut a, ns) = settled();
    a.handle_announcement(at_ms(1), change(true, 1, ns, 0));
    a.handle_leave();
    assert!(matches!(requests(&mut a)[..], [(_, RequestTag::Leave, Request::Leave(_))]));
    reply(&mut a, at_ms(2), RequestTag::Leave, &Reply::Done(Done));
    a.handle_timeout(at_ms(100));
    a.handle_connected(at_ms(100), Duration::ZERO);
    assert!(actions(&mut a).is_empty());
    assert_eq!(a.member(), None);
}

#[test]
fn namespaces_and_flushes_are_bounded() {
    let mut a = announcer();
    for index in 0..RANK_NAMESPACES_MAX {
        a.open(at_ms(0), NsName(u128::try_from(index).unwrap().to_le_bytes())).unwrap();
    }
    assert_eq!(a.open(at_ms(0), NsName([0xff; 16])), Err(OpenError));
    for flush in 0..=FLUSHES_MAX as u64 {
        a.handle_flush(at_ms(0), FlushId(flush), at_ms(10));
    }
    let ended = AnnouncerAction::FlushDone { flush: FlushId(FLUSHES_MAX as u64), ok: false };
    assert_eq!(actions(&mut a), [ended]);
    a.handle_timeout(at_ms(10));
    assert_eq!(actions(&mut a).len(), FLUSHES_MAX);
}
