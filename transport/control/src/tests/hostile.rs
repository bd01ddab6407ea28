//! Peers that hold valid certificates and do not keep to the protocol.

use std::sync::Arc;

use bytes::Bytes;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{ReadError, ReadExactError, VarInt};

use super::*;
use crate::error::code;
use crate::frame::Kind;
use crate::limits::{FRAME_BYTES_MAX, REQUEST_BYTES_PENDING_MAX};
use crate::tls::NameRule;
use crate::{ConnectError, RequestError};

/// A connection that sends what it likes.
async fn raw_client(tls: &Tls, server: &Endpoint) -> (quinn::Endpoint, quinn::Connection) {
    let crypto = QuicClientConfig::try_from(tls.control_client_config(NameRule::Any).unwrap()).unwrap();
    let endpoint = quinn::Endpoint::client(v4()).unwrap();
    let config = quinn::ClientConfig::new(Arc::new(crypto));
    let connection = endpoint.connect_with(config, server.local_addr(), "any").unwrap().await.unwrap();
    (endpoint, connection)
}

fn header(kind: u8, length: u32) -> Vec<u8> {
    let mut bytes = vec![kind];
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes
}

/// Sends `bytes` on a stream of its own, ended or not, and gives the code with which the reply is refused.
async fn refusal_of(connection: &quinn::Connection, bytes: &[u8], end: bool) -> u64 {
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    // The peer may stop the stream before all of it is sent.
    let _ = send.write_all(bytes).await;
    if end {
        let _ = send.finish();
    }
    let mut byte = [0u8; 1];
    match tokio::time::timeout(SOON, recv.read_exact(&mut byte)).await.expect("refused in time") {
        Err(ReadExactError::ReadError(ReadError::Reset(code))) => code.into_inner(),
        other => panic!("not refused: {other:?}"),
    }
}

async fn works(connection: &quinn::Connection) -> bool {
    let (mut send, mut recv) = connection.open_bi().await.unwrap();
    send.write_all(&header(Kind::Request as u8, 2)).await.unwrap();
    send.write_all(b"ab").await.unwrap();
    send.finish().unwrap();
    let reply = recv.read_to_end(100).await.unwrap();
    reply == [&header(Kind::Reply as u8, 2)[..], b"ba"].concat()
}

#[tokio::test]
async fn frames_that_break_the_rules_are_refused_and_the_connection_lives() {
    let tls = new_tls(&[]);
    let server = bind(&tls, Arc::new(Recorder::default()));
    let (_endpoint, connection) = raw_client(&tls, &server).await;
    let request = Kind::Request as u8;
    let too_large = u32::try_from(FRAME_BYTES_MAX + 1).unwrap();
    let malformed = u64::from(code::MALFORMED);
    // The length alone is enough: nothing of the body is waited for.
    assert_eq!(
        refusal_of(&connection, &header(request, too_large), false).await,
        u64::from(code::REQUEST_TOO_LARGE)
    );
    assert_eq!(
        refusal_of(&connection, &header(request, u32::MAX), false).await,
        u64::from(code::REQUEST_TOO_LARGE)
    );
    for (bytes, what) in [
        (vec![], "nothing at all"),
        (vec![request, 1], "half a header"),
        (header(request, 5), "a length without a body"),
        ([header(request, 5), b"abc".to_vec()].concat(), "a body that is too short"),
        ([header(request, 2), b"abc".to_vec()].concat(), "a body that is too long"),
        ([header(request, 0), b"a".to_vec()].concat(), "a body where none was announced"),
        ([header(Kind::Reply as u8, 1), b"a".to_vec()].concat(), "a reply to nothing"),
        (
            [header(Kind::Notification as u8, 1), b"a".to_vec()].concat(),
            "a notification that expects a reply",
        ),
        ([header(Kind::Greeting as u8, 1), b"a".to_vec()].concat(), "a greeting with a body"),
        (header(0, 0), "kind 0"),
        (header(255, 0), "kind 255"),
    ] {
        assert_eq!(refusal_of(&connection, &bytes, true).await, malformed, "{what}");
    }
    assert!(works(&connection).await);
}

