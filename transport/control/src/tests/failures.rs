//! What goes wrong between honest peers, and the errors that say so.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::*;
use crate::limits::FRAME_BYTES_MAX;
use crate::{BindError, ConnectError, Refusal, RequestError};

fn quick(tls: &Tls, connect_timeout: Duration) -> EndpointConfig {
    EndpointConfig { connect_timeout, ..EndpointConfig::new(tls.clone()) }
}

#[tokio::test]
async fn a_body_above_a_frame_is_refused_here_and_as_a_reply_there() {
    let tls = new_tls(&[]);
    let server = bind(&tls, Arc::new(Recorder::default()));
    let client = client(&tls);
    let connection = connect(&client, &server).await;
    let too_large = Bytes::from(vec![0; FRAME_BYTES_MAX + 1]);
    let expected = RequestError::TooLarge { length_bytes: FRAME_BYTES_MAX + 1, limit_bytes: FRAME_BYTES_MAX };
    let error = connection.request(too_large.clone(), SOON).await.unwrap_err();
    assert!(error == expected && error.is_local() && !error.is_retryable());
    assert_eq!(connection.notify(too_large).await.unwrap_err(), expected);
    let error = connection.request(TOO_MUCH.into(), SOON).await.unwrap_err();
    assert_eq!(error, RequestError::Refused { refusal: Refusal::ReplyTooLarge });
    assert_eq!(connection.request("ab".into(), SOON).await.unwrap(), Bytes::from_static(b"ba"));
}

