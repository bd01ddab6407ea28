//! Bounded text and names; everything is checked while it is decoded and borrows the frame.

use core::fmt;
use std::borrow::Cow;

use serde::de::{self, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::limits::{ADDRESSES_MAX, ADDRESS_BYTES_MAX, NAME_BYTES_MAX};

macro_rules! text {
    ($(#[$doc:meta])* $name:ident, $max:expr, $min:expr) => {
        $(#[$doc])*
        #[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name<'a>(Cow<'a, str>);

        impl<'a> $name<'a> {
            /// Checks the length; `None` if it is out of bounds.
            #[must_use]
            pub fn new(text: impl Into<Cow<'a, str>>) -> Option<Self> {
                let text = text.into();
                ($min..=$max).contains(&text.len()).then_some(Self(text))
            }

            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// The same text, borrowing from this value.
            #[must_use]
            pub fn borrowed(&self) -> $name<'_> {
                $name(Cow::Borrowed(&self.0))
            }

            /// The same text, owned.
            #[must_use]
            pub fn into_owned(self) -> $name<'static> {
                $name(Cow::Owned(self.0.into_owned()))
            }
        }

        impl fmt::Display for $name<'_> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl Serialize for $name<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(&self.0)
            }
        }

        impl<'de: 'a, 'a> Deserialize<'de> for $name<'a> {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let text = deserializer.deserialize_str(TextVisitor)?;
                Self::new(text).ok_or_else(|| de::Error::custom("length of a text"))
            }
        }
    };
}

text! {
    /// Name of a rank, an engine or a cluster: 1 to [`NAME_BYTES_MAX`] bytes.
    Name, NAME_BYTES_MAX, 1
}
text! {
    /// An advertised address or path: 1 to [`ADDRESS_BYTES_MAX`] bytes.
    Address, ADDRESS_BYTES_MAX, 1
}

struct TextVisitor;

impl<'de> Visitor<'de> for TextVisitor {
    type Value = &'de str;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text of the frame")
    }

    fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(text)
    }
}

/// At most [`ADDRESSES_MAX`] addresses. Room is taken as they are decoded, never on a claim.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressList<'a>(Vec<Address<'a>>);

impl<'a> AddressList<'a> {
    /// The addresses; `None` if there are too many.
    #[must_use]
    pub fn new(addresses: Vec<Address<'a>>) -> Option<Self> {
        (addresses.len() <= ADDRESSES_MAX).then_some(Self(addresses))
    }

    /// The addresses, best first.
    #[must_use]
    pub fn as_slice(&self) -> &[Address<'a>] {
        &self.0
    }

    /// The same addresses, borrowing from this value.
    #[must_use]
    pub fn borrowed(&self) -> AddressList<'_> {
        AddressList(self.0.iter().map(Address::borrowed).collect())
    }

    /// The same addresses, owned.
    #[must_use]
    pub fn into_owned(self) -> AddressList<'static> {
        AddressList(self.0.into_iter().map(Address::into_owned).collect())
    }
}

impl Serialize for AddressList<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(&self.0)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for AddressList<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Vec<Address<'de>>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("addresses")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
                let mut list = Vec::new();
                while let Some(address) = seq.next_element()? {
                    if list.len() == ADDRESSES_MAX {
                        return Err(de::Error::custom("too many addresses"));
                    }
                    list.push(address);
                }
                Ok(list)
            }
        }
        deserializer.deserialize_seq(List).map(AddressList)
    }
}

/// Where a rank can be reached, as it advertises itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advertised<'a> {
    /// `HOST:PORT` of its control listener, where HELLO is said; best first.
    #[serde(borrow)]
    pub control: AddressList<'a>,
    /// `HOST:PORT` of its data listener for tcp; best first.
    #[serde(borrow)]
    pub tcp: AddressList<'a>,
    /// Paths of its Unix sockets for shm.
    #[serde(borrow)]
    pub unix: AddressList<'a>,
    /// RDMA devices, as `GID` text; best first.
    #[serde(borrow)]
    pub nics: AddressList<'a>,
}

impl Advertised<'_> {
    /// The same addresses, borrowing from this value.
    #[must_use]
    pub fn borrowed(&self) -> Advertised<'_> {
        Advertised {
            control: self.control.borrowed(),
            tcp: self.tcp.borrowed(),
            unix: self.unix.borrowed(),
            nics: self.nics.borrowed(),
        }
    }

    /// The same addresses, owned.
    #[must_use]
    pub fn into_owned(self) -> Advertised<'static> {
        Advertised {
            control: self.control.into_owned(),
            tcp: self.tcp.into_owned(),
            unix: self.unix.into_owned(),
            nics: self.nics.into_owned(),
        }
    }
}

/// A namespace's public name: 16 bytes that reveal neither the namespace nor its secret
/// ([`NamespaceKey::public_name`](crate::hash::NamespaceKey::public_name)). The same for every rank and in every life of
/// the directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NsName(pub [u8; 16]);

/// Number that one life of the directory gives to a namespace.
///
/// Not a [`NsId`](crate::NsId): those are numbers that a rank gives itself, stable for as long as the rank lives. A
/// directory that restarts may number the same namespaces differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct NsNumber(pub u32);

/// Names an engine to the directory without any registration: the first 8 bytes of its name's hash.
///
/// A rank that an engine could not reach is hidden from that engine's ranks and scheduler only (design 1.9).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EngineKey(pub u64);

impl EngineKey {
    /// Nobody in particular: nothing is hidden from it.
    pub const ANONYMOUS: Self = Self(0);

    /// The key of the engine called `name`.
    #[must_use]
    pub fn of(name: &str) -> Self {
        let mut first = [0; 8];
        first.copy_from_slice(&blake3::hash(name.as_bytes()).as_bytes()[..8]);
        Self(u64::from_le_bytes(first).max(1))
    }
}
