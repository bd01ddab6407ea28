//! System calls on sockets: vectored sends and receives, and the options both sides set.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use kvfabric_memory::Segment;
use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use crate::limits::{KEEPALIVE_IDLE, KEEPALIVE_INTERVAL, USER_TIMEOUT};

/// One entry of a vectored system call. Making one is safe; the calls that use it are not.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct IoVec(libc::iovec);

impl IoVec {
    pub(crate) fn new(base: *const u8, length_bytes: usize) -> Self {
        Self(libc::iovec { iov_base: base.cast_mut().cast(), iov_len: length_bytes })
    }

    pub(crate) fn of_segment(segment: &Segment) -> Self {
        Self::new(segment.base(), segment.length_bytes())
    }

    pub(crate) fn base(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    pub(crate) fn length_bytes(&self) -> usize {
        self.0.iov_len
    }

    pub(crate) fn truncate(&mut self, length_bytes: usize) {
        self.0.iov_len = self.0.iov_len.min(length_bytes);
    }
}

// SAFETY: an entry is an address and a length; only the unsafe calls below use it, on whichever thread.
unsafe impl Send for IoVec {}

fn message(vectors: &[IoVec]) -> libc::msghdr {
    // SAFETY: msghdr is plain data for which all zeros is the empty message.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = vectors.as_ptr().cast_mut().cast();
    message.msg_iovlen = vectors.len() as _;
    message
}

fn result(returned: isize) -> io::Result<usize> {
    usize::try_from(returned).map_err(|_| io::Error::last_os_error())
}

/// Sends without blocking. The kernel copies the bytes before this returns (no MSG_ZEROCOPY), which the word's place in
/// the protocol depends on. With `more`, a last partial segment waits for the next send, which the caller makes at once.
///
/// # Safety
/// Every entry must name readable memory. It may be written meanwhile by anybody: only the kernel reads it.
pub(crate) unsafe fn send_vectored(
    socket: BorrowedFd<'_>,
    vectors: &[IoVec],
    more: bool,
) -> io::Result<usize> {
    let message = message(vectors);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL | if more { libc::MSG_MORE } else { 0 };
    loop {
        // SAFETY: the message names `vectors`, which lives through the call and whose memory the caller vouches for.
        match result(unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Receives without blocking.
///
/// # Safety
/// Every entry must name writable memory to which no Rust reference exists during the call.
pub(crate) unsafe fn receive_vectored(socket: BorrowedFd<'_>, vectors: &[IoVec]) -> io::Result<usize> {
    let mut message = message(vectors);
    loop {
        // SAFETY: as for sending; the caller vouches for writable memory.
        match result(unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) }) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Receives into a buffer of our own without blocking.
pub(crate) fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    let vectors = [IoVec::new(buffer.as_mut_ptr(), buffer.len())];
    // SAFETY: the entry is the buffer, exclusively borrowed for the call and not used through its reference meanwhile.
    unsafe { receive_vectored(socket, &vectors) }
}

/// Sends bytes of our own without blocking.
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], more: bool) -> io::Result<usize> {
    // SAFETY: the entry is a borrowed slice.
    unsafe { send_vectored(socket, &[IoVec::new(bytes.as_ptr(), bytes.len())], more) }
}

type MemcpyFn =
    unsafe extern "C" fn(*mut libc::c_void, *const libc::c_void, libc::size_t) -> *mut libc::c_void;

static MEMCPY: MemcpyFn = libc::memcpy;

/// Copies memory that another thread or process may write meanwhile into a buffer of our own. A concurrent writer
/// yields torn bytes, which the word check rejects, and nothing worse: the call goes through a pointer that is read
/// anew each time, so the compiler cannot reason about the bytes.
///
/// # Safety
/// `source` must be readable for the buffer's length and must not overlap it.
pub(crate) unsafe fn copy_shared(source: *const u8, buffer: &mut [u8]) {
    // SAFETY: a static is always readable.
    let copy = unsafe { std::ptr::read_volatile(&raw const MEMCPY) };
    // SAFETY: the caller vouches for the source, the destination is a slice.
    unsafe { copy(buffer.as_mut_ptr().cast(), source.cast(), buffer.len()) };
}

/// Options of a connection whose peer has been let in.
pub(crate) fn tune(socket: BorrowedFd<'_>, buffer_bytes: Option<usize>) -> io::Result<()> {
    let socket = SockRef::from(&socket);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(
        &TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL).with_retries(5),
    )?;
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
    if let Some(bytes) = buffer_bytes {
        socket.set_send_buffer_size(bytes)?;
        socket.set_recv_buffer_size(bytes)?;
    }
    Ok(())
}

/// Asks to be woken only when this much has arrived.
pub(crate) fn set_wake_bytes(socket: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
    let value = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
    #[allow(clippy::cast_possible_truncation)] // The size of an int.
    const VALUE_BYTES: libc::socklen_t = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the option takes one int, which lives through the call.
    let returned = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_RCVLOWAT,
            (&raw const value).cast(),
            VALUE_BYTES,
        )
    };
    result(returned as isize).map(|_| ())
}

/// Begins to connect without blocking. Returns the socket; writability tells the outcome.
pub(crate) fn begin_connect(address: SocketAddr, buffer_bytes: Option<usize>) -> io::Result<OwnedFd> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    tune(socket.as_fd(), buffer_bytes)?;
    match socket.connect(&address.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EINPROGRESS) => {}
        Err(error) => return Err(error),
    }
    Ok(socket.into())
}

/// What became of a connect that has finished.
pub(crate) fn connect_outcome(socket: BorrowedFd<'_>) -> io::Result<()> {
    match SockRef::from(&socket).take_error()? {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// Binds and listens. `SO_REUSEADDR` lets a restarted owner have its port back at once; a port that somebody listens
/// on is still refused.
pub(crate) fn listen(address: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())?;
    socket.listen(1024)?;
    Ok(socket)
}
