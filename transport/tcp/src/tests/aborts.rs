//! Rule R4: what is reported has retired, and no byte reaches its destination afterwards.

use std::time::Duration;

use kvfabric_memory::ScatterList;
use kvfabric_transport_api::{Event, OpToken, PeerKey, PostError, Provider, ReadError};

use super::{object, Arena, Owner, Random, Reader, Script};
use crate::wire::Status;
use crate::ProviderOptions;

#[test]
fn before_anything_was_sent() {
    let owner = Owner::start(&[1000]);
    let mut reader = Reader::new();
    reader.connect(1, owner.target(1)).unwrap();
    let arena = Arena::new(1000);
    let token = reader.post(1, 0, 1000, 0, ScatterList::whole(&arena.region), true).unwrap();
    reader.provider.abort(token);
    assert_eq!(reader.provider.in_flight(), 1);
    let done = reader.next_read();
    assert_eq!((done.token, done.outcome), (token, Err(ReadError::Aborted)));
    assert_eq!(reader.provider.in_flight(), 0);
    // Its reply comes all the same, and the next one after it.
    reader.read_whole(1, 0, 1000, 1);
    assert!(arena.is_untouched());
}

#[test]
fn after_the_end_and_for_unknown_tokens_it_does_nothing() {
    let owner = Owner::start(&[1000]);
    let mut reader = Reader::new();
    reader.connect(1, owner.target(1)).unwrap();
    reader.read_whole(1, 0, 1000, 1);
    reader.provider.abort(OpToken(1));
    reader.provider.abort(OpToken(77));
    reader.poll(5);
    assert!(reader.events.is_empty());
    reader.read_whole(1, 0, 1000, 1);
}

/// Ends a read after each number of bytes of its reply, with the owner silent from there on: it retires at once. Then
/// the owner goes on, with a next reply behind it, and the canaries stay.
#[test]
fn in_the_middle_of_a_reply_with_the_owner_stalled() {
    for sent in [0, 1, 31, 32, 33, 500, 1031, 1032, 1063] {
        let script = Script::new();
        let mut reader = Reader::new();
        let mut owner = script.welcome(&mut reader);
        let arena = Arena::new(2000);
        let mut list = ScatterList::default();
        list.push(&arena.region, 100, 400).unwrap();
        list.push(&arena.region, 700, 600).unwrap();
        let token = reader.post(1, 3, 1000, 0, list, true).unwrap();
        reader.poll(2);
        let sequence = owner.request().sequence;
        let mut reply =
            crate::wire::Reply { sequence, status: Status::Ok, length_bytes: 1000 }.encode().to_vec();
        reply.extend_from_slice(&object(3, 1, 1000));
        reply.extend_from_slice(&[5; 32]);
        owner.send(&reply[..sent]);
        reader.provider.wait(Duration::from_millis(20));
        reader.poll(5);
        assert!(reader.events.is_empty());

        reader.provider.abort(token);
        reader.poll(1);
        let Some(Event::Read(done)) = reader.events.pop() else { panic!("not retired at once ({sent})") };
        assert_eq!(done.outcome, Err(ReadError::Aborted));
        arena.region.fill(0, 2000, super::CANARY).unwrap();
        // Dropping the list gives the engine its memory back: nothing here holds the region any more.
        drop(done.destination);
        assert_eq!(arena.region.handle_count(), 1);

        owner.send(&reply[sent..]);
        let next = Arena::new(10);
        reader.post(1, 4, 10, 0, ScatterList::whole(&next.region), false).unwrap();
        reader.poll(2);
        let sequence = owner.request().sequence;
        owner.send_header(sequence, Status::Ok, 10);
        owner.send(&[6; 10]);
        owner.send_word(2);
        let landed = reader.next_read().outcome.unwrap();
        assert_eq!((landed.word.generation, landed.check), (2, None));
        assert_eq!(next.bytes(), [6; 10]);
        assert!(arena.is_untouched(), "late bytes reached the destination ({sent})");
    }
}

