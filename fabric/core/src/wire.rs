//! Messages of the control plane (design 1.7). Bodies are postcard; framing and limits are in [`crate::limits`].