#[tokio::test]
async fn random_bytes_are_refused_or_answered_and_never_end_the_server() {
    let tls = new_tls(&[]);
    let recorder = Arc::new(Recorder::default());
    let server = bind(&tls, recorder.clone());
    let (_endpoint, connection) = raw_client(&tls, &server).await;
    let seed: u64 = std::env::var("KVFABRIC_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(|| u64::from(std::process::id()));
    println!("replay: KVFABRIC_TEST_SEED={seed} cargo test -p kvfabric-transport-control random_bytes");
    for round in 0..500u64 {
        let mut bytes = pattern(usize::try_from(round % 97).unwrap() * 31, seed.wrapping_add(round)).to_vec();
        if let Some(kind) = bytes.first_mut() {
            // Half of them get past the first check.
            *kind %= 8;
        }
        let mut uni = connection.open_uni().await.unwrap();
        let _ = uni.write_all(&bytes).await;
        if round % 3 == 0 {
            let _ = uni.finish();
        } else {
            let _ = uni.reset(VarInt::from_u32(77));
        }
        let (mut send, mut recv) = connection.open_bi().await.unwrap();
        let _ = send.write_all(&bytes).await;
        let _ = send.finish();
        let ended = tokio::time::timeout(SOON, recv.read_to_end(1 << 20)).await;
        assert!(ended.is_ok(), "stream {round} has no end");
    }
    assert!(works(&connection).await);
    assert_eq!(connection.close_reason(), None);
}

#[tokio::test]
async fn bytes_of_waiting_requests_are_bounded() {
    let tls = new_tls(&[]);
    let server = bind(&tls, Arc::new(Recorder::default()));
    let (_endpoint, connection) = raw_client(&tls, &server).await;
    let claim = header(Kind::Request as u8, u32::try_from(FRAME_BYTES_MAX).unwrap());
    let mut open = Vec::new();
    for _ in 0..REQUEST_BYTES_PENDING_MAX / FRAME_BYTES_MAX {
        let (mut send, recv) = connection.open_bi().await.unwrap();
        send.write_all(&claim).await.unwrap();
        open.push((send, recv));
    }
    // Streams are taken in order only mostly, so the last claim may not be the one refused: one more certainly is.
    let mut byte = [0u8; 1];
    let refused = refusal_of(&connection, &claim, false).await;
    assert_eq!(refused, u64::from(code::BUSY));
    // Giving them up makes room again.
    for (mut send, _recv) in open.drain(..) {
        send.reset(VarInt::from_u32(1)).unwrap();
    }
    let started = Instant::now();
    loop {
        let (mut send, mut recv) = connection.open_bi().await.unwrap();
        send.write_all(&claim).await.unwrap();
        match tokio::time::timeout(Duration::from_millis(200), recv.read_exact(&mut byte)).await {
            Err(_) => break,
            Ok(Err(ReadExactError::ReadError(ReadError::Reset(code)))) if code.into_inner() == 4 => {}
            Ok(other) => panic!("{other:?}"),
        }
        assert!(started.elapsed() < SOON, "room was not given back");
    }
}

/// A server that answers the greeting, and then every request with `reply` as it stands.
async fn raw_server(tls: &Tls, reply: Vec<u8>) -> (quinn::Endpoint, tokio::task::JoinHandle<()>) {
    let crypto = QuicServerConfig::try_from(tls.control_server_config().unwrap()).unwrap();
    let config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
    let endpoint = quinn::Endpoint::server(config, v4()).unwrap();
    let accepting = endpoint.clone();
    let task = tokio::spawn(async move {
        while let Some(incoming) = accepting.accept().await {
            let connection = incoming.accept().unwrap().await.unwrap();
            let mut greeted = false;
            while let Ok((mut send, mut recv)) = connection.accept_bi().await {
                recv.read_to_end(1 << 20).await.unwrap();
                let answer = if greeted { reply.clone() } else { header(Kind::Reply as u8, 0) };
                greeted = true;
                // The client may stop the stream before all of it is sent.
                let _ = send.write_all(&answer).await;
                let _ = send.finish();
            }
        }
    });
    (endpoint, task)
}

async fn ask_raw_server(reply: Vec<u8>) -> Result<Bytes, RequestError> {
    let tls = new_tls(&[]);
    let (server, task) = raw_server(&tls, reply).await;
    let client = client(&tls);
    let connection = client.connect(&server.local_addr().unwrap().to_string()).await.unwrap();
    let result = connection.request("ab".into(), SOON).await;
    task.abort();
    result
}

#[tokio::test]
async fn replies_that_break_the_rules_are_errors() {
    let reply = Kind::Reply as u8;
    let too_large = u32::try_from(FRAME_BYTES_MAX + 1).unwrap();
    let expected =
        RequestError::ReplyTooLarge { length_bytes: FRAME_BYTES_MAX + 1, limit_bytes: FRAME_BYTES_MAX };
    assert_eq!(ask_raw_server(header(reply, too_large)).await, Err(expected));
    for bytes in [
        vec![],
        vec![reply, 0, 0],
        header(reply, 3),
        [header(reply, 1), b"abc".to_vec()].concat(),
        header(Kind::Request as u8, 0),
        header(99, 0),
    ] {
        assert_eq!(ask_raw_server(bytes.clone()).await, Err(RequestError::MalformedReply), "{bytes:?}");
    }
    let good = [header(reply, 3), b"abc".to_vec()].concat();
    assert_eq!(ask_raw_server(good).await, Ok(Bytes::from_static(b"abc")));
}

#[tokio::test]
async fn another_protocol_version_is_refused_in_the_handshake() {
    let tls = new_tls(&[]);
    let server = bind(&tls, Arc::new(Recorder::default()));
    let mut crypto = tls.control_client_config(NameRule::Any).unwrap();
    crypto.alpn_protocols = vec![b"kvfabric-control/999".to_vec()];
    let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(crypto).unwrap()));
    let endpoint = quinn::Endpoint::client(v4()).unwrap();
    let error = endpoint.connect_with(config, server.local_addr(), "any").unwrap().await.unwrap_err();
    assert!(matches!(CloseReason::from_quic(&error), CloseReason::Tls(_)), "{error:?}");
}