#[tokio::test]
async fn a_request_that_is_dropped_or_never_answered() {
    let tls = new_tls(&[]);
    let recorder = Arc::new(Recorder::default());
    let server = bind(&tls, recorder.clone());
    let client = client(&tls);
    let connection = connect(&client, &server).await;
    let error = connection.request(DROP.into(), SOON).await.unwrap_err();
    assert_eq!(error, RequestError::Refused { refusal: Refusal::Unanswered });
    let deadline = Duration::from_millis(100);
    let error = connection.request(HOLD.into(), deadline).await.unwrap_err();
    assert_eq!(error, RequestError::Timeout { deadline });
    assert!(error.is_retryable() && !error.is_connection_lost());
    // The server learns that nobody waits any more, and the connection is as good as before.
    let held = recorder.first_held().await;
    let started = Instant::now();
    while !held.is_abandoned() {
        assert!(started.elapsed() < SOON, "the cancelled request is still waited for");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(connection.request("ab".into(), SOON).await.unwrap(), Bytes::from_static(b"ba"));
}

#[tokio::test]
async fn a_server_that_leaves_in_the_middle_of_a_request_says_so() {
    let tls = new_tls(&[]);
    let recorder = Arc::new(Recorder::default());
    let server = bind(&tls, recorder.clone());
    let client = client(&tls);
    let connection = connect(&client, &server).await;
    let waiting = tokio::spawn(async move { connection.request(HOLD.into(), SOON).await });
    let held = recorder.first_held().await;
    server.shutdown("going down").await;
    let error = waiting.await.unwrap().unwrap_err();
    let reason = CloseReason::Peer { code: 0, reason: "going down".into() };
    assert_eq!(error, RequestError::ConnectionLost { reason });
    assert!(!held.reply("too late"));
}

#[test]
fn a_server_killed_in_the_middle_of_a_request_is_noticed_by_silence() {
    let tls = new_tls(&[]);
    let recorder = Arc::new(Recorder::default());
    let server_runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let server = server_runtime.block_on(async { bind(&tls, recorder.clone()) });
    let address = server.local_addr().to_string();
    let client_runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    client_runtime.block_on(async move {
        let config = EndpointConfig {
            idle_timeout: Duration::from_millis(1500),
            keep_alive: Duration::from_millis(300),
            ..EndpointConfig::new(tls.clone())
        };
        let client = Endpoint::client(config, Arc::new(Recorder::default())).unwrap();
        let connection = client.connect(&address).await.unwrap();
        let waiting = tokio::spawn(async move { connection.request(HOLD.into(), SOON).await });
        let held = recorder.first_held().await;
        // Nothing of the server runs any more, and nothing takes leave.
        server_runtime.shutdown_background();
        let error = waiting.await.unwrap().unwrap_err();
        assert_eq!(error, RequestError::ConnectionLost { reason: CloseReason::TimedOut });
        drop((held, server));
    });
}

#[tokio::test]
async fn an_idle_connection_is_kept_alive() {
    let tls = new_tls(&[]);
    let config = EndpointConfig {
        idle_timeout: Duration::from_millis(2000),
        keep_alive: Duration::from_millis(200),
        ..EndpointConfig::new(tls.clone())
    };
    let server = Endpoint::bind(config.clone(), v4(), Arc::new(Recorder::default())).unwrap();
    let client = Endpoint::client(config, Arc::new(Recorder::default())).unwrap();
    let connection = connect(&client, &server).await;
    tokio::time::sleep(Duration::from_millis(5000)).await;
    assert_eq!(connection.close_reason(), None);
}

#[tokio::test]
async fn other_authorities_are_refused_both_ways() {
    let (ours, theirs) = (new_tls(&[]), new_tls(&[]));
    let server = bind(&ours, Arc::new(Recorder::default()));
    let address = server.local_addr().to_string();
    let error = client(&theirs).connect(&address).await.unwrap_err();
    assert!(matches!(&error, ConnectError::Tls { .. }), "{error}");
    assert!(error.to_string().contains("--tls-dir") && error.to_string().contains(&address), "{error}");
    // A client without certificate, which would accept any server.
    let insecure = Tls::load(&Security::InsecureNoAuth).unwrap();
    let error = client(&insecure).connect(&address).await.unwrap_err();
    assert!(matches!(&error, ConnectError::Tls { .. }), "{error}");
    // A client with certificates does not take a server without.
    let server = bind(&insecure, Arc::new(Recorder::default()));
    let error = client(&ours).connect(&server.local_addr().to_string()).await.unwrap_err();
    assert!(matches!(&error, ConnectError::Tls { .. }), "{error}");
}

#[tokio::test]
async fn a_client_certificate_of_another_authority_is_refused_by_the_server() {
    // The client trusts the server's authority, but its own certificate is of another one.
    let (ours, theirs) = (TempDir::new(), TempDir::new());
    certs::generate(ours.path(), &[]).unwrap();
    certs::generate(theirs.path(), &[]).unwrap();
    let server_tls = Tls::load(&Security::Dir(ours.path().to_owned())).unwrap();
    let both = std::fs::read_to_string(ours.path().join("ca.pem")).unwrap()
        + &std::fs::read_to_string(theirs.path().join("ca.pem")).unwrap();
    std::fs::write(theirs.path().join("ca.pem"), both).unwrap();
    let client_tls = Tls::load(&Security::Dir(theirs.path().to_owned())).unwrap();
    let recorder = Arc::new(Recorder::default());
    let server = bind(&server_tls, recorder.clone());
    let error = client(&client_tls).connect(&server.local_addr().to_string()).await.unwrap_err();
    assert!(matches!(&error, ConnectError::Tls { .. }), "{error}");
    assert_eq!(recorder.seen(), [], "the server's handler never hears of such a client");
}

#[tokio::test]
async fn names_of_hosts_and_ranks_are_checked() {
    let tls = new_tls(&["engine0"]);
    let server = Endpoint::bind(
        EndpointConfig::new(tls.clone()),
        "127.0.0.2:0".parse().unwrap(),
        Arc::new(Recorder::default()),
    )
    .unwrap();
    let address = server.local_addr().to_string();
    let client = client(&tls);
    // 127.0.0.2 is not in the certificate, the rank is.
    let error = client.connect(&address).await.unwrap_err();
    assert!(matches!(&error, ConnectError::Tls { .. }), "{error}");
    client.connect_rank(&address, "engine0").await.unwrap();
    client.connect_rank(&address, "engine0-tp3").await.unwrap();
    for wrong in ["engine1", "engine01", ""] {
        let error = client.connect_rank(&address, wrong).await.unwrap_err();
        assert!(matches!(&error, ConnectError::Tls { .. }), "{wrong}: {error}");
    }
}

#[tokio::test]
async fn nobody_there_and_targets_that_make_no_sense() {
    let tls = new_tls(&[]);
    let limit = Duration::from_millis(400);
    let client = Endpoint::client(quick(&tls, limit), Arc::new(Recorder::default())).unwrap();
    let silent = std::net::UdpSocket::bind(v4()).unwrap();
    let target = silent.local_addr().unwrap().to_string();
    let error = client.connect(&target).await.unwrap_err();
    assert_eq!(error, ConnectError::Timeout { target: target.clone(), timeout: limit });
    assert!(error.to_string().contains(&target) && error.is_retryable());
    for wrong in ["", "localhost", "localhost:", "localhost:99999", ":7000", "::1:7000", "[::1]", "a b:1"] {
        let error = client.connect(wrong).await.unwrap_err();
        assert_eq!(error, ConnectError::InvalidTarget { target: wrong.to_owned() }, "{wrong}");
    }
    let client = self::client(&tls);
    let error = client.connect("no-such-host.invalid:7000").await.unwrap_err();
    assert!(matches!(&error, ConnectError::Unresolved { .. }), "{error}");
    assert!(error.to_string().contains("no-such-host.invalid:7000"), "{error}");
    let four = bind(&tls, Arc::new(Recorder::default()));
    let error = four.connect("[::1]:7000").await.unwrap_err();
    assert!(matches!(&error, ConnectError::Unreachable { .. }), "{error}");
    four.close("enough");
    let error = four.connect("127.0.0.1:7000").await.unwrap_err();
    assert!(matches!(&error, ConnectError::EndpointClosed { .. }), "{error}");
}

#[tokio::test]
async fn ports_and_addresses_that_cannot_be_listened_on() {
    let tls = new_tls(&[]);
    let first = bind(&tls, Arc::new(Recorder::default()));
    let address = first.local_addr();
    let again =
        |address| Endpoint::bind(EndpointConfig::new(tls.clone()), address, Arc::new(Recorder::default()));
    let error = again(address).unwrap_err();
    assert_eq!(error, BindError::AddressInUse { protocol: "UDP", address });
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    // TEST-NET-1 is nobody's.
    let elsewhere: SocketAddr = "192.0.2.1:0".parse().unwrap();
    let error = again(elsewhere).unwrap_err();
    assert_eq!(error, BindError::AddressNotAvailable { protocol: "UDP", address: elsewhere });
    let tcp = std::net::TcpListener::bind(v4()).unwrap();
    let address = tcp.local_addr().unwrap();
    let config = EndpointConfig::new(tls.clone());
    let error =
        Endpoint::bind_with_liveness(config.clone(), address, Arc::new(Recorder::default())).unwrap_err();
    assert_eq!(error, BindError::AddressInUse { protocol: "TCP", address });
    let (endpoint, listener) =
        Endpoint::bind_with_liveness(config, v4(), Arc::new(Recorder::default())).unwrap();
    assert_eq!(endpoint.local_addr(), listener.local_addr().unwrap());
}

#[tokio::test]
async fn development_certificates_stay_on_loopback() {
    let dir = TempDir::new();
    let tls = Tls::load_dev(&dir.path().join("dev-ca")).unwrap();
    let any: SocketAddr = "0.0.0.0:0".parse().unwrap();
    let error =
        Endpoint::bind(EndpointConfig::new(tls.clone()), any, Arc::new(Recorder::default())).unwrap_err();
    assert_eq!(error, BindError::DevBeyondLoopback { address: any });
    assert!(error.to_string().contains("--tls-dir") && error.to_string().contains("--insecure-no-auth"));
    // Every loopback address and every rank name will do.
    let server = Endpoint::bind(
        EndpointConfig::new(tls.clone()),
        "127.0.0.3:0".parse().unwrap(),
        Arc::new(Recorder::default()),
    )
    .unwrap();
    let connection = connect(&client(&tls), &server).await;
    assert!(connection.peer().is_authenticated() && connection.peer().allows("whatever"));
}

#[test]
fn an_endpoint_outside_of_a_runtime_is_an_error() {
    let result = Endpoint::client(EndpointConfig::new(new_tls(&[])), Arc::new(Recorder::default()));
    assert!(matches!(result, Err(BindError::NoRuntime { .. })));
}

#[tokio::test]
async fn handshakes_above_the_rate_wait_or_are_refused() {
    let tls = new_tls(&[]);
    let config = EndpointConfig { handshakes_per_source_per_s: 1, ..EndpointConfig::new(tls.clone()) };
    let server = Endpoint::bind(config, v4(), Arc::new(Recorder::default())).unwrap();
    let address = server.local_addr().to_string();
    // Three at a rate of one: the client asks again by itself.
    let patient = client(&tls);
    for _ in 0..3 {
        patient.connect(&address).await.unwrap();
    }
    // The bucket is empty now, and this client has no time.
    let hasty =
        Endpoint::client(quick(&tls, Duration::from_millis(300)), Arc::new(Recorder::default())).unwrap();
    let mut errors = Vec::new();
    for _ in 0..4 {
        if let Err(error) = hasty.connect(&address).await {
            errors.push(error);
        }
    }
    assert!(errors.contains(&ConnectError::Refused { target: address }), "{errors:?}");
}
