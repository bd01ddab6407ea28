//! Fuzz bodies: the same functions serve fuzzers and property tests.

use super::{
    decode_reply, decode_request, encode_reply, encode_request, FixedRecord, Records, Reply, Request,
};

/// Decodes arbitrary bytes as a request and, if they are one, uses all of it. Never panics, except when a message does
/// not survive encoding: that is the bug to find.
pub fn fuzz_request(bytes: &[u8]) {
    let Ok(request) = decode_request(bytes) else { return };
    match &request {
        Request::Publish(body) => exhaust(&body.ops),
        Request::Lookup(body) => exhaust(&body.0.keys),
        Request::Locate(body) => exhaust(&body.0.keys),
        Request::MissReports(body) => exhaust(&body.reports),
        Request::Slabs(body) => {
            exhaust(&body.added);
            exhaust(&body.retired);
        }
        Request::Touch(body) => exhaust(&body.entries),
        _ => {}
    }
    let mut again = Vec::new();
    let encoded = encode_request(&request, &mut again);
    assert!(encoded.is_ok(), "a decoded request must be encodable");
    assert_eq!(decode_request(&again), Ok(request));
}

/// Decodes arbitrary bytes as a reply and, if they are one, uses all of it. Never panics, except when a message does
/// not survive encoding: that is the bug to find.
pub fn fuzz_reply(bytes: &[u8]) {
    let Ok(reply) = decode_reply(bytes) else { return };
    match &reply {
        Reply::Publish(super::PublishReply::Applied { raised, .. }) => exhaust(raised),
        Reply::Lookup(body) => assert_eq!(body.hits.iter().filter(|hit| *hit).count(), body.hits.ones()),
        Reply::Locate(body) => {
            assert_eq!(body.iter().count(), body.len());
            exhaust(body.ranks());
        }
        Reply::Hello(super::HelloReply::Ack(body)) => {
            exhaust(&body.slabs);
            exhaust(&body.tcp_tokens);
        }
        _ => {}
    }
    let mut again = Vec::new();
    let encoded = encode_reply(&reply, &mut again);
    assert!(encoded.is_ok(), "a decoded reply must be encodable");
    assert_eq!(decode_reply(&again), Ok(reply));
}

fn exhaust<R: FixedRecord>(records: &Records<'_, R>) {
    let again: Records<'_, R> = records.iter().collect();
    assert_eq!(again.len(), records.len());
    assert_eq!(records.iter().len(), records.len());
}
