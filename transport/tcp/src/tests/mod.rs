use crate as _;
