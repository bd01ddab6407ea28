//! Peers that break the protocol, on either side.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Instant;

use kvfabric_memory::ScatterList;
use kvfabric_transport_api::{Event, PeerKey, ReadError};

use super::{eventually, raw_reader, Arena, Owner, Random, Reader, Script, INCARNATION, LIMIT};
use crate::wire::{encode_frame_header, Hello, Reply, Request, Status};

/// Whether the other side has closed the connection; whatever it still sent is read and thrown away.
fn is_closed(socket: &mut TcpStream) -> bool {
    let mut buffer = [0; 4096];
    loop {
        match socket.read(&mut buffer) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn bad_replies_end_the_connection_and_nothing_else() {
    let good = |sequence| Reply { sequence, status: Status::Ok, length_bytes: 100 }.encode().to_vec();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("magic", vec![0; 200]),
        ("sequence", [good(1), vec![1; 132]].concat()),
        ("longer", {
            let header = Reply { sequence: 0, status: Status::Ok, length_bytes: 101 }.encode().to_vec();
            [header, vec![1; 133]].concat()
        }),
        ("shorter", {
            let header = Reply { sequence: 0, status: Status::Ok, length_bytes: 99 }.encode().to_vec();
            [header, vec![1; 131]].concat()
        }),
        ("bytes after an error", {
            let header =
                Reply { sequence: 0, status: Status::UnknownSlot, length_bytes: 0 }.encode().to_vec();
            [header, vec![1; 132]].concat()
        }),
        ("unknown status", {
            let mut header = good(0);
            header[4] = 9;
            header
        }),
        ("an error with a length", {
            let mut header = good(0);
            header[4] = 1;
            header
        }),
    ];
    for (name, bytes) in cases {
        let script = Script::new();
        let mut reader = Reader::new();
        let mut owner = script.welcome(&mut reader);
        let arena = Arena::new(300);
        let mut list = ScatterList::default();
        list.push(&arena.region, 100, 100).unwrap();
        reader.post(1, 0, 100, 0, list, true).unwrap();
        reader.poll(2);
        assert_eq!(owner.request().sequence, 0);
        owner.send(&bytes);
        let done = reader.next_read();
        assert!(matches!(done.outcome, Err(ReadError::Protocol(_))), "{name}: {:?}", done.outcome);
        assert!(matches!(reader.next(), Event::Disconnected { .. }), "{name}");
        let bytes = arena.bytes();
        assert!(bytes[..100].iter().chain(&bytes[200..]).all(|&byte| byte == super::CANARY), "{name}");
        assert!(is_closed(&mut owner.socket), "{name}");
    }
}

#[test]
fn bytes_that_nobody_asked_for_end_the_connection() {
    let script = Script::new();
    let mut reader = Reader::new();
    let mut owner = script.welcome(&mut reader);
    owner.send(&[1]);
    let Event::Disconnected { peer, reason } = reader.next() else { panic!("not disconnected") };
    assert_eq!(peer, PeerKey(1));
    assert!(reason.contains("nobody asked for"), "{reason}");
}

#[test]
fn random_replies_never_reach_beyond_their_destination() {
    let mut random = Random::new("random_replies_never_reach");
    for _ in 0..60 {
        let script = Script::new();
        let mut reader = Reader::new();
        let mut owner = script.welcome(&mut reader);
        let arena = Arena::new(300);
        for _ in 0..1 + random.below(3) {
            let mut list = ScatterList::default();
            list.push(&arena.region, 100, 100).unwrap();
            reader.post(1, 0, 100, 0, list, random.below(2) == 0).unwrap();
        }
        reader.poll(2);
        let mut reply = Reply { sequence: 0, status: Status::Ok, length_bytes: 100 }.encode().to_vec();
        reply.extend(random.bytes(132));
        let flips = random.below(3);
        for _ in 0..flips {
            let at = random.below(32);
            reply[at] ^= 1 << random.below(8);
        }
        let junk = random.below(400);
        reply.extend(random.bytes(junk));
        reply.truncate(1 + random.below(reply.len()));
        owner.send(&reply);
        owner.socket.shutdown(Shutdown::Write).unwrap();
        loop {
            match reader.next() {
                Event::Read(done) => drop(done),
                Event::Disconnected { .. } => break,
                other => panic!("unexpected: {other:?}"),
            }
        }
        let bytes = arena.bytes();
        assert!(bytes[..100].iter().chain(&bytes[200..]).all(|&byte| byte == super::CANARY));
    }
}

#[test]
fn a_connection_cut_in_the_middle_of_an_object_loses_its_reads() {
    for cut in [0, 10, 32, 80, 132, 163] {
        let script = Script::new();
        let mut reader = Reader::new();
        let mut owner = script.welcome(&mut reader);
        let arena = Arena::new(100);
        for _ in 0..2 {
            reader.post(1, 0, 100, 0, ScatterList::whole(&arena.region), true).unwrap();
        }
        reader.poll(2);
        let sequence = owner.request().sequence;
        let mut reply = Reply { sequence, status: Status::Ok, length_bytes: 100 }.encode().to_vec();
        reply.extend_from_slice(&[3; 132]);
        owner.send(&reply[..cut]);
        drop(owner);
        for _ in 0..2 {
            let outcome = reader.next_read().outcome;
            assert!(matches!(outcome, Err(ReadError::PeerLost(_))), "{cut}: {outcome:?}");
        }
        assert!(matches!(reader.next(), Event::Disconnected { .. }));
    }
}

#[test]
fn bad_requests_end_their_connection_only() {
    let mut random = Random::new("bad_requests_end");
    let owner = Owner::start(&[1000]);
    let mut reader = Reader::new();
    reader.connect(1, owner.target(1)).unwrap();
    let good = Request { sequence: 0, slot: 0, object_bytes: 1000, object_offset: 0, length_bytes: 1000 };
    let frame = |count: u16, request: Request| [&encode_frame_header(count)[..], &request.encode()].concat();
    let mut reserved = frame(1, good);
    reserved[6] = 1;
    let mut cases = vec![
        frame(0, good),
        frame(300, good),
        frame(1, Request { length_bytes: 0, ..good }),
        frame(1, Request { length_bytes: 1001, ..good }),
        frame(1, Request { object_offset: u64::MAX, ..good }),
        frame(1, Request { object_bytes: u64::MAX, length_bytes: u64::MAX, ..good }),
        reserved,
        [frame(1, good), vec![0xff; 50]].concat(),
    ];
    cases.extend((0..20).map(|_| random.bytes(64)));
    let count = cases.len() as u64;
    for case in cases {
        let mut socket = raw_reader(&owner);
        socket.write_all(&case).unwrap();
        assert!(is_closed(&mut socket), "{case:?}");
        reader.read_whole(1, 0, 1000, 1);
    }
    eventually("all were counted", || owner.server.stats().protocol_errors == count);
    // Truncated frames are no error, only an end.
    for length in [1, 7, 8, 20, 47] {
        let mut socket = raw_reader(&owner);
        socket.write_all(&frame(1, good)[..length]).unwrap();
        socket.shutdown(Shutdown::Write).unwrap();
        assert!(is_closed(&mut socket));
    }
    eventually("only the good reader is left", || owner.server.stats().connections == 1);
    assert_eq!(owner.server.stats().protocol_errors, count);
    reader.read_whole(1, 0, 1000, 1);
}

#[test]
fn random_greetings_are_refused() {
    let mut random = Random::new("random_greetings");
    let owner = Owner::start(&[1000]);
    for round in 0..40 {
        let mut socket = TcpStream::connect(owner.server.local_addr()).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        let mut bytes = if round % 2 == 0 {
            let token = owner.tokens.issue(1, Instant::now(), LIMIT).unwrap()[0];
            Hello { token, incarnation: INCARNATION }.encode().to_vec()
        } else {
            random.bytes(56)
        };
        // Past the token every bit counts, the version and the reserved field included.
        let at = 32 + random.below(24);
        bytes[at] ^= 1 << random.below(8);
        if round % 4 == 3 {
            bytes.truncate(1 + random.below(55));
        }
        // The owner may close while this is being written.
        let _ = socket.write_all(&bytes);
        let _ = socket.shutdown(Shutdown::Write);
        assert!(is_closed(&mut socket));
    }
    eventually("all are gone", || owner.server.stats().connections == 0);
    assert_eq!(owner.server.stats().objects_sent, 0);
    let mut reader = Reader::new();
    reader.connect(1, owner.target(1)).unwrap();
    reader.read_whole(1, 0, 1000, 1);
}
