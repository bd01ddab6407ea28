//! Identity, liveness, hiding (design 1.9).

use super::*;
use crate::directory::limits::{ATTACH_TIMEOUT, LOST_ENTRIES_KEEP};
use crate::limits::{HIDE_MAX, HIDE_MIN};

#[test]
fn a_second_process_of_a_connected_name_is_refused() {
    let mut d = Directory::new();
    d.join(at_ms(0), "a", 1);
    let control = d.connection();
    assert_eq!(d.join_reply(at_ms(1), control, "a", 2), JoinReply::NameInUse);
    assert!(matches!(d.join_reply(at_ms(1), control, "b", 3), JoinReply::Joined(_)));
}

#[test]
fn a_newer_process_closes_the_older_for_ever() {
    let mut d = Directory::new();
    let old = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    d.service.handle_connection_closed(at_ms(1), old.liveness);
    let new = d.join(at_ms(2), "a", 2);
    assert_ne!(old.member.rank, new.member.rank);
    assert!(d.hits(at_ms(2)).is_empty());
    let control = d.connection();
    assert_eq!(d.join_reply(at_ms(3), control, "a", 1), JoinReply::Closed);
    // Not under another name either, and not after the newer one is gone.
    assert_eq!(d.join_reply(at_ms(3), control, "b", 1), JoinReply::Closed);
    d.service.handle_connection_closed(at_ms(4), new.control);
    assert_eq!(d.join_reply(at_ms(5), control, "a", 1), JoinReply::Closed);
    assert_eq!(d.service.who(old.member), WhoReply::Unknown);
}

#[test]
fn a_join_that_comes_twice_over_one_connection_changes_nothing() {
    let mut d = Directory::new();
    let control = d.connection();
    let first = d.join_reply(at_ms(0), control, "a", 1);
    let peer = d.announce(at_ms(0), "b", 2, &[(1, 1)]);
    assert_eq!(d.join_reply(at_ms(1), control, "a", 1), first);
    let again = d.join_reply(at_ms(1), peer.control, "b", 2);
    assert!(matches!(again, JoinReply::Joined(joined) if joined.rank == peer.member.rank));
    assert_eq!(d.hits(at_ms(1)), [1]);
    assert!(d.send_as(&peer, 2, false, false, &[]).is_ok());
}

#[test]
fn publications_of_a_dead_incarnation_are_ignored() {
    let mut d = Directory::new();
    let old = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    d.service.handle_connection_closed(at_ms(1), old.control);
    d.announce(at_ms(2), "a", 2, &[(2, 1)]);
    let (ns, epoch) = d.open(&old, NS, 0);
    let refused = d.send_as(&old, 9, true, true, &[put(ns, epoch, 3, 5)]);
    assert_eq!(refused, Err(Refusal::UnknownRank));
    assert_eq!(d.hits(at_ms(2)), [2]);
    assert_eq!(d.service.stats().publishes_foreign, 1);
}

#[test]
fn another_cluster_is_refused() {
    let mut d = Directory::with(ServiceConfig { cluster: "other".into(), ..config() });
    let control = d.connection();
    assert_eq!(d.join_reply(at_ms(0), control, "a", 1), JoinReply::ClusterMismatch);
}

#[test]
fn a_lost_connection_hides_at_once_and_announcing_again_shows() {
    for closed in ["control", "liveness"] {
        let mut d = Directory::new();
        let peer = d.announce(at_ms(0), "a", 1, &[(1, 1), (2, 2), (3, 3)]);
        assert_eq!(d.hits(at_ms(0)), [1, 2, 3]);
        let connection = if closed == "control" { peer.control } else { peer.liveness };
        d.service.handle_connection_closed(at_ms(1), connection);
        assert!(d.hits(at_ms(1)).is_empty(), "{closed}");
        // The same process: same rank, hidden until it announces.
        let mut again = d.join(at_ms(2), "a", 1);
        assert_eq!(again.member, peer.member);
        assert!(d.hits(at_ms(2)).is_empty(), "{closed}");
        again.seq_no = peer.seq_no;
        let (ns, epoch) = d.open(&again, NS, 0);
        d.send(&mut again, true, false, &[put(ns, epoch, 1, 1)]);
        assert_eq!(d.hits(at_ms(2)), [1]);
        d.send(&mut again, false, true, &[put(ns, epoch, 2, 5)]);
        assert_eq!(d.hits(at_ms(2)), [1, 2], "3 was not announced again");
        assert_eq!(d.locate(at_ms(2), 2)[0].generation, Generation(5));
        d.run_until(at_ms(100));
        assert_eq!(d.service.stats().replicas, 2, "what was not announced again is swept");
    }
}