#[test]
fn at_random_with_a_real_owner() {
    let mut random = Random::new("at_random_with_a_real_owner");
    let owner = Owner::start(&[300_000]);
    let mut reader = Reader::new();
    reader.connect(1, owner.target(2)).unwrap();
    let mut flights = std::collections::HashMap::new();
    let mut kept = Vec::new();
    let (mut aborted, mut landed) = (0, 0);
    for _ in 0..400 {
        let arena = Arena::new(300_000);
        let token = reader.post(1, 0, 300_000, 0, ScatterList::whole(&arena.region), true).unwrap();
        flights.insert(token, arena);
        for _ in 0..random.below(4) {
            reader.poll(1);
        }
        if random.below(3) > 0 {
            let nth = random.below(flights.len());
            if let Some(&token) = flights.keys().nth(nth) {
                reader.provider.abort(token);
            }
        }
        while !reader.events.is_empty() || flights.len() > 8 {
            let done = reader.next_read();
            let arena = flights.remove(&done.token).unwrap();
            match done.outcome {
                Ok(word) => {
                    assert_eq!(word.check, Some(word.word.check));
                    assert!(arena.bytes() == object(0, 1, 300_000));
                    landed += 1;
                }
                Err(error) => {
                    assert_eq!(error, ReadError::Aborted);
                    // From now on these bytes are the engine's.
                    arena.region.fill(0, 300_000, super::CANARY).unwrap();
                    kept.push(arena);
                    aborted += 1;
                }
            }
            if kept.len() > 40 {
                assert!(kept.remove(0).is_untouched(), "late bytes reached a destination");
            }
        }
    }
    while !flights.is_empty() {
        flights.remove(&reader.next_read().token).unwrap();
    }
    assert!(kept.iter().all(Arena::is_untouched), "late bytes reached a destination");
    assert!(aborted > 0 && landed > 0, "{aborted} aborted, {landed} landed");
}

#[test]
fn a_stalled_owner_fills_the_queue_and_is_given_up() {
    let script = Script::new();
    let options = ProviderOptions {
        requests_in_flight: 4,
        stall_timeout: Duration::from_millis(300),
        ..Default::default()
    };
    let mut reader = Reader::with(options);
    let _owner = script.welcome(&mut reader);
    let arenas: Vec<Arena> = (0..4).map(|_| Arena::new(100)).collect();
    let mut tokens = Vec::new();
    for arena in &arenas {
        tokens.push(reader.post(1, 0, 100, 0, ScatterList::whole(&arena.region), false).unwrap());
    }
    reader.poll(2);
    for &token in &tokens[..3] {
        reader.provider.abort(token);
    }
    for token in &tokens[..3] {
        let done = reader.next_read();
        assert_eq!((done.token, done.outcome), (*token, Err(ReadError::Aborted)));
    }
    // Their replies are still due, so there is no room yet.
    let refused = reader.post(1, 0, 100, 0, ScatterList::whole(&arenas[0].region), false);
    assert!(matches!(refused, Err(PostError::QueueFull(_))));
    let done = reader.next_read();
    assert_eq!(done.token, tokens[3]);
    assert!(matches!(done.outcome, Err(ReadError::PeerLost(_))));
    assert!(matches!(reader.next(), Event::Disconnected { peer: PeerKey(1), .. }));
    assert_eq!(reader.provider.in_flight(), 0);
}

#[test]
fn disconnect_ends_everything_of_the_peer_at_once() {
    let script = Script::new();
    let mut reader = Reader::new();
    let mut owner = script.welcome(&mut reader);
    let arena = Arena::new(100);
    for _ in 0..3 {
        reader
            .post(
                1,
                0,
                50,
                0,
                {
                    let mut l = ScatterList::default();
                    l.push(&arena.region, 0, 50).unwrap();
                    l
                },
                false,
            )
            .unwrap();
    }
    reader.poll(2);
    let sequence = owner.request().sequence;
    owner.send_header(sequence, Status::Ok, 50);
    owner.send(&[1; 20]);
    reader.provider.wait(Duration::from_millis(20));
    reader.poll(3);
    reader.provider.disconnect(PeerKey(1));
    for _ in 0..3 {
        assert_eq!(reader.next_read().outcome, Err(ReadError::Aborted));
    }
    arena.region.fill(0, 100, super::CANARY).unwrap();
    // The socket is gone, so this may or may not fail; it reaches nobody.
    let _ = std::io::Write::write_all(&mut owner.socket, &[2; 30]);
    reader.poll(20);
    assert!(arena.is_untouched() && reader.events.is_empty());
    let refused = reader.post(1, 0, 50, 0, ScatterList::whole(&arena.region), false);
    assert!(matches!(refused, Err(PostError::NotConnected(_))));
}
