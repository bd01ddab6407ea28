//! Unix SEQPACKET sockets: one packet is one frame, and descriptors travel with it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::cmsg_space;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Longest path of a Unix socket, bytes: what fits `sockaddr_un` with its final zero.
pub const UNIX_PATH_BYTES_MAX: usize = 107;

/// Descriptors in one packet: the pool's and the word table's.
const FDS_MAX: usize = 2;

/// A packet as received. Descriptors that came along are closed with it unless taken.
pub(crate) struct Packet {
    pub(crate) length_bytes: usize,
    pub(crate) fds: Vec<OwnedFd>,
    /// The packet or its descriptors did not fit: a broken peer.
    pub(crate) truncated: bool,
}

/// A nonblocking socket that passes to no child process.
pub(crate) fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

/// The address of a path. Abstract addresses are not paths, and an empty path would be one.
pub(crate) fn address(path: &Path) -> io::Result<SocketAddrUnix> {
    if path.as_os_str().is_empty() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(SocketAddrUnix::new(path)?)
}

/// Sends one frame without blocking.
pub(crate) fn send(fd: BorrowedFd<'_>, frame: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    loop {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        match rustix::net::sendmsg(fd, &[IoSlice::new(frame)], &mut control, flags) {
            Err(Errno::INTR) => {}
            Ok(sent) if sent != frame.len() => return Err(io::ErrorKind::WriteZero.into()),
            result => return result.map(drop).map_err(Into::into),
        }
    }
}

/// Receives one packet without blocking. A length of 0 without descriptors is the end of the connection (no frame is
/// empty).
pub(crate) fn receive(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Packet> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(FDS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = loop {
        match rustix::net::recvmsg(fd, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Err(Errno::INTR) => {}
            result => break result?,
        }
    };
    let mut fds = Vec::new();
    for item in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = item {
            fds.extend(received);
        }
    }
    let truncated = message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC);
    Ok(Packet { length_bytes: message.bytes.min(buffer.len()), fds, truncated })
}

/// Whether the process at the other end belongs to this user or to root. Inside another user namespace it has no user
/// that is known here, and is refused.
pub(crate) fn peer_is_allowed(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let peer = rustix::net::sockopt::socket_peercred(fd)?;
    Ok(user_is_allowed(peer.uid.as_raw(), rustix::process::geteuid().as_raw()))
}

/// The rule behind [`peer_is_allowed`].
pub(crate) fn user_is_allowed(peer_uid: u32, own_uid: u32) -> bool {
    peer_uid == own_uid || peer_uid == 0
}

/// Whether an error means "not now".
pub(crate) fn would_block(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::WouldBlock
}

/// A counter descriptor that makes a wait return.
pub(crate) fn wake_fd() -> io::Result<OwnedFd> {
    use rustix::event::{eventfd, EventfdFlags};
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

/// Makes the wait on a [`wake_fd`] return. A full counter means that it will anyway.
pub(crate) fn wake(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// Takes back what [`wake`] did.
pub(crate) fn clear_wake(fd: &OwnedFd) {
    let mut count = [0u8; 8];
    let _ = rustix::io::read(fd.as_fd(), &mut count);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_user_and_root_are_allowed() {
        assert!(user_is_allowed(1000, 1000));
        assert!(user_is_allowed(0, 1000));
        assert!(user_is_allowed(0, 0));
        assert!(!user_is_allowed(1000, 0), "a server of root does not serve everybody");
        assert!(!user_is_allowed(1001, 1000));
        // What the kernel shows for a user that does not exist in this user namespace.
        assert!(!user_is_allowed(65_534, 1000));
    }
}
