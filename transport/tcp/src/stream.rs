//! A connection's byte stream: the bare socket, or TLS over it. Both copy before they return.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustls::Connection;

use crate::limits::{TLS_BUFFER_BYTES, TLS_CHUNK_BYTES};
use crate::socket::{self, IoVec};

/// The two kinds of stream. An enum, so that the plain path costs one predictable branch.
pub(crate) enum Stream {
    Plain(OwnedFd),
    Tls(Box<TlsStream>),
}

pub(crate) struct TlsStream {
    socket: OwnedFd,
    session: Connection,
    /// Bytes pass through here on their way from memory that others may write.
    chunk: Box<[u8]>,
    /// The socket has ended; what rustls still holds can be read.
    closed: bool,
}

impl Stream {
    pub(crate) fn plain(socket: OwnedFd) -> Self {
        Self::Plain(socket)
    }

    pub(crate) fn tls(socket: OwnedFd, mut session: Connection) -> Self {
        session.set_buffer_limit(Some(TLS_BUFFER_BYTES));
        let chunk = vec![0; TLS_CHUNK_BYTES].into_boxed_slice();
        Self::Tls(Box::new(TlsStream { socket, session, chunk, closed: false }))
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Plain(socket) => socket.as_fd(),
            Self::Tls(tls) => tls.socket.as_fd(),
        }
    }

    /// Whether this is the bare socket, whose receives may ask to be woken late.
    pub(crate) fn is_plain(&self) -> bool {
        matches!(self, Self::Plain(_))
    }

    /// Receives what is there, without blocking; fewer bytes than asked for mean that the socket is drained. 0 is the
    /// end of the stream.
    ///
    /// # Safety
    /// Every entry must name writable memory to which no Rust reference exists during the call.
    pub(crate) unsafe fn receive(&mut self, vectors: &[IoVec]) -> io::Result<usize> {
        match self {
            // SAFETY: the caller's promise.
            Self::Plain(socket) => unsafe { socket::receive_vectored(socket.as_fd(), vectors) },
            // SAFETY: the caller's promise.
            Self::Tls(tls) => unsafe { tls.receive(vectors) },
        }
    }

    /// Receives into a buffer of our own.
    pub(crate) fn receive_into(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let vectors = [IoVec::new(buffer.as_mut_ptr(), buffer.len())];
        // SAFETY: the entry is the exclusively borrowed buffer.
        unsafe { self.receive(&vectors) }
    }

    /// Sends what the socket takes, without blocking. What was taken has been copied when this returns.
    ///
    /// # Safety
    /// Every entry must name readable memory; others may write it meanwhile.
    pub(crate) unsafe fn send(&mut self, vectors: &[IoVec], more: bool) -> io::Result<usize> {
        match self {
            // SAFETY: the caller's promise.
            Self::Plain(socket) => unsafe { socket::send_vectored(socket.as_fd(), vectors, more) },
            // SAFETY: the caller's promise.
            Self::Tls(tls) => unsafe { tls.send(vectors) },
        }
    }

    /// Sends bytes of our own.
    pub(crate) fn send_from(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // SAFETY: the entry is a borrowed slice.
        unsafe { self.send(&[IoVec::new(bytes.as_ptr(), bytes.len())], false) }
    }

    /// Moves a TLS session on where it has something to send of its own or kept back; the bare socket has nothing.
    /// Returns whether everything is out.
    pub(crate) fn flush(&mut self) -> io::Result<bool> {
        match self {
            Self::Plain(_) => Ok(true),
            Self::Tls(tls) => tls.flush(),
        }
    }

    /// Whether [`Stream::flush`] has something to do.
    pub(crate) fn wants_flush(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(tls) => tls.session.wants_write(),
        }
    }

    /// Goes on with a TLS handshake. Returns whether it is done; the bare socket has none.
    pub(crate) fn handshake(&mut self) -> io::Result<bool> {
        match self {
            Self::Plain(_) => Ok(true),
            Self::Tls(tls) => tls.handshake(),
        }
    }
}

