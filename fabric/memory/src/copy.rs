//! The copy of bytes that somebody else may write at the same time.
//!
//! A reader of a peer's pool copies bytes which the owner may be overwriting; the word read afterwards tells whether the
//! copy counts (rule R3). For the compiler such a copy would be a data race if it could see it, so it cannot: the call
//! goes to the C library through a pointer that is read anew each time, with no reference to the bytes anywhere.

/// A copy function that the optimiser knows nothing about.
#[derive(Clone, Copy)]
pub(crate) struct OpaqueCopy {
    #[cfg(not(miri))]
    memcpy: MemcpyFn,
}

#[cfg(not(miri))]
type MemcpyFn =
    unsafe extern "C" fn(*mut libc::c_void, *const libc::c_void, libc::size_t) -> *mut libc::c_void;

#[cfg(not(miri))]
static MEMCPY: MemcpyFn = libc::memcpy;

impl OpaqueCopy {
    /// Fetches the function. Once an operation, so that the cost per range is an indirect call and nothing else.
    #[inline]
    pub(crate) fn get() -> Self {
        #[cfg(not(miri))]
        {
            // SAFETY: a static is always readable; the volatile read keeps the compiler from knowing which function it
            // is, and so from reasoning about the bytes.
            Self { memcpy: unsafe { std::ptr::read_volatile(&raw const MEMCPY) } }
        }
        #[cfg(miri)]
        Self {}
    }

    /// Copies `length_bytes` from `source` to `destination`. The bytes may change meanwhile; then any mix of old and
    /// new ones arrives.
    ///
    /// # Safety
    /// `source` must be mapped for reading and `destination` for writing, both over `length_bytes`, and they must not
    /// overlap.
    #[inline]
    pub(crate) unsafe fn copy(self, destination: *mut u8, source: *const u8, length_bytes: usize) {
        #[cfg(not(miri))]
        {
            // SAFETY: the caller's promise is exactly memcpy's.
            unsafe { (self.memcpy)(destination.cast(), source.cast(), length_bytes) };
        }
        #[cfg(miri)]
        {
            // SAFETY: the caller's promise is the twin's too.
            unsafe { copy_relaxed(destination, source, length_bytes) };
        }
    }
}

/// The twin of [`OpaqueCopy::copy`] for Miri: the same copy as relaxed atomics, which the language defines.
///
/// # Safety
/// As for [`OpaqueCopy::copy`].
#[cfg(any(miri, test))]
pub(crate) unsafe fn copy_relaxed(destination: *mut u8, source: *const u8, length_bytes: usize) {
    use std::sync::atomic::{AtomicU8, Ordering};
    for at in 0..length_bytes {
        // SAFETY: the caller promises both ranges; a byte is always aligned for AtomicU8. Loading does not write, so a
        // read-only source is fine.
        unsafe {
            let value = (*source.add(at).cast::<AtomicU8>()).load(Ordering::Relaxed);
            (*destination.add(at).cast::<AtomicU8>()).store(value, Ordering::Relaxed);
        }
    }
}

/// Waits until every load before it is complete, on top of the language's acquire fence.
///
/// x86 keeps loads in order by itself, but its manuals leave the loads inside a string copy (which memcpy may be) less
/// clearly ordered than plain ones. One LFENCE per object costs a few nanoseconds and ends the discussion (rule R2).
#[inline]
pub(crate) fn complete_loads() {
    std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        // SAFETY: LFENCE exists on every x86-64 processor and touches no memory.
        unsafe { std::arch::x86_64::_mm_lfence() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_copies_agree() {
        for length in [0usize, 1, 7, 64, 4095, 4096, 10_000] {
            let source: Vec<u8> =
                (0..length).map(|i| u8::try_from(i % 251).expect("below 251") ^ 0x5a).collect();
            let mut opaque = vec![0u8; length];
            let mut relaxed = vec![0u8; length];
            // SAFETY: three separate vectors of `length` bytes.
            unsafe {
                OpaqueCopy::get().copy(opaque.as_mut_ptr(), source.as_ptr(), length);
                copy_relaxed(relaxed.as_mut_ptr(), source.as_ptr(), length);
            }
            assert_eq!(opaque, source);
            assert_eq!(relaxed, source);
        }
    }
}
