//! One frame on each stream: a kind byte, a 32-bit little-endian length, that many bytes, end of stream.

use bytes::{BufMut, Bytes, BytesMut};
use quinn::{ReadError, ReadExactError, RecvStream, SendStream, WriteError};

use crate::limits::{FRAME_BYTES_AHEAD, FRAME_BYTES_MAX, FRAME_HEADER_BYTES};

/// What a frame is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Request = 1,
    Reply = 2,
    Notification = 3,
    /// Sent once by the connecting side. With TLS 1.3 the client's handshake ends before the server has judged the
    /// client's certificate; only an answered greeting shows that the connection is usable.
    Greeting = 4,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        [Self::Request, Self::Reply, Self::Notification, Self::Greeting]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }
}

/// A frame's header, checked against the limit before anything else of the frame is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) kind: Kind,
    pub(crate) length_bytes: usize,
}

/// Why a frame could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FrameError {
    TooLarge { length_bytes: usize },
    Malformed,
    Read(ReadError),
}

impl From<ReadError> for FrameError {
    fn from(error: ReadError) -> Self {
        Self::Read(error)
    }
}

/// Writes one frame and ends the stream. The body is handed over without a copy.
pub(crate) async fn write(stream: &mut SendStream, kind: Kind, body: Bytes) -> Result<(), WriteError> {
    let mut header = BytesMut::with_capacity(FRAME_HEADER_BYTES);
    header.put_u8(kind as u8);
    // Callers refuse bodies above FRAME_BYTES_MAX, which fits 32 bits.
    header.put_u32_le(u32::try_from(body.len()).unwrap_or(u32::MAX));
    let mut parts = [header.freeze(), body];
    let parts = if parts[1].is_empty() { &mut parts[..1] } else { &mut parts[..] };
    stream.write_all_chunks(parts).await?;
    // Fails only for a stream that was stopped meanwhile, which the next operation on it reports.
    let _ = stream.finish();
    Ok(())
}

/// Reads and checks a frame's header.
pub(crate) async fn read_header(stream: &mut RecvStream) -> Result<Header, FrameError> {
    let mut header = [0u8; FRAME_HEADER_BYTES];
    stream.read_exact(&mut header).await.map_err(|error| match error {
        ReadExactError::FinishedEarly(_) => FrameError::Malformed,
        ReadExactError::ReadError(error) => FrameError::Read(error),
    })?;
    let [kind, length @ ..] = header;
    let kind = Kind::from_byte(kind).ok_or(FrameError::Malformed)?;
    let length_bytes = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
    if length_bytes > FRAME_BYTES_MAX {
        return Err(FrameError::TooLarge { length_bytes });
    }
    Ok(Header { kind, length_bytes })
}

/// Reads the body that `header` announces, and the end of the stream.
pub(crate) async fn read_body(stream: &mut RecvStream, header: Header) -> Result<Bytes, FrameError> {
    // A body comes in packets of about 1,400 bytes; taking many under one lock of the connection matters at 64 KiB.
    let mut chunks = [const { Bytes::new() }; 64];
    let mut body = BytesMut::new();
    while let Some(count) = stream.read_chunks(&mut chunks).await? {
        for chunk in chunks.iter_mut().take(count) {
            let chunk = std::mem::take(chunk);
            if chunk.len() > header.length_bytes - body.len() {
                return Err(FrameError::Malformed);
            }
            if body.is_empty() && chunk.len() == header.length_bytes {
                // The whole body in one piece: hand it on without a copy once the stream's end is seen.
                return match stream.read_chunk(1, true).await? {
                    None => Ok(chunk),
                    Some(_) => Err(FrameError::Malformed),
                };
            }
            if body.capacity() == 0 {
                body.reserve(header.length_bytes.min(FRAME_BYTES_AHEAD));
            }
            body.extend_from_slice(&chunk);
        }
    }
    if body.len() == header.length_bytes {
        Ok(body.freeze())
    } else {
        Err(FrameError::Malformed)
    }
}
