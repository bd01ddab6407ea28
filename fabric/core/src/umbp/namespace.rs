//! Namespaces: which engines may read each other's objects.

use core::fmt;
use std::sync::Arc;

use serde_json::{json, Map, Value};
use sha2::{Digest, Sha256};
use thiserror::Error;

use super::json::{python_json, python_repr_list, JsonError};
use super::limits::NAMESPACE_BYTES_MAX;
use super::{CacheGroup, KeyError, LayerSpec};

/// Why a namespace cannot be had.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NamespaceError {
    /// The option `key_namespace` holds something else.
    #[error("key_namespace must be a non-empty string or 'auto'")]
    BadOption,
    /// The namespace does not fit a key.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A layer of a group with a specification for each layer has none.
    #[error("layer {} of cache group {group_id} has no specification", super::python_repr(layer))]
    MissingLayerSpec {
        /// Index of the group.
        group_id: usize,
        /// Name of the layer.
        layer: String,
    },
    /// A specification's value cannot be written.
    #[error(transparent)]
    Json(#[from] JsonError),
    /// The workers of one engine derived different namespaces, or none reported one.
    #[error("UMBP workers must report exactly one namespace, got {}", list(namespaces))]
    Disagreement {
        /// What they reported, sorted.
        namespaces: Vec<String>,
    },
}

fn list(namespaces: &[String]) -> String {
    python_repr_list(namespaces.iter().map(String::as_str))
}

/// The version of the derivation, part of what is hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayoutVersion {
    /// Of builds before 0.33.0: a group counts as its kind and dtype.
    V1,
    /// Of vLLM 0.33.0: a group counts as every field of every layer's specification.
    V2,
}

/// The draft model, whose KV is stored with the target's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpeculativeInputs {
    /// Method, as `eagle`.
    pub method: Option<String>,
    /// Draft model.
    pub model: Option<String>,
    /// Revision of the draft model.
    pub revision: Option<String>,
}

/// What a derived namespace depends on. Two engines share objects exactly when all of it is equal.
#[derive(Clone, Debug, PartialEq)]
pub struct NamespaceInputs<'a> {
    /// Name or path of the model, as the engine was given it.
    pub model: &'a str,
    /// Revision of the model.
    pub revision: Option<&'a str>,
    /// Tokens of one block of the engine's cache.
    pub block_size: u64,
    /// Name of the physical layout, as `LBNHC`.
    pub cache_layout: Option<&'a str>,
    /// Cache groups in order.
    pub groups: &'a [CacheGroup],
    /// Tensor-parallel size.
    pub tp_size: u32,
    /// Pipeline-parallel size.
    pub pp_size: u32,
    /// Prefill-context-parallel size.
    pub pcp_size: u32,
    /// Decode-context-parallel size.
    pub dcp_size: u32,
    /// Draft model; without one the namespace is as if drafts did not exist.
    pub speculative: Option<SpeculativeInputs>,
}

impl NamespaceInputs<'_> {
    /// The text whose SHA-256 names the namespace.
    ///
    /// # Errors
    /// A layer without specification, or a value that cannot be written.
    pub fn payload(&self, version: LayoutVersion) -> Result<String, NamespaceError> {
        let mut groups = Vec::with_capacity(self.groups.len());
        for (group_id, group) in self.groups.iter().enumerate() {
            groups.push(match version {
                LayoutVersion::V1 => group_v1(group),
                LayoutVersion::V2 => group_v2(group_id, group)?,
            });
        }
        let mut fields = json!({
            "model": self.model,
            "revision": self.revision,
            "block_size": self.block_size,
            "cache_layout": self.cache_layout,
            "groups": groups,
            "tp": self.tp_size,
            "pp": self.pp_size,
            "pcp": self.pcp_size,
            "dcp": self.dcp_size,
            "layout_version": match version {
                LayoutVersion::V1 => 1,
                LayoutVersion::V2 => 2,
            },
        });
        if let (Some(draft), Some(fields)) = (&self.speculative, fields.as_object_mut()) {
            let draft = json!({"method": draft.method, "model": draft.model, "revision": draft.revision});
            fields.insert("speculative".to_owned(), draft);
        }
        Ok(python_json(&fields)?)
    }
}