#[test]
fn the_other_connection_of_a_lost_rank_is_closed() {
    let mut d = Directory::new();
    let peer = d.join(at_ms(0), "a", 1);
    d.take_actions();
    d.service.handle_connection_closed(at_ms(1), peer.liveness);
    assert!(d.take_actions().contains(&ServiceAction::CloseConnection { connection: peer.control }));
    assert_eq!(d.send_as(&peer, 1, true, true, &[]), Err(Refusal::UnknownRank));
}

#[test]
fn missed_pings_hide_until_the_rank_is_heard() {
    let mut d = Directory::new();
    let peer = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let timeout = u64::try_from(TIMEOUT.as_millis()).unwrap();
    d.service.handle_ping(at_ms(500), peer.liveness, Ping { load: 0 }).unwrap();
    d.run_until(at_ms(500 + timeout - 1));
    assert_eq!(d.hits(at_ms(1500)), [1]);
    d.run_until(at_ms(500 + 2 * timeout));
    assert!(d.hits(at_ms(2500)).is_empty());
    d.service.handle_ping(at_ms(5000), peer.liveness, Ping { load: 0 }).unwrap();
    assert_eq!(d.hits(at_ms(5000)), [1], "nothing was lost, so nothing need be announced");
}

#[test]
fn a_sign_of_life_without_a_load_keeps_the_load() {
    let mut d = Directory::new();
    let peer = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    d.service.handle_ping(at_ms(1), peer.liveness, Ping { load: 70 }).unwrap();
    d.service.handle_silent(peer.liveness);
    assert!(d.hits(at_ms(2)).is_empty());
    assert_eq!(d.service.handle_heard(at_ms(3), peer.liveness), Ok(peer.member.rank));
    assert_eq!(d.locate(at_ms(3), 1)[0].load, 70);
    assert_eq!(d.service.handle_heard(at_ms(3), peer.control), Err(Refusal::UnknownRank));
}

#[test]
fn a_silent_process_gives_way_to_a_newer_one() {
    let mut d = Directory::new();
    let peer = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    d.run_until(at_ms(3000));
    d.take_actions();
    d.join(at_ms(3000), "a", 2);
    let actions = d.take_actions();
    for connection in [peer.control, peer.liveness] {
        assert!(actions.contains(&ServiceAction::CloseConnection { connection }));
    }
    assert_eq!(
        d.service.handle_ping(at_ms(3001), peer.liveness, Ping { load: 0 }),
        Err(Refusal::UnknownRank)
    );
}

#[test]
fn a_rank_that_never_attaches_is_lost() {
    let mut d = Directory::new();
    let control = d.connection();
    assert!(matches!(d.join_reply(at_ms(0), control, "a", 1), JoinReply::Joined(_)));
    d.run_until(Time::ZERO.after(ATTACH_TIMEOUT + TIMEOUT));
    assert!(d.take_actions().contains(&ServiceAction::CloseConnection { connection: control }));
    let control = d.connection();
    assert!(matches!(d.join_reply(at_ms(9000), control, "a", 2), JoinReply::Joined(_)));
}

#[test]
fn the_liveness_connection_needs_the_ranks_token() {
    let mut d = Directory::new();
    let peer = d.join(at_ms(0), "a", 1);
    let connection = d.connection();
    let attach = Attach { member: peer.member, liveness_token: 12345 };
    assert_eq!(d.service.handle_attach(at_ms(0), connection, &attach), Err(Refusal::ForeignConnection));
    let stranger = Member { rank: RankId(1), ..peer.member };
    let attach = Attach { member: stranger, liveness_token: 7 };
    assert_eq!(d.service.handle_attach(at_ms(0), connection, &attach), Err(Refusal::UnknownRank));
}

#[test]
fn a_rank_publishes_over_its_own_connection_only() {
    let mut d = Directory::new();
    let (a, b) = (d.join(at_ms(0), "a", 1), d.join(at_ms(0), "b", 2));
    let forged = Peer { control: b.control, ..a.clone() };
    assert_eq!(d.send_as(&forged, 1, true, true, &[]), Err(Refusal::ForeignConnection));
    let leave = Leave { member: a.member };
    assert_eq!(d.service.handle_leave(at_ms(0), b.control, &leave), Err(Refusal::ForeignConnection));
}

#[test]
fn a_rank_that_leaves_is_closed() {
    let mut d = Directory::new();
    let peer = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    d.service.handle_leave(at_ms(1), peer.control, &Leave { member: peer.member }).unwrap();
    assert!(d.hits(at_ms(1)).is_empty());
    let control = d.connection();
    assert_eq!(d.join_reply(at_ms(2), control, "a", 1), JoinReply::Closed);
    assert!(matches!(d.join_reply(at_ms(2), control, "a", 2), JoinReply::Joined(_)));
    d.run_until(at_ms(200));
    assert_eq!(d.service.stats().replicas, 0);
}

