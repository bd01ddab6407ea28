//! Where a reply is: header, bytes, word. Builds the entries of the next receive and accounts for what it brought.

use std::collections::VecDeque;
use std::hash::Hasher as _;

use kvfabric_memory::{RawWord, ScatterList, Segment};
use kvfabric_transport_api::{Event, Landed, ReadDone, ReadError, ReadOp};
use twox_hash::XxHash3_64;

use crate::limits::{HASH_CHUNK_BYTES, IO_VECTORS_MAX, RECEIVE_TURN_BYTES};
use crate::socket::{copy_shared, IoVec};
use crate::wire::{Reply, Status, WireError, REPLY_BYTES};

/// One request whose reply is due.
pub(super) struct Flight {
    pub sequence: u64,
    pub length_bytes: u64,
    /// The operation, with its destination. `None`: ended by force and retired; the rest of its reply goes to the sink.
    pub op: Option<ReadOp>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Header,
    Body,
    Word,
}

/// Progress within the reply that is due first.
pub(super) struct Landing {
    stage: Stage,
    header: [u8; REPLY_BYTES],
    header_filled: usize,
    word: [u8; RawWord::BYTES],
    word_filled: usize,
    /// Bytes of the body that have arrived.
    landed: u64,
    /// The piece of the destination that is being filled, and how far.
    segment: usize,
    segment_filled: usize,
    hasher: Option<XxHash3_64>,
    /// Private copy of what is being hashed.
    piece: Box<[u8; HASH_PIECE_BYTES]>,
}

/// Pieces are copied here before they are hashed: the engine may write its memory at any time, so no reference to it
/// may exist. Small enough for the first-level cache.
const HASH_PIECE_BYTES: usize = 8 << 10;

impl Landing {
    pub(super) fn new() -> Self {
        Self {
            stage: Stage::Header,
            header: [0; REPLY_BYTES],
            header_filled: 0,
            word: [0; RawWord::BYTES],
            word_filled: 0,
            landed: 0,
            segment: 0,
            segment_filled: 0,
            hasher: None,
            piece: Box::new([0; HASH_PIECE_BYTES]),
        }
    }

    /// Bytes until the reply that is due first is complete.
    pub(super) fn due(&self, flights: &VecDeque<Flight>) -> u64 {
        let Some(flight) = flights.front() else { return 0 };
        let word = (RawWord::BYTES - self.word_filled) as u64;
        match self.stage {
            Stage::Header => (REPLY_BYTES - self.header_filled) as u64 + flight.length_bytes + word,
            Stage::Body => flight.length_bytes - self.landed + word,
            Stage::Word => word,
        }
    }

    /// Fills `vectors` with where the next bytes belong, and returns how many bytes that is.
    ///
    /// The next reply's header is taken along, never its body: until the header is judged, nothing says that these
    /// bytes are that object's. The one exception is a reply with none behind it, where whatever follows an error
    /// would be a violation anyway; so a single read needs a single receive.
    pub(super) fn compose(
        &mut self,
        flights: &VecDeque<Flight>,
        vectors: &mut Vec<IoVec>,
        sink: &mut [u8],
    ) -> usize {
        vectors.clear();
        let Some(flight) = flights.front() else { return 0 };
        let alone = flights.len() == 1;
        let mut total = 0;
        let mut push = |vectors: &mut Vec<IoVec>, vector: IoVec| {
            total += vector.length_bytes();
            vectors.push(vector);
        };
        if self.stage == Stage::Header {
            let room = self.header.get_mut(self.header_filled..).unwrap_or_default();
            push(vectors, IoVec::new(room.as_ptr(), room.len()));
            if !alone || flight.op.is_none() {
                return total;
            }
        }
        let mut complete = true;
        if self.stage != Stage::Word {
            let left = flight.length_bytes - self.landed;
            let limit = match &flight.op {
                None => sink.len(),
                Some(op) if op.checksum => HASH_CHUNK_BYTES,
                Some(_) => RECEIVE_TURN_BYTES,
            };
            let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(limit);
            let named = match &flight.op {
                Some(op) => self.name_destination(&op.destination, wanted, vectors, &mut push),
                None => {
                    push(vectors, IoVec::new(sink.as_mut_ptr(), wanted));
                    wanted
                }
            };
            complete = named as u64 == left;
        }
        if complete {
            let room = self.word.get_mut(self.word_filled..).unwrap_or_default();
            push(vectors, IoVec::new(room.as_ptr(), room.len()));
            if !alone && self.stage != Stage::Header {
                push(vectors, IoVec::new(self.header.as_mut_ptr(), REPLY_BYTES));
            }
        }
        total
    }

    /// Names the next `wanted` bytes of the destination, as far as one call can. Returns how many were named.
    fn name_destination(
        &self,
        destination: &ScatterList,
        wanted: usize,
        vectors: &mut Vec<IoVec>,
        push: &mut impl FnMut(&mut Vec<IoVec>, IoVec),
    ) -> usize {
        // Three entries are kept for header, word and next header.
        let entries = IO_VECTORS_MAX - 3;
        let mut named = 0;
        let mut skip = self.segment_filled;
        let pieces = destination.segments().get(self.segment..).unwrap_or_default();
        for piece in pieces.iter().take(entries) {
            let mut vector = IoVec::of_segment(piece);
            if skip > 0 {
                vector = IoVec::new(vector.base().wrapping_add(skip), vector.length_bytes() - skip);
                skip = 0;
            }
            vector.truncate(wanted - named);
            named += vector.length_bytes();
            push(vectors, vector);
            if named == wanted {
                break;
            }
        }
        named
    }

