//! Sockets: UDP with large buffers, TCP listeners, and both on one port.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::sync::Once;

use rustix::net::sockopt::{set_socket_recv_buffer_size_force, set_socket_send_buffer_size_force};
use socket2::{Domain, Protocol, Socket, Type};

use crate::error::BindError;
use crate::limits::{SHARED_PORT_TRIES, SOCKET_BUFFER_BYTES};

const UDP: &str = "UDP";
const TCP: &str = "TCP";
const LISTEN_BACKLOG: i32 = 1024;

/// A UDP socket bound to `address`. An IPv6 wildcard takes IPv4 as well.
pub(crate) fn bind_udp(address: SocketAddr) -> Result<UdpSocket, BindError> {
    let fail = |action| move |error: io::Error| BindError::from_io(UDP, address, action, &error);
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))
        .map_err(fail("create the socket"))?;
    dual_stack(&socket, address).map_err(fail("take both address families"))?;
    enlarge_buffers(&socket);
    socket.bind(&address.into()).map_err(fail("bind"))?;
    socket.set_nonblocking(true).map_err(fail("make it non-blocking"))?;
    Ok(socket.into())
}

/// A UDP socket for connecting only: both address families where the host has IPv6, else IPv4.
pub(crate) fn bind_udp_client() -> Result<UdpSocket, BindError> {
    bind_udp(SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)))
        .or_else(|_| bind_udp(SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))))
}

/// A listening TCP socket bound to `address`. An IPv6 wildcard takes IPv4 as well.
pub(crate) fn bind_tcp(address: SocketAddr) -> Result<TcpListener, BindError> {
    let fail = |action| move |error: io::Error| BindError::from_io(TCP, address, action, &error);
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))
        .map_err(fail("create the socket"))?;
    dual_stack(&socket, address).map_err(fail("take both address families"))?;
    // Connections of a former process linger in TIME_WAIT; a listener that is alive still keeps its port.
    socket.set_reuse_address(true).map_err(fail("reuse the address"))?;
    socket.bind(&address.into()).map_err(fail("bind"))?;
    socket.listen(LISTEN_BACKLOG).map_err(fail("listen"))?;
    socket.set_nonblocking(true).map_err(fail("make it non-blocking"))?;
    Ok(socket.into())
}

/// UDP and TCP on one port of `address`. With port 0 the kernel chooses for UDP, and ports that TCP does not have free
/// are passed over.
pub(crate) fn bind_both(address: SocketAddr) -> Result<(UdpSocket, TcpListener), BindError> {
    let mut tries = 0;
    loop {
        let udp = bind_udp(address)?;
        let bound =
            udp.local_addr().map_err(|error| BindError::from_io(UDP, address, "read its address", &error))?;
        match bind_tcp(bound) {
            Ok(tcp) => return Ok((udp, tcp)),
            Err(BindError::AddressInUse { .. }) if address.port() == 0 && tries < SHARED_PORT_TRIES => {
                tries += 1
            }
            Err(error) => return Err(error),
        }
    }
}

fn dual_stack(socket: &Socket, address: SocketAddr) -> io::Result<()> {
    match address {
        SocketAddr::V6(v6) if v6.ip().is_unspecified() => socket.set_only_v6(false),
        _ => Ok(()),
    }
}

/// Asks for [`SOCKET_BUFFER_BYTES`] each way, and says once if the kernel gives less: it works, with losses in bursts.
fn enlarge_buffers(socket: &Socket) {
    static WARNED: Once = Once::new();
    // With CAP_NET_ADMIN the system's limit can be passed; without it the plain call takes what the limit allows.
    // Neither failure matters by itself, the result is looked at below.
    if set_socket_recv_buffer_size_force(socket, SOCKET_BUFFER_BYTES).is_err() {
        let _ = socket.set_recv_buffer_size(SOCKET_BUFFER_BYTES);
    }
    if set_socket_send_buffer_size_force(socket, SOCKET_BUFFER_BYTES).is_err() {
        let _ = socket.set_send_buffer_size(SOCKET_BUFFER_BYTES);
    }
    let receive = socket.recv_buffer_size().unwrap_or(0);
    let send = socket.send_buffer_size().unwrap_or(0);
    // The kernel reports twice what it grants, to count its own overhead.
    if receive.min(send) < 2 * SOCKET_BUFFER_BYTES {
        WARNED.call_once(|| {
            tracing::warn!(
                wanted_bytes = SOCKET_BUFFER_BYTES,
                receive_bytes = receive / 2,
                send_bytes = send / 2,
                "the kernel grants smaller socket buffers than asked for, so bursts may lose packets; raise \
                 net.core.rmem_max and net.core.wmem_max"
            );
        });
    }
}
