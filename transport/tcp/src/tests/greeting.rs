//! Who is let in.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvfabric_transport_api::{ConnectError, Event, PeerKey, PeerTarget, Provider};

use super::{eventually, owner_memory, target, Owner, Reader, Script, INCARNATION, LIMIT};
use crate::{ProviderOptions, ServeError, ServerOptions, TcpServer, TokenStore};

fn refused(result: Result<(), ConnectError>) -> String {
    match result {
        Err(ConnectError::Unreachable(reason)) => reason,
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn tokens_are_good_once_and_in_time() {
    let owner = Owner::start(&[100]);
    let mut reader = Reader::new();
    let good = owner.target(1);
    reader.connect(1, good.clone()).unwrap();
    reader.read_whole(1, 0, 100, 1);
    assert!(refused(reader.connect(2, good)).contains("token"));
    let address = owner.server.local_addr();
    assert!(refused(reader.connect(3, target(address, vec![[0; 32]]))).contains("token"));
    let old = owner.tokens.issue(1, Instant::now(), Duration::ZERO).unwrap();
    assert!(refused(reader.connect(4, target(address, old))).contains("token"));
    // One good and one bad token are no connection either.
    let mut mixed = owner.target(2);
    mixed.tcp_tokens[1] = [9; 32];
    assert!(refused(reader.connect(5, mixed)).contains("token"));
    assert_eq!(
        reader.connect(6, target(address, vec![])),
        Err(ConnectError::Protocol("the peer issued no data token".to_owned()))
    );
    assert_eq!(reader.connect(7, PeerTarget::default()), Err(ConnectError::NoAddress));
    eventually("refusals are counted", || owner.server.stats().greetings_refused >= 4);
    reader.read_whole(1, 0, 100, 1);
}

#[test]
fn another_incarnation_is_refused_and_told() {
    let owner = Owner::start(&[100]);
    let mut reader = Reader::new();
    let mut wrong = owner.target(1);
    wrong.incarnation = 77;
    let error = reader.connect(1, wrong).unwrap_err();
    assert_eq!(error, ConnectError::WrongIncarnation { wanted: 77, found: INCARNATION });
}

#[test]
fn an_owner_that_claims_another_incarnation_is_refused() {
    let script = Script::new();
    let mut reader = Reader::new();
    reader.provider.connect(PeerKey(1), script.target());
    let mut socket = script.listener.accept().unwrap().0;
    let welcome = crate::wire::Welcome { verdict: crate::wire::Verdict::Ready, incarnation: 5 };
    std::io::Write::write_all(&mut socket, &welcome.encode()).unwrap();
    let Event::ConnectFailed { error, .. } = reader.next() else { panic!("connected") };
    assert_eq!(error, ConnectError::WrongIncarnation { wanted: INCARNATION, found: 5 });
}

#[test]
fn nobody_there_and_nobody_answering_are_told_apart_and_bounded() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = gone.local_addr().unwrap();
    drop(gone);
    let options = ProviderOptions { connect_timeout: Duration::from_millis(200), ..Default::default() };
    let mut reader = Reader::with(options);
    assert!(refused(reader.connect(1, target(address, vec![[1; 32]]))).contains("refused"));
    let script = Script::new();
    assert!(refused(reader.connect(2, script.target())).contains("in time"));
    assert!(
        refused(
            reader
                .connect(3, PeerTarget { tcp_address: Some("no host at all".to_owned()), ..script.target() })
        )
        .len()
            > 3
    );
    let gone = Script::new();
    reader.provider.connect(PeerKey(4), gone.target());
    drop(gone);
    assert!(matches!(reader.next(), Event::ConnectFailed { peer: PeerKey(4), .. }));
}

#[test]
fn a_port_in_use_is_named() {
    let owner = Owner::start(&[100]);
    let address = owner.server.local_addr();
    let second = TcpServer::start(
        address,
        owner_memory(&[100]),
        Arc::new(TokenStore::new()),
        INCARNATION,
        ServerOptions::default(),
    );
    match second {
        Err(error @ ServeError::AddressInUse(named)) => {
            assert_eq!(named, address);
            assert!(error.to_string().contains(&address.to_string()));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_listener_of_the_callers_own_and_several_threads() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let tokens = Arc::new(TokenStore::new());
    let options = ServerOptions { threads: 3, busy_poll: Duration::from_micros(50), ..Default::default() };
    let server =
        TcpServer::with_listener(listener, owner_memory(&[5000]), Arc::clone(&tokens), INCARNATION, options)
            .unwrap();
    assert_eq!(server.local_addr(), address);
    let mut reader = Reader::new();
    for peer in 0..6 {
        let issued = tokens.issue(2, Instant::now(), LIMIT).unwrap();
        reader.connect(peer, target(address, issued)).unwrap();
    }
    for peer in 0..6 {
        reader.read_whole(peer, 0, 5000, 1);
    }
    assert_eq!(server.stats().connections, 12);
    let options = ServerOptions { threads: 0, ..Default::default() };
    let refused = TcpServer::start(address, owner_memory(&[1]), tokens, INCARNATION, options);
    assert!(matches!(refused, Err(ServeError::AddressInUse(_) | ServeError::Option(_))));
}

#[test]
fn ipv6_and_host_names() {
    let mut reader = Reader::new();
    if TcpListener::bind("[::1]:0").is_ok() {
        let owner = Owner::start_with(&[3000], "[::1]:0".parse().unwrap(), ServerOptions::default());
        assert!(owner.server.local_addr().is_ipv6());
        reader.connect(1, owner.target(2)).unwrap();
        reader.read_whole(1, 0, 3000, 1);
        drop(owner);
        assert!(matches!(reader.next(), Event::Disconnected { peer: PeerKey(1), .. }));
    } else {
        println!("skipped: this machine has no IPv6 loopback");
    }
    // Whichever addresses the name has, the one that listens is found.
    let owner = Owner::start(&[3000]);
    let mut named = owner.target(2);
    named.tcp_address = Some(format!("localhost:{}", owner.server.local_addr().port()));
    reader.connect(2, named).unwrap();
    reader.read_whole(2, 0, 3000, 1);
}

#[test]
fn limits_and_timers_of_the_owner() {
    let options =
        ServerOptions { connections_max: 2, idle_timeout: Duration::from_millis(700), ..Default::default() };
    let owner = Owner::start_with(&[100], "127.0.0.1:0".parse().unwrap(), options);
    let mut reader = Reader::new();
    reader.connect(1, owner.target(1)).unwrap();
    let silent = TcpStream::connect(owner.server.local_addr()).unwrap();
    eventually("both are there", || owner.server.stats().connections == 2);
    assert!(reader.connect(2, owner.target(1)).is_err());
    assert_eq!(owner.server.stats().connections_refused, 1);
    assert!(matches!(reader.next(), Event::Disconnected { peer: PeerKey(1), .. }));
    eventually("the silent one was sent away", || owner.server.stats().greetings_refused == 1);
    eventually("nobody is left", || owner.server.stats().connections == 0);
    assert_eq!(owner.server.stats().timeouts, 1);
    drop(silent);
}

#[test]
fn connecting_again_under_the_same_key_starts_anew() {
    let owner = Owner::start(&[100]);
    let mut reader = Reader::new();
    reader.connect(1, owner.target(1)).unwrap();
    reader.connect(1, owner.target(2)).unwrap();
    reader.read_whole(1, 0, 100, 1);
    eventually("the first connection is gone", || owner.server.stats().connections == 2);
}