/// The socket as rustls wants it.
struct Wire<'a>(BorrowedFd<'a>);

impl Read for Wire<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        socket::receive(self.0, buffer)
    }
}

impl Write for Wire<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        socket::send(self.0, bytes, false)
    }

    fn write_vectored(&mut self, slices: &[io::IoSlice<'_>]) -> io::Result<usize> {
        let mut vectors = [IoVec::new(std::ptr::null(), 0); 64];
        let count = slices.len().min(vectors.len());
        for (vector, slice) in vectors.iter_mut().zip(slices) {
            *vector = IoVec::new(slice.as_ptr(), slice.len());
        }
        // SAFETY: the entries are borrowed slices.
        unsafe { socket::send_vectored(self.0, vectors.get(..count).unwrap_or_default(), false) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn tls_error(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

fn blocked(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

impl TlsStream {
    fn flush(&mut self) -> io::Result<bool> {
        while self.session.wants_write() {
            match self.session.write_tls(&mut Wire(self.socket.as_fd())) {
                Ok(_) => {}
                Err(error) if blocked(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }

    /// Takes one batch of records off the socket. `WouldBlock` when there are none.
    fn take_records(&mut self) -> io::Result<()> {
        if self.closed {
            return Ok(());
        }
        let taken = self.session.read_tls(&mut Wire(self.socket.as_fd()))?;
        if taken == 0 {
            self.closed = true;
        }
        if let Err(error) = self.session.process_new_packets() {
            // The peer should hear why; if it cannot, the error is reported all the same.
            let _ = self.flush();
            return Err(tls_error(error));
        }
        Ok(())
    }

    fn handshake(&mut self) -> io::Result<bool> {
        loop {
            self.flush()?;
            if !self.session.is_handshaking() {
                return Ok(true);
            }
            if self.closed {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            match self.take_records() {
                Ok(()) => {}
                Err(error) if blocked(&error) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }

    unsafe fn receive(&mut self, vectors: &[IoVec]) -> io::Result<usize> {
        let mut total = 0;
        for vector in vectors {
            let mut done = 0;
            while done < vector.length_bytes() {
                let room = (vector.length_bytes() - done).min(self.chunk.len());
                let Some(chunk) = self.chunk.get_mut(..room) else { return Ok(total) };
                match self.session.reader().read(chunk) {
                    Ok(0) => return Ok(total),
                    Ok(taken) => {
                        // SAFETY: `done + taken` is within the entry, which the caller vouches for; the chunk is ours.
                        unsafe {
                            std::ptr::copy_nonoverlapping(
                                self.chunk.as_ptr(),
                                vector.base().add(done),
                                taken,
                            );
                        }
                        done += taken;
                        total += taken;
                    }
                    Err(error) if blocked(&error) => match self.take_records() {
                        Ok(()) => {}
                        Err(error) if total > 0 && blocked(&error) => return Ok(total),
                        Err(error) => return Err(error),
                    },
                    // The socket ended without a TLS goodbye: an end like any other, since every reply has its length.
                    Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(total),
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(total)
    }

    unsafe fn send(&mut self, vectors: &[IoVec]) -> io::Result<usize> {
        if !self.flush()? {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let mut total = 0;
        for vector in vectors {
            let mut done = 0;
            while done < vector.length_bytes() {
                let room = (vector.length_bytes() - done).min(self.chunk.len());
                let Some(chunk) = self.chunk.get_mut(..room) else { return Ok(total) };
                // SAFETY: the range lies within the entry, which the caller vouches for.
                unsafe { socket::copy_shared(vector.base().add(done), chunk) };
                let taken = self.session.writer().write(chunk)?;
                done += taken;
                total += taken;
                if taken < room && !self.flush()? {
                    return if total > 0 { Ok(total) } else { Err(io::ErrorKind::WouldBlock.into()) };
                }
            }
        }
        self.flush()?;
        Ok(total)
    }
}
