//! Errors, one type for each operation.

use core::fmt;
use core::time::Duration;
use std::io;
use std::net::SocketAddr;

use crate::tls::TlsError;

/// Application codes on streams and connections.
pub(crate) mod code {
    pub(crate) const CLOSED: u32 = 0;
    pub(crate) const CANCELLED: u32 = 1;
    pub(crate) const REQUEST_TOO_LARGE: u32 = 2;
    pub(crate) const REPLY_TOO_LARGE: u32 = 3;
    pub(crate) const BUSY: u32 = 4;
    pub(crate) const UNANSWERED: u32 = 5;
    pub(crate) const MALFORMED: u32 = 6;
    pub(crate) const TIMEOUT: u32 = 7;
    pub(crate) const WRONG_NAME: u32 = 8;
}

/// Why the peer refused one request; the connection lives on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The body is larger than the peer takes.
    RequestTooLarge,
    /// The answer is larger than a frame.
    ReplyTooLarge,
    /// Too many bytes of requests wait at the peer.
    Busy,
    /// The peer's handler dropped the request without an answer.
    Unanswered,
    /// The peer could not read the frame.
    Malformed,
    /// The request did not arrive, or was not answered, within the peer's limit.
    Timeout,
    /// A code that this version does not know.
    Other(u64),
}

impl Refusal {
    pub(crate) fn from_code(value: u64) -> Self {
        match u32::try_from(value) {
            Ok(code::REQUEST_TOO_LARGE) => Self::RequestTooLarge,
            Ok(code::REPLY_TOO_LARGE) => Self::ReplyTooLarge,
            Ok(code::BUSY) => Self::Busy,
            Ok(code::UNANSWERED) => Self::Unanswered,
            Ok(code::MALFORMED) => Self::Malformed,
            Ok(code::TIMEOUT) => Self::Timeout,
            _ => Self::Other(value),
        }
    }

    pub(crate) fn code(self) -> quinn::VarInt {
        let small = match self {
            Self::RequestTooLarge => code::REQUEST_TOO_LARGE,
            Self::ReplyTooLarge => code::REPLY_TOO_LARGE,
            Self::Busy => code::BUSY,
            Self::Unanswered => code::UNANSWERED,
            Self::Malformed => code::MALFORMED,
            Self::Timeout => code::TIMEOUT,
            Self::Other(value) => {
                return quinn::VarInt::from_u64(value).unwrap_or(quinn::VarInt::from_u32(code::UNANSWERED))
            }
        };
        quinn::VarInt::from_u32(small)
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RequestTooLarge => f.write_str("the request is too large"),
            Self::ReplyTooLarge => f.write_str("the reply is too large"),
            Self::Busy => f.write_str("too many requests wait"),
            Self::Unanswered => f.write_str("the request was dropped without an answer"),
            Self::Malformed => f.write_str("the frame is malformed"),
            Self::Timeout => f.write_str("the peer's time limit passed"),
            Self::Other(value) => write!(f, "unknown code {value}"),
        }
    }
}

/// Why a connection ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// This side closed it.
    Local,
    /// The peer closed it, with its code and reason.
    Peer {
        /// Application code.
        code: u64,
        /// Text that the peer gave, cut and made printable.
        reason: String,
    },
    /// Nothing was heard of the peer for the idle timeout.
    TimedOut,
    /// The peer does not know the connection: it restarted.
    Reset,
    /// The peer refuses new connections for now.
    Refused,
    /// TLS failed: a certificate is missing, expired, or of another authority.
    Tls(String),
    /// The peer broke the transport's protocol, or speaks another version.
    Protocol(String),
}

impl CloseReason {
    pub(crate) fn from_quic(error: &quinn::ConnectionError) -> Self {
        use quinn::ConnectionError as E;
        match error {
            E::LocallyClosed => Self::Local,
            E::TimedOut => Self::TimedOut,
            E::Reset => Self::Reset,
            E::ApplicationClosed(close) => Self::Peer {
                code: close.error_code.into_inner(),
                reason: String::from_utf8_lossy(&close.reason)
                    .chars()
                    .filter(|c| !c.is_control())
                    .take(200)
                    .collect(),
            },
            E::ConnectionClosed(close)
                if close.error_code == quinn::TransportErrorCode::CONNECTION_REFUSED =>
            {
                Self::Refused
            }
            E::ConnectionClosed(close) => {
                Self::of_code(close.error_code, format!("reported by the peer: {close}"))
            }
            E::TransportError(error) => Self::of_code(error.code, error.to_string()),
            E::VersionMismatch | E::CidsExhausted => Self::Protocol(error.to_string()),
        }
    }

