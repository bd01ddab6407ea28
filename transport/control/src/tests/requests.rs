//! Requests and notifications that go well.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::*;
use crate::limits::FRAME_BYTES_MAX;
use crate::{Backoff, LinkState, Reconnecting, RequestError};

#[tokio::test]
async fn requests_and_replies_of_every_size_up_to_a_frame() {
    let tls = new_tls(&[]);
    let server = bind(&tls, Arc::new(Recorder::default()));
    let client = client(&tls);
    let connection = connect(&client, &server).await;
    for length in [0, 1, 5, 1199, 1200, 1451, 65_536, 65_537, 1 << 20, FRAME_BYTES_MAX - 1, FRAME_BYTES_MAX] {
        let request = pattern(length, length as u64);
        let reply = connection.request(request.clone(), SOON).await.unwrap();
        assert!(reply == reversed(&request), "reply to {length} bytes differs");
    }
}

#[tokio::test]
async fn many_requests_in_flight_are_not_mixed_up() {
    let tls = new_tls(&[]);
    let server = bind(&tls, Arc::new(Recorder::default()));
    let client = client(&tls);
    let connection = connect(&client, &server).await;
    let mut tasks = tokio::task::JoinSet::new();
    // More than the peer takes at once: the rest waits for its turn.
    for number in 0..2000usize {
        let connection = connection.clone();
        tasks.spawn(async move {
            let request = pattern(number * 2, number as u64);
            let reply = connection.request(request.clone(), SOON).await.unwrap();
            assert!(reply == reversed(&request), "reply {number} differs");
        });
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_clients_at_once() {
    let tls = new_tls(&[]);
    let recorder = Arc::new(Recorder::default());
    let server = bind(&tls, recorder.clone());
    let address = server.local_addr().to_string();
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..64u64 {
        let (tls, address) = (tls.clone(), address.clone());
        tasks.spawn(async move {
            let client = client(&tls);
            let connection = client.connect(&address).await.unwrap();
            for round in 0..20 {
                let request = pattern(4096, number * 1000 + round);
                let reply = connection.request(request.clone(), SOON).await.unwrap();
                assert!(reply == reversed(&request));
            }
            client.shutdown("done").await;
        });
    }
    while let Some(result) = tasks.join_next().await {
        result.unwrap();
    }
    let count = |seen: &[Seen], which: fn(&Seen) -> bool| seen.iter().filter(|event| which(event)).count();
    recorder.until(|seen| count(seen, |event| matches!(event, Seen::Closed(..))) == 64).await;
    assert_eq!(count(&recorder.seen(), |event| matches!(event, Seen::Connected(_))), 64);
}

#[tokio::test]
async fn either_side_asks_on_the_connection_that_the_client_made() {
    let tls = new_tls(&["rank-a"]);
    let (at_server, at_client) = (Arc::new(Recorder::default()), Arc::new(Recorder::default()));
    let server = bind(&tls, at_server.clone());
    let client = Endpoint::client(EndpointConfig::new(tls.clone()), at_client.clone()).unwrap();
    let connection = connect(&client, &server).await;
    assert!(connection.is_initiator());
    at_server.until(|seen| !seen.is_empty()).await;
    let back = at_server.connection();
    assert!(!back.is_initiator());
    assert!(back.peer().is_authenticated());
    assert!(back.peer().names().contains(&"rank-a".to_owned()), "{:?}", back.peer());
    assert!(back.peer().allows("rank-a-3") && !back.peer().allows("rank-b"));
    let request = pattern(100_000, 1);
    assert_eq!(back.request(request.clone(), SOON).await.unwrap(), reversed(&request));
    assert_eq!(connection.request(request.clone(), SOON).await.unwrap(), reversed(&request));
    assert_eq!(at_client.seen(), [Seen::Connected(connection.id())]);
}

#[tokio::test]
async fn notifications_arrive_each_once() {
    let tls = new_tls(&[]);
    let recorder = Arc::new(Recorder::default());
    let server = bind(&tls, recorder.clone());
    let client = client(&tls);
    let connection = connect(&client, &server).await;
    for number in 0..2000u64 {
        connection.notify(pattern(100, number)).await.unwrap();
    }
    recorder.until(|seen| seen.len() == 2001).await;
    let mut got: Vec<Bytes> = recorder
        .seen()
        .into_iter()
        .filter_map(|event| match event {
            Seen::Notified(_, message) => Some(message),
            _ => None,
        })
        .collect();
    let mut expected: Vec<Bytes> = (0..2000).map(|number| pattern(100, number)).collect();
    got.sort();
    expected.sort();
    assert!(got == expected, "notifications lost, doubled or changed");
}

#[tokio::test]
async fn a_held_responder_answers_later_from_another_thread() {
    let tls = new_tls(&[]);
    let recorder = Arc::new(Recorder::default());
    let server = bind(&tls, recorder.clone());
    let client = client(&tls);
    let connection = connect(&client, &server).await;
    let waiting = tokio::spawn(async move { connection.request(HOLD.into(), SOON).await });
    let held = recorder.first_held().await;
    assert!(!held.is_abandoned());
    std::thread::spawn(move || assert!(held.reply("late"))).join().unwrap();
    assert_eq!(waiting.await.unwrap().unwrap(), Bytes::from_static(b"late"));
}

#[tokio::test]
async fn both_sides_hear_of_the_end_once_and_why() {
    let tls = new_tls(&[]);
    let (at_server, at_client) = (Arc::new(Recorder::default()), Arc::new(Recorder::default()));
    let server = bind(&tls, at_server.clone());
    let client = Endpoint::client(EndpointConfig::new(tls.clone()), at_client.clone()).unwrap();
    let connection = connect(&client, &server).await;
    connection.close("had enough");
    at_client.until(|seen| seen.len() == 2).await;
    at_server.until(|seen| seen.len() == 2).await;
    assert_eq!(at_client.seen()[1], Seen::Closed(connection.id(), CloseReason::Local));
    let reason = CloseReason::Peer { code: 0, reason: "had enough".into() };
    assert_eq!(at_server.seen()[1], Seen::Closed(at_server.connection().id(), reason));
    assert_eq!(connection.closed().await, CloseReason::Local);
    let error = connection.request(Bytes::new(), SOON).await.unwrap_err();
    assert_eq!(error, RequestError::ConnectionLost { reason: CloseReason::Local });
}

#[tokio::test]
async fn ipv6_and_names_of_both_families() {
    let tls = new_tls(&[]);
    let six = Endpoint::bind(
        EndpointConfig::new(tls.clone()),
        "[::1]:0".parse().unwrap(),
        Arc::new(Recorder::default()),
    )
    .unwrap();
    let four = bind(&tls, Arc::new(Recorder::default()));
    let client = client(&tls);
    for server in [&six, &four] {
        for target in [server.local_addr().to_string(), format!("localhost:{}", server.local_addr().port())] {
            // Whether `localhost` has an IPv6 address is the host's affair.
            if target.starts_with("localhost") && server.local_addr().is_ipv6() && !localhost_is_ipv6().await
            {
                continue;
            }
            let connection = client.connect(&target).await.unwrap();
            assert_eq!(connection.peer().address(), server.local_addr());
            let reply = connection.request("ab".into(), SOON).await.unwrap();
            assert_eq!(reply, Bytes::from_static(b"ba"));
        }
    }
}

async fn localhost_is_ipv6() -> bool {
    tokio::net::lookup_host("localhost:1").await.is_ok_and(|mut found| found.any(|address| address.is_ipv6()))
}

#[tokio::test]
async fn insecure_mode_works_with_itself_and_proves_no_names() {
    let tls = Tls::load(&Security::InsecureNoAuth).unwrap();
    let recorder = Arc::new(Recorder::default());
    let server = bind(&tls, recorder.clone());
    // Another process has another certificate.
    let other = client(&Tls::load(&Security::InsecureNoAuth).unwrap());
    let connection = connect(&other, &server).await;
    assert_eq!(connection.request("ab".into(), SOON).await.unwrap(), Bytes::from_static(b"ba"));
    let peer = recorder.connection().peer().clone();
    assert!(!peer.is_authenticated() && peer.names().is_empty() && peer.allows("anybody"));
}

#[tokio::test]
async fn a_link_comes_back_when_its_server_does() {
    let tls = new_tls(&[]);
    let server = bind(&tls, Arc::new(Recorder::default()));
    let address = server.local_addr();
    let backoff = Backoff::new(Duration::from_millis(10), Duration::from_millis(100));
    let link = Reconnecting::start(client(&tls), &address.to_string(), backoff, 1);
    let first = link.connection(SOON).await.unwrap();
    assert_eq!(first.request("ab".into(), SOON).await.unwrap(), Bytes::from_static(b"ba"));
    server.shutdown("restart").await;
    drop(server);
    let mut states = link.watch();
    states
        .wait_for(|state| matches!(state, LinkState::Connecting { lost: Some(CloseReason::Peer { .. }), .. }))
        .await
        .unwrap();
    assert!(link.current().is_none());
    let started = Instant::now();
    let _server = loop {
        // The old socket closes when its last task has ended.
        match Endpoint::bind(EndpointConfig::new(tls.clone()), address, Arc::new(Recorder::default())) {
            Ok(server) => break server,
            Err(error) => assert!(started.elapsed() < SOON, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    let second = link.connection(SOON).await.unwrap();
    assert_ne!(second.id(), first.id());
    assert_eq!(second.request("ab".into(), SOON).await.unwrap(), Bytes::from_static(b"ba"));
}

/// Knows whether requests come after the end of their connection.
#[derive(Default)]
struct Ordered {
    requests: AtomicU64,
    late: AtomicU64,
    closed: std::sync::atomic::AtomicBool,
}

impl Handler for Ordered {
    fn handle_request(&self, _connection: &Connection, request: Bytes, responder: Responder) {
        self.requests.fetch_add(1, Ordering::SeqCst);
        // Widens the window in which the end may overtake.
        std::thread::yield_now();
        if self.closed.load(Ordering::SeqCst) {
            self.late.fetch_add(1, Ordering::SeqCst);
        }
        responder.reply(request);
    }

    fn handle_closed(&self, _connection: &Connection, _reason: &CloseReason) {
        self.closed.store(true, Ordering::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_request_comes_after_the_end_of_its_connection() {
    let tls = new_tls(&[]);
    let mut requests = 0;
    for round in 0..20 {
        let ordered = Arc::new(Ordered::default());
        let server = bind(&tls, ordered.clone());
        let client = client(&tls);
        let connection = connect(&client, &server).await;
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..100 {
            let connection = connection.clone();
            tasks.spawn(async move { connection.request(Bytes::from_static(&[1; 2000]), SOON).await });
        }
        // Ends in the middle of it, at another point each time.
        for _ in 0..round * 3 {
            tasks.join_next().await;
        }
        connection.close("in the middle");
        while tasks.join_next().await.is_some() {}
        let started = Instant::now();
        while !ordered.closed.load(Ordering::SeqCst) {
            assert!(started.elapsed() < SOON);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert_eq!(ordered.late.load(Ordering::SeqCst), 0, "round {round}");
        requests += ordered.requests.load(Ordering::SeqCst);
    }
    assert!(requests > 500, "the rounds ended in the middle of something");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_that_must_prove_its_address_gets_in() {
    let tls = new_tls(&[]);
    let config = EndpointConfig {
        handshakes_per_source_per_s: 100_000,
        connect_timeout: SOON,
        ..EndpointConfig::new(tls.clone())
    };
    let server = Endpoint::bind(config.clone(), v4(), Arc::new(Recorder::default())).unwrap();
    let client = Endpoint::client(config, Arc::new(Recorder::default())).unwrap();
    let target = server.local_addr().to_string();
    let mut tasks = tokio::task::JoinSet::new();
    // More at once than are taken without a Retry.
    for _ in 0..2 * crate::limits::HANDSHAKES_PENDING_RETRY {
        let (client, target) = (client.clone(), target.clone());
        tasks.spawn(async move {
            let connection = client.connect(&target).await.unwrap();
            assert_eq!(connection.request("ab".into(), SOON).await.unwrap(), Bytes::from_static(b"ba"));
            connection
        });
    }
    let connections = tasks.join_all().await;
    assert_eq!(connections.len(), 2 * crate::limits::HANDSHAKES_PENDING_RETRY);
}
