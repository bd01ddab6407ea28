//! Memory that peers and devices touch.
//!
//! Regions from raw pointers are the unsafe entry of the whole workspace ([`Region::from_raw`]); what follows is safe:
//! a [`ScatterList`] can only be built from registered regions with bounds checks, owns a share of every region it
//! names, and is what an in-flight operation holds until its last work item retired (rule R4).

mod pool;
mod region;
mod scatter;
mod word;

#[allow(unused_imports)]
pub use pool::*;
pub use region::*;
pub use scatter::*;
pub use word::*;