    /// Accounts for `bytes` that a receive composed by [`Landing::compose`] brought.
    ///
    /// # Errors
    /// [`WireError`]: the peer broke the protocol; the connection must be closed.
    pub(super) fn land(
        &mut self,
        mut bytes: usize,
        flights: &mut VecDeque<Flight>,
        events: &mut Vec<Event>,
    ) -> Result<(), WireError> {
        while bytes > 0 {
            let Some(flight) = flights.front_mut() else { return Err(WireError::Sequence) };
            match self.stage {
                Stage::Header => {
                    let taken = bytes.min(REPLY_BYTES - self.header_filled);
                    self.header_filled += taken;
                    bytes -= taken;
                    if self.header_filled == REPLY_BYTES {
                        let reply = Reply::decode(&self.header)?;
                        reply.check(flight.sequence, flight.length_bytes)?;
                        if reply.status == Status::Ok {
                            self.begin_body(flight);
                        } else if bytes > 0 {
                            // Nothing else was asked for, see `compose`.
                            return Err(WireError::Sequence);
                        } else {
                            self.begin_reply();
                            refuse(flights.pop_front(), reply.status, events);
                        }
                    }
                }
                Stage::Body => {
                    let left = usize::try_from(flight.length_bytes - self.landed).unwrap_or(usize::MAX);
                    let taken = bytes.min(left);
                    self.take_body(flight, taken);
                    bytes -= taken;
                    if self.landed == flight.length_bytes {
                        self.stage = Stage::Word;
                    }
                }
                Stage::Word => {
                    let taken = bytes.min(RawWord::BYTES - self.word_filled);
                    self.word_filled += taken;
                    bytes -= taken;
                    if self.word_filled == RawWord::BYTES {
                        self.retire(flights.pop_front(), events);
                        self.begin_reply();
                    }
                }
            }
        }
        Ok(())
    }

    fn begin_body(&mut self, flight: &Flight) {
        self.stage = Stage::Body;
        // The buffer is free again: the next header is received into it.
        self.header_filled = 0;
        self.hasher = flight.op.as_ref().is_some_and(|op| op.checksum).then(XxHash3_64::new);
    }

    /// The next reply starts from nothing; its first bytes may be named before its header has come.
    fn begin_reply(&mut self) {
        self.stage = Stage::Header;
        (self.header_filled, self.word_filled) = (0, 0);
        (self.landed, self.segment, self.segment_filled) = (0, 0, 0);
    }

    fn take_body(&mut self, flight: &Flight, taken: usize) {
        self.landed += taken as u64;
        let Some(op) = &flight.op else { return };
        let mut left = taken;
        while left > 0 {
            let Some(piece) = op.destination.segments().get(self.segment) else { return };
            let part = left.min(piece.length_bytes() - self.segment_filled);
            if let Some(hasher) = &mut self.hasher {
                hash_piece(hasher, &mut self.piece, piece, self.segment_filled, part);
            }
            left -= part;
            self.segment_filled += part;
            if self.segment_filled == piece.length_bytes() {
                self.segment += 1;
                self.segment_filled = 0;
            }
        }
    }

    fn retire(&mut self, flight: Option<Flight>, events: &mut Vec<Event>) {
        let check = self.hasher.take().map(|hasher| hasher.finish().max(1));
        let Some(Flight { op: Some(op), .. }) = flight else { return };
        let outcome = Ok(Landed { word: RawWord::from_le_bytes(&self.word), check });
        events.push(Event::Read(ReadDone { token: op.token, destination: op.destination, outcome }));
    }
}

fn refuse(flight: Option<Flight>, status: Status, events: &mut Vec<Event>) {
    let Some(Flight { op: Some(op), .. }) = flight else { return };
    let error = match status {
        Status::UnknownSlot => ReadError::UnknownSlot(op.slot),
        Status::SizeMismatch | Status::Ok => ReadError::SizeMismatch,
    };
    events.push(Event::Read(ReadDone { token: op.token, destination: op.destination, outcome: Err(error) }));
}

fn hash_piece(
    hasher: &mut XxHash3_64,
    buffer: &mut [u8; HASH_PIECE_BYTES],
    piece: &Segment,
    offset: usize,
    length_bytes: usize,
) {
    let mut done = 0;
    while done < length_bytes {
        let part = (length_bytes - done).min(HASH_PIECE_BYTES);
        let Some(buffer) = buffer.get_mut(..part) else { return };
        // SAFETY: `offset + length_bytes` lies within the piece, whose region the operation's list holds; the buffer
        // is private.
        unsafe { copy_shared(piece.base().wrapping_add(offset + done), buffer) };
        hasher.write(buffer);
        done += part;
    }
}