    fn of_code(code: quinn::TransportErrorCode, text: String) -> Self {
        // RFC 9001, 4.8: codes 0x0100 to 0x01ff carry a TLS alert.
        if (0x0100..0x0200).contains(&u64::from(code)) {
            Self::Tls(text)
        } else {
            Self::Protocol(text)
        }
    }
}

impl fmt::Display for CloseReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("closed by this side"),
            Self::Peer { code, reason } if reason.is_empty() => write!(f, "closed by the peer (code {code})"),
            Self::Peer { code, reason } => write!(f, "closed by the peer (code {code}: {reason})"),
            Self::TimedOut => f.write_str("nothing heard of the peer"),
            Self::Reset => f.write_str("the peer restarted"),
            Self::Refused => f.write_str("the peer takes no more connections for now"),
            Self::Tls(text) => write!(f, "TLS failed: {text}"),
            Self::Protocol(text) => write!(f, "protocol error: {text}"),
        }
    }
}

/// Why a request or a notification failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// No reply within the caller's deadline. The peer may or may not have acted.
    #[error("no reply within {deadline:?}")]
    Timeout {
        /// The deadline.
        deadline: Duration,
    },
    /// The connection ended. The peer may or may not have acted.
    #[error("connection lost: {reason}")]
    ConnectionLost {
        /// Why.
        reason: CloseReason,
    },
    /// The body is larger than a frame; nothing was sent.
    #[error("a body of {length_bytes} bytes is above the limit of {limit_bytes}")]
    TooLarge {
        /// Length of the body.
        length_bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// The peer claims a reply that is larger than a frame; nothing of it was read.
    #[error("a reply of {length_bytes} bytes is above the limit of {limit_bytes}")]
    ReplyTooLarge {
        /// Length that the peer claimed.
        length_bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// The peer's reply is not a frame.
    #[error("the reply is malformed")]
    MalformedReply,
    /// The peer refused this request.
    #[error("refused by the peer: {refusal}")]
    Refused {
        /// Why.
        refusal: Refusal,
    },
}

impl RequestError {
    /// Whether the same request may succeed later, possibly on a new connection.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Timeout { .. } | Self::ConnectionLost { .. } => true,
            Self::Refused { refusal } => {
                matches!(refusal, Refusal::Busy | Refusal::Timeout | Refusal::Unanswered)
            }
            Self::TooLarge { .. } | Self::ReplyTooLarge { .. } | Self::MalformedReply => false,
        }
    }

    /// Whether the cause lies on this side: the connection is fine and the peer saw nothing.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::TooLarge { .. })
    }

    /// Whether the connection is gone.
    #[must_use]
    pub fn is_connection_lost(&self) -> bool {
        matches!(self, Self::ConnectionLost { .. })
    }
}