fn group_v1(group: &CacheGroup) -> Value {
    let dtype = match group.spec.dtype() {
        None | Some(Value::Null) => json!("None"),
        Some(dtype) => dtype.clone(),
    };
    json!({
        "layers": group.layers,
        "block_size": group.spec.block_size(),
        "kind": group.spec.kind(),
        "dtype": dtype,
    })
}

fn group_v2(group_id: usize, group: &CacheGroup) -> Result<Value, NamespaceError> {
    let mut specs = Map::new();
    for layer in &group.layers {
        let spec = group
            .spec
            .layer(layer)
            .ok_or_else(|| NamespaceError::MissingLayerSpec { group_id, layer: layer.clone() })?;
        specs.insert(layer.clone(), fingerprint(spec));
    }
    Ok(json!({
        "layers": group.layers,
        "block_size": group.spec.block_size(),
        "layer_specs": specs,
    }))
}

/// The kind and every field; a field named `kind` takes the place of the kind.
fn fingerprint(spec: &LayerSpec) -> Value {
    let mut fields = Map::new();
    fields.insert("kind".to_owned(), json!(spec.kind));
    fields.extend(spec.fields.iter().map(|(name, value)| (name.clone(), value.clone())));
    Value::Object(fields)
}

/// A namespace: non-empty text of at most [`NAMESPACE_BYTES_MAX`] bytes. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UmbpNamespace(Arc<str>);

impl UmbpNamespace {
    /// A namespace of any non-empty text.
    ///
    /// # Errors
    /// [`KeyError::NamespaceEmpty`] or [`KeyError::NamespaceTooLong`].
    pub fn new(namespace: &str) -> Result<Self, KeyError> {
        match namespace.len() {
            0 => Err(KeyError::NamespaceEmpty),
            length_bytes if length_bytes > NAMESPACE_BYTES_MAX => {
                Err(KeyError::NamespaceTooLong { length_bytes })
            }
            _ => Ok(Self(namespace.into())),
        }
    }

    /// The namespace that the option `key_namespace` asks for; `None` when it is absent or `"auto"`, that is derived.
    ///
    /// # Errors
    /// The option is no non-empty text, or too long for a key.
    pub fn configured(option: Option<&Value>) -> Result<Option<Self>, NamespaceError> {
        match option {
            None => Ok(None),
            Some(Value::String(text)) if text == "auto" => Ok(None),
            Some(Value::String(text)) if !text.is_empty() => Ok(Some(Self::new(text)?)),
            Some(_) => Err(NamespaceError::BadOption),
        }
    }

    /// The derived namespace: the first 32 hex digits of SHA-256 over [`NamespaceInputs::payload`].
    ///
    /// # Errors
    /// As [`NamespaceInputs::payload`].
    pub fn derive(inputs: &NamespaceInputs<'_>, version: LayoutVersion) -> Result<Self, NamespaceError> {
        let digest = Sha256::digest(inputs.payload(version)?.as_bytes());
        let mut name = super::BlockHash::new(&digest)?.to_string();
        name.truncate(32);
        Ok(Self::new(&name)?)
    }

    /// The namespace that all workers of an engine reported.
    ///
    /// # Errors
    /// There is not exactly one.
    pub fn agreed<'a>(reports: impl IntoIterator<Item = &'a str>) -> Result<Self, NamespaceError> {
        let namespaces: std::collections::BTreeSet<_> = reports.into_iter().collect();
        match (namespaces.first(), namespaces.len()) {
            (Some(namespace), 1) => Ok(Self::new(namespace)?),
            _ => Err(NamespaceError::Disagreement {
                namespaces: namespaces.into_iter().map(str::to_owned).collect(),
            }),
        }
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for UmbpNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
