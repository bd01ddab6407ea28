//! The copy of bytes that somebody else may write at the same time.
//!
//! A reader of a peer's pool copies bytes which the owner may be overwriting; the word read afterwards tells whether the
//! copy counts (rule R3). For the compiler such a copy would be a data race if it could see it, so it cannot: the call
//! goes to the C library through a pointer that is read anew each time, with no reference to the bytes anywhere.
//!
//! What orders the word's load after these loads is the acquire fence in [`WordCell::load_after_data`]
//! (crate::WordCell::load_after_data). On arm64 that is an instruction. On x86 it is none: the processor keeps loads in
//! order, those of string instructions included (Intel SDM volume 3, 9.2.2 makes exceptions for stores only); an LFENCE
//! was measured to cost about 100 ns an object of 4 KiB, because copies no longer overlap.

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

/// Copies like [`OpaqueCopy::copy`], past the caches: for destinations that nobody reads soon and that no cache holds,
/// which a plain copy would first fetch. Measured on one core of a Sapphire Rapids server, ranges of 4 and 64 KiB: 1.3 to 1.7
/// times memcpy's bandwidth from 32 MiB on, half of it at 1 MiB. [`settle`] must follow before anybody is told.
///
/// # Safety
/// As for [`OpaqueCopy::copy`].
#[cfg(all(target_arch = "x86_64", not(miri)))]
pub(crate) unsafe fn copy_past_caches(
    copy: OpaqueCopy,
    mut destination: *mut u8,
    mut source: *const u8,
    length_bytes: usize,
) {
    const LINE_BYTES: usize = 64;
    let head = destination.align_offset(LINE_BYTES).min(length_bytes);
    let lines = (length_bytes - head) / LINE_BYTES;
    let tail = length_bytes - head - lines * LINE_BYTES;
    // SAFETY: the three parts add up to `length_bytes`, which the caller promises. The loop runs `lines` times, at least
    // once, and its stores are aligned: `destination` is at a line's start after the head. SSE2 is part of x86-64. Being
    // assembler, the loads are as opaque to the compiler as those of the C library.
    unsafe {
        copy.copy(destination, source, head);
        destination = destination.add(head);
        source = source.add(head);
        if lines > 0 {
            std::arch::asm!(
                "2:",
                "movdqu {a}, [{source}]",
                "movdqu {b}, [{source} + 16]",
                "movdqu {c}, [{source} + 32]",
                "movdqu {d}, [{source} + 48]",
                "movntdq [{destination}], {a}",
                "movntdq [{destination} + 16], {b}",
                "movntdq [{destination} + 32], {c}",
                "movntdq [{destination} + 48], {d}",
                "add {source}, 64",
                "add {destination}, 64",
                "sub {lines}, 1",
                "jnz 2b",
                source = inout(reg) source,
                destination = inout(reg) destination,
                lines = inout(reg) lines => _,
                a = out(xmm_reg) _,
                b = out(xmm_reg) _,
                c = out(xmm_reg) _,
                d = out(xmm_reg) _,
                options(nostack),
            );
        }
        copy.copy(destination, source, tail);
    }
}

/// Where there is no better way past the caches, the plain copy.
///
/// # Safety
/// As for [`OpaqueCopy::copy`].
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
pub(crate) unsafe fn copy_past_caches(
    copy: OpaqueCopy,
    destination: *mut u8,
    source: *const u8,
    length_bytes: usize,
) {
    // SAFETY: the caller's promise.
    unsafe { copy.copy(destination, source, length_bytes) };
}

/// Orders the stores of [`copy_past_caches`] before everything that follows; ordinary stores need no such thing.
#[inline]
pub(crate) fn settle() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: SFENCE exists on every x86-64 processor and touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_copies_agree() {
        for length in [0usize, 1, 7, 63, 64, 65, 128, 4095, 4096, 10_000] {
            let source: Vec<u8> =
                (0..length).map(|i| u8::try_from(i % 251).expect("below 251") ^ 0x5a).collect();
            let mut opaque = vec![0u8; length];
            let mut relaxed = vec![0u8; length];
            let mut streamed = vec![0u8; length + 3];
            // SAFETY: separate vectors of at least `length` bytes.
            unsafe {
                OpaqueCopy::get().copy(opaque.as_mut_ptr(), source.as_ptr(), length);
                copy_relaxed(relaxed.as_mut_ptr(), source.as_ptr(), length);
                copy_past_caches(OpaqueCopy::get(), streamed.as_mut_ptr().add(3), source.as_ptr(), length);
            }
            settle();
            assert_eq!(opaque, source);
            assert_eq!(relaxed, source);
            assert_eq!(streamed[3..], source);
            assert_eq!(streamed[..3], [0; 3]);
        }
    }
}