/// Why a connection could not be made. Every variant names the target.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The target is not `HOST:PORT`.
    #[error("`{target}` is not HOST:PORT (an IPv6 address is written [ADDRESS]:PORT)")]
    InvalidTarget {
        /// What was given.
        target: String,
    },
    /// The host name has no address.
    #[error("cannot resolve the host of `{target}`: {detail}; check the name, or give an IP address")]
    Unresolved {
        /// What was given.
        target: String,
        /// The resolver's words.
        detail: String,
    },
    /// The target has only addresses of a family that this endpoint's socket cannot reach.
    #[error("`{target}` has no address that a socket bound to {local} can reach; bind to an address of the same family")]
    Unreachable {
        /// What was given.
        target: String,
        /// This endpoint's address.
        local: SocketAddr,
    },
    /// Nobody answered.
    #[error(
        "no answer from `{target}` within {timeout:?}; check that it runs, its address, and that UDP passes"
    )]
    Timeout {
        /// What was given.
        target: String,
        /// The limit.
        timeout: Duration,
    },
    /// The peer refuses new connections for now: its limits are reached.
    #[error("`{target}` refuses new connections for now")]
    Refused {
        /// What was given.
        target: String,
    },
    /// One side does not accept the other's certificate.
    #[error(
        "`{target}`: TLS failed: {detail}; both sides need certificates of one authority (--tls-dir), or both --insecure-no-auth"
    )]
    Tls {
        /// What was given.
        target: String,
        /// What TLS says.
        detail: String,
    },
    /// The peer's certificate is valid but names somebody else.
    #[error("`{target}` should be `{expected}`, but its certificate is for {names:?}")]
    WrongName {
        /// What was given.
        target: String,
        /// The rank that was expected.
        expected: String,
        /// The certificate's names.
        names: Vec<String>,
    },
    /// The connection ended before it was usable.
    #[error("`{target}`: {reason}")]
    Lost {
        /// What was given.
        target: String,
        /// Why.
        reason: CloseReason,
    },
    /// This endpoint is closed.
    #[error("cannot connect to `{target}`: this endpoint is closed")]
    EndpointClosed {
        /// What was given.
        target: String,
    },
    /// This side cannot even try.
    #[error("cannot connect to `{target}`: {detail}")]
    Local {
        /// What was given.
        target: String,
        /// Why.
        detail: String,
    },
}

impl ConnectError {
    /// Whether a later attempt may succeed without anybody changing a setting.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(
            self,
            Self::Unresolved { .. } | Self::Timeout { .. } | Self::Refused { .. } | Self::Lost { .. }
        )
    }

    /// Whether the cause lies on this side.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(
            self,
            Self::InvalidTarget { .. }
                | Self::Unreachable { .. }
                | Self::EndpointClosed { .. }
                | Self::Local { .. }
        )
    }
}

/// Why an endpoint or a listener could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    /// Another process has the port.
    #[error(
        "cannot listen on {protocol} {address}: the port is in use; stop the process that has it (`ss -lnp`) or choose another port (0 lets the kernel choose)"
    )]
    AddressInUse {
        /// `UDP` or `TCP`.
        protocol: &'static str,
        /// The address.
        address: SocketAddr,
    },
    /// This host does not have the address.
    #[error("cannot listen on {protocol} {address}: this host has no such address; see `ip address`")]
    AddressNotAvailable {
        /// `UDP` or `TCP`.
        protocol: &'static str,
        /// The address.
        address: SocketAddr,
    },
    /// Development certificates are for loopback only.
    #[error(
        "refusing to listen on {address}, which is reachable from other hosts, with development certificates; give certificates (--tls-dir DIR, made by `kvfabric certs DIR`) or ask for no authentication (--insecure-no-auth)"
    )]
    DevBeyondLoopback {
        /// The address.
        address: SocketAddr,
    },
    /// An endpoint was made outside of a tokio runtime.
    #[error("cannot listen on UDP {address}: there is no tokio runtime around the call")]
    NoRuntime {
        /// The address.
        address: SocketAddr,
    },
    /// The certificates cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The operating system refused for another reason.
    #[error("cannot listen on {protocol} {address}: {action}: {kind}")]
    Io {
        /// `UDP` or `TCP`.
        protocol: &'static str,
        /// The address.
        address: SocketAddr,
        /// What was tried.
        action: &'static str,
        /// What the system said.
        kind: io::ErrorKind,
    },
}

impl BindError {
    pub(crate) fn from_io(
        protocol: &'static str,
        address: SocketAddr,
        action: &'static str,
        error: &io::Error,
    ) -> Self {
        match error.kind() {
            io::ErrorKind::AddrInUse => Self::AddressInUse { protocol, address },
            io::ErrorKind::AddrNotAvailable => Self::AddressNotAvailable { protocol, address },
            kind => Self::Io { protocol, address, action, kind },
        }
    }

    /// Whether trying again later may help without a change of settings.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::AddressInUse { .. })
    }

    /// Always: nothing was sent to anybody.
    #[must_use]
    pub fn is_local(&self) -> bool {
        true
    }
}
