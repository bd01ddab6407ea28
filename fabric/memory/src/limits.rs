//! The limits of this crate, each with its reason.

/// Copies are cut into pieces of this size and the forced end is looked for between them: at 1 GB/s, far below what
/// any memory does, a piece takes 0.26 ms of the 10 ms drain bound (design 1.8).
pub const COPY_CHUNK_BYTES: usize = 256 << 10;
/// Most slabs of one owner: a pool of 1 TiB in extents of 64 MiB.
pub const SLABS_MAX: usize = 16_384;
/// Most slots of one owner: 2^26 words are 2 GiB of sparse table.
pub const WORD_SLOTS_MAX: u32 = 1 << 26;
/// Largest pool: bounds what a peer can be made to reserve of its address space (47 bits on x86-64).
pub const POOL_BYTES_MAX: u64 = 1 << 44;
/// Memory for words is taken in pieces of this size (2,048 words), by the owner and by readers alike.
pub const WORD_GRANULE_BYTES: usize = 64 << 10;
/// A reader enters a peer's pages into its own page table in pieces of this size, right before it first reads them:
/// 512 small pages take tens of microseconds, far below the drain bound, and one huge page fits exactly.
pub const POOL_GRANULE_BYTES: usize = 2 << 20;
/// Ranges in regions at least this large are written past the caches (unless they are hashed, which wants them there):
/// what is loaded into such a region is spread too widely for any cache to hold it. Smaller ones are faster in cache.
pub const STREAMING_REGION_BYTES_MIN: usize = 64 << 20;
/// Shorter ranges gain nothing from that.
pub const STREAMING_RANGE_BYTES_MIN: usize = 4 << 10;
/// Shorter objects are not worth the wait for their stores, which comes once an object.
pub const STREAMING_OBJECT_BYTES_MIN: u64 = 64 << 10;
/// Hashing works in pieces that stay in the first-level cache.
pub const CHECKSUM_PIECE_BYTES: usize = 8 << 10;

const _: () = {
    assert!(COPY_CHUNK_BYTES % CHECKSUM_PIECE_BYTES == 0);
    assert!(COPY_CHUNK_BYTES <= POOL_GRANULE_BYTES);
    assert!(WORD_GRANULE_BYTES % crate::RawWord::BYTES == 0);
    assert!(POOL_GRANULE_BYTES.is_power_of_two() && WORD_GRANULE_BYTES.is_power_of_two());
};