#[tokio::test]
async fn packets_that_are_not_quic_are_ignored() {
    let tls = new_tls(&[]);
    let server = bind(&tls, Arc::new(Recorder::default()));
    let socket = std::net::UdpSocket::bind(v4()).unwrap();
    for seed in 0..500 {
        let length = usize::try_from(seed).unwrap() * 3 % 1400;
        let mut packet = pattern(length, seed).to_vec();
        if let Some(first) = packet.first_mut().filter(|_| seed % 2 == 0) {
            // Looks like the long header of an Initial packet.
            *first = 0xc0 | (*first & 0x0f);
        }
        socket.send_to(&packet, server.local_addr()).unwrap();
    }
    let client = client(&tls);
    let connection = connect(&client, &server).await;
    assert_eq!(connection.request("ab".into(), SOON).await.unwrap(), Bytes::from_static(b"ba"));
}

#[tokio::test]
async fn a_server_that_never_answers_the_greeting_is_a_timeout() {
    let tls = new_tls(&[]);
    let crypto = QuicServerConfig::try_from(tls.control_server_config().unwrap()).unwrap();
    let server = quinn::Endpoint::server(quinn::ServerConfig::with_crypto(Arc::new(crypto)), v4()).unwrap();
    let target = server.local_addr().unwrap().to_string();
    let task = tokio::spawn(async move {
        let connection = server.accept().await.unwrap().accept().unwrap().await.unwrap();
        connection.closed().await
    });
    let timeout = Duration::from_millis(500);
    let config = EndpointConfig { connect_timeout: timeout, ..EndpointConfig::new(tls) };
    let client = Endpoint::client(config, Arc::new(Recorder::default())).unwrap();
    assert_eq!(client.connect(&target).await.unwrap_err(), ConnectError::Timeout { target, timeout });
    // The half-made connection does not linger.
    tokio::time::timeout(SOON, task).await.unwrap().unwrap();
}