#[test]
fn entries_of_a_rank_that_stays_away_are_dropped() {
    let mut d = Directory::new();
    let peer = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    d.service.handle_connection_closed(at_ms(0), peer.liveness);
    d.run_until(Time::ZERO.after(LOST_ENTRIES_KEEP / 2));
    assert_eq!(d.service.stats().replicas, 1);
    d.run_until(Time::ZERO.after(LOST_ENTRIES_KEEP + TIMEOUT));
    assert_eq!(d.service.stats().replicas, 0);
    // The process itself may still come back.
    assert_eq!(d.announce(at_ms(70_000), "a", 1, &[]).member, peer.member);
}

#[test]
fn rank_numbers_of_another_life_are_not_mistaken() {
    let mut first = Directory::new();
    let old = first.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let mut second = Directory::with(ServiceConfig { session: 0xfeed_face_5000_0000, ..config() });
    assert_eq!(second.send_as(&old, 2, false, false, &[]), Err(Refusal::UnknownRank));
    let new = second.join(at_ms(0), "a", 1);
    assert_ne!(old.member.rank, new.member.rank);
    let old_query = first.query(EngineKey::ANONYMOUS, &[1]);
    assert_eq!(second.service.lookup(at_ms(0), &old_query), Err(Refusal::UnknownNamespace));
}

#[test]
fn unreachable_owners_are_hidden_from_the_reporting_engine_only() {
    let mut d = Directory::new();
    let peer = d.announce(at_ms(0), "a", 1, &[(1, 1), (2, 1)]);
    let (hurt, fine) = (EngineKey(11), EngineKey(12));
    d.report(at_ms(0), hurt, &peer, 1, 1, MissReason::Unreachable);
    assert!(d.hits_for(at_ms(1), hurt, &[1, 2]).is_empty(), "all that the owner offers is hidden");
    assert!(d.locate_for(at_ms(1), hurt, 1).is_empty());
    assert_eq!(d.hits_for(at_ms(1), fine, &[1, 2]), [1, 2]);
    assert_eq!(d.hits(at_ms(1)), [1, 2]);
    assert_eq!(d.hits_for(Time::ZERO.after(HIDE_MIN), hurt, &[1, 2]), [1, 2]);
}

#[test]
fn hiding_doubles_up_to_its_limit_and_is_forgotten() {
    let mut d = Directory::new();
    let peer = d.announce(at_ms(0), "a", 1, &[(1, 1)]);
    let engine = EngineKey(11);
    let mut now = at_ms(0);
    let mut spans = Vec::new();
    for _ in 0..8 {
        d.report(now, engine, &peer, 1, 1, MissReason::Unreachable);
        // Reports while it is hidden change nothing.
        d.report(now.after(Duration::from_millis(1)), engine, &peer, 1, 1, MissReason::Unreachable);
        let start = now;
        while d.hits_for(now, engine, &[1]).is_empty() {
            now = now.after(Duration::from_millis(500));
        }
        spans.push(now.since(start).as_secs());
    }
    assert_eq!(spans, [2, 4, 8, 16, 32, 60, 60, 60]);
    now = now.after(HIDE_MAX);
    d.report(now, engine, &peer, 1, 1, MissReason::Unreachable);
    assert_eq!(d.hits_for(now.after(HIDE_MIN), engine, &[1]), [1], "after a long peace it starts anew");
}

#[test]
fn the_table_of_hidden_pairs_is_bounded() {
    let mut hides = Hides::default();
    let most = crate::directory::limits::HIDES_MAX as u64;
    for engine in 1..=most + 10 {
        hides.report(at_ms(0), EngineKey(engine), RankId(1));
    }
    assert_eq!(hides.len() as u64, most);
    assert_eq!(hides.hidden_from(at_ms(1), EngineKey(most + 1)).count(), 0);
    // Later there is room again.
    let later = Time::ZERO.after(3 * HIDE_MIN);
    hides.report(later, EngineKey(most + 1), RankId(1));
    assert_eq!(hides.len(), 1);
    assert_eq!(hides.hidden_from(later, EngineKey(most + 1)).collect::<Vec<_>>(), [RankId(1)]);
}

#[test]
fn who_says_how_to_reach_a_rank() {
    let mut d = Directory::new();
    let peer = d.join(at_ms(0), "a", 1);
    let Reply::Who(WhoReply::Known(info)) =
        d.service.answer(at_ms(0), &Request::Who(Who { member: peer.member }))
    else {
        panic!("the rank is known")
    };
    assert_eq!((info.name.as_str(), info.engine.as_str(), info.live), ("a", "engine", true));
    let other = Member { incarnation: incarnation(77), ..peer.member };
    assert_eq!(d.service.who(other), WhoReply::Unknown);
}
